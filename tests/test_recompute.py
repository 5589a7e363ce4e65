"""``patch_model(memory=...)``: gradients do not depend on it, and less is kept."""

from __future__ import annotations

import copy

import pytest
import support
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from ultralytics import YOLO
from ultralytics.nn.modules import Conv
from ultralytics.nn.modules.block import C3k

from yolo12_fastconv import _recompute, ops, patch_model, training, unpatch_model


def chain() -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(Conv(3, 8, 3, 2), Conv(8, 16, 3), Conv(16, 8, 1, act=False), Conv(8, 8, 3, g=8))
    return support.uneven(model).train()


def kept_bytes(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward, each storage once, without the parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _outputs = support.tensors(model(x))
    return sum(storages.values())


@pytest.mark.parametrize("memory", _recompute.MODES)
def test_gradients_and_buffers_are_the_same_bit_for_bit(memory, monkeypatch):
    monkeypatch.setitem(
        _recompute.LEAST_BYTES, "auto", 4096
    )  # larger than the last maps, smaller than the first
    x = torch.randn(2, 3, 32, 32)
    fast = patch_model(chain(), memory="fast")
    ours = patch_model(chain(), memory=memory)
    for _ in range(2):  # the second time with moved statistics
        expected, found = support.step(fast, x), support.step(ours, x)
        assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
        assert found[1].keys() == expected[1].keys()
        assert all(
            torch.equal(found[1][name], grad) for name, grad in expected[1].items() if grad is not None
        )
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), fast.buffers(), strict=True))


def test_less_is_kept():
    x = torch.randn(2, 3, 64, 64)
    fast, low = (kept_bytes(patch_model(chain(), memory=memory), x) for memory in ("fast", "low"))
    # Three of the four inputs are outputs of blocks: 8, 16 and 8 maps of 32 x 32.
    assert fast - low == 2 * (8 + 16 + 8) * 32 * 32 * 4
    assert kept_bytes(patch_model(chain()), x) == fast, "small tensors are not worth a pass"


def test_a_tensor_with_two_readers_is_computed_once_and_not_kept():
    """The input of a C3k, which two convolutions read, that of its bottleneck, and what is inside the bottleneck."""

    def block(memory: str) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(Conv(3, 8, 3), C3k(8, 16, 1, True, e=0.5))
        return patch_model(support.uneven(model).train(), memory=memory)

    x = torch.randn(2, 3, 16, 16)
    fast, low = block("fast"), block("low")
    assert kept_bytes(fast, x) - kept_bytes(low, x) == 2 * (8 + 8 + 8) * 16 * 16 * 4
    expected = support.step(fast, x)
    y = low(x)
    for _ in range(2):  # the second time from the same graph
        low.zero_grad()
        with support.OpLog() as log:
            support.tensors(y)[0].sum().backward(retain_graph=True)
        assert log.names.count("yolo12_fastconv.bn_act.default") == 3
    low = block("low")
    found = support.step(low, x)
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items() if grad is not None)


@pytest.mark.parametrize("change", ["write", "data", "view", "sum"])
def test_what_was_changed_is_kept_itself(change):
    def run(memory):
        model = patch_model(chain(), memory=memory)
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        y = model[0](x)
        if change == "write":
            with torch.no_grad():
                y.mul_(2)
        elif change == "data":
            y.data = 2 * y.data
        elif change == "view":
            y = y[:, :, 1:]
        else:
            y = y + 1
        model[1](y).sin().sum().backward()
        return [p.grad for p in model[1].parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run("low"), run("fast"), strict=True))


def test_under_checkpoint():
    def run(memory):
        model = patch_model(chain(), memory=memory)
        x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        checkpoint(model, x, use_reentrant=False).sin().sum().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    assert all(torch.equal(a, b) for a, b in zip(run("low"), run("fast"), strict=True))


