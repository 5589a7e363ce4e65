"""Training with Ultralytics: what is patched and when, checkpoints, resume, DDP, and equality with stock."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import cpu_ranks
import pytest
import shapes_dataset
import torch
from logs import logged
from support import assert_same_buffers, assert_same_grads, build, patched_copy
from torch import nn
from ultralytics import YOLO
from ultralytics.cfg import get_cfg
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.nn.autobackend import AutoBackend
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.dist import ddp_cleanup, generate_ddp_file

from yolo12_fastconv import PatchError, _autopatch, graphs, patch_model, training, unpatch_model
from yolo12_fastconv.patching import patch_modules
from yolo12_fastconv.training import count_blocks

BLOCKS = 113
ALL, NONE = (BLOCKS, BLOCKS), (0, BLOCKS)

SETTINGS = {
    "imgsz": 64, "epochs": 1, "batch": 4, "nbs": 4, "workers": 0, "device": "cpu", "plots": False, "val": False,
    "optimizer": "SGD", "lr0": 0.01, "warmup_epochs": 0, "seed": 0, "amp": False, "verbose": False,
}  # fmt: skip


class Recorder:
    """Callbacks that note what happens in a run."""

    def __init__(self, yolo: YOLO, keep: Path | None = None) -> None:
        self.trainers: list[str] = []
        self.blocks: list[tuple[int, int]] = []
        self.ema_blocks: list[tuple[int, int]] = []
        self.losses: list[float] = []
        self.final: dict[str, torch.Tensor] = {}
        self.keep = keep
        yolo.add_callback("on_train_start", self.on_train_start)
        yolo.add_callback("on_train_batch_end", self.on_train_batch_end)
        yolo.add_callback("on_model_save", self.on_model_save)
        yolo.add_callback("on_train_end", self.on_train_end)

    def on_train_start(self, trainer: Any) -> None:
        self.trainers.append(type(trainer).__name__)
        self.blocks.append(count_blocks(trainer.model))
        self.ema_blocks.append(count_blocks(trainer.ema.ema))

    def on_train_batch_end(self, trainer: Any) -> None:
        self.losses.append(trainer.loss.item())

    def on_model_save(self, trainer: Any) -> None:
        if self.keep is not None and not self.keep.exists():  # as it is after the first epoch: resumable
            shutil.copy(trainer.last, self.keep)

    def on_train_end(self, trainer: Any) -> None:
        self.final = {key: value.clone() for key, value in trainer.model.state_dict().items()}


class Run:
    """One finished training run."""

    def __init__(self, folder: Path, data: Path, model: str | Path, patched: bool, **settings: Any) -> None:
        self.yolo = patch_model(YOLO(model)) if patched else YOLO(model)
        self.interrupted = folder / "interrupted.pt"
        folder.mkdir()
        self.seen = Recorder(self.yolo, self.interrupted)
        with logged() as self.log:
            self.yolo.train(data=str(data), **{**SETTINGS, "project": str(folder), **settings})
        self.best, self.last = Path(self.yolo.trainer.best), Path(self.yolo.trainer.last)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return shapes_dataset.make(tmp_path_factory.mktemp("shapes"), size=64, train=8, val=4)


@pytest.fixture(scope="module")
def patched_run(data, tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("runs") / "patched", data, "yolo12n.yaml", True, epochs=2)


@pytest.fixture(scope="module")
def stock_run(data, tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("runs") / "stock", data, "yolo12n.yaml", False, epochs=2)


@pytest.fixture
def hook():
    training.install()
    yield
    training.uninstall()


def relative_gap(ours: list[float], stock: list[float]) -> float:
    assert len(ours) == len(stock)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, stock, strict=True))


def boxes_batch(pictures: int, size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A random training batch with two boxes a picture."""
    generator = torch.Generator().manual_seed(seed)
    count = 2 * pictures
    return {
        "img": torch.rand(pictures, 3, size, size, generator=generator),
        "cls": torch.randint(3, (count, 1), generator=generator).float(),
        "bboxes": torch.rand(count, 4, generator=generator) * 0.3 + 0.35,
        "batch_idx": torch.arange(pictures).repeat_interleave(2).float(),
    }


def detection_model(nc: int = 3, seed: int = 0) -> DetectionModel:
    torch.manual_seed(seed)
    model = DetectionModel("yolo12n.yaml", nc=nc, verbose=False)
    model.args = get_cfg()
    return model.train()


