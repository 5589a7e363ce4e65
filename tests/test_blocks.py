"""Patched blocks, one at a time, against stock ones: numbers, state, and which path a call takes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import os
import pickle
import pickletools
import threading
import warnings
from typing import ClassVar

import psutil
import pytest
import support
import torch
from support import (
    assert_same,
    assert_same_buffers,
    assert_same_grads,
    fused_calls,
    patched_copy,
    step,
    uneven,
)
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from ultralytics.nn.modules.conv import Conv, DWConv

from yolo12_fastconv import blocks, ops
from yolo12_fastconv.blocks import FastConv, FastDWConv
from yolo12_fastconv.patching import patch_model, patch_modules, patch_report, unpatch_modules


def with_bias(block: Conv) -> Conv:
    block.conv.bias = nn.Parameter(torch.linspace(-0.5, 0.5, block.conv.out_channels))
    return block


GEOMETRIES = {
    "stem": lambda: Conv(3, 16, 3, 2),
    "1x1": lambda: Conv(16, 24, 1),
    "3x3": lambda: Conv(8, 13, 3),
    "odd": lambda: Conv(7, 11, 3),
    "even-kernel": lambda: Conv(6, 8, 6, 2, 2),
    "1x7": lambda: Conv(4, 6, (1, 7), 1, (0, 3)),
    "dilated": lambda: Conv(4, 8, 3, d=2),
    "grouped": lambda: Conv(12, 18, 3, g=3),
    "depthwise": lambda: DWConv(16, 16, 3),
    "depthwise-7x7": lambda: Conv(16, 16, 7, g=16, act=False),
    "no-act": lambda: Conv(8, 16, 1, act=False),
    "relu": lambda: Conv(8, 16, 3, act=nn.ReLU()),
    "relu-inplace": lambda: Conv(8, 16, 3, act=nn.ReLU(inplace=True)),
    "silu-inplace": lambda: Conv(8, 16, 3, act=nn.SiLU(inplace=True)),
    "prelu": lambda: Conv(8, 16, 3, act=nn.PReLU(16)),
    "bias": lambda: with_bias(Conv(8, 16, 3, 2)),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> Conv:
    return uneven(GEOMETRIES[name]()).to(dtype)


def make_input(
    block: Conv, size: tuple[int, int] = (11, 13), batch: int = 3, dtype=torch.float64
) -> torch.Tensor:
    return torch.randn(batch, block.conv.in_channels, *size, dtype=torch.float64).to(dtype).requires_grad_()


def test_fast_classes_keep_the_stock_ones_as_bases():
    assert issubclass(FastConv, Conv) and issubclass(FastDWConv, DWConv) and issubclass(FastDWConv, FastConv)
    assert FastConv._stock is Conv and FastDWConv._stock is DWConv


# --------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_output_gradients_and_buffers_equal_stock(name, training):
    block = make(name).train(training)
    fast = patched_copy(block)
    x = make_input(block)
    assert fused_calls(fast, x.detach()) == 1
    fast = patched_copy(block)  # the call above moved the statistics
    stock_y, stock_grads = step(block, x)
    y, grads = step(fast, x)
    assert_same(y, stock_y, 1e-14)
    assert_same_grads(grads, stock_grads, 1e-11)
    assert_same_buffers(fast, block, 1e-14)


def fused_block(name: str, dtype: torch.dtype = torch.float64) -> Conv:
    """A block after Ultralytics' fuse(): a biased convolution without batch norm."""
    block = with_bias(GEOMETRIES[name]())
    del block.bn
    block.forward = block.forward_fuse
    return block.to(dtype)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_fused_blocks_equal_stock_also_in_gradients(name):
    block = fused_block(name)
    fast = patched_copy(block)
    x = make_input(block)
    assert fused_calls(fast, x.detach()) == 1
    stock, ours = step(block, x), step(fast, x)
    assert_same(ours[0], stock[0], 1e-14)
    assert_same_grads(ours[1], stock[1], 1e-11)


def unusual_calls(monkeypatch) -> list[object]:
    """Grows with every call that does not pass the block's quick guard."""
    calls: list[object] = []
    run_checked = blocks._run_checked
    monkeypatch.setattr(blocks, "_run_checked", lambda *call: calls.append(call) or run_checked(*call))
    return calls


@pytest.mark.parametrize("mode", ["eval", "train", "folded"])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"]
)
@pytest.mark.parametrize("name", ["stem", "3x3", "depthwise-7x7", "bias", "no-act"])
def test_usual_calls_pass_the_quick_guard(name, mode, dtype, monkeypatch):
    block = fused_block(name, dtype) if mode == "folded" else make(name, dtype).train(mode == "train")
    fast, x = patched_copy(block), make_input(block, dtype=dtype)
    calls = unusual_calls(monkeypatch)
    fast(x)
    with torch.no_grad():
        fast.run(x, torch.zeros(3, 1, 1, 1, dtype=dtype))
    if dtype is torch.float32:
        with torch.autocast("cpu", torch.bfloat16):
            assert fast(x).dtype is torch.bfloat16
            fast(x.bfloat16())
    with torch.inference_mode():
        if dtype is not torch.bfloat16:
            fast(x.detach())
    assert not calls


@pytest.mark.parametrize(
    "change",
    [
        lambda block: block.conv.register_forward_hook(lambda *_: None),
        lambda block: block.bn.register_forward_pre_hook(lambda *_: None),
        lambda block: setattr(block.act, "forward", block.act.forward),
        lambda block: setattr(block.conv, "padding_mode", "reflect"),
        lambda block: setattr(block.conv, "padding", "same"),
        lambda block: block.conv.double(),
        lambda block: block.bn.double(),
        lambda block: setattr(block.bn, "running_var", None),
        lambda block: setattr(block.bn, "bias", None),
        lambda block: setattr(block, "act", nn.ReLU()),
        lambda block: setattr(block, "bn", nn.SyncBatchNorm(13)),
        lambda block: block.to("meta"),
        lambda block: block.bn.to("meta"),
        lambda block: setattr(block, "_fc_strict", "0"),
    ],
)
def test_other_calls_do_not_pass_the_quick_guard(change, monkeypatch):
    fast = patched_copy(make("3x3", torch.float32).eval())
    change(fast)
    calls = unusual_calls(monkeypatch)
    with contextlib.suppress(RuntimeError, ValueError, TypeError):
        fast(make_input(fast, dtype=torch.float32))
    assert len(calls) == 1


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("name", ["stem", "1x1", "3x3", "depthwise-7x7", "bias", "relu"])
def test_loses_no_more_than_stock_against_float64(name, dtype, training):
    block = make(name, dtype).train(training)
    x = make_input(block, dtype=dtype)
    truth_y, truth_grads = step(copy.deepcopy(block).double(), x.detach().double().requires_grad_())
    fast = patched_copy(block)
    stock_y, stock_grads = step(block, x)
    y, grads = step(fast, x)
    floor = 4 * torch.finfo(dtype).eps
    assert support.error(y[0], truth_y[0]) <= 2 * support.error(stock_y[0], truth_y[0]) + floor
    scale = max(grad.norm() / grad.numel() ** 0.5 for grad in truth_grads.values())
    for key, truth in truth_grads.items():
        if truth.norm() / truth.numel() ** 0.5 < 1e-6 * scale:
            continue  # the bias before a batch norm: all rounding
        stock_error, fast_error = (support.error(g[key], truth) for g in (stock_grads, grads))
        assert fast_error <= 2 * stock_error + floor, key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("var", [1e5, 1e-9])
