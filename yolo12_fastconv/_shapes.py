"""Which sizes fit together in a convolution, its per-channel vectors and its residual, and in area attention.

One set of checks for the ATen kernels and the fake ones, so `torch._check` and no branches on sizes; the CUDA library
has the same in C++ (csrc/host/convolution.cpp, csrc/host/attention.cpp). Every failed check is a RuntimeError that
names the sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor


def _require(condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    # torch._check costs microseconds on a plain bool too; it is for the symbolic sizes of a compiler.
    if isinstance(condition, bool):
        if not condition:
            raise RuntimeError(message())
    else:
        torch._check(condition, message)


def output_size(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> list[int]:
    """Sizes (N, K, P, Q) of the convolution's output, after checking every size that goes in."""
    _require(x.dim() == 4, lambda: f"x must be (N, C, H, W), got {tuple(x.shape)}")
    _require(weight.dim() == 4, lambda: f"weight must be (K, C / groups, R, S), got {tuple(weight.shape)}")
    _require(groups > 0, lambda: f"groups must be positive, got {groups}")
    for name, pair, least in (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1)):
        _require(
            len(pair) == 2 and all(value >= least for value in pair),
            partial("{} must be two integers >= {}, got {}".format, name, least, pair),
        )
    _require(
        x.shape[1] == weight.shape[1] * groups,
        lambda: (
            f"x has {x.shape[1]} channels, but weight {tuple(weight.shape)} with groups={groups} takes "
            f"{weight.shape[1] * groups}"
        ),
    )
    _require(
        weight.shape[0] % groups == 0,
        lambda: f"weight has {weight.shape[0]} output channels, not a multiple of groups={groups}",
    )
    out = [x.shape[0], weight.shape[0]]
    for axis in (0, 1):
        size = x.shape[2 + axis] + 2 * padding[axis]
        extent = dilation[axis] * (weight.shape[2 + axis] - 1) + 1
        _require(
            size >= extent,
            partial("padded input size {} is smaller than the kernel's extent {}".format, size, extent),
        )
        out.append((size - extent) // stride[axis] + 1)
    return out


def check_channels(channels: int, x: Tensor, **vectors: Tensor | None) -> None:
    """Per-channel vectors, by name: (channels,), on the device of `x`, or None."""
    for name, vector in vectors.items():
        if vector is not None:
            shape = tuple(vector.shape)
            _require(shape == (channels,), partial("{} must be ({},), got {}".format, name, channels, shape))
            _require(
                vector.device == x.device,
                partial("{} is on {}, x on {}".format, name, vector.device, x.device),
            )


def check_statistics(
    channels: int, x: Tensor, running_mean: Tensor | None, running_var: Tensor | None
) -> None:
    """Running mean and variance: both or neither, (channels,), on the device of `x`."""
    _require(
        (running_mean is None) == (running_var is None),
        lambda: "running_mean and running_var go together: give both or neither",
    )
    check_channels(channels, x, running_mean=running_mean, running_var=running_var)


def check_residual(residual: Tensor | None, size: list[int]) -> None:
    """The residual has the output's size: nothing is broadcast."""
    if residual is not None:
        _require(
            list(residual.shape) == size,
            lambda: f"residual must be {tuple(size)}, got {tuple(residual.shape)}",
        )


def check_added(added: Tensor | None, x: Tensor) -> None:
    """What is to be added to the gradient of `x` has its size: nothing is broadcast."""
    if added is not None:
        _require(
            added.shape == x.shape,
            lambda: f"add_to_grad_x must have the shape of x, {tuple(x.shape)}, got {tuple(added.shape)}",
        )


def check_grad_x(grad_x: Tensor, more: Tensor | None, x: Tensor) -> None:
    """What the gradient of `x` is added to in place, and what else is: nothing is broadcast or promoted."""
    for name, tensor in (("grad_x", grad_x), ("more", more)):
        if tensor is not None:
            _require(
                tensor.shape == x.shape,
                partial(
                    "{} must have the shape of x, {}, got {}".format,
                    name,
                    tuple(x.shape),
                    tuple(tensor.shape),
                ),
            )
    _require(
        grad_x.dtype is x.dtype, lambda: f"grad_x must have the dtype of x, {x.dtype}, got {grad_x.dtype}"
    )


def check_concat(tensors: list[Tensor], scales: list[int]) -> list[int]:
    """Maps to be magnified and concatenated along their channels; returns the result's sizes (N, C, H, W)."""
    _require(len(tensors) > 0, lambda: "tensors must hold at least one tensor")
    _require(
        len(scales) == len(tensors),
        lambda: f"scales must have one entry per tensor, got {len(scales)} for {len(tensors)}",
    )
    size: list[int] = []
    channels = 0
    for i, (t, scale) in enumerate(zip(tensors, scales, strict=True)):
        _require(scale in (1, 2), partial("scales must be 1 or 2, got {}".format, scale))
        _require(t.dim() == 4, partial("tensors[{}] must be (N, C, H, W), got {}".format, i, tuple(t.shape)))
        _require(
            t.device == tensors[0].device,
            partial("tensors[{}] is on {}, the first on {}".format, i, t.device, tensors[0].device),
        )
        mine = [t.shape[0], t.shape[2] * scale, t.shape[3] * scale]
        size = size or mine
        for ours, expected in zip(mine, size, strict=True):
            _require(
                ours == expected,
                partial("tensors[{}] gives (N, H, W) = {}, the first {}".format, i, tuple(mine), tuple(size)),
            )
        channels += t.shape[1]
    return [size[0], channels, *size[1:]]


def check_concat_out(tensors: list[Tensor], scales: list[int], out: Tensor) -> None:
    """The tensor that a concatenation is written to: its size, on its device."""
    size = check_concat(tensors, scales)
    _require(list(out.shape) == size, lambda: f"out must be {tuple(size)}, got {tuple(out.shape)}")
    _require(
        out.device == tensors[0].device,
        lambda: f"out must be on {tensors[0].device}, got {out.device}",
    )


def check_even(grad_y: Tensor) -> None:
    """The gradient of a map that was magnified by 2."""
    _require(grad_y.dim() == 4, lambda: f"grad_y must be (N, C, H, W), got {tuple(grad_y.shape)}")
    h, w = grad_y.shape[2:]
    _require(h % 2 == 0 and w % 2 == 0, lambda: f"grad_y must have even height and width, got {h}x{w}")


def check_upsample_sum(grad_y: Tensor, grad_x: Tensor) -> None:
    """The gradient of a map that was magnified by 2, to be added to another gradient of that map."""
    check_even(grad_y)
    n, c, h, w = grad_y.shape
    _require(
        tuple(grad_x.shape) == (n, c, h // 2, w // 2)
        and grad_x.dtype is grad_y.dtype
        and grad_x.device == grad_y.device,
        lambda: (
            f"grad_x must be {(n, c, h // 2, w // 2)} in the dtype and on the device of grad_y, "
            f"{grad_y.dtype} on {grad_y.device}, got {tuple(grad_x.shape)} in {grad_x.dtype} on {grad_x.device}"
        ),
    )


def check_detect(
    boxes: list[Tensor], scores: list[Tensor], bin_values: Tensor | None, points: Tensor, steps: Tensor
) -> tuple[int, int, int, int]:
    """A detection head's maps; returns N, channels of the boxes, classes and the number of anchors."""
    _require(
        0 < len(boxes) == len(scores),
        lambda: f"boxes and scores must have one map per level, got {len(boxes)} and {len(scores)}",
    )
    for t in (*boxes, *scores):
        _require(
            t.dim() == 4,
            partial("boxes and scores must be (N, C, H, W) maps, got {}".format, tuple(t.shape)),
        )
    batch, channels, classes = boxes[0].shape[0], boxes[0].shape[1], scores[0].shape[1]
    _require(
        channels > 0 and channels % 4 == 0,
        lambda: f"boxes must have a multiple of 4 channels, got {channels}",
    )
    anchors = 0
    for i, (box, score) in enumerate(zip(boxes, scores, strict=True)):
        h, w = box.shape[2:]
        agrees = (box.shape[0], box.shape[1]) == (batch, channels) and tuple(score.shape) == (
            batch,
            classes,
            h,
            w,
        )
        _require(
            agrees and box.dtype == score.dtype == boxes[0].dtype,
            partial(
                "boxes and scores must agree in batch, map sizes of a level, channels of all levels and dtype; "
                "level {} is {} {} and {} {}".format,
                i,
                tuple(box.shape),
                box.dtype,
                tuple(score.shape),
                score.dtype,
            ),
        )
        anchors = anchors + h * w
    bins = channels // 4
    _require(
        bins == 1 if bin_values is None else bin_values.numel() == bins,
        lambda: f"bin_values must have {bins} elements, one per bin, and may be absent for one bin alone",
    )
    _require(
        tuple(points.shape) == (2, anchors) and tuple(steps.shape) == (1, anchors),
        lambda: (
            f"points must be (2, {anchors}) and steps (1, {anchors}), got {tuple(points.shape)} and "
            f"{tuple(steps.shape)}"
        ),
    )
    for t in (points, steps):
        _require(
            t.dtype == boxes[0].dtype and t.device == boxes[0].device,
            lambda: "points and steps must have the dtype and device of boxes",
        )
    return batch, channels, classes, anchors


def check_out(out: Tensor, size: list[int], x: Tensor, dtype: torch.dtype) -> None:
    """The tensor to write to: the result's size and dtype, on the device of `x`."""
    _require(list(out.shape) == size, lambda: f"out must be {tuple(size)}, got {tuple(out.shape)}")
    _require(
        out.dtype == dtype and out.device == x.device,
        lambda: f"out must be {dtype} on {x.device}, got {out.dtype} on {out.device}",
    )


def attention_sizes(qkv: Tensor, num_heads: int, area: int) -> tuple[int, int, int, int, int]:
    """Batch, channels of the output, height, width and channels of a head, after checking every size that goes in."""
    _require(qkv.dim() == 4, lambda: f"qkv must be (B, 3 * C, H, W), got {tuple(qkv.shape)}")
    _require(num_heads > 0, lambda: f"num_heads must be positive, got {num_heads}")
    _require(area > 0, lambda: f"area must be positive, got {area}")
    batch, channels, height, width = qkv.shape
    _require(
        channels % (3 * num_heads) == 0,
        lambda: f"qkv has {channels} channels, not a multiple of 3 * num_heads = {3 * num_heads}",
    )
    _require(
        (height * width) % area == 0,
        lambda: f"qkv has {height} x {width} = {height * width} pixels, not a multiple of area={area}",
    )
    return batch, channels // 3, height, width, channels // (3 * num_heads)


def check_attention_gradients(grad_out: Tensor, grad_values: Tensor | None, out: Tensor) -> None:
    """Gradients of the output and of the values have the output's size."""
    for name, grad in (("grad_out", grad_out), ("grad_values", grad_values)):
        if grad is not None:
            _require(
                grad.shape == out.shape,
                partial("{} must be {}, got {}".format, name, tuple(out.shape), tuple(grad.shape)),
            )
