"""The patcher: what is swapped and what is kept, every order of operations, undo, report, switches, whole models."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import pickle
import sys
import types

import pytest
import support
import torch
from support import (
    assert_same,
    assert_same_buffers,
    assert_same_grads,
    fused_calls,
    patched_copy,
    step,
    tensors,
)
from torch import nn
from ultralytics import YOLO
from ultralytics.nn.modules.block import C2f
from ultralytics.nn.modules.conv import (
    Conv,
    Conv2,
    ConvTranspose,
    DWConv,
    Focus,
    GhostConv,
    LightConv,
    RepConv,
)
from ultralytics.nn.tasks import DetectionModel

from yolo12_fastconv import (
    PatchError,
    blocks,
    graphs,
    ops,
    patch_model,
    patch_report,
    patching,
    registry,
    unpatch_model,
)
from yolo12_fastconv.blocks import FastConv, FastDWConv
from yolo12_fastconv.patching import patch_modules


def counts(model: nn.Module) -> tuple[int, int]:
    """Numbers of patched blocks: plain, depthwise."""
    kinds = [type(m) for m in model.modules()]
    return kinds.count(FastConv), kinds.count(FastDWConv)


def describe(model: nn.Module) -> dict:
    """Everything that patching must leave alone: per module its class, attributes, flags and hooks, and all tensors."""
    facts: dict = {}
    for name, module in model.named_modules():
        values = {}
        for key, value in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                values[key] = {k: id(v) for k, v in value.items()}
            elif key == "forward":
                values[key] = (value.__func__, id(value.__self__))
            elif isinstance(value, dict):
                values[key] = dict(value)
            else:
                values[key] = value
        facts[name] = (type(module), values)
    facts["tensors"] = {
        k: (id(v), v.data_ptr(), v.stride(), v.dtype, v.requires_grad)
        for k, v in model.state_dict(keep_vars=True).items()
    }
    return facts


# ------------------------------------------------------------------------------------------------------- whole models


# Conv and DWConv blocks.
TASKS = {
    "yolo12n.yaml": (107, 6),
    "yolo12n-seg.yaml": (116, 6),
    "yolo12n-pose.yaml": (113, 6),
    "yolo12n-obb.yaml": (113, 6),
    "yolo12n-cls.yaml": (58, 0),
}


@pytest.mark.parametrize("cfg", TASKS)
def test_every_task_computes_as_stock(cfg):
    """Evaluation, training with gradients and buffers, and fused; in float64, where a difference is a fault."""
    model = support.build(cfg).double()
    fast = patched_copy(model)
    assert counts(fast) == TASKS[cfg]
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    # Heads run the last convolutions of their six branches as ops too.
    calls = sum(TASKS[cfg]) + (0 if "cls" in cfg else 6)
    with torch.no_grad():
        assert fused_calls(fast, x) == calls
        assert_same(tensors(fast(x)), tensors(model(x)), 1e-12)
    model.train(), fast.train()
    model.requires_grad_(True), fast.requires_grad_(True)
    stock, ours = step(model, x), step(fast, x)
    assert_same(ours[0], stock[0], 1e-11)
    assert_same_grads(ours[1], stock[1], 1e-7)
    assert_same_buffers(fast, model, 1e-11)
    for m in (model, fast):  # older releases fold in float32 only
        m.eval().float().fuse(verbose=False).double()
    with torch.no_grad():
        assert fused_calls(fast, x) == calls
        assert_same(tensors(fast(x)), tensors(model(x)), 1e-11)


@pytest.mark.parametrize("cfg", ["yolo12n.yaml", "yolo12l.yaml"])
def test_float32_outputs_equal_stock(cfg, images):
    model = support.build(cfg)
    fast = patched_copy(model)
    with torch.no_grad():
        assert_same(tensors(fast(images)), tensors(model(images)), 1e-5)
    assert sum(counts(fast)) == {"yolo12n.yaml": 113, "yolo12l.yaml": 205}[cfg]


SWAPS = {
    **blocks.FAST,
    **registry.FUSED,
    DetectionModel: graphs.mixed_class(graphs.TaskModel, DetectionModel),
}
OTHERS = [
    "yolo11n.yaml",
    "yolo26n.yaml",
    "yolov10n.yaml",
    "yolov9t.yaml",
    "yolov8n-ghost.yaml",
    "yolov6n.yaml",
    "yolov5n.yaml",
    "yolov8n-world.yaml",
]


@pytest.mark.parametrize("cfg", OTHERS)
def test_other_models_of_ultralytics_compute_as_stock(cfg):
    model = support.build(cfg).double()
    fast = patched_copy(model)
    for name, module in model.named_modules():
        mine = fast.get_submodule(name)
        kept = getattr(module, "one2one_cv2", None) is not None  # a head that needs no suppression
        swapped = SWAPS.get(type(module), type(module)) if name else type(fast)
        assert type(mine) is (type(module) if kept else swapped)
    assert type(fast) is graphs.mixed_class(graphs.TaskModel, type(model))
    x = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        assert fused_calls(fast, x) > 20
        assert_same(tensors(fast(x)), tensors(model(x)), 1e-11)
        for m in (model, fast):  # older releases fold in float32 only
            m.float().fuse(verbose=False).double()
        assert_same(tensors(fast(x)), tensors(model(x)), 1e-11)


@pytest.mark.parametrize("size", [(32, 640), (96, 64), (416, 32), (32, 32), (96, 64)])
def test_rectangular_pictures(size, yolo12n):
    fast = patched_copy(yolo12n)
    x = torch.rand(1, 3, *size)
    with torch.no_grad():
        assert_same(tensors(fast(x)), tensors(yolo12n(x)), 1e-5)


def test_activation_of_the_yaml(images, monkeypatch):
    monkeypatch.setattr(Conv, "default_act", Conv.default_act)  # older releases leave the YAML's there
    cfg = {**support.TINY, "activation": "torch.nn.ReLU()"}
    model = support.build(cfg)
    assert type(model.model[0].act) is nn.ReLU
    fast = patched_copy(model)
    fast.model[3].act, model.model[3].act = nn.Hardswish(), nn.Hardswish()
    with torch.no_grad():
        assert fused_calls(fast, images) == 25
        assert_same(tensors(fast(images)), tensors(model(images)), 1e-6)


def test_losses_weights_and_ema_follow_stock(yolo12n):
    """Five training steps with SGD and EMA; in float64, since in float32 rounding grows a thousandfold meanwhile."""
    from ultralytics.utils.torch_utils import ModelEMA

    def train(model: nn.Module) -> tuple[list[float], nn.Module]:
        ema = ModelEMA(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True)
        losses = []
        for seed in range(5):
            x = torch.rand(2, 3, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            loss = sum(output.square().mean() for output in tensors(model(x)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            losses.append(loss.item())
        return losses, ema.ema

    yolo12n.train().requires_grad_(True).double()
    fast = patched_copy(yolo12n)
    (stock_losses, stock_ema), (losses, ema) = train(yolo12n), train(fast)
    assert losses == pytest.approx(stock_losses, rel=1e-8)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-2)
    assert counts(ema) == (107, 6)
    for model, stock in ((fast, yolo12n), (ema, stock_ema)):
        for name, value in model.state_dict().items():
            assert support.error(value, stock.state_dict()[name]) < 1e-7, name


def test_profile_info_and_flops(yolo12n, images, log):
    from ultralytics.utils.torch_utils import get_flops

    fast = patched_copy(yolo12n)
    flops = get_flops(yolo12n, 64)
    assert get_flops(fast, 64) == flops > 0
    fast.info(verbose=True, imgsz=64)
    assert "YOLO12n summary" in log.text
    with torch.no_grad():
        fast.predict(images, profile=True)
        assert fused_calls(fast, images) == 113 + 6  # counting left no hooks behind
    fast.fuse(verbose=False), yolo12n.fuse(verbose=False)
    assert get_flops(fast, 64) == get_flops(yolo12n, 64) > 0


# --------------------------------------------------------------------------------------- orders of patch, fuse, undo


def act_patch(model):
    return patch_model(model)


def act_unpatch(model):
    return unpatch_model(model)


def act_fuse(model):
    return model.fuse(verbose=False)


def act_double(model):
    return model.double()


def act_bfloat16(model):
    return model.bfloat16()


def act_channels_last(model):
    return model.to(memory_format=torch.channels_last)


def act_deepcopy(model):
    return copy.deepcopy(model)


def act_pickle(model):
    return pickle.loads(pickle.dumps(model))


ACTIONS = (act_patch, act_unpatch, act_fuse, act_deepcopy, act_pickle)

THREE_BLOCKS = {
    "nc": 3,
    "scale": "n",
    "scales": {"n": [1.0, 1.0, 1024]},
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 1, "DWConv", [8, 3, 1]]],
    "head": [[-1, 1, "Classify", ["nc"]]],
}


def run_orders(model: nn.Module, actions: tuple) -> None:
    """Apply `actions` to a model, and to a stock twin all but patch and unpatch: same outputs and expected classes."""
    ours, stock = copy.deepcopy(model), copy.deepcopy(model)
    total, patched = len([m for m in model.modules() if isinstance(m, Conv)]), False
    for action in actions:
        ours = action(ours)
        if action not in (act_patch, act_unpatch):
            stock = action(stock)
        # Pickles hold stock blocks.
        patched = {act_patch: True, act_unpatch: False, act_pickle: False}.get(action, patched)
        assert sum(counts(ours)) == (total if patched else 0)
    weight = ours.model[0].conv.weight
    x = torch.rand(2, 3, 32, 32, dtype=weight.dtype)
    with torch.no_grad():
        assert fused_calls(ours, x) == (total if patched else 0)
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 0.02}[weight.dtype]
        assert_same(tensors(ours(x)), tensors(stock(x)), tolerance if patched else 0)
    assert ours.is_fused() == stock.is_fused()
    assert list(ours.state_dict()) == list(stock.state_dict())
    for (name, mine), theirs in zip(ours.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs) and mine.stride() == theirs.stride(), name


def test_every_order_of_operations():
    model = support.build(THREE_BLOCKS)
    for order in itertools.permutations(ACTIONS):
        run_orders(model, order)


@pytest.mark.parametrize(
    "actions",
    [
        (act_patch, act_bfloat16, act_fuse),
        (act_bfloat16, act_fuse, act_patch),
        (act_patch, act_channels_last, act_fuse, act_unpatch, act_patch),
        (act_fuse, act_channels_last, act_patch, act_deepcopy, act_deepcopy),
        (act_patch, act_fuse, act_fuse, act_patch),
        (act_fuse, act_patch, act_unpatch, act_double, act_patch, act_pickle, act_patch),
        (act_patch, act_fuse, act_deepcopy, act_unpatch, act_pickle),
    ],
    ids=lambda actions: "-".join(a.__name__[4:] for a in actions),
)
def test_longer_orders(actions, tiny):
    run_orders(tiny, actions)


@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
def test_unpatch_is_the_exact_inverse(fused, yolo12n, images):
    if fused:
        yolo12n.fuse(verbose=False)
    block = yolo12n.model[3]
    block.note = {"user": "attribute"}
    block.register_forward_hook(lambda *a: None)
    outputs = tensors(yolo12n(images))  # Detect keeps what it computes from the first map
    before = describe(yolo12n)
    class_facts = {
        cls: dict(vars(cls)) for cls in (Conv, DWConv, nn.Conv2d, nn.BatchNorm2d, nn.SiLU, nn.Module)
    }

    assert patch_model(yolo12n) is yolo12n
    patched = describe(yolo12n)
    assert patched["tensors"] == before["tensors"]
    for name, module in yolo12n.named_modules():
        (kind, values), (fast_kind, fast_values) = before[name], patched[name]
        assert fast_kind is type(module) is SWAPS.get(kind, kind)
        if fused and kind in blocks.FAST:  # the function behind the instance attribute is the fast class's
            values, fast_values = (
                {k: v for k, v in d.items() if k != "forward"} for d in (values, fast_values)
            )
        assert {key: value for key, value in fast_values.items() if not key.startswith("_fc_")} == values
    yolo12n(images)
    yolo12n.train(), yolo12n.eval()

    assert unpatch_model(yolo12n) is yolo12n
    assert describe(yolo12n) == before
    assert all(torch.equal(a, b) for a, b in zip(tensors(yolo12n(images)), outputs, strict=True))
    assert class_facts == {cls: dict(vars(cls)) for cls in class_facts}
    patch_model(yolo12n)
    assert counts(yolo12n) == (107, 6)


def test_nothing_of_ultralytics_or_torch_changes(tiny):
    """Module dictionaries and class dictionaries around patch, step, copy, pickle and unpatch."""
    torch_names = {
        "",
        ".nn",
        ".nn.functional",
        ".nn.modules.conv",
        ".nn.modules.batchnorm",
        ".optim",
        ".serialization",
    }
    modules = [
        module
        for name, module in sys.modules.items()
        if name.split(".")[0] == "ultralytics" or name in {f"torch{suffix}" for suffix in torch_names}
    ]

    def snapshot() -> dict:
        facts = {}
        for module in modules:
            for key, value in vars(module).items():
                if key.startswith("__") or isinstance(value, types.ModuleType):
                    continue
                facts[module.__name__, key] = id(value)
                if isinstance(value, type) and value.__module__ == module.__name__:
                    facts.update(
                        {
                            (module.__name__, key, k): id(v)
                            for k, v in vars(value).items()
                            if not k.startswith("__")
                        }
                    )
        facts["act"] = dict(vars(Conv.default_act))
        return facts

    other = copy.deepcopy(tiny)
    x = torch.rand(2, 3, 32, 32)
    step(copy.deepcopy(tiny).train(), x)  # whatever a first step imports
    before = snapshot()
    patch_model(tiny)
    step(tiny.train(), x)
    pickle.dumps(copy.deepcopy(tiny))
    assert sum(counts(other)) == 0 and sum(counts(support.build(support.TINY))) == 0
    unpatch_model(tiny)
    after = snapshot()
    assert {key for key in before if after.get(key) != before[key]} == set()
    assert set(after) == set(before)


def test_unpatch_after_training_leaves_a_stock_model(tiny):
    patch_model(tiny).train()
    x = torch.rand(2, 3, 32, 32)
    optimizer = torch.optim.SGD(tiny.parameters(), 0.1)
    step(tiny, x)
    optimizer.step()
    unpatch_model(tiny)
    twin = support.build(support.TINY, seed=1)
    twin.load_state_dict(tiny.state_dict())
    twin.eval(), tiny.eval()
    assert torch.equal(tiny(x)[1], twin(x)[1])
    assert {type(m).__module__.split(".")[0] for m in tiny.modules()} == {"torch", "ultralytics"}


def test_attributes_hooks_and_flags_survive(yolo12n):
    block = yolo12n.model[1]
    block.note = "mine"
    calls = []
    block.register_forward_pre_hook(lambda *a: calls.append(1))
    block.conv.weight.requires_grad_(False)
    block.train()
    tags = block.i, block.f, block.type, block.np
    patch_model(yolo12n)
    assert (block.i, block.f, block.type, block.np) == tags
    assert block.note == "mine" and block.training and not block.conv.weight.requires_grad
    yolo12n(torch.rand(2, 3, 64, 64))
    assert calls == [1]


# ------------------------------------------------------------------------------------------------- state and optimizer


def test_state_dict_is_live_and_has_stocks_keys(tiny):
    keys = list(tiny.state_dict())
    pointers = {k: v.data_ptr() for k, v in tiny.state_dict().items()}
    parameters = [name for name, _ in tiny.named_parameters()]
    patch_model(tiny)
    state = tiny.state_dict()
    assert list(state) == keys and [name for name, _ in tiny.named_parameters()] == parameters
    assert {k: v.data_ptr() for k, v in state.items()} == pointers
    step(tiny.train(), torch.rand(2, 3, 32, 32))
    torch.optim.SGD(tiny.parameters(), 0.1).step()
    assert all(torch.equal(state[k], v) for k, v in tiny.state_dict().items())


def test_loading_weights_transfers_as_between_stock_models(yolo12n, log):
    for nc in (80, 1, 67):
        reports = []
        other = DetectionModel("yolo12n.yaml", nc=nc, verbose=False)
        for source_patched, target_patched in itertools.product((False, True), repeat=2):
            source, target = copy.deepcopy(yolo12n), copy.deepcopy(other)
            for model, wanted in ((source, source_patched), (target, target_patched)):
                if wanted:
                    patch_modules(model)
            log.clear()
            target.load(source)
            reports.append([m for m in log.messages if "Transferred" in m])
        assert reports[0] and all(report == reports[0] for report in reports)


@pytest.mark.parametrize("name", ["SGD", "MuSGD", "AdamW"])
def test_optimizer_groups_are_stocks(name, yolo12n):
    from ultralytics.engine.trainer import BaseTrainer

    def groups(model: nn.Module) -> list[list[str]]:
        names = {id(p): n for n, p in model.named_parameters()}
        optimizer = BaseTrainer.build_optimizer(types.SimpleNamespace(args=None, data={}), model, name=name)
        return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    stock = groups(yolo12n)
    assert groups(patch_model(yolo12n)) == stock
    assert sum(map(len, stock)) == len(list(yolo12n.parameters()))


@pytest.mark.parametrize("frozen", ["nothing", "backbone", "all-but-biases"])
def test_the_same_parameters_get_gradients_as_in_stock(frozen, tiny):
    for name, parameter in tiny.named_parameters():
        parameter.requires_grad_(
            {"nothing": True, "backbone": name.startswith("model.5"), "all-but-biases": "bias" in name}[
                frozen
            ]
        )
    tiny = tiny.double().train()
    fast = patched_copy(tiny)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    stock, ours = step(tiny, x), step(fast, x)
    assert {n for n, g in ours[1].items() if g is None} == {n for n, g in stock[1].items() if g is None}
    assert_same_grads(ours[1], stock[1], 1e-8)


# ---------------------------------------------------------------------------------------------------- what is swapped


def look_alikes() -> nn.Module:
    return support.uneven(
        nn.Sequential(
            Conv(3, 8, 3), Conv2(8, 8, 3), RepConv(8, 8), GhostConv(8, 8), ConvTranspose(8, 8), Focus(8, 8),
            LightConv(8, 8, 3), C2f(8, 8), nn.Conv2d(8, 8, 1), DWConv(8, 8, 3),
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_look_alikes_keep_their_formula_and_are_reported(training):
    model = look_alikes().double().train(training)
    fast = patched_copy(model)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    stock, ours = step(model, x), step(fast, x)
    assert_same(ours[0], stock[0], 1e-12)
    assert_same_grads(ours[1], stock[1], 1e-9)
    assert type(fast[1]) is Conv2 and type(fast[2]) is RepConv and type(fast[2].conv1) is FastConv
    report = {row.name: row for row in patch_report(fast)}
    assert report["1"].reason == "Conv2 is a subclass of Conv with a forward of its own"
    assert report["4"].reason == "ConvTranspose, not a Conv block"
    assert report["8"].reason == "Conv2d, not a Conv block"
    assert report["0"].patched and report["2.conv1"].patched and report["9"].layer == "FastDWConv"
    # Every convolution is in one row, its own or its block's.
    convolutions = [m for m in fast.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(report) == len(convolutions) - 1  # Conv2 has two in one row


def test_user_subclasses_stay():
    class Scaled(Conv):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(3, 8), Conv(8, 8)).eval()
    summary = patch_modules(model)
    assert type(model[0]) is Scaled and summary.kept == {
        "0": "Scaled is a subclass of Conv with a forward of its own"
    }
    assert (summary.patched, summary.total) == (1, 2)


class Renamed(nn.Module):
    """A user's module with blocks under other names."""

    def __init__(self):
        super().__init__()
        self.entrance = Conv(3, 8, 3)
        self.rest = nn.ModuleDict({"a": DWConv(8, 8, 3), "b": nn.ModuleList([Conv(8, 4)])})

    def forward(self, x):
        return self.rest["b"][0](self.rest["a"](self.entrance(x)))


def test_blocks_are_found_by_type_whatever_their_names():
    model = Renamed().eval()
    x = torch.rand(1, 3, 8, 8)
    expected = model(x)
    assert counts(patch_model(model)) == (2, 1)
    assert_same([model(x)], [expected], 1e-6)


def test_a_single_block_and_shared_blocks():
    block = patch_model(Conv(3, 8).eval())
    assert type(block) is FastConv and fused_calls(block, torch.rand(1, 3, 4, 4)) == 1
    shared = Conv(8, 8)
    summary = patch_modules(nn.Sequential(shared, shared))
    assert summary.swapped == ["0"] and type(shared) is FastConv


@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
def test_a_forward_of_the_users_own_keeps_the_block(fused, tiny, images):
    if fused:
        tiny.fuse(verbose=False)
    block = tiny.model[3]
    stock = block.forward
    block.forward = lambda x: stock(x) * 2
    expected = tiny(images)[1]
    patch_model(tiny)
    assert type(block) is Conv
    assert torch.allclose(tiny(images)[1], expected, atol=1e-6)
    row = next(row for row in patch_report(tiny) if row.name == "model.3")
    assert row.reason == "has a forward of its own (an instance attribute)"


def test_a_forward_assigned_after_patching_wins_and_is_reported(tiny, images):
    patch_model(tiny)
    block = tiny.model[3]
    fast = block.forward
    block.forward = lambda x: fast(x) * 2
    doubled = tiny(images)[1]
    row = next(row for row in patch_report(tiny) if row.name == "model.3")
    assert row.patched and "forward of its own" in row.reason
    unpatch_model(tiny)
    assert type(block) is Conv and torch.allclose(tiny(images)[1], doubled, atol=1e-6)


def test_children_that_make_a_block_ineligible_are_named():
    extra, bare, no_act, odd_devices = Conv(3, 8), Conv(3, 8), Conv(3, 8), Conv(3, 8)
    extra.attention = nn.Linear(2, 2)
    del bare.bn
    del no_act.act
    odd_devices.bn.to("meta")
    model = nn.ModuleDict(
        {"extra": extra, "bare": bare, "no_act": no_act, "odd_devices": odd_devices, "good": Conv(3, 8)}
    )
    summary = patch_modules(model)
    assert summary.swapped == ["good"]
    assert summary.kept == {
        "extra": "has children besides conv, bn and act: attention",
        "bare": "has no child bn, and was not fused by Ultralytics",
        "no_act": "has no child act",
        "odd_devices": "its tensors are on different devices: cpu, meta",
    }


def test_patching_twice_changes_nothing_and_says_so(tiny, log):
    patch_model(tiny)
    assert "25 of 25 Conv blocks patched, 9 of 9 larger blocks fused (" in log.messages[-1]
    before = describe(tiny)
    patch_model(tiny)
    assert "25 of 25 Conv blocks patched, 0 of them new" in log.messages[-1]
    assert describe(tiny) == before
    assert len([m for m in log.messages if "patched" in m]) == 2


def test_include_and_exclude(tiny):
    def patched(**selection) -> list[str]:
        return patch_modules(copy.deepcopy(tiny), **selection).swapped

    everything = patched()
    assert patched(include="model.0") == ["model.0"]
    assert patched(include=["model.0", "model.1"]) == ["model.0", "model.1"]
    assert patched(include=(name for name in ("model.5*",))) == ["model.5.conv"]
    assert patched(exclude="model.*.*") == ["model.0", "model.1", "model.3"]
    without_mlp = [name for name in everything if name.startswith("model.4.") and "mlp" not in name]
    assert patched(include="model.4.*", exclude=["*.mlp.*"]) == without_mlp
    assert patched(include=lambda name, block: type(block) is DWConv) == ["model.1"]
    not_3x3 = [name for name in everything if tiny.get_submodule(name).conv.kernel_size != (3, 3)]
    assert patched(exclude=lambda name, block: name in everything and name not in not_3x3) == not_3x3
    assert patched(exclude=[]) == everything
    assert patched(include=[]) == []


