"""A generated data set of filled shapes for every task of Ultralytics, in its folder layout: no download, fixed seed.

Classes: circle, square, triangle. Colours and background are random, so only the form tells the classes apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np

NAMES = ("circle", "square", "triangle")
TASKS = ("detect", "segment", "pose", "obb", "classify")


@dataclass(frozen=True)
class Shape:
    """One drawn shape: its class, and its outline as (n, 2) pixel coordinates."""

    label: int
    outline: np.ndarray


def _outline(label: int, centre: np.ndarray, radius: float, angle: float) -> np.ndarray:
    corners = {0: 24, 1: 4, 2: 3}[label]
    turns = angle + 2 * math.pi * np.arange(corners) / corners
    return centre + radius * np.stack([np.cos(turns), np.sin(turns)], axis=1)


def draw(size: int, rng: np.random.Generator, count: int) -> tuple[np.ndarray, list[Shape]]:
    """A (size, size, 3) uint8 picture with up to `count` shapes that do not touch each other."""
    background = rng.integers(60, 196, 3)
    image = np.clip(background + rng.normal(0, 12, (size, size, 3)), 0, 255).astype(np.uint8)
    shapes: list[Shape] = []
    taken: list[tuple[np.ndarray, float]] = []
    for _ in range(count):
        radius = rng.uniform(0.14, 0.24) * size
        centre = rng.uniform(radius + 1, size - radius - 1, 2)
        if any(np.linalg.norm(centre - other) < radius + other_radius for other, other_radius in taken):
            continue
        taken.append((centre, radius))
        label = int(rng.integers(len(NAMES)))
        # Keep the shape's colour at least 60 away from the background in every channel.
        colour = (background + rng.choice((-1, 1)) * rng.integers(60, 120, 3)) % 256
        outline = _outline(label, centre, radius, rng.uniform(0, 2 * math.pi))
        cv2.fillPoly(
            image, [np.round(outline).astype(np.int32)], [int(c) for c in colour], lineType=cv2.LINE_AA
        )
        shapes.append(Shape(label, outline))
    return image, shapes


def _row(task: str, shape: Shape, size: int) -> str:
    """One line of a label file; every coordinate is a fraction of the picture."""
    points = shape.outline / size
    low, high = points.min(0), points.max(0)
    box = [*(low + high) / 2, *(high - low)]
    if task == "segment":
        values = points.ravel().tolist()
    elif task == "obb":
        corners = cv2.boxPoints(cv2.minAreaRect(shape.outline.astype(np.float32)))
        values = (corners / size).ravel().tolist()
    elif task == "pose":  # key points: the first three points of the outline, all visible
        values = [*box, *np.concatenate([points[:3], np.full((3, 1), 2.0)], axis=1).ravel()]
    else:
        values = box
    return " ".join([str(shape.label), *(f"{v:.6f}" for v in values)])


def make(
    root: Path, task: str = "detect", *, size: int, train: int, val: int, shapes: int = 3, seed: int = 0
) -> Path:
    """Write a data set of `train` + `val` pictures below `root`.

    Returns what ``data=`` takes: the path of ``data.yaml``, or of the folder for ``task="classify"``.
    """
    rng = np.random.default_rng(seed)
    for split, pictures in (("train", train), ("val", val)):
        for index in range(pictures):
            if task == "classify":  # one shape a picture, every class in every split
                label = index % len(NAMES)
                image, drawn = draw(size, rng, 1)
                while drawn[0].label != label:
                    image, drawn = draw(size, rng, 1)
                folder = root / split / NAMES[label]
            else:
                image, drawn = draw(size, rng, shapes)
                folder = root / "images" / split
                labels = root / "labels" / split
                labels.mkdir(parents=True, exist_ok=True)
                rows = [_row(task, shape, size) for shape in drawn]
                (labels / f"{index:04d}.txt").write_text("\n".join(rows) + "\n")
            folder.mkdir(parents=True, exist_ok=True)
            if not cv2.imwrite(str(folder / f"{index:04d}.png"), image):
                raise OSError(f"cannot write a picture into {folder}")
    if task == "classify":
        return root
    lines = [f"path: {root.resolve()}", "train: images/train", "val: images/val", "names:"]
    lines += [f"  {i}: {name}" for i, name in enumerate(NAMES)]
    if task == "pose":
        lines += ["kpt_shape: [3, 3]", "flip_idx: [0, 1, 2]"]
    yaml = root / "data.yaml"
    yaml.write_text("\n".join(lines) + "\n")
    return yaml
