"""benchmark.py model: inference of whole models, ours beside stock Ultralytics, CUDA graphs and torch.compile."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timing
import torch
from bench_options import DTYPES, MODELS, OURS, fill, keys_of, several_or_none
from bench_session import Gate, Session, Skipped, failure, fused, network, patched, pictures
from records import RECORDS
from run_tables import model_table
from torch import Tensor

USAGE = """\
model: inference of whole models; on a CPU only to see that it runs (no record), as with
  model=yolo12n batch=1 imgsz=64 dtype=fp32
  model=yolo12n,yolo12x   default: all five          batch=1,8,32      default
  dtype=fp16,bf16,fp32    default: fp16              imgsz=640         default; a multiple of 32
  tf32=False              default: True, as torch    replays=9         default; a time is their median
  peers=NAMES|none        default: channels_last,stock-graph,channels_last-graph; also, each with a minute of
                          compiling: compile,compile-reduce-overhead,compile-max-autotune; and the patched model
                          compiled with fullgraph=True: ours-compile,ours-compile-reduce-overhead
  Always there: `stock` (as predict runs it: NCHW, fused), `ours`, `ours-graph` (cuda_graph=True) and, as the floor of
  what a graph can give, `ours-plain-graph` (one torch.cuda.CUDAGraph, the input copied in). Every row passes or fails
  the error rule against stock and a float64 truth.