def test_selection_is_reported_and_unused_patterns_are_warned_about(tiny, log):
    patch_model(tiny, exclude=["model.0", "backbone.*"])
    assert "exclude='backbone.*' matches no block" in log.text
    assert (
        "24 of 25 Conv blocks patched, 9 of 9 larger blocks fused; 1 kept: left out by include or exclude (model.0)"
        in log.text
    )
    patch_model(tiny)
    assert sum(counts(tiny)) == 25


@pytest.mark.parametrize("value", [3, ["model.0", 3], {1: 2}], ids=str)
@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_selection_of_a_wrong_type(argument, value, tiny):
    with pytest.raises(TypeError, match=rf"{argument} must be a name pattern, several, or a callable"):
        patch_model(tiny, **{argument: value})
    assert sum(counts(tiny)) == 0


@pytest.mark.parametrize("inplace", [True, False])
def test_inplace(inplace, tiny):
    result = patch_model(tiny, inplace=inplace)
    assert (result is tiny) == inplace
    assert sum(counts(result)) == 25 and sum(counts(tiny)) == (25 if inplace else 0)
    if not inplace:
        ours, theirs = ({p.data_ptr() for p in m.parameters()} for m in (result, tiny))
        assert not ours & theirs


# -------------------------------------------------------------------------------------------------- wrappers and inputs


