"""A YOLO12n that really detects: trained patched, on generated pictures of shapes, once per test run.

    python tests/trained.py FOLDER    writes FOLDER/best.pt, and the data set below FOLDER/shapes

``YOLO12_FASTCONV_TRAINED=/path/to/best.pt`` makes the tests use that file instead of training.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

import shapes_dataset

VARIABLE = "YOLO12_FASTCONV_TRAINED"
SIZE = 96
MINIMUM_MAP50 = 0.5

DATASET = {"size": SIZE, "train": 160, "val": 40, "shapes": 3, "seed": 0}
# No augmentation beyond flips: few steps have to do. `nbs` equal to `batch`: every batch is a step.
SETTINGS = {
    "imgsz": SIZE, "epochs": 12, "batch": 8, "nbs": 8, "optimizer": "AdamW", "lr0": 0.002, "lrf": 0.05,
    "warmup_epochs": 1, "mosaic": 0, "hsv_h": 0, "hsv_s": 0, "hsv_v": 0, "scale": 0, "translate": 0, "fliplr": 0.5,
    "workers": 0, "seed": 0, "val": False, "plots": False, "amp": False,
}  # fmt: skip


@functools.cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="yolo12_fastconv_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache
def shapes_yaml() -> Path:
    """The data set's ``data.yaml``."""
    return shapes_dataset.make(_folder() / "shapes", **DATASET)


@functools.cache
def shapes_images() -> list[Path]:
    """The 40 validation pictures, 96×96."""
    return sorted((shapes_yaml().parent / "images" / "val").iterdir())


@functools.cache
def trained_weights() -> Path:
    """A YOLO12n checkpoint with a mAP50 of at least 0.5 on the pictures: two minutes of training on a CPU core.

    Raises:
        FileNotFoundError: the environment variable names no file.
        RuntimeError: the trained model detects too little.
    """
    given = os.environ.get(VARIABLE)
    if given:
        if not Path(given).is_file():
            raise FileNotFoundError(f"{VARIABLE}={given} is no file")
        return Path(given)
    return train(_folder(), shapes_yaml())


def train(folder: Path, data: Path) -> Path:
    """Train into `folder`; returns the path of ``best.pt``."""
    import torch
    from ultralytics import YOLO

    from yolo12_fastconv import patch_model

    yolo = patch_model(YOLO("yolo12n.yaml"))
    # On two cores Ultralytics computes with one thread, which is right: two are slower as soon as another process runs.
    device = "0" if torch.cuda.is_available() else "cpu"
    yolo.train(data=str(data), project=str(folder), name="trained", device=device, **SETTINGS)
    if yolo.metrics.box.map50 < MINIMUM_MAP50:
        raise RuntimeError(
            f"the model trained on shapes has a mAP50 of {yolo.metrics.box.map50:.3f}, {MINIMUM_MAP50} was expected"
        )
    return Path(yolo.trainer.best)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    target = Path(sys.argv[1])
    best = train(target, shapes_dataset.make(target / "shapes", **DATASET))
    shutil.copy(best, target / "best.pt")
    print(target / "best.pt")
