"""Forward and backward of a whole model in training mode, ours and its peers. For benchmark.py train scope=model."""

from __future__ import annotations

import contextlib
import copy
import functools
import time
from collections.abc import Callable
from typing import Any

import timing
import torch
from bench_options import DTYPES, OURS
from bench_session import Session, failure, judge, network, patched, pictures
from torch import Tensor, nn
from train_benchmark import MEMORY, Options, autocast

from yolo12_fastconv import error_rule
from yolo12_fastconv.training import count_blocks

FIELDS = (
    *("ms", "spread", "images_s", "peak_gib", "launches", "kernels", "kernel_ms", "host_ms", "compile_s"),
    "error",
)
NO_TIME = "no time left"
WARM = 4
"""Steps before measuring; `cuda_graph=True` captures at the third."""
GATED = 4
"""Pictures of the batch that the parity gate trains on, in float64 too."""
NEGLIGIBLE = 1e-3
"""Gradients that are this much smaller than the median parameter's count for less."""
GRADIENT = 0.01
"""Standard deviation of the gradient that goes back from each output. At 0.1, weight gradients of the first layers
overflow half on stock PyTorch (of m in NCHW, of n in channels_last); at 0.01 the largest of m is 7392."""


def measure(session: Session, options: Options, identity: dict[str, Any]) -> dict[str, Any]:
    """One set of scope "model"."""
    dtype, batch = identity["dtype"], identity["batch"]
    base = network(identity["model"], options.imgsz, str(session.device))
    x = pictures(batch, options.imgsz, 1).to(session.device)
    gate = Gate(base, pictures(min(batch, GATED), options.imgsz, 2).to(session.device), dtype)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, timing.Call] = {}
    if "compile" in options.peers:  # importing it takes seconds
        torch._dynamo.reset()
    for name in _names(session, options):
        rows[name] = {"contender": name, **dict.fromkeys(FIELDS), "ok": None, "note": ""}
        if name == "compile" and session.out_of_time():
            rows[name]["note"] = NO_TIME
            continue
        try:
            step = _prepare(name, base, x, dtype, rows[name])
            rows[name] |= gate(step.twin(), WARM) if _replays(name) else gate(step)
            calls[name] = functools.partial(step, x)
        except Exception as error:  # one contender must not end the run; of ours it is a failure
            rows[name] |= {"note": failure(error), "ok": False if name.startswith("ours") else None}
    for name, time_of in timing.wall(calls, options.replays).items():
        rows[name] |= time_of | {"images_s": round(1000 * batch / time_of["ms"], 1)}
        rows[name]["host_ms"] = timing.host_ms(calls[name])
        if x.is_cuda:
            counts = timing.profiled(calls[name], 2)
            rows[name] |= {key: int(counts[key]) for key in ("launches", "kernels")}
            rows[name]["kernel_ms"] = round(counts["busy_us"] / 1000, 3)
    complete = all(row["note"] != NO_TIME for row in rows.values())
    return {**identity, "complete": complete, "replays": options.replays, "rows": list(rows.values())}


def _names(session: Session, options: Options) -> tuple[str, ...]:
    peers = tuple(name for name in options.peers if name == "stock") if session.quick else options.peers
    ours = OURS[:1] if session.quick else OURS
    ours += tuple(f"{ours[-1]}-{memory}" for memory in options.memory)
    return ("stock", *(name for name in peers if name not in ("stock", "compile")), *ours) + (
        ("compile",) if "compile" in peers else ()
    )


class Step:
    """A model's forward and backward; the gradients are those of this call alone."""

    def __init__(self, net: Any, call: Callable[[Tensor], Any], device: torch.device, dtype: str) -> None:
        self.net, self.call, self.context = net, call, functools.partial(autocast, device, dtype)
        self.parameters = list(net.parameters())
        self.gradients: dict[tuple[int, ...], Tensor] = {}

    def twin(self) -> Step:
        """The same step of a copy of the model."""
        twin = copy.copy(self)
        twin.net = twin.call = copy.deepcopy(self.net)
        twin.parameters = list(twin.net.parameters())
        return twin

    def outputs(self, x: Tensor) -> list[Tensor]:
        """The head's raw boxes and scores, as the loss gets them."""
        with self.context():
            found = self.call(x)
        return [found["boxes"], found["scores"]]

    def __call__(self, x: Tensor) -> list[Tensor]:
        # As an optimizer does it. `Module.zero_grad` looks for the parameters of m's 501 modules in 1.8 ms.
        for parameter in self.parameters:
            parameter.grad = None
        outputs = self.outputs(x)
        torch.autograd.backward(outputs, [self._gradient(output) for output in outputs])
        return outputs

    def _gradient(self, output: Tensor) -> Tensor:
        """The same numbers for each model: drawn on the CPU in float32."""
        key = tuple(output.shape)
        if key not in self.gradients:
            generator = torch.Generator().manual_seed(output.shape[1])
            drawn = GRADIENT * torch.randn(output.shape, generator=generator)
            self.gradients[key] = drawn.to(output.device, output.dtype)
        return self.gradients[key]


