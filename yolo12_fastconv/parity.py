"""Layer-by-layer check of a patched model against the stock one, both against a float64 truth.

Every patched block is given what its stock twin gets when the *stock* model runs, so that one layer's rounding does
not blur the next one's. Stock block, our block and the formulas of ``reference.py`` in float64 then compute from the
same tensors; ``error_rule.py`` and configs/tolerances.yaml say how close ours has to be.
"""

from __future__ import annotations

import contextlib
import copy
import math
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import yolo12_fastconv
from yolo12_fastconv import blocks, detections, error_rule, ops, patching, registry
from yolo12_fastconv.parity_layers import LayerChecker, Progress, Settings, flatten
from yolo12_fastconv.parity_report import ParityReport, ParityRow

from ultralytics.nn.modules.head import OBB, Classify, Detect  # isort: skip  (blocks has checked that it can be imported)

__all__ = ["ParityReport", "ParityRow", "check_parity", "main", "natural_batch", "randomise_"]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_parity(
    model: nn.Module,
    batch: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    mode: str = "eval",
    device: torch.device | str | None = None,
    reference: nn.Module | None = None,
    autocast: bool | None = None,
    allow_tf32: bool = False,
    imgsz: int | tuple[int, int] = 640,
    conf: float = 0.25,
    iou: float = 0.7,
    seed: int = 0,
    progress: bool | None = None,
) -> ParityReport:
    """Compares each patched block, and the whole model, with stock Ultralytics and with a float64 truth.

    In evaluation mode the outputs of each block are compared, in training mode also all gradients for one random
    `grad_y`, and the batch norm's buffers. Then the outputs of the whole model, and in evaluation mode what it detects
    after Ultralytics' NMS.

    Everything runs on copies: the model, its mode, gradients and buffers, the random state and torch's switches are as
    before, and hooks on the model are not called.

    Args:
        model: `ultralytics.YOLO`, a task model or any module that `patch_model` takes, fused or not. If no block of it
            is patched, a copy is, with `patch_model`'s defaults.
        batch: (N, C, H, W) input, for pictures RGB in 0...1; by default two of `natural_batch` at `imgsz`.
        dtype: float32, float16 or bfloat16.
        mode: "eval" or "train".
        device: where to compute; by default where the model is.
        reference: model whose blocks are the stock side, patched or not, with blocks of the same names; by default
            `model` with its patch undone. Give the unpatched original to find differences in parameters, buffers or
            attributes too.
        autocast: parameters stay float32 and ``torch.autocast`` chooses, as in Ultralytics' training with AMP; else
            the model is cast to `dtype`, as by ``predict(quantize=16)``. By default in training mode only. No effect
            in float32.
        allow_tf32: ``torch.backends.cudnn.allow_tf32`` during the check, on both sides.
        conf, iou: thresholds of confidence and overlap for the detections.
        seed: of the default batch and of `grad_y`.
        progress: count layers on stderr; by default if that is a terminal.

    Returns:
        A report; `ParityReport.ok` is the verdict.

    Raises:
        ValueError: an argument out of range, a model in which nothing is or can be patched, a `reference` with other
            blocks, half precision training without autocast.
        PatchError, TypeError: as `patch_model`.
        Exception: whatever the stock model itself raises for this batch. An error that only ours raises is a row.
    """
    live = patching._network(_module(model, "model"))
    source = live if reference is None else patching._network(_module(reference, "reference"))
    if device is None:
        device = next((parameter.device for parameter in live.parameters()), "cpu")
    settings = Settings.checked(dtype, mode, torch.device(device), autocast, allow_tf32, seed)
    if batch is None:
        size = (imgsz, imgsz) if isinstance(imgsz, int) else imgsz
        batch = natural_batch(2, _in_channels(source), *size, seed=seed)
    elif batch.dim() != 4 or not batch.is_floating_point():
        raise ValueError(
            f"batch must be a floating (N, C, H, W) tensor, got {tuple(batch.shape)} {batch.dtype}"
        )
    with _pinned(settings):
        ours, stock = _twin(live, settings), _twin(source, settings)
        if not _patched(ours):
            plan = patching.patch_modules(ours)
            if not plan.patched:
                reasons = plan.reasons() or "it holds no Ultralytics Conv block"
                raise ValueError(
                    f"nothing of {type(live).__name__} can be patched, nothing to compare: {reasons}"
                )
        patching.unpatch_modules(stock)
        fast, larger = _patched(ours), dict(registry.blocks_of(ours))
        _check_pairs(stock, {**fast, **larger})
        # The larger blocks' stock side: by themselves, since hooks are on those that the stock model runs.
        twins = dict(copy.deepcopy(stock).named_modules())
        pairs = {name: (block, twins[name]) for name, block in larger.items()}
        # A copy: a batch made in inference mode could take no part in autograd.
        x = batch.detach().clone().to(settings.device, torch.float32 if settings.autocast else dtype)
        report = ParityReport(mode, _environment(live, settings, x), kept=_kept(ours, fast))
        shown = sys.stderr.isatty() if progress is None else progress
        with Progress(len(fast) + len(pairs), shown) as bar:
            checker = LayerChecker(fast, pairs, settings, report, bar)
            stock_outputs = checker.run(stock, x)
        report.unreached = [name for name in (*fast, *larger) if name not in checker.calls]
        _compare_outputs(report, settings, ours, stock, x, stock_outputs, conf, iou)
    return report


