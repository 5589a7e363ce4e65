"""What the fast classes of larger blocks have in common, and how they call their children.

A larger block (`Bottleneck`, `C3k2`, `AAttn`, ...) is made of other blocks. Its fast class computes the stock class's
formula with the same children, and hands two things down to those that can use them: a tensor to add to a result, and
the place where a result belongs. A child that is no fast block, or that somebody watches by hooks, is called as stock
calls it. So nothing about the children needs to be known beforehand, and every child's own state is read when it runs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from yolo12_fastconv import _config, blocks, programs
from yolo12_fastconv.blocks import SEAT, FallbackError, FastConv, StockPickle

__all__ = ["FusedBlock", "child", "is_at", "is_watched", "run", "run_and_pass", "run_and_pass_twice", "store"]

child = blocks.child


class FusedBlock(StockPickle):
    """Base of the fast classes of larger blocks.

    A subclass names its stock class (`_stock`, also its second base), arguments of a cheap and legal constructor call
    (`_stock_args`), and implements `run`. It has no state of its own; `yolo12_fastconv.registry` lists it.
    """

    fuses: ClassVar[str] = ""
    """What runs fused, in a few words, for the report."""
    samples: ClassVar[Any] = ()
    """Constructor arguments of small blocks, on whose numbers the formula of the installed stock class is checked."""

    @classmethod
    def structure_problem(cls, block: Any) -> str | None:
        """Why `block`, of the stock class or of this one, computes as stock: what it is made of is not what this class
        knows. None if it does. Asked before patching, by reports, and at every call: it must be cheap."""
        return None

    @classmethod
    def sample_input(cls, block: Any) -> Any:
        """Input for a block made of `samples`, on a CPU in float64."""
        channels = next(parameter.shape[1] for parameter in block.parameters() if parameter.dim() == 4)
        return torch.randn(1, channels, 4, 6, dtype=torch.float64)

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """``self(x) + residual``, in `out` if it can be written; see `FastConv.run`. Never called while exporting."""
        raise NotImplementedError

    def run_and_pass(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`run`, and `x` for whatever else reads it: see `ops.conv_bn_act_train_and_pass`."""
        return self.run(x, residual, out), x

    def plane(self, x: Tensor) -> tuple[int, int]:
        """Height and width of the result."""
        return x.shape[2], x.shape[3]

    def forward(self, x: Tensor) -> Tensor:
        """As the stock class."""
        return programs.call(self, self.run_or_stock, x)

    def run_or_stock(self, x: Tensor) -> Tensor:
        """`forward`, op by op."""
        if not self.fused_now():
            return self._stock.forward(self, x)
        seat = self.__dict__.get(SEAT)
        if seat is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.run(x)
        return seat.fill(self, x)

    def fused_now(self) -> bool:
        """Whether a call at this moment computes by `run`: not while exporting, since exported graphs shall hold
        standard operators, not when the plugin is disabled, and not in a structure that the class does not know.

        Raises:
            FallbackError: the structure is unknown, and strict mode is on.
        """
        if blocks.exporting() or _config.disabled():
            return False
        problem = self.structure_problem(self)
        if problem is not None and ("_fc_strict" in self.__dict__ or _config.strict()):
            name = self.__dict__.get("_fc_strict") or type(self).__name__
            raise FallbackError(f"yolo12_fastconv strict mode: {name} computes as stock: {problem}")
        return problem is None


def run(
    module: Any,
    x: Tensor,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    passed: list[Tensor] | None = None,
) -> Tensor:
    """``module(x) + residual`` for a child of a fused block, in `out` if it can be written there.

    Fast blocks that nobody watches run without the machinery of `nn.Module.__call__`.

    Args:
        residual: may be `x` itself.
        passed: `x` once for each of its other readers, one or two; gets what they shall read instead. In training their
            gradients are added where `module` computes its own, if the first thing it does is a fast convolution:
            autograd needs no pass of its own for the sum.

    Returns:
        `out` if it was written, else another tensor of whatever dtype and size stock has.
    """
    kind = type(module)
    if issubclass(kind, FastConv):
        if not is_watched(module):
            return module.run(x, residual, out, passed)
    elif issubclass(kind, FusedBlock):
        if not is_watched(module) and module.fused_now():
            if passed is None:
                return module.run(x, residual, out)
            y, other = module.run_and_pass(x, residual, out)
            passed[:] = [other] * len(passed)
            return y
    elif kind is nn.Sequential and module._modules and not is_watched(module):
        first, *rest = module._modules.values()
        if not rest:
            return run(first, x, residual, out, passed)
        if residual is x:
            passed = [x] if passed is None else passed
            y = run(first, x, passed=passed)
            residual = passed[0]
        else:
            y = run(first, x, passed=passed)
        for layer in rest[:-1]:
            y = run(layer, y)
        return run(rest[-1], y, residual, out)
    y = module(x)
    if residual is not None:
        y = residual + y
    return store(y, out)


def run_and_pass(
    module: Any, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`run`, and what another reader of `x` shall read instead."""
    passed = [x]
    return run(module, x, residual, out, passed), passed[0]


def run_and_pass_twice(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`run`, and what two others that read `x` shall read instead."""
    passed = [x, x]
    return run(module, x, passed=passed), passed[0], passed[1]


def is_at(place: Tensor | None, y: Tensor) -> bool:
    """Whether `y` was written to `place`; with autograd it is another tensor there."""
    return y is place or (
        place is not None
        and torch.is_grad_enabled()
        and y.stride() == place.stride()
        and y.shape == place.shape
        and y.dtype is place.dtype
        and y.data_ptr() == place.data_ptr()
    )


def store(y: Tensor, out: Tensor | None) -> Tensor:
    """`out` after copying `y` there, or `y` if there is no `out`, it is of another size, dtype or device, or a gradient
    is recorded."""
    if out is None or type(y) is not Tensor or torch.is_grad_enabled():
        return y
    if y.shape != out.shape or y.dtype is not out.dtype or y.device != out.device:
        return y
    return out.copy_(y)


def is_watched(module: nn.Module) -> bool:
    """Whether calling `module` does more than its class's forward, or than the one that ``fuse()`` gave it."""
    if _has_any_global_hook() or blocks.has_hooks(module):
        return True
    forward = module.__dict__.get("forward")
    return forward is not None and not blocks.is_fused_forward(module, forward)
