"""CUDA graphs: `patch_model(..., cuda_graph=True)` replays a task model's forward instead of launching its kernels.

At batch 1 a small YOLO12 keeps the GPU busy for a fraction of the time that the host needs to launch it. A task model
whose class has `GraphModel` mixed in counts its calls by signature and captures the `REPEATS`-th one of a kind.

What is captured: plain calls, ``model(x)`` with one strided CUDA tensor, in evaluation mode and without gradients.
Calls with ``augment``, ``embed``, ``profile`` or other arguments, training, tracing, export, compilation, calls under
function or dispatch modes and transforms, inside somebody else's capture, or with hooks on inner modules run as ever.

Signature: shape, strides, dtype and device of the input, and everything global that steers kernels (`_flags`).

Right results:

- Kernels of a graph read the live weights: values changed in place need nothing.
- Whatever else could change the result (a tensor, module, attribute, flag or hook replaced or added) is compared with
  its state at capture (`_Structure`) in every call, while the GPU runs the replay, so that the comparison costs no time
  where the GPU needs longer than the host. A replay that turns out stale is thrown away and the call runs eagerly. The
  graphs own the memory they read until then, so a stale replay reads old values and nothing else. Not seen: changes
  inside a list or dictionary that is an attribute, and classes and functions edited in place.
- The input is copied into the graph's own tensor, and outputs are copied out of it: the caller owns what it gets. A
  tensor that is returned in two places is one tensor again, and outputs that share memory share it again; one that is a
  slice of a larger tensor comes dense.
- Heads keep the anchors of the last shape as attributes. They are made by an eager call before the capture, outside the
  graph's memory, and a replay leaves them in the head as an eager call of that shape would.

Memory: at most `MAX_GRAPHS` graphs a model, the least recently used goes first. Graphs of one model share a memory
pool: its size is that of the largest, about, and not the sum. A pool serves `MAX_GRAPHS` captures and then a new one
begins, since a pool's memory is only given back as a whole. Moving the model (``to``, ``half``, ...) or ``train()``
frees all.

Threads and streams: calls of one model that could be captured, eager ones too, exclude one another on the host, and on
the GPU each waits for the one before, since they share a pool and the head's anchors. Models are independent. A capture
is ``thread_local``: other threads go on using the GPU meanwhile.

Graphs never travel: copies start without any, and pickles hold stock classes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import operator
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from yolo12_fastconv import _compat, _config
from yolo12_fastconv.blocks import StockPickle

_compat.require_ultralytics()

from ultralytics.nn.modules.head import Detect, RTDETRDecoder  # noqa: E402
from ultralytics.nn.tasks import BaseModel  # noqa: E402

__all__ = ["MAX_GRAPHS", "REPEATS", "GraphModel", "describe", "disable", "enable", "enabled", "why_not"]

REPEATS = 3
"""A signature is captured at its third call. A capture takes as long as about three eager calls."""
MAX_GRAPHS = 8
"""Graphs that one model keeps."""
_MAX_SIGNATURES = 256
"""Signatures whose calls are counted, per model."""
_MAX_REPEATS = 96
_MAX_FAILURES = 3
"""Failed captures after which a model is not captured any more."""

_CACHES: dict[type[nn.Module], tuple[str, ...]] = {
    Detect: ("shape", "anchors", "strides"),
    RTDETRDecoder: ("shapes", "anchors", "valid_mask"),
}
"""Attributes that a head's forward sets, as functions of the input's shape."""


# ------------------------------------------------------------------------------------------------------- task models


class GraphModel(StockPickle):
    """Mixin for Ultralytics' task models: replays the calls that repeat; see the module."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock class's ``forward``: predictions for a tensor, the loss for a dictionary."""
        if (
            torch.compiler.is_compiling()
            or type(x) is not Tensor
            or self.training
            or torch.is_grad_enabled()
            or not all(value is None or value is False for value in (*args, *kwargs.values()))
            or not _ordinary_call()
        ):
            return super().forward(x, *args, **kwargs)
        return _graphs(self).call(self, super().forward, x)

    def train(self, mode: bool = True) -> Any:
        """As `torch.nn.Module.train`; training frees the graphs."""
        if mode:
            _drop(self, "the model was set to training mode")
        return super().train(mode)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        # `to`, `half`, `cuda`, ...: found at the next call in any case, but the old weights' memory is free at once.
        _drop(self, "the model was moved or cast")
        return super()._apply(fn, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._stock, _stub_arguments(self._stock), _state(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(_state(self), memo))
        return twin

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        twin.__setstate__(_state(self))
        return twin


def _state(model: nn.Module) -> dict[str, Any]:
    # `nn.Module` leaves out what `compile()` sets, too.
    return {k: v for k, v in vars(model).items() if not k.startswith("_fc_") and k != "_compiled_call_impl"}


_STUB = {"nc": 1, "kpt_shape": [1, 3], "backbone": [[-1, 1, "nn.Identity", []]], "head": []}


@functools.cache
def _parameters_of(stock: Any) -> tuple[inspect.Parameter, ...]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p for p in inspect.signature(stock).parameters.values() if p.kind in positional)


def _stub_arguments(stock: Any) -> tuple[Any, ...]:
    """Arguments with which unpickling makes an empty model of class `stock`, to be overwritten by the pickled state."""
    known = {"cfg": copy.deepcopy(_STUB), "verbose": False}
    return tuple(known.get(p.name, p.default) for p in _parameters_of(stock))


@functools.cache
def _graph_class(stock: Any) -> Any:
    # The stock class's name, as messages and people know it.
    return type(stock.__name__, (GraphModel, stock), {"_stock": stock, "__module__": __name__})


def why_not(network: nn.Module) -> str | None:
    """Why `network` cannot have CUDA graphs, or None."""
    if enabled(network):
        return None
    if not isinstance(network, BaseModel):
        return f"{type(network).__name__} is not one of Ultralytics' task models"
    if "forward" in vars(network):
        return "it has a forward of its own (an instance attribute)"
    stock: Any = type(network)
    return _class_problem(stock)


@functools.cache
def _class_problem(stock: Any) -> str | None:
    # Pickles of the model have to be readable without this package.
    try:
        with torch.random.fork_rng(devices=[]):
            twin = stock(*_stub_arguments(stock))
    except Exception as error:
        return (
            f"{stock.__name__} cannot be made empty, which its pickles need: {type(error).__name__}: {error}"
        )
    return None if type(twin) is stock else f"{stock.__name__} makes a {type(twin).__name__}"


def enable(network: nn.Module) -> None:
    """Let `network` use CUDA graphs. Without effect on one that does.

    Raises:
        ValueError: it cannot; the message says why (`why_not`).
    """
    reason = why_not(network)
    if reason is not None:
        raise ValueError(reason)
    if not enabled(network):
        stock: Any = type(network)
        network.__class__ = _graph_class(stock)


def disable(network: nn.Module) -> bool:
    """Undo `enable` and free the graphs; returns whether there was something to undo."""
    if not isinstance(network, GraphModel):
        return False
    _drop(network, "CUDA graphs were switched off")
    vars(network).pop("_fc_graphs", None)
    network.__class__ = network._stock
    return True


def enabled(network: nn.Module) -> bool:
    """Whether `network` uses CUDA graphs."""
    return isinstance(network, GraphModel)


def describe(network: nn.Module) -> str:
    """The state of a model's graphs in one line; empty if it uses none."""
    if not isinstance(network, GraphModel):
        return ""
    graphs = vars(network).get("_fc_graphs")
    return graphs.describe() if graphs is not None else "none captured yet"


