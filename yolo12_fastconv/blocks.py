"""FastConv and FastDWConv: what patched Ultralytics `Conv` and `DWConv` blocks become.

Only the class of a block changes; its parameters, buffers, children and attributes stay the objects they are. At each
call the block looks at its live children and at the input, and decides whether the fused op computes what the stock
block would. Where it does not, the block computes exactly as stock does.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parameter import Parameter

from yolo12_fastconv import _compat, _config, _library, ops

_compat.require_ultralytics()

from ultralytics.nn.modules.conv import Conv, DWConv  # noqa: E402

__all__ = ["FAST", "STOCK", "FallbackError", "FastConv", "FastDWConv", "kernel_reason", "structure_reason"]

_FUSED_ACTIVATIONS = {nn.SiLU: "silu", nn.Identity: "identity"}
DTYPES = frozenset((torch.float16, torch.bfloat16, torch.float32, torch.float64))
_CASTABLE = DTYPES - {torch.float64}  # by autocast

# Looked up once: they are asked at every call of every block.
_is_tracing = torch._C._is_tracing
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_transform_depth = torch._C._functorch.get_dynamic_layer_stack_depth


SEAT = "_fc_seat"
"""Attribute of a layer that makes a part of a concat further on: see `_places.py`."""


class FallbackError(RuntimeError):
    """A patched block would not run on a CUDA kernel of this package, and strict mode is on."""


class StockPickle(nn.Module):
    """Mixin: the module pickles as its stock class, and copies as its own.

    Files, DDP workers and other processes then need no plugin, while EMA, predictor and exporter copies stay patched.
    Attributes that start with ``_fc_`` are the plugin's own and are left out of pickles.
    """

    _stock: Any = None
    """Class to name in pickles."""
    _stock_args: tuple[Any, ...] = (1, 1)
    """Arguments with which unpickling makes an object of it, to be overwritten by the pickled state."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {key: value for key, value in vars(self).items() if not key.startswith("_fc_")}
        return self._stock, self._stock_args, state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(vars(self), memo))
        return twin

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        twin.__setstate__(dict(vars(self)))
        return twin


class FastConv(StockPickle, Conv):
    """An Ultralytics `Conv` block, ``act(bn(conv(x)))``, that runs as one fused op.

    Input and output are those of `Conv`: (N, C, H, W) to (N, K, P, Q), in float16, bfloat16, float32 or float64, or in
    autocast's dtype; the output's layout is the ops' (`yolo12_fastconv.ops`). The block has no state of its own and is
    made by `yolo12_fastconv.patch_model`, not by its constructor.

    Raises:
        FallbackError: strict mode is on and the call would not run on a CUDA kernel. The message gives the reason.
    """

    _stock: Any = Conv

    def forward(self, x: Tensor) -> Tensor:
        """``act(bn(conv(x)))``: batch statistics and buffer updates as `torch.nn.BatchNorm2d` would have them."""
        if SEAT in self.__dict__ and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y: Tensor = self.__dict__[SEAT].fill(self, x)
            return y
        return _run(self, child(self, "bn"), x)

    # The name under which Ultralytics' `fuse()` installs it, and under which it is pickled.
    def forward_fuse(self, x: Tensor) -> Tensor:
        """``act(conv(x))``: the forward after Ultralytics' ``fuse()``, which folds the batch norm into `conv`."""
        return _run(self, None, x)

    def _apply(self, fn: Any, recurse: bool = True) -> FastConv:
        # Where `nn.Module` moves and casts tensors: predictors do both after fusing.
        super()._apply(fn, recurse)
        keep_weight_for_kernels(self)
        return self

    def run(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        out: Tensor | None = None,
        passed: list[Tensor] | None = None,
    ) -> Tensor:
        """``self(x) + residual`` as one op, for blocks that hold this one and know that nobody watches it.

        Args:
            x: as for `forward`.
            residual: tensor to add, of any dtype; the sum is in the dtype that ``+`` gives it.
            out: where to write the result if that can be done: a channel slice of a larger tensor, for example. With
                autograd by batch statistics alone, and not while compiling.
            passed: `x` once for each of its other readers, one or two; gets what they shall read instead: see
                `ops.conv_bn_act_train_and_pass`.

        Returns:
            `out` if it was written, with autograd another tensor over its memory; else a tensor with its own.
        """
        bn = None if "forward" in self.__dict__ else child(self, "bn")
        return _run(self, bn, x, residual, out, passed)

    def plane(self, x: Tensor) -> tuple[int, int]:
        """Height and width of the result, if it is of a plain convolution."""
        conv = child(self, "conv")
        if type(conv) is not nn.Conv2d or type(conv.padding) is not tuple:
            return x.shape[2], x.shape[3]
        return output_plane(conv, conv.weight, x)


