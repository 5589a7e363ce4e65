"""Find the Ultralytics blocks of a model, swap their classes, report on them, and undo it.

A swap is ``block.__class__ = FastConv``: the block stays the same object with the same parameters, buffers, hooks,
names, tags (`i`, `f`, `type`, `np`), flags and attributes, and nothing of Ultralytics or PyTorch is edited.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from yolo12_fastconv import _compat, _config, _recompute, blocks, graphs, neck, ops, registry
from yolo12_fastconv.blocks import FAST, STOCK, Conv, is_fused_forward
from yolo12_fastconv.registry import FUSED, UNFUSED

# blocks has checked that Ultralytics can be imported.
from ultralytics.engine.model import Model  # isort: skip
from ultralytics.nn.modules.block import AAttn  # isort: skip

__all__ = [
    "BlockRow",
    "LayerRow",
    "PatchError",
    "PatchReport",
    "PatchSummary",
    "patch_model",
    "patch_modules",
    "patch_report",
    "unpatch_model",
    "unpatch_modules",
]

Selector = str | Iterable[str] | Callable[[str, nn.Module], bool] | None
AnyModule = TypeVar("AnyModule", bound=nn.Module)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NOMINAL_MAP = 80
"""Height and width of the input for which `patch_report` asks the tile menu: the report has no input to look at."""


class PatchError(RuntimeError):
    """A model cannot be patched; the message says why and what helps."""


@dataclass
class PatchSummary:
    """What `patch_modules` did, by names of blocks."""

    swapped: list[str] = field(default_factory=list)
    """`Conv` blocks that this call swapped."""
    already: list[str] = field(default_factory=list)
    """`Conv` blocks that were patched before."""
    kept: dict[str, str] = field(default_factory=dict)
    """`Conv` blocks that stay stock, each with the reason."""
    fused: list[str] = field(default_factory=list)
    """Larger blocks (`registry.FUSED`) that this call swapped."""
    already_fused: list[str] = field(default_factory=list)
    """Larger blocks that were patched before."""
    unfused: dict[str, str] = field(default_factory=dict)
    """Larger blocks that stay stock, each with the reason."""
    strict: list[str] = field(default_factory=list)
    """Patched blocks that this call set to raise instead of falling back."""

    @property
    def patched(self) -> int:
        """Number of patched `Conv` blocks after the call."""
        return len(self.swapped) + len(self.already)

    @property
    def total(self) -> int:
        """Number of `Conv` blocks, subclasses included."""
        return self.patched + len(self.kept)

    @property
    def patched_fused(self) -> int:
        """Number of patched larger blocks after the call."""
        return len(self.fused) + len(self.already_fused)

    def reasons(self) -> str:
        """Each distinct reason for keeping a `Conv` block, with its count and first block."""
        return _reasons(self.kept)

    def __str__(self) -> str:
        text = f"{self.patched} of {self.total} Conv blocks patched"
        if self.already:
            text += f", {len(self.swapped)} of them new"
        larger = self.patched_fused + len(self.unfused)
        if larger:
            text += f", {self.patched_fused} of {larger} larger blocks fused"
        reasons = "; ".join(filter(None, (_reasons(self.kept), _reasons(self.unfused))))
        return f"{text}; {reasons}" if reasons else text


def _reasons(kept: dict[str, str]) -> str:
    counts = Counter(kept.values())
    first = {reason: name for name, reason in reversed(kept.items())}
    return "; ".join(f"{count} kept: {reason} ({first[reason]})" for reason, count in counts.items())


def patch_model(
    model: AnyModule,
    *,
    include: Selector = None,
    exclude: Selector = None,
    attention: bool = True,
    cuda_graph: bool = False,
    memory: str = "auto",
    inplace: bool = True,
    strict: bool = False,
) -> AnyModule:
    """Make every eligible block of a model run fused, forward and backward.

    `Conv` and `DWConv` blocks become one op each. The larger blocks that are made of them (`yolo12_fastconv.registry`
    lists the types) hand residuals, and in inference the places of their concats, down to these, and the attention of
    `AAttn` is one op. The blocks' classes are swapped; parameters, buffers and everything else stay the same objects.
    Idempotent. A patched `ultralytics.YOLO` also trains patched. Logs one line.

    Args:
        model: `ultralytics.YOLO` or another Ultralytics `Model`, a task model such as `DetectionModel`, or any module
            that holds Ultralytics blocks or is one, fused or not, also wrapped by DistributedDataParallel,
            DataParallel or ``torch.compile``.
        include: blocks to patch: a name pattern ("model.0.*", as `fnmatch`), the name of a stock class ("Conv",
            "C3k2"), several of these, or a callable ``(name, block) -> bool``; None means all. Names are those of
            `named_modules()` of the innermost model. Each block is asked about by itself: "model.6" is the block of
            that name without those inside it, "model.6*" both.
        exclude: blocks to leave stock, in the same forms; it wins over `include`.
        attention: False leaves the attention of `AAttn` blocks to stock, like ``exclude="AAttn"``.
        cuda_graph: True lets a task model replay CUDA graphs of calls whose inputs repeat in shape, dtype and layout:
            in evaluation mode without gradients (`yolo12_fastconv.graphs` has the conditions), and forward and
            backward of its network in training (`yolo12_fastconv.training_graphs`). A later call without it switches
            graphs off. Copies, such as those for prediction and validation, have graphs of their own.
        memory: what training does about the inputs of blocks, which are kept for the weight gradients. "low" keeps none
            that is a patched block's output and computes it again in backward, bit for bit; "fast" keeps all; "auto"
            computes those again that are large. Gradients of gradients need "fast" (`yolo12_fastconv._recompute`).
        inplace: False copies the model and its weights first and patches the copy.
        strict: raise instead of falling back. Here: if a selected block could not run on a CUDA kernel, before
            anything is swapped. Later: at any call of a block patched so that does not run on one, on a CPU included.

    Returns:
        `model`, or the patched copy.

    Raises:
        PatchError: nothing in the model can be patched, its model is an exported file, this Ultralytics computes
            something else in `Conv`, `strict` is set and a block would fall back, or `cuda_graph` is set for what is
            not one of Ultralytics' task models.
        TypeError, ValueError: an argument of the wrong type or value.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be ultralytics.YOLO or a torch.nn.Module, got {type(model).__name__}: {model!r}"
            + (f". Load it first: patch_model(YOLO({model!r}))" if isinstance(model, str) else "")
        )
    network = _network(model)
    _check_memory(memory)
    include, exclude = _several(include), _several(exclude)
    options: dict[str, Any] = dict(include=include, exclude=exclude, attention=attention, strict=strict)
    logger = _compat.get_logger()
    if _config.disabled():
        logger.info("yolo12_fastconv: %s is set, the model stays unpatched", _config.DISABLE)
        return model if inplace else _copy(model)
    # Everything that can fail comes before the first change.
    plan = _plan(network, **options)
    if not plan.patched and not plan.patched_fused:
        raise PatchError(_nothing_to_patch(network, plan))
    _check_graphs(network, cuda_graph)
    if not inplace:
        model = _copy(model)
        network = _network(model)
    _apply(network, plan)
    _set_memory(network, memory)
    (graphs.enable if cuda_graph else graphs.disable)(network)
    if isinstance(model, Model):
        from yolo12_fastconv import training

        training.adopt(model, **options, cuda_graph=cuda_graph, memory=memory)
        model.predictor = None  # a cached predictor owns a copy of the unpatched model
    suffix = ", CUDA graphs on" if cuda_graph else ""
    logger.info("yolo12_fastconv: %s (%s)%s", plan, _served_by(network), suffix)
    return model


