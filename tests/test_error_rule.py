"""The error rule and its tolerances."""

from __future__ import annotations

import math

import pytest
import torch

from yolo12_fastconv import error_rule
from yolo12_fastconv.error_rule import Comparison, compare, tolerances

TRUTH = torch.linspace(-2, 2, 64, dtype=torch.float64)


def test_errors_are_relative_to_the_truth():
    ours, stock = TRUTH.float().clone(), TRUTH.float().clone()
    ours[-1] += 0.5
    comparison = compare(ours, stock, TRUTH, floor=0.0)
    assert comparison.ours[0] == pytest.approx(0.5 / 2, rel=1e-6)
    assert comparison.ours[1] == pytest.approx(0.5 / TRUTH.norm().item(), rel=1e-6)
    assert max(comparison.stock) < 1e-7
    assert not comparison.ok and comparison.used > 1 and comparison.ratio > 1e6


def test_rule_is_twice_stock_plus_floor():
    stock = (TRUTH * 1.001).float()
    assert compare((TRUTH * 1.0019).float(), stock, TRUTH, floor=0.0).ok
    assert not compare((TRUTH * 1.0021).float(), stock, TRUTH, floor=0.0).ok
    assert compare((TRUTH * 1.0021).float(), stock, TRUTH, floor=2e-4).ok


def test_one_wrong_value_among_many_is_seen():
    truth = torch.randn(100_000, dtype=torch.float64)
    ours = truth.float()
    ours[777] += 1e-4
    assert not compare(ours, truth.float(), truth, floor=tolerances().floor("y", "float32", 64)).ok


def test_small_drift_everywhere_is_seen():
    truth = torch.randn(100_000, dtype=torch.float64)
    floor = tolerances().floor("y", "float32", 64)
    assert not compare((truth * (1 + 4e-6)).float(), truth.float(), truth, floor=floor).ok
    assert compare((truth * (1 + 4e-7)).float(), truth.float(), truth, floor=floor).ok


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["ours", "stock"])
def test_non_finite_on_one_side_is_a_problem(value, side):
    values = {"ours": TRUTH.float().clone(), "stock": TRUTH.float().clone()}
    values[side][5] = value
    comparison = compare(values["ours"], values["stock"], TRUTH, floor=1.0)
    assert not comparison.ok and "in 1 of 64 values" in comparison.problem
    values["ours"][5] = values["stock"][5] = value
    comparison = compare(values["ours"], values["stock"], TRUTH, floor=0.0)
    assert comparison.ok and max(comparison.ours) < 1e-7, "the errors are those of the other values"
    values["ours"][5] = -value if math.isinf(value) else math.inf
    assert not compare(values["ours"], values["stock"], TRUTH, floor=1.0).ok


@pytest.mark.parametrize(
    ("ours", "word"), [(TRUTH.float()[1:], "shape"), (TRUTH.half(), "dtype"), (TRUTH.float()[None], "shape")]
)
def test_other_shape_or_dtype_is_a_problem(ours, word):
    comparison = compare(ours, TRUTH.float(), TRUTH, floor=1.0)
    assert not comparison.ok and comparison.problem.startswith(word)
    assert comparison.used == math.inf


def test_zero_truth_has_absolute_errors():
    zero = torch.zeros(8, dtype=torch.float64)
    assert compare(zero.float(), zero.float(), zero, floor=0.0).ok
    assert not compare(zero.float() + 1e-3, zero.float(), zero, floor=1e-4).ok
    assert compare(zero.float() + 1e-3, zero.float(), zero, floor=1e-4, scale=100.0).ok


def test_numbers_without_relative_precision_get_one_step():
    truth = torch.full((16,), 3.3e-8, dtype=torch.float64)
    stock = torch.zeros(16, dtype=torch.float16)
    ours = torch.full((16,), 6e-8, dtype=torch.float16)
    assert ours.unique().item() == pytest.approx(2**-24)
    assert compare(ours, stock, truth, floor=1e-3).ok
    assert not compare(ours * 4, stock, truth, floor=1e-3).ok


def test_empty_tensors_agree():
    empty = torch.zeros(0, 4)
    assert compare(empty, empty, empty.double(), floor=0.0).ok


def test_ratio_of_exact_sides():
    assert Comparison((0.0, 0.0), (0.0, 0.0), (0.0, 0.0)).ratio == 1
    assert Comparison((1.0, 0.0), (0.0, 0.0), (2.0, 0.0)).ratio == math.inf


def test_floors_are_below_what_must_be_found():
    """A weight off by a factor of 1.001 changes float32 results by 1e-3: far above any floor of the model's layers."""
    rules = tolerances()
    assert rules.factor == 2
    for quantity in ("y", "grad_x", "grad_weight", "grad_bn_weight", "running_mean", "running_var"):
        assert rules.floor(quantity, "float32", 7000) < 1e-5
        assert rules.floor(quantity, "float32", 32 * 320 * 320) < 1e-4
    assert rules.floor("y", "float16", 576) < 2e-3
    assert rules.floor("y", "bfloat16", 576) == pytest.approx(8 * rules.floor("y", "float16", 576), rel=1e-2)


def test_unit_roundoffs_are_those_of_the_dtypes():
    for name in ("float16", "bfloat16", "float32"):
        assert tolerances().unit_roundoff[name] == torch.finfo(getattr(torch, name)).eps / 2
    assert tolerances().unit_roundoff["tf32"] == 2**-11


def test_tf32_rounds_to_ten_fraction_bits():
    x = torch.cat([torch.randn(10_000), torch.tensor([0.0, 1.0, -3.5, 1e-30, 6e4])])
    rounded = error_rule.round_tf32(x)
    error = ((rounded - x).abs() / x.abs().clamp_min(1e-37)).max().item()
    assert 0.9 * 2**-11 < error <= 2**-11
    assert torch.equal(error_rule.round_tf32(rounded), rounded)
    assert not (rounded.view(torch.int32) & 0x1FFF).any()
    assert error_rule.round_tf32(torch.tensor([math.inf, -math.inf, math.nan])).isfinite().sum() == 0


def test_error_of_tf32_is_granted():
    stock, ours = TRUTH.float(), (TRUTH * 1.0005).float()
    assert not compare(ours, stock, TRUTH, floor=1e-5).ok
    granted = compare(ours, stock, TRUTH, floor=1e-5, granted=TRUTH * 0.9997)
    assert granted.ok and max(granted.stock) < 1e-7


def test_precision_names():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert error_rule.precision_name(torch.float32, True, cuda) == "tf32"
    assert error_rule.precision_name(torch.float32, True, cpu) == "float32"
    assert error_rule.precision_name(torch.float32, False, cuda) == "float32"
    assert error_rule.precision_name(torch.bfloat16, True, cuda) == "bfloat16"