def _graphs(model: Any) -> Graphs:
    graphs = vars(model).get("_fc_graphs")
    # DataParallel's replicas are shallow copies: they find the graphs of another model.
    if graphs is None or graphs.owner() is not model:
        with _create_lock:
            graphs = vars(model).get("_fc_graphs")
            if graphs is None or graphs.owner() is not model:
                graphs = vars(model)["_fc_graphs"] = Graphs(model)
    return graphs


def _drop(model: Any, reason: str) -> None:
    graphs = vars(model).get("_fc_graphs")
    if graphs is not None and graphs.owner() is model:
        graphs.drop(reason)


_create_lock = threading.Lock()


# ------------------------------------------------------------------------------------------------------- signatures


def _ordinary_call() -> bool:
    return not (
        torch.jit.is_tracing()
        or torch.compiler.is_exporting()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.get_dynamic_layer_stack_depth() > 0
        or forward_ad._current_level >= 0
        or _has_any_global_hook()
        or _config.disabled()
    )


def _flags() -> tuple[Any, ...]:
    """What steers the choice of kernels besides the tensors."""
    return (
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        torch.backends.cuda.matmul.fp32_precision,
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        _config.strict(),
        _config.value("YOLO12_FASTCONV_KERNEL"),
        _config.value("YOLO12_FASTCONV_TARGET"),
    )


