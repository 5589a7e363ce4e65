"""Fast classes of the detection heads: `Detect`, `Segment`, `Pose`, `OBB`.

The last convolutions (plain 1x1 `nn.Conv2d` with a bias) run as the fused op. In inference one kernel makes all outputs
of their maps; in training the outputs are laid out as their maps are. In exports, and for heads of another structure,
stock computes.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from yolo12_fastconv import _late, _side_stream, blocks, ops, programs
from yolo12_fastconv.fused_block import FusedBlock, child, is_watched, run_and_pass
from yolo12_fastconv.fused_block import run as run_child

from ultralytics.nn.modules.block import DFL  # isort: skip  (blocks has checked that)
from ultralytics.nn.modules.head import OBB, Detect, Pose, Segment  # isort: skip
from ultralytics.utils.tal import make_anchors  # isort: skip

__all__ = ["FastDetect", "FastOBB", "FastPose", "FastSegment"]

MOST_BINS, MOST_LEVELS = 16, 8
"""What the kernel takes: csrc/device/maps.h."""

_OWN = ("forward_head", "_inference", "_get_decode_boxes", "decode_bboxes", "one2many")
_DECODED = "_fc_decoded"


_IDENTITY = nn.Identity()


class _Decoding:
    """The box head as `FastDetect.run` hands it to `forward_head`: what comes back is decoded too."""

    def __init__(self, head: Any) -> None:
        self.head = head


def _constructor_arguments(stock: type) -> tuple[Any, ...]:
    """Arguments of a small head, in the order that this Ultralytics has them in."""
    small = {"nc": 1, "nm": 1, "npr": 1, "ne": 1, "kpt_shape": (1, 2), "reg_max": 1, "ch": (8,)}
    parameters = list(inspect.signature(stock).parameters.values())
    return tuple(small.get(p.name, p.default) for p in parameters)


def _sample(stock: type, **values: Any) -> tuple[Any, ...]:
    parameters = list(inspect.signature(stock).parameters.values())
    return tuple(values.get(p.name, p.default) for p in parameters)


class FastDetect(FusedBlock, Detect):
    """Boxes and classes of the maps of several levels; see `yolo12_fastconv.ops.detect_decode`.

    The fast classes of `Segment`, `Pose` and `OBB` have their stock class in front of this one, whose methods call
    `Detect`'s by ``super()`` and so reach these.
    """

    _stock: Any = Detect
    _stock_args = _constructor_arguments(Detect)
    fuses = "last convolutions, decoding"
    samples = (_sample(Detect, nc=3, ch=(8, 16)),)
    decodes = True
    """Whether the boxes are decoded as `Detect` does."""

    @classmethod
    def sample_input(cls, block: Any) -> list[Tensor]:
        block.stride = torch.tensor([8.0, 16.0])  # a model sets it when it is built
        return [torch.randn(2, 8, 4, 6, dtype=torch.float64), torch.randn(2, 16, 2, 3, dtype=torch.float64)]

    @classmethod
    def structure_problem(cls, block: Any) -> str | None:
        if getattr(block, "one2one_cv2", None) is not None or block.cv2 is None or block.cv3 is None:
            return "has one-to-one heads"
        own = [name for name in _OWN if name in block.__dict__]  # Dynamo does not trace every method of a set
        if own:
            return f"has its own {', '.join(sorted(own))} (instance attributes)"
        if not 0 < block.nl <= MOST_LEVELS or not 0 < block.reg_max <= MOST_BINS:
            return f"has {block.nl} levels and {block.reg_max} bins, the kernel takes {MOST_LEVELS} and {MOST_BINS}"
        dfl = child(block, "dfl")
        if is_watched(dfl):
            return "dfl has hooks or a forward of its own"
        if type(dfl) is DFL:
            conv = child(dfl, "conv")
            if type(conv) is not nn.Conv2d or is_watched(conv) or conv.bias is not None:
                return "dfl.conv has hooks, a bias, or is no plain nn.Conv2d"
            if tuple(conv.weight.shape) != (1, block.reg_max, 1, 1) or dfl.c1 != block.reg_max:
                return f"dfl.conv has weights {tuple(conv.weight.shape)} for {block.reg_max} bins"
        elif type(dfl) is not nn.Identity or block.reg_max != 1:
            return f"dfl is {type(dfl).__name__} for {block.reg_max} bins"
        return None

    def forward(self, x: Any) -> Any:
        """As `Detect`."""
        return self.run(x) if self.fused_now() else Detect.forward(self, x)

    def run(self, x: Any, residual: Tensor | None = None, out: Tensor | None = None) -> Any:
        if self.training or self.export or not isinstance(x, list) or len(x) != self.nl:
            return Detect.forward(self, x)
        heads = self.one2many
        heads["box_head"] = _Decoding(heads["box_head"])
        predictions = self.forward_head(x, **heads)
        return self._inference(predictions), predictions

    def forward_head(self, x: list[Tensor], box_head: Any = None, cls_head: Any = None) -> dict[str, Any]:
        """As `Detect`; after `run` also ``"_fc_decoded"``, which `_inference` takes out again."""
        if not isinstance(box_head, _Decoding):
            if not self.training or box_head is None or cls_head is None or not self.fused_now():
                return Detect.forward_head(self, x, box_head, cls_head)
            boxes, scores = [], []
            for i in range(self.nl):
                box, level = _head_and_pass(box_head[i], x[i])
                boxes.append(box)
                scores.append(_head_and_pass(cls_head[i], level)[0])
            return {"boxes": _join(boxes), "scores": _join(scores), "feats": x}
        if _side_stream.current() is None:
            boxes = programs.call(box_head.head, functools.partial(_maps, box_head.head), *x)
            scores = programs.call(cls_head, functools.partial(_maps, cls_head), *x)
        else:
            maps = _maps([*box_head.head, *cls_head], *x, *x)
            boxes, scores = maps[: self.nl], maps[self.nl :]
        if self.decodes and self._decodable(boxes, scores):
            shape = x[0].shape
            if self.dynamic or self.shape != shape:
                self.anchors, self.strides = (a.transpose(0, 1) for a in make_anchors(x, self.stride, 0.5))
                self.shape = shape
            points, steps = self.anchors, self.strides
            if self._fits(boxes, points, steps):
                values = None if self.reg_max == 1 else child(child(self, "dfl"), "conv").weight
                batch, anchors = boxes[0].shape[0], points.shape[1]
                decode = functools.partial(
                    ops.detect_decode, boxes, scores, values, points, steps, xywh=not self.xyxy
                )
                if type(self) is FastDetect:  # `Segment` and `Pose` compute with what is decoded
                    sizes = [(batch, rows, anchors) for rows in (4 + self.nc, 4 * self.reg_max, self.nc)]
                    y, all_boxes, all_scores = _late.call(decode, sizes)
                else:
                    y, all_boxes, all_scores = decode()
                return {"boxes": all_boxes, "scores": all_scores, "feats": x, _DECODED: y}
        return {"boxes": _levels(boxes), "scores": _levels(scores), "feats": x}

    def _inference(self, x: dict[str, Any]) -> Tensor:
        """As `Detect`."""
        decoded = x.pop(_DECODED, None)
        return Detect._inference(self, x) if decoded is None else decoded

    def _decodable(self, boxes: list[Tensor], scores: list[Tensor]) -> bool:
        """Whether these are maps as the op takes them, without gradients, in one dtype that stock would keep."""
        first = boxes[0]
        for channels, maps in ((4 * self.reg_max, boxes), (self.nc, scores)):
            for t, level in zip(maps, boxes, strict=True):
                if (
                    type(t) is not Tensor
                    or t.dtype is not first.dtype
                    or t.device != first.device
                    or t.dim() != 4
                    or t.shape != (first.shape[0], channels, *level.shape[2:])
                    or (t.requires_grad and torch.is_grad_enabled())
                ):
                    return False
        # Under autocast the convolution of `dfl` rounds to autocast's type.
        return blocks.map_reason(first) is None and ops.compute_dtype(first) is first.dtype

    def _fits(self, boxes: list[Tensor], points: Tensor, steps: Tensor) -> bool:
        """Whether anchors and strides belong to these maps, and promote nothing; where not, stock has its own say."""
        anchors = sum(t.shape[2] * t.shape[3] for t in boxes)
        return all(
            type(t) is Tensor
            and t.dtype is boxes[0].dtype
            and t.device == boxes[0].device
            and t.shape == (rows, anchors)
            for t, rows in ((points, 2), (steps, 1))
        )


class FastSegment(Segment, FastDetect):  # type: ignore[misc]
    """`FastDetect` with mask coefficients and prototypes."""

    _stock = Segment
    _stock_args = _constructor_arguments(Segment)
    samples = (_sample(Segment, nc=3, nm=4, npr=8, ch=(8, 16)),)


class FastPose(Pose, FastDetect):  # type: ignore[misc]
    """`FastDetect` with keypoints."""

    _stock = Pose
    _stock_args = _constructor_arguments(Pose)
    samples = (_sample(Pose, nc=3, kpt_shape=(2, 3), ch=(8, 16)),)


class FastOBB(OBB, FastDetect):  # type: ignore[misc]
    """Rotated boxes: the last convolutions are fast, decoding is stock's."""

    _stock = OBB
    _stock_args = _constructor_arguments(OBB)
    fuses = "last convolutions"
    samples = (_sample(OBB, nc=3, ch=(8, 16)),)
    decodes = False


