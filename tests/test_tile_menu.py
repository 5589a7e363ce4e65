"""Which kernel serves which convolution: the compiled library's tile menu, a host function that needs no GPU.

Runs where the library is loaded; `.ci/run` names it by YOLO12_FASTCONV_LIBRARY, and then it has to be.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import cases
import pytest
import torch

from yolo12_fastconv import ops

pytestmark = pytest.mark.skipif(
    not ops.LIBRARY.loaded and "YOLO12_FASTCONV_LIBRARY" not in os.environ,
    reason=f"no compiled library: {ops.LIBRARY.reason}",
)

HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_forced_target(monkeypatch):
    monkeypatch.delenv("YOLO12_FASTCONV_TARGET", raising=False)
    monkeypatch.delenv("YOLO12_FASTCONV_KERNEL", raising=False)


def kernel(
    case: cases.Case, dtype: torch.dtype, capability: int, *, tf32: bool = False, training: bool = False
) -> list[str]:
    """[family, target, tile]"""
    weight = (case.co, case.ci // case.groups, *case.kernel)
    name = ops.describe_kernel(
        (case.batch, case.ci, case.h, case.w), weight, case.stride, case.padding, case.dilation, case.groups, dtype,
        tf32=tf32, capability=capability, training=training,
    )  # fmt: skip
    return name.split("/")


def candidates(case: cases.Case, dtype: torch.dtype, capability: int, *, tf32: bool = False) -> list[str]:
    weight = (case.co, case.ci // case.groups, *case.kernel)
    return ops.kernel_candidates(
        (case.batch, case.ci, case.h, case.w), weight, case.stride, case.padding, case.dilation, case.groups, dtype,
        tf32=tf32, capability=capability,
    )  # fmt: skip


def shapes():
    return [
        case for scale in cases.SCALES for batch in (1, 32) for case in cases.conv_shapes(scale, batch=batch)
    ]


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 24, 32, 64])
def test_training_runs_plans_that_its_kernel_has(batch):
    """No blocks or workers that share stages; where it takes statistics, up to 128 channels a tile, no clusters. Where
    inference has a cluster for each tile, training has it too, and a pass over z."""
    others = 0
    for case in (case for scale in cases.SCALES for case in cases.conv_shapes(scale, batch=batch)):
        name, inference = (kernel(case, torch.float16, 90, training=training) for training in (True, False))
        assert not set(name[2].split("-")) & {"ring", "paired", "rest"}, f"{case}: {name}"
        if name == inference:
            continue
        assert name[:2] == inference[:2] == ["implicit_gemm", "sm90"]
        assert "once" not in name[2] and "split" not in name[2], f"{case}: {name}"
        assert int(name[2].split("-")[0].split("x")[1]) <= 128, f"{case}: {name}"
        others += 1
    assert others


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120])
def test_half_convolutions_of_the_models_run_on_tensor_cores_or_depthwise(dtype, capability):
    targets = set()
    for case in shapes():
        family, target, tile = kernel(case, dtype, capability)
        assert tile
        assert family == ("depthwise" if case.groups > 1 else "stem" if case.ci == 3 else "implicit_gemm"), (
            case
        )
        targets.add(target if family == "implicit_gemm" else "")
    # A library that was not built for 9.0a has no kernel for sm90.
    sm90 = capability == 90 and "9.0a" in ops.LIBRARY.arch_list
    assert targets == {"", "sm90" if sm90 else "sm80"}


def test_other_precisions_and_older_gpus():
    for case in shapes():
        if case.groups == 1:
            assert kernel(case, torch.float32, 90)[0] in ("direct", "aten")
            tf32 = ["stem", "mma"] if case.ci == 3 else ["implicit_gemm", "sm80"]
            assert kernel(case, torch.float32, 80, tf32=True)[:2] == tf32
            assert kernel(case, torch.float64, 90)[0] == "direct"
            assert kernel(case, torch.float16, 75)[0] == "direct"
        else:
            assert kernel(case, torch.float32, 75)[0] == "depthwise"
            assert kernel(case, torch.float32, 90)[:2] == ["depthwise", "simt"]
            assert kernel(case, torch.float16, 75)[:2] == ["depthwise", "simt"]


def test_strict_float_goes_to_cudnn_where_the_direct_kernel_is_slower(monkeypatch):
    def conv(ci: int, co: int, size: int, k: int = 3, stride: int = 1) -> cases.Case:
        return cases.Case("float", ci, co, size, size, (k, k), (stride, stride), (k // 2, k // 2), batch=32)

    slower = [conv(64, 64, 80), conv(512, 64, 40), conv(128, 128, 40, stride=2), conv(1024, 512, 20, k=1)]
    slower += [replace(conv(ci, ci, 20, k), batch=1) for ci, k in ((128, 1), (512, 1), (16, 3), (96, 3))]
    slower += [conv(128, 384, 20, k=1), replace(conv(128, 384, 20, k=1), batch=1)]  # the first by the table
    faster = [conv(3, 16, 640), conv(16, 32, 80), conv(256, 256, 160, stride=2), conv(256, 256, 80, k=1)]
    faster += [replace(conv(64, 64, 80, k=1), batch=1), replace(conv(64, 64, 160, stride=2), batch=1)]
    faster += [conv(128, 256, 20, k=1), replace(conv(128, 128, 80, k=1), batch=1)]
    for case in [*slower, *faster]:
        names = candidates(case, torch.float32, 90)
        assert names == sorted(["direct/simt", "aten/float"], reverse=case in faster), case
        for name in names:
            monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", name)
            assert "/".join(kernel(case, torch.float32, 90)) == name
        monkeypatch.delenv("YOLO12_FASTCONV_KERNEL")
    # Only there: TF32 has kernels of its own, double and groups stay.
    assert kernel(slower[0], torch.float32, 90, tf32=True)[0] == "implicit_gemm"
    assert candidates(slower[0], torch.float64, 90) == ["direct/simt"]
    assert candidates(replace(slower[0], groups=2), torch.float32, 90) == ["direct/simt"]


@pytest.mark.parametrize("target", ["", "sm80"])
def test_depthwise_runs_on_tensor_cores_with_stride_1_and_whole_chunks(target, monkeypatch):
    if target:
        monkeypatch.setenv("YOLO12_FASTCONV_TARGET", target)

    def depthwise(channels: int, size: int, stride: int = 1) -> cases.Case:
        pad = size // 2
        return cases.Case(
            "dw", channels, channels, 20, 20, (size, size), (stride, stride), (pad, pad), groups=channels
        )

    for dtype in HALF:
        for size in (3, 5, 7):
            assert kernel(depthwise(80, size), dtype, 80) == ["depthwise", "mma", f"{size}x{size}"]
        assert kernel(depthwise(80, 3, stride=2), dtype, 90) == ["depthwise", "simt", "3x3"]
        assert kernel(depthwise(37, 7), dtype, 90) == ["depthwise", "simt", "7x7"]


def test_awkward_convolutions_find_a_kernel():
    families = {kernel(case, torch.float16, 90)[0] for case in cases.AWKWARD}
    assert families == {"implicit_gemm", "depthwise", "stem", "direct"}


def test_stems():
    case = cases.Case("stem", 3, 16, 640, 640, kernel=(3, 3), stride=(2, 2), padding=(1, 1), batch=32)
    for dtype in HALF:
        for capability in (80, 90, 120):
            assert kernel(case, dtype, capability) == ["stem", "mma", "3x3s2"]
    assert kernel(replace(case, stride=(1, 2), ci=4), torch.float16, 90) == ["stem", "mma", "3x3s1x2"]
    for other in (
        replace(case, ci=5), replace(case, stride=(3, 3)), replace(case, dilation=(2, 2)), replace(case, co=520),
        replace(case, kernel=(6, 6)), replace(case, ci=4, groups=2),
    ):  # fmt: skip
        assert kernel(other, torch.float16, 80)[0] == ("direct" if other.groups > 1 else "implicit_gemm"), (
            other
        )
    # In float, with TF32 only, and half as many channels out: the weights lie in shared memory.
    assert kernel(case, torch.float32, 90, tf32=True) == ["stem", "mma", "3x3s2"]
    assert kernel(replace(case, co=256), torch.float32, 80, tf32=True)[0] == "stem"
    assert kernel(replace(case, co=264), torch.float32, 80, tf32=True)[0] == "implicit_gemm"
    assert kernel(case, torch.float32, 75, tf32=True)[0] == "direct"


def test_float_in_tf32_has_both_kernels_too(monkeypatch):
    dense = [case for case in shapes() if case.groups == 1 and case.ci > 4]  # but the stem
    targets = {kernel(case, torch.float32, 90, tf32=True)[1] for case in dense}
    built = "9.0a" in ops.LIBRARY.arch_list
    assert targets == ({"sm80", "sm90"} if built else {"sm80"})
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm80")
    assert {kernel(case, torch.float32, 90, tf32=True)[1] for case in dense} == {"sm80"}
    if built:
        monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm90")
        assert {kernel(case, torch.float32, 90, tf32=True)[1] for case in dense} == {"sm90"}


def test_forced_targets(monkeypatch):
    case = next(case for case in shapes() if case.groups == 1 and case.ci >= 64)
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm80")
    assert kernel(case, torch.float16, 90)[1] == "sm80"
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm90")
    with pytest.raises(RuntimeError, match=r"needs a GPU of compute capability 9\.0"):
        kernel(case, torch.float16, 80)
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm42")
    with pytest.raises(RuntimeError, match="sm42 is no target"):
        kernel(case, torch.float16, 90)


@pytest.mark.parametrize("capability", [80, 90])
def test_candidates_begin_with_the_choice(capability):
    for case in [*shapes(), *cases.AWKWARD]:
        names = candidates(case, torch.float16, capability)
        assert names[0] == "/".join(kernel(case, torch.float16, capability))
        assert len(set(names)) == len(names) <= 150, case
        assert names == candidates(case, torch.float16, capability)


def test_candidates_of_one_kernel_families():
    assert candidates(cases.Case("dw", 80, 80, 20, 20, groups=80), torch.float16, 90) == ["direct/simt"]
    assert candidates(cases.Case("fp64", 80, 80, 20, 20), torch.float64, 90) == ["direct/simt"]
    names = candidates(cases.Case("sm80", 80, 80, 20, 20), torch.float16, 80)
    assert len(names) > 10 and all(name.startswith("implicit_gemm/sm80/") for name in names)


def test_windows_of_sm80():
    """3x3, stride 1, padding 1, whole chunks of half, and maps whose rows fit the shared memory of every GPU."""

    def windows(
        ci: int, width: int, k: int = 3, stride: int = 1, pad: int = 1, dtype: torch.dtype = torch.float16
    ):
        case = cases.Case("window", ci, 64, 40, width, (k, k), (stride, stride), (pad, pad), batch=32)
        return [name for name in candidates(case, dtype, 80, tf32=True) if name.endswith("-window")]

    assert windows(64, 40) and windows(8, 40) and windows(64, 40, dtype=torch.bfloat16)
    # Narrower tiles fit wider maps, and with one block of 32 channels one window is enough.
    assert len(windows(64, 40)) > len(windows(64, 160)) > len(windows(64, 700)) == 0
    assert len(windows(32, 300)) > len(windows(64, 300))
    assert not windows(68, 40) and not windows(64, 40, dtype=torch.float32)
    assert not windows(64, 40, k=1, pad=0) and not windows(64, 40, stride=2) and not windows(64, 40, pad=0)
    assert kernel(cases.Case("window", 64, 64, 80, 80, (3, 3), (1, 1), (1, 1), batch=32), torch.float16, 80)[
        2
    ].endswith("-window")


def test_wide_warps_of_sm80():
    """Tiles without registers for any taps: half, whole chunks, at least a stage of channels, up to nine taps."""

    def wide(ci: int, k: int = 1, dtype: torch.dtype = torch.float16):
        case = cases.Case("wide", ci, 128, 40, 40, (k, k), (2, 2), (k // 2, k // 2), batch=32)
        return [name for name in candidates(case, dtype, 80, tf32=True) if name.endswith("-wide")]

    assert len(wide(64)) == len(wide(72, k=3)) == len(wide(64, dtype=torch.bfloat16)) == 2
    assert not wide(68) and not wide(56, k=3) and not wide(64, k=5) and not wide(64, dtype=torch.float32)
    large = cases.Case("wide", 512, 512, 80, 80, (3, 3), (2, 2), (1, 1), batch=32)
    assert all(kernel(large, torch.float16, capability)[2].endswith("-wide") for capability in (80, 86, 120))


needs_sm90 = pytest.mark.skipif("9.0a" not in ops.LIBRARY.arch_list, reason="library without 9.0a")


def sm90_plans(case: cases.Case, dtype: torch.dtype = torch.float16) -> list[tuple[str, int, int]]:
    """Tile and way of the plans among the candidates, and their stages."""
    found = [
        re.fullmatch(r"implicit_gemm/sm90/(.+)-(\d+)\+(\d+)", name)
        for name in candidates(case, dtype, 90, tf32=dtype == torch.float32)
    ]
    return [(match[1], int(match[2]), int(match[3])) for match in found if match]


@needs_sm90
def test_rings_are_no_longer_than_what_passes_through_them():
    # Seven tiles of 64 pixels, one for each block.
    plans = sm90_plans(cases.Case("short", 256, 256, 20, 20, batch=1))
    assert plans
    for way, pixel_stages, weight_stages in plans:
        channels, depth = map(int, re.match(r"\d+x(\d+)x(\d+)-rows", way).groups())
        if channels >= 16:  # not more blocks than multiprocessors
            assert pixel_stages <= 256 // depth, way
        assert weight_stages <= 4, way


@needs_sm90
def test_reductions_are_split_where_multiprocessors_would_be_idle():
    def splits(case: cases.Case) -> set[int]:
        found = (re.search(r"-split(\d)$", way) for way, _, _ in sm90_plans(case))
        return {int(match[1]) for match in found if match}

    taps = {"kernel": (3, 3), "padding": (1, 1)}
    assert splits(cases.Case("four", 256, 64, 20, 20, **taps, batch=1)) == {
        2,
        4,
    }  # not 2, 2 and 0 of four blocks
    assert splits(cases.Case("three", 192, 64, 20, 20, **taps, batch=1)) == {2, 3}
    assert not splits(cases.Case("one block", 64, 64, 20, 20, **taps, batch=1))
    assert not splits(cases.Case("full", 256, 256, 80, 80, **taps, batch=32))


@needs_sm90
def test_the_rest_of_the_tiles_is_dealt_out_where_each_block_gets_a_part_at_most():
    def tiles(case: cases.Case, dtype: torch.dtype = torch.float16) -> set[str]:
        return {way.split("x")[1] for way, _, _ in sm90_plans(case, dtype) if way.endswith("-rest")}

    # 200 tiles of 64 pixels: 33 columns for 192 of 768 channels leave 2, in 6 parts; 44 for 256 leave 24, in 96.
    assert tiles(cases.Case("768", 1536, 768, 20, 20, batch=32)) == {"128", "192"}
    assert tiles(cases.Case("taps", 768, 768, 40, 40, kernel=(3, 3), stride=(2, 2), padding=(1, 1), batch=32))
    # 800: 132, 66 and 44 columns leave 8 each, in 32, 16 and 24 parts.
    assert {"128", "256"} <= tiles(cases.Case("256", 512, 256, 40, 40, batch=32))
    assert not tiles(cases.Case("no rest", 512, 256, 40, 33, batch=32))  # 660 tiles
    assert not tiles(cases.Case("few tiles", 512, 256, 40, 40, batch=1))
    assert not tiles(cases.Case("half a block", 96, 256, 40, 40, batch=32))
    assert not tiles(cases.Case("float", 512, 256, 40, 40, batch=32), torch.float32)
    windows = cases.Case("window", 128, 256, 40, 40, kernel=(3, 3), padding=(1, 1), batch=32)
    assert not any("window" in way and "rest" in way for way, _, _ in sm90_plans(windows))


@needs_sm90
def test_blocks_copy_pixels_for_each_other_where_tiles_of_channels_come_in_pairs():
    def tiles(case: cases.Case, dtype: torch.dtype = torch.float16) -> set[str]:
        return {way.split("x")[1] for way, _, _ in sm90_plans(case, dtype) if "-paired" in way}

    assert tiles(cases.Case("768", 256, 768, 40, 40, batch=32)) == {"128", "192"}  # not 3 of 256
    assert tiles(cases.Case("1024", 256, 1024, 40, 40, batch=32)) == {"128", "192", "256"}
    assert not tiles(cases.Case("128", 256, 128, 40, 40, batch=32))
    assert not tiles(cases.Case("half a block", 96, 256, 40, 40, batch=32))
    taps = {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1)}
    assert tiles(cases.Case("taps", 256, 768, 40, 40, **taps, batch=32)) == {"128", "192"}
    assert not any(
        "window" in way and "paired" in way
        for way, _, _ in sm90_plans(cases.Case("w", 256, 768, 40, 40, **taps))
    )
    assert not tiles(cases.Case("float", 256, 768, 40, 40, batch=32), torch.float32)


@needs_sm90
def test_workers_share_a_ring_where_it_holds_a_tile():
    def rings(case: cases.Case, dtype: torch.dtype = torch.float16) -> list[tuple[str, int, int]]:
        found = [plan for plan in sm90_plans(case, dtype) if "-ring" in plan[0]]
        return [(way, pixel_stages, int(way.split("x")[2].split("-")[0])) for way, pixel_stages, _ in found]

    found = rings(cases.Case("384", 384, 1152, 20, 20, batch=32))
    assert {way.split("x")[1] for way, _, _ in found} == {"128", "192"}  # weights of 256 leave no room
    assert all("resident" in way and not way.startswith("64x") for way, _, _ in found)
    assert all(stages * channels >= 384 for _, stages, channels in found)
    assert not rings(cases.Case("768", 768, 768, 20, 20, batch=32))  # streamed
    assert not rings(cases.Case("half a block", 96, 256, 40, 40, batch=32))
    assert not rings(cases.Case("taps", 128, 256, 40, 40, kernel=(3, 3), padding=(1, 1), batch=32))
    assert not rings(cases.Case("float", 128, 256, 40, 40, batch=32), torch.float32)


@needs_sm90
def test_kernels_for_small_grids_are_plans_where_all_blocks_run_at_once():
    def plans(
        case: cases.Case, dtype: torch.dtype = torch.float16, *, tf32: bool = False
    ) -> list[tuple[int, int]]:
        names = candidates(case, dtype, 90, tf32=tf32)
        found = (re.fullmatch(r"implicit_gemm/sm90/(\d+)x(\d+)x\d+-\w+-once", name) for name in names)
        return [(int(match[1]), int(match[2])) for match in found if match]

    taps = {"kernel": (3, 3), "padding": (1, 1)}
    for case in (
        cases.Case("rows", 128, 256, 40, 40, batch=1),
        cases.Case("window", 64, 64, 40, 40, **taps, batch=1),
        cases.Case("strided", 64, 64, 40, 40, **taps, stride=(2, 2), batch=1),
    ):
        side = case.h // case.stride[0]
        tiles = -(-side * side // 64) if case.kernel == (1, 1) else (-(-side // 8)) ** 2
        assert plans(case)
        for pixels, channels in plans(case):
            assert -(-tiles // (pixels // 64)) * -(-case.co // channels) <= 132, (case, pixels, channels)
        assert not plans(replace(case, batch=32, h=160, w=160))  # more tiles than fit
        assert not plans(replace(case, co=51))
        assert case.kernel == (1, 1) or not plans(replace(case, dilation=(2, 2)))
        assert not plans(case, torch.float32, tf32=True)
    # Widths whose channels leave a thread with half a vector, and tap by tap nothing may follow the last channel.
    assert {channels for _, channels in plans(cases.Case("460", 384, 460, 20, 20, batch=1))} == {16, 48}
    assert {channels for _, channels in plans(cases.Case("40", 40, 128, 20, 20, **taps, batch=1))} == {16, 32}
    # Long reductions, whose parts do not all have a place.
    assert (64, 128) in plans(cases.Case("long rows", 1024, 128, 80, 80, batch=1))
    assert (64, 64) in plans(cases.Case("long windows", 256, 64, 80, 80, **taps, batch=1))
    assert (64, 64) in plans(cases.Case("strided", 256, 256, 80, 80, **taps, stride=(2, 2), batch=1))


@needs_sm90
@pytest.mark.parametrize(
    ("file", "dtypes"),
    [
        ("tuned_layers", HALF),
        ("tuned_layers_dgrad", HALF),
        ("tuned_layers_shared", HALF),
        ("tuned_layers_tf32", (torch.float32,)),
    ],
)
def test_tuned_layers_begin_with_the_kernel_that_was_timed(file, dtypes):
    shared = {case for case, _ in tuned_layers("tuned_layers_shared")}
    for case, name in tuned_layers(file):
        if "shared" not in file and case in shared:
            continue  # what serves the layer where that kernel can't
        for dtype in dtypes:
            assert candidates(case, dtype, 90, tf32=dtype is torch.float32)[0] == name, case


@needs_sm90
def test_tuned_layers_with_statistics_are_plans_that_have_such_a_kernel():
    for case, name in tuned_layers("tuned_layers_stats"):
        assert "split" not in name and "once" not in name, name
        assert int(re.split("[/x]", name)[3]) <= 128, name
        assert name in candidates(case, torch.float16, 90), case


def tuned_layers(file: str) -> list[tuple[cases.Case, str]]:
    """Layers and kernels of a table of csrc/host."""
    table = (Path(__file__).parent.parent / "csrc" / "host" / f"{file}.inc").read_text()
    rows = re.findall(r'\{(\d+), (\d+), (\d+), (\d+), (\d+), (\d+), "(.+)"\},', table)
    assert len(rows) == len(table.splitlines()) > 10
    layers = []
    for *sizes, name in rows:
        batch, ci, co, size, k, stride = map(int, sizes)
        geometry = {"kernel": (k, k), "stride": (stride,) * 2, "padding": (k // 2,) * 2}
        layers.append((cases.Case("tuned", ci, co, size, size, **geometry, batch=batch), name))
    return layers


@needs_sm90
def test_each_plan_has_its_stages():
    ways = [way for way, _, _ in sm90_plans(cases.Case("long", 256, 256, 80, 80, batch=32))]
    assert len(ways) > 20 and len(set(ways)) == len(ways)


@needs_sm90
def test_rows_of_float_hold_half_as_many_channels():
    """A stage's rows are 32, 64 or 128 bytes, a 1x1 has up to four blocks of them in a stage."""
    for channels, half, float32 in ((8, 16, 8), (16, 16, 16), (32, 32, 32), (64, 64, 32), (40, 64, 16)):
        case = cases.Case("depth", channels, 64, 40, 40, kernel=(3, 3), padding=(1, 1), batch=8)
        for dtype, depth in ((torch.float16, half), (torch.float32, float32)):
            assert {way.split("-")[0].split("x")[2] for way, _, _ in sm90_plans(case, dtype)} == {str(depth)}
    case = cases.Case("parts", 256, 64, 40, 40, batch=8)
    depths = {way.split("-")[0].split("x")[2] for way, _, _ in sm90_plans(case, torch.float32)}
    assert depths <= {"32", "64", "128"} and len(depths) > 1


