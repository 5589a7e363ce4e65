"""What a CUDA graph returns: the nest of tuples, lists and dictionaries that the model returns, of other tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from yolo12_fastconv import _late

__all__ = ["Nest", "Outputs", "Uncapturable", "clone"]


class Uncapturable(Exception):
    """A call cannot become a graph, and why."""


class Nest:
    """The tensors of a nest of tuples, lists and dictionaries, each once, and how to build the nest of others."""

    def __init__(
        self, outputs: Any, device: torch.device, foreign: set[int], late: Sequence[Tensor] = ()
    ) -> None:
        """
        Args:
            foreign: addresses of memory that outputs must not lie in, since the caller would get a copy of it.
            late: tensors without memory that stand for results to come.

        Raises:
            Uncapturable: there is something else in the nest.
        """
        self.device, self.foreign, self.late = device, foreign, late
        self.tensors: list[Tensor] = []
        """The tensors, in the order of the nest."""
        self.build = self._builder(outputs)
        """The nest, of a list of other tensors in place of `tensors`."""

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
        raise Uncapturable(f"the model returns a {kind.__name__}")

    def _index(self, tensor: Tensor) -> int:
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return index
        if any(tensor is one for one in self.late):
            self.tensors.append(tensor)
            return len(self.tensors) - 1
        if tensor.device != self.device or tensor.layout is not torch.strided:
            raise Uncapturable(f"the model returns a tensor on {tensor.device}, {tensor.layout}")
        if tensor.numel() and tensor.untyped_storage().data_ptr() in self.foreign:
            raise Uncapturable("the model returns its input or a weight, or a view of one")
        self.tensors.append(tensor)
        return len(self.tensors) - 1


class Outputs(Nest):
    """Copies a graph's outputs for the caller, and makes those that the graph does not."""

    def __init__(
        self, outputs: Any, device: torch.device, foreign: set[int], late: _late.Late | None = None
    ) -> None:
        calls = late.calls if late else []
        coming = [tensor for _, results in calls for tensor in results]
        super().__init__(outputs, device, foreign, coming)
        self.functions = [function for function, _ in calls]
        groups: dict[int, list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            if not any(tensor is one for one in coming):
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
                raise Uncapturable("outputs of different dtypes share memory")
            begin = min(int(tensor.storage_offset()) for tensor in tensors)
            end = max(map(_end, tensors))
            for index, tensor in zip(members, tensors, strict=True):
                offset = tensor.storage_offset() - begin
                self.views[index] = (len(self.sources), tensor.shape, tensor.stride(), offset)
            self.sources.append(torch.as_strided(tensors[0], (end - begin,), (1,), begin))
        self.direct = all(view is None for view in self.views) and not coming
        for index, tensor in enumerate(self.tensors):
            for place, one in enumerate(coming):
                if tensor is one:
                    self.copied[index] = len(self.sources) + place

    def __call__(self) -> Any:
        copies = clone(self.sources) if self.sources else []
        for function in self.functions:
            copies += function()
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


def clone(tensors: list[Tensor]) -> list[Tensor]:
    # One launch for outputs of one dtype, where a launch each takes longer on GPU and host: 28 against 62 us for the
    # 5 MB of YOLO12n at 640, batch 1. From about 64 MB on copies one by one are faster: 109 against 163 us for 168 MB.
    if sum(tensor.nbytes for tensor in tensors) > _ONE_BY_ONE:
        return [tensor.clone() for tensor in tensors]
    copies = [torch.empty_like(tensor) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies
