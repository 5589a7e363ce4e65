"""Reading, merging and writing the records that consist of sets: docs/benchmarks/<gpu>-<kind>.json of benchmark.py.

A record is {"kind", "gpu", "complete", "sets"}; a set is what was measured under the same conditions in one run: its
identity, the facts of that run (`records.facts`), "complete", and "rows".
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import records
from bench_options import DTYPES, MODELS, UsageError

Record = dict[str, Any]

IDENTITY = {
    "layers": ("model", "batch", "imgsz", "dtype", "tf32", "target"),
    "model": ("model", "batch", "imgsz", "dtype", "tf32"),
    "predict": ("model", "batch", "imgsz", "dtype", "sizes"),
    "train": ("scope", "model", "batch", "imgsz", "dtype", "mode"),
    "ddp": ("model", "batch", "imgsz", "dtype"),
    "convergence": ("model", "batch", "imgsz", "dtype", "steps", "seed"),
    "soak": ("model", "batch", "imgsz", "dtype"),
}
"""What a set is known by, for each kind of record."""
_ORDER = ("scope", "target", "mode", "sizes", "dtype", "tf32", "imgsz", "batch", "model")
"""Sets are sorted by these, as far as their kind has them."""


def read(path: Path, kind: str | None = None) -> Record | None:
    """The record in `path`, or None if there is no such file.

    Raises:
        UsageError: the file holds something else, or a record of another kind than `kind`.
    """
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from None
    found = record.get("kind") if isinstance(record, dict) else None
    if found not in IDENTITY or kind not in (None, found):
        raise UsageError(f"{path}: not a record of scripts/benchmark.py {kind or ''}".rstrip())
    return record


def to_draw(path: Path, kind: str) -> tuple[Record, Any] | None:
    """The record in `path`, and matplotlib's class of figures.

    None, after saying why, if it has no sets or there is no matplotlib, which a machine with a GPU need not have.

    Raises:
        UsageError: there is no record of that kind in `path`.
    """
    record = read(path, kind)
    if record is None:
        raise UsageError(f"{path}: no such file")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"benchmark: no plot: {error}; pip install '.[bench]', then scripts/benchmark.py plot {path}")
        return None
    if not record["sets"]:
        print(f"benchmark: no plot: {records.shown(path)} has no {kind}")
        return None
    return record, Figure


def merge(old: Record | None, new: Record) -> Record:
    """`old` with the sets of `new` in place of those of the same model, batch, and so on.

    A set that the time ran out for replaces no complete one. The whole is complete if `new` is, and every set.

    Raises:
        UsageError: the records are of two GPUs or two kinds.
    """
    if old and old["gpu"] != new["gpu"]:
        raise UsageError(f"a record of {new['gpu']} cannot be added to one of {old['gpu']}")
    if old and old["kind"] != new["kind"]:
        raise UsageError(f"a record of kind {new['kind']} cannot be added to one of kind {old['kind']}")
    identity = IDENTITY[new["kind"]]
    sets = {tuple(one[key] for key in identity): one for one in (old["sets"] if old else [])}
    for one in new["sets"]:
        key = tuple(one[key] for key in identity)
        if one["complete"] or key not in sets or not sets[key]["complete"]:
            sets[key] = one
    ordered = sorted(sets.values(), key=lambda one: [_rank(key, one[key]) for key in _ORDER if key in one])
    return {
        "kind": new["kind"],
        "gpu": new["gpu"],
        "complete": new["complete"] and all(one["complete"] for one in ordered),
        "sets": ordered,
    }


def _rank(key: str, value: Any) -> Any:
    if key == "model":
        return MODELS.index(value)
    if key == "dtype":
        return list(DTYPES).index(value)
    return (value != "default", value) if key == "target" else value


def write(path: Path, record: Record) -> None:
    """One row a line: a hundredth of the lines of indented JSON, and a difference still names the row."""

    def opened(fields: Record, last: str, items: list[str], indent: str) -> str:
        separator = ",\n" + indent
        return f'{json.dumps(fields)[:-1]}, "{last}": [\n{indent}{separator.join(items)}\n{indent[1:]}]}}'

    sets = []
    for one in record["sets"]:
        facts = {key: value for key, value in one.items() if key != "rows"}
        sets.append(opened(facts, "rows", [json.dumps(row) for row in one["rows"]], "  "))
    head = {key: value for key, value in record.items() if key != "sets"}
    text = opened(head, "sets", sets, " ") + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when whole: a run may be ended while it writes.
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def add(path: Path, kind: str, gpu: str, measured: Record) -> None:
    """Add one set to the record in `path`, which is made if it is not there."""
    new = {"kind": kind, "gpu": gpu, "complete": measured["complete"], "sets": [measured]}
    write(path, merge(read(path, kind), new))
