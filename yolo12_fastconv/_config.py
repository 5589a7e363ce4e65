"""Environment switches of the patched blocks, read live at every call.

``YOLO12_FASTCONV_DISABLE=1`` turns the plugin off: nothing is patched, and blocks patched before compute as stock.
``YOLO12_FASTCONV_STRICT=1`` turns every fallback into an error. ``YOLO12_FASTCONV_CUDA_GRAPH=1`` is ``cuda_graph=True``
for what the process-wide patch reaches (the command line). On, off and spelling: `_compat.env_flag`.

A graph of ``torch.compile`` keeps what the switches said when it was compiled.
"""

from __future__ import annotations

import os
from typing import Any

from yolo12_fastconv import _compat

DISABLE = "YOLO12_FASTCONV_DISABLE"
STRICT = "YOLO12_FASTCONV_STRICT"
CUDA_GRAPH = "YOLO12_FASTCONV_CUDA_GRAPH"


def _key(name: str) -> object:
    return os.environ.encodekey(name) if hasattr(os.environ, "encodekey") else name


# `os.environ` encodes the name at every look-up, which costs as much as the rest of a block's checks. The mapping that
# it wraps is the same object for the life of the process, and is not public: without it, look names up in `os.environ`.
_ENVIRONMENT: Any = getattr(os.environ, "_data", os.environ)
_DISABLE_KEY = _key(DISABLE) if _ENVIRONMENT is not os.environ else DISABLE
_STRICT_KEY = _key(STRICT) if _ENVIRONMENT is not os.environ else STRICT
_keys: dict[str, Any] = {}


def value(name: str) -> object:
    """The value of an environment variable, of whatever type the mapping below `os.environ` holds; None if unset."""
    key = _keys.get(name)
    if key is None:
        key = _keys[name] = _key(name) if _ENVIRONMENT is not os.environ else name
    return _ENVIRONMENT.get(key)


def is_set() -> bool:
    """Whether one of the switches is in the environment, on or off: one cheap question instead of two."""
    return _DISABLE_KEY in _ENVIRONMENT or _STRICT_KEY in _ENVIRONMENT


def disabled() -> bool:
    """Whether YOLO12_FASTCONV_DISABLE is on."""
    return _DISABLE_KEY in _ENVIRONMENT and _compat.env_flag(DISABLE)


def strict() -> bool:
    """Whether YOLO12_FASTCONV_STRICT is on."""
    return _STRICT_KEY in _ENVIRONMENT and _compat.env_flag(STRICT)


def cuda_graph() -> bool:
    """Whether YOLO12_FASTCONV_CUDA_GRAPH is on."""
    return _compat.env_flag(CUDA_GRAPH)
