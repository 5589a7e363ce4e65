"""Fast heads, Concat and Upsample on a CPU: equal to stock, in every form in which a head is called or left alone."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import OpLog, tensors
from torch import nn

from yolo12_fastconv import _late, heads, neck, registry
from yolo12_fastconv.patching import patch_modules, unpatch_modules

from ultralytics import YOLO  # isort: skip
from ultralytics.nn.modules.conv import Concat  # isort: skip
from ultralytics.nn.modules.head import OBB, Detect, Pose, Segment  # isort: skip

NAMES = ["Detect", "Segment", "Pose", "OBB", "Concat", "Upsample"]
CONFIGS = ["yolo12n.yaml", "yolo12n-seg.yaml", "yolo12n-pose.yaml", "yolo12n-obb.yaml"]


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    """A stock model, and a copy with fast heads, concats and upsamplings alone."""
    torch.manual_seed(0)
    stock = YOLO(request.param).model.eval()
    return stock, swapped(stock)


def swapped(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    assert patch_modules(twin, include=NAMES).fused
    return twin


def form(output):
    """Keys, types, shapes, dtypes and strides of a nested output."""
    if isinstance(output, torch.Tensor):
        return output.shape, output.dtype, output.stride()
    if isinstance(output, dict):
        assert type(output) is dict
        return {name: form(value) for name, value in output.items()}
    return type(output), [form(value) for value in output]


def assert_equal(ours, stock):
    assert form(ours) == form(stock)
    assert all(torch.equal(a, b) for a, b in zip(tensors(ours), tensors(stock), strict=True))


def small_head(**changes) -> Detect:
    torch.manual_seed(0)
    head = Detect(nc=3, ch=(8, 16)).eval()
    head.stride = torch.tensor([8.0, 16.0])
    for name, value in changes.items():
        setattr(head, name, value)
    return head


def features(batch: int = 2, h: int = 4, w: int = 6) -> list[torch.Tensor]:
    return [torch.randn(batch, 8, h, w), torch.randn(batch, 16, h // 2, w // 2)]


def decodes(module: nn.Module, *inputs) -> bool:
    with OpLog() as log, torch.no_grad():
        module(*inputs)
    return "yolo12_fastconv.detect_decode.default" in log.names


@torch.no_grad()
def test_inference_equals_stock_bit_for_bit(pair):
    stock, fast = pair
    for size in ((64, 96), (96, 64), (64, 96), (32, 32)):
        x = torch.rand(2, 3, *size)
        with OpLog() as log:
            ours = fast(x)
        assert_equal(ours, stock(x))
        assert log.names.count("yolo12_fastconv.concat_channels.default") == 6
        is_obb = type(stock.model[-1]) is OBB
        assert log.names.count("yolo12_fastconv.detect_decode.default") == (not is_obb)
        for name in ("anchors", "strides"):
            assert torch.equal(getattr(fast.model[-1], name), getattr(stock.model[-1], name))
        assert fast.model[-1].shape == stock.model[-1].shape


def test_training_equals_stock(pair):
    stock, fast = copy.deepcopy(pair[0]).train(), swapped(pair[0]).train()
    x = torch.rand(2, 3, 64, 64)
    outputs = []
    for model in (fast, stock):
        torch.manual_seed(0)
        output = model(x)
        sum((t * torch.randn_like(t)).sum() for t in tensors(output)).backward()
        outputs.append(output)
    assert_equal(*outputs)
    for (name, ours), theirs in zip(fast.named_parameters(), stock.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_pickles_are_stock_and_copies_are_fast(pair):
    _stock, fast = pair
    content = pickle.dumps(fast)
    assert b"yolo12_fastconv" not in content
    again = pickle.loads(content)
    twin = copy.deepcopy(fast)
    for a, b, c in zip(fast.modules(), again.modules(), twin.modules(), strict=True):
        assert type(b) is registry.UNFUSED.get(type(a), type(a))
        assert type(c) is type(a)
        assert not any(key.startswith("_fc_") for key in vars(b))
    unpatch_modules(twin)
    assert not any(type(module) in registry.UNFUSED for module in twin.modules())
    assert not any(key.startswith("_fc_") for module in twin.modules() for key in vars(module))


@pytest.mark.parametrize("stock", [nn.Upsample, Concat, Detect, Segment, Pose, OBB])
def test_the_installed_classes_compute_what_was_expected(stock):
    registry._formula_problem.cache_clear()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert registry.formula_problem(stock) is None
        assert torch.get_num_threads() == 3, "put back after the check"
    finally:
        torch.set_num_threads(before)


def test_a_head_that_computes_something_else_stays_stock(monkeypatch):
    def forward(self, x):
        preds = self.forward_head(x, **self.one2many)
        return preds if self.training else (self._inference(preds) + 1, preds)

    monkeypatch.setattr(Detect, "forward", forward)
    plan = patch_modules(small_head(), include=NAMES)
    assert not plan.fused and "computes something else" in str(plan.unfused)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda head: head.dfl.register_forward_hook(lambda *_: None), "dfl has hooks"),
        (lambda head: head.dfl.conv.register_forward_hook(lambda *_: None), "dfl.conv has hooks"),
        (lambda head: setattr(head, "reg_max", 20), "20 bins"),
        (lambda head: setattr(head, "one2one_cv2", head.cv2), "one-to-one"),
        (lambda head: setattr(head, "decode_bboxes", head.decode_bboxes), "its own decode_bboxes"),
        (lambda head: setattr(head, "dfl", nn.Identity()), "dfl is Identity"),
    ],
)
def test_unknown_structure_is_stock(change, reason):
    head = small_head()
    change(head)
    assert reason in heads.FastDetect.structure_problem(head)
    before = small_head()
    patch_modules(before, include=NAMES)
    assert type(before) is heads.FastDetect
    change(before)
    if reason.startswith(("dfl.conv has", "dfl has", "its own")):  # those that stock can run with
        x = features()
        assert not decodes(before, x)
        assert_equal(before(x), small_head()(x))


@torch.no_grad()
def test_hooks_on_last_convolutions_run():
    head = swapped(small_head())
    seen = []
    head.cv2[0][2].register_forward_hook(lambda *_: seen.append(1))
    head.cv3[1].register_forward_hook(lambda *_: seen.append(2))
    x = features()
    assert decodes(head, x)
    assert seen == [1, 2]
    assert_equal(head(x), small_head()(x))


@torch.no_grad()
@pytest.mark.parametrize("changes", [{"xyxy": True}, {"export": True}, {"dynamic": True}])
def test_flags_of_the_head(changes):
    head = small_head(**changes)
    x = features()
    fast = swapped(head)
    assert decodes(fast, x) is ("export" not in changes)
    assert_equal(fast(x), head(x))


@torch.no_grad()
def test_decoding_can_come_late(pair):
    """What a capture notes is what an eager call computes; heads that compute with it decode at once."""
    stock, fast = pair
    x = torch.rand(2, 3, 64, 96)
    expected = tensors(fast(x))
    with _late.noted() as late:
        y = tensors(fast(x))
    head = type(fast.model[-1])
    assert len(late.calls) == (head is heads.FastDetect)
    for function, results in late.calls:
        made = function()
        for place, result in zip(results, made, strict=True):
            index = next(i for i, t in enumerate(y) if t is place)
            assert place.is_meta and place.shape == result.shape
            y[index] = result
    assert_equal(y, expected)
    assert_equal(tensors(fast(x)), tensors(stock(x)))  # outside nothing is noted


@torch.no_grad()
@pytest.mark.parametrize("reg_max", [1, 8, 16])
@pytest.mark.parametrize("nc", [1, 3, 80])
def test_bins_and_classes(reg_max, nc):
    torch.manual_seed(0)
    head = Detect(nc=nc, reg_max=reg_max, ch=(8, 16)).eval()
    head.stride = torch.tensor([8.0, 16.0])
    fast = swapped(head)
    for x in (features(), features(1, 2, 26)):
        assert decodes(fast, x)
        assert_equal(fast(x), head(x))


def test_eval_with_gradients_is_stock():
    head = small_head()
    fast = swapped(head)
    x = [t.requires_grad_() for t in features()]
    y = fast(x)
    assert_equal(y, head(x))
    y[0].sum().backward()
    assert x[0].grad is not None


@torch.no_grad()
def test_anchors_of_another_dtype_are_left_to_stock():
    head = swapped(small_head())
    x = features()
    head(x)
    head.anchors, head.strides = head.anchors.double(), head.strides.double()
    assert not decodes(head, x) and head(x)[0].dtype is torch.float64


@torch.no_grad()
def test_autocast_keeps_stocks_types():
    head = small_head()
    fast, x = swapped(head), features()
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(fast(x), head(x))


@torch.no_grad()
def test_a_direct_call_of_forward_head_is_stocks():
    head = small_head()
    fast, x = swapped(head), features()
    assert_equal(fast.forward_head(x, **fast.one2many), head.forward_head(x, **head.one2many))
    assert fast.forward_head(x) == {}


def test_export_traces_standard_operators():
    head = swapped(small_head(export=True))
    head(features())  # makes the anchors, which else are traced
    graph = str(torch.jit.trace(head, (features(),)).inlined_graph)
    assert "yolo12_fastconv::" not in graph and "aten::softmax" in graph


@pytest.mark.parametrize(
    "layer",
    [nn.Upsample(scale_factor=3), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Upsample(size=(8, 8))],
)
def test_other_upsamplings_stay_stock(layer):
    assert not patch_modules(layer).fused


def test_concat_of_what_the_op_does_not_take():
    layer, stock = Concat(1), Concat(1)
    patch_modules(layer)
    assert type(layer) is neck.FastConcat
    for x in (
        [torch.zeros(2, 3), torch.ones(2, 4)],
        [torch.zeros(2, 3, 4, 4, dtype=torch.int32)] * 2,
        [torch.zeros(1, 3, 4, 4).half(), torch.zeros(1, 3, 4, 4).bfloat16()],
        [torch.zeros(1, 3, 4, 4), torch.zeros(1, 2, 4, 4).double()],
    ):
        assert_equal(layer(x), stock(x))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        layer([torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 4, 5)])
    assert not patch_modules(Concat(2)).fused


def test_who_reads_an_upsampled_map():
    model = YOLO("yolo12n.yaml").model
    patch_modules(model)
    ups = [layer for layer in model.model if type(layer) is neck.FastUpsample]
    assert len(ups) == 2 and all(neck._all_readers_round(up) for up in ups)
    assert not any(neck._all_readers_round(copy.deepcopy(up)) for up in ups)
    twin = copy.deepcopy(model)
    assert not any(neck._all_readers_round(twin.model[up.i]) for up in ups)
    patch_modules(twin)
    assert all(neck._all_readers_round(twin.model[up.i]) for up in ups)

    first = ups[0]
    for watched in (
        first,
        model.model[10],
        model.model[11],
        model.model[11].cv1,
        model.model[11].cv1.conv,
        model.model,
    ):
        handle = watched.register_forward_hook(lambda *_: None)
        assert not neck._all_readers_round(first)
        handle.remove()
        assert neck._all_readers_round(first)
    block = model.model[11]
    block.gamma = nn.Parameter(torch.ones(1))
    assert not neck._all_readers_round(first)
    block.gamma = None
    model.model[11] = nn.Identity()
    model.model[11].f, model.model[11].i = -1, 11
    assert not neck._all_readers_round(first)
    model.model[11] = block
    model.model[-1].f = [14, 17, 20, 10]  # the head reads the concat too
    assert not neck._all_readers_round(first) and neck._all_readers_round(ups[1])
