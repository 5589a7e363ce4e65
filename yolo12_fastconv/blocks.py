"""FastConv and FastDWConv: what patched Ultralytics `Conv` and `DWConv` blocks become.

Only the class of a block changes; its parameters, buffers, children and attributes stay the objects they are. At each
call the block looks at its live children and at the input, and decides whether the fused op computes what the stock
block would. Where it does not (see `stock_reason`), the block computes exactly as stock does.
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

__all__ = ["FAST", "STOCK", "FallbackError", "FastConv", "FastDWConv", "stock_reason", "structure_reason"]

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
        if _exporting():
            return self.act(self.bn(self.conv(x)))
        conv: Any = self.conv
        bn: Any = self.bn
        act = self.act
        reason = stock_reason(conv, bn, act, x)
        if reason is not None or "_fc_strict" in self.__dict__ or _config.strict():
            _require_kernel(self, x, reason)
        if reason is not None:
            return act(bn(conv(x)))
        weight, bias = conv.weight, conv.bias
        fused = _FUSED_ACTIVATIONS.get(type(act), "identity")
        mean, var = bn.running_mean, bn.running_var
        if bn.training or mean is None:
            y, batch_mean, batch_var = ops.conv_bn_act_train(
                x, weight, bias, bn.weight, bn.bias, bn.eps, None, conv.stride, conv.padding, conv.dilation,
                conv.groups, fused,
            )  # fmt: skip
            if bn.training and bn.track_running_stats and mean is not None:
                ops.update_running_stats_(
                    mean,
                    var,
                    bn.num_batches_tracked,
                    batch_mean,
                    batch_var,
                    bn.momentum,
                    y.numel() // y.shape[1],
                )
        else:
            y = ops.conv_bn_act(
                x, weight, bias, ops.BatchNormState(bn.weight, bn.bias, mean, var, bn.eps), None, conv.stride,
                conv.padding, conv.dilation, conv.groups, fused,
            )  # fmt: skip
        return y if type(act) in _FUSED_ACTIVATIONS else act(y)

    # The name under which Ultralytics' `fuse()` installs it, and under which it is pickled.
    def forward_fuse(self, x: Tensor) -> Tensor:
        """``act(conv(x))``: the forward after Ultralytics' ``fuse()``, which folds the batch norm into `conv`."""
        if _exporting():
            return self.act(self.conv(x))
        conv: Any = self.conv
        act = self.act
        reason = stock_reason(conv, None, act, x)
        if reason is not None or "_fc_strict" in self.__dict__ or _config.strict():
            _require_kernel(self, x, reason)
        if reason is not None:
            return act(conv(x))
        y = ops.conv_bn_act(
            x, conv.weight, conv.bias, None, None, conv.stride, conv.padding, conv.dilation, conv.groups,
            _FUSED_ACTIVATIONS.get(type(act), "identity"),
        )  # fmt: skip
        return y if type(act) in _FUSED_ACTIVATIONS else act(y)


class FastDWConv(FastConv, DWConv):
    """An Ultralytics `DWConv` block that runs as one fused op; see `FastConv`."""

    _stock = DWConv


FAST: dict[type[nn.Module], type[nn.Module]] = {Conv: FastConv, DWConv: FastDWConv}
"""Stock class to fast class. Exact types: other subclasses of `Conv` compute something else."""

STOCK: dict[type[nn.Module], type[nn.Module]] = {fast: stock for stock, fast in FAST.items()}
"""Fast class to stock class."""


def _exporting() -> bool:
    # Traced and exported graphs shall hold standard operators. ONNX export is one or the other of the two.
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def structure_reason(conv: Any, bn: Any, act: Any) -> str | None:
    """Why a block with these children cannot run as the fused op, whatever its input; None if it can.

    `bn` is None for a block whose batch norm was folded into `conv`.
    """
    if type(conv) is not nn.Conv2d:
        return f"conv is {_class_name(conv)}, not exactly torch.nn.Conv2d"
    if bn is not None and type(bn) is not nn.BatchNorm2d:
        return f"bn is {_class_name(bn)}, not exactly torch.nn.BatchNorm2d"
    for name, child in (("conv", conv), ("bn", bn), ("act", act)):
        if child is None:
            continue
        if (
            child._forward_hooks
            or child._forward_pre_hooks
            or child._backward_hooks
            or child._backward_pre_hooks
        ):
            return f"{name} has hooks"
        if "forward" in child.__dict__:
            return f"{name} has a forward of its own"
    if conv.padding_mode != "zeros":
        return f"padding_mode is {conv.padding_mode!r}"
    if type(conv.padding) is str:
        return f"padding is {conv.padding!r}"
    if bn is not None:
        if (bn.running_mean is None) != (bn.running_var is None):
            return "bn has only one of running_mean and running_var"
        if bn.running_mean is None and bn.num_batches_tracked is not None:
            return "bn counts batches without running statistics"
    return None


