"""The ops on feature maps on a CPU: equal to stock's operations, gradients, fakes, bad input."""

from __future__ import annotations

import map_checks
import pytest
import torch
from torch.library import opcheck

from yolo12_fastconv import ops

OPS = torch.ops.yolo12_fastconv
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", map_checks.LAYOUTS)
def test_concat_equals_stock(dtype, layout):
    for case in map_checks.CONCATS:
        maps = case.inputs(dtype, "cpu", layout)
        y, stock = ops.concat_channels(maps, case.scales), case.stock(maps)
        assert torch.equal(y, stock) and y.dtype is stock.dtype and y.stride() == stock.stride(), case


def test_concat_promotes_like_stock_or_to_the_given_dtype():
    a, b = torch.randn(1, 2, 3, 3).half(), torch.randn(1, 4, 3, 3)
    assert torch.equal(ops.concat_channels([a, b]), torch.cat([a, b], 1))
    assert ops.concat_channels([a, a], dtype=torch.float32).dtype is torch.float32


def test_concat_gradients():
    for case in map_checks.CONCATS[3:6]:
        maps = [x.requires_grad_() for x in case.inputs(torch.float64, "cpu", "nhwc")]

        def concat(*tensors, scales=case.scales):
            return ops.concat_channels(tensors, scales)

        assert torch.autograd.gradcheck(concat, maps)
        assert torch.autograd.gradgradcheck(concat, maps)


def test_concat_gradient_goes_where_it_is_wanted():
    a, b = torch.randn(1, 3, 2, 2), torch.randn(1, 2, 4, 4, requires_grad=True)
    ops.concat_channels([a, b], [2, 1]).sum().backward()
    assert a.grad is None and torch.equal(b.grad, torch.ones_like(b))


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16", "float16"])
def test_detect_equals_stock_bit_for_bit(precision):
    for case in map_checks.DETECTS[1:]:
        arguments = case.inputs(getattr(torch, precision), "cpu", "padded")
        problems, used = [], 0.0
        if precision != "float64":
            problems, used = map_checks.check_detect(case, precision, "cpu", "padded")
        assert not problems and used < 1
        from yolo12_fastconv import _aten_maps

        for ours, stock in zip(
            ops.detect_decode(*arguments, xywh=case.xywh),
            _aten_maps.detect_decode(*arguments, case.xywh),
            strict=True,
        ):
            assert torch.equal(ours, stock)


def test_detect_is_differentiable():
    case = map_checks.DetectCase(((2, 2), (1, 1)), classes=2, bins=3, batch=1)
    boxes, scores, values, points, steps = case.inputs(torch.float64, "cpu")
    leaves = [t.requires_grad_() for t in (*boxes, *scores)]

    def decode(*tensors):
        return ops.detect_decode(tensors[:2], tensors[2:], values, points, steps)

    assert torch.autograd.gradcheck(decode, leaves)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_opcheck(layout):
    case = map_checks.CONCATS[4]
    maps = case.inputs(torch.float32, "cpu", layout)
    for arguments in (maps, [x.detach().requires_grad_() for x in maps]):
        opcheck(OPS.concat_channels.default, (arguments, list(case.scales), torch.float32))
    opcheck(OPS.upsample_nearest_backward.default, (maps[0],))
    opcheck(OPS.upsample_nearest_backward.default, (maps[0].detach().requires_grad_(),))
    boxes, scores, *rest = map_checks.DETECTS[3].inputs(torch.float32, "cpu", layout)
    opcheck(OPS.detect_decode.default, (boxes, scores, *rest, True))
    opcheck(OPS.detect_decode.default, ([b.requires_grad_() for b in boxes], scores, *rest, False))


@pytest.mark.parametrize(
    ("tensors", "scales", "message"),
    [
        ([], [], "at least one tensor"),
        ([(1, 2, 3, 3)], [1, 2], "one entry per tensor, got 2 for 1"),
        ([(1, 2, 3, 3)], [3], "scales must be 1 or 2, got 3"),
        ([(1, 2, 3)], [1], r"must be \(N, C, H, W\)"),
        ([(1, 2, 3, 3), (1, 2, 6, 3)], [2, 1], r"tensors\[1\] gives"),
        ([(1, 2, 3, 3), (2, 2, 3, 3)], [1, 1], r"tensors\[1\] gives"),
    ],
)
def test_concat_names_what_is_wrong(tensors, scales, message):
    with pytest.raises(RuntimeError, match=message):
        ops.concat_channels([torch.zeros(size) for size in tensors], scales)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boxes": []}, "one map per level, got 0 and 2"),
        (
            {"boxes": [torch.zeros(2, 33, 20, 34), torch.zeros(2, 33, 10, 17)]},
            "multiple of 4 channels, got 33",
        ),
        ({"scores": [torch.zeros(2, 20, 20, 34), torch.zeros(2, 21, 10, 17)]}, "level 1"),
        ({"bin_values": torch.arange(7.0)}, "must have 8 elements"),
        ({"bin_values": None}, "must have 8 elements"),
        ({"points": torch.zeros(2, 5)}, r"points must be \(2, 850\)"),
        ({"steps": torch.zeros(1, 850, dtype=torch.float64)}, "dtype and device of boxes"),
    ],
)
def test_detect_names_what_is_wrong(change, message):
    names = ("boxes", "scores", "bin_values", "points", "steps")
    arguments = dict(zip(names, map_checks.DETECTS[3].inputs(torch.float32, "cpu"), strict=True))
    with pytest.raises(RuntimeError, match=message):
        ops.detect_decode(**{**arguments, **change})
