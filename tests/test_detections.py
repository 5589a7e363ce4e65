"""Detections of two sides matched one to one: what counts as a difference, and what rounding explains."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from yolo12_fastconv.detections import compare_classes, compare_detections

NC = 3


def raw(*rows: tuple, dtype: torch.dtype = torch.float32, anchors: int = 12) -> Tensor:
    """A head's output for one picture: rows of (x, y, w, h, scores...), the remaining anchors empty."""
    prediction = torch.zeros(anchors, 4 + NC + 1)
    prediction[:, :4] = torch.tensor([8.0, 8.0, 4.0, 4.0])
    for i, row in enumerate(rows):
        prediction[i, : len(row)] = torch.tensor(row)
    return prediction.T[None].to(dtype)


def box(
    x: float = 100.0, y: float = 100.0, w: float = 80.0, h: float = 60.0, label: int = 0, score: float = 0.8
):
    scores = [0.0] * NC
    scores[label] = score
    return (x, y, w, h, *scores)


def compare(ours: Tensor, stock: Tensor, **arguments):
    return compare_detections(ours, stock, **{"nc": NC, "conf": 0.25, "iou": 0.7, **arguments})


def test_equal_predictions_match():
    stock = raw(box(), box(x=300, label=1), box(y=300, label=2, score=0.3))
    report = compare(stock.clone(), stock)
    assert report.ok and (report.stock, report.ours, report.matched) == (3, 3, 3)
    assert report.lowest_iou == 1 and report.largest_score_difference == 0 and not report.near_ties
    assert "stock 3, ours 3, matched 3" in str(report)
    assert report.to_dict()["ok"] is True


def test_no_detections_are_said_to_be_none():
    report = compare(raw(), raw())
    assert report.ok and "none on either side" in str(report)


def test_predictions_are_not_changed():
    stock = raw(box(), box(x=300))
    given = stock.clone()
    compare(stock, stock)
    assert torch.equal(stock, given)


@pytest.mark.parametrize(
    ("changed", "ok"),
    [
        (box(x=100.3), True),
        (box(x=102), False),
        (box(w=80.5), True),
        (box(w=85), False),
        (box(score=0.80005), True),
        (box(score=0.802), False),
        (box(label=1), False),
    ],
)
def test_boxes_scores_and_classes_have_to_agree(changed, ok):
    report = compare(raw(changed), raw(box()))
    assert report.ok is ok
    if not ok:
        assert len(report.problems) == 2, "each side lacks the other's"
        assert "stock's class 0 with score 0.8000 at (60.0, 70.0, 140.0, 130.0)" in report.problems[0]
        assert "has no counterpart" in str(report)


def test_score_limit_is_that_of_the_precision():
    for precision, difference, ok in (
        ("float32", 5e-5, True), ("float32", 1e-3, False), ("tf32", 5e-3, True), ("float16", 5e-3, True),
        ("float16", 0.02, False), ("bfloat16", 0.02, True), ("bfloat16", 0.1, False),
    ):  # fmt: skip
        report = compare(raw(box(score=0.6 + difference)), raw(box(score=0.6)), precision=precision)
        assert report.ok is ok, (precision, difference)


def test_missing_and_additional_boxes_are_problems():
    assert len(compare(raw(), raw(box())).problems) == 1
    report = compare(raw(box(), box(x=300)), raw(box()))
    assert len(report.problems) == 1 and report.problems[0].startswith("picture 0: our class 0")


def test_box_near_the_confidence_threshold():
    report = compare(raw(box(score=0.24996)), raw(box(score=0.25002)))
    assert report.ok and report.near_ties == {"near the confidence threshold": 1}
    assert (report.stock, report.ours, report.matched) == (1, 0, 0)
    assert not compare(raw(box(score=0.2)), raw(box(score=0.25002))).ok


def test_classes_that_change_places():
    a, b = (100.0, 100.0, 80.0, 60.0, 0.60003, 0.6, 0.0), (100.0, 100.0, 80.0, 60.0, 0.6, 0.60003, 0.0)
    report = compare(raw(a), raw(b))
    assert report.ok and report.near_ties == {"near-equal classes": 2}
    c = (100.0, 100.0, 80.0, 60.0, 0.65, 0.6, 0.0)
    assert not compare(raw(c), raw(b)).ok


