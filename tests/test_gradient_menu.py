"""What computes a convolution's gradients: the compiled library's choice, a host function that needs no GPU.

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

SHARED_BYTES = 227 * 1024  # of a block on 9.0


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in ("TARGET", "KERNEL", "GRADIENTS", "WGRAD"):
        monkeypatch.delenv(f"YOLO12_FASTCONV_{name}", raising=False)


def gradients(
    case: cases.Case, dtype: torch.dtype = torch.float16, capability: int = 90, *, tf32: bool = False
) -> tuple[str, str]:
    """Names of what computes the gradients of x and of the weight."""
    return ops.describe_gradients(
        (case.batch, case.ci, case.h, case.w), (case.co, case.ci // case.groups, *case.kernel),
        case.stride, case.padding, case.dilation, case.groups, dtype, tf32=tf32, capability=capability,
    )  # fmt: skip


def shapes(batch: int = 32) -> list[cases.Case]:
    return [case for scale in cases.SCALES for case in cases.conv_shapes(scale, batch=batch)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2, 32])
def test_own_kernels_have_every_layer_of_the_models(monkeypatch, dtype, batch):
    monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "own")
    for case in shapes(batch):
        dgrad, wgrad = gradients(case, dtype)
        depthwise = "wgrad/depthwise/sm90" if case.kernel == (7, 7) else "wgrad/simt"
        expected = depthwise if case.groups > 1 else "wgrad/stem" if case.ci == 3 else "wgrad/sm90"
        assert wgrad.startswith(expected), f"{case}: {wgrad}"
        # With stride 2 the weights of 16 input channels at least have to fit shared memory.
        strided = "dgrad/sm90/strided" if case.ci >= 8 and case.co <= 512 else "aten"
        assert dgrad == strided if case.stride != (1, 1) else dgrad != "aten", f"{case}: {dgrad}"


def test_plans_fit_the_hardware(monkeypatch):
    monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "own")
    seen = set()
    for case in [*shapes(), *shapes(2), *cases.AWKWARD]:
        name = gradients(case)[1]
        if not name.startswith("wgrad/sm90/"):
            continue
        mode, filters, channels, pixels, stages, slices = re.fullmatch(
            r"wgrad/sm90/(rows|window)/(\d+)x(\d+)x(\d+)x(\d+)/(\d+)", name
        ).groups()  # type: ignore[union-attr]
        seen.add(mode)
        row = max(32, min(128, 1 << (2 * case.co - 1).bit_length()))
        x_row = max(32, min(128, 1 << (2 * int(channels) - 1).bit_length()))
        if mode == "rows":
            stage = (
                int(filters) // 64 * int(pixels) * row + -(-2 * int(channels) // x_row) * int(pixels) * x_row
            )
            assert int(pixels) <= 256, name
        else:
            stride = case.stride[0]
            window = (8 + 2 // stride) * (int(pixels) // 8 + 2 // stride)
            if channels == "48":  # three blocks of 16
                window, x_row = 3 * window, 32
            if filters == "96":  # three blocks of 32
                row = 3 * 64
            stage = int(pixels) * row + stride**2 * -(-window // 8) * 8 * x_row
        assert int(stages) >= 2 and int(stages) * (-(-stage // 1024) * 1024 + 16) <= SHARED_BYTES, (
            f"{case}: {name}"
        )
        out = case.out_size
        assert 1 <= int(slices) <= out[0] * out[2] * out[3], f"{case}: {name}"
    assert seen == {"rows", "window"}


def test_timed_plans_are_those_that_run():
    source = (Path(__file__).parent.parent / "csrc" / "host" / "wgrad_plan.cpp").read_text()
    plans = re.findall(r'\{(\d+), (\d+), (\d+), (\d), (\d), "(wgrad/[^"]+)"\}', source)
    assert len(plans) >= 10
    for *numbers, name in plans:
        ci, co, size, k, stride = map(int, numbers)
        case = cases.Case("", ci, co, size, size, (k, k), (stride, stride), (k // 2, k // 2), batch=32)
        assert gradients(case)[1] == name, case
        assert gradients(replace(case, w=size + 8))[1] != name, "timed for another map"


def test_choices_that_were_timed():
    def strided(ci: int, co: int, size: int) -> tuple[str, str]:
        return gradients(cases.Case("", ci, co, size, size, (3, 3), (2, 2), (1, 1), batch=32))

    for ci, co, size in ((16, 32, 320), (64, 128, 320), (96, 192, 320), (128, 128, 40)):
        assert strided(ci, co, size)[0] == "dgrad/sm90/strided"
    for ci, co, size in ((128, 256, 40), (256, 256, 160), (512, 512, 80), (768, 768, 40)):
        assert strided(ci, co, size)[0] == "aten"
    assert strided(768, 768, 40)[1] == "aten"
    assert strided(768, 768, 80)[1].startswith("wgrad/sm90")

    source = (Path(__file__).parent.parent / "csrc" / "host" / "gradient_menu.cpp").read_text()
    timed = re.findall(r"\{(\d+), (\d+), (\d+), (\d), (true|false)\},", source)
    assert len(timed) >= 10
    for ci, co, size, k, ours in timed:
        case = cases.Case(
            "", int(ci), int(co), int(size), int(size), (int(k),) * 2, (1, 1), (int(k) // 2,) * 2, batch=32
        )
        chosen = gradients(case)[0] != "aten"
        assert chosen == (ours == "true"), case
        assert (gradients(replace(case, batch=8))[0] != "aten") != chosen, "as the rule has it"


def test_what_has_no_kernel_stays_with_aten(monkeypatch):
    monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "own")
    base = dict(ci=64, co=64, h=20, w=20, batch=4)
    for case in (
        cases.Case("dilated", kernel=(3, 3), padding=(2, 2), dilation=(2, 2), **base),
        cases.Case("stride 3", kernel=(3, 3), padding=(1, 1), stride=(3, 3), **base),
        cases.Case("5x5", kernel=(5, 5), padding=(2, 2), **base),
        cases.Case("1x1 with stride", stride=(2, 2), **base),
        cases.Case("1x1 with padding", padding=(1, 1), **base),
        cases.Case("groups", kernel=(3, 3), padding=(1, 1), groups=4, **base),
    ):
        assert gradients(case)[1] == "aten", case
    # A forward kernel pads with zeros; a gradient would have to drop rows that the padding made.
    assert gradients(cases.Case("1x1 with padding", padding=(1, 1), **base))[0] == "aten"
    assert gradients(cases.Case("5x5", kernel=(5, 5), padding=(2, 2), **base))[0] != "aten"
    strided = dict(base, kernel=(3, 3), stride=(2, 2), padding=(1, 1))
    assert gradients(cases.Case("stride 2", **strided))[0] == "dgrad/sm90/strided"
    for name, change in {
        "padding": {"padding": (0, 0)}, "one row": {"h": 1}, "channels of x": {"ci": 60},
        "channels of z": {"co": 60}, "too many": {"co": 768}, "dilation": {"dilation": (2, 2)},
    }.items():  # fmt: skip
        assert gradients(cases.Case(name, **(strided | change)))[0] == "aten", name
    assert gradients(cases.Case("other GPUs", **strided), capability=80)[0] == "aten"
    assert gradients(cases.Case("in float", **strided), torch.float32)[0] == "aten"


def test_other_gpus_and_dtypes():
    case = cases.Case("", 64, 64, 20, 20, (3, 3), (1, 1), (1, 1))
    assert gradients(case, capability=80)[1] == "aten"
    assert gradients(case, capability=80)[0].startswith("implicit_gemm/sm80")
    assert gradients(case, torch.float32) == ("aten", "wgrad/simt")
    assert gradients(case, torch.float32, tf32=True) == ("aten", "aten")
    assert gradients(case, torch.float64) == ("aten", "wgrad/simt")


def test_depthwise_weight():
    """7x7 in half has a kernel of its own for 9.0, from multiples of 8 channels on."""
    case = cases.Case("", 64, 64, 20, 20, (7, 7), (1, 1), (3, 3), groups=64)
    assert gradients(case)[1] == gradients(case, torch.bfloat16)[1] == "wgrad/depthwise/sm90"
    assert gradients(replace(case, h=1, w=100, batch=1))[1] == "wgrad/depthwise/sm90"
    assert gradients(case, capability=80)[1] == gradients(case, torch.float32)[1] == "wgrad/simt"
    for change in ({"ci": 60, "co": 60, "groups": 60}, {"kernel": (3, 3)}, {"stride": (2, 2)}):
        assert gradients(replace(case, **change))[1] == "wgrad/simt", change


def test_switches(monkeypatch):
    case = cases.Case("", 64, 64, 20, 20, (3, 3), (1, 1), (1, 1))
    depthwise = cases.Case("", 64, 64, 20, 20, (7, 7), (1, 1), (3, 3), groups=64)
    monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "aten")
    assert gradients(case) == ("aten", "aten")
    assert gradients(depthwise) == ("aten", "wgrad/simt")  # ATen's is less exact
    monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "cudnn")
    with pytest.raises(RuntimeError, match="YOLO12_FASTCONV_GRADIENTS=cudnn: use own, fused or aten"):
        gradients(case)
    monkeypatch.delenv("YOLO12_FASTCONV_GRADIENTS")
    named = "wgrad/sm90/window/64x32x64x15/3"
    assert gradients(case)[1] != named
    monkeypatch.setenv("YOLO12_FASTCONV_WGRAD", named)
    assert gradients(case)[1] == named
    monkeypatch.setenv("YOLO12_FASTCONV_WGRAD", "wgrad/sm90/window/64x32x64x15/999999")
    assert gradients(case)[1] != "wgrad/sm90/window/64x32x64x15/999999"
    stem = cases.Case("", 3, 64, 64, 96, (3, 3), (2, 2), (1, 1))
    assert gradients(stem)[1] == "wgrad/stem"
    named = "wgrad/sm90/window/64x16x64x11/3"
    monkeypatch.setenv("YOLO12_FASTCONV_WGRAD", named)
    assert gradients(stem)[1] == named


def in_one_pass(case: cases.Case, dtype: torch.dtype = torch.float16, capability: int = 90) -> bool:
    return ops.backward_in_one_pass(
        (case.batch, case.ci, case.h, case.w), (case.co, case.ci // case.groups, *case.kernel),
        case.stride, case.padding, case.dilation, case.groups, dtype, tf32=False, capability=capability,
    )  # fmt: skip


def pointwise(ci: int, co: int) -> cases.Case:
    return cases.Case("", ci, co, 20, 20, (1, 1), (1, 1), (0, 0))


def test_backward_in_one_pass(monkeypatch):
    narrow = pointwise(64, 128)
    assert in_one_pass(narrow) and in_one_pass(narrow, torch.bfloat16)
    assert not in_one_pass(narrow, torch.float32)
    assert not in_one_pass(narrow, capability=80)
    # Sums of the weight's gradient that fit the registers of a warpgroup or two; rows of 16 bytes.
    for ci, co, served in (
        (8, 8, True), (384, 64, True), (392, 64, False), (256, 128, True), (264, 128, False), (128, 192, True),
        (136, 192, False), (64, 200, False), (60, 64, False), (64, 60, False),
    ):  # fmt: skip
        assert in_one_pass(pointwise(ci, co)) == served, f"{ci} to {co}"
    assert not in_one_pass(cases.Case("", 64, 64, 20, 20, (3, 3), (1, 1), (1, 1)))
    assert not in_one_pass(cases.Case("", 64, 64, 20, 20, (1, 1), (1, 1), (0, 0), groups=64))
    for wish, expected in (("own", False), ("aten", False), ("fused", True)):
        monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", wish)
        assert in_one_pass(narrow) == expected, wish


def test_narrow_layers_of_the_models_take_one_pass():
    for case in shapes():
        narrow = case.kernel == (1, 1) and case.ci * -(-case.co // 64) <= 192
        if narrow:
            assert in_one_pass(case), f"{case}"
