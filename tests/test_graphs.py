"""CUDA graphs without a GPU: signatures, what makes a graph stale, bounds, pickles, copies, undo, fallbacks.

`FakeBackend` stands for CUDA: its graph is a twin of the model as it was at the capture, whose tensors share the
memory of the model's tensors then. Like a graph it sees values changed in place, and nothing else.
"""

from __future__ import annotations

import contextlib
import copy
import io
import operator
import pickle
import pickletools
import threading
import types
import zipfile

import pytest
import support
import torch
from support import tensors
from torch import nn
from ultralytics import YOLO
from ultralytics.nn.modules.conv import Conv
from ultralytics.nn.tasks import ClassificationModel, DetectionModel

from yolo12_fastconv import (
    PatchError,
    _graph_capture,
    _graph_outputs,
    _graph_state,
    _late,
    graphs,
    patch_model,
    patch_report,
    training,
    unpatch_model,
)
from yolo12_fastconv.patching import patch_modules


class FakeGraph:
    def __init__(self, model, x):
        memo = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            alias = tensor.detach()
            memo[id(tensor)] = nn.Parameter(alias, False) if isinstance(tensor, nn.Parameter) else alias
        self.twin, self.x = copy.deepcopy(model, memo), x
        self.outputs = self.run()

    def run(self):
        return self.twin._stock.forward(self.twin, self.x)

    def replay(self):
        for mine, new in zip(tensors(self.outputs), tensors(self.run()), strict=True):
            mine.copy_(new)


class FakeBackend:
    """`graphs.CudaBackend` on a CPU."""

    def __init__(self):
        self.device = None

    def serves(self, x):
        return True

    def guard(self, x):
        return contextlib.nullcontext()

    def begin(self, x):
        self.device = x.device

    def end(self):
        pass

    finish = release = end

    def capture(self, function, x):
        with torch.inference_mode(False), torch.no_grad():
            static = x.clone()
            function(static)
            graph = FakeGraph(function.__self__, static)
        return _graph_capture.Recording(static, graph.outputs, graph, None)


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    monkeypatch.setattr(graphs, "BACKEND", FakeBackend)


def graphed(model):
    patch_modules(model, cuda_graph=True)
    return model


def state(model) -> graphs.Graphs:
    return vars(model)["_fc_graphs"]


def warm(model, x, calls=graphs.REPEATS):
    with torch.no_grad():
        for _ in range(calls):
            y = model(x)
    return y


def stock_output(model, x):
    """What a stock copy of `model` computes."""
    twin = copy.deepcopy(model)
    graphs.disable(twin)
    with torch.no_grad():
        return tensors(twin(x))


def assert_equal(ours, expected):
    ours = tensors(ours)
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


X = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


# ---------------------------------------------------------------------------------------------------------- replaying


def test_third_call_is_captured_and_later_ones_replay(tiny):
    model = graphed(tiny)
    assert type(model) is not ClassificationModel and isinstance(model, ClassificationModel)
    for call in range(6):
        x = torch.rand(2, 3, 32, 32)
        assert_equal(warm(model, x, 1), stock_output(model, x))
        assert state(model).counts["captures"] == (call >= graphs.REPEATS - 1)
    assert state(model).counts["replays"] == 6 - graphs.REPEATS
    assert state(model).counts["eager calls"] == graphs.REPEATS


def test_outputs_are_the_callers(yolo12n, images):
    model = graphed(yolo12n)
    warm(model, images)
    first = warm(model, images, 1)
    expected = [t.clone() for t in tensors(first)]
    warm(model, torch.rand_like(images), 1)
    assert_equal(first, expected)
    for t in tensors(first):
        t.zero_()
    assert_equal(warm(model, images, 1), expected)
    again = warm(model, images, 1)
    assert type(again) is tuple and list(again[1]) == ["boxes", "scores", "feats"]
    assert type(again[1]["feats"]) is list


def test_inputs_are_read_and_not_kept(tiny):
    model = graphed(tiny)
    x = X.clone()
    warm(model, x, 4)
    assert torch.equal(x, X)
    x.add_(1)
    assert_equal(warm(model, x, 1), stock_output(model, x))


