"""Larger blocks on a CPU: each type beside its stock class, switches, files, copies, compilers, exports, parity."""

from __future__ import annotations

import copy
import io
import pickle
import pickletools

import pytest
import support
import torch
from support import OpLog, assert_same, assert_same_buffers, assert_same_grads, tensors
from torch import Tensor, nn
from ultralytics import YOLO
from ultralytics.nn.modules.block import (
    C3,
    A2C2f,
    AAttn,
    ABlock,
    Bottleneck,
    C2f,
    C3k,
    C3k2,
    C3x,
)
from ultralytics.nn.modules.conv import Conv

from yolo12_fastconv import (
    _config,
    blocks,
    check_parity,
    csp,
    ops,
    patch_model,
    patch_report,
    registry,
    training,
)
from yolo12_fastconv.patching import patch_modules, unpatch_modules

BLOCKS = {
    "Bottleneck": lambda: Bottleneck(16, 16, e=0.5),
    "Bottleneck without shortcut": lambda: Bottleneck(16, 24),
    "C2f": lambda: C2f(16, 32, 2, True),
    "C3k2": lambda: C3k2(16, 32, 2),
    "C3k2 of C3k": lambda: C3k2(16, 32, 1, True),
    "C3": lambda: C3(16, 32, 2),
    "C3k": lambda: C3k(16, 32, 2),
    "AAttn": lambda: AAttn(64, 2, 1),
    "AAttn of areas": lambda: AAttn(64, 2, 4),
    "ABlock": lambda: ABlock(64, 2, 1.2, 4),
    "A2C2f": lambda: A2C2f(32, 64, 2, True, 4),
    "A2C2f with gamma": lambda: A2C2f(64, 64, 1, True, 1, True, 1.2),
    "A2C2f of C3k": lambda: A2C2f(32, 64, 1, False),
}
AMP = {"float32": None, "bfloat16 autocast": torch.bfloat16}


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    stock = support.uneven(BLOCKS[name]()).eval()
    fast = copy.deepcopy(stock)
    assert patch_modules(fast).fused
    return stock, fast


def input_of(block: nn.Module, dtype: torch.dtype = torch.float32, memory_format=torch.contiguous_format):
    channels = next(p for p in block.parameters() if p.dim() == 4).shape[1]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, channels, 4, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype).contiguous(memory_format=memory_format)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_computes_as_stock(name, memory_format):
    """In float64, where a difference is a fault: inference in place, evaluation with gradients, and training."""
    stock, fast = (block.double() for block in pair(name))
    x = input_of(stock, torch.float64, memory_format)
    # Stock attention makes its results contiguous; ours leaves them in the layout of its input.
    layouts = memory_format is torch.contiguous_format or not isinstance(stock, AAttn)

    def results(outputs: list[Tensor]) -> list[Tensor]:
        return outputs if layouts else [output.contiguous() for output in outputs]

    with torch.no_grad():
        assert_same(results([fast(x)]), results([stock(x)]), 1e-12)
    for mode in (False, True):
        stock.train(mode)
        fast.train(mode)
        sides = []
        for block in (fast, stock):
            sides.append(support.step(block, x.clone().requires_grad_()))
        (ours, our_grads), (theirs, their_grads) = sides
        assert_same(results(ours), results(theirs), 1e-12)
        if not layouts:
            our_grads, their_grads = (
                {n: g if g is None else g.contiguous() for n, g in grads.items()}
                for grads in (our_grads, their_grads)
            )
        assert_same_grads(our_grads, their_grads, 1e-9)
        assert_same_buffers(fast, stock, 1e-12)


@pytest.mark.parametrize("name", BLOCKS)
def test_autocast_returns_stocks_dtype(name):
    stock, fast = pair(name)
    half = input_of(stock, torch.bfloat16)
    for x in (half, half.float()):
        for mode in (False, True):
            stock.train(mode)
            fast.train(mode)
            exact = copy.deepcopy(stock).double()(x.double())
            with torch.set_grad_enabled(mode), torch.autocast("cpu", torch.bfloat16):
                ours, theirs = fast(x), stock(x)
            assert ours.dtype is theirs.dtype
            assert support.error(ours, exact) <= 2 * support.error(theirs, exact) + 2e-3


