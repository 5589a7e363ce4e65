"""KEY=VALUE options of benchmark.py and tune.py: converters of values, and the keys that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from yolo12_fastconv._arguments import Keys, UsageError, parse_pair, positive

MODELS = ("yolo12n", "yolo12s", "yolo12m", "yolo12l", "yolo12x")
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
OURS = ("ours", "ours-graph")
"""Contenders that are patched: without CUDA graphs and with them. On a CPU there is the first alone."""
T = TypeVar("T")

__all__ = ["DTYPES", "MODELS", "ONE", "OURS", "UsageError", "fill", "keys_of"]


def several(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    names = tuple(names)

    def convert(text: str) -> tuple[str, ...]:
        chosen = tuple(dict.fromkeys(text.split(",")))
        if not set(chosen) <= set(names):
            raise ValueError
        return chosen

    return convert


def several_or_none(names: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    convert = several(names)
    return lambda text: () if text == "none" else convert(text)


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    return lambda text: {name: name for name in names}[text]


def batches(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))


def image_size(text: str) -> int:
    size = positive(text)
    if size % 32:
        raise ValueError
    return size


def seconds_of(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise ValueError
    return seconds


def path_of(text: str) -> Path:
    if not text:
        raise ValueError
    return Path(text).absolute()


def file_of(text: str) -> Path:
    path = path_of(text)
    if not path.is_file():
        raise ValueError
    return path


def flag(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


COMMON: Keys = {
    "model": (several(MODELS), f"some of {','.join(MODELS)}"),
    "batch": (batches, "numbers from 1, as in 1,32"),
    "dtype": (several(DTYPES), f"some of {','.join(DTYPES)}"),
    "imgsz": (image_size, "a multiple of 32"),
    "tf32": (flag, "True or False"),
    "replays": (positive, "a number from 1"),
    "out": (path_of, "a folder"),
    "budget": (seconds_of, "seconds"),
}
"""Keys that mean the same in several commands."""


ONE: Keys = {
    "model": (one_of(MODELS), f"one of {', '.join(MODELS)}"),
    "dtype": (one_of(DTYPES), f"one of {', '.join(DTYPES)}"),
    "batch": (positive, "a number from 1"),
    **{key: COMMON[key] for key in ("imgsz", "out", "budget")},
}
"""Keys of commands that measure one set."""


def keys_of(*common: str, **own: tuple[Callable[[str], object], str]) -> Keys:
    """The named ones of `COMMON`, and `own` ones."""
    return {key: COMMON[key] for key in common} | own


def fill(options: T, arguments: Sequence[str], keys: Keys) -> T:
    """`options` with the attributes that KEY=VALUE arguments name set.

    Raises:
        UsageError: an argument that is unknown or out of range.
    """
    for argument in arguments:
        key, value = parse_pair(argument, keys)
        setattr(options, key, value)
    return options