class FastDWConv(FastConv, DWConv):
    """An Ultralytics `DWConv` block that runs as one fused op; see `FastConv`."""

    _stock = DWConv


FAST: dict[type[nn.Module], type[nn.Module]] = {Conv: FastConv, DWConv: FastDWConv}
"""Stock class to fast class. Exact types: other subclasses of `Conv` compute something else."""

STOCK: dict[type[nn.Module], type[nn.Module]] = {fast: stock for stock, fast in FAST.items()}
"""Fast class to stock class."""


def _run(
    block: FastConv,
    bn: Any,
    x: Tensor,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    passed: list[Tensor] | None = None,
) -> Tensor:
    """``act(bn(conv(x))) + residual`` with the children of `block`; `bn` is None if it was folded into `conv`.

    The usual call is recognised here in one go, by conditions that together are enough for the fused op: asking for
    reasons one by one took longer than the op. Every other call goes to `_run_checked`, which knows all cases. It is
    also what a compiler traces, whose graphs need no shortcut.
    `passed`, a list that holds `x` once or twice, gets in its place what others shall read instead, if there is a
    gradient to add.
    """
    if torch.compiler.is_compiling() or _is_tracing() or type(x) is not Tensor or _has_any_global_hook():
        return _run_checked(block, bn, x, residual, out, passed)
    try:
        children: Any = block._modules
        conv, act = children["conv"], children["act"]
        held: Any = conv._parameters
        weight, bias = held["weight"], held["bias"]
        given = dtype = x.dtype
        casts = False
        if _is_any_autocast_enabled():
            dtype = ops.compute_dtype(x)
            casts = given in _CASTABLE and torch.is_autocast_enabled("cuda" if x.is_cuda else "cpu")
        device, kind = x.device, weight.dtype
        usual = (
            type(conv) is nn.Conv2d
            and type(act) in _FUSED_ACTIVATIONS
            and not is_hooked(conv)
            and not is_hooked(act)
            and conv.padding_mode == "zeros"
            and type(conv.padding) is tuple
            and (type(weight) is Parameter or type(weight) is Tensor)
            and given in DTYPES
            and (kind is given or (casts and kind in _CASTABLE))
            and weight.device == device
            and (bias is None or (bias.dtype is kind and bias.device == device))
            and x.dim() == 4
            and x.numel() != 0
            and x.layout is torch.strided
            and _is_served(x, dtype)
            and _transform_depth() == 0
            and forward_ad._current_level < 0
            and not _config.is_set()
            and "_fc_strict" not in block.__dict__
        )
        gamma: Any = None
        beta = mean = var = counter = gamma
        training = False
        if usual and bn is not None:
            gamma, beta = bn._parameters["weight"], bn._parameters["bias"]
            buffers = bn._buffers
            mean, var, counter = (
                buffers["running_mean"],
                buffers["running_var"],
                buffers["num_batches_tracked"],
            )
            training, kind = bn.training, mean.dtype
            usual = (
                type(bn) is nn.BatchNorm2d
                and not is_hooked(bn)
                and (kind is dtype or (kind is torch.float32 and dtype is not torch.float64))
                and gamma.dtype is beta.dtype is var.dtype is kind
                and gamma.device == beta.device == mean.device == var.device == device
                # Of one picture there may be a single value per channel.
                and not (
                    training and (not bn.track_running_stats or counter.device != device or x.shape[0] == 1)
                )
            )
    except (KeyError, AttributeError):
        usual = False  # a child, parameter or buffer is no entry of its table, or is None
    if not usual:
        return _run_checked(block, bn, x, residual, out, passed)
    return _compute(
        block, x, conv, bn, act, dtype, weight, bias, gamma, beta, mean, var, counter, training, residual, out,
        passed,
    )  # fmt: skip


