"""The ops on ATen (oneDNN, cuDNN): the CPU kernels, and the CUDA kernels where the compiled library is absent.

The functions have the ops' schemas and use the calls that stock Ultralytics blocks end up in, so on a CPU a patched
block rounds as a stock one does. Gradients are written out, as the compiled kernels have to write them out.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from yolo12_fastconv._shapes import check_channels, check_residual, check_statistics, output_size
from yolo12_fastconv.reference import SILU

aten = torch.ops.aten


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # The ops have cast already. Autocast is still active inside a kernel, and would cast a float32 request again.
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _is_channels_last(t: Tensor) -> bool:
    # Strides of an NHWC tensor or of a channel slice of one. Mirrors the order that ATen looks for when it chooses a
    # convolution's output layout: C fastest, then W, H, N; sizes of one carry no order, except that a tensor with
    # nothing but contiguous strides is not channels_last.
    if t.dim() != 4:
        return False
    sizes, strides = t.shape, t.stride()
    minimum, adjacent = 0, strides[1]
    if adjacent == 0:
        return False
    for dim in (1, 3, 2, 0):
        size, stride = sizes[dim], strides[dim]
        if size == 0 or stride < minimum:
            return False
        if dim == 0 and minimum == adjacent:
            return False
        minimum = stride * size if size > 1 else stride
    return True


def output_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Layout of `y`, `z` and the gradient of `x`: one rule for real and fake kernels.

    CUDA: always channels_last. CPU: what ATen's convolution returns, channels_last if `x` or `weight` is.
    """
    if x.device.type == "cuda" or _is_channels_last(x) or _is_channels_last(weight):
        return torch.channels_last
    return torch.contiguous_format


def _in_format(t: Tensor, memory_format: torch.memory_format) -> Tensor:
    """`t` with exactly the strides that a fresh tensor of this layout has.

    `contiguous` leaves a dimension of size 1 whatever stride it has, and fake kernels could not know which.
    """
    t = t.contiguous(memory_format=memory_format)
    _n, c, h, w = t.shape
    strides = (h * w * c, 1, w * c, c) if memory_format is torch.channels_last else (c * h * w, h * w, w, 1)
    return t if t.stride() == strides or t.numel() == 0 else t.as_strided(t.shape, strides)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    layout: torch.memory_format,
) -> Tensor:
    cast_bias = None if bias is None else bias.to(dtype)
    z = aten.convolution(
        x.to(dtype), weight.to(dtype), cast_bias, stride, padding, dilation, False, [0, 0], groups
    )
    return _in_format(z, layout)


def _finish(u: Tensor, act: int, residual: Tensor | None) -> Tensor:
    """Activation and residual, in place on `u`, which no one else holds."""
    if act == SILU:
        aten.silu_(u)
    if residual is not None:
        u += residual
    return u


def conv_bn_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: int,
    dtype: torch.dtype,
    allow_tf32: bool,
) -> Tensor:
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_statistics(size[1], x, running_mean, running_var)
    check_residual(residual, size)
    layout = output_format(x, weight)
    with _without_autocast(x.device):
        u = _convolution(x, weight, bias, stride, padding, dilation, groups, dtype, layout)
        if running_mean is not None:
            u = aten.native_batch_norm(u, bn_weight, bn_bias, running_mean, running_var, False, 0.0, eps)[0]
            u = _in_format(u, layout)
        return _finish(u, act, residual)


def conv_bn_act_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: int,
    dtype: torch.dtype,
    allow_tf32: bool,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    layout = output_format(x, weight)
    with _without_autocast(x.device):
        z = _convolution(x, weight, bias, stride, padding, dilation, groups, dtype, layout)
        u = z
        if running_mean is not None:
            u = aten.native_batch_norm(z, bn_weight, bn_bias, running_mean, running_var, False, 0.0, eps)[0]
        grad_z = aten.silu_backward(grad_y, u) if act == SILU else grad_y
        grad_gamma = grad_beta = None
        if running_mean is not None:
            mask = [True, output_mask[3], output_mask[4]]
            grad_z, grad_gamma, grad_beta = aten.native_batch_norm_backward(
                grad_z, z, bn_weight, running_mean, running_var, None, None, False, eps, mask
            )
        grads = _conv_grads(grad_z, x, weight, bias, stride, padding, dilation, groups, dtype, output_mask)
        return *grads, *_bn_grads(grad_gamma, grad_beta, bn_weight, bn_bias, output_mask, x)