@pytest.mark.parametrize("name", ["C3k2", "C3k2 of C3k", "C3k", "A2C2f", "A2C2f of C3k"])
def test_inference_writes_concats_in_place(name):
    stock, fast = pair(name)
    x = input_of(stock)
    with torch.no_grad(), OpLog() as log:
        fast(x)
    assert not any("aten.cat" in op for op in log.names) and any("conv_bn_act_out" in op for op in log.names)
    with OpLog() as log:
        fast(x)
    assert any("aten.cat" in op for op in log.names) and not any("conv_bn_act_out" in op for op in log.names)


def test_parts_of_other_widths_and_foreign_blocks_are_concatenated():
    """A pruned chain, a stock block, and one that returns another dtype: parts that have no place in the buffer."""
    stock = support.uneven(C3k2(16, 32, 2)).eval()
    stock.m[1] = Conv(16, 24, 3)
    stock.cv2 = Conv(32 + 16 + 24, 32)
    foreign = support.uneven(C2f(16, 32, 2)).eval()
    foreign.m[0] = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Hardswish())
    promoting = support.uneven(C2f(16, 32, 1)).eval()

    class Promote(nn.Module):
        def forward(self, x):
            return x.double()

    promoting.m[0] = Promote()
    for block in (stock, foreign):
        x, fast = input_of(block), support.patched_copy(block)
        with torch.no_grad():
            assert_same([fast(x)], [block(x)], 1e-6)
    x, fast = input_of(promoting), support.patched_copy(promoting)
    with torch.no_grad():
        for model in (promoting, fast):
            with pytest.raises(RuntimeError):  # the concat is float64, the weights are not
                model(x)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("training", [False, True])
def test_hooks_on_inner_modules_fire(name, training):
    stock, fast = pair(name)
    x = input_of(stock)
    for block in (stock, fast):
        block.train(training)
    for inner in [
        key for key, module in stock.named_modules() if key and not isinstance(module, nn.ModuleList)
    ]:
        counts = []
        for block in (stock, fast):
            calls: list[tuple[int, ...]] = []
            hook = lambda module, args, y, calls=calls: calls.append(tuple(y.shape))  # noqa: E731
            target = block.get_submodule(inner)
            if isinstance(target, nn.SiLU):
                continue  # one object for all
            handle = target.register_forward_hook(hook)
            with torch.set_grad_enabled(training):
                block(x)
            handle.remove()
            counts.append(calls)
        assert counts[:1] == counts[1:], inner


def test_a_hook_that_changes_a_result_changes_the_blocks(monkeypatch):
    stock, fast = pair("ABlock")
    x = input_of(stock)
    with torch.no_grad():
        plain = fast(x)
        for block in (stock, fast):
            block.attn.pe.register_forward_hook(lambda module, args, y: 2 * y)
        assert_same([fast(x)], [stock(x)], 1e-6)
        assert not torch.allclose(fast(x), plain)


def test_switched_off():
    model = support.build("yolo12n.yaml")

    def kinds(**options) -> set[str]:
        twin = copy.deepcopy(model)
        patch_modules(twin, **options)
        return {registry.UNFUSED[type(m)].__name__ for m in twin.modules() if type(m) in registry.UNFUSED}

    everything = {"AAttn", "ABlock", "A2C2f", "C3k2", "C3k", "Bottleneck", "Concat", "Upsample", "Detect"}
    assert kinds() == everything
    assert kinds(attention=False) == everything - {"AAttn"}
    assert kinds(exclude=["C3k2", "ABlock"]) == everything - {"C3k2", "ABlock"}
    assert kinds(include="Conv") == set()
    twin = copy.deepcopy(model)
    summary = patch_modules(twin, exclude="model.6*")
    assert not any(type(m) in (*registry.UNFUSED, *blocks.STOCK) for m in twin.model[6].modules())
    assert len(summary.fused) + len(summary.unfused) == 45 and all(
        n.startswith("model.6") for n in summary.unfused
    )
    assert "larger blocks fused" in str(summary)


