"""Area attention on the CPU: stock's block, float64 truth, gradients, fakes, autocast, compile, bad input."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from ultralytics.nn.modules.block import AAttn

from yolo12_fastconv import ops, reference

OPS = torch.ops.yolo12_fastconv
FORMATS = [torch.contiguous_format, torch.channels_last]

# batch, heads, channels of a head, height, width, areas
SIZES = {
    "areas": (2, 2, 8, 4, 6, 4),
    "one area": (1, 3, 5, 3, 5, 1),
    "one pixel": (2, 1, 4, 1, 1, 1),
    "pixel areas": (1, 2, 4, 2, 3, 6),
    "odd": (1, 1, 7, 5, 7, 5),
}


def make(
    name: str, dtype: torch.dtype = torch.float64, layout: str = "nhwc"
) -> tuple[torch.Tensor, int, int]:
    batch, heads, channels, height, width, area = SIZES[name]
    qkv = torch.randn(batch, 3 * heads * channels, height, width, dtype=dtype)
    if layout == "nhwc":
        qkv = qkv.contiguous(memory_format=torch.channels_last)
    elif layout == "slice":
        wide = torch.randn(batch, qkv.size(1) + 16, height, width, dtype=dtype)
        wide = wide.contiguous(memory_format=torch.channels_last)
        wide[:, 8:-8] = qkv
        qkv = wide[:, 8:-8]
    return qkv, heads, area


class Stock(nn.Module):
    """AAttn with its convolutions taken away: what lies between qkv and proj."""

    def __init__(self, channels: int, num_heads: int, area: int) -> None:
        super().__init__()
        self.attention = AAttn(channels, num_heads, area)
        self.attention.qkv = self.attention.proj = nn.Identity()
        self.attention.pe = Zero()

    def forward(self, qkv: torch.Tensor) -> torch.Tensor:
        return self.attention(qkv)


class Zero(nn.Module):
    """Keeps the values that it is given, and adds nothing."""

    def forward(self, v: torch.Tensor) -> torch.Tensor:
        self.values = v
        return torch.zeros_like(v)


def relative(a: torch.Tensor, truth: torch.Tensor) -> float:
    return ((a.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("layout", ["nhwc", "nchw", "slice"])
@pytest.mark.parametrize("name", SIZES)
def test_outputs_and_gradients_equal_stocks(name, layout):
    qkv, heads, area = make(name, layout=layout)
    ours_in, stock_in = (
        qkv.detach().clone(memory_format=torch.preserve_format).requires_grad_() for _ in "ab"
    )
    stock = Stock(qkv.size(1) // 3, heads, area)
    expected = stock(stock_in)
    values = stock.attention.pe.values
    out, v = ops.area_attention(ours_in, heads, area, with_values=True)
    assert torch.equal(v, values)
    assert relative(out, expected.detach()) < 1e-12
    assert torch.equal(ops.area_attention(qkv, heads, area), out)
    grad_out, grad_v = torch.randn_like(expected), torch.randn_like(expected)
    for wanted in ((grad_out, grad_v), (grad_out, None), (None, grad_v)):
        grads = []
        for leaf, outputs in ((ours_in, (out, v)), (stock_in, (expected, values))):
            pairs = [(y, g) for y, g in zip(outputs, wanted, strict=True) if g is not None]
            ys, gs = zip(*pairs, strict=True)
            grads += torch.autograd.grad(ys, leaf, gs, retain_graph=True)
        assert relative(grads[0], grads[1]) < 1e-11


@pytest.mark.parametrize("name", SIZES)
def test_reference_equals_stock(name):
    qkv, heads, area = make(name)
    stock = Stock(qkv.size(1) // 3, heads, area)
    out, values = reference.area_attention(qkv, heads, area, (qkv.size(1) / 3 / heads) ** -0.5)
    assert torch.equal(out, stock(qkv)) and torch.equal(values, stock.attention.pe.values)


@pytest.mark.parametrize("name", ["areas", "one area", "one pixel"])
def test_first_and_second_derivatives(name):
    qkv, heads, area = make(name)
    qkv.requires_grad_()

    def run(qkv):
        return ops.area_attention(qkv, heads, area, 0.7, with_values=True)

    assert torch.autograd.gradcheck(run, (qkv,), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (qkv,), fast_mode=True)


def test_backward_op_refuses_to_be_differentiated():
    qkv, heads, area = make("areas")
    out, _, lse = OPS.area_attention.default(qkv, heads, area, 1.0, False)
    grad = OPS.area_attention_backward.default(
        torch.randn_like(out).requires_grad_(), None, qkv, out, lse, heads, area, 1.0
    )
    with pytest.raises(RuntimeError, match="create_graph=True"):
        grad.sum().backward()


@pytest.mark.parametrize("layout", ["nhwc", "nchw", "slice"])
@pytest.mark.parametrize("name", SIZES)
def test_layouts_are_those_of_the_fakes(name, layout):
    qkv, heads, area = make(name, torch.float32, layout)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(qkv)
        fakes = [*OPS.area_attention.default(fake, heads, area, 1.0, True)]
        fakes.append(
            OPS.area_attention_backward.default(fakes[0], None, fake, fakes[0], fakes[2], heads, area, 1.0)
        )
    real = [*OPS.area_attention.default(qkv, heads, area, 1.0, True)]
    real.append(OPS.area_attention_backward.default(real[0], None, qkv, real[0], real[2], heads, area, 1.0))
    for a, b in zip(fakes, real, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
    memory_format = torch.contiguous_format if layout == "nchw" else torch.channels_last
    assert all(t.is_contiguous(memory_format=memory_format) for t in (real[0], real[1], real[3]))


def test_cuda_outputs_are_channels_last_in_fakes():
    with FakeTensorMode():
        out, v = ops.area_attention(torch.randn(2, 96, 4, 6, device="cuda"), 1, 4, with_values=True)
        assert out.stride() == v.stride() == (32 * 24, 1, 6 * 32, 32)


@pytest.mark.parametrize("loaded", [False, True])
def test_fakes_know_which_cases_keep_the_logsumexp(monkeypatch, loaded):
    monkeypatch.setattr(ops, "LIBRARY", dataclasses.replace(ops.LIBRARY, loaded=loaded))
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for channels in (16, 32):
            with FakeTensorMode():
                qkv = torch.empty(2, 3 * 3 * channels, 4, 6, device="cuda", dtype=dtype)
                logsumexp = OPS.area_attention.default(qkv, 3, 4, 1.0, False)[2]
            kept = loaded and channels == 32 and dtype is not torch.float64
            assert logsumexp.shape == ((2, 3, 24) if kept else (0,))
            assert logsumexp.dtype is torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["nhwc", "nchw", "slice"])
def test_opcheck(layout, dtype):
    qkv, heads, area = make("areas", dtype, layout)
    out, _, lse = OPS.area_attention.default(qkv, heads, area, 0.5, True)
    grad = torch.randn_like(out)
    for with_values in (False, True):
        opcheck(OPS.area_attention.default, (qkv, heads, area, 0.5, with_values))
        opcheck(OPS.area_attention.default, (qkv.clone().requires_grad_(), heads, area, 0.5, with_values))
    opcheck(OPS.area_attention_backward.default, (grad, grad, qkv, out, lse, heads, area, 0.5))
    opcheck(OPS.area_attention_backward.default, (grad, None, qkv, out, lse, heads, area, 0.5))


@pytest.mark.parametrize("amp_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_computes_in_its_dtype(amp_dtype):
    qkv, heads, area = make("areas", torch.float32)
    qkv.requires_grad_()
    stock = Stock(qkv.size(1) // 3, heads, area)
    with torch.autocast("cpu", amp_dtype):
        out, v = ops.area_attention(qkv, heads, area, with_values=True)
        assert out.dtype == v.dtype == amp_dtype
        assert ops.area_attention(qkv.detach().double(), heads, area).dtype == torch.float64
    (out.float().sum() + v.float().square().sum()).backward()
    assert qkv.grad.dtype == torch.float32
    assert relative(out, stock(qkv.double()).detach()) < 8 * torch.finfo(amp_dtype).eps


def test_large_logits_do_not_overflow():
    qkv, heads, area = make("areas")
    qkv *= 100
    stock = Stock(qkv.size(1) // 3, heads, area)
    assert relative(ops.area_attention(qkv, heads, area), stock(qkv)) < 1e-10


def test_non_finite_values_pass_through_as_in_stock():
    for value in (float("nan"), float("inf"), float("-inf")):
        for part in range(3):  # query, key, value
            qkv, heads, area = make("areas")
            qkv[0, 8 * part + 3, 1, 1] = value
            stock = Stock(qkv.size(1) // 3, heads, area)(qkv)
            ours = ops.area_attention(qkv, heads, area)
            assert torch.equal(ours.isnan(), stock.isnan()) and torch.equal(ours.isinf(), stock.isinf())


def test_outputs_are_fresh():
    for name in SIZES:
        qkv, heads, area = make(name)
        before = qkv.clone()
        out, v = ops.area_attention(qkv, heads, area, with_values=True)
        out.fill_(1.0), v.fill_(2.0)
        assert torch.equal(qkv, before) and (out == 1).all()


@pytest.mark.parametrize("with_values", [False, True])
def test_compiles_without_graph_breaks(with_values):
    qkv, heads, area = make("areas", torch.float32)
    qkv.requires_grad_()

    def run(qkv):
        result = ops.area_attention(qkv, heads, area, with_values=with_values)
        return result[0] + 2 * result[1] if with_values else result

    expected = run(qkv)
    grad = torch.autograd.grad(expected.square().sum(), qkv)[0]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(qkv)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.autograd.grad(compiled.square().sum(), qkv)[0], grad)


BAD = {
    "qkv must be": (torch.randn(24, 4, 4), 2, 1),
    "num_heads must be positive": (torch.randn(1, 24, 4, 4), 0, 1),
    "area must be positive": (torch.randn(1, 24, 4, 4), 2, 0),
    "not a multiple of 3 \\* num_heads = 15": (torch.randn(1, 24, 4, 4), 5, 1),
    "not a multiple of area=3": (torch.randn(1, 24, 4, 4), 2, 3),
}


@pytest.mark.parametrize("message", BAD)
def test_real_and_fake_kernels_name_what_does_not_fit(message):
    qkv, heads, area = BAD[message]
    for scale in (None, 1.0):
        with pytest.raises(RuntimeError, match=message):
            ops.area_attention(qkv, heads, area, scale)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=message):
            ops.area_attention(qkv, heads, area, scale)


def test_empty_batch():
    qkv = torch.randn(0, 24, 4, 4, requires_grad=True)
    out = ops.area_attention(qkv, 2, 4)
    out.sum().backward()
    assert out.shape == (0, 8, 4, 4) and qkv.grad.shape == qkv.shape
