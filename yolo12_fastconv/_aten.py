"""The ops on ATen (oneDNN, cuDNN): the CPU kernels, and the CUDA kernels where the compiled library is absent.

The functions have the ops' schemas and use the calls that stock Ultralytics blocks end up in, so on a CPU a patched
block rounds as a stock one does. Gradients are written out, as the compiled kernels have to write them out.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from yolo12_fastconv import reference
from yolo12_fastconv._shapes import (
    attention_sizes,
    check_added,
    check_attention_gradients,
    check_channels,
    check_grad_x,
    check_out,
    check_residual,
    check_statistics,
    output_size,
)
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


def conv_bn_act_out(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
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
) -> None:
    check_out(out, output_size(x, weight, stride, padding, dilation, groups), x, dtype)
    y = conv_bn_act(
        x, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, residual, stride, padding, dilation,
        groups, act, dtype, allow_tf32,
    )  # fmt: skip
    out.copy_(y)


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
    out: Tensor | None = None,
    cast_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if out is not None:
        check_out(out, output_size(x, weight, stride, padding, dilation, groups), x, dtype)
    y, z, mean, var = conv_bn_act_train(
        x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act, dtype,
        allow_tf32,
    )  # fmt: skip
    if running_mean is not None and running_var is not None:
        check_statistics(z.size(1), x, running_mean, running_var)
        count = z.numel() // z.size(1)
        update_running_stats_(running_mean, running_var, num_batches_tracked, mean, var, momentum, count)
    if out is not None:
        out.copy_(y)
        y = y.new_empty(0)
    return y, z, mean, var, cast_unless_given(weight, dtype, cast_weight)


def bn_act(
    z: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    act: int,
) -> Tensor:
    # By the statistics of z once more, not by `mean` and `var`: then it is the forward's y bit for bit.
    gamma, beta = _cast(bn_weight, mean.dtype), _cast(bn_bias, mean.dtype)
    with _without_autocast(z.device):
        u = aten.native_batch_norm(z, gamma, beta, None, None, True, 0.0, eps)[0]
        return _finish(u if u.stride() == z.stride() else torch.empty_like(z).copy_(u), act, None)


def cast_unless_given(weight: Tensor, dtype: torch.dtype, given: Tensor | None) -> Tensor:
    """The weight as the backward op can take it again; empty where it has the dtype already, or was given in it."""
    if given is not None or weight.dtype is dtype:
        return weight.new_empty(0, dtype=dtype)
    return weight.to(dtype)


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
    add_to_grad_x: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_added(add_to_grad_x, x)
    mask = [any(output_mask[:3]), output_mask[3], output_mask[4]]
    grad_z, grad_gamma, grad_beta = bn_act_backward(grad_y, z, mean, var, bn_weight, bn_bias, eps, act, mask)
    grads = conv_backward(
        grad_z, x, weight, bias, stride, padding, dilation, groups, dtype, allow_tf32, output_mask[:3], cast_weight,
        add_to_grad_x,
    )  # fmt: skip
    return *grads, _or_empty(grad_gamma, output_mask[3], x), _or_empty(grad_beta, output_mask[4], x)


def bn_act_backward(
    grad_y: Tensor,
    z: Tensor,
    mean: Tensor,
    var: Tensor,
    bn_weight: Tensor | None,
    bn_bias: Tensor | None,
    eps: float,
    act: int,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    with _without_autocast(z.device):
        gamma, beta = _cast(bn_weight, mean.dtype), _cast(bn_bias, mean.dtype)
        grad_u = grad_y
        if act == SILU:
            u = aten.native_batch_norm(z, gamma, beta, mean, var, False, 0.0, eps)[0]
            grad_u = aten.silu_backward(grad_y, u)
        grad_z, grad_gamma, grad_beta = aten.native_batch_norm_backward(
            grad_u, z, gamma, None, None, mean, torch.rsqrt(var + eps), True, eps, output_mask
        )
        if output_mask[0]:
            grad_z = grad_z if grad_z.stride() == z.stride() else torch.empty_like(z).copy_(grad_z)
        mask = [True, True, True, *output_mask[1:]]
        grads = _bn_grads(grad_gamma, grad_beta, bn_weight, bn_bias, mask, z)
        return _or_empty(grad_z, output_mask[0], z), *grads


def conv_backward(
    grad_z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    allow_tf32: bool,
    output_mask: list[bool],
    cast_weight: Tensor | None = None,
    add_to_grad_x: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    check_added(add_to_grad_x, x)
    with _without_autocast(x.device):
        grads = _conv_grads(
            grad_z, x, weight, bias, stride, padding, dilation, groups, dtype, output_mask, cast_weight
        )
        if add_to_grad_x is not None and output_mask[0]:
            grads[0].add_(add_to_grad_x)
        return grads


def conv_bn_act_train_backward_(
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
    cast_weight: Tensor | None,
    grad_x: Tensor,
    more: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_grad_x(grad_x, more, x)
    made, *others = conv_bn_act_train_backward(
        grad_y, x, weight, bias, z, mean, var, bn_weight, bn_bias, eps, stride, padding, dilation, groups, act, dtype,
        allow_tf32, output_mask, cast_weight,
    )  # fmt: skip
    if output_mask[0]:
        _add(grad_x, more, made)
    return x.new_empty(0), *others  # type: ignore[return-value]


def conv_backward_(
    grad_z: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
    allow_tf32: bool,
    cast_weight: Tensor | None,
    grad_x: Tensor,
    more: Tensor | None = None,
) -> None:
    check_grad_x(grad_x, more, x)
    made = conv_backward(
        grad_z,
        x,
        weight,
        None,
        stride,
        padding,
        dilation,
        groups,
        dtype,
        allow_tf32,
        [True, False, False],
        cast_weight,
    )[0]
    _add(grad_x, more, made)


def _add(grad_x: Tensor, more: Tensor | None, made: Tensor) -> None:
    """Each sum is rounded, as autograd's would be."""
    with _without_autocast(grad_x.device):
        if more is not None:
            grad_x.add_(more)
        grad_x.add_(made)


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


