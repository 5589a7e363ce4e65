"""CUDA graphs in training: forward and backward of a task model's network, replayed (`graphs` has those of inference).

A training step of a small YOLO12 has some 2000 launches, and the host needs several times as long for them as the GPU.
A model in training mode whose ``model(x)`` repeats, by itself or inside the ``model(batch)`` that returns the loss, has
its network captured: the forward at the third call in a row of one signature, the backward when the first gradients
come back to it. The loss, the optimizer and everything else stay as they are.

Joined to autograd: a replayed forward is one node of the autograd graph, whose inputs are the parameters. Outputs are
copies of the graph's, and so are the parameters' gradients: both are the caller's own, whatever is done to them.
Gradients are accumulated, scaled, clipped and hooked as ever.

Right results:

- A call counts once: a capture runs nothing, and the call that is captured is replayed. Batch norm's buffers move in
  the replay as in an eager call.
- Everything in `_graph_state` is compared, and also ``requires_grad`` of every parameter, while the replay runs: the
  GPU need not wait for it (0.8 ms of YOLO12m). A replay saves the buffers first; if the model was changed, they are put
  back and the call is eager.
- A forward whose node still waits for its backward owns the graph's activations: until then further calls are eager.
- What the captured backward cannot do runs the forward again, eagerly, from the call's input, without moving buffers,
  and then its backward: ``create_graph=True``, a second backward of one node, gradients of more outputs than at the
  capture, other global flags. The graph is then given up. Gradients of fewer outputs are the captured backward's with
  zeros for the others; parameters that reach none of the given outputs get none.
- As in autograd, a parameter changed in place between forward and backward is an error, and so is a changed input, or
  a second backward without ``retain_graph``.
- During a capture the parameters are stood in for by aliases, so that neither their hooks nor their gradient
  accumulators take part. A network whose autograd graph reaches other leaves, or has autograd functions of others than
  PyTorch and this package, is not captured.

Besides, a graph needs less time on the GPU: weights are cast at once (`_weight_casts`), and weight gradients are
parallel branches (`_side_stream`).

Eager in any case: inputs that need gradients, saved-tensor hooks (activation checkpointing, offloading), anomaly mode,
SyncBatchNorm, hooks on inner modules, several processes that train together (DistributedDataParallel overlaps its
communication with the backward, which one node cannot), and what `graphs` excludes.

Memory: one graph a model. It holds the activations of a step, also between steps. A call of another size, such as an
epoch's last batch, is eager; if the device has no room for it beside the graph, the graph is freed first. It is also
freed when memory runs out anywhere in the model or its loss, when the model is moved, and by ``eval()``, but not by
``train()`` of a model in training mode. Trainers free it when they clear memory to try again with a smaller batch, and
before validation, if there is less room beside it than it takes.

Threads: captures wait until no call of the model runs. Do not call parts of a model in one thread while another trains
it.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn.parameter import Parameter

from yolo12_fastconv import _compat, _weight_casts
from yolo12_fastconv._graph_capture import out_of_memory, unfilled_memory
from yolo12_fastconv._graph_outputs import Nest, Uncapturable, clone
from yolo12_fastconv._graph_state import Structure, flags

__all__ = ["TrainingGraphs"]

_MAX_REPEATS = 96
_MAX_FAILURES = 3
"""Failed captures after which a model is not captured any more."""
_PAID = 12
"""Replays that make up for a capture."""
_MARGIN = 1.1
"""Room that an eager call must have, over the memory that the graph needs for an input of its size."""

Gradients = tuple[Tensor | None, ...]


class _Key(NamedTuple):
    """What a call must have in common with the captured one, besides the model's state."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    autocast: bool
    autocast_dtype: torch.dtype
    others: tuple[Any, ...]
    """The rest of `flags`."""

    @classmethod
    def of(cls, x: Tensor) -> _Key:
        autocast, autocast_dtype, *others = flags()
        return cls(x.shape, x.stride(), x.dtype, x.device, autocast, autocast_dtype, tuple(others))


class _Call:
    """One replayed forward, until its node is gone."""

    def __init__(self, graphs: TrainingGraphs, entry: _Entry, model: nn.Module, function: Any) -> None:
        self.graphs, self.entry, self.model, self.function = graphs, entry, model, function
        self.versions = entry.versions()
        self.consumed = False