def unpatch_model(model: AnyModule) -> AnyModule:
    """The exact inverse of `patch_model`: stock classes again, every tensor the same object. Logs one line.

    Args:
        model: as for `patch_model`. One that is not patched stays as it is.

    Returns:
        `model`.

    Raises:
        PatchError, TypeError: as `patch_model`, for a model that could not have been patched.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be ultralytics.YOLO or a torch.nn.Module, got {type(model).__name__}: {model!r}"
        )
    network = _network(model)
    larger = len(list(registry.blocks_of(network)))
    count = unpatch_modules(network)
    if isinstance(model, Model):
        from yolo12_fastconv import training

        training.release(model)
        model.predictor = None  # it owns a copy of the patched model
    message = (
        f"{count} Conv blocks are stock again" + (f", and {larger} larger ones" if larger else "")
        if count or larger
        else "the model holds no patched block, nothing to undo"
    )
    _compat.get_logger().info("yolo12_fastconv: %s", message)
    return model


def patch_modules(
    module: nn.Module,
    include: Selector = None,
    exclude: Selector = None,
    strict: bool = False,
    attention: bool = True,
    cuda_graph: bool = False,
    memory: str | None = None,
) -> PatchSummary:
    """Swap the eligible blocks of `module`: `patch_model` without log line, copy and YOLO objects.

    Args: as `patch_model`; without `cuda_graph` a model keeps the graphs that it has, and without `memory` its mode.

    Returns:
        What was swapped and what was kept; a module without any block is no error here. With
        YOLO12_FASTCONV_DISABLE set nothing is swapped.

    Raises:
        PatchError: this Ultralytics computes something else in `Conv`, or `strict` is set and a block would fall back.
        ValueError: `memory` is none of the modes.
    """
    if memory is not None:
        _check_memory(memory)
    network = _unwrap(module)
    plan = _plan(network, _several(include), _several(exclude), attention, strict)
    if cuda_graph and not _config.disabled():
        _check_graphs(network, cuda_graph)
        graphs.enable(network)
    elif plan.patched and not graphs.enabled(network):
        graphs.disable(network)
    _apply(network, plan)
    if memory is not None:
        _set_memory(network, memory)
    return plan


def unpatch_modules(module: nn.Module) -> int:
    """Give every patched block of `module` its stock class back; returns how many `Conv` blocks there were."""
    count = 0
    network = _unwrap(module)
    graphs.restore(network)
    for block in network.modules():
        stock = STOCK.get(type(block)) or UNFUSED.get(type(block))
        if stock is not None:
            if type(block) in STOCK:
                count += 1
                blocks.restore_weight(block)
            block.__class__ = stock
            for key in [key for key in vars(block) if key.startswith("_fc_")]:
                del block.__dict__[key]
            _rebind_fused_forward(block)
    return count


# -------------------------------------------------------------------------------------------------------- selection


def _plan(
    network: nn.Module, include: Selector, exclude: Selector, attention: bool, strict: bool
) -> PatchSummary:
    """What `patch_modules` would do. Changes nothing."""
    summary = PatchSummary()
    included = _Selection("include", include, default=True)
    excluded = _Selection("exclude", exclude, default=False)
    stocks: set[Any] = set()
    for name, block in network.named_modules():
        larger = type(block) in FUSED or type(block) in UNFUSED
        if not larger and not isinstance(block, Conv):
            continue
        # Both are asked about every block, so that each pattern which matches nothing can be named.
        wanted, unwanted = included(name, block), excluded(name, block)
        if not attention and (UNFUSED.get(type(block)) or type(block)) is AAttn:
            unwanted = True
        reason = None
        if type(block) in STOCK or type(block) in UNFUSED:
            (summary.already_fused if larger else summary.already).append(name)
        elif _config.disabled():
            reason = f"{_config.DISABLE} is set"
        elif unwanted or not wanted:
            reason = (
                "left out by include, exclude or attention" if larger else "left out by include or exclude"
            )
        else:
            reason = _why_not_fused(block) if larger else _why_not(block)
        if reason is not None:
            (summary.unfused if larger else summary.kept)[name] = reason
        elif type(block) in FUSED:
            summary.fused.append(name)
        elif type(block) in FAST:
            summary.swapped.append(name)
            stocks.add(type(block))
        known = larger or type(block) in (*FAST, *STOCK)
        if strict and wanted and not unwanted and known and not _config.disabled():
            reason = reason or (None if larger else _no_kernel_reason(block))
            if reason is not None:
                raise PatchError(
                    f"strict: nothing was patched, since {name or type(block).__name__} cannot run on a CUDA kernel: "
                    f"{reason}"
                )
            summary.strict.append(name)
    for selection in (included, excluded):
        selection.warn_about_unused()
    for stock in stocks:
        _check_formula(stock, stock.forward, stock.forward_fuse)
    return summary


def _check_graphs(network: nn.Module, cuda_graph: bool) -> None:
    reason = graphs.why_not(network) if cuda_graph else None
    if reason is not None:
        raise PatchError(f"cuda_graph=True is not possible: {reason}. Patch without it")


def _check_memory(memory: str) -> None:
    if memory not in _recompute.MODES:
        raise ValueError(f'memory must be "auto", "low" or "fast", got {memory!r}')


def _set_memory(network: nn.Module, memory: str) -> None:
    for block in network.modules():
        if type(block) in STOCK:
            vars(block).pop("_fc_memory", None)
            if memory != "auto":
                block._fc_memory = memory  # type: ignore[assignment]


def _apply(network: nn.Module, plan: PatchSummary) -> None:
    modules: dict[str, Any] = dict(network.named_modules())
    for name in (*plan.swapped, *plan.fused):
        block = modules[name]
        larger = type(block) in FUSED
        block.__class__ = FUSED[type(block)] if larger else FAST[type(block)]
        _rebind_fused_forward(block)
        if not larger:
            blocks.keep_weight_for_kernels(block)
    neck.link_layers(network)
    for name in plan.strict:
        modules[name]._fc_strict = name or type(modules[name]).__name__


def _several(selector: Selector) -> Selector:
    """`selector` in a form that can be used more than once: an iterable of patterns becomes a tuple."""
    if (
        selector is None
        or isinstance(selector, str)
        or callable(selector)
        or not isinstance(selector, Iterable)
    ):
        return selector
    return tuple(selector)


class _Selection:
    """`include` or `exclude`, as a function of a block's name and the block."""

    def __init__(self, argument: str, selector: Selector, default: bool) -> None:
        self.argument = argument
        self.default = default
        self.function: Callable[[str, nn.Module], bool] | None = None
        self.patterns: list[str] = []
        self.used: set[str] = set()
        if selector is None:
            return
        if isinstance(selector, str):
            self.patterns = [selector]
        elif callable(selector):
            self.function = selector
        else:
            self.patterns = list(selector) if isinstance(selector, Iterable) else [selector]
            if not all(isinstance(pattern, str) for pattern in self.patterns):
                raise TypeError(
                    f"{argument} must be a name pattern, several, or a callable (name, block) -> bool, "
                    f"got {selector!r}"
                )
        self.default = False

    def __call__(self, name: str, block: nn.Module) -> bool:
        if self.function is not None:
            return bool(self.function(name, block))
        stock: type = STOCK.get(type(block)) or UNFUSED.get(type(block)) or type(block)
        matching = [p for p in self.patterns if p == stock.__name__ or fnmatch.fnmatchcase(name, p)]
        self.used.update(matching)
        return bool(matching) or self.default

    def warn_about_unused(self) -> None:
        for pattern in self.patterns:
            if pattern not in self.used:
                _compat.get_logger().warning(
                    "yolo12_fastconv: %s=%r matches no block", self.argument, pattern
                )


