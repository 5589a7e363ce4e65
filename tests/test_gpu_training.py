"""`YOLO.train` of a patched model with CUDA graphs, on a GPU: bit for bit the run without, whatever is switched on; and
what happens when memory runs out.

pytest -m gpu tests/test_gpu_training.py
"""

from __future__ import annotations

import contextlib
import copy
import gc
import shutil
from pathlib import Path
from typing import Any

import cv2
import pytest
import shapes_dataset
import support
import test_gpu_graphs
import torch
from test_gpu_graphs import assert_identical, batch_of, loss_of
from test_training import SETTINGS, Recorder
from ultralytics import YOLO
from ultralytics.utils.autobatch import check_train_batch_size
from ultralytics.utils.torch_utils import unwrap_model

from yolo12_fastconv import _graph_capture, patch_model
from yolo12_fastconv.patching import patch_modules

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic")]
trained = test_gpu_graphs.trained

CONFIGS = {
    "detect": "yolo12n.yaml",
    "segment": "yolo12n-seg.yaml",
    "pose": "yolo12n-pose.yaml",
    "obb": "yolo12n-obb.yaml",
    "classify": "yolo12n-cls.yaml",
}


class Run:
    """A finished run of YOLO.train: its losses, weights, and what the graphs did."""

    def __init__(self, folder: Path, data: Path, model: str | Path, graph: bool, **settings: Any) -> None:
        folder.mkdir(parents=True)
        self.yolo = patch_model(YOLO(model), cuda_graph=graph)
        self.seen = Recorder(self.yolo, folder / "interrupted.pt")
        self.counts: dict[str, int] = {}
        self.sizes: list[torch.Size] = []
        self.yolo.add_callback("on_train_start", self._watch)
        self.yolo.add_callback("on_train_end", self._count)
        options = {**SETTINGS, "device": "0", "amp": True, "epochs": 2, "project": str(folder), **settings}
        self.yolo.train(data=str(data), **options)

    def _watch(self, trainer: Any) -> None:
        stock = trainer.preprocess_batch

        def preprocess(batch: dict[str, Any]) -> dict[str, Any]:
            batch = stock(batch)
            self.sizes.append(batch["img"].shape)
            return batch

        trainer.preprocess_batch = preprocess

    def _count(self, trainer: Any) -> None:
        graphs = vars(unwrap_model(trainer.model)).get("_fc_graphs")
        self.counts = dict(graphs.training.counts) if graphs is not None else {}


def assert_same_runs(ours: Run, plain: Run) -> None:
    assert ours.seen.losses == plain.seen.losses
    assert len(ours.seen.losses) >= 4 and all(torch.isfinite(torch.tensor(ours.seen.losses)))
    for key, value in plain.seen.final.items():
        assert torch.equal(ours.seen.final[key], value), key


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return shapes_dataset.make(tmp_path_factory.mktemp("shapes"), size=64, train=16, val=2)


def both(tmp_path: Path, data: Path, model: str | Path, **settings: Any) -> Run:
    """The run with graphs, compared with the one without."""
    ours, plain = (Run(tmp_path / str(graph), data, model, graph, **settings) for graph in (True, False))
    assert_same_runs(ours, plain)
    assert not plain.counts
    return ours


@pytest.mark.parametrize("task", ["segment", "pose", "obb", "classify"])
def test_tasks(cuda, task, tmp_path):
    data = shapes_dataset.make(tmp_path / "shapes", task, size=64, train=12, val=3)
    run = both(tmp_path, data, CONFIGS[task], epochs=2)
    assert run.counts == {"eager calls": 2, "captures": 1, "replays": 4}