"""
GRAPH_PEERS = ("channels_last", "stock-graph", "channels_last-graph")
COMPILERS = {
    "compile": "default",
    "compile-reduce-overhead": "reduce-overhead",
    "compile-max-autotune": "max-autotune",
    "ours-compile": "default",
    "ours-compile-reduce-overhead": "reduce-overhead",
}
PEERS = (*GRAPH_PEERS, *COMPILERS)
PATCHED = (*OURS, "ours-plain-graph", "ours-compile", "ours-compile-reduce-overhead")
PLAIN_GRAPHS = ("stock-graph", "channels_last-graph", "ours-plain-graph")
NO_TIME = "no time left"
FIELDS = (
    *("ms", "spread", "images_s", "peak_gib", "launches", "kernels", "kernel_ms", "host_ms"),
    *("compile_s", "patch_s", "first_ms", "first_extra_ms", "error"),
)
Network = Callable[[Tensor], Any]

WARM = 10
"""Calls before measuring; `cuda_graph=True` captures after a few."""


@dataclass
class Options:
    model: tuple[str, ...] = MODELS
    batch: tuple[int, ...] = (1, 8, 32)
    dtype: tuple[str, ...] = ("fp16",)
    imgsz: int = 640
    peers: tuple[str, ...] = GRAPH_PEERS
    tf32: bool = True
    replays: int = 9
    out: Path = RECORDS
    budget: float = float("inf")


_KEYS = keys_of(
    *("model", "batch", "dtype", "imgsz", "tf32", "replays", "out", "budget"),
    peers=(several_or_none(PEERS), f"some of {','.join(PEERS)}, or none"),
)


def parse(arguments: Sequence[str]) -> Options:
    """Options out of KEY=VALUE arguments; raises as `fill`."""
    return fill(Options(), arguments, _KEYS)


def run(options: Options) -> int:
    """Measure, print the tables, write the record. Returns the exit status."""
    session = Session("model", options, cpu=True)
    torch.backends.cudnn.allow_tf32 = (
        options.tf32
    )  # torch's other switch, of matmul, stays off as for every user
    plan = [(m, b, d) for m in options.model for d in options.dtype for b in options.batch]
    for model, batch, dtype in plan:
        if session.out_of_time():
            break
        measured = measure(session, options, model, batch, dtype)
        print(model_table([measured]), flush=True)
        session.add(measured, f"{model} batch {batch} {dtype}")
        timing.release()
    return session.end()


def measure(session: Session, options: Options, model: str, batch: int, dtype: str) -> dict[str, Any]:
    """One set: every contender on the same pictures."""
    base = network(model, options.imgsz, str(session.device))
    kind = getattr(torch, DTYPES[dtype])
    # The gate's pictures are other ones than those that are timed.
    x, other = (pictures(batch, options.imgsz, seed).to(session.device, kind) for seed in (1, 2))
    stock = fused(copy.deepcopy(base), kind)
    names = ("stock", "ours") if session.quick else ("stock", *OURS, "ours-plain-graph", *options.peers)
    if set(names) & set(COMPILERS):  # importing it takes seconds
        torch._dynamo.reset()  # the compiled models of the set before
    with torch.inference_mode():
        rows, calls = _contenders(session, names, base, kind, x, Gate(stock, other))
        for name, time_of in timing.wall(calls, options.replays).items():
            rows[name] |= time_of | {"images_s": round(1000 * batch / time_of["ms"], 1)}
            rows[name] |= _counts(calls[name], rows[name], on_gpu=x.is_cuda)
    return {
        "model": model,
        "batch": batch,
        "imgsz": options.imgsz,
        "dtype": dtype,
        "tf32": options.tf32 and dtype == "fp32" and not session.quick,
        "complete": all(row["note"] != NO_TIME for row in rows.values()),
        "replays": options.replays,
        "rows": list(rows.values()),
    }


def _contenders(
    session: Session, names: Sequence[str], base: Any, dtype: torch.dtype, x: Tensor, gate: Gate
) -> tuple[dict[str, dict[str, Any]], dict[str, timing.Call]]:
    """The row of each contender so far, and a call of those that can be timed."""
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, timing.Call] = {}
    for name in names:
        if name in COMPILERS and session.out_of_time():
            rows[name] = _empty(name, NO_TIME)
            continue
        try:
            call, rows[name] = _prepare(name, base, dtype, x)
            rows[name] |= gate(call)
            calls[name] = functools.partial(call, x)
        except Skipped as reason:
            rows[name] = _empty(name, str(reason))
        except Exception as error:  # one contender must not end the run; of ours it is a failure
            rows[name] = _empty(name, failure(error)) | {"ok": False if name in PATCHED else None}
    return rows, calls


def _empty(name: str, note: str = "") -> dict[str, Any]:
    return {"contender": name, **dict.fromkeys(FIELDS), "ok": None, "note": note}


def _prepare(name: str, base: Any, dtype: torch.dtype, x: Tensor) -> tuple[Network, dict[str, Any]]:
    """What is called, warm, and its row so far: seconds of making it, peak memory, ms of the first call."""
    row = _empty(name)
    before = torch.cuda.memory_allocated() if x.is_cuda else 0
    call, row["patch_s"] = _build(name, base, dtype)
    if name in COMPILERS:
        # The anchors of a head's first call are no part of stock's graph either: `fullgraph` refuses them.
        call(x)
        call = torch.compile(call, mode=COMPILERS[name], dynamic=False, fullgraph=name in PATCHED)
    graph = name in PLAIN_GRAPHS
    with _cold_compiler() if name in COMPILERS else contextlib.nullcontext():
        first = 0.0 if graph else timing.timed(lambda: call(x))[1]
    with timing.PeakMemory(before) if x.is_cuda else contextlib.nullcontext() as peak:
        if graph:
            call = timing.graphed(call, x)
        second = timing.timed(lambda: call(x))[1]  # in which torch.compile records its CUDA graphs
        for _ in range(WARM):
            call(x)
    row["peak_gib"] = peak.gib if peak else None
    if name in COMPILERS:
        row["compile_s"] = round(first + second, 1)
    elif not graph:
        row["first_ms"] = round(1000 * first, 2)
    return call, row


@contextlib.contextmanager
def _cold_compiler() -> Iterator[None]:
    """Compile as a user does for the first time: kernels that another contender, or an earlier run, left on disk would
    shorten it."""
    from torch._inductor import utils

    fresh: Any = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    with fresh():
        yield


@torch.inference_mode(False)
def _build(name: str, base: Any, dtype: torch.dtype) -> tuple[Network, float | None]:
    """The network of a contender as predict would have it, and the seconds of patching."""
    net, seconds = copy.deepcopy(base).eval(), None
    if name in PATCHED:
        net, seconds = patched(net, cuda_graph=name == "ours-graph")
    net = fused(net, dtype)
    if name.startswith(("channels_last", "compile", "ours-compile")):
        net = net.to(memory_format=torch.channels_last)
    return net, None if seconds is None else round(seconds, 3)


def _counts(call: timing.Call, row: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
    """Host time, launches and kernels of a call, and what its first call took more than `row` says of a later one."""
    found: dict[str, Any] = {"host_ms": timing.host_ms(call)}
    if row["first_ms"] is not None:
        found["first_extra_ms"] = round(row["first_ms"] - row["ms"], 1)
    if on_gpu:
        counts = timing.profiled(call)
        found |= {key: int(counts[key]) for key in ("launches", "kernels")}
        found["kernel_ms"] = round(counts["busy_us"] / 1000, 3)
    return found
