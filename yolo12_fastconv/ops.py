"""The ops of the package: schemas, documentation, fake kernels. With `_autograd.py` the only caller of ``torch.ops``.

Namespace ``yolo12_fastconv``. CUDA kernels come from the compiled library (``csrc/``); without it, and on a CPU, the
same ops run on ATen (``_aten.py``). The functions below read torch's global state (autocast, TF32) at call time and
pass it as arguments, because a stable-ABI library cannot see it.

Layouts: on CUDA `y`, `z` and the gradient of `x` are channels_last, whatever `x` is; on a CPU they have the layout
that ATen's convolution would return. Weight gradients have the strides and dtype of the weight. One exception: where
the compiled library runs a convolution in half precision and the channels of `y` are no multiple of 8, the pixels of
`y` and `z` begin at multiples of 8 elements, as in a channel slice of a wider tensor, which the next convolution reads
much faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from yolo12_fastconv import _aten, _aten_maps, _autograd, _library, _program
from yolo12_fastconv._shapes import (
    attention_sizes,
    check_attention_gradients,
    check_channels,
    check_concat,
    check_concat_out,
    check_detect,
    check_grad_x,
    check_out,
    check_residual,
    check_statistics,
    check_upsample_sum,
    output_size,
)
from yolo12_fastconv.reference import ACTIVATIONS

__all__ = [
    "BatchNormState",
    "RunningStats",
    "area_attention",
    "concat_channels",
    "concat_channels_out",
    "conv_bn_act",
    "conv_bn_act_out",
    "conv_bn_act_train",
    "conv_bn_act_train_and_pass",
    "detect_decode",
    "update_running_stats_",
]

NAMESPACE = "yolo12_fastconv"

# `int[2]`, and lists for it: the dispatcher takes 0.9 us of host time for one, 1.5 us for a tuple, and 0.7 us more for
# `SymInt[2]`. Strides, paddings and dilations are constants of a module, never symbolic.
_GEOMETRY = (
    "int[2] stride, int[2] padding, int[2] dilation, SymInt groups, int act, ScalarType dtype, "
    "bool allow_tf32"
)
_BN_EVAL = "Tensor? bn_weight, Tensor? bn_bias, Tensor? running_mean, Tensor? running_var, float eps"
_BN_TRAIN = "Tensor? bn_weight, Tensor? bn_bias, float eps"
_ATTENTION = (
    "(Tensor qkv, SymInt num_heads, SymInt area, float scale, bool with_values)"
    " -> (Tensor out, Tensor values, Tensor logsumexp)"
)
_ATTENTION_BACKWARD = (
    "(Tensor grad_out, Tensor? grad_values, Tensor qkv, Tensor out, Tensor logsumexp, SymInt num_heads, SymInt area,"
    " float scale) -> Tensor"
)
_RUNNING = (
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum"
)
_GRADS = "(Tensor grad_x, Tensor grad_weight, Tensor grad_bias, Tensor grad_bn_weight, Tensor grad_bn_bias)"

SCHEMAS = {
    "conv_bn_act": f"(Tensor x, Tensor weight, Tensor? bias, {_BN_EVAL}, Tensor? residual, {_GEOMETRY}) -> Tensor",
    "conv_bn_act_out": (
        f"(Tensor x, Tensor weight, Tensor(a!) out, Tensor? bias, {_BN_EVAL}, Tensor? residual, {_GEOMETRY}) -> ()"
    ),
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
        f" {_GEOMETRY}, bool[5] output_mask, Tensor? cast_weight=None, Tensor? add_to_grad_x=None) -> {_GRADS}"
    ),
    # The same that adds `more` and then the gradient of x to `grad_x`, in place; the first one returned is empty. Its
    # halves below would do, in two more calls of 19 us of host time each. A step of YOLO12m has 16 of them, x 32, and
    # without CUDA graphs it waits for the host.
    "conv_bn_act_train_backward_": (
        f"(Tensor grad_y, Tensor x, Tensor weight, Tensor? bias, Tensor z, Tensor mean, Tensor var, {_BN_TRAIN},"
        f" {_GEOMETRY}, bool[5] output_mask, Tensor? cast_weight, Tensor(a!) grad_x, Tensor? more=None) -> {_GRADS}"
    ),
    # conv_bn_act_train and update_running_stats_ in one call, with the weight in `dtype`, which backward takes again:
    # empty if the weight has that dtype, or was given in it. Without running_mean and running_var nothing is moved.
    # With `out`, y is written there and the one returned is empty.
    "conv_bn_act_train_": (
        f"(Tensor x, Tensor weight, Tensor? bias, {_BN_TRAIN}, Tensor? residual, {_GEOMETRY}, {_RUNNING},"
        " Tensor(d!)? out=None, Tensor? cast_weight=None)"
        " -> (Tensor y, Tensor z, Tensor mean, Tensor var, Tensor cast)"
    ),
    # The y of conv_bn_act_train, from its other outputs.
    "bn_act": (f"(Tensor z, Tensor mean, Tensor var, {_BN_TRAIN}, int act) -> Tensor"),
    # The two halves of conv_bn_act_train_backward: to the gradient of z, and from there to those of the convolution.
    "bn_act_backward": (
        f"(Tensor grad_y, Tensor z, Tensor mean, Tensor var, {_BN_TRAIN}, int act, bool[3] output_mask)"
        " -> (Tensor grad_z, Tensor grad_bn_weight, Tensor grad_bn_bias)"
    ),
    "conv_backward": (
        "(Tensor grad_z, Tensor x, Tensor weight, Tensor? bias, int[2] stride, int[2] padding, int[2] dilation,"
        " SymInt groups, ScalarType dtype, bool allow_tf32, bool[3] output_mask, Tensor? cast_weight=None,"
        " Tensor? add_to_grad_x=None) -> (Tensor grad_x, Tensor grad_weight, Tensor grad_bias)"
    ),
    # The gradient of x alone, added to `grad_x` in place, behind `more`.
    "conv_backward_": (
        "(Tensor grad_z, Tensor x, Tensor weight, int[2] stride, int[2] padding, int[2] dilation, SymInt groups,"
        " ScalarType dtype, bool allow_tf32, Tensor? cast_weight, Tensor(a!) grad_x, Tensor? more=None) -> ()"
    ),
    "update_running_stats_": (
        "(Tensor(a!) running_mean, Tensor(b!) running_var, Tensor(c!)? num_batches_tracked, Tensor mean, Tensor var,"
        " float? momentum, SymInt count) -> ()"
    ),
    "concat_channels": "(Tensor[] tensors, SymInt[] scales, ScalarType dtype) -> Tensor",
    "concat_channels_out": "(Tensor[] tensors, SymInt[] scales, Tensor(a!) out) -> ()",
    "upsample_nearest_backward": "(Tensor grad_y) -> Tensor",
    # The same, added to `grad_x` in place.
    "upsample_nearest_backward_": "(Tensor grad_y, Tensor(a!) grad_x) -> ()",
    "detect_decode": (
        "(Tensor[] boxes, Tensor[] scores, Tensor? bin_values, Tensor points, Tensor steps, bool xywh)"
        " -> (Tensor y, Tensor all_boxes, Tensor all_scores)"
    ),
    # A chain of conv_bn_act, conv_bn_act_out and area_attention in one call: `_program.py`. `outputs`: four sizes and
    # four strides of each result.
    "run_program": (
        "(Tensor[] inputs, Tensor[] constants, Tensor program, int[] outputs, ScalarType dtype, bool allow_tf32)"
        " -> Tensor[]"
    ),
    "area_attention": _ATTENTION,
    "area_attention_backward": _ATTENTION_BACKWARD,
    # The same on ATen: what the compiled library calls where it has no kernel.
    "area_attention_aten": _ATTENTION,
    "area_attention_backward_aten": _ATTENTION_BACKWARD,
    # Which kernel serves a convolution, as "family/target/tile": the library's tile menu, a pure host function.
    "describe_kernel": "(int[4] x_size, int[4] weight_size, int[2] stride, int[2] padding, int[2] dilation, int groups,"
    " ScalarType dtype, bool allow_tf32, int capability, bool training=False) -> str",
    # All kernels that can serve it, the best estimate first.
    "kernel_candidates": "(int[4] x_size, int[4] weight_size, int[2] stride, int[2] padding, int[2] dilation,"
    " int groups, ScalarType dtype, bool allow_tf32, int capability) -> str[]",
    # What computes the gradients of x and of the weight.
    "describe_gradients": "(int[4] x_size, int[4] weight_size, int[2] stride, int[2] padding, int[2] dilation,"
    " int groups, ScalarType dtype, bool allow_tf32, int capability) -> str[]",
    # Whether a training op's backward computes them in one pass, from the gradient of y on.
    "backward_in_one_pass": "(int[4] x_size, int[4] weight_size, int[2] stride, int[2] padding, int[2] dilation,"
    " int groups, ScalarType dtype, bool allow_tf32, int capability) -> bool",
    # What the compiled library is: "arch_list=...;cuda=...;source_hash=...;version=...".
    "library_info": "() -> str",
}
_HOST_OPS = (
    "describe_kernel",
    "kernel_candidates",
    "describe_gradients",
    "backward_in_one_pass",
    "library_info",
)  # no tensors: defined for the compiled library alone
_ATEN_OPS = ("area_attention_aten", "area_attention_backward_aten")

_lib = torch.library.Library(NAMESPACE, "DEF")
for _name, _schema in SCHEMAS.items():
    _lib.define(_name + _schema)

_ops = getattr(torch.ops, NAMESPACE)
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def _aten_kernel(name: str) -> Callable:
    return getattr(next(module for module in (_aten, _aten_maps, _program) if hasattr(module, name)), name)


for _name in SCHEMAS:
    if _name in _ATEN_OPS:
        _lib.impl(_name, _aten_kernel(_name.removesuffix("_aten")), "CUDA")
    elif _name not in _HOST_OPS:
        _lib.impl(_name, _aten_kernel(_name), "CPU")

LIBRARY = _library.load()
"""What was loaded, or why not: `yolo12_fastconv._library.LibraryStatus`."""

if not LIBRARY.loaded:
    for _name in SCHEMAS:
        if _name not in _HOST_OPS + _ATEN_OPS:
            _lib.impl(_name, _aten_kernel(_name), "CUDA")


class BatchNormState(NamedTuple):
    """The tensors of a batch norm that normalises with running statistics, each (K,), and its eps."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    eps: float


