"""CUDA graphs: `patch_model(..., cuda_graph=True)` replays a task model's forward instead of launching its kernels.

At batch 1 a small YOLO12 keeps the GPU busy for a fraction of the time that the host needs to launch it. A task model
whose class has `GraphModel` mixed in counts its calls by signature and captures the `REPEATS`-th one of a kind.

What is captured: plain calls, ``model(x)`` with one strided CUDA tensor, in evaluation mode and without gradients; in
training mode with gradients, `training_graphs` has its own rules, and this text is about the former. Calls with
``augment``, ``embed``, ``profile`` or other arguments, tracing, export, calls under function or dispatch modes and
transforms, inside somebody else's capture, or with hooks on inner modules run as ever. What ``torch.compile`` makes of
a plain call ends in such a call (`whole_model.py`), what it traces itself has no graphs of ours.

Signature: shape, strides, dtype and device of the input, and everything global that steers kernels
(`_graph_state.flags`).

Right results:

- Kernels of a graph read the live weights: values changed in place need nothing.
- Whatever else could change the result (a tensor, module, attribute, flag or hook replaced or added) is compared with
  its state at capture (`_graph_state.Structure`) in every call, while the GPU runs the replay, so that the comparison
  costs no time where the GPU needs longer than the host. A replay that turns out stale is thrown away and the call
  runs eagerly. The graphs own the memory they read until then, so a stale replay reads old values and nothing else. Not
  seen: changes inside a list or dictionary that is an attribute, and classes and functions edited in place.
- The input is copied into the graph's own tensor, and outputs are copied out of it, or made after the replay by the
  last op (`_late`): the caller owns what it gets. A tensor that is returned in two places is one tensor again, and
  outputs that share memory share it again; one that is a slice of a larger tensor comes dense.
- Heads keep the anchors of the last shape as attributes. They are made by an eager call before the capture, outside the
  graph's memory, and a replay leaves them in the head as an eager call of that shape would.

Memory: at most `MAX_GRAPHS` graphs a model, the least recently used goes first. Graphs of one model share a memory
pool: its size is that of the largest, about, and not the sum. A pool serves `MAX_GRAPHS` captures and then a new one
begins, since a pool's memory is only given back as a whole. Moving the model (``to``, ``half``, ...) or ``train()``
frees all, and so does an eager call that runs out of memory, before it is tried again.

Threads and streams: calls of one model that could be captured, eager ones too, exclude one another on the host, and on
the GPU each waits for the one before, since they share a pool and the head's anchors. Models are independent. A capture
is ``thread_local``: other threads go on using the GPU meanwhile.

Graphs never travel: copies start without any, and pickles hold stock classes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from yolo12_fastconv import _compat, whole_model
from yolo12_fastconv._graph_capture import MAX_GRAPHS, CudaBackend, out_of_memory
from yolo12_fastconv._graph_outputs import Outputs, Uncapturable
from yolo12_fastconv._graph_state import Structure, flags, ordinary_call
from yolo12_fastconv.blocks import StockPickle
from yolo12_fastconv.training_graphs import TrainingGraphs

_compat.require_ultralytics()

from ultralytics.nn.tasks import BaseModel  # noqa: E402

__all__ = [
    *("MAX_GRAPHS", "REPEATS", "GraphModel"),
    *("describe", "disable", "enable", "enabled", "free", "why_not"),
]

REPEATS = 3
"""A signature is captured at its third call. A capture takes as long as about three eager calls."""
_MAX_SIGNATURES = 256
"""Signatures whose calls are counted, per model."""
_MAX_REPEATS = 96
_MAX_FAILURES = 3
"""Failed captures after which a model is not captured any more."""


# ------------------------------------------------------------------------------------------------------- task models


class TaskModel(StockPickle):
    """Mixin for Ultralytics' task models: shows a compiler the whole network as one op, in inference
    (`whole_model.py`). Copies are of its class, pickles of the stock class."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock class's ``forward``: predictions for a tensor, the loss for a dictionary."""
        if torch.compiler.is_compiling():
            outputs = whole_model.trace(self, x, args, kwargs)
            if outputs is not None:
                return outputs
        return super().forward(x, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self._stock, _stub_arguments(self._stock), _state(self)

    # `YOLO` asks its network for the attributes that it has not itself, and would be copied by the network's method.
    __deepcopy__: Any = None

    def __copy__(self) -> Any:
        twin = type(self).__new__(type(self))
        twin.__setstate__(_state(self))
        whole_model.register(twin)
        return twin


class GraphModel(TaskModel):
    """Mixin for Ultralytics' task models: replays the calls that repeat; see the module."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """As the stock class's ``forward``: predictions for a tensor, the loss for a dictionary."""
        if (
            torch.compiler.is_compiling()
            or type(x) is not Tensor
            or self.training is not torch.is_grad_enabled()
            or not all(value is None or value is False for value in (*args, *kwargs.values()))
            or not ordinary_call()
        ):
            return super().forward(x, *args, **kwargs)
        if self.training:
            return _graphs(self).training.call(self, super().forward, x)
        return _graphs(self).call(self, super().forward, x)

    def loss(self, *args: Any, **kwargs: Any) -> Any:
        """As the stock class's ``loss``. If memory runs out in it, the graph of the network is freed."""
        try:
            return super().loss(*args, **kwargs)  # type: ignore[misc]
        except RuntimeError as error:
            if out_of_memory(error):
                _drop(self, "out of memory", now=True)
            raise

    def train(self, mode: bool = True) -> Any:
        """As `torch.nn.Module.train`; the graphs of the other mode are freed."""
        if mode:
            _drop(self, "the model was set to training mode", training=False)
        elif self.training:
            _drop(self, "the model was set to evaluation mode", inference=False)
        return super().train(mode)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        # `to`, `half`, `cuda`, ...: found at the next call in any case, but the old weights' memory is free at once.
        _drop(self, "the model was moved or cast")
        return super()._apply(fn, *args, **kwargs)


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
def mixed_class(mixin: Any, stock: Any) -> Any:
    """The class that a task model of class `stock` becomes: `TaskModel` or `GraphModel` in front of it."""
    # The stock class's name, as messages and people know it.
    mixed = type(stock.__name__, (mixin, stock), {"_stock": stock, "__module__": __name__})
    copy._deepcopy_dispatch[mixed] = _deepcopy  # type: ignore[attr-defined]
    return mixed


def _deepcopy(model: Any, memo: dict[int, Any]) -> Any:
    """What the `copy` module calls for a task model in place of a ``__deepcopy__``."""
    kind: Any = type(model)
    twin = memo[id(model)] = kind.__new__(kind)
    twin.__setstate__(copy.deepcopy(_state(model), memo))
    whole_model.register(twin)
    return twin


def why_not(network: nn.Module) -> str | None:
    """Why `network` cannot have CUDA graphs, or None."""
    if enabled(network):
        return None
    if not isinstance(network, BaseModel):
        return f"{type(network).__name__} is not one of Ultralytics' task models"
    if "forward" in vars(network):
        return "it has a forward of its own (an instance attribute)"
    stock: Any = _stock_class(network)
    return _class_problem(stock)


def _stock_class(network: Any) -> Any:
    return network._stock if isinstance(network, TaskModel) else type(network)


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
        network.__class__ = mixed_class(GraphModel, _stock_class(network))
        whole_model.register(network)


def disable(network: nn.Module) -> None:
    """Let `network` use no CUDA graphs, and free those that it has. A task model becomes or stays a `TaskModel`, if it
    can be one."""
    if not isinstance(network, GraphModel) and why_not(network) is not None:
        return
    restore(network)
    stock: Any = type(network)
    network.__class__ = mixed_class(TaskModel, stock)
    whole_model.register(network)


def restore(network: nn.Module) -> None:
    """Give `network` its stock class back."""
    if isinstance(network, TaskModel):
        _drop(network, "CUDA graphs were switched off")
        vars(network).pop("_fc_graphs", None)
        network.__class__ = network._stock


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


def _drop(model: Any, reason: str, inference: bool = True, training: bool = True, now: bool = False) -> None:
    graphs = vars(model).get("_fc_graphs")
    if graphs is not None and graphs.owner() is model:
        if inference:
            graphs.drop(reason)
        if training:
            graphs.training.drop(reason, now)


def free(network: nn.Module) -> None:
    """Free the graphs of a model that is not going to be called for a while, or whose memory is needed; later calls may
    capture others. A forward that waits for its backward is run again then."""
    _drop(network, "they were freed", now=True)


def make_room(network: nn.Module) -> None:
    """Free the training graph of `network` if the device has less room beside it than it takes itself."""
    graphs = vars(network).get("_fc_graphs")
    if graphs is not None and graphs.owner() is network:
        graphs.training.make_room()


_create_lock = threading.Lock()


# ------------------------------------------------------------------------------------------------------------- graphs

BACKEND: Callable[[], Any] = CudaBackend


class _Entry:
    """A graph and how to use it."""

    def __init__(self, recording: Any, outputs: Outputs, head: list[tuple[dict[str, Any], str, Any]]) -> None:
        self.recording, self.outputs, self.head = recording, outputs, head
        self.replays = 0


class Graphs:
    """The graphs of one model, their bound, and what they depend on."""

    def __init__(self, model: nn.Module) -> None:
        self.owner = weakref.ref(model)
        self.lock = threading.RLock()
        self.backend = BACKEND()
        self.training = TrainingGraphs(model, BACKEND(), REPEATS)
        self.entries: OrderedDict[Any, _Entry] = OrderedDict()
        self.structure: Structure | None = None
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
        key = (x.shape, x.stride(), x.dtype, x.device, *flags())
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
                result = self._eager(function, x)
                if self._due(key):
                    self._capture(key, model, function, x)
                return result
            finally:
                backend.end()

    def _eager(self, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        try:
            return function(x)
        except RuntimeError as error:
            if not self.entries or not out_of_memory(error):
                raise
        # What the graphs hold is the model's own: without them there is as much room as without `cuda_graph=True`.
        self.backend.finish()
        self.drop("out of memory")
        return function(x)

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
            self.structure = Structure(model)
        structure = self.structure
        if structure.hooked():
            self.structure = None
            self._explain("inner modules have hooks")
            return
        head = structure.head_state()
        recording = None
        try:
            if torch._debug_has_internal_overlap(x) == 1:
                raise Uncapturable("elements of the input share memory")
            recording = self.backend.capture(function, x)
            if not structure.unchanged():
                raise Uncapturable("a call changes attributes of the model")
            foreign = {memory.data_ptr() for memory in structure.memory}
            foreign |= {v.untyped_storage().data_ptr() for _, _, v in head if isinstance(v, Tensor)}
            foreign.add(recording.x.untyped_storage().data_ptr())
            outputs = Outputs(recording.outputs, x.device, foreign, recording.late)
        except Exception as error:
            self.failures += 1
            self.calls[key] = float("-inf")
            if not self.entries:
                self.structure = None  # it keeps the memory of weights
            what = str(error) if isinstance(error, Uncapturable) else f"{type(error).__name__}: {error}"
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
            return "; ".join(filter(None, (text, counts, self.problem, self.training.describe())))
