"""The ops on the CPU: float64 truth, stock modules, gradients, fakes, autocast, compile, bad input."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from yolo12_fastconv import _aten, _autograd, ops, reference

OPS = torch.ops.yolo12_fastconv
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FORMATS = [torch.contiguous_format, torch.channels_last]

# N, C, H, W, K, R, S, stride, padding, dilation, groups: pointwise, dense, strided, depthwise, grouped, degenerate
GEOMETRIES = {
    "pointwise": (2, 8, 5, 7, 16, 1, 1, (1, 1), (0, 0), (1, 1), 1),
    "dense": (2, 6, 5, 7, 9, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    "strided": (1, 3, 9, 11, 8, 3, 3, (2, 2), (1, 1), (1, 1), 1),
    "depthwise": (2, 8, 6, 6, 8, 7, 7, (1, 1), (3, 3), (1, 1), 8),
    "grouped": (2, 8, 6, 5, 4, 3, 3, (1, 1), (2, 2), (2, 2), 2),
    "asymmetric": (2, 4, 7, 9, 6, 1, 5, (2, 1), (0, 2), (1, 1), 1),
    "one channel": (3, 1, 4, 4, 1, 3, 3, (1, 1), (1, 1), (1, 1), 1),
    "one pixel": (2, 4, 1, 1, 5, 1, 1, (1, 1), (0, 0), (1, 1), 1),
    "odd channels": (2, 13, 4, 5, 307, 1, 1, (1, 1), (0, 0), (1, 1), 1),
}


class Case:
    """Random tensors of one convolution; every call draws fresh ones."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64, memory_format=torch.contiguous_format):
        n, c, h, w, k, r, s, self.stride, self.padding, self.dilation, self.groups = GEOMETRIES[name]
        self.x = torch.randn(n, c, h, w, dtype=dtype).to(memory_format=memory_format)
        self.weight = (
            torch.randn(k, c // self.groups, r, s, dtype=dtype) / (c // self.groups * r * s) ** 0.5
        ).to(memory_format=memory_format)
        vector = torch.promote_types(dtype, torch.float32)
        self.bias = torch.randn(k, dtype=dtype)
        self.gamma, self.beta = torch.rand(k, dtype=vector) + 0.5, torch.randn(k, dtype=vector)
        self.mean, self.var = torch.randn(k, dtype=vector), torch.rand(k, dtype=vector) + 0.5
        self.geometry = (self.stride, self.padding, self.dilation, self.groups)
        self.dtype = dtype

    def bn(self, eps: float = 1e-3) -> ops.BatchNormState:
        return ops.BatchNormState(self.gamma, self.beta, self.mean, self.var, eps)

    def output(self) -> torch.Tensor:
        return torch.randn_like(ops.conv_bn_act(self.x, self.weight, None, None, None, *self.geometry))

    def differentiable(self) -> tuple[torch.Tensor, ...]:
        tensors = (self.x, self.weight, self.bias, self.gamma, self.beta)
        return tuple(t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors)


def relative(a: torch.Tensor, truth: torch.Tensor) -> float:
    return ((a.double() - truth).norm() / truth.norm()).item()


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("act", ["silu", "identity"])
def test_inference_equals_the_reference(geometry, act):
    case = Case(geometry)
    residual = case.output()
    y = ops.conv_bn_act(case.x, case.weight, case.bias, case.bn(), residual, *case.geometry, act=act)
    conv = torch.nn.functional.conv2d(case.x, case.weight, case.bias, *case.geometry)
    u = (conv - case.mean.view(1, -1, 1, 1)) / (case.var + 1e-3).sqrt().view(1, -1, 1, 1)
    u = u * case.gamma.view(1, -1, 1, 1) + case.beta.view(1, -1, 1, 1)
    truth = (u * torch.sigmoid(u) if act == "silu" else u) + residual
    assert relative(y, truth) < 1e-12
    without_bn = ops.conv_bn_act(case.x, case.weight, case.bias, None, None, *case.geometry, act=act)
    assert relative(without_bn, conv * torch.sigmoid(conv) if act == "silu" else conv) < 1e-12


@pytest.mark.parametrize("geometry", [g for g in GEOMETRIES if g != "odd channels"])
@pytest.mark.parametrize("act", ["silu", "identity"])
def test_training_equals_stock_modules(geometry, act):
    case = Case(geometry)
    x, weight, bias, gamma, beta = case.differentiable()
    bn = nn.BatchNorm2d(len(gamma), eps=1e-3, momentum=0.03, dtype=torch.float64)
    bn.weight, bn.bias = nn.Parameter(gamma.detach().clone()), nn.Parameter(beta.detach().clone())
    stock_in = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    stock = bn(torch.nn.functional.conv2d(*stock_in, *case.geometry))
    stock = torch.nn.functional.silu(stock) if act == "silu" else stock
    y, mean, var = ops.conv_bn_act_train(x, weight, bias, gamma, beta, 1e-3, None, *case.geometry, act=act)
    assert relative(y, stock.detach()) < 1e-12

    running_mean, running_var = torch.zeros(len(gamma)).double(), torch.ones(len(gamma)).double()
    tracked = torch.tensor(0)
    ops.update_running_stats_(running_mean, running_var, tracked, mean, var, 0.03, y.numel() // y.size(1))
    torch.testing.assert_close(running_mean, bn.running_mean, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(running_var, bn.running_var, rtol=1e-12, atol=1e-14)
    assert tracked == bn.num_batches_tracked == 1

    grad = torch.randn_like(y)
    y.backward(grad)
    stock.backward(grad)
    for ours, theirs in zip((x, weight, gamma, beta), (*stock_in[:2], bn.weight, bn.bias), strict=True):
        assert relative(ours.grad, theirs.grad) < 1e-10
    # The batch mean takes the bias out again: its gradient is rounding around zero.
    torch.testing.assert_close(bias.grad, stock_in[2].grad, rtol=0, atol=1e-12)


def test_running_statistics_average_cumulatively_without_momentum():
    bn = nn.BatchNorm2d(4, momentum=None)
    mean, var, tracked = torch.zeros(4), torch.ones(4), torch.tensor(0)
    for _ in range(3):
        z = torch.randn(2, 4, 3, 3)
        bn(z)
        batch_var, batch_mean = torch.var_mean(z, (0, 2, 3), correction=0)
        ops.update_running_stats_(mean, var, tracked, batch_mean, batch_var, None, 18)
    torch.testing.assert_close(mean, bn.running_mean)
    torch.testing.assert_close(var, bn.running_var)
    assert tracked == 3
    before = mean.clone()
    ops.update_running_stats_(mean, var, None, torch.ones(4), torch.ones(4), None, 18)
    assert torch.equal(mean, before), "without a counter nn.BatchNorm2d moves nothing"


@pytest.mark.parametrize("momentum", [0.03, None])
@pytest.mark.parametrize("grad", [False, True])
def test_running_statistics_move_within_the_training_op(momentum, grad):
    case = Case("dense", torch.float32)
    arguments = (case.x, case.weight, None, case.gamma, case.beta, 1e-3, None, *case.geometry)
    buffers = [(case.mean.clone(), case.var.clone(), torch.tensor(3)) for _ in range(2)]
    with torch.set_grad_enabled(grad):
        case.weight.requires_grad_()
        y, mean, var = ops.conv_bn_act_train(*arguments)
        ops.update_running_stats_(*buffers[0], mean, var, momentum, y.numel() // y.size(1))
        out = ops.conv_bn_act_train(*arguments, running=ops.RunningStats(*buffers[1], momentum))
    assert out[0].requires_grad is grad
    for a, b in zip((*buffers[0], y, mean, var), (*buffers[1], *out), strict=True):
        assert torch.equal(a, b)
    assert buffers[1][2] == 4 and not torch.equal(buffers[1][0], case.mean)


def test_training_saves_tensors_that_are_no_results_of_autograd():
    case = Case("dense", torch.float32)
    case.weight.requires_grad_()
    arguments = (
        case.x,
        case.weight,
        None,
        case.gamma,
        case.beta,
        1e-3,
        None,
        *map(list, case.geometry[:3]),
        1,
    )

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

    gc.collect()
    gc.disable()  # nothing may wait for it
    try:
        saved: list[weakref.ref] = []

        def pack(tensor):
            box = Saved(tensor)
            saved.append(weakref.ref(box))
            return box

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor):
            y, z, mean, var = OPS.conv_bn_act_train.default(*arguments, reference.SILU, torch.float32, False)
        assert y.requires_grad and not (z.requires_grad or mean.requires_grad or var.requires_grad)
        kept = [box().tensor.data_ptr() for box in saved]
        assert {z.data_ptr(), mean.data_ptr(), var.data_ptr()} <= set(kept)
        del y
        assert all(box() is None for box in saved)
    finally:
        gc.enable()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True


def test_ops_run_without_filling_of_memory(deterministic):
    def filling():
        return torch.utils.deterministic.fill_uninitialized_memory

    assert not _autograd.call_op(filling)
    assert filling()
    with pytest.raises(ZeroDivisionError):
        _autograd.call_op(lambda: 1 // 0)
    assert filling(), "put back after an error"
    torch.utils.deterministic.fill_uninitialized_memory = False
    assert not _autograd.call_op(filling)
    assert not filling(), "left as the user set it"


def test_every_op_runs_without_filling_of_memory(deterministic, monkeypatch):
    seen = []

    def spy(op, *arguments):
        def watched(*given):
            seen.append((str(op), torch.utils.deterministic.fill_uninitialized_memory))
            return op(*given)

        return call_op(watched, *arguments)

    call_op = _autograd.call_op
    monkeypatch.setattr(_autograd, "call_op", spy)
    case = Case("dense", torch.float32)
    case.weight.requires_grad_()
    ops.conv_bn_act(case.x, case.weight, None, case.bn(), None, *case.geometry).sum().backward()
    ops.conv_bn_act_train(case.x, case.weight, None, case.gamma, case.beta)[0].sum().backward()
    names = ("conv_bn_act", "conv_bn_act_backward", "conv_bn_act_train_", "conv_bn_act_train_backward")
    assert seen == [(f"yolo12_fastconv.{name}.default", False) for name in names]


@pytest.mark.parametrize(
    "geometry", ["pointwise", "dense", "depthwise", "grouped", "asymmetric", "one channel"]
)
@pytest.mark.parametrize("act", ["silu", "identity"])
def test_gradcheck(geometry, act):
    case = Case(geometry)
    inputs = (*case.differentiable(), case.output().requires_grad_())

    def inference(x, weight, bias, gamma, beta, residual):
        bn = ops.BatchNormState(gamma, beta, case.mean, case.var, 1e-3)
        return ops.conv_bn_act(x, weight, bias, bn, residual, *case.geometry, act=act)

    def training(x, weight, bias, gamma, beta, residual):
        return ops.conv_bn_act_train(x, weight, bias, gamma, beta, 1e-3, residual, *case.geometry, act=act)[0]

    assert torch.autograd.gradcheck(inference, inputs, fast_mode=True)
    assert torch.autograd.gradcheck(training, inputs, fast_mode=True, atol=1e-4)


def test_second_derivatives():
    case = Case("dense")
    inputs = (*case.differentiable(), case.output().requires_grad_())

    def inference(x, weight, bias, gamma, beta, residual):
        bn = ops.BatchNormState(gamma, beta, case.mean, case.var, 1e-3)
        return ops.conv_bn_act(x, weight, bias, bn, residual, *case.geometry)

    def training(x, weight, bias, gamma, beta, residual):
        return ops.conv_bn_act_train(x, weight, bias, gamma, beta, 1e-3, residual, *case.geometry)[0]

    assert torch.autograd.gradgradcheck(inference, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(training, inputs, fast_mode=True, atol=1e-4)


def test_backward_ops_refuse_to_be_differentiated():
    case = Case("pointwise")
    grad_y = case.output().requires_grad_()
    geometry = [[1, 1], [0, 0], [1, 1], 1, reference.SILU, case.dtype, False]
    mask = [True, True, False, False, False]
    grads = OPS.conv_bn_act_backward.default(grad_y, case.x, case.weight, None, *case.bn(), *geometry, mask)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        grads[0].sum().backward()


def test_only_wanted_gradients_are_computed():
    case = Case("dense")
    x, weight, bias, gamma, beta = case.differentiable()
    y = ops.conv_bn_act_train(
        x.detach(), weight, bias.detach(), gamma.detach(), beta, 1e-3, None, *case.geometry
    )[0]
    y.sum().backward()
    assert [t.grad is None for t in (x, weight, bias, gamma, beta)] == [True, False, True, True, False]


@pytest.mark.parametrize("weight_format", FORMATS)
def test_weight_gradient_has_the_weights_strides(weight_format):
    x = torch.randn(2, 6, 8, 8).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 6, 3, 3).to(memory_format=weight_format).requires_grad_()
    ops.conv_bn_act_train(x, weight, None, None, None, 1e-3, None, padding=(1, 1))[
        0
    ].square().sum().backward()
    assert weight.grad.stride() == weight.stride()


def op_calls(case: Case):
    """Each op with arguments for opcheck, all tensors without history."""
    geometry = [
        list(case.stride),
        list(case.padding),
        list(case.dilation),
        case.groups,
        reference.SILU,
        case.dtype,
        False,
    ]
    x, weight = case.x, case.weight
    y, z, mean, var = OPS.conv_bn_act_train.default(
        x, weight, None, case.gamma, case.beta, 1e-3, None, *geometry
    )
    grad_y, mask = torch.randn_like(y), [True, True, False, True, True]
    yield OPS.conv_bn_act.default, (x, weight, case.bias, *case.bn(), torch.randn_like(y), *geometry)
    yield OPS.conv_bn_act.default, (x, weight, case.bias, None, None, None, None, 0.0, None, *geometry)
    yield OPS.conv_bn_act_backward.default, (grad_y, x, weight, None, *case.bn(), *geometry, mask)
    yield (
        OPS.conv_bn_act_train.default,
        (x, weight, None, case.gamma, case.beta, 1e-3, torch.randn_like(y), *geometry),
    )
    yield (
        OPS.conv_bn_act_train_backward.default,
        (grad_y, x, weight, None, z, mean, var, case.gamma, case.beta, 1e-3, *geometry, mask),
    )
    train = (x, weight, None, case.gamma, case.beta, 1e-3, None, *geometry)
    cast = [
        list(case.stride),
        list(case.padding),
        list(case.dilation),
        case.groups,
        reference.SILU,
        torch.bfloat16,
    ]
    for running in (
        (case.mean.float(), case.var.float(), torch.tensor(3), 0.03),
        (case.mean.float(), case.var.float(), torch.tensor(3), None),
        (None, None, None, None),
    ):
        yield OPS.conv_bn_act_train_.default, (*train, *running)
    yield OPS.conv_bn_act_train_.default, (*train[:7], *cast, False, None, None, None, None)
    yield (
        OPS.conv_bn_act_train_backward.default,
        (
            grad_y.bfloat16(), x, weight, None, z.bfloat16(), mean, var, case.gamma, case.beta, 1e-3, *cast, False,
            mask, weight.bfloat16(),
        ),
    )  # fmt: skip
    yield (
        OPS.conv_bn_act_train_.default,
        (*train[:7], *cast, False, None, None, None, None, None, weight.bfloat16()),
    )
    yield (
        OPS.bn_act_backward.default,
        (grad_y, z, mean, var, case.gamma, case.beta, 1e-3, reference.SILU, [True] * 3),
    )
    yield OPS.bn_act_backward.default, (grad_y, z, mean, var, None, case.beta, 1e-3, 0, [True, False, False])
    convolution = [*geometry[:4], case.dtype, False]
    yield OPS.conv_backward.default, (z, x, weight, case.bias, *convolution, [True] * 3, None, x)
    yield OPS.conv_backward.default, (z, x, weight, None, *convolution, [False, True, False], weight)
    yield (
        OPS.update_running_stats_.default,
        (case.mean.clone(), case.var.clone(), torch.tensor(3), mean, var, 0.03, 40),
    )


def with_gradients(arguments):
    floating = (torch.float32, torch.float64)
    return tuple(
        a.clone(memory_format=torch.preserve_format).requires_grad_()
        if isinstance(a, torch.Tensor) and i in (0, 1, 3, 4) and a.dtype in floating
        else a
        for i, a in enumerate(arguments)
    )


@pytest.mark.parametrize("geometry", ["pointwise", "dense", "depthwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_opcheck(geometry, dtype, memory_format):
    for op, arguments in op_calls(Case(geometry, dtype, memory_format)):
        opcheck(op, arguments)
        if op in (OPS.conv_bn_act.default, OPS.conv_bn_act_train.default):
            opcheck(op, with_gradients(arguments))


def layout_of(t: torch.Tensor) -> torch.memory_format:
    return torch.contiguous_format if t.is_contiguous() else torch.channels_last


def layouts(t: torch.Tensor):
    """The same values as NCHW, NHWC, and channel slices of wider tensors of both."""
    yield t.contiguous()
    yield t.contiguous(memory_format=torch.channels_last)
    wide = torch.cat([t, t, t], 1)
    yield wide.contiguous()[:, t.size(1) : 2 * t.size(1)]
    yield wide.contiguous(memory_format=torch.channels_last)[:, t.size(1) : 2 * t.size(1)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("channels_last_weight", [False, True])
def test_fake_strides_equal_real_ones_and_stocks(geometry, channels_last_weight):
    case = Case(geometry, torch.float32)
    weight = case.weight.to(memory_format=torch.channels_last) if channels_last_weight else case.weight
    for x in layouts(case.x):
        real = ops.conv_bn_act(x, weight, None, case.bn(), None, *case.geometry)
        trained = ops.conv_bn_act_train(x, weight, None, case.gamma, case.beta, 1e-3, None, *case.geometry)
        stock = torch.nn.functional.conv2d(x, weight, None, *case.geometry)
        with FakeTensorMode() as mode:
            fx, fw, fbn = (
                mode.from_tensor(x),
                mode.from_tensor(weight),
                [mode.from_tensor(t) for t in case.bn()[:4]],
            )
            fake = ops.conv_bn_act(fx, fw, None, ops.BatchNormState(*fbn, 1e-3), None, *case.geometry)
            fakes = ops.conv_bn_act_train(fx, fw, None, fbn[0], fbn[1], 1e-3, None, *case.geometry)
        assert fake.stride() == real.stride(), (x.stride(), weight.stride())
        assert real.is_contiguous(memory_format=layout_of(stock)), (x.stride(), weight.stride())
        for a, b in zip(fakes, trained, strict=True):
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_cuda_outputs_are_channels_last_in_fakes():
    with FakeTensorMode():
        for memory_format in FORMATS:
            x = torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=memory_format)
            y = ops.conv_bn_act(x, torch.randn(4, 3, 3, 3, device="cuda"), stride=(2, 2), padding=(1, 1))
            assert y.stride() == (4 * 16, 1, 16, 4)


@pytest.mark.parametrize("amp_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_equals_stock_conv2d(amp_dtype):
    weight, gamma, beta = torch.randn(8, 4, 3, 3, requires_grad=True), torch.rand(8), torch.randn(8)
    bn = nn.BatchNorm2d(8)
    with torch.autocast("cpu", amp_dtype):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(2, 4, 6, 6, dtype=dtype)
            y, mean, _ = ops.conv_bn_act_train(x, weight, None, gamma, beta, 1e-5)
            stock = nn.functional.silu(bn(nn.functional.conv2d(x, weight)))
            assert y.dtype == stock.dtype == amp_dtype and mean.dtype == torch.float32
            y.float().sum().backward()
            assert weight.grad.dtype == torch.float32
        double = torch.randn(2, 4, 6, 6, dtype=torch.float64)
        assert ops.conv_bn_act(double, weight.double()).dtype == torch.float64
    assert ops.conv_bn_act(torch.randn(2, 4, 6, 6), weight).dtype == torch.float32


def test_half_statistics_are_kept_in_float32():
    case = Case("dense", torch.bfloat16)
    y, mean, var = ops.conv_bn_act_train(
        case.x, case.weight, None, case.gamma.bfloat16(), case.beta.bfloat16(), 1e-3, None, *case.geometry
    )
    assert (y.dtype, mean.dtype, var.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_non_finite_values_pass_through_as_in_stock():
    for value, training in itertools.product((float("nan"), float("inf"), float("-inf")), (False, True)):
        x = torch.randn(2, 4, 6, 6)
        x[0, 1, 2, 3] = value
        weight = torch.randn(8, 4, 3, 3)
        bn = nn.BatchNorm2d(8).train(training)
        ours_in, stock_in = x.clone().requires_grad_(), x.clone().requires_grad_()
        if training:
            ours = ops.conv_bn_act_train(ours_in, weight, None, bn.weight, bn.bias, bn.eps)[0]
        else:
            state = ops.BatchNormState(bn.weight, bn.bias, bn.running_mean, bn.running_var, bn.eps)
            ours = ops.conv_bn_act(ours_in, weight, None, state)
        stock = nn.functional.silu(bn(nn.functional.conv2d(stock_in, weight)))
        ours.sum().backward()
        stock.sum().backward()
        for a, b in ((ours, stock), (ours_in.grad, stock_in.grad)):
            assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.isinf(), b.isinf())


def test_inputs_are_left_alone_and_outputs_are_fresh():
    case = Case("pointwise", torch.float32)
    before = [t.clone() for t in (case.x, case.weight, case.gamma, case.beta, case.mean, case.var)]
    residual = case.output()
    kept = residual.clone()
    y = ops.conv_bn_act(case.x, case.weight, None, case.bn(), residual, *case.geometry, act="identity")
    y.add_(1)
    after = (case.x, case.weight, case.gamma, case.beta, case.mean, case.var)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and torch.equal(residual, kept)
    # An identity activation must not make the output an alias of what backward needs.
    x = case.x.clone().requires_grad_()
    y = ops.conv_bn_act_train(
        x, case.weight, None, case.gamma, case.beta, 1e-3, None, *case.geometry, act="identity"
    )[0]
    expected = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    grad_y = 2 * y.detach()
    y.detach().fill_(7.0)
    assert torch.equal(torch.autograd.grad(y, x, grad_y)[0], expected)


def test_running_statistics_may_move_between_an_eval_forward_and_its_backward():
    case = Case("dense")
    x = case.x.clone().requires_grad_()
    y = ops.conv_bn_act(x, case.weight, None, case.bn(), None, *case.geometry)
    expected = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    ops.update_running_stats_(
        case.mean, case.var, None, torch.ones_like(case.mean), torch.ones_like(case.var), 0.5, 9
    )
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected)


@pytest.mark.parametrize("training", [False, True])
def test_compiles_without_graph_breaks(training):
    case = Case("dense", torch.float32)
    weight = case.weight.clone().requires_grad_()

    def run(x):
        if training:
            return ops.conv_bn_act_train(x, weight, None, case.gamma, case.beta, 1e-3, None, *case.geometry)[
                0
            ]
        return ops.conv_bn_act(x, weight, None, case.bn(), None, *case.geometry)

    expected = run(case.x)
    grad = torch.autograd.grad(expected.square().sum(), weight)[0]
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)(case.x)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(torch.autograd.grad(compiled.square().sum(), weight)[0], grad)


BAD = {
    "x must be": dict(x=torch.randn(4, 6, 6)),
    "channels": dict(x=torch.randn(2, 5, 6, 6)),
    "stride": dict(stride=(0, 1)),
    "padding": dict(padding=(-1, 0)),
    "smaller than": dict(x=torch.randn(2, 4, 2, 2)),
    "groups": dict(weight=torch.randn(7, 2, 3, 3), groups=2),
    "residual": dict(residual=torch.randn(1, 8, 1, 1)),
    "bn_weight": dict(
        bn=ops.BatchNormState(torch.ones(3), torch.ones(8), torch.ones(8), torch.ones(8), 1e-3)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_real_and_fake_kernels_name_what_does_not_fit(message):
    arguments = dict(x=torch.randn(2, 4, 6, 6), weight=torch.randn(8, 4, 3, 3)) | BAD[message]
    with pytest.raises(RuntimeError, match=message):
        ops.conv_bn_act(**arguments)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=message):
        ops.conv_bn_act(**arguments)


def test_unfused_activation_is_refused():
    with pytest.raises(KeyError, match="relu"):
        ops.conv_bn_act(torch.randn(1, 4, 3, 3), torch.randn(4, 4, 1, 1), act="relu")


def test_empty_batch():
    y = ops.conv_bn_act(torch.randn(0, 3, 8, 8), torch.randn(4, 3, 3, 3), stride=(2, 2), padding=(1, 1))
    assert y.shape == (0, 4, 4, 4)


def test_layout_rule_follows_aten():
    for size in ((2, 3, 4, 5), (1, 1, 1, 1), (2, 1, 4, 4), (1, 8, 1, 1), (2, 8, 1, 5)):
        for x in layouts(torch.randn(size)):
            weight = torch.randn(4, size[1], 1, 1)
            stock = torch.nn.functional.conv2d(x, weight)
            assert stock.is_contiguous(memory_format=_aten.output_format(x, weight)), (size, x.stride())


def test_tf32_follows_both_spellings_of_torchs_switch():
    cuda, conv = torch.device("cuda"), torch.backends.cudnn.conv
    before = conv.fp32_precision
    try:
        for value in (True, False, True):
            torch.backends.cudnn.allow_tf32 = value
            assert ops.allow_tf32(cuda, torch.float32) is value
        conv.fp32_precision = "ieee"  # now the older spelling raises
        assert ops.allow_tf32(cuda, torch.float32) is False
        conv.fp32_precision = "tf32"
        assert ops.allow_tf32(cuda, torch.float32) is True
        assert ops.allow_tf32(cuda, torch.float16) is False
        assert ops.allow_tf32(torch.device("cpu"), torch.float32) is False
    finally:
        conv.fp32_precision = before
