"""CUDA graphs of training without a GPU: what is captured and when, whose memory is whose, and every way out.

`FakeBackend` stands for CUDA, as in test_graphs: a graph is a twin of the model as it was at the capture, whose tensors
share the memory of the model's tensors then; a capture moves nothing, a replay writes into the tensors of the capture.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import weakref

import pytest
import shapes_dataset
import support
import test_graphs
import torch
from support import tensors
from torch import nn
from torch.utils.checkpoint import checkpoint
from ultralytics import YOLO
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import ClassificationModel
from ultralytics.utils.loss import v8DetectionLoss

from yolo12_fastconv import _graph_capture, graphs, patch_model, patch_report, training_graphs
from yolo12_fastconv.patching import patch_modules


class FakeForward:
    def __init__(self, model, x, before):
        self.before = before
        memo = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            alias = tensor.detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(alias, tensor.requires_grad) if is_parameter else alias
        self.twin, self.x = copy.deepcopy(model, memo), x
        self.live, self.outputs = [], []

    def run(self):
        with torch.enable_grad():
            self.live = tensors(self.twin._stock.forward(self.twin, self.x))

    def replay(self):
        self.before()
        self.run()
        with torch.no_grad():
            for mine, new in zip(self.outputs, self.live, strict=True):
                mine.copy_(new)


class FakeBackward:
    def __init__(self, forward, given, sources, static, found):
        self.forward, self.given, self.sources, self.static, self.found = (
            forward,
            given,
            sources,
            static,
            found,
        )

    def replay(self):
        outputs = [self.forward.live[index] for index in self.given]
        found = torch.autograd.grad(outputs, self.sources, self.static, allow_unused=True)
        for mine, new in zip(self.found, found, strict=True):
            if mine is not None:
                mine.copy_(new)
        # As on a GPU, the activations are gone.
        self.forward.live = []


class FakeBackend(test_graphs.FakeBackend):
    """`CudaBackend` on a CPU. `free` is what `room` says."""

    free = 1 << 40

    def capture_forward(self, function, x, before):
        model = function.__self__
        buffers = [buffer.clone() for buffer in model.buffers()]
        static = x.clone()
        try:
            with torch.enable_grad():
                outputs = function(static)
        finally:
            for buffer, kept in zip(model.buffers(), buffers, strict=True):
                buffer.data.copy_(kept)
        with torch.no_grad():
            graph = FakeForward(model, static, before)
            graph.outputs = [output.data for output in tensors(outputs)]
            for output in graph.outputs:
                output.fill_(float("nan"))
        return _graph_capture.Recording(static, outputs, graph, None)

    def capture_backward(self, forward, outputs, sources, grads):
        graph = forward.graph
        kept = [output.detach() for output in outputs]
        addresses = [output.data_ptr() for output in graph.outputs]
        given = [addresses.index(output.data_ptr()) for output in kept]
        static = [torch.full_like(grad, float("nan")) for grad in grads]
        found = list(torch.autograd.grad(outputs, sources, static, allow_unused=True))
        found = [None if grad is None else grad.clone().fill_(float("nan")) for grad in found]
        places = {p.data_ptr(): p for p in graph.twin.parameters()}
        twins = [places[source.data_ptr()] for source in sources]
        back = FakeBackward(graph, given, twins, static, found)
        return _graph_capture.BackwardRecording(static, found, back)

    def room(self, recording):
        return FakeBackend.free

    def size(self, recording):
        return 1000


@pytest.fixture(autouse=True)
def backend(monkeypatch):
    monkeypatch.setattr(graphs, "BACKEND", FakeBackend)


def graphed(model):
    patch_modules(model, cuda_graph=True)
    return model.train()


def state(model) -> training_graphs.TrainingGraphs:
    return vars(model)["_fc_graphs"].training


def counts(model) -> dict[str, int]:
    return dict(state(model).counts)


def twin_of(model):
    """The same model patched, without graphs."""
    twin = copy.deepcopy(model)
    graphs.disable(twin)
    return twin


def loss_of(y):
    """Uses the outputs unequally."""
    return sum((t.float() * torch.linspace(-1, 1, t.numel()).view_as(t)).sum() for t in tensors(y))


def step(model, x, loss=loss_of):
    y = model(x)
    loss(y).backward()
    return [t.detach() for t in tensors(y)]


def pictures(seed, *shape):
    return torch.rand(*(shape or (2, 3, 32, 32)), generator=torch.Generator().manual_seed(seed))


def assert_equal(ours, stock):
    """Parameters, gradients and buffers, bit by bit."""
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad) and a.grad.stride() == b.grad.stride(), name
    for (name, a), b in zip(ours.named_buffers(), stock.named_buffers(), strict=True):
        assert torch.equal(a, b[1]), name


def warm(model, calls=graphs.REPEATS, x=None):
    for call in range(calls):
        step(model, pictures(call) if x is None else x)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=1e-3)


# ---------------------------------------------------------------------------------------------------------- replaying


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_is_equal_bit_by_bit(tiny, set_to_none):
    """Steps with accumulation over two, clipping, and a validation in between that must not free the graph."""
    ours = graphed(tiny)
    stock = twin_of(ours)
    optimizers = [optimizer_of(ours), optimizer_of(stock)]
    for number in range(10):
        x = pictures(number)
        for a, b in zip(step(ours, x), step(stock, x), strict=True):
            assert torch.equal(a, b)
        assert_equal(ours, stock)
        if number % 2:
            for model, optimizer in zip((ours, stock), optimizers, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
        if number == 5:
            copy.deepcopy(ours).eval()(x)
            ours.train()
            stock.train()
    assert counts(ours) == {"eager calls": 2, "captures": 1, "replays": 8}


def test_detection_with_its_loss(yolo12n):
    """``model(batch)``: the loss's own forward is the one that is replayed."""
    from ultralytics.cfg import get_cfg

    yolo12n.args = get_cfg()
    for parameter in yolo12n.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    yolo12n.model[-1].dfl.requires_grad_(False)
    ours = graphed(yolo12n)
    stock = twin_of(ours)
    for number in range(5):
        batch = {
            "img": pictures(number, 2, 3, 64, 64),
            "batch_idx": torch.tensor([0.0, 1.0, 1.0]),
            "cls": torch.tensor([[1.0], [2.0], [3.0]]),
            "bboxes": torch.tensor([[0.5, 0.5, 0.6, 0.4], [0.3, 0.4, 0.4, 0.5], [0.6, 0.6, 0.3, 0.3]]),
        }
        if number == 3:  # a batch without objects: the boxes get no gradient, and neither do their branches
            batch = {
                **batch,
                "batch_idx": torch.zeros(0),
                "cls": torch.zeros(0, 1),
                "bboxes": torch.zeros(0, 4),
            }
        for model in (ours, stock):
            model.zero_grad()
            model(batch)[0].sum().backward()
        assert_equal(ours, stock)
    assert counts(ours) == {"eager calls": 2, "captures": 1, "replays": 3}


