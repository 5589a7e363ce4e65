#!/usr/bin/env python3
"""The record of what was run on a GPU: docs/benchmarks/<gpu>.json, and the README's tables of all records.

    scripts/gpu_record.py run FOLDER [--only tests|parity] [--models n,m,x,n-seg] [--workers N] [--budget SECONDS]
                                                           raw results into FOLDER; needs a GPU
    scripts/gpu_record.py collect FOLDER                   raw results into docs/benchmarks/<gpu>.json
    scripts/gpu_record.py readme [--check]                 write the tables into README.md, or compare
    scripts/gpu_record.py stale                            say which records are older than the sources

A sanitizer.json of scripts/sanitize.py in FOLDER, of the same csrc/, is collected too. So is a rerun.xml, which pytest
has written of tests that were run once more on later sources: what it says of a test stands, and the record says of how
many.

`run` exits with 1 if a test failed or a layer is out of parity. It may run on another machine than `collect`. Parity
of each model is a process of its own and writes after every one of its runs, so that a run that is ended, or a model
that crashes, leaves what was measured; models may be run one after the other into the same FOLDER. The budget is that
of a model's parity. Results of other
sources that lie there are removed first. `stale` exits with 0 in any case, since a record can only be renewed where
there is a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from records import RECORDS, ROOT, facts, readme, slug, stale, why_not

SCALES = "nsmlx"
MODELS = "n,s,m,l,x,n-seg,n-pose,n-obb,n-cls"


def run(folder: Path, only: str | None, models: str, workers: int, budget: float = float("inf")) -> int:
    problem = why_not()
    if problem:
        print(f"gpu_record: {problem}", file=sys.stderr)
        return 2
    _prepare(folder, facts())
    ok = True
    if only != "parity":
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "--tb=short",
            f"--junitxml={folder / 'junit.xml'}",
        ]
        if workers > 1:  # pytest-xdist
            command += ["-n", str(workers), "--dist", "load"]
        environment = {**os.environ, "YOLO12_FASTCONV_RESULTS": str(folder), "YOLO_AUTOINSTALL": "false"}
        ok &= subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0
    if only != "tests":
        for model in models.split(","):
            ok &= _parity(folder, model, budget)
    return 0 if ok else 1


def _prepare(folder: Path, now: dict[str, Any]) -> None:
    """Make the folder, with facts.json; what lies there of other sources or another GPU goes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "facts.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if any(before.get(key) != now[key] for key in ("gpu", "sources")):
        for pattern in ("matrix*.json", "junit.xml", "gpu-ops-accuracy*.json"):
            for path in folder.glob(pattern):
                path.unlink()
    file.write_text(json.dumps(now), encoding="utf-8")


def _parity(folder: Path, model: str, budget: float) -> bool:
    """Parity of one model into matrix-<model>.json; whether it held."""
    script = str(ROOT / "scripts" / "parity_check.py")
    file = folder / f"matrix-{model}.json"
    file.unlink(missing_ok=True)  # of a run before: if this one crashes, it must not stand in
    command = [sys.executable, script, "--matrix", model, "--json", str(file), "--budget", str(budget)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def _matrix(folder: Path) -> dict[str, Any] | None:
    """The runs of all models, by task and scale; None if there is none."""
    parts = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("matrix*.json")]
    if not parts:
        return None
    rows = [row for part in parts for row in part["rows"]]
    return {
        "ok": all(part["ok"] for part in parts),
        "complete": all(part.get("complete", True) for part in parts),
        "rows": sorted(rows, key=lambda row: _place(row["model"])),
    }


def _place(model: str) -> tuple[str, int]:
    """Of a name such as yolo12n-seg in the table: detection first, then the other tasks, each from n to x."""
    scale, _, task = model.removeprefix("yolo12").partition("-")
    return task, SCALES.index(scale)


def collect(folder: Path) -> int:
    matrix = _matrix(folder)
    measured = matrix is not None or (folder / "junit.xml").is_file()
    if not measured or not (folder / "facts.json").is_file():
        lacking = "facts.json" if measured else "junit.xml and matrix-<model>.json"
        print(f"gpu_record: {folder} lacks {lacking}: run scripts/gpu_record.py run", file=sys.stderr)
        return 2
    record = json.loads((folder / "facts.json").read_text())
    record["tests"] = _tests(folder)
    record["parity"] = matrix or {"ok": None, "complete": False, "rows": []}
    for row in record["parity"]["rows"]:
        row.pop("environment", None)
    record["sanitizer"] = _sanitizer(folder, record)
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / f"{slug(record['gpu'])}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"gpu_record: wrote {path.relative_to(ROOT)}")
    return 0