def test_disabled_at_run_time(monkeypatch):
    stock, fast = pair("A2C2f")
    x = input_of(stock)
    monkeypatch.setenv(_config.DISABLE, "1")
    with torch.no_grad(), OpLog() as log:
        assert torch.equal(fast(x), stock(x))
    assert not any(ops.NAMESPACE in name for name in log.names)
    assert all(row.reason for row in patch_report(fast).blocks)


def test_another_layout_of_attention_keeps_its_forward():
    class Older(AAttn):
        def __init__(self):
            nn.Module.__init__(self)
            self.area, self.num_heads, self.head_dim, self.all_head_dim = 1, 2, 32, 64
            self.qk, self.v = Conv(64, 128, 1, act=False), Conv(64, 64, 1, act=False)
            self.pe, self.proj = Conv(64, 64, 5, 1, 2, g=64, act=False), Conv(64, 64, 1, act=False)

    block = Older()
    block.__class__ = AAttn  # as files of the authors' fork load
    model = nn.Sequential(ABlock(64, 2))
    model[0].attn = block
    summary = patch_modules(model)
    assert type(block) is AAttn and "no child qkv" in summary.unfused["0.attn"]
    assert "0.attn.qk" in summary.swapped and "0" in summary.fused
    with pytest.raises(AttributeError, match="qkv"):  # stock's own error
        model(torch.randn(1, 64, 4, 4))


def test_another_formula_keeps_its_forward(monkeypatch):
    """A release, or a user, that computes something else in a block's forward."""
    right = Bottleneck.forward
    monkeypatch.setattr(Bottleneck, "forward", lambda self, x: 2 * right(self, x))
    model = nn.Sequential(C3k2(16, 32, 1), Bottleneck(32, 32))
    summary = patch_modules(model)
    assert "Bottleneck of Ultralytics" in summary.unfused["1"] and "1.cv1" in summary.swapped
    assert type(model[1]) is Bottleneck


def test_subclasses_and_own_forwards_are_left_alone():
    own = Bottleneck(16, 16)
    own.forward = lambda x: x
    model = nn.Sequential(C3x(16, 16), own)
    summary = patch_modules(model)
    assert type(model[0]) is C3x and type(own) is Bottleneck
    assert summary.unfused["1"] == "has a forward of its own (an instance attribute)"


@pytest.mark.parametrize("name", BLOCKS)
def test_files_hold_stock_classes_and_copies_fast_ones(name):
    stock, fast = pair(name)
    x = input_of(stock)
    data = pickle.dumps(fast)
    assert not any("yolo12_fastconv" in str(argument) for _op, argument, _at in pickletools.genops(data))
    loaded = pickle.loads(data)
    assert type(loaded) is type(stock)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is type(stock)
    for twin in (copy.deepcopy(fast), copy.copy(fast)):
        assert type(twin) is type(fast)
    assert fast.state_dict().keys() == stock.state_dict().keys()
    with torch.no_grad():
        assert torch.equal(loaded(x), stock(x))
        assert torch.equal(copy.deepcopy(fast)(x), fast(x))
        unpatch_modules(fast)
        assert type(fast) is type(stock) and torch.equal(fast(x), stock(x))


@pytest.mark.parametrize("name", ["C3k2 of C3k", "A2C2f", "A2C2f with gamma"])
def test_compiles_without_graph_breaks(name):
    stock, fast = pair(name)
    x = input_of(stock)
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
        assert_same([compiled(x)], [stock(x)], 1e-6)


def test_exports_hold_standard_operators():
    stock, fast = pair("A2C2f")
    x = input_of(stock)
    with torch.no_grad():
        traced = torch.jit.trace(fast, x)
    assert f"{ops.NAMESPACE}::" not in str(traced.inlined_graph)
    assert torch.equal(traced(x), stock(x))


