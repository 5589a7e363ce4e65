"""Fused CUDA Conv + BatchNorm + SiLU blocks for Ultralytics YOLO12, swapped in with one line: ``patch_model(model)``.

The names below are imported on first use, so that ``yolo12_fastconv.ops`` and ``python -m yolo12_fastconv.info``
work without Ultralytics.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from yolo12_fastconv.parity import ParityReport, check_parity
    from yolo12_fastconv.patching import PatchError, patch_model, patch_report, unpatch_model

__version__ = "0.1.0"

__all__ = ["ParityReport", "PatchError", "check_parity", "patch_model", "patch_report", "unpatch_model"]

_HOME = {
    "ParityReport": "parity",
    "PatchError": "patching",
    "check_parity": "parity",
    "patch_model": "patching",
    "patch_report": "patching",
    "unpatch_model": "patching",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"yolo12_fastconv.{_HOME[name]}"), name)
    raise AttributeError(f"module 'yolo12_fastconv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
