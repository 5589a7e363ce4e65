"""Programs for the op `run_program`: how ops that follow one another are written down, and how ATen runs them.

A program is an int64 tensor on the CPU: instructions, each a code and its operands. Registers hold tensors: the inputs
first, then what each instruction makes, in order. Constants (weights, batch norms' tensors) are counted by themselves;
-1 stands for one that is absent. A floating-point operand is the bits of a double. ``csrc/host/program.cpp`` runs the
same format on a GPU. It is a tensor because a list costs 40 ns a number on the way into an op, which is 30 us here.
"""

from __future__ import annotations

import itertools
import struct
from typing import Any

import torch
from torch import Tensor

from yolo12_fastconv import _aten

__all__ = ["ATTENTION", "CONVOLUTION", "EMPTY", "EXPECT", "FREE", "RETURN", "VIEW", "bits", "run_program"]

EXPECT = 0
"""constant, 1 for float32 or 0 for the dtype of the inputs, number of dimensions, sizes: if the constant is no such
tensor on the inputs' device, the program ends without results."""
EMPTY = 1
"""sizes (4), strides (4): makes a tensor, uninitialised."""
VIEW = 2
"""register, sizes (4), strides (4), offset from its first element: makes a view."""
CONVOLUTION = 3
"""out register or -1, x and residual registers, weight, bias, gamma, beta, mean, variance constants, eps, stride (2),
padding (2), dilation (2), groups, act: makes a tensor where `out` is -1, else writes there. As `conv_bn_act`."""
ATTENTION = 4
"""qkv register, heads, area, scale, with_values: makes two tensors. As `area_attention`."""
FREE = 5
"""register, which is not read any more."""
RETURN = 6
"""register, the next of the results."""


def bits(value: float) -> int:
    """The bits of a double, as a signed integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _double(value: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", value))[0])


def run_program(
    inputs: list[Tensor],
    constants: list[Tensor],
    program: Tensor,
    outputs: list[int],
    dtype: torch.dtype,
    allow_tf32: bool,
) -> list[Tensor]:
    try:
        return _interpret(inputs, constants, program.tolist(), outputs, dtype, allow_tf32)
    except (IndexError, StopIteration):
        raise RuntimeError(
            "yolo12_fastconv: program reads a register or constant, or a number, that is not there"
        ) from None


def _interpret(
    inputs: list[Tensor],
    constants: list[Tensor],
    program: list[int],
    outputs: list[int],
    dtype: torch.dtype,
    allow_tf32: bool,
) -> list[Tensor]:
    registers: list[Tensor | None] = list(inputs)
    results: list[Tensor] = []
    numbers = iter(program)

    def take(count: int) -> list[int]:
        values = list(itertools.islice(numbers, count))
        if len(values) < count:
            raise IndexError
        return values

    def register() -> Tensor | None:
        index = next(numbers)
        return None if index < 0 else _present(registers[index])

    def constant() -> Tensor | None:
        index = next(numbers)
        return None if index < 0 else constants[index]

    for instruction in numbers:
        if instruction == EXPECT:
            held, float32 = _present(constant()), next(numbers)
            sizes = take(next(numbers))
            if (
                held.dtype is not (torch.float32 if float32 else dtype)
                or list(held.shape) != sizes
                or held.device != inputs[0].device
            ):
                return []
        elif instruction == EMPTY:
            registers.append(inputs[0].new_empty_strided(take(4), take(4), dtype=dtype))
        elif instruction == VIEW:
            source = _present(register())
            sizes, strides, offset = take(4), take(4), next(numbers)
            registers.append(source.as_strided(sizes, strides, source.storage_offset() + offset))
        elif instruction == CONVOLUTION:
            out, x, residual = register(), _present(register()), register()
            weight, bias, batch_norm = _present(constant()), constant(), [constant() for _ in range(4)]
            operands: Any = (
                bias, *batch_norm, _double(next(numbers)), residual, take(2), take(2), take(2), next(numbers),
                next(numbers), dtype, allow_tf32,
            )  # fmt: skip
            if out is None:
                registers.append(_aten.conv_bn_act(x, weight, *operands))
            else:
                _aten.conv_bn_act_out(x, weight, out, *operands)
        elif instruction == ATTENTION:
            qkv, heads, area = _present(register()), next(numbers), next(numbers)
            y, values, _ = _aten.area_attention(qkv, heads, area, _double(next(numbers)), bool(next(numbers)))
            registers += [y, values]
        elif instruction == FREE:
            registers[next(numbers)] = None
        elif instruction == RETURN:
            results.append(_present(register()))
        else:
            raise RuntimeError(f"yolo12_fastconv: program has an instruction {instruction}")
    if results and len(outputs) != 8 * len(results):
        raise RuntimeError(
            f"yolo12_fastconv: program returns {len(results)} tensors, outputs has {len(outputs)} numbers, not 8 for "
            "each"
        )
    return results


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise RuntimeError("yolo12_fastconv: program reads a register that was freed")
    return tensor