def _why_not(block: Conv) -> str | None:
    """Why a stock block cannot be patched, or cannot run as the fused op now; None if nothing speaks against it."""
    if type(block) not in FAST:
        return f"{type(block).__name__} is a subclass of Conv with a forward of its own"
    children = set(block._modules)
    if not {"conv", "act"} <= children:
        return f"has no child {' and '.join(sorted({'conv', 'act'} - children))}"
    if children - {"conv", "bn", "act"}:
        return f"has children besides conv, bn and act: {', '.join(sorted(children - {'conv', 'bn', 'act'}))}"
    forward = vars(block).get("forward")
    if forward is not None and not is_fused_forward(block, forward):
        return "has a forward of its own (an instance attribute)"
    if forward is None and "bn" not in children:
        return "has no child bn, and was not fused by Ultralytics"
    devices = _devices(block)
    if len(devices) > 1:
        return f"its tensors are on different devices: {', '.join(sorted(map(str, devices)))}"
    return None


def _why_not_fused(block: Any) -> str | None:
    """Why a larger stock block keeps its own forward; None if nothing speaks against its fused form."""
    if "forward" in vars(block):
        return "has a forward of its own (an instance attribute)"
    return FUSED[type(block)].structure_problem(block) or registry.formula_problem(type(block))