def _levels(maps: list[Tensor]) -> Tensor:
    """(N, C, A), contiguous, of the maps (N, C, H, W) of all levels."""
    return torch.cat([t.view(t.shape[0], t.shape[1], -1) for t in maps], -1)


def _join(maps: list[Tensor]) -> Tensor:
    """The same in the layout (N, A, C): from NHWC maps that is a copy of long runs, forward and backward, instead of
    two transpositions, and the losses of Ultralytics take their predictions in that order."""
    if all(t.is_cuda and t.dim() == 4 and t.stride(1) == 1 for t in maps):
        return torch.cat([t.permute(0, 2, 3, 1).flatten(1, 2) for t in maps], 1).transpose(1, 2)
    return _levels(maps)


_MOST_PIXELS = 64 * 128
"""Of a map, pictures included, whose heads run beside others: all levels of one picture of 640 by 640. Of 32
pictures the smallest level, with twice as many, gained nothing beside the others."""


def _maps(heads: Any, *xs: Tensor) -> list[Tensor]:
    """What each head makes of its map. Of small maps one after the other would leave most of the GPU idle, so a CUDA
    graph has them as parallel branches."""
    return _side_stream.run_all(
        [functools.partial(_head, heads[i], x) for i, x in enumerate(xs)],
        [x.numel() <= _MOST_PIXELS * x.shape[1] for x in xs],
    )


