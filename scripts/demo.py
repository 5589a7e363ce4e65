"""Patches a YOLO12n, predicts one picture with and without the patch, and checks every layer.

    scripts/demo.sh [model=yolo12n.pt] [source=PICTURE] [imgsz=640] [conf=0.25] [device=cpu|cuda:0] [save=demo.jpg]

model: weights, or a YAML file for random weights. Without it, yolo12n.pt, which Ultralytics downloads; where that
fails, yolo12n.yaml with random weights from a fixed seed, whose boxes mean nothing but must still agree.
source: the picture; the one that comes with Ultralytics if left out.
Exit status: 0 parity, 1 parity broken, 2 could not run.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cv2
import torch
from torchvision.ops import box_iou
from ultralytics import YOLO
from ultralytics.data.augment import LetterBox
from ultralytics.engine.results import Results
from ultralytics.utils import ASSETS

from yolo12_fastconv import PatchError, check_parity, patch_model, patch_report

DEFAULTS = {"model": "", "source": "", "imgsz": "640", "conf": "", "device": "", "save": "demo.jpg"}
SHOWN = 8


def parse(arguments: list[str]) -> dict[str, str]:
    """`key=value` arguments over the defaults. Raises ValueError for anything else."""
    options = dict(DEFAULTS)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in options:
            raise ValueError(
                f"{argument!r} is no argument; expected key=value with a key of {', '.join(DEFAULTS)}"
            )
        options[key] = value
    return options


def load(name: str) -> tuple[YOLO, bool]:
    """The model of this name, and whether its weights are random; the default one if the name is empty."""
    if not name:
        try:
            return YOLO("yolo12n.pt"), False
        except (
            OSError,
            RuntimeError,
        ) as error:  # what Ultralytics raises for a failed download differs by version
            print(f"yolo12n.pt is not here and can't be downloaded ({str(error).strip()})\n")
        name = "yolo12n.yaml"
    torch.manual_seed(0)
    return YOLO(name), name.endswith((".yaml", ".yml"))


def network_input(source: Path, imgsz: int, device: torch.device) -> torch.Tensor:
    """The picture as the model gets it: (1, 3, imgsz, imgsz), float32 in 0 to 1, RGB. Raises OSError."""
    picture = cv2.imread(str(source))
    if picture is None:
        raise OSError(f"{source} is no picture that OpenCV reads")
    padded = LetterBox((imgsz, imgsz), auto=False)(image=picture)
    return torch.from_numpy(padded[..., ::-1].copy()).permute(2, 0, 1)[None].to(device).float() / 255


def describe(title: str, result: Results) -> str:
    boxes = result.boxes
    lines = [f"{title}: {len(boxes)} detections"]
    for box in list(boxes)[:SHOWN]:
        corners = ", ".join(f"{value:.2f}" for value in box.xyxy[0].tolist())
        lines.append(f"  {result.names[int(box.cls)]:14} {float(box.conf):.6f}  [{corners}]")
    if len(boxes) > SHOWN:
        lines.append(f"  … {len(boxes) - SHOWN} more")
    return "\n".join(lines)


def compare(stock: Results, fast: Results) -> str:
    """How many boxes of one result have a partner of the same class in the other, and how far apart they are."""
    if not len(stock.boxes) or not len(fast.boxes):
        return f"{len(stock.boxes)} stock boxes, {len(fast.boxes)} patched ones"
    same_class = stock.boxes.cls[:, None] == fast.boxes.cls[None]
    iou, partner = (box_iou(stock.boxes.xyxy, fast.boxes.xyxy) * same_class).max(1)
    score = (stock.boxes.conf - fast.boxes.conf[partner]).abs()
    matched = int((iou >= 0.99).sum())
    return (
        f"{matched} of {len(stock.boxes)} stock boxes have a patched partner (IoU at least 0.99); "
        f"smallest IoU {float(iou.min()):.6f}, largest score difference {float(score.max()):.1e}"
    )


def run(options: dict[str, Any]) -> int:
    stock, random = load(options["model"])
    # The same weights once more: predicting fuses a model in place, and this one is to be patched unfused.
    fast, _ = load(options["model"] or ("yolo12n.yaml" if random else "yolo12n.pt"))
    source = Path(options["source"]) if options["source"] else ASSETS / "bus.jpg"
    imgsz = int(options["imgsz"])
    conf = float(options["conf"] or (1e-5 if random else 0.25))
    device = torch.device(options["device"] or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    if random:
        print(
            f"The weights are RANDOM, so the boxes below mean nothing. conf is lowered to {conf:g} to have some; they "
            "show only that stock and patched agree. With weights: scripts/demo.sh model=yolo12n.pt; to train some on "
            "generated pictures of shapes, in minutes: python tests/trained.py FOLDER\n"
        )

    patch_model(fast)
    for model in (stock, fast):
        model.to(device)
    batch = network_input(source, imgsz, device)
    print(f"Patch report on {device}\n{patch_report(fast).summary()}\n")
    dtypes = [torch.float32] if device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]
    # `reference`: stock blocks with weights read from the file once more, not the patched model with its patch undone.
    reports = [
        check_parity(fast, batch, dtype=dtype, mode="eval", reference=stock, conf=conf) for dtype in dtypes
    ]

    # Random weights find boxes everywhere: more than a few would hide the picture.
    max_det = 20 if random else 300
    arguments = {"imgsz": imgsz, "conf": conf, "max_det": max_det, "device": device, "verbose": False}
    without = stock.predict(source, **arguments)[0]
    with_patch = fast.predict(source, **arguments)[0]
    print(describe("Without the patch", without))
    print(describe("With the patch", with_patch))
    print(compare(without, with_patch) + "\n")

    for report in reports:
        print(f"{report}\n")
    picture = Path(options["save"]).resolve()
    with_patch.save(filename=str(picture))
    print(f"Annotated picture: {picture}")
    parity = all(report.ok for report in reports)
    print("Parity holds." if parity else "PARITY IS BROKEN, see the table.")
    return 0 if parity else 1


def main(arguments: list[str]) -> int:
    if {"-h", "--help", "help"} & set(arguments):
        print(__doc__)
        return 0
    try:
        return run(parse(arguments))
    except (ValueError, TypeError, OSError, PatchError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
