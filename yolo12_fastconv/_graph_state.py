"""What a CUDA graph of a model depends on besides its input: the kind of call, global flags, the state of the model."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

from yolo12_fastconv import _compat, _config

_compat.require_ultralytics()

from ultralytics.nn.modules.head import Detect, RTDETRDecoder  # noqa: E402

__all__ = ["BOOKKEEPING", "Structure", "flags", "ordinary_call"]

_CACHES: dict[type[nn.Module], tuple[str, ...]] = {
    Detect: ("shape", "anchors", "strides"),
    RTDETRDecoder: ("shapes", "anchors", "valid_mask"),
}
"""Attributes that a head's forward sets, as functions of the input's shape."""


# ------------------------------------------------------------------------------------------------------- signatures


def ordinary_call() -> bool:
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


def flags() -> tuple[Any, ...]:
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
        _config.value("YOLO12_FASTCONV_GRADIENTS"),
    )


# -------------------------------------------------------------------------------------------------- state of a model

BOOKKEEPING = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")


class Structure:
    """Everything of a model that a graph has baked in, to be compared with the model as it is now.

    The comparisons are those of lists, tuples and dictionaries, which compare identities first: about 0.2 ms for the
    350 modules of a fused YOLO12n, where a loop in Python would take more than a replay.
    """

    def __init__(self, model: nn.Module, addresses: bool = True) -> None:
        """`addresses`: whether memory and strides of the tensors are part of the state, besides which they are."""
        self.addresses = addresses
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
            own = {n for n in space if n not in BOOKKEEPING and n != "_fc_graphs"}
            own.difference_update(cached, () if module is not model else _OF_TRAINING)
            grouped.setdefault(tuple(sorted(own)), []).append(space)
        self.grouped = grouped
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
        self.memory = [tensor.untyped_storage() for tensor in self.tensors] if addresses else []
        self.layout = self._layout()

    def _attributes(self) -> list[list[Any]]:
        return [list(map(getter, members)) for getter, members in self.groups]

    def _layout(self) -> tuple[Any, ...]:
        if not self.addresses:
            return ()
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

    def restore(self) -> None:
        """Put back the parameters, buffers, modules and attributes that were there, as far as they were replaced."""
        for table, content in zip(self.tables, self.contents, strict=True):
            table.clear()
            table.update(content)
        groups = [(names, members) for names, members in self.grouped.items() if names]
        for (names, members), kept in zip(groups, self.attributes, strict=True):
            for space, values in zip(members, kept, strict=True):
                space.update(zip(names, values if len(names) > 1 else (values,), strict=True))

    def head_state(self) -> list[tuple[dict[str, Any], str, Any]]:
        """What heads keep for the present shape."""
        return [(space, name, space[name]) for space, name in self.caches if name in space]


_OF_TRAINING = frozenset({"args", "criterion", "names", "pt_path", "task", "yaml"})
"""Attributes of a task model that its forward never reads."""
