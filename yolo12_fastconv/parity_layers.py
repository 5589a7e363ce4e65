"""The comparison of single blocks for `check_parity`: stock block, our block and the float64 truth on one input."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from yolo12_fastconv import _config, blocks, error_rule, ops, reference
from yolo12_fastconv.parity_report import ParityReport, ParityRow

from ultralytics.nn.modules.head import Detect  # isort: skip  (blocks has checked that it can be imported)

__all__ = ["LayerChecker", "Progress", "Settings"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MODES = ("eval", "train")
_GRADIENTS = {
    "conv.weight": "grad_weight",
    "conv.bias": "grad_bias",
    "bn.weight": "grad_bn_weight",
    "bn.bias": "grad_bn_bias",
}


@dataclass(frozen=True)
class Settings:
    """How everything of one check is run: on both sides alike."""

    dtype: torch.dtype
    mode: str
    device: torch.device
    autocast: bool
    allow_tf32: bool
    seed: int

    @classmethod
    def checked(
        cls,
        dtype: torch.dtype,
        mode: str,
        device: torch.device,
        autocast: bool | None,
        allow_tf32: bool,
        seed: int,
    ) -> Settings:
        """Arguments of `check_parity`, completed. Raises ValueError for one out of range."""
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {device}, but torch sees no CUDA GPU; use device=cpu")
        if dtype is torch.float32:
            autocast = False
        elif autocast is None:
            autocast = mode == "train"
        if mode == "train" and dtype is not torch.float32 and not autocast:
            raise ValueError(
                "half precision trains under autocast with float32 parameters: leave autocast=None"
            )
        return cls(dtype, mode, device, autocast, allow_tf32, seed)

    @property
    def precision(self) -> str:
        return error_rule.precision_name(self.dtype, self.allow_tf32, self.device)

    @property
    def training(self) -> bool:
        return self.mode == "train"

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast as asked for, without its cache: weights cast outside of autograd must not reach a run inside."""
        return torch.autocast(
            self.device.type,
            dtype=self.dtype if self.autocast else None,
            enabled=self.autocast,
            cache_enabled=False,
        )


class Progress:
    """Counts layers on one line of stderr."""

    def __init__(self, total: int, shown: bool) -> None:
        self.total, self.shown, self.done = total, shown, 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def step(self, name: str) -> None:
        self.done += 1
        if self.shown:
            sys.stderr.write(f"\r\033[Kparity: layer {self.done} of {self.total}: {name}")
            sys.stderr.flush()


