"""Batch statistics that the first layer's and the depthwise kernels take on the way, on a GPU.

pytest -m gpu tests/test_gpu_stats.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import op_checks
import pytest
import torch
from torch import Tensor

from yolo12_fastconv import ops

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)

# (n, c, h, w). Whole blocks and parts of blocks of each tile, odd sizes, one picture; of 13 channels, another kernel's.
DEPTHWISE = [
    (1, 8, 2, 1), (1, 8, 7, 9), (2, 24, 20, 20), (3, 40, 21, 23), (1, 64, 40, 40), (4, 384, 20, 20), (32, 80, 20, 20),
    (32, 64, 40, 40), (8, 128, 80, 80), (2, 13, 9, 9),
]  # fmt: skip
# (n, k, h, w). Rows of z of no whole tiles of 32 pixels, 13 channels: without statistics on the way.
STEM = [
    (1, 16, 4, 8), (1, 12, 2, 64), (1, 16, 64, 64), (2, 64, 96, 72), (3, 96, 33, 40), (2, 160, 64, 64),
    (8, 16, 640, 640), (2, 96, 640, 608), (2, 32, 50, 57), (2, 13, 64, 64),
]  # fmt: skip


class Layer(NamedTuple):
    what: str
    x: Tensor
    weight: Tensor
    stride: int
    padding: int
    groups: int


def depthwise(n: int, c: int, h: int, w: int, kernel: int, dtype: torch.dtype) -> Layer:
    x = torch.randn(n, c, h, w, device="cuda", dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = (torch.randn(c, 1, kernel, kernel, device="cuda") / kernel).to(dtype)
    return Layer(f"{kernel}x{kernel} {n, c, h, w}", x, weight, 1, kernel // 2, c)


def stem(n: int, k: int, h: int, w: int, layout: str, dtype: torch.dtype) -> Layer:
    x = torch.randn(n, 3, h, w, device="cuda")
    if layout == "interleaved":
        x = x.contiguous(memory_format=torch.channels_last)
    if layout == "half":
        x = x.to(dtype)
    return Layer(f"{layout} {n, k, h, w}", x, torch.randn(k, 3, 3, 3, device="cuda") / 5, 2, 1, 1)


def layers(dtype: torch.dtype) -> Iterator[Layer]:
    for index, (size, kernel) in enumerate(itertools.product(DEPTHWISE, (3, 5, 7))):
        torch.manual_seed(index)
        yield depthwise(*size, kernel, dtype)
    for index, (size, layout) in enumerate(itertools.product(STEM, ("planar", "interleaved", "half"))):
        torch.manual_seed(index)
        yield stem(*size, layout, dtype)


def in_training(layer: Layer, bias: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """z, mean, variance."""
    geometry = [[layer.stride] * 2, [layer.padding] * 2, [1, 1], layer.groups]
    _y, z, mean, var = torch.ops.yolo12_fastconv.conv_bn_act_train.default(
        layer.x, layer.weight, bias, None, None, 1e-3, None, *geometry, 0, dtype, True
    )
    return z, mean, var


def exact(z: Tensor) -> tuple[Tensor, Tensor]:
    var, mean = torch.var_mean(z.double(), (0, 2, 3), correction=0)
    return mean, var


@DTYPES
@pytest.mark.parametrize("offset", [0.0, 333.0])
def test_against_float64(cuda, dtype, offset):
    """Mean and variance of z as rounded, the same in each run, and z as inference has it."""
    problems = []
    for layer in layers(dtype):
        bias = torch.full((layer.weight.size(0),), offset, device=cuda, dtype=dtype)
        plain = ops.conv_bn_act(
            layer.x.to(dtype), layer.weight.to(dtype), bias, None, None, (layer.stride,) * 2, (layer.padding,) * 2,
            groups=layer.groups, act="identity",
        )  # fmt: skip
        results = []
        for _ in range(2):
            op_checks.poison([plain])
            results.append(in_training(layer, bias, dtype))
        z, mean, var = results[0]
        exact_mean, exact_var = exact(z)
        spread = exact_var.clamp_min(1e-12).sqrt()
        errors = {
            # Of the spread, with what float keeps of the offset.
            "mean": ((mean - exact_mean).abs() / (spread + offset * 2**-2)).max() / 2e-6,
            "var": ((var - exact_var).abs() / exact_var.clamp_min(1e-12)).max()
            / (5e-6 + offset / spread.min() * 2**-24),
        }
        problems += [
            f"{layer.what}: {what} {error:.2g} of its limit"
            for what, error in errors.items()
            if not error < 1
        ]
        if not torch.equal(z, plain):
            problems.append(f"{layer.what}: z differs from inference's")
        if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
            problems.append(f"{layer.what}: differs between two runs")
    assert not problems, "\n".join(problems)


@DTYPES
def test_after_unlike_rows(cuda, dtype):
    """Means of 0 to 100 deviations, on which the choice of an origin depends; in some, rows of another come first.
    z is x, or every fourth pixel of it."""
    problems = []
    for size, offset, before in itertools.product(
        ((1, 6, 8), (1, 6, 64), (3, 18, 24), (2, 64, 64), (16, 80, 128)),
        (0.0, 1.5, 3.9, 4.1, 7.0, 13.0, 100.0),
        (None, 0.0, 3.0),
    ):
        torch.manual_seed(1)
        x = torch.randn(size[0], 3, *size[1:], device=cuda) + offset
        if before is not None:
            x[:1, :, : size[1] // 2] = before
        x = x.to(dtype)
        channels = 16
        dense, single = (torch.zeros(channels, c, 3, 3, device=cuda, dtype=dtype) for c in (3, 1))
        dense[:, 0, 1, 1] = single[:, 0, 1, 1] = 1
        many = x[:, :1].expand(-1, channels, -1, -1).contiguous(memory_format=torch.channels_last)
        for layer in (Layer("stem", x, dense, 2, 1, 1), Layer("depthwise", many, single, 1, 1, channels)):
            z, mean, var = in_training(layer, None, dtype)
            wrong = op_checks.moments_used(mean, var, z, offset)
            if not wrong < 1:
                problems.append(f"{layer.what} {size} {offset} {before}: {wrong:.2g} of the limit")
    assert not problems, "\n".join(problems)


def test_without_a_pass_over_z(cuda):
    """Values that overflow reach no other channel, and no further than in torch."""
    channels = 16
    many = torch.randn(2, channels, 24, 24, device=cuda, dtype=torch.float16)
    many[0, 0, 0, 0] = many[1, 1, 11, 7] = 60000
    single = torch.zeros(channels, 1, 7, 7, device=cuda, dtype=torch.float16)
    single[:, 0, 3, 3] = 2
    picture = torch.randn(2, 3, 48, 64, device=cuda)
    picture[0, 0, 0, 0] = picture[1, 1, 22, 14] = 60000
    dense = torch.zeros(channels, 3, 3, 3, device=cuda)
    dense[0, 0, 1, 1] = dense[1, 1, 1, 1] = dense[2:, 2, 1, 1] = 2
    many = many.contiguous(memory_format=torch.channels_last)
    for layer in (Layer("depthwise", many, single, 1, 3, channels), Layer("stem", picture, dense, 2, 1, 1)):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            _z, mean, var = in_training(layer, None, torch.float16)
            torch.cuda.synchronize()
        kernels = " ".join(event.key for event in profile.key_averages())
        assert "tile_stats_kernel" in kernels and "::stats_kernel" not in kernels, kernels
        assert mean[:2].isposinf().all() and mean[2:].isfinite().all(), layer.what
        assert var[:2].isnan().all() and var[2:].isfinite().all(), layer.what