def natural_batch(n: int, channels: int, height: int, width: int, *, seed: int = 0) -> Tensor:
    """(n, channels, height, width) float32 in 0...1 with the smooth patches and fine grain of photographs, seeded."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.zeros(n, channels, height, width)
    for cells, weight in ((3, 0.5), (12, 0.3), (48, 0.15)):
        grid = torch.rand(n, channels, min(cells, height), min(cells, width), generator=generator)
        batch += weight * F.interpolate(grid, size=(height, width), mode="bilinear", align_corners=False)
    return batch.add_(0.05 * torch.rand(n, channels, height, width, generator=generator)).clamp_(0, 1)


def randomise_(network: nn.Module, batch: Tensor, *, seed: int = 0) -> None:
    """Give a freshly built network batch norms like a trained one's, in place: random affine parameters, and the
    statistics of `batch`.

    As built, every batch norm is the identity, so that nothing of it is tested, and signals die out in deep models,
    which leaves half precision nothing to compare.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [layer.momentum for layer in layers]
    training = [(module, module.training) for module in network.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        for layer in layers:
            layer.momentum = 1.0
            if layer.weight is not None:
                layer.weight.copy_(0.5 + torch.rand(layer.weight.shape, generator=generator))
                layer.bias.copy_(0.3 * torch.randn(layer.bias.shape, generator=generator))
        try:
            network.train()(batch)
            for layer in layers:
                # Small maps of few pictures leave a channel next to no variance, and dividing by that would amplify
                # every rounding. The rest of a new network's variances are around 0.2.
                if layer.running_var is not None:
                    layer.running_var.clamp_(min=0.05)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
            for module, mode in training:
                module.training = mode


def main(argv: Sequence[str] | None = None) -> int:
    """The command ``yolo12-fastconv parity``, see `yolo12_fastconv.parity_cli`. Returns the exit status."""
    from yolo12_fastconv import parity_cli

    return parity_cli.main(argv)


# ------------------------------------------------------------------------------------------------------- preparation


def _module(model: object, argument: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{argument} must be ultralytics.YOLO or a torch.nn.Module, got {type(model).__name__}"
        )
    return model


def _in_channels(network: nn.Module) -> int:
    return next((m.in_channels for m in network.modules() if isinstance(m, nn.Conv2d)), 3)


@contextlib.contextmanager
def _pinned(settings: Settings) -> Iterator[None]:
    """Random state forked, TF32 as asked for, no inference mode, no autocast of the caller's."""
    cudnn: Any = torch.backends.cudnn
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    # Torch has two sets of names for the same switch, and the older one can't be read where a caller has used the
    # newer one for convolutions alone.
    try:
        legacy = cudnn.allow_tf32
    except RuntimeError:
        legacy = None
    precisions = [(part, part.fp32_precision) for part in (cudnn.conv, cudnn.rnn)]
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(False),
        torch.set_grad_enabled(False),
        torch.autocast(settings.device.type, enabled=False),
    ):
        try:
            cudnn.allow_tf32 = settings.allow_tf32
            yield
        finally:
            if legacy is not None:
                cudnn.allow_tf32 = legacy
            for part, precision in precisions:
                if part.fp32_precision != precision:
                    part.fp32_precision = precision


def _no_hook(*args: Any, **kwargs: Any) -> None:
    return None


def _twin(network: nn.Module, settings: Settings) -> Any:
    """A copy on the device, in the dtype and mode of the check.

    Hooks stay where they are, since what a block does depends on their presence, and become empty functions: the
    user's code is neither copied nor called.
    """
    memo: dict[int, Any] = {}
    for module in network.modules():
        for kind in _HOOKS:
            memo.update((id(hook), _no_hook) for hook in getattr(module, kind).values())
    twin = copy.deepcopy(network, memo)
    for module in twin.modules():
        for kind in _HOOKS:
            hooks = getattr(module, kind)
            hooks.update(dict.fromkeys(hooks, _no_hook))
    twin.to(settings.device, torch.float32 if settings.autocast else settings.dtype)
    return twin.train(settings.training).requires_grad_(settings.training)


