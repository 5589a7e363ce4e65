"""The one list of what is swapped: Ultralytics block types and the classes that their blocks become.

Exact types: a subclass computes something else until it stands here by itself. `Conv` and `DWConv` are the blocks that
hold convolutions; the others are made of those, and of each other. To add one: a subclass of `FusedBlock` in a file of
its own or beside its like, and a line here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from yolo12_fastconv import attention, csp, heads, neck
from yolo12_fastconv.blocks import FAST

__all__ = ["FUSED", "UNFUSED", "blocks_of", "formula_problem"]

FUSED: dict[type[nn.Module], Any] = {
    fast._stock: fast
    for fast in (
        csp.FastBottleneck,
        csp.FastC2f,
        csp.FastC3k2,
        csp.FastC3,
        csp.FastC3k,
        csp.FastA2C2f,
        attention.FastAAttn,
        attention.FastABlock,
        neck.FastUpsample,
        neck.FastConcat,
        heads.FastDetect,
        heads.FastSegment,
        heads.FastPose,
        heads.FastOBB,
    )
}
"""Stock class to fast class, of blocks made of others."""

UNFUSED: dict[type[nn.Module], type[nn.Module]] = {fast: stock for stock, fast in FUSED.items()}
"""Fast class to stock class."""


def blocks_of(network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and block of every fused block of `network`, outer ones first."""
    for name, module in network.named_modules():
        if type(module) in UNFUSED:
            yield name, module


def formula_problem(stock: type[nn.Module]) -> str | None:
    """Why the installed Ultralytics' `stock` is not what its fast class computes; None if it is.

    Small blocks of the stock class are run beside swapped copies of themselves, in float64, in training and in
    evaluation. The stock forward is part of the cache's key: one that is replaced is looked at again.
    """
    return _formula_problem(FUSED[stock], stock.forward)


@functools.lru_cache(maxsize=64)
def _formula_problem(fast: Any, forward: Callable) -> str | None:
    import ultralytics

    what = "computes something else"
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.inference_mode(False),
            torch.autocast("cpu", enabled=False),
            _one_thread(),
            # Not for nothing: every call of torch passes through Python then.
            contextlib.nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu"),
        ):
            torch.manual_seed(0)
            same = all(_same_numbers(fast, arguments) for arguments in fast.samples)
    except Exception as error:
        same, what = False, f"raises {type(error).__name__}: {error}"
    name, version = fast._stock.__name__, ultralytics.__version__
    return None if same else f"{name} of Ultralytics {version} {what} than its fused form"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of a few hundred elements gain nothing from threads, and lose seconds to them where the cores are busy:
    with two threads on two busy cores the checks of all blocks took 120 s, with one thread 7 s.

    The number is one for the process: other threads compute with one thread too until it is put back.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _same_numbers(fast: Any, arguments: tuple[Any, ...]) -> bool:
    block: Any = fast._stock(*arguments).double()
    twin: Any = fast._stock(*arguments).double()
    for tensor in block.buffers():
        if tensor.is_floating_point():
            nn.init.uniform_(tensor, 0.5, 1.5)
    for parameter in block.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    fast.sample_input(twin)
    x = fast.sample_input(block)
    twin.load_state_dict(block.state_dict())
    for module in twin.modules():
        kind = type(module)
        module.__class__ = FAST.get(kind) or FUSED.get(kind) or kind
    for training in (False, True):
        block.train(training)
        twin.train(training)
        with torch.set_grad_enabled(training):
            ours, expected = twin(x), block.forward(x)
        pairs = zip((*_tensors(ours), *twin.buffers()), (*_tensors(expected), *block.buffers()), strict=True)
        if not all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in pairs):
            return False
    return True


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a nested output; the names in a dictionary are part of it."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for name in sorted(output):
            yield from _tensors(output[name])
    elif isinstance(output, list | tuple):
        for part in output:
            yield from _tensors(part)