class _Network(torch.autograd.Function):
    """The network as one node: ``(call, x, *parameters) -> outputs``."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        with unfilled_memory():
            outputs = clone(call.entry.outputs)
        ctx.mark_non_differentiable(
            *(y for y, reached in zip(outputs, call.entry.reach, strict=True) if not reached)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (x,) = ctx.saved_tensors  # raises if it was changed, and at a second backward without retain_graph
        return (None, None, *ctx.call.graphs.backward(ctx.call, x, grads))


class _State(Structure):
    """`Structure`, and which parameters are trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.trained = self._trained()

    def _trained(self) -> list[bool]:
        return [tensor.requires_grad for tensor in self.tensors]

    def unchanged(self) -> bool:
        return super().unchanged() and self._trained() == self.trained

    def parameters(self) -> list[Parameter]:
        """The trained parameters, each once."""
        held = [value for table in self.contents for value in table.values() if isinstance(value, Parameter)]
        return [p for p in dict.fromkeys(held) if p.requires_grad]

    def buffers(self) -> list[Tensor]:
        held = [
            value
            for table in self.contents
            for value in table.values()
            if isinstance(value, Tensor) and not isinstance(value, Parameter)
        ]
        return list(dict.fromkeys(held))

    @contextlib.contextmanager
    def replaced(self, substitutes: dict[Tensor, Tensor]) -> Iterator[None]:
        """Put other parameters and buffers into the modules, for a while. What is replaced meanwhile stays."""
        places = [
            (table, name, value)
            for table, content in zip(self.tables, self.contents, strict=True)
            for name, value in content.items()
            if isinstance(value, Tensor) and value in substitutes
        ]
        try:
            for table, name, value in places:
                table[name] = substitutes[value]
            yield
        finally:
            for table, name, value in places:
                if table.get(name) is substitutes[value]:
                    table[name] = value


class _Saved:
    """The buffers of a model, which a replay moves, and what they were before it."""

    def __init__(self, buffers: list[Tensor]) -> None:
        self.buffers, self.addresses = buffers, list(map(Tensor.data_ptr, buffers))
        grouped: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            grouped.setdefault(buffer.dtype, []).append(buffer)
        # Tensors of one dtype are copied in one launch for a hundred of them.
        self.groups = [(group, [torch.empty_like(buffer) for buffer in group]) for group in grouped.values()]

    def save(self) -> None:
        """What a graph does first."""
        with torch.no_grad():
            for group, copies in self.groups:
                torch._foreach_copy_(copies, group)

    def restore(self) -> None:
        with torch.no_grad():
            for group, copies in self.groups:
                torch._foreach_copy_(group, copies)

    def in_place(self) -> bool:
        """Whether the graph would write into memory that is still the buffers'."""
        return list(map(Tensor.data_ptr, self.buffers)) == self.addresses