def _devices(block: nn.Module) -> set[torch.device]:
    # Where a stock block needs its tensors together; the counter of batches may be anywhere.
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return {tensor.device for name, tensor in tensors if not name.endswith("num_batches_tracked")}


def _no_kernel_reason(block: Any) -> str | None:
    """Why `block` cannot run on a CUDA kernel, now or after a move to the GPU of this machine; None if it can."""
    reason = _structure_reason(block)
    if reason is not None:
        return reason
    device = block.conv.weight.device
    if device.type == "cpu":  # most models are patched before Ultralytics moves them
        if not ops.LIBRARY.loaded:
            return ops.LIBRARY.reason
        if not torch.cuda.is_available():
            return "no CUDA device is available"
        device = torch.device("cuda", torch.cuda.current_device())
    return blocks.kernel_reason(device, block.conv.weight.dtype)


def _structure_reason(block: Any) -> str | None:
    return blocks.structure_reason(block.conv, block._modules.get("bn"), block.act)


def _device_problem(block: Any) -> str | None:
    """Why the GPU that holds `block` is not served by the compiled library; None on a CPU or without a library."""
    weight = block.conv.weight
    if not weight.is_cuda or not ops.LIBRARY.loaded:
        return None
    return blocks.kernel_reason(weight.device, weight.dtype)


