"""The ops on feature maps on CUDA: exact copies, and the error rule for what is computed.

pytest -m gpu tests/test_gpu_maps.py
"""

from __future__ import annotations

import map_checks
import op_checks
import pytest
import torch
from torch.library import opcheck

from yolo12_fastconv import error_rule, ops

pytestmark = pytest.mark.gpu

OPS = torch.ops.yolo12_fastconv
PRECISIONS = ["float16", "bfloat16", "float32"]


@pytest.mark.parametrize("precision", [*PRECISIONS, "float64"])
def test_concat_copies_exactly(cuda, precision):
    for case in map_checks.CONCATS:
        for layout in map_checks.LAYOUTS:
            maps = case.inputs(getattr(torch, precision), cuda, layout)
            stock = case.stock(maps)
            op_checks.poison([stock])
            y = ops.concat_channels(maps, case.scales)
            assert torch.equal(y, stock), f"{case} {layout}"
            assert y.stride() == torch.empty_like(y, memory_format=torch.channels_last).stride(), (
                f"{case} {layout}"
            )


def test_concat_writes_into_a_slice(cuda):
    for case in map_checks.CONCATS:
        for layout in map_checks.LAYOUTS:
            maps = case.inputs(torch.float16, cuda, "nhwc")
            stock = case.stock(maps)
            out = map_checks.laid_out(torch.zeros_like(stock), layout)
            ops.concat_channels_out(maps, case.scales, out)
            assert torch.equal(out, stock), f"{case} {layout}"
            if layout == "slice":  # beside it nothing changes
                wide = out._base if out._base is not None else out
                assert wide.isnan().sum() == wide.numel() - out.numel()


def test_concat_converts(cuda):
    case = map_checks.CONCATS[0]
    half, full = case.inputs(torch.float16, cuda, "nhwc"), case.inputs(torch.float32, cuda, "nchw", seed=1)
    for maps in (half, [half[0], full[1]], [full[0], half[1]]):
        y = ops.concat_channels(maps, case.scales, dtype=torch.float32)
        assert torch.equal(y, case.stock([t.float() for t in maps]))


def test_concat_of_more_words_than_31_bits_count(cuda):
    """Two-byte words of more than 2**31: the kernel is launched in parts."""
    x = torch.zeros(9, 1, 16384, 16384, dtype=torch.float16, device=cuda)
    x[0, 0, 0, 1] = x[8, 0, 5, 6] = x[8, 0, -1, -1] = 1
    y = ops.concat_channels([x])
    assert y.sum(dtype=torch.float32) == 3 and y[8, 0, 5, 6] == 1 and y[8, 0, -1, -1] == 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_concat_gradients(cuda, precision):
    dtype = getattr(torch, precision)
    for case in map_checks.CONCATS:
        for layout in map_checks.LAYOUTS:
            sides = {}
            for side, kind in (("ours", dtype), ("stock", dtype), ("truth", torch.float64)):
                maps = [t.to(kind).detach().requires_grad_() for t in case.inputs(dtype, cuda, layout)]
                y = ops.concat_channels(maps, case.scales) if side == "ours" else case.stock(maps)
                g = torch.Generator(cuda).manual_seed(1)
                grad = torch.randn(y.shape, generator=g, device=cuda, dtype=torch.float64).to(dtype).to(kind)
                sides[side] = torch.autograd.grad(y, maps, map_checks.laid_out(grad, layout))
            floor = error_rule.tolerances().floor("grad_x", precision, 4)
            for ours, stock, truth in zip(*sides.values(), strict=True):
                c = error_rule.compare(ours, stock, truth, floor)
                assert c.ok, f"{case} {layout}: {c}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", map_checks.LAYOUTS)
def test_detect_keeps_the_error_rule(cuda, precision, layout):
    problems = []
    for case in map_checks.DETECTS:
        found, _used = map_checks.check_detect(case, precision, cuda, layout)
        problems += found
    assert not problems, "\n".join(problems)