def test_wrapped_models(tiny, images, tmp_path):
    expected = tiny(images)[1]
    for wrap in (
        nn.DataParallel,
        lambda m: torch.compile(m, backend="eager"),
        lambda m: torch.compile(nn.DataParallel(m), backend="eager"),
    ):
        model = copy.deepcopy(tiny)
        wrapped = wrap(model)
        assert patch_model(wrapped) is wrapped
        assert sum(counts(model)) == 25
        assert_same([model(images)[1]], [expected], 1e-6)
        assert len([row for row in patch_report(wrapped) if row.patched]) == 25
        assert patch_report(wrapped).rows[0].name == "model.0"
        unpatch_model(wrapped)
        assert sum(counts(model)) == 0

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(tiny))
        patch_model(parallel, include="model.0")
        assert type(parallel.module.model[0]) is FastConv
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_models_that_cannot_be_patched():
    with pytest.raises(PatchError, match="Linear holds no Ultralytics Conv block"):
        patch_model(nn.Linear(2, 2))
    with pytest.raises(
        PatchError, match=r"none of the 1 Conv blocks of Conv2 can be patched: 1 kept: Conv2 is a subclass"
    ):
        patch_model(Conv2(3, 8, 3))
    with pytest.raises(TypeError, match=r"got str: 'yolo12n.pt'.*patch_model\(YOLO\('yolo12n.pt'\)\)"):
        patch_model("yolo12n.pt")
    for function in (patch_model, unpatch_model, patch_report):
        with pytest.raises(TypeError, match=r"model must be ultralytics.YOLO or a torch.nn.Module, got int"):
            function(3)
    traced = torch.jit.trace(Conv(3, 8).eval(), torch.rand(1, 3, 8, 8))
    with pytest.raises(PatchError, match="holds no Ultralytics Conv block"):
        patch_model(traced)


