"""Gradients that are added up where they lie: in the slices of a concat's gradient.

The gradient of a concat is a new tensor, made by the convolution behind it, and its slices are the gradients of the
parts. Where a part was also read by a convolution inside the block, that one's backward adds its gradient of the part
to the slice, in place. Two parts that were the halves of one tensor have its gradient side by side then: nothing is
put together.

A slice may be written where nobody else sees it. That is so if it comes straight from one autograd node of this package
to another, which gets it alone: the first notes on the tensor for which node it is. A sum that autograd made of it is
another tensor, without a note, and what another node handed on, perhaps to two, has a note for that one; both are left
alone. So are gradients with a history (``create_graph=True``): nothing is noted on them. Parts that a hook has seen are
read by what autograd knows as another function, so that their gradients are sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NOTE = "_fc_slice"


class _Slice(NamedTuple):
    node: Any
    """The autograd node that gets the tensor, and nobody else."""
    whole: Tensor | None
    """The gradient of the concat of which the tensor is a slice; None if it is that itself."""
    begin: int
    """The slice's first channel in `whole`."""


def _for(grad: Tensor, node: Any) -> _Slice | None:
    note: _Slice | None = grad.__dict__.get(_NOTE)
    return note if note is not None and note.node is node else None


def give(grad: Tensor, node: Any) -> None:
    """Note on `grad`, which nobody else holds, that `node` gets it alone."""
    if not torch.is_grad_enabled():
        note = grad.__dict__.get(_NOTE)
        setattr(grad, _NOTE, _Slice(node, None, 0) if note is None else note._replace(node=node))


def split(whole: Tensor, node: Any, widths: Sequence[int], nodes: Sequence[Any]) -> tuple[Tensor, ...]:
    """The slices of the gradient of a concat, whose node is `node`, for the nodes of its parts."""
    parts = whole.split(widths, 1)
    if _for(whole, node) is not None:
        begin = 0
        for part, width, to in zip(parts, widths, nodes, strict=True):
            setattr(part, _NOTE, _Slice(to, whole, begin))
            begin += width
    return parts


def own(grads: Sequence[Tensor], node: Any) -> Tensor | None:
    """The first of `grads` that `node` may write to."""
    return next((grad for grad in grads if _for(grad, node) is not None), None)


def side_by_side(first: Tensor, second: Tensor, node: Any) -> Tensor | None:
    """The concatenation of two gradients of `node`, if they lie so in one that is nobody else's."""
    left, right = _for(first, node), _for(second, node)
    if left is None or right is None or left.whole is None or left.whole is not right.whole:
        return None
    width = first.shape[1]
    if right.begin != left.begin + width:
        return None
    return left.whole.narrow(1, left.begin, width + second.shape[1])
