"""Larger blocks on CUDA: results written into channel slices, and whole blocks under the error rule.

pytest -m gpu tests/test_gpu_blocks.py
"""

from __future__ import annotations

import copy
from dataclasses import replace

import cases
import op_checks
import pytest
import support
import torch

from yolo12_fastconv import attention, check_parity, csp, ops, registry
from yolo12_fastconv.patching import patch_modules

pytestmark = pytest.mark.gpu


def written_slice(case: cases.Case, precision: str, cuda, offset: int, pitch: int) -> str | None:
    """What is wrong with the result of `conv_bn_act_out` in channels `offset`... of `pitch`, or None."""
    with op_checks.numerics(tf32=precision == "tf32"):
        arguments = case.inputs(op_checks.PRECISIONS[precision], cuda).eval_arguments()
        expected = ops.conv_bn_act(**arguments)
        n, k, p, q = expected.shape
        whole = torch.full((n, p, q, pitch), 7.0, dtype=expected.dtype, device=cuda).permute(0, 3, 1, 2)
        untouched = whole.clone()
        out = whole[:, offset : offset + k]
        out.fill_(float("nan"))
        ops.conv_bn_act_out(out=out, **arguments)
    if not torch.equal(out, expected):
        return f"{case} {precision} at {offset} of {pitch}: differs from conv_bn_act"
    out.copy_(untouched[:, offset : offset + k])
    return (
        None
        if torch.equal(whole, untouched)
        else f"{case} {precision} at {offset} of {pitch}: neighbours changed"
    )


@pytest.mark.parametrize("precision", list(op_checks.PRECISIONS))
def test_results_written_into_slices(cuda, precision):
    """`conv_bn_act` is compared with float64 elsewhere; here: the same numbers, and nothing beside them."""
    problems = []
    shapes = [
        replace(case, residual=residual) for case in cases.conv_shapes("n", 160) for residual in (False, True)
    ]
    for case in (*shapes, *cases.AWKWARD):
        k = case.out_size[1]
        for offset, pitch in ((0, k + 8), (8, -(-k // 8) * 8 + 16), (3, k + 5)):
            problems.append(written_slice(case, precision, cuda, offset, pitch))
    problems = [problem for problem in problems if problem]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("cfg", ["yolo12n.yaml", "yolo12l.yaml"])
@pytest.mark.parametrize(
    ("dtype", "mode", "autocast"),
    [
        (torch.float16, "eval", False),
        (torch.bfloat16, "eval", False),
        (torch.float16, "eval", True),
        (torch.float32, "eval", False),
        (torch.float16, "train", True),
        (torch.float32, "train", False),
    ],
)
def test_blocks_of_the_models(cuda, cfg, dtype, mode, autocast):
    report = check_parity(
        support.build(cfg),
        imgsz=(160, 224),
        dtype=dtype,
        mode=mode,
        autocast=autocast,
        device=cuda,
        progress=False,
    )
    assert len(list(report.larger_blocks())) == len(
        [m for m in support.build(cfg).modules() if type(m) in registry.FUSED]
    )
    bad = [row for row in report.blocks if not row.ok]
    assert not bad, "\n".join(f"{row.layer} {row.quantity} ({row.geometry}): {row.comparison}" for row in bad)


def test_inference_copies_nothing(cuda):
    """Concats and residuals cost no kernel of their own: of torch's, none that copies, concatenates or adds."""
    model = support.build("yolo12n.yaml").to(cuda).half().eval()
    of_convolutions = {
        s for s, fast in registry.FUSED.items() if fast.__module__ in (csp.__name__, attention.__name__)
    }
    blocks = [copy.deepcopy(block) for block in model.modules() if type(block) in of_convolutions]
    for block in blocks:
        patch_modules(block)
        channels = next(p for p in block.parameters() if p.dim() == 4).shape[1]
        x = torch.randn(2, channels, 20, 24, device=cuda, dtype=torch.half).to(
            memory_format=torch.channels_last
        )
        with torch.inference_mode(), support.OpLog() as log:
            block(x)
        foreign = {
            name for name in log.names if any(op in name for op in ("aten.cat", "copy_", "aten.add", "clone"))
        }
        assert not foreign, f"{type(block).__name__}: {foreign}"


def test_inference_is_deterministic_and_needs_no_fresh_memory(cuda):
    model = support.build("yolo12n.yaml").to(cuda).half().eval()
    patch_modules(model)
    x = torch.rand(2, 3, 160, 224, device=cuda, dtype=torch.half)
    with torch.inference_mode():
        first = support.tensors(model(x))
        poison = [torch.full((1 << 24,), float("nan"), device=cuda, dtype=torch.half) for _ in range(4)]
        del poison  # what the next buffers are made of
        for a, b in zip(first, support.tensors(model(x)), strict=True):
            assert torch.equal(a, b)


def test_weights_in_the_kernels_layout_change_no_bit(cuda):
    """A fused model's weights get other strides when it moves; packing them at every call gave the same numbers."""
    model = support.build("yolo12n.yaml").fuse(verbose=False).to(cuda).half()
    x = torch.rand(2, 3, 96, 128, device=cuda, dtype=torch.half)
    patch_modules(model)
    kept = [m for m in model.modules() if "_fc_weight_kept" in vars(m)]
    assert len(kept) == 32
    with torch.inference_mode():
        ours = support.tensors(model(x))
        for module in kept:
            module.conv.weight.data = module.conv.weight.data.contiguous()
        assert all(torch.equal(a, b) for a, b in zip(ours, support.tensors(model(x)), strict=True))