def test_inference_mode_and_no_grad_share_graphs(tiny):
    model = graphed(tiny)
    with torch.inference_mode():
        for _ in range(4):
            y = model(X)
    assert tensors(y)[0].is_inference()
    y = warm(model, X, 1)
    assert not tensors(y)[0].is_inference() and state(model).counts["captures"] == 1
    assert_equal(y, stock_output(model, X))


SIGNATURES = {
    "shape": lambda x: x[:, :, :, :16].contiguous(),
    "batch": lambda x: x[:1],
    "strides": lambda x: x.contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("change", SIGNATURES)
def test_signature(tiny, change):
    model = graphed(tiny)
    warm(model, X, 4)
    other = SIGNATURES[change](X)
    assert_equal(warm(model, other, 1), stock_output(model, other))
    assert state(model).counts["replays"] == 1
    with pytest.raises(RuntimeError):
        warm(model, X.double(), 1)
    assert state(model).counts["replays"] == 1


FLAGS = {
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "matmul precision": lambda: torch.set_float32_matmul_precision("high"),
}


@pytest.mark.parametrize("flag", FLAGS)
def test_global_flags_are_part_of_the_signature(tiny, flag):
    model = graphed(tiny)
    warm(model, X, 4)
    before = (
        torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic,
        torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision(),
    )  # fmt: skip
    try:
        FLAGS[flag]()
        warm(model, X, 1)
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = before[1:3]
        torch.set_float32_matmul_precision(before[3])
    assert state(model).counts["replays"] == 1


def test_environment_and_autocast_are_part_of_the_signature(tiny, monkeypatch):
    model = graphed(tiny)
    warm(model, X, 4)
    with torch.autocast("cuda", torch.bfloat16):
        warm(model, X, 1)
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "aten")
    warm(model, X, 1)
    monkeypatch.delenv("YOLO12_FASTCONV_TARGET")
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    warm(model, X, 1)
    assert state(model).counts["replays"] == 1


# ------------------------------------------------------------------------------------------- what makes a graph stale


def conv(model):
    return model.model[0].conv


def replace_parameter(model):
    conv(model).weight = nn.Parameter(torch.randn_like(conv(model).weight))


def replace_data(model):
    conv(model).weight.data = torch.randn_like(conv(model).weight)


def transpose_data(model):
    weight = model.model[0].conv.weight
    weight.data = weight.data.transpose(2, 3)