def test_detect_in_double(cuda):
    for case in map_checks.DETECTS:
        arguments = case.inputs(torch.float64, cuda)
        from yolo12_fastconv import _aten_maps

        for ours, stock in zip(
            ops.detect_decode(*arguments, xywh=case.xywh),
            _aten_maps.detect_decode(*arguments, case.xywh),
            strict=True,
        ):
            torch.testing.assert_close(ours, stock, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_detect_with_nan_and_infinity(cuda, precision):
    case = map_checks.DETECTS[1]
    arguments = case.inputs(getattr(torch, precision), cuda)
    for maps in arguments[:2]:
        for i, value in enumerate((float("nan"), float("inf"), float("-inf"))):
            for level, t in enumerate(maps):
                t[i % 2, (5 * i + level) % t.shape[1], 3 + i, 2 * level] = value
        maps[1][0, :, 4, 4] = float("-inf")
        maps[2][1, :, 5, 5] = float("inf")
    problems, _used = map_checks.check_detect(case, precision, cuda, "nhwc", arguments)
    assert not problems, "\n".join(problems)


def test_detect_is_the_same_every_time_and_writes_all(cuda):
    for case in map_checks.DETECTS:
        arguments = case.inputs(torch.float16, cuda)
        first = ops.detect_decode(*arguments, xywh=case.xywh)
        op_checks.poison(first)
        for a, b in zip(ops.detect_decode(*arguments, xywh=case.xywh), first, strict=True):
            assert torch.equal(a, b) and not a.isnan().any(), case


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("channels", "wide"), [(64, 160), (24, 24), (5, 13), (3, 3)])
def test_upsample_backward_in_place(cuda, dtype, channels, wide):
    """Bit for bit the rounded sum of both gradients, in a slice or in any other layout, and nothing beside it."""
    torch.manual_seed(0)
    grad_y, sums = (
        torch.randn(2, wide, *size, device=cuda).to(dtype, memory_format=torch.channels_last)
        for size in ((12, 20), (6, 10))
    )
    grad_y, before, place = grad_y[:, :channels], sums.clone(), sums[:, wide - channels :]
    gradient = OPS.upsample_nearest_backward.default(grad_y)
    op_checks.poison([gradient.clone()])
    for target in (place, torch.randn(2, channels, 6, 10, device=cuda).to(dtype)):
        expected = target + gradient
        OPS.upsample_nearest_backward_.default(grad_y, target)
        assert torch.equal(target, expected)
    assert torch.equal(sums[:, : wide - channels], before[:, : wide - channels])


def test_ops_on_maps_run_on_the_current_stream_and_in_graphs(cuda):
    case, concat = map_checks.DETECTS[1], map_checks.CONCATS[0]
    arguments, others = (case.inputs(torch.float16, cuda, seed=seed) for seed in (0, 1))
    maps, other_maps = (concat.inputs(torch.float16, cuda, "nhwc", seed=seed) for seed in (0, 1))
    expected = (*ops.detect_decode(*others), ops.concat_channels(other_maps, concat.scales))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ops.detect_decode(*arguments), ops.concat_channels(maps, concat.scales)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = (*ops.detect_decode(*arguments), ops.concat_channels(maps, concat.scales))
    for to, value in zip(
        (*arguments[0], *arguments[1], *maps), (*others[0], *others[1], *other_maps), strict=True
    ):
        to.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


def test_opcheck(cuda):
    case = map_checks.CONCATS[0]
    maps = case.inputs(torch.float16, cuda, "nchw")
    for arguments in (maps, [x.detach().requires_grad_() for x in maps]):
        opcheck(OPS.concat_channels.default, (arguments, list(case.scales), torch.float16))
    opcheck(OPS.upsample_nearest_backward.default, (maps[1],))
    size = (*maps[1].shape[:2], maps[1].shape[2] // 2, maps[1].shape[3] // 2)
    grad_x = torch.randn(size, device=cuda).half()
    opcheck(OPS.upsample_nearest_backward_.default, (maps[1], grad_x))
    opcheck(OPS.concat_channels_out.default, (maps, list(case.scales), torch.empty(2, 24, 8, 6, device=cuda)))
    boxes, scores, *rest = map_checks.DETECTS[3].inputs(torch.float16, cuda)
    opcheck(OPS.detect_decode.default, (boxes, scores, *rest, True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": [torch.zeros(2, 20, 20, 34), torch.zeros(2, 21, 10, 17)]}, "level 1"),
        ({"boxes": [torch.zeros(2, 68, 20, 34), torch.zeros(2, 68, 10, 17)]}, "4 to 64 channels"),
        ({"bin_values": torch.arange(7.0)}, "must have 8 elements"),
        ({"points": torch.zeros(2, 5)}, "points must be 2x850"),
    ],
)
def test_detect_names_what_is_wrong(cuda, change, message):
    names = ("boxes", "scores", "bin_values", "points", "steps")
    arguments = dict(zip(names, map_checks.DETECTS[3].inputs(torch.float32, cuda), strict=True))
    moved = {k: [t.to(cuda) for t in v] if isinstance(v, list) else v.to(cuda) for k, v in change.items()}
    with pytest.raises(RuntimeError, match=message):
        ops.detect_decode(**{**arguments, **moved})
