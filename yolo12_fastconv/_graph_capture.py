"""Capturing and replaying CUDA graphs: memory pools, streams, random generators, failed captures."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from yolo12_fastconv import _late, _side_stream

__all__ = ["MAX_GRAPHS", "BackwardRecording", "CudaBackend", "Recording", "out_of_memory", "unfilled_memory"]

MAX_GRAPHS = 8
"""Graphs that one model keeps."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory has run out: also in an op of the compiled library, which can raise no class of PyTorch's."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


class Pool:
    """A memory pool of graphs; it lives as long as one of its recordings."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.captures = 0
        self.bytes = 0
        """What the pool holds of the device's memory, as far as it is known."""


class Recording:
    """A captured call: its input, its outputs, its graph, and what is launched after it."""

    def __init__(
        self, x: Tensor, outputs: Any, graph: Any, pool: Any, late: _late.Late | None = None
    ) -> None:
        self.x, self.outputs, self.graph, self.pool = x, outputs, graph, pool
        self.late = late or _late.Late()

    def replay(self, x: Tensor) -> None:
        """Run the graph for `x`, on the current stream."""
        self.x.data.copy_(x)  # a capture with gradients has saved `x`, which must not count as changed
        self.graph.replay()


class BackwardRecording:
    """A captured backward: the gradients that come in, those that it finds (None: not reached), its graph."""

    def __init__(self, grads: list[Tensor], found: list[Tensor | None], graph: Any) -> None:
        self.grads, self.found, self.graph = grads, found, graph

    def replay(self) -> None:
        """Run the graph, on the current stream."""
        self.graph.replay()


class CudaBackend:
    """What the graphs of one model need of CUDA. Tests have a replacement."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.pool: Callable[[], Pool | None] = lambda: None

    def serves(self, x: Tensor) -> bool:
        """Whether calls with this input can be captured or replayed now."""
        return x.is_cuda and x.layout is torch.strided and not torch._C._cuda_isCurrentStreamCapturing()

    def guard(self, x: Tensor) -> contextlib.AbstractContextManager[Any]:
        """The input's device becomes the current one."""
        if x.device.index == torch._C._cuda_getDevice():
            return _NOTHING
        return torch.cuda.device(x.device)

    def begin(self, x: Tensor) -> None:
        """Let the current stream wait for the call before."""
        if self.device != x.device:
            self.device = x.device
            self.done = torch.cuda.Event()
            self.side = torch.cuda.Stream(x.device)
            self.beside = [torch.cuda.Stream(x.device) for _ in range(_side_stream.STREAMS)]
        self.done.wait()

    def end(self) -> None:
        """Mark the end of this call on the current stream."""
        self.done.record()

    def finish(self) -> None:
        """Wait for the GPU, before memory is freed that a stale replay may be reading."""
        torch.cuda.current_stream().synchronize()

    def release(self) -> None:
        """Before recordings are freed: their memory is the side stream's, which has to wait for the last replay."""
        if self.device is not None:
            self.done.wait(self.side)

    def capture(self, function: Callable[[Tensor], Any], x: Tensor) -> Recording:
        """Capture ``function(x)``, after one run of it on the stream of the capture.

        Raises whatever capturing raises; the stream and the allocator are then as before.
        """
        pool = self.pool()
        if pool is None or pool.captures >= MAX_GRAPHS:
            pool = Pool()
        with self._side_stream(), torch.no_grad():
            static = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
            static.copy_(x)
            function(static)

            def call() -> Any:
                with _side_stream.beside(self._branches()):
                    return function(static)

            with _late.noted() as late:
                graph, outputs = self._record(pool, call)
        pool.captures += 1
        self.pool = weakref.ref(pool)
        return Recording(static, outputs, graph, pool, late)

    def capture_forward(
        self, function: Callable[[Tensor], Any], x: Tensor, before: Callable[[], None]
    ) -> Recording:
        """Capture ``before()``, and ``function(x)`` with its autograd graph, in a pool of its own. Nothing runs.

        Calls before, of the same kind, must have warmed up what makes its plans at the first call. Raises as `capture`.
        """
        pool = Pool()
        # What the eager calls have left in the allocator cannot be used by the pool, which needs as much again.
        torch.cuda.empty_cache()
        reserved = torch.cuda.memory_reserved()
        with self._side_stream(), torch.enable_grad(), unfilled_memory():
            static = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)

            def call() -> Any:
                before()
                return function(static)

            graph, outputs = self._record(pool, call)
        pool.bytes = torch.cuda.memory_reserved() - reserved
        return Recording(static, outputs, graph, pool)

    def capture_backward(
        self, forward: Recording, outputs: list[Tensor], sources: list[Tensor], grads: list[Tensor]
    ) -> BackwardRecording:
        """Capture the gradients of `sources` from those of `outputs`, in the pool of `forward`, whose autograd graph
        is used up. `grads`: gradients like those that will come. Nothing runs. Raises as `capture`."""
        before = torch.cuda.memory_reserved()
        with self._side_stream(), unfilled_memory():
            static = [torch.empty_like(grad) for grad in grads]

            def backward() -> tuple[Tensor | None, ...]:
                with _side_stream.beside(self._branches(_side_stream.private_leaves(outputs))):
                    return torch.autograd.grad(outputs, sources, static, allow_unused=True)

            graph, found = self._record(forward.pool, backward)
        forward.pool.bytes += torch.cuda.memory_reserved() - before
        return BackwardRecording(static, list(found), graph)

    def room(self, recording: Recording) -> int:
        """Bytes that the device and the allocator could give to a call beside `recording`."""
        idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - recording.pool.bytes
        return int(torch.cuda.mem_get_info()[0]) + max(idle, 0)

    def size(self, recording: Recording) -> int:
        """Bytes of the pool of `recording`."""
        return int(recording.pool.bytes)

    def _branches(self, leaves: Iterable[Tensor] | None = None) -> _side_stream.Branches:
        """With `leaves` those of a backward, which is one chain with another beside it."""
        streams = self.beside if leaves is None else self.beside[: _side_stream.BACKWARD_STREAMS]
        return _side_stream.Branches(_side_stream.CudaStreams(self.side, streams), leaves or ())

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        try:
            with torch.cuda.stream(self.side), torch.inference_mode(False), no_autocast_cache():
                yield
        finally:
            current.wait_stream(self.side)

    def _record(self, pool: Pool, function: Callable[[], Any]) -> tuple[Any, Any]:
        graph = torch.cuda.CUDAGraph()
        # cuBLAS has a workspace for each stream. The graph shall have one that is its own.
        torch._C._cuda_clearCublasWorkspaces()
        # A garbage collection in the middle could free somebody's graph, which CUDA forbids during a capture.
        collecting = gc.isenabled()
        gc.disable()
        try:
            _begin(graph, pool)
            try:
                result = function()
            except BaseException:
                self._abort(graph, pool)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._leave_pool(pool)
                raise
        finally:
            if collecting:
                gc.enable()
            torch._C._cuda_clearCublasWorkspaces()
        return graph, result

    def _abort(self, graph: Any, pool: Pool) -> None:
        try:
            graph.capture_end()
        except Exception:  # it reports again what went wrong
            self._leave_pool(pool)

    def _leave_pool(self, pool: Pool) -> None:
        # A capture that CUDA has invalidated ends without telling the allocator.
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with contextlib.suppress(AttributeError, RuntimeError):
                getattr(torch._C, name)(torch.cuda.current_device(), pool.handle)


