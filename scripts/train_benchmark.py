"""benchmark.py train: forward and backward of whole models, whole iterations of YOLO.train, and single Conv blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from bench_options import fill, keys_of, several, several_or_none
from bench_session import Session
from records import RECORDS
from run_tables import train_table

from yolo12_fastconv._arguments import positive

USAGE = """\
train: training under autocast; on a CPU only to see that it runs (no record), as with
  model=yolo12n batch=2 imgsz=64 dtype=fp32 iterations=3
  scope=model,iteration,layers   default: model,iteration
      model: forward and backward of the model, without loss; iteration: YOLO.train as shipped, on generated pictures;
      layers: every Conv block alone, the time in which the GPU is busy
  model=yolo12n,yolo12x   default: n,m               batch=32          default
  dtype=fp16,bf16,fp32    default: fp16              imgsz=640         default; a multiple of 32
  mode=deterministic,free default: deterministic, as Ultralytics trains; of scope=iteration too
  peers=stock,channels_last,compile|none             default: stock,channels_last; compile takes minutes
      stock: NCHW; channels_last: as Ultralytics trains on CUDA by default
      always there: ours, and on a GPU ours-graph (cuda_graph=True), both with memory="auto"
  memory=low,fast|none    patch_model(memory=...), with cuda_graph=True on a GPU; of scope=model; default: none
  replays=9               default                    workers=8         of the data loader; default as Ultralytics
  iterations=20           timed whole, after 10 that warm up; then 8 phase by phase, then 3 with the profiler
  cache=ram               keep decoded pictures in memory; default: False, as Ultralytics
"""
SCOPES = ("model", "iteration", "layers")
PEERS = ("stock", "channels_last", "compile")
MODES = ("deterministic", "free")
MEMORY = ("low", "fast")


@dataclass
class Options:
    scope: tuple[str, ...] = ("model", "iteration")
    model: tuple[str, ...] = ("yolo12n", "yolo12m")
    batch: tuple[int, ...] = (32,)
    dtype: tuple[str, ...] = ("fp16",)
    imgsz: int = 640
    mode: tuple[str, ...] = ("deterministic",)
    peers: tuple[str, ...] = ("stock", "channels_last")
    memory: tuple[str, ...] = ()
    replays: int = 9
    workers: int = 8
    iterations: int = 20
    cache: str | bool = False
    out: Path = RECORDS
    budget: float = float("inf")


_KEYS = keys_of(
    *("model", "batch", "dtype", "imgsz", "replays", "out", "budget"),
    scope=(several(SCOPES), f"some of {','.join(SCOPES)}"),
    mode=(several(MODES), f"some of {','.join(MODES)}"),
    peers=(several_or_none(PEERS), f"some of {','.join(PEERS)}, or none"),
    memory=(several_or_none(MEMORY), f"some of {','.join(MEMORY)}, or none"),
    workers=(int, "a number"),
    iterations=(positive, "a number from 1"),
    cache=(lambda text: {"ram": "ram", "False": False}[text], "ram or False"),
)


def parse(arguments: Sequence[str]) -> Options:
    """Options out of KEY=VALUE arguments; raises as `fill`."""
    return fill(Options(), arguments, _KEYS)


def run(options: Options) -> int:
    """Measure, print the tables, write the record. Returns the exit status."""
    import train_blocks
    import train_iterations
    import train_passes

    measures: dict[str, Any] = {
        "model": train_passes.measure,
        "iteration": train_iterations.measure,
        "layers": train_blocks.measure,
    }
    session = Session("train", options, cpu=True)
    plan = [
        (scope, model, batch, dtype, mode)
        for model in options.model
        for scope in options.scope
        for dtype in options.dtype
        for batch in options.batch
        for mode in options.mode
    ]
    for scope, model, batch, dtype, mode in plan:
        if session.out_of_time():
            break
        seed(mode)
        identity = {"scope": scope, "model": model, "batch": batch, "imgsz": options.imgsz, "dtype": dtype}
        identity["mode"] = mode
        try:
            measured = measures[scope](session, options, identity)
        finally:
            seed("free")
        print(train_table([measured]), flush=True)
        session.add(measured, f"{scope} of {model} batch {batch} {dtype} {mode}")
        timing.release()
    return session.end()


def seed(mode: str) -> None:
    """Seeds and switches as Ultralytics sets them for ``deterministic=True``, or without."""
    from ultralytics.utils.torch_utils import init_seeds

    init_seeds(0, deterministic=mode == "deterministic")


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": None}
    return torch.autocast(device.type, dtype=kinds[dtype], enabled=dtype != "fp32")
