"""Fast classes of YOLO12's residual and concatenating blocks: `Bottleneck`, `C2f`, `C3k2`, `C3`, `C3k`, `A2C2f`.

Residuals are added by the last convolution. The parts of a concat are written side by side into one buffer by the
blocks that make them, and read there as channel slices: nothing is copied. To autograd the parts are tensors of their
own, which happen to share memory, and so is the concat; nobody outside the block sees them. In training that also saves
the memory of the parts, which are kept for the next block's weight gradient as the concat is. Where a gradient is
recorded but statistics are not those of the batch, the parts are concatenated as stock does.

What a tensor is read by twice is read one after the other, so that the gradients are added on the way
(`fused_block.run_and_pass`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from yolo12_fastconv import _aten, blocks, ops, programs
from yolo12_fastconv.blocks import FastConv
from yolo12_fastconv.fused_block import (
    FusedBlock,
    child,
    is_at,
    is_watched,
    run,
    run_and_pass,
    run_and_pass_twice,
    store,
)

from ultralytics.nn.modules.block import C3, A2C2f, Bottleneck, C2f, C3k, C3k2  # isort: skip  (blocks has checked that)

__all__ = ["FastA2C2f", "FastBottleneck", "FastC2f", "FastC3", "FastC3k", "FastC3k2", "concat_buffer"]


class FastBottleneck(FusedBlock, Bottleneck):
    """``cv2(cv1(x))``, plus `x` where the block has a shortcut, which the last convolution adds."""

    _stock: Any = Bottleneck
    _stock_args = (1, 2)
    fuses = "residual in cv2"
    samples: ClassVar[Any] = ((8, 8), (8, 8, False))

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.run_and_pass(x, residual, out)[0]

    def run_and_pass(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `FusedBlock`."""
        cv1, cv2 = child(self, "cv1"), child(self, "cv2")
        if not self.add:
            hidden, x = run_and_pass(cv1, x)
            return run(cv2, hidden, residual, out), x
        hidden, shortcut, x = run_and_pass_twice(cv1, x)
        if residual is None:
            return run(cv2, hidden, shortcut, out), x
        return store(residual + run(cv2, hidden, shortcut), out), x


class FastC2f(FusedBlock, C2f):
    """Two halves of ``cv1(x)`` and what a chain of blocks makes of the second, concatenated for `cv2`."""

    _stock: Any = C2f
    _stock_args = (1, 2, 0)
    fuses = "concat in place"
    samples: ClassVar[Any] = ((8, 16, 2, True),)

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        cv1, cv2, layers = child(self, "cv1"), child(self, "cv2"), child(self, "m")
        buffer, places = _places(x, cv1, cv2, halves=2, more=len(layers))
        y = run(cv1, x, out=places[0])
        in_place = is_at(places[0], y)
        # Of an odd width, chunks of two widths or one alone.
        parts = list(y.chunk(2, 1) if y.shape[1] % 2 else ops.halves(y))
        in_place = _chain(parts, layers, places[1:]) and in_place
        return run(cv2, _whole(buffer if in_place else None, parts), residual, out)


class FastC3k2(FastC2f, C3k2):
    """As `FastC2f`, with other blocks in the chain."""

    _stock: Any = C3k2
    _stock_args = (1, 2, 0)
    samples: ClassVar[Any] = ((8, 16, 2), (8, 16, 1, True))