def stock_reason(conv: Any, bn: Any, act: Any, x: Tensor) -> str | None:
    """Why a block with these children must compute `x` as stock does; None if the fused op may.

    Besides `structure_reason`: everything for which stock raises an error of its own, so that the error stays stock's.
    """
    if _config.disabled():
        return f"{_config.DISABLE} is set"
    if _has_any_global_hook():
        return "hooks for all modules are registered"
    reason = structure_reason(conv, bn, act)
    if reason is not None:
        return reason
    if type(x) is not Tensor and type(x) is not Parameter:
        return f"the input is a {type(x).__name__}, not a plain tensor"
    weight = conv.weight
    if type(weight) is not Parameter and type(weight) is not Tensor:
        return f"the weight is a {type(weight).__name__}, not a plain tensor"
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return "a function transform or forward-mode differentiation is active"
    if not (x.is_cuda or x.is_cpu):
        return f"the input is on {x.device}"
    if x.dim() != 4 or x.layout is not torch.strided:
        return "the input is not a dense (N, C, H, W) tensor"
    if x.numel() == 0:
        return "the input is empty"
    return _dtype_reason(conv, bn, x) or _device_reason(conv, bn, x) or _single_value_reason(conv, bn, x)


def _dtype_reason(conv: Any, bn: Any, x: Tensor) -> str | None:
    weight, bias = conv.weight, conv.bias
    if x.dtype not in _DTYPES:
        return f"the input is {x.dtype}"
    for tensor in (weight, bias):
        if tensor is None or tensor.dtype is x.dtype:
            continue
        # Autocast reconciles all but float64.
        if (
            not torch.is_autocast_enabled(x.device.type)
            or torch.float64 in (x.dtype, tensor.dtype)
            or tensor.dtype not in _DTYPES
        ):
            return f"the input is {x.dtype}, conv holds {tensor.dtype}"
    if bn is not None:
        # Batch norm takes vectors of its input's dtype, or float32 ones beside half input.
        dtype = ops.compute_dtype(x)
        for vector in (bn.weight, bn.bias, bn.running_mean, bn.running_var):
            if vector is None or vector.dtype is dtype:
                continue
            if vector.dtype is not torch.float32 or dtype is torch.float64:
                return f"bn holds {vector.dtype}, its input is {dtype}"
    return None


def _device_reason(conv: Any, bn: Any, x: Tensor) -> str | None:
    device = x.device
    if conv.weight.device != device or (conv.bias is not None and conv.bias.device != device):
        return f"the input is on {device}, the weight on {conv.weight.device}"
    if bn is not None:
        for vector in (bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.num_batches_tracked):
            if vector is not None and vector.device != device:
                return f"the input is on {device}, bn on {vector.device}"
    return None


def _single_value_reason(conv: Any, bn: Any, x: Tensor) -> str | None:
    # Of one value per channel there are no batch statistics: stock raises ValueError.
    if bn is None or x.shape[0] != 1 or not (bn.training or bn.running_mean is None):
        return None
    for axis in (0, 1):
        size = (
            x.shape[2 + axis]
            + 2 * conv.padding[axis]
            - conv.dilation[axis] * (conv.weight.shape[2 + axis] - 1)
        )
        if (size - 1) // conv.stride[axis] != 0:
            return None
    return "batch statistics of one value per channel"


def _require_kernel(block: FastConv, x: Tensor, reason: str | None) -> None:
    """Raise FallbackError if strict mode is on and no CUDA kernel serves this call; `reason` is `stock_reason`'s."""
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
    index = torch.cuda.current_device() if device.index is None else device.index
    supported, reason = _library.device_supported(index, dtype)
    return None if supported else reason


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
