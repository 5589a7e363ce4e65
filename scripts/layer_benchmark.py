"""benchmark.py layers: every Conv block of the YOLO12 models against its peers and its roofline, tables and plot."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import record_files
import records
from bench_options import COMMON, DTYPES, MODELS, UsageError, fill, keys_of, one_of, several
from records import RECORDS

from yolo12_fastconv._arguments import positive

USAGE = """\
layers: every Conv block alone, against its peers and its roofline; needs a GPU and the compiled library
  model=yolo12n,yolo12x   default: all five          batch=1,32        default
  dtype=fp16,bf16,fp32    default: fp16              imgsz=640         default; a multiple of 32
  peers=eager,cudnn,compile   default: eager,cudnn   replays=9         default; a time is their median
  tf32=False              default: True              target=sm80|sm90  default: what the library chooses
  rows=N|all              of a table; default: 20
  `eager` is channels_last PyTorch with the batch norm folded, as in a fused Ultralytics model; `cudnn` cuDNN's fused
  graph, the fastest of up to five plans (pip install '.[bench]'); `compile` torch.compile of `eager`.
"""
PEERS = ("eager", "cudnn", "compile")
TARGETS = ("sm80", "sm90")


@dataclass
class Options:
    model: tuple[str, ...] = MODELS
    batch: tuple[int, ...] = (1, 32)
    dtype: tuple[str, ...] = ("fp16",)
    imgsz: int = 640
    peers: tuple[str, ...] = ("eager", "cudnn")
    tf32: bool = True
    target: str = "default"
    replays: int = 9
    rows: int | None = 20
    """None: all."""
    out: Path = RECORDS
    budget: float = float("inf")


# -------------------------------------------------------------------------------------------------------- arguments


_KEYS = keys_of(
    *("model", "batch", "dtype", "imgsz"),
    peers=(several(PEERS), f"some of {','.join(PEERS)}"),
    tf32=COMMON["tf32"],
    target=(one_of(TARGETS), f"one of {', '.join(TARGETS)}"),
    replays=COMMON["replays"],
    rows=(lambda text: None if text == "all" else positive(text), "a number from 1, or all"),
    out=COMMON["out"],
    budget=COMMON["budget"],
)


def parse(arguments: Sequence[str]) -> Options:
    """Options out of KEY=VALUE arguments; raises as `fill`."""
    return fill(Options(), arguments, _KEYS)


# ---------------------------------------------------------------------------------------------------------- measure


def run(options: Options) -> int:
    """Measure, print the tables, write record and plot. Returns the exit status."""
    if options.target != "default":
        os.environ["YOLO12_FASTCONV_TARGET"] = options.target  # the library reads it at every call
    problem = records.why_not()
    if problem:
        raise UsageError(problem)
    import cases
    import layer_timing
    import torch

    start = time.monotonic()
    facts = records.facts()
    gpu = facts.pop("gpu")
    path = options.out / f"{records.slug(gpu)}-layers.json"
    layer_timing.use_tf32(options.tf32)
    plan = [
        (dtype, batch, model, cases.conv_shapes(model, options.imgsz, batch=batch))
        for dtype in options.dtype
        for batch in options.batch
        for model in options.model
    ]
    # Models share shapes, m and l most of all. A shape is known by everything but its name and count.
    todo = {(dtype, _shape(case)) for dtype, _, _, blocks in plan for case in blocks}
    known: dict[tuple[str, Any], dict[str, Any]] = {}
    progress = Progress(len(todo))
    ceilings: dict[str, dict[str, float]] = {}
    out_of_time = False
    failed: list[str] = []
    for name, batch, model, blocks in plan:
        if out_of_time:
            break
        dtype = getattr(torch, DTYPES[name])
        if name not in ceilings:
            ceilings[name] = layer_timing.measure_ceilings(dtype, options.replays)
        rows = []
        for case in blocks:
            key = (name, _shape(case))
            if key not in known:
                if time.monotonic() - start > options.budget:
                    out_of_time = True
                    break
                progress.show(f"{name} {model} batch {batch}: {case}")
                known[key] = layer_timing.measure(
                    case, dtype, list(options.peers), tf32=options.tf32, replays=options.replays
                )
                torch.cuda.empty_cache()  # the CUDA graphs' own pools, of gigabytes in large maps
            rows.append(_row(case, dtype, ceilings[name], known[key]))
        measured = {
            "model": model,
            "batch": batch,
            "imgsz": options.imgsz,
            "dtype": name,
            "tf32": options.tf32 and name == "fp32",
            "target": options.target,
            "complete": not out_of_time,
            **facts,
            "ceilings": ceilings[name],
            "replays": options.replays,
            "rows": rows,
        }
        progress.clear()
        if rows:
            print(table(measured, options.rows), flush=True)
        failed += [f"{model} {row['name']}: {row['notes']['ours']}" for row in rows if "ours" in row["notes"]]
        # After every set, so that a run that is ended from outside loses one set at most.
        new = {"kind": "layers", "gpu": gpu, "complete": not out_of_time, "sets": [measured] if rows else []}
        record_files.write(path, record_files.merge(record_files.read(path, "layers"), new))
    progress.clear()
    if out_of_time:
        print(f"benchmark: stopped by budget={options.budget:g}, {len(known)} of {len(todo)} layers measured")
    if path.is_file():
        print(f"benchmark: wrote {records.shown(path)}")
        plot(path)
    for line in failed:
        print(f"benchmark: no time of ours for {line}", file=sys.stderr)
    return 1 if failed else 0


def _shape(case: Any) -> tuple[Any, ...]:
    return (
        *(case.ci, case.co, case.h, case.w, case.kernel, case.stride, case.padding, case.dilation),
        *(case.groups, case.act, case.batch),
    )


def _row(case: Any, dtype: Any, ceilings: dict[str, float], found: dict[str, Any]) -> dict[str, Any]:
    """A layer of a record. `found`: times and notes of `layer_timing.measure`."""
    row = {
        "name": case.name.partition("-")[2],  # without the scale: models share layers
        "ci": case.ci, "co": case.co, "h": case.h, "w": case.w, "k": case.kernel[0], "s": case.stride[0],
        "groups": case.groups, "act": case.act, "count": case.count,
        "flop": case.flops, "bytes": case.bytes(dtype),
    }  # fmt: skip
    row |= {"family": records.family(row), "roofline_us": roofline(row["flop"], row["bytes"], ceilings)}
    return row | found


def roofline(flop: int, size: int, ceilings: dict[str, float]) -> float:
    """µs below which the GPU cannot do `flop` operations on `size` bytes."""
    return round(max(flop / ceilings["tflop_s"], size / ceilings["tb_s"]) / 1e6, 4)


class Progress:
    """Layers done and time left on stderr: one line that rewrites itself, or, in a log, a line every 30 seconds."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.tty = sys.stderr.isatty()
        self.shown = self.start

    def show(self, text: str) -> None:
        now = time.monotonic()
        left = (now - self.start) / self.done * (self.total - self.done) if self.done else 0.0
        line = f"[{self.done + 1}/{self.total}, {left:.0f} s left] {text}"
        self.done += 1
        if self.tty:
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
        elif now - self.shown > 30:
            self.shown = now
            print(line, file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------- tables and plots


def table(measured: dict[str, Any], shown: int | None = 20) -> str:
    """A set in markdown: layers by what they lose on the roofline over the whole model, families, slower layers."""
    rows = sorted(measured["rows"], key=_lost, reverse=True)
    ceilings = measured["ceilings"]
    blocks = sum(row["count"] for row in rows)
    unfinished = "" if measured["complete"] else ", NOT COMPLETE"
    lines = [
        f"## {measured['model']} batch {measured['batch']} {records.precision(measured)}, {measured['imgsz']} pixels: "
        f"{len(rows)} layers, {blocks} blocks{unfinished}",
        f"ceilings: {ceilings['tb_s']:.2f} TB/s, {ceilings['tflop_s']:.0f} TFLOP/s",
        "",
        "| layer | count | µs | spread | TB/s | TFLOP/s | roofline | share | best peer | ours / best | kernel |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows[:shown]:
        us, best = records.our_time(row), records.best_peer(row)
        named = "-"
        if best:
            peers = {name: time["us"] for name, time in row["times"].items() if name != "ours" and time}
            named = f"{best:.2f} {min(peers, key=peers.__getitem__)}"
        ours = ["-"] * 5
        if us:
            spread, rates = row["times"]["ours"]["spread"], (row["bytes"] / us / 1e6, row["flop"] / us / 1e6)
            ours = [f"{us:.2f}", f"{100 * spread:.0f} %", f"{rates[0]:.2f}", f"{rates[1]:.0f}"]
            ours.append(f"{100 * row['roofline_us'] / us:.0f} %")
        cells = [row["name"], row["count"], *ours[:4], f"{row['roofline_us']:.2f}", ours[4], named]
        kernel = (row["times"]["ours"] or {}).get("kernel", "-")
        lines.append("| " + " | ".join(map(str, [*cells, _number(records.ratio(row), 2), kernel])) + " |")
    if shown is not None and len(rows) > shown:
        lines.append(f"\n{len(rows) - shown} more with rows=all")
    lines += [
        "",
        "| sums, µs | ours | best peer | eager | roofline | ours / best |",
        "|---|---|---|---|---|---|",
    ]
    families = list(dict.fromkeys(row["family"] for row in sorted(rows, key=lambda row: row["family"])))
    groups = [(name, [row for row in rows if row["family"] == name]) for name in families]
    for name, group in [*groups, ("all", rows)]:
        total = records.sums(group)
        ratio = total["ours"] / total["best"] if total["ours"] and total["best"] else None
        cells = [name, *(_number(value) for value in total.values()), _number(ratio, 2)]
        lines.append("| " + " | ".join(cells) + " |")
    slower = sorted(records.slower(rows), key=lambda row: records.ratio(row) or 0, reverse=True)
    lines.append(f"\n{len(slower)} of {len(rows)} layers slower than the best peer by more than 5 %")
    lines += [
        f"- {row['name']} x{row['count']}: {records.our_time(row):.1f} against {records.best_peer(row):.1f}, "
        f"{records.ratio(row):.2f}"
        for row in slower
    ]
    notes: dict[str, list[str]] = {}
    for row in rows:
        for contender, note in row["notes"].items():
            notes.setdefault(f"{contender}: {note}", []).append(row["name"])
    if notes:
        lines.append("\nnot timed:")
        lines += [f"- {note} ({len(names)}: {', '.join(names[:3])})" for note, names in notes.items()]
    return "\n".join(lines) + "\n"


def _lost(row: dict[str, Any]) -> float:
    """µs above the roofline over all blocks of the model; a layer without a time comes first."""
    us = records.our_time(row)
    return float("inf") if us is None else (us - row["roofline_us"]) * row["count"]


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def plot(path: Path) -> None:
    """Draw the record `path` as the .png beside it: times against rooflines, a panel for each set.

    Without matplotlib only says so, since a machine with a GPU need not have it.

    Raises:
        UsageError: there is no record in `path`.
    """
    found = record_files.to_draw(path, "layers")
    if found is None:
        return
    record, Figure = found
    sets = record["sets"]
    lines = list(dict.fromkeys(_conditions(one) for one in sets))
    models = [model for model in MODELS if any(one["model"] == model for one in sets)]
    figure = Figure(figsize=(2.9 * len(models) + 0.4, 3.0 * len(lines) + 0.5), layout="constrained")
    panels = figure.subplots(len(lines), len(models), squeeze=False)
    for i, line in enumerate(lines):
        here = {one["model"]: one for one in sets if _conditions(one) == line}
        times = [row["roofline_us"] for one in here.values() for row in one["rows"]]
        times += [time for one in here.values() for row in one["rows"] for time in _drawn(row) if time]
        limits = (0.7 * min(times), 1.4 * max(times))
        for panel, model in zip(panels[i], models, strict=True):
            panel.set(xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal")
            panel.set_title(f"{model} {line}", fontsize=9)
            panel.set_xlabel("roofline, µs", fontsize=8)
            panel.tick_params(labelsize=8)
            panel.grid(True, which="major", linewidth=0.4, alpha=0.6)
            panel.plot(limits, limits, color="black", linewidth=0.8, label="roofline")
            rows = here[model]["rows"] if model in here else []
            for k, (label, marker, colour) in enumerate((("best peer", "x", "C1"), ("ours", "o", "C0"))):
                points = [(row["roofline_us"], time) for row in rows if (time := _drawn(row)[k])]
                x, y = zip(*points, strict=True) if points else ((), ())
                panel.scatter(x, y, s=12, marker=marker, color=colour, linewidths=0.9, alpha=0.8, label=label)
        panels[i][0].set_ylabel("measured, µs", fontsize=8)
    panels[0][0].legend(fontsize=7, loc="upper left")
    figure.suptitle(f"YOLO12 Conv blocks on {record['gpu']}: time against roofline", fontsize=11)
    picture = path.with_suffix(".png")
    # Without the version of matplotlib in it, the same record gives the same file.
    figure.savefig(picture, dpi=110, metadata={"Software": None})
    print(f"benchmark: wrote {records.shown(picture)}")


def _conditions(measured: dict[str, Any]) -> str:
    return f"batch {measured['batch']} {records.precision(measured)} {measured['imgsz']} px"


def _drawn(row: dict[str, Any]) -> tuple[float | None, float | None]:
    return records.best_peer(row), records.our_time(row)
