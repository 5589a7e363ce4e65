"""What a CUDA graph leaves to be launched after its replay: the op that makes a model's outputs.

Inside the graph its results would lie in the graph's memory, and be copied for the caller each time. Launched after the
replay it writes them into memory that is the caller's: 490 MB less to move for YOLO12m in float at batch 32.

During a capture `call` only notes the op and returns tensors without memory ("meta") in place of its results. Whatever
computed with them would fail, and with it the capture.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Late", "call", "noted"]


@dataclass
class Late:
    """The ops of one capture, and what stands for the results of each."""

    calls: list[tuple[Callable[[], Sequence[Tensor]], tuple[Tensor, ...]]] = field(default_factory=list)


class _State(threading.local):
    late: Late | None = None


_state = _State()


@contextlib.contextmanager
def noted() -> Iterator[Late]:
    """While inside, `call` notes this thread's ops instead of running them."""
    before, _state.late = _state.late, Late()
    try:
        yield _state.late
    finally:
        _state.late = before


def call(function: Callable[[], Sequence[Tensor]], sizes: Sequence[Sequence[int]]) -> Sequence[Tensor]:
    """``function()``, now or after each replay. Its results, of these sizes, are returned by the model as they are."""
    late = _state.late
    if late is None:
        return function()
    results = tuple(torch.empty(tuple(size), device="meta") for size in sizes)
    late.calls.append((function, results))
    return results