def test_half_precision_fold_keeps_extreme_variances(var, dtype):
    """Batch norm in float32 beside half convolutions, as autocast has it."""
    block = with_bias(Conv(8, 8, 3)).eval()
    block.bn.eps = 1e-3
    with torch.no_grad():
        block.bn.running_var.fill_(var)
        block.bn.running_mean.copy_(torch.linspace(-2, 2, 8))
        block.bn.weight.fill_(1e-3 if var < 1 else 40)
        block.conv.weight.mul_(var**0.5 if var > 1 else 1)
    block = block.to(memory_format=torch.channels_last)
    assert not block.conv.weight.is_contiguous()
    fast = patched_copy(block)
    x = torch.randn(2, 8, 9, 9)
    truth = copy.deepcopy(block).double()(x.double())
    with torch.autocast("cpu", dtype=dtype):
        assert fused_calls(fast, x) == 1
        stock_error, fast_error = (support.error(m(x), truth) for m in (block, fast))
    assert fast_error <= 2 * stock_error + torch.finfo(dtype).eps
    assert fast_error < 20 * torch.finfo(dtype).eps


def test_running_statistics_over_ten_small_steps():
    model = nn.Sequential(Conv(3, 8, 3, 2), DWConv(8, 8, 3), Conv(8, 16, act=False)).double().train()
    fast = patched_copy(model)
    for seed in range(10):
        x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        model(x), fast(x)
    assert_same_buffers(fast, model, 1e-13)
    assert fast[0].bn.num_batches_tracked == 10


BATCH_NORMS = {
    "plain": {},
    "momentum-none": {"momentum": None},
    "momentum-0": {"momentum": 0.0},
    "no-affine": {"affine": False},
    "no-bias": {"bias": False},
    "no-tracking": {"track_running_stats": False},
    "no-tracking-no-affine": {"track_running_stats": False, "affine": False},
}


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("settings", BATCH_NORMS.values(), ids=BATCH_NORMS)
def test_batch_norm_settings(settings, training):
    block = Conv(4, 6, 3)
    block.bn = nn.BatchNorm2d(6, eps=1e-3, **settings)
    block = uneven(block).double().train(training)
    fast = patched_copy(block)
    x = make_input(block)
    assert fused_calls(fast, x.detach()) == 1
    fast = patched_copy(block)
    for _ in range(3):
        stock_y, stock_grads = step(block, x)
        y, grads = step(fast, x)
        assert_same(y, stock_y, 1e-14)
        assert_same_grads(grads, stock_grads, 1e-11)
        assert_same_buffers(fast, block, 1e-14)


