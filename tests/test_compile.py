"""Patched models under torch.compile: one graph, no more recompilations than stock, the same numbers and buffers."""

from __future__ import annotations

import copy
import itertools

import pytest
import support
import torch
from support import (
    OpLog,
    assert_same,
    assert_same_buffers,
    assert_same_grads,
    patched_copy,
    step,
    tensors,
    uneven,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from ultralytics.nn.modules.conv import Conv, DWConv

from yolo12_fastconv import blocks, patch_model, unpatch_model


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No graphs or counters of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def small(act: bool | nn.Module = True) -> nn.Module:
    return uneven(nn.Sequential(Conv(3, 8, 3, 2, act=act), DWConv(8, 8, 3), Conv(8, 16, act=False))).double()


def compiled(
    module: nn.Module, backend: str = "aot_eager", **options
) -> tuple[nn.Module, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(module, backend=counter, fullgraph=True, **options), counter


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("act", [True, nn.ReLU()], ids=["silu", "relu"])
def test_blocks_make_one_graph_of_fused_ops(act, training):
    model = small(act).train(training)
    fast = patched_copy(model)
    program, counter = compiled(fast)
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        stock, ours = step(model, x), step(program, x)
        grads = {name.removeprefix("_orig_mod."): grad for name, grad in ours[1].items()}
        assert_same(ours[0], stock[0], 1e-13)
        assert_same_grads(grads, stock[1], 1e-10)
        assert_same_buffers(fast, model, 1e-13)
    assert counter.frame_count == 1
    called = [
        str(node.target)
        for graph in counter.graphs
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    op = "yolo12_fastconv.conv_bn_act_train.default" if training else "yolo12_fastconv.conv_bn_act.default"
    assert called.count(op) == 3
    assert called.count("yolo12_fastconv.update_running_stats_.default") == (3 if training else 0)
    assert not [name for name in called if "conv2d" in name or "batch_norm" in name]
    assert fast[0].bn.num_batches_tracked == (3 if training else 0)


def test_fused_blocks_compile():
    fast = patched_copy(small().eval())
    for block in fast:
        block.conv.bias = nn.Parameter(torch.randn(block.conv.out_channels, dtype=torch.float64))
        del block.bn
        block.forward = block.forward_fuse
    x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    program, counter = compiled(fast)
    assert_same([program(x)], [fast(x)], 1e-13)
    assert counter.frame_count == 1


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_whole_model_is_one_graph(training, yolo12n, images):
    yolo12n.requires_grad_(True).train(training)
    fast = patched_copy(yolo12n)
    with torch.no_grad():  # the head's first evaluation makes anchors, which breaks stock's graph as well
        expected = tensors(yolo12n(images))
        fast(images)
    if training:
        for m in (fast, yolo12n):
            m.load_state_dict(copy.deepcopy(yolo12n.state_dict()))
        expected = tensors(copy.deepcopy(yolo12n)(images))
    program, counter = compiled(fast, backend="eager")
    outputs = tensors(program(images))
    assert counter.frame_count == 1 and not counters["graph_break"]
    assert_same([t.detach() for t in outputs], [t.detach() for t in expected], 1e-4)
    ops = [
        str(node.target)
        for node in counter.graphs[0].graph.nodes
        if "yolo12_fastconv.conv_bn_act" in str(node.target)
    ]
    assert len(ops) == 113


def test_no_more_graphs_than_stock_over_shapes_and_modes():
    shapes = [(2, 3, 16, 16), (2, 3, 32, 16), (1, 3, 24, 40), (2, 3, 16, 16)]
    frames = {}
    for name, model in (("stock", small()), ("fast", patched_copy(small()))):
        torch._dynamo.reset()
        counters.clear()
        program, counter = compiled(model)
        for training, shape in itertools.product((True, False), shapes):
            model.train(training)
            program(torch.rand(shape, dtype=torch.float64))
        frames[name] = counter.frame_count
        assert not counters["graph_break"]
    assert frames["fast"] <= frames["stock"]


def test_dynamic_shapes():
    frames = []
    for model in (small().eval(), patched_copy(small().eval())):
        torch._dynamo.reset()
        program, counter = compiled(model, dynamic=True)
        for shape in [(2, 3, 16, 20), (3, 3, 32, 28), (5, 3, 11, 13)]:
            x = torch.rand(shape, dtype=torch.float64)
            assert_same([program(x)], [model(x)], 1e-13)
        frames.append(counter.frame_count)
    assert frames[1] <= frames[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_training_step_under_autocast(dtype):
    model = small().float().train()
    fast = patched_copy(model)
    program, counter = compiled(fast)
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        stock, ours = step(model, x), step(program, x)
    assert ours[0][0].dtype is dtype and counter.frame_count == 1
    grads = {name.removeprefix("_orig_mod."): grad for name, grad in ours[1].items()}
    tolerance = 8 * torch.finfo(dtype).eps
    assert_same(ours[0], stock[0], tolerance)
    assert_same_grads(grads, stock[1], 4 * tolerance)
    assert_same_buffers(fast, model, tolerance)
    y = program(x)  # autocast off again: another graph, in float32
    assert y.dtype is torch.float32 and counter.frame_count == 2


def test_swapping_after_compilation_takes_effect():
    model = small().eval()
    program, counter = compiled(model)
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    expected = program(x)
    patch_model(program)
    with OpLog() as log:
        model(x)
    assert log.fused == 3
    assert_same([program(x)], [expected], 1e-13)
    assert counter.frame_count == 2
    assert "yolo12_fastconv.conv_bn_act.default" in str(counter.graphs[-1].graph)
    unpatch_model(program)
    assert torch.equal(program(x), expected)


def test_a_hook_on_a_child_is_compiled_as_stock():
    fast = patched_copy(small().eval())
    fast[0].conv.register_forward_hook(lambda module, args, output: output * 2)
    x = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    expected = fast(x)
    program, counter = compiled(fast)
    assert_same([program(x)], [expected], 1e-13)
    assert str(counter.graphs[0].graph).count("yolo12_fastconv.conv_bn_act.default") == 2


def test_vmap_inside_a_compiled_function():
    fast = patched_copy(small().eval())
    x = torch.rand(3, 3, 16, 16, dtype=torch.float64)
    program = torch.compile(torch.func.vmap(lambda t: fast(t[None])[0]), backend="aot_eager")
    assert_same([program(x).contiguous()], [fast(x)], 1e-12)


def test_strict_mode_is_kept_in_graphs(monkeypatch):
    fast = patched_copy(small().eval())
    monkeypatch.setenv("YOLO12_FASTCONV_STRICT", "1")
    with pytest.raises(Exception) as raised:
        torch.compile(fast, backend="eager")(torch.rand(1, 3, 16, 16, dtype=torch.float64))
    assert isinstance(raised.value, blocks.FallbackError)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_gpu_inductor_one_step(cuda, dtype, training):
    model = small().float().to(cuda).to(memory_format=torch.channels_last).train(training)
    fast = patched_copy(model)
    program = torch.compile(fast, fullgraph=True)
    for shape in [(2, 3, 32, 32), (2, 3, 48, 32)]:
        x = torch.randn(shape, device=cuda, requires_grad=True)
        with torch.autocast("cuda", dtype=dtype, enabled=dtype is not torch.float32):
            stock, ours = step(model, x), step(program, x)
        grads = {name.removeprefix("_orig_mod."): grad for name, grad in ours[1].items()}
        assert ours[0][0].is_contiguous(memory_format=torch.channels_last)
        assert support.error(ours[0][0], stock[0][0]) < 5e-3
        for name, grad in stock[1].items():
            assert support.error(grads[name], grad) < 3e-2, name
    for name, mine in fast.named_buffers():
        assert support.error(mine, dict(model.named_buffers())[name]) < 5e-3, name


@pytest.mark.gpu
def test_gpu_reduce_overhead_mode(cuda):
    """Inductor with CUDA graphs."""
    fast = patched_copy(small().half().to(cuda).eval())
    program = torch.compile(fast, fullgraph=True, mode="reduce-overhead")
    with torch.inference_mode():
        for seed in range(4):
            x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed)).half().to(cuda)
            assert support.error(program(x).clone(), fast(x)) < 5e-3
