"""The backward of narrow 1x1 blocks in one pass, against float64 and against the passes that it replaces.

pytest -m gpu tests/test_gpu_pointwise_backward.py
"""

from __future__ import annotations

import op_checks
import pytest
import torch
from torch import Tensor

from yolo12_fastconv import ops

pytestmark = pytest.mark.gpu

OPS = torch.ops.yolo12_fastconv
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLOOR = {"float16": 1e-3, "bfloat16": 8e-3}  # of the largest value: one rounding
# In, out, height, width, batch: each number of slices with each number of columns, tiles in part, more and fewer tiles
# than blocks, few pixels, and input channels in parts.
SHAPES = [
    (64, 64, 80, 80, 2), (48, 64, 37, 41, 2), (32, 32, 20, 20, 4), (16, 24, 13, 7, 3), (96, 128, 40, 40, 2),
    (128, 128, 40, 40, 4), (64, 192, 40, 40, 2), (128, 64, 20, 20, 8), (192, 64, 20, 20, 4), (8, 8, 5, 5, 1),
    (80, 80, 33, 17, 2), (64, 80, 80, 80, 1), (128, 40, 9, 9, 1), (184, 56, 11, 10, 2), (96, 48, 80, 80, 2),
    (56, 136, 19, 21, 2), (40, 184, 8, 8, 1), (32, 16, 160, 160, 16), (128, 128, 1, 1, 3),
    (256, 32, 40, 40, 2), (384, 64, 20, 20, 3), (328, 56, 11, 13, 2), (256, 128, 20, 20, 8), (200, 72, 17, 9, 2),
    (128, 192, 20, 20, 4), (88, 136, 23, 5, 2),
]  # fmt: skip


def nhwc(n: int, c: int, h: int, w: int, dtype: torch.dtype, cuda: torch.device) -> Tensor:
    return torch.randn(n, h, w, c, device=cuda).to(dtype).permute(0, 3, 1, 2)


class Backward:
    """One call of conv_bn_act_train_backward, how often it is asked for."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, act: int, mode: str, cuda: torch.device
    ) -> None:
        ci, co, h, w, n = shape
        self.act, self.mode, self.dtype, wide = act, mode, dtype, 24 if mode == "slices" else 0
        self.x = nhwc(n, ci + wide, h, w, dtype, cuda)[:, : ci + wide][:, wide:]
        self.grad_y = nhwc(n, co + wide, h, w, dtype, cuda)[:, wide:]
        self.weight = (torch.randn(co, ci, 1, 1, device=cuda) / ci**0.5).contiguous(
            memory_format=torch.channels_last
        )
        self.cast = self.weight.to(dtype)
        self.z = torch.nn.functional.conv2d(self.x.float(), self.cast.float()).to(dtype)
        self.z = self.z.contiguous(memory_format=torch.channels_last) + 3.0
        self.mean = self.z.float().mean((0, 2, 3))
        self.var = self.z.float().var((0, 2, 3), unbiased=False)
        self.gamma, self.beta = torch.rand(co, device=cuda) + 0.5, torch.randn(co, device=cuda)
        self.added = nhwc(n, ci + 8, h, w, dtype, cuda)[:, 8:]

    def __call__(self) -> tuple[Tensor, ...]:
        op_checks.poison([self.x, self.grad_y, self.weight])
        call = (
            self.grad_y, self.x, self.weight, None, self.z, self.mean, self.var, self.gamma, self.beta, 1e-3,
            [1, 1], [0, 0], [1, 1], 1, self.act, self.dtype, False, [True, True, False, True, True], self.cast,
        )  # fmt: skip
        if self.mode != "in place":
            return OPS.conv_bn_act_train_backward(*call, None if self.mode == "plain" else self.added)
        n, c, h, w = self.added.shape
        buffer = nhwc(n, c + 8, h, w, self.dtype, self.x.device)
        before, place = buffer[:, :8].clone(), buffer[:, 8:]
        place.copy_(self.added)
        _, *grads = OPS.conv_bn_act_train_backward_(*call, place, self.added)
        assert torch.equal(before, buffer[:, :8]), "written beside the slice"
        return place, *grads

    def truth(self) -> dict[int, Tensor]:
        """Position in the results: float64."""
        channels = [t.double().view(1, -1, 1, 1) for t in (self.mean, self.var, self.gamma, self.beta)]
        mean, var, gamma, beta = channels
        invstd = (var + 1e-3).rsqrt()
        normed = (self.z.double() - mean) * invstd
        u = normed * gamma + beta
        sigmoid = u.sigmoid()
        du = self.grad_y.double() * (sigmoid * (1 + u * (1 - sigmoid)) if self.act else 1)
        grad_beta, grad_gamma = (t.sum((0, 2, 3), keepdim=True) for t in (du, du * normed))
        grad_z = gamma * invstd * (du - (grad_beta + normed * grad_gamma) / (du.numel() / du.shape[1]))
        weight = self.cast.double()[:, :, 0, 0]
        times = {"plain": 0, "added": 1, "slices": 1, "in place": 2}[self.mode]
        grad_x = torch.einsum("nkhw,kc->nchw", grad_z, weight) + times * self.added.double()
        grad_weight = torch.einsum("nkhw,nchw->kc", grad_z, self.x.double())
        return {0: grad_x, 1: grad_weight[:, :, None, None], 3: grad_gamma.flatten(), 4: grad_beta.flatten()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("mode", ["plain", "added", "in place", "slices"])
def test_one_pass_is_as_exact_as_the_others(cuda, monkeypatch, shape, precision, mode):
    ci, co, h, w, n = shape
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        pytest.skip("a kernel for 9.0")
    monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "fused")
    assert ops.backward_in_one_pass(
        (n, ci, h, w), (co, ci, 1, 1), (1, 1), (0, 0), (1, 1), 1, HALF[precision], tf32=False, capability=90
    )
    torch.manual_seed(sum(shape))
    for act in (1, 0):
        backward = Backward(shape, HALF[precision], act, mode, cuda)
        first, again = backward(), backward()
        monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "own")
        apart = backward()
        monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "fused")
        for position, truth in backward.truth().items():
            largest = truth.abs().max().clamp_min(1e-30)
            error, other = (
                float((r[position].double() - truth).abs().max() / largest) for r in (first, apart)
            )
            assert error <= 2 * other + FLOOR[precision], (
                f"result {position}, act {act}: {error:.1e} to {other:.1e}"
            )
            assert torch.equal(first[position], again[position]), f"result {position}: two runs differ"


def test_kernel_runs_in_training(cuda):
    """Through a block, and not only where it is called by name."""
    from torch.profiler import ProfilerActivity, profile
    from ultralytics.nn.modules.conv import Conv

    from yolo12_fastconv.patching import patch_modules

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("a kernel for 9.0")
    block = Conv(64, 64, 1).to(cuda, memory_format=torch.channels_last).train()
    patch_modules(block)
    x = torch.randn(2, 64, 40, 40, device=cuda).contiguous(memory_format=torch.channels_last).requires_grad_()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler, torch.autocast("cuda"):
        block(x.half()).sum().backward()
        torch.cuda.synchronize()
    assert any("pointwise_backward_sm90" in event.name for event in profiler.events())