def _rebind_fused_forward(block: Any) -> None:
    # The instance attribute that `fuse()` left is bound to the former class's function, and hides the class's own.
    forward = vars(block).get("forward")
    if forward is not None and is_fused_forward(block, forward):
        block.forward = block.forward_fuse


def _unwrap(module: Any) -> nn.Module:
    """The innermost module of DistributedDataParallel, DataParallel and ``torch.compile`` wrappers."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(vars(module).get("_modules", {}).get("_orig_mod"), nn.Module):
            module = module._modules["_orig_mod"]
        else:
            return module


def _network(model: nn.Module) -> nn.Module:
    """The module whose blocks are patched: of an Ultralytics `Model` its `model`, else the unwrapped `model`."""
    if not isinstance(model, Model):
        return _unwrap(model)
    network = model.model
    if not isinstance(network, nn.Module):
        raise PatchError(
            f"{type(model).__name__} holds {network!r}, an exported model or none, and no PyTorch layers: "
            "patch the .pt or .yaml model it was made from"
        )
    return _unwrap(network)


def _copy(model: AnyModule) -> AnyModule:
    if not isinstance(model, Model):
        return copy.deepcopy(model)
    # Predictor and trainer own further models, threads and locks, and start anew on the copy.
    kept = model.predictor, model.trainer
    model.predictor = model.trainer = None
    try:
        return copy.deepcopy(model)
    finally:
        model.predictor, model.trainer = kept


def _nothing_to_patch(network: nn.Module, plan: PatchSummary) -> str:
    if not plan.total:
        return (
            f"{type(network).__name__} holds no Ultralytics Conv block, nothing to patch. Give patch_model a YOLO "
            "object, a task model, or a module with blocks of ultralytics.nn.modules"
        )
    return (
        f"none of the {plan.total} Conv blocks of {type(network).__name__} can be patched: {plan.reasons()}"
    )


def _served_by(network: nn.Module) -> str:
    """What computes the patched blocks, for the log line."""
    if not ops.LIBRARY.loaded:
        return f"ATen fallback: {ops.LIBRARY.reason}"
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        reason = blocks.kernel_reason(device, torch.float32)
        return f"ATen fallback: {reason}" if reason else f"CUDA library for {' '.join(ops.LIBRARY.arch_list)}"
    return f"on {device.type}: ATen; CUDA library for {' '.join(ops.LIBRARY.arch_list)} loaded"


# ------------------------------------------------------------------------------------------------------- formula


def _expected_forward(self, x):
    return self.act(self.bn(self.conv(x)))


def _expected_forward_fuse(self, x):
    return self.act(self.conv(x))


@functools.lru_cache(maxsize=16)
def _check_formula(stock: Any, forward: Callable, forward_fuse: Callable) -> None:
    """Raise PatchError unless `forward` and `forward_fuse` of `stock` compute what the fused op computes.

    The two functions are part of the cache's key: one that is replaced is looked at again.
    """
    if _same_code(forward, _expected_forward) and _same_code(forward_fuse, _expected_forward_fuse):
        return
    try:
        same = _same_numbers(stock)
    except Exception as error:
        raise PatchError(_formula_message(stock, f"raises {type(error).__name__}: {error}")) from error
    if not same:
        raise PatchError(_formula_message(stock, "computes something else"))


def _formula_message(stock: type[nn.Module], what: str) -> str:
    import ultralytics

    return (
        f"{stock.__name__} of Ultralytics {ultralytics.__version__} {what} where act(bn(conv(x))) was expected, so its "
        f"blocks stay unpatched. Tested with Ultralytics {_compat.ULTRALYTICS_TESTED}; was the class modified?"
    )


def _same_code(function: Callable, expected: Callable) -> bool:
    code, other = getattr(function, "__code__", None), expected.__code__
    return code is not None and code.co_code == other.co_code and code.co_names == other.co_names


def _same_numbers(stock: Any) -> bool:
    """Whether a small block of `stock` computes the expected formula, in training and evaluation and when fused."""
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        block = stock(4, 8, 3, 2).double()
        for tensor in (block.bn.weight, block.bn.bias, block.bn.running_mean, block.bn.running_var):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
        x = torch.randn(2, 4, 6, 5, dtype=torch.float64)
        for act in (nn.SiLU(), nn.Identity(), nn.ReLU()):
            block.act = act
            for training in (True, False):
                block.train(training)
                twin = copy.deepcopy(block)
                pairs = [(block.forward(x), _expected_forward(twin, x))]
                pairs += zip(block.buffers(), twin.buffers(), strict=True)
                pairs.append((block.forward_fuse(x), _expected_forward_fuse(twin, x)))
                if not all(torch.equal(ours, expected) for ours, expected in pairs):
                    return False
    return True


# --------------------------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class LayerRow:
    """One convolution of a model."""

    name: str
    layer: str
    """Class of the block or layer."""
    geometry: str
    """As "3x3 s2 p1 d1 g1, 16→32"."""
    act: str
    bn: bool
    """Whether a batch norm is there: not after ``fuse()``, and not for a bare convolution."""
    patched: bool
    reason: str
    """Why the layer computes as stock; empty for one that runs as the fused op."""
    kernel: str
    """What computes it: the tile menu's choice, or "ATen" and why; empty for stock layers."""


