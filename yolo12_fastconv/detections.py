"""What two versions of one model find in the same pictures: detections after NMS, matched one to one.

Two roundings of one computation can differ in which of two near-equal boxes non-maximum suppression keeps, and in
whether a box just clears the confidence threshold. A box that one side lacks counts as a difference unless the other
side's raw predictions hold the same box with the same score, and show why it was not kept: see `_why_missing`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from ultralytics.utils.metrics import batch_probiou, box_iou
from ultralytics.utils.nms import non_max_suppression
from ultralytics.utils.ops import xywh2xyxy

from yolo12_fastconv.error_rule import Tolerances, tolerances

__all__ = ["DetectionReport", "compare_classes", "compare_detections"]


@dataclass
class DetectionReport:
    """How the results for a batch of pictures agree."""

    kind: str
    """ "boxes", "rotated boxes" or "classes"."""
    pictures: int
    stock: int = 0
    """Detections on stock's side, over all pictures."""
    ours: int = 0
    matched: int = 0
    lowest_iou: float = 1.0
    """Of all matched pairs."""
    largest_score_difference: float = 0.0
    near_ties: dict[str, int] = field(default_factory=dict)
    """Detections of one side that the other lacks for a reason that rounding explains, by reason."""
    problems: list[str] = field(default_factory=list)
    """Differences that rounding does not explain, one sentence each."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        if self.kind == "classes":
            text = f"classes: {self.matched} of {self.pictures} pictures have the same top class"
        elif not self.stock and not self.ours:
            return f"{self.kind} after NMS: none on either side ({self.pictures} pictures), so nothing to compare"
        else:
            text = f"{self.kind} after NMS: stock {self.stock}, ours {self.ours}, matched {self.matched}"
        if self.matched:
            iou = f"lowest IoU {self.lowest_iou:.4f}, " if self.kind != "classes" else ""
            text += f"; {iou}largest score difference {self.largest_score_difference:.1e}"
        text += "".join(f"; {count} {reason}" for reason, count in self.near_ties.items())
        return text + "".join(f"\n  {problem}" for problem in self.problems)


def compare_classes(ours: Tensor, stock: Tensor, precision: str) -> DetectionReport:
    """Compares the top class of each picture. `ours`, `stock`: (N, classes) probabilities; `precision` as in
    `Tolerances.floor`."""
    report = DetectionReport("classes", len(stock), len(stock), len(ours))
    limit = tolerances().detection("score", precision)
    ours, stock = ours.detach().float().cpu(), stock.detach().float().cpu()
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        if a.isnan().any() or b.isnan().any():
            if not torch.equal(a.isnan(), b.isnan()):
                report.problems.append(f"picture {i}: NaN among the probabilities of one side only")
            continue
        top, mine = int(b.argmax()), int(a.argmax())
        difference = float((a[top] - b[top]).abs())
        report.largest_score_difference = max(report.largest_score_difference, difference)
        if difference > limit:
            report.problems.append(
                f"picture {i}: class {top} has probability {b[top]:.4f}, ours {a[top]:.4f}"
            )
        elif top == mine:
            report.matched += 1
        else:  # both probabilities within the limit of each other's, so the two classes are within twice that
            report.near_ties["near-equal classes"] = report.near_ties.get("near-equal classes", 0) + 1
    return report


def compare_detections(
    ours: Tensor,
    stock: Tensor,
    *,
    nc: int,
    conf: float = 0.25,
    iou: float = 0.7,
    rotated: bool = False,
    end2end: bool = False,
    precision: str = "float32",
) -> DetectionReport:
    """Runs Ultralytics' NMS on two raw predictions and matches what it keeps.

    Args:
        ours, stock: (N, 4 + nc + extras, anchors) as a YOLO head returns in evaluation mode, or (N, detections, 6+)
            for an end-to-end head.
        nc: number of classes.
        conf, iou: thresholds of confidence and of overlap, as for ``predict``.
        rotated: boxes have an angle, the last of the extras.
        precision: as in `Tolerances.floor`.
    """
    report = DetectionReport("rotated boxes" if rotated else "boxes", len(stock))
    # A generous time limit: NMS stops at it, wherever it is, and the two sides would then differ.
    kept = [
        non_max_suppression(
            raw.detach().clone(), conf, iou, nc=nc, rotated=rotated, end2end=end2end, max_time_img=60.0
        )
        for raw in (ours, stock)
    ]
    sides = zip(kept[0], kept[1], ours, stock, strict=True)
    for picture, (our_kept, stock_kept, our_raw, stock_raw) in enumerate(sides):
        matcher = _Matcher(tolerances(), precision, stock.dtype, conf, iou, rotated)
        a, b = matcher.detections(our_kept), matcher.detections(stock_kept)
        report.ours, report.stock = report.ours + len(a), report.stock + len(b)
        pairs, a_left, b_left = matcher.match(a, b)
        report.matched += len(pairs)
        for i, j in pairs:
            overlap = float(matcher.overlap(a[i : i + 1], b[j : j + 1]))
            report.lowest_iou = min(report.lowest_iou, overlap)
            difference = float((a[i, 4] - b[j, 4]).abs())
            report.largest_score_difference = max(report.largest_score_difference, difference)
        for mine, theirs, raw, rest, name, other in (
            (b[b_left], a, our_raw, a_left, "stock's", "ours"),
            (a[a_left], b, stock_raw, b_left, "our", "stock"),
        ):
            for detection in mine:
                reason = None if end2end else matcher.why_missing(detection, theirs, rest, raw, nc)
                if reason is None:
                    box = ", ".join(f"{value:.1f}" for value in detection[:4].tolist())
                    report.problems.append(
                        f"picture {picture}: {name} class {int(detection[5])} with score {detection[4]:.4f} at "
                        f"({box}) has no counterpart in {other}"
                    )
                else:
                    report.near_ties[reason] = report.near_ties.get(reason, 0) + 1
    return report


class _Matcher:
    """Agreement of detections, as rows (box, score, class, angle): xyxy boxes, or xywh for rotated ones."""

    def __init__(
        self, rules: Tolerances, precision: str, dtype: torch.dtype, conf: float, iou: float, rotated: bool
    ) -> None:
        self.least_iou = rules.detection("iou", precision)
        self.nms_margin = float(rules.detections["nms_iou"])
        self.ulp = float(rules.detections["ulp"]) * torch.finfo(dtype).eps
        self.score = rules.detection("score", precision)
        self.conf, self.iou, self.rotated = conf, iou, rotated

    def detections(self, kept: Tensor) -> Tensor:
        """What NMS returned for one picture, as (n, 7) rows; the angle is zero for upright boxes."""
        kept = kept.float().cpu()
        angle = kept[:, -1:] if self.rotated else torch.zeros(len(kept), 1)
        return torch.cat([kept[:, :6], angle], 1)

    def overlap(self, a: Tensor, b: Tensor) -> Tensor:
        """(len(a), len(b)) intersection over union, or its probabilistic kin for rotated boxes."""
        if self.rotated:
            return batch_probiou(a[:, [0, 1, 2, 3, 6]], b[:, [0, 1, 2, 3, 6]])
        return box_iou(a[:, :4], b[:, :4])

    def _agree(self, a: Tensor, b: Tensor) -> Tensor:
        """(len(a), len(b)): overlap enough, or every coordinate within some units in the last place."""
        columns = [0, 1, 2, 3, 6] if self.rotated else [0, 1, 2, 3]
        apart = (a[:, None, columns] - b[None, :, columns]).abs().amax(2)
        step = self.ulp * torch.exp2(b[:, :4].abs().amax(1).clamp(min=1e-3).log2().floor())
        if self.rotated:  # an angle has a finer step than coordinates, and its own range
            apart = torch.maximum(
                (a[:, None, :4] - b[None, :, :4]).abs().amax(2),
                (a[:, None, 6] - b[None, :, 6]).abs() / self.ulp * step[None],
            )
        return (self.overlap(a, b) >= self.least_iou) | (apart <= step[None])

    def match(self, a: Tensor, b: Tensor) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Pairs of row numbers with the same class, box and score, best overlap first, and the rows left over."""
        pairs: list[tuple[int, int]] = []
        if len(a) and len(b):
            alike = (
                (a[:, None, 5] == b[None, :, 5])
                & self._agree(a, b)
                & ((a[:, None, 4] - b[None, :, 4]).abs() <= self.score)
            )
            overlap = self.overlap(a, b).where(alike, -1.0)
            for index in overlap.flatten().argsort(descending=True).tolist():
                i, j = divmod(index, len(b))
                if not alike[i, j]:
                    continue
                pairs.append((i, j))
                alike[i, :] = alike[:, j] = False
        return (
            pairs,
            [i for i in range(len(a)) if i not in {p[0] for p in pairs}],
            [j for j in range(len(b)) if j not in {p[1] for p in pairs}],
        )

    def why_missing(
        self, detection: Tensor, kept: Tensor, kept_unmatched: list[int], raw: Tensor, nc: int
    ) -> str | None:
        """Why the other side did not keep `detection` although it predicts the same box with the same score.

        Args:
            detection: one row of `detections`.
            kept: what the other side kept, and `kept_unmatched` which of these rows have no counterpart here.
            raw: (4 + nc + extras, anchors), the other side's predictions.

        Returns:
            The reason: the other score is not above the confidence threshold, another class is ahead by less than
            scores may differ, or a box suppressed it that is as good (or was not kept on this side, and is judged by
            itself), or overlaps it about as much as the NMS threshold. None: the box or its score is not there, or
            nothing explains its absence.
        """
        raw = raw.detach().float().cpu()
        boxes = raw[:4].T if self.rotated else xywh2xyxy(raw[:4].T)
        label = int(detection[5])
        scores = raw[4 : 4 + nc].T
        angle = raw[-1:].T if self.rotated else torch.zeros(len(boxes), 1)
        rows = torch.cat([boxes, scores[:, label : label + 1], torch.full_like(angle, label), angle], 1)
        same = self._agree(detection[None], rows)[0] & ((rows[:, 4] - detection[4]).abs() <= self.score)
        for anchor in same.nonzero().flatten().tolist():
            row = rows[anchor : anchor + 1]
            score, best = float(row[0, 4]), float(scores[anchor].max())
            if score <= self.conf:
                return "near the confidence threshold"
            if score < best <= score + 2 * self.score:
                return "near-equal classes"
            rivals = [i for i in range(len(kept)) if int(kept[i, 5]) == label and float(kept[i, 4]) >= score]
            for i in rivals:
                overlap = float(self.overlap(kept[i : i + 1], row))
                if overlap <= self.iou - self.nms_margin:
                    continue
                close = float(kept[i, 4]) <= score + 2 * self.score
                if close or i in kept_unmatched or overlap <= self.iou + self.nms_margin:
                    return "near-equal boxes in NMS"
        return None