# ------------------------------------------------------------------------------------------------ what is patched, when


def test_trainer_model_and_ema_are_patched(patched_run):
    seen = patched_run.seen
    assert (seen.trainers, seen.blocks, seen.ema_blocks) == (["FastDetectionTrainer"], [ALL], [ALL])
    assert len(seen.losses) == 4
    assert all(torch.isfinite(torch.tensor(seen.losses)))


def test_training_says_once_how_many_blocks_are_patched(patched_run, stock_run):
    lines = [line for line in patched_run.log if line.startswith("yolo12_fastconv: training")]
    assert lines == [
        f"yolo12_fastconv: training with {BLOCKS} of {BLOCKS} Conv blocks patched (the EMA is a copy of this model)"
    ]
    assert not [line for line in stock_run.log if "yolo12_fastconv" in line]


def test_yolo_is_patched_after_training_and_validates_and_predicts_patched(patched_run, data, tmp_path):
    yolo = patched_run.yolo
    assert count_blocks(yolo.model) == ALL
    assert type(yolo) is training.FastYOLO
    found: list[tuple[int, int]] = []
    original = AutoBackend.forward

    def forward(self, *args, **kwargs):
        found.append(count_blocks(self.model))
        return original(self, *args, **kwargs)

    AutoBackend.forward = forward
    try:
        metrics = yolo.val(data=str(data), imgsz=64, device="cpu", plots=False, project=str(tmp_path))
        results = yolo.predict(str(data.parent / "images" / "val"), imgsz=64, device="cpu")
    finally:
        AutoBackend.forward = original
    assert len(results) == 4
    assert 0 <= metrics.box.map50 <= 1
    assert set(found) == {ALL}


def test_unpatched_yolo_trains_stock_again(data, tmp_path):
    yolo = unpatch_model(patch_model(YOLO("yolo12n.yaml")))
    assert type(yolo) is YOLO
    assert "_fastconv_options" not in vars(yolo)
    seen = Recorder(yolo)
    yolo.train(data=str(data), **SETTINGS, project=str(tmp_path))
    assert (seen.trainers, seen.blocks, seen.ema_blocks) == (["DetectionTrainer"], [NONE], [NONE])
    assert count_blocks(yolo.model) == NONE


@pytest.mark.parametrize("task", ["segment", "pose", "obb", "classify"])
def test_other_tasks_train_patched(task, tmp_path):
    suffix = {"segment": "seg", "classify": "cls"}.get(task, task)
    yolo = patch_model(YOLO(f"yolo12n-{suffix}.yaml"))
    seen = Recorder(yolo)
    data = shapes_dataset.make(tmp_path / "shapes", task, size=64, train=6, val=3)
    yolo.train(data=str(data), **{**SETTINGS, "batch": 3}, project=str(tmp_path))
    trainer = type(yolo.trainer)
    assert trainer in vars(training).values()
    assert issubclass(trainer, training.FastConvTrainerMixin)
    blocks = {"segment": 122, "pose": 119, "obb": 119, "classify": 58}[task]
    assert (seen.blocks, seen.ema_blocks) == ([(blocks, blocks)], [(blocks, blocks)])
    assert count_blocks(yolo.model) == (blocks, blocks)
    assert all(torch.isfinite(torch.tensor(seen.losses)))


def test_failed_training_leaves_the_model_patched(patched_run, data, tmp_path):
    class Interrupted(KeyboardInterrupt):
        pass

    def interrupt(trainer):
        raise Interrupted

    yolo = patch_model(YOLO(patched_run.best))
    yolo.add_callback("on_train_batch_start", interrupt)
    with pytest.raises(Interrupted):
        yolo.train(data=str(data), **SETTINGS, project=str(tmp_path))
    assert count_blocks(yolo.model) == ALL
    # Ended before the trainer set its model up: `YOLO.model` is then the freshly built, stock one.
    yolo.clear_callback("on_train_batch_start")
    yolo.add_callback("on_pretrain_routine_start", interrupt)
    with pytest.raises(Interrupted):
        yolo.train(data=str(data), **SETTINGS, project=str(tmp_path))
    assert count_blocks(yolo.model) == ALL


