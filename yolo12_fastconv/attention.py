"""Fast classes of YOLO12's attention blocks: `AAttn` (area attention) and `ABlock` (attention and a small MLP)."""

from __future__ import annotations

from torch import Tensor

from yolo12_fastconv.fused_block import FusedBlock, child, run, store

from ultralytics.nn.modules.block import ABlock  # isort: skip  (fused_block has checked that)

__all__ = ["FastABlock"]


class FastABlock(FusedBlock, ABlock):
    """``x = x + attn(x)``, then ``x + mlp(x)``: each sum is made by the last convolution before it."""

    _stock = ABlock
    _stock_args = (32, 1)
    fuses = "residuals in attn.proj and mlp.1"
    samples = ((32, 1, 1.2, 1),)

    def run(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        x = run(child(self, "attn"), x, x)
        if residual is None:
            return run(child(self, "mlp"), x, x, out)
        return store(residual + run(child(self, "mlp"), x, x), out)
