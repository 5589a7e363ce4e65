"""Concats between the layers of a model, in place, in training on a CPU: against stock's layers and autograd's sums."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import OpLog
from torch import nn
from torch.library import opcheck
from ultralytics.nn.modules.block import A2C2f, C3k2
from ultralytics.nn.modules.conv import Concat, Conv

from yolo12_fastconv import _places, _slices, ops
from yolo12_fastconv.patching import patch_modules

OPS = torch.ops.yolo12_fastconv


class Network(nn.Module):
    """A backbone and neck as a task model has them: layer `i` reads layers `f`."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[tuple[Any, nn.Module]] = [
            (-1, C3k2(8, 8, 1)),  # 0: read by 1 and by the concat 6
            (-1, Conv(8, 16, 3, 2)),
            (-1, C3k2(16, 16, 1)),
            (-1, A2C2f(16, 16, 1, False, e=2.0)),  # 3: read by 4 and by the concat 9
            (-1, nn.Sequential()),
            (3, nn.Upsample(None, 2, "nearest")),
            ([-1, 0], Concat(1)),
            (-1, C3k2(24, 8, 1)),
            (-1, Conv(8, 8, 3, 2)),
            ([-1, 3], Concat(1)),
            (-1, C3k2(24, 16, 1)),
        ]
        del layers[4]
        self.model = nn.Sequential()
        for i, (f, layer) in enumerate(layers):
            layer.i = i
            layer.f = f if i < 4 else [j if j < 4 else j - 1 for j in f] if isinstance(f, list) else f
            self.model.append(layer)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias)

    def forward(
        self, x: torch.Tensor, look: Callable[[int, list[torch.Tensor]], None] | None = None
    ) -> list[torch.Tensor]:
        """All layers' results; `look` is called after each."""
        results: list[torch.Tensor] = []
        for i, layer in enumerate(self.model):
            given = [results[j] if j >= 0 else (results[-1] if results else x) for j in _listed(layer.f)]
            results.append(layer(given if isinstance(layer.f, list) else given[0]))
            if look is not None:
                look(i, results)
        return results


def _listed(f: Any) -> list[int]:
    return f if isinstance(f, list) else [f]


CONCATS, PARTS = (5, 8), ((4, 0), (7, 3))


@pytest.fixture
def networks():
    """Patched and stock, of the same weights."""
    torch.manual_seed(0)
    stock = Network().double().train()
    fast = copy.deepcopy(stock)
    patch_modules(fast, memory="fast")
    return fast, stock


def picture(*size: int) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(size or (2, 8, 8, 12), dtype=torch.float64)


def grads(network, x=None, look=None, ends=(4, 6, 9)):
    """Gradients of the input and of the parameters, for a loss of the layers `ends`."""
    x = (picture() if x is None else x).clone().requires_grad_()
    results = network(x, look)
    loss = sum((results[i] * (i + 1)).sin().sum() for i in ends)
    leaves = [x, *network.parameters()]
    return torch.autograd.grad(loss, leaves, allow_unused=True)


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


def in_place(network, x=None) -> list[bool]:
    """Of each part of each concat, whether it lies in the concat."""
    results = network(picture() if x is None else x)
    found = []
    for concat, parts in zip(CONCATS, PARTS, strict=True):
        begin = 0
        for part in parts:
            place = results[concat].narrow(1, begin, results[part].shape[1])
            found.append(place.data_ptr() == results[part].data_ptr())
            begin += results[part].shape[1]
    return found


@pytest.fixture
def posted(monkeypatch):
    """What became of gradients that concats had for other readers."""
    log: list[bool] = []
    post = _slices.Mail.post

    def logged(self, *arguments):
        log.append(post(self, *arguments))
        return log[-1]

    monkeypatch.setattr(_slices.Mail, "post", logged)
    return log


def test_parts_lie_in_the_concat_from_the_second_call_on(networks, posted):
    fast, stock = networks
    expected = grads(stock)
    first, second, third = (grads(fast) for _ in range(3))
    assert all(torch.equal(a, b) for a, b in zip(second, third, strict=True))
    assert_close(first, expected)
    assert_close(second, expected)
    assert in_place(fast) == [True] * 4
    assert sum(posted) == 4  # of layers 0 and 3, in two calls
    with OpLog() as log:
        fast(picture())
    assert sum("concat_channels" in name for name in log.names) == 1  # the upsampling


def test_sums_are_made_in_the_slices(networks, monkeypatch):
    fast, _ = networks
    grads(fast)
    with OpLog() as log:
        ours = grads(fast)
    assert sum("upsample_nearest_backward_." in name for name in log.names) == 1
    in_slices = sum("conv_bn_act_train_backward_." in name for name in log.names)
    monkeypatch.setattr(_slices.Mail, "post", lambda *_: False)
    with OpLog() as log:
        theirs = grads(fast)
    assert sum("conv_bn_act_train_backward_." in name for name in log.names) == in_slices - 1
    assert_close(ours, theirs)