def test_options_of_patching_hold_in_training(data, tmp_path):
    yolo = patch_model(YOLO("yolo12n.yaml"), exclude=["model.0", "model.21.cv2.*"])
    before = {name for name, block in yolo.model.named_modules() if type(block) in training.STOCK}
    assert len(before) == BLOCKS - 7
    found = []
    yolo.add_callback("on_train_start", lambda trainer: found.extend([trainer.model, trainer.ema.ema]))
    yolo.train(data=str(data), **SETTINGS, project=str(tmp_path))
    for model in [*found, yolo.model]:
        assert {name for name, block in model.named_modules() if type(block) in training.STOCK} == before


def test_strict_holds_in_training(monkeypatch):
    yolo = YOLO("yolo12n.yaml")
    patch_modules(yolo.model)
    training.adopt(yolo, strict=True)  # `patch_model` would refuse it on a machine without a GPU
    trainer = training.fast_trainer(DetectionTrainer, **yolo._fastconv_options)
    instance = trainer.__new__(trainer)
    instance.model = detection_model()
    if torch.cuda.is_available():
        instance.setup_model()
        assert all("_fc_strict" in vars(m) for m in instance.model.modules() if type(m) in training.STOCK)
    else:
        with pytest.raises(PatchError, match="strict"):
            instance.setup_model()
        assert count_blocks(instance.model) == NONE


def test_disable_switch_trains_stock(monkeypatch, data, tmp_path):
    yolo = patch_model(YOLO("yolo12n.yaml"))
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    seen = Recorder(yolo)
    yolo.train(data=str(data), **SETTINGS, project=str(tmp_path))
    assert (seen.trainers, seen.blocks, seen.ema_blocks) == (["DetectionTrainer"], [NONE], [NONE])
    assert count_blocks(yolo.model) == NONE
    assert training.install() is False


class OwnTrainer(DetectionTrainer):
    """A user's trainer."""


def test_own_trainers_are_patched(data, tmp_path):
    made = []

    def factory(*args, **kwargs):
        made.append(OwnTrainer(*args, **kwargs))
        return made[-1]

    for trainer in (OwnTrainer, functools.partial(factory)):
        yolo = patch_model(YOLO("yolo12n.yaml"))
        seen = Recorder(yolo)
        yolo.train(trainer=trainer, data=str(data), **SETTINGS, project=str(tmp_path))
        assert isinstance(
            yolo.trainer, OwnTrainer if trainer is not training.FastDetectionTrainer else trainer
        )
        assert "Trainer" in type(yolo.trainer).__name__
        assert (seen.blocks, seen.ema_blocks) == ([ALL], [ALL])
    assert made == [yolo.trainer]


def test_training_does_not_fill_memory(monkeypatch):
    seen = []

    class Trainer:
        def train(self):
            seen.append(torch.utils.deterministic.fill_uninitialized_memory)
            raise ValueError("no data")

    class Fast(training.FastConvTrainerMixin, Trainer):
        pass

    for disabled in (False, True):
        if disabled:
            monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
        with pytest.raises(ValueError, match="no data"):
            Fast().train()
        assert torch.utils.deterministic.fill_uninitialized_memory, "put back after an error"
    assert seen == [False, True]


def test_trainer_must_be_callable():
    with pytest.raises(TypeError, match="trainer must be a trainer class, got 'DetectionTrainer'"):
        patch_model(YOLO("yolo12n.yaml")).train(trainer="DetectionTrainer")


def test_fast_trainer_is_idempotent_and_importable():
    fast = training.fast_trainer(DetectionTrainer)
    assert fast is training.FastDetectionTrainer
    assert training.fast_trainer(fast) is fast
    assert pickle.loads(pickle.dumps(fast)) is fast
    assert training.fast_trainer(fast, exclude=None, strict=False) is fast
    excluding = training.fast_trainer(fast, exclude="model.0")
    assert excluding.fastconv_options == {"exclude": "model.0"}
    assert fast.fastconv_options == {}
    assert training.fast_trainer(excluding, exclude="model.0") is excluding


def test_several_data_sets(data, tmp_path):
    other = shapes_dataset.make(tmp_path / "other", size=64, train=4, val=2, seed=1)
    yolo = patch_model(YOLO("yolo12n.yaml"))
    seen = Recorder(yolo)
    metrics = yolo.train(data=[str(data), str(other)], **SETTINGS, project=str(tmp_path / "runs"))
    assert len(metrics) == 2
    assert all(metrics.values())
    assert (seen.blocks, seen.ema_blocks) == ([ALL, ALL], [ALL, ALL])
    assert count_blocks(yolo.model) == ALL