def _sanitizer(folder: Path, record: dict[str, Any]) -> dict[str, Any] | None:
    """Verdicts of scripts/sanitize.py on all cases and these kernels, or None."""
    file = folder / "sanitizer.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    if found is None or found["only"] or not found.get("whole") or found["gpu"] != record["gpu"]:
        return None
    if found["sources"]["csrc"] != record["sources"]["csrc"]:
        return None
    return {key: found[key] for key in ("date", "all_kernels", "tools")}


def _tests(folder: Path) -> dict[str, Any]:
    """Counts out of pytest's XML, and the accuracy of the ops by kernel family and quantity.

    Without the XML, which pytest writes at its end, the suite was not completed: that is what the record then says.
    """
    again = _outcomes(folder / "rerun.xml") if (folder / "rerun.xml").is_file() else {}
    ops = (
        None if again else _accuracy(folder)
    )  # accuracies are not written by test, so none could be replaced
    if not (folder / "junit.xml").is_file():
        return {"complete": False, "ops": ops}
    outcomes = _outcomes(folder / "junit.xml")
    replaced = [name for name in again if name in outcomes]
    outcomes |= again
    totals: dict[str, Any] = {
        kind: list(outcomes.values()).count(kind) for kind in ("passed", "failed", "skipped")
    }
    suites = ET.parse(folder / "junit.xml").getroot().iter("testsuite")
    totals["seconds"] = round(sum(float(suite.get("time", 0)) for suite in suites), 1)
    files: dict[str, int] = {}
    for name in outcomes:
        files[name.partition("::")[0]] = files.get(name.partition("::")[0], 0) + 1
    failures = [name for name, outcome in outcomes.items() if outcome == "failed"]
    return {
        "complete": True,
        **totals,
        "rerun": len(replaced),
        "files": files,
        "failures": failures,
        "ops": ops,
    }


def _outcomes(path: Path) -> dict[str, str]:
    """Of a pytest XML: file::test, and passed, failed or skipped."""
    outcomes = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        bad = case.find("failure") is not None or case.find("error") is not None
        name = f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"
        outcomes[name] = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
    return outcomes


def _accuracy(folder: Path) -> dict[str, Any] | None:
    """What tests/test_gpu_ops.py measured, in one or several processes; of rows of the same kind the worst."""
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("gpu-ops-accuracy*.json"))]
    if not parts:
        return None
    kinds = ("family", "kernel", "op", "precision", "quantity")
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in (row for part in parts for row in part["rows"]):
        key = tuple(row[kind] for kind in kinds)
        known = rows.setdefault(key, row)
        if known is row:
            continue
        # `used` is null where the error is not finite, which is the worst.
        worst = max(known, row, key=lambda r: float("inf") if r["used"] is None else r["used"])
        counts = {name: known[name] + row[name] for name in ("comparisons", "failed")}
        rows[key] = {**worst, **counts}
    return {
        "environment": parts[0]["environment"],
        "comparisons": sum(part["comparisons"] for part in parts),
        "failed": sum(part["failed"] for part in parts),
        "failures": [text for part in parts for text in part["failures"]][:200],
        "rows": [rows[key] for key in sorted(rows)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("folder", type=Path)
    run_parser.add_argument("--only", choices=["tests", "parity"])
    run_parser.add_argument("--models", default=MODELS)
    run_parser.add_argument("--budget", type=float, default=float("inf"), help="seconds of a model's parity")
    run_parser.add_argument(
        "--workers", type=int, default=1, help="processes of the suite, with pytest-xdist"
    )
    commands.add_parser("collect").add_argument("folder", type=Path)
    commands.add_parser("readme").add_argument("--check", action="store_true")
    commands.add_parser("stale")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.folder, arguments.only, arguments.models, arguments.workers, arguments.budget)
    if arguments.command == "collect":
        return collect(arguments.folder)
    return readme(arguments.check) if arguments.command == "readme" else stale()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