class _Backward:
    """A captured backward: for gradients of which outputs, and under which flags."""

    def __init__(self, recording: Any, given: tuple[int, ...]) -> None:
        self.recording, self.given, self.flags = recording, given, flags()
        self.found = [grad for grad in recording.found if grad is not None]

    def serves(self, given: tuple[int, ...]) -> bool:
        return set(given) <= set(self.given)

    def __call__(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        for static, index in zip(self.recording.grads, self.given, strict=True):
            grad = grads[index]
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
        self.recording.replay()
        # A product with one is an exact copy, and one call makes all: 350 clones take as many launches.
        with unfilled_memory():
            copies = iter(torch._foreach_mul(self.found, 1) if self.found else ())
        return [None if grad is None else next(copies) for grad in self.recording.found]


class _Entry:
    """A captured network."""

    def __init__(
        self, key: _Key, state: _State, saved: _Saved, recording: Any, aliases: dict[Tensor, Tensor]
    ) -> None:
        """Takes the outputs out of `recording`.

        Raises:
            Uncapturable: the outputs, or what they depend on, cannot be replayed.
        """
        self.key, self.state, self.saved, self.recording = key, state, saved, recording
        foreign = {memory.data_ptr() for memory in state.memory}
        foreign.add(recording.x.untyped_storage().data_ptr())
        nest = Nest(recording.outputs, recording.x.device, foreign)
        recording.outputs = None
        self.build = nest.build
        self.live: list[Tensor] | None = nest.tensors
        """The outputs with their autograd graph, until the backward is captured."""
        self.outputs = [tensor.detach() for tensor in nest.tensors]
        leaves = [_leaves(tensor) for tensor in nest.tensors]
        sources = {alias: parameter for parameter, alias in aliases.items()}
        reached = dict.fromkeys(leaf for found in leaves for leaf in found)
        if not reached:
            raise Uncapturable("no output needs a gradient")
        if not all(leaf in sources for leaf in reached):
            raise Uncapturable(
                "outputs depend on a tensor with requires_grad that is no parameter of the model"
            )
        self.aliases = list(reached)
        self.parameters = [sources[leaf] for leaf in reached]
        places = {leaf: place for place, leaf in enumerate(reached)}
        self.reach = [frozenset(places[leaf] for leaf in found) for found in leaves]
        """Of each output, which of `parameters` it depends on."""
        self.backward: _Backward | None = None
        self.released = False
        self.last: Callable[[], _Call | None] = lambda: None
        self.replays = 0

    def versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def release(self) -> None:
        """Let go of the graph's memory: nodes of replayed calls may live on."""
        self.recording = self.backward = self.live = None
        self.outputs, self.aliases = [], []
        self.released = True

    def pending(self) -> bool:
        """Whether a forward waits for its backward."""
        call = self.last()
        return call is not None and not call.consumed


def _leaves(output: Tensor) -> dict[Tensor, None]:
    """The leaves that `output` depends on, in a fixed order.

    Raises:
        Uncapturable: there is an autograd function on the way that might do anything.
    """
    found: dict[Tensor, None] = {}
    if output.grad_fn is None:
        return found
    seen, waiting = {output.grad_fn}, [output.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if isinstance(node, BackwardCFunction):
            function: Any = type(node)._forward_cls  # type: ignore[attr-defined]
            if not function.__module__.startswith(f"{__package__}."):
                raise Uncapturable(f"the model uses the autograd function {function.__name__}")
        elif hasattr(node, "variable"):
            found[node.variable] = None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


class TrainingGraphs:
    """The graph of one model in training mode, and what it depends on."""

    def __init__(self, model: nn.Module, backend: Any, repeats: int) -> None:
        self.lock = threading.RLock()
        self.backend, self.first_repeats = backend, repeats
        self.entry: _Entry | None = None
        self.repeats = repeats
        self.last: _Key | None = None
        """Signature of the last call."""
        self.streak = 0
        """Calls in a row that had it."""
        self.running = 0
        """Eager calls that have not returned."""
        self.refused: set[_Key] = set()
        self.failures = 0
        self.counts: Counter[str] = Counter()
        self.explained = False
        self.problem = ""

    def call(self, model: nn.Module, function: Callable[[Tensor], Any], x: Tensor) -> Any:
        """``function(x)``, replayed if it was captured, captured if it has been called often enough in a row."""
        if not self.backend.serves(x) or x.requires_grad or _watched():
            return function(x)
        key = _Key.of(x)
        with self.backend.guard(x):
            with self.lock:
                while (entry := self._entry_for(key, model, function, x)) is not None:
                    outputs = self._replay(entry, model, function, x)
                    if outputs is not None:
                        return entry.build(outputs)
                    self.drop("the model was changed")
                self.counts["eager calls"] += 1
                self.running += 1
            try:
                with self._freed_without_memory():
                    return function(x)
            finally:
                with self.lock:
                    self.running -= 1

    def _entry_for(
        self, key: _Key, model: nn.Module, function: Callable[[Tensor], Any], x: Tensor
    ) -> _Entry | None:
        """The graph for this call, or None if it has to be eager."""
        entry = self.entry
        if entry is not None and entry.key == key:
            if entry.pending():
                self.counts["calls before the last one's backward"] += 1
                return None
            if entry.saved.in_place():
                self.last, self.streak = key, 0
                return entry
            self.drop("the model was changed")
        self.streak = self.streak + 1 if key == self.last else 1
        self.last = key
        if (
            self.streak < self.repeats
            or self.failures >= _MAX_FAILURES
            or key in self.refused
            or self.running
        ):
            self._make_room(x)
            return None
        if self.entry is not None:
            # Sizes that take turns: wait longer before the next capture, unless this one has paid.
            paid = self.entry.replays >= _PAID
            self.repeats = self.first_repeats if paid else min(2 * self.repeats, _MAX_REPEATS)
            self._free("another input size came repeatedly")
        return self._capture(key, model, function, x)

    def _make_room(self, x: Tensor) -> None:
        entry = self.entry
        if entry is not None:
            needed = self.backend.size(entry.recording) * x.numel() / entry.recording.x.numel()
            if self.backend.room(entry.recording) < _MARGIN * needed:
                self._free("no room for another input size beside it")

    def _capture(
        self, key: _Key, model: nn.Module, function: Callable[[Tensor], Any], x: Tensor
    ) -> _Entry | None:
        state: _State | None = None
        try:
            state = _State(model)
            _check(state, model, x)
            saved = _Saved(state.buffers())
            # `data`, other than `detach`, has a version of its own: the optimizer's steps are no change of the alias.
            aliases: dict[Tensor, Tensor] = {p: Parameter(p.data) for p in state.parameters()}
            with (
                self._in_turn(x),
                state.replaced(aliases),
                _weight_casts.at_once(aliases.values()),
                torch.autograd.graph.disable_saved_tensors_hooks("the model uses saved-tensor hooks"),
            ):
                recording = self.backend.capture_forward(function, x, saved.save)
            if not state.unchanged():
                raise Uncapturable("a call changes attributes of the model")
            self.entry = _Entry(key, state, saved, recording, aliases)
        except Exception as error:
            if state is not None:
                state.restore()  # tensors that the capture has left as attributes have never been computed
            self._failed(key, error)
            return None
        self.counts["captures"] += 1
        self.problem = ""
        return self.entry

    def _failed(self, key: _Key, error: Exception) -> None:
        self.failures += 1
        self.refused.add(key)
        what = str(error) if isinstance(error, Uncapturable) else f"{type(error).__name__}: {error}"
        reason = what.splitlines()[0] if what else ""
        self.problem = f"not captured: {reason}"
        if not self.explained:
            self.explained = True
            _compat.get_logger().warning("yolo12_fastconv: no CUDA graph, training runs without: %s", reason)

    @contextlib.contextmanager
    def _freed_without_memory(self) -> Iterator[None]:
        """Frees the graph where memory runs out inside: around `_in_turn`, whose end marks a replay that may run."""
        try:
            yield
        except RuntimeError as error:
            if out_of_memory(error):
                self.drop("out of memory", now=True)
            raise

    @contextlib.contextmanager
    def _in_turn(self, x: Tensor) -> Iterator[None]:
        """What uses the graph's memory: behind what used it before, on whatever stream."""
        self.backend.begin(x)
        try:
            yield
        finally:
            self.backend.end()

    def _replay(
        self, entry: _Entry, model: nn.Module, function: Callable[[Tensor], Any], x: Tensor
    ) -> list[Tensor] | None:
        """The outputs of a replayed forward, joined to autograd. None if the model is another than at the capture: then
        its buffers are as before."""
        call = _Call(self, entry, model, function)
        with self._freed_without_memory(), self._in_turn(x):
            entry.recording.replay(x)
            if not entry.state.unchanged():
                entry.saved.restore()
                return None
            outputs = _Network.apply(call, x, *entry.parameters)
        entry.last = weakref.ref(call)
        entry.replays += 1
        self.counts["replays"] += 1
        return list(outputs)

    def backward(self, call: _Call, x: Tensor, grads: Gradients) -> Sequence[Tensor | None]:
        """Gradients of the call's parameters, from those of its outputs."""
        entry = call.entry
        given = tuple(index for index, grad in enumerate(grads) if grad is not None)
        if not given:
            return [None] * len(entry.parameters)
        if entry.versions() != call.versions:
            raise RuntimeError(
                "yolo12_fastconv: a parameter was changed in place between a forward and its backward, which needs the "
                "values of before. Call backward() before the optimizer's step"
            )
        with self.backend.guard(x):
            with self.lock:
                reason = self._why_again(call, given)
                with self._freed_without_memory(), self._in_turn(x):
                    if reason is None and entry.backward is None:
                        reason = self._capture_backward(entry, grads, given)
                    call.consumed = True
                    if reason is None:
                        assert entry.backward is not None
                        found = entry.backward(grads)
                        if len(given) == len(entry.backward.given):
                            return found
                        reached = frozenset().union(*(entry.reach[index] for index in given))
                        return [grad if place in reached else None for place, grad in enumerate(found)]
                if self.entry is entry:
                    self.repeats = min(2 * self.repeats, _MAX_REPEATS)
                    self._free(reason)
                if not entry.pending():
                    entry.release()  # its memory is needed
                self.counts["eager backwards"] += 1
            return _again(call, x, grads, given)

    def _why_again(self, call: _Call, given: tuple[int, ...]) -> str | None:
        """Why the captured backward cannot serve, or None."""
        backward = call.entry.backward
        if torch.is_grad_enabled():
            return "a backward with create_graph=True"
        if call.consumed:
            return "a second backward of one forward"
        if call.entry.released:
            return "the graph was freed before the backward"
        if backward is not None and not backward.serves(given):
            return "the loss depends on other outputs than at the capture"
        if backward is not None and backward.flags != flags():
            return "global flags were changed"
        return None

    def _capture_backward(self, entry: _Entry, grads: Gradients, given: tuple[int, ...]) -> str | None:
        """Capture; on failure the reason."""
        assert entry.live is not None
        try:
            outputs = [entry.live[index] for index in given]
            wanted = [grad for grad in grads if grad is not None]
            recording = self.backend.capture_backward(entry.recording, outputs, entry.aliases, wanted)
            entry.backward = _Backward(recording, given)
        except Exception as error:
            self._failed(entry.key, error)
            return self.problem
        finally:
            entry.live = None
        return None

    def drop(self, reason: str, now: bool = False) -> None:
        """Free the graph, and count anew. `now`: also if a forward waits for its backward, which then runs it again."""
        with self.lock:
            if self.entry is not None:
                self._free(reason, now)
            self.streak = 0
            self.repeats = self.first_repeats

    def make_room(self) -> None:
        """Free the graph if the device has less room beside it than it takes itself."""
        with self.lock:
            entry = self.entry
            if entry is not None:
                with self.backend.guard(entry.recording.x):
                    if self.backend.room(entry.recording) < self.backend.size(entry.recording):
                        self._free("no room for others beside it")

    def _free(self, reason: str, now: bool = False) -> None:
        self.counts["dropped"] += 1
        if reason != self.problem:
            self.problem = f"dropped: {reason}"
        self.streak = 0
        # Its memory is the side stream's, which has to wait for the last replay.
        self.backend.release()
        entry, self.entry = self.entry, None
        if entry is not None and (now or not entry.pending()):
            entry.release()

    def __del__(self) -> None:
        if getattr(self, "entry", None) is not None:
            with contextlib.suppress(Exception):
                self.backend.release()

    def describe(self) -> str:
        """State in one line, for reports; empty if the model was never trained."""
        with self.lock:
            if not self.counts:
                return ""
            text = "none captured"
            if self.entry is not None:
                x = self.entry.recording.x
                text = f"{'x'.join(map(str, x.shape))} {str(x.dtype)[6:]} captured"
                size = self.backend.size(self.entry.recording)
                text += f" ({size / 2**30:.2f} GiB)" if size else ""
            counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
            return "in training: " + ", ".join(filter(None, (text, counts, self.problem)))


def _watched() -> bool:
    """Whether somebody looks at the autograd graph while it is made."""
    return torch.is_anomaly_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _check(state: _State, model: nn.Module, x: Tensor) -> None:
    """Raise Uncapturable if it is known that the network cannot be captured."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise Uncapturable("several processes train together")
    if state.hooked():
        raise Uncapturable("inner modules have hooks")
    if torch._debug_has_internal_overlap(x) == 1:
        raise Uncapturable("elements of the input share memory")
    for module in model.modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise Uncapturable("SyncBatchNorm communicates")
    parameters = state.parameters()
    if not parameters:
        raise Uncapturable("no parameter needs a gradient")
    if any(type(parameter) is not Parameter for parameter in parameters):
        raise Uncapturable("a parameter is of another class than torch.nn.Parameter")
    if any(tensor.device != x.device for tensor in (*model.parameters(), *model.buffers())):
        raise Uncapturable("a parameter or buffer is on another device than the input")


def _again(call: _Call, x: Tensor, grads: Gradients, given: tuple[int, ...]) -> Sequence[Tensor | None]:
    """The call's gradients by an eager forward, which moves no buffer, and its backward."""
    entry = call.entry
    state = entry.state
    if not state.unchanged():
        raise RuntimeError(
            "yolo12_fastconv: this backward needs the forward once more (create_graph=True, a second backward of one "
            "forward, or gradients of other outputs than before), but the model was changed since. Call backward() "
            "before changing the model, or patch it without cuda_graph=True"
        )
    with (
        torch.enable_grad(),
        torch.autocast(
            x.device.type,
            entry.key.autocast_dtype,
            enabled=entry.key.autocast and x.is_cuda,
            cache_enabled=False,
        ),
        state.replaced({buffer: buffer.clone() for buffer in state.buffers()}),
    ):
        outputs = Nest(call.function(x), x.device, set()).tensors
    return torch.autograd.grad(
        [outputs[index] for index in given],
        entry.parameters,
        [grads[index] for index in given],
        create_graph=torch.is_grad_enabled(),
        allow_unused=True,
    )
