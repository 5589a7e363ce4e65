"""Tensors that are read twice, and concats written in place, in training on a CPU: against autograd's own sums."""

from __future__ import annotations

import copy

import pytest
import support
import torch
from support import OpLog, assert_same_grads
from torch import nn
from torch.library import opcheck
from ultralytics.nn.modules.block import A2C2f, ABlock, Bottleneck, C2f, C3k, C3k2
from ultralytics.nn.modules.conv import Conv

from yolo12_fastconv import _slices, ops
from yolo12_fastconv.patching import patch_modules

OPS = torch.ops.yolo12_fastconv
GEOMETRY = ([1, 1], [1, 1], [1, 1], 1)


def tensors(*sizes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def arguments(act: int = 1):
    x, weight, gamma, beta = tensors((2, 6, 5, 4), (8, 6, 3, 3), (8,), (8,))
    return x, weight, None, gamma, beta, 1e-3, None, *GEOMETRY, act, torch.float64, False


@pytest.mark.parametrize("create_graph", [False, True])
def test_passed_tensor_gets_the_sum(create_graph):
    """The same gradients as from reading `x` twice; also when one of the two results has no gradient."""
    x, weight, _, gamma, beta, *_ = arguments()

    def grads(passing: bool, used: tuple[bool, bool]):
        leaves = [t.clone().requires_grad_() for t in (x, weight, gamma, beta)]
        source = leaves[0] * 2
        call = (source, leaves[1], None, *leaves[2:], 1e-3, None, (1, 1), (1, 1))
        if passing:
            y, other = ops.conv_bn_act_train_and_pass(*call)
        else:
            y, other = ops.conv_bn_act_train(*call)[0], source
        loss = sum(t.square().mul(t).sum() for t, use in zip((y, other), used, strict=True) if use)
        first = torch.autograd.grad(loss, leaves, create_graph=create_graph, allow_unused=True)
        if not create_graph:
            return first
        again = sum(g.square().sum() for g in first if g is not None)
        return first + torch.autograd.grad(again, leaves, allow_unused=True)

    for used in ((True, True), (True, False), (False, True)):
        for ours, theirs in zip(grads(True, used), grads(False, used), strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_passes_x_itself_without_a_gradient():
    x, weight, *_ = arguments()
    assert ops.conv_bn_act_train_and_pass(x, weight, padding=(1, 1))[1] is x
    assert ops.conv_bn_act_train_and_pass(x, weight.requires_grad_(), padding=(1, 1))[1] is x
    with torch.no_grad():
        assert ops.conv_bn_act_train_and_pass(x.requires_grad_(), weight, padding=(1, 1))[1] is x


def test_changes_in_place_are_noticed():
    """`x` is saved: changed through what was passed, its gradients would be wrong, so autograd has to raise."""
    x, weight, *_ = arguments()
    source = x.requires_grad_() * 1
    y, passed = ops.conv_bn_act_train_and_pass(source, weight.requires_grad_(), padding=(1, 1))
    with torch.no_grad():
        passed.detach().mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_writes_to_a_slice(layout):
    call = arguments()
    buffer = torch.full((2, 20, 5, 4), 7.0, dtype=torch.float64).contiguous(memory_format=layout)
    out = buffer[:, 4:12]
    expected = OPS.conv_bn_act_train_.default(*call, None, None, None, None)
    made = OPS.conv_bn_act_train_.default(*call, None, None, None, None, out)
    assert made[0].numel() == 0 and torch.equal(out, expected[0])
    assert all(torch.equal(a, b) for a, b in zip(made[1:], expected[1:], strict=True))
    assert (buffer[:, :4] == 7).all() and (buffer[:, 12:] == 7).all()

    leaf = call[0].clone().requires_grad_()
    y, _, _ = ops.conv_bn_act_train(leaf, *call[1:7], (1, 1), (1, 1), out=out)
    assert y.data_ptr() == out.data_ptr() and y._base is None and not buffer.requires_grad
    joined = ops.join_channels(out, [y])
    joined.square().sum().backward()
    other = call[0].clone().requires_grad_()
    ops.conv_bn_act_train(other, *call[1:7], (1, 1), (1, 1))[0].square().sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad)


def test_bad_arguments():
    x, *rest = arguments()
    for out in (x.new_empty(2, 7, 5, 4), x.new_empty(2, 8, 5, 4, dtype=torch.float32)):
        with pytest.raises(RuntimeError, match="out must be"):
            OPS.conv_bn_act_train_.default(x, *rest, None, None, None, None, out)
    y, z, mean, var = OPS.conv_bn_act_train.default(x, *rest)
    backward = (
        y,
        x,
        rest[0],
        None,
        z,
        mean,
        var,
        rest[2],
        rest[3],
        1e-3,
        *rest[6:],
        [True] * 2 + [False] * 3,
    )
    with pytest.raises(RuntimeError, match="add_to_grad_x must have the shape of x"):
        OPS.conv_bn_act_train_backward.default(*backward, None, x[:, :3])
    for wrong in ((x[:, :3],), (x.float(),), (x.clone(), x[:, :3])):
        with pytest.raises(RuntimeError, match=r"(grad_x|more) must have the (shape|dtype) of x"):
            OPS.conv_bn_act_train_backward_.default(*backward, None, *wrong)
    with pytest.raises(RuntimeError, match="conv_bn_act_train_backward_ has no gradient"):
        OPS.conv_bn_act_train_backward_.default(
            y, x.requires_grad_(), *backward[2:], None, torch.zeros_like(y)
        )


def test_opcheck():
    call = arguments()
    out = torch.empty(2, 20, 5, 4, dtype=torch.float64)[:, 4:12]
    opcheck(OPS.conv_bn_act_train_.default, (*call, None, None, None, None, out))
    x, weight, _, gamma, beta, *_ = call
    y, z, mean, var = OPS.conv_bn_act_train.default(*call)
    mask = [True, True, False, True, True]
    opcheck(
        OPS.conv_bn_act_train_backward.default,
        (y, x, weight, None, z, mean, var, gamma, beta, 1e-3, *call[7:], mask, None, torch.randn_like(x)),
    )
    wide = torch.randn(2, 20, 5, 4, dtype=torch.float64)
    in_place = (
        y,
        x,
        weight,
        None,
        z,
        mean,
        var,
        gamma,
        beta,
        1e-3,
        *call[7:],
        mask,
        None,
        wide[:, 3:9],
        wide[:, 9:15],
    )
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    opcheck(OPS.conv_bn_act_train_backward_.default, in_place, test_utils=tests)
    *form, _act, dtype, tf32 = call[7:]
    alone = (z, x, weight, *form, dtype, tf32, None, wide[:, 3:9], wide[:, 9:15])
    opcheck(OPS.conv_backward_.default, alone, test_utils=tests)
    made = OPS.conv_backward.default(
        z, x, weight, None, *form, dtype, tf32, [True, False, False], None, wide[:, 9:15]
    )[0]
    before = wide.clone()
    OPS.conv_backward_.default(*alone)
    torch.testing.assert_close(wide[:, 3:9], before[:, 3:9] + made)
    assert torch.equal(wide[:, :3], before[:, :3]) and torch.equal(wide[:, 9:], before[:, 9:])
    with pytest.raises(RuntimeError, match="conv_backward_ has no gradient"):
        OPS.conv_backward_.default(z, x.clone().requires_grad_(), *alone[2:])


BLOCKS = {  # block, and how many of its convolutions add to a slice of a concat's gradient
    "Bottleneck": (lambda: Bottleneck(16, 16, e=0.5), 0),
    "C2f": (lambda: C2f(16, 32, 2, True), 2),
    "C2f without shortcuts": (lambda: C2f(16, 32, 1), 1),
    "C3k": (lambda: C3k(16, 32, 2), 0),
    "C3k2 of C3k": (lambda: C3k2(16, 32, 1, True), 2),
    "ABlock": (lambda: ABlock(64, 2, 1.2, 4), 0),
    "A2C2f": (lambda: A2C2f(32, 64, 2, True, 4), 2),
    "A2C2f of C3k": (lambda: A2C2f(32, 64, 2, False), 4),
    "A2C2f with gamma": (lambda: A2C2f(64, 64, 1, True, 1, True, 1.2), 1),
}


def block_of(name: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    block = support.uneven(BLOCKS[name][0]()).double().train()
    patch_modules(block)
    channels = next(p for p in block.parameters() if p.dim() == 4).shape[1]
    return block, torch.randn(2, channels, 4, 6, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_neither_concatenate_nor_add(name):
    block, x = block_of(name)
    with OpLog() as log:
        y = block(x)
    assert "aten.cat.default" not in log.names
    with OpLog() as log:
        y.backward(torch.randn_like(y))
    copies = ("aten.cat.default", "aten.add.Tensor", "yolo12_fastconv.concat_channels.default")
    assert not set(copies) & set(log.names)
    assert log.names.count("yolo12_fastconv.conv_bn_act_train_backward_.default") == BLOCKS[name][1]


def grads_of(block: nn.Module, x: torch.Tensor, times: int = 1) -> list[torch.Tensor]:
    """The gradients of the last of `times` backwards of one graph."""
    y = block(x)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    leaves = [x, *block.parameters()]
    for _ in range(times):
        grads = torch.autograd.grad(y, leaves, grad, retain_graph=True)
    return list(grads)


@pytest.mark.parametrize("name", BLOCKS)
def test_in_place_sums_are_autograds(name, monkeypatch):
    """Also in the second backward of one graph. Equal but for the order in which a CPU sums over strided rows; on a GPU
    bit for bit (test_gpu_gradient_sums.py)."""
    block, x = block_of(name)
    first, second = grads_of(block, x), grads_of(block, x, times=2)
    monkeypatch.setattr(_slices, "own", lambda grads, node: None)
    expected = grads_of(block, x)
    for ours, again, theirs in zip(first, second, expected, strict=True):
        assert torch.equal(ours, again)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("place", ["part", "whole block", "cv2 of a C3k", "second convolution"])
def test_gradients_that_a_hook_holds_are_not_written(place):
    """What a hook has seen of a gradient stays as it was."""
    block, x = block_of("C3k2 of C3k")
    watched = {
        "part": block.m[0], "whole block": block, "cv2 of a C3k": block.m[0].cv2, "second convolution": block.cv2.conv,
    }[place]  # fmt: skip
    seen = []

    def look(module, inputs):
        inputs[0].register_hook(lambda grad: seen.append((grad, grad.clone())))

    watched.register_forward_pre_hook(look)
    grads_of(block, x)
    assert len(seen) == 1
    assert all(torch.equal(now, then) for now, then in seen)


def test_a_hook_whose_module_has_no_gradient_holds_its_own():
    """The watched reader's result is cut off: then the gradient of what it has read would be the slice alone."""
    block, x = block_of("C3k2 of C3k")
    seen = []

    def look(module, inputs, output):
        inputs[0].register_hook(lambda grad: seen.append((grad, grad.clone())))
        return output.detach()

    block.m[0].cv2.register_forward_hook(look)
    block(x).square().sum().backward()
    assert len(seen) == 1 and torch.equal(*seen[0])


def test_some_gradients_alone():
    """Gradients of some leaves, where not all nodes of a block run."""
    block, x = block_of("A2C2f")
    y = block(x)
    every = grads_of(block, x)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    leaves = [x, *block.parameters()]
    for i in (0, 1, 4, 7):
        (alone,) = torch.autograd.grad(y, leaves[i], grad, retain_graph=True)
        assert torch.equal(alone, every[i])


def test_double_backward_through_a_block():
    def second(module, x):
        (first,) = torch.autograd.grad(module(x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, *module.parameters()], allow_unused=True)

    block, x = block_of("C3k2 of C3k")
    patch_modules(block, memory="fast")
    stock = support.uneven(C3k2(16, 32, 1, True)).double().train()
    stock.load_state_dict(block.state_dict())
    for ours, theirs in zip(second(block, x), second(stock, x), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_passed_twice():
    """Three readers: the gradients of the two others are added together, and then to that of the convolution."""
    x, weight, _, gamma, beta, *_ = arguments()

    def grads(passing):
        leaves = [t.clone().requires_grad_() for t in (x, weight, gamma, beta)]
        source = leaves[0] * 2
        call = (source, leaves[1], None, *leaves[2:], 1e-3, None, (1, 1), (1, 1))
        if passing:
            y, second, third = ops.conv_bn_act_train_and_pass(*call, passes=2)
        else:
            y, second, third = ops.conv_bn_act_train(*call)[0], source, source
        return torch.autograd.grad(y.sin().sum() + second.cos().sum() + third.exp().sum(), leaves)

    for ours, theirs in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_foreign_parts_are_concatenated():
    """A part that its block did not write to its place: another width, another module, a frozen batch norm."""
    for change in range(3):
        torch.manual_seed(0)
        stock = support.uneven(C2f(16, 32, 2)).double().train()
        if change == 0:
            stock.m[1] = Conv(16, 24, 3).double()
            stock.cv2 = Conv(32 + 16 + 24, 32).double()
        elif change == 1:
            stock.m[0] = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Hardswish(inplace=True)).double()
        else:
            stock.m[1].cv2.bn.eval()
        fast = copy.deepcopy(stock)
        patch_modules(fast)
        x = torch.randn(2, 16, 4, 6, dtype=torch.float64)
        (ours, our_grads), (theirs, their_grads) = (
            support.step(block, x.clone().requires_grad_()) for block in (fast, stock)
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert_same_grads(our_grads, their_grads, 1e-9)
