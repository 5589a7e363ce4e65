"""The inputs of tests and benchmarks are what they say, and the ops keep the error rule on all awkward ones."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import cases
import op_checks
import pytest
import torch

from yolo12_fastconv import ops

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts" / "list_conv_shapes.py"


def test_listed_shapes_are_those_of_the_models():
    run = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_stale_listing_is_found(tmp_path, monkeypatch, capsys):
    script = runpy.run_path(str(SCRIPT))
    main, path = script["main"], tmp_path / "conv_shapes.yaml"
    monkeypatch.setitem(main.__globals__, "listing", lambda: "detect: {}\n")
    monkeypatch.setitem(main.__globals__, "PATH", path)
    monkeypatch.setattr(sys, "argv", ["list_conv_shapes.py", "--check"])
    assert main() == 1, "a missing file is stale"
    path.write_text("detect: {n: []}\n")
    assert main() == 1
    assert str(path) in capsys.readouterr().err
    path.write_text("detect: {}\n")
    assert main() == 0


@pytest.mark.parametrize(
    ("scale", "blocks", "identity"),
    [("n", 113, 32), ("s", 113, 32), ("m", 123, 32), ("l", 205, 64), ("x", 205, 64)],
)
def test_conv_shapes_have_the_known_counts(scale, blocks, identity):
    shapes = cases.conv_shapes(scale)
    assert sum(case.count for case in shapes) == blocks
    assert sum(case.count for case in shapes if case.act == "identity") == identity
    assert sum(case.count for case in shapes if case.family == "stem") == 1
    assert len({str(case) for case in shapes}) == len(shapes)


def test_conv_shapes_scale_with_the_input():
    square, wide = cases.conv_shapes("yolo12n"), cases.conv_shapes("n", (416, 608))
    for a, b in zip(square, wide, strict=True):
        assert (a.ci, a.co, a.kernel, a.stride) == (b.ci, b.co, b.kernel, b.stride)
        assert (b.h * 640, b.w * 640) == (a.h * 416, a.w * 608)
    with pytest.raises(ValueError, match="100x100"):
        cases.conv_shapes("n", 100)
    with pytest.raises(ValueError, match="'q'"):
        cases.conv_shapes("q")


def test_other_tasks_list_only_what_detect_has_not():
    for scale in cases.SCALES:
        detect = {replace(case, name="", count=0) for case in cases.conv_shapes(scale)}
        for task in ("segment", "pose", "obb", "classify"):
            others = [replace(case, name="", count=0) for case in cases.conv_shapes(scale, task=task)]
            assert not detect & set(others)
            assert others or (task in ("pose", "obb") and scale in "mlx"), (
                "these heads have nothing of their own"
            )


def test_awkward_cases_cover_what_they_should():
    counts = Counter(case.layout for case in cases.AWKWARD)
    assert set(counts) == set(cases.LAYOUTS)
    assert len({str(case) for case in cases.AWKWARD}) == len(cases.AWKWARD)
    channels = {case.ci for case in cases.AWKWARD} | {case.co for case in cases.AWKWARD}
    assert {1, 13, 307, 460} <= channels
    for case in cases.AWKWARD:
        y = torch.nn.functional.conv2d(
            torch.zeros(case.batch, case.ci, case.h, case.w),
            torch.zeros(case.co, case.ci // case.groups, *case.kernel),
            None, case.stride, case.padding, case.dilation, case.groups,
        )  # fmt: skip
        assert tuple(y.shape) == case.out_size


@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_layouts_hold_the_same_numbers(layout):
    x = torch.randn(2, 13, 5, 7)
    given = cases.relayout(x, layout)
    assert given.shape == x.shape
    assert torch.equal(given, x[:1].expand_as(x) if layout == "expanded" else x)
    _n, c, h, w = x.shape
    strides = {
        "nhwc": (h * w * c, 1, w * c, c),
        "nchw": (c * h * w, h * w, w, 1),
        "slice": (h * w * 32, 1, w * 32, 32),
        "misaligned": (h * w * 17, 1, w * 17, 17),
        "nchw_slice": (17 * h * w, h * w, w, 1),
        "crop": ((h + 3) * (w + 2) * c, 1, (w + 2) * c, c),
        "transposed": (h * w * c, 1, c, h * c),
        "expanded": (0, 1, w * c, c),
    }
    assert given.stride() == strides[layout]
    offsets = {"slice": 8, "misaligned": 3, "nchw_slice": 3 * h * w, "crop": (2 * (w + 2) + 1) * c}
    assert given.storage_offset() == offsets.get(layout, 0)


def test_inputs_are_seeded_and_leave_the_random_state():
    case = cases.conv_shapes("n", 64)[5]
    before = torch.get_rng_state()
    a, b, c = case.inputs(seed=3), case.inputs(seed=3), case.inputs(seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a.x, b.x) and torch.equal(a.weight, b.weight) and torch.equal(a.grad_y, b.grad_y)
    assert not torch.equal(a.x, c.x)


def test_parameters_have_the_dtypes_asked_for():
    case = replace(cases.conv_shapes("n", 64)[5], bias=True, residual=True)
    half = case.inputs(torch.bfloat16)
    assert {half.x.dtype, half.weight.dtype, half.bias.dtype, half.mean.dtype, half.residual.dtype} == {
        torch.bfloat16
    }
    mixed = case.inputs(torch.bfloat16, param_dtype=torch.float32)
    assert (mixed.x.dtype, mixed.weight.dtype, mixed.var.dtype) == (
        torch.bfloat16,
        torch.float32,
        torch.float32,
    )


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_ops_keep_the_error_rule_on_awkward_cases(precision):
    findings = [
        finding
        for case in cases.AWKWARD
        for finding in op_checks.check_case(case, precision, "cpu", eval_gradients=True)
    ]
    assert not op_checks.failures(findings), op_checks.failures(findings)
    assert {finding.op for finding in findings} == {"eval", "train"}


def test_op_checks_find_a_wrong_op(monkeypatch):
    """The check of the check: an op that is off in one place, at random, or in its layout is reported."""
    case = replace(cases.conv_shapes("n", 64)[5], layout="slice")
    right = ops.conv_bn_act
    assert not op_checks.failures(op_checks.check_case(case, "float32", "cpu", train=False))

    def off_in_one_value(*args, **kwargs):
        y = right(*args, **kwargs)
        return y + torch.zeros_like(y).index_put([torch.tensor(0)] * 4, torch.tensor(1e-4))

    def random(*args, **kwargs):
        return right(*args, **kwargs) * (1 + 1e-7 * torch.rand(()))

    def unwritten(*args, **kwargs):
        y = right(*args, **kwargs)
        return y.index_fill(1, torch.tensor([3]), float("nan"))

    def overwriting(x, *args, **kwargs):
        y = right(x, *args, **kwargs)
        x[0, 0, 0, 0] += 1
        return y

    for wrong, message in (
        (off_in_one_value, "of the limit"),
        (random, "two runs differ"),
        (unwritten, "NaN or infinity differs"),
        (overwriting, "wrote to its input"),
    ):
        monkeypatch.setattr(ops, "conv_bn_act", wrong)
        text = op_checks.failures(op_checks.check_case(case, "float32", "cpu", train=False))
        assert message in text and str(case) in text, f"{wrong.__name__}: {text}"
