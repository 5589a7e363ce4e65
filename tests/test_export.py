"""Exports of patched models: standard operators, the same numbers, and the live model stays patched."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from support import assert_same, fused_calls, patched_copy, tensors
from torch import nn
from ultralytics import YOLO

from yolo12_fastconv import patch_model
from yolo12_fastconv.blocks import FastConv

pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def prepare(model: nn.Module, fused: bool) -> nn.Module:
    fast = patched_copy(model)
    if fused:
        fast.fuse(verbose=False)
    return fast.requires_grad_(False)


def run_onnx(path: str, x: torch.Tensor) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(y) for y in session.run(None, {session.get_inputs()[0].name: x.numpy()})]


LOAD_WITHOUT_PLUGIN = """
import sys
sys.modules["yolo12_fastconv"] = None
import torch
model = torch.jit.load(sys.argv[1])
torch.save(model(torch.load(sys.argv[2])), sys.argv[3])
"""


@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
def test_torchscript_file_runs_without_the_plugin(fused, tiny, tmp_path):
    fast = prepare(tiny, fused)
    x, other = torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)
    traced = torch.jit.trace(fast, x, strict=False)
    assert "yolo12_fastconv::" not in str(traced.inlined_graph)
    files = [str(tmp_path / name) for name in ("model.torchscript", "x.pt", "y.pt")]
    traced.save(files[0])
    torch.save(other, files[1])
    subprocess.run([sys.executable, "-c", LOAD_WITHOUT_PLUGIN, *files], check=True)
    assert fused_calls(fast, other) == 25
    assert_same(tensors(torch.load(files[2])), tensors(fast(other)), 1e-5)


@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
def test_onnx_by_tracing(fused, tiny, tmp_path):
    fast = prepare(tiny, fused)
    x, other = torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(fast, (x,), path, dynamo=False)
    graph = onnx.load(path).graph
    assert {node.domain for node in graph.node} == {""}
    assert fused_calls(fast, other) == 25
    for mine, theirs in zip(run_onnx(path, other), tensors(fast(other)), strict=False):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["bn", "fused"])
def test_torch_export(fused, strict, tiny):
    fast = prepare(tiny, fused)
    x, other = torch.rand(2, 3, 32, 32), torch.rand(2, 3, 32, 32)
    program = torch.export.export(fast, (x,), strict=strict)
    assert "yolo12_fastconv" not in str(program.graph)
    assert "conv2d" in str(program.graph)
    assert fused_calls(fast, other) == 25
    assert_same(tensors(program.module()(other)), tensors(fast(other)), 1e-5)


@pytest.mark.parametrize("form", ["torchscript", "onnx", "openvino"])
def test_export_of_a_patched_yolo(form, tmp_path, images):
    if form == "openvino":
        openvino = pytest.importorskip("openvino")
    yolo = patch_model(YOLO("yolo12n.yaml"))
    yolo.ckpt_path = str(tmp_path / "model.pt")  # names the exported file
    yolo.model.pt_path = yolo.ckpt_path
    weights = copy.deepcopy(yolo.model.state_dict())
    path = yolo.export(format=form, imgsz=64)
    assert sum(isinstance(m, FastConv) for m in yolo.model.modules()) == 113
    assert all(torch.equal(weights[k], v) for k, v in yolo.model.state_dict().items())
    x = images[:1]
    with torch.no_grad():
        expected = tensors(yolo.model.eval()(x))[0]
        if form == "onnx":
            assert {node.domain for node in onnx.load(path).graph.node} == {""}
            exported = run_onnx(path, x)[0]
        elif form == "openvino":
            core = openvino.Core()
            file = core.read_model(next(Path(path).glob("*.xml")))
            assert all(op.get_type_info().version_id.startswith("opset") for op in file.get_ops())
            exported = torch.from_numpy(core.compile_model(file, "CPU")(x.numpy())[0])
        else:
            exported = torch.jit.load(path)(x)
    np.testing.assert_allclose(tensors(exported)[0], expected, rtol=1e-3, atol=1e-3)
    picture = (images[0].permute(1, 2, 0) * 255).byte().numpy()
    found, live = (
        model.predict(picture, imgsz=64, conf=0.0001, verbose=False)[0].boxes.data
        for model in (YOLO(path, task="detect"), yolo)
    )
    assert len(found) == len(live) > 0
    torch.testing.assert_close(found, live, rtol=1e-2, atol=1e-2)


def test_fx_tracing_of_a_block_is_refused_or_holds_standard_operators(tiny):
    """torch.fx reaches torch's functions through Proxy objects, which are no tensors: the stock path."""
    graph = torch.fx.symbolic_trace(patched_copy(tiny).model[0])
    assert "yolo12_fastconv" not in graph.code
    x = torch.rand(1, 3, 32, 32)
    assert_same([graph(x)], [tiny.model[0](x)], 1e-6)