class FastC3(FusedBlock, C3):
    """A chain of blocks behind ``cv1(x)``, and ``cv2(x)``, concatenated for `cv3`."""

    _stock: Any = C3
    _stock_args = (1, 2, 0)
    fuses = "concat in place"
    samples: ClassVar[Any] = ((8, 16, 2),)

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.run_and_pass(x, residual, out)[0]

    def run_and_pass(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `FusedBlock`."""
        cv1, cv2, cv3 = child(self, "cv1"), child(self, "cv2"), child(self, "cv3")
        buffer = concat_buffer(x, cv2, cv3)
        left = right = None
        if buffer is not None:
            width = child(cv2, "conv").weight.shape[0]
            if width < buffer.shape[1]:
                left, right = buffer.split((buffer.shape[1] - width, width), 1)
        hidden, x = run_and_pass(cv1, x)
        first = run(child(self, "m"), hidden, out=left)
        passed = x
        second, x = run_and_pass(cv2, x, out=right)
        if x is passed and x.requires_grad and torch.is_grad_enabled():
            # Perhaps somebody has seen it, who may hold on to its gradient: what a concat reads is summed in place.
            x = x.view_as(x)
        in_place = is_at(left, first) and is_at(right, second)
        return run(cv3, _whole(buffer if in_place else None, [first, second]), residual, out), x


class FastC3k(FastC3, C3k):
    """As `FastC3`, with kernels of another size."""

    _stock: Any = C3k
    _stock_args = (1, 2, 0)
    samples: ClassVar[Any] = ((8, 16, 2),)


class FastA2C2f(FusedBlock, A2C2f):
    """``cv1(x)`` and the results of a chain of blocks behind it, concatenated for `cv2`; scaled by `gamma` and added to
    `x` where the block has one."""

    _stock: Any = A2C2f
    # With a gamma: one that is None would be a plain attribute, and hide the unpickled parameter.
    _stock_args = (1, 64, 0, True, 1, True)
    fuses = "concat in place"
    samples: ClassVar[Any] = ((32, 64, 1, False), (64, 64, 1, True, 4, True, 1.2))

    def forward(self, x: Tensor) -> Tensor:
        """As the stock class. The scaled sum is an operation of torch: `run` has a program for the rest."""
        return super().forward(x) if self.gamma is None else self.run_or_stock(x)

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        gamma = self.gamma
        if gamma is None:
            return self._unscaled(x, residual, out)[0]
        if torch.is_grad_enabled():
            y, x = self._unscaled(x)
        else:
            y = programs.call(self, lambda x: self._unscaled(x)[0], x)
        scale = gamma.view(-1, gamma.shape[0], 1, 1)
        y = torch.addcmul(x, scale, y) if x.dtype is y.dtype is gamma.dtype else x + scale * y
        return store(y if residual is None else residual + y, out)

    def _unscaled(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `cv2` makes of the concat, and `x` for whatever else reads it."""
        cv1, cv2, layers = child(self, "cv1"), child(self, "cv2"), child(self, "m")
        buffer, places = _places(x, cv1, cv2, halves=1, more=len(layers))
        if self.gamma is None:
            first = run(cv1, x, out=places[0])
        else:
            first, x = run_and_pass(cv1, x, out=places[0])
        in_place = is_at(places[0], first)
        parts = [first]
        in_place = _chain(parts, layers, places[1:]) and in_place
        return run(cv2, _whole(buffer if in_place else None, parts), residual, out), x


def _chain(parts: list[Tensor], layers: Any, places: list[Tensor | None]) -> bool:
    """Append to `parts` what each layer makes of the last; returns whether each was written to its place. A part that a
    layer has read is replaced by what the concat shall read instead."""
    in_place = True
    for layer, place in zip(layers, places, strict=True):
        y, parts[-1] = run_and_pass(layer, parts[-1], out=place)
        in_place = in_place and is_at(place, y)
        parts.append(y)
    return in_place


def _whole(buffer: Tensor | None, parts: list[Tensor]) -> Tensor:
    if buffer is None:
        return torch.cat(parts, 1)
    return ops.join_channels(buffer, parts) if torch.is_grad_enabled() else buffer


def concat_buffer(x: Tensor, producer: Any, consumer: Any) -> Tensor | None:
    """Uninitialised input for `consumer`, into which `producer`, a block that reads `x`, and others write their parts.

    (N, channels that `consumer` reads, height and width of what `producer` makes of `x`), in the dtype in which both
    compute and the layout of the ops' results. None where parts have to be tensors of their own: with gradients outside
    of training, for a compiler, which plans its buffers itself, and where one of the two blocks is no fast one or may
    run as stock.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.dim() != 4:
        return None
    for block in (producer, consumer):
        if not isinstance(block, FastConv) or is_watched(block):
            return None
    if torch.is_grad_enabled() and not ("bn" in producer._modules and child(producer, "bn").training):
        return None
    first, last = child(producer, "conv"), child(consumer, "conv")
    weight = first.weight
    height, width = blocks.output_plane(first, weight, x)
    if height < 1 or width < 1 or x.numel() == 0:
        return None
    return torch.empty(
        (x.shape[0], last.weight.shape[1] * last.groups, height, width),
        dtype=ops.compute_dtype(x),
        device=x.device,
        memory_format=_aten.output_format(x, weight),
    )


def _places(
    x: Tensor, cv1: Any, cv2: Any, halves: int, more: int
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The concat's buffer, and the slices of it for ``cv1(x)`` and for `more` parts that are each as wide as one of its
    `halves`; all None if there is no buffer or its width does not come out."""
    buffer = concat_buffer(x, cv1, cv2)
    if buffer is not None:
        first = child(cv1, "conv").weight.shape[0]
        part = first // halves
        if first == part * halves and buffer.shape[1] == first + more * part:
            return buffer, list(buffer.split([first, *[part] * more], 1))
    return None, [None] * (1 + more)
