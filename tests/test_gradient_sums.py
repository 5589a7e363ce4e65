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

from yolo12_fastconv import ops
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


BLOCKS = {  # block, and how many sums autograd makes of its own: gradients that three read
    "Bottleneck": (lambda: Bottleneck(16, 16, e=0.5), 0),
    "C2f": (lambda: C2f(16, 32, 2, True), 0),
    "C3k": (lambda: C3k(16, 32, 2), 0),
    "C3k2 of C3k": (lambda: C3k2(16, 32, 1, True), 0),
    "ABlock": (lambda: ABlock(64, 2, 1.2, 4), 0),
    "A2C2f": (lambda: A2C2f(32, 64, 2, True, 4), 0),
    "A2C2f with gamma": (lambda: A2C2f(64, 64, 1, True, 1, True, 1.2), 0),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_neither_concatenate_nor_add(name):
    make, sums = BLOCKS[name]
    torch.manual_seed(0)
    block = support.uneven(make()).double().train()
    patch_modules(block)
    channels = next(p for p in block.parameters() if p.dim() == 4).shape[1]
    x = torch.randn(2, channels, 4, 6, dtype=torch.float64).requires_grad_()
    with OpLog() as log:
        y = block(x)
    assert "aten.cat.default" not in log.names
    with OpLog() as log:
        y.backward(torch.randn_like(y))
    assert "aten.cat.default" not in log.names
    assert sum(op.startswith("aten.add.") for op in log.names) == sums


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
