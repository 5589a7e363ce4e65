"""CUDA graphs on a GPU: equal to eager calls after every change, owned outputs, threads, streams, bounded memory."""

from __future__ import annotations

import copy
import gc
import threading

import numpy as np
import pytest
import shapes_dataset
import support
import torch
from support import tensors
from torch import nn
from ultralytics import YOLO

from yolo12_fastconv import _side_stream, graphs, patch_model, patch_report
from yolo12_fastconv.patching import patch_modules

pytestmark = pytest.mark.gpu


def graphed(model, device, dtype=torch.float16):
    patch_modules(model, cuda_graph=True)
    return model.to(device, dtype).requires_grad_(False)


def state(model) -> graphs.Graphs:
    return vars(model)["_fc_graphs"]


def warm(model, x, calls=1):
    with torch.no_grad():
        for _ in range(calls):
            y = model(x)
    return y


def eager(model, x):
    """What the patched model computes without graphs."""
    twin = copy.deepcopy(model)
    graphs.disable(twin)
    with torch.no_grad():
        return tensors(twin(x))


def assert_same(ours, expected, tolerance=2e-3):
    ours = tensors(ours)
    assert len(ours) == len(expected)
    for a, b in zip(ours, expected, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert support.error(a, b) <= tolerance


def images(device, *size, dtype=torch.float16):
    return torch.rand(*size, device=device, dtype=dtype)


CHANGES = {
    "nothing": lambda model: None,
    "in place": lambda model: [p.data.mul_(1.1) for p in model.parameters()],
    "load_state_dict": lambda model: model.load_state_dict(
        {k: v * 1.1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    ),
    "assign": lambda model: model.load_state_dict(
        {k: v * 1.1 if v.is_floating_point() else v.clone() for k, v in model.state_dict().items()},
        assign=True,
    ),
    "data": lambda model: [setattr(p, "data", p.data * 1.1) for p in model.parameters()],
    "fuse": lambda model: model.fuse(verbose=False),
    "there and back": lambda model: model.cpu().to("cuda"),
    "module": lambda model: setattr(model.model[0], "act", nn.ReLU()),
    "hook": lambda model: model.model[0].register_forward_hook(lambda m, a, y: y * 1.1),
}
REPLAYED = {"nothing", "in place", "load_state_dict"}


def test_equal_to_eager_whatever_was_changed(cuda, yolo12n):
    for name, change in CHANGES.items():
        model = graphed(copy.deepcopy(yolo12n), cuda)
        x = images(cuda, 2, 3, 64, 64)
        assert_same(warm(model, x, 4), eager(model, x))
        assert state(model).counts["replays"] == 1, graphs.describe(model)
        change(model)
        x = images(cuda, 2, 3, 64, 64)
        expected = eager(model, x)
        assert_same(warm(model, x), expected)
        assert (state(model).counts["replays"] == 2) == (name in REPLAYED), name
        if name != "hook":
            assert_same(warm(model, x, 4), expected)
            assert len(state(model).entries) == 1, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_autocast_and_inference_mode(cuda, yolo12n, dtype):
    model = graphed(yolo12n, cuda, dtype)
    x = images(cuda, 1, 3, 64, 96, dtype=dtype)
    assert_same(warm(model, x, 5), eager(model, x), 1e-5 if dtype is torch.float32 else 1e-2)
    if dtype is torch.float32:
        with torch.autocast("cuda", torch.float16), torch.inference_mode():
            expected = eager(model, x)
            for _ in range(5):
                y = model(x)
        assert tensors(y)[0].is_inference()
        assert_same(y, expected)
    assert state(model).counts["captures"] == 1 + (dtype is torch.float32)


def test_outputs_are_the_callers_and_shapes_alternate(cuda, yolo12n):
    model = graphed(yolo12n, cuda)
    inputs = [images(cuda, 1, 3, 64, 32 * (1 + i)) for i in range(3)]
    expected = [eager(model, x) for x in inputs]
    for x in inputs:
        warm(model, x, 3)
    kept = []
    for index in (0, 1, 2, 2, 1, 0, 1, 0):
        kept.append((index, warm(model, inputs[index])))
        assert model.model[-1].shape[-1] == inputs[index].shape[-1] // 8
    for index, y in kept:
        assert_same(y, expected[index])
    graphs.disable(model)
    for x, y in zip(inputs, expected, strict=True):
        assert_same(warm(model, x), y)  # anchors that outlive their graphs


def test_threads_and_streams(cuda, yolo12n):
    """Eight threads, each on its own stream, on two models of different weights."""
    models = [graphed(copy.deepcopy(yolo12n), cuda) for _ in range(2)]
    for p in models[1].parameters():
        p.data.mul_(1.1)
    inputs = [images(cuda, 1, 3, 64, 32 * (1 + i % 3)) for i in range(8)]
    expected = [eager(models[i % 2], x) for i, x in enumerate(inputs)]
    torch.cuda.synchronize()
    errors = []

    def work(index):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                results = [warm(models[index % 2], inputs[index]) for _ in range(25)]
                scratch = [torch.rand(1 << 20, device=cuda).fill_(float("nan")) for _ in range(3)]
                torch.cuda.current_stream().synchronize()
                del scratch
                for y in results:
                    assert_same(y, expected[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors
    for model in models:
        assert state(model).counts["captures"] == 3 and not state(model).failures, graphs.describe(model)


def test_two_thousand_shapes(cuda, tiny):
    """Memory is bounded, results right, and it is given back."""
    model = graphed(tiny, cuda)
    sizes = [(n, 8 + h, 8 + w) for n in (1, 2) for h in range(25) for w in range(40)]
    reserved = 0
    for number, (n, h, w) in enumerate(sizes):
        x = images(cuda, n, 3, h, w)
        y = warm(model, x, 4 if number % 8 == 0 else 1)
        if number % 97 == 0:
            assert_same(y, eager(model, x))
        if number == 1000:
            reserved = torch.cuda.memory_reserved()
        assert len(state(model).entries) <= graphs.MAX_GRAPHS
    assert state(model).counts["captures"] >= 8 and not state(model).failures
    assert torch.cuda.memory_reserved() <= reserved + (64 << 20), graphs.describe(model)
    graphs.disable(model)
    del y
    gc.collect()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= allocated + (64 << 20)


def test_a_failed_capture_leaves_everything_usable(cuda, tiny, monkeypatch):
    from ultralytics.nn.tasks import ClassificationModel

    stock = ClassificationModel.forward

    def forward(self, x):
        y = stock(self, x)
        if self.model[0].sync:
            y[0].sum().item()
        return y

    monkeypatch.setattr(ClassificationModel, "forward", forward)
    tiny.model[0].sync = True
    model = graphed(tiny, cuda)
    x = images(cuda, 1, 3, 32, 32)
    expected = eager(model, x)
    assert_same(warm(model, x, 6), expected)
    assert state(model).failures == 1 and not state(model).entries
    images(cuda, 1)  # random numbers, which a failed capture can break
    model.model[0].sync = False
    other = images(cuda, 1, 3, 32, 40)
    expected = eager(model, other)
    assert_same(warm(model, other, 6), expected)
    assert len(state(model).entries) == 1, graphs.describe(model)
    graphs.disable(model)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= torch.cuda.memory_allocated() + (64 << 20)


def test_inside_anothers_capture_calls_are_eager(cuda, yolo12n):
    model = graphed(yolo12n, cuda)
    x = images(cuda, 1, 3, 64, 64)
    warm(model, x, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    x.copy_(images(cuda, 1, 3, 64, 64))
    graph.replay()
    assert_same(y, eager(model, x))
    assert_same(warm(model, x), eager(model, x))
    assert state(model).counts["replays"] == 2


def test_predict(cuda):
    """Detections of streams of pictures are those without graphs."""
    torch.manual_seed(0)
    model = support.build("yolo12n.yaml")
    plain, fast = YOLO("yolo12n.yaml"), YOLO("yolo12n.yaml")
    plain.model, fast.model = copy.deepcopy(model), copy.deepcopy(model)
    patch_model(plain)
    patch_model(fast, cuda_graph=True)
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 255, (96, 128 if i < 6 else 96, 3), dtype=np.uint8) for i in range(9)]
    options = dict(imgsz=128, device=0, verbose=False, save=False, conf=1e-6, half=True)
    for _ in range(2):
        ours = [fast.predict(picture, **options)[0].boxes.data for picture in pictures]
    stock = [plain.predict(picture, **options)[0].boxes.data for picture in pictures]
    served = fast.predictor.model.model
    assert state(served).counts["captures"] == 2 and state(served).counts["replays"] >= 8
    assert any(len(a) for a in stock)
    for a, b in zip(ours, stock, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


def test_val(cuda, tmp_path, monkeypatch):
    """Validation replays. (Metrics of untrained weights are zero; `test_predict` compares detections.)"""
    data = shapes_dataset.make(tmp_path / "shapes", size=64, train=1, val=8)
    made = []
    stock = graphs.Graphs.__init__
    monkeypatch.setattr(
        graphs.Graphs, "__init__", lambda self, model: made.append(self) or stock(self, model)
    )
    model = YOLO("yolo12n.yaml")
    options = dict(data=str(data), imgsz=64, batch=1, device=0, workers=0, verbose=False, plots=False)
    patch_model(model, cuda_graph=True)
    model.val(project=str(tmp_path), **options)
    assert sum(graph.counts["replays"] for graph in made) >= 4


# ------------------------------------------------------------------------------------------------------------ training


def batch_of(device, seed, count=4, size=96, objects=True):
    generator = torch.Generator().manual_seed(seed)
    boxes = 4 * count if objects else 0
    return {
        "img": torch.rand(count, 3, size, size, generator=generator).to(device),
        "batch_idx": (torch.arange(boxes) // 4).float().to(device),
        "cls": torch.randint(0, 80, (boxes, 1), generator=generator).float().to(device),
        "bboxes": (0.4 * torch.rand(boxes, 4, generator=generator) + 0.2).to(device),
    }


@pytest.fixture
def trained(cuda, yolo12n):
    """A model with graphs and one without, as the trainer has them, in deterministic mode."""
    from ultralytics.cfg import get_cfg

    yolo12n.args = get_cfg()
    yolo12n.requires_grad_(True)
    ours = yolo12n.to(cuda, memory_format=torch.channels_last).train()
    plain = copy.deepcopy(ours)
    patch_modules(ours, cuda_graph=True)
    patch_modules(plain)
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield ours, plain
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = before


def loss_of(model, batch, dtype):
    with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
        return model(batch)[0].sum()


def assert_identical(ours, plain):
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert (a.grad is None) == (b.grad is None), name
        assert a.grad is None or (torch.equal(a.grad, b.grad) and a.grad.stride() == b.grad.stride()), name
    for (name, a), b in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_training_is_identical(cuda, trained, dtype):
    """Losses, gradients, parameters and buffers, bit by bit, over steps with scaling, clipping and accumulation; a
    batch without objects, and an overflow."""
    optimizers = [torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, nesterov=True) for net in trained]
    scalers = [
        torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=dtype is torch.float16) for _ in trained
    ]
    for number in range(10):
        batch = batch_of(cuda, number, objects=number != 6)
        if number in (7, 8) and dtype is torch.float16:
            [scaler.update(2.0**40 if number == 7 else 1024.0) for scaler in scalers]
        losses = []
        for net, scaler in zip(trained, scalers, strict=True):
            losses.append(loss_of(net, batch, dtype))
            scaler.scale(losses[-1]).backward()
        assert torch.equal(*losses)
        if number != 7:
            assert_identical(*trained)
        if number % 2:
            for net, scaler, optimizer in zip(trained, scalers, optimizers, strict=True):
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        if number == 5:
            warm(copy.deepcopy(trained[0]).eval(), batch["img"], 4)
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert state(trained[0]).training.counts == {"eager calls": 2, "captures": 1, "replays": 8}
    assert "GiB" in str(patch_report(trained[0]))


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_what_a_graph_cannot_do_is_done_eagerly(cuda, trained):
    """Forwards before backwards, a second backward, other sizes, and an OOM during the capture."""
    for net in trained:
        for number in range(4):
            loss_of(net, batch_of(cuda, number), torch.float16).backward()
        losses = [loss_of(net, batch_of(cuda, 10 + n, 4 - n // 2), torch.float16) for n in range(3)]
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
        losses[0].backward()
        loss_of(net, batch_of(cuda, 20), torch.float16).backward()
    assert_identical(*trained)
    assert state(trained[0]).training.counts["eager backwards"] == 1, graphs.describe(trained[0])


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_training_graphs_give_their_memory_back(cuda, trained):
    model = trained[0]
    gc.collect()
    torch.cuda.empty_cache()
    reserved = []
    for _ in range(3):
        for number in range(4):
            loss_of(model, batch_of(cuda, number, size=256), torch.float16).backward()
        model.zero_grad()
        graphs.free(model)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved) <= reserved[0] + (8 << 20)
    assert state(model).training.counts["captures"] == 3


@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize(("scale", "size"), [("n", 192), ("m", 128)])
def test_branches_of_a_backward_are_identical(cuda, scale, size, monkeypatch):
    """Gradients of replays with weight gradients beside are those without, bit by bit, from several streams."""
    model = support.build(f"yolo12{scale}.yaml").requires_grad_(True)
    model = model.to(cuda, memory_format=torch.channels_last).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator(cuda).manual_seed(0)
    pictures = [torch.rand(2, 3, size, size, device=cuda, generator=generator) * (1 + n) for n in range(10)]

    def grads(x):
        with torch.autocast("cuda", torch.float16):
            outputs = [y for y in tensors(model(x)) if y.requires_grad]
        gradients = [torch.full_like(y, 1e-2) for y in outputs]
        found = torch.autograd.grad(outputs, parameters, gradients, allow_unused=True)  # not that of `dfl`
        return torch.cat([g.flatten() for g in found if g is not None])

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        patch_modules(model)
        expected = [grads(x) for x in pictures]
        patch_modules(model, cuda_graph=True)
        runs = []
        run = _side_stream.Branches.run
        monkeypatch.setattr(_side_stream.Branches, "run", lambda *a: runs.append(1) or run(*a))
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for number in range(50):
            with torch.cuda.stream(streams[number % 3]):
                assert torch.equal(grads(pictures[number % 10]), expected[number % 10]), number
            torch.cuda.synchronize()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(runs) > 50  # of 113 convolutions; those of one pass have no branch
    assert state(model).training.counts["replays"] == 48


def test_heads_in_branches_are_identical(cuda, yolo12n, monkeypatch):
    model = graphed(yolo12n, cuda)
    pictures = [images(cuda, 1, 3, 320, 320) for _ in range(5)]
    expected = [eager(model, x) for x in pictures]
    runs = []
    run = _side_stream.Branches.run
    monkeypatch.setattr(_side_stream.Branches, "run", lambda *a: runs.append(1) or run(*a))
    for number in range(50):
        found = tensors(warm(model, pictures[number % 5]))
        assert all(torch.equal(a, b) for a, b in zip(found, expected[number % 5], strict=True)), number
    assert len(runs) == 5
