"""Gradients that are added up where they lie: in the slices of a concat's gradient.

The gradient of a concat is a new tensor, made by the convolution behind it, and its slices are the gradients of the
parts. Where a part was also read by a convolution inside the block, that one's backward adds its gradient of the part
to the slice, in place. Two parts that were the halves of one tensor have its gradient side by side then: nothing is
put together.

A slice may be written where nobody else sees it. That is so if it comes straight from one autograd node of this package
to another, which gets it alone: the first notes on the tensor for which node it is. A sum that autograd made of it is
another tensor, without a note, and what another node handed on, perhaps to two, has a note for that one; both are left
alone. So are gradients with a history (``create_graph=True``): nothing is noted on them. Parts that a hook has seen are
read by what autograd knows as another function, so that their gradients are sums. Nor is the gradient of a concat whose
tensor has a hook or retains its gradient (`is_seen`).

Between the layers of a model the order is Ultralytics': a part of a concat is handed to another layer as well, and
autograd would add the two gradients. There the concat's backward gives its slice to the node of the other reader
(`Mail`), which adds its own gradient to it, and no gradient to autograd. Only if that is the same sum: both contribute
to the same result of the same node, and the reader's node is going to run in this backward. If it has run already, the
slice goes to autograd.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_NOTE = "_fc_slice"
_MAIL = "_fc_mail"
_TAKEN = object()

_task = torch._C._current_graph_task_id
_will_run = torch._C._will_engine_execute_node


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


def is_seen(x: Tensor) -> bool:
    """Whether somebody may hold on to the gradient of `x`."""
    return bool(x._backward_hooks) or x.retains_grad


class Mail:
    """By which the backward of a concat gives the gradient of a part to the node of another reader of that part, the
    first one that recorded a gradient."""

    __slots__ = ("_box", "_reader")

    def __init__(self) -> None:
        self._reader: weakref.ref[Any] | None = None
        self._box: dict[int, Any] = {}
        """By backward pass, the gradient, or that the reader has run. `setdefault` is one step for all threads."""

    def post(self, grad: Tensor, edge: tuple[Any, int]) -> bool:
        """Give `grad`, which else goes along `edge` to autograd. False if it has to: nothing was done."""
        reader = None if self._reader is None else self._reader()
        if reader is None or torch.is_grad_enabled():
            return False
        if reader.next_functions[0] != edge or not _will_run(reader):
            return False
        note = grad.__dict__.get(_NOTE)
        if note is not None:
            setattr(grad, _NOTE, note._replace(node=reader))
        if self._box.setdefault(_task(), grad) is grad:
            return True
        if note is not None:
            setattr(grad, _NOTE, note)
        return False

    def take(self) -> Tensor | None:
        """What came for the reader, whose backward this is. Later gradients are refused."""
        task = _task()
        grad = self._box.setdefault(task, _TAKEN)
        self._box[task] = _TAKEN
        return None if grad is _TAKEN else grad


def open_mail(part: Tensor) -> None:
    """Let a concat that reads `part` give its gradient to another node that reads it."""
    setattr(part, _MAIL, Mail())


def mail_of(part: Tensor) -> Mail | None:
    """Through which a concat that reads `part` gives its gradient."""
    return part.__dict__.get(_MAIL)


def reads(x: Tensor, node: Any) -> Mail | None:
    """Through which `node`, whose first differentiable argument is `x`, gets a concat's gradient of it."""
    mail = mail_of(x)
    if mail is None or mail._reader is not None:
        return None
    mail._reader = weakref.ref(node)
    return mail