def test_strict_mode_names_the_block():
    block = AAttn(64, 2)
    patch_modules(block)
    del block.pe
    block._fc_strict = "attn"
    with pytest.raises(blocks.FallbackError, match="attn computes as stock: has no child pe"):
        block(torch.randn(1, 64, 4, 4))


def test_report_lists_larger_blocks():
    model = nn.Sequential(C3k2(16, 32, 1), AAttn(32, 1))
    assert [row.reason for row in patch_report(model).blocks] == ["not patched"] * 3
    patch_model(model, attention=False)
    report = patch_report(model)
    assert [(row.name, row.layer, row.patched) for row in report.blocks] == [
        ("0", "FastC3k2", True), ("0.m.0", "FastBottleneck", True), ("1", "AAttn", False)
    ]  # fmt: skip
    for text in (str(report), report.to_markdown(), report.to_json()):
        assert "concat in place" in text and "FastBottleneck" in text
    assert "2 of 3 larger blocks run fused" in report.summary()


@pytest.fixture
def small():
    torch.manual_seed(0)
    return support.uneven(nn.Sequential(Conv(3, 64, 3, 2), A2C2f(64, 64, 1, True, 4), C3k2(64, 32, 1))).eval()


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_parity_finds_planted_faults(small, monkeypatch, mode):
    """By the name of the block that has the fault, with all layers within the rule."""
    batch = torch.rand(2, 3, 16, 24)
    good = check_parity(small, batch, mode=mode, progress=False)
    assert good.ok and {name for name, _ in good.larger_blocks()} == {
        "1", "1.m.0.0", "1.m.0.0.attn", "1.m.0.1", "1.m.0.1.attn", "2", "2.m.0"
    }  # fmt: skip

    right = csp.run
    monkeypatch.setattr(csp, "run", lambda module, x, residual=None, out=None: right(module, x, None, out))
    report = check_parity(small, batch, mode=mode, progress=False)
    assert not report.ok and report.first_bad.layer == "2" and all(row.ok for row in report.rows)
    assert {row.layer for row in report.blocks if not row.ok} == {"2", "2.m.0"}
    monkeypatch.undo()

    attention = ops.area_attention
    monkeypatch.setattr(
        ops, "area_attention", lambda qkv, heads, area, **kwargs: attention(qkv, heads, 1, **kwargs)
    )
    report = check_parity(small, batch, mode=mode, progress=False)
    assert {row.layer for row in report.blocks if not row.ok} >= {"1.m.0.0.attn", "1.m.0.1.attn"}
    assert all(not row.layer.startswith("2") for row in report.blocks if not row.ok)
    assert "larger blocks" in report.summary() and "1.m.0.0.attn" in report.to_json()


def test_out_is_checked_and_has_no_gradient():
    x, weight = torch.randn(1, 8, 4, 4), torch.randn(16, 8, 1, 1)
    whole = torch.zeros(1, 24, 4, 4)
    ops.conv_bn_act_out(x, weight, whole[:, 4:20])
    assert torch.equal(whole[:, 4:20], ops.conv_bn_act(x, weight))
    assert not whole[:, :4].any() and not whole[:, 20:].any()
    with pytest.raises(RuntimeError, match="out must be"):
        ops.conv_bn_act_out(x, weight, whole)
    with pytest.raises(RuntimeError, match=r"out must be torch.float32"):
        ops.conv_bn_act_out(x, weight, torch.zeros(1, 16, 4, 4, dtype=torch.half))
    with pytest.raises(RuntimeError, match="no gradient"):
        ops.conv_bn_act_out(x, weight.requires_grad_(), whole[:, 4:20])


