"""Our own gradient kernels, each tile of them, against float64; test_gpu_ops.py has all shapes as the menu serves them.

pytest -m gpu tests/test_gpu_gradients.py
"""

from __future__ import annotations

import cases
import op_checks
import pytest
import torch
from torch import Tensor

from yolo12_fastconv import ops

pytestmark = pytest.mark.gpu

HALF = {"float16": 4e-4, "bfloat16": 3e-3}  # l2 error of a rounded result
SUM_ERROR = 5e-6  # of a weight gradient: float sums of at most 51200 products


@pytest.fixture(autouse=True)
def own_kernels(monkeypatch, cuda):
    monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "own")


def describe(case: cases.Case, dtype: torch.dtype) -> tuple[str, str]:
    major, minor = torch.cuda.get_device_capability()
    return ops.describe_gradients(
        (case.batch, case.ci, case.h, case.w), (case.co, case.ci // case.groups, *case.kernel),
        case.stride, case.padding, case.dilation, case.groups, dtype, tf32=False, capability=10 * major + minor,
    )  # fmt: skip


def check(
    case: cases.Case,
    precision: str,
    cuda: torch.device,
    layout: str = "nhwc",
    x_dtype: torch.dtype | None = None,
) -> None:
    """Gradients of x and of a float32 weight, twice, from poisoned memory."""
    dtype = op_checks.PRECISIONS[precision]
    inputs = case.inputs(x_dtype or dtype, cuda)
    grad_y = inputs.grad_y.to(dtype)
    x, weight = cases.relayout(inputs.x, layout), inputs.weight.float()

    def run() -> tuple[Tensor, Tensor]:
        op_checks.poison([x, weight, grad_y])
        grads = torch.ops.yolo12_fastconv.conv_bn_act_backward(
            grad_y, x, weight, None, None, None, None, None, 0.0, list(case.stride), list(case.padding),
            list(case.dilation), case.groups, 0, dtype, False, [True, True, False, False, False],
        )  # fmt: skip
        return grads[0], grads[1]

    first, second = run(), run()
    truth = torch.ops.aten.convolution_backward(
        grad_y.double(), x.to(dtype).double(), weight.to(dtype).double(), None, case.stride, case.padding,
        case.dilation, False, [0, 0], case.groups, [True, True, False],
    )  # fmt: skip
    for name, ours, again, right, limit in zip(
        ("grad_x", "grad_weight"), first, second, truth, (HALF[precision], SUM_ERROR), strict=False
    ):
        error = float((ours.double() - right).norm() / right.norm())
        assert error <= limit, (
            f"{case} {precision} {layout} {describe(case, dtype)}: {name} is off by {error:.1e}"
        )
        assert torch.equal(ours, again), f"{case} {precision} {layout}: two runs of {name} differ"
    assert first[1].dtype == torch.float32 and first[1].stride() == weight.stride()


def dense(ci: int, co: int, h: int, w: int, kernel: int, stride: int = 1, padding: int = -1) -> cases.Case:
    pad = kernel // 2 if padding < 0 else padding
    name = f"{ci}to{co}-{kernel}x{kernel}s{stride}p{pad}-{h}x{w}"
    return cases.Case(name, ci, co, h, w, (kernel, kernel), (stride, stride), (pad, pad))


DENSE = [
    *(
        dense(ci, co, 13, 11, 1)
        for ci, co in ((8, 8), (16, 40), (48, 80), (64, 64), (200, 136), (307, 61), (260, 300))
    ),
    *(
        dense(ci, co, h, w, 3, stride)
        for stride in (1, 2)
        for ci, co, h, w in (
            (64, 64, 8, 8),
            (16, 32, 33, 17),
            (136, 72, 23, 41),
            (8, 8, 7, 5),
            (32, 96, 1, 40),
            (20, 12, 9, 9),
        )
    ),
    dense(64, 64, 20, 20, 3, 1, 0),
    dense(64, 64, 20, 20, 3, 1, 2),
    dense(64, 64, 20, 20, 3, 2, 0),
    # Stride 2: tiles of 64, 48, 32 and 16 channels of x, one to five blocks of channels of z, even and odd sizes.
    *(
        dense(ci, co, h, w, 3, 2)
        for ci, co, h, w in (
            (128, 128, 36, 80),
            (48, 64, 17, 34),
            (96, 192, 18, 21),
            (64, 320, 15, 16),
            (24, 40, 2, 9),
        )
    ),
    dense(3, 16, 64, 96, 3, 2),
    dense(3, 24, 31, 33, 3, 1),
]
DEPTHWISE = [
    cases.Case(f"depthwise-{k}x{k}-{c}-{h}x{w}", c, c, h, w, (k, k), (1, 1), (k // 2, k // 2), groups=c)
    for k in (3, 5, 7)
    for c, h, w in (
        (64, 40, 40),
        (80, 20, 20),
        (24, 23, 41),
        (130, 9, 7),
        (10, 5, 3),
        (256, 3, 70),
        (8, 30, 100),
    )
]


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("case", [*DENSE, *DEPTHWISE], ids=str)
def test_gradients(cuda, case, precision):
    dgrad, wgrad = describe(case, op_checks.PRECISIONS[precision])
    if torch.cuda.get_device_capability() == (9, 0):
        assert wgrad != "aten"
        strided = case.padding == (1, 1) and case.h > 1 and case.ci % 8 == 0 and case.co % 8 == 0
        assert case.stride == (1, 1) or dgrad == ("dgrad/sm90/strided" if strided else "aten")
    assert dgrad != "aten" or case.stride != (1, 1)
    check(case, precision, cuda)


@pytest.mark.parametrize("target", ["sm90", "sm80"])
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("kernel", [3, 7])
@pytest.mark.parametrize(
    ("batch", "channels", "h", "w"),
    [
        (1, 64, 40, 40),
        (5, 72, 20, 20),
        (3, 8, 1, 1),
        (1, 24, 1, 50),
        (4, 200, 13, 1),
        (2, 40, 33, 47),
        (2, 40, 31, 48),
        (3, 96, 17, 23),
        (3, 96, 18, 24),
        (7, 520, 12, 8),
        (1, 16, 81, 161),
        (32, 32, 80, 80),
        (3, 10, 9, 11),
        (3, 13, 9, 11),
    ],
)
def test_depthwise_weight(cuda, monkeypatch, batch, channels, h, w, kernel, precision, target):
    """One image and odd numbers of them, widths around those of a block, odd channels, all kernels there are."""
    if target == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", target)
    name = f"depthwise-{kernel}x{kernel}-{batch}x{channels}-{h}x{w}"
    square, pad = (kernel, kernel), (kernel // 2, kernel // 2)
    case = cases.Case(name, channels, channels, h, w, square, (1, 1), pad, groups=channels, batch=batch)
    wgrad = describe(case, op_checks.PRECISIONS[precision])[1]
    special = target == "sm90" and kernel == 7 and channels % 8 == 0
    assert wgrad == ("wgrad/depthwise/sm90" if special else "wgrad/simt")
    check(case, precision, cuda)


@pytest.mark.parametrize("layout", ["slice", "misaligned", "crop", "nchw", "transposed", "expanded"])
@pytest.mark.parametrize(
    "case",
    [
        dense(64, 72, 20, 24, 1),
        dense(64, 72, 20, 24, 3),
        dense(64, 72, 20, 24, 3, 2),
        DEPTHWISE[0],
        DEPTHWISE[14],
    ],
    ids=str,
)
def test_layouts_of_x(cuda, case, layout):
    check(case, "float16", cuda, layout)


@pytest.mark.parametrize("layout", ["nhwc", "nchw", "slice", "misaligned"])
@pytest.mark.parametrize("x_dtype", [torch.float32, None], ids=["pictures in float", "in half"])
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize(
    "case",
    [
        dense(3, k, h, w, 3, 2)
        for k, h, w in ((16, 64, 96), (24, 9, 8), (48, 31, 328), (64, 17, 640), (96, 6, 40))
    ],
    ids=str,
)
def test_first_convolution(cuda, case, precision, x_dtype, layout):
    """A strip of outputs that is not full, several, odd heights, 16 to 64 channels a block, two blocks of them."""
    if torch.cuda.get_device_capability() == (9, 0):
        assert describe(case, op_checks.PRECISIONS[precision])[1] == "wgrad/stem"
    check(case, precision, cuda, layout, x_dtype)


def test_every_tile(cuda, monkeypatch):
    """Of the sm90 weight gradient, with one slice and with several, by name."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    tried = set()
    for case in (
        dense(250, 200, 24, 24, 1),
        dense(72, 104, 23, 20, 3),
        dense(80, 101, 23, 20, 3),
        dense(48, 96, 9, 17, 3, 1, 0),
        dense(72, 104, 23, 20, 3, 2),
    ):
        kind = "rows" if case.kernel == (1, 1) else "window"
        names = [
            f"wgrad/sm90/{kind}/{filters}x{channels}x{pixels}x{stages}/{slices}"
            for filters in (64, 96, 128, 192, 256)
            for channels in (16, 32, 48, 64, 80, 96, 128, 192, 256)
            for pixels in (64, 80, 128, 256)
            for stages in range(2, 17)
            for slices in (1, 3)
        ]
        for name in names:
            monkeypatch.setenv("YOLO12_FASTCONV_WGRAD", name)
            if describe(case, torch.float16)[1] == name:
                check(case, "float16", cuda)
                tried.add((kind, case.stride, name.split("/")[3].rsplit("x", 1)[0]))
    assert len(tried) >= 25, tried
    assert ("window", (1, 1), "64x48x80") in tried
    assert {("window", stride, "96x32x80") for stride in ((1, 1), (2, 2))} <= tried


@pytest.mark.parametrize("slices", [8, 9, 32, 33, 144, 145, 161, 400])
def test_numbers_of_slices(cuda, monkeypatch, slices):
    """The second launch adds them in one round or in several: few elements, gaps behind the channels, many."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    side = 40 if slices <= 33 else 160  # the limit is for slices of up to some hundred products
    for case in (dense(24, 40, side, side, 3), dense(22, 42, side, side, 3), dense(64, 72, side, side, 3)):
        monkeypatch.delenv("YOLO12_FASTCONV_WGRAD", raising=False)
        name = f"{describe(case, torch.float16)[1].rpartition('/')[0]}/{slices}"
        monkeypatch.setenv("YOLO12_FASTCONV_WGRAD", name)
        assert describe(case, torch.float16)[1] == name
        check(case, "float16", cuda)