def _patched(network: nn.Module) -> dict[str, Any]:
    return {name: block for name, block in network.named_modules() if type(block) in blocks.STOCK}


def _kept(ours: nn.Module, fast: dict[str, Any]) -> dict[str, str]:
    modules = dict(ours.named_modules())
    rows = (row for row in patching.patch_report(ours) if row.name not in fast)
    return {row.name: row.reason for row in rows if isinstance(modules[row.name], blocks.Conv)}


def _check_pairs(stock: nn.Module, fast: dict[str, Any]) -> None:
    twins = dict(stock.named_modules())
    for name, block in fast.items():
        twin = twins.get(name)
        expected = blocks.STOCK.get(type(block)) or registry.UNFUSED[type(block)]
        if type(twin) is not expected:
            raise ValueError(f"reference has no {expected.__name__} named {name!r}, but {twin!r}")
        if (twin._modules.get("bn") is None) != (block._modules.get("bn") is None):
            raise ValueError(
                f"{name!r} is fused on one side only: give a reference in the same state as the model"
            )


def _environment(live: nn.Module, settings: Settings, x: Tensor) -> dict[str, Any]:
    import ultralytics

    device = settings.device
    name = platform.processor() or platform.machine() or "cpu"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        name = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
    how = "under autocast, parameters float32" if settings.autocast else "parameters too"
    precision = "float32" if settings.dtype is torch.float32 else f"{str(settings.dtype)[6:]} ({how})"
    tf32 = f"torch.backends.cudnn.allow_tf32={settings.allow_tf32} on both sides"
    return {
        "model": type(live).__name__,
        "mode": settings.mode,
        "precision": precision,
        "TF32": tf32,
        "input": " × ".join(map(str, x.shape)),
        "device": f"{device} ({name})",
        "library": "loaded, " + " ".join(ops.LIBRARY.arch_list) if ops.LIBRARY.loaded else ops.LIBRARY.reason,
        "seed": settings.seed,
        "versions": f"yolo12_fastconv {yolo12_fastconv.__version__}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, ultralytics {ultralytics.__version__}",
    }


# ------------------------------------------------------------------------------------------------------- whole model


def _compare_outputs(
    report: ParityReport,
    settings: Settings,
    ours: Any,
    stock: Any,
    x: Tensor,
    stock_outputs: Any,
    conf: float,
    iou: float,
) -> None:
    blocks_run = len(list(report.layers()))
    layers = getattr(ours, "model", None)  # of a task model: a Sequential that ends with the head
    head = layers[-1] if isinstance(layers, nn.Sequential) else ours
    try:
        torch.manual_seed(settings.seed)
        with settings.running():
            our_outputs = ours(x)
    except Exception as error:
        comparison = error_rule.Comparison.impossible(
            f"raises {type(error).__name__}: {error}".splitlines()[0]
        )
        report.outputs.append(ParityRow("model", "output", (), "", "", comparison))
        return
    torch.manual_seed(settings.seed)
    exact = dict(flatten(stock.double()(x.double()), head))
    mine = dict(flatten(our_outputs, head))
    floor = error_rule.tolerances().floor("output", settings.precision, 1) * math.sqrt(blocks_run)
    for place, value in flatten(stock_outputs, head):
        if place not in mine:
            comparison = error_rule.Comparison.impossible("missing on our side")
        else:
            comparison = error_rule.compare(mine[place], value, exact[place], floor)
            # The l2 error is judged, and boxes one by one; configs/tolerances.yaml says why.
            limit = (float("inf"), comparison.limit[1])
            comparison = error_rule.Comparison(comparison.ours, comparison.stock, limit, comparison.problem)
        report.outputs.append(ParityRow("model", place, tuple(value.shape), "", "", comparison))
    if settings.training or any(row.comparison.problem for row in report.outputs):
        return
    first, second = (
        out[0] if isinstance(out, (tuple, list)) else out for out in (our_outputs, stock_outputs)
    )
    if isinstance(head, Classify):
        report.detections = detections.compare_classes(first, second, settings.precision)
    elif isinstance(head, Detect):
        if isinstance(first, (tuple, list)):  # of a segmentation head: predictions and mask prototypes
            first, second = first[0], second[0]
        report.detections = detections.compare_detections(
            first, second, nc=head.nc, conf=conf, iou=iou, rotated=isinstance(head, OBB),
            end2end=bool(getattr(head, "end2end", False)), precision=settings.precision,
        )  # fmt: skip