def test_out_passes_opcheck_and_functionalisation():
    x, weight, out = torch.randn(1, 8, 4, 4), torch.randn(16, 8, 1, 1), torch.zeros(1, 16, 4, 4)
    arguments = [
        x, weight, out, None, None, None, None, None, 0.0, None, [1, 1], [0, 0], [1, 1], 1, 1, torch.float32, False
    ]  # fmt: skip
    torch.library.opcheck(torch.ops.yolo12_fastconv.conv_bn_act_out.default, arguments)

    def write(x, whole):
        ops.conv_bn_act_out(x, weight, whole[:, 4:20])
        return whole * 2

    torch._dynamo.reset()
    whole = torch.zeros(1, 24, 4, 4)
    y = torch.compile(write, fullgraph=True, backend="aot_eager")(x, whole)
    assert torch.equal(whole[:, 4:20], ops.conv_bn_act(x, weight)) and torch.equal(y, whole * 2)


@pytest.mark.parametrize("cfg", ["yolo12n-seg.yaml", "yolo12n-cls.yaml"])
@pytest.mark.parametrize("size", [(64, 64), (96, 32)], ids=str)
def test_whole_models(cfg, size):
    model = support.build(cfg).double()
    fast = support.patched_copy(model)
    x = torch.rand(1, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        assert_same(tensors(fast(x)), tensors(model(x)), 1e-11)


def test_fused_weights_get_the_kernels_strides_and_give_them_back(monkeypatch):
    """As on a GPU: after `fuse()` and a move, or at once for a model that is fused already."""
    monkeypatch.setattr(blocks, "_on_gpu", lambda weight: True)
    model = support.build("yolo12n.yaml")
    weights = {name: p for name, p in model.named_parameters() if p.dim() == 4}
    patch_modules(model)
    model.float()
    assert all(p.is_contiguous() for p in weights.values())  # a model that may still be fused
    model.fuse(verbose=False)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    pointers = dict(model.named_parameters())
    for change in (lambda: model.to(torch.float32), lambda: (unpatch_modules(model), patch_modules(model))):
        change()
        kept = [m for m in model.modules() if "_fc_weight_kept" in vars(m)]
        assert len(kept) == 32  # the dense 3x3 ones but the stem
        assert all(m.conv.weight.is_contiguous(memory_format=torch.channels_last) for m in kept)
        twin = pickle.loads(pickle.dumps(model))
        assert not any("_fc_weight_kept" in vars(m) for m in twin.modules())
    for name, p in model.named_parameters():
        assert p is pointers[name] and torch.equal(p, expected[name])
    unpatch_modules(model)
    assert all(p.is_contiguous() for p in model.parameters())
    assert not any(key.startswith("_fc_") for m in model.modules() for key in vars(m))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_rows_of_odd_widths_are_whole_chunks_apart(dtype):
    lanes = 16 // torch.empty(0, dtype=dtype).element_size()
    for channels, kernel in ((lanes, 3), (2 * lanes, 1), (lanes + 1, 1), (3 * lanes - 1, 3)):
        weight = torch.randn(4, channels, kernel, kernel).to(dtype)
        kept = blocks.padded_channels_last(weight)
        pitch = -(-channels // lanes) * lanes
        assert torch.equal(kept, weight) and kept.stride(0) == kernel * kernel * pitch
        assert kernel == 1 or kept.stride()[1:] == (1, kernel * pitch, pitch)
        assert blocks.padded_channels_last(kept).data_ptr() == kept.data_ptr()
        assert channels % lanes or kept.is_contiguous(memory_format=torch.channels_last)


def test_attention_is_an_option_of_training_too():
    assert training._without_defaults(dict(include=None, exclude=None, attention=True, strict=False)) == {}
    assert training._without_defaults(dict(attention=False, strict=True)) == {
        "attention": False,
        "strict": True,
    }
    yolo = patch_model(YOLO("yolo12n.yaml"), attention=False)
    assert yolo._fastconv_options == {"attention": False}
    yolo._patch_again()
    assert not any(type(m) is registry.FUSED[AAttn] for m in yolo.model.modules())
    assert patch_model(YOLO("yolo12n.yaml"))._fastconv_options == {}
