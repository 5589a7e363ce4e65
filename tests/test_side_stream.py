"""Parallel branches of captured graphs, without a GPU: what goes there, what is held meanwhile, and that nobody reads
a result before the streams have met. `FakeStreams` stands for CUDA."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from support import OpLog, tensors
from torch import nn

from yolo12_fastconv import _autograd, _side_stream, _weight_casts, heads, ops
from yolo12_fastconv.patching import patch_modules


class FakeStreams:
    """Notes what happens: ("fork", side), ("join", side)."""

    def __init__(self, count=1):
        self.sides, self.events, self.current = [None] * count, [], True

    def is_current(self):
        return self.current

    @contextlib.contextmanager
    def fork(self, side):
        self.events.append(("fork", side))
        self.current = False
        yield
        self.current = True

    def mark(self, side):
        return side, len(self.events)

    def join(self, mark):
        self.events.append(("join", mark[0]))


class LateStreams(FakeStreams):
    """What a branch finds is NaN until the first stream has waited for it, as it may be on a GPU."""

    def __init__(self, count=1):
        super().__init__(count)
        self.found, self.waiting = [], []

    def mark(self, side):
        mark = super().mark(side)
        for tensor in filter(torch.is_floating_point, self.found):
            self.waiting.append((mark, tensor, tensor.detach().clone()))
            tensor.detach().fill_(float("nan"))
        self.found = []
        return mark

    def join(self, mark):
        super().join(mark)
        for entry in list(self.waiting):
            (side, moment), tensor, value = entry
            if side == mark[0] and moment <= mark[1]:
                tensor.detach().copy_(value)
                self.waiting.remove(entry)


class Late(_side_stream.Branches):
    """Branches of `LateStreams`, counted."""

    runs = 0

    def run(self, function, reads):
        self.runs += 1

        def noted():
            result = function()
            self.streams.found = tensors(result)
            return result

        return super().run(noted, reads)

    def join(self):
        super().join()
        assert not self.streams.waiting


def gradients(model, x, branches=None, loss=None):
    """Of all trained parameters, as a capture finds them; with `branches` a function that makes them of the leaves."""
    outputs = [y for y in tensors(model(x)) if y.requires_grad]
    parameters = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.linspace(-1, 1, y.numel()).view_as(y) for y in outputs]
    with contextlib.ExitStack() as stack:
        if branches is not None:
            branches = branches(_side_stream.private_leaves(outputs))
            stack.enter_context(_side_stream.beside(branches))
        found = torch.autograd.grad(outputs, parameters, grads, allow_unused=True)
    return found, branches


def same(ours, expected):
    return all(
        a is b is None or (torch.equal(a, b) and a.stride() == b.stride())
        for a, b in zip(ours, expected, strict=True)
    )


@pytest.mark.parametrize("memory", ["fast", "low"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_backward_is_identical(yolo12n, memory, count):
    patch_modules(yolo12n, memory=memory)
    yolo12n.requires_grad_(True).train()
    x = torch.rand(2, 3, 64, 64)
    expected, _ = gradients(yolo12n, x)
    with OpLog() as log:
        found, branches = gradients(yolo12n, x, lambda leaves: Late(LateStreams(count), leaves))
    # Into the slices of concats' gradients, as without branches.
    assert log.names.count("yolo12_fastconv.conv_backward_.default") > 10
    assert "yolo12_fastconv.conv_bn_act_train_backward_.default" not in log.names
    convolutions = sum(isinstance(m, nn.Conv2d) for m in yolo12n.modules()) - 1  # that of `dfl` is a constant
    assert branches.runs == convolutions
    assert same(found, expected)
    assert not branches.waiting and branches.held == 0
    assert {side for what, side in branches.streams.events if what == "fork"} == set(range(count))


def test_frozen_parameters(tiny):
    patch_modules(tiny)
    tiny.requires_grad_(True).train()
    convolutions = [m for m in tiny.modules() if isinstance(m, nn.Conv2d)]
    convolutions[1].weight.requires_grad_(False)
    x = torch.rand(2, 3, 32, 32)
    expected, _ = gradients(tiny, x)
    found, branches = gradients(tiny, x, lambda leaves: Late(LateStreams(), leaves))
    assert same(found, expected)
    assert branches.runs == len(convolutions) - 1


def test_a_weight_used_twice_stays_in_the_first_stream():
    torch.manual_seed(0)
    weight = torch.randn(4, 4, 1, 1, requires_grad=True)
    derived = torch.randn(4, 4, 1, 1, requires_grad=True)
    alone = torch.randn(4, 4, 1, 1, requires_grad=True)
    x = torch.randn(2, 4, 3, 3)

    def network():
        y = ops.conv_bn_act_train(x, weight)[0]
        y = ops.conv_bn_act_train(y, derived * 2)[0]
        y = ops.conv_bn_act_train(y, alone)[0]
        return ops.conv_bn_act_train(y, weight)[0].square()

    parameters = (weight, derived, alone)
    expected = torch.autograd.grad(network(), parameters, torch.ones(2, 4, 3, 3))
    y = network()
    leaves = _side_stream.private_leaves([y])
    assert leaves == {derived, alone}
    branches = Late(LateStreams(), leaves)
    with _side_stream.beside(branches):
        found = torch.autograd.grad(y, parameters, torch.ones(2, 4, 3, 3))
    assert same(found, expected)
    assert branches.runs == 1


def test_what_a_branch_reads_is_held_until_the_streams_have_met(monkeypatch):
    monkeypatch.setattr(_side_stream, "HELD", 1000)
    streams = FakeStreams(2)
    branches = _side_stream.Branches(streams)
    held = []

    def run(elements):
        tensor = torch.zeros(elements)
        held.append(weakref.ref(tensor))
        assert branches.run(lambda: streams.is_current(), [tensor, None]) is False

    def alive():
        return [reference() is not None for reference in held]

    run(100)
    run(100)
    assert alive() == [True, True]
    run(100)  # 1200 bytes
    assert alive() == [False, True, True] and branches.held == 800
    run(1000)  # more than is allowed, alone
    assert alive() == [False, False, False, True] and branches.held == 4000
    branches.join()
    assert alive() == [False] * 4 and branches.held == 0
    assert streams.events == [
        ("fork", 0), ("fork", 1), ("fork", 0), ("join", 0), ("fork", 1), ("join", 1), ("join", 0), ("join", 1)
    ]  # fmt: skip


def test_branches_end_with_the_capture(tiny):
    streams = FakeStreams()
    with (
        pytest.raises(ValueError, match="in the middle"),
        _side_stream.beside(_side_stream.Branches(streams)),
    ):
        _side_stream.current().run(lambda: None, ())
        raise ValueError("in the middle")
    assert _side_stream.current() is None
    assert streams.events == [("fork", 0), ("join", 0)]
    streams.current = False  # another stream's calls do not go there
    with _side_stream.beside(_side_stream.Branches(streams)):
        assert _side_stream.current() is None


def test_eager_backwards_have_no_branches(tiny, monkeypatch):
    monkeypatch.setattr(_side_stream.Branches, "run", None)
    patch_modules(tiny)
    tiny.requires_grad_(True).train()
    gradients(tiny, torch.rand(2, 3, 32, 32))


@pytest.mark.parametrize("most", [0, 2 * 4 * 4, 1 << 20])
def test_heads_of_small_maps_are_branches(yolo12n, monkeypatch, most):
    """Of levels of 8, 4 and 2 rows: none, the two small ones, all."""
    patch_modules(yolo12n.requires_grad_(False))
    x = torch.rand(2, 3, 64, 64)
    expected = tensors(yolo12n(x))
    monkeypatch.setattr(heads, "_MOST_PIXELS", most)
    branches = Late(LateStreams(3))
    with _side_stream.beside(branches):
        found = tensors(yolo12n(x))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert branches.runs == {0: 0, 32: 4, 1 << 20: 5}[most]


def test_casts_of_weights_are_made_once(yolo12n, monkeypatch):
    launches, given = [], []
    copy, call_op = torch._foreach_copy_, _autograd.call_op

    def spy(op, *arguments):
        if op is torch.ops.yolo12_fastconv.conv_bn_act_train_.default:
            given.append(len(arguments) == 20 and arguments[19].dtype is torch.bfloat16)
        return call_op(op, *arguments)

    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: launches.append(lists) or copy(*lists))
    monkeypatch.setattr(_autograd, "call_op", spy)
    patch_modules(yolo12n)
    yolo12n.requires_grad_(True).to(memory_format=torch.channels_last).train()
    x = torch.rand(2, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = gradients(yolo12n, x)
        assert not any(given) and not launches
        given.clear()
        with _weight_casts.at_once(yolo12n.parameters()):
            found, _ = gradients(yolo12n, x)
    assert same(found, expected)
    assert len(given) > 100 and all(given) and len(launches) == 1
