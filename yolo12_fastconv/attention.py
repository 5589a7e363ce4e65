"""Fast classes of YOLO12's attention blocks: `AAttn` (area attention) and `ABlock` (attention and a small MLP)."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from yolo12_fastconv import ops
from yolo12_fastconv.fused_block import (
    FusedBlock,
    child,
    is_watched,
    run,
    run_and_pass,
    run_and_pass_twice,
    store,
)

from ultralytics.nn.modules.block import AAttn, ABlock  # isort: skip  (fused_block has checked that)

__all__ = ["FastAAttn", "FastABlock"]


class FastAAttn(FusedBlock, AAttn):
    """``proj(attention(qkv(x)) + pe(values))``: attention within each area of the map as one op, which also hands out
    the values as a tensor of their own; `pe` adds what attention made of them.

    The layout of `qkv` is that of Ultralytics' `AAttn`: for each head its query, key and value channels in this order.
    """

    _stock: Any = AAttn
    _stock_args = (1, 1)
    fuses = "area attention, its sum with pe"
    samples: ClassVar[Any] = ((32, 1, 1), (64, 2, 4))

    @classmethod
    def structure_problem(cls, block: Any) -> str | None:
        modules = block._modules
        if not ("qkv" in modules and "pe" in modules and "proj" in modules):
            missing = ", ".join(name for name in ("qkv", "pe", "proj") if name not in modules)
            return f"has no child {missing}: another layout of attention"
        conv = modules["qkv"]._modules.get("conv")
        if conv is not None and is_watched(
            conv
        ):  # counters of operations see matmul and softmax beside their hooks
            return "qkv.conv has hooks or a forward of its own"
        return None

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.run_and_pass(x, residual, out)[0]

    def run_and_pass(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `FusedBlock`."""
        heads = self.num_heads
        if residual is x:
            qkv, residual, passed = run_and_pass_twice(child(self, "qkv"), x)
        else:
            qkv, passed = run_and_pass(child(self, "qkv"), x)
        if qkv.shape[1] != 3 * heads * self.head_dim:  # pruned, for example: stock's error
            y = self._stock.forward(self, x)
            return store(y if residual is None else residual + y, out), passed
        attended, values = ops.area_attention(qkv, heads, self.area, with_values=True)
        return run(child(self, "proj"), run(child(self, "pe"), values, attended), residual, out), passed


class FastABlock(FusedBlock, ABlock):
    """``x = x + attn(x)``, then ``x + mlp(x)``: each sum is made by the last convolution before it."""

    _stock: Any = ABlock
    _stock_args = (1, 1)
    fuses = "residuals in attn.proj and mlp.1"
    samples: ClassVar[Any] = ((32, 1, 1.2, 1),)

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.run_and_pass(x, residual, out)[0]

    def run_and_pass(
        self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `FusedBlock`."""
        attended, passed = run_and_pass(child(self, "attn"), x, x)
        if residual is None:
            return run(child(self, "mlp"), attended, attended, out), passed
        return store(residual + run(child(self, "mlp"), attended, attended), out), passed
