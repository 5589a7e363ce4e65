"""What ``torch.compile`` sees of a patched task model in inference: one op, `run_model`, for the whole network.

Uncompiled, a patched network writes concats in place, reads strided views and runs whole blocks as recorded programs or
CUDA graphs. A compiler that traces through it sees the convolutions one by one, plans memory and layouts between them
by its own lights, and cannot fuse anything into them: YOLO12n took 2.5 times as long as uncompiled. So there is nothing
to see: when the op runs, it calls the network as an uncompiled call would.

When: in evaluation mode without gradients, with one plain tensor, of a patched model with one of the heads in `_HEADS`
in which all blocks that can be patched are. Everything else is traced as ever, and exports, which shall hold standard
operators, too.

Right results:

- The op finds the live model by a name. So weights and whatever else change in place need nothing. The name is new in
  every process and for every copy: caches of compiled code never take one model for another.
- Sizes and dtypes of the outputs, symbolic ones too, are those of the stock forward of a copy without memory, run on
  fake tensors. Training mode, gradients, autocast, what a head reads of its own attributes and the kind of the first
  weight are guarded. If outputs come out otherwise all the same, the op raises.
- Outputs own their memory: what shares some, or has other strides than promised, is copied.

A compiler takes the op for a function of `x`: within one graph it may run it before or after a change of the weights.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from yolo12_fastconv import _aten, _compat, ops
from yolo12_fastconv._graph_state import Structure, ordinary_call
from yolo12_fastconv.blocks import FAST, STOCK
from yolo12_fastconv.registry import UNFUSED

_compat.require_ultralytics()

from ultralytics.nn.modules.head import OBB, Classify, Detect, Pose, Segment  # noqa: E402

__all__ = ["register", "trace"]

_HEADS = (Detect, Segment, Pose, OBB, Classify)
"""Heads, patched or not, whose outputs are known to be new tensors."""
_READ = ("training", "export", "format", "dynamic", "xyxy", "max_det", "agnostic_nms", "_end2end")
"""Attributes that decide what a head returns."""
_MADE = ("shape", "anchors", "strides")
"""Attributes that a detection head sets, as functions of the input's shape."""
_MAX_ANCHORS = 64
"""Shapes whose anchors are kept, 33 KB each for a picture of 640 by 640 in half precision."""


# ------------------------------------------------------------------------------------------------- what is traced


