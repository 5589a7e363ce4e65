"""Does patched training converge as stock does? ``benchmark.py convergence``; see USAGE."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import record_files
import records
import timing
from bench_options import ONE, UsageError, fill, keys_of
from numpy.typing import NDArray
from records import RECORDS

from yolo12_fastconv._arguments import positive

Curve = NDArray[np.float64]

USAGE = """\
convergence: stock and patched YOLO.train from one seed on generated pictures; also on a CPU, with small settings
  model=yolo12n           default                    dtype=fp16|bf16|fp32  default: fp16; fp32 on a CPU
  steps=300               default                    batch=16          default
  imgsz=160               default                    pictures=160      default, of the training set
  seed=0                  default                    stock=3           stock runs, from 2 to 4; default
  The stock runs get the pictures of every batch in another order: the same sums, added up in another order. How far
  their loss curves and final mAP are apart is the noise. Exit status 1 if the patched run is outside of it.
"""
WINDOW = 20
"""Steps over which a loss curve is smoothed."""
WORKERS = 4
"""Processes that read pictures: as many in all runs, since each draws its own random numbers. In the trainer's own
process, 200 steps of YOLO12n at batch 16 took 50 s on an H200."""
FACTOR, FLOOR = 1.5, 0.01
"""The patched run may be this many times as far from a stock run as two stock runs are from each other, plus the floor:
the largest of three distances is itself a draw. As parts of the loss, and as mAP."""
ORDERS = ("as they come", "reversed", "rotated by a half", "rotated by a third")


@dataclass
class Options:
    model: str = "yolo12n"
    dtype: str | None = None
    steps: int = 300
    batch: int = 16
    imgsz: int = 160
    pictures: int = 160
    seed: int = 0
    stock: int = 3
    out: Path = RECORDS
    budget: float = float("inf")


_KEYS = ONE | keys_of(
    steps=(positive, "a number from 1"),
    pictures=(positive, "a number from 1"),
    seed=(int, "a number"),
    stock=(lambda text: {"2": 2, "3": 3, "4": 4}[text], "2, 3 or 4"),
)


def parse(arguments: Sequence[str]) -> Options:
    """Options out of KEY=VALUE arguments; raises as `fill`."""
    options = fill(Options(), arguments, _KEYS)
    if options.pictures < options.batch:
        raise UsageError(f"pictures={options.pictures}: there must be a batch of them, {options.batch}")
    return options


def run(options: Options) -> int:
    """Train, compare, print the table, write record and plot. Returns the exit status."""
    from bench_session import Session
    from run_tables import convergence_table

    session = Session("convergence", options, cpu=True)
    dtype = options.dtype or ("fp32" if session.quick else "fp16")
    runs = [(f"stock, pictures {order}", i, False) for i, order in enumerate(ORDERS[: options.stock])]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = _dataset(Path(folder), options)
        # Ours before the last stock runs: a budget that ends the run leaves something to compare.
        for name, order, patch in [*runs[:2], ("ours", 0, True), *runs[2:]]:
            if session.out_of_time():
                break
            rows.append(
                {"contender": name, **train(data, folder, options, dtype, order, patch, session.quick)}
            )
            timing.release()
    measured = {
        "model": options.model, "batch": options.batch, "imgsz": options.imgsz, "dtype": dtype,
        "steps": options.steps, "seed": options.seed, "complete": len(rows) == len(runs) + 1,
        **compare(rows),
    }  # fmt: skip
    print(convergence_table([measured]), flush=True)
    session.add(measured, f"{options.model} {options.steps} steps")
    if not session.quick:
        plot(session.path)
    return session.end()


def _dataset(folder: Path, options: Options) -> Path:
    import shapes_dataset

    validation = max(options.pictures // 4, 4)
    return shapes_dataset.make(
        folder / "shapes", size=options.imgsz, train=options.pictures, val=validation, seed=options.seed
    )


def train(
    data: Path, folder: str, options: Options, dtype: str, order: int, patch: bool, on_cpu: bool
) -> dict[str, Any]:
    """The losses of one run, step by step, and the final mAP of its best checkpoint."""
    from train_iterations import settings_of, without_amp_check
    from ultralytics import YOLO

    from yolo12_fastconv.patching import patch_model

    per_epoch = -(-options.pictures // options.batch)
    identity = {"imgsz": options.imgsz, "batch": options.batch, "dtype": dtype}
    settings = settings_of(identity, folder, "cpu" if on_cpu else "cuda") | {
        "epochs": -(-options.steps // per_epoch), "seed": options.seed, "workers": 0 if on_cpu else WORKERS,
        "optimizer": "AdamW", "lr0": 0.002, "lrf": 0.05, "warmup_epochs": 1, "mosaic": 0, "close_mosaic": 0,
    }  # fmt: skip
    losses: list[Any] = []
    yolo: Any = YOLO(f"{options.model}.yaml")
    if patch:
        yolo = patch_model(yolo)
    yolo.add_callback("on_pretrain_routine_start", without_amp_check)
    yolo.add_callback("on_train_start", lambda trainer: _reorder(trainer, order))
    yolo.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.detach()))
    yolo.train(data=str(data), **settings)
    curve = [round(loss.item() / options.batch, 5) for loss in losses]
    box = yolo.metrics.box
    return {
        "losses": curve,
        "last": smooth(curve)[-1],
        "map50": round(box.map50, 4),
        "map": round(box.map, 4),
    }


def _reorder(trainer: Any, order: int) -> None:
    """Give the pictures of every batch another order: nothing but the order of summation changes."""
    original = trainer.preprocess_batch

    def preprocess(batch: dict[str, Any]) -> dict[str, Any]:
        batch = original(batch)
        count = len(batch["img"])
        places = list(range(count))  # places[new] = old
        if order == 1:
            places.reverse()
        elif order > 1:
            places = places[count // order :] + places[: count // order]
        new_of = {old: new for new, old in enumerate(places)}
        index = batch["batch_idx"]
        # The loss wants the boxes in the order of their pictures.
        moved, boxes = index.new_tensor([new_of[int(old)] for old in index.tolist()]).sort(stable=True)
        batch |= {"img": batch["img"][places], "batch_idx": moved}
        batch |= {key: batch[key][boxes] for key in ("cls", "bboxes")}
        return batch

    if order:
        trainer.preprocess_batch = preprocess


# ----------------------------------------------------------------------------------------------------------- verdict


def smooth(losses: Sequence[float]) -> list[float]:
    """Running means of `WINDOW` steps, or of all if there are fewer."""
    window = min(WINDOW, len(losses))
    return np.convolve(np.asarray(losses), np.ones(window) / window, "valid").round(5).tolist()


def distance(a: Curve, b: Curve) -> float:
    """Root mean square of the difference of two smoothed curves, relative to the second."""
    count = min(len(a), len(b))
    return float(np.sqrt(np.mean(((a[:count] - b[:count]) / b[:count]) ** 2)))


def compare(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Verdicts into the rows; {"band": the largest distance of two stock runs, "rows"}.

    The patched run is judged by its distance from the nearest stock run, and by its mAP against the range of theirs.
    """
    curves = {row["contender"]: np.asarray(smooth(row["losses"])) for row in rows}
    stock = [name for name in curves if name != "ours"]
    apart = [distance(curves[a], curves[b]) for a, b in itertools.combinations(stock, 2)]
    band = max(apart, default=0.0)
    maps = [row["map50"] for row in rows if row["contender"] != "ours"]
    for row in rows:
        others = [
            distance(curves[row["contender"]], curves[name]) for name in stock if name != row["contender"]
        ]
        row |= {"distance": round(min(others, default=0.0), 5), "ok": None, "note": ""}
        if row["contender"] != "ours":
            continue
        wide = max(maps) - min(maps)
        outside = max(min(maps) - row["map50"], row["map50"] - max(maps), 0.0)
        problems = []
        if not row["distance"] <= FACTOR * band + FLOOR:
            problems.append(
                f"its loss is {row['distance']:.4f} from stock, beyond {FACTOR * band + FLOOR:.4f}"
            )
        if not outside <= FACTOR * wide + FLOOR:
            problems.append(f"its mAP50 is {outside:.3f} outside of stock's")
        row |= {"ok": not problems, "note": "; ".join(problems) or "inside"}
    return {"band": round(band, 5), "rows": rows}