@pytest.mark.parametrize("size", [(1, 8, 4, 6), (3, 8, 8, 8)])
def test_another_size_is_right_at_once(networks, size):
    fast, stock = networks
    for x in (picture(), picture(), picture(*size), picture()):
        assert_close(grads(fast, x), grads(stock, x))


def test_other_widths_are_right_at_once(networks):
    fast, stock = networks
    grads(fast), grads(fast)
    torch.manual_seed(3)
    wider, next_ = C3k2(8, 16, 1).double().train(), C3k2(32, 8, 1).double().train()
    down = Conv(16, 16, 3, 2).double().train()
    for network in (fast, stock):
        for i, layer in ((0, wider), (1, down), (6, next_)):
            new = copy.deepcopy(layer)
            new.i, new.f = i, network.model[i].f
            network.model[i] = new
    patch_modules(fast, memory="fast")
    for _ in range(3):
        assert_close(grads(fast), grads(stock))
    assert in_place(fast) == [True] * 4


@pytest.mark.parametrize(
    "watched", ["model", "model.0", "model.1", "model.1.conv", "model.5", "model.6", "model.6.cv1"]
)
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_where_somebody_looks_on_the_parts_are_copied(networks, watched, kind):
    fast, stock = networks
    grads(fast)
    seen: list[list[torch.Tensor]] = []
    for network in (fast, stock):
        module = network.get_submodule(watched)
        if kind == "forward":
            module.register_forward_hook(lambda module, inputs, output: None)
        else:
            # Of a sequence whose forward is not called it is never called either.
            module.register_full_backward_hook(
                lambda module, grad_in, grad_out: seen.append([*grad_in, *grad_out])
            )
    ours = grads(fast)
    half = len(seen)
    assert_close(ours, grads(stock))
    for a, b in zip(seen[:half], seen[half:], strict=True):
        assert_close(a, b)
    assert not in_place(fast)[1]


@pytest.mark.parametrize("layer", range(10))
def test_gradients_that_a_tensors_hook_sees_are_right_and_stay(networks, layer):
    fast, stock = networks
    grads(fast)
    seen = []

    def look(i, results):
        if i == layer:
            results[i].register_hook(lambda grad: seen.append((grad, grad.clone())))

    assert_close(grads(fast, look=look), grads(stock, look=look))
    (ours, then), (theirs, _) = seen
    assert torch.equal(ours, then)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_retained_gradients_are_right(networks):
    grads(networks[0])
    kept = []
    for network in networks:
        results = network(picture().requires_grad_())
        for result in results:
            result.retain_grad()
        sum((results[i] * (i + 1)).sin().sum() for i in (4, 6, 9)).backward()
        kept.append([result.grad for result in results])
    assert_close(*kept)


@pytest.mark.parametrize("ends", [(9,), (6,), (5,), (4,), (2,), (0, 5), (3, 5), (8,)])
def test_readers_without_a_gradient(networks, ends):
    """Where the other reader of a part does not run, its gradient goes to autograd."""
    fast, stock = networks
    grads(fast)
    assert_close(grads(fast, ends=ends), grads(stock, ends=ends))


def test_a_reader_that_is_cut_off(networks):
    """Layer 1 has read the part, but its result has no gradient."""
    fast, stock = networks
    grads(fast)

    def look(i, results):
        if i == 1:
            results[1] = results[1].detach()

    assert_close(grads(fast, look=look), grads(stock, look=look))


def test_some_gradients_alone_and_twice(networks):
    fast, _ = networks
    every = grads(fast)
    x = picture().requires_grad_()
    results = fast(x)
    loss = sum((results[i] * (i + 1)).sin().sum() for i in (4, 6, 9))
    leaves = [x, *fast.parameters()]
    for i in (0, 1, 7, len(leaves) - 1):
        (alone,) = torch.autograd.grad(loss, leaves[i], retain_graph=True)
        torch.testing.assert_close(alone, every[i], rtol=1e-9, atol=1e-10)
    for _ in range(2):
        again = torch.autograd.grad(loss, leaves, retain_graph=True)
        assert_close(again, every)
    (inner,) = torch.autograd.grad(loss, results[0], retain_graph=True)
    assert inner.isfinite().all()


def test_a_part_that_is_changed_before_the_concat(networks):
    """The upsampling has read layer 3 as it was: its gradient is that of another tensor."""
    fast, stock = networks
    grads(fast)

    def look(i, results):
        if i == 4:
            results[3].mul_(2)

    assert_close(grads(fast, look=look), grads(stock, look=look))


def test_double_backward(networks):
    def second(network):
        x = picture().requires_grad_()
        (first,) = torch.autograd.grad(network(x)[-1].sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *network.parameters()], allow_unused=True)

    fast, stock = networks
    grads(fast)
    for ours, theirs in zip(second(fast), second(stock), strict=True):
        if ours is None or theirs is None:
            assert all(t is None or not t.any() for t in (ours, theirs))
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)