def test_exported_files_are_refused(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(b"")
    for function in (patch_model, unpatch_model, patch_report):
        with pytest.raises(PatchError, match=r"model.onnx.*no PyTorch layers: patch the .pt or .yaml model"):
            function(YOLO(path, task="detect"))


def test_unpatching_an_unpatched_model_says_so(tiny, log):
    before = describe(tiny)
    assert unpatch_model(tiny) is tiny
    assert "holds no patched block, nothing to undo" in log.messages[-1]
    assert describe(tiny) == before
    patch_model(tiny)
    unpatch_model(tiny)
    assert "25 Conv blocks are stock again" in log.messages[-1]


def test_yolo_objects(images):
    yolo = YOLO("yolo12n.yaml")
    stock = type(yolo)
    picture = (images[0].permute(1, 2, 0) * 255).byte().numpy()
    expected = yolo.predict(picture, imgsz=64, conf=0.0001, verbose=False)[0].boxes.data
    assert yolo.predictor is not None
    assert patch_model(yolo) is yolo
    assert isinstance(yolo, stock) and yolo.predictor is None
    assert counts(yolo.model) == (107, 6)
    boxes = yolo.predict(picture, imgsz=64, conf=0.0001, verbose=False)[0].boxes.data
    assert len(boxes) and torch.allclose(boxes, expected, atol=1e-3)
    assert sum(counts(yolo.predictor.model.model)) == 113
    assert counts(yolo.model) == (107, 6)  # the predictor fused a copy, or this model, patched

    unpatch_model(yolo)
    assert type(yolo) is stock and yolo.predictor is None and sum(counts(yolo.model)) == 0
    boxes = yolo.predict(picture, imgsz=64, conf=0.0001, verbose=False)[0].boxes.data
    assert torch.allclose(boxes, expected, atol=1e-3)


def test_copy_of_a_yolo_object(images):
    yolo = YOLO("yolo12n.yaml")
    picture = (images[0].permute(1, 2, 0) * 255).byte().numpy()
    yolo.predict(picture, imgsz=64, verbose=False)
    predictor = yolo.predictor
    twin = patch_model(yolo, inplace=False)
    assert twin is not yolo and twin.model is not yolo.model
    assert sum(counts(twin.model)) == 113 and sum(counts(yolo.model)) == 0
    assert yolo.predictor is predictor and twin.predictor is None
    assert type(yolo) is YOLO and isinstance(twin, YOLO)
    assert twin.predict(picture, imgsz=64, verbose=False) is not None


def test_saved_yolo_holds_stock_classes(tmp_path):
    yolo = patch_model(YOLO("yolo12n.yaml"))
    yolo.save(tmp_path / "saved.pt")
    assert sum(counts(yolo.model)) == 113
    import zipfile

    with zipfile.ZipFile(tmp_path / "saved.pt") as archive:
        data = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    assert b"yolo12_fastconv" not in data
    loaded = YOLO(tmp_path / "saved.pt")
    assert sum(counts(loaded.model)) == 0
    assert sum(counts(patch_model(loaded).model)) == 113


def test_rtdetr_objects():
    from ultralytics import RTDETR

    model = RTDETR("rtdetr-l.yaml")
    x = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = tensors(model.model.eval()(x))[0]
        patch_model(model)
        assert isinstance(model, RTDETR) and sum(counts(model.model)) > 50
        assert support.error(tensors(model.model(x))[0], expected) < 1e-3
    unpatch_model(model)
    assert type(model) is RTDETR


# ------------------------------------------------------------------------------------------------------------- formula


def other_formula(self, x):
    return self.act(self.bn(self.conv(x))) + 1


def other_way_to_write_it(self, x):
    y = self.conv(x)
    y = self.bn(y)
    return self.act(y)


def failing(self, x):
    raise AttributeError("no such thing")


def test_another_formula_in_conv_is_refused(monkeypatch, tiny):
    for method in ("forward", "forward_fuse"):
        for function, what in (
            (other_formula, "computes something else"),
            (failing, "raises AttributeError"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(Conv, method, function)
                with pytest.raises(PatchError, match=rf"Conv of Ultralytics [0-9.]+ {what}"):
                    patch_model(tiny)
                assert sum(counts(tiny)) == 0
    patch_model(tiny)


def test_the_same_formula_written_otherwise_is_accepted(monkeypatch, tiny):
    state = torch.get_rng_state()
    monkeypatch.setattr(Conv, "forward", other_way_to_write_it)
    patch_model(tiny)
    assert sum(counts(tiny)) == 25
    assert torch.equal(torch.get_rng_state(), state)


# -------------------------------------------------------------------------------------------------------------- report


def test_report_of_a_patched_model(yolo12n):
    report = patch_report(patch_model(yolo12n))
    rows = {row.name: row for row in report}
    assert len(report) == len(rows) == 113 + 7  # Detect: six last convolutions and DFL's
    assert sum(row.patched for row in report) == 113
    stem = rows["model.0"]
    assert (stem.layer, stem.geometry, stem.act, stem.bn) == (
        "FastConv",
        "3x3 s2 p1 d1 g1, 3→16",
        "SiLU",
        True,
    )
    assert (stem.reason, stem.kernel) == ("", "ATen (cpu)")
    pe = rows["model.6.m.0.0.attn.pe"]
    assert (pe.geometry, pe.act) == ("7x7 s1 p3 d1 g64, 64→64", "Identity")
    assert rows["model.21.dfl.conv"].reason == "Conv2d, not a Conv block"
    assert report.summary().startswith("113 of 120 convolutions run as the fused op (")
    assert "7 as stock: Conv2d, not a Conv block" in report.summary()
    assert "113 by ATen (cpu)" in report.summary()
    text = str(report)
    assert text.count("\n") > 120 and "model.0  " in text and report.summary() in text
    layers, larger = (table.splitlines() for table in report.to_markdown().split("\n\n"))
    assert len(layers) == 122 and {line.count("|") for line in layers} == {8}
    assert len(larger) == 2 + 45 and {line.count("|") for line in larger} == {5}
    data = json.loads(report.to_json())
    assert data["rows"][0]["name"] == "model.0" and len(data["rows"]) == 120
    assert data["served_by"] == report.served_by != ""


def test_report_of_a_fused_and_of_an_unpatched_model(tiny):
    assert {row.reason for row in patch_report(tiny)} == {"not patched"}
    patch_model(tiny.fuse(verbose=False))
    assert {(row.patched, row.bn, row.reason) for row in patch_report(tiny)} == {(True, False, "")}


def test_report_follows_the_live_state(tiny, monkeypatch):
    patch_model(tiny)

    def reason(name: str) -> str:
        return next(row.reason for row in patch_report(tiny) if row.name == name)

    handle = tiny.model[0].conv.register_forward_hook(lambda *a: None)
    assert reason("model.0") == "conv has hooks or a forward of its own"
    handle.remove()
    assert reason("model.0") == ""
    tiny.model[1].bn = nn.GroupNorm(1, 8)
    assert reason("model.1").startswith("bn is torch.nn.modules.normalization.GroupNorm")
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    assert reason("model.3") == "YOLO12_FASTCONV_DISABLE is set"


def test_log_line_says_what_computes(tiny, log):
    patch_model(tiny)
    said = log.messages[-1]
    assert said.startswith("yolo12_fastconv: 25 of 25 Conv blocks patched, 9 of 9 larger blocks fused (")
    assert (ops.LIBRARY.reason if not ops.LIBRARY.loaded else "CUDA library") in said


# ------------------------------------------------------------------------------------------------------------ switches


def test_disable_leaves_the_model_alone(monkeypatch, tiny, log):
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    assert patch_model(tiny) is tiny
    assert patch_model(tiny, inplace=False) is not tiny
    assert sum(counts(tiny)) == 0
    assert log.messages[-1] == "yolo12_fastconv: YOLO12_FASTCONV_DISABLE is set, the model stays unpatched"
    yolo = patch_model(YOLO("yolo12n.yaml"))
    assert type(yolo) is YOLO and sum(counts(yolo.model)) == 0
    summary = patch_modules(tiny)
    assert summary.patched == 0 and set(summary.kept.values()) == {"YOLO12_FASTCONV_DISABLE is set"}


def test_strict_never_leaves_a_half_patched_model(tiny, monkeypatch):
    if not torch.cuda.is_available() or not ops.LIBRARY.loaded:
        with pytest.raises(
            PatchError, match=r"strict: nothing was patched, since model.0 cannot run on a CUDA kernel: "
        ):
            patch_model(tiny, strict=True)
        assert sum(counts(tiny)) == 0
    # As on a machine where kernels serve everything.
    monkeypatch.setattr(patching, "_no_kernel_reason", patching._structure_reason)
    tiny.model[3].conv.register_forward_hook(lambda *a: None)
    with pytest.raises(PatchError, match=r"nothing was patched, since model.3 cannot .*conv has hooks"):
        patch_model(tiny, strict=True)
    assert sum(counts(tiny)) == 0
    patch_model(tiny, strict=True, exclude="model.3")
    assert sum(counts(tiny)) == 24
    with pytest.raises(blocks.FallbackError, match=r"strict mode: model.0 with input .* ATen \(cpu\)"):
        tiny(torch.rand(1, 3, 32, 32))
    unpatch_model(tiny)
    assert not [key for m in tiny.modules() for key in vars(m) if key.startswith("_fc_")]


# ----------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["nchw", "nhwc"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)
@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
@pytest.mark.parametrize("cfg", ["yolo12n.yaml", "yolo12n-seg.yaml", "yolo12n-cls.yaml"])
def test_gpu_model_in_evaluation_against_float64(cuda, cfg, fused, dtype, layout):
    model = support.build(cfg)
    if fused:
        model.fuse(verbose=False)
    x = torch.rand(2, 3, 160, 96)
    model, x = model.to(dtype), x.to(dtype)
    truth = tensors(copy.deepcopy(model).double()(x.double()))
    model, x = model.to(cuda).to(memory_format=layout), x.to(cuda).to(memory_format=layout)
    fast = patch_model(copy.deepcopy(model))
    with torch.no_grad():
        stock, ours = tensors(model(x)), tensors(fast(x))
    last = (
        0 if "cls" in cfg else 6
    )  # convolutions of the head's branches, as in test_every_task_computes_as_stock
    assert fused_calls(fast, x) == sum(counts(fast)) + last
    for mine, theirs, exact in zip(ours, stock, truth, strict=True):
        error, stock_error = (support.error(t.cpu(), exact.detach()) for t in (mine, theirs))
        assert error <= 2 * stock_error + 16 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize(
    "autocast", [None, torch.float16, torch.bfloat16], ids=["fp32", "amp-fp16", "amp-bf16"]
)
def test_gpu_training_step_against_float64(cuda, autocast, yolo12n):
    """All gradients of a model together are no further from the truth than stock's."""
    yolo12n.requires_grad_(True).train()
    x = torch.rand(4, 3, 128, 128)
    truth = {n: g for n, g in step(copy.deepcopy(yolo12n).double(), x.double())[1].items() if g is not None}
    model = yolo12n.to(cuda).to(memory_format=torch.channels_last)
    fast = patch_model(copy.deepcopy(model))
    errors = []
    for m in (fast, model):
        with torch.autocast("cuda", dtype=autocast or torch.float16, enabled=autocast is not None):
            grads = step(m, x.to(cuda))[1]
        errors.append(
            sum((grads[n].cpu().double() - t).square().sum() for n, t in truth.items()).sqrt().item()
        )
    total = sum(t.square().sum() for t in truth.values()).sqrt().item()
    assert errors[0] <= 2 * errors[1] + 1e-5 * total


@pytest.mark.gpu
def test_gpu_report_names_kernels(cuda, yolo12n):
    report = patch_report(patch_model(yolo12n.half().to(cuda)))
    kernels = [row.kernel for row in report if row.patched]
    assert len(kernels) == 113
    assert all(kernel.count("/") == 2 and "ATen" not in kernel for kernel in kernels)
    assert "CUDA library" in report.summary()


@pytest.mark.gpu
def test_gpu_training_needs_no_more_memory_than_stock(cuda, yolo12n):
    yolo12n.requires_grad_(True).train().to(cuda).to(memory_format=torch.channels_last)
    x = torch.rand(8, 3, 320, 320, device=cuda).to(memory_format=torch.channels_last)
    peaks = []
    for m in (yolo12n, patch_model(copy.deepcopy(yolo12n))):
        for _ in range(2):
            m.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = sum(t.float().square().mean() for t in tensors(m(x)))
            loss.backward()
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - base)
        del loss
        m.zero_grad()
    assert peaks[1] <= peaks[0]


@pytest.mark.gpu
def test_gpu_strict_model_runs_on_kernels_only(cuda, images):
    yolo = YOLO("yolo12n.yaml")
    yolo.model.to(cuda).half().eval()
    patch_model(yolo, strict=True)
    with torch.no_grad():
        outputs = tensors(yolo.model(images.half().to(cuda)))
    assert all(t.isfinite().all() for t in outputs)


@pytest.mark.gpu
def test_gpu_predict_in_half_precision(cuda, images):
    yolo = YOLO("yolo12n.yaml")
    picture = (images[0].permute(1, 2, 0) * 255).byte().numpy()
    expected = yolo.predict(picture, imgsz=64, conf=0.0001, half=True, device=0, verbose=False)[0].boxes.data
    patch_model(yolo)
    boxes = yolo.predict(picture, imgsz=64, conf=0.0001, half=True, device=0, verbose=False)[0].boxes.data
    assert abs(len(boxes) - len(expected)) <= 0.1 * len(expected) + 2
    assert fused_calls(lambda: yolo.predict(picture, imgsz=64, half=True, device=0, verbose=False)) >= 113


def test_public_names():
    import yolo12_fastconv

    assert set(yolo12_fastconv.__all__) >= {"patch_model", "unpatch_model", "patch_report", "PatchError"}
    assert importlib.util.find_spec("yolo12_fastconv.patching") is not None
