"""One op call for a whole block in inference: its ops are written down once, and then run in C++ one behind the other.

Without a CUDA graph a small YOLO12 at batch 1 waits for its host: Python and the dispatcher take five times as long for
a convolution as its kernel. `call` watches how a block computes a kind of input, and keeps the ops as a program
(`_program.py`). Later calls run that by one op, `ops.run_program`, with the parameters as they are then.

Right results:

- A program holds no values and no addresses, only which op reads what. Weights are handed in at every call.
- What else decides how a block computes is compared at every call: the kind of call and the global switches
  (`_is_ordinary`); size, strides, dtype and device of the inputs; the modules, attributes, hooks and tensors of the
  block (`_graph_state.Structure`); and, by the program itself, these tensors' sizes, dtypes and devices. Any
  difference, and the block computes as ever. Not seen: changes inside a list that is an attribute, and classes edited
  in place.
- The program consists of the same ops with the same arguments, so the results are the same bit by bit.
- A block in which anything else happens than our ops, views of their results and allocations is left alone.

Programs belong to their block object: copies and pickles have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import TorchDispatchMode

from yolo12_fastconv import _config, _program, ops
from yolo12_fastconv._graph_state import Structure

__all__ = ["call", "describe"]

_MAX_SIGNATURES = 16
"""Kinds of input that a block remembers; one more, and it begins anew."""
_MAX_CHANGES = 8
"""Times that a block was found changed, after which it is left alone: it may change at every call."""

_is_tracing = torch._C._is_tracing
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_transform_depth = torch._C._functorch.get_dynamic_layer_stack_depth
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack


def call(block: nn.Module, compute: Callable[..., Any], *inputs: Any) -> Any:
    """``compute(*inputs)``: by a program, if that is known to be the same.

    Args:
        block: whose state decides what `compute` does, besides global switches and its arguments.
        compute: takes tensors, returns a tensor or a list of tensors, and has no other effect.
    """
    if not _is_ordinary(inputs):
        return compute(*inputs)
    plans = _plans.get(block)
    if plans is None:
        plans = _plans[block] = _Plans()
    signature = tuple([(t.shape, t.stride(), t.dtype, t.get_device()) for t in inputs])
    program = plans.programs.get(signature)
    if program is None:
        return plans.observe(block, signature, compute, inputs)
    results = program.run(inputs) if program.structure.unchanged() else None
    if not results:
        plans.forget()
        return compute(*inputs)
    return results[0] if program.single else results


def _is_ordinary(inputs: Sequence[Any]) -> bool:
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _is_tracing()
        or _is_any_autocast_enabled()
        or _has_any_global_hook()
        or _config.is_set()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform_depth() > 0
        or forward_ad._current_level >= 0
    ):
        return False
    for t in inputs:
        if type(t) is not Tensor or t.layout is not torch.strided or t.dim() != 4 or t.numel() == 0:
            return False
        if not _is_served(t):
            return False
    return True


def _is_served(t: Tensor) -> bool:
    """Whether programs are worth it for `t`. A CUDA graph records the launches, whoever makes them, and may want the
    branches of a block on streams of their own."""
    return t.is_cuda and ops.LIBRARY.loaded and not torch.cuda.is_current_stream_capturing()


def describe(block: nn.Module) -> list[str]:
    """What became of the kinds of input that a block has seen: for tests and for the curious."""
    plans = _plans.get(block)
    return [] if plans is None else [str(p) for p in (*plans.programs.values(), *plans.others.values())]


class _Plans:
    """The programs of a block by the signature of their inputs, and the signatures that have none."""

    def __init__(self) -> None:
        self.programs: dict[Any, _Program] = {}
        self.others: dict[Any, str] = {}
        self.changes = 0

    def observe(
        self, block: nn.Module, signature: Any, compute: Callable[..., Any], inputs: Sequence[Tensor]
    ) -> Any:
        """The first calls of a kind: one that is only noted, since many kinds are seen once; one that is recorded."""
        state = self.others.get(signature)
        if state != _SEEN or self.changes >= _MAX_CHANGES:
            if state is None:
                if len(self.programs) + len(self.others) >= _MAX_SIGNATURES:
                    self.programs, self.others = {}, {}
                self.others[signature] = _SEEN
            return compute(*inputs)
        structure = Structure(block, addresses=False)
        recorder = _Recorder(inputs, structure.tensors)
        with recorder:
            result = compute(*inputs)
        try:
            self.programs[signature] = recorder.program(structure, result)
            self.others.pop(signature, None)  # another thread may have been here
        except _Unknown as unknown:
            self.others[signature] = str(unknown)
        return result

    def forget(self) -> None:
        self.programs, self.others = {}, {}
        self.changes += 1


_SEEN = "seen once"

_plans: weakref.WeakKeyDictionary[nn.Module, _Plans] = weakref.WeakKeyDictionary()


class _Program:
    def __init__(
        self, structure: Structure, code: list[int], outputs: list[int], constants: list[Tensor], single: bool
    ) -> None:
        self.structure = structure
        with torch.inference_mode(False):
            self.code = torch.tensor(code, dtype=torch.int64, device="cpu")
        self.outputs = outputs
        self.constants = constants
        self.single = single

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        return ops.run_program(inputs, self.constants, self.code, self.outputs)

    def __str__(self) -> str:
        return f"a program of {self.code.numel()} numbers, {len(self.constants)} tensors"


class _Unknown(Exception):
    """What happens is none of the instructions."""


class _Recorder(TorchDispatchMode):
    """Writes down the ops that run under it. Views need no instruction of their own until an op reads one: it is known
    by its memory."""

    def __init__(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.problem: str | None = None
        self.instructions: list[tuple[list[Any], list[int]]] = []  # with the registers that each reads
        self.count = 0
        # By storage: register, sizes, strides, offset of the tensor that it was allocated for.
        self.owners: dict[int, tuple[int, Any, Any, int]] = {}
        self.views: dict[tuple[Any, ...], int] = {}
        self.held = {id(t): t for t in tensors}
        self.constants: dict[int, int] = {}
        self.inputs = len(inputs)
        self.dtype = inputs[0].dtype
        self.tf32 = ops.allow_tf32(inputs[0].device, self.dtype)
        for t in inputs:
            if t.dtype is not self.dtype or _storage(t) in self.owners:
                self.problem = "its inputs differ in dtype or share memory"
            self._own(t)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's wrapper for compilers, under which nothing is recorded, would import all of torch._dynamo with sympy:
        # the second call of a model in a fresh process took 4.2 s.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.problem is None:
            try:
                self._write(func, args, result)
            except _Unknown as unknown:
                self.problem = str(unknown)
        return result

    def _write(self, func: Any, args: Any, result: Any) -> None:
        if func is _CONV:
            self._convolution(None, args[:2], args[2:])
            self._own(result)
        elif func is _CONV_OUT:
            self._convolution(args[2], args[:2], args[3:])
        elif func is _ATTENTION:
            qkv, heads, area, scale, with_values = args
            source = self._register(qkv)
            code = [_program.ATTENTION, source, heads, area, _program.bits(scale), int(with_values)]
            self.instructions.append((code, [source]))
            self._own(result[0])
            self._own(result[1])
        elif func is torch.ops.aten.empty.memory_format and result.dtype is self.dtype and result.dim() == 4:
            self.instructions.append(([_program.EMPTY, *result.shape, *result.stride()], []))
            self._own(result)
        elif not func.is_view:
            raise _Unknown(f"it calls {func}")

    def _convolution(self, out: Tensor | None, operands: Any, others: Any) -> None:
        bias, gamma, beta, mean, var, eps, residual, stride, padding, dilation, groups, act, dtype, tf32 = (
            others
        )
        if dtype is not self.dtype or tf32 is not self.tf32:
            raise _Unknown(f"it computes in {dtype}, its input is {self.dtype}")
        x, weight = operands
        registers = [self._register(t) for t in (out, x, residual)]
        constants = [self._constant(t) for t in (weight, bias, gamma, beta, mean, var)]
        numbers = [_program.bits(eps), *stride, *padding, *dilation, groups, act]
        self.instructions.append(([_program.CONVOLUTION, *registers, *constants, *numbers], registers))

    def _own(self, tensor: Tensor) -> None:
        """A register for a tensor with memory of its own. Memory that was freed and taken again is the new tensor's."""
        start = int(tensor.storage_offset())
        self.owners[_storage(tensor)] = (self.count, tuple(tensor.shape), tensor.stride(), start)
        self.count += 1

    def _register(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        owner = self.owners.get(_storage(tensor))
        if owner is None or tensor.dtype is not self.dtype or tensor.dim() != 4:
            raise _Unknown("an op reads a tensor of unknown origin")
        register, sizes, strides, start = owner
        seen = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - start)
        if seen == (sizes, strides, 0):
            return register
        view = (register, *seen)
        if view not in self.views:
            self.instructions.append(([_program.VIEW, register, *seen[0], *seen[1], seen[2]], [register]))
            self.views[view] = self.count
            self.count += 1
        return self.views[view]

    def _constant(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return -1
        if self.held.get(id(tensor)) is not tensor:
            raise _Unknown("an op reads a parameter that the block does not hold")
        if tensor.dtype not in (self.dtype, torch.float32):
            raise _Unknown(f"its input is {self.dtype}, a parameter {tensor.dtype}")
        return self.constants.setdefault(id(tensor), len(self.constants))

    def program(self, structure: Structure, result: Any) -> _Program:
        """What was written down, with `result` as its results.

        Raises:
            _Unknown: that would not be the same; the message says why.
        """
        if self.problem is not None:
            raise _Unknown(self.problem)
        if structure.hooked() or not structure.unchanged():
            raise _Unknown("a module in it has hooks, or it changes while it runs")
        results = result if type(result) is list else [result]
        if not all(type(t) is Tensor for t in results):
            raise _Unknown(f"its result is a {type(result).__name__}")
        returned = [self._register(t) for t in results]
        if len(set(returned)) < len(returned) or not all(
            self._is_whole(r, t) for r, t in zip(returned, results, strict=True)
        ):
            raise _Unknown("its results share memory with each other or an input")
        last = {register: i for i, (_, read) in enumerate(self.instructions) for register in read}
        constants = [self.held[key] for key in self.constants]
        code: list[int] = []
        for i, t in enumerate(constants):
            code += [_program.EXPECT, i, int(t.dtype is torch.float32), t.dim(), *t.shape]
        for i, (instruction, read) in enumerate(self.instructions):
            code += instruction
            for register in sorted(set(read)):
                if register >= self.inputs and last[register] == i and register not in returned:
                    code += [_program.FREE, register]
        for register in returned:
            code += [_program.RETURN, register]
        outputs = [number for t in results for number in (*t.shape, *t.stride())]
        return _Program(structure, code, outputs, constants, type(result) is Tensor)

    def _is_whole(self, register: int, tensor: Tensor) -> bool:
        return register >= self.inputs and self.owners[_storage(tensor)][0] == register


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


_CONV = torch.ops.yolo12_fastconv.conv_bn_act.default
_CONV_OUT = torch.ops.yolo12_fastconv.conv_bn_act_out.default
_ATTENTION = torch.ops.yolo12_fastconv.area_attention.default
