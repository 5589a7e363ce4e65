"""The ops of the package: schemas, documentation, fake kernels. With `_autograd.py` the only caller of ``torch.ops``.

Namespace ``yolo12_fastconv``. CUDA kernels come from the compiled library (``csrc/``); without it, and on a CPU, the
same ops run on ATen (``_aten.py``). The functions below read torch's global state (autocast, TF32) at call time and
pass it as arguments, because a stable-ABI library cannot see it.

Layouts: on CUDA `y`, `z` and the gradient of `x` are channels_last, whatever `x` is; on a CPU they have the layout
that ATen's convolution would return. Weight gradients have the strides and dtype of the weight. One exception: where
the compiled library runs `conv_bn_act` in half precision and the channels of `y` are no multiple of 8, its pixels begin
at multiples of 8 elements, as in a channel slice of a wider tensor, which the next convolution reads much faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from yolo12_fastconv import _aten, _autograd, _library
from yolo12_fastconv._shapes import check_channels, check_residual, check_statistics, output_size
from yolo12_fastconv.reference import ACTIVATIONS

__all__ = ["BatchNormState", "RunningStats", "conv_bn_act", "conv_bn_act_train", "update_running_stats_"]

NAMESPACE = "yolo12_fastconv"

_GEOMETRY = (
    "SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, SymInt groups, int act, ScalarType dtype, "
    "bool allow_tf32"
)
_BN_EVAL = "Tensor? bn_weight, Tensor? bn_bias, Tensor? running_mean, Tensor? running_var, float eps"
_BN_TRAIN = "Tensor? bn_weight, Tensor? bn_bias, float eps"
_RUNNING = (
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum"
)
_GRADS = "(Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_bn_weight, Tensor grad_bn_bias)"

SCHEMAS = {
    "conv_bn_act": f"(Tensor x, Tensor weight, Tensor? bias, {_BN_EVAL}, Tensor? residual, {_GEOMETRY}) -> Tensor",
    "conv_bn_act_backward": (
        f"(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, {_BN_EVAL}, {_GEOMETRY}, bool[5] output_mask)"
        f" -> {_GRADS}"
    ),
    "conv_bn_act_train": (
        f"(Tensor x, Tensor weight, Tensor? bias, {_BN_TRAIN}, Tensor? residual, {_GEOMETRY})"
        " -> (Tensor y, Tensor z, Tensor mean, Tensor var)"
    ),
    "conv_bn_act_train_backward": (
        f"(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, Tensor z, Tensor mean, Tensor var, {_BN_TRAIN},"
        f" {_GEOMETRY}, bool[5] output_mask, Tensor? cast_weight=None) -> {_GRADS}"
    ),
    # conv_bn_act_train and update_running_stats_ in one call, with the weight in `dtype`, which backward takes again:
    # empty if the weight has that dtype. Without running_mean and running_var nothing is moved.
    "conv_bn_act_train_": (
        f"(Tensor x, Tensor weight, Tensor? bias, {_BN_TRAIN}, Tensor? residual, {_GEOMETRY}, {_RUNNING})"
        " -> (Tensor y, Tensor z, Tensor mean, Tensor var, Tensor cast_weight)"
    ),
    "update_running_stats_": (
        "(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches_tracked, Tensor mean, Tensor var,"
        " float? momentum, SymInt count) -> ()"
    ),
    # Which kernel serves a convolution, as "family/target/tile": the library's tile menu, a pure host function.
    "describe_kernel": "(int[4] x_size, int[4] weight_size, int[2] stride, int[2] padding, int[2] dilation, int groups,"
    " ScalarType dtype, bool allow_tf32, int capability) -> str",
    # All kernels that can serve it, the best estimate first.
    "kernel_candidates": "(int[4] x_size, int[4] weight_size, int[2] stride, int[2] padding, int[2] dilation,"
    " int groups, ScalarType dtype, bool allow_tf32, int capability) -> str[]",
    # What the compiled library is: "arch_list=...;cuda=...;source_hash=...;version=...".
    "library_info": "() -> str",
}
_HOST_OPS = (
    "describe_kernel",
    "kernel_candidates",
    "library_info",
)  # no tensors: defined for the compiled library alone

_lib = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _lib.define(_name + _schema)

_ops = getattr(torch.ops, NAMESPACE)
for _name in SCHEMAS:
    if _name not in _HOST_OPS:
        _lib.impl(_name, getattr(_aten, _name), "CPU")

LIBRARY = _library.load()
"""What was loaded, or why not: `yolo12_fastconv._library.LibraryStatus`."""

if not LIBRARY.loaded:
    for _name in SCHEMAS:
        if _name not in _HOST_OPS:
            _lib.impl(_name, getattr(_aten, _name), "CUDA")


class BatchNormState(NamedTuple):
    """The tensors of a batch norm that normalises with running statistics, each (K,), and its eps."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    eps: float


