"""``memory="low"``: a block's input, computed again in backward from what the block before it keeps anyway.

A `Conv` block in training keeps its convolution's output `z` and the batch's statistics for its own backward. Its
output ``y = act(batch_norm(z))`` is most often the next block's input, which that block would keep for its weight
gradient: the same numbers twice. `y` carries a note of where it came from, and the next block keeps that instead; its
backward runs the normalising pass once more, which gives `y` again, bit for bit.

Only for the tensor itself: a view, a slice, a concat or a sum has no note and is kept. So is one that was written to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MODES = ("auto", "low", "fast")
"""What `patch_model(memory=...)` takes."""

LEAST_BYTES = {"auto": 32 << 20, "low": 0}
"""Inputs from this size on are computed again. "auto": the pass over 32 MiB takes about 15 us on an H200, and one more
launch on the host about as long: below, it would cost more time for next to no memory."""

_NOTE = "_fc_source"


class Source(NamedTuple):
    """Where a tensor came from: ``bn_act(*tensors, eps, act)``."""

    tensors: tuple[Tensor | None, ...]
    """z, mean, var, bn_weight, bn_bias."""
    eps: float
    act: int
    version: int
    """Of the tensor when it was made; a later write counts it up."""
    address: int
    """Of its first element; assigning to ``.data`` moves it and leaves the version."""


def note(y: Tensor, tensors: tuple[Tensor | None, ...], eps: float, act: int) -> None:
    """Remember on `y` that it is ``act(batch_norm(z))`` of these tensors."""
    setattr(y, _NOTE, Source(tensors, eps, act, y._version, y.data_ptr()))


def source_of(x: Tensor, mode: str) -> Source | None:
    """What to keep in the place of `x`, or None if `x` itself is to be kept."""
    least = LEAST_BYTES.get(mode)
    if least is None:  # "fast"
        return None
    source: Source | None = x.__dict__.get(_NOTE)
    if source is None or x.nbytes < least:
        return None
    return source if (source.version, source.address) == (x._version, x.data_ptr()) else None


def again(op: Callable[..., Any], tensors: tuple[Tensor | None, ...], eps: float, act: int) -> Tensor:
    """The tensor that a `Source` describes. `tensors` are its, as autograd kept them."""
    if torch.is_grad_enabled():  # create_graph=True: it would hang on nothing
        raise RuntimeError(
            "yolo12_fastconv: gradients of gradients (create_graph=True) need the inputs of all blocks, and some were "
            'not kept, to save memory: patch with patch_model(model, memory="fast")'
        )
    y: Tensor = op(*tensors, eps, act)
    return y
