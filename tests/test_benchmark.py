"""scripts/benchmark.py: arguments, arithmetic, records, tables and plots. What it times needs a GPU."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import cases
import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
CEILINGS = {"tb_s": 4.0, "tflop_s": 800.0}


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield importlib.import_module("benchmark")
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture
def checkout(benchmark, tmp_path, monkeypatch):
    """An empty checkout in place of this one, for what is written."""
    folder = tmp_path / "docs" / "benchmarks"
    monkeypatch.setattr(benchmark.records, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark.records, "RECORDS", folder)
    monkeypatch.setattr(benchmark, "RECORDS", folder)
    records = benchmark.records
    (tmp_path / "README.md").write_text(f"before\n{records.BEGIN}\nan older one\n{records.END}\nafter\n")
    return tmp_path


def found(ours, eager, cudnn):
    def time(us):
        return None if us is None else {"us": us, "spread": 0.01}

    notes = {"cudnn": "fused graphs have no groups"} if cudnn is None else {}
    return {"times": {"ours": time(ours), "eager": time(eager), "cudnn": time(cudnn)}, "notes": notes}


@pytest.fixture
def a_set(benchmark):
    """Makes a set as `layers` does: YOLO12n, each layer twice its roofline, eager 4 times, cuDNN 3 where it has one."""

    def make(batch=32, complete=True, factor=2.0, **changes):
        rows = []
        for case in cases.conv_shapes("n", batch=batch):
            least = benchmark.roofline(case.flops, case.bytes(torch.float16), CEILINGS)
            times = found(factor * least, 4 * least, None if case.groups > 1 else 3 * least)
            rows.append(benchmark._row(case, torch.float16, CEILINGS, times))
        return {
            "model": "yolo12n", "batch": batch, "imgsz": 640, "dtype": "fp16", "tf32": False, "target": "default",
            "complete": complete, "date": "2026-01-02", "sources": {"csrc": "c" * 16, "package": "p" * 16},
            "environment": {"versions": {"torch": "2.14.1"}}, "ceilings": CEILINGS, "replays": 9, "rows": rows,
        } | changes  # fmt: skip

    return make


def a_record(*sets, complete=True, gpu="NVIDIA Test 1"):
    return {"kind": "layers", "gpu": gpu, "complete": complete, "sets": list(sets)}


def test_arguments(benchmark, tmp_path):
    options = benchmark.parse(["model=yolo12x,yolo12n", "batch=8", "dtype=bf16,fp32", "tf32=False", "rows=all",
                               f"out={tmp_path}", "budget=90", "target=sm80"])  # fmt: skip
    assert (options.model, options.batch, options.dtype) == (("yolo12x", "yolo12n"), (8,), ("bf16", "fp32"))
    assert (options.tf32, options.rows, options.out, options.budget) == (False, None, tmp_path, 90)
    assert benchmark.parse([]).model == benchmark.MODELS


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("modle=yolo12n", "unknown key 'modle'; the keys are model, batch, dtype"),
        ("yolo12n", "'yolo12n' is not KEY=VALUE"),
        ("model=yolo11n", "model=yolo11n: model must be some of yolo12n,"),
        ("batch=0", "batch=0: batch must be numbers from 1"),
        ("imgsz=100", "a multiple of 32"),
        ("peers=eager,tensorrt", "peers must be some of eager,cudnn,compile"),
        ("target=aten", "target must be one of sm80, sm90"),
        ("budget=-1", "budget must be seconds"),
    ],
)
def test_a_wrong_argument_is_named(benchmark, capsys, argument, said):
    assert benchmark.main(["layers", argument]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_without_a_gpu_it_says_so():
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "layers", "model=yolo12n"]
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (2, "benchmark: no CUDA GPU here\n")


def test_roofline_of_known_layers(benchmark):
    def of(ci, co, size, k, s):
        shapes = cases.conv_shapes("n", batch=32)
        case = next(c for c in shapes if (c.ci, c.co, c.h, c.kernel[0], c.stride[0]) == (ci, co, size, k, s))
        return benchmark._row(case, torch.float16, {"tb_s": 4.3, "tflop_s": 790.0}, found(1, 1, 1))

    stem = of(3, 16, 640, 3, 2)
    assert stem["bytes"] == 2 * (32 * 3 * 640 * 640 + 16 * 27 + 32 * 16 * 320 * 320)
    assert stem["flop"] == 2 * 32 * 16 * 320 * 320 * 27
    assert (stem["family"], round(stem["roofline_us"], 1)) == ("stem", 42.7)
    pointwise = of(48, 64, 160, 1, 1)
    assert (pointwise["family"], round(pointwise["roofline_us"], 1)) == ("1x1", 42.7)
    assert of(16, 32, 320, 3, 2)["family"] == "3x3/2"
    # Bound by products, not by memory.
    assert benchmark.roofline(8 * 10**12, 4 * 10**9, CEILINGS) == 10_000


def test_merging_adds_sets_and_keeps_complete_ones(benchmark, a_set, tmp_path):
    path = tmp_path / "a.json"
    benchmark._write(path, benchmark.merge(None, a_record(a_set(), a_set(batch=1))))
    merged = benchmark.merge(benchmark._read(path), a_record(a_set(factor=1.5), a_set(target="sm80")))
    assert [(one["batch"], one["target"]) for one in merged["sets"]] == [
        (1, "default"), (32, "default"), (32, "sm80"),
    ]  # fmt: skip
    assert merged["sets"][1]["rows"][0]["times"]["ours"]["us"] == pytest.approx(
        1.5 * merged["sets"][1]["rows"][0]["roofline_us"]
    )
    cut = benchmark.merge(merged, a_record(a_set(complete=False), complete=False))
    assert cut["sets"] == merged["sets"]
    assert merged["complete"] and not cut["complete"]
    assert benchmark.merge(None, a_record(complete=False))["sets"] == []
    with pytest.raises(benchmark.UsageError, match="Another cannot be added to one of NVIDIA Test 1"):
        benchmark.merge(merged, a_record(a_set(), gpu="Another"))


def test_a_record_is_written_whole_and_read_back(benchmark, a_set, tmp_path):
    path = tmp_path / "folder" / "a.json"
    record = benchmark.merge(None, a_record(a_set(), a_set(batch=1)))
    benchmark._write(path, record)
    assert json.loads(path.read_text()) == record
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    path.write_text("[]")
    with pytest.raises(benchmark.UsageError, match="not a record"):
        benchmark._read(path)


def test_table_has_losses_sums_and_slower_layers(benchmark, a_set):
    measured = a_set()
    worst, unmeasured = measured["rows"][5], measured["rows"][-1]
    worst["times"]["ours"]["us"] = 1000.0
    text = benchmark.table(measured)
    assert text.splitlines()[5].startswith(f"| {worst['name']} | {worst['count']} | 1000.00 | 1 % |")
    assert f"1 of {len(measured['rows'])} layers slower" in text
    assert f"- {worst['name']} x{worst['count']}: 1000.0 against" in text
    assert {row["family"] for row in measured["rows"]} == {"stem", "1x1", "3x3", "3x3/2", "dw7", "dw3"}
    assert all(f"\n| {family} |" in text for family in ("stem", "1x1", "3x3", "3x3/2", "dw7", "dw3", "all"))
    assert "cudnn: fused graphs have no groups" in text
    assert benchmark.table(measured, None).count("\n") > text.count("\n")
    # A layer without our time leaves no sum that is too small.
    unmeasured["times"]["ours"] = None
    unmeasured["notes"]["ours"] = "wrong result"
    assert benchmark.records.sums(measured["rows"])["ours"] is None
    assert "ours: wrong result" in benchmark.table(measured)


def test_collected_records_reach_plot_and_readme(benchmark, a_set, checkout):
    pytest.importorskip("matplotlib")
    file = checkout / "from-a-gpu.json"
    benchmark._write(file, a_record(a_set(), a_set(batch=1, complete=False)))
    assert benchmark.main(["collect", str(file)]) == 0
    names = sorted(path.name for path in (checkout / "docs" / "benchmarks").iterdir())
    assert names == ["nvidia-test-1-layers.json", "nvidia-test-1-layers.png"]
    assert benchmark.main(["readme", "--check"]) == 1
    assert benchmark.main(["readme"]) == 0
    assert benchmark.main(["readme", "--check"]) == 0
    text = (checkout / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "an older one" not in text
    lines = [line for line in text.splitlines() if line.startswith("| yolo12n")]
    total = benchmark.records.sums(a_set()["rows"])
    assert len(lines) == 1  # the set that is not complete has no sums
    cells = [f"{value:.0f}" for value in total.values()]
    assert lines[0].startswith(f"| yolo12n | 32 | 640 | fp16 | {' | '.join(cells)} | ")
    assert lines[0].endswith(f"| 0 of {len(a_set()['rows'])} |")
    assert benchmark.records.stale() == 0


def test_both_kinds_of_record_stand_side_by_side(benchmark, a_set, checkout):
    real = SCRIPTS.parent / "docs" / "benchmarks"
    for path in real.glob("*.json"):
        if not benchmark.records.of_layers(json.loads(path.read_text())):
            benchmark.RECORDS.mkdir(parents=True, exist_ok=True)
            (benchmark.RECORDS / path.name).write_text(path.read_text())
    benchmark._write(benchmark.RECORDS / "nvidia-test-1-layers.json", a_record(a_set()))
    text = benchmark.records.table()
    assert "Parity with stock" in text and "Conv blocks alone on one NVIDIA Test 1" in text


def test_layers_measures_each_shape_once_and_keeps_to_its_budget(benchmark, checkout, monkeypatch, capsys):
    layer_timing = importlib.import_module("layer_timing")
    measured = []

    def measure(case, dtype, peers, *, tf32, replays):
        measured.append(case)
        now[0] += 1.0
        return found(1.0, 2.0, None)

    now = [0.0]
    facts = {"gpu": "NVIDIA Test 1", "date": "2026-01-02", "sources": {"csrc": "c", "package": "p"}}
    monkeypatch.setattr(benchmark.records, "why_not", lambda: None)
    monkeypatch.setattr(benchmark.records, "facts", lambda: dict(facts))
    monkeypatch.setattr(layer_timing, "measure", measure)
    monkeypatch.setattr(layer_timing, "measure_ceilings", lambda dtype, replays: CEILINGS)
    monkeypatch.setattr(layer_timing, "use_tf32", lambda allowed: None)
    monkeypatch.setattr(benchmark.time, "monotonic", lambda: now[0])
    arguments = ["layers", "model=yolo12m,yolo12l", "batch=1", f"out={checkout / 'out'}"]
    assert benchmark.main(arguments) == 0
    record = benchmark._read(checkout / "out" / "nvidia-test-1-layers.json")
    medium, large = ([case.name.partition("-")[2] for case in cases.conv_shapes(scale)] for scale in "ml")
    assert [[row["name"] for row in one["rows"]] for one in record["sets"]] == [medium, large]
    assert len(measured) == len({*medium, *large}) < len(medium) + len(large)
    assert record["complete"] and "yolo12l batch 1 fp16" in capsys.readouterr().out

    measured.clear()
    assert benchmark.main([*arguments, f"out={checkout / 'cut'}", "budget=9.5"]) == 0
    record = benchmark._read(checkout / "cut" / "nvidia-test-1-layers.json")
    assert [(one["complete"], len(one["rows"])) for one in record["sets"]] == [(False, 10)]
    assert len(measured) == 10 and not record["complete"]
    assert "stopped by budget=9.5" in capsys.readouterr().out
