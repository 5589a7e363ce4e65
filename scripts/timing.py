"""What all benchmarks measure with: CUDA graphs, wall and host times, memory, and the counts of torch.profiler."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Call = Callable[[], Any]

CALLS = 10
"""Calls in a CUDA graph: one replay lasts long enough for events, and the host takes no part in it."""
SAMPLE_S = 0.03
"""A sample of a wall time lasts at least this long: against it, reading the clock and the final wait are nothing."""
LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cudaGraphLaunch",
    "cudaMemcpy",
    "cudaMemset",
)
"""Beginnings of the names of calls by which the host gives the GPU something to do."""


def use_tf32(allowed: bool) -> None:
    """TF32 for every contender, or for none."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.backends.cuda.matmul.allow_tf32 = allowed


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    """Give memory back: models hold reference cycles, and CUDA graphs pools of their own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------- CUDA graphs


def capture(call: Call, calls: int = CALLS) -> torch.cuda.CUDAGraph:
    """`calls` calls, after three that warm up on the stream that they are captured on."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()  # what a replay fails with belongs to this contender
    return graph


def graphed(function: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """`function` as one CUDA graph for inputs like `x`, copied in. The next call overwrites its outputs."""
    static = x.clone()
    kept: dict[str, Any] = {"function": function}  # whose weights the graph reads, and does not own

    def call() -> None:
        kept.pop("outputs", None)  # of the call before: not to be counted as memory of this one
        kept["outputs"] = function(static)

    graph = capture(call, 1)

    def replay(value: torch.Tensor) -> Any:
        static.copy_(value)
        graph.replay()
        return kept["outputs"]

    return replay


def alternate(graphs: dict[str, torch.cuda.CUDAGraph], replays: int) -> dict[str, dict[str, Any]]:
    """µs of one call of each, median over the replays, and the spread (p90 - p10) / median.

    The contenders take turns, so that a change of the clock meets all of them.
    """
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _, (name, graph) in itertools.product(range(replays), graphs.items()):
        found[name].append(_elapsed(graph) / CALLS)
    return {name: summary(values) for name, values in found.items()}


def _elapsed(graph: torch.cuda.CUDAGraph) -> float:
    """µs that the GPU takes for a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Some 50 µs of waiting on the GPU, in which the host launches all that follows: without them the time between the
    # two events holds the launch of the graph too, which is more than ten small layers take.
    torch.cuda._sleep(100_000)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end)


def summary(values: list[float], unit: str = "us") -> dict[str, Any]:
    """Median under the name of the unit, and the spread (p90 - p10) / median."""
    low, median, high = np.percentile(values, (10, 50, 90)).tolist()
    return {unit: round(median, 3), "spread": round((high - low) / median, 4)}


# --------------------------------------------------------------------------------------------------- whole calls


def wall(calls: dict[str, Call], replays: int) -> dict[str, dict[str, Any]]:
    """ms of one call of each as its user waits for it, host and GPU: median and spread. The contenders take turns.

    A sample is as many calls one after the other as last `SAMPLE_S`, and the wait for the last one.
    """
    counts = {name: _calls_of_a_sample(call) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(replays), calls.items()):
        found[name].append(1000 * _seconds(call, counts[name]) / counts[name])
    return {name: summary(values, "ms") for name, values in found.items()}


def _calls_of_a_sample(call: Call) -> int:
    _seconds(call, 2)
    return max(1, min(200, round(SAMPLE_S / max(_seconds(call, 1), 1e-6))))


def _seconds(call: Call, count: int) -> float:
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return time.perf_counter() - start


def host_ms(call: Call, repeats: int = 5) -> float:
    """ms until a call returns while the GPU has nothing else to do: what its launches cost the host. Median."""
    values = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        values.append(1000 * (time.perf_counter() - start))
    synchronize()
    return round(float(np.median(values)), 3)


def timed(call: Call) -> tuple[Any, float]:
    """What a call returns, and its seconds with all that it has started."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return result, time.perf_counter() - start


class PeakMemory:
    """GiB that are allocated at most within ``with PeakMemory(before) as peak``, above `before` bytes: `peak.gib`."""

    def __init__(self, before: int) -> None:
        self.before, self.gib = before, 0.0

    def __enter__(self) -> PeakMemory:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        self.gib = round((torch.cuda.max_memory_allocated() - self.before) / 2**30, 3)


def poison(gib: float = 4.0) -> None:
    """Fill what torch's allocator hands out next with NaN, so that a kernel which leaves its output unwritten does not
    pass with an earlier one's result that happens to lie there."""
    release()
    free = torch.cuda.mem_get_info()[0]
    size = int(min(gib * 2**30, free / 2)) // 4
    blocks = [torch.full((size,), float("nan"), device="cuda")]
    blocks += [
        torch.full((1 << 17,), float("nan"), device="cuda") for _ in range(64)
    ]  # the pool of small tensors
    torch.cuda.synchronize()
    del blocks


# ---------------------------------------------------------------------------------------------------------- counts


def profiled(call: Call, calls: int = 1) -> dict[str, float]:
    """What torch.profiler counts, per call: launches by the host, kernels (copies and fills too), and µs in which the
    GPU is busy with any of them.

    A CUDA graph is one launch of many kernels.
    """
    from torch.profiler import ProfilerActivity, profile

    synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            call()
        synchronize()
    return {name: value / calls for name, value in totals(profiler).items()}


def totals(profiler: Any) -> dict[str, float]:
    """Launches, kernels and busy µs of a finished profile."""
    launches, intervals = 0, []
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            if not getattr(event, "is_user_annotation", False):  # a name for a range, no work
                intervals.append((event.time_range.start, event.time_range.end))
        elif event.name.startswith(LAUNCHES):
            launches += 1
    return {"launches": launches, "kernels": len(intervals), "busy_us": union(intervals)}


def union(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of what the (start, end) pairs cover.

    The sum of their lengths would count a kernel that starts before its predecessor has ended (programmatic dependent
    launch, streams side by side) for the time that it waits, or shares, once more. Gaps between kernels do not count.
    """
    covered, last = 0.0, -math.inf
    for start, end in sorted(intervals):
        if end > last:
            covered += end - max(start, last)
            last = end
    return covered
