"""Patched against stock on a model that detects: the same boxes, one to one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from trained import MINIMUM_MAP50, SIZE, shapes_images, shapes_yaml, trained_weights
from ultralytics import YOLO
from ultralytics.models.yolo.detect import DetectionPredictor
from ultralytics.nn.autobackend import AutoBackend
from ultralytics.utils.metrics import box_iou

from yolo12_fastconv import patch_model
from yolo12_fastconv.training import count_blocks

CONFIDENCE = 0.25


class UnfusedPredictor(DetectionPredictor):
    """Predicts with the batch norms in place, on a CPU."""

    def setup_model(self, model: Any, verbose: bool = False) -> None:
        self.device = torch.device("cpu")
        self.model = AutoBackend(copy.deepcopy(model), device=self.device, fuse=False, verbose=False)
        self.model.eval()


@pytest.fixture(scope="module")
def weights() -> Path:
    return trained_weights()


def detect(yolo: YOLO, imgsz: int | list[int], **settings: Any) -> list[torch.Tensor]:
    """(n, 6) boxes of every validation picture: x1, y1, x2, y2, score, class; also some below the threshold."""
    settings = {"conf": CONFIDENCE - 0.05, "device": "cpu", "verbose": False, "rect": False, **settings}
    results = yolo.predict([str(path) for path in shapes_images()], imgsz=imgsz, **settings)
    return [result.boxes.data.float().cpu() for result in results]


def assert_same_boxes(
    ours: list[torch.Tensor], stock: list[torch.Tensor], score: float, pixels: float = 0.0
) -> int:
    """Every box with a score above the threshold on either side is one box of the other side.

    The same box: equal class, scores within `score`, and an IoU of 0.99 or more, or corners within `pixels`.
    Returns how many boxes stock has.
    """
    assert len(ours) == len(stock) == len(shapes_images())
    for a, b in zip(ours, stock, strict=True):
        for left, right in ((a, b), (b, a)):
            confident = left[left[:, 4] >= CONFIDENCE]
            delta = (confident[:, None] - right[None]).abs()
            close = (box_iou(confident[:, :4], right[:, :4]) >= 0.99) | (delta[..., :4].amax(2) <= pixels)
            match = close & (delta[..., 4] <= score) & (delta[..., 5] == 0)
            assert match.any(1).all(), f"{confident[~match.any(1)]} has no counterpart in {right}"
            nearest = {int(row.sum(1).argmin()) for row in delta}
            assert len(nearest) == len(confident), "two boxes share a counterpart"
    return sum(int((b[:, 4] >= CONFIDENCE).sum()) for b in stock)


def test_the_model_detects(weights, tmp_path):
    settings = {
        "data": str(shapes_yaml()),
        "imgsz": SIZE,
        "device": "cpu",
        "plots": False,
        "project": str(tmp_path),
    }
    stock = YOLO(weights).val(**settings)
    fast = patch_model(YOLO(weights)).val(**settings)
    assert stock.box.map50 >= MINIMUM_MAP50
    assert fast.box.map50 == pytest.approx(stock.box.map50, abs=1e-3)
    assert fast.box.map == pytest.approx(stock.box.map, abs=1e-3)


def test_checkpoint_is_small_and_stock(weights):
    assert weights.stat().st_size < 6_000_000
    assert count_blocks(YOLO(weights).model) == (0, 113)


@pytest.mark.parametrize("imgsz", [96, 128, [96, 160], [160, 64]], ids=str)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_boxes_equal_stock(weights, imgsz, fused):
    predictor = None if fused else UnfusedPredictor
    yolo = patch_model(YOLO(weights))
    ours = detect(yolo, imgsz, predictor=predictor)
    running = yolo.predictor.model.model
    assert running.is_fused() is fused
    assert count_blocks(running) == (113, 113)
    stock = detect(YOLO(weights), imgsz, predictor=predictor)
    assert assert_same_boxes(ours, stock, score=1e-4) >= len(shapes_images())


def test_a_difference_would_be_noticed(weights):
    stock = detect(YOLO(weights), SIZE)
    yolo = patch_model(YOLO(weights))
    with torch.no_grad():
        yolo.model.model[0].conv.weight *= 1.02
    with pytest.raises(AssertionError, match="has no counterpart"):
        assert_same_boxes(detect(yolo, SIZE), stock, score=1e-4)


def test_one_picture_at_a_time_gives_the_boxes_of_a_batch(weights):
    yolo = patch_model(YOLO(weights))
    assert assert_same_boxes(detect(yolo, SIZE, batch=8), detect(yolo, SIZE, batch=1), score=1e-4)


def test_tracks_equal_stock(weights):
    """Boxes and identities over a stream of pictures that move."""
    pytest.importorskip("lap")
    picture = cv2.imread(str(shapes_images()[0]))
    tracks = []
    for yolo in (patch_model(YOLO(weights)), YOLO(weights)):
        settings = dict(imgsz=SIZE, device="cpu", verbose=False, conf=CONFIDENCE, persist=True)
        stream = [np.roll(picture, 2 * step, axis=1).copy() for step in range(6)]
        tracks.append([yolo.track(frame, **settings)[0].boxes.data for frame in stream])
        patched = count_blocks(yolo.predictor.model.model)[0]
        assert patched == (113 if len(tracks) == 1 else 0)
    assert all(boxes.shape[1] == 7 for boxes in tracks[1])  # x1, y1, x2, y2, identity, score, class
    assert sum(map(len, tracks[1])) >= 6
    for ours, stock in zip(*tracks, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-2)


def test_fine_tuning_the_trained_model_keeps_it_detecting(weights, tmp_path):
    yolo = patch_model(YOLO(weights))
    losses: list[float] = []
    yolo.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
    yolo.train(
        data=str(shapes_yaml()), imgsz=SIZE, epochs=1, batch=16, nbs=16, fraction=0.3, optimizer="SGD", lr0=1e-4,
        warmup_epochs=0, mosaic=0, workers=0, device="cpu", plots=False, val=False, amp=False, project=str(tmp_path),
    )  # fmt: skip
    assert np.isfinite(losses).all()
    assert yolo.metrics.box.map50 >= MINIMUM_MAP50


@pytest.mark.gpu
@pytest.mark.parametrize("imgsz", [96, 128, [96, 160]], ids=str)
@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
def test_boxes_equal_stock_on_the_gpu(cuda, weights, imgsz, half):
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        ours = detect(patch_model(YOLO(weights)), imgsz, device="0", half=half)
        stock = detect(YOLO(weights), imgsz, device="0", half=half)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    if half:  # coordinates have 11 bits: two of their steps are allowed, whatever the size of the box
        step = 2.0 ** (np.floor(np.log2(np.max(imgsz))) - 10)
        assert assert_same_boxes(ours, stock, score=0.01, pixels=2 * step) >= len(shapes_images())
    else:
        assert assert_same_boxes(ours, stock, score=1e-4) >= len(shapes_images())


@pytest.mark.gpu
def test_map_equals_stock_on_the_gpu(cuda, weights, tmp_path):
    settings = {
        "data": str(shapes_yaml()), "imgsz": SIZE, "device": "0", "half": True, "plots": False, "workers": 0,
        "project": str(tmp_path),
    }  # fmt: skip
    stock = YOLO(weights).val(**settings)
    fast = patch_model(YOLO(weights)).val(**settings)
    assert fast.box.map50 == pytest.approx(stock.box.map50, abs=0.01)
