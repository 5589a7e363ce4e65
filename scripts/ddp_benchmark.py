"""benchmark.py ddp: YOLO.train on one GPU and on two, stock and patched."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
import train_iterations
from bench_options import UsageError, fill, keys_of
from bench_session import Session, failure
from records import RECORDS, ROOT
from run_tables import ddp_table

from yolo12_fastconv._arguments import positive

USAGE = """\
ddp: real YOLO.train on device=0 and on device=0,1, as many pictures on each GPU; needs two GPUs (and cloudpickle)
  model=yolo12n,yolo12x   default: n                 batch=32          default; of each GPU
  dtype=fp16,bf16,fp32    default: fp16              imgsz=640         default; a multiple of 32
  iterations=30           default; the first 10 warm up                workers=8          default
"""
WARM = 10


@dataclass
class Options:
    model: tuple[str, ...] = ("yolo12n",)
    batch: tuple[int, ...] = (32,)
    dtype: tuple[str, ...] = ("fp16",)
    imgsz: int = 640
    iterations: int = 30
    workers: int = 8
    out: Path = RECORDS
    budget: float = float("inf")


_KEYS = keys_of(
    *("model", "batch", "dtype", "imgsz", "out", "budget"),
    iterations=(positive, "a number from 1"),
    workers=(int, "a number"),
)


def parse(arguments: Sequence[str]) -> Options:
    """Options out of KEY=VALUE arguments; raises as `fill`."""
    options = fill(Options(), arguments, _KEYS)
    if options.iterations < WARM + 3:
        raise UsageError(
            f"iterations={options.iterations}: the first {WARM} warm up; give at least {WARM + 3}"
        )
    return options


def run(options: Options) -> int:
    """Measure, print the tables, write the record. Returns the exit status."""
    if torch.cuda.device_count() < 2:
        raise UsageError(f"ddp needs two GPUs, torch sees {torch.cuda.device_count()} here")
    session = Session("ddp", options)
    plan = [
        (model, batch, dtype) for model in options.model for batch in options.batch for dtype in options.dtype
    ]
    for model, batch, dtype in plan:
        if session.out_of_time():
            break
        identity = {"model": model, "batch": batch, "imgsz": options.imgsz, "dtype": dtype}
        measured = measure(session, options, identity)
        print(ddp_table([measured]), flush=True)
        session.add(measured, f"{model} batch {batch} {dtype}")
    return session.end()


def measure(session: Session, options: Options, identity: dict[str, Any]) -> dict[str, Any]:
    """One set: both contenders on one GPU and on two."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = train_iterations.dataset(
            Path(folder), options.imgsz, 2 * identity["batch"] * options.iterations
        )
        one_gpu = train_iterations.dataset(
            Path(folder) / "1", options.imgsz, identity["batch"] * options.iterations
        )
        for name in ("stock", "ours"):
            row: dict[str, Any] = {"contender": name, "ok": None, "note": ""}
            row |= dict.fromkeys(("ms_1", "images_s_1", "ms_2", "images_s_2"))
            rows.append(row)
            for gpus in (1, 2):
                try:
                    ms = _train(
                        data if gpus == 2 else one_gpu, name == "ours", gpus, options, identity, folder
                    )
                    row |= {
                        f"ms_{gpus}": ms,
                        f"images_s_{gpus}": round(1000 * gpus * identity["batch"] / ms, 1),
                    }
                except Exception as error:  # one run must not end the others; of ours it is a failure
                    row["note"] += f"{gpus} GPU: {failure(error)} "
                    row["ok"] = False if name == "ours" else row["ok"]
            timing.release()
    return {
        **identity,
        "complete": True,
        "iterations": options.iterations,
        "workers": options.workers,
        "rows": rows,
    }


def _train(
    data: Path, patch: bool, gpus: int, options: Options, identity: dict[str, Any], folder: str
) -> float:
    """Median ms of an iteration after the warm-up."""
    from ultralytics import YOLO

    from yolo12_fastconv.patching import patch_model

    settings = train_iterations.settings_of(identity, folder, "cuda")
    settings |= {"workers": options.workers, "name": f"{patch}-{gpus}", "device": 0 if gpus == 1 else [0, 1]}
    settings |= {"batch": gpus * identity["batch"], "nbs": gpus * identity["batch"]}
    file = Path(folder) / f"times-{patch}-{gpus}.json"
    yolo: Any = YOLO(f"{identity['model']}.yaml")
    if patch:
        yolo = patch_model(yolo)
    train_iterations.record_times(yolo)
    # The ranks are new processes that import this package, train_iterations.py and tests/shapes_dataset.py.
    path = os.pathsep.join(
        [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    )
    with train_iterations.environment(PYTHONPATH=path, **{train_iterations.TIMES: str(file)}):
        yolo.train(data=str(data), **settings)
    times = json.loads(file.read_text())[WARM:]
    return timing.summary(times, "ms")["ms"]
