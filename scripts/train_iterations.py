"""Whole iterations of YOLO.train on generated pictures: time, phases, GPU-busy share, memory.

For benchmark.py train scope=iteration, ddp and convergence. A module of its own without the rest of the benchmark,
because the ranks of a multi-GPU run import it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timing
import torch
from bench_options import OURS

PICTURES = 32
"""Distinct pictures of a data set; a list names them as often as a run needs pictures."""
WARM, PHASED, PROFILED = 10, 8, 3
TIMES = "YOLO12_FASTCONV_BENCHMARK_TIMES"
"""Environment variable: the file into which rank 0 of `record_times` writes."""
FIELDS = ("ms", "spread", "images_s", "gpu_busy", "phases", "peak_gib")


class Finished(Exception):
    """Enough iterations."""


def measure(session: Any, options: Any, identity: dict[str, Any]) -> dict[str, Any]:
    """One set of scope "iteration"."""
    # What Ultralytics does on CUDA by itself, and patched.
    names = ["channels_last", *(OURS[:1] if session.quick else OURS)]
    names += [name for name in ("stock", "compile") if name in options.peers and name != "stock"]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        warm, phased, kernels = (2, 1, 0) if session.quick else (WARM, PHASED, PROFILED)
        count = warm + options.iterations + phased + kernels + 2
        data = dataset(Path(folder), options.imgsz, count * identity["batch"])
        for name in names:
            row = {"contender": name, **dict.fromkeys(FIELDS), "ok": None, "note": ""}
            rows.append(row)
            if session.out_of_time():
                row["note"] = "no time left"
                continue
            watch = Watch(warm, options.iterations, phased, kernels)
            settings = settings_of(identity, folder, str(session.device)) | {
                "workers": 0 if session.quick else options.workers,
                "cache": options.cache,
                "deterministic": identity["mode"] == "deterministic",
                "compile": name == "compile",
            }
            try:
                train(data, identity["model"], name, settings, watch)
                row |= watch.results(identity["batch"])
            except Exception as error:  # one contender must not end the run; of ours it is a failure
                row |= {"note": one_line(error), "ok": False if name in OURS else None}
            timing.release()
    complete = all(row["note"] != "no time left" for row in rows)
    extra = {"workers": options.workers, "cache": options.cache, "iterations": options.iterations}
    return {**identity, "complete": complete, **extra, "rows": rows}


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def settings_of(identity: dict[str, Any], folder: str, device: str) -> dict[str, Any]:
    """Arguments of `YOLO.train`: Ultralytics' defaults but for a step at every batch, no validation and no plots."""
    amp: dict[str, Any] = {"fp16": True, "bf16": "bf16", "fp32": False}
    return {
        "imgsz": identity["imgsz"], "batch": identity["batch"], "nbs": identity["batch"], "epochs": 1,
        "amp": amp[identity["dtype"]], "device": "cpu" if device == "cpu" else 0, "project": folder,
        "val": False, "plots": False, "seed": 0, "verbose": False,
    }  # fmt: skip


def train(data: Path, model: str, contender: str, settings: dict[str, Any], watch: Watch) -> None:
    """`YOLO.train` until the watch has seen enough; patched for one of `bench_options.OURS`."""
    from ultralytics import YOLO

    from yolo12_fastconv.patching import patch_model

    yolo: Any = YOLO(f"{model}.yaml")
    if contender in OURS:
        yolo = patch_model(yolo, cuda_graph=contender == "ours-graph")
    yolo.add_callback("on_pretrain_routine_start", without_amp_check)
    watch.attach(yolo)
    with contextlib.suppress(Finished):
        yolo.train(data=str(data), **settings)
    loader = getattr(yolo.trainer, "train_loader", None)
    if hasattr(loader, "close"):
        loader.close()


def without_amp_check(trainer: Any) -> None:
    """Ultralytics downloads a model to try AMP; offline it uses AMP in any case, after waiting for the network."""
    from ultralytics.engine import trainer as module

    module.check_amp = lambda model: next(model.parameters()).is_cuda


def dataset(folder: Path, size: int, count: int, seed: int = 0) -> Path:
    """A ``data.yaml`` of `count` training pictures, `PICTURES` of them distinct, as JPEG; 4 for validation."""
    import cv2
    import shapes_dataset

    yaml = shapes_dataset.make(folder / "shapes", size=size, train=min(PICTURES, count), val=4, seed=seed)
    pictures = sorted((yaml.parent / "images" / "train").glob("*.png"))
    jpegs = [path.with_suffix(".jpg") for path in pictures]
    for path, jpeg in zip(pictures, jpegs, strict=True):
        cv2.imwrite(str(jpeg), cv2.imread(str(path)))
        path.unlink()
    names = [str(jpegs[i % len(jpegs)]) for i in range(count)]
    (yaml.parent / "train.txt").write_text("\n".join(names) + "\n")
    yaml.write_text(yaml.read_text().replace("train: images/train", "train: train.txt"))
    return yaml


