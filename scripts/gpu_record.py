#!/usr/bin/env python3
"""The record of what was run on a GPU: docs/benchmarks/<gpu>.json, and the README's table from it.

    scripts/gpu_record.py run FOLDER [--only tests|parity] [--scales n,m,l,x] [--workers N]
                                                           raw results into FOLDER; needs a GPU
    scripts/gpu_record.py collect FOLDER                   raw results into docs/benchmarks/<gpu>.json
    scripts/gpu_record.py readme [--check]                 write the table into README.md, or compare
    scripts/gpu_record.py stale                            say which records are older than the sources

`run` exits with 1 if a test failed or a layer is out of parity. It may run on another machine than `collect`. `stale`
exits with 0 in any case, since a record can only be renewed where there is a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- gpu record: written by scripts/gpu_record.py readme -->", "<!-- end of gpu record -->"


def package_hash() -> str:
    """Hash of the Python sources of the package, 16 hexadecimal digits."""
    listing = hashlib.sha256()
    for path in sorted((ROOT / "yolo12_fastconv").glob("*.py")):
        listing.update(path.name.encode() + b"\0" + path.read_bytes())
    return listing.hexdigest()[:16]


def source_hashes() -> dict[str, str]:
    from yolo12_fastconv import _library

    return {"csrc": _library.source_hash(ROOT / "csrc"), "package": package_hash()}


def run(folder: Path, only: str | None, scales: str, workers: int) -> int:
    import torch

    from yolo12_fastconv import info, ops

    if not torch.cuda.is_available():
        print("gpu_record: no CUDA GPU here", file=sys.stderr)
        return 2
    if not ops.LIBRARY.loaded:
        print(f"gpu_record: the library is not loaded: {ops.LIBRARY.reason}", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "sources": source_hashes(),
        "library": {"source_hash": ops.LIBRARY.source_hash, "arch_list": list(ops.LIBRARY.arch_list)},
        "environment": _public(info.collect()),
    }
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
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
        script = str(ROOT / "scripts" / "parity_check.py")
        command = [sys.executable, script, "--matrix", scales, "--json", str(folder / "matrix.json")]
        ok &= subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    return 0 if ok else 1


def collect(folder: Path) -> int:
    missing = [name for name in ("facts.json", "matrix.json") if not (folder / name).is_file()]
    if missing:
        print(
            f"gpu_record: {folder} lacks {', '.join(missing)}: run scripts/gpu_record.py run", file=sys.stderr
        )
        return 2
    record = json.loads((folder / "facts.json").read_text())
    record["tests"] = _tests(folder)
    record["parity"] = json.loads((folder / "matrix.json").read_text())
    for row in record["parity"]["rows"]:
        row.pop("environment", None)
    RECORDS.mkdir(parents=True, exist_ok=True)
    path = RECORDS / (re.sub(r"[^a-z0-9]+", "-", record["gpu"].lower()).strip("-") + ".json")
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"gpu_record: wrote {path.relative_to(ROOT)}")
    return 0


def _public(facts: dict[str, Any]) -> dict[str, Any]:
    """Versions and GPUs out of `info.collect()`, without paths of the machine."""
    return {
        "versions": {
            "yolo12_fastconv": facts["yolo12_fastconv"]["version"],
            "python": facts["python"]["version"],
            "torch": facts["torch"]["version"],
            "cuda": facts["torch"]["cuda"],
            "cudnn": facts["torch"]["cudnn"],
            "ultralytics": facts["ultralytics"]["version"],
            "driver": facts["driver"],
        },
        "gpus": [{key: gpu[key] for key in ("name", "capability")} for gpu in facts["gpus"]],
    }


def _tests(folder: Path) -> dict[str, Any]:
    """Counts out of pytest's XML, and the accuracy of the ops by kernel family and quantity.

    Without the XML, which pytest writes at its end, the suite was not completed: that is what the record then says.
    """
    ops = _accuracy(folder)
    if not (folder / "junit.xml").is_file():
        return {"complete": False, "ops": ops}
    totals = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0}
    files: dict[str, int] = {}
    failures = []
    for suite in ET.parse(folder / "junit.xml").getroot().iter("testsuite"):
        totals["seconds"] += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            bad = case.find("failure") is not None or case.find("error") is not None
            kind = "failed" if bad else "skipped" if case.find("skipped") is not None else "passed"
            totals[kind] += 1
            name = case.get("classname", "").rsplit(".", 1)[-1]
            files[name] = files.get(name, 0) + 1
            if bad:
                failures.append(f"{name}::{case.get('name')}")
    totals["seconds"] = round(totals["seconds"], 1)
    return {"complete": True, **totals, "files": files, "failures": failures, "ops": ops}


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


def records() -> list[tuple[Path, dict[str, Any]]]:
    return [(path, json.loads(path.read_text())) for path in sorted(RECORDS.glob("*.json"))]


def table() -> str:
    """The README's table of all records."""
    lines = []
    for path, record in records():
        versions = record["environment"]["versions"]
        tests = record["tests"]
        suite = "the GPU tests were not run to their end"
        if tests["complete"]:
            suite = f"{tests['passed']} GPU tests passed, {tests['failed']} failed"
        if tests["ops"]:
            compared, beyond = tests["ops"]["comparisons"], tests["ops"]["failed"]
            suite += f"; of {compared} outputs and gradients of single ops, {beyond} were beyond the limit"
        lines += [
            f"On one {record['gpu']} ({record['date']}, torch {versions['torch']}, Ultralytics "
            f"{versions['ultralytics']}): {suite}.",
            "",
            "Parity with stock: every block on the same input, against a float64 truth (random weights; the limit is "
            "twice stock's own error plus rounding, `configs/tolerances.yaml`):",
            "",
            "| model | precision | mode | blocks | closest to its limit | verdict |",
            "|---|---|---|---|---|---|",
        ]
        for row in record["parity"]["rows"]:
            used = "-" if row["used"] is None else f"{100 * row['used']:.0f} %"
            verdict = "parity" if row["ok"] else "**broken**"
            cells = (row["model"], row["precision"], row["mode"], row["layers"], used, verdict)
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        sources = record["sources"]
        lines += [
            "",
            f"Full record: [{path.relative_to(ROOT)}]({path.relative_to(ROOT).as_posix()}), of csrc/ "
            f"`{sources['csrc']}` and package `{sources['package']}`; `scripts/gpu_record.py stale` says whether they "
            "have changed since.",
        ]
    return "\n".join(lines) if lines else "No GPU record yet."


