"""What is installed and what was loaded: what a bug report needs.

    python -m yolo12_fastconv.info [--json]

Works without Ultralytics, without a GPU and with a missing or damaged library; exit status 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import torch

import yolo12_fastconv
from yolo12_fastconv import _compat, _library

SWITCHES = (
    "YOLO12_FASTCONV",
    "YOLO12_FASTCONV_DISABLE",
    "YOLO12_FASTCONV_STRICT",
    "YOLO12_FASTCONV_CUDA_GRAPH",
    "YOLO12_FASTCONV_LIBRARY",
    "YOLO12_FASTCONV_TARGET",
    "YOLO12_FASTCONV_KERNEL",
    "YOLO12_FASTCONV_PRINT_TILES",
)
DISTRIBUTIONS = ("ultralytics", "ultralytics-opencv-headless")


def collect() -> dict[str, Any]:
    """All facts, as plain dictionaries, lists, strings and numbers. Raises nothing for what is missing: it says so."""
    return {
        "yolo12_fastconv": {
            "version": yolo12_fastconv.__version__,
            "path": str(Path(yolo12_fastconv.__file__).parent),
        },
        "python": {"version": platform.python_version(), "platform": platform.platform()},
        "torch": {
            "version": str(torch.__version__),
            "problem": _compat.torch_problem(),
            "cuda": torch.version.cuda,
            "cudnn": _cudnn_version(),
        },
        "ultralytics": _ultralytics(),
        "library": dataclasses.asdict(_library.load()),
        "gpus": _gpus(),
        "driver": _driver(),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
    }


def _cudnn_version() -> int | None:
    # Loading a cuDNN that does not fit raises.
    try:
        return torch.backends.cudnn.version()
    except RuntimeError:
        return None


def _ultralytics() -> dict[str, Any]:
    # Without importing it: that takes seconds, writes a settings file, and fails where OpenCV lacks a system library.
    installed = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    version = None
    spec = importlib.util.find_spec("ultralytics")
    if spec is not None and spec.origin is not None:
        found = re.search(
            r"^__version__ = [\"'](.+)[\"']", Path(spec.origin).read_text("utf-8"), re.MULTILINE
        )
        version = found[1] if found else "unknown"
    problem = None
    if version is None:
        problem = f"not installed: {_compat.ULTRALYTICS_INSTALL}"
    elif _compat.version_tuple(version) < _compat.ULTRALYTICS_MINIMUM:
        problem = f"too old, 8.3.242 or newer is needed: {_compat.ULTRALYTICS_INSTALL}"
    elif len(installed) > 1:
        problem = "two distributions overwrite each other's files: uninstall both, then install one"
    return {
        "version": version,
        "distributions": installed,
        "tested": _compat.ULTRALYTICS_TESTED,
        "problem": problem,
    }


def _gpus() -> list[dict[str, Any]]:
    if torch.version.cuda is None:
        return []
    gpus = []
    for index in range(torch.cuda.device_count()):
        name, capability = _library.device_facts(index)
        supported, reason = _library.device_supported(index)
        gpus.append(
            {
                "index": index,
                "name": name,
                "capability": f"{capability[0]}.{capability[1]}",
                "supported": supported,
                "reason": reason,
            }
        )
    return gpus


def _driver() -> str | None:
    """The version of the NVIDIA kernel driver, None where there is none (or, as on Windows, no such file)."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)\s", text)
    return found[1] if found else None


def to_text(facts: dict[str, Any]) -> str:
    """The facts of `collect` for people, one a line."""
    package, torch_facts, ultralytics = facts["yolo12_fastconv"], facts["torch"], facts["ultralytics"]
    library = facts["library"]
    rows = [
        ("yolo12_fastconv", f"{package['version']} ({package['path']})"),
        ("Python", f"{facts['python']['version']} on {facts['python']['platform']}"),
        ("PyTorch", f"{torch_facts['version']}, CUDA {torch_facts['cuda']}, cuDNN {torch_facts['cudnn']}"),
        ("Ultralytics", f"{ultralytics['version']} (tested: {ultralytics['tested']})"),
    ]
    rows += [("", f"from {name} {version}") for name, version in ultralytics["distributions"].items()]
    rows += [("problem", text) for text in (torch_facts["problem"], ultralytics["problem"]) if text]
    if library["loaded"]:
        rows += [
            ("CUDA library", library["path"]),
            ("", f"architectures {' '.join(library['arch_list'])}"),
            ("", f"nvcc {library['cuda_version']}, source hash {library['source_hash']}"),
        ]
    else:
        rows.append(("CUDA library", f"not loaded, ops run on ATen: {library['reason']}"))
        rows += [("", f"looked for {path}") for path in library["tried"]]
        if not library["path"] and library["tried"]:
            rows.append(("", "install a wheel that holds it, or build it: see README.md, Install"))
    rows.append(("driver", facts["driver"] or "none found"))
    for gpu in facts["gpus"]:
        state = "supported" if gpu["supported"] else f"not supported: {gpu['reason']}"
        rows.append(
            (f"cuda:{gpu['index']}", f"{gpu['name']}, compute capability {gpu['capability']}, {state}")
        )
    if not facts["gpus"]:
        rows.append(("GPUs", "none"))
    rows += [("switch", f"{name}={value}") for name, value in facts["switches"].items()]
    return "\n".join(f"{label + ':' if label else '':17} {text}" for label, text in rows)


def main(argv: list[str] | None = None) -> int:
    """Prints the facts. Returns the exit status 0."""
    parser = argparse.ArgumentParser(
        prog="python -m yolo12_fastconv.info", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else to_text(facts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
