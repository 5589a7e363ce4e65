"""The casts of a captured forward's weights, all in one launch.

Under autocast each convolution casts its weight: 120 to 210 launches a step, of which each takes longer than its bytes
need. A replayed forward reads the weights as they are at its beginning whatever the order, so it casts them together,
when the first one is asked for. An eager forward does not: a block must not see another's weight of before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

__all__ = ["at_once", "cast_of", "known"]


class _Casts:
    def __init__(self, weights: Iterable[Tensor]) -> None:
        # Dense, channels last: as the op's own cast is, but for odd widths. Others are cast by the op.
        self.weights = {
            w: None
            for w in weights
            if w.dim() == 4
            and w.dtype is torch.float32
            and w.is_contiguous(memory_format=torch.channels_last)
            and (w.shape[1] <= 8 or w.shape[1] % 8 == 0)
        }
        self.made: dict[Tensor, Tensor] = {}

    def get(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        if not self.made:
            with torch.no_grad():
                casts = [torch.empty_like(w, dtype=dtype) for w in self.weights]
                torch._foreach_copy_(casts, list(self.weights))
            self.made = dict(zip(self.weights, casts, strict=True))
        cast = self.made[weight]
        return cast if cast.dtype is dtype else None


_capturing: list[_Casts] = []


@contextlib.contextmanager
def at_once(weights: Iterable[Tensor]) -> Iterator[None]:
    """While this lasts, `cast_of` knows these tensors, which nobody else has or changes."""
    casts = _Casts(weights)
    _capturing.append(casts)
    try:
        yield
    finally:
        _capturing.remove(casts)


def known() -> bool:
    """Whether `cast_of` may know any tensor."""
    return bool(_capturing)


def cast_of(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`weight` in `dtype`, or None if the op has to cast it."""
    for casts in _capturing:
        if weight in casts.weights and weight.dtype is not dtype:
            return casts.get(weight, dtype)
    return None
