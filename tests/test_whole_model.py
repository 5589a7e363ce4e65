"""Patched task models under torch.compile in inference: one op, the outputs of an uncompiled call, changes followed."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import support
import torch
from support import assert_same, tensors, uneven
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from ultralytics import YOLO
from ultralytics.nn.tasks import DetectionModel, OBBModel, PoseModel, SegmentationModel

from yolo12_fastconv import graphs, patch_model, unpatch_model, whole_model
from yolo12_fastconv.blocks import FallbackError
from yolo12_fastconv.patching import patch_modules

OP = "yolo12_fastconv.run_model.default"
CFG = {  # a detector that builds in milliseconds
    "nc": 3,
    "kpt_shape": [2, 3],
    "scale": "n",
    "scales": {"n": [1.0, 1.0, 1024]},
    "backbone": [
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
        [-1, 1, "C3k2", [32, False]],
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "A2C2f", [64, True, 1]],
    ],
    "head": [
        [-1, 1, "nn.Upsample", [None, 2, "nearest"]],
        [[-1, 2], 1, "Concat", [1]],
        [-1, 1, "C3k2", [32, False]],
        [[7, 4], 1, "Detect", ["nc"]],
    ],
}
TASKS = {
    "detect": (DetectionModel, ["Detect", ["nc"]]),
    "segment": (SegmentationModel, ["Segment", ["nc", 8, 16]]),
    "pose": (PoseModel, ["Pose", ["nc", "kpt_shape"]]),
    "obb": (OBBModel, ["OBB", ["nc", 1]]),
}


def build(task: str = "detect") -> nn.Module:
    """A stock model of `task`, in evaluation mode, whose head has made its anchors for (2, 3, 64, 64)."""
    kind, head = TASKS[task]
    cfg = copy.deepcopy(CFG)
    cfg["head"][-1] = [[7, 4], 1, *head]
    torch.manual_seed(0)
    return uneven(kind(cfg, verbose=False)).eval()


@pytest.fixture
def model():
    return build()


@pytest.fixture
def x():
    return torch.rand(2, 3, 64, 64)


@pytest.fixture(autouse=True)
def without_gradients():
    """No graphs or counters of other tests either."""
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


class Compiled:
    """A model under ``torch.compile(fullgraph=True)`` and the ops of its latest graph."""

    def __init__(self, model: nn.Module, backend: str = "eager", **options) -> None:
        self.counter = CompileCounterWithBackend(backend)
        self.program = torch.compile(model, backend=self.counter, fullgraph=True, **options)

    def __call__(self, x, *args, **kwargs):
        return self.program(x, *args, **kwargs)

    @property
    def frames(self) -> int:
        return self.counter.frame_count

    def ops(self) -> list[str]:
        nodes = self.counter.graphs[-1].graph.nodes
        found = [str(node.target) for node in nodes if node.op == "call_function"]
        return [name for name in found if name.startswith("yolo12_fastconv")]


def structure(outputs):
    if isinstance(outputs, dict):
        return {key: structure(value) for key, value in outputs.items()}
    if isinstance(outputs, list | tuple):
        return type(outputs)(structure(value) for value in outputs)
    return type(outputs)


def assert_equal(ours, expected):
    assert structure(ours) == structure(expected)
    assert_same(tensors(ours), tensors(expected), 0)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
def test_one_op_with_the_outputs_of_an_uncompiled_call(task, fused, x):
    model = patch_model(build(task))
    if fused:
        model.fuse(verbose=False)
    program = Compiled(model, "aot_eager")
    # Dynamo could not trace how a head makes anchors: here nothing has to be called before.
    for seed in range(3):
        picture = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed))
        assert_equal(program(picture), model(picture))
    assert program.ops() == [OP] and program.frames == 1 and not counters["graph_break"]


def test_classifier(tiny):
    model, x = patch_model(tiny), torch.rand(2, 3, 32, 32)
    program = Compiled(model)
    assert_equal(program(x), model(x))
    assert program.ops() == [OP]


def test_inductor(model, x):
    fast = patch_model(model)
    program = torch.compile(fast, fullgraph=True)
    for picture in (x, torch.rand_like(x)):
        assert_equal(program(picture), fast(picture))
    assert_equal(torch.compile(lambda t: fast(t / 2 + 0.25)[0] * 2)(x), fast(x / 2 + 0.25)[0] * 2)


def test_channels_last(model, x):
    fast = patch_model(model).to(memory_format=torch.channels_last)
    program = Compiled(fast, "aot_eager")
    for picture in (x, x.contiguous(memory_format=torch.channels_last)):
        assert_equal(program(picture), fast(picture))


def test_shapes_become_symbolic(model):
    fast = patch_model(model)
    program = Compiled(fast, "aot_eager")
    for size in [(2, 3, 64, 64), (3, 3, 96, 32), (4, 3, 32, 64), (5, 3, 128, 96)]:
        picture = torch.rand(size)
        assert_equal(program(picture), fast(picture))
    assert program.frames == 2 and program.ops() == [OP]


def test_changes_in_place_take_effect(model, x):
    fast = patch_model(model)
    program = Compiled(fast)
    before = program(x)
    fast.model[0].conv.weight.mul_(1.5)
    fast.model[2].cv1.bn.running_mean.add_(0.1)
    fast.model[3].act = nn.ReLU()
    assert support.error(program(x)[1]["feats"][0], before[1]["feats"][0]) > 1e-3
    assert_equal(program(x), fast(x))
    calls = []
    fast.model[1].conv.register_forward_hook(lambda *args: calls.append(1))
    assert_equal(program(x), fast(x))
    assert len(calls) == 2 and program.frames == 1


def test_what_changes_the_outputs_is_compiled_again(model, x):
    fast = patch_model(model)
    program = Compiled(fast, "aot_eager")
    program(x)
    fast.model[-1].export = True
    assert_equal(program(x), fast(x))
    assert type(program(x)) is torch.Tensor and program.frames == 2
    fast.model[-1].export = False
    fast.double()
    assert_equal(program(x.double()), fast(x.double()))
    assert program.frames == 3
    with pytest.raises(RuntimeError):  # as uncompiled
        program(x)
    fast.float().train()
    program(x)
    assert OP not in program.ops()
    fast.eval()
    assert_equal(program(x), fast(x))


def test_autocast(model, x):
    fast = patch_model(model)
    program = Compiled(fast, "aot_eager")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            outputs = program(x)
            assert_equal(outputs, fast(x))
            assert outputs[1]["scores"].dtype is dtype
    assert_equal(program(x), fast(x))
    assert program.frames == 3 and program.ops() == [OP]


def test_inference_mode(model, x):
    fast = patch_model(model)
    with torch.inference_mode():
        program = Compiled(fast, "aot_eager")
        assert_equal(program(x), fast(x))
    assert program.ops() == [OP]


@pytest.mark.parametrize(
    "case", ["gradients", "training", "hook", "forward", "disabled", "part", "embed", "head"]
)
def test_everything_else_is_traced_as_ever(case, model, x, monkeypatch):
    model(x)  # makes the anchors, which Dynamo cannot trace
    fast = patch_model(model, include=["model.0", "model.1"] if case == "part" else None)
    kwargs = {}
    if case == "training":
        fast.train()
    elif case == "hook":
        fast.model[1].conv.register_forward_hook(lambda module, args, output: output * 2)
    elif case == "forward":
        fast.forward = fast._predict_once
    elif case == "disabled":
        monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    elif case == "embed":
        kwargs = {"embed": [3]}
    elif case == "head":
        fast.model[-1].__class__ = type("Own", (type(fast.model[-1]),), {})
    program = Compiled(fast)
    with torch.set_grad_enabled(case == "gradients"):
        found, expected = program(x, **kwargs), copy.deepcopy(fast)(x, **kwargs)
    assert structure(found) == structure(expected)
    assert_same([t.detach() for t in tensors(found)], [t.detach() for t in tensors(expected)], 1e-5)
    assert OP not in program.ops()


def test_exports_hold_standard_operators(model, x):
    model(x)
    program = torch.export.export(patch_model(model), (x,), strict=False)
    assert "yolo12_fastconv" not in str(program.graph)


def test_strict_mode_holds_at_every_call(model, x, monkeypatch):
    fast = patch_model(model)
    program = Compiled(fast)
    program(x)
    monkeypatch.setenv("YOLO12_FASTCONV_STRICT", "1")
    with pytest.raises(FallbackError):
        program(x)


def test_copies_are_models_of_their_own(model, x):
    fast = patch_model(model)
    program = Compiled(fast)
    expected = program(x)
    twin = copy.deepcopy(fast)
    twin.model[0].conv.weight.mul_(1.5)
    other = Compiled(twin)
    assert_equal(other(x), twin(x))
    assert other.ops() == [OP]
    assert support.error(other(x)[1]["feats"][0], expected[1]["feats"][0]) > 1e-3
    assert_equal(program(x), expected)
    shallow = copy.copy(fast)
    assert_equal(Compiled(shallow)(x), expected)
    assert_equal(Compiled(fast._replicate_for_data_parallel())(x), expected)


def test_patching_and_unpatching_after_compilation(model, x):
    model(x)
    program = Compiled(model)
    expected = program(x)
    patch_model(program.program)
    assert_equal(program(x), model(x))
    assert program.ops() == [OP]
    unpatch_model(program.program)
    assert type(model) is DetectionModel
    assert_equal(program(x), expected)
    assert program.frames == 2  # the first graph, of stock, fits again


def test_a_model_does_not_outlive_its_owner(model, x):
    fast = copy.deepcopy(patch_model(model))
    program = Compiled(fast)
    program(x)
    key, name, reference = id(fast), whole_model._ids[id(fast)].name, weakref.ref(fast)
    del fast, program
    torch._dynamo.reset()
    gc.collect()
    assert reference() is None and key not in whole_model._ids and name not in whole_model._names


def test_outputs_own_their_memory(model, x, monkeypatch):
    fast = patch_model(model)
    key = whole_model._describe(id(fast), x.dtype, None).split(" ")[0]

    def forward(self, x):
        whole = torch.arange(24.0).view(2, 12)
        return whole[:, :5], [whole[:, 5:], x], whole

    monkeypatch.setattr(type(fast), "forward", forward)
    outputs = whole_model._op(x, f"{key} t3 0 l2 1 2 3", None)
    addresses = [x.untyped_storage().data_ptr(), *(t.untyped_storage().data_ptr() for t in outputs)]
    assert len(set(addresses)) == 5
    assert torch.equal(torch.cat(outputs[:2], 1), outputs[3]) and torch.equal(outputs[2], x)
    with pytest.raises(RuntimeError, match="returns other tensors than when it was compiled"):
        whole_model._op(x, f"{key} t2 0 1", None)


def test_anchors_are_kept_by_shape(model):
    fast = patch_model(model)
    program, head = Compiled(fast), fast.model[-1]
    pictures = [torch.rand(1, 3, 64, 64), torch.rand(1, 3, 64, 96), torch.rand(1, 3, 64, 64)]
    made = []
    for picture in pictures:
        assert_equal(program(picture), copy.deepcopy(fast)(picture))
        made.append(head.anchors)
    assert made[0] is made[2] and made[0].shape == (2, 320) and made[1].shape == (2, 480)
    fast.model[-1] = copy.deepcopy(head)
    fast.model[-1].stride *= 2
    fast.model[-1].shape = None
    found = program(pictures[0])
    fast.model[-1].shape = None
    assert_equal(found, fast(pictures[0]))


def test_yolo_objects(x):
    yolo = YOLO("yolo12n.yaml")
    uneven(yolo.model)
    patch_model(yolo)
    picture = (x[0].permute(1, 2, 0) * 255).byte().numpy()
    expected = yolo.predict(picture, imgsz=64, conf=0.01, verbose=False)[0].boxes.data
    ran = []
    original = whole_model._Model.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_model._Model, "model", lambda self: ran.append(self.name) or original(self))
        found = yolo.predict(picture, imgsz=64, conf=0.01, verbose=False, compile=True)[0].boxes.data
    assert ran and torch.equal(found, expected)


def test_sub_modules_are_traced(model):
    """Blocks that no task model holds are ops of their own."""
    block = nn.Sequential(*list(model.model)[:2])
    assert patch_modules(block).patched == 2
    program = Compiled(block)
    program(torch.rand(2, 3, 16, 16))
    assert program.ops() == ["yolo12_fastconv.conv_bn_act.default"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("cuda_graph", [False, True], ids=["eager", "graph"])
def test_gpu_outputs_are_those_of_an_uncompiled_call(cuda, mode, cuda_graph):
    """Bit for bit, by the same kernels, with weights that change; whoever captures them."""
    fast = patch_model(build(), cuda_graph=cuda_graph).fuse(verbose=False).to(cuda).half()
    plain = copy.deepcopy(fast)
    graphs.disable(plain)
    program = torch.compile(fast, fullgraph=True, mode=mode, dynamic=False)
    for seed in range(12):
        width = 96 if seed % 3 == 1 else 64
        x = torch.rand(2, 3, 64, width, generator=torch.Generator().manual_seed(seed)).half().to(cuda)
        if seed == 6:
            for m in (fast, plain):
                m.model[0].conv.weight.mul_(1.5)
        assert_equal([t.clone() for t in tensors(program(x))], tensors(plain(x)))