def attention_format(qkv: Tensor) -> torch.memory_format:
    """Layout of the output, the values and the gradient of area attention: one rule for real and fake kernels.

    CUDA: always channels_last. CPU: that of `qkv`.
    """
    if qkv.device.type == "cuda" or _is_channels_last(qkv):
        return torch.channels_last
    return torch.contiguous_format


def _heads(t: Tensor, num_heads: int, area: int) -> Tensor:
    """(B, heads * c, H, W) as (B * area, heads, pixels of an area, c): a view, if pixels are evenly spaced in `t`."""
    batch, channels, height, width = t.shape
    rows = t.permute(0, 2, 3, 1).reshape(
        batch * area, height * width // area, num_heads, channels // num_heads
    )
    return rows.transpose(1, 2)


def _from_heads(t: Tensor, size: list[int], layout: torch.memory_format) -> Tensor:
    batch, channels, height, width = size
    return _in_format(t.transpose(1, 2).reshape(batch, height, width, channels).permute(0, 3, 1, 2), layout)


def area_attention(
    qkv: Tensor, num_heads: int, area: int, scale: float, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, channels, height, width, head_dim = attention_sizes(qkv, num_heads, area)
    size, layout = [batch, channels, height, width], attention_format(qkv)
    no_sums = qkv.new_empty(0, dtype=torch.promote_types(qkv.dtype, torch.float32))
    # As stock writes it where the call below rounds otherwise (on a CPU) or makes numbers of infinite logits (float).
    if qkv.numel() and (qkv.is_cpu or qkv.dtype.itemsize > 2):
        with _without_autocast(qkv.device):
            out, v = reference.area_attention(qkv, num_heads, area, scale)
        values = _fresh(_in_format(v, layout), qkv) if with_values else qkv.new_empty(0)
        return _fresh(_in_format(out, layout), qkv), values, no_sums
    q, k, v = _heads(qkv, num_heads, area).split(head_dim, dim=-1)
    if qkv.numel():
        with _without_autocast(qkv.device):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale)
            # A query that is not finite makes NaN of stock's output; the call takes rows of -inf for masked: zeros.
            # The norm is the largest magnitude or NaN: it does not overflow, as a sum in half might.
            out = torch.add(out, torch.linalg.vector_norm(q, math.inf, dim=-1, keepdim=True), alpha=0)
    else:  # some backends of the call above divide by the number of pixels
        out = torch.empty_like(v)
    values = _fresh(_from_heads(v, size, layout), qkv) if with_values else qkv.new_empty(0)
    # No sums of exponentials: backward computes the softmax anew.
    return _fresh(_from_heads(out, size, layout), qkv), values, no_sums


def _fresh(t: Tensor, source: Tensor) -> Tensor:
    # An op returns no alias of its input, which a single pixel or head would be.
    return t.clone() if t.untyped_storage()._cdata == source.untyped_storage()._cdata else t


def area_attention_backward(
    grad_out: Tensor,
    grad_values: Tensor | None,
    qkv: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    num_heads: int,
    area: int,
    scale: float,
) -> Tensor:
    *size, head_dim = attention_sizes(qkv, num_heads, area)
    check_attention_gradients(grad_out, grad_values, out)
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = _heads(qkv, num_heads, area).split(head_dim, dim=-1)
    grad, o = (_heads(t, num_heads, area) for t in (grad_out, out))
    with _without_autocast(qkv.device):
        # As stock: the products in the dtype of qkv, the softmax in float32.
        weights = ((q * scale) @ k.transpose(-2, -1)).to(dtype).softmax(dim=-1)
        grad_v = weights.to(qkv.dtype).transpose(-2, -1) @ grad
        mean = (grad.to(dtype) * o.to(dtype)).sum(dim=-1, keepdim=True)
        grad_logits = weights.mul_((grad @ v.transpose(-2, -1)).to(dtype) - mean).to(qkv.dtype)
        grad_q = (grad_logits @ k) * scale
        grad_k = grad_logits.transpose(-2, -1) @ (q * scale)
    if grad_values is not None:
        grad_v = grad_v + _heads(grad_values, num_heads, area)
    batch, channels, height, width = size
    layout = attention_format(qkv)
    return _from_heads(
        torch.cat((grad_q, grad_k, grad_v), dim=-1), [batch, 3 * channels, height, width], layout
    )