def test_frozen_statistics_and_parts_without_a_gradient(networks):
    for network in networks:
        for i in (0, 1):
            network.model[i].requires_grad_(False)
            for module in network.model[i].modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
    for _ in range(3):
        x, leaves = picture(), []
        for network in networks:
            results = network(x)
            trained = [p for p in network.parameters() if p.requires_grad]
            leaves.append(torch.autograd.grad(results[-1].sin().sum(), trained, allow_unused=True))
        assert_close(*leaves)
    assert in_place(networks[0]) == [True, False, True, True]


def test_copies_and_inference_have_places_of_their_own(networks):
    fast, stock = networks
    grads(fast)
    twin = copy.deepcopy(fast)
    assert in_place(twin) == [False] * 4 and in_place(fast) == [True] * 4
    assert not any(name.startswith("_fc") for layer in fast.model for name in layer.__reduce_ex__(2)[2])
    stock.load_state_dict(fast.state_dict())
    fast.eval(), stock.eval()
    with torch.no_grad():
        assert_close(fast(picture()), stock(picture()))


def test_a_second_concat_has_a_tensor_of_its_own(networks):
    fast, _ = networks
    grads(fast)
    results = fast(picture())
    again = fast.model[5]([results[4], results[0]])
    assert torch.equal(again, results[5]) and again.data_ptr() != results[5].data_ptr()


def test_a_link_knows_its_layers():
    network = Network()
    assert [_places.sources_of(network.model, i) for i in (0, 4, 5, 8)] == [(-1,), (3,), (4, 0), (7, 3)]
    assert list(_places.readers_of(list(network.model), 0)) == [network.model[1], network.model[5]]
    network.model[6].f = 7
    assert _places.sources_of(network.model, 6) is None
    assert None in list(_places.readers_of(list(network.model), 5))


def test_mail_that_comes_late_is_refused(monkeypatch):
    monkeypatch.setattr(_slices, "_will_run", lambda node: True)

    class Node:
        next_functions = (("producer", 0), ("weight", 0))

    part, node = torch.ones(1), Node()
    for late in (False, True):
        monkeypatch.setattr(_slices, "_task", lambda late=late: int(late))
        if not late:
            _slices.open_mail(part)
            mail = _slices.reads(part, node)
            assert mail is not None and _slices.reads(part, Node()) is None
        elif mail.take() is not None:
            raise AssertionError("nothing had come in this pass")
        grad = torch.ones(2)
        with torch.no_grad():
            assert not mail.post(grad, ("another", 0))
            assert mail.post(grad, ("producer", 0)) is not late
        assert mail.take() is (None if late else grad)
        assert mail.take() is None
    del node
    with torch.no_grad():
        assert not mail.post(torch.ones(2), ("producer", 0))


def test_upsample_into_a_slice():
    for dtype in (torch.float64, torch.float32):
        x = torch.randn(2, 3, 4, 5, dtype=dtype, requires_grad=True)
        buffer = torch.full((2, 7, 8, 10), 7.0, dtype=dtype)
        y = ops.upsample_nearest(x, out=buffer[:, 2:5])
        assert torch.equal(y, nn.functional.interpolate(x, scale_factor=2))
        assert y.data_ptr() == buffer[:, 2:5].data_ptr() and y._base is None and not buffer.requires_grad
        assert (buffer[:, :2] == 7).all() and (buffer[:, 5:] == 7).all()
    assert ops.upsample_nearest(x, torch.float64).dtype is torch.float64
    x = torch.randn(1, 2, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ops.upsample_nearest, x)
    assert torch.autograd.gradgradcheck(ops.upsample_nearest, x)


def test_upsample_backward_in_place():
    wide, grad = torch.randn(2, 9, 3, 4), torch.randn(2, 5, 6, 8)
    sum_, before = wide[:, 2:7], wide.clone()
    expected = sum_ + OPS.upsample_nearest_backward.default(grad)
    OPS.upsample_nearest_backward_.default(grad, sum_)
    assert torch.equal(sum_, expected)
    assert torch.equal(wide[:, :2], before[:, :2]) and torch.equal(wide[:, 7:], before[:, 7:])
    opcheck(OPS.upsample_nearest_backward_.default, (grad, torch.randn(2, 5, 3, 4)))
    for bad in (torch.randn(2, 5, 3, 3), torch.randn(2, 5, 3, 4).double()):
        with pytest.raises(RuntimeError, match="grad_x must be"):
            OPS.upsample_nearest_backward_.default(grad, bad)
    with pytest.raises(RuntimeError, match="has no gradient"):
        OPS.upsample_nearest_backward_.default(grad.requires_grad_(), torch.randn(2, 5, 3, 4))


@pytest.mark.parametrize("backward", [False, True])
def test_nothing_keeps_the_activations(networks, backward):
    """No cycle of references that goes through autograd's graph, which no garbage collector would find."""
    fast, _ = networks
    grads(fast)
    gc.collect()
    gc.disable()
    try:
        results = fast(picture().requires_grad_())
        kept = [weakref.ref(result.untyped_storage()) for result in results]
        if backward:
            results[-1].sum().backward()
        assert all(ref() is not None for ref in kept)
        del results
        assert not any(ref() is not None for ref in kept)
    finally:
        gc.enable()