@pytest.mark.parametrize("flags", [(True, False), (False, True)], ids=["track-off-later", "track-on-later"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_tracking_flag_changed_after_construction(flags, training):
    before, after = flags
    block = Conv(4, 6, 3)
    block.bn = nn.BatchNorm2d(6, track_running_stats=before)
    block = uneven(block).double().train(training)
    block.bn.track_running_stats = after
    fast = patched_copy(block)
    x = make_input(block)
    for _ in range(2):
        assert_same(step(fast, x)[0], step(block, x)[0], 1e-14)
    assert_same_buffers(fast, block, 1e-14)


@pytest.mark.parametrize("missing", ["running_mean", "num_batches_tracked", "both-statistics"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_buffers_set_to_none(missing, training):
    block = make("3x3").train(training)
    for name in ("running_mean", "running_var") if missing == "both-statistics" else (missing,):
        setattr(block.bn, name, None)
    fast = patched_copy(block)
    x = make_input(block)
    assert_same_outcome(fast, block, x, tolerance=1e-14)
    assert_same_buffers(fast, block, 1e-14)


def test_the_mode_of_bn_decides_not_that_of_the_block():
    block = make("3x3").train()
    block.bn.eval()  # what Ultralytics' trainer does to frozen layers
    fast = patched_copy(block)
    x = make_input(block)
    assert_same(step(fast, x)[0], step(block, x)[0], 1e-14)
    assert fast.bn.num_batches_tracked == 0
    block.eval().bn.train()
    fast.eval().bn.train()
    assert_same(step(fast, x)[0], step(block, x)[0], 1e-14)
    assert fast.bn.num_batches_tracked == block.bn.num_batches_tracked == 1


def test_statistics_move_without_gradients_too():
    block = make("3x3").train()
    fast = patched_copy(block)
    x = make_input(block).detach()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            block(x), fast(x)
    assert_same_buffers(fast, block, 1e-14)
    assert fast.bn.num_batches_tracked == 2


@pytest.mark.parametrize(
    "act", [nn.Hardswish(), nn.GELU(), nn.SiLU(), nn.Identity(), nn.LeakyReLU(0.1, inplace=True)]
)
def test_activation_assigned_after_patching_is_followed(act):
    block = make("3x3")
    fast = patched_copy(block)
    block.act = fast.act = act
    x = make_input(block)
    assert fused_calls(fast, x.detach()) == 1
    stock, ours = step(block, x), step(fast, x)
    assert_same(ours[0], stock[0], 1e-14)
    assert_same_grads(ours[1], stock[1], 1e-11)


def test_a_subclass_of_silu_is_called():
    class Doubled(nn.SiLU):
        def forward(self, x):
            return 2 * super().forward(x)

    block = make("3x3").eval()
    block.act = Doubled()
    x = make_input(block)
    assert torch.equal(patched_copy(block)(x), block(x))


def test_tensors_and_constants_are_read_at_every_call():
    block = make("bias").eval()
    fast = patched_copy(block)
    x = make_input(block)
    fast(x)

    def change(target: Conv) -> None:
        with torch.no_grad():
            target.conv.weight.mul_(1.5)
            target.conv.weight.data = target.conv.weight.data.flip(0)
            target.conv.bias.data.add_(1)
            target.bn.running_var.data *= 3
            target.bn.running_mean = target.bn.running_mean + 0.5
            target.bn.weight = nn.Parameter(target.bn.weight * 2)
        target.bn.eps = 0.1
        target.conv.stride = (1, 2)

    change(block), change(fast)
    assert torch.equal(fast(x), block(x))
    block.bn.momentum = fast.bn.momentum = 0.4
    block.train(), fast.train()
    assert_same(step(fast, x)[0], step(block, x)[0], 1e-14)
    assert_same_buffers(fast, block, 1e-14)


def test_channels_pruned_after_patching():
    model = uneven(nn.Sequential(Conv(3, 16, 3, 2), Conv(16, 8, 3))).double().train()
    fast = patched_copy(model)
    for m in (model, fast):
        torch.manual_seed(1)
        m[0].conv, m[0].bn = nn.Conv2d(3, 13, 3, 2, 1, bias=False).double(), nn.BatchNorm2d(13).double()
        m[1].conv = nn.Conv2d(13, 8, 3, 1, 1, bias=False).double()
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    assert fused_calls(copy.deepcopy(fast), x.detach()) == 2
    stock, ours = step(model, x), step(fast, x)
    assert_same(ours[0], stock[0], 1e-13)
    assert_same_grads(ours[1], stock[1], 1e-10)


# ---------------------------------------------------------------------------------------------------- shapes, layouts


def test_sizes_in_any_order_give_what_each_gives_alone():
    model = uneven(nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 8, 7, g=8, act=False), Conv(8, 16, 1))).eval()
    fast = patched_copy(model)
    sizes = [(1, 1), (2, 3), (5, 7), (11, 13), (1, 32), (33, 1), (64, 48), (20, 34), (5, 7), (1, 1)]
    first: dict[tuple[int, int], torch.Tensor] = {}
    for size in sizes:
        x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(sum(size)))
        y = fast(x)
        assert_same([y], [model(x)], 1e-6)
        assert torch.equal(y, first.setdefault(size, y))


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("x_format", [torch.contiguous_format, torch.channels_last], ids=["x-nchw", "x-nhwc"])
@pytest.mark.parametrize("w_format", [torch.contiguous_format, torch.channels_last], ids=["w-nchw", "w-nhwc"])
@pytest.mark.parametrize("name", ["stem", "1x1", "3x3", "depthwise"])
def test_layouts(name, w_format, x_format, training):
    block = make(name).to(memory_format=w_format).train(training)
    fast = patched_copy(block)
    x = make_input(block).detach().to(memory_format=x_format).requires_grad_()
    stock, ours = step(block, x), step(fast, x)
    assert_same(ours[0], stock[0], 1e-14)  # strides included
    assert_same_grads(ours[1], stock[1], 1e-11)
    for parameter in fast.parameters():
        assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_channel_slices_of_a_wider_map(training):
    block = make("3x3").train(training)
    fast = patched_copy(block)
    wide = torch.randn(2, 24, 9, 9, dtype=torch.float64).to(memory_format=torch.channels_last)
    for x in (
        *wide.chunk(3, 1),
        wide[:, 3:11],
        wide.permute(0, 1, 3, 2)[:, :8],
        wide[:1, :8].expand(3, -1, -1, -1),
    ):
        x = x.detach().requires_grad_()
        stock, ours = step(block, x), step(fast, x)
        assert support.error(ours[0][0], stock[0][0]) < 1e-14
        assert support.error(ours[1]["input0"], stock[1]["input0"]) < 1e-11


def test_memory_does_not_grow_with_the_number_of_shapes():
    block = make("1x1", torch.float32).eval()
    fast = patched_copy(block)

    def growth(module: nn.Module, count: int) -> int:
        before = psutil.Process().memory_info().rss
        with torch.inference_mode():
            for i in range(count):
                module(torch.zeros(1 + i % 3, 16, 1 + i // 50, 1 + i % 50))
        return psutil.Process().memory_info().rss - before

    growth(fast, 200), growth(block, 200)
    stock = growth(block, 2000)
    assert growth(fast, 2000) < max(50 << 20, 1.1 * stock)


# ------------------------------------------------------------------------------------------- errors and odd inputs


def assert_same_outcome(
    fast: nn.Module, stock: nn.Module, *inputs: torch.Tensor, tolerance: float = 0.0
) -> None:
    """Equal outputs, or exceptions of one type."""

    def outcome(module: nn.Module):
        try:
            return support.tensors(module(*inputs)), None
        except Exception as raised:
            return None, type(raised)

    stock_y, stock_error = outcome(stock)
    y, raised = outcome(fast)
    assert raised == stock_error
    if stock_y is not None:
        assert_same(y, stock_y, tolerance)


ODD_INPUTS = {
    "3-D": torch.randn(8, 9, 9),
    "5-D": torch.randn(1, 8, 9, 9, 9),
    "too-many-channels": torch.randn(2, 9, 9, 9),
    "smaller-than-the-kernel": torch.randn(2, 8, 1, 0),
    "integers": torch.ones(2, 8, 9, 9, dtype=torch.int64),
    "bytes": torch.ones(2, 8, 9, 9, dtype=torch.uint8),
    "complex": torch.randn(2, 8, 9, 9, dtype=torch.complex64),
    "half": torch.randn(2, 8, 9, 9).half(),
    "double": torch.randn(2, 8, 9, 9).double(),
    "meta": torch.randn(2, 8, 9, 9, device="meta"),
    "sparse": torch.randn(2, 8, 9, 9).to_sparse(),
    "no-channels": torch.randn(2, 0, 9, 9),
}


@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("x", ODD_INPUTS.values(), ids=ODD_INPUTS)
def test_odd_inputs_end_as_in_stock(x, training, fused):
    block = make("3x3", torch.float32).train(training)
    fast = patched_copy(block)
    if fused:
        block.forward, fast.forward = block.forward_fuse, fast.forward_fuse
    assert_same_outcome(fast, block, x)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("shape", [(0, 3, 64, 64), (2, 3, 0, 64)])
def test_empty_batches(shape, training):
    block = make("stem", torch.float32).train(training)
    fast = patched_copy(block)
    x = torch.zeros(shape, requires_grad=True)
    assert_same_outcome(fast, block, x)
    if not training and shape[0] == 0:
        assert_same_grads(step(fast, x)[1], step(block, x)[1], 0)
    assert_same_buffers(fast, block, 0)


@pytest.mark.parametrize("stride", [1, 2])
def test_one_value_per_channel(stride):
    block = Conv(8, 8, 3, stride).train()
    fast = patched_copy(block)
    x = torch.randn(1, 8, stride, stride)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fast(x)
    assert fast.bn.num_batches_tracked == 1  # stock counts before it raises
    fast.eval(), block.eval()
    assert torch.equal(fast(x), block(x))
    fast.train(), block.train()
    y = torch.randn(1, 8, stride + 1, 1)
    assert_same_outcome(fast, block, y, tolerance=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["3x3", "1x1", "depthwise", "no-act", "relu"])
def test_non_finite_values_stay_where_stock_has_them(name, training, value):
    block = make(name, torch.float32).train(training)
    fast = patched_copy(block)
    x = make_input(block, dtype=torch.float32).detach()
    x[1, 2, 4, 5] = value
    stock, ours = (step(m, x.clone().requires_grad_()) for m in (block, fast))
    pairs = [(ours[0][0], stock[0][0]), *((ours[1][key], stock[1][key]) for key in stock[1])]
    for mine, theirs in pairs:
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert torch.equal(mine.isinf(), theirs.isinf())
    assert stock[0][0].isnan().any() or stock[0][0].isinf().any()


def test_infinite_gradients_pass_through():
    block = make("3x3", torch.float32).train()
    fast = patched_copy(block)
    x = make_input(block, dtype=torch.float32)
    for m in (block, fast):
        m.zero_grad()
        (m(x).sum() * float("inf")).backward()
    for mine, theirs in zip(fast.parameters(), block.parameters(), strict=True):
        assert not theirs.grad.isfinite().all()
        assert torch.equal(mine.grad.isfinite(), theirs.grad.isfinite())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["3x3", "relu-inplace", "silu-inplace"])
def test_inputs_are_not_written_and_outputs_may_be(name, training):
    block = make(name).train(training)
    fast = patched_copy(block)
    x = make_input(block)
    before = x.detach().clone()
    for m in (block, fast):
        m.zero_grad()
        y = m(x)
        y.add_(1)
        if name == "relu-inplace":  # needs its own output for backward
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.square().sum().backward()
        else:
            y.square().sum().backward()
    assert torch.equal(x.detach(), before)
    stock, ours = ({n: p.grad for n, p in m.named_parameters()} for m in (block, fast))
    if name != "relu-inplace":
        assert_same_grads(ours, stock, 1e-10)


# ------------------------------------------------------------------------------------------------- mixed precision


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "autocast", [None, torch.float16, torch.bfloat16], ids=["no-autocast", "autocast-fp16", "autocast-bf16"]
)
@pytest.mark.parametrize("w_dtype", DTYPES, ids=lambda d: f"w-{d}"[2:])
@pytest.mark.parametrize("x_dtype", DTYPES, ids=lambda d: f"x-{d}")
def test_dtype_combinations_end_as_in_stock(x_dtype, w_dtype, autocast, training):
    block = with_bias(Conv(4, 6, 3)).to(w_dtype).train(training)
    fast = patched_copy(block)
    x = torch.randn(2, 4, 5, 5).to(x_dtype)
    tolerance = 4 * torch.finfo(autocast or x_dtype).eps
    context = torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext()
    with context:
        assert_same_outcome(fast, block, x, tolerance=tolerance)
        if autocast and x_dtype is not torch.float64 and w_dtype is torch.float32:
            assert fused_calls(fast, x) == 1  # the combinations of mixed-precision training


def test_float32_batch_norm_beside_half_convolution():
    block = make("3x3", torch.bfloat16)
    block.bn.float()
    fast = patched_copy(block)
    x = make_input(block, dtype=torch.bfloat16)
    for training in (False, True):
        block.train(training), fast.train(training)
        assert fused_calls(copy.deepcopy(fast), x.detach()) == 1
        assert_same(step(fast, x)[0], step(block, x)[0], 0.01)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gradients_under_autocast(training):
    block = make("3x3", torch.float32).train(training)
    fast = patched_copy(block)
    x = make_input(block, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock, ours = step(block, x), step(fast, x)
    assert ours[0][0].dtype is torch.bfloat16
    assert_same(ours[0], stock[0], 0.01)
    assert_same_grads(ours[1], stock[1], 0.02)
    assert_same_buffers(fast, block, 0.01)


# ------------------------------------------------------------------------------------------------------- which path


def hook_forward(module: nn.Module, log: list):
    return module.register_forward_hook(lambda *a: log.append("forward"))


def hook_forward_pre(module: nn.Module, log: list):
    return module.register_forward_pre_hook(lambda *a: log.append("forward_pre"))


def hook_backward(module: nn.Module, log: list):
    return module.register_full_backward_hook(lambda *a: log.append("backward"))


def hook_backward_pre(module: nn.Module, log: list):
    return module.register_full_backward_pre_hook(lambda *a: log.append("backward_pre"))


@pytest.mark.parametrize("hook", [hook_forward, hook_forward_pre, hook_backward, hook_backward_pre])
@pytest.mark.parametrize("child", ["conv", "bn", "act"])
def test_hooks_on_children_fire(child, hook):
    block = make("3x3").train()
    block.act = nn.SiLU()  # the shared one must not be hooked
    fast = patched_copy(block)
    x = make_input(block)
    log: list[str] = []
    handle = hook(getattr(fast, child), log)
    y, grads = step(fast, x)
    assert log == [hook.__name__[5:]]
    stock_y, stock_grads = step(block, x)
    assert torch.equal(y[0], stock_y[0])
    assert all(torch.equal(grads[name], stock_grads[name]) for name in grads)
    handle.remove()
    assert fused_calls(fast, x.detach()) == 1
    assert len(log) == 1


def test_hooks_on_the_block_fire_around_the_fused_op():
    block = make("3x3").train()
    log: list[str] = []
    for hook in (hook_forward, hook_forward_pre, hook_backward, hook_backward_pre):
        hook(block, log)
    patch_modules(block)
    x = make_input(block)
    assert fused_calls(block, x.detach()) == 1
    log.clear()
    step(block, x)
    assert log == ["forward_pre", "forward", "backward_pre", "backward"]


def test_global_hooks_see_the_children():
    fast = patched_copy(make("3x3").eval())
    x = make_input(fast)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *a: seen.append(type(module)))
    try:
        fast(x)
    finally:
        handle.remove()
    assert seen == [nn.Conv2d, nn.BatchNorm2d, nn.SiLU, FastConv]
    assert fused_calls(fast, x.detach()) == 1


def test_flop_counter_sees_the_convolutions():
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    block = make("3x3").eval()
    for module in (block, patched_copy(block)):
        with FlopCounterMode(display=False) as counter:
            module(make_input(block).detach())
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def spectral(block: Conv) -> None:
    nn.utils.parametrizations.spectral_norm(block.conv)


def old_weight_norm(block: Conv) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(block.conv)


def reflect(block: Conv) -> None:
    conv = block.conv
    block.conv = nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1, padding_mode="reflect").double()