def readme(check: bool) -> int:
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        print(f"gpu_record: README.md lacks the lines {BEGIN!r} and {END!r}", file=sys.stderr)
        return 1
    head, rest = text.split(BEGIN, 1)
    new = head + BEGIN + "\n" + table() + "\n" + END + rest.split(END, 1)[1]
    if check:
        if new != text:
            print(
                "README.md does not show docs/benchmarks: run scripts/gpu_record.py readme", file=sys.stderr
            )
        return int(new != text)
    path.write_text(new, encoding="utf-8")
    return 0


def stale() -> int:
    now = source_hashes()
    for path, record in records():
        changed = [name for name, value in now.items() if record["sources"].get(name) != value]
        state = f"stale: {' and '.join(changed)} changed since {record['date']}" if changed else "current"
        print(f"{path.relative_to(ROOT)}: {state}")
    if not records():
        print("docs/benchmarks: no record")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("folder", type=Path)
    run_parser.add_argument("--only", choices=["tests", "parity"])
    run_parser.add_argument("--scales", default="n,m,l,x")
    run_parser.add_argument(
        "--workers", type=int, default=1, help="processes of the suite, with pytest-xdist"
    )
    commands.add_parser("collect").add_argument("folder", type=Path)
    commands.add_parser("readme").add_argument("--check", action="store_true")
    commands.add_parser("stale")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments.folder, arguments.only, arguments.scales, arguments.workers)
    if arguments.command == "collect":
        return collect(arguments.folder)
    return readme(arguments.check) if arguments.command == "readme" else stale()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