_begin_lock = threading.Lock()


def _begin(graph: Any, pool: Pool) -> None:
    # A capture takes over the state of the device's random generator: until its end other threads could not draw
    # numbers, and nobody could after a capture that failed. So it gets a state of its own, and a forward that draws
    # numbers fails to be captured.
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    # A state of its own takes two numbers on the GPU. Without room for them torch ends the process when it destroys the
    # graph, so that is found out before; what is freed here is there for them.
    room = [torch.empty(1, dtype=torch.int64, device=generator.device) for _ in range(2)]
    del room
    with _begin_lock:
        kept = generator.graphsafe_get_state()
        generator.graphsafe_set_state(generator.clone_state())
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        finally:
            generator.graphsafe_set_state(kept)


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def no_autocast_cache() -> Iterator[None]:
    # The cache holds casts of weights, which a graph would read when they are long freed, and never make again.
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def unfilled_memory() -> Iterator[None]:
    """Keeps torch from filling what it allocates while deterministic algorithms are on.

    Ultralytics trains with ``deterministic=True`` by default, and torch then fills every uninitialised tensor with NaN:
    11 of 91 ms of GPU time a step of YOLO12m. Newer Ultralytics switches that off by itself. Results are the same
    without, and repeat bit by bit: neither torch's ops nor this package's read memory that nobody wrote. The filling
    makes mistakes repeatable, not results.

    The switch is one for the whole process; if it was on, it is put back on, also after an error.
    """
    if not torch._C._get_deterministic_fill_uninitialized_memory():
        yield
        return
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    try:
        yield
    finally:
        torch._C._set_deterministic_fill_uninitialized_memory(True)
