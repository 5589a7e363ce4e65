"""benchmark.py predict: YOLO.predict on a folder of pictures, phase by phase, stock and patched."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timing
import torch
from bench_options import COMMON, OURS, file_of, fill, keys_of, several
from bench_session import Session, Skipped, failure, needs_device_for_graphs, network, pictures
from records import RECORDS
from run_tables import predict_table

from yolo12_fastconv._arguments import UsageError, positive
from yolo12_fastconv.patching import patch_model

USAGE = """\
predict: YOLO.predict on a folder of generated pictures; on a CPU only to see that it runs (no record)
  model=yolo12n,yolo12x   default: n                 batch=1,16        default
  dtype=fp16,fp32         default                    imgsz=640         default; a multiple of 32
  sizes=equal,mixed       default: 640x480 only, and five sizes        pictures=64        default
  replays=5               default; a time is their median              weights=FILE       of one model; default: random,
                          with a head that finds some hundred boxes in a picture before suppression
  Contenders: `stock`, `ours`, `ours-graph` (cuda_graph=True). Preprocess, inference and postprocess are Ultralytics'
  own figures; the rest is reading the pictures and everything else. Detections must be those of stock, but for one in
  twenty on a threshold.
"""
SIZES = {"equal": ((480, 640),), "mixed": ((480, 640), (720, 1280), (1080, 810), (600, 600), (375, 500))}
"""(height, width) of the pictures."""
DISTINCT = 10
"""Pictures that are drawn; the others are copies."""
CANDIDATES = 100
"""Boxes above the confidence threshold in a picture, before suppression."""
CONF = 0.25
UNLIKE = 0.05
"""Part of the detections that may differ: random weights put many on the threshold."""
PHASES = ("preprocess", "inference", "postprocess")
CONTENDERS = ("stock", *OURS)


@dataclass
class Options:
    model: tuple[str, ...] = ("yolo12n",)
    batch: tuple[int, ...] = (1, 16)
    dtype: tuple[str, ...] = ("fp16", "fp32")
    imgsz: int = 640
    sizes: tuple[str, ...] = ("equal", "mixed")
    pictures: int = 64
    weights: Path | None = None
    replays: int = 5
    out: Path = RECORDS
    budget: float = float("inf")


_KEYS = keys_of("model", "batch") | {
    "dtype": (several(("fp16", "fp32")), "some of fp16,fp32: Ultralytics predicts in no other"),
    "imgsz": COMMON["imgsz"],
    "sizes": (several(SIZES), f"some of {','.join(SIZES)}"),
    "pictures": (positive, "a number from 1"),
    "weights": (file_of, "a file"),
    **keys_of("replays", "out", "budget"),
}


def parse(arguments: Sequence[str]) -> Options:
    """Options out of KEY=VALUE arguments; raises as `fill`."""
    options = fill(Options(), arguments, _KEYS)
    if options.weights and len(options.model) > 1:
        raise UsageError("weights=FILE is of one model: give model=yolo12n, say")
    return options


def run(options: Options) -> int:
    """Measure, print the tables, write the record. Returns the exit status."""
    session = Session("predict", options, cpu=True)
    plan = [
        (model, sizes, dtype, batch)
        for model in options.model
        for sizes in options.sizes
        for dtype in options.dtype
        for batch in options.batch
    ]
    with tempfile.TemporaryDirectory() as name:
        folders = {sizes: draw(Path(name) / sizes, SIZES[sizes], options.pictures) for sizes in options.sizes}
        for model, sizes, dtype, batch in plan:
            if session.out_of_time():
                break
            identity = {
                "model": model,
                "batch": batch,
                "imgsz": options.imgsz,
                "dtype": dtype,
                "sizes": sizes,
            }
            measured = identity | measure(session, options, identity, folders[sizes])
            print(predict_table([measured]), flush=True)
            session.add(measured, f"{model} batch {batch} {dtype} {sizes}")
            timing.release()
    return session.end()


def draw(folder: Path, sizes: Sequence[tuple[int, int]], count: int) -> Path:
    """A folder of `count` JPEG pictures of these sizes, in turn."""
    import cv2
    import shapes_dataset

    folder.mkdir()
    rng = np.random.default_rng(0)
    for index in range(count):
        path = folder / f"{index:04d}.jpg"
        if index >= DISTINCT:
            shutil.copy(folder / f"{index % DISTINCT:04d}.jpg", path)
            continue
        height, width = sizes[index % len(sizes)]
        image = shapes_dataset.draw(max(height, width), rng, 6)[0]
        cv2.imwrite(str(path), image[:height, :width])
    return folder


def measure(session: Session, options: Options, identity: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The rows of one set, and what was the same for all."""
    settings = {
        "source": str(folder), "stream": True, "verbose": False, "save": False, "conf": CONF,
        "batch": identity["batch"], "imgsz": options.imgsz, "device": str(session.device),
        **_precision(identity["dtype"]),
    }  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    yolos: dict[str, Any] = {}
    counts: dict[str, list[int]] = {}
    for name in CONTENDERS[:2] if session.quick else CONTENDERS:
        empty = dict.fromkeys(("ms", "spread", *PHASES, "rest", "detections"))
        rows[name] = {"contender": name, **empty, "ok": None, "note": ""}
        try:
            yolos[name] = _yolo(name, identity["model"], options, str(session.device))
            counts[name] = _pass(yolos[name], settings)["detections"]  # warms up every shape too
            rows[name] |= _verdict(counts[name], counts["stock"])
        except Skipped as reason:
            rows[name]["note"] = str(reason)
        except Exception as error:  # one contender must not end the run; of ours it is a failure
            yolos.pop(name, None)
            rows[name] |= {"note": failure(error), "ok": False if name != "stock" else None}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in yolos}
    for _ in range(options.replays):
        for name, yolo in yolos.items():
            found[name].append(_pass(yolo, settings))
    for name, passes in found.items():
        rows[name] |= timing.summary([one["ms"] for one in passes], "ms")
        rows[name] |= {
            key: round(float(np.median([one[key] for one in passes])), 4) for key in (*PHASES, "rest")
        }
    weights = "random" if options.weights is None else options.weights.name
    shared = {"complete": True, "pictures": options.pictures, "weights": weights, "replays": options.replays}
    return shared | {"rows": list(rows.values())}