def test_boxes_that_change_places_in_nms():
    """Two anchors see one object with nearly one score: each side keeps another."""
    first, second = box(score=0.80003), box(x=105, score=0.8)
    report = compare(raw(box(score=0.79998), second), raw(first, second))
    assert report.ok and report.near_ties == {"near-equal boxes in NMS": 2}, str(report)


def test_box_that_a_clearly_better_one_suppresses_is_a_problem():
    """NMS on our side keeps a box that isn't there on stock's."""
    report = compare(raw(box(score=0.9, x=106), box()), raw(box()))
    assert not report.ok


def test_overlap_near_the_nms_threshold():
    """IoU 0.7 plus or minus a little: merged on one side, two boxes on the other."""
    wide = 100.0

    def pair(shift: float) -> Tensor:
        return raw(box(w=wide, score=0.9), box(x=100 + shift, w=wide, score=0.6))

    # Two equal boxes shifted by s of width w overlap by (w - s) / (w + s): 0.7 at 17.65 of 100.
    report = compare(pair(17.6), pair(17.7))
    assert (report.ours, report.stock) == (1, 2)
    assert report.ok and report.near_ties == {"near-equal boxes in NMS": 1}, str(report)
    assert not compare(pair(10), pair(17.7)).ok


def test_coordinates_within_the_last_places_of_half():
    """At 600 pixels half has steps of 0.5: a small box that moves by one step has not moved."""
    stock, ours = box(x=600.0, y=600.0, w=20.0, h=20.0), box(x=600.5, y=600.0, w=20.0, h=20.0)
    half = {"dtype": torch.float16}
    report = compare(raw(ours, **half), raw(stock, **half), precision="float16")
    assert report.ok and report.lowest_iou < 0.96
    assert not compare(raw(ours), raw(stock)).ok
    moved = box(x=603.0, y=600.0, w=20.0, h=20.0)
    assert not compare(raw(moved, **half), raw(stock, **half), precision="float16").ok


def test_equal_boxes_are_matched_once():
    """Two identical detections of two classes each find their own partner."""
    stock = raw(box(label=0), box(label=1), box(label=0, x=103, score=0.7))
    report = compare(stock.clone(), stock)
    assert report.matched == report.stock == 2
    doubled = torch.cat([stock, stock])
    assert compare(doubled.clone(), doubled).matched == 4


def test_rotated_boxes():
    def turned(angle: float, score: float = 0.8) -> tuple:
        return (*box(w=90, h=30, score=score), angle)

    report = compare(raw(turned(0.5)), raw(turned(0.5)), rotated=True)
    assert report.ok and report.kind == "rotated boxes" and report.matched == 1
    assert compare(raw(turned(0.501)), raw(turned(0.5)), rotated=True).ok
    assert not compare(raw(turned(0.8)), raw(turned(0.5)), rotated=True).ok


def test_end_to_end_heads():
    kept = torch.tensor([[[10.0, 10.0, 50.0, 60.0, 0.9, 1.0], [20.0, 80.0, 50.0, 120.0, 0.5, 0.0]]])
    assert compare(kept.clone(), kept, end2end=True).matched == 2
    shifted = kept.clone()
    shifted[0, 1, 0] += 3
    assert not compare(shifted, kept, end2end=True).ok


def test_top_classes():
    stock = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.39999, 0.2]])
    report = compare_classes(stock.clone(), stock, "float32")
    assert report.ok and report.matched == 2 and "2 of 2" in str(report)
    tied = stock.clone()
    tied[1, :2] = torch.tensor([0.39998, 0.40001])
    report = compare_classes(tied, stock, "float32")
    assert report.ok and report.matched == 1 and report.near_ties == {"near-equal classes": 1}
    wrong = torch.tensor([[0.2, 0.7, 0.1], [0.4, 0.39999, 0.2]])
    report = compare_classes(wrong, stock, "float16")
    assert not report.ok and "picture 0: class 0 has probability 0.7000, ours 0.2000" in str(report)
    nan = stock.clone()
    nan[0, 1] = math.nan
    assert not compare_classes(nan, stock, "float32").ok
    assert compare_classes(nan, nan.clone(), "float32").ok
