"""The result of `check_parity`: rows, verdict, and its forms as text, JSON and Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from yolo12_fastconv.detections import DetectionReport
from yolo12_fastconv.error_rule import Comparison, finite

__all__ = ["ParityReport", "ParityRow"]


@dataclass(frozen=True)
class ParityRow:
    """One tensor of one layer, or one output of the whole model, compared."""

    layer: str
    """Name in `named_modules()`; "model" for outputs of the whole model."""
    quantity: str
    """"y", "grad_x", "grad_weight", "running_var", ..., or the place of an output: "output[0]"."""
    shape: tuple[int, ...]
    """Of the compared tensor."""
    geometry: str
    """Of the convolution and its input; empty for the model's outputs."""
    kernel: str
    """What served our side."""
    comparison: Comparison

    @property
    def ok(self) -> bool:
        return self.comparison.ok

    def to_dict(self) -> dict[str, Any]:
        c = self.comparison
        return {
            "layer": self.layer,
            "quantity": self.quantity,
            "shape": list(self.shape),
            "geometry": self.geometry,
            "kernel": self.kernel,
            "ours": _pair(c.ours),
            "stock": _pair(c.stock),
            "limit": _pair(c.limit),
            "ratio": finite(c.ratio),
            "ok": c.ok,
            "problem": c.problem,
        }


