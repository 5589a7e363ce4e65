"""Concats between the layers of a model, in place, in training.

A layer whose output a `FastConcat` further on reads writes it to its place in the concat's buffer: the first of these
layers allocates it, the concat then copies those parts alone that lie elsewhere. The parts share their memory with the
concat, without autograd's knowledge; to it they are tensors of their own, as in the blocks (`csp.py`). That saves the
copies, the memory of the parts, and their recomputation (`_recompute.py`): what a concat keeps is kept.

How large the concat is, the layers know from its last call in training that copied all. Where sizes, types or layers
have changed since, the concat copies as ever: a part in a place of its own is an ordinary tensor.

Who writes to a part in place would write to the concat. So all that reads a part or the concat has to be a layer that
begins with a convolution of ours, an upsampling or a concat, that nobody watches: looked at anew at every call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from yolo12_fastconv import _slices, ops
from yolo12_fastconv.blocks import FAST, SEAT, STOCK, exporting
from yolo12_fastconv.fused_block import child, is_at, is_watched

from ultralytics.nn.modules.block import A2C2f, C2f, C3k2  # isort: skip  (blocks has checked that)

LINK = "_fc_link"
"""Attribute of a concat layer: its `Link`."""
_ROOM = "_fc_part_of"


class Room:
    """The buffer of a concat that is being filled."""

    __slots__ = ("__weakref__", "buffer", "taken", "thread", "widths")

    def __init__(self, buffer: Tensor, widths: tuple[int, ...]) -> None:
        self.buffer: Tensor | None = buffer
        """None once the concat has it: of its output the parts must know nothing, whose autograd graph they are in."""
        self.widths = widths
        self.taken: set[int] = set()
        self.thread = threading.get_ident()


class _Form(NamedTuple):
    """What a concat was like."""

    widths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    format: torch.memory_format


class Link:
    """What a concat layer and the layers it reads share. A copy of a layer has the original's, which does not believe
    it."""

    __slots__ = ("concat", "form", "layers", "room", "sources")

    def __init__(self, layers: nn.Sequential, concat: int, sources: tuple[int, ...]) -> None:
        self.layers = weakref.ref(layers)
        self.concat, self.sources = concat, sources
        self.form: _Form | None = None
        self.room: weakref.ref[Room] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        return self

    def _believed(self, place: int, layer: nn.Module) -> bool:
        """Whether `layer` still stands at `place`, and all is as this module's docstring says."""
        sequence = self.layers()
        if sequence is None or torch.compiler.is_compiling() or is_watched(sequence) or is_watched(layer):
            return False
        layers = list(sequence._modules.values())
        if max(place, self.concat) >= len(layers) or layers[place] is not layer:
            return False
        concat: Any = layers[self.concat]
        if concat.__dict__.get(LINK) is not self or sources_of(layers, self.concat) != self.sources:
            return False
        return all(_only_reads(reader) for reader in readers_of(layers, place))

    def fill(self, index: int, layer: Any, x: Tensor) -> Tensor:
        """``layer.run(x)``, the concat's part `index`, in its place if there is one."""
        form = self.form
        if (
            form is None
            or not layer.training
            or type(x) is not Tensor
            or x.dim() != 4
            or exporting()
            or not self._believed(self.sources[index], layer)
        ):
            return layer.run(x)
        room = self._room(index, form, (x.shape[0], sum(form.widths), *layer.plane(x)))
        place = room.buffer.narrow(1, sum(form.widths[:index]), form.widths[index])  # type: ignore[union-attr]
        y = layer.run(x, out=place)
        if is_at(place, y):
            setattr(y, _ROOM, room)
            _slices.open_mail(y)
        return y

    def _room(self, index: int, form: _Form, size: tuple[int, ...]) -> Room:
        room = None if self.room is None else self.room()
        if (
            room is None
            or room.buffer is None
            or index in room.taken
            or room.thread != threading.get_ident()
            or room.widths != form.widths
            or (*room.buffer.shape,) != size
            or room.buffer.dtype is not form.dtype
            or room.buffer.device != form.device
        ):
            buffer = torch.empty(size, dtype=form.dtype, device=form.device, memory_format=form.format)
            room = Room(buffer, form.widths)
            self.room = weakref.ref(room)
        room.taken.add(index)
        return room

    def join(self, layer: nn.Module, parts: Sequence[Tensor]) -> Tensor | None:
        """The concatenation of `parts` in the buffer where some of them lie; None if there is none."""
        room: Room | None = next((t.__dict__[_ROOM] for t in parts if _ROOM in t.__dict__), None)
        if room is None or room.buffer is None:
            return None
        buffer, room.buffer = room.buffer, None  # another concat of these parts gets a tensor of its own
        n, _c, h, w = buffer.shape
        fits = len(parts) == len(room.widths) and all(
            t.shape == (n, width, h, w) and t.dtype is buffer.dtype and t.device == buffer.device
            for t, width in zip(parts, room.widths, strict=True)
        )
        if not fits or not self._believed(self.concat, layer):
            return None
        for part, place in zip(parts, buffer.split(room.widths, 1), strict=True):
            if not is_at(place, part):
                with torch.no_grad():
                    ops.concat_channels_out([part], None, place)
        return ops.join_channels(buffer, parts)

    def remember(self, parts: Sequence[Tensor], y: Tensor) -> None:
        """`y` is the concatenation of `parts`, by a copy of all."""
        if any(t.dtype is not y.dtype for t in parts):
            self.form = None
            return
        dense = torch.channels_last if y.is_cuda or not y.is_contiguous() else torch.contiguous_format
        self.form = _Form(tuple(t.shape[1] for t in parts), y.dtype, y.device, dense)