_NO_BATCH_NORM = (None, None, None, None, 0.0)


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
    device = "cuda" if x.is_cuda else x.device.type  # `device.type` makes a string, which takes longer
    if torch.is_autocast_enabled(device) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype


def _eager_dtype(x: Tensor) -> torch.dtype:
    """`compute_dtype`, in half the time where no autocast is active, and not for a compiler."""
    return compute_dtype(x) if _is_any_autocast_enabled() else x.dtype


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
    # Eager calls enter the autograd kernel without a trip through the dispatcher, which would box all arguments.
    if torch.compiler.is_compiling():
        op, dtype = _ops.conv_bn_act.default, compute_dtype(x)
    else:
        op, dtype = _autograd.conv_bn_act, _eager_dtype(x)
    bn_weight, bn_bias, mean, var, eps = _NO_BATCH_NORM if bn is None else bn
    tf32 = dtype is torch.float32 and allow_tf32(x.device, dtype)
    return op(
        x, weight, bias, bn_weight, bn_bias, mean, var, eps, residual, list(stride), list(padding),
        list(dilation), groups, ACTIVATIONS[act], dtype, tf32,
    )  # fmt: skip


def conv_bn_act_out(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    bn: BatchNormState | None = None,
    residual: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
    act: str = "silu",
) -> None:
    """`conv_bn_act` that writes its result into `out`: a channel slice of a larger tensor saves its concat.

    Args:
        x, weight, bias, bn, residual, stride, padding, dilation, groups, act: as `conv_bn_act`. None may share memory
            with `out`.
        out: (N, K, P, Q) in the dtype of the result. A kernel writes it directly if it is NHWC or a channel slice of
            NHWC, its pixels evenly spaced and each at a multiple of 16 bytes; else the result is copied there.

    Raises:
        RuntimeError: as `conv_bn_act`; `out` of another size, dtype or device; a gradient would be wanted, which an op
            that writes to its argument has not.
    """
    if torch.compiler.is_compiling():
        op, dtype = _ops.conv_bn_act_out.default, compute_dtype(x)
    else:
        op, dtype = _autograd.conv_bn_act_out, _eager_dtype(x)
    bn_weight, bn_bias, mean, var, eps = _NO_BATCH_NORM if bn is None else bn
    tf32 = dtype is torch.float32 and allow_tf32(x.device, dtype)
    op(
        x, weight, out, bias, bn_weight, bn_bias, mean, var, eps, residual, list(stride), list(padding),
        list(dilation), groups, ACTIVATIONS[act], dtype, tf32,
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
    memory: str = "fast",
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution, batch norm by the statistics of this batch, activation and residual.

    Args:
        running: buffers to move as `update_running_stats_` does, in the same call and on CUDA in the same kernel; None
            leaves that to the caller.
        memory: "low" or "auto": if `x` is the output of this op, backward may compute it again from what its own call
            keeps, instead of keeping it (`_recompute.py`); "fast" keeps it.
        out: (N, K, P, Q) in the dtype of the result, where to write `y`: a channel slice of a larger tensor, which is
            nobody else's until then and has no history; a kernel writes it as in `conv_bn_act_out`. Not while
            compiling. The others are those of `conv_bn_act`.

    Returns:
        y: (N, K, P, Q) in the dtype of `x`, or autocast's; with `out` a tensor of its own that has its memory.
        mean, var: (K,) mean and biased variance of the convolution's output over (N, P, Q); float32, or float64 for
            float64. Not differentiable.

    Raises:
        RuntimeError: as `conv_bn_act`, where a channel has a single value, of which there is no variance, and for `out`
            of another size, dtype or device.
    """
    arguments = _train_arguments(
        x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act
    )
    if torch.compiler.is_compiling():
        # An op that takes part in a graph's autograd writes to none of its inputs.
        y, _z, mean, var = _ops.conv_bn_act_train.default(*arguments)
        if running is not None:
            update_running_stats_(*running[:3], mean, var, running.momentum, y.numel() // y.shape[1])
        return y, mean, var
    y, _z, mean, var, _weight = _autograd.conv_bn_act_train_(
        *arguments, *(running or _UNTRACKED), out, memory=memory
    )
    return _result(y, out), mean, var


def conv_bn_act_train_and_pass(
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
    memory: str = "fast",
    out: Tensor | None = None,
    passes: int = 1,
) -> tuple[Tensor, ...]:
    """`conv_bn_act_train`, and `x` once more for whatever else reads it.

    Autograd adds the gradients of a tensor that is read twice, in a pass over three tensors of its size. Whoever reads
    the second result instead of `x` has its gradient added by the kernel that computes the convolution's gradient of
    `x`, with the same two roundings: in place, if it is a slice of the gradient of `join_channels`.

    Args:
        As `conv_bn_act_train`.
        passes: 1, or 2 for a tensor that three read.

    Returns:
        y: as `conv_bn_act_train`.
        x: a view of `x` with history, `passes` of them; `x` itself where no gradient of it is recorded, and while
            compiling.

    Raises:
        As `conv_bn_act_train`.
    """
    if torch.compiler.is_compiling():
        y, _, _ = conv_bn_act_train(
            x,
            weight,
            bias,
            bn_weight,
            bn_bias,
            eps,
            residual,
            stride,
            padding,
            dilation,
            groups,
            act,
            running,
        )
        return (y, *(x,) * passes)
    arguments = _train_arguments(
        x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act
    )
    outputs = _autograd.conv_bn_act_train_and_pass(
        *arguments, *(running or _UNTRACKED), out, memory=memory, passes=passes
    )
    return (_result(outputs[0], out), *outputs[-passes:])


def _train_arguments(
    x: Tensor, weight: Tensor, bias: Tensor | None, bn_weight: Tensor | None, bn_bias: Tensor | None, eps: float,
    residual: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    act: str,
) -> tuple[Any, ...]:  # fmt: skip
    """Those of the ops `conv_bn_act_train` and `conv_bn_act_train_`, with torch's state read now."""
    dtype = compute_dtype(x)
    tf32 = dtype is torch.float32 and allow_tf32(x.device, dtype)
    return (
        x, weight, bias, bn_weight, bn_bias, eps, residual, list(stride), list(padding), list(dilation), groups,
        ACTIVATIONS[act], dtype, tf32,
    )  # fmt: skip


def _result(y: Tensor, out: Tensor | None) -> Tensor:
    """What `conv_bn_act_train` returns as y: without gradients, the op's is empty if it has written to `out`."""
    return y if out is None or y.requires_grad else _autograd.alias(out)


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


@overload
def area_attention(
    qkv: Tensor, num_heads: int, area: int, scale: float | None = ..., with_values: Literal[False] = ...
) -> Tensor: ...


@overload
def area_attention(
    qkv: Tensor, num_heads: int, area: int, scale: float | None = ..., *, with_values: Literal[True]
) -> tuple[Tensor, Tensor]: ...


def area_attention(
    qkv: Tensor, num_heads: int, area: int, scale: float | None = None, with_values: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention within areas of a feature map: ``softmax(q k^T * scale) v`` for each picture, area and head.

    The pixels of a picture, in reading order, are split into `area` runs of equal length; a pixel attends to those of
    its run. On CUDA, half precision and float32 with 32 channels a head run on kernels of the compiled library: logits
    and softmax in float32, weights rounded to half precision for the product of half values; float32 products to the
    accuracy of float32, whatever TF32 setting. All else, and the gradient in float32, runs on ATen: half precision on
    CUDA forward by its ``scaled_dot_product_attention``; its gradient, float32, float64 and everything on a CPU as
    stock computes it, by two products and a softmax.

    Args:
        qkv: (B, 3 * C, H, W) in any floating dtype, C = num_heads * d; the channels of a head lie together, d of its
            query, d of its key, d of its value. NHWC and channel slices of NHWC tensors are read in place. Under
            autocast it is cast to autocast's dtype.
        num_heads: number of heads.
        area: number of areas; divides H * W.
        scale: of the logits; d ** -0.5 if None.
        with_values: also return the values as a tensor of their own, for a convolution over them.

    Returns:
        out: (B, C, H, W) in the dtype of `qkv`, channels_last on CUDA, else in the layout of `qkv`.
        values: only if `with_values`: (B, C, H, W), likewise.
        Both differentiable twice in `qkv`; what is saved is `qkv`, `out` and a float32 per pixel and head.

    Raises:
        RuntimeError: sizes that do not fit together; the message names them.
    """
    dtype = compute_dtype(qkv)
    if qkv.dtype is not dtype:
        qkv = qkv.to(dtype)
    if scale is None:
        scale = attention_sizes(qkv, num_heads, area)[-1] ** -0.5
    op = _ops.area_attention.default if torch.compiler.is_compiling() else _autograd.area_attention
    out, values, _logsumexp = op(qkv, num_heads, area, scale, with_values)
    return (out, values) if with_values else out


def concat_channels(
    tensors: Sequence[Tensor], scales: Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Concatenation of maps along their channels, each magnified by nearest neighbour on the way.

    Args:
        tensors: (N, C_i, H / scale_i, W / scale_i), at least one, on one device; float16, bfloat16, float32 or float64,
            each of any strides. NHWC ones, and channel slices of them, are read in place.
        scales: 1 or 2 for each tensor; None means 1 for all. 2 is `torch.nn.Upsample` with ``scale_factor=2`` and
            ``mode="nearest"``.
        dtype: of the result; None means the type that the tensors' types promote to. Not changed by autocast.

    Returns:
        y: (N, sum of C_i, H, W): channels_last on CUDA, on a CPU as `torch.cat` would return it. Differentiable at any
        order. The gradient of an upsampled tensor is summed in float32 (float64 for float64), in one order.

    Raises:
        RuntimeError: sizes or devices that do not fit together, or another scale; the message names them.
    """
    if not tensors:  # the dispatcher's own words for it are a page long
        raise RuntimeError("yolo12_fastconv: tensors must hold at least one tensor")
    if scales is None:
        scales = [1] * len(tensors)
    if dtype is None:
        dtype = tensors[0].dtype
        for t in tensors[1:]:
            dtype = torch.promote_types(dtype, t.dtype)
    op = _ops.concat_channels.default if torch.compiler.is_compiling() else _autograd.concat_channels
    return op(list(tensors), list(scales), dtype)


def concat_channels_out(tensors: Sequence[Tensor], scales: Sequence[int] | None, out: Tensor) -> None:
    """`concat_channels` that writes its result into `out`.

    Args:
        tensors, scales: as `concat_channels`. None may share memory with `out`.
        out: (N, sum of C_i, H, W), of any dtype. A kernel writes it directly if it is NHWC or a channel slice of NHWC;
            else the result is copied there.

    Raises:
        RuntimeError: as `concat_channels`; `out` of another size or device; a gradient would be wanted, which an op
            that writes to its argument has not.
    """
    op = _ops.concat_channels_out.default if torch.compiler.is_compiling() else _autograd.concat_channels_out
    op(list(tensors), [1] * len(tensors) if scales is None else list(scales), out)


def upsample_nearest(x: Tensor, dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """`torch.nn.Upsample` with ``scale_factor=2`` and ``mode="nearest"``.

    Args:
        x: (N, C, H, W), float16, bfloat16, float32 or float64, of any strides; NHWC and channel slices of NHWC are read
            in place.
        dtype: of the result; None means that of `x`.
        out: (N, C, 2 H, 2 W) in `dtype`, where to write the result: a channel slice of a larger tensor, which is nobody
            else's until then and has no history. Not while compiling.

    Returns:
        y: (N, C, 2 H, 2 W), laid out as by `concat_channels`; with `out` a tensor of its own that has its memory.
        Differentiable at any order; the gradient is summed in float32 (float64 for float64), in one order.

    Raises:
        RuntimeError: `x` is no map; `out` of another size or device; the message names it.
    """
    dtype = x.dtype if dtype is None else dtype
    if torch.compiler.is_compiling():
        return _ops.concat_channels.default([x], [2], dtype)
    return _autograd.upsample_nearest(x, dtype, out)


def join_channels(buffer: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The concatenation of `parts` along their channels without a copy: they lie in `buffer` one behind the other.

    Args:
        buffer: (N, sum of C_i, H, W) without history.
        parts: (N, C_i, H, W) each, written to the channels of `buffer` in this order, by `conv_bn_act_train` for
            example. That is not checked.

    Returns:
        y: `buffer`, as a differentiable function of `parts`.
    """
    return _autograd.join(buffer, list(parts))


def halves(y: Tensor) -> tuple[Tensor, Tensor]:
    """``y.chunk(2, 1)`` of a map with an even number of channels. Its backward takes the two gradients as one where
    they are slices side by side of the gradient of `join_channels`, and else concatenates by `concat_channels`."""
    if torch.compiler.is_compiling():
        first, second = y.chunk(2, 1)
        return first, second
    return _autograd.halves(y)


def detect_decode(
    boxes: Sequence[Tensor],
    scores: Sequence[Tensor],
    bin_values: Tensor | None,
    points: Tensor,
    steps: Tensor,
    *,
    xywh: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a detection head returns in inference, from the maps of its levels.

    The levels are put one behind the other along A, their number of pixels in sum. A side of a box is the expectation
    ``sum(softmax(bins) * bin_values)`` (Distribution Focal Loss), the sides being the distances from the anchor point
    to the left, top, right and bottom edge.

    Args:
        boxes: (N, 4 * bins, H_i, W_i) per level, one dtype; NHWC maps are read in place. The CUDA kernel takes up to 16
            bins and 8 levels.
        scores: (N, classes, H_i, W_i) per level, in the dtype of `boxes`.
        bin_values: `bins` elements, of any shape; None for a single bin that is the distance itself.
        points: (2, A), x and y of the anchor points, in pixels of their level; dtype of `boxes`.
        steps: (1, A), image pixels per pixel of the level; dtype of `boxes`.
        xywh: boxes as centre and size, else as left, top, right, bottom.

    Returns:
        y: (N, 4 + classes, A): boxes in image pixels, and sigmoid of the scores. On CUDA computed in float32 (float64
            for float64) and rounded once.
        boxes, scores: (N, 4 * bins, A) and (N, classes, A): the maps. All three are contiguous. Differentiable; then
            ATen computes.

    Raises:
        RuntimeError: sizes, dtypes or devices that do not fit together; the message names them.
    """
    op = _ops.detect_decode.default if torch.compiler.is_compiling() else _autograd.detect_decode
    return op(list(boxes), list(scores), bin_values, points, steps, xywh)


def run_program(
    inputs: Sequence[Tensor], constants: Sequence[Tensor], program: Tensor, outputs: Sequence[int]
) -> list[Tensor]:
    """Several ops of inference in one call: what `programs` keeps of a block. Not cast by autocast.

    Args:
        inputs: (N, C, H, W) each, at least one, of one dtype and on one device.
        constants: parameters and buffers that the ops read.
        program: int64 on the CPU, in the format of `_program`.
        outputs: four sizes and four strides of each result, for fake kernels.

    Returns:
        What the program returns, in the dtype of `inputs`, without gradients. An empty list if a constant has another
        size, dtype or device than the program expects; nothing was computed then.

    Raises:
        RuntimeError: as the ops do; a program that reads what is not there; a gradient would be wanted.
    """
    first = inputs[0]
    tf32 = first.dtype is torch.float32 and allow_tf32(first.device, first.dtype)
    op = _ops.run_program.default if torch.compiler.is_compiling() else _autograd.run_program
    return op(list(inputs), list(constants), program, list(outputs), first.dtype, tf32)


# ----------------------------------------------------------------------------------------------------- fake kernels


def _stats_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _empty_output(x: Tensor, weight: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device=x.device, memory_format=_aten.output_format(x, weight))


def _empty_pixels(x: Tensor, weight: Tensor, size: Sequence[int], dtype: torch.dtype, groups: int) -> Tensor:
    """An output whose pixels the library pads."""
    if x.device.type == "cuda" and LIBRARY.loaded and _pads(size[1], dtype, groups):
        return _empty_rows(x, size, dtype)
    return _empty_output(x, weight, size, dtype)


def _empty_rows(like: Tensor, size: Sequence[int], dtype: torch.dtype) -> Tensor:
    _n, c, h, w = size
    pitch = (c + 7) // 8 * 8
    return like.new_empty_strided(size, (h * w * pitch, 1, w * pitch, pitch), dtype=dtype)


def _pads(channels: int, dtype: torch.dtype, groups: int) -> bool:
    """`padded_pitch` in csrc/host/convolution.cpp."""
    return dtype.itemsize == 2 and groups == 1 and channels > 8


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act", lib=_lib)
def _(
    x, weight, bias, bn_weight, bn_bias, running_mean, running_var, eps, residual, stride, padding, dilation, groups,
    act, dtype, allow_tf32,
):  # fmt: skip
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_statistics(size[1], x, running_mean, running_var)
    check_residual(residual, size)
    return _empty_pixels(x, weight, size, dtype, groups)


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_out", lib=_lib)
def _(
    x, weight, out, bias, bn_weight, bn_bias, running_mean, running_var, eps, residual, stride, padding, dilation,
    groups, act, dtype, allow_tf32,
):  # fmt: skip
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_statistics(size[1], x, running_mean, running_var)
    check_residual(residual, size)
    check_out(out, size, x, dtype)


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_train", lib=_lib)
def _(
    x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act, dtype, allow_tf32
):  # fmt: skip
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_residual(residual, size)
    stats = [x.new_empty(size[1], dtype=_stats_dtype(dtype)) for _ in range(2)]
    y, z = (_empty_pixels(x, weight, size, dtype, groups) for _ in range(2))
    return y, z, *stats


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_train_", lib=_lib)
def _(
    x, weight, bias, bn_weight, bn_bias, eps, residual, stride, padding, dilation, groups, act, dtype, allow_tf32,
    running_mean, running_var, num_batches_tracked, momentum, out=None, cast_weight=None,
):  # fmt: skip
    size = output_size(x, weight, stride, padding, dilation, groups)
    check_channels(size[1], x, bias=bias, bn_weight=bn_weight, bn_bias=bn_bias)
    check_statistics(size[1], x, running_mean, running_var)
    check_residual(residual, size)
    stats = [x.new_empty(size[1], dtype=_stats_dtype(dtype)) for _ in range(2)]
    y, z = (_empty_pixels(x, weight, size, dtype, groups) for _ in range(2))
    if out is not None:
        check_out(out, size, x, dtype)
        y = y.new_empty(0)
    cast = _aten.cast_unless_given(weight, dtype, cast_weight)
    if cast.numel() and x.device.type == "cuda" and LIBRARY.loaded:
        k, c, r, s = weight.shape
        if _pads(c, dtype, groups):
            cast = _empty_rows(cast, weight.shape, dtype)
        else:
            cast = cast.new_empty_strided((k, c, r, s), (r * s * c, 1, s * c, c))
    return y, z, *stats, cast


def _fake_grads(x, weight, bias, bn_weight, bn_bias, output_mask):
    return _fake_grads_of(x, weight, (x, weight, bias, bn_weight, bn_bias), output_mask)


def _fake_grads_of(x, weight, likes, output_mask):
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
    allow_tf32, output_mask, cast_weight=None, add_to_grad_x=None,
):  # fmt: skip
    return _fake_grads(x, weight, bias, bn_weight, bn_bias, output_mask)


@torch.library.register_fake(f"{NAMESPACE}::conv_bn_act_train_backward_", lib=_lib)
def _(
    grad_y, x, weight, bias, z, mean, var, bn_weight, bn_bias, eps, stride, padding, dilation, groups, act, dtype,
    allow_tf32, output_mask, cast_weight, grad_x, more=None,
):  # fmt: skip
    check_grad_x(grad_x, more, x)
    return _fake_grads(x, weight, bias, bn_weight, bn_bias, [False, *output_mask[1:]])


@torch.library.register_fake(f"{NAMESPACE}::bn_act", lib=_lib)
def _(z, mean, var, bn_weight, bn_bias, eps, act):
    check_channels(z.shape[1], z, bn_weight=bn_weight, bn_bias=bn_bias)
    return torch.empty_like(z)


@torch.library.register_fake(f"{NAMESPACE}::bn_act_backward", lib=_lib)
def _(grad_y, z, mean, var, bn_weight, bn_bias, eps, act, output_mask):
    likes = (z, bn_weight, bn_bias)
    return tuple(
        torch.empty_like(like) if wanted and like is not None else z.new_empty(0)
        for like, wanted in zip(likes, output_mask, strict=True)
    )


@torch.library.register_fake(f"{NAMESPACE}::conv_backward", lib=_lib)
def _(
    grad_z, x, weight, bias, stride, padding, dilation, groups, dtype, allow_tf32, output_mask, cast_weight=None,
    add_to_grad_x=None,
):  # fmt: skip
    return _fake_grads_of(x, weight, (x, weight, bias), output_mask)


@torch.library.register_fake(f"{NAMESPACE}::conv_backward_", lib=_lib)
def _(
    grad_z, x, weight, stride, padding, dilation, groups, dtype, allow_tf32, cast_weight, grad_x, more=None
):  # fmt: skip
    check_grad_x(grad_x, more, x)


@torch.library.register_fake(f"{NAMESPACE}::update_running_stats_", lib=_lib)
def _(running_mean, running_var, num_batches_tracked, mean, var, momentum, count):
    return None


@torch.library.register_fake(f"{NAMESPACE}::concat_channels", lib=_lib)
def _(tensors, scales, dtype):
    if tensors[0].device.type != "cuda":
        return _aten_maps.concat_channels(tensors, scales, dtype)
    size = check_concat(tensors, scales)
    return torch.empty(size, dtype=dtype, device=tensors[0].device, memory_format=torch.channels_last)


@torch.library.register_fake(f"{NAMESPACE}::concat_channels_out", lib=_lib)
def _(tensors, scales, out):
    check_concat_out(tensors, scales, out)


@torch.library.register_fake(f"{NAMESPACE}::upsample_nearest_backward", lib=_lib)
def _(grad_y):
    return _aten_maps.upsample_nearest_backward(grad_y)


@torch.library.register_fake(f"{NAMESPACE}::upsample_nearest_backward_", lib=_lib)
def _(grad_y, grad_x):
    check_upsample_sum(grad_y, grad_x)


@torch.library.register_fake(f"{NAMESPACE}::run_program", lib=_lib)
def _(inputs, constants, program, outputs, dtype, allow_tf32):
    return [
        inputs[0].new_empty_strided(outputs[i : i + 4], outputs[i + 4 : i + 8], dtype=dtype)
        for i in range(0, len(outputs), 8)
    ]


@torch.library.register_fake(f"{NAMESPACE}::detect_decode", lib=_lib)
def _(boxes, scores, bin_values, points, steps, xywh):
    batch, channels, classes, anchors = check_detect(boxes, scores, bin_values, points, steps)
    return (
        boxes[0].new_empty(batch, 4 + classes, anchors),
        boxes[0].new_empty(batch, channels, anchors),
        boxes[0].new_empty(batch, classes, anchors),
    )


@torch.library.register_fake(f"{NAMESPACE}::area_attention", lib=_lib)
def _(qkv, num_heads, area, scale, with_values):
    batch, channels, height, width, head_dim = attention_sizes(qkv, num_heads, area)
    out = torch.empty(
        (batch, channels, height, width),
        dtype=qkv.dtype,
        device=qkv.device,
        memory_format=_aten.attention_format(qkv),
    )
    values = torch.empty_like(out) if with_values else qkv.new_empty(0)
    # `attention_kernel_serves` in csrc/host/attention.cpp; ATen computes the softmax anew in backward.
    kept = qkv.device.type == "cuda" and LIBRARY.loaded and qkv.dtype.itemsize <= 4 and head_dim == 32
    size = (batch, num_heads, height * width) if kept else (0,)
    return out, values, qkv.new_empty(size, dtype=_stats_dtype(qkv.dtype))


@torch.library.register_fake(f"{NAMESPACE}::area_attention_backward", lib=_lib)
def _(grad_out, grad_values, qkv, out, logsumexp, num_heads, area, scale):
    attention_sizes(qkv, num_heads, area)
    check_attention_gradients(grad_out, grad_values, out)
    return torch.empty(
        qkv.shape, dtype=qkv.dtype, device=qkv.device, memory_format=_aten.attention_format(qkv)
    )


# --------------------------------------------------------------------------------------------------------- autograd

for _name in (
    "conv_bn_act",
    "conv_bn_act_out",
    "conv_bn_act_train",
    "conv_bn_act_train_",
    "conv_bn_act_backward",
    "conv_bn_act_train_backward",
    "conv_bn_act_train_backward_",
    "bn_act",
    "bn_act_backward",
    "conv_backward",
    "conv_backward_",
    "concat_channels",
    "concat_channels_out",
    "upsample_nearest_backward",
    "upsample_nearest_backward_",
    "detect_decode",
    "run_program",
    "area_attention",
    "area_attention_backward",
):
    _lib.impl(_name, getattr(_autograd, _name), "Autograd")


# -------------------------------------------------------------------------------------------------------- host ops


def _menu_op(name: str) -> Callable[..., Any]:
    """A host op of the compiled library."""
    if not LIBRARY.loaded:
        raise RuntimeError(f"yolo12_fastconv: no compiled library, so no menu of kernels: {LIBRARY.reason}")
    op: Callable[..., Any] = getattr(_ops, name).default
    return op


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
    training: bool = False,
) -> str:
    """The tile menu's choice for a convolution, "family/target/tile". A host function: needs the compiled library, not
    a GPU.

    Args:
        x_size: (N, C, H, W). weight_size: (K, C / groups, R, S).
        stride, padding, dilation: (height, width). groups: as in `conv_bn_act`.
        dtype: the one that the convolution is computed in.
        tf32: whether float32 may use TF32; by keyword.
        capability: compute capability of the GPU, major * 10 + minor; by keyword.
        training: whether for the forward of `conv_bn_act_train`, which takes statistics on the way; by keyword.

    Raises:
        RuntimeError: the compiled library is not loaded.
    """
    name: str = _menu_op("describe_kernel")(
        x_size, weight_size, stride, padding, dilation, groups, dtype, tf32, capability, training
    )
    return name


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
    150.

    Raises:
        RuntimeError: the compiled library is not loaded.
    """
    names: list[str] = _menu_op("kernel_candidates")(
        x_size, weight_size, stride, padding, dilation, groups, dtype, tf32, capability
    )
    return names


def describe_gradients(
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
) -> tuple[str, str]:
    """What computes the gradients of `x` and of the weight: "family/target/tile" of our kernels, or "aten".

    Arguments as `describe_kernel`. ``YOLO12_FASTCONV_GRADIENTS=own`` takes our kernels wherever there is one, also
    where cuDNN was measured to be faster; ``fused`` besides takes one pass for both and the batch norm's where there is
    one (`backward_in_one_pass`); ``aten`` has ours only where ATen's weight gradient is less exact. A name of
    ``wgrad/sm90/...`` in ``YOLO12_FASTCONV_WGRAD`` forces that tile where it fits.

    Raises:
        RuntimeError: the compiled library is not loaded.
    """
    dgrad, wgrad = _menu_op("describe_gradients")(
        x_size, weight_size, stride, padding, dilation, groups, dtype, tf32, capability
    )
    return dgrad, wgrad


def backward_in_one_pass(
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
) -> bool:
    """Whether the backward of `conv_bn_act_train` goes from the sums of the batch norm to the gradients of `x` and of
    the weight in one kernel, if both are asked for and lie as it reads them. Arguments as `describe_kernel`.

    Raises:
        RuntimeError: the compiled library is not loaded.
    """
    in_one: bool = _menu_op("backward_in_one_pass")(
        x_size, weight_size, stride, padding, dilation, groups, dtype, tf32, capability
    )
    return in_one
