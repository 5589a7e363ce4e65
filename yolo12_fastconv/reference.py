"""Every op of the package once more in plain differentiable PyTorch: the formulas that tests call the truth.

Run in float64 these functions give the reference values; run in another dtype they are the stock Ultralytics
computation, step by step. Nothing here is tuned. The ops use this file only to differentiate twice (``ops.py``).

Shapes, as everywhere in the package: ``x`` (N, C, H, W), ``weight`` (K, C / groups, R, S), ``y`` and ``z``
(N, K, P, Q), per-channel vectors (K,).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IDENTITY = 0
SILU = 1
ACTIVATIONS = {"identity": IDENTITY, "silu": SILU}


def activate(u: Tensor, act: int) -> Tensor:
    """Apply activation code `act` (``IDENTITY`` or ``SILU``) to `u`."""
    return F.silu(u) if act == SILU else u


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    dtype: torch.dtype,
) -> Tensor:
    """Zero-padded 2-D convolution of `x`, `weight` and `bias` cast to `dtype`, as ``conv2d`` does under autocast."""
    cast_bias = None if bias is None else bias.to(dtype)
    return F.conv2d(x.to(dtype), weight.to(dtype), cast_bias, stride, padding, dilation, groups)


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
) -> Tensor:
    """Inference: ``act(bn(conv(x))) + residual`` with running statistics; no batch norm if `running_mean` is None."""
    u = conv(x, weight, bias, stride, padding, dilation, groups, dtype)
    if running_mean is not None:
        u = F.batch_norm(u, running_mean, running_var, bn_weight, bn_bias, False, 0.0, eps)
    y = activate(u, act)
    return y if residual is None else y + residual


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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training: ``act(bn(z)) + residual`` with the batch statistics of ``z = conv(x)``.

    Returns `y`, `z`, and the mean and biased variance of `z` over (N, P, Q), in float32 at least.
    """
    z = conv(x, weight, bias, stride, padding, dilation, groups, dtype)
    y = activate(F.batch_norm(z, None, None, bn_weight, bn_bias, True, 0.0, eps), act)
    var, mean = torch.var_mean(z.to(torch.promote_types(z.dtype, torch.float32)), dim=(0, 2, 3), correction=0)
    return (y if residual is None else y + residual), z, mean, var


def area_attention(qkv: Tensor, num_heads: int, area: int, scale: float) -> tuple[Tensor, Tensor]:
    """Area attention of ``qkv`` (B, 3 * C, H, W) as Ultralytics' ``AAttn`` writes it: the output and the values, both
    (B, C, H, W).
    """
    batch, channels, height, width = qkv.shape
    rows = qkv.flatten(2).transpose(1, 2).reshape(batch * area, height * width // area, channels)
    heads = rows.view(*rows.shape[:2], num_heads, channels // num_heads).permute(0, 2, 3, 1)
    q, k, v = heads.chunk(3, dim=2)
    weights = ((q * scale).transpose(-2, -1) @ k).softmax(dim=-1)
    out = v @ weights.transpose(-2, -1)
    return _pixels(out, batch, height, width), _pixels(v, batch, height, width)


def _pixels(heads: Tensor, batch: int, height: int, width: int) -> Tensor:
    # (B * area, heads, channels of a head, pixels of an area) to (B, C, H, W)
    return heads.permute(0, 3, 1, 2).reshape(batch, height, width, -1).permute(0, 3, 1, 2)