def assign_state(model):
    scaled = {k: v * 1.1 if v.is_floating_point() else v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(scaled, assign=True)


def replace_buffer(model):
    model.model[0].bn.running_mean = torch.rand_like(model.model[0].bn.running_mean)


def replace_module(model):
    model.model[0].act = nn.ReLU()


def replace_class(model):
    model.model[0].act.__class__ = nn.ReLU


def parametrize(model):
    nn.utils.parametrize.register_parametrization(conv(model), "weight", nn.Softplus())


def override_forward(model):
    act = model.model[0].act
    act.forward = types.MethodType(lambda self, x: x * 2, act)


def override_inner_call(model):
    model._predict_once = lambda x, profile=False, embed=None: (x * 2, x)


STALE = {
    "parameter replaced": replace_parameter,
    "data replaced": replace_data,
    "data transposed": transpose_data,
    "state assigned": assign_state,
    "buffer replaced": replace_buffer,
    "module replaced": replace_module,
    "class replaced": replace_class,
    "parametrized": parametrize,
    "instance forward": override_forward,
    "instance method of the model": override_inner_call,
    "eps": lambda model: setattr(model.model[0].bn, "eps", 0.5),
    "batch statistics": lambda model: model.model[0].bn.train(),
    "geometry": lambda model: (
        setattr(conv(model), "dilation", (2, 2)),
        setattr(conv(model), "padding", (2, 2)),
    ),
    "fused": lambda model: model.fuse(verbose=False),
    "hook": lambda model: model.model[0].register_forward_hook(lambda m, args, y: y * 3),
    "pre-hook": lambda model: model.model[0].register_forward_pre_hook(lambda m, args: (args[0] * 3,)),
    "submodule cast": lambda model: conv(model).double().float(),
    "layer removed": lambda model: model.model.__delitem__(1),
}


@pytest.mark.parametrize("change", STALE)
def test_changed_models_are_not_replayed(tiny, change):
    model = graphed(tiny)
    model.model[0].act = nn.SiLU()  # stock blocks share one
    warm(model, X, 4)
    before = tensors(warm(model, X, 1))
    STALE[change](model)
    expected = stock_output(model, X)
    if change != "submodule cast":
        assert not torch.equal(before[0], expected[0]) or change == "fused"
    ours = tensors(warm(model, X, 1))
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert not state(model).entries and state(model).counts["dropped"] == 1
    assert_equal(warm(model, X, 4), stock_output(model, X))


def test_one_element_tensors_are_compared_by_identity(tiny):
    model = graphed(tiny)
    warm(model, X, 4)
    bn = model.model[0].bn
    bn.num_batches_tracked = bn.num_batches_tracked.clone()
    warm(model, X, 1)
    assert state(model).counts["dropped"] == 1


IN_PLACE = {
    "copy_": lambda model: conv(model).weight.data.mul_(2),
    "buffer": lambda model: model.model[0].bn.running_mean.add_(1),
    "load_state_dict": lambda model: model.load_state_dict(
        {k: v * 1.5 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    ),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_values_changed_in_place_need_no_new_graph(tiny, change):
    model = graphed(tiny)
    before = warm(model, X, 4)
    IN_PLACE[change](model)
    ours = warm(model, X, 1)
    assert not torch.equal(tensors(ours)[0], tensors(before)[0])
    assert_equal(ours, stock_output(model, X))
    assert state(model).counts["captures"] == 1 and state(model).counts["replays"] == 2


@pytest.mark.parametrize(
    "action", [lambda m: m.double(), lambda m: m.train(), lambda m: m.to("cpu", torch.bfloat16)]
)
def test_moving_and_training_free_graphs_at_once(tiny, action):
    model = graphed(tiny)
    warm(model, X, 4)
    action(model)
    assert not state(model).entries and state(model).structure is None


def test_heads_are_left_as_an_eager_call_leaves_them(yolo12n):
    """Anchors of several shapes, replayed and eager calls mixed."""
    model = graphed(yolo12n)
    inputs = [torch.rand(1, 3, 64, size) for size in (64, 96, 32)]
    for index in (0, 0, 0, 1, 1, 1, 0, 1, 0, 2, 0, 1, 2, 2, 1, 0, 2):
        expected = stock_output(model, inputs[index])
        assert_equal(warm(model, inputs[index], 1), expected)
        head = model.model[-1]
        assert head.shape[-1] == inputs[index].shape[-1] // 8
        assert head.anchors.shape[1] == expected[0].shape[-1]
    assert state(model).counts["captures"] == 3 and not state(model).counts["dropped"]


# --------------------------------------------------------------------------------------------------------- not captured


def test_only_plain_calls_are_replayed(yolo12n, images, capsys):
    model = graphed(yolo12n)
    warm(model, images)
    with torch.no_grad():
        assert len(model(images, embed=[3, 5])) == 2
        model(images, augment=True)
        model(images, False, False, None)
        model(images, augment=False, embed=None)
    assert state(model).counts == {"eager calls": 3, "captures": 1, "replays": 2}
    model(images)  # gradients
    with support.OpLog() as ops_log, torch.no_grad():
        model(images)
    assert ops_log.fused == 113 + 6  # the last convolutions of the head's branches
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    with torch.no_grad():
        model(images)
    handle.remove()
    model.train()
    with torch.no_grad():
        model(images)
    assert state(model).counts["replays"] == 2


def test_compiled_calls_are_captured_and_replayed(tiny):
    model = graphed(tiny)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(tensors(warm(compiled, X, 5)), stock_output(model, X))
    assert state(model).counts["replays"] == 2


def test_traced_calls_are_stock(tiny):
    model = graphed(tiny)
    warm(model, X, 4)
    with torch.no_grad():
        traced = torch.jit.trace(model, X, strict=False, check_trace=False)
    assert "yolo12_fastconv::" not in str(traced.inlined_graph)
    assert state(model).counts["replays"] == 1


def test_hooks_prevent_capture_and_say_so_once(tiny, log):
    model = graphed(tiny)
    calls = []
    handle = model.model[0].conv.register_forward_hook(lambda *args: calls.append(1))
    warm(model, X, 9)
    assert len(calls) == 9 and not state(model).entries
    assert sum("no CUDA graph" in r.getMessage() for r in log.records) == 1
    handle.remove()
    warm(model, X, 4)
    assert state(model).counts["replays"] == 1


def test_the_models_own_hooks_are_called_around_replays(tiny):
    model = graphed(tiny)
    calls = []
    model.register_forward_hook(lambda *args: calls.append(1))
    warm(model, X, 5)
    assert len(calls) == 5 and state(model).counts["replays"] == 2


def test_running_out_of_memory_frees_the_graphs_and_tries_again(tiny, monkeypatch):
    model = graphed(tiny)
    warm(model, torch.rand(1, 3, 32, 32))
    other = torch.rand(1, 3, 32, 40)
    expected = stock_output(model, other)
    stock, room = ClassificationModel.forward, []

    def forward(self, x):
        room.append(not state(model).entries)
        if not room[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stock(self, x)

    monkeypatch.setattr(ClassificationModel, "forward", forward)
    for a, b in zip(tensors(warm(model, other, 1)), tensors(expected), strict=True):
        torch.testing.assert_close(a, b)
    assert room == [False, True] and state(model).counts["dropped"] == 1
    # Without graphs there is nothing to free: the caller is told.
    room.clear()
    monkeypatch.setattr(
        ClassificationModel,
        "forward",
        lambda *a: room.append(1) or (_ for _ in ()).throw(torch.OutOfMemoryError("out")),
    )
    with pytest.raises(torch.OutOfMemoryError):
        warm(model, other, 1)
    assert len(room) == 1


def test_failed_captures_fall_back_with_one_line(tiny, log, monkeypatch):
    def fail(self, function, x):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(FakeBackend, "capture", fail)
    model = graphed(tiny)
    for size in (32, 40, 48, 56, 64):
        x = torch.rand(1, 3, size, size)
        for _ in range(7):
            assert_equal(warm(model, x, 1), stock_output(model, x))
    lines = [r.getMessage() for r in log.records if "no CUDA graph" in r.getMessage()]
    assert lines == [
        "yolo12_fastconv: no CUDA graph, calls run without: RuntimeError: operation not permitted when stream is "
        "capturing"
    ]
    assert state(model).failures == 3 and state(model).structure is None
    assert "not captured: RuntimeError" in graphs.describe(model)


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (lambda model, x: x, "its input or a weight"),
        (lambda model, x: [x[:1]], "its input or a weight"),
        (lambda model, x: {"w": model.model[0].conv.weight.detach()}, "its input or a weight"),
        (lambda model, x: {1, 2}, "returns a set"),
        (lambda model, x: torch.empty(2, device="meta"), "on meta"),
    ],
)
def test_outputs_that_cannot_be_copied_are_not_captured(tiny, monkeypatch, result, reason):
    monkeypatch.setattr(ClassificationModel, "forward", lambda self, x: result(self, x))
    model = graphed(tiny)
    warm(model, X, 5)
    assert not state(model).entries and reason in graphs.describe(model)


def test_a_model_that_changes_itself_is_not_captured(tiny, monkeypatch):
    def forward(self, x):
        self.model[0].calls = getattr(self.model[0], "calls", 0) + 1
        return x * self.model[0].calls

    monkeypatch.setattr(ClassificationModel, "forward", forward)
    model = graphed(tiny)
    for call in range(3):
        assert torch.equal(warm(model, X, 1), X * (call + 1))
    assert not state(model).entries and "changes attributes" in graphs.describe(model)


# ----------------------------------------------------------------------------------------------------------- outputs


def test_shared_outputs_stay_shared():
    base = torch.arange(24.0).reshape(4, 6)
    other = torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    nest = (base[:, 1:3], {"a": base[1:, 2:], "b": [other, other], "c": None}, 3)
    copies = _graph_outputs.Outputs(nest, base.device, set())()
    assert torch.equal(copies[0], nest[0]) and torch.equal(copies[1]["a"], nest[1]["a"]) and copies[2] == 3
    assert copies[0].stride() == nest[0].stride()
    copies[0].fill_(-1)
    assert (copies[1]["a"][:, 0] == -1).all() and not (base == -1).any()
    first, second = copies[1]["b"]
    assert first is second and first.stride() == other.stride() and torch.equal(first, other)
    assert first.data_ptr() != other.data_ptr() and copies[1]["c"] is None


def test_late_outputs_are_made_for_each_call():
    kept, runs = torch.rand(2, 3), []

    def function():
        runs.append(torch.full((2, 2), float(len(runs))))
        return [runs[-1], runs[-1] + 10]

    with _late.noted() as late:
        first, second = _late.call(function, [(2, 2), (2, 2)])
    assert not runs and _late.call(function, [(2, 2), (2, 2)])[0] is runs[0]
    outputs = _graph_outputs.Outputs((second, {"kept": kept, "first": first}), kept.device, set(), late)
    for call in (1, 2):
        results = outputs()
        assert results[1]["first"] is runs[call] and torch.equal(results[0], runs[call] + 10)
        assert torch.equal(results[1]["kept"], kept) and results[1]["kept"] is not kept
    # What was computed of a result that is yet to come is no output.
    with pytest.raises(_graph_outputs.Uncapturable, match="meta"):
        _graph_outputs.Outputs((first + 1,), kept.device, set(), late)
    (only,) = _graph_outputs.Outputs((first,), kept.device, set(), late)()
    assert only is runs[3]


def test_slices_come_dense():
    wide = torch.rand(2, 8, 4, 5).contiguous(memory_format=torch.channels_last)
    (copy_,) = _graph_outputs.Outputs((wide[:, 2:5],), wide.device, set())()
    assert torch.equal(copy_, wide[:, 2:5]) and copy_.is_contiguous(memory_format=torch.channels_last)


# ------------------------------------------------------------------------------------------------------------- bounds


def test_graphs_are_bounded_and_the_least_recently_used_goes(tiny):
    model = graphed(tiny)
    keep = torch.rand(1, 3, 32, 32)
    warm(model, keep, 4)
    for width in range(33, 33 + graphs.MAX_GRAPHS + 3):
        warm(model, torch.rand(1, 3, 8, width), 16)
        warm(model, keep, 1)
        assert len(state(model).entries) <= graphs.MAX_GRAPHS
    assert state(model).counts["evicted"] == 4
    replays = state(model).counts["replays"]
    assert_equal(warm(model, keep, 1), stock_output(model, keep))
    assert state(model).counts["replays"] == replays + 1


def test_many_shapes_make_captures_rare(tiny):
    """100 shapes, four calls each: nothing comes back, so captures stop paying and stop happening."""
    model = graphed(tiny)
    for width in range(8, 108):
        x = torch.rand(1, 3, 8, width)
        y = warm(model, x, 4)
    assert_equal(y, stock_output(model, x))
    assert len(state(model).entries) <= graphs.MAX_GRAPHS and len(state(model).calls) <= 256
    assert state(model).counts["captures"] <= 12


def test_threads(yolo12n):
    model = graphed(yolo12n)
    inputs = [torch.rand(1, 3, 64, 32 * (1 + i % 3)) for i in range(8)]
    expected = [stock_output(model, x) for x in inputs]
    errors = []

    def work(index):
        try:
            for _ in range(6):
                assert_equal(warm(model, inputs[index], 1), expected[index])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors and state(model).counts["captures"] == 3


# --------------------------------------------------------------------------------------------- pickles, copies, undo


def names_in(data: bytes) -> set[str]:
    found = set()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        for _, argument, _ in pickletools.genops(archive.read(name)):
            found.add(str(argument))
    return found


TASKS = ["yolo12n.yaml", "yolo12n-seg.yaml", "yolo12n-pose.yaml", "yolo12n-obb.yaml", "yolo12n-cls.yaml"]


@pytest.mark.parametrize("cfg", TASKS)
def test_pickles_are_stock_and_copies_have_graphs(cfg):
    model = support.build(cfg)
    stock = type(model)
    graphed(model)
    assert type(model).__name__ == stock.__name__
    x = torch.rand(1, 3, 64, 64)
    expected = tensors(warm(model, x, 4))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert not any("yolo12_fastconv" in name or "_fc_" in name for name in names_in(buffer.getvalue()))
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert type(loaded) is stock and set(vars(loaded)) == set(vars(model)) - {"_fc_graphs"}
    with torch.no_grad():
        for a, b in zip(tensors(loaded(x)), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for protocol in (2, 4, 5):
        assert type(pickle.loads(pickle.dumps(model, protocol))) is stock
    for twin in (copy.deepcopy(model), copy.copy(model)):
        assert type(twin) is type(model) and "_fc_graphs" not in vars(twin)
        assert_equal(warm(twin, x, 4), expected)
        assert state(twin) is not state(model) and state(twin).counts["replays"] == 1
    with torch.no_grad():
        for p in copy.deepcopy(model).parameters():
            p.zero_()
    assert_equal(warm(model, x, 1), expected)


def test_safe_loading(tiny):
    graphed(tiny)
    buffer = io.BytesIO()
    torch.save(tiny, buffer)
    allowed = [type(m) for m in copy.deepcopy(unpatch_model(tiny)).modules()]
    with torch.serialization.safe_globals([*allowed, getattr, set, Conv]):
        loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    assert type(loaded) is ClassificationModel


def test_unpatching_is_exact(tiny):
    before = set(vars(tiny))
    patch_model(tiny, cuda_graph=True)
    warm(tiny, X, 4)
    unpatch_model(tiny)
    assert type(tiny) is ClassificationModel and set(vars(tiny)) == before
    patch_model(tiny, cuda_graph=True)
    patch_model(tiny)
    assert not graphs.enabled(tiny)
    unpatch_model(tiny)
    assert type(tiny) is ClassificationModel and set(vars(tiny)) == before


def test_shallow_replicas_do_not_use_anothers_graphs(tiny):
    model = graphed(tiny)
    warm(model, X, 4)
    replica = model._replicate_for_data_parallel()
    replica.model = copy.deepcopy(model.model)
    conv(replica).weight.data.mul_(3)
    replica._modules = dict(replica._modules)
    assert_equal(warm(replica, X, 1), stock_output(replica, X))
    assert state(model).counts["replays"] == 1 and state(replica) is not state(model)


def test_what_is_no_task_model_is_refused():
    block = nn.Sequential(Conv(3, 8), Conv(8, 8))
    with pytest.raises(PatchError, match="cuda_graph=True is not possible: Sequential is not one of"):
        patch_model(block, cuda_graph=True)
    assert type(block[0]) is Conv


def test_report(tiny, log):
    patch_model(tiny, cuda_graph=True)
    assert "CUDA graphs on" in log.text
    assert "CUDA graphs: none captured yet" in str(patch_report(tiny))
    warm(tiny, X, 4)
    report = patch_report(tiny)
    assert "CUDA graphs: 1 of at most 8 captured (2x3x32x32 float32); 3 eager calls" in report.summary()
    assert report.cuda_graphs in report.to_json()
    unpatch_model(tiny)
    assert "CUDA graph" not in str(patch_report(tiny))


# ------------------------------------------------------------------------------------------------------- YOLO objects


def test_yolo_objects(tmp_path):
    import numpy as np

    yolo = patch_model(YOLO("yolo12n.yaml"), cuda_graph=True)
    assert isinstance(yolo.model, DetectionModel) and graphs.enabled(yolo.model) and yolo.task == "detect"
    picture = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    for _ in range(5):
        yolo.predict(picture, imgsz=64, device="cpu", verbose=False, save=False)
    served = yolo.predictor.model.model
    assert graphs.enabled(served) and served is not yolo.model
    assert state(served).counts["replays"] >= 2
    assert yolo._fastconv_options == {"cuda_graph": True}
    yolo.save(tmp_path / "saved.pt")
    again = YOLO(tmp_path / "saved.pt")
    assert type(again.model) is DetectionModel and not graphs.enabled(again.model)
    yolo.predictor = None  # holds a lock
    restored = pickle.loads(pickle.dumps(yolo))
    assert graphs.enabled(restored.model)
    yolo.load(tmp_path / "saved.pt")
    assert graphs.enabled(yolo.model)
    fast = training.fast_trainer(training.DetectionTrainer, **yolo._fastconv_options)
    assert fast.fastconv_options == {"cuda_graph": True}
    unpatch_model(yolo)
    assert type(yolo.model) is DetectionModel


def test_attributes_compared_cover_the_inner_ones(tiny):
    """The comparison must notice any attribute of any inner module."""
    model = graphed(tiny)
    warm(model, X, 4)
    structure = state(model).structure
    assert structure.unchanged()
    for module in list(model.modules())[1:]:
        for name in sorted(set(vars(module)) - _graph_state.BOOKKEEPING):
            before = vars(module)[name]
            vars(module)[name] = object()
            assert not structure.unchanged(), (type(module), name)
            vars(module)[name] = before
    assert structure.unchanged()
    assert operator.is_(structure, state(model).structure)