# -------------------------------------------------------------------------------------------------- state of a model

_BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")


class _Structure:
    """Everything of a model that a graph has baked in, to be compared with the model as it is now.

    The comparisons are those of lists, tuples and dictionaries, which compare identities first: about 0.2 ms for the
    350 modules of a fused YOLO12n, where a loop in Python would take more than a replay.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        spaces = [vars(module) for module in modules]
        # The model's own hooks are called around its forward, and so around a replay.
        self.hooks = [space[name] for space in spaces[1:] for name in _HOOKS]
        self.modules, self.types = modules[1:], list(map(type, modules[1:]))
        self.spaces, self.sizes = spaces, list(map(len, spaces))
        tables = [space[name] for space in spaces for name in _TABLES]
        self.empty = [table for table in tables if not table]
        self.tables = [table for table in tables if table]
        self.contents = [dict(table) for table in self.tables]
        # Attributes, grouped by the set of their names: of modules of a kind.
        grouped: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        self.caches: list[tuple[dict[str, Any], str]] = []
        for module, space in zip(modules, spaces, strict=True):
            cached = next((names for kind, names in _CACHES.items() if isinstance(module, kind)), ())
            self.caches += [(space, name) for name in cached]
            own = {n for n in space if n not in _BOOKKEEPING and n != "_fc_graphs"}
            own.difference_update(cached, () if module is not model else _OF_TRAINING)
            grouped.setdefault(tuple(sorted(own)), []).append(space)
        self.groups = [(operator.itemgetter(*names), members) for names, members in grouped.items() if names]
        self.attributes = self._attributes()
        held = [(table, name) for table in self.tables for name in table] + [
            (space, name)
            for getter_names, members in grouped.items()
            for space in members
            for name in getter_names
        ]
        held = [(table, name) for table, name in held if isinstance(table[name], Tensor)]
        self.tensors = [table[name] for table, name in held]
        # Tensors of one element compare by value: these are compared by identity.
        single = [(table, name) for table, name in held if table[name].numel() == 1]
        self.single_tables = [table for table, _ in single]
        self.single_names = [name for _, name in single]
        self.single = [table[name] for table, name in single]
        self.contiguous = [tensor for tensor in self.tensors if tensor.is_contiguous()]
        self.strided = [tensor for tensor in self.tensors if not tensor.is_contiguous()]
        # With their memory kept, a tensor whose data was replaced has another address.
        self.memory = [tensor.untyped_storage() for tensor in self.tensors]
        self.layout = self._layout()

    def _attributes(self) -> list[list[Any]]:
        return [list(map(getter, members)) for getter, members in self.groups]

    def _layout(self) -> tuple[Any, ...]:
        # At the address of before lies the memory of before, perhaps seen through another view of it. `stride` for all
        # would take as long as the other three together.
        return (
            list(map(Tensor.data_ptr, self.tensors)),
            list(map(Tensor.numel, self.tensors)),
            all(map(Tensor.is_contiguous, self.contiguous)),
            list(map(Tensor.stride, self.strided)),
        )

    def hooked(self) -> bool:
        """Whether inner modules have hooks, which a replay would not call."""
        return any(self.hooks)

    def unchanged(self) -> bool:
        """Whether the model is as it was, values of tensors and caches of heads aside."""
        try:
            return (
                list(map(len, self.spaces)) == self.sizes
                and list(map(type, self.modules)) == self.types
                and not any(self.hooks)
                and not any(self.empty)
                and self.tables == self.contents
                and self._attributes() == self.attributes
                and all(
                    map(
                        operator.is_,
                        map(operator.getitem, self.single_tables, self.single_names),
                        self.single,
                    )
                )
                and self._layout() == self.layout
            )
        # An attribute is gone, or tensors and arrays were compared that are not the same.
        except Exception:
            return False

    def head_state(self) -> list[tuple[dict[str, Any], str, Any]]:
        """What heads keep for the present shape."""
        return [(space, name, space[name]) for space, name in self.caches if name in space]


_OF_TRAINING = frozenset({"args", "criterion", "names", "pt_path", "task", "yaml"})
"""Attributes of a task model that its forward never reads."""


# ------------------------------------------------------------------------------------------------------------ outputs


class _Uncapturable(Exception):
    """A call cannot become a graph, and why."""


class _Outputs:
    """Copies a graph's outputs for the caller: the same nest of tuples, lists and dictionaries, of new tensors."""

    def __init__(self, outputs: Any, device: torch.device, foreign: set[int]) -> None:
        """`foreign`: addresses of memory that outputs must not lie in, since the caller would get a copy of it."""
        self.device, self.foreign = device, foreign
        self.tensors: list[Tensor] = []
        self.build = self._builder(outputs)
        groups: dict[int, list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(index)
        self.sources: list[Tensor] = []
        self.views: list[tuple[Any, ...] | None] = [None] * len(self.tensors)
        self.copied: list[int] = [0] * len(self.tensors)  # which copy each output is, or is a view of
        for members in groups.values():
            for index in members:
                self.copied[index] = len(self.sources)
            tensors = [self.tensors[index] for index in members]
            if len(members) == 1:
                self.sources.append(tensors[0])
                continue
            if len({tensor.dtype for tensor in tensors}) > 1:
                raise _Uncapturable("outputs of different dtypes share memory")
            begin = min(int(tensor.storage_offset()) for tensor in tensors)
            end = max(map(_end, tensors))
            for index, tensor in zip(members, tensors, strict=True):
                offset = tensor.storage_offset() - begin
                self.views[index] = (len(self.sources), tensor.shape, tensor.stride(), offset)
            self.sources.append(torch.as_strided(tensors[0], (end - begin,), (1,), begin))
        self.direct = all(view is None for view in self.views)

    def _builder(self, value: Any) -> Callable[[list[Tensor]], Any]:
        kind = type(value)
        if kind is Tensor:
            return operator.itemgetter(self._index(value))
        if kind in (tuple, list):
            parts = [self._builder(part) for part in value]
            if kind is list:
                return lambda copies: [part(copies) for part in parts]
            return lambda copies: tuple([part(copies) for part in parts])
        if kind is dict:
            items = [(key, self._builder(part)) for key, part in value.items()]
            return lambda copies: {key: part(copies) for key, part in items}
        if value is None or kind in (bool, int, float, str):
            return lambda copies: value
        raise _Uncapturable(f"the model returns a {kind.__name__}")

    def _index(self, tensor: Tensor) -> int:
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return index
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise _Uncapturable(f"the model returns a tensor on {tensor.device}, {tensor.layout}")
        if tensor.numel() and tensor.untyped_storage().data_ptr() in self.foreign:
            raise _Uncapturable("the model returns its input or a weight, or a view of one")
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def __call__(self) -> Any:
        copies = _clone(self.sources)
        if not self.direct:
            copies = [
                copies[self.copied[index]] if view is None else copies[view[0]].as_strided(*view[1:])
                for index, view in enumerate(self.views)
            ]
        return self.build(copies)


def _end(tensor: Tensor) -> int:
    """One past the last element's place in its memory."""
    if not tensor.numel():
        return int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + last + 1


_ONE_BY_ONE = 64 << 20


def _clone(tensors: list[Tensor]) -> list[Tensor]:
    # One launch for outputs of one dtype, where a launch each takes longer on GPU and host: 28 against 62 us for the
    # 5 MB of YOLO12n at 640, batch 1. From about 64 MB on copies one by one are faster: 109 against 163 us for 168 MB.
    if sum(tensor.nbytes for tensor in tensors) > _ONE_BY_ONE:
        return [tensor.clone() for tensor in tensors]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


# --------------------------------------------------------------------------------------------------------------- CUDA


class _Pool:
    """A memory pool of graphs; it lives as long as one of its recordings."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.captures = 0


class Recording:
    """A captured call: its input, its outputs, its graph."""

    def __init__(self, x: Tensor, outputs: Any, graph: Any, pool: Any) -> None:
        self.x, self.outputs, self.graph, self.pool = x, outputs, graph, pool

    def replay(self, x: Tensor) -> None:
        """Run the graph for `x`, on the current stream."""
        self.x.copy_(x)
        self.graph.replay()


class CudaBackend:
    """What `Graphs` needs of CUDA, for one model. Tests put a replacement here."""

    def __init__(self) -> None:
        self.device: torch.device | None = None
        self.pool: Callable[[], _Pool | None] = lambda: None

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
        current = torch.cuda.current_stream()
        pool = self.pool()
        if pool is None or pool.captures >= MAX_GRAPHS:
            pool = _Pool()
        self.side.wait_stream(current)
        try:
            with (
                torch.cuda.stream(self.side),
                torch.inference_mode(False),
                torch.no_grad(),
                _no_autocast_cache(),
            ):
                static = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
                static.copy_(x)
                function(static)
                graph = torch.cuda.CUDAGraph()
                # cuBLAS has a workspace for each stream. The graph shall have one that is its own.
                torch._C._cuda_clearCublasWorkspaces()
                try:
                    outputs = self._record(graph, pool, function, static)
                finally:
                    torch._C._cuda_clearCublasWorkspaces()
        finally:
            current.wait_stream(self.side)
        pool.captures += 1
        self.pool = weakref.ref(pool)
        return Recording(static, outputs, graph, pool)

    def _record(self, graph: Any, pool: _Pool, function: Callable[[Tensor], Any], static: Tensor) -> Any:
        # A garbage collection in the middle could free somebody's graph, which CUDA forbids during a capture.
        collecting = gc.isenabled()
        gc.disable()
        try:
            _begin(graph, pool)
            try:
                outputs = function(static)
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
        return outputs

    def _abort(self, graph: Any, pool: _Pool) -> None:
        try:
            graph.capture_end()
        except Exception:  # it reports again what went wrong
            self._leave_pool(pool)

    def _leave_pool(self, pool: _Pool) -> None:
        # A capture that CUDA has invalidated ends without telling the allocator.
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            with contextlib.suppress(AttributeError, RuntimeError):
                getattr(torch._C, name)(torch.cuda.current_device(), pool.handle)


_begin_lock = threading.Lock()


def _begin(graph: Any, pool: _Pool) -> None:
    # A capture takes over the state of the device's random generator: until its end other threads could not draw
    # numbers, and nobody could after a capture that failed. So it gets a state of its own, and a forward that draws
    # numbers fails to be captured.
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    with _begin_lock:
        kept = generator.graphsafe_get_state()
        generator.graphsafe_set_state(generator.clone_state())
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
        finally:
            generator.graphsafe_set_state(kept)


_NOTHING = contextlib.nullcontext()
BACKEND: Callable[[], Any] = CudaBackend


@contextlib.contextmanager
def _no_autocast_cache() -> Iterator[None]:
    # The cache holds casts of weights, which a graph would read when they are long freed, and never make again.
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# ------------------------------------------------------------------------------------------------------------- graphs


class _Entry:
    """A graph and how to use it."""

    def __init__(
        self, recording: Any, outputs: _Outputs, head: list[tuple[dict[str, Any], str, Any]]
    ) -> None:
        self.recording, self.outputs, self.head = recording, outputs, head
        self.replays = 0


class Graphs:
    """The graphs of one model, their bound, and what they depend on."""

    def __init__(self, model: nn.Module) -> None:
        self.owner = weakref.ref(model)
        self.lock = threading.RLock()
        self.backend = BACKEND()
        self.entries: OrderedDict[Any, _Entry] = OrderedDict()
        self.structure: _Structure | None = None
        self.calls: OrderedDict[Any, float] = OrderedDict()
        self.repeats = REPEATS
        self.failures = 0
        self.counts: Counter[str] = Counter()
        self.messages: set[str] = set()
        self.problem = ""

    def __reduce__(self) -> Any:
        return type(None), ()  # whoever copies or pickles a model's attributes by other means gets None

    def __del__(self) -> None:
        if getattr(self, "entries", None):
            with contextlib.suppress(Exception):
                self.backend.release()

    def call(self, model: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        """``function(x)``, replayed if it was captured, captured if it has been called often enough."""
        backend = self.backend
        if not backend.serves(x):
            return function(x)
        key = (x.shape, x.stride(), x.dtype, x.device, *_flags())
        with backend.guard(x), self.lock:
            if backend.device != x.device:
                self.drop("the model was moved")
            backend.begin(x)
            try:
                entry = self.entries.get(key)
                if entry is not None:
                    entry.recording.replay(x)
                    outputs = entry.outputs()
                    assert self.structure is not None
                    if self.structure.unchanged():
                        self._used(key, entry)
                        return outputs
                    del outputs
                    backend.finish()
                    self.drop("the model was changed")
                self.counts["eager calls"] += 1
                result = function(x)
                if self._due(key):
                    self._capture(key, model, function, x)
                return result
            finally:
                backend.end()

    def _used(self, key: Any, entry: _Entry) -> None:
        self.entries.move_to_end(key)
        entry.replays += 1
        self.counts["replays"] += 1
        for space, name, value in entry.head:
            space[name] = value

    def _due(self, key: Any) -> bool:
        if self.failures >= _MAX_FAILURES:
            return False
        calls = self.calls.pop(key, 0) + 1
        self.calls[key] = calls
        if len(self.calls) > _MAX_SIGNATURES:
            self.calls.popitem(last=False)
        return calls >= self.repeats

    def _capture(self, key: Any, model: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> None:
        del self.calls[key]
        if self.structure is None or not self.structure.unchanged():
            self.drop("the model was changed")
            self.structure = _Structure(model)
        structure = self.structure
        if structure.hooked():
            self.structure = None
            self._explain("inner modules have hooks")
            return
        head = structure.head_state()
        recording = None
        try:
            if torch._debug_has_internal_overlap(x) == 1:
                raise _Uncapturable("elements of the input share memory")
            recording = self.backend.capture(function, x)
            if not structure.unchanged():
                raise _Uncapturable("a call changes attributes of the model")
            foreign = {memory.data_ptr() for memory in structure.memory}
            foreign |= {v.untyped_storage().data_ptr() for _, _, v in head if isinstance(v, Tensor)}
            foreign.add(recording.x.untyped_storage().data_ptr())
            outputs = _Outputs(recording.outputs, x.device, foreign)
        except Exception as error:
            self.failures += 1
            self.calls[key] = float("-inf")
            if not self.entries:
                self.structure = None  # it keeps the memory of weights
            what = str(error) if isinstance(error, _Uncapturable) else f"{type(error).__name__}: {error}"
            self._explain(what.splitlines()[0] if what else "")
            return
        finally:
            # What the head made for itself inside the capture lies in the graph's memory.
            for space, name, value in head:
                space[name] = value
        recording.outputs = None  # `outputs` holds the tensors
        self.entries[key] = _Entry(recording, outputs, head)
        self.counts["captures"] += 1
        while len(self.entries) > MAX_GRAPHS:
            _, evicted = self.entries.popitem(last=False)
            # More kinds of calls come back than there is room for: wait longer before the next capture.
            if evicted.replays < 4 * REPEATS:
                self.repeats = min(2 * self.repeats, _MAX_REPEATS)
            self.counts["evicted"] += 1
            self.backend.release()

    def drop(self, reason: str) -> None:
        """Free all graphs."""
        with self.lock:
            if self.entries:
                self.counts["dropped"] += len(self.entries)
                self.problem = f"dropped: {reason}"
                self.backend.release()
            self.entries.clear()
            self.calls.clear()
            self.structure = None
            self.repeats = REPEATS

    def _explain(self, reason: str) -> None:
        self.problem = f"not captured: {reason}"
        if not self.messages:
            _compat.get_logger().warning("yolo12_fastconv: no CUDA graph, calls run without: %s", reason)
        self.messages.add(reason[:200])
        while len(self.messages) > 8:
            self.messages.pop()

    def describe(self) -> str:
        """State in one line, for reports."""
        with self.lock:
            shapes = ", ".join(f"{'x'.join(map(str, key[0]))} {str(key[2])[6:]}" for key in self.entries)
            text = f"{len(self.entries)} of at most {MAX_GRAPHS} captured" + (
                f" ({shapes})" if shapes else ""
            )
            counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
            return "; ".join(filter(None, (text, counts, self.problem)))
