"""Fast classes of YOLO12's residual and concatenating blocks: `Bottleneck`, `C2f`, `C3k2`, `C3`, `C3k`, `A2C2f`.

Residuals are added by the last convolution. Where no gradient is recorded, the parts of a concat are written side by
side into one buffer by the blocks that make them, and read there as channel slices: nothing is copied. With gradients
the parts stay tensors of their own and are concatenated, as stock does: autograd keeps both the parts and their concat
in any case, and a buffer written part by part would have to be versioned part by part.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from yolo12_fastconv import _aten, blocks, ops
from yolo12_fastconv.blocks import FastConv
from yolo12_fastconv.fused_block import FusedBlock, child, is_watched, run, store

from ultralytics.nn.modules.block import C3, A2C2f, Bottleneck, C2f, C3k, C3k2  # isort: skip  (blocks has checked that)

__all__ = ["FastA2C2f", "FastBottleneck", "FastC2f", "FastC3", "FastC3k", "FastC3k2", "concat_buffer"]


class FastBottleneck(FusedBlock, Bottleneck):
    """``cv2(cv1(x))``, plus `x` where the block has a shortcut, which the last convolution adds."""

    _stock: Any = Bottleneck
    _stock_args = (1, 2)
    fuses = "residual in cv2"
    samples: ClassVar[Any] = ((8, 8), (8, 8, False))

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        cv1, cv2 = child(self, "cv1"), child(self, "cv2")
        hidden = run(cv1, x)
        if not self.add:
            return run(cv2, hidden, residual, out)
        if residual is None:
            return run(cv2, hidden, x, out)
        return store(residual + run(cv2, hidden, x), out)


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
        parts = list(y.chunk(2, 1))
        in_place = buffer is not None and y is places[0]
        for layer, place in zip(layers, places[1:], strict=True):
            parts.append(run(layer, parts[-1], out=place))
            in_place = in_place and parts[-1] is place
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
        cv1, cv2, cv3 = child(self, "cv1"), child(self, "cv2"), child(self, "cv3")
        buffer = concat_buffer(x, cv2, cv3)
        left = right = None
        if buffer is not None:
            width = child(cv2, "conv").weight.shape[0]
            if width < buffer.shape[1]:
                left, right = buffer.split((buffer.shape[1] - width, width), 1)
        first = run(child(self, "m"), run(cv1, x), out=left)
        second = run(cv2, x, out=right)
        in_place = left is not None and first is left and second is right
        return run(cv3, _whole(buffer if in_place else None, [first, second]), residual, out)


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

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        cv1, cv2, layers = child(self, "cv1"), child(self, "cv2"), child(self, "m")
        gamma = self.gamma
        buffer, places = _places(x, cv1, cv2, halves=1, more=len(layers))
        parts: list[Tensor] = [run(cv1, x, out=places[0])]
        in_place = buffer is not None and parts[0] is places[0]
        for layer, place in zip(layers, places[1:], strict=True):
            parts.append(run(layer, parts[-1], out=place))
            in_place = in_place and parts[-1] is place
        whole = _whole(buffer if in_place else None, parts)
        if gamma is None:
            return run(cv2, whole, residual, out)
        y = run(cv2, whole)
        scale = gamma.view(-1, gamma.shape[0], 1, 1)
        y = torch.addcmul(x, scale, y) if x.dtype is y.dtype is gamma.dtype else x + scale * y
        return store(y if residual is None else residual + y, out)


def _whole(buffer: Tensor | None, parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, 1) if buffer is None else buffer


def concat_buffer(x: Tensor, producer: Any, consumer: Any) -> Tensor | None:
    """Uninitialised input for `consumer`, into which `producer`, a block that reads `x`, and others write their parts.

    (N, channels that `consumer` reads, height and width of what `producer` makes of `x`), in the dtype in which both
    compute and the layout of the ops' results. None where parts have to be tensors of their own: with gradients, for a
    compiler, which plans its buffers itself, and where one of the two blocks is no fast one or may run as stock.
    """
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(x) is not Tensor or x.dim() != 4:
        return None
    for block in (producer, consumer):
        if not isinstance(block, FastConv) or is_watched(block):
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