def plot(path: Path) -> None:
    """Draw the record `path` as the .png beside it: smoothed loss curves, a panel for each set.

    Raises:
        UsageError: there is no record in `path`.
    """
    found = record_files.to_draw(path, "convergence")
    if found is None:
        return
    record, Figure = found
    sets = record["sets"]
    figure = Figure(figsize=(6.4, 3.4 * len(sets)), layout="constrained")
    panels = figure.subplots(len(sets), 1, squeeze=False)[:, 0]
    for panel, one in zip(panels, sets, strict=True):
        for row in one["rows"]:
            curve = smooth(row["losses"])
            style = {"color": "C3", "linewidth": 1.4} if row["contender"] == "ours" else {"linewidth": 0.8}
            panel.plot(
                range(len(row["losses"]) - len(curve), len(row["losses"])),
                curve,
                label=row["contender"],
                **style,
            )
        panel.set_title(
            f"{one['model']}, {one['dtype']}, batch {one['batch']}, {one['imgsz']} px", fontsize=9
        )
        panel.set_xlabel("step", fontsize=8)
        panel.set_ylabel(f"loss, mean of {WINDOW} steps", fontsize=8)
        panel.tick_params(labelsize=8)
        panel.grid(True, linewidth=0.4, alpha=0.6)
        panel.legend(fontsize=7)
    figure.suptitle(f"Training on {record['gpu']}: patched and stock", fontsize=11)
    picture = path.with_suffix(".png")
    figure.savefig(picture, dpi=110, metadata={"Software": None})
    print(f"benchmark: wrote {records.shown(picture)}")