def _prepare(name: str, base: nn.Module, x: Tensor, dtype: str, row: dict[str, Any]) -> Step:
    """The step of a contender, warm; seconds of compiling and peak memory go into its row."""
    before = torch.cuda.memory_allocated() if x.is_cuda else 0
    net: Any = copy.deepcopy(base).train()
    if name != "stock" and x.is_cuda:
        net = net.to(memory_format=torch.channels_last)  # as the trainer does; pictures come NCHW
    if name.startswith("ours"):
        memory = next((memory for memory in MEMORY if name.endswith(memory)), "auto")
        net = patched(net, name.startswith("ours-graph"), memory)[0]
    step = Step(net, torch.compile(net, dynamic=False) if name == "compile" else net, x.device, dtype)
    start = time.perf_counter()
    # A graph's memory counts while it is captured, and not when it is replayed.
    with timing.PeakMemory(before) if x.is_cuda else contextlib.nullcontext() as first:
        for _ in range(WARM):
            step(x)
    timing.synchronize()
    if name == "compile":
        row["compile_s"] = round(time.perf_counter() - start, 1)
    with timing.PeakMemory(before) if x.is_cuda else contextlib.nullcontext() as peak:
        step(x)
    row["peak_gib"] = (first if _replays(name) else peak).gib if x.is_cuda else None
    return step


def _replays(name: str) -> bool:
    return name.startswith("ours-graph")


class Gate:
    """Outputs and the gradient of all parameters against stock's, both against a float64 truth, on a batch of its own.

    The gradient is judged as one vector in which every parameter's has the same length. Those that are zero but for
    rounding, such as of a shift that a later batch norm takes out again, have next to none.
    """

    def __init__(self, base: nn.Module, x: Tensor, dtype: str) -> None:
        self.x = x
        kind = getattr(torch, DTYPES[dtype])
        tf32 = torch.backends.cudnn.allow_tf32
        self.precision = error_rule.precision_name(kind, tf32, x.device)
        self.blocks = count_blocks(base)[1]
        exact = copy.deepcopy(base).double().train()
        self.truth = self._results(Step(exact, exact, x.device, "fp32"), x.double())
        stock = copy.deepcopy(base).train()
        self.stock = self._results(Step(stock, stock, x.device, dtype), x)

    def _results(self, step: Step, x: Tensor, calls: int = 1) -> dict[str, Tensor]:
        for _ in range(calls):
            outputs = step(x)
        results = {
            name: value.detach().clone() for name, value in zip(("boxes", "scores"), outputs, strict=True)
        }
        return results | {
            name: parameter.grad.clone()
            for name, parameter in step.net.named_parameters()
            if parameter.grad is not None
        }

    def __call__(self, step: Step, calls: int = 1) -> dict[str, Any]:
        """Verdict of the last of `calls` steps."""
        if self.x.is_cuda:
            timing.poison()
        mine = self._results(step, self.x, calls)
        if mine.keys() != self.stock.keys():
            odd = sorted(mine.keys() ^ self.stock.keys())
            return {"ok": False, "error": None, "note": f"not in both: {', '.join(odd)[:200]}"}
        rule, root = error_rule.tolerances(), self.blocks**0.5
        floors = {"output": rule.floor("output", self.precision, 1) * root}
        floors["gradient"] = rule.floor("grad_weight", self.precision, 2048) * root
        pairs = {
            name: error_rule.compare(mine[name], self.stock[name], self.truth[name], floors["output"])
            for name in ("boxes", "scores")
        }
        ours, stock, truth = (self._gradient(results) for results in (mine, self.stock, self.truth))
        pairs["gradient"] = error_rule.compare(ours, stock, truth, floors["gradient"])
        return judge(pairs)

    def _gradient(self, results: dict[str, Tensor]) -> Tensor:
        names = [name for name in self.truth if name not in ("boxes", "scores")]
        norms = {name: self.truth[name].norm() for name in names}
        least = NEGLIGIBLE * torch.stack(list(norms.values())).median()
        norms = {name: norm.maximum(least) for name, norm in norms.items()}
        return torch.cat([(results[name].double() / norms[name]).flatten() for name in names])
