"""The error rule: how two roundings of one computation are compared with a float64 truth.

``error(ours, truth) <= factor * error(stock, truth) + floor``; configs/tolerances.yaml has the numbers and their
reasons. Used by `check_parity` and by the tests of the ops.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from torch import Tensor

from yolo12_fastconv import _compat

__all__ = ["Comparison", "Tolerances", "compare", "round_tf32", "tolerances"]

HALF = ("float16", "bfloat16")


@dataclass(frozen=True)
class Comparison:
    """One tensor of ours beside stock's, both against the truth. Errors are (max, l2), relative to the truth."""

    ours: tuple[float, float]
    stock: tuple[float, float]
    limit: tuple[float, float]
    """``factor * stock + floor`` for each error, see `compare`."""
    problem: str = ""
    """Why the tensors cannot be compared, or where NaN and infinities differ; empty if neither."""

    @classmethod
    def impossible(cls, problem: str) -> Comparison:
        """A failed comparison without numbers."""
        nan = (math.nan, math.nan)
        return cls(nan, nan, nan, problem)

    @property
    def ok(self) -> bool:
        return not self.problem and all(a <= b for a, b in zip(self.ours, self.limit, strict=True))

    @property
    def ratio(self) -> float:
        """Our error over stock's, the larger of the two measures; 1 where both are exact."""
        pairs = zip(self.ours, self.stock, strict=True)
        return max(1.0 if a == b else a / b if b else math.inf for a, b in pairs)

    @property
    def used(self) -> float:
        """How much of the limit our error takes, the larger of the two measures: above 1 is broken."""
        if self.problem:
            return math.inf
        pairs = zip(self.ours, self.limit, strict=True)
        return max(0.0 if a == 0 else a / b if b else math.inf for a, b in pairs)


class Tolerances:
    """configs/tolerances.yaml, checked when it is read."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.factor = float(values["factor"])
        self.unit_roundoff = {name: float(u) for name, u in values["unit_roundoff"].items()}
        self.quantities: dict[str, dict[str, Any]] = values["quantities"]
        self.detections: dict[str, Any] = values["detections"]

    def floor(self, quantity: str, precision: str, terms: int) -> float:
        """The floor of `quantity` ("y", "grad_x", ...) for values that are each a sum of `terms` terms.

        `precision` is "float16", "bfloat16", "float32" or "tf32".
        """
        row = self.quantities[quantity]
        u, v = self.unit_roundoff[precision], self.unit_roundoff["float32"]
        chain = min(max(terms, 1), row.get("chain", math.inf))
        floor = _of(row["roundings"], precision) * u + row["growth"] * math.sqrt(chain) * v
        return floor + _of(row.get("averaged", {}), precision) / math.sqrt(max(terms, 1)) * u

    def detection(self, rule: str, precision: str) -> float:
        """Least "iou" or largest difference of "score" of two matched detections."""
        return _of(self.detections[rule], precision)


def _of(row: dict[str, float], precision: str) -> float:
    """The entry of `row` for `precision`: its own, else that of all half formats, else float32's for TF32."""
    keys = (precision, "half" if precision in HALF else "float32")
    return next((float(row[key]) for key in keys if key in row), 0.0)


@functools.cache
def tolerances() -> Tolerances:
    """The tolerances of this checkout or installed package."""
    return Tolerances(yaml.safe_load(_compat.config_path("tolerances.yaml").read_text(encoding="utf-8")))


def precision_name(dtype: torch.dtype, allow_tf32: bool, device: torch.device) -> str:
    """Name under which configs/tolerances.yaml lists the arithmetic of `dtype` on `device`."""
    if dtype is torch.float32 and allow_tf32 and device.type == "cuda":
        return "tf32"
    return str(dtype).removeprefix("torch.")


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no word for it (NaN, infinity)."""
    return value if math.isfinite(value) else None


def round_tf32(tensor: Tensor) -> Tensor:
    """Float32 numbers rounded to the 10 fraction bits of TF32, ties away from zero."""
    bits = tensor.detach().float().view(torch.int32)
    return torch.where(tensor.isfinite(), ((bits + 0x1000) & ~0x1FFF).view(torch.float32), tensor)


def compare(
    ours: Tensor,
    stock: Tensor,
    truth: Tensor,
    floor: float,
    *,
    factor: float | None = None,
    scale: float = 0.0,
    granted: Tensor | None = None,
) -> Comparison:
    """Compares two tensors with a float64 truth, under the error rule.

    Args:
        ours, stock: same shape, dtype and device; a difference in one of them is a problem, not an error.
        truth: float64, same shape and device.
        floor: as from `Tolerances.floor`.
        factor: instead of that of configs/tolerances.yaml.
        scale: of a quantity that is zero but for rounding: errors are divided by this where it is larger than the
            truth's own largest value (max), or root mean square (l2).
        granted: another value of the tensor, in float64, whose error counts as stock's where it is larger: of TF32,
            which stock may use too, and uses where cuDNN thinks fit.

    NaN and infinities must stand where stock has them; the errors are those of all other positions.
    """
    factor = tolerances().factor if factor is None else factor
    for what in ("shape", "dtype", "device"):
        a, b = getattr(ours, what), getattr(stock, what)
        if a != b:
            return Comparison.impossible(f"{what} is {_plain(a)}, stock's {_plain(b)}")
    if truth.shape != stock.shape:
        raise ValueError(f"the truth has shape {tuple(truth.shape)}, stock {tuple(stock.shape)}")
    if not stock.numel():
        return Comparison((0.0, 0.0), (0.0, 0.0), (floor, floor))
    # Numbers below the smallest normal one have a fixed step instead of a relative precision.
    limits = torch.finfo(stock.dtype)
    step = limits.smallest_normal * limits.eps
    ours, stock, truth = ours.detach().double(), stock.detach().double(), truth.detach()
    finite = stock.isfinite()
    unlike = (ours.isnan() != stock.isnan()) | (ours.isinf() != stock.isinf())
    unlike |= ours.isinf() & stock.isinf() & (ours != stock)
    usable = finite & ours.isfinite() & truth.isfinite()
    sizes, errors = truth.where(usable, 0.0), []
    for values in (ours, stock, truth if granted is None else granted.detach()):
        error = (values - truth).where(usable, 0.0)
        errors += [error.abs().max(), error.norm()]
    # One transfer from the device for all numbers.
    largest, norm, ours_max, ours_l2, stock_max, stock_l2, granted_max, granted_l2, wrong = torch.stack(
        [sizes.abs().max(), sizes.norm(), *errors, unlike.sum().double()]
    ).tolist()
    # An all-zero truth has no scale of its own: then errors are absolute.
    largest, norm = max(largest, scale) or 1.0, max(norm, scale * math.sqrt(truth.numel())) or 1.0
    ours_error, stock_error = (ours_max / largest, ours_l2 / norm), (stock_max / largest, stock_l2 / norm)
    base = (max(stock_error[0], granted_max / largest), max(stock_error[1], granted_l2 / norm))
    steps = (step / largest, step * math.sqrt(truth.numel()) / norm)
    limit = (factor * base[0] + floor + steps[0], factor * base[1] + floor + steps[1])
    problem = f"NaN or infinity differs from stock in {int(wrong)} of {truth.numel()} values" if wrong else ""
    return Comparison(ours_error, stock_error, limit, problem)


def _plain(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value).removeprefix("torch.")
