"""Does memory stay where it is while YOLO.train runs? ``benchmark.py soak``; see USAGE."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from bench_options import ONE, OURS, fill, keys_of, several
from records import RECORDS

from yolo12_fastconv._arguments import positive

USAGE = """\
soak: YOLO.train for some minutes, its memory looked at after every epoch; also on a CPU, with small settings
  model=yolo12n           default                    dtype=fp16|bf16|fp32  default: fp16; fp32 on a CPU
  seconds=600             default, of each contender batch=16              default
  imgsz=640               default                    workers=4             default
  contenders=stock,ours,ours-graph                   default: ours-graph
  An epoch ends with a smaller batch, validation and a checkpoint, so that graphs are freed and captured again. Exit
  status 1 if memory grew: allocated and reserved on the device, or resident on the host.
"""
STEPS = 24
"""Full batches of an epoch. A graph needs three alike before it is captured."""
WARM = 2
"""Epochs before memory counts: the caches of allocator, cuDNN and Ultralytics fill."""
LEAST = 6
"""Epochs to judge, without those that warm up."""
LIMITS = {"allocated_mib": 8.0, "reserved_mib": 64.0, "host_mib": 48.0}
"""Growth that is allowed from the second third of the epochs to the last, MiB: a captured graph's fragments differ by
some MiB from epoch to epoch, and the host's heap by tens."""


@dataclass
class Options:
    model: str = "yolo12n"
    dtype: str | None = None
    seconds: int = 600
    batch: int = 16
    imgsz: int = 640
    workers: int = 4
    contenders: tuple[str, ...] = ("ours-graph",)
    out: Path = RECORDS
    budget: float = float("inf")


_KEYS = ONE | keys_of(
    seconds=(positive, "a number from 1"),
    workers=(int, "a number"),
    contenders=(several(("stock", *OURS)), f"some of stock,{','.join(OURS)}"),
)


def parse(arguments: Sequence[str]) -> Options:
    """Options out of KEY=VALUE arguments; raises as `fill`."""
    return fill(Options(), arguments, _KEYS)


def run(options: Options) -> int:
    """Train, print the table, write the record. Returns the exit status."""
    from bench_session import Session, failure
    from run_tables import soak_table

    session = Session("soak", options, cpu=True)
    dtype = options.dtype or ("fp32" if session.quick else "fp16")
    identity = {"model": options.model, "batch": options.batch, "imgsz": options.imgsz, "dtype": dtype}
    rows: list[dict[str, Any]] = []
    for name in options.contenders:
        if session.out_of_time():
            break
        try:
            rows.append(judge(name, train(options, identity, name, session.quick)))
        except Exception as error:  # one contender must not end the run; of ours it is a failure
            rows.append({**judge(name, []), "ok": False if name in OURS else None, "note": failure(error)})
        timing.release()
    complete = len(rows) == len(options.contenders)
    measured = {**identity, "complete": complete, "workers": options.workers, "rows": rows}
    print(soak_table([measured]), flush=True)
    session.add(measured, f"{options.model} batch {options.batch}")
    return session.end()


def train(options: Options, identity: dict[str, Any], contender: str, on_cpu: bool) -> list[dict[str, float]]:
    """What memory was after each epoch."""
    import train_iterations
    from ultralytics import YOLO

    from yolo12_fastconv.patching import patch_model

    samples: list[dict[str, float]] = []
    start = time.monotonic()
    full = 3 if on_cpu else STEPS

    def look(trainer: Any) -> None:
        steps = (trainer.epoch + 1) * (full + 1)
        samples.append({"steps": steps, "seconds": time.monotonic() - start} | memory())
        # Ultralytics looks at this after every epoch, as for patience=.
        trainer.stop = samples[-1]["seconds"] > options.seconds and len(samples) >= WARM + LEAST

    with tempfile.TemporaryDirectory() as folder:
        count = full * options.batch + max(options.batch // 2, 1)
        data = train_iterations.dataset(Path(folder), options.imgsz, count)
        settings = train_iterations.settings_of(identity, folder, "cpu" if on_cpu else "cuda") | {
            "epochs": 10**6, "patience": 0, "val": True, "workers": 0 if on_cpu else options.workers,
        }  # fmt: skip
        yolo: Any = YOLO(f"{options.model}.yaml")
        if contender in OURS:
            yolo = patch_model(yolo, cuda_graph=contender == "ours-graph")
        yolo.add_callback("on_pretrain_routine_start", train_iterations.without_amp_check)
        yolo.add_callback("on_fit_epoch_end", look)
        yolo.train(data=str(data), **settings)
    return samples


def memory() -> dict[str, float]:
    """MiB now: allocated and reserved by torch on the device, resident of this process on the host."""
    import psutil

    on_device = torch.cuda.is_available()
    return {
        "allocated_mib": torch.cuda.memory_allocated() / 2**20 if on_device else 0.0,
        "reserved_mib": torch.cuda.memory_reserved() / 2**20 if on_device else 0.0,
        "host_mib": psutil.Process().memory_info().rss / 2**20,
    }


def judge(contender: str, samples: list[dict[str, float]]) -> dict[str, Any]:
    """A row: length, memory at the end, its growth from the second third of the epochs to the last, verdict."""
    kept = samples[WARM:]
    row: dict[str, Any] = {"contender": contender, "ok": None, "note": "", "epochs": len(samples)}
    row |= dict.fromkeys(("steps", "seconds", *LIMITS, *(f"{name}_growth" for name in LIMITS)))
    if len(kept) < LEAST:
        return row | {"note": f"{len(samples)} epochs are too few to judge"}
    third = len(kept) // 3
    problems = []
    for name, limit in LIMITS.items():
        now = statistics.median(one[name] for one in kept[-third:])
        growth = now - statistics.median(one[name] for one in kept[third:-third])
        row |= {name: round(now, 1), f"{name}_growth": round(growth, 1)}
        if growth > limit:
            problems.append(f"{name} grew by {growth:.0f}, more than {limit:.0f}")
    row |= {"steps": int(samples[-1]["steps"]), "seconds": round(samples[-1]["seconds"])}
    return row | {"ok": not problems, "note": "; ".join(problems)}