def _run_checked(
    block: FastConv,
    bn: Any,
    x: Tensor,
    residual: Tensor | None,
    out: Tensor | None,
    passed: list[Tensor] | None,
) -> Tensor:
    """`_run` for any call: by the fused op, or as stock where there is a reason to."""
    conv, act = child(block, "conv"), child(block, "act")
    if exporting():
        return _as_stock(conv, bn, act, x, residual)
    gamma = beta = mean = var = counter = None
    batch_statistics = False
    reason = structure_reason(conv, bn, act)
    if reason is None:
        weight, bias = parameter(conv, "weight"), parameter(conv, "bias")
        reason = input_reason(x, weight, bias)
    if reason is None:
        dtype = ops.compute_dtype(x)
        if bn is not None:
            gamma, beta = parameter(bn, "weight"), parameter(bn, "bias")
            mean, var = buffer(bn, "running_mean"), buffer(bn, "running_var")
            counter = buffer(bn, "num_batches_tracked")
            batch_statistics = bn.training or (mean is None and var is None)
            reason = _bn_reason(x, dtype, (gamma, beta, mean, var), counter)
            if reason is None and batch_statistics and x.shape[0] == 1:
                reason = _single_value_reason(conv, weight, x)
    if "_fc_strict" in block.__dict__ or _config.strict():
        _require_kernel(block, x, reason)
    if reason is not None:
        return _as_stock(conv, bn, act, x, residual)
    return _compute(
        block, x, conv, bn, act, dtype, weight, bias, gamma, beta, mean, var, counter, batch_statistics, residual, out,
        passed,
    )  # fmt: skip


def _compute(
    block: FastConv, x: Tensor, conv: Any, bn: Any, act: Any, dtype: torch.dtype, weight: Tensor, bias: Tensor | None,
    gamma: Tensor | None, beta: Tensor | None, mean: Any, var: Any, counter: Tensor | None,
    batch_statistics: bool, residual: Tensor | None, out: Tensor | None, passed: list[Tensor] | None,
) -> Tensor:  # fmt: skip
    """By the fused op: everything has been checked but `residual` and `out`."""
    fused = _FUSED_ACTIVATIONS.get(type(act))
    later = None
    if residual is not None and not (fused and _fits(residual, dtype, conv, weight, x)):
        later, residual = residual, None
    geometry = (conv.stride, conv.padding, conv.dilation, conv.groups, fused or "identity")
    if batch_statistics:
        running = None
        if bn.training and bn.track_running_stats and mean is not None and var is not None:
            running = ops.RunningStats(mean, var, counter, bn.momentum)
        if out is not None and not (fused and later is None and _fits(out, dtype, conv, weight, x)):
            out = None
        memory = block.__dict__.get("_fc_memory", "auto")
        arguments = (x, weight, bias, gamma, beta, bn.eps, residual, *geometry, running, memory, out)
        if passed is None:
            y, _, _ = ops.conv_bn_act_train(*arguments)
        else:
            y, *passed[:] = ops.conv_bn_act_train_and_pass(*arguments, len(passed))
    else:
        state = None if bn is None else ops.BatchNormState(gamma, beta, mean, var, bn.eps)
        if torch.is_grad_enabled():
            out = None  # by running statistics, the op that writes there has no gradient
        if out is not None and fused and later is None and _fits(out, dtype, conv, weight, x):
            ops.conv_bn_act_out(x, weight, out, bias, state, residual, *geometry)
            return out
        y = ops.conv_bn_act(x, weight, bias, state, residual, *geometry)
    if not fused:
        y = act(y)
    return y if later is None else later + y


