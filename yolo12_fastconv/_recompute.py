"""``memory="low"``: a block's input, computed again in backward from what the block before it keeps anyway.

A `Conv` block in training keeps its convolution's output `z` and the batch's statistics for its own backward. Its
output ``y = act(batch_norm(z))`` is most often the next block's input, which that block would keep for its weight
gradient: the same numbers twice. `y` carries a note of where it came from, and the next block keeps that instead; its
backward runs the normalising pass once more, which gives `y` again, bit for bit.

Only for the tensor itself: a view, a slice, a concat or a sum has no note and is kept. So is one that was written to.
A tensor that is read twice, one after the other (`ops.conv_bn_act_train_and_pass`), is computed once for both. One that
somebody else still holds in backward, such as a result of the model, is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

MODES = ("auto", "low", "fast")
"""What `patch_model(memory=...)` takes."""

LEAST_BYTES = {"auto": 32 << 20, "low": 0}
"""Inputs from this size on are computed again. Measured on an H200, forward and backward of YOLO12m at batch 32: "auto"
keeps 9.14 GiB instead of 11.17 and has 26 passes more, 1.7 ms; "low" keeps 8.73 GiB, and has 36 passes and 0.4 ms more
than that (docs/kernel-notes.md)."""

_NOTE = "_fc_source"


class Shared:
    """One tensor computed again for all that read it, each of which takes it once in a backward."""

    __slots__ = ("left", "readers", "value")

    def __init__(self) -> None:
        self.readers = 0
        self.left = 0
        """How many will still take `value`."""
        self.value: Tensor | None = None

    def take(self, make: Callable[[], Tensor]) -> Tensor:
        y = self.value
        if y is None:
            y, self.left = make(), self.readers
        self.left -= 1
        self.value = y if self.left > 0 else None
        return y


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
    held: Callable[[], Tensor | None]
    """The tensor, as long as anybody holds it."""
    shared: Shared | None = None
    """Of a tensor that was passed on."""


def note(y: Tensor, tensors: tuple[Tensor | None, ...], eps: float, act: int) -> None:
    """Remember on `y` that it is ``act(batch_norm(z))`` of these tensors."""
    setattr(y, _NOTE, Source(tensors, eps, act, y._version, y.data_ptr(), TensorWeakRef(y)))


def source_of(x: Tensor, mode: str) -> Source | None:
    """What to keep in the place of `x`, or None if `x` itself is to be kept."""
    least = LEAST_BYTES.get(mode)
    if least is None:  # "fast"
        return None
    source: Source | None = x.__dict__.get(_NOTE)
    if source is None or x.nbytes < least:
        return None
    return source if _is_unchanged(source, x) else None


def _is_unchanged(source: Source, x: Tensor) -> bool:
    return (source.version, source.address) == (x._version, x.data_ptr())


def hand_on(source: Source, views: Sequence[Tensor]) -> None:
    """Remember `source`, a shared one, on views of a whole tensor, which count their versions with it."""
    for view in views:
        setattr(view, _NOTE, source)


def again(op: Callable[..., Any], tensors: tuple[Tensor | None, ...], source: Source) -> Tensor:
    """The tensor that `source`, of which only `tensors` is left out, describes. `tensors` are its, as autograd kept
    them."""
    if torch.is_grad_enabled():  # create_graph=True: it would hang on nothing
        raise RuntimeError(
            "yolo12_fastconv: gradients of gradients (create_graph=True) need the inputs of all blocks, and some were "
            'not kept, to save memory: patch with patch_model(model, memory="fast")'
        )

    def make() -> Tensor:
        held = source.held()
        if held is not None and _is_unchanged(source, held):
            return held
        y: Tensor = op(*tensors, source.eps, source.act)
        return y

    return make() if source.shared is None else source.shared.take(make)
