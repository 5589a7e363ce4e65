"""Blocks as programs on CUDA: the same bits as op by op.

pytest -m gpu tests/test_gpu_programs.py
"""

from __future__ import annotations

import copy

import op_checks
import pytest
import support
import torch
from torch import nn

from yolo12_fastconv import _program, ops, patch_model, programs

pytestmark = pytest.mark.gpu


def poison() -> None:
    """Leave NaN in the memory that the next calls allocate."""
    for size in (1 << 28, 1 << 20, 1 << 12):
        torch.empty(size, dtype=torch.uint8, device="cuda").fill_(255)


def op_by_op(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_is_served", lambda t: False)
        return [t.clone() for t in support.tensors(model(x))]


@pytest.fixture(scope="module", params=["yolo12n.yaml", "yolo12l.yaml"])
def network(request):
    return support.build(request.param)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [(1, 320, 320), (8, 96, 160)], ids=str)
@pytest.mark.parametrize("precision", list(op_checks.PRECISIONS))
def test_a_whole_model(cuda, network, precision, size, fused):
    batch, *picture = size
    with op_checks.numerics(tf32=precision == "tf32"), torch.no_grad():
        model = copy.deepcopy(network).to(cuda)
        if fused:
            model.fuse(verbose=False)
        model = patch_model(model.to(op_checks.PRECISIONS[precision]))
        for _ in range(4):
            x = torch.randn(batch, 3, *picture, device=cuda, dtype=op_checks.PRECISIONS[precision])
            expected = op_by_op(model, x)
            poison()
            for y, e in zip(support.tensors(model(x)), expected, strict=True):
                assert torch.equal(y, e) and y.stride() == e.stride()
        texts = [text for module in model.modules() for text in programs.describe(module)]
        assert len(texts) == 10 and all(text.startswith("a program") for text in texts)
        for parameter in model.parameters():
            parameter.mul_(0.97)
        y = support.tensors(model(x))[0]
        assert torch.equal(y, op_by_op(model, x)[0])
        assert not torch.equal(y, expected[0])


def test_streams_and_graphs(cuda, network):
    """Programs run on the current stream, and not at all while a graph is captured."""
    model = patch_model(copy.deepcopy(network).to(cuda).half())
    x = torch.randn(1, 3, 96, 96, device=cuda, dtype=torch.half)
    with torch.inference_mode():
        for _ in range(3):
            expected = support.tensors(model(x))[0].clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = torch.zeros_like(x).copy_(x)
            y = support.tensors(model(late))[0]
        stream.synchronize()
        assert torch.equal(y, expected)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = support.tensors(model(x))[0]
        graph.replay()
        assert torch.equal(y, expected)


def test_deterministic_mode(cuda, network):
    model = patch_model(copy.deepcopy(network).to(cuda).half())
    x = torch.randn(1, 3, 96, 96, device=cuda, dtype=torch.half)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.inference_mode():
            outputs = [support.tensors(model(x))[0] for _ in range(4)]
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(y, outputs[0]) for y in outputs)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([99], "instruction 99"),
        ([_program.RETURN, 7], "register 7"),
        ([_program.EMPTY, 1, 2], "ends within"),
        ([_program.FREE, 0, _program.RETURN, 0], "freed"),
        ([_program.EXPECT, 3, 0, 0], "constant 3"),
        ([_program.VIEW, 0, 1, 4, 3, 5, 60, 1, 20, 4, 1], "beyond"),
        ([_program.VIEW, 0, 1, 4, 3, 5, 60, 1, 20, 4, -1], "beyond"),
        ([_program.RETURN, 0, _program.RETURN, 0], "2 tensors"),
    ],
)
def test_bad_programs(cuda, code, message):
    x = torch.randn(1, 3, 5, 4, device=cuda).permute(0, 3, 1, 2)
    with pytest.raises(RuntimeError, match=message):
        ops.run_program([x], [], torch.tensor(code), [*x.shape, *x.stride()])
    with pytest.raises(RuntimeError, match="on the CPU"):
        ops.run_program([x], [], torch.tensor(code, device=cuda), [*x.shape, *x.stride()])


def test_unexpected_constants_end_a_program(cuda):
    x = torch.randn(1, 4, 3, 5, device=cuda, dtype=torch.half)
    program = torch.tensor([_program.EXPECT, 0, 0, 1, 4])
    for constant in (
        torch.zeros(4, device=cuda),
        torch.zeros(5, device=cuda, dtype=torch.half),
        torch.zeros(4, 1, device=cuda, dtype=torch.half),
        torch.zeros(4, dtype=torch.half),
    ):
        assert ops.run_program([x], [constant], program, []) == []
