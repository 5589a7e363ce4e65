"""Command-line arguments in Ultralytics' ``key=value`` form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Keys = Mapping[str, tuple[Callable[[str], Any], str]]
"""By key, what converts a value (raising KeyError or ValueError), and what the key must be, in words."""


class UsageError(Exception):
    """The command cannot run; the message is one line with the value and the remedy."""


def parse_pair(argument: str, keys: Keys, bare: Sequence[str] = ()) -> tuple[str, Any]:
    """Key and converted value of one argument. A key in `bare` may stand alone and then means ``key=True``.

    Raises:
        UsageError: no ``key=value``, an unknown key, or a value that does not convert.
    """
    key, equals, value = argument.partition("=")
    if not equals and key in bare:
        value = "True"
    elif not equals:
        raise UsageError(f"{argument!r} is not KEY=VALUE; the keys are {', '.join(keys)}")
    if key not in keys:
        raise UsageError(f"unknown key {key!r}; the keys are {', '.join(keys)}")
    convert, expected = keys[key]
    try:
        converted = convert(value)
    except (KeyError, ValueError):
        raise UsageError(f"{key}={value}: {key} must be {expected}") from None
    if convert is str and not value:
        raise UsageError(f"{key}= is empty: {key} must be {expected}")
    return key, converted


def positive(text: str) -> int:
    """An integer from 1 on; ValueError otherwise."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value