class Seat(NamedTuple):
    """Which part of which concat a layer makes."""

    link: Link
    part: int

    def fill(self, layer: Any, x: Tensor) -> Tensor:
        """As `Link.fill`."""
        return self.link.fill(self.part, layer, x)


def link(layers: nn.Sequential, is_concat: Any, is_part: Any) -> None:
    """Tell the layers of a task model's `model` which concats they are parts of.

    Args:
        layers: each layer `i` reads the layers `f`.
        is_concat, is_part: say of a layer whether it is such a concat, and whether it can write to a place.
    """
    modules: list[Any] = list(layers._modules.values())
    for place, concat in enumerate(modules):
        sources = sources_of(modules, place) if is_concat(concat) else None
        if not sources or min(sources) < 0:
            continue
        shared = concat.__dict__.get(LINK)
        # Where nothing has changed it stays the same object: CUDA graphs of the model compare it.
        if (
            shared is None
            or shared.layers() is not layers
            or (shared.concat, shared.sources) != (place, sources)
        ):
            shared = concat.__dict__[LINK] = Link(layers, place, sources)
        for index, source in enumerate(sources):
            if is_part(modules[source]):
                modules[source].__dict__[SEAT] = Seat(shared, index)


def sources_of(layers: Sequence[Any], place: int) -> tuple[int, ...] | None:
    """Which layers the one at `place` reads, -1 being the model's input; None if that is not known."""
    given = getattr(layers[place], "f", None)
    sources = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(f, int) and -1 <= f < place for f in sources):
        return None
    return tuple(place - 1 if f == -1 else f for f in sources)


def readers_of(layers: Sequence[Any], place: int) -> Iterator[Any]:
    """The layers that read the one at `place`, and None for one that might."""
    for i in range(place + 1, len(layers)):
        sources = sources_of(layers, i)
        if sources is None:
            yield None
        elif place in sources:
            yield layers[i]


def _only_reads(layer: Any) -> bool:
    """Whether `layer` reads its input and lets nobody else see it."""
    if layer is None or is_watched(layer):
        return False
    return getattr(type(layer), "only_reads", False) or first_convolution(layer) is not None


def first_convolution(layer: Any) -> Any:
    """The plain convolution that is all that `layer` does with its input; None if there is none."""
    if is_watched(layer):
        return None
    if isinstance(layer, A2C2f | C2f | C3k2):
        stock = getattr(type(layer), "_stock", type(layer))
        if stock not in (A2C2f, C2f, C3k2) or getattr(layer, "gamma", None) is not None:
            return None
        layer = child(layer, "cv1")
    if type(layer) not in FAST and type(layer) not in STOCK:
        return None
    conv = child(layer, "conv")
    plain = type(conv) is nn.Conv2d and not is_watched(conv) and not is_watched(layer)
    return conv if plain and conv.padding_mode == "zeros" else None
