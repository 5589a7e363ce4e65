"""Weight gradients beside the rest of a captured backward: parallel branches of its CUDA graph.

Nothing in a backward waits for a weight's gradient, but in one stream everything behind it does. During a capture it is
put on a second stream, which waits for the first where it forks off; the graph then has it as a branch. It keeps the
tensor cores busy while batch norms read and write memory, and fills what short kernels leave idle.

Who reads memory on the second stream holds it (`Branches.run(held=...)`) until the first stream has waited for that:
the allocator would hand it out again at once, since to it only the first stream counts. What is held is bounded: the
first stream waits for the oldest branch while it is more than `HELD`, but never for the newest, which may go on beside
the next block.

Only gradients that nothing else touches before the end are put there (`private_leaves`): autograd adds those of a
parameter that is used twice, and passes those of a view on, and it does both on the first stream.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Branches", "CudaStreams", "beside", "current", "private_leaves", "run_all"]

T = TypeVar("T")

STREAMS, BACKWARD_STREAMS = 5, 1
"""Streams that the branches take turns on, of inference and of a backward. Two for a backward gained nothing, nor did
another priority."""
HELD = 64 << 20
"""Bytes that branches may hold; one alone may hold more. With 256 MiB YOLO12n at batch 32 was no faster, and its graphs
took 0.2 GiB more."""


class CudaStreams:
    """The stream of a capture, and the ones beside it. Tests have a replacement."""

    def __init__(self, main: torch.cuda.Stream, sides: list[torch.cuda.Stream]) -> None:
        self.main, self.sides = main, sides

    def is_current(self) -> bool:
        return torch.cuda.current_stream(self.main.device) == self.main

    @contextlib.contextmanager
    def fork(self, side: int) -> Iterator[None]:
        """What is launched inside runs on a stream beside, after all that the main one has been given."""
        self.sides[side].wait_stream(self.main)
        with torch.cuda.stream(self.sides[side]):
            yield

    def mark(self, side: int) -> Any:
        return self.sides[side].record_event()

    def join(self, mark: Any) -> None:
        """Let the main stream wait for a mark."""
        self.main.wait_event(mark)


class Branches:
    """The branches of one capture."""

    def __init__(self, streams: Any, leaves: Iterable[Tensor] = ()) -> None:
        """`leaves`: parameters whose gradients may be computed beside (`private_leaves`)."""
        self.streams, self.leaves = streams, set(leaves)
        self.next = 0
        self.waiting: deque[tuple[int, Any, tuple[Tensor, ...]]] = deque()
        """Of each branch the first stream has not waited for: its stream, its end, what it reads."""
        self.held = 0

    def takes(self, *parameters: Tensor | None) -> bool:
        """Whether gradients of all these may come from a branch."""
        return all(parameter is None or parameter in self.leaves for parameter in parameters)

    def run(self, function: Callable[[], T], reads: Iterable[Tensor | None]) -> T:
        """``function()`` in a branch. `reads`: all tensors that it reads and that others may free."""
        side, self.next = self.next, (self.next + 1) % len(self.streams.sides)
        with self.streams.fork(side):
            result = function()
            mark = self.streams.mark(side)
        held = tuple(tensor for tensor in reads if tensor is not None)
        self.waiting.append((side, mark, held))
        self.held += _bytes(held)
        self._join(lambda: len(self.waiting) > 1 and self.held > HELD)
        return result

    def join(self) -> None:
        """Let the first stream wait for all branches."""
        self._join(lambda: bool(self.waiting))

    def _join(self, goes_on: Callable[[], bool]) -> None:
        ends = {}
        while goes_on():
            side, mark, held = self.waiting.popleft()
            ends[side] = mark
            self.held -= _bytes(held)
            del held  # only now may the allocator give it to what the first stream is given next
        for mark in ends.values():
            self.streams.join(mark)


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def run_all(calls: list[Callable[[], T]], beside: list[bool]) -> list[T]:
    """Results of all calls, which do not depend on each other and read nothing that is freed meanwhile: while a graph
    of inference is captured, those that are to run `beside` in branches of it."""
    branches = current()
    if branches is None or sum(beside) + (not all(beside)) < 2:
        return [call() for call in calls]
    if all(beside):
        beside = [*beside[:-1], False]
    found = [branches.run(call, ()) if aside else None for call, aside in zip(calls, beside, strict=True)]
    results: Any = [
        other if aside else call() for call, aside, other in zip(calls, beside, found, strict=True)
    ]
    branches.join()
    return results


_running: list[Branches] = []


def current() -> Branches | None:
    """The branches of the capture that is going on in the current stream."""
    for branches in _running:
        if branches.streams.is_current():
            return branches
    return None


@contextlib.contextmanager
def beside(branches: Branches) -> Iterator[None]:
    """While this lasts, `current` finds `branches`; at the end all are joined."""
    _running.append(branches)
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # a capture that failed may refuse it
            branches.join()
        raise
    else:
        branches.join()
    finally:
        _running.remove(branches)


def private_leaves(outputs: Iterable[Tensor]) -> set[Tensor]:
    """The leaves that get one gradient from a backward of `outputs`: those with one edge in their autograd graph."""
    edges: dict[Any, int] = {}
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if hasattr(following, "variable"):
                edges[following] = edges.get(following, 0) + 1
            elif following not in seen:
                seen.add(following)
                waiting.append(following)
    return {node.variable for node, count in edges.items() if count == 1}
