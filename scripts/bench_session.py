"""One run of a benchmark: device, time budget, record; and what the contenders of all benchmarks are made of."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import record_files
import records
import timing
import torch
from bench_options import UsageError
from torch import Tensor, nn

from yolo12_fastconv import error_rule, parity
from yolo12_fastconv.parity_layers import flatten
from yolo12_fastconv.patching import patch_model
from yolo12_fastconv.training import count_blocks

GATED = 4
"""Pictures of a batch that are compared with the float64 truth: first, last, and some between."""


class Skipped(Exception):
    """A contender that cannot be had here; the message says why. No failure of it."""


class Session:
    """Where and how long to measure, and where to write.

    On a machine without a GPU a command may still run with small settings, to see that it works: `quick`. That is
    no measurement, and nothing is written.
    """

    def __init__(self, kind: str, options: Any, *, cpu: bool = False) -> None:
        problem = records.why_not()
        self.quick = cpu and not torch.cuda.is_available()
        if problem and not self.quick:
            raise UsageError(problem)
        if self.quick:
            torch.set_num_threads(1)  # two are slower as soon as another process runs
        self.kind, self.start, self.budget = kind, time.monotonic(), options.budget
        self.device = torch.device("cpu" if self.quick else "cuda")
        self.facts = {"gpu": "CPU"} if self.quick else records.facts()
        self.gpu = self.facts.pop("gpu")
        self.path = options.out / f"{records.slug(self.gpu)}-{kind}.json"
        self.cut, self.failed = False, []  # type: tuple[bool, list[str]]
        if not self.quick:
            gc.freeze()  # what is imported stays: `timing.release` looked through it for 125 ms each time

    @property
    def left(self) -> float:
        return self.budget - (time.monotonic() - self.start)

    def out_of_time(self) -> bool:
        self.cut |= self.left <= 0
        return self.cut

    def add(self, measured: dict[str, Any], title: str) -> None:
        """Write one set; a run that is ended from outside loses one at most. `title` names it in messages."""
        self.failed += [
            f"{title}, {row['contender']}: {row['note'] or 'wrong result'}"
            for row in measured["rows"]
            if row["ok"] is False
        ]
        if not self.quick:
            record_files.add(self.path, self.kind, self.gpu, {**measured, **self.facts})

    def end(self) -> int:
        """Say what became of the run. Returns the exit status."""
        if self.cut:
            print(f"benchmark: stopped by budget={self.budget:g}")
        if self.quick:
            print("benchmark: no GPU here: this was no measurement and no GPU record, nothing was written")
        elif self.path.is_file():
            print(f"benchmark: wrote {records.shown(self.path)}")
        for line in self.failed:
            print(f"benchmark: {line}", file=sys.stderr)
        return 1 if self.failed else 0


def failure(error: Exception) -> str:
    """An exception in one line for a row's note."""
    return " ".join(str(error).split())[:300] or type(error).__name__


# ---------------------------------------------------------------------------------------------------------- networks


@functools.lru_cache(maxsize=1)
def network(model: str, imgsz: int, device: str) -> nn.Module:
    """The stock detection model in float32 on the device, with random weights and a trained one's batch norms."""
    from ultralytics.nn.tasks import DetectionModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = DetectionModel(f"{model}.yaml", verbose=False).to(device)
    parity.randomise_(net, pictures(2, imgsz).to(device))
    return net


@functools.lru_cache(maxsize=4)
def pictures(count: int, imgsz: int, seed: int = 0) -> Tensor:
    """(count, 3, imgsz, imgsz) float32 in 0...1: no two pictures of it are alike.

    Two are drawn and the others are these, shifted: drawing 32 large ones takes seconds.
    """
    drawn = parity.natural_batch(min(count, 2), 3, imgsz, imgsz, seed=seed)
    return torch.stack([drawn[i % len(drawn)].roll((37 * i, 53 * i), (1, 2)) for i in range(count)])


def fused(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`net` as predict runs it: batch norms folded in float32, then cast."""
    net = net.eval().fuse(verbose=False)  # type: ignore[operator]
    return net.to(dtype).requires_grad_(False)


def needs_device_for_graphs() -> None:
    """Raises Skipped without a GPU."""
    if not torch.cuda.is_available():
        raise Skipped("no CUDA device, so no graphs")


def patched(net: Any, cuda_graph: bool = False, memory: str = "auto") -> tuple[Any, float]:
    """`net` patched in place, and the seconds that it took.

    Raises:
        Skipped: `cuda_graph` without a GPU.
    """
    if cuda_graph:
        needs_device_for_graphs()
    return timing.timed(lambda: patch_model(net, cuda_graph=cuda_graph, memory=memory))


# -------------------------------------------------------------------------------------------------------- parity gate


class Gate:
    """Outputs of contenders against stock's, both against the float64 truth: the whole-model part of `check_parity`.

    The gate has a batch of its own, other than the one that is timed, so that nothing can pass with leftovers.
    """

    def __init__(self, stock: Any, x: Tensor) -> None:
        self.x = x
        self.head = stock.model[-1]
        self.rows = torch.linspace(0, len(x) - 1, min(GATED, len(x))).round().long().unique().to(x.device)
        self.blocks = count_blocks(stock)[1]
        tf32 = torch.backends.cudnn.allow_tf32
        self.precision = error_rule.precision_name(x.dtype, tf32, x.device)
        exact = copy.deepcopy(stock).double()
        self.truth = self._flat(exact(x[self.rows].double()))
        del exact
        self.stock = self._flat(stock(x), self.rows)

    def _flat(self, outputs: Any, rows: Tensor | None = None) -> dict[str, Tensor]:
        found = dict(flatten(outputs, self.head))
        return {key: (value if rows is None else value[rows]).clone() for key, value in found.items()}

    def __call__(self, call: Callable[[Tensor], Any]) -> dict[str, Any]:
        """{"ok", "error": the worst of our errors as a part of its limit, "note"} of one contender."""
        if self.x.is_cuda:
            timing.poison()
        mine = self._flat(call(self.x), self.rows)
        if mine.keys() != self.stock.keys():
            return {"ok": False, "error": None, "note": f"outputs are {', '.join(mine)}"}
        floor = error_rule.tolerances().floor("output", self.precision, 1) * self.blocks**0.5
        pairs = {
            key: error_rule.compare(mine[key], value, self.truth[key], floor)
            for key, value in self.stock.items()
        }
        return judge(pairs)


def judge(comparisons: dict[str, error_rule.Comparison]) -> dict[str, Any]:
    """Verdict of the worst tensor by its l2 error, which configs/tolerances.yaml says is what counts in a model."""
    worst, used, note = "", 0.0, ""
    for key, one in comparisons.items():
        share = float("inf") if one.problem or one.ours[1] != one.ours[1] else one.ours[1] / one.limit[1]
        if share >= used:
            worst, used, note = key, share, one.problem
    ok = used <= 1
    if not ok and not note:
        note = f"wrong: {worst} has {used:.1f} times the error that is allowed"
    return {"ok": ok, "error": error_rule.finite(round(used, 4)), "note": note and f"{worst}: {note}"}
