"""The sm90 implicit GEMM on shapes that reach each of its channel tiles, modes and ways out.

pytest -m gpu tests/test_gpu_sm90.py
"""

from __future__ import annotations

import re
from typing import NamedTuple

import op_checks
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from ultralytics.nn.modules.conv import Conv as Block

from yolo12_fastconv import error_rule, ops
from yolo12_fastconv.patching import patch_modules

pytestmark = pytest.mark.gpu


class Conv(NamedTuple):
    size: tuple[int, int, int, int]  # of x
    channels: int
    kernel: int
    stride: int
    padding: int
    dilation: int


WIDTHS = [
    Conv((2, 96, 20, 23), channels, kernel, 1, kernel // 2, 1)
    for kernel in (1, 3)
    for channels in (16, 32, 48, 64, 80, 96, 128, 192, 256)
]
GEOMETRIES = [
    Conv((2, 64, 33, 31), 64, 3, 2, 1, 1),
    Conv((2, 40, 13, 17), 51, 3, 2, 2, 2),
    Conv((2, 40, 13, 17), 56, 5, 1, 4, 2),
    Conv((2, 40, 13, 17), 56, 5, 3, 0, 1),
    Conv((3, 24, 7, 5), 8, 3, 1, 1, 1),
    Conv((1, 8, 1, 1), 8, 3, 1, 1, 1),
    Conv((1, 72, 9, 40), 24, 1, 2, 0, 1),
    Conv((4, 5, 64, 48), 16, 3, 2, 1, 1),
]
ODD = [
    Conv((2, 307, 20, 20), 61, 1, 1, 0, 1),
    Conv((2, 460, 20, 20), 384, 1, 1, 0, 1),
    Conv((2, 384, 20, 20), 460, 1, 1, 0, 1),
    Conv((3, 72, 21, 19), 102, 3, 1, 1, 1),
    Conv((3, 72, 21, 19), 103, 1, 1, 0, 1),
]
# Many tiles per block: rings that go round, workers that lag behind each other.
LONG = [
    Conv((16, 384, 80, 80), 384, 1, 1, 0, 1),
    Conv((16, 256, 80, 80), 256, 3, 2, 1, 1),
    Conv((12, 192, 77, 79), 200, 3, 1, 1, 1),
]


@pytest.fixture(autouse=True)
def forced(monkeypatch, cuda):
    if torch.cuda.get_device_capability(cuda) != (9, 0):
        pytest.fail("these tests need a GPU of compute capability 9.0")
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm90")


def name_of(conv: Conv, dtype: torch.dtype) -> str:
    return ops.describe_kernel(
        conv.size, (conv.channels, conv.size[1], conv.kernel, conv.kernel), (conv.stride,) * 2, (conv.padding,) * 2,
        (conv.dilation,) * 2, 1, dtype, tf32=dtype == torch.float32, capability=90,
    )  # fmt: skip


def relative(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


@pytest.fixture
def tf32(cuda):
    """TF32 is allowed. `cuda` has switched it off, and puts back what was before."""
    torch.backends.cudnn.allow_tf32 = True


def operand(tensor: Tensor) -> Tensor:
    """As the tensor cores see it."""
    return error_rule.round_tf32(tensor) if tensor.dtype == torch.float32 else tensor


def residual_like(y: Tensor, index: int) -> Tensor:
    """Random values in turn as dense as y, as an aligned slice, and as one that no 16-byte loads can read."""
    before = (0, 8, 3)[(index + index // 9) % 3]
    n, c, h, w = y.shape
    wide = torch.randn(n, before + c, h, w, device=y.device, dtype=y.dtype)
    return wide.contiguous(memory_format=torch.channels_last)[:, before:]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    "convs", [WIDTHS, GEOMETRIES, ODD, LONG], ids=["widths", "geometries", "odd", "long"]
)
def test_error_and_repetition(cuda, convs, residual, sliced, dtype):
    problems = []
    for index, conv in enumerate(convs):
        (n, c, h, w), k, kernel, stride, padding, dilation = conv
        torch.manual_seed(index)
        wide = torch.randn(n, c + 16, h, w, device=cuda, dtype=dtype).contiguous(
            memory_format=torch.channels_last
        )
        if sliced:  # what lies around the slice is not for multiplying with zeros
            wide[:, :8] = wide[:, 8 + c :] = torch.nan
        x = wide[:, 8 : 8 + c] if sliced else wide[:, :c].contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(k, c, kernel, kernel, device=cuda) / (c * kernel**2) ** 0.5).to(dtype)
        bias = torch.randn(k, device=cuda, dtype=dtype)
        geometry = ((stride,) * 2, (padding,) * 2, (dilation,) * 2)

        def stock(to, x=x, weight=weight, bias=bias, geometry=geometry):
            return functional.silu(functional.conv2d(x.to(to), weight.to(to), bias.to(to), *geometry))

        truth, peer = stock(torch.float64), stock(dtype)
        # cuDNN decides for each shape whether stock uses TF32.
        granted = stock(torch.float64, operand(x), operand(weight)) if dtype == torch.float32 else truth
        added = residual_like(peer, index) if residual else None
        if added is not None:
            truth, peer, granted = truth + added.double(), peer + added, granted + added.double()
        got = ops.conv_bn_act(x, weight, bias, None, added, *geometry)
        again = ops.conv_bn_act(x, weight, bias, None, added, *geometry)
        name = name_of(conv, dtype)
        allowed = max(relative(peer, truth), relative(granted, truth))
        error, limit = relative(got, truth), 2 * allowed + 1e-5
        if not error <= limit or not torch.equal(got, again) or not name.startswith("implicit_gemm/sm90/"):
            problems.append(
                f"{conv}, {name}: error {error:.3g}, limit {limit:.3g}, equal {torch.equal(got, again)}"
            )
    assert not problems, "\n".join(problems)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("kernel", [1, 3])
def test_float_is_rounded_to_the_nearest_tf32(cuda, kernel):
    """By the copy engine. Dropping bits, as wgmma does, would be off by up to 2^-10, and always towards zero."""
    torch.manual_seed(0)
    geometry = ((1, 1), (kernel // 2,) * 2)
    x = torch.randn(2, 64, 16, 16, device=cuda).contiguous(memory_format=torch.channels_last)
    eye = torch.zeros(64, 64, kernel, kernel, device=cuda)
    eye[:, :, kernel // 2, kernel // 2] = torch.eye(64, device=cuda)
    got = ops.conv_bn_act(x, eye, None, None, None, *geometry, act="identity")
    assert not (got.view(torch.int32) & 0x1FFF).any()
    assert ((got - x).abs() <= x.abs() * 2**-11).all()
    # The weights: each pixel of a column has a one in a channel of its own, so 3x3 adds up three weights.
    ones = torch.eye(64, device=cuda)[None, :, :, None].contiguous(memory_format=torch.channels_last)
    weight = torch.randn(96, 64, kernel, kernel, device=cuda)
    got = ops.conv_bn_act(ones, weight, None, None, None, *geometry, act="identity")
    exact = functional.conv2d(ones.double(), weight.double(), None, *geometry)
    nearest = functional.conv2d(ones.double(), operand(weight).double(), None, *geometry)
    # One of 8192 random numbers is a tie, which operand() may round the other way: 1e-5.
    assert relative(got, nearest) < 5e-5 < relative(got, exact) < 3e-4


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_crop_of_a_map(cuda, dtype):
    """Pixels of a 1x1 that are not evenly spaced. Float that is not rounded would be off by 6e-4."""
    x = (
        torch.randn(2, 256, 12, 14, device=cuda)
        .to(dtype)
        .contiguous(memory_format=torch.channels_last)[:, :, 1:10, 2:13]
    )
    weight = (torch.randn(64, 256, 1, 1, device=cuda) / 16).to(dtype)
    got = ops.conv_bn_act(x, weight, act="identity")
    assert relative(got, functional.conv2d(x.double(), weight.double())) < 4e-4


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_more_than_31_bits(cuda, dtype):
    x = torch.randn(96, 256, 320, 288, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert x.numel() > 2**31
    for kernel, stride in ((1, 1), (3, 1), (3, 2)):
        weight = (torch.randn(24, 256, kernel, kernel, device=cuda) / (16 * kernel)).to(dtype)
        geometry = ((stride,) * 2, (kernel // 2,) * 2)
        got = ops.conv_bn_act(x, weight, None, None, None, *geometry, act="identity")
        for first in (0, 94):
            part = slice(first, first + 2)
            assert (
                relative(got[part], functional.conv2d(x[part].double(), weight.double(), None, *geometry))
                < 4e-4
            )


def test_forced_target_that_the_gpu_has_not():
    with pytest.raises(RuntimeError, match=r"sm90 needs a GPU of compute capability 9\.0, this one has 8\.0"):
        ops.describe_kernel(
            (1, 8, 8, 8), (8, 8, 1, 1), (1, 1), (0, 0), (1, 1), 1, torch.float16, tf32=False, capability=80
        )


# Maps smaller than a tile, tiles with one valid row or column, one tile for many workers, and many tiles for each.
STATS = [
    Conv((1, 8, 1, 2), 8, 1, 1, 0, 1),
    Conv((1, 16, 9, 9), 24, 3, 1, 1, 1),
    Conv((2, 32, 17, 8), 16, 3, 1, 1, 1),
    Conv((3, 48, 5, 7), 1, 1, 1, 0, 1),
    Conv((32, 64, 40, 40), 13, 1, 1, 0, 1),
    Conv((32, 256, 20, 20), 512, 1, 1, 0, 1),
    Conv((8, 64, 160, 160), 64, 3, 2, 1, 1),
]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [0.0, 333.0])
@pytest.mark.parametrize(
    "convs", [WIDTHS, GEOMETRIES, ODD, LONG, STATS], ids=["widths", "geometries", "odd", "long", "stats"]
)
def test_statistics_of_the_output(cuda, convs, offset, dtype):
    """Mean and variance are those of z as it is stored, also `offset` deviations from zero; z is inference's, bit for
    bit where the same kernel computes it: those for small grids and of wide tiles have no statistics."""
    problems = []
    for index, conv in enumerate(convs):
        (n, c, h, w), k, kernel, stride, padding, dilation = conv
        torch.manual_seed(index)
        x = torch.randn(n, c, h, w, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(k, c, kernel, kernel, device=cuda) / (c * kernel**2) ** 0.5).to(dtype)
        bias = torch.full((k,), offset, device=cuda, dtype=dtype)
        geometry = ((stride,) * 2, (padding,) * 2, (dilation,) * 2)
        name = name_of(conv, dtype)
        plain = ops.conv_bn_act(x, weight, bias, None, None, *geometry, act="identity")
        count = plain.numel() // k
        if count < 2:
            continue
        results = []
        settings = (1, 0, dtype, True)  # groups, identity, and whether TF32 is allowed
        for _ in range(2):
            op_checks.poison([plain])
            running = [torch.zeros(k, device=cuda), torch.ones(k, device=cuda), torch.tensor(1, device=cuda)]
            _y, z, mean, var, _cast = torch.ops.yolo12_fastconv.conv_bn_act_train_.default(
                x, weight, bias, None, None, 1e-3, None, *map(list, geometry), *settings, *running, 0.25
            )
            results.append((z, mean, var, *running))
        z, mean, var, running_mean, running_var, batches = results[0]
        exact_var, exact_mean = torch.var_mean(z.double(), (0, 2, 3), correction=0)
        spread = exact_var.clamp_min(1e-12).sqrt()
        errors = {
            # Of the spread, with what float keeps of the offset.
            "mean": ((mean - exact_mean).abs() / (spread + offset * 2**-2)).max() / 2e-6,
            "var": ((var - exact_var).abs() / exact_var.clamp_min(1e-12)).max()
            / (5e-6 + offset / spread.min() * 2**-24),
            "running_mean": ((running_mean - 0.25 * mean).abs() / mean.abs().clamp_min(1e-3)).max() / 1e-6,
            "running_var": (running_var - 0.75 - 0.25 * var * (count / (count - 1))).abs().max() / 1e-5,
        }
        problems += [
            f"{conv}, {name}: {what} {error:.2g} of its limit"
            for what, error in errors.items()
            if not error < 1
        ]
        if int(batches) != 2:
            problems.append(f"{conv}, {name}: {int(batches)} batches")
        other = name.endswith("-once") or int(re.split("[/x]", name)[3]) > 128
        rounding = torch.finfo(dtype).eps * plain.abs().max() if other else 0
        if not ((z - plain).abs() <= rounding).all():
            problems.append(f"{conv}, {name}: z differs from inference's")
        if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
            problems.append(f"{conv}, {name}: differs between two runs")
        if not name.startswith("implicit_gemm/sm90/"):
            problems.append(f"{conv}, {name}: not the kernel under test")
    assert not problems, "\n".join(problems)


def test_statistics_are_taken_by_the_convolution(cuda):
    """Without a pass over z. Values that overflow reach no other channel, and no further than in torch."""
    for channels in (16, 32, 48, 64, 80, 96, 128):
        x = torch.randn(2, channels, 24, 24, device=cuda, dtype=torch.float16)
        x[0, 0, 0, 0] = x[1, 1, 11, 7] = 60000
        x[1, 2, 23, 23] = -60000
        weight = (2 * torch.eye(channels, device=cuda, dtype=torch.float16))[:, :, None, None].contiguous()
        x = x.contiguous(memory_format=torch.channels_last)
        _y, mean, var = ops.conv_bn_act_train(x, weight, None, None, None, 1e-3)
        assert mean[:2].isposinf().all() and mean[2].isneginf() and mean[3:].isfinite().all(), channels
        assert var[:3].isnan().all() and var[3:].isfinite().all(), channels
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _y, mean, var = ops.conv_bn_act_train(x, weight, None, None, None, 1e-3)
        torch.cuda.synchronize()
    kernels = " ".join(event.key for event in profile.key_averages())
    assert "tile_stats_kernel" in kernels and "::stats_kernel" not in kernels, kernels


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_far_from_zero_and_after_unlike_rows(cuda, dtype):
    """Means of 0 to 100 deviations, on which the choice of an origin depends, in whole tiles and in parts of tiles. In
    some, rows of another value come first. z is x."""
    problems = []
    for channels in (16, 32, 48, 64, 80, 96, 128):
        weight = torch.eye(channels, device=cuda, dtype=dtype)[:, :, None, None].contiguous()
        for size in ((1, 2, 3), (3, 9, 9), (2, 24, 24), (16, 40, 40)):
            torch.manual_seed(channels)
            for offset in (0.0, 1.5, 3.9, 4.1, 7.0, 13.0, 100.0):
                for before in (None, 0.0, 3.0):
                    x = torch.randn(size[0], channels, *size[1:], device=cuda) + offset
                    if before is not None:
                        x[:1, :, : size[1] // 2] = before
                    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
                    _y, mean, var = ops.conv_bn_act_train(x, weight, None, None, None, 1e-3)
                    wrong = op_checks.moments_used(mean, var, x, offset)
                    if not wrong < 1:
                        problems.append(f"{channels} {size} {offset} {before}: {wrong:.2g} of the limit")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_odd_widths_in_training(cuda, dtype):
    """Pixels of y, z and weights begin at multiples of 16 bytes, and what lies between is not read."""
    for channels in (13, 307, 460):
        x = torch.randn(4, 40, 20, 20, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
        wide, narrow = (
            torch.randn(*size, 1, 1, device=cuda) / 8 for size in ((channels, 40), (24, channels))
        )
        leaves = [leaf.requires_grad_() for leaf in (x, wide, narrow)]
        results = []
        for _ in range(2):
            op_checks.poison([x.detach()])
            with torch.autocast("cuda", dtype=dtype):
                y = ops.conv_bn_act_train(x, wide, None, None, None, 1e-3)[0]
                out = ops.conv_bn_act_train(y, narrow, None, None, None, 1e-3)[0]
            assert y.stride(3) == -(-channels // 8) * 8
            results.append(
                (
                    out,
                    *torch.autograd.grad(
                        out, leaves, torch.linspace(-1, 1, out.numel(), device=cuda).view_as(out).to(dtype)
                    ),
                )
            )
        doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
        truth = doubles[0]
        for weight in doubles[1:]:
            z = functional.conv2d(truth, weight)
            truth = functional.silu(functional.batch_norm(z, None, None, training=True, eps=1e-3))
        grads = torch.autograd.grad(
            truth,
            doubles,
            torch.linspace(-1, 1, truth.numel(), device=cuda, dtype=torch.double).view_as(truth),
        )
        for mine, exact in zip(results[0], (truth, *grads), strict=True):
            assert relative(mine, exact) < (2e-3 if dtype is torch.float16 else 1.6e-2)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("groups", [1, 64], ids=["dense", "depthwise"])
def test_filter_of_the_gradient_has_no_launch(cuda, groups):
    """The blocks that sum for the batch norm's backward make it, in eager training of a block."""
    block = Block(64, 64, 3, g=groups).to(cuda, memory_format=torch.channels_last).train()
    patch_modules(block)
    x = torch.randn(2, 64, 20, 20, device=cuda, dtype=torch.float16)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with torch.autocast("cuda"):
            y = block(x)
        y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
    kernels = " ".join(event.key for event in profile.key_averages())
    assert "backward_sums_kernel" in kernels and "transpose" not in kernels, kernels
    assert block.bn.num_batches_tracked == 1


def test_statistics_in_a_graph(cuda):
    """Replayed on other numbers than it was captured on."""
    x = torch.randn(4, 96, 21, 19, device=cuda, dtype=torch.float16).contiguous(
        memory_format=torch.channels_last
    )
    weight = (torch.randn(72, 96, 3, 3, device=cuda) / 30).half()
    arguments = (x, weight, None, None, None, 1e-3, None, (1, 1), (1, 1))
    ops.conv_bn_act_train(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.conv_bn_act_train(*arguments)
    x.copy_(torch.randn_like(x) * 3 + 1)
    graph.replay()
    for replayed, direct in zip(captured, ops.conv_bn_act_train(*arguments), strict=True):
        assert torch.equal(replayed, direct)


SPLIT = [
    (Conv((1, 192, 40, 40), 192, 3, 1, 1, 1), True),
    (Conv((1, 512, 20, 20), 64, 3, 1, 1, 1), False),
    (Conv((1, 512, 40, 40), 512, 3, 2, 1, 1), False),
    (Conv((1, 1536, 20, 20), 768, 1, 1, 0, 1), True),
    (Conv((2, 200, 13, 17), 51, 3, 1, 1, 1), True),
    (Conv((1, 320, 9, 11), 24, 5, 1, 2, 1), False),
    (Conv((1, 460, 20, 20), 384, 1, 1, 0, 1), False),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_reductions_that_clusters_share(cuda, dtype, monkeypatch):
    """Each way to split a reduction, whether or not the menu would choose it."""
    problems = []
    splits = set()
    for index, (conv, residual) in enumerate(SPLIT):
        (n, c, h, w), k, kernel, *numbers = conv
        torch.manual_seed(index)
        x = torch.randn(n, c, h, w, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(k, c, kernel, kernel, device=cuda) / (c * kernel**2) ** 0.5).to(dtype)
        geometry = tuple((number,) * 2 for number in numbers)
        truth = functional.conv2d(x.double(), weight.double(), None, *geometry)
        peer = functional.conv2d(x, weight, None, *geometry)
        added = residual_like(peer, index) if residual else None
        if added is not None:
            truth, peer = truth + added.double(), peer + added
        limit = 2 * relative(peer, truth) + 1e-5
        names = ops.kernel_candidates(x.shape, weight.shape, *geometry, 1, dtype, tf32=False, capability=90)
        named = [name for name in names if "-split" in name]
        splits.update(name.partition("-split")[2][0] for name in named)
        for name in named[:24]:
            monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", name)
            op_checks.poison([peer])
            got = ops.conv_bn_act(x, weight, None, None, added, *geometry, act="identity")
            again = ops.conv_bn_act(x, weight, None, None, added, *geometry, act="identity")
            error = relative(got, truth)
            if not error <= limit or not torch.equal(got, again):
                problems.append(f"{conv}, {name}: error {error:.3g}, limit {limit:.3g}")
        monkeypatch.delenv("YOLO12_FASTCONV_KERNEL")
    assert not problems, "\n".join(problems)
    assert splits == {"2", "3", "4"}


# 200, 800 or 393 tiles among 66, 44, 33, 22 or 132 blocks: 2, 8, 24 or more are left.
REST = [
    Conv((32, 384, 20, 20), 768, 1, 1, 0, 1),
    Conv((32, 1536, 20, 20), 768, 1, 1, 0, 1),
    Conv((32, 128, 40, 40), 256, 1, 1, 0, 1),
    Conv((32, 512, 40, 40), 250, 1, 1, 0, 1),
    Conv((32, 320, 40, 40), 384, 1, 1, 0, 1),
    Conv((32, 128, 40, 40), 768, 3, 2, 1, 1),
    Conv((32, 64, 40, 40), 250, 3, 2, 1, 1),
    Conv((11, 192, 79, 59), 200, 1, 1, 0, 1),
]
# Blocks that copy pixels for each other: with a rest and without, whole tiles of channels and not, few tiles and many.
PAIRED = [
    *REST,
    Conv((32, 384, 20, 20), 1152, 1, 1, 0, 1),
    Conv((5, 320, 41, 43), 248, 1, 1, 0, 1),
    Conv((5, 64, 27, 23), 256, 3, 2, 1, 1),  # of the last tile, one block has no pixel to copy
    Conv((1, 64, 5, 3), 256, 1, 1, 0, 1),
    Conv((8, 1024, 40, 40), 1024, 1, 1, 0, 1),
]


@pytest.mark.parametrize(
    ("convs", "pattern", "modes"),
    [
        (REST, "(streamed|resident)-rest-", {"rows", "taps", "streamed", "resident", "rest"}),
        (PAIRED, "(streamed|resident)-paired-", {"rows", "taps", "streamed", "resident", "paired", "rest"}),
        (PAIRED, "-ring-", {"rows", "resident", "ring", "paired", "rest"}),
    ],
    ids=["dealt out in parts", "paired blocks", "one ring"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rest_of_the_tiles_and_pairs_of_blocks(cuda, dtype, convs, pattern, modes, monkeypatch):
    """Each plan of the kind, whether or not the menu would choose it."""
    problems, tried = [], set()
    for index, conv in enumerate(convs):
        (n, c, h, w), k, kernel, *numbers = conv
        torch.manual_seed(index)
        x = torch.randn(n, c, h, w, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(k, c, kernel, kernel, device=cuda) / (c * kernel**2) ** 0.5).to(dtype)
        geometry = tuple((number,) * 2 for number in numbers)
        act = ("silu", "identity")[index % 2]
        activate = functional.silu if act == "silu" else lambda y: y
        bias = torch.randn(k, device=cuda, dtype=dtype)
        truth = activate(functional.conv2d(x.double(), weight.double(), bias.double(), *geometry))
        peer = activate(functional.conv2d(x, weight, bias, *geometry))
        added = residual_like(peer, index // 2) if index % 4 > 1 else None
        if added is not None:
            truth, peer = truth + added.double(), peer + added
        pixels = truth.numel() // k // 64 * 64  # the last tiles by themselves: 1 % of all would not show
        last = slice(max(0, pixels - 64 * 32), None)
        rows = [y.permute(0, 2, 3, 1).reshape(-1, k)[last] for y in (truth, peer)]
        limit = 2 * relative(rows[1], rows[0]) + 1e-5
        names = ops.kernel_candidates(x.shape, weight.shape, *geometry, 1, dtype, tf32=False, capability=90)
        for name in (name for name in names if re.search(pattern, name)):
            monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", name)
            op_checks.poison([peer])
            got = ops.conv_bn_act(x, weight, bias, None, added, *geometry, act=act)
            again = ops.conv_bn_act(x, weight, bias, None, added, *geometry, act=act)
            error = relative(got.permute(0, 2, 3, 1).reshape(-1, k)[last], rows[0])
            whole = relative(got, truth)
            if not error <= limit or not whole <= limit or not torch.equal(got, again):
                problems.append(f"{conv}, {name}: errors {error:.3g}, {whole:.3g}, limit {limit:.3g}")
            tile, *ways = name.split("/")[-1].split("-")
            tried.update(ways[:-1], tile.split("x")[1:2])
        monkeypatch.delenv("YOLO12_FASTCONV_KERNEL", raising=False)
    assert not problems, "\n".join(problems)
    assert tried == modes | {"128", "192", "256"}


# Blocks of channels without a rest, and several tiles a worker: short loops, and workers that take turns.
ROUNDS = [
    *(Conv((13, 128, 53, 53), channels, 1, 1, 0, 1) for channels in (16, 32, 48, 64, 80, 96, 128, 192, 256)),
    Conv((5, 320, 41, 43), 248, 1, 1, 0, 1),
    Conv((6, 128, 43, 41), 200, 3, 2, 1, 1),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_each_plan_of_a_layer(cuda, dtype, monkeypatch):
    """Whether or not the menu would choose it."""
    problems, modes = [], set()
    for index, conv in enumerate(ROUNDS):
        (n, c, h, w), k, kernel, *numbers = conv
        torch.manual_seed(index)
        x = torch.randn(n, c, h, w, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
        weight = (torch.randn(k, c, kernel, kernel, device=cuda) / (c * kernel**2) ** 0.5).to(dtype)
        geometry = tuple((number,) * 2 for number in numbers)
        act = ("silu", "identity")[index % 2]
        activate = functional.silu if act == "silu" else lambda y: y
        truth = activate(functional.conv2d(x.double(), weight.double(), None, *geometry))
        peer = activate(functional.conv2d(x, weight, None, *geometry))
        added = residual_like(peer, index // 2) if index % 4 > 1 else None
        if added is not None:
            truth, peer = truth + added.double(), peer + added
        limit = 2 * relative(peer, truth) + 1e-5
        names = ops.kernel_candidates(x.shape, weight.shape, *geometry, 1, dtype, tf32=False, capability=90)
        for name in names:
            monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", name)
            op_checks.poison([peer])
            got = ops.conv_bn_act(x, weight, None, None, added, *geometry, act=act)
            again = ops.conv_bn_act(x, weight, None, None, added, *geometry, act=act)
            error = relative(got, truth)
            if not error <= limit or not torch.equal(got, again):
                problems.append(f"{conv}, {name}: error {error:.3g}, limit {limit:.3g}")
            modes.update(part for part in name.split("/")[-1].split("-") if part.isalpha())
        monkeypatch.delenv("YOLO12_FASTCONV_KERNEL")
    assert not problems, "\n".join(problems)
    assert modes == {"rows", "taps", "window", "resident", "streamed", "rest", "paired", "ring"}


@pytest.mark.parametrize("target", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_whose_padding_holds_anything(cuda, dtype, target, monkeypatch):
    """Rows of odd widths, 16 bytes times a number apart, are read as they lie: not what is between them."""
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", target)
    for c, kernel in ((460, 1), (307, 1), (51, 3)):
        geometry = ((1, 1), (kernel // 2,) * 2)
        x = torch.randn(2, c, 20, 20, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
        weight = torch.randn(64, c, kernel, kernel, device=cuda, dtype=dtype) / (c * kernel**2) ** 0.5
        rows = torch.full((64, kernel, kernel, -(-c // 8) * 8), torch.nan, device=cuda, dtype=dtype)
        rows[..., :c] = weight.permute(0, 2, 3, 1)
        padded = rows[..., :c].permute(0, 3, 1, 2)
        assert torch.equal(
            ops.conv_bn_act(x, padded, None, None, None, *geometry),
            ops.conv_bn_act(x, weight, None, None, None, *geometry),
        )


# The kernel for small grids: each mode, parts of the channels that are not full, tiles that do not divide the channels.
SMALL = [
    Conv((1, 64, 40, 40), 128, 1, 1, 0, 1),
    Conv((2, 96, 20, 23), 96, 1, 1, 0, 1),
    Conv((1, 460, 20, 20), 384, 1, 1, 0, 1),
    Conv((1, 307, 20, 20), 256, 1, 1, 0, 1),
    Conv((1, 384, 20, 20), 460, 1, 1, 0, 1),
    Conv((1, 768, 9, 11), 256, 1, 1, 0, 1),
    Conv((1, 256, 40, 40), 256, 1, 1, 0, 1),
    Conv((1, 64, 40, 40), 64, 3, 1, 1, 1),
    Conv((1, 16, 33, 24), 16, 3, 1, 1, 1),
    Conv((2, 96, 20, 20), 96, 3, 1, 1, 1),
    Conv((1, 192, 20, 20), 192, 3, 1, 1, 1),
    Conv((2, 40, 13, 17), 56, 3, 1, 2, 1),
    Conv((3, 24, 7, 5), 16, 3, 1, 0, 1),
    Conv((1, 64, 33, 31), 64, 3, 2, 1, 1),
    Conv((1, 128, 20, 20), 128, 3, 2, 1, 1),
    Conv((1, 16, 30, 41), 32, 3, 2, 1, 1),
    Conv((2, 36, 19, 22), 52, 3, 2, 0, 1),
    # Half a part, and a part and a quarter.
    Conv((1, 48, 21, 30), 48, 3, 1, 1, 1),
    Conv((2, 80, 17, 11), 64, 3, 1, 1, 1),
    # Reductions that go through a ring; the last one's tiles do not divide among two workers.
    Conv((1, 1100, 17, 23), 128, 1, 1, 0, 1),
    Conv((2, 1920, 9, 11), 192, 1, 1, 0, 1),
    Conv((1, 512, 20, 19), 64, 3, 1, 1, 1),
    Conv((2, 256, 21, 19), 96, 3, 2, 1, 1),
    Conv((1, 1280, 13, 13), 132, 1, 1, 0, 1),
]


def affine_of(
    kind: int, channels: int, dtype: torch.dtype, device
) -> tuple[Tensor | None, ops.BatchNormState | None]:
    """Bias and batch norm, each way that a block may have them."""

    def vector(to: torch.dtype) -> Tensor:
        return torch.randn(channels, device=device).to(to)

    def norm(first: torch.dtype, second: torch.dtype) -> ops.BatchNormState:
        return ops.BatchNormState(
            vector(first), vector(second), vector(second), vector(second).abs() + 0.5, 1e-3
        )

    match kind % 6:
        case 0:
            return None, norm(dtype, dtype)
        case 1:
            return vector(dtype), None
        case 2:
            return None, norm(torch.float32, torch.float32)
        case 3:
            return vector(torch.float32), None
        case 4:
            return vector(dtype), norm(dtype, torch.float32)
        case _:
            return None, None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["dense", "slice", "out"])
def test_kernels_for_small_grids(cuda, dtype, layout, monkeypatch):
    """Each of them, whether or not the menu would choose it."""
    problems = []
    ran = 0
    for index, conv in enumerate(SMALL):
        (n, c, h, w), k, kernel, *numbers = conv
        torch.manual_seed(index)
        pitch = -(-c // 8) * 8
        wide = torch.full((n, h, w, pitch + 16), torch.nan, device=cuda, dtype=dtype)
        wide[..., 8 : 8 + c] = torch.randn(n, h, w, c, device=cuda)
        x = wide[..., 8 : 8 + c].permute(0, 3, 1, 2)
        if layout == "dense" and c % 8 == 0:
            x = x.contiguous(memory_format=torch.channels_last)
        rows = torch.full((k, kernel, kernel, pitch), torch.nan, device=cuda, dtype=dtype)
        rows[..., :c] = torch.randn(k, kernel, kernel, c, device=cuda) / (c * kernel**2) ** 0.5
        weight = rows[..., :c].permute(0, 3, 1, 2)
        geometry = tuple((number,) * 2 for number in numbers)
        bias, bn = affine_of(index, k, dtype, cuda)
        act = ("silu", "identity")[index // 2 % 2]

        def stock(to, x=x, weight=weight, bias=bias, bn=bn, geometry=geometry, act=act):
            y = functional.conv2d(x.to(to), weight.to(to), None, *geometry)
            wide = to if to == torch.float64 else torch.float32
            y = y.to(wide)
            if bias is not None:
                y = y + bias.to(wide).view(1, -1, 1, 1)
            if bn is not None:
                gamma, beta, mean, var = (
                    value.to(wide).view(1, -1, 1, 1)
                    for value in (bn.weight, bn.bias, bn.running_mean, bn.running_var)
                )
                y = (y - mean) / (var + bn.eps).sqrt() * gamma + beta
            return (functional.silu(y) if act == "silu" else y).to(to)

        truth, peer = stock(torch.float64), stock(dtype)
        added = residual_like(peer, index) if index % 3 != 1 else None
        if added is not None:
            truth, peer = truth + added.double(), peer + added
        limit = 2 * relative(peer, truth) + 1e-5
        names = ops.kernel_candidates(x.shape, weight.shape, *geometry, 1, dtype, tf32=False, capability=90)
        for name in [name for name in names if name.endswith("-once")]:
            ran += 1
            monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", name)
            results = []
            for _ in range(2):
                if layout == "out":
                    around = torch.full(
                        (n, peer.shape[2], peer.shape[3], k + 24), torch.nan, device=cuda, dtype=dtype
                    )
                    out = around[..., 8 : 8 + k].permute(0, 3, 1, 2)
                    ops.conv_bn_act_out(x, weight, out, bias, bn, added, *geometry, act=act)
                    if not (around[..., :8].isnan().all() and around[..., 8 + k :].isnan().all()):
                        problems.append(f"{conv}, {name}: writes beside its channels")
                    results.append(out)
                else:
                    op_checks.poison([peer])
                    results.append(ops.conv_bn_act(x, weight, bias, bn, added, *geometry, act=act))
            error = relative(results[0], truth)
            if not error <= limit or not torch.equal(*results):
                problems.append(f"{conv}, {name}: error {error:.3g}, limit {limit:.3g}")
        monkeypatch.delenv("YOLO12_FASTCONV_KERNEL", raising=False)
    assert not problems, f"{len(problems)} of {ran}\n" + "\n".join(problems)
    assert ran > 60