@pytest.mark.parametrize("cfg", sorted(set(test_graphs.TASKS) - {"yolo12n.yaml"}))
def test_networks_of_other_tasks(cfg):
    """Nested outputs: dictionaries, masks' prototypes, key points, angles."""
    model = graphed(support.build(cfg).requires_grad_())
    stock = twin_of(model)
    for number in range(4):
        ours, theirs = (step(net, pictures(number, 2, 3, 64, 64)) for net in (model, stock))
        assert len(ours) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert_equal(model, stock)
    assert counts(model) == {"eager calls": 2, "captures": 1, "replays": 2}


def test_outputs_and_gradients_are_the_callers(tiny):
    model = graphed(tiny)
    warm(model)
    model.zero_grad()
    y = model(pictures(7))
    loss_of(y).backward()
    kept = [t.detach().clone() for t in tensors(y)]
    grads = [p.grad.clone() for p in model.parameters()]
    held = [p.grad for p in model.parameters()]
    model.zero_grad()
    step(model, pictures(8))
    assert all(torch.equal(a, b) for a, b in zip(tensors(y), kept, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(held, grads, strict=True))
    assert len({grad.untyped_storage().data_ptr() for grad in held}) == len(held)


def test_hooks_of_parameters_are_called_once_per_backward(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    calls = []
    for net in (model, stock):
        next(net.parameters()).register_hook(lambda grad: calls.append(1) or grad * 2)
        next(net.parameters()).register_post_accumulate_grad_hook(lambda p: calls.append(2))
    for number in range(5):
        step(model, pictures(number))
        step(stock, pictures(number))
        assert_equal(model, stock)
    assert calls == [1, 2] * 10 and counts(model)["replays"] == 3


@pytest.mark.parametrize("kind", ["expanded", "transposed", "infinite"])
def test_gradients_of_any_kind(tiny, kind):
    model = graphed(tiny)
    stock = twin_of(model)

    def backward(y):
        (y,) = tensors(y)
        grad = {
            "expanded": torch.ones(()).expand_as(y),
            "transposed": torch.randn(*y.shape[::-1], generator=torch.Generator().manual_seed(0)).t(),
            "infinite": torch.full_like(y, float("inf")),
        }[kind]
        y.backward(grad)

    for number in range(5):
        for net in (model, stock):
            net.zero_grad()
            backward(net(pictures(number)))
    for a, b in zip(model.parameters(), stock.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad) or (a.grad.isnan() == b.grad.isnan()).all()
    assert counts(model)["replays"] == 3


def test_frozen_layers_and_batch_norms(tiny):
    """As the trainer's ``freeze=2``: parameters without gradients, their batch norms in evaluation mode."""
    model = graphed(tiny)
    for layer in model.model[:2]:
        layer.requires_grad_(False)
        layer.bn.eval()
    stock = twin_of(model)
    for number in range(5):
        step(model, pictures(number))
        step(stock, pictures(number))
    assert_equal(model, stock)
    assert counts(model) == {"eager calls": 2, "captures": 1, "replays": 3}
    model.model[0].requires_grad_(True)
    stock.model[0].requires_grad_(True)
    step(model, pictures(9))
    step(stock, pictures(9))
    assert_equal(model, stock)
    assert counts(model)["dropped"] == 1


# -------------------------------------------------------------------------------------------- what autograd may ask for


def test_a_second_forward_before_the_backward_is_eager(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    warm(model)
    warm(stock)
    for net in (model, stock):
        losses = [loss_of(net(pictures(number))) for number in (5, 6, 7)]
        for loss in reversed(losses):
            loss.backward()
        step(net, pictures(8))
    assert_equal(model, stock)
    assert counts(model)["calls before the last one's backward"] == 2
    assert counts(model)["replays"] == 3


def test_a_forward_whose_result_was_thrown_away_blocks_nothing(tiny):
    model = graphed(tiny)
    warm(model)
    for number in range(3):
        model(pictures(number))
    assert counts(model)["replays"] == 4


def test_second_backwards(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    for net in (model, stock):
        warm(net)
        loss = loss_of(net(pictures(5)))
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        warm(net, 9)
    assert_equal(model, stock)
    assert counts(model)["eager backwards"] == 1 and counts(model)["captures"] == 2
    assert counts(model)["dropped"] == 1


def test_gradients_of_gradients(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    found = []
    for net in (model, stock):
        warm(net)
        net.zero_grad()
        grads = torch.autograd.grad(loss_of(net(pictures(5))), list(net.parameters()), create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        penalty.backward()
        found.append([p.grad for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert [b.tolist() for b in model.buffers()] == [b.tolist() for b in stock.buffers()]
    assert "create_graph=True" in graphs.describe(model)


def test_gradients_of_some_parameters(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    found = []
    for net in (model, stock):
        warm(net)
        some = list(net.parameters())[3:7]
        found.append(torch.autograd.grad(loss_of(net(pictures(5))), some))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert counts(model)["replays"] == 2


def test_parameters_changed_before_the_backward_are_an_error(tiny):
    model = graphed(tiny)
    warm(model)
    loss = loss_of(model(pictures(5)))
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between a forward and its backward"):
        loss.backward()


def test_inputs_changed_before_the_backward_are_an_error(tiny):
    model = graphed(tiny)
    warm(model)
    x = pictures(5)
    loss = loss_of(model(x))
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Two(ClassificationModel):
    """Two outputs with parameters of their own, and one without a gradient."""

    def predict(self, x, *args, **kwargs):
        y = self.model[0](x)
        return {"a": self.model[1](y), "b": [self.model[2](y)], "n": y.detach() * 2, "size": (3, None)}


@pytest.fixture
def two(tiny):
    tiny.__class__ = Two
    tiny.model[2] = copy.deepcopy(tiny.model[1])
    return graphed(tiny)


def test_the_nest_of_outputs(two):
    stock = twin_of(two)
    for number in range(5):
        y, expected = two(pictures(number)), stock(pictures(number))
        assert list(y) == list(expected) and y["size"] == (3, None) and type(y["b"]) is list
        assert not y["n"].requires_grad and y["a"].requires_grad
        assert all(torch.equal(a, b) for a, b in zip(tensors(y), tensors(expected), strict=True))
        loss_of(y).backward()
        loss_of(expected).backward()
        assert_equal(two, stock)
    assert counts(two)["replays"] == 3


def test_fewer_outputs_in_the_loss(two):
    """Parameters that none of the given outputs depends on get no gradient, as without a graph."""
    stock = twin_of(two)
    for number, used in enumerate(("ab", "ab", "ab", "a", "b", "ab")):
        for net in (two, stock):
            net.zero_grad()
            y = net(pictures(number))
            loss_of([y[name] for name in used]).backward()
        assert_equal(two, stock)
        assert (two.model[2].conv.weight.grad is None) == (used == "a")
    assert counts(two) == {"eager calls": 2, "captures": 1, "replays": 4}


def test_more_outputs_in_the_loss(two):
    stock = twin_of(two)
    for number, used in enumerate(("a", "a", "a", "ab", *["ab"] * 8)):
        for net in (two, stock):
            net.zero_grad()
            y = net(pictures(number))
            loss_of([y[name] for name in used]).backward()
        assert_equal(two, stock)
    assert counts(two)["eager backwards"] == 1 and counts(two)["captures"] == 2
    assert counts(two)["replays"] == 2 + 3


def test_a_model_changed_between_forward_and_backward(two):
    """The captured backward does not need it; where the forward has to be repeated, it is an error."""
    for number in range(4):
        loss_of(two(pictures(number))["a"]).backward()
    y = two(pictures(5))
    two.eval()
    with pytest.raises(RuntimeError, match="model was changed since"):
        loss_of(y).backward()
    two.train()
    for number in range(4):
        loss_of(two(pictures(number))["a"]).backward()
    y = two(pictures(5))
    two.eval()
    loss_of(y["a"]).backward()


# ------------------------------------------------------------------------------------------- what makes a graph stale


@pytest.mark.parametrize("change", sorted(set(test_graphs.STALE) - {"instance method of the model"}))
def test_changed_models_are_not_replayed(tiny, change):
    model = graphed(tiny)
    model.model[0].act = nn.SiLU()
    warm(model)
    if change == "batch statistics":
        model.model[0].bn.eval()
    else:
        test_graphs.STALE[change](model)
    stock = twin_of(model)
    for net in (model, stock):
        net.zero_grad()
        step(net, pictures(3))
    assert_equal(model, stock)
    assert counts(model)["dropped"] == 1 and counts(model)["replays"] == 1


def test_a_replay_of_a_changed_model_moves_no_buffer(tiny):
    """The model is compared while the replay runs, which has moved the buffers by then."""
    model = graphed(tiny)
    stock = twin_of(model)
    for net in (model, stock):
        warm(net, 5)
        net.model[0].bn.momentum = 0.3
        step(net, pictures(3))
    assert_equal(model, stock)
    assert state(model).problem == "dropped: the model was changed" and counts(model)["replays"] == 3


def test_values_changed_in_place_need_no_new_graph(tiny):
    model = graphed(tiny)
    warm(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    stock = twin_of(model)
    for net in (model, stock):
        net.zero_grad()
        step(net, pictures(3))
    assert_equal(model, stock)
    assert counts(model)["replays"] == 2


def test_modes_and_moves(tiny):
    model = graphed(tiny)
    warm(model)
    model.train()
    assert state(model).entry is not None
    model.eval()
    assert state(model).entry is None and state(model).streak == 0
    with torch.no_grad():
        test_graphs.warm(model, pictures(0), 4)
    assert vars(model)["_fc_graphs"].entries
    model.train()
    assert not vars(model)["_fc_graphs"].entries
    warm(model)
    assert state(model).entry is not None
    model.double()
    assert state(model).entry is None
    graphs.disable(model)
    step(model, pictures(0).double())


def test_nothing_is_kept_alive(tiny):
    model = copy.deepcopy(graphed(tiny))
    warm(model)
    loss = loss_of(model(pictures(0)))
    loss.backward()
    graph = weakref.ref(state(model).entry.recording.graph)
    model.eval()
    gc.collect()
    assert graph() is None  # although the loss is still there
    model.train()
    warm(model)
    graph = weakref.ref(state(model).entry.recording.graph)
    ref = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model, loss
    finally:
        gc.enable()
    gc.collect()
    assert ref() is None and graph() is None


# --------------------------------------------------------------------------------------------------------- not captured


def test_sizes_that_take_turns_are_never_captured(tiny):
    model = graphed(tiny)
    for number in range(20):
        step(model, pictures(number, 2, 3, 32, 32 + 8 * (number % 3)))
    assert counts(model) == {"eager calls": 20}


def test_the_last_batch_of_each_epoch_is_eager(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    for number in range(15):
        x = pictures(number)[: 1 if number % 5 == 4 else 2]
        step(model, x)
        step(stock, x)
    assert_equal(model, stock)
    assert counts(model) == {"eager calls": 2 + 3, "captures": 1, "replays": 10}


def test_another_size_frees_the_graph_if_there_is_no_room(tiny, monkeypatch):
    model = graphed(tiny)
    warm(model)
    monkeypatch.setattr(FakeBackend, "free", 1)
    step(model, pictures(0, 1, 3, 32, 32))
    assert state(model).entry is None and "no room" in graphs.describe(model)
    warm(model)
    assert counts(model)["captures"] == 2


def test_a_size_that_stays_replaces_the_graph(tiny):
    model = graphed(tiny)
    warm(model)
    for number in range(2 * graphs.REPEATS + 1):
        step(model, pictures(number, 1, 3, 32, 40))
    assert counts(model)["captures"] == 2 and state(model).repeats == 2 * graphs.REPEATS
    assert "1x3x32x40 float32 captured" in graphs.describe(model)


def whole_checkpoint(model, x):
    return checkpoint(model, x, use_reentrant=False)


def saved_on_cpu(model, x):
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def anomaly(model, x):
    with torch.autograd.detect_anomaly(check_nan=False):
        return model(x)


EAGER = {
    "checkpoint": whole_checkpoint,
    "saved on cpu": saved_on_cpu,
    "anomaly mode": anomaly,
    "input with gradient": lambda model, x: model(x.requires_grad_()),
    "embed": lambda model, x: model(x, embed=[1, 2])[0],
}


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("how", EAGER)
def test_calls_that_are_eager(tiny, how):
    model = graphed(tiny)
    stock = twin_of(model)
    for number in range(5):
        for net in (model, stock):
            loss_of(EAGER[how](net, pictures(number))).backward()
    assert_equal(model, stock)
    graph = vars(model).get("_fc_graphs")
    assert graph is None or not graph.training.counts["captures"]


def test_without_gradients_training_is_eager(tiny):
    model = graphed(tiny)
    with torch.no_grad():
        for number in range(5):
            model(pictures(number))
    assert "_fc_graphs" not in vars(model)


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def odd_function(model):
    block = model.model[0]
    block.forward = lambda x: Odd.apply(type(block).forward(block, x))


def inner_checkpoint(model):
    model.model[1].forward = lambda x: checkpoint(
        type(model.model[1]).forward, model.model[1], x, use_reentrant=False
    )


def outer_scale(model):
    scale = torch.ones((), requires_grad=True)
    model.model[0].forward = lambda x: type(model.model[0]).forward(model.model[0], x) * scale


def own_buffer(model):
    block = model.model[0]
    block.register_buffer("seen", torch.zeros(()))

    def forward(x):
        block.seen = block.seen + 1
        return type(block).forward(block, x)

    block.forward = forward


def counter(model):
    block = model.model[0]
    block.calls = 0

    def forward(x):
        block.calls += 1
        return type(block).forward(block, x)

    block.forward = forward


REFUSED = {
    "autograd function": (
        odd_function,
        "the autograd function Odd",
    ),
    "checkpoint inside": (inner_checkpoint, "saved-tensor hooks"),
    "leaf outside": (outer_scale, "no parameter of the model"),
    "buffer replaced": (own_buffer, "changes attributes"),
    "counter": (counter, "changes attributes"),
    "hooks": (lambda model: model.model[0].register_forward_hook(lambda *args: None), "inner modules have hooks"),
    "frozen": (lambda model: model.requires_grad_(False), "no parameter needs a gradient"),
    "SyncBatchNorm": (lambda model: nn.SyncBatchNorm.convert_sync_batchnorm(model), "SyncBatchNorm"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_models_that_are_refused_train_as_ever(tiny, what, log):
    change, reason = REFUSED[what]
    model = graphed(tiny)
    stock = twin_of(model)
    change(model)
    change(stock)
    for number in range(5):
        for net in (model, stock):
            try:
                y = net(pictures(number))
            except ValueError as error:  # SyncBatchNorm has no CPU kernel
                assert "SyncBatchNorm" in str(error)
                return
            if what != "frozen":
                loss_of(y).backward()
    assert_equal(model, stock)
    if what in ("counter",):
        assert model.model[0].calls == 5
    if what == "buffer replaced":
        assert model.model[0].seen == 5
    assert not counts(model).get("captures") and reason in graphs.describe(model)
    lines = [r.getMessage() for r in log.records if "no CUDA graph" in r.getMessage()]
    assert len(lines) == 1 and reason in lines[0]


def test_several_processes_are_eager(tiny, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = graphed(tiny)
    warm(model, 5)
    assert counts(model) == {"eager calls": 5} and "several processes" in graphs.describe(model)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_failed_captures_fall_back(tiny, log, monkeypatch, phase, error):
    def fail(self, *args):
        raise error("CUDA out of memory\nand more")

    monkeypatch.setattr(FakeBackend, f"capture_{phase}", fail)
    model = graphed(tiny)
    stock = twin_of(model)
    for number in range(6):
        step(model, pictures(number))
        step(stock, pictures(number))
        assert_equal(model, stock)
    lines = [r.getMessage() for r in log.records if "no CUDA graph" in r.getMessage()]
    assert len(lines) == 1 and f"{error.__name__}: CUDA out of memory" in lines[0]
    assert state(model).entry is None and state(model).failures == 1


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_running_out_of_memory_frees_the_graph(tiny, monkeypatch, error):
    model = graphed(tiny)
    warm(model)

    def fail(self, x):
        raise error("yolo12_fastconv: CUDA out of memory: no room")

    with monkeypatch.context() as patch:
        patch.setattr(ClassificationModel, "forward", fail)
        with pytest.raises(error):
            model(pictures(0, 1, 3, 32, 32))
    assert state(model).entry is None
    warm(model)
    assert counts(model)["captures"] == 2


def fail_in_the_loss(monkeypatch, calls):
    """`v8DetectionLoss` runs out of memory at the calls of these numbers, counted from 0."""
    stock, count = v8DetectionLoss.__call__, itertools.count()

    def loss(self, *args):
        if next(count) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return stock(self, *args)

    monkeypatch.setattr(v8DetectionLoss, "__call__", loss)


def detection_batch(pictures):
    return {
        "img": torch.rand(pictures, 3, 64, 64),
        "batch_idx": torch.arange(pictures).float(),
        "cls": torch.zeros(pictures, 1),
        "bboxes": torch.full((pictures, 4), 0.4),
    }


def test_running_out_of_memory_in_the_loss_frees_the_graph(yolo12n, monkeypatch):
    """At once, although the error's traceback still holds the network's outputs, which wait for their backward."""
    yolo12n.args = get_cfg()
    model = graphed(yolo12n.requires_grad_())
    fail_in_the_loss(monkeypatch, {4})
    for _ in range(4):
        model(detection_batch(1))[0].sum().backward()
    entry = state(model).entry
    assert counts(model)["replays"] == 2
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(detection_batch(1))
    assert caught.tb is not None and entry.pending()
    assert state(model).entry is None and entry.released and entry.recording is None


def test_a_graph_freed_before_its_backward_changes_no_gradient(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    for net in (model, stock):
        warm(net)
        loss = loss_of(net(pictures(4)))
        graphs.free(net)
        loss.backward()
    assert_equal(model, stock)
    assert counts(model)["eager backwards"] == 1 and state(model).entry is None


def test_making_room(tiny, monkeypatch):
    model = graphed(tiny)
    graphs.make_room(model)
    warm(model)
    graphs.make_room(model)
    assert state(model).entry is not None
    monkeypatch.setattr(FakeBackend, "free", 999)  # of 1000 that the graph takes
    graphs.make_room(model)
    assert state(model).entry is None and "no room" in graphs.describe(model)
    graphs.make_room(twin_of(model))  # without graphs, there is nothing to do


def train(tmp_path, **settings):
    """YOLO.train with graphs on a CPU: sizes of the batches, losses, and the graph's state."""
    data = shapes_dataset.make(tmp_path / "shapes", size=64, train=8, val=2)
    yolo = patch_model(YOLO("yolo12n.yaml"), cuda_graph=True)
    seen = []
    yolo.add_callback("on_train_batch_end", lambda t: seen.append((t.batch_size, t.loss.item())))
    kept = []
    yolo.add_callback("on_train_epoch_end", lambda t: kept.append(state(t.model)))
    yolo.train(
        data=str(data), project=str(tmp_path), imgsz=64, workers=0, device="cpu", plots=False, amp=False, seed=0,
        **{"epochs": 1, "batch": 2, "nbs": 2, "val": False, "mosaic": 0, **settings},
    )  # fmt: skip
    return seen, kept[-1]


def test_the_trainers_retry_with_half_the_batch(tmp_path, monkeypatch):
    """Memory runs out behind a replay in the first epoch: the graph is freed before the batch is halved."""
    fail_in_the_loss(monkeypatch, {3})
    freed = []
    stock = training_graphs.TrainingGraphs.drop
    monkeypatch.setattr(
        training_graphs.TrainingGraphs,
        "drop",
        lambda self, *a, **kw: freed.append(a) or stock(self, *a, **kw),
    )
    seen, found = train(tmp_path)
    assert [batch for batch, _ in seen] == [2] * 3 + [1] * 8
    assert all(map(math.isfinite, (loss for _, loss in seen)))
    assert ("out of memory",) in {a[:1] for a in freed}
    assert found.counts["captures"] == 2 and found.counts["replays"] == 2 + 6


@pytest.mark.parametrize("free", [999, 1 << 40], ids=["short of memory", "enough"])
def test_validation_has_room(tmp_path, monkeypatch, free):
    """A training graph that takes more than is left is freed before the EMA is validated, and captured again later."""
    monkeypatch.setattr(FakeBackend, "free", free)
    _, found = train(tmp_path, epochs=2, val=True)
    assert found.counts["captures"] == (2 if free == 999 else 1)


# ------------------------------------------------------------------------------------------------------------- reports


def test_report_pickle_and_copy(tiny):
    model = graphed(tiny)
    warm(model, 4)
    assert "in training: 2x3x32x32 float32 captured" in str(patch_report(model))
    assert "2 eager calls, 1 captures, 2 replays" in str(patch_report(model))
    twin = copy.deepcopy(model)
    assert "_fc_graphs" not in vars(twin)
    warm(twin, 4)
    assert counts(twin)["replays"] == 2 and state(twin) is not state(model)


def test_flags_are_part_of_the_signature(tiny):
    model = graphed(tiny)
    warm(model)
    with torch.autocast("cuda", torch.bfloat16) if torch.cuda.is_available() else contextlib.nullcontext():
        torch.backends.cudnn.deterministic = True
        try:
            step(model, pictures(0))
            loss = loss_of(model(pictures(0)))
        finally:
            torch.backends.cudnn.deterministic = False
    loss.backward()
    assert counts(model)["replays"] == 1


def test_backward_under_other_flags(tiny):
    model = graphed(tiny)
    stock = twin_of(model)
    for net in (model, stock):
        warm(net)
        loss = loss_of(net(pictures(4)))
        torch.backends.cudnn.deterministic = True
        try:
            loss.backward()
        finally:
            torch.backends.cudnn.deterministic = False
    assert_equal(model, stock)
    assert counts(model)["eager backwards"] == 1


def test_the_trainers_model(tiny):
    """The whole of `support.step` twice, from a fresh patch: nothing depends on gradients being there before."""
    model = graphed(tiny)
    for _ in range(4):
        _, grads = support.step(model, pictures(0))
    twin = twin_of(model)
    _, expected = support.step(twin, pictures(0))
    assert all(torch.equal(grads[name], grad) for name, grad in expected.items())
