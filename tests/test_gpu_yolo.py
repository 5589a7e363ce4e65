"""What users call on a GPU: the detections of every task one to one with stock, tracking, and export of patched models.

pytest -m gpu tests/test_gpu_yolo.py
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import support
import torch
import trained
from ultralytics import YOLO
from ultralytics.nn.tasks import ClassificationModel, OBBModel, PoseModel, SegmentationModel

from yolo12_fastconv import graphs, patch_model
from yolo12_fastconv.detections import compare_classes, compare_detections
from yolo12_fastconv.patching import patch_modules
from yolo12_fastconv.training import count_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def detector() -> Any:
    """A detection model with trained weights, stock, on the CPU."""
    return YOLO(trained.trained_weights()).model.float().eval()


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    return [cv2.imread(str(path)) for path in trained.shapes_images()]


def batch_of(pictures: list[np.ndarray], count: int, height: int, width: int) -> torch.Tensor:
    """(count, 3, height, width) in [0, 1]: each a mosaic of pictures at the size they were trained with."""
    made = np.full((count, height, width, 3), 114, np.uint8)
    number = 0
    for canvas in made:
        for top in range(0, height - 31, 96):
            for left in range(0, width - 31, 96):
                tile = pictures[number % len(pictures)][: height - top, : width - left]
                canvas[top : top + tile.shape[0], left : left + tile.shape[1]] = tile
                number += 1
    return torch.from_numpy(made).permute(0, 3, 1, 2).float() / 255


def raw(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else raw(outputs[0])


def pair(model: Any, cuda: torch.device, dtype: torch.dtype, graph: bool = False) -> tuple[Any, Any]:
    """Stock and patched, fused, as predictors have them."""
    stock = copy.deepcopy(model)
    stock.fuse(verbose=False)
    stock = stock.to(cuda, dtype).requires_grad_(False)
    ours = copy.deepcopy(stock)
    patch_modules(ours, cuda_graph=graph)
    return ours, stock


def check(
    ours: Any, stock: Any, truth: Any, x: torch.Tensor, precision: str, **options: Any
) -> tuple[int, int]:
    """Detections of both, each compared with those of the float64 `truth` rounded to the same dtype; how many it has,
    and how many of them ours has. In bfloat16, whose coordinates have steps of 4 pixels from 512 on, stock's own boxes
    are off by more than boxes may differ, so that stock is no truth; the others are compared with stock, too."""
    with torch.inference_mode():
        mine, theirs, exact = raw(ours(x)), raw(stock(x)), raw(truth(x.double())).to(x.dtype)
    reports = [
        compare_detections(found, exact, nc=3, precision=precision, **options) for found in (mine, theirs)
    ]
    problems, missed = ([len(r.problems) for r in reports], [r.stock - r.matched for r in reports])
    message = f"{tuple(x.shape)} {precision}: ours {reports[0]}\nstock {reports[1]}"
    assert problems[0] <= 2 * problems[1], message
    assert missed[0] <= 2 * missed[1] + 1, message
    if precision != "bfloat16":
        report = compare_detections(mine, theirs, nc=3, precision=precision, **options)
        assert report.ok, f"{tuple(x.shape)} {precision}: {report}"
        assert report.matched >= 0.9 * report.stock, str(report)
    return reports[0].stock, reports[0].matched


SIZES = [  # pictures, height, width
    *((count, 96, 96) for count in (1, 2, 3, 5, 8, 16, 31, 32, 64)),
    *(
        (count, height, width)
        for count in (1, 4)
        for height, width in ((96, 192), (288, 96), (32, 640), (416, 736))
    ),
    (1, 640, 640),
    (64, 96, 160),
]


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_detections_of_any_batch_and_size(cuda, detector, pictures, precision, graph):
    ours, stock = pair(detector, cuda, DTYPES[precision], graph)
    truth = copy.deepcopy(stock).double()
    found = matched = 0
    for count, height, width in SIZES:
        x = batch_of(pictures, count, height, width).to(cuda, DTYPES[precision])
        boxes, same = check(ours, stock, truth, x, precision)
        found, matched = found + boxes, matched + same
        if graph and count in (1, 8, 64):
            with torch.inference_mode():
                for _ in range(3):
                    ours(x)
            check(ours, stock, truth, x, precision)
    assert found >= 100 and matched >= 0.95 * found
    if graph:
        assert vars(ours)["_fc_graphs"].counts["replays"] >= 10, graphs.describe(ours)


TASKS = {
    "segment": (SegmentationModel, "yolo12n-seg.yaml"),
    "pose": (PoseModel, "yolo12n-pose.yaml"),
    "obb": (OBBModel, "yolo12n-obb.yaml"),
}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("task", TASKS)
def test_detections_of_other_tasks(cuda, detector, pictures, task, precision):
    """Trained boxes and classes, with masks, key points and angles of random weights: they are compared as tensors."""
    make, cfg = TASKS[task]
    torch.manual_seed(0)
    model = support.uneven(make(cfg, nc=3, verbose=False))
    model.load_state_dict(detector.state_dict(), strict=False)
    shared = [k for k, v in detector.state_dict().items() if k in model.state_dict()]
    assert len(shared) == len(detector.state_dict())
    ours, stock = pair(model.eval(), cuda, DTYPES[precision])
    truth = copy.deepcopy(stock).double()
    found = matched = 0
    for count, height, width in ((1, 96, 96), (16, 96, 96), (3, 96, 160), (1, 288, 96)):
        x = batch_of(pictures, count, height, width).to(cuda, DTYPES[precision])
        boxes, same = check(ours, stock, truth, x, precision, rotated=task == "obb")
        found, matched = found + boxes, matched + same
        with torch.inference_mode():
            exact, mine, theirs = (
                support.tensors(net(y)) for net, y in ((truth, x.double()), (ours, x), (stock, x))
            )
        for a, b, right in zip(mine, theirs, exact, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert support.error(a, right) <= 2 * support.error(b, right) + 1e-5
    assert found >= 10 and matched >= 0.9 * found


@pytest.mark.parametrize("precision", DTYPES)
def test_classes(cuda, detector, pictures, precision):
    torch.manual_seed(0)
    model = support.uneven(ClassificationModel("yolo12n-cls.yaml", nc=3, verbose=False))
    known = model.state_dict()
    taken = {k: v for k, v in detector.state_dict().items() if k in known and v.shape == known[k].shape}
    assert len(taken) > 100
    model.load_state_dict(taken, strict=False)
    ours, stock = pair(model.eval(), cuda, DTYPES[precision])
    for count, height, width in ((1, 96, 96), (64, 96, 96), (3, 224, 224)):
        x = batch_of(pictures, count, height, width).to(cuda, DTYPES[precision])
        with torch.inference_mode():
            report = compare_classes(raw(ours(x)), raw(stock(x)), precision)
        assert report.ok and report.matched >= 0.9 * count, str(report)


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("batch", [1, 7])
def test_pictures_of_odd_sizes(cuda, pictures, half, batch):
    """`YOLO.predict` on pictures of sizes that are no multiples of 32, in rectangles. In half, what stock finds in
    float32 is the truth for both."""
    shapes = [(97, 131), (96, 96), (63, 190), (101, 77), (96, 96), (45, 45), (200, 99)]
    source = [
        cv2.copyMakeBorder(pictures[i], 0, max(h - 96, 0), 0, max(w - 96, 0), cv2.BORDER_CONSTANT)[:h, :w]
        for i, (h, w) in enumerate(shapes)
    ]
    options = dict(imgsz=192, device=0, batch=batch, verbose=False, conf=0.2, rect=True)
    truth = YOLO(trained.trained_weights()).predict(source, **options)
    assert sum(len(result.boxes) for result in truth) >= 4
    allowed = 0
    if half:
        stock = YOLO(trained.trained_weights()).predict(source, **options, half=True)
        allowed = 2 * sum(map(len, differences(stock, truth, half))) + 1
    for graph in (False, True):
        ours = patch_model(YOLO(trained.trained_weights()), cuda_graph=graph)
        lacking = differences(ours.predict(source, **options, half=half), truth, half)
        assert sum(map(len, lacking)) <= allowed, (lacking, allowed)


def differences(ours: list[Any], truth: list[Any], half: bool) -> list[list[torch.Tensor]]:
    """Of each picture, the boxes above 0.25 of one side without counterpart on the other."""
    score, pixels = (0.02, 1.0) if half else (1e-3, 0.05)
    return [
        unmatched(a.boxes.data.float(), b.boxes.data.float(), 0.25, score, pixels)
        for a, b in zip(ours, truth, strict=True)
    ]


def unmatched(
    ours: torch.Tensor, stock: torch.Tensor, conf: float, score: float, pixels: float
) -> list[torch.Tensor]:
    """Boxes above `conf` of one side that have none of the other within `score` and `pixels`."""
    lacking = []
    for left, right in ((ours, stock), (stock, ours)):
        for row in left[left[:, -2] >= conf + score]:
            near = (right[:, :4] - row[:4]).abs().amax(1) <= pixels
            near &= ((right[:, -2] - row[-2]).abs() <= score) & (right[:, -1] == row[-1])
            if not near.any():
                lacking.append(row)
    return lacking


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_tracking(cuda, pictures, graph):
    """Boxes and identities over a stream of pictures that move."""
    pytest.importorskip("lap")
    stream = [np.roll(pictures[0], 2 * step, axis=1).copy() for step in range(8)]
    options = dict(imgsz=96, device=0, verbose=False, conf=0.2, persist=True)
    tracks = []
    for yolo in (
        patch_model(YOLO(trained.trained_weights()), cuda_graph=graph),
        YOLO(trained.trained_weights()),
    ):
        tracks.append([yolo.track(picture, **options)[0].boxes.data.cpu() for picture in stream])
        if len(tracks) == 1:
            network = yolo.predictor.model.model
            assert count_blocks(network) == (113, 113)
            assert not graph or vars(network)["_fc_graphs"].counts["replays"] >= 4
    assert sum(map(len, tracks[1])) >= 4
    for ours, stock in zip(*tracks, strict=True):
        assert ours.shape == stock.shape
        if len(ours):  # x1, y1, x2, y2, identity, score, class
            torch.testing.assert_close(ours, stock, rtol=1e-3, atol=2e-2)


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize("form", ["torchscript", "onnx", "openvino"])
def test_export(cuda, form, half, pictures, tmp_path):
    """Standard operators, the numbers of the live model, which stays patched, on the GPU and with its graphs."""
    if form != "torchscript":
        onnx = pytest.importorskip("onnx")
        pytest.importorskip({"onnx": "onnxruntime", "openvino": "openvino"}[form])
    if form == "openvino" and half:
        pytest.skip("OpenVINO runs on the CPU")
    weights = tmp_path / "model.pt"
    weights.write_bytes(Path(trained.trained_weights()).read_bytes())
    yolo = patch_model(YOLO(weights), cuda_graph=True)
    yolo.model.to(cuda)
    before = copy.deepcopy(yolo.model.state_dict())
    path = yolo.export(format=form, imgsz=96, device=0, half=half, verbose=False)
    assert count_blocks(yolo.model) == (113, 113) and graphs.enabled(yolo.model)
    assert all(torch.equal(before[key], value) for key, value in yolo.model.state_dict().items())
    assert next(yolo.model.parameters()).is_cuda
    x = batch_of(pictures, 1, 96, 96).to(cuda)
    stock = YOLO(weights).model.to(cuda).eval().fuse(verbose=False)
    with torch.no_grad():
        expected = raw(stock(x))
        if form == "torchscript":
            script = torch.jit.load(path, map_location=cuda)
            assert "yolo12_fastconv::" not in str(script.inlined_graph)  # names of ops, not of classes
            found = raw(script(x.half() if half else x)).float()
            assert support.error(found, expected) <= (2e-2 if half else 1e-4)
        elif form == "onnx":
            assert {node.domain for node in onnx.load(path).graph.node} == {""}
    options = dict(imgsz=96, device=0 if form == "torchscript" else "cpu", verbose=False, conf=0.2)
    loaded = (
        YOLO(path, task="detect")
        .predict(pictures[0], **options, half=half and form == "torchscript")[0]
        .boxes.data
    )
    live = yolo.predict(pictures[0], imgsz=96, device=0, verbose=False, conf=0.2)[0].boxes.data
    assert len(live) > 0
    lacking = unmatched(loaded.cpu(), live.cpu(), 0.25, 0.02 if half else 2e-3, 1.0 if half else 0.1)
    assert not lacking, (lacking, loaded, live)