def test_frozen_layers(data, tmp_path):
    stock, fast = (Run(tmp_path / str(p), data, "yolo12n.yaml", p, freeze=5).seen for p in (False, True))
    assert fast.blocks == [ALL]
    assert fast.final.keys() == stock.final.keys()
    for key, value in stock.final.items():
        if int(key.split(".")[1]) < 5:  # running statistics too: frozen batch norms are in evaluation mode
            assert torch.equal(fast.final[key], value), key
    assert fast.final["model.4.cv1.bn.num_batches_tracked"] == 0
    assert fast.final["model.5.bn.num_batches_tracked"] == 2
    assert relative_gap(fast.losses, stock.losses) <= 1e-3


# ------------------------------------------------------------------------------------------------------- YOLO objects


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_copies_and_pickles_of_a_yolo_object_are_patched(cuda_graph):
    yolo = patch_model(YOLO("yolo12n.yaml"), exclude="model.0", cuda_graph=cuda_graph)
    for twin in (copy.deepcopy(yolo), pickle.loads(pickle.dumps(yolo))):
        assert type(twin) is training.FastYOLO
        assert count_blocks(twin.model) == (BLOCKS - 1, BLOCKS)
        graph = {"cuda_graph": True} if cuda_graph else {}
        assert twin._fastconv_options == {"exclude": "model.0", **graph}
        assert count_blocks(unpatch_model(twin).model) == NONE
        assert type(twin) is YOLO
    assert count_blocks(yolo.model) == (BLOCKS - 1, BLOCKS)


def test_a_copy_of_a_stock_yolo_object_with_a_patched_network():
    yolo = YOLO("yolo12n.yaml")
    patch_modules(yolo.model)
    twin = copy.deepcopy(yolo)
    assert type(twin) is YOLO and type(twin.model) is type(yolo.model) and twin.model is not yolo.model
    assert count_blocks(twin.model) == ALL


class OwnYOLO(YOLO):
    """A user's model class."""


def test_subclasses_of_model_stay_what_they_are():
    yolo = patch_model(OwnYOLO("yolo12n.yaml"))
    assert isinstance(yolo, OwnYOLO)
    assert isinstance(yolo, training.FastModelMixin)
    assert type(patch_model(OwnYOLO("yolo12n.yaml"))) is type(yolo)
    twin = pickle.loads(pickle.dumps(yolo))
    assert type(twin) is type(yolo)
    assert count_blocks(twin.model) == ALL
    assert type(unpatch_model(yolo)) is OwnYOLO


def test_rtdetr_and_world_are_adopted():
    from ultralytics import RTDETR, YOLOWorld

    for cls in (RTDETR, YOLOWorld):
        yolo = cls.__new__(cls)
        nn.Module.__init__(yolo)
        yolo.model = nn.Identity()
        training.adopt(yolo)
        assert isinstance(yolo, (cls, training.FastModelMixin))
        assert type(yolo).__name__ == f"Fast{cls.__name__}"
        training.release(yolo)
        assert type(yolo) is cls


def test_loading_weights_with_other_classes_leaves_no_stock_block():
    yolo = patch_model(YOLO("yolo12n.yaml"))
    yolo.load(detection_model(nc=3))  # the class branch of the head is rebuilt from the source
    assert count_blocks(yolo.model) == ALL


@pytest.mark.parametrize("nc", [80, 1, 3, 67])
def test_as_many_weights_are_transferred_as_between_stock_models(nc):
    def transferred(patch_target: bool, patch_source: bool) -> list[str]:
        target, source = detection_model(nc), detection_model(80, seed=1)
        for model, patch in ((target, patch_target), (source, patch_source)):
            if patch:
                patch_modules(model)
        with logged() as messages:
            target.load(source)
        return [line for line in messages if line.startswith("Transferred")]

    stock = transferred(False, False)
    assert len(stock) == 1
    assert transferred(True, False) == transferred(False, True) == transferred(True, True) == stock


# -------------------------------------------------------------------------------------------------------- checkpoints


def plugin_names(path: Path) -> list[str]:
    """Globals and other strings in the pickles of a file that name the package."""
    with zipfile.ZipFile(path) as archive:
        pickles = [archive.read(name) for name in archive.namelist() if name.endswith(".pkl")]
    assert pickles
    arguments = [argument for data in pickles for _, argument, _ in pickletools.genops(data)]
    return [a for a in arguments if isinstance(a, str) and re.match(r"yolo12_fastconv([.\s]|$)", a)]


