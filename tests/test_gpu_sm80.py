"""Every tile of the sm80 implicit GEMM, whether or not the menu would choose it: shapes that end inside of tiles.

pytest -m gpu tests/test_gpu_sm80.py
"""

from __future__ import annotations

from typing import NamedTuple

import op_checks
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from yolo12_fastconv import ops

pytestmark = pytest.mark.gpu


class Conv(NamedTuple):
    size: tuple[int, int, int, int]  # of x
    channels: int
    kernel: int
    stride: int = 1
    padding: int = 1
    dilation: int = 1


# Windows: blocks of 32 channels that are full, half full, less; images of which many, one or a part lie in a window.
WINDOWS = [
    Conv((2, 8, 5, 7), 16, 3),
    Conv((1, 16, 1, 1), 8, 3),
    Conv((3, 64, 20, 20), 64, 3),
    Conv((2, 96, 13, 17), 96, 3),
    Conv((1, 48, 33, 9), 40, 3),
    Conv((2, 72, 11, 40), 100, 3),
    Conv((5, 24, 3, 3), 17, 3),
    Conv((2, 192, 20, 34), 192, 3),
    Conv((1, 32, 7, 300), 32, 3),
    Conv((33, 8, 2, 2), 8, 3),
    Conv((300, 16, 1, 3), 16, 3),
    Conv((1, 104, 64, 2), 96, 3),
    Conv((2, 80, 160, 160), 80, 3),
]
OTHERS = [
    Conv((2, 51, 13, 17), 96, 3),
    Conv((2, 307, 20, 20), 256, 1, padding=0),
    Conv((1, 200, 9, 30), 51, 3, stride=2),
    Conv((2, 64, 40, 41), 128, 3, stride=2),
    Conv((2, 40, 17, 19), 72, 5, padding=2),
    Conv((1, 64, 30, 30), 96, 3, padding=2, dilation=2),
    Conv((2, 384, 40, 40), 460, 1, padding=0),
    Conv((1, 9, 50, 50), 24, 3, padding=0),
    Conv((1, 72, 160, 160), 200, 3, stride=2),
    Conv((3, 96, 80, 80), 176, 1, padding=0),
    # 1x1 ends of stages: a chunk, half of one, less than a stage; behind the last pixel and channel.
    Conv((2, 40, 30, 31), 96, 1, padding=0),
    Conv((2, 460, 13, 13), 200, 1, padding=0),
    Conv((2, 129, 13, 13), 131, 1, padding=0),
    Conv((2, 13, 50, 13), 64, 1, padding=0),
    Conv((3, 192, 20, 20), 192, 1, padding=0),
    # Up to nine taps by addition: whole stages, taps that end within one, pixels that are not adjacent.
    Conv((2, 88, 31, 31), 100, 3, stride=2),
    Conv((2, 96, 80, 80), 192, 3, stride=2),
    Conv((2, 64, 31, 31), 128, 3, padding=2, dilation=2),
    Conv((1, 320, 17, 17), 131, 1, stride=2, padding=0),
    Conv((2, 72, 33, 20), 128, 2, padding=0),
    Conv((2, 48, 40, 40), 96, 3, stride=2),
]


def relative(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("convs", [WINDOWS, OTHERS], ids=["windows", "others"])
def test_every_tile(cuda, convs, dtype, monkeypatch):
    """x and out are slices of tensors that hold NaN elsewhere: what is read or written beside them shows."""
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm80")
    problems = []
    tiles = set()
    for index, conv in enumerate(convs):
        (n, c, h, w), k, kernel, *numbers = conv
        torch.manual_seed(index)
        first = index % 2 * 8
        wide = torch.full((n, h, w, first + -(-c // 8) * 8), torch.nan, device=cuda, dtype=dtype)
        wide[..., first : first + c] = torch.randn(n, h, w, c, device=cuda)
        x = wide[..., first : first + c].permute(0, 3, 1, 2)
        weight = (torch.randn(k, c, kernel, kernel, device=cuda) / (c * kernel**2) ** 0.5).to(dtype)
        geometry = tuple((number,) * 2 for number in numbers)
        truth = functional.conv2d(x.double(), weight.double(), None, *geometry)
        peer = functional.conv2d(x, weight, None, *geometry)
        act = "silu" if index % 4 < 2 else "identity"
        if act == "silu":
            truth, peer = functional.silu(truth), functional.silu(peer)
        added = torch.randn_like(peer) if index % 3 else None
        if added is not None:
            truth, peer = truth + added.double(), peer + added
        limit = 2 * relative(peer, truth) + 1e-5
        largest = 3 * (peer.double() - truth).abs().max() + 1e-3
        names = ops.kernel_candidates(x.shape, weight.shape, *geometry, 1, dtype, tf32=False, capability=90)
        for name in names:
            tiles.add(name.rpartition("/")[2])
            monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", name)
            results = []
            for _ in range(2):
                around = torch.full(
                    (n, *peer.shape[2:], first + -(-k // 8) * 8), torch.nan, device=cuda, dtype=dtype
                )
                op_checks.poison([peer])
                y = around[..., :k].permute(0, 3, 1, 2)
                ops.conv_bn_act_out(x, weight, y, None, None, added, *geometry, act=act)
                results.append((y, around[..., k:]))
            (got, beside), (again, _) = results
            error, worst = relative(got, truth), (got.double() - truth).abs().max()
            right = (
                error <= limit and worst <= largest and torch.equal(got, again) and bool(beside.isnan().all())
            )
            if not right:
                problems.append(
                    f"{conv}, {name}: error {error:.3g}, limit {limit:.3g}, {worst:.3g}, {largest:.3g}"
                )
        monkeypatch.delenv("YOLO12_FASTCONV_KERNEL")
    assert not problems, "\n".join(problems)
    assert any("-window" in tile for tile in tiles) == (convs is WINDOWS)
    assert len(tiles) > 11