class LayerChecker:
    """Runs the stock model and, before each of its blocks, compares ours with it on the block's input.

    Nothing is kept of a layer but its row: large models are checked in little more memory than they run in.
    """

    def __init__(
        self,
        fast: dict[str, Any],
        larger: dict[str, tuple[Any, Any]],
        settings: Settings,
        report: ParityReport,
        progress: Progress,
    ) -> None:
        """`fast`: our `Conv` blocks by name. `larger`: our larger blocks, each with a stock twin that no model runs."""
        self.fast, self.larger = fast, larger
        self.settings, self.report, self.progress = settings, report, progress
        self.calls: dict[str, int] = {}
        self.buffers: dict[str, dict[str, Tensor]] = {}

    def run(self, stock: nn.Module, x: Tensor) -> Any:
        """Outputs of the stock model for `x`; the rows go to the report."""
        modules = dict(stock.named_modules())
        hooks = {name: self._hook(name) for name in self.fast}
        hooks |= {name: self._larger_hook(name) for name in self.larger}
        handles = [modules[name].register_forward_pre_hook(hook) for name, hook in hooks.items()]
        try:
            torch.manual_seed(self.settings.seed)
            with self.settings.running():
                return stock(x)
        finally:
            for handle in handles:
                handle.remove()

    def _step(self, name: str) -> str:
        self.calls[name] = self.calls.get(name, 0) + 1
        self.progress.step(name)
        return name if self.calls[name] == 1 else f"{name} (call {self.calls[name]})"

    def _larger_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            layer = self._step(name)
            with torch.autocast(self.settings.device.type, enabled=False):
                self._check_larger(layer, *self.larger[name], _mapped(args[0], Tensor.detach))

        return hook

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(stock_block: nn.Module, args: tuple[Any, ...]) -> None:
            layer = self._step(name)
            # The stock model's own run moves its buffers; a block that runs again starts where ours does.
            if name not in self.buffers:
                self.buffers[name] = {key: value.clone() for key, value in stock_block.named_buffers()}
            _restore(stock_block, self.buffers[name])
            with torch.autocast(self.settings.device.type, enabled=False):
                self._check(layer, self.fast[name], stock_block, args[0].detach())

        return hook

    def _check(self, layer: str, block: Any, stock_block: Any, x: Tensor) -> None:
        settings = self.settings
        before = x.clone()
        # `forward`, not a call: the block's own hook is this method.
        stock = _Side.of(stock_block, stock_block.forward, x, settings, None)
        truth = _truth(stock_block, x, stock, settings)
        tf32 = settings.precision == "tf32"
        granted = _truth(stock_block, x, stock, settings, tf32=True).values if tf32 else {}
        geometry = _geometry(block.conv, x)

        def floor(quantity: str) -> float:
            return _floor(quantity, block.conv, stock.values["y"], settings)

        comparison = _SideBySide(self.report.rows, layer, geometry, stock, truth, granted, floor)
        try:
            with _OpLog() as log:
                ours = _Side.of(block, block, x, settings, stock.grad_y)
            comparison.kernel = _kernel(block, x, settings) if log.used else _stock_reason(block)
        except Exception as error:
            comparison.raised(error)
            return
        comparison.compare(ours)
        if not _same(x, before):
            comparison.broken("input", x.shape, "the call wrote to its input")
            x.copy_(before)

    def _check_larger(self, layer: str, block: Any, stock_block: Any, x: Any) -> None:
        # `x`: a tensor, or the list of them that heads and concats take.
        settings = self.settings
        before = _mapped(x, Tensor.clone)
        stock = _Side.of(stock_block, stock_block.forward, x, settings, None)
        truth = _exact_side(stock_block, x, stock, settings)
        tf32 = settings.precision == "tf32"
        granted = _exact_side(stock_block, x, stock, settings, tf32=True).values if tf32 else {}
        y = next(iter(stock.values.values()))
        convolutions = max(1, sum(isinstance(module, nn.Conv2d) for module in block.modules()))
        sizes = [f"{t.shape[1]}→{y.shape[1]}, {t.shape[2]}×{t.shape[3]}" for _, t in _inputs(x)]
        geometry = f"{type(stock_block).__name__}, {' and '.join(sizes)}"

        def floor(quantity: str) -> float:
            known = "grad_weight"
            if quantity.startswith(("y", "grad_x")):
                known = "grad_x" if quantity.startswith("grad_x") else "output"
            if quantity.endswith(("running_mean", "running_var")):
                known = quantity.rpartition(".")[2]
            # Each convolution adds an error of its own and passes on those before it, as in the whole model.
            pixels = y.numel() // max(y.shape[1], 1)
            return error_rule.tolerances().floor(known, settings.precision, pixels) * convolutions**0.5

        comparison = _SideBySide(
            self.report.blocks,
            layer,
            geometry,
            stock,
            _Truth(truth.values, {}),
            granted,
            floor,
            judge_max=False,
        )
        comparison.kernel = block.fuses
        try:
            if not block.fused_now():
                problem = block.structure_problem(block) or _config.DISABLE
                comparison.kernel = f"stock: {problem}"
            # A result that somebody looks at is stock's, to the dtype; an upsampling narrows what only blocks read.
            with block.register_forward_hook(lambda *_: None):
                ours = _Side.of(block, block, x, settings, stock.grad_y)
        except Exception as error:
            comparison.raised(error)
            return
        comparison.compare(ours)
        for (_, tensor), (_, kept) in zip(_inputs(x), _inputs(before), strict=True):
            if not _same(tensor, kept):
                comparison.broken("input", tensor.shape, "the call wrote to its input")
                tensor.copy_(kept)