def _head(head: Any, x: Tensor) -> Tensor:
    """``head(x)`` for a sequence of blocks that ends in a plain convolution, which runs as the fused op."""
    return _head_and_pass(head, x)[0]


def _head_and_pass(head: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """`_head`, and `x` for the next one: see `fused_block.run_and_pass`."""
    if type(head) is not nn.Sequential or is_watched(head) or not head._modules:
        return head(x), x
    *layers, last = head._modules.values()
    passed = x
    for i, layer in enumerate(layers):
        if i == 0:
            x, passed = run_and_pass(layer, x)
        else:
            x = run_child(layer, x)
    return _convolution(last, x), passed


def _convolution(conv: Any, x: Tensor) -> Tensor:
    """``conv(x)``: by the fused op if nobody watches.

    In training that adds the bias in the convolution, and in backward sums its gradient and makes whole maps of the
    levels' parts of a gradient by kernels of this package: torch's took a launch each for the first, and 0.4 ms a step
    for the others.
    """
    kind: Any = type(conv)  # compared by itself, mypy would narrow `conv`
    if (
        kind is not nn.Conv2d
        or is_watched(conv)
        or blocks.structure_reason(conv, None, _IDENTITY) is not None
    ):
        return conv(x)
    weight, bias = blocks.parameter(conv, "weight"), blocks.parameter(conv, "bias")
    if blocks.input_reason(x, weight, bias) is not None:
        return conv(x)
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return conv(x)
    return ops.conv_bn_act(
        x, weight, bias, None, None, conv.stride, conv.padding, conv.dilation, conv.groups, "identity"
    )