SWITCHES = {
    "bf16": {"amp": "bf16"},
    "float32": {"amp": False},
    "accumulated": {"nbs": 16, "epochs": 3},
    "frozen": {"freeze": 10},
    "all frozen but the head": {"freeze": 21},
    "validated": {"val": True, "epochs": 2},
    "cosine and AdamW": {"optimizer": "AdamW", "cos_lr": True, "warmup_epochs": 1},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(cuda, name, data, tmp_path):
    run = both(tmp_path, data, "yolo12n.yaml", **SWITCHES[name])
    steps = len(run.seen.losses)
    assert run.counts == {"eager calls": 2, "captures": 1, "replays": steps - 2}


def test_multi_scale(cuda, data, tmp_path):
    """Sizes change from step to step: right results, one graph at most, and captures are rare."""
    run = both(tmp_path, data, "yolo12n.yaml", multi_scale=0.5, epochs=6, imgsz=96)
    assert len(set(run.sizes)) >= 2
    assert run.counts["eager calls"] + run.counts.get("replays", 0) == len(run.seen.losses) == 24
    assert run.counts.get("captures", 0) <= 2


def test_rectangles(cuda, tmp_path):
    """Batches of two shapes, one behind the other, in every epoch."""
    data = shapes_dataset.make(tmp_path / "shapes", size=64, train=16, val=2)
    for number, path in enumerate(sorted((data.parent / "images" / "train").iterdir())):
        if number % 2:
            assert cv2.imwrite(str(path), cv2.resize(cv2.imread(str(path)), (64, 32)))
    run = both(tmp_path, data, "yolo12n.yaml", rect=True, epochs=4)
    assert len(set(run.sizes)) >= 2
    assert run.counts.get("captures", 0) <= 3


def test_resumed(cuda, data, tmp_path):
    first = Run(tmp_path / "first", data, "yolo12n.yaml", True, epochs=3)
    resumed = []
    for graph in (True, False):
        folder = tmp_path / str(graph)
        folder.mkdir()
        file = folder / "interrupted.pt"
        shutil.copy(first.seen.keep, file)
        yolo = patch_model(YOLO(file), cuda_graph=graph)
        seen = Recorder(yolo)
        yolo.train(
            resume=True, save_dir=str(folder), data=str(data), val=False, plots=False, workers=0, device="0"
        )
        resumed.append(seen)
    assert resumed[0].losses == resumed[1].losses
    assert len(resumed[0].losses) == 8  # the second and the third epoch
    assert all(torch.equal(resumed[0].final[key], value) for key, value in resumed[1].final.items())


def test_compiled(cuda, data, tmp_path, monkeypatch):
    """compile=True: what is compiled has no graphs of ours, and trains. (With inductor it would take minutes.)

    In strict float. While compiling, other ops compute, and with half or TF32 their other roundings move the loss of a
    first step on 64x64 pixels, whose last maps are 2x2, by 0.1 to 0.2 %.
    """
    stock, compiled = torch.compile, []

    def compile_(model, **options):
        compiled.append(options.pop("backend"))
        options.pop("mode", None)
        return stock(model, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    run = Run(tmp_path / "compiled", data, "yolo12n.yaml", True, compile=True, epochs=1, amp=False)
    plain = Run(tmp_path / "plain", data, "yolo12n.yaml", False, epochs=1, amp=False)
    assert compiled and len(run.seen.losses) == 4 and not run.counts.get("captures")
    # Each step doubles the distance, or more.
    ours, theirs = run.seen.losses[0], plain.seen.losses[0]
    assert abs(ours - theirs) <= 1e-4 * abs(theirs), (run.seen.losses, plain.seen.losses)
    assert all(torch.isfinite(torch.tensor(run.seen.losses)))


# -------------------------------------------------------------------------------------------------------------- memory


@contextlib.contextmanager
def no_memory(left: int = 0):
    """All memory that the allocator holds is taken, down to pieces of a few hundred bytes, and it gets `left` bytes."""
    taken = []
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()  # which a capture does, too
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6)
    try:
        for size in (1 << power for power in range(30, 8, -1)):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + left) / total)
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def pools() -> set[tuple[int, int]]:
    """The memory pools of graphs that hold memory."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()} - {(0, 0)}


@pytest.mark.parametrize("left", [0, 4 << 20], ids=["at once", "on the way"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_out_of_memory_in_a_capture(cuda, trained, phase, left, monkeypatch, log):
    """Training goes on without a graph, from the same step, and the memory of the failed capture is given back."""
    ours, plain = trained
    record = _graph_capture.CudaBackend._record
    calls = []
    before = pools()

    def fail(self, pool, function):
        calls.append(1)
        if len(calls) != (1 if phase == "forward" else 2):
            return record(self, pool, function)
        with no_memory(left):
            return record(self, pool, function)

    monkeypatch.setattr(_graph_capture.CudaBackend, "_record", fail)
    for number in range(5):
        batch = batch_of(cuda, number, size=160)
        losses = [loss_of(net, batch, torch.float16) for net in trained]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        del loss, losses
        assert_identical(ours, plain)
    training = test_gpu_graphs.state(ours).training
    assert len(calls) == (1 if phase == "forward" else 2)
    assert training.failures == 1 and training.entry is None, training.describe()
    lines = [r.getMessage() for r in log.records if "no CUDA graph" in r.getMessage()]
    assert len(lines) == 1 and "out of memory" in lines[0]
    assert pools() <= before, "memory of the failed capture is kept"
    # Another size is captured as ever: after twice as many equal calls, where a forward had been captured for nothing.
    for number in range(6):
        losses = [loss_of(net, batch_of(cuda, number, size=128), torch.float16) for net in trained]
        for loss in losses:
            loss.backward()
    assert_identical(ours, plain)
    assert training.counts["captures"] >= 1 and training.entry is not None, training.describe()


def test_out_of_memory_in_the_first_epoch(cuda, data, tmp_path):
    """Ultralytics halves the batch and goes on: the graph of the larger one is freed before that."""
    trainer_batches, reserved = [], []
    full = contextlib.ExitStack()

    def batch_start(trainer):
        trainer_batches.append(trainer.batch_size)
        if len(trainer_batches) == 4:  # the second replay
            full.enter_context(no_memory())
            reserved.append(torch.cuda.memory_reserved())

    def epoch_start(trainer):
        if len(trainer_batches) == 4:
            full.close()
            network = unwrap_model(trainer.model)
            graphs = vars(network)["_fc_graphs"].training
            reserved.append(graphs.entry is None)

    yolo = patch_model(YOLO("yolo12n.yaml"), cuda_graph=True)
    yolo.add_callback("on_train_batch_start", batch_start)
    yolo.add_callback("on_train_epoch_start", epoch_start)
    seen = Recorder(yolo)
    counts = {}
    yolo.add_callback(
        "on_train_end",
        lambda trainer: counts.update(vars(unwrap_model(trainer.model))["_fc_graphs"].training.counts),
    )
    try:
        yolo.train(
            data=str(data),
            **{**SETTINGS, "device": "0", "amp": True, "epochs": 2, "imgsz": 128},
            project=str(tmp_path),
        )
    finally:
        full.close()
    assert trainer_batches[:5] == [4, 4, 4, 4, 2] and trainer_batches[-1] == 2
    assert reserved[1] is True, "the graph was kept"
    assert len(seen.losses) == 3 + 8 + 8 and all(torch.isfinite(torch.tensor(seen.losses)))
    assert counts["captures"] == 2 and counts["replays"] >= 1 + 14, counts


@pytest.mark.parametrize("scale", ["n"])
def test_batch_size_by_memory(cuda, scale):
    """AutoBatch profiles copies of the patched model; with its batch, a step with graphs needs about the memory that it
    was chosen for."""
    fraction = 4 * 2**30 / torch.cuda.get_device_properties(cuda).total_memory
    stock = support.build(f"yolo12{scale}.yaml").to(cuda, memory_format=torch.channels_last).train()
    stock.requires_grad_(True)
    model = copy.deepcopy(stock)
    patch_modules(model, cuda_graph=True)

    found = [check_train_batch_size(net, 320, True, batch=fraction) for net in (model, stock)]
    assert "_fc_graphs" not in vars(model)  # copies were profiled
    assert found[0] >= found[1], found  # at 320 pixels, few tensors are large enough to be computed again
    del stock
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    from ultralytics.cfg import get_cfg

    model.args = get_cfg()
    for number in range(5):
        loss_of(model, batch_of(cuda, number, found[0], 320), torch.float16).backward()
    training = test_gpu_graphs.state(model).training
    assert training.counts["replays"] == 3 and not training.failures, training.describe()
    used = torch.cuda.max_memory_reserved() / 2**30
    free = torch.cuda.mem_get_info()[0] / 2**30
    assert used <= 4 * 1.5, (
        f"{used:.2f} GiB for a batch of {found[0]} that 4 GiB were meant for ({free:.1f} free)"
    )