class Watch:
    """Callbacks that time a trainer's iterations; ends the training when it has seen enough.

    After `warm` iterations, `timed` are timed whole, from the end of one to the end of the next; then `phased` with a
    wait for the GPU after each phase; then `profiled` with torch.profiler.
    """

    def __init__(self, warm: int, timed: int, phased: int, profiled: int) -> None:
        self.borders = (warm, warm + timed, warm + timed + phased, warm + timed + phased + profiled)
        self.done = 0
        self.whole: list[float] = []
        self.phases: list[dict[str, float]] = []
        self.busy_us: float | None = None
        self.peak_gib: float | None = None
        self.before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        self.last = 0.0
        self.profiler: Any = None

    def attach(self, yolo: Any) -> None:
        for event in ("on_train_start", "on_train_batch_start", "on_train_batch_end"):
            yolo.add_callback(event, getattr(self, event))

    # ---- callbacks

    def on_train_start(self, trainer: Any) -> None:
        network = getattr(trainer.model, "_orig_mod", trainer.model)
        make_criterion = network.init_criterion
        network.init_criterion = lambda: self._between(make_criterion(), "forward", "loss")
        trainer.preprocess_batch = self._between(trainer.preprocess_batch, None, "preprocess")
        trainer.optimizer_step = self._between(trainer.optimizer_step, "backward", None)
        trainer.ema.update = self._between(trainer.ema.update, "optimizer", "ema")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.last = time.perf_counter()

    def on_train_batch_start(self, trainer: Any) -> None:
        self.mark("data")

    def on_train_batch_end(self, trainer: Any) -> None:
        self.mark("rest")
        now = time.perf_counter()
        warm, timed, phased, profiled = self.borders
        if warm <= self.done < timed:
            self.whole.append(1000 * (now - self.last))
        self.done += 1
        if self.done == timed and torch.cuda.is_available():
            self.peak_gib = round((torch.cuda.max_memory_allocated() - self.before) / 2**30, 3)
        if timed <= self.done < phased:
            self.phases.append({})
        if phased < profiled:
            if self.done == phased:
                self._start_profiler()
            elif self.done == profiled:
                self._stop_profiler(profiled - phased)
        if self.done >= profiled:
            raise Finished
        if self.phasing:
            timing.synchronize()
        self.last = time.perf_counter()

    # ---- phases

    @property
    def phasing(self) -> bool:
        return self.borders[1] <= self.done < self.borders[2]

    def mark(self, phase: str | None) -> None:
        """End of a phase, while phases are timed. None: nothing ends here."""
        if phase is None or not self.phasing:
            return
        timing.synchronize()
        now = time.perf_counter()
        into = self.phases[-1]
        into[phase] = into.get(phase, 0.0) + 1000 * (now - self.last)
        self.last = now

    def _between(self, function: Callable[..., Any], before: str | None, after: str | None) -> Any:
        return _Marked(function, functools.partial(self.mark, before), functools.partial(self.mark, after))

    def _start_profiler(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        timing.synchronize()
        self.profiler = profile(activities=[ProfilerActivity.CUDA], acc_events=True)
        self.profiler.start()

    def _stop_profiler(self, iterations: int) -> None:
        timing.synchronize()
        self.profiler.stop()
        self.busy_us = timing.totals(self.profiler)["busy_us"] / iterations

    # ---- results

    def results(self, batch: int) -> dict[str, Any]:
        """Fields of a row. GPU busy: busy time of the profiled iterations over the median time of the timed ones."""
        if len(self.whole) < 2:
            raise RuntimeError(f"training ended after {self.done} iterations")
        found = timing.summary(self.whole, "ms")
        busy = None if self.busy_us is None else round(self.busy_us / 1000 / found["ms"], 4)
        names = list(dict.fromkeys(name for phases in self.phases for name in phases))
        phases = {name: _median([one.get(name, 0.0) for one in self.phases]) for name in names}
        return {
            **found,
            "images_s": round(1000 * batch / found["ms"], 1),
            "gpu_busy": busy,
            "phases": phases,
            "peak_gib": self.peak_gib,
        }


def _median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 3)


class _Marked:
    """A callable with something done before and after each call; everything else is the callable's."""

    def __init__(self, function: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._function, self._before, self._after = function, before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        result = self._function(*args, **kwargs)
        self._after()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


# ------------------------------------------------------------------------------------------------------- ranks of DDP


def record_times(yolo: Any) -> None:
    """Callbacks, importable by the ranks, that write the ms of rank 0's iterations to the file named by `TIMES`."""
    yolo.add_callback("on_pretrain_routine_start", without_amp_check)
    yolo.add_callback("on_train_batch_end", note_time)
    yolo.add_callback("on_train_epoch_end", write_times)


_ends: list[float] = []


def note_time(trainer: Any) -> None:
    _ends.append(time.perf_counter())


def write_times(trainer: Any) -> None:
    if int(os.environ.get("RANK", -1)) in (-1, 0):
        gaps = [1000 * (b - a) for a, b in itertools.pairwise(_ends)]
        Path(os.environ[TIMES]).write_text(json.dumps(gaps))
    _ends.clear()


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables, which child processes inherit, and back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