def trace(model: Any, x: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The network's outputs, for a compiler that traces a call of `model`; None if it shall trace the network itself.

    Dynamo guards what this function uses, and the answers of `_describe` not at all.
    """
    if (
        type(x) is not Tensor
        or model.training
        or torch.is_grad_enabled()
        or not all(value is None or value is False for value in (*args, *kwargs.values()))
    ):
        return None
    head, weight = model.model[-1], next(model.parameters())
    read = [getattr(head, name, None) for name in _READ]
    kind = "cuda" if x.is_cuda else x.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    description = _describe(id(model), x.dtype, autocast, weight.dtype, *read)
    if description is None:
        return None
    tensors = _op(x, description, autocast)
    return _build(description.split(" "), 1, tensors)[0]


def _build(nest: Sequence[str], at: int, tensors: Sequence[Tensor]) -> tuple[Any, int]:
    """The part of a nest that begins with word `at`, and where it ends."""
    word = nest[at]
    at += 1
    if word[0] == "d":
        items = {}
        for _ in range(int(word[1:])):
            key = nest[at]
            items[key], at = _build(nest, at + 1, tensors)
        return items, at
    if word[0] in "lt":
        parts = []
        for _ in range(int(word[1:])):
            part, at = _build(nest, at, tensors)
            parts.append(part)
        return (parts if word[0] == "l" else tuple(parts)), at
    return tensors[int(word)], at


# --------------------------------------------------------------------------------------------------- what is there


_Size = tuple[tuple[int, ...], torch.dtype]


class _Model:
    """A model that can be run by its name, and what its outputs are."""

    def __init__(self, model: nn.Module) -> None:
        self.name = secrets.token_hex(8)
        self.reference = weakref.ref(model, functools.partial(_forget, id(model), self.name))
        self.lock = threading.Lock()
        self.twin: Any = None
        """A stock copy without memory, as the model was when a compiler last traced it."""
        self.head: dict[str, Any] | None = None
        self.anchors: dict[Any, dict[str, Any]] = {}
        self.known: dict[Any, tuple[list[str], list[_Size]]] = {}

    def model(self) -> Any:
        """
        Raises:
            RuntimeError: it is gone.
        """
        model = self.reference()
        if model is None:
            raise RuntimeError("yolo12_fastconv: the model that was compiled does not exist any more")
        return model

    def describe(self, dtype: torch.dtype, autocast: torch.dtype | None) -> str | None:
        """Name and nest for the op, or None if the network cannot be one op. Runs it on a fake picture."""
        model = self.model()
        conv = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
        if conv is None or not _is_suitable(model) or not ordinary_call():
            return None
        side = max(64, 2 * int(max(model.stride)))
        try:
            with _disable_current_modes():
                with torch.inference_mode(False):
                    twin = _without_memory(model)
                with self.lock:
                    self.twin, self.known = twin, {}
                with FakeTensorMode():
                    picture = torch.empty(
                        2, conv.in_channels, side, side, dtype=dtype, device=conv.weight.device
                    )
                    words, _sizes = self.outputs(picture, autocast)
        except Exception:  # the compiler shall come upon it by itself, and say so in its own words
            return None
        return " ".join([self.name, *words])

    def outputs(self, x: Tensor, autocast: torch.dtype | None) -> tuple[list[str], list[_Size]]:
        """Nest, sizes and dtypes of the outputs for a fake `x`: those of the stock forward."""
        # A compiler asks six times. Symbolic sizes are computed each time: they belong to one of its runs.
        fixed = all(type(size) is int for size in x.shape)
        key = (x.shape, x.dtype, x.device, autocast) if fixed else None
        with self.lock, torch.no_grad():
            if key in self.known:
                return self.known[key]
            tensors: list[Tensor] = []
            words = _flatten(self._run_twin(x, autocast), tensors)
            result = words, [(tuple(t.shape), t.dtype) for t in tensors]
            if fixed:
                self.known[key] = result
            return result

    @contextlib.contextmanager
    def anchors_for(self, head: dict[str, Any], x: Tensor, autocast: torch.dtype | None) -> Iterator[None]:
        """Run a head, by its attributes, with the anchors that it made for an input like `x` before, or keep those that
        it makes now. A head keeps those of its last input; with ``mode="reduce-overhead"`` they would be made in
        the memory of a CUDA graph, where nothing may stay, or while one is captured, which is not possible."""
        if self.head is not head:
            self.head, self.anchors = head, {}
        key = (x.shape, x.dtype, x.device, autocast)
        kept = self.anchors.get(key)
        if kept is not None:
            head.update(kept)
        yield
        made = {name: head[name] for name in _MADE if name in head}
        if made and (kept is None or made["anchors"] is not kept["anchors"]):
            if len(self.anchors) >= _MAX_ANCHORS:
                self.anchors.clear()
            self.anchors[key] = _outside_pools(made)
            head.update(self.anchors[key])

    def _run_twin(self, x: Tensor, autocast: torch.dtype | None) -> Any:
        twin = self.twin
        for name in _MADE:  # for another fake
            vars(twin.model[-1]).pop(name, None)
        held = {
            name: x.new_empty_strided(t.shape, t.stride(), dtype=t.dtype)
            for name, t in (*twin.named_parameters(), *twin.named_buffers())
        }
        with _autocast(x, autocast):
            return torch.func.functional_call(twin, held, (x,))


_ids: dict[int, _Model] = {}
_names: dict[str, _Model] = {}


def register(model: nn.Module) -> None:
    """Let `model` be run by the op."""
    entry = _Model(model)
    _ids[id(model)] = _names[entry.name] = entry


def _forget(key: int, name: str, reference: Any, ids: Any = _ids, names: Any = _names) -> None:
    names.pop(name, None)  # arguments, since at the end of the process this module has no globals any more
    if key in ids and ids[key].name == name:
        del ids[key]


def _describe(key: int, dtype: torch.dtype, autocast: torch.dtype | None, *guarded: Any) -> str | None:
    """`_Model.describe` of the model with ``id`` `key`; None for one that was never registered.

    Dynamo asks again when an argument has changed, also one of those that are `guarded` for that alone.
    """
    entry = _ids.get(key)
    return None if entry is None else entry.describe(dtype, autocast)


# For Dynamo a constant: see `blocks.py`. That of `id` is guarded by identity.
_describe._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_suitable(model: Any) -> bool:
    """Whether the network shall be one op: most of it is ours, and its outputs are known to be new tensors."""
    modules = list(model.modules())
    kinds = [type(m) for m in modules]
    head = type(model.model[-1])
    ours, stock = (sum(kind in table for kind in kinds) for table in (STOCK, FAST))
    return ours > stock and UNFUSED.get(head, head) in _HEADS and not Structure(model).hooked()


def _without_memory(model: Any) -> Any:
    """A stock copy of `model` whose parameters and buffers have no memory."""
    from yolo12_fastconv.patching import unpatch_modules  # which imports this module

    memo: dict[int, Any] = {}
    for t in model.parameters():
        memo[id(t)] = nn.Parameter(
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), False
        )
    for t in model.buffers():
        memo[id(t)] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    twin = copy.deepcopy(model, memo)
    unpatch_modules(twin)
    head = twin.model[-1]
    if isinstance(getattr(head, "stride", None), Tensor):
        head.stride = head.stride.tolist()  # numbers that anchors are filled with
    return twin


# ----------------------------------------------------------------------------------------------------------- the op


def _flatten(value: Any, tensors: list[Tensor]) -> list[str]:
    """A nest of tensors in words, for `_build`; appends each tensor to `tensors` once.

    Raises:
        TypeError: there is something else in the nest.
    """
    if isinstance(value, Tensor):
        for index, tensor in enumerate(tensors):
            if tensor is value:
                return [str(index)]
        tensors.append(value)
        return [str(len(tensors) - 1)]
    kind = type(value)
    if kind is dict and all(type(key) is str and key and " " not in key for key in value):
        parts = [[key, *_flatten(part, tensors)] for key, part in value.items()]
    elif kind is list or kind is tuple:
        parts = [_flatten(part, tensors) for part in value]
    else:
        raise TypeError(f"the model returns a {kind.__name__}")
    return [f"{kind.__name__[0]}{len(value)}", *(word for part in parts for word in part)]


def _autocast(x: Tensor, dtype: torch.dtype | None) -> Any:
    """Autocast to `dtype`, or none, as where the compiled function was called: compiled code runs without."""
    kind = "cuda" if x.is_cuda else x.device.type
    if dtype is (torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None):
        return contextlib.nullcontext()  # entering takes 10 us of host time
    return torch.autocast(kind, dtype, enabled=dtype is not None)


def _outside_pools(values: dict[str, Any]) -> dict[str, Any]:
    """Copies of the tensors in ordinary memory. What gives a thread's allocations to the pool of a CUDA graph does so
    for that thread alone."""
    device = next((t.device for t in values.values() if isinstance(t, Tensor) and t.is_cuda), None)
    if device is not None and torch.cuda.is_current_stream_capturing():
        return values
    copies = dict(values)

    def copy_() -> None:
        for name, value in values.items():
            if isinstance(value, Tensor):
                copies[name] = value.detach().clone()
        if device is not None:
            torch.cuda.current_stream(device).synchronize()

    if device is not None:
        torch.cuda.current_stream(device).synchronize()
    thread = threading.Thread(target=copy_)
    thread.start()
    thread.join()
    return copies


def _format(model: nn.Module, x: Tensor) -> torch.memory_format:
    """Of the maps among the outputs: that of most networks' own."""
    if x.is_cuda:
        return torch.channels_last
    return _aten.output_format(x, next(model.parameters()))


def _run_model(x: Tensor, model: str, autocast: torch.dtype | None) -> list[Tensor]:
    entry = _names[model.split(" ", 1)[0]]
    network = entry.model()
    with torch.no_grad(), _autocast(x, autocast), entry.anchors_for(vars(network.model[-1]), x, autocast):
        outputs = type(network).forward(network, x)  # its own hooks are called around the op
    tensors: list[Tensor] = []
    words = _flatten(outputs, tensors)
    if words != model.split(" ")[1:]:
        raise RuntimeError(
            "yolo12_fastconv: the model returns other tensors than when it was compiled. Compile it again, after "
            "torch.compiler.reset()"
        )
    maps = _format(network, x)
    taken = {x.untyped_storage()._cdata}
    for i, t in enumerate(tensors):
        memory = t.untyped_storage()._cdata
        kept = t.is_contiguous(memory_format=maps) if t.dim() == 4 else t.is_contiguous()
        if memory in taken or not kept:
            tensors[i] = t.clone(memory_format=maps if t.dim() == 4 else torch.contiguous_format)
        taken.add(memory)
    return tensors


def _run_fake(x: Tensor, model: str, autocast: torch.dtype | None) -> list[Tensor]:
    entry = _names[model.split(" ", 1)[0]]
    maps = _format(entry.model(), x)
    _words, sizes = entry.outputs(x, autocast)
    return [
        torch.empty(
            size, dtype=dtype, device=x.device,
            memory_format=maps if len(size) == 4 else torch.contiguous_format,
        )
        for size, dtype in sizes
    ]  # fmt: skip


_lib = torch.library.Library(ops.NAMESPACE, "FRAGMENT")
_lib.define("run_model(Tensor x, str model, ScalarType? autocast) -> Tensor[]")
_lib.impl("run_model", _run_model, "CompositeExplicitAutograd")
torch.library.register_fake(f"{ops.NAMESPACE}::run_model", _run_fake, lib=_lib)
_op = torch.ops.yolo12_fastconv.run_model.default
