"""Fast heads, Concat and Upsample on CUDA.

pytest -m gpu tests/test_gpu_heads.py
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from yolo12_fastconv import error_rule, neck
from yolo12_fastconv.patching import patch_modules

from ultralytics import YOLO  # isort: skip
from ultralytics.nn.modules.conv import Concat  # isort: skip
from ultralytics.nn.modules.head import OBB, Detect, Pose, Segment  # isort: skip

pytestmark = pytest.mark.gpu

HEADS = {
    "detect": lambda: Detect(nc=80, ch=(64, 128, 256)),
    "three classes": lambda: Detect(nc=3, ch=(64, 128, 256)),
    "one class, 8 bins": lambda: Detect(nc=1, reg_max=8, ch=(64, 128, 256)),
    "segment": lambda: Segment(nc=80, ch=(64, 128, 256)),
    "pose": lambda: Pose(nc=1, ch=(64, 128, 256)),
    "obb": lambda: OBB(nc=15, ch=(64, 128, 256)),
}


@torch.no_grad()
@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_keep_the_error_rule(cuda, name, precision):
    torch.manual_seed(0)
    dtype = getattr(torch, precision)
    head = HEADS[name]().eval().to(cuda, dtype)
    head.stride = torch.tensor([8.0, 16.0, 32.0], device=cuda, dtype=dtype)
    fast, truth = copy.deepcopy(head), copy.deepcopy(head).double()
    truth.stride = head.stride.double()
    assert patch_modules(fast, include=[type(head).__name__]).fused
    for sizes in (((40, 32), (20, 16), (10, 8)), ((20, 36), (10, 18), (5, 9))):
        x = [
            torch.randn(2, c, h, w, device=cuda, dtype=dtype).contiguous(memory_format=torch.channels_last)
            for c, (h, w) in zip((64, 128, 256), sizes, strict=True)
        ]
        ours, stock, exact = fast(list(x)), head(list(x)), truth([t.double() for t in x])
        if isinstance(ours[0], tuple):
            ours, stock, exact = (*ours[0], ours[1]), (*stock[0], stock[1]), (*exact[0], exact[1])
        named = {"box": lambda o: o[0][:, :4], "rest": lambda o: o[0][:, 4:]}
        for key in stock[-1]:
            if key != "feats":
                named[key] = lambda o, key=key: o[-1][key]
        assert list(ours[-1]) == list(stock[-1])
        # Five convolutions behind one another: independent errors.
        floor = error_rule.tolerances().floor("output", precision, 256) * 5**0.5
        for what, part in named.items():
            a, b, c = part(ours), part(stock), part(exact)
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            result = error_rule.compare(a, b, c, floor)
            assert result.ok, f"{what} at {sizes[0]}: {result}"


@torch.no_grad()
def test_upsample_and_concat_share_a_buffer(cuda):
    up, concat = nn.Upsample(scale_factor=2), Concat(1)
    holder = nn.Sequential(up, concat)
    patch_modules(holder)
    for dtype in (torch.float16, torch.float32):
        pointers = []
        for i in range(4):
            x = torch.randn(2, 24, 5, 7, device=cuda, dtype=dtype).contiguous(
                memory_format=torch.channels_last
            )
            more = 8 if i < 3 else 16
            skip = torch.randn(2, more, 10, 14, device=cuda, dtype=dtype)
            skip = skip.contiguous(memory_format=torch.channels_last)
            big = up(x)
            expected = torch.cat([nn.functional.interpolate(x, scale_factor=2), skip], 1)
            y = concat([big, skip])
            again = concat([big, skip])
            for result in (y, again):
                assert torch.equal(result, expected) and result.stride() == expected.stride()
            assert again.data_ptr() != y.data_ptr()
            assert torch.equal(big, expected[:, :24])
            pointers.append(big.data_ptr() == y.data_ptr())
        assert pointers[1:] == [True, True, False]


@pytest.mark.parametrize("imgsz", [(96, 160)])
def test_training_under_autocast_leaves_out_float32(cuda, imgsz):
    """The same numbers and gradients as stock's detour by float32."""
    torch.manual_seed(0)
    stock = YOLO("yolo12n.yaml").model.to(cuda).train().to(memory_format=torch.channels_last)
    fast = copy.deepcopy(stock)
    patch_modules(fast, include=["Upsample", "Concat"])
    seen = []
    compute = neck.FastUpsample.compute
    neck.FastUpsample.compute = lambda self, *given: seen.append(compute(self, *given)) or seen[-1]
    deterministic = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        x = torch.rand(2, 3, *imgsz, device=cuda)
        results = []
        for model in (fast, stock):
            with torch.autocast("cuda", torch.float16):
                output = model(x)
            grads = torch.autograd.grad(
                (output["boxes"].float() ** 2).mean() + (output["scores"].float() ** 2).mean(),
                [p for p in model.parameters() if p.requires_grad],
            )
            results.append((output["boxes"], output["scores"], *grads))
    finally:
        neck.FastUpsample.compute = compute
        torch.backends.cudnn.deterministic = deterministic
    assert [t.dtype for t in seen] == [torch.float16] * 2
    for i, (a, b) in enumerate(zip(*results, strict=True)):
        assert a.dtype is b.dtype
        difference = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-20)
        assert difference < (1e-6 if i < 2 else 2e-2), f"{i}: {difference:.1e}"


def test_upsample_alone_keeps_autocasts_float32(cuda):
    up = nn.Upsample(scale_factor=2).train()
    patch_modules(up)
    x = torch.randn(1, 8, 4, 4, device=cuda, dtype=torch.float16, requires_grad=True)
    with torch.autocast("cuda", torch.float16):
        assert up(x).dtype is nn.functional.interpolate(x, scale_factor=2).dtype is torch.float32
