"""scripts/tune.py without a GPU: arguments, estimates, and a fit to made-up timings."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from yolo12_fastconv import ops
from yolo12_fastconv._arguments import UsageError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import cases
import tune

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

KERNELS = (
    "implicit_gemm/sm80/64x64x8x4",
    "implicit_gemm/sm80/16x32x8x8",
    "implicit_gemm/sm90/128x64x64-{}-streamed-2+8",
    "implicit_gemm/sm90/256x32x64-{}-streamed-4+8",
    "implicit_gemm/sm90/192x96x64-{}-streamed-3+4",
)


def test_arguments():
    options = tune.parse(["model=n,x", "batch=1", "top=8", "budget=60", "out=f.json"], tune._SWEEP_KEYS)
    assert options.model == ("n", "x") and options.batch == (1,) and options.top == 8 and options.budget == 60
    assert tune.parse(["sweep=a,b", "write=True"], tune._FIT_KEYS).sweep == (Path("a"), Path("b"))
    assert tune.parse(["dtype=tf32"], tune._SWEEP_KEYS).dtype == "tf32"
    for argument in ("model=y", "batch=0", "dtype=fp64", "top=x", "sweep=a"):
        with pytest.raises(UsageError, match=argument.partition("=")[0]):
            tune.parse([argument], tune._SWEEP_KEYS)
    assert (
        tune.main([]) == tune.main(["sweep"]) == tune.main(["fit"]) == tune.main(["fit", "sweep=/none"]) == 2
    )


@needs_compiler
def test_fit_finds_what_made_the_times(tmp_path, capsys):
    model = tune.Model()
    assert len(set(model.names)) == len(model.names) > 20
    slower = model.defaults * np.where(np.array(model.names) == "gemm_step", 8.0, 1.0)
    rows = []
    for case in tune.dense_layers("n", 640, 1):
        layer = tune.layer_of(case)
        mode = "rows" if case.kernel == (1, 1) else "window"
        kernels = [kernel.format(mode) for kernel in KERNELS if case.ci % 64 == 0 or "sm80" in kernel]
        queries = (tune._Query * len(kernels))(*(model.query(layer, kernel) for kernel in kernels))
        us = model.cycles(queries, slower) / tune.CYCLES_PER_US
        rows.append(
            dict(zip(tune.FIELDS, layer, strict=True)) | {"us": dict(zip(kernels, us.tolist(), strict=True))}
        )
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"kind": "tiles", "rows": rows}))
    assert tune.main(["fit", f"sweep={path}", "seconds=5"]) == 0
    before, after, with_table = (
        float(line.split()[-1])
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("all, weighted equally")
    )
    assert before > 1.02 and after < 1 + (before - 1) / 2 and with_table <= after


@needs_compiler
def test_tf32_has_a_table_of_its_own(tmp_path, capsys, monkeypatch):
    case = cases.Case("one", 256, 256, 40, 40, batch=32)
    model = tune.Model(4)
    layer = tune.layer_of(case)
    names = [f"implicit_gemm/sm90/{tile}-rows-streamed-{stages}" for tile, stages in
             (("128x256x32", "4+4"), ("192x128x32", "4+5"), ("256x64x32", "4+4"))]  # fmt: skip
    queries = (tune._Query * 3)(*(model.query(layer, name) for name in names))
    slowest = names[int(np.argmax(model.cycles(queries, model.defaults)))]
    row = dict(zip(tune.FIELDS, layer, strict=True)) | {"us": {n: 10.0 - (n == slowest) for n in names}}
    files = [tmp_path / f"{name}.json" for name in ("tf32", "fp16")]
    for file in files:
        file.write_text(json.dumps({"kind": "tiles", "dtype": file.stem, "rows": [row]}))
    table = tmp_path / "tf32.inc"
    monkeypatch.setattr(tune, "TF32_TABLE", table)
    before = tune.HEADER.read_text(), tune.TABLE.read_text()
    assert tune.main(["fit", f"sweep={files[0]}", "write=True"]) == 0
    assert table.read_text() == f'{{32, 256, 256, 40, 1, 1, "{slowest}"}},\n'
    assert before == (tune.HEADER.read_text(), tune.TABLE.read_text())
    assert tune.main(["fit", f"sweep={files[0]},{files[1]}"]) == 2
    assert "not both at once" in capsys.readouterr().err


@needs_compiler
def test_plans_whose_blocks_share_work_have_a_table_of_their_own(tmp_path, monkeypatch):
    cases_of = {size: cases.Case("one", 256, 256, size, size, batch=32) for size in (40, 80)}
    model = tune.Model()
    names = [f"implicit_gemm/sm90/{tile}-rows-streamed-{stages}" for tile, stages in
             (("128x256x64", "4+4"), ("192x128x64", "4+5"))]  # fmt: skip
    shared = [
        names[1].replace("streamed-", f"streamed-{way}-") for way in ("paired", "rest", "paired-rest", "ring")
    ]
    rows = []
    for size, times in ((40, (9.0, 8.5, 8.7, 8.9)), (80, (9.9, 9.95, 9.9, 9.9))):
        layer = tune.layer_of(cases_of[size])
        queries = (tune._Query * 2)(*(model.query(layer, name) for name in names))
        cycles = model.cycles(queries, model.defaults)
        # Plans have the estimate of the plan that shares nothing.
        assert model.cycles((tune._Query * 1)(model.query(layer, shared[2])), model.defaults)[0] == cycles[1]
        us = dict(zip(names, 10.0 + (cycles > cycles.min()), strict=True)) | dict(
            zip(shared, times, strict=True)
        )
        rows.append(dict(zip(tune.FIELDS, layer, strict=True)) | {"us": us})
    sweep = tmp_path / "sweep.json"
    sweep.write_text(json.dumps({"kind": "tiles", "dtype": "fp16", "rows": rows}))
    for name in ("TABLE", "SHARED_TABLE"):
        monkeypatch.setattr(tune, name, tmp_path / name)
    header = tmp_path / "header"
    header.write_text(tune.HEADER.read_text())
    monkeypatch.setattr(tune, "HEADER", header)
    assert tune.main(["fit", f"sweep={sweep}", "seconds=1", "write=True"]) == 0
    assert (tmp_path / "SHARED_TABLE").read_text() == f'{{32, 256, 256, 40, 1, 1, "{shared[1]}"}},\n'
    assert (tmp_path / "TABLE").read_text() == ""


@needs_compiler
@pytest.mark.skipif(not ops.LIBRARY.loaded, reason=f"no compiled library: {ops.LIBRARY.reason}")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_estimates_are_those_of_the_library(dtype):
    model = tune.Model(dtype.itemsize)
    for case in tune.dense_layers("m", 640, 32):
        names = ops.kernel_candidates(
            (case.batch, case.ci, case.h, case.w), (case.co, case.ci, *case.kernel), case.stride, case.padding,
            case.dilation, 1, dtype, tf32=dtype is torch.float32, capability=90,
        )  # fmt: skip
        queries = (tune._Query * len(names))(*(model.query(tune.layer_of(case), name) for name in names))
        cycles = model.cycles(queries, model.defaults)
        # The first three may be two that were timed, and the best of those that share no work.
        assert (np.diff(cycles[3:]) >= 0).all(), case


def test_table_has_what_the_estimates_miss_by_enough():
    us = {"a": 10.0, "b": 9.0, "c": 9.9}
    layer = (1, 64, 64, 20, 20, 1, 1, 0)
    timings = type("Timings", (), {})()
    timings.layers = [(*layer, "silu"), (*layer, "identity"), (1, 64, 64, 20, 30, 1, 1, 0, "silu")]
    timings.kernels, timings.us = [*us] * 3, np.array([*us.values()] * 3)
    timings.us[4] = 12.0  # b without an activation: 21 in sum, a 20, c 19.8
    timings.sizes, timings.first = [3] * 3, np.array([0, 3, 6])
    chosen = np.array([0, 3, 6])
    assert tune.tuned_layers(timings, chosen, 0.02) == {} and chosen.tolist() == [0, 3, 6]
    assert tune.tuned_layers(timings, chosen, 0.005) == {(1, 64, 64, 20, 1, 1): "c"}
    assert chosen.tolist() == [2, 5, 6]  # the map that is not square has no place in the table