def test_checkpoints_hold_stock_classes_only(patched_run, tmp_path):
    raw = tmp_path / "raw.pt"
    torch.save(patched_run.yolo.model, raw)
    saved = tmp_path / "saved.pt"
    patched_run.yolo.save(saved)
    for path in (patched_run.best, patched_run.last, patched_run.interrupted, saved, raw):
        assert plugin_names(path) == [], path
    named = tmp_path / "named.pt"
    torch.save(training.FastYOLO, named)
    assert plugin_names(named), "the search finds nothing where the package is named"


BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "yolo12_fastconv":
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
import torch
from ultralytics import YOLO

folder, *files = sys.argv[1:]
x = torch.load(folder + "/x.pt")
outputs = []
for file in files:
    stock = torch.load(file, map_location="cpu", weights_only=False)
    assert (stock.get("ema") or stock["model"]) is not None
    with torch.inference_mode():
        outputs.append(YOLO(file).model.float().eval()(x)[0])
assert "yolo12_fastconv" not in sys.modules
torch.save(outputs, folder + "/outputs.pt")
"""


def test_checkpoints_open_without_the_package_and_under_safe_load(patched_run, images, tmp_path):
    files = [patched_run.best, patched_run.last, patched_run.interrupted]
    torch.save(images, tmp_path / "x.pt")
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(tmp_path), *map(str, files)],
        env={**os.environ, "ULTRALYTICS_SAFE_LOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = torch.load(tmp_path / "outputs.pt")
    for file, output in zip(files, outputs, strict=True):
        with torch.inference_mode():
            stock = YOLO(file).model.eval()(images)[0]
            fast = patch_model(YOLO(file)).model.eval()(images)[0]
        torch.testing.assert_close(output, stock, rtol=0, atol=0)
        torch.testing.assert_close(fast, stock, rtol=1e-4, atol=1e-4)


def test_resume_from_patched_to_stock_and_back(patched_run, stock_run, data, tmp_path):
    for origin in (patched_run, stock_run):
        losses = []
        for patched in (False, True):
            yolo = YOLO(origin.interrupted)
            assert yolo.ckpt["optimizer"] is not None
            if patched:
                patch_model(yolo)
            seen = Recorder(yolo)
            folder = tmp_path / f"{id(origin)}{patched}"
            yolo.train(resume=True, save_dir=str(folder), data=str(data), val=False, plots=False, workers=0)
            assert seen.blocks == seen.ema_blocks == [ALL if patched else NONE]
            assert yolo.trainer.start_epoch == 1
            losses.append(seen.losses)
        assert len(losses[0]) == 2
        assert relative_gap(losses[1][:1], losses[0][:1]) <= 1e-5
        assert relative_gap(losses[1], losses[0]) <= 1e-3


def test_model_can_be_copied_and_pickled_between_forward_and_backward():
    model = detection_model()
    patch_modules(model)
    batch = boxes_batch(2, 64)
    loss = model(batch)[0].sum()
    twin = copy.deepcopy(model)
    pickle.loads(pickle.dumps(model))
    loss.backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".dfl." not in name)
    assert all(p.grad is None for p in twin.parameters())
    storages = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()] if t.numel()}
    assert not storages & {
        t.untyped_storage().data_ptr() for t in [*twin.parameters(), *twin.buffers()] if t.numel()
    }


# -------------------------------------------------------------------------------------------------- equality with stock


def test_losses_of_a_run_equal_stock(patched_run, stock_run):
    ours, stock = patched_run.seen, stock_run.seen
    assert relative_gap(ours.losses[:1], stock.losses[:1]) <= 1e-6
    assert relative_gap(ours.losses, stock.losses) <= 1e-3
    assert ours.final.keys() == stock.final.keys()
    for key, value in stock.final.items():
        assert ours.final[key].dtype == value.dtype
        if not value.is_floating_point():
            assert torch.equal(ours.final[key], value), key


def test_gradients_and_buffers_of_a_step_equal_stock():
    stock = detection_model()
    fast = copy.deepcopy(stock)
    patch_modules(fast)
    batch = boxes_batch(4, 64)
    losses, grads = [], []
    for model in (stock, fast):
        loss, _ = model({key: value.clone() for key, value in batch.items()})
        loss.sum().backward()
        losses.append(loss.sum().item())
        grads.append({name: p.grad for name, p in model.named_parameters()})
    assert relative_gap(losses[1:], losses[:1]) <= 1e-6
    assert_same_grads(grads[1], grads[0], 1e-4)
    assert_same_buffers(fast, stock, 1e-5)


def descend(model: nn.Module, steps: int, lr: float, size: int, autocast: bool = False) -> list[float]:
    """Losses of a classifier over some steps of SGD, each on eight random pictures of its own."""
    model.train().requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for index in range(steps):
        generator = torch.Generator().manual_seed(index)
        pictures = torch.rand(8, 3, size, size, generator=generator)
        labels = torch.randint(3, (8,), generator=generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(model(pictures).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ten_losses_agree_as_two_stock_runs_do():
    """Two stock runs that differ in the order of summation alone (memory format) set the measure."""
    start = build("yolo12n-cls.yaml")
    stock = descend(copy.deepcopy(start), 10, 0.01, 64)
    noise = relative_gap(
        descend(copy.deepcopy(start).to(memory_format=torch.channels_last), 10, 0.01, 64), stock
    )
    assert relative_gap(descend(patched_copy(start), 10, 0.01, 64), stock) <= 2 * noise + 1e-5


def test_fifty_steps_under_bfloat16_autocast(tiny):
    ours = descend(patched_copy(tiny), 50, 0.005, 32, autocast=True)
    stock = descend(tiny, 50, 0.005, 32, autocast=True)
    assert all(torch.isfinite(torch.tensor(ours)))
    assert abs(sum(ours) / sum(stock) - 1) < 0.01


def test_two_runs_from_one_seed_are_bit_equal(patched_run, data, tmp_path):
    again = Run(tmp_path / "again", data, "yolo12n.yaml", True, epochs=2)
    assert again.seen.losses == patched_run.seen.losses
    for key, value in patched_run.seen.final.items():
        assert torch.equal(again.seen.final[key], value), key


# ------------------------------------------------------------------------------------- other processes: DDP, tune, hook


def run_ddp_script(trainer: DetectionTrainer, *launcher: str) -> dict[str, list[str]]:
    """Execute the script that Ultralytics writes for the ranks of a multi-GPU run; what the callbacks printed there."""
    file = generate_ddp_file(trainer)
    try:
        done = subprocess.run([sys.executable, *launcher, file], capture_output=True, text=True)
    finally:
        ddp_cleanup(trainer, file)
    assert done.returncode == 0, done.stdout + done.stderr
    printed: dict[str, list[str]] = {"BLOCKS": [], "WEIGHTS": []}
    for line in done.stdout.splitlines():
        key, _, text = line.partition(" ")
        if key in printed:
            printed[key].append(text)
    return printed


def test_two_ranks_train_patched_and_alike(data, tmp_path):
    overrides = {**SETTINGS, "data": str(data), "model": "yolo12n.yaml", "project": str(tmp_path)}
    trainer = cpu_ranks.CpuRanksTrainer(overrides=overrides)
    trainer.add_callback("on_train_start", cpu_ranks.report_blocks)
    trainer.add_callback("on_fit_epoch_end", cpu_ranks.report_weights)
    trainer.model = patched_copy(detection_model())
    printed = run_ddp_script(trainer, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    assert printed["BLOCKS"] == [f"_CpuParallel {BLOCKS} {BLOCKS} {BLOCKS} {BLOCKS}"] * 2
    assert len(printed["WEIGHTS"]) == 2
    assert len(set(printed["WEIGHTS"])) == 1
    assert plugin_names(trainer.last) == []


def test_ranks_get_own_trainers_and_options(data, tmp_path):
    class LocalTrainer(DetectionTrainer):  # can be pickled by value only
        pass

    options = {"exclude": lambda name, block: name == "model.0"}
    overrides = {**SETTINGS, "data": str(data), "model": "yolo12n.yaml", "project": str(tmp_path)}
    trainer = training.fast_trainer(LocalTrainer, **options)(overrides=overrides)
    assert type(trainer).__name__ == "FastConvLocalTrainer"
    trainer.add_callback("on_train_start", cpu_ranks.report_blocks)
    trainer.model = detection_model()
    patch_modules(trainer.model, **options)
    blocks = f"{BLOCKS - 1} {BLOCKS}"
    assert run_ddp_script(trainer)["BLOCKS"] == [f"DetectionModel {blocks} {blocks}"]


def test_old_ultralytics_refuses_what_it_cannot_hand_to_the_ranks(monkeypatch):
    from ultralytics.utils import dist

    def generate_ddp_file(trainer):  # as in releases that write `from module import name`
        return f"from {type(trainer).__module__} import {type(trainer).__name__}"

    def instance(cls):
        trainer = cls.__new__(cls)
        trainer.ddp = True
        return trainer

    trained = []
    monkeypatch.setattr(dist, "generate_ddp_file", generate_ddp_file)
    monkeypatch.setattr(DetectionTrainer, "train", lambda self: trained.append(type(self)))
    instance(training.FastDetectionTrainer).train()
    assert trained == [training.FastDetectionTrainer]
    for cls in (
        training.fast_trainer(OwnTrainer),
        training.fast_trainer(DetectionTrainer, exclude="model.0"),
    ):
        with pytest.raises(RuntimeError, match=r"cannot hand .* update Ultralytics"):
            instance(cls).train()
    assert len(trained) == 1


def test_tune_asks_its_processes_to_patch(monkeypatch):
    seen = []
    monkeypatch.setattr(
        YOLO, "tune", lambda self, *args, **kw: seen.append(os.environ.get(_autopatch.ENABLE))
    )
    monkeypatch.setattr(_autopatch, "installed", lambda: True)
    yolo = patch_model(YOLO("yolo12n.yaml"))
    with logged() as messages:
        yolo.tune(iterations=1)
    assert seen == ["1"]
    assert messages == []
    assert _autopatch.ENABLE not in os.environ


def test_cuda_graphs_reach_trainers_and_other_processes(monkeypatch):
    seen = []
    variables = (_autopatch.ENABLE, "YOLO12_FASTCONV_CUDA_GRAPH")
    monkeypatch.setattr(
        YOLO, "tune", lambda self, *args, **kw: seen.append([*map(os.environ.get, variables)])
    )
    monkeypatch.setattr(_autopatch, "installed", lambda: True)
    yolo = patch_model(YOLO("yolo12n.yaml"), cuda_graph=True)
    with logged() as messages:
        yolo.tune(iterations=1)
    assert seen == [["1", "1"]] and messages == [] and not any(name in os.environ for name in variables)
    # The process-wide patch takes the variable; a patch by hand does not.
    model = YOLO("yolo12n.yaml").model
    monkeypatch.setenv("YOLO12_FASTCONV_CUDA_GRAPH", "1")
    training.patch_for_training(model, {})
    assert not graphs.enabled(model)
    training.install()
    try:
        training.patch_for_training(model, {})
        assert graphs.enabled(model)
        block = model.model[0]  # no task model: patched without graphs
        training.patch_for_training(block, {})
        assert not graphs.enabled(block)
    finally:
        training.uninstall()


def test_graphs_of_the_ema_are_freed_after_validation(monkeypatch):
    freed = []
    monkeypatch.setattr(graphs, "free", freed.append)
    monkeypatch.setattr(DetectionTrainer, "validate", lambda self: ({"fitness": 1.0}, 1.0))
    trainer = object.__new__(training.FastDetectionTrainer)
    assert trainer.validate() == ({"fitness": 1.0}, 1.0) and not freed
    ema = types.SimpleNamespace(ema=torch.nn.Identity())
    trainer.ema = ema
    trainer.validate()
    assert freed == [ema.ema]


def test_tune_says_when_its_processes_stay_stock(monkeypatch):
    seen = []
    monkeypatch.setattr(
        YOLO, "tune", lambda self, *args, **kw: seen.append(os.environ.get(_autopatch.ENABLE))
    )
    monkeypatch.setattr(_autopatch, "installed", lambda: False)
    with logged() as messages:
        patch_model(YOLO("yolo12n.yaml")).tune(iterations=1)
        patch_model(YOLO("yolo12n.yaml"), exclude="model.0").tune(iterations=1)
    warnings = [line for line in messages if "tune()" in line]
    assert len(warnings) == 2
    assert "is not in site-packages" in warnings[0]
    assert "cannot be told what to leave out" in warnings[1]
    assert seen == ["1", None]


def test_install_covers_training_and_prediction(hook, data, tmp_path):
    yolo = YOLO("yolo12n.yaml")
    assert type(yolo) is YOLO
    seen = Recorder(yolo)
    yolo.train(data=str(data), **SETTINGS, project=str(tmp_path))
    assert (seen.trainers, seen.blocks, seen.ema_blocks) == (["FastDetectionTrainer"], [ALL], [ALL])
    assert count_blocks(yolo.model) == NONE
    yolo.predict(str(data.parent / "images" / "val"), imgsz=64, device="cpu")
    assert count_blocks(yolo.predictor.model.model) == ALL
    assert count_blocks(yolo.model) == NONE


def test_install_covers_trainers_that_no_yolo_object_chose(hook, data, tmp_path):
    trainer = OwnTrainer(
        overrides={**SETTINGS, "data": str(data), "model": "yolo12n.yaml", "project": str(tmp_path)}
    )
    seen: list[tuple[int, int]] = []
    trainer.add_callback("on_train_start", lambda t: seen.append(count_blocks(t.ema.ema)))
    trainer.train()
    assert seen == [ALL]


def test_install_leaves_models_patched_by_hand_alone(hook, yolo12n):
    patch_modules(yolo12n, exclude="model.0")
    backend = AutoBackend(yolo12n, verbose=False)
    assert count_blocks(backend.model) == (BLOCKS - 1, BLOCKS)


def test_install_is_idempotent_and_uninstall_restores_everything():
    from ultralytics.engine.model import Model
    from ultralytics.engine.trainer import BaseTrainer

    def methods():
        return vars(Model)["_smart_load"], vars(BaseTrainer)["setup_model"], vars(AutoBackend)["__init__"]

    stock = methods()
    assert training.install() is True
    wrapped = methods()
    assert all(a is not b for a, b in zip(stock, wrapped, strict=True))
    assert training.install() is True
    assert methods() == wrapped
    training.uninstall()
    assert methods() == stock
    training.uninstall()
    assert methods() == stock
    assert YOLO("yolo12n.yaml")._smart_load("trainer") is DetectionTrainer


def test_uninstall_under_somebody_elses_wrapper_only_passes_on():
    from ultralytics.engine.model import Model

    training.install()
    ours = vars(Model)["_smart_load"]
    try:
        Model._smart_load = lambda self, key: ours(self, key)
        training.uninstall()
        assert YOLO("yolo12n.yaml")._smart_load("trainer") is DetectionTrainer
        training.install()
        assert YOLO("yolo12n.yaml")._smart_load("trainer") is training.FastDetectionTrainer
    finally:
        Model._smart_load = ours
        training.uninstall()
    assert vars(Model)["_smart_load"] is not ours


# ----------------------------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [False, True, "bf16"], ids=["fp32", "fp16", "bf16"])
def test_training_on_the_gpu(cuda, amp, data, tmp_path):
    yolo = patch_model(YOLO("yolo12n.yaml"))
    seen = Recorder(yolo)
    yolo.train(data=str(data), **{**SETTINGS, "device": "0", "amp": amp}, project=str(tmp_path))
    assert (seen.blocks, seen.ema_blocks) == ([ALL], [ALL])
    assert all(torch.isfinite(torch.tensor(seen.losses)))
    assert plugin_names(Path(yolo.trainer.best)) == []
    assert count_blocks(yolo.model) == ALL
    assert count_blocks(YOLO(yolo.trainer.best).model) == NONE
    yolo.predict(str(data.parent / "images" / "val"), imgsz=64, device="0", verbose=False)
    assert count_blocks(yolo.predictor.model.model) == ALL


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "fp16"])
def test_two_gpu_runs_from_one_seed_are_bit_equal(cuda, amp, data, tmp_path):
    runs = [
        Run(tmp_path / str(i), data, "yolo12n.yaml", True, epochs=2, device="0", amp=amp, deterministic=True)
        for i in range(2)
    ]
    assert runs[0].seen.losses == runs[1].seen.losses
    for key, value in runs[0].seen.final.items():
        assert torch.equal(runs[1].seen.final[key], value), key


@pytest.mark.gpu
def test_losses_on_the_gpu_are_near_stock(cuda, data, tmp_path):
    runs = [
        Run(tmp_path / str(patched), data, "yolo12n.yaml", patched, epochs=2, device="0")
        for patched in (False, True)
    ]
    assert relative_gap(runs[1].seen.losses[:1], runs[0].seen.losses[:1]) <= 1e-3  # TF32 on both sides
    assert abs(sum(runs[1].seen.losses) / sum(runs[0].seen.losses) - 1) < 0.02