@dataclass
class ParityReport:
    """Errors of a patched model beside the stock model's. Printable; `ok` is the verdict."""

    mode: str
    environment: dict[str, Any]
    """Versions, device, precision, input, and what else the numbers depend on."""
    rows: list[ParityRow] = field(default_factory=list)
    """Layers in the order in which the model runs them."""
    blocks: list[ParityRow] = field(default_factory=list)
    """Larger blocks, made of layers and of each other, in the same order."""
    outputs: list[ParityRow] = field(default_factory=list)
    """Outputs of the whole model."""
    detections: DetectionReport | None = None
    """None in training mode, and for models that detect nothing."""
    unreached: list[str] = field(default_factory=list)
    """Patched blocks that the model did not run on this batch, and that are therefore not compared."""
    kept: dict[str, str] = field(default_factory=dict)
    """`Conv` blocks that are not patched, with the reason: they are stock on both sides."""

    @property
    def ok(self) -> bool:
        """Whether something was compared, and everything that was is within the rule."""
        detections_ok = self.detections is None or self.detections.ok
        return (
            bool(self.rows)
            and detections_ok
            and all(row.ok for row in (*self.rows, *self.blocks, *self.outputs))
        )

    @property
    def first_bad(self) -> ParityRow | None:
        """The first row outside the rule, layers first, then larger blocks; None if there is none."""
        return next((row for row in (*self.rows, *self.blocks, *self.outputs) if not row.ok), None)

    @property
    def worst(self) -> ParityRow | None:
        """The layer row that takes most of what it may."""
        return max(self.rows, key=lambda row: row.comparison.used, default=None)

    def layers(self) -> Iterator[tuple[str, list[ParityRow]]]:
        """Each layer's name with its rows."""
        yield from _by_name(self.rows)

    def larger_blocks(self) -> Iterator[tuple[str, list[ParityRow]]]:
        """Each larger block's name with its rows."""
        yield from _by_name(self.blocks)

    def summary(self) -> str:
        """The verdict in one line."""
        layers = len(list(self.layers()))
        larger = len(list(self.larger_blocks()))
        tensors = len(self.rows) + len(self.blocks) + len(self.outputs)
        counts = f"{layers} layers, {larger} larger blocks, {tensors} tensors compared"
        if self.ok and self.worst is not None:
            worst = self.worst
            return (
                f"parity: {counts}, all within the rule; closest to its limit: {worst.layer} {worst.quantity} "
                f"({100 * worst.comparison.used:.0f} % of it, {_ratio(worst.comparison.ratio)} × stock's error)"
            )
        bad = self.first_bad
        if bad is not None:
            failed = sum(not row.ok for row in (*self.rows, *self.blocks, *self.outputs))
            what = bad.comparison.problem or (
                f"error {_errors(bad.comparison.ours)}, stock {_errors(bad.comparison.stock)}, "
                f"limit {_errors(bad.comparison.limit)}"
            )
            return f"BROKEN: {failed} of {counts}; first: {bad.layer} {bad.quantity}: {what}"
        if not self.rows:
            return "BROKEN: no patched block took part, so nothing was compared"
        return f"BROKEN: {counts}, all within the rule, but the detections differ"

    def to_dict(self) -> dict[str, Any]:
        bad = self.first_bad
        return {
            "ok": self.ok,
            "summary": self.summary(),
            "first_bad": None if bad is None else {"layer": bad.layer, "quantity": bad.quantity},
            "mode": self.mode,
            "environment": self.environment,
            "layers": [row.to_dict() for row in self.rows],
            "blocks": [row.to_dict() for row in self.blocks],
            "outputs": [row.to_dict() for row in self.outputs],
            "detections": None if self.detections is None else self.detections.to_dict(),
            "unreached": self.unreached,
            "kept": self.kept,
        }

    def to_json(self) -> str:
        """Every row, as a JSON object. Numbers that JSON has no word for (NaN, infinity) are null."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def to_markdown(self) -> str:
        """Environment, verdict and the table of layers."""
        title = "parity" if self.ok else "BROKEN"
        lines = [f"# Layer-by-layer check: {title}", "", self.summary(), ""]
        lines += [f"- {key}: {value}" for key, value in self.environment.items()]
        table = self._table()
        lines += ["", *("| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in table[:1])]
        lines += ["|" + "---|" * len(table[0])]
        lines += ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in table[1:]]
        notes = self._notes()
        return "\n".join([*lines, *([""] if notes else []), *(f"- {note}" for note in notes)]) + "\n"

    def __str__(self) -> str:
        table = self._table()
        widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
        lines += ["", *(f"{key}: {value}" for key, value in self.environment.items())]
        return "\n".join([*lines, *self._notes(), self.summary()])

    def _table(self) -> list[tuple[str, ...]]:
        """One line per layer, then one per larger block: its first broken quantity, or the one closest to its limit."""
        header = ("layer", "convolution", "quantity", "stock max", "ours max", "limit", "stock l2", "ours l2")
        table: list[tuple[str, ...]] = [(*header, "limit", "ratio", "verdict", "served by")]
        outputs = ((row.layer, [row]) for row in self.outputs)
        groups = [*self.layers(), *self.larger_blocks(), *outputs]
        for layer, rows in groups:
            row = next((row for row in rows if not row.ok), None) or max(
                rows, key=lambda r: r.comparison.used
            )
            c = row.comparison
            numbers = (c.stock[0], c.ours[0], c.limit[0], c.stock[1], c.ours[1], c.limit[1])
            verdict = "ok" if row.ok else f"BROKEN {c.problem}".rstrip()
            cells = (*(f"{value:.1e}" for value in numbers), _ratio(c.ratio), verdict, row.kernel)
            table.append((layer or "(model)", row.geometry, row.quantity, *cells))
        return table

    def _notes(self) -> list[str]:
        notes = []
        if self.detections is not None:
            notes.append(str(self.detections))
        if self.unreached:
            notes.append(f"not run on this batch, not compared: {', '.join(self.unreached)}")
        notes += [f"not patched: {name}: {reason}" for name, reason in self.kept.items()]
        return notes


def _by_name(rows: list[ParityRow]) -> Iterator[tuple[str, list[ParityRow]]]:
    groups: dict[str, list[ParityRow]] = {}
    for row in rows:
        groups.setdefault(row.layer, []).append(row)
    yield from groups.items()


def _pair(values: tuple[float, float]) -> dict[str, float | None]:
    return {"max": finite(values[0]), "l2": finite(values[1])}


def _errors(values: tuple[float, float]) -> str:
    return f"{values[0]:.1e} max {values[1]:.1e} l2"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "-"