@dataclass
class _SideBySide:
    """Turns what the sides of one block made into rows of the report."""

    rows: list[ParityRow]
    layer: str
    geometry: str
    stock: _Side
    truth: _Truth
    granted: dict[str, Tensor]
    floor: Callable[[str], float]
    judge_max: bool = True
    """False for what many roundings went through, whose largest error is one draw from a long-tailed distribution."""
    kernel: str = ""

    def add(self, quantity: str, shape: Sequence[int], comparison: error_rule.Comparison) -> None:
        self.rows.append(
            ParityRow(self.layer, quantity, tuple(shape), self.geometry, self.kernel, comparison)
        )

    def broken(self, quantity: str, shape: Sequence[int], problem: str) -> None:
        self.add(quantity, shape, error_rule.Comparison.impossible(problem))

    def raised(self, error: Exception) -> None:
        # Whatever our side raises is its difference from stock, which did not.
        problem = f"raises {type(error).__name__}: {error}".splitlines()[0]
        quantity, value = next(iter(self.stock.values.items()))
        self.broken(quantity, value.shape, problem)

    def compare(self, ours: _Side) -> None:
        for quantity, expected in self.stock.values.items():
            value, exact = ours.values.get(quantity), self.truth.values.get(quantity)
            if expected is None or value is None:
                if value is not expected:
                    self.broken(quantity, (), f"is {_presence(value)}, stock's is {_presence(expected)}")
            elif not expected.is_floating_point():
                same = torch.equal(value, expected)
                problem = "" if same else f"is {_short(value)}, stock's {_short(expected)}"
                exactly = (0.0, 0.0)
                self.add(quantity, expected.shape, error_rule.Comparison(exactly, exactly, exactly, problem))
            else:
                exact = expected.double() if exact is None else exact
                comparison = error_rule.compare(
                    value,
                    expected,
                    exact,
                    self.floor(quantity),
                    scale=self.truth.scales.get(quantity, 0.0),
                    granted=self.granted.get(quantity),
                )
                if not self.judge_max:
                    limit = (float("inf"), comparison.limit[1])
                    comparison = error_rule.Comparison(
                        comparison.ours, comparison.stock, limit, comparison.problem
                    )
                self.add(quantity, expected.shape, comparison)
        for quantity in ours.values.keys() - self.stock.values.keys():
            self.broken(quantity, (), "stock has no such tensor")
        if ours.changed:
            self.broken("state", (), f"the call changed {', '.join(ours.changed)}")


def _exact_side(
    block: nn.Module, x: Tensor, stock: _Side, settings: Settings, *, tf32: bool = False
) -> _Side:
    """What a larger block's stock forward makes in float64, or with every convolution's operands rounded to TF32."""
    exact = copy.deepcopy(block).double()
    settings = replace(settings, autocast=False)
    grad_y = None if stock.grad_y is None else [grad.double() for grad in stock.grad_y]
    if tf32:
        for conv in exact.modules():
            if isinstance(conv, nn.Conv2d):
                conv.weight.data = error_rule.round_tf32(conv.weight.data).double()
                conv.register_forward_pre_hook(_round_input)
    return _Side.of(exact, exact.forward, _mapped(x, Tensor.double), settings, grad_y)


