#!/usr/bin/env python3
"""Measures this package beside stock Ultralytics and other peers, and writes docs/benchmarks/<gpu>-<command>.json.

    scripts/benchmark.py layers      [KEY=VALUE ...]   every Conv block alone
    scripts/benchmark.py model       [KEY=VALUE ...]   whole models, inference
    scripts/benchmark.py predict     [KEY=VALUE ...]   YOLO.predict on pictures, phase by phase
    scripts/benchmark.py train       [KEY=VALUE ...]   forward and backward, whole YOLO.train iterations, single blocks
    scripts/benchmark.py ddp         [KEY=VALUE ...]   YOLO.train on one GPU and on two
    scripts/benchmark.py convergence [KEY=VALUE ...]   loss curves of stock and patched training
    scripts/benchmark.py soak        [KEY=VALUE ...]   memory while YOLO.train runs for minutes
    scripts/benchmark.py COMMAND --help                the keys of a command
    scripts/benchmark.py collect FILE [...]            add what was measured elsewhere to docs/benchmarks/
    scripts/benchmark.py plot FILE                     draw FILE again, as the .png beside it
    scripts/benchmark.py readme [--check]              write the README's tables, as scripts/gpu_record.py readme does

For every command that measures: out=FOLDER (default: docs/benchmarks) and budget=SECONDS, after which it stops and has
written what there is (default: none). A file that is there already is added to; a set of the same conditions is
replaced. Exit status: 0 measured, 1 one of our results is missing or wrong, 2 could not run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import records
from records import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the package of this checkout, and tests/cases.py
import record_files  # noqa: E402
from bench_options import UsageError  # noqa: E402

COMMANDS = {
    "layers": "layer_benchmark",
    "model": "model_benchmark",
    "predict": "predict_benchmark",
    "train": "train_benchmark",
    "ddp": "ddp_benchmark",
    "convergence": "convergence",
    "soak": "soak",
}
"""Modules with `USAGE`, `parse` and `run`. Imported when needed: they import torch and Ultralytics."""
PLOTS = {"layers": "layer_benchmark", "convergence": "convergence"}
"""Modules with `plot`, by kind of record."""


def offline() -> None:
    """No downloads, installations or reports by Ultralytics, which reads these once, and its ranks inherit them."""
    for name, value in {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}.items():
        os.environ.setdefault(name, value)


def measure(command: str, arguments: Sequence[str]) -> int:
    module = importlib.import_module(COMMANDS[command])
    if any(argument in ("-h", "--help", "help") for argument in arguments):
        print(module.USAGE.strip())
        return 0
    return module.run(module.parse(arguments))


def collect(files: Sequence[str]) -> int:
    """Add the records `files` to those of docs/benchmarks/, and draw those that have a plot."""
    for name in files:
        new = record_files.read(Path(name))
        if new is None:
            raise UsageError(f"{name}: no such file")
        path = records.RECORDS / f"{records.slug(new['gpu'])}-{new['kind']}.json"
        record_files.write(path, record_files.merge(record_files.read(path, new["kind"]), new))
        print(f"benchmark: wrote {records.shown(path)}")
        if new["kind"] in PLOTS:
            importlib.import_module(PLOTS[new["kind"]]).plot(path)
    return 0


def plot(path: Path) -> int:
    record = record_files.read(path)
    if record is None:
        raise UsageError(f"{path}: no such file")
    if record["kind"] not in PLOTS:
        raise UsageError(f"{path}: records of kind {record['kind']} have no plot")
    importlib.import_module(PLOTS[record["kind"]]).plot(path)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command with `argv` (default: this process's arguments). Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    offline()
    try:
        if command in COMMANDS:
            return measure(command, rest)
        if command == "collect" and rest:
            return collect(rest)
        if command == "plot" and len(rest) == 1:
            return plot(Path(rest[0]).absolute())
        if command == "readme" and rest in ([], ["--check"]):
            return records.readme(bool(rest))
        raise UsageError(
            f"{' '.join(arguments)!r} is no command: {', '.join(COMMANDS)} [KEY=VALUE ...], collect FILE [...], "
            "plot FILE, readme [--check]"
        )
    except UsageError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