@dataclass(frozen=True)
class BlockRow:
    """One larger block of a model, of a type that `registry.FUSED` lists."""

    name: str
    layer: str
    """Class of the block."""
    patched: bool
    reason: str
    """Why the block computes as stock, its children apart; empty for one that runs fused."""
    fuses: str
    """What runs fused; empty for stock blocks."""


class PatchReport:
    """What became of each convolution and each larger block of a model: `rows` and `blocks`; iterable over the former,
    printable, as JSON or Markdown."""

    def __init__(
        self, rows: list[LayerRow], served_by: str, blocks: Iterable[BlockRow] = (), cuda_graphs: str = ""
    ) -> None:
        self.rows = rows
        """`LayerRow` objects."""
        self.blocks = list(blocks)
        """`BlockRow` objects, outer blocks first."""
        self.served_by = served_by
        """What computes the patched blocks, in words."""
        self.cuda_graphs = cuda_graphs
        """State of the CUDA graphs, in words; empty if they are off."""

    def __iter__(self) -> Iterator[LayerRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def summary(self) -> str:
        """Counts of fused, patched and stock layers, each distinct reason with its count, and what computes."""
        fused = [row for row in self.rows if row.patched and not row.reason]
        lines = [f"{len(fused)} of {len(self.rows)} convolutions run as the fused op ({self.served_by})"]
        stock = Counter(row.reason for row in self.rows if row.reason)
        lines += [f"  {count} as stock: {reason}" for reason, count in stock.most_common()]
        kernels = Counter(row.kernel for row in fused)
        lines += [f"  {count} by {kernel}" for kernel, count in kernels.most_common()]
        if self.blocks:
            running = sum(row.patched and not row.reason for row in self.blocks)
            lines.append(f"{running} of {len(self.blocks)} larger blocks run fused")
            kept = Counter(row.reason for row in self.blocks if row.reason)
            lines += [f"  {count} as stock: {reason}" for reason, count in kept.most_common()]
        lines += [f"CUDA graphs: {self.cuda_graphs}"] if self.cuda_graphs else []
        return "\n".join(lines)

    def to_json(self) -> str:
        """Layers, larger blocks and the summary's first line, as a JSON object."""
        return json.dumps(
            {
                "served_by": self.served_by,
                "cuda_graphs": self.cuda_graphs,
                "rows": [asdict(row) for row in self.rows],
                "blocks": [asdict(row) for row in self.blocks],
            },
            indent=1,
            ensure_ascii=False,
        )

    def to_markdown(self) -> str:
        """Layers, and below them the larger blocks, as Markdown tables."""
        return "\n\n".join(
            "\n".join("| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in table)
            for table in ([t[0], tuple("---" for _ in t[0]), *t[1:]] for t in self._tables())
        )

    def __str__(self) -> str:
        parts = []
        for table in self._tables():
            widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
            parts += [
                "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table
            ]
            parts.append("")
        return "\n".join([*parts[:-1], self.summary()])

    def _tables(self) -> Iterator[list[tuple[str, ...]]]:
        header = ("layer", "class", "geometry", "act", "BN", "runs as", "kernel")
        yield [header, *(_cells(row) for row in self.rows)]
        if self.blocks:
            lines = [
                (
                    row.name or "(model)",
                    row.layer,
                    f"stock: {row.reason}" if row.reason else "fused",
                    row.fuses,
                )
                for row in self.blocks
            ]
            yield [("larger block", "class", "runs as", "fused parts"), *lines]


def _cells(row: LayerRow) -> tuple[str, ...]:
    runs = f"stock: {row.reason}" if row.reason else "fused op"
    return (
        row.name or "(model)",
        row.layer,
        row.geometry,
        row.act,
        "yes" if row.bn else "no",
        runs,
        row.kernel,
    )


def patch_report(model: nn.Module) -> PatchReport:
    """One row for each convolution of a model: what it is, whether it is patched or why not, which kernel serves it;
    and one for each larger block of a type that can be fused.

    Reads the live state: a block with a hook on a child, for example, is patched and computes as stock, and says so.
    On CUDA the kernel is the tile menu's choice for one channels_last image of 80 by 80 at this layer.

    Args:
        model: as for `patch_model`; patched or not.

    Raises:
        PatchError, TypeError: as `patch_model`, for a model that could not have been patched.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be ultralytics.YOLO or a torch.nn.Module, got {type(model).__name__}: {model!r}"
        )
    network = _network(model)
    rows: list[LayerRow] = []
    larger: list[BlockRow] = []
    inside: set[int] = set()  # convolutions that belong to a block with a row of its own
    for name, module in network.named_modules():
        own = [child for child in module.children() if isinstance(child, _CONVOLUTIONS)]
        if own and (isinstance(module, Conv) or type(module).__module__ == Conv.__module__):
            inside.update(map(id, own))
            rows.append(_row(name, module, own[0]))
        elif isinstance(module, _CONVOLUTIONS) and id(module) not in inside:
            rows.append(_row(name, module, module))
        elif type(module) in FUSED or type(module) in UNFUSED:
            larger.append(_block_row(name, module))
    return PatchReport(rows, _served_by(network), larger, graphs.describe(network))


def _block_row(name: str, block: Any) -> BlockRow:
    patched = type(block) in UNFUSED
    if not patched:
        reason: str | None = _why_not_fused(block) or "not patched"
    elif "forward" in vars(block):
        reason = "has a forward of its own (an instance attribute)"
    else:
        reason = f"{_config.DISABLE} is set" if _config.disabled() else block.structure_problem(block)
    return BlockRow(
        name, type(block).__name__, patched, reason or "", "" if reason or not patched else block.fuses
    )


def _row(name: str, layer: nn.Module, conv: nn.Module) -> LayerRow:
    patched = type(layer) in STOCK
    reason = _stock_row_reason(layer)
    act = "-" if layer is conv else type(layer._modules.get("act")).__name__
    bn = layer is not conv and layer._modules.get("bn") is not None
    kernel = _kernel(conv) if patched and not reason else ""
    return LayerRow(name, type(layer).__name__, _geometry(conv), act, bn, patched, reason, kernel)


def _stock_row_reason(layer: nn.Module) -> str:
    if type(layer) in STOCK:
        forward = vars(layer).get("forward")
        if forward is not None and not is_fused_forward(layer, forward):
            return "has a forward of its own (an instance attribute)"
        return _structure_reason(layer) or _device_problem(layer) or ""
    if not isinstance(layer, Conv):
        return f"{type(layer).__name__}, not a Conv block"
    return _why_not(layer) or "not patched"


def _geometry(conv: Any) -> str:
    def pair(value: Any) -> str:
        return (
            str(value[0])
            if isinstance(value, tuple) and len(set(value)) == 1
            else str(value).replace(" ", "")
        )

    kernel = "x".join(map(str, conv.kernel_size))
    return (
        f"{kernel} s{pair(conv.stride)} p{pair(conv.padding)} d{pair(conv.dilation)} g{conv.groups}, "
        f"{conv.in_channels}→{conv.out_channels}"
    )


def _kernel(conv: Any) -> str:
    weight = conv.weight
    if weight.device.type != "cuda":
        return f"ATen ({weight.device.type})"
    reason = blocks.kernel_reason(weight.device, weight.dtype)
    if reason:
        return f"ATen: {reason}"
    major, minor = torch.cuda.get_device_capability(weight.device)
    return ops.describe_kernel(
        (1, weight.shape[1] * conv.groups, _NOMINAL_MAP, _NOMINAL_MAP),
        tuple(weight.shape),
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
        weight.dtype,
        tf32=ops.allow_tf32(weight.device, weight.dtype),
        capability=major * 10 + minor,
    )