class RunningStats(NamedTuple):
    """The buffers of a batch norm that `conv_bn_act_train` is to move, in place, by the batch's statistics."""

    mean: Tensor
    var: Tensor
    num_batches_tracked: Tensor | None
    momentum: float | None
    """None means the cumulative average over all batches tracked."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a convolution of `x` runs in: autocast's for `x.device` where it is active, else that of `x`.

    As in ATen's autocast, float64 is left alone.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def allow_tf32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether float32 convolutions may use TF32 on `device` right now: torch's own switch for them, read live."""
    if dtype is not torch.float32 or device.type != "cuda":
        return False
    if torch.compiler.is_compiling():  # the one spelling that Dynamo traces, and guards
        return torch.backends.cudnn.allow_tf32
    # The older switch raises where convolutions and RNNs were set apart; this one follows both spellings.
    return torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]


def conv_bn_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    bn: BatchNormState | None = None,
    residual: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    act: str = "silu",
) -> Tensor:
    """Convolution, batch norm by running statistics, activation and residual in one op.

    ``y = act((conv(x, weight) + bias - mean) / sqrt(var + eps) * gamma + beta) + residual``, with the fold into one
    float32 scale and shift per channel done inside the op at every call: nothing is cached.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32 or float64; NHWC, NCHW or a channel slice of an NHWC tensor.
        weight: (K, C / groups, R, S), any strides; the dtype of `x`, or any under autocast.
        bias: (K,) or None.
        bn: running statistics and affine parameters, or None for a block without batch norm (after ``fuse()``).
        residual: (N, K, P, Q) added after the activation, or None.
        stride, padding, dilation: (height, width). Padding is with zeros.
        groups: as in ``torch.nn.functional.conv2d``.
        act: "silu" or "identity".

    Returns:
        y: (N, K, P, Q) in the dtype of `x`, or autocast's. Differentiable twice in all tensors but the statistics.

    Raises:
        RuntimeError: sizes, dtypes or devices that do not fit together; the message names them.
        KeyError: an `act` that is not fused.
    """
    dtype = compute_dtype(x)
    bn_weight, bn_bias, mean, var, eps = bn if bn is not None else (None, None, None, None, 0.0)
    # Eager calls enter the autograd kernel without a trip through the dispatcher, which would box all arguments.
    op = _ops.conv_bn_act.default if torch.compiler.is_compiling() else _autograd.conv_bn_act
    return op(
        x, weight, bias, bn_weight, bn_bias, mean, var, eps, residual, stride, padding, dilation, groups,
        ACTIVATIONS[act], dtype, allow_tf32(x.device, dtype),
    )  # fmt: skip