def _as_stock(conv: Any, bn: Any, act: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    y = act(conv(x)) if bn is None else act(bn(conv(x)))
    return y if residual is None else residual + y


def _fits(tensor: Tensor, dtype: torch.dtype, conv: Any, weight: Tensor, x: Tensor) -> bool:
    """Whether `tensor` is a plain one of the convolution's output size, dtype and device: nothing would be promoted
    or broadcast."""
    return (
        type(tensor) is Tensor
        and tensor.dtype is dtype
        and tensor.shape == (x.shape[0], weight.shape[0], *output_plane(conv, weight, x))
        and tensor.device == x.device
    )


def output_plane(conv: Any, weight: Tensor, x: Tensor) -> tuple[int, int]:
    """Height and width of the convolution's output."""
    _n, _c, height, width = x.shape
    _k, _c, r, s = weight.shape
    (pad_h, pad_w), (step_h, step_w), (gap_h, gap_w) = conv.padding, conv.stride, conv.dilation
    return (
        (height + 2 * pad_h - gap_h * (r - 1) - 1) // step_h + 1,
        (width + 2 * pad_w - gap_w * (s - 1) - 1) // step_w + 1,
    )


def exporting() -> bool:
    # Traced and exported graphs shall hold standard operators. An ONNX export is one or the other.
    if torch.compiler.is_compiling():
        return torch.jit.is_tracing() or _is_exporting()
    return _is_tracing()


def _is_exporting() -> bool:
    return torch.compiler.is_exporting()


def is_fused_forward(block: nn.Module, forward: Any) -> bool:
    """Whether `forward` is the block's own `forward_fuse`, as Ultralytics' ``fuse()`` leaves it."""
    function = getattr(forward, "__func__", None)
    return (function is FastConv.forward_fuse or function is Conv.forward_fuse) and forward.__self__ is block


def keep_weight_for_kernels(block: Any) -> None:
    """Give the weight of a block without batch norm, on a GPU, the strides that the kernels read.

    Those of `padded_channels_last`: the same Parameter with the same values in another order; `restore_weight` undoes
    it. Else dense k x k weights are packed at every call: measured on YOLO12n, m and x (H200, fp16), 32, 36 and 60
    launches, 8 to 10 % of the kernel time of m and x at batch 32, and of n at batch 1. So are odd widths, the 1x1 of l
    and x that read 307 and 460 channels.

    Only after Ultralytics' ``fuse()``: releases up to at least 8.4.60 fold batch norms with ``weight.view(...)``, which
    raises on such strides, so neither a model that may still be fused nor a file of one may have them. Nor would much
    be won: parameters in training are float32, and casting them is the same launch.
    """
    conv = block._modules.get("conv")
    if "bn" in block._modules or type(conv) is not nn.Conv2d or conv.groups != 1:
        return
    weight = conv._parameters.get("weight")
    # First convolutions have kernels of their own, which read any strides.
    if type(weight) is not Parameter or not _on_gpu(weight) or weight.shape[1] < 8:
        return
    kept = padded_channels_last(weight.data)
    if kept.stride() != weight.stride():
        weight.data = kept
        block._fc_weight_kept = True


def padded_channels_last(tensor: Tensor) -> Tensor:
    """`tensor` (N, C, H, W) as rows of C, the rows a multiple of 16 bytes apart: channels_last where C is one.

    Kernels read weights and pictures so without a copy. The tensor itself, if it lies so.
    """
    n, c, h, w = tensor.shape
    lanes = 16 // tensor.element_size()
    pitch = -(-c // lanes) * lanes
    if pitch == c:
        return tensor.contiguous(memory_format=torch.channels_last)
    if tensor.stride() == (h * w * pitch, 1, w * pitch, pitch):
        return tensor
    return tensor.new_zeros(n, h, w, pitch)[..., :c].permute(0, 3, 1, 2).copy_(tensor)


def restore_weight(block: Any) -> None:
    """Undo `keep_weight_for_kernels`, where it changed something."""
    if "_fc_weight_kept" in block.__dict__:
        del block.__dict__["_fc_weight_kept"]
        weight = block.conv.weight
        weight.data = weight.data.contiguous()


def _on_gpu(weight: Tensor) -> bool:
    return weight.is_cuda


# The three functions below are `getattr` without its search through parameters, buffers and children, which would take
# more time than all other checks. A child may also be a plain attribute: DataParallel and FSDP replace parameters so.


def child(module: nn.Module, name: str) -> Any:
    table = module._modules
    return table[name] if name in table else getattr(module, name)


def parameter(module: nn.Module, name: str) -> Any:
    table = module._parameters
    return table[name] if name in table else getattr(module, name)


def buffer(module: nn.Module, name: str) -> Any:
    table = module._buffers
    return table[name] if name in table else getattr(module, name)


def structure_reason(conv: Any, bn: Any, act: Any) -> str | None:
    """Why a block with these children computes as stock, whatever its input; None if the fused op may serve it.

    `bn` is None for a block whose batch norm was folded into `conv`.
    """
    if _config.disabled():
        return f"{_config.DISABLE} is set"
    if _has_any_global_hook():
        return "hooks for all modules are registered"
    if type(conv) is not nn.Conv2d:
        return f"conv is {_class_name(conv)}, not exactly torch.nn.Conv2d"
    if bn is not None and type(bn) is not nn.BatchNorm2d:
        return f"bn is {_class_name(bn)}, not exactly torch.nn.BatchNorm2d"
    if not isinstance(act, nn.Module):
        return f"act is {act!r}, not a module"
    if is_hooked(conv):
        return "conv has hooks or a forward of its own"
    if bn is not None and is_hooked(bn):
        return "bn has hooks or a forward of its own"
    if is_hooked(act):
        return "act has hooks or a forward of its own"
    if conv.padding_mode != "zeros":
        return f"padding_mode is {conv.padding_mode!r}"
    if type(conv.padding) is not tuple:
        return f"padding is {conv.padding!r}"
    if bn is not None:
        mean, var = buffer(bn, "running_mean"), buffer(bn, "running_var")
        if (mean is None) is not (var is None):
            return "bn has only one of running_mean and running_var"
        if mean is None and buffer(bn, "num_batches_tracked") is not None:
            return "bn counts batches without running statistics"
    return None


def is_hooked(child: nn.Module) -> bool:
    """Whether calling `child` does more than the forward of its class: hooks, or a forward of its own."""
    return "forward" in child.__dict__ or has_hooks(child)


def has_hooks(module: nn.Module) -> bool:
    own = module.__dict__  # where `nn.Module.__init__` puts its tables of hooks
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


# Besides what the op cannot do, the reasons below are those for which stock raises an error: so that it stays stock's.


def input_reason(x: Any, weight: Any, bias: Tensor | None) -> str | None:
    """Why a convolution of `x` with these parameters computes as stock; None if the op can."""
    problem = map_reason(x) or _class_reason(weight, "weight")
    if problem is not None:
        return problem
    given, device = x.dtype, x.device
    for tensor in (weight, bias):
        if tensor is None:
            continue
        if tensor.device != device:
            return f"the input is on {device}, conv on {tensor.device}"
        # Autocast reconciles all but float64.
        if tensor.dtype is not given and not (
            torch.is_autocast_enabled(device.type) and given in _CASTABLE and tensor.dtype in _CASTABLE
        ):
            return f"the input is {given}, conv holds {tensor.dtype}"
    return None


def map_reason(x: Any) -> str | None:
    """Why the ops cannot take `x`, which should be a map (N, C, H, W); None if they can."""
    problem = _class_reason(x, "input")
    if problem is not None:
        return problem
    # A compiler traces through transforms by itself, and could not trace these questions.
    if not torch.compiler.is_compiling() and (_transform_depth() > 0 or forward_ad._current_level >= 0):
        return "a function transform or forward-mode differentiation is active"
    device = x.device
    if x.is_cuda:
        problem = _device_problem(device.index, ops.compute_dtype(x)) if ops.LIBRARY.loaded else None
        if problem is not None:
            return problem
    elif not x.is_cpu:
        return f"the input is on {device}"
    if x.dim() != 4 or x.layout is not torch.strided:
        return "the input is not a dense (N, C, H, W) tensor"
    if x.numel() == 0:
        return "the input is empty"
    if x.dtype not in DTYPES:
        return f"the input is {x.dtype}"
    return None


def _class_reason(tensor: Any, name: str) -> str | None:
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return None
    return f"the {name} is a {type(tensor).__name__}, not a plain tensor"


def _bn_reason(
    x: Tensor, dtype: torch.dtype, vectors: tuple[Tensor | None, ...], counter: Tensor | None
) -> str | None:
    device = x.device
    for vector in vectors:
        if vector is None:
            continue
        if vector.device != device:
            return f"the input is on {device}, bn on {vector.device}"
        # Batch norm takes vectors of its input's dtype, or float32 ones beside half input.
        if vector.dtype is not dtype and (vector.dtype is not torch.float32 or dtype is torch.float64):
            return f"bn holds {vector.dtype}, its input is {dtype}"
    if counter is not None and counter.device != device:
        return f"the input is on {device}, bn's counter on {counter.device}"
    return None


def _single_value_reason(conv: Any, weight: Tensor, x: Tensor) -> str | None:
    # Of one value per channel there are no batch statistics: stock raises ValueError.
    return "batch statistics of one value per channel" if output_plane(conv, weight, x) == (1, 1) else None


def _require_kernel(block: FastConv, x: Tensor, reason: str | None) -> None:
    """Raise FallbackError if strict mode is on and no CUDA kernel serves this call.

    `reason`: why the block computes as stock, or None.
    """
    if not ("_fc_strict" in vars(block) or _config.strict()) or _config.disabled():
        return
    if reason is None:
        reason = kernel_reason(x.device, ops.compute_dtype(x))
    if reason is not None:
        name = vars(block).get("_fc_strict") or f"{type(block).__name__} {tuple(block.conv.weight.shape)}"
        raise FallbackError(
            f"yolo12_fastconv strict mode: {name} with input {tuple(x.shape)} {x.dtype} does not run on a CUDA "
            f"kernel: {reason}"
        )


def kernel_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why tensors of `dtype` on `device` are computed by ATen and not by a kernel of the compiled library, or None."""
    if device.type != "cuda":
        return f"ATen ({device.type})"
    if not ops.LIBRARY.loaded:
        return ops.LIBRARY.reason
    return _device_problem(torch.cuda.current_device() if device.index is None else device.index, dtype)


_device_problems: dict[tuple[int, torch.dtype], str | None] = {}


def _is_served(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the device of `x` was found before to have no problem with `dtype`."""
    if x.is_cuda:
        return not ops.LIBRARY.loaded or _device_problems.get((x.get_device(), dtype), "") is None
    return x.is_cpu


def _device_problem(index: int, dtype: torch.dtype) -> str | None:
    """Why the loaded library cannot serve a CUDA device, or None. Logs a reason the first time it is found."""
    key = (index, dtype)
    if key not in _device_problems:
        supported, reason = _library.device_supported(index, dtype)
        _device_problems[key] = None if supported else reason
        if not supported:
            _compat.get_logger().warning("yolo12_fastconv: blocks compute as stock: %s", reason)
    return _device_problems[key]


# For Dynamo a constant, instead of code to trace: what `torch.compiler.assume_constant_result` sets, which costs the
# import of the whole compiler.
_device_problem._dynamo_marked_constant = True  # type: ignore[attr-defined]
# PyTorch 2.11's Dynamo takes every call of torch's own function for True, whatever it traces for.
_is_exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