def test_gradients_of_gradients_say_what_they_need():
    x = torch.randn(1, 3, 8, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(patch_model(chain(), memory="fast")(x).sum(), x, create_graph=True)
    assert grad.requires_grad
    with pytest.raises(RuntimeError, match=r'patch_model\(model, memory="fast"\)'):
        torch.autograd.grad(patch_model(chain(), memory="low")(x).sum(), x, create_graph=True)


def test_a_whole_model_keeps_less_and_trains_the_same(yolo12n):
    x = torch.rand(2, 3, 64, 64)
    fast, low = (patch_model(copy.deepcopy(yolo12n).train(), memory=memory) for memory in ("fast", "low"))
    expected, found = support.step(fast, x), support.step(low, x)
    assert all(torch.equal(found[1][name], grad) for name, grad in expected[1].items() if grad is not None)
    assert kept_bytes(low, x) < 0.8 * kept_bytes(fast, x)


def test_the_mode_is_set_and_left():
    with pytest.raises(ValueError, match="'tiny'"):
        patch_model(chain(), memory="tiny")
    model = patch_model(chain(), memory="low")
    assert {block._fc_memory for block in model} == {"low"}
    assert {block._fc_memory for block in copy.deepcopy(model)} == {"low"}
    patch_model(model)
    assert not any("_fc_memory" in vars(block) for block in model)
    unpatch_model(patch_model(model, memory="fast"))
    assert not any("_fc_memory" in vars(block) for block in model)


def test_training_takes_the_mode_over():
    yolo = patch_model(YOLO("yolo12n.yaml"), memory="low")
    trainer = training.fast_trainer(yolo._smart_load("trainer"), **yolo._fastconv_options)
    assert trainer.fastconv_options == {"memory": "low"}
    assert training._without_defaults({"memory": "auto"}) == {}


def test_the_op_gives_the_output_again():
    x, weight = torch.randn(2, 3, 8, 8), torch.randn(8, 3, 3, 3)
    gamma, beta = torch.randn(8), torch.randn(8)
    geometry = ([1, 1], [1, 1], [1, 1], 1)
    op = torch.ops.yolo12_fastconv
    for act in (0, 1):
        train = (x, weight, None, gamma, beta, 1e-3, None, *geometry, act, torch.float32, False)
        y, z, mean, var = op.conv_bn_act_train.default(*train)
        arguments = (z, mean, var, gamma, beta, 1e-3, act)
        assert torch.equal(op.bn_act.default(*arguments), y)
        torch.library.opcheck(op.bn_act.default, arguments)
    with pytest.raises(RuntimeError, match="differentiable"):
        op.bn_act.default(z.requires_grad_(), *arguments[1:]).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gpu_gradients_are_the_same_and_memory_is_less(cuda, yolo12n, dtype, monkeypatch):
    x = torch.rand(4, 3, 320, 320, device=cuda)
    peaks, gradients = {}, {}
    monkeypatch.setattr(
        torch.backends.cudnn, "deterministic", True
    )  # else cuDNN's weight gradients vary by run
    for memory in ("fast", "low"):
        model = patch_model(copy.deepcopy(yolo12n).to(cuda).train(), memory=memory)
        for _ in range(2):
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
                outputs = support.tensors(model(x))
            sum(y.float().sin().mean() for y in outputs).backward()
            peaks[memory] = torch.cuda.max_memory_allocated() - before
        gradients[memory] = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients["low"].keys() == gradients["fast"].keys()
    assert all(torch.equal(gradients["low"][name], grad) for name, grad in gradients["fast"].items())
    assert peaks["low"] < 0.9 * peaks["fast"]


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 13, 460])
def test_gpu_op_gives_the_output_again(cuda, channels):
    x = torch.randn(2, 16, 20, 20, device=cuda, dtype=torch.half)
    weight = torch.randn(channels, 16, 1, 1, device=cuda, dtype=torch.half)
    gamma, beta = torch.randn(2, channels, device=cuda)
    y, _mean, _var = ops.conv_bn_act_train(x, weight, None, gamma, beta, 1e-3)
    op = torch.ops.yolo12_fastconv
    train = (x, weight, None, gamma, beta, 1e-3, None, [1, 1], [0, 0], [1, 1], 1, 1, torch.half, False)
    _y, z, mean, var = op.conv_bn_act_train.default(*train)
    assert torch.equal(op.bn_act.default(z, mean, var, gamma, beta, 1e-3, 1), y)
