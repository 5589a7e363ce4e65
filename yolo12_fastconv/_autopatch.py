"""Opt-in by environment: with ``YOLO12_FASTCONV=1`` every Ultralytics process of this Python environment runs patched.

``yolo12_fastconv_autopatch.pth`` in site-packages calls `register` at interpreter start, and only with the variable
set. This module therefore imports nothing heavy: PyTorch and Ultralytics are imported when the program imports them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import site
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENABLE = "YOLO12_FASTCONV"
PTH = "yolo12_fastconv_autopatch.pth"
# Imported by everything that can load a model: the command line, `YOLO`, trainers and the ranks of DDP.
TARGET = "ultralytics.models.yolo.model"


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `TARGET` as the other finders would, and calls `install` when it has been executed."""

    def __init__(self) -> None:
        self._loader: importlib.abc.Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != TARGET:
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        if spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        assert self._loader is not None and module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        install()

    def __getattr__(self, name: str) -> Any:
        # Whoever only looks at the module's specification gets what the real loader has: source, file name, code.
        if name == "_loader" or self._loader is None:
            raise AttributeError(name)
        return getattr(self._loader, name)


def register() -> None:
    """Patch Ultralytics once it is imported. A second call changes nothing."""
    if TARGET in sys.modules:
        install()
    elif not any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport())


def install() -> None:
    """Install the process-wide patch; where that is impossible, say so and leave Ultralytics as it is."""
    try:
        from yolo12_fastconv import training

        training.install()
    except Exception as error:  # The user's program has to run, patched or not.
        from yolo12_fastconv import _compat

        _compat.get_logger().warning(
            f"yolo12_fastconv: YOLO12_FASTCONV is set, but nothing is patched: {error}"
        )


def installed() -> bool:
    """Whether new processes of this Python environment call `register`: the ``.pth`` file is in a site folder."""
    return any(
        (Path(folder) / PTH).is_file() for folder in [*site.getsitepackages(), site.getusersitepackages()]
    )
