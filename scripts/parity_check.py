#!/usr/bin/env python3
"""Layer-by-layer check of a patched model against stock Ultralytics: ``yolo12-fastconv parity`` as a script.

    scripts/parity_check.py model=yolo12n.pt source=bus.jpg quantize=16      as the command; see its --help
    scripts/parity_check.py --matrix n,x,n-seg [KEY=VALUE ...] [--budget SECONDS] [--json FILE] [--markdown FILE]

The matrix runs YOLO12 models with random weights, named by scale and task (n-seg, n-pose, n-obb, n-cls), one after the
other, each in fp32, fp16 and bf16, in evaluation mode (also fused, as ``predict`` has it) and in training mode, and
writes one line for each. The files are written after every run; a run that raises is a line with its error, and the
next one follows. After the budget no further run begins. Keys: imgsz, batch, source, device, seed. Exit status as the
command's: 0 all hold parity, 1 at least one is broken, 2 one could not run, or not all within the budget.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from yolo12_fastconv import parity_cli
from yolo12_fastconv.parity_report import ParityReport

SCALES = "nsmlx"
TASKS = ("", "-seg", "-pose", "-obb", "-cls")
KEYS = ("imgsz", "batch", "source", "device", "seed")
RUNS = [
    ("eval", ("mode=eval",)),
    ("eval, fused", ("mode=eval", "fuse=True")),
    ("train", ("mode=train",)),
]
COLUMNS = (
    "model",
    "precision",
    "mode",
    "layers",
    "tensors",
    "closest to its limit",
    "of limit",
    "ratio",
    "detections",
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--matrix" not in arguments:
        return parity_cli.main(arguments)
    try:
        models, rest, files, budget = _parse(arguments)
        plan = [(f"yolo12{model}.yaml", *run) for model in models for run in _runs(rest)]
        rows: list[dict[str, Any]] = []
        end = time.monotonic() + budget
        for run in plan:
            if time.monotonic() > end:
                print(f"parity_check: stopped by --budget {budget:g}, {len(rows)} of {len(plan)} runs made")
                break
            rows.append(_row_or_problem(*run))
            # After every run, so that a matrix that is ended from outside loses one at most.
            _write(files, rows, complete=len(rows) == len(plan))
    except parity_cli.UsageError as error:
        print(f"parity_check: {error}", file=sys.stderr)
        return 2
    print(_markdown(rows), end="")
    if len(rows) < len(plan) or any(row["problem"] for row in rows):
        return 2
    return 0 if all(row["ok"] for row in rows) else 1


def _write(files: tuple[str, str], rows: list[dict[str, Any]], complete: bool) -> None:
    texts = (json.dumps(_summary(rows, complete), indent=1) + "\n", _markdown(rows))
    for path, text in zip(files, texts, strict=True):
        if path:
            part = Path(f"{path}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)  # whole, even if this process is ended now


def _row_or_problem(model: str, precision: str, mode: str, arguments: list[str]) -> dict[str, Any]:
    try:
        return {**_row(model, precision, mode, arguments), "problem": ""}
    except parity_cli.UsageError:  # the same for every run
        raise
    except Exception as error:  # of a kernel or of memory, say: the status tells it from broken parity
        traceback.print_exc()
        row = dict.fromkeys(("worst", "used", "ratio", "detections"))
        return {
            **row, "model": model.removesuffix(".yaml"), "precision": precision, "mode": mode, "ok": False,
            "layers": 0, "tensors": 0, "kernels": [], "problems": [], "environment": {},
            "problem": f"could not run: {type(error).__name__}: {error}".splitlines()[0][:200],
        }  # fmt: skip
    finally:
        gc.collect()  # models hold reference cycles
        if torch.cuda.is_initialized():
            with contextlib.suppress(RuntimeError):  # of a kernel before, which is in the row
                torch.cuda.empty_cache()


def _parse(arguments: list[str]) -> tuple[list[str], list[str], tuple[str, str], float]:
    """Models as "n" or "n-seg", KEY=VALUE arguments, the files of --json and --markdown, and seconds."""
    options = {"--matrix": "", "--json": "", "--markdown": "", "--budget": "inf"}
    rest: list[str] = []
    pending = iter(arguments)
    for argument in pending:
        if argument in options:
            options[argument] = next(pending, "")
        elif argument.partition("=")[0] in KEYS:
            rest.append(argument)
        else:
            raise parity_cli.UsageError(
                f"{argument!r} has no place beside --matrix; the keys are {', '.join(KEYS)}"
            )
    known = [scale + task for scale in SCALES for task in TASKS]
    models = options["--matrix"].split(",")
    if not set(models) <= set(known):
        tasks = ", ".join(task for task in TASKS if task)
        raise parity_cli.UsageError(
            f"--matrix {','.join(models)}: scales are {', '.join(SCALES)}, tasks {tasks}, as in --matrix n,x,n-seg"
        )
    try:
        budget = float(options["--budget"])
    except ValueError:
        raise parity_cli.UsageError(f"--budget {options['--budget']}: seconds, as in --budget 120") from None
    return models, rest, (options["--json"], options["--markdown"]), budget


def _runs(rest: list[str]) -> list[tuple[str, str, list[str]]]:
    """(precision, mode, arguments) of each run."""
    return [
        (precision, mode, [f"dtype={precision}", *arguments, *rest])
        for precision in ("fp32", "fp16", "bf16")
        for mode, arguments in RUNS
    ]


def _row(model: str, precision: str, mode: str, arguments: list[str]) -> dict[str, Any]:
    start = time.perf_counter()
    report: ParityReport = parity_cli.run([f"model={model}", *arguments])
    seconds = time.perf_counter() - start
    print(f"{model} {precision} {mode}: {report.summary()} ({seconds:.0f} s)", file=sys.stderr)
    worst = report.worst
    return {
        "model": model.removesuffix(".yaml"),
        "precision": precision,
        "mode": mode,
        "ok": report.ok,
        "layers": len(list(report.layers())),
        "tensors": len(report.rows) + len(report.outputs),
        "worst": None if worst is None else f"{worst.layer} {worst.quantity}",
        "used": None if worst is None else worst.comparison.used,
        "ratio": None if worst is None else worst.comparison.ratio,
        "kernels": sorted({row.kernel.split("/")[0] for row in report.rows}),
        "detections": None if report.detections is None else str(report.detections).splitlines()[0],
        "problems": [row.to_dict() for row in (*report.rows, *report.outputs) if not row.ok],
        "environment": report.environment,
    }


def _summary(rows: list[dict[str, Any]], complete: bool) -> dict[str, Any]:
    return {"ok": all(row["ok"] for row in rows), "complete": complete, "rows": rows}


def _markdown(rows: list[dict[str, Any]]) -> str:
    lines = ["# Parity with stock Ultralytics, layer by layer", ""]
    environment = next((row["environment"] for row in rows if row["environment"]), {})
    keys = ("input", "source", "device", "library", "versions")
    lines += [f"- {key}: {environment[key]}" for key in keys if key in environment]
    lines += ["", f"| {' | '.join((*COLUMNS, 'verdict'))} |", "|" + "---|" * (len(COLUMNS) + 1)]
    for row in rows:
        used = "-" if row["used"] is None else f"{100 * row['used']:.0f} %"
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
        detections = row["detections"] or "-"
        cells = (
            row["model"],
            row["precision"],
            row["mode"],
            row["layers"],
            row["tensors"],
            row["worst"],
            used,
            ratio,
        )
        verdict = "parity" if row["ok"] else f"**{row['problem'] or 'BROKEN'}**"
        lines.append("| " + " | ".join(map(str, (*cells, detections, verdict))) + " |")
    for row in rows:
        for problem in row["problems"]:
            numbers = (
                problem["problem"]
                or f"ours {problem['ours']}, stock {problem['stock']}, limit {problem['limit']}"
            )
            lines += [
                "",
                f"- {row['model']} {row['precision']} {row['mode']}: {problem['layer']} {problem['quantity']}: ",
            ]
            lines[-1] += f"{numbers} ({problem['geometry']}, {problem['kernel']})"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
