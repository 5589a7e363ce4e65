"""What the tests of blocks and patcher share: models, twins, one training step, errors, a log of dispatched ops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from yolo12_fastconv.patching import patch_modules

NAMESPACE = "yolo12_fastconv"

TINY = {  # every kind of block that there is in a YOLO12, in a model that builds in milliseconds
    "nc": 3,
    "scale": "n",
    "scales": {"n": [1.0, 1.0, 1024]},
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "DWConv", [8, 3, 1]],
        [-1, 1, "C3k2", [16, True]],
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "A2C2f", [64, True, 1]],
    ],
    "head": [[-1, 1, "Classify", ["nc"]]],
}


def build(cfg: str | dict, seed: int = 0, **kwargs: Any) -> nn.Module:
    """The task model of a YAML name or dictionary, with uneven batch norms, in evaluation mode.

    A dictionary is a classifier.
    """
    from ultralytics import YOLO
    from ultralytics.nn.tasks import ClassificationModel

    torch.manual_seed(seed)
    if isinstance(cfg, dict):
        model = ClassificationModel(copy.deepcopy(cfg), verbose=False, **kwargs)
    else:
        model = YOLO(cfg).model
    return uneven(model).eval()


def uneven(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every batch norm affine parameters and statistics unlike those it starts with."""
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: Tensor | None, low: float, high: float) -> None:
        if tensor is not None:
            values = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * (high - low) + low
            tensor.data.copy_(values)

    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            fill(child.weight, 0.6, 1.4)
            fill(child.bias, -0.3, 0.3)
            fill(child.running_mean, -0.3, 0.3)
            fill(child.running_var, 0.5, 2.0)
    return module


def patched_copy(module: nn.Module) -> nn.Module:
    """A copy of `module` with every eligible block patched."""
    twin = copy.deepcopy(module)
    assert patch_modules(twin).patched
    return twin


def tensors(outputs: Any) -> list[Tensor]:
    """All tensors of a nested output, in order."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = outputs.values()
    if isinstance(outputs, Iterable) and not isinstance(outputs, str):
        return [tensor for output in outputs for tensor in tensors(output)]
    return []


def step(module: Callable, *inputs: Tensor, seed: int = 0) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Forward, and backward from a fixed random gradient. Outputs, and gradients by name ("input0" for inputs)."""
    outputs = tensors(module(*inputs))
    generator = torch.Generator().manual_seed(seed)
    loss = sum(
        (output * torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)).sum()
        for output in outputs
        if output.requires_grad
    )
    module.zero_grad()
    for tensor in inputs:
        tensor.grad = None
    loss.backward()
    grads = {name: parameter.grad for name, parameter in module.named_parameters()}
    grads.update({f"input{i}": tensor.grad for i, tensor in enumerate(inputs) if tensor.requires_grad})
    return [output.detach() for output in outputs], grads


def rms(value: Tensor) -> float:
    """Root mean square, 0 for a tensor without elements."""
    return value.double().norm().item() / max(value.numel(), 1) ** 0.5


def error(value: Tensor, truth: Tensor) -> float:
    """Root mean square of the difference, relative to the truth's."""
    truth = truth.double()
    return ((value.double() - truth).norm() / truth.norm().clamp_min(1e-30)).item()


def assert_same(ours: list[Tensor], stock: list[Tensor], tolerance: float) -> None:
    """Shapes, dtypes and layouts are equal, and values up to a relative error."""
    assert len(ours) == len(stock)
    for a, b in zip(ours, stock, strict=True):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)
        if a.device.type == "meta":
            continue
        assert error(a, b) <= tolerance, f"relative error {error(a, b):.2e} of a {tuple(a.shape)} tensor"


def assert_same_grads(ours: dict[str, Any], stock: dict[str, Any], tolerance: float) -> None:
    """The same tensors have gradients, with equal shapes, dtypes and strides, and values up to a relative error.

    The error is relative to the largest gradient of the tensors: some, such as a bias before a batch norm, are zero
    but for rounding.
    """
    assert {n for n, g in ours.items() if g is None} == {n for n, g in stock.items() if g is None}
    scale = max(rms(grad) for grad in stock.values() if grad is not None)
    for name, grad in stock.items():
        if grad is None:
            continue
        mine = ours[name]
        assert (mine.shape, mine.dtype, mine.stride()) == (grad.shape, grad.dtype, grad.stride()), name
        difference = rms(mine.double() - grad.double())
        assert difference <= tolerance * max(rms(grad), 1e-3 * scale), (
            f"{name}: {difference:.2e} of {rms(grad):.2e}"
        )


def assert_same_buffers(ours: nn.Module, stock: nn.Module, tolerance: float) -> None:
    """Buffers are equal up to a relative error, integers exactly."""
    theirs = dict(stock.named_buffers())
    for name, mine in ours.named_buffers():
        if mine.is_floating_point():
            assert error(mine, theirs[name]) <= tolerance, name
        else:
            assert torch.equal(mine, theirs[name]), name


class OpLog(TorchDispatchMode):
    """Records the names of dispatched ops: ``with OpLog() as log: ...; log.fused``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))

    @property
    def fused(self) -> int:
        """Number of calls of the plugin's forward ops."""
        forward = tuple(
            f"{NAMESPACE}.{op}.default" for op in ("conv_bn_act", "conv_bn_act_out", "conv_bn_act_train")
        )
        return sum(name in forward for name in self.names)


def fused_calls(function: Callable, *args: Any) -> int:
    """How many blocks ran as the fused op in ``function(*args)``."""
    with OpLog() as log:
        function(*args)
    return log.fused
