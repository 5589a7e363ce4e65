"""Inputs for tests and benchmarks: the convolutions of the YOLO12 models, and convolutions chosen to be awkward.

for case in cases.conv_shapes("n") + cases.AWKWARD:
    inputs = case.inputs(torch.float16, device="cuda", seed=0)
    y = ops.conv_bn_act(**inputs.eval_arguments())
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import yaml
from torch import Tensor

from yolo12_fastconv import _compat, ops

SCALES = ("n", "s", "m", "l", "x")

LAYOUTS = {
    "nhwc": "channels_last",
    "nchw": "contiguous",
    "slice": "channels 8.. of a wider NHWC tensor: 16-byte aligned in half",
    "misaligned": "channels 3.. of a wider NHWC tensor: no pixel starts on more than 2 bytes in half",
    "nchw_slice": "channels 3.. of a wider NCHW tensor",
    "crop": "a window inside a larger NHWC picture",
    "transposed": "height and width swapped: neither NCHW nor NHWC",
    "expanded": "the first NHWC picture seen N times: batch stride 0",
}


def relayout(x: Tensor, layout: str) -> Tensor:
    """The numbers of `x` (N, C, H, W) in one of `LAYOUTS`. What lies around a slice or a crop is NaN.

    Raises:
        ValueError: there is no such layout.
    """
    n, c, h, w = x.shape

    def window(
        channels: int, c0: int, height: int, h0: int, width: int, w0: int, memory_format: torch.memory_format
    ) -> Tensor:
        wide = x.new_full((n, channels, height, width), float("nan")).contiguous(memory_format=memory_format)
        view = wide[:, c0 : c0 + c, h0 : h0 + h, w0 : w0 + w]
        view.copy_(x)
        return view

    nhwc, nchw = torch.channels_last, torch.contiguous_format
    match layout:
        case "nhwc":
            return x.contiguous(memory_format=nhwc)
        case "nchw":
            return x.contiguous()
        case "slice":
            # Always at least one 16-byte group on either side, and a pixel stride that is a multiple of 8.
            return window(-(-c // 8) * 8 + 16, 8, h, 0, w, 0, nhwc)
        case "misaligned":
            return window(c + 4, 3, h, 0, w, 0, nhwc)
        case "nchw_slice":
            return window(c + 4, 3, h, 0, w, 0, nchw)
        case "crop":
            return window(c, 0, h + 3, 2, w + 2, 1, nhwc)
        case "transposed":
            return x.transpose(2, 3).contiguous(memory_format=nhwc).transpose(2, 3)
        case "expanded":
            return x[:1].contiguous(memory_format=nhwc).expand(n, c, h, w)
    raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call. `mean` and `var` are running statistics; all but x, weight, grad_y may be None."""

    case: Case
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    var: Tensor | None
    residual: Tensor | None
    grad_y: Tensor

    def _geometry(self) -> dict[str, Any]:
        case = self.case
        return dict(
            stride=case.stride, padding=case.padding, dilation=case.dilation, groups=case.groups, act=case.act
        )

    def eval_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `ops.conv_bn_act`."""
        bn = None
        if self.mean is not None and self.var is not None:
            bn = ops.BatchNormState(self.gamma, self.beta, self.mean, self.var, self.case.eps)
        return dict(
            x=self.x, weight=self.weight, bias=self.bias, bn=bn, residual=self.residual, **self._geometry()
        )

    def train_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `ops.conv_bn_act_train`."""
        return dict(
            x=self.x, weight=self.weight, bias=self.bias, bn_weight=self.gamma, bn_bias=self.beta,
            eps=self.case.eps, residual=self.residual, **self._geometry(),
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One convolution block. Pairs are (height, width). `str(case)` is a test id."""

    name: str
    ci: int
    co: int
    h: int
    w: int
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    act: str = "silu"
    batch: int = 2
    bias: bool = False
    bn: bool = True
    affine: bool = True
    residual: bool = False
    layout: str = "nhwc"
    x_mean: float = 0.0
    x_std: float = 1.0
    eps: float = 1e-3
    count: int = 1
    """How many such blocks the model has."""

    def __str__(self) -> str:
        return self.name

    @property
    def out_size(self) -> tuple[int, int, int, int]:
        """(N, K, P, Q)."""
        p, q = (
            (size + 2 * pad - dil * (k - 1) - 1) // step + 1
            for size, k, step, pad, dil in zip(
                (self.h, self.w), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return self.batch, self.co, p, q

    @property
    def terms(self) -> int:
        """Products that one output value is the sum of: C / groups * R * S."""
        return self.ci // self.groups * self.kernel[0] * self.kernel[1]

    @property
    def flops(self) -> int:
        """Multiplications and additions of one forward convolution."""
        n, k, p, q = self.out_size
        return 2 * n * k * p * q * self.terms

    @property
    def family(self) -> str:
        """Kind of convolution: stem, pointwise, depthwise, grouped, or dense with its kernel size."""
        if self.groups == 1:
            if self.kernel == (1, 1):
                return "pointwise"
            return "stem" if self.ci <= 4 else f"dense {self.kernel[0]}x{self.kernel[1]}"
        return "depthwise" if self.groups == self.ci else "grouped"

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of x, weight and y, each once."""
        n, k, p, q = self.out_size
        return dtype.itemsize * (self.batch * self.ci * self.h * self.w + k * self.terms + n * k * p * q)

    def inputs(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        param_dtype: torch.dtype | None = None,
        bn_dtype: torch.dtype | None = None,
    ) -> Inputs:
        """Seeded tensors of this case on `device`, drawn there. The global random state stays as it is.

        Args:
            dtype: of x, residual and grad_y.
            param_dtype: of weight and bias; `dtype` by default. float32 is what training under autocast has.
            bn_dtype: of the batch norm's vectors; `param_dtype` by default.
        """
        device = torch.device(device)
        generator = torch.Generator(device).manual_seed(seed)
        param_dtype = param_dtype or dtype
        bn_dtype = bn_dtype or param_dtype

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, device=device)

        def uniform(low: float, high: float, *size: int) -> Tensor:
            return low + (high - low) * torch.rand(*size, generator=generator, device=device)

        values = self.x_mean + self.x_std * normal(self.batch, self.ci, self.h, self.w)
        x = relayout(values.to(dtype), self.layout)
        weight = normal(self.co, self.ci // self.groups, *self.kernel) / self.terms**0.5
        # The running statistics belong to what the convolution returns, more or less.
        mean = self.x_mean * weight.sum((1, 2, 3)) + 0.1 * self.x_std * normal(self.co)
        var = self.x_std**2 * uniform(0.5, 1.5, self.co)
        bias, gamma, beta = normal(self.co), uniform(0.5, 1.5, self.co), 0.3 * normal(self.co)
        nhwc = torch.channels_last
        return Inputs(
            case=self,
            x=x,
            weight=weight.to(param_dtype),
            bias=bias.to(param_dtype) if self.bias else None,
            gamma=gamma.to(bn_dtype) if self.bn and self.affine else None,
            beta=beta.to(bn_dtype) if self.bn and self.affine else None,
            mean=mean.to(bn_dtype) if self.bn else None,
            var=var.to(bn_dtype) if self.bn else None,
            residual=normal(*self.out_size).to(dtype).contiguous(memory_format=nhwc)
            if self.residual
            else None,
            grad_y=normal(*self.out_size).to(dtype).contiguous(memory_format=nhwc),
        )


def with_layouts(case: Case, layouts: Sequence[str]) -> list[Case]:
    """`case` once per layout, the layout's name in the case's."""
    return [replace(case, layout=layout, name=f"{case.name}-{layout}") for layout in layouts]


@functools.cache
def _listing() -> dict[str, Any]:
    return yaml.safe_load(_compat.config_path("conv_shapes.yaml").read_text(encoding="utf-8"))


def conv_shapes(
    scale: str, imgsz: int | tuple[int, int] | None = None, *, task: str = "detect", batch: int = 2
) -> list[Case]:
    """Every distinct Conv block of a YOLO12 model, from configs/conv_shapes.yaml.

    Args:
        scale: "n", "s", "m", "l" or "x"; "yolo12n" means "n".
        imgsz: input size, a number or (height, width), multiples of 32; by default the size the model trains with.
        task: "detect", or "segment", "pose", "obb", "classify" for what these have beyond detect.
        batch: pictures per batch.

    Raises:
        ValueError: a scale, task or size that does not exist.
    """
    scale = scale.removeprefix("yolo12")
    listing = _listing()
    if task not in listing or scale not in SCALES:
        raise ValueError(
            f"no YOLO12 model of task {task!r} and scale {scale!r}: {', '.join(listing)}; n, s, m, l, x"
        )
    trained = listing[task]["imgsz"]
    height, width = (imgsz or trained,) * 2 if imgsz is None or isinstance(imgsz, int) else imgsz
    if height % 32 or width % 32 or height <= 0 or width <= 0:
        raise ValueError(f"imgsz must be positive multiples of 32, got {height}x{width}")
    cases = []
    for row in listing[task][scale]:
        ci, co, k, s, p, d, groups, act = (
            row[key] for key in ("ci", "co", "k", "s", "p", "d", "groups", "act")
        )
        # A map is the input divided by a power of two; a classifier's last one is 7 of 224.
        h, w = height * row["h"] // trained, width * row["w"] // trained
        kind = f"dw{k}x{k}" if groups == ci and groups > 1 else f"{k}x{k}"
        cases.append(
            Case(
                name=f"{scale}-{ci}to{co}-{kind}{f's{s}' if s > 1 else ''}-{h}x{w}-{act}",
                ci=ci,
                co=co,
                h=h,
                w=w,
                kernel=(k, k),
                stride=(s, s),
                padding=(p, p),
                dilation=(d, d),
                groups=groups,
                act=act,
                batch=batch,
                count=row["count"],
            )
        )
    return cases


def _awkward() -> list[Case]:
    k3: dict[str, Any] = dict(kernel=(3, 3), padding=(1, 1))
    k5: dict[str, Any] = dict(kernel=(5, 5), padding=(2, 2))
    k7: dict[str, Any] = dict(kernel=(7, 7), padding=(3, 3))
    cases = [
        # Channel counts: odd, prime, single, smaller than any tile, one more than a tile.
        Case("odd-channels-1x1", 13, 307, 9, 11),
        Case("odd-channels-460-1x1", 460, 13, 7, 5, act="identity"),
        Case("odd-channels-307-1x1", 307, 384, 12, 12, act="identity"),
        Case("odd-channels-3x3", 13, 17, 11, 13, **k3),
        Case("one-channel-in", 1, 16, 10, 10, **k3),
        Case("one-channel-out", 16, 1, 10, 10, **k3),
        Case("one-channel-in-and-out", 1, 1, 6, 7),
        Case("tile-plus-one", 129, 65, 17, 16),
        Case("deep-sum", 1024, 8, 6, 6, **k3),
        Case("wide-output", 8, 1000, 4, 4),
        # Maps: one row, one column, one pixel, smaller than the kernel, sizes that leave a remainder with the stride.
        Case("one-row", 16, 24, 1, 37, **k3),
        Case("one-column", 16, 24, 41, 1, **k3),
        Case("one-pixel", 32, 48, 1, 1, batch=3),
        Case("one-pixel-3x3", 32, 48, 1, 1, batch=4, **k3),
        Case("map-smaller-than-kernel", 8, 16, 2, 3, **k7),
        Case("stride-2-odd-map", 16, 32, 19, 21, stride=(2, 2), **k3),
        Case("stride-2-even-map", 16, 32, 18, 20, stride=(2, 2), **k3),
        Case("stride-2-1x1", 24, 32, 13, 15, stride=(2, 2)),
        Case("stride-3", 16, 16, 20, 22, stride=(3, 3), **k3),
        Case("stem-odd-map", 3, 16, 33, 47, stride=(2, 2), layout="nchw", **k3),
        Case("stem-nhwc", 3, 24, 34, 46, stride=(2, 2), **k3),
        Case("stem-even-map", 3, 16, 32, 80, stride=(2, 2), layout="nchw", **k3),
        Case("stem-even-map-nhwc", 3, 64, 24, 72, stride=(2, 2), **k3),
        Case("stem-wide", 3, 96, 20, 136, stride=(2, 2), layout="nchw", **k3),
        Case("stem-unpadded", 3, 32, 19, 64, kernel=(3, 3), stride=(2, 2), layout="nchw"),
        Case("stem-odd-channels-out", 3, 7, 16, 64, stride=(2, 2), layout="nchw", **k3),
        Case("stem-one-channel", 1, 16, 22, 34, stride=(2, 2), layout="nchw", **k3),
        Case("stem-four-channels", 4, 24, 13, 35, stride=(2, 2), **k3),
        Case("stem-stride-1", 3, 16, 11, 41, layout="nchw", **k3),
        Case("stem-stride-1x2", 3, 12, 12, 40, kernel=(3, 3), stride=(1, 2), padding=(1, 1), act="identity"),
        Case("stem-residual", 3, 16, 16, 32, stride=(2, 2), residual=True, layout="nchw", **k3),
        Case("stem-6x6", 3, 16, 32, 40, kernel=(6, 6), stride=(2, 2), padding=(2, 2), layout="nchw"),
        Case("prime-map", 32, 32, 31, 37, **k3),
        Case("batch-1", 64, 64, 20, 34, batch=1, **k3),
        Case("batch-17", 8, 8, 5, 7, batch=17),
        # Kernels: even, large, oblong, dilated, padded beyond half the kernel, not padded, unequal in the two axes.
        Case("kernel-2x2", 16, 16, 9, 10, kernel=(2, 2)),
        Case("kernel-2x2-padded", 16, 16, 9, 10, kernel=(2, 2), padding=(1, 1)),
        Case("kernel-4x4-stride-2", 16, 24, 16, 18, kernel=(4, 4), stride=(2, 2), padding=(1, 1)),
        Case("kernel-5x5", 16, 24, 14, 15, **k5),
        Case("kernel-7x7", 8, 16, 15, 14, **k7),
        Case("kernel-1x7", 16, 16, 10, 12, kernel=(1, 7), padding=(0, 3)),
        Case("kernel-7x1", 16, 16, 10, 12, kernel=(7, 1), padding=(3, 0)),
        Case("kernel-11x11", 4, 8, 16, 16, kernel=(11, 11), padding=(5, 5)),
        Case("kernel-3x3-no-padding", 16, 16, 8, 9, kernel=(3, 3)),
        Case("dilation-2", 16, 16, 15, 17, kernel=(3, 3), padding=(2, 2), dilation=(2, 2)),
        Case("dilation-2-stride-2", 16, 16, 15, 17, kernel=(3, 3), padding=(2, 2), dilation=(2, 2), stride=(2, 2)),
        Case("dilation-2x3", 16, 16, 15, 17, kernel=(3, 3), padding=(2, 3), dilation=(2, 3)),
        Case("padding-over-half", 16, 16, 7, 8, kernel=(3, 3), padding=(4, 3)),
        Case("padding-1x1", 16, 16, 7, 8, padding=(2, 1)),
        Case("asymmetric-stride", 16, 16, 13, 16, stride=(1, 2), **k3),
        Case("asymmetric-padding", 16, 16, 13, 16, kernel=(3, 3), padding=(0, 1)),
        # Groups.
        Case("groups-2", 32, 48, 10, 11, groups=2, **k3),
        Case("groups-4-1x1", 32, 64, 10, 11, groups=4),
        Case("groups-odd", 21, 15, 9, 9, groups=3, **k3),
        Case("depthwise-3x3", 40, 40, 12, 13, groups=40, **k3),
        Case("depthwise-5x5", 24, 24, 12, 13, groups=24, **k5),
        Case("depthwise-7x7", 48, 48, 20, 20, groups=48, act="identity", **k7),
        Case("depthwise-odd-channels", 13, 13, 11, 9, groups=13, **k3),
        Case("depthwise-7x7-odd-channels", 37, 37, 9, 10, groups=37, **k7),
        Case("depthwise-stride-2", 32, 32, 15, 17, groups=32, stride=(2, 2), **k3),
        Case("depthwise-1x1", 32, 32, 9, 9, groups=32),
        Case("depthwise-multiplier-2", 16, 32, 11, 12, groups=16, **k3),
        Case("depthwise-one-row", 16, 16, 1, 20, groups=16, **k7),
        # What follows the convolution.
        Case("bias-and-bn", 24, 32, 9, 10, bias=True, **k3),
        Case("bias-no-bn", 24, 32, 9, 10, bias=True, bn=False, **k3),
        Case("no-bias-no-bn", 24, 32, 9, 10, bn=False, act="identity"),
        Case("bn-without-affine", 24, 32, 9, 10, affine=False),
        Case("residual", 32, 32, 11, 10, residual=True, **k3),
        Case("residual-identity", 32, 32, 11, 10, residual=True, act="identity"),
        Case("residual-odd-channels", 13, 13, 7, 9, residual=True, bias=True, bn=False, **k3),
        Case("residual-depthwise", 24, 24, 11, 10, residual=True, groups=24, **k3),
        Case("residual-depthwise-7x7", 40, 40, 13, 23, residual=True, groups=40, act="identity", **k7),
        Case("classifier-eps", 32, 32, 7, 7, eps=1e-5),
        # Numbers: a large mean beside a small variance, and values near both ends of half precision.
        Case("large-mean", 16, 32, 12, 12, x_mean=20.0, x_std=0.05),
        Case("large-mean-3x3", 16, 32, 12, 12, x_mean=-8.0, x_std=0.5, **k3),
        Case("large-values", 16, 32, 8, 8, x_std=1000.0, **k3),
        Case("small-values", 16, 32, 8, 8, x_std=1e-3, **k3),
    ]  # fmt: skip
    foreign = [layout for layout in LAYOUTS if layout != "nhwc"]
    for base in (
        Case("pointwise", 32, 48, 10, 12),
        Case("dense-3x3", 16, 24, 10, 12, **k3),
        Case("dense-3x3-stride-2", 16, 24, 11, 13, stride=(2, 2), **k3),
        Case("depthwise", 32, 32, 10, 12, groups=32, **k3),
        Case("odd", 13, 17, 9, 10, **k3),
    ):
        cases += with_layouts(base, foreign)
    return cases


AWKWARD: list[Case] = _awkward()
"""Small blocks, each with something that a kernel may get wrong."""