def _precision(dtype: str) -> dict[str, Any]:
    from ultralytics.utils import DEFAULT_CFG_DICT

    if dtype == "fp32":
        return {}
    return {"quantize": 16} if "quantize" in DEFAULT_CFG_DICT else {"half": True}  # the older name


def _yolo(name: str, model: str, options: Options, device: str) -> Any:
    from ultralytics import YOLO

    if name == "ours-graph":
        needs_device_for_graphs()
    if options.weights:
        yolo: Any = YOLO(str(options.weights))
    else:
        yolo = YOLO(f"{model}.yaml")
        yolo.model = _finding(copy.deepcopy(network(model, options.imgsz, device)), options.imgsz, device)
    if name == "stock":
        return yolo
    return patch_model(yolo, cuda_graph=name == "ours-graph")


def _finding(net: Any, imgsz: int, device: str) -> Any:
    """`net` with the scores of its head shifted so that about `CANDIDATES` boxes of a picture pass the threshold."""
    net.eval()
    with torch.no_grad():
        scores = net(pictures(2, imgsz).to(device))[0][:, 4:].flatten(1).double()
        least = scores.topk(min(CANDIDATES, scores.shape[1]), 1).values.amin(1).mean().logit()
        for branch in net.model[-1].cv3:
            branch[-1].bias += math.log(CONF / (1 - CONF)) - least.item()
    return net


def _pass(yolo: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """ms per picture of one run through the folder, whole and by phase, and the detections of each picture."""
    timing.synchronize()
    start = time.perf_counter()
    speeds, detections = [], []
    for result in yolo.predict(**settings):
        speeds.append([result.speed[phase] for phase in PHASES])
        detections.append(len(result.boxes))
    timing.synchronize()
    ms = 1000 * (time.perf_counter() - start) / len(speeds)
    phases = dict(zip(PHASES, np.mean(speeds, 0).tolist(), strict=True))
    return {"ms": ms, **phases, "rest": ms - sum(phases.values()), "detections": detections}


def _verdict(ours: list[int], stock: list[int]) -> dict[str, Any]:
    """Detections per picture must be as many as stock's, but for `UNLIKE` of them all."""
    unlike = sum(abs(a - b) for a, b in zip(ours, stock, strict=True))
    ok = unlike <= UNLIKE * max(sum(stock), 20)
    note = "" if ok else f"wrong: {unlike} of {sum(stock)} detections are not as with stock"
    return {"detections": sum(ours), "ok": ok, "note": note}