def same_padding(block: Conv) -> None:
    block.conv = nn.Conv2d(block.conv.in_channels, block.conv.out_channels, 4, padding="same").double()


def group_norm(block: Conv) -> None:
    block.bn = nn.GroupNorm(1, block.conv.out_channels).double()


def no_norm(block: Conv) -> None:
    block.bn = nn.Identity()


def conv_of_another_class(block: Conv) -> None:
    class Doubling(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) * 2

    block.conv = Doubling(block.conv.in_channels, block.conv.out_channels, 3).double()


def forward_of_conv(block: Conv) -> None:
    stock = block.conv.forward
    block.conv.forward = lambda x: stock(x) * 3


def function_as_activation(block: Conv) -> None:
    del block.act
    block.act = torch.tanh


CHANGES = [
    spectral, old_weight_norm, reflect, same_padding, group_norm, no_norm, conv_of_another_class, forward_of_conv,
    function_as_activation,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_children_that_the_op_cannot_serve_run_as_stock(change):
    block = Conv(4, 6, 3).double()
    x = make_input(block)
    fast = patched_copy(block)
    for m in (block, fast):
        torch.manual_seed(0)
        change(m)
        torch.manual_seed(0)
    assert isinstance(fast, FastConv)
    assert blocks.structure_reason(fast.conv, fast.bn, fast.act)
    assert fused_calls(fast, x.detach()) == 0
    with torch.no_grad():  # the call above may have moved statistics or power iterations
        block(x)
    stock, ours = step(block, x), step(fast, x)
    assert torch.equal(ours[0][0], stock[0][0])
    assert_same_grads(ours[1], stock[1], 0)


def test_sync_batch_norm_runs_as_stock():
    block = make("3x3").eval()
    fast = patched_copy(block)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(fast)
    assert type(synced) is FastConv and type(synced.bn) is nn.SyncBatchNorm
    x = make_input(block)
    assert fused_calls(synced, x.detach()) == 0
    assert_same([synced(x)], [block(x)], 1e-14)


class Labelled(torch.Tensor):
    """A tensor subclass that counts the functions it goes through."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(getattr(function, "__name__", str(function)))
        return super().__torch_function__(function, types, args, kwargs)


def test_tensor_subclasses_keep_their_behaviour():
    block = make("3x3").eval()
    x = make_input(block).detach()
    Labelled.seen.clear()
    y = patched_copy(block)(x.as_subclass(Labelled))
    assert type(y) is Labelled and "conv2d" in Labelled.seen
    assert torch.equal(y.as_subclass(torch.Tensor), block(x))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_function_transforms_and_forward_mode():
    block = make("3x3").eval()
    fast = patched_copy(block)
    x, v = make_input(block).detach(), make_input(block).detach()
    for m in (block, fast):
        m.requires_grad_(False)
    stock, ours = ([torch.func.vmap(lambda t, m=m: m(t[None])[0])(x)] for m in (block, fast))
    assert_same(ours, stock, 0)
    stock, ours = (list(torch.func.jvp(m, (x,), (v,))) for m in (block, fast))
    assert_same(ours, stock, 0)
    tangents = []
    for m in (block, fast):
        with forward_ad.dual_level():
            tangents.append(forward_ad.unpack_dual(m(forward_ad.make_dual(x, v))).tangent)
    assert_same(tangents[1:], tangents[:1], 0)
    stock, ours = ([torch.func.grad(lambda t, m=m: m(t).square().sum())(x)] for m in (block, fast))
    assert_same(ours, stock, 0)
    state = {name: tensor + 0.1 for name, tensor in fast.state_dict().items() if tensor.is_floating_point()}
    outputs = [torch.func.functional_call(m, state, (x,)) for m in (block, fast)]
    assert_same(outputs[1:], outputs[:1], 0)
    assert not torch.equal(outputs[1], fast(x))


def test_data_parallel_replicas_read_their_own_tensors():
    """DataParallel's replicas hold parameters and buffers as plain attributes."""
    fast = patched_copy(make("bias").eval())
    x = make_input(fast).detach()
    replica = fast._replicate_for_data_parallel()
    for name, child in fast.named_children():
        twin = child._replicate_for_data_parallel()
        for key, tensor in (*child.named_parameters(), *child.named_buffers()):
            setattr(twin, key, tensor.detach() + 0.25)
        setattr(replica, name, twin)
    reference = copy.deepcopy(fast)
    unpatch_modules(reference)
    for tensor in (*reference.parameters(), *reference.buffers()):
        tensor.data = tensor.data + 0.25 if tensor.is_floating_point() else tensor.data
    assert fused_calls(replica, x) == 1
    assert torch.equal(replica(x), reference(x))


# --------------------------------------------------------------------------------------------------- differentiation


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", ["3x3", "1x1", "depthwise", "no-act", "relu", "bias"])
def test_second_derivatives(name, training):
    results = []
    block = make(name).train(training)
    x = make_input(block, size=(5, 4), batch=2)
    for m in (block, patched_copy(block)):
        m.zero_grad()
        y = m(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        ((grad**2).sum() + y.sum()).backward()
        results.append({"x": x.grad.clone(), **{n: p.grad for n, p in m.named_parameters()}})
        x.grad = None
    assert_same_grads(results[1], results[0], 1e-9)


@pytest.mark.parametrize("which", ["all", "none-but-bias", "weights-frozen", "input", "nothing"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_only_what_requires_gradients_gets_them(which, training):
    results = []
    block = make("bias").train(training)
    for m in (block, patched_copy(block)):
        x = (
            make_input(block, batch=2)
            .detach()
            .fill_(0.5)
            .add_(torch.linspace(0, 1, 13))
            .requires_grad_(which == "input")
        )
        for name, parameter in m.named_parameters():
            wanted = {
                "all": True,
                "none-but-bias": name.endswith("bias"),
                "weights-frozen": "conv" not in name,
            }
            parameter.requires_grad_(wanted.get(which, False))
        y = m(x)
        assert y.requires_grad is (which != "nothing")
        if which != "nothing":
            y.square().sum().backward()
        results.append({"x": x.grad, **{n: p.grad for n, p in m.named_parameters()}})
    assert [n for n, g in results[1].items() if g is None] == [n for n, g in results[0].items() if g is None]
    if which != "nothing":
        assert_same_grads(results[1], results[0], 1e-10)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not-reentrant"])
def test_activation_checkpointing_moves_statistics_as_in_stock(reentrant):
    model = uneven(nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 8, 3), DWConv(8, 8, 3))).double().train()
    fast = patched_copy(model)
    for seed in range(3):
        x = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for m in (model, fast):
            m.zero_grad()
            checkpoint(m, x.clone().requires_grad_(), use_reentrant=reentrant).square().sum().backward()
        grads, stock = ({n: p.grad for n, p in m.named_parameters()} for m in (fast, model))
        assert_same_grads(grads, stock, 1e-10)
    assert_same_buffers(fast, model, 1e-13)
    assert model[0].bn.num_batches_tracked == 6  # three steps, each recomputed once


def test_same_seed_same_bits():
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = patched_copy(nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 8, 3), DWConv(8, 8, 3)).train())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(2, 3, 16, 16)).square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers()]

    torch.use_deterministic_algorithms(True)
    try:
        assert all(torch.equal(a, b) for a, b in zip(train(), train(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_distributed_data_parallel_gives_stocks_gradients_without_layout_warnings(tmp_path):
    import torch.distributed as dist

    torch.manual_seed(0)
    model = uneven(nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 16, 1), DWConv(16, 16, 3))).train()
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        grads = []
        for m in (copy.deepcopy(model), patched_copy(model)):
            parallel = nn.parallel.DistributedDataParallel(m)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                parallel(x).square().mean().backward()
            grads.append({n: p.grad for n, p in m.named_parameters()})
        assert_same_grads(grads[1], grads[0], 1e-4)
    finally:
        dist.destroy_process_group()


# --------------------------------------------------------------------------------------------------- copies and files


def fast_classes(module: nn.Module) -> list[type]:
    return [type(m) for m in module.modules() if isinstance(m, FastConv)]


@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
def test_copies_stay_patched_and_own_their_tensors(fused, tiny):
    model = patched_copy(tiny)
    if fused:
        model.fuse(verbose=False)
    x = torch.randn(2, 3, 32, 32)
    twin = copy.deepcopy(model)
    assert fast_classes(twin) == fast_classes(model) and len(fast_classes(twin)) == 25
    ours, theirs = ({t.data_ptr() for t in m.state_dict().values() if t.numel()} for m in (twin, model))
    assert not ours & theirs
    assert torch.equal(twin(x)[1], model(x)[1])
    for tensor in model.parameters():
        tensor.data.zero_()
    assert not torch.equal(twin(x)[1], model(x)[1])
    assert (
        len({id(m.act) for m in twin.modules() if type(m) is FastConv and type(m.act) is nn.SiLU}) == 1
    )  # still shared

    shallow = copy.copy(twin.model[0])
    assert type(shallow) is FastConv and shallow.conv is twin.model[0].conv


@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_name_stock_classes_only(protocol, fused, tiny):
    model = patched_copy(tiny)
    if fused:
        model.fuse(verbose=False)
    for block in model.modules():
        if isinstance(block, FastConv):
            block._fc_note = "of the plugin"
    data = pickle.dumps(model, protocol)
    text = " ".join(str(argument) for _, argument, _ in pickletools.genops(data))
    assert "fastconv" not in text.lower() and "_fc_" not in text
    loaded = pickle.loads(data)
    assert [type(m) for m in loaded.modules() if isinstance(m, Conv)] == [
        FastConv._stock if t is FastConv else DWConv for t in fast_classes(model)
    ]
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(loaded(x)[1], model(x)[1], atol=1e-5)  # stock attention rounds at other places
    assert patch_modules(loaded).patched == 25
    assert torch.equal(loaded(x)[1], model(x)[1])


def test_torch_save_and_safe_load_of_a_patched_block():
    model = patched_copy(nn.Sequential(Conv(3, 8), DWConv(8, 8, 3)))
    file = io.BytesIO()
    torch.save(model, file)
    assert b"yolo12_fastconv" not in file.getvalue()
    file.seek(0)
    allowed = [Conv, DWConv, nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.SiLU]
    with torch.serialization.safe_globals(allowed):
        loaded = torch.load(file, weights_only=True)
    assert [type(m) for m in loaded] == [Conv, DWConv]


def test_copy_and_pickle_between_forward_and_backward(tiny):
    model = patched_copy(tiny).train()
    x = torch.randn(2, 3, 32, 32)
    y = support.tensors(model(x))[0]
    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    y.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(p.grad is None for p in twin.parameters())
    support.tensors(twin(x))[0].square().sum().backward()


def test_nothing_is_left_on_the_block():
    block = make("3x3").train()
    fast = patched_copy(block)
    step(fast, make_input(block))
    with torch.inference_mode():
        fast.eval()(make_input(block))
    assert set(vars(fast)) == set(vars(block))
    for child in ("conv", "bn", "act"):
        assert set(vars(getattr(fast, child))) == set(vars(getattr(block, child)))


def test_inference_mode_then_other_dtypes_then_training():
    block = make("3x3", torch.float32).eval()
    fast = patched_copy(block)
    x = make_input(block, dtype=torch.float32)
    with torch.inference_mode():
        fast(x), block(x)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        block.to(dtype), fast.to(dtype)
        with torch.inference_mode():
            assert_same([fast(x.to(dtype))], [block(x.to(dtype))], 2 * torch.finfo(dtype).eps)
    block.train(), fast.train()
    stock, ours = (step(m, x.detach().double().requires_grad_()) for m in (block, fast))
    assert_same(ours[0], stock[0], 1e-14)
    assert_same_grads(ours[1], stock[1], 1e-11)


def test_threads_share_a_patched_model(tiny):
    model = patched_copy(tiny)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = model(x)[1]
    results: list[torch.Tensor] = []

    def work() -> None:
        with torch.no_grad():
            results.extend(model(x)[1] for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert all(torch.equal(result, expected) for result in results)


# ---------------------------------------------------------------------------------------------------------- switches


def test_disable_is_read_at_every_call(monkeypatch):
    fast = patched_copy(make("3x3").eval())
    x = make_input(fast).detach()
    assert fused_calls(fast, x) == 1
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    assert fused_calls(fast, x) == 0
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "0")
    assert fused_calls(fast, x) == 1


def test_strict_mode_makes_fallbacks_errors(monkeypatch):
    fast = patched_copy(make("3x3").eval())
    x = make_input(fast).detach()
    monkeypatch.setenv("YOLO12_FASTCONV_STRICT", "1")
    with pytest.raises(
        blocks.FallbackError, match=r"FastConv \(13, 8, 3, 3\) with input \(3, 8, 11, 13\).*ATen \(cpu\)"
    ):
        fast(x)
    hook_forward(fast.conv, [])
    with pytest.raises(blocks.FallbackError, match="conv has hooks"):
        fast(x)
    fast.forward = fast.forward_fuse
    with pytest.raises(blocks.FallbackError, match="conv has hooks"):
        fast(x)
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    assert fast(x).shape == (3, 13, 11, 13)
    monkeypatch.delenv("YOLO12_FASTCONV_DISABLE")
    monkeypatch.setenv("YOLO12_FASTCONV_STRICT", "off")
    assert fast(x).shape == (3, 13, 11, 13)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_strict_mode_lets_exports_through(monkeypatch):
    fast = patched_copy(make("3x3").eval())
    x = make_input(fast).detach()
    expected = fast(x)
    monkeypatch.setenv("YOLO12_FASTCONV_STRICT", "1")
    assert torch.equal(torch.jit.trace(fast, x, check_trace=False)(x), expected)


def test_strict_block_names_itself_in_copies_but_not_in_files():
    model = patched_copy(nn.Sequential(Conv(3, 8)))
    model[0]._fc_strict = "0"  # what patch_model(strict=True) does where a CUDA kernel can serve the block
    for twin in (model, copy.deepcopy(model)):
        with pytest.raises(blocks.FallbackError, match=r"strict mode: 0 with input"):
            twin(torch.randn(1, 3, 8, 8))
    assert pickle.loads(pickle.dumps(model))(torch.randn(1, 3, 8, 8)).shape == (1, 8, 8, 8)
    unpatch_modules(model)
    assert "_fc_strict" not in vars(model[0])


def test_a_device_that_the_library_does_not_serve_is_named_once(monkeypatch):
    if not ops.LIBRARY.loaded:
        monkeypatch.setattr(ops, "LIBRARY", dataclasses.replace(ops.LIBRARY, loaded=True, reason=""))
    monkeypatch.setattr(blocks, "_device_problems", {})
    monkeypatch.setattr(
        blocks._library, "device_supported", lambda index, dtype: (False, f"cuda:{index} is too old")
    )
    said: list[str] = []
    monkeypatch.setattr(
        blocks._compat.get_logger(), "warning", lambda text, *values: said.append(text % values)
    )
    for _ in range(2):
        assert blocks.kernel_reason(torch.device("cuda", 1), torch.float16) == "cuda:1 is too old"
    assert said == ["yolo12_fastconv: blocks compute as stock: cuda:1 is too old"]


# --------------------------------------------------------------------------------------------------------------- GPU


GPU_BLOCKS = [
    "stem",
    "1x1",
    "3x3",
    "depthwise",
    "depthwise-7x7",
    "no-act",
    "relu",
    "bias",
    "dilated",
    "grouped",
    "1x7",
]


def errors(
    block: Conv, x: torch.Tensor, autocast: torch.dtype | None = None
) -> dict[str, tuple[float, float, float]]:
    """Error of the patched and of the stock block against float64, and the size of the truth, of output, gradients
    and buffers."""
    truth = copy.deepcopy(block).cpu().double()
    fast = patched_copy(block)
    results = []
    for m, t in ((truth, x.detach().cpu().double()), (block, x.detach()), (fast, x.detach())):
        context = (
            torch.autocast("cuda", dtype=autocast) if autocast and t.is_cuda else contextlib.nullcontext()
        )
        with context:
            y, grads = step(m, t.requires_grad_())
        results.append(
            {"y": y[0], **grads, **{n: b.clone() for n, b in m.named_buffers() if b.is_floating_point()}}
        )
    reference, stock, ours = ({k: v.cpu().double() for k, v in r.items()} for r in results)
    rms = {key: value.norm().item() / value.numel() ** 0.5 for key, value in reference.items()}
    return {
        key: (support.error(ours[key], value), support.error(stock[key], value), rms[key])
        for key, value in reference.items()
    }


def assert_no_worse(result: dict[str, tuple[float, float, float]], floor: float) -> None:
    for key, (ours, stock, size) in result.items():
        # The gradient of a bias before a batch norm is zero but for rounding.
        if size > 1e-6:
            assert ours <= 2 * stock + floor, f"{key}: {ours:.2e}, stock {stock:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("name", GPU_BLOCKS)
def test_gpu_block_against_float64(cuda, name, layout, dtype, training):
    block = make(name, dtype).to(cuda).to(memory_format=layout).train(training)
    x = make_input(block, (20, 34), 2, dtype).detach().to(cuda).to(memory_format=layout)
    fast = patched_copy(block)
    assert fused_calls(copy.deepcopy(fast), x) == 1
    assert fast(x).stride(1) == 1  # channels_last; an odd width may have gaps between its pixels
    assert_no_worse(errors(block, x), 4 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("name", GPU_BLOCKS)
def test_gpu_fused_block_against_float64(cuda, name, dtype):
    block = fused_block(name, dtype).to(cuda)
    x = make_input(block, (20, 34), 2, dtype).detach().to(cuda)
    assert fused_calls(patched_copy(block), x) == 1
    assert_no_worse(errors(block, x), 4 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("name", GPU_BLOCKS)
def test_gpu_autocast(cuda, name, dtype, training):
    block = make(name, torch.float32).to(cuda).train(training)
    x = make_input(block, (20, 34), 2, torch.float32).detach().to(cuda)
    fast = patched_copy(block)
    with torch.autocast("cuda", dtype=dtype):
        assert fast(x).dtype is dtype
    assert_no_worse(errors(block, x, dtype), 4 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("x_dtype", DTYPES, ids=lambda d: f"x-{d}")
@pytest.mark.parametrize("w_dtype", DTYPES, ids=lambda d: f"w-{d}")
@pytest.mark.parametrize("autocast", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gpu_dtype_combinations_end_as_in_stock(cuda, x_dtype, w_dtype, autocast, training):
    block = make("bias", w_dtype).to(cuda).train(training)
    x = make_input(block, dtype=x_dtype).detach().to(cuda)
    outcomes = []
    for m in (block, patched_copy(block)):
        context = torch.autocast("cuda", dtype=autocast) if autocast else contextlib.nullcontext()
        try:
            with context:
                outcomes.append(m(x).dtype)
        except Exception as raised:
            outcomes.append(type(raised))
    assert outcomes[0] == outcomes[1]


@pytest.mark.gpu
def test_gpu_tf32_switch_is_obeyed(cuda):
    block = make("3x3", torch.float32).to(cuda).eval()
    fast = patched_copy(block)
    x = make_input(block, (40, 40), 2, torch.float32).detach().to(cuda)
    with torch.no_grad():
        truth = copy.deepcopy(block).cpu().double()(x.cpu().double())
        before = torch.backends.cudnn.allow_tf32
        try:
            torch.backends.cudnn.allow_tf32 = False
            exact = support.error(fast(x).cpu(), truth)
            torch.backends.cudnn.allow_tf32 = True
            fast(x)
            torch.backends.cudnn.allow_tf32 = False
            again = support.error(fast(x).cpu(), truth)
        finally:
            torch.backends.cudnn.allow_tf32 = before
    assert exact == again < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("shape", [(0, 3, 64, 64), (2, 3, 0, 64)])
def test_gpu_empty_batches(cuda, shape, training):
    block = make("stem", torch.float32).to(cuda).train(training)
    x = torch.zeros(shape, device=cuda)
    assert_same_outcome(patched_copy(block), block, x)


@pytest.mark.gpu
def test_gpu_one_value_per_channel(cuda):
    fast = patched_copy(Conv(8, 8).train()).to(cuda)
    x = torch.randn(1, 8, 1, 1, device=cuda)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fast(x)
    assert fast.eval()(x).shape == (1, 8, 1, 1)


@pytest.mark.gpu
def test_gpu_that_the_library_does_not_serve_computes_as_stock(cuda, monkeypatch):
    block = make("3x3", torch.float16).eval().to(cuda)
    fast = patched_copy(block)
    x = make_input(block, dtype=torch.float16).detach().to(cuda)
    monkeypatch.setattr(blocks, "_device_problems", {})
    monkeypatch.setattr(blocks._library, "device_supported", lambda index, dtype: (False, "too old"))
    assert fused_calls(fast, x) == 0
    assert torch.equal(fast(x), block(x))
    assert {row.reason for row in patch_report(fast)} == {"too old"}


@pytest.mark.gpu
def test_gpu_mixed_devices_end_as_in_stock(cuda):
    block = make("3x3", torch.float32).eval()
    fast = patched_copy(block)
    x = make_input(block, dtype=torch.float32).detach()
    assert_same_outcome(fast, block, x.to(cuda))
    for m in (block, fast):
        m.to(cuda)
        m.bn.cpu()
    assert_same_outcome(fast, block, x.to(cuda))
    for m in (block, fast):
        m.to(cuda).train()
        m.bn.num_batches_tracked = m.bn.num_batches_tracked.cpu()  # stock counts there
        m(x.to(cuda))
        assert m.bn.num_batches_tracked.item() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gpu_side_stream(cuda, training):
    fast = patched_copy(make("3x3", torch.float16).train(training)).to(cuda)
    x = make_input(fast, (64, 64), 8, torch.float16).detach().to(cuda)
    expected = copy.deepcopy(fast)(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # an op on another stream would read `late` before it is written
        late = x.clone()
        y = fast(late)
    torch.cuda.current_stream().wait_stream(stream)
    assert support.error(y.detach(), expected.detach()) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_gpu_graph_capture(cuda, training):
    model = uneven(
        nn.Sequential(Conv(3, 16, 3, 2), Conv(16, 16, 3), DWConv(16, 16, 3), Conv(16, 32, act=False))
    )
    fast = patched_copy(model.train(training)).to(cuda)
    reference = copy.deepcopy(fast)
    static = torch.randn(2, 3, 32, 32, device=cuda)

    def run(module: nn.Module) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
            y = module(static)
        y.float().square().mean().backward()
        return y

    warm = copy.deepcopy(fast)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(warm)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(fast)
    for seed in range(3):
        static.copy_(torch.randn(static.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        expected = run(reference)
        assert support.error(y, expected.detach()) < 1e-3
        for mine, theirs in zip(fast.parameters(), reference.parameters(), strict=True):
            assert support.error(mine.grad, theirs.grad) < 1e-2
    assert_same_buffers(fast, reference, 1e-4)
    assert fast[0].bn.num_batches_tracked == (3 if training else 0)


@pytest.mark.gpu
def test_gpu_deterministic_runs_are_bit_identical(cuda):
    def train() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Conv(3, 16, 3, 2), Conv(16, 16, 3), DWConv(16, 16, 3), Conv(16, 32, 1))
        model = patched_copy(model.train()).to(cuda)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                y = model(torch.randn(4, 3, 64, 64, device=cuda))
            y.float().square().mean().backward()
            optimizer.step()
        return [*model.parameters(), *model.buffers()]

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first, second = train(), train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_gpu_memory_is_flat_over_shapes(cuda):
    fast = patched_copy(make("3x3", torch.float16).eval()).to(cuda)

    def visit() -> None:
        with torch.inference_mode():
            for i in range(300):
                fast(torch.zeros(1 + i % 3, 8, 3 + i % 20, 3 + i % 17, device=cuda, dtype=torch.float16))

    visit()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    visit()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
def test_gpu_moves_between_devices(cuda):
    fast = patched_copy(make("bias", torch.float32).eval())
    x = make_input(fast, dtype=torch.float32).detach()
    with torch.inference_mode():
        expected = fast(x)
        on_gpu = fast.to(cuda)(x.to(cuda)).cpu()
        assert support.error(on_gpu, expected) < 5e-3  # TF32 may be on
        assert torch.equal(fast.cpu()(x), expected)


@pytest.mark.gpu
def test_gpu_strict_mode_passes_on_kernels_and_fails_on_fallbacks(cuda):
    fast = patch_model(make("3x3", torch.float16).eval().to(cuda), strict=True)
    x = make_input(fast, dtype=torch.float16).detach().to(cuda)
    assert fast(x).shape == (3, 13, 11, 13)
    handle = hook_forward(fast.conv, [])
    with pytest.raises(blocks.FallbackError, match="conv has hooks"):
        fast(x)
    handle.remove()
    fast(x)
    with pytest.raises(blocks.FallbackError, match=r"ATen \(cpu\)"):
        fast.float().cpu()(x.float().cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_BLOCKS)
def test_gpu_inference_launches_no_aten_convolution(cuda, name):
    from torch.profiler import ProfilerActivity, profile

    fast = patched_copy(make(name, torch.float16).eval()).to(cuda)
    x = make_input(fast, dtype=torch.float16).detach().to(cuda)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU]) as recorded:
        fast(x)
        torch.cuda.synchronize()
    names = [event.key for event in recorded.key_averages()]
    assert f"{ops.NAMESPACE}::conv_bn_act" in names
    assert not [called for called in names if called.startswith("aten::") and "conv" in called]