@needs_sm90
def test_named_kernels(monkeypatch):
    case = cases.Case("named", 128, 128, 40, 40, kernel=(3, 3), padding=(1, 1))
    other = cases.Case("other", 3, 16, 64, 64, kernel=(3, 3), padding=(1, 1))
    names = candidates(case, torch.float16, 90)
    for name in (names[-1], names[len(names) // 2], names[0]):
        monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", name)
        assert "/".join(kernel(case, torch.float16, 90)) == name
        assert kernel(other, torch.float16, 90)[0] == "stem"
    monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", next(name for name in names if "/sm90/" in name))
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm80")
    assert kernel(case, torch.float16, 90)[1] == "sm80"
    monkeypatch.delenv("YOLO12_FASTCONV_TARGET")
    monkeypatch.delenv("YOLO12_FASTCONV_KERNEL")
    assert "/".join(kernel(case, torch.float16, 90)) == names[0]


def test_choices_are_printed_once(monkeypatch, capfd):
    monkeypatch.setenv("YOLO12_FASTCONV_PRINT_TILES", "1")
    case = cases.Case("printed", 24, 40, 17, 19)
    names = {"/".join(kernel(case, torch.float16, 80)) for _ in range(3)}
    printed = [line for line in capfd.readouterr().err.splitlines() if "24x17x19" in line]
    assert len(printed) == len(names) == 1 and names.pop() in printed[0]


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(RuntimeError, match="x has 5 channels"):
        ops.describe_kernel(
            (1, 5, 8, 8), (4, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1, torch.float16, tf32=False, capability=90
        )
    with pytest.raises(RuntimeError, match="smaller than the kernel's extent 3"):
        ops.describe_kernel(
            (1, 3, 2, 8), (4, 3, 3, 3), (1, 1), (0, 0), (1, 1), 1, torch.float16, tf32=False, capability=90
        )