def _round_input(_: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    x = args[0]
    return (
        x + (error_rule.round_tf32(x).double() - x).detach()
    )  # the gradient passes as if nothing was rounded


class _OpLog(TorchDispatchMode):
    """Notes whether an op of this package runs: a block may decide at the call to compute as stock."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used |= func.namespace == ops.NAMESPACE
        return func(*args, **(kwargs or {}))


@dataclass
class _Side:
    """What one block made of one input."""

    values: dict[str, Any]
    """y, or each tensor of it; in training mode also gradients (None: there is none) and buffers after the call."""
    grad_y: list[Tensor] | None
    """Gradients of the tensors of y."""
    changed: list[str]
    """Parameters, and in evaluation mode buffers, that the call changed."""

    @classmethod
    def of(
        cls,
        block: nn.Module,
        forward: Callable[[Any], Any],
        x: Any,
        settings: Settings,
        grad_y: list[Tensor] | None,
    ) -> _Side:
        """Runs `forward` of `block`, and puts the block's state back."""
        state = _tensors(block)
        values: dict[str, Any] = {}
        try:
            if not settings.training:
                with settings.running():
                    values |= flatten(forward(x), block, "y")
            else:
                leaf = _mapped(x, lambda tensor: tensor.detach().requires_grad_())
                with torch.enable_grad():
                    with settings.running():
                        outputs = dict(flatten(forward(leaf), block, "y"))
                    if grad_y is None:
                        first = next(iter(outputs.values()))
                        generator = torch.Generator(first.device).manual_seed(settings.seed)
                        grad_y = [torch.empty_like(y).normal_(generator=generator) for y in outputs.values()]
                    wanted = {**dict(_inputs(leaf)), **dict(block.named_parameters())}
                    grads = torch.autograd.grad(
                        list(outputs.values()), list(wanted.values()), grad_y, allow_unused=True
                    )
                values |= {place: y.detach() for place, y in outputs.items()}
                for (name, tensor), grad in zip(wanted.items(), grads, strict=True):
                    known = name if not isinstance(tensor, nn.Parameter) else f"grad[{name}]"
                    values[_GRADIENTS.get(name, known)] = grad
                for name, buffer in block.named_buffers():
                    values[name.removeprefix("bn.")] = buffer.clone()
            frozen = set(state) - (
                {name for name, _ in block.named_buffers()} if settings.training else set()
            )
            after = {**dict(block.named_parameters()), **dict(block.named_buffers())}
            changed = [name for name in state if name in frozen and not _same(after[name], state[name])]
        finally:
            _restore(block, state)
        return cls(values, grad_y, changed)


@dataclass
class _Truth:
    values: dict[str, Tensor]
    scales: dict[str, float]
    """Natural sizes of quantities that may be zero but for rounding, see `error_rule.compare`."""


def _truth(block: Any, x: Tensor, stock: _Side, settings: Settings, *, tf32: bool = False) -> _Truth:
    """The block's formula in float64 on the tensors that the convolution gets, or on these rounded to TF32.

    A block that runs as stock on both sides for its structure (another padding mode, say) has no formula here: where
    a quantity is missing, stock's own value is taken for the truth.
    """
    conv: Any = block.conv
    bn: Any = block._modules.get("bn")
    act = block.act
    if not _has_formula(conv, bn):
        return _Truth({}, {})

    def exact(tensor: Tensor | None, cast: bool = False) -> Any:
        if tensor is None:
            return None
        rounded = tensor.detach().to(settings.dtype) if cast and settings.autocast else tensor.detach()
        if cast and tf32:
            rounded = error_rule.round_tf32(rounded)
        return rounded.double().requires_grad_(settings.training)

    leaf, weight = exact(x, True), exact(conv.weight, True)
    bias = exact(conv.bias, settings.autocast)
    gamma, beta = (exact(bn.weight), exact(bn.bias)) if bn is not None else (None, None)
    act64 = copy.deepcopy(act).double()
    geometry: Any = (conv.stride, conv.padding, conv.dilation, conv.groups, reference.IDENTITY, torch.float64)
    batch_statistics = bn is not None and (bn.training or bn.running_mean is None)
    z: Any = None
    mean: Any = None
    var: Any = None
    with torch.set_grad_enabled(settings.training):
        if batch_statistics:
            u, z, mean, var = reference.conv_bn_act_train(
                leaf, weight, bias, gamma, beta, bn.eps, None, *geometry
            )
        else:
            mean64 = None if bn is None else bn.running_mean.double()
            var64 = None if bn is None else bn.running_var.double()
            eps = 0.0 if bn is None else bn.eps
            u = reference.conv_bn_act(leaf, weight, bias, gamma, beta, mean64, var64, eps, None, *geometry)
        y = reference.activate(u, reference.SILU) if type(act) is nn.SiLU else act64(u)
    values, scales = {"y": y.detach()}, {}
    if settings.training and stock.grad_y is not None:
        leaves = {"grad_x": leaf, "grad_weight": weight, "grad_bias": bias}
        leaves |= {"grad_bn_weight": gamma, "grad_bn_bias": beta}
        leaves |= {f"grad[act.{name}]": parameter for name, parameter in act64.named_parameters()}
        if z is not None:
            leaves["z"] = z
        wanted = {name: tensor for name, tensor in leaves.items() if tensor is not None}
        grads = torch.autograd.grad(y, list(wanted.values()), stock.grad_y[0].double(), allow_unused=True)
        values |= {name: g for name, g in zip(wanted, grads, strict=True) if g is not None}
        if z is not None:
            # The batch norm takes out every constant: the gradient of a bias before it is zero but for rounding.
            scales["grad_bias"] = float(values.pop("z").abs().sum((0, 2, 3)).max())
    if bn is not None and bn.training and bn.track_running_stats and bn.running_mean is not None:
        momentum = bn.momentum
        if momentum is None:
            momentum = 1.0 / (int(bn.num_batches_tracked) + 1)
        count = y.numel() // y.shape[1]
        for name, old, new in (
            ("running_mean", bn.running_mean, mean),
            ("running_var", bn.running_var, var * (count / (count - 1))),
        ):
            values[name] = ((1 - momentum) * old.double() + momentum * new).detach()
        # A mean near zero is as exact as the values that it is the mean of.
        scales["running_mean"] = momentum * float(var.max()) ** 0.5
    return _Truth(values, scales)


def _has_formula(conv: Any, bn: Any) -> bool:
    plain = type(conv) is nn.Conv2d and type(conv.weight) is nn.Parameter
    padded = plain and conv.padding_mode == "zeros" and type(conv.padding) is tuple
    return padded and (bn is None or type(bn) is nn.BatchNorm2d)


def flatten(outputs: Any, head: Any, place: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Floating tensors of nested outputs, with their places. Boxes and scores of a decoded prediction are apart: pixels
    would hide what happens to scores."""
    if isinstance(outputs, Tensor):
        inside = place[len(re.split(r"[.[]", place, maxsplit=1)[0]) :]
        decoded = isinstance(head, Detect) and not head.training and inside in ("", "[0]", "[0][0]")
        if decoded and outputs.dim() == 3 and not getattr(head, "end2end", False):
            for part, rows in zip(
                ("boxes", "scores", "extras"), outputs.tensor_split((4, 4 + head.nc), 1), strict=True
            ):
                if rows.numel():
                    yield f"{place}.{part}", rows
        elif outputs.is_floating_point():
            yield place, outputs
    elif isinstance(outputs, dict):
        for key, value in outputs.items():
            yield from flatten(value, head, f"{place}.{key}")
    elif isinstance(outputs, (tuple, list)):
        for index, value in enumerate(outputs):
            yield from flatten(value, head, f"{place}[{index}]")


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """`value`, a tensor or tensors in lists and tuples, with `function` applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    return [_mapped(part, function) for part in value]


def _inputs(x: Any) -> list[tuple[str, Tensor]]:
    """The tensors of a block's input, each with the name of its gradient."""
    return [(place.replace("x", "grad_x", 1), tensor) for place, tensor in flatten(x, None, "x")]


def _tensors(block: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _restore(block: nn.Module, state: dict[str, Tensor]) -> None:
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    for name, saved in state.items():
        tensors[name].data.copy_(saved)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN where NaN is."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _floor(quantity: str, conv: Any, y: Tensor, settings: Settings) -> float:
    k, c, r, s = (
        conv.weight.shape
    )  # not the convolution's attributes, which a pruned model may leave as they were
    pixels = y.numel() // max(y.shape[1], 1)
    terms = {"y": c * r * s, "grad_x": k // conv.groups * r * s}
    known = quantity if quantity in error_rule.tolerances().quantities else "grad_weight"
    return error_rule.tolerances().floor(known, settings.precision, terms.get(quantity, pixels))


def _stock_reason(block: Any) -> str:
    reason = blocks.structure_reason(block.conv, block._modules.get("bn"), block.act)
    return f"stock: {reason or 'the block does not take this input, or has another forward'}"


def _kernel(block: Any, x: Tensor, settings: Settings) -> str:
    """What serves the fused op: the tile menu's choice, or why it is ATen."""
    dtype, conv = settings.dtype, block.conv
    reason = blocks.kernel_reason(x.device, dtype)
    if reason is not None:
        return reason
    major, minor = torch.cuda.get_device_capability(x.device)
    return ops.describe_kernel(
        x.shape, conv.weight.shape, conv.stride, conv.padding, conv.dilation, conv.groups, dtype,
        tf32=ops.allow_tf32(x.device, dtype), capability=10 * major + minor,
    )  # fmt: skip


def _geometry(conv: Any, x: Tensor) -> str:
    def pair(letter: str, values: Any, usual: int) -> str:
        if values == (usual, usual):
            return ""
        equal = isinstance(values, tuple) and len(set(values)) == 1
        return f" {letter}{values[0] if equal else 'x'.join(map(str, values))}"

    k, c, *kernel = conv.weight.shape
    details = (
        pair("s", conv.stride, 1)
        + pair("d", conv.dilation, 1)
        + (f" g{conv.groups}" if conv.groups > 1 else "")
    )
    return f"{'x'.join(map(str, kernel))}{details}, {c * conv.groups}→{k}, {x.shape[2]}×{x.shape[3]}"


def _presence(value: Tensor | None) -> str:
    return "none" if value is None else "there"


def _short(value: Tensor) -> str:
    return str(value.item()) if value.numel() == 1 else f"different in {value.numel()} values"
