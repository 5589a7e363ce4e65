"""Cases and comparisons for the ops on feature maps, on a CPU (test_maps.py) and on CUDA (test_gpu_maps.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from yolo12_fastconv import _aten_maps, error_rule, ops

LAYOUTS = ("nhwc", "nchw", "slice", "padded", "misaligned")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The numbers of `x` in another layout: NHWC, NCHW, a channel slice of a wider NHWC tensor, NHWC with unused
    elements behind each pixel, or a channel slice that begins at an odd element."""
    if layout in ("nhwc", "nchw"):
        return x.contiguous(
            memory_format=torch.channels_last if layout == "nhwc" else torch.contiguous_format
        )
    before, after = {"slice": (8, 16), "padded": (0, -x.shape[1] % 8), "misaligned": (1, 2)}[layout]
    wide = torch.full(
        (x.shape[0], before + x.shape[1] + after, *x.shape[2:]), float("nan"), dtype=x.dtype, device=x.device
    ).contiguous(memory_format=torch.channels_last)
    part = wide[:, before : before + x.shape[1]]
    part.copy_(x)
    return part


@dataclass(frozen=True)
class ConcatCase:
    channels: tuple[int, ...]
    scales: tuple[int, ...]
    h: int
    w: int
    batch: int = 2

    def inputs(self, dtype: torch.dtype, device: object, layout: str, seed: int = 0) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        maps = []
        for c, s in zip(self.channels, self.scales, strict=True):
            x = torch.randn(self.batch, c, self.h // s, self.w // s, generator=g, dtype=torch.float64)
            maps.append(laid_out(x.to(dtype).to(device), layout))
        return maps

    def stock(self, maps: list[Tensor]) -> Tensor:
        return torch.cat(
            [
                x if s == 1 else F.interpolate(x, scale_factor=2, mode="nearest")
                for x, s in zip(maps, self.scales, strict=True)
            ],
            1,
        )


CONCATS = (
    ConcatCase((16, 8), (2, 1), 8, 6),
    ConcatCase((512, 256), (2, 1), 40, 20, batch=1),
    ConcatCase((24,), (2,), 6, 26),
    ConcatCase((24,), (1,), 1, 1),
    ConcatCase((13, 7, 1), (1, 2, 1), 26, 6),
    ConcatCase((1, 1), (2, 2), 2, 2, batch=3),
    ConcatCase((64, 32, 32), (1, 1, 1), 13, 13),
    ConcatCase((12, 20), (1, 2), 20, 34),
    ConcatCase((4,) * 11, (1, 2) * 5 + (1,), 4, 6),
)


@dataclass(frozen=True)
class DetectCase:
    sizes: tuple[tuple[int, int], ...]
    classes: int = 80
    bins: int = 16
    batch: int = 2
    xywh: bool = True

    def inputs(
        self, dtype: torch.dtype, device: object, layout: str = "nhwc", seed: int = 0
    ) -> tuple[list[Tensor], list[Tensor], Tensor | None, Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)

        def maps(channels: int, spread: float, shift: float) -> list[Tensor]:
            made = []
            for h, w in self.sizes:
                x = torch.randn(self.batch, channels, h, w, generator=g, dtype=torch.float64)
                made.append(laid_out((x * spread + shift).to(dtype).to(device), layout))
            return made

        boxes, scores = maps(4 * self.bins, 2.0, 1.0), maps(self.classes, 3.0, -3.0)
        points, steps = [], []
        for level, (h, w) in enumerate(self.sizes):
            y, x = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
            points.append(torch.stack((x, y), -1).view(-1, 2))
            steps.append(torch.full((h * w, 1), 8.0 * 2**level))
        # Transposed views, as in `Detect`.
        point, step = (torch.cat(t).to(dtype).to(device).transpose(0, 1) for t in (points, steps))
        values = (
            None if self.bins == 1 else torch.arange(self.bins, dtype=dtype, device=device).view(1, -1, 1, 1)
        )
        return boxes, scores, values, point, step


DETECTS = (
    DetectCase(((80, 80), (40, 40), (20, 20))),
    DetectCase(((60, 80), (30, 40), (15, 20)), classes=3),
    DetectCase(((76, 52), (38, 26), (19, 13)), classes=1, batch=3),
    DetectCase(((20, 34), (10, 17)), classes=20, bins=8),
    DetectCase(((13, 13),), classes=200, bins=1, xywh=False),
    DetectCase(((1, 1), (3, 1), (1, 13)), classes=130, bins=5),
    DetectCase(((8, 8), (4, 4)), classes=80, bins=16, batch=1, xywh=False),
)


def double(arguments: tuple) -> tuple:
    return tuple(
        [t.double() for t in a] if isinstance(a, list) else a.double() if isinstance(a, Tensor) else a
        for a in arguments
    )


def check_detect(
    case: DetectCase, precision: str, device: object, layout: str, arguments: tuple | None = None
):
    """The op against stock's operations and a float64 truth: a list of what is wrong, and how much of the limit is
    used."""
    dtype = getattr(torch, precision)
    arguments = arguments or case.inputs(dtype, device, layout)
    stock = _aten_maps.detect_decode(*arguments, case.xywh)
    truth = _aten_maps.detect_decode(*double(arguments), case.xywh)
    ours = ops.detect_decode(*arguments, xywh=case.xywh)
    problems, used = [], 0.0
    for name, a, b in zip(("y", "boxes", "scores"), ours, stock, strict=True):
        if not a.is_contiguous() or (a.shape, a.dtype) != (b.shape, b.dtype):
            problems.append(f"{name} is {a.dtype} {tuple(a.shape)} {a.stride()}")
    for name, a, b in zip(("boxes", "scores"), ours[1:], stock[1:], strict=True):
        if not (a.nan_to_num(9e4) == b.nan_to_num(9e4)).all():
            problems.append(f"{name} differ from the maps in {(a != b).sum()} elements")
    floor = error_rule.tolerances().floor("y", precision, 4 * case.bins)
    for name, part in (("box", slice(0, 4)), ("confidence", slice(4, None))):
        c = error_rule.compare(ours[0][:, part], stock[0][:, part], truth[0][:, part], floor)
        used = max(used, c.used)
        if not c.ok:
            problems.append(f"{name}: ours {c.ours} stock {c.stock} limit {c.limit} {c.problem}")
    return [f"{case} {precision} {layout} {p}" for p in problems], used
