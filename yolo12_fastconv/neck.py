"""Fast classes of the layers between the blocks: `nn.Upsample` and `Concat`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from yolo12_fastconv import _config, _places, blocks, ops
from yolo12_fastconv.blocks import FallbackError, FastConv
from yolo12_fastconv.fused_block import FusedBlock, is_watched

from ultralytics.nn.modules.conv import Concat  # isort: skip  (blocks has checked that)

__all__ = ["FastConcat", "FastUpsample", "link_layers"]

_HALF = (torch.float16, torch.bfloat16)


class _MapLayer(FusedBlock):
    """A layer that computes as one op where its inputs allow, and else as stock."""

    only_reads = True
    """Whether it lets nobody else see its input."""

    def forward(self, x: Any) -> Any:
        """As the stock class."""
        return self.run_or_stock(x)

    def run(self, x: Any, residual: Tensor | None = None, out: Tensor | None = None) -> Any:
        reason = self.input_problem(x)
        if "_fc_strict" in self.__dict__ or _config.strict():
            first = x if isinstance(x, Tensor) else next((t for t in x if isinstance(t, Tensor)), None)
            device = torch.device("cpu") if first is None else first.device
            kernel = reason or blocks.kernel_reason(device, torch.float32 if first is None else first.dtype)
            if kernel is not None:
                name = self.__dict__.get("_fc_strict") or type(self).__name__
                raise FallbackError(
                    f"yolo12_fastconv strict mode: {name} does not run on a CUDA kernel: {kernel}"
                )
        y = self.compute(x, out) if reason is None else self._stock.forward(self, x)
        return y if residual is None else residual + y

    def input_problem(self, x: Any) -> str | None:
        """Why a call with `x` computes as stock; None if the op does."""
        raise NotImplementedError

    def compute(self, x: Any, out: Tensor | None = None) -> Tensor:
        """The result, in `out` if that can be; asked with gradients alone."""
        raise NotImplementedError


class _Room:
    """What `FastUpsample` tells `FastConcat`, as an attribute of its result: in which buffer this is the first part of
    a concat, and who made it."""

    __slots__ = ("buffer", "maker")

    def __init__(self, buffer: Tensor | None, maker: FastUpsample) -> None:
        self.buffer = buffer
        self.maker = maker


class FastUpsample(_MapLayer, nn.Upsample):
    """Nearest-neighbour upsampling to twice the height and width as one kernel, forward and backward.

    Of stock's dtype: under autocast on CUDA that is float32. With one exception. In training, a result of which all
    layers that read it round it back to autocast's type as the first thing they do is left in that type from the start:
    the numbers are the same, and so are the gradients, in half the memory. `link_layers` says where to look.

    In inference, a result whose like was the first part of a concat before is written to the first channels of a wider
    tensor, of which the concat then has to write the others alone. In training: `_places.py`.
    """

    _stock = nn.Upsample
    _stock_args = ()
    fuses = "one kernel"
    samples = ((None, 2, "nearest"),)

    @classmethod
    def sample_input(cls, block: Any) -> Tensor:
        return torch.randn(1, 6, 4, 5, dtype=torch.float64)

    @classmethod
    def structure_problem(cls, block: Any) -> str | None:
        factor = block.scale_factor
        if block.mode != "nearest" or block.size is not None or factor not in (2, (2, 2)):
            return f"mode={block.mode!r}, size={block.size}, scale_factor={factor} is not nearest by 2"
        if block.align_corners is not None or block.recompute_scale_factor:
            return "align_corners or recompute_scale_factor is set"
        return None

    def input_problem(self, x: Any) -> str | None:
        return blocks.map_reason(x)

    def plane(self, x: Tensor) -> tuple[int, int]:
        """Height and width of the result."""
        return 2 * x.shape[2], 2 * x.shape[3]

    def compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        dtype = x.dtype
        if x.is_cuda and dtype in _HALF and torch.is_autocast_enabled("cuda"):
            rounded = dtype is torch.get_autocast_dtype("cuda") and self.training and torch.is_grad_enabled()
            if not (rounded and _all_readers_round(self)):
                dtype = torch.float32
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or is_watched(self):
            fits = out is not None and out.dtype is dtype and out.shape[:2] == x.shape[:2]
            return ops.upsample_nearest(x, dtype, out if fits else None)
        # How many channels came behind the last result. Without them, or with others by now, nothing is lost but time.
        more = self.__dict__.get("_fc_more", 0)
        buffer = None
        if more:
            n, c, h, w = x.shape
            size = (n, c + more, 2 * h, 2 * w)
            buffer = torch.empty(size, dtype=dtype, device=x.device, memory_format=torch.channels_last)
            y = buffer.narrow(1, 0, c)
            ops.concat_channels_out([x], [2], y)
        else:
            y = ops.concat_channels([x], [2], dtype)
        y._fc_room = _Room(buffer, self)  # type: ignore[attr-defined]
        return y


class FastConcat(_MapLayer, Concat):
    """Concatenation of NHWC maps along their channels as one kernel, forward and backward."""

    _stock = Concat
    _stock_args = ()
    fuses = "one kernel"
    samples = ((1,),)

    @classmethod
    def sample_input(cls, block: Any) -> list[Tensor]:
        return [torch.randn(1, channels, 4, 5, dtype=torch.float64) for channels in (3, 5, 2)]

    @classmethod
    def structure_problem(cls, block: Any) -> str | None:
        return None if block.d in (1, -3) else f"concatenates along dimension {block.d}"

    def input_problem(self, x: Any) -> str | None:
        if not isinstance(x, list | tuple) or not x:
            return "the input is not a list of maps"
        first = x[0]
        for t in x:
            problem = blocks.map_reason(t)
            if problem is not None:
                return problem
            if t.device != first.device or t.shape[2:] != first.shape[2:] or t.shape[0] != first.shape[0]:
                return "the maps differ in size or device"
            if t.is_cuda and t.stride(1) != 1 and t.shape[1] > 1:
                return "a map is not NHWC"
            # Two half types promote to a third in torch.cat, and differently under autocast.
            if t.dtype is not first.dtype and {t.dtype, first.dtype} & set(_HALF) == set(_HALF):
                return f"the maps are {first.dtype} and {t.dtype}"
        return None

    def compute(self, x: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        link = self.__dict__.get(_places.LINK)
        if (
            link is not None
            and torch.is_grad_enabled()
            and self.training
            and not torch.compiler.is_compiling()
        ):
            y: Tensor | None = link.join(self, x)
            if y is None:
                y = ops.concat_channels(x)
                link.remember(x, y)
            return y
        room = getattr(x[0], "_fc_room", None)
        if room is None or torch.is_grad_enabled() or torch.compiler.is_compiling() or is_watched(self):
            return ops.concat_channels(x)
        first, others = x[0], x[1:]
        buffer, room.buffer = room.buffer, None  # a second concat of the same tensor gets a tensor of its own
        more = sum(t.shape[1] for t in others)
        # On a CPU ATen concatenates, by a copy of all.
        alike = first.is_cuda and all(t.dtype is first.dtype for t in others)
        if buffer is not None and alike and more and buffer.shape[1] == first.shape[1] + more:
            ops.concat_channels_out(others, None, buffer.narrow(1, first.shape[1], more))
            return buffer
        room.maker.__dict__["_fc_more"] = more if alike else 0
        return ops.concat_channels(x)


def link_layers(network: nn.Module) -> None:
    """Tell the `FastUpsample` layers of a task model which sequence of layers they are in: its `model`, in which each
    layer `i` reads the layers `f`. And tell all which concats they are parts of.

    The sequence is looked at anew at every call, and only believed where it holds the layer in its place. A copy of a
    model is not linked before it is patched, and then computes in stock's dtype.
    """
    layers = network._modules.get("model")
    if isinstance(layers, nn.Sequential):
        for layer in layers:
            if type(layer) is FastUpsample:
                layer.__dict__["_fc_layers"] = weakref.ref(layers)
        _places.link(
            layers,
            lambda layer: type(layer) is FastConcat,
            lambda layer: isinstance(layer, FastConv | FusedBlock) and type(layer) is not FastConcat,
        )


def _all_readers_round(layer: Any) -> bool:
    """Whether nothing sees the result of `layer`, or of concats that read it, but convolutions, which begin by rounding
    to autocast's type."""
    reference = layer.__dict__.get("_fc_layers")
    sequence = None if reference is None or torch.compiler.is_compiling() else reference()
    if sequence is None or is_watched(layer) or is_watched(sequence):
        return False
    layers: list[Any] = list(sequence._modules.values())
    waiting, place = [], getattr(layer, "i", -1)
    if not 0 <= place < len(layers) or layers[place] is not layer:
        return False
    waiting.append(place)
    while waiting:
        place = waiting.pop()
        readers = list(_places.readers_of(layers, place))
        if not readers:
            return False
        for reader in readers:
            if type(reader) in (Concat, FastConcat) and not is_watched(reader):
                waiting.append(layers.index(reader))
            elif reader is None or not _rounds_first(reader):
                return False
    return True


def _rounds_first(layer: Any) -> bool:
    """Whether all that a layer does with its input is a convolution, which rounds it to autocast's type."""
    conv = _places.first_convolution(layer)
    return conv is not None and conv.weight.dtype is not torch.float64
