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
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        conv, bn, act = _child(self, "conv"), _child(self, "bn"), _child(self, "act")
        if _exporting():
            return act(bn(conv(x)))
        reason = structure_reason(conv, bn, act)
        if reason is None:
            weight, bias = _parameter(conv, "weight"), _parameter(conv, "bias")
            gamma, beta = _parameter(bn, "weight"), _parameter(bn, "bias")
            mean, var = _buffer(bn, "running_mean"), _buffer(bn, "running_var")
            counter = _buffer(bn, "num_batches_tracked")
            batch_statistics = bn.training or (mean is None and var is None)
            reason = (
                _input_reason(x, weight, bias)
                or _bn_reason(x, gamma, beta, mean, var, counter)
                or (_single_value_reason(conv, weight, x) if batch_statistics and x.shape[0] == 1 else None)
            )
        if "_fc_strict" in self.__dict__ or _config.strict():
            _require_kernel(self, x, reason)
        if reason is not None:
            return act(bn(conv(x)))
        fused = _FUSED_ACTIVATIONS.get(type(act))
        if batch_statistics:
            moves = bn.training and bn.track_running_stats and mean is not None
            y, _, _ = ops.conv_bn_act_train(
                x, weight, bias, gamma, beta, bn.eps, None, conv.stride, conv.padding, conv.dilation, conv.groups,
                fused or "identity", ops.RunningStats(mean, var, counter, bn.momentum) if moves else None,
            )  # fmt: skip
        else:
            y = ops.conv_bn_act(
                x, weight, bias, ops.BatchNormState(gamma, beta, mean, var, bn.eps), None, conv.stride, conv.padding,
                conv.dilation, conv.groups, fused or "identity",
            )  # fmt: skip
        return y if fused else act(y)

    # The name under which Ultralytics' `fuse()` installs it, and under which it is pickled.
    def forward_fuse(self, x: Tensor) -> Tensor:
        """``act(conv(x))``: the forward after Ultralytics' ``fuse()``, which folds the batch norm into `conv`."""
        conv, act = _child(self, "conv"), _child(self, "act")
        if _exporting():
            return act(conv(x))
        reason = structure_reason(conv, None, act)
        if reason is None:
            weight, bias = _parameter(conv, "weight"), _parameter(conv, "bias")
            reason = _input_reason(x, weight, bias)
        if "_fc_strict" in self.__dict__ or _config.strict():
            _require_kernel(self, x, reason)
        if reason is not None:
            return act(conv(x))
        fused = _FUSED_ACTIVATIONS.get(type(act))
        y = ops.conv_bn_act(
            x, weight, bias, None, None, conv.stride, conv.padding, conv.dilation, conv.groups, fused or "identity"
        )  # fmt: skip
        return y if fused else act(y)


class FastDWConv(FastConv, DWConv):
    """An Ultralytics `DWConv` block that runs as one fused op; see `FastConv`."""

    _stock = DWConv


FAST: dict[type[nn.Module], type[nn.Module]] = {Conv: FastConv, DWConv: FastDWConv}
"""Stock class to fast class. Exact types: other subclasses of `Conv` compute something else."""

STOCK: dict[type[nn.Module], type[nn.Module]] = {fast: stock for stock, fast in FAST.items()}
"""Fast class to stock class."""


def _exporting() -> bool:
    # Traced and exported graphs shall hold standard operators. An ONNX export is one or the other.
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


# The three functions below are `getattr` without its search through parameters, buffers and children, which would take
# more time than all other checks. A child may also be a plain attribute: DataParallel and FSDP replace parameters so.


def _child(module: nn.Module, name: str) -> Any:
    table = module._modules
    return table[name] if name in table else getattr(module, name)


def _parameter(module: nn.Module, name: str) -> Any:
    table = module._parameters
    return table[name] if name in table else getattr(module, name)


def _buffer(module: nn.Module, name: str) -> Any:
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
    if _is_watched(conv):
        return "conv has hooks or a forward of its own"
    if bn is not None and _is_watched(bn):
        return "bn has hooks or a forward of its own"
    if _is_watched(act):
        return "act has hooks or a forward of its own"
    if conv.padding_mode != "zeros":
        return f"padding_mode is {conv.padding_mode!r}"
    if type(conv.padding) is not tuple:
        return f"padding is {conv.padding!r}"
    if bn is not None:
        mean, var = _buffer(bn, "running_mean"), _buffer(bn, "running_var")
        if (mean is None) is not (var is None):
            return "bn has only one of running_mean and running_var"
        if mean is None and _buffer(bn, "num_batches_tracked") is not None:
            return "bn counts batches without running statistics"
    return None


def _is_watched(child: nn.Module) -> bool:
    return bool(
        child._forward_hooks
        or child._forward_pre_hooks
        or child._backward_hooks
        or child._backward_pre_hooks
        or "forward" in child.__dict__
    )


# Besides what the op cannot do, the reasons below are those for which stock raises an error: so that it stays stock's.


def _input_reason(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    if type(x) is not Tensor and type(x) is not Parameter:
        return f"the input is a {type(x).__name__}, not a plain tensor"
    if type(weight) is not Parameter and type(weight) is not Tensor:
        return f"the weight is a {type(weight).__name__}, not a plain tensor"
    # A compiler traces through transforms by itself, and could not trace these questions.
    if not torch.compiler.is_compiling() and (
        torch._C._functorch.get_dynamic_layer_stack_depth() > 0 or forward_ad._current_level >= 0
    ):
        return "a function transform or forward-mode differentiation is active"
    if x.is_cuda:
        problem = _device_problem(x.device.index, ops.compute_dtype(x)) if ops.LIBRARY.loaded else None
        if problem is not None:
            return problem
    elif x.device.type != "cpu":
        return f"the input is on {x.device}"
    if x.dim() != 4 or x.layout is not torch.strided:
        return "the input is not a dense (N, C, H, W) tensor"
    if x.numel() == 0:
        return "the input is empty"
    dtype = x.dtype
    if dtype not in _DTYPES:
        return f"the input is {dtype}"
    for tensor in (weight, bias):
        if tensor is None:
            continue
        if tensor.device != x.device:
            return f"the input is on {x.device}, conv on {tensor.device}"
        # Autocast reconciles all but float64.
        if tensor.dtype is not dtype and (
            not torch.is_autocast_enabled(x.device.type)
            or torch.float64 in (dtype, tensor.dtype)
            or tensor.dtype not in _DTYPES
        ):
            return f"the input is {dtype}, conv holds {tensor.dtype}"
    return None


def _bn_reason(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    counter: Tensor | None,
) -> str | None:
    device, dtype = x.device, ops.compute_dtype(x)
    for vector in (gamma, beta, mean, var):
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
    for axis in (0, 1):
        spare = (
            x.shape[2 + axis]
            + 2 * conv.padding[axis]
            - conv.dilation[axis] * (weight.shape[2 + axis] - 1)
            - 1
        )
        if spare // conv.stride[axis] != 0:
            return None
    return "batch statistics of one value per channel"


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


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