def conv_bn_act_train(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    bn_weight: Tensor | None = None,
    bn_bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    act: str = "silu",
    running: RunningStats | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution, batch norm by the statistics of this batch, activation and residual.

    Args:
        running: buffers to move as `update_running_stats_` does, in the same call and on CUDA in the same kernel; None
            leaves that to the caller. The others are those of `conv_bn_act`.

    Returns:
        y: (N, K, P, Q) in the dtype of `x`, or autocast's.
        mean, var: (K,) mean and biased variance of the convolution's output over (N, P, Q); float32, or float64 for
            float64. Not differentiable.

    Raises:
        RuntimeError: as `conv_bn_act`, and where a channel has a single value, of which there is no variance.
    """
    dtype = compute_dtype(x)
    arguments = (
        x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups,
        ACTIVATIONS[act], dtype, allow_tf32(x.device, dtype),
    )  # fmt: skip
    if (
        torch.compiler.is_compiling()
    ):  # an op that takes part in a graph's autograd writes to none of its inputs
        y, _z, mean, var = _ops.conv_bn_act_train.default(*arguments)
        if running is not None:
            update_running_stats_(*running[:3], mean, var, running.momentum, y.numel() // y.shape[1])
        return y, mean, var
    y, _z, mean, var, _weight = _autograd.conv_bn_act_train_(*arguments, *(running or _UNTRACKED))
    return y, mean, var


_UNTRACKED = (None, None, None, None)  # in the place of RunningStats


def update_running_stats_(
    running_mean: Tensor,
    running_var: Tensor,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    var: Tensor,
    momentum: float | None,
    count: int,
) -> None:
    """Move a batch norm's buffers by one batch, in place, as ``nn.BatchNorm2d`` does.

    ``running = (1 - momentum) * running + momentum * batch``, with the unbiased variance ``var * count / (count - 1)``.

    Args:
        running_mean, running_var: (K,) buffers. num_batches_tracked: () int64 buffer, incremented; may be None.
        mean, var: (K,) batch mean and biased variance, from `conv_bn_act_train`.
        momentum: None means the cumulative average over all batches tracked.
        count: values per channel, N * P * Q, at least 2.
    """
    _ops.update_running_stats_.default(
        running_mean, running_var, num_batches_tracked, mean, var, momentum, count
    )


# ----------------------------------------------------------------------------------------------------- fake kernels


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _empty_output(x: Tensor, weight: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=x.device, memory_format=_aten.output_format(x, weight))


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act", lib=_lib)
def _(
    x, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, residual, stride, padding, dilation, groups,
    act, dtype, allow_tf32,
):  # fmt: skip
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_statistics(size[1], x, running_mean, running_var)
    check_residual(residual, size)
    _n, k, p, q = size
    if x.device.type == "cuda" and LIBRARY.loaded and dtype.itemsize == 2 and groups == 1 and k > 8:
        pitch = (k + 7) // 8 * 8  # `padded_pitch` in csrc/host/convolution.cpp
        return x.new_empty_strided(size, (p * q * pitch, 1, q * pitch, pitch), dtype=dtype)
    return _empty_output(x, weight, size, dtype)


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_train", lib=_lib)
def _(
    x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act, dtype, allow_tf32
):  # fmt: skip
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_residual(residual, size)
    stats = [x.new_empty(size[1], dtype=_stats_dtype(dtype)) for _ in range(2)]
    return _empty_output(x, weight, size, dtype), _empty_output(x, weight, size, dtype), *stats


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_train_", lib=_lib)
def _(
    x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act, dtype, allow_tf32,
    running_mean, running_var, num_batches_tracked, momentum,
):  # fmt: skip
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_statistics(size[1], x, running_mean, running_var)
    check_residual(residual, size)
    stats = [x.new_empty(size[1], dtype=_stats_dtype(dtype)) for _ in range(2)]
    y, z = (_empty_output(x, weight, size, dtype) for _ in range(2))
    cast_weight = _aten.cast_weight(weight, dtype)
    if cast_weight.numel() and x.device.type == "cuda" and LIBRARY.loaded:
        k, c, r, s = weight.shape
        cast_weight = cast_weight.new_empty_strided((k, c, r, s), (r * s * c, 1, s * c, c))
    return y, z, *stats, cast_weight


def _fake_grads(x, weight, bias, bn_weight, bn_bias, output_mask):
    likes = (x, weight, bias, bn_weight, bn_bias)
    grads = []
    for like, wanted in zip(likes, output_mask, strict=True):
        if not wanted or like is None:
            grads.append(x.new_empty(0))
        elif like is x:
            grads.append(_empty_output(x, weight, x.shape, x.dtype))
        else:
            grads.append(torch.empty_like(like))
    return tuple(grads)


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_backward", lib=_lib)
def _(
    grad_y, x, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, stride, padding, dilation, groups,
    act, dtype, allow_tf32, output_mask,
):  # fmt: skip
    return _fake_grads(x, weight, bias, bn_weight, bn_bias, output_mask)


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_train_backward", lib=_lib)
def _(
    grad_y, x, weight, bias, z, mean, var, bn_weight, bn_bias, eps, stride, padding, dilation, groups, act, dtype,
    allow_tf32, output_mask, cast_weight=None,
):  # fmt: skip
    return _fake_grads(x, weight, bias, bn_weight, bn_bias, output_mask)


@torch.library.register_fake(f"{NAMESPACE}::update_running_stats_", lib=_lib)
def _(running_mean, running_var, num_batches_tracked, mean, var, momentum, count):
    return None


# --------------------------------------------------------------------------------------------------------- autograd

for _name in (
    "conv_bn_act",
    "conv_bn_act_train",
    "conv_bn_act_train_",
    "conv_bn_act_backward",
    "conv_bn_act_train_backward",
):
    _lib.impl(_name, getattr(_autograd, _name), "Autograd")


# -------------------------------------------------------------------------------------------------------- host ops


def describe_kernel(
    x_size: Sequence[int],
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: torch.dtype,
    *,
    tf32: bool,
    capability: int,
) -> str:
    """The tile menu's choice for a convolution, "family/target/tile", on a GPU of compute capability `capability`
    (major * 10 + minor). A host function: needs the compiled library, not a GPU.

    Raises:
        RuntimeError: the compiled library is not loaded.
    """
    if not LIBRARY.loaded:
        raise RuntimeError(
            f"yolo12_fastconv: no compiled library, so no kernel to describe: {LIBRARY.reason}"
        )
    return _ops.describe_kernel.default(
        x_size, weight_size, stride, padding, dilation, groups, dtype, tf32, capability
    )


def kernel_candidates(
    x_size: Sequence[int],
    weight_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    dtype: torch.dtype,
    *,
    tf32: bool,
    capability: int,
) -> list[str]:
    """Names of the kernels that the tile menu weighs for a convolution, the best estimate first; arguments as
    `describe_kernel`. With one of them in ``YOLO12_FASTCONV_KERNEL``, the convolution runs it. At least one, at most
    100.

    Raises:
        RuntimeError: the compiled library is not loaded.
    """
    if not LIBRARY.loaded:
        raise RuntimeError(
            f"yolo12_fastconv: no compiled library, so no kernels to choose among: {LIBRARY.reason}"
        )
    return _ops.kernel_candidates.default(
        x_size, weight_size, stride, padding, dilation, groups, dtype, tf32, capability
    )
