"""The ops on feature maps (concatenation, upsampling, decoding of a detection head) on ATen; see `_aten.py`."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from yolo12_fastconv._shapes import (
    check_concat,
    check_concat_out,
    check_detect,
    check_even,
    check_upsample_sum,
)

aten = torch.ops.aten


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _channels_last_on_cuda(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.device.type == "cuda" else t


def concat_channels(tensors: list[Tensor], scales: list[int], dtype: torch.dtype) -> Tensor:
    check_concat(tensors, scales)
    with _without_autocast(tensors[0].device):
        maps = []
        for t, scale in zip(tensors, scales, strict=True):
            t = t.to(dtype)
            if scale != 1:
                t = aten.upsample_nearest2d.default(t, [t.shape[2] * scale, t.shape[3] * scale])
            maps.append(t)
        return _channels_last_on_cuda(aten.cat.default(maps, 1))


def concat_channels_out(tensors: list[Tensor], scales: list[int], out: Tensor) -> None:
    check_concat_out(tensors, scales, out)
    out.copy_(concat_channels(tensors, scales, out.dtype))


def upsample_nearest_backward(grad_y: Tensor) -> Tensor:
    check_even(grad_y)
    n, c, h, w = grad_y.shape
    with _without_autocast(grad_y.device):
        grad_x = aten.upsample_nearest2d_backward.default(grad_y, [h, w], [n, c, h // 2, w // 2])
        return _channels_last_on_cuda(grad_x)


def upsample_nearest_backward_(grad_y: Tensor, grad_x: Tensor) -> None:
    check_upsample_sum(grad_y, grad_x)
    grad_x.add_(upsample_nearest_backward(grad_y))


def detect_decode(
    boxes: list[Tensor],
    scores: list[Tensor],
    bin_values: Tensor | None,
    points: Tensor,
    steps: Tensor,
    xywh: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operation by operation what stock's `Detect` computes, autocast included: differentiable as it is."""
    check_detect(boxes, scores, bin_values, points, steps)
    batch = boxes[0].shape[0]
    all_boxes = torch.cat([t.reshape(batch, t.shape[1], -1) for t in boxes], -1)
    all_scores = torch.cat([t.reshape(batch, t.shape[1], -1) for t in scores], -1)
    anchors = all_boxes.shape[2]
    sides = all_boxes
    if bin_values is not None:
        bins = all_boxes.shape[1] // 4
        shares = all_boxes.view(batch, 4, bins, anchors).transpose(2, 1).softmax(1)
        sides = torch.conv2d(shares, bin_values.view(1, bins, 1, 1)).view(batch, 4, anchors)
    left_top, right_bottom = sides.chunk(2, 1)
    low, high = points.unsqueeze(0) - left_top, points.unsqueeze(0) + right_bottom
    box = torch.cat([(low + high) / 2, high - low] if xywh else (low, high), 1)
    return torch.cat((box * steps, all_scores.sigmoid()), 1), all_boxes, all_scores
