"""Single Conv blocks in training, forward and backward, measured in two ways. For benchmark.py train scope=layers.

Busy: launched one by one, the time in which the GPU is busy. Graph: captured in a CUDA graph, the time of a replay."""

from __future__ import annotations

import copy
from typing import Any

import cases
import timing
import torch
from bench_options import UsageError
from bench_session import Session, failure
from layer_timing import as_in_a_model
from torch import Tensor, nn
from train_benchmark import Options, autocast

from yolo12_fastconv.patching import patch_modules

CALLS = 5
"""Calls in a profile, after two that warm up."""
TOLERANCE = {"fp16": 1e-2, "bf16": 6e-2, "fp32": 1e-2}
"""Relative l2 distance of y and of the weight's gradient from eager's that makes a result wrong. The error rule is for
the tests; this finds a kernel that computes something else."""


def measure(session: Session, options: Options, identity: dict[str, Any]) -> dict[str, Any]:
    """One set of scope "layers"."""
    if session.quick:
        raise UsageError("scope=layers measures kernels: it needs a GPU")
    rows = []
    shapes = cases.conv_shapes(identity["model"], options.imgsz, batch=identity["batch"])
    for case in shapes:
        if session.out_of_time():
            break
        rows.append(_row(case, session.device, identity["dtype"], options.replays))
        timing.release()
    return {**identity, "complete": len(rows) == len(shapes), "rows": rows}


def _row(case: cases.Case, device: torch.device, dtype: str, replays: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "contender": case.name.partition("-")[2], "name": case.name.partition("-")[2], "count": case.count,
        "ok": None, "note": "",
    }  # fmt: skip
    row |= dict.fromkeys(
        f"{name}_{what}" for name in ("ours", "eager") for what in ("us", "kernels", "graph_us")
    )
    try:
        stock = _block(case).to(device, memory_format=torch.channels_last).train()
        blocks = {"eager": stock, "ours": copy.deepcopy(stock)}
        patch_modules(blocks["ours"])
        calls = {
            name: _Call(block, case, device, dtype, as_op=name == "ours") for name, block in blocks.items()
        }
        expected, mine = calls["eager"].results(), calls["ours"].results()
        distance = max(_distance(a, b) for a, b in zip(mine, expected, strict=True))
        row["ok"] = distance < TOLERANCE[dtype]
        if not row["ok"]:
            row["note"] = f"wrong: {distance:.1e} from eager in relative l2"
        for name, call in calls.items():
            for _ in range(2):
                call()
            counts = timing.profiled(call, CALLS)
            if name == "eager" or row["ok"]:
                row |= {f"{name}_us": round(counts["busy_us"], 2), f"{name}_kernels": counts["kernels"]}
        graphs = {name: timing.capture(call) for name, call in calls.items() if name == "eager" or row["ok"]}
        for name, replay in timing.alternate(graphs, replays).items():
            row[f"{name}_graph_us"] = round(replay["us"], 2)
    except Exception as error:  # one layer must not end the run
        row |= {"ok": False, "note": failure(error)}
    return row


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()


def _block(case: cases.Case) -> nn.Module:
    from ultralytics.nn.modules.conv import Conv

    act = nn.SiLU() if case.act == "silu" else nn.Identity()
    size = (case.kernel[0], case.stride[0], case.padding[0], case.groups, case.dilation[0])
    block = Conv(case.ci, case.co, *size, act)
    block.bn.eps, block.bn.momentum = case.eps, 0.03
    return block


class _Call:
    """A block's forward and backward under autocast.

    The stem gets what the trainer feeds, float pictures in NCHW that need no gradient; the others half NHWC, with
    `as_op` in the rows that the op before returns: of an odd width they begin at multiples of 16 bytes.
    """

    def __init__(
        self, block: nn.Module, case: cases.Case, device: torch.device, dtype: str, *, as_op: bool
    ) -> None:
        kind = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self.block, self.device, self.dtype = block, device, dtype
        inputs = case.inputs(kind, device)
        if case.ci <= 4:
            self.x = inputs.x.float().contiguous()
        else:
            self.x = (as_in_a_model(inputs.x) if as_op else inputs.x).requires_grad_()
        self.grad_y = inputs.grad_y

    def __call__(self) -> list[Tensor]:
        """y, and the gradients of x, if it needs one, and of the parameters.

        Asked for, not accumulated: in a leaf whose rows have gaps they would be copied.
        """
        with autocast(self.device, self.dtype):
            y = self.block(self.x)
        sources = [self.x] if self.x.requires_grad else []
        return [y, *torch.autograd.grad(y, [*sources, *self.block.parameters()], self.grad_y)]

    def results(self) -> list[Tensor]:
        return [result.detach().clone() for result in self()]