def conv_bn_act_train(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: int,
    dtype: torch.dtype,
    allow_tf32: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_residual(residual, size)
    layout = output_format(x, weight)
    with _without_autocast(x.device):
        z = _convolution(x, weight, bias, stride, padding, dilation, groups, dtype, layout)
        channels, count = z.size(1), z.numel() // z.size(1)
        # Fresh "running" buffers with momentum 1 receive the batch mean and the unbiased variance.
        stats_dtype = torch.promote_types(dtype, torch.float32)
        mean = torch.zeros(channels, dtype=stats_dtype, device=x.device)
        var = torch.zeros(channels, dtype=stats_dtype, device=x.device)
        gamma, beta = _cast(bn_weight, stats_dtype), _cast(bn_bias, stats_dtype)
        u = aten.native_batch_norm(z, gamma, beta, mean, var, True, 1.0, eps)[0]
        u = _in_format(u, layout)
        return _finish(u, act, residual), z, mean, var.mul_((count - 1) / count)


def conv_bn_act_train_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: int,
    dtype: torch.dtype,
    allow_tf32: bool,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y, z, mean, var = conv_bn_act_train(
        x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act, dtype,
        allow_tf32,
    )  # fmt: skip
    if running_mean is not None and running_var is not None:
        check_statistics(z.size(1), x, running_mean, running_var)
        count = z.numel() // z.size(1)
        update_running_stats_(running_mean, running_var, num_batches_tracked, mean, var, momentum, count)
    return y, z, mean, var, cast_weight(weight, dtype)


def cast_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight as the backward op can take it again; empty where it has the dtype already."""
    return weight.new_empty(0) if weight.dtype is dtype else weight.to(dtype)


def conv_bn_act_train_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    act: int,
    dtype: torch.dtype,
    allow_tf32: bool,
    output_mask: list[bool],
    cast_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with _without_autocast(x.device):
        gamma, beta = _cast(bn_weight, mean.dtype), _cast(bn_bias, mean.dtype)
        grad_u = grad_y
        if act == SILU:
            u = aten.native_batch_norm(z, gamma, beta, mean, var, False, 0.0, eps)[0]
            grad_u = aten.silu_backward(grad_y, u)
        mask = [any(output_mask[:3]), output_mask[3], output_mask[4]]
        grad_z, grad_gamma, grad_beta = aten.native_batch_norm_backward(
            grad_u, z, gamma, None, None, mean, torch.rsqrt(var + eps), True, eps, mask
        )
        grads = _conv_grads(
            grad_z, x, weight, bias, stride, padding, dilation, groups, dtype, output_mask, cast_weight
        )
        return *grads, *_bn_grads(grad_gamma, grad_beta, bn_weight, bn_bias, output_mask, x)


def _cast(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    # ATen wants all of a batch norm's vectors in one dtype; a no-op for the usual float32 ones.
    return None if vector is None else vector.to(dtype)


def _bn_grads(
    grad_gamma: Tensor | None,
    grad_beta: Tensor | None,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    output_mask: list[bool],
    x: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of gamma and beta in their own dtypes; empty if not asked for."""
    if grad_gamma is not None and bn_weight is not None:
        grad_gamma = grad_gamma.to(bn_weight.dtype)
    if grad_beta is not None and bn_bias is not None:
        grad_beta = grad_beta.to(bn_bias.dtype)
    return _or_empty(grad_gamma, output_mask[3], x), _or_empty(grad_beta, output_mask[4], x)


def _conv_grads(
    grad_z: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    output_mask: list[bool],
    cast_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias, each in its own tensor's dtype and the ops' layouts; empty if not asked for."""
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None
    if any(output_mask[:3]):
        bias_sizes = None if bias is None else list(bias.shape)
        cast_weight = weight.to(dtype) if cast_weight is None else cast_weight
        grad_x, grad_weight, grad_bias = aten.convolution_backward(
            grad_z, x.to(dtype), cast_weight, bias_sizes, stride, padding, dilation, False, [0, 0], groups,
            [output_mask[0], output_mask[1], output_mask[2]],
        )  # fmt: skip
    if grad_x is not None:
        grad_x = _in_format(grad_x.to(x.dtype), output_format(x, weight))
    if grad_weight is not None:
        grad_weight = torch.empty_like(weight).copy_(grad_weight)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return (
        _or_empty(grad_x, output_mask[0], x),
        _or_empty(grad_weight, output_mask[1], x),
        _or_empty(grad_bias, output_mask[2], x),
    )


def _or_empty(grad: Tensor | None, wanted: bool, like: Tensor) -> Tensor:
    # Ops return tensors, never None: an unwanted gradient is an empty one.
    return grad if wanted and grad is not None else like.new_empty(0)


def update_running_stats_(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float | None,
    count: int,
) -> None:
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    if momentum is None:  # nn.BatchNorm2d: a cumulative average over all batches seen
        if num_batches_tracked is None:
            return
        factor: Tensor | float = 1.0 / num_batches_tracked.to(mean.dtype)
    else:
        factor = momentum
    unbiased = var * (count / (count - 1))
    running_mean.copy_(running_mean * (1 - factor) + mean * factor)
    running_var.copy_(running_var * (1 - factor) + unbiased * factor)
