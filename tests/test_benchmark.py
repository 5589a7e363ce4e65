"""scripts/benchmark.py: arguments, arithmetic, records, tables and plots. What it times needs a GPU."""

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import cases
import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
CEILINGS = {"tb_s": 4.0, "tflop_s": 800.0}


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield
    finally:
        sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def benchmark(scripts):
    return importlib.import_module("benchmark")


@pytest.fixture(scope="module")
def layers(benchmark):
    return importlib.import_module("layer_benchmark")


@pytest.fixture(scope="module")
def files(benchmark):
    return importlib.import_module("record_files")


@pytest.fixture
def checkout(benchmark, tmp_path, monkeypatch):
    """An empty checkout in place of this one, for what is written."""
    folder = tmp_path / "docs" / "benchmarks"
    monkeypatch.setattr(benchmark.records, "ROOT", tmp_path)
    monkeypatch.setattr(benchmark.records, "RECORDS", folder)
    records = benchmark.records
    (tmp_path / "README.md").write_text(f"before\n{records.BEGIN}\nan older one\n{records.END}\nafter\n")
    return tmp_path


def found(ours, eager, cudnn):
    def time(us):
        return None if us is None else {"us": us, "spread": 0.01}

    notes = {"cudnn": "fused graphs have no groups"} if cudnn is None else {}
    return {"times": {"ours": time(ours), "eager": time(eager), "cudnn": time(cudnn)}, "notes": notes}


@pytest.fixture
def a_set(layers):
    """Makes a set as `layers` does: YOLO12n, each layer twice its roofline, eager 4 times, cuDNN 3 where it has one."""

    def make(batch=32, complete=True, factor=2.0, **changes):
        rows = []
        for case in cases.conv_shapes("n", batch=batch):
            least = layers.roofline(case.flops, case.bytes(torch.float16), CEILINGS)
            times = found(factor * least, 4 * least, None if case.groups > 1 else 3 * least)
            rows.append(layers._row(case, torch.float16, CEILINGS, times))
        return {
            "model": "yolo12n", "batch": batch, "imgsz": 640, "dtype": "fp16", "tf32": False, "target": "default",
            "complete": complete, "date": "2026-01-02", "sources": {"csrc": "c" * 16, "package": "p" * 16},
            "environment": {"versions": {"torch": "2.14.1"}}, "ceilings": CEILINGS, "replays": 9, "rows": rows,
        } | changes  # fmt: skip

    return make


def a_record(*sets, complete=True, gpu="NVIDIA Test 1"):
    return {"kind": "layers", "gpu": gpu, "complete": complete, "sets": list(sets)}


def test_arguments(tmp_path, layers):
    options = layers.parse(["model=yolo12x,yolo12n", "batch=8", "dtype=bf16,fp32", "tf32=False", "rows=all",
                               f"out={tmp_path}", "budget=90", "target=sm80"])  # fmt: skip
    assert (options.model, options.batch, options.dtype) == (("yolo12x", "yolo12n"), (8,), ("bf16", "fp32"))
    assert (options.tf32, options.rows, options.out, options.budget) == (False, None, tmp_path, 90)
    assert layers.parse([]).model == layers.MODELS


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


def test_roofline_of_known_layers(layers):
    def of(ci, co, size, k, s):
        shapes = cases.conv_shapes("n", batch=32)
        case = next(c for c in shapes if (c.ci, c.co, c.h, c.kernel[0], c.stride[0]) == (ci, co, size, k, s))
        return layers._row(case, torch.float16, {"tb_s": 4.3, "tflop_s": 790.0}, found(1, 1, 1))

    stem = of(3, 16, 640, 3, 2)
    assert stem["bytes"] == 2 * (32 * 3 * 640 * 640 + 16 * 27 + 32 * 16 * 320 * 320)
    assert stem["flop"] == 2 * 32 * 16 * 320 * 320 * 27
    assert (stem["family"], round(stem["roofline_us"], 1)) == ("stem", 42.7)
    pointwise = of(48, 64, 160, 1, 1)
    assert (pointwise["family"], round(pointwise["roofline_us"], 1)) == ("1x1", 42.7)
    assert of(16, 32, 320, 3, 2)["family"] == "3x3/2"
    # Bound by products, not by memory.
    assert layers.roofline(8 * 10**12, 4 * 10**9, CEILINGS) == 10_000


def test_merging_adds_sets_and_keeps_complete_ones(benchmark, a_set, tmp_path, files):
    path = tmp_path / "a.json"
    files.write(path, files.merge(None, a_record(a_set(), a_set(batch=1))))
    merged = files.merge(files.read(path), a_record(a_set(factor=1.5), a_set(target="sm80")))
    assert [(one["batch"], one["target"]) for one in merged["sets"]] == [
        (1, "default"), (32, "default"), (32, "sm80"),
    ]  # fmt: skip
    assert merged["sets"][1]["rows"][0]["times"]["ours"]["us"] == pytest.approx(
        1.5 * merged["sets"][1]["rows"][0]["roofline_us"]
    )
    cut = files.merge(merged, a_record(a_set(complete=False), complete=False))
    assert cut["sets"] == merged["sets"]
    assert merged["complete"] and not cut["complete"]
    assert files.merge(None, a_record(complete=False))["sets"] == []
    with pytest.raises(benchmark.UsageError, match="Another cannot be added to one of NVIDIA Test 1"):
        files.merge(merged, a_record(a_set(), gpu="Another"))


def test_a_record_is_written_whole_and_read_back(benchmark, a_set, tmp_path, files):
    path = tmp_path / "folder" / "a.json"
    record = files.merge(None, a_record(a_set(), a_set(batch=1)))
    files.write(path, record)
    assert json.loads(path.read_text()) == record
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]
    path.write_text("[]")
    with pytest.raises(benchmark.UsageError, match="not a record"):
        files.read(path)


def test_table_has_losses_sums_and_slower_layers(benchmark, a_set, layers):
    measured = a_set()
    worst, unmeasured = measured["rows"][5], measured["rows"][-1]
    worst["times"]["ours"]["us"] = 1000.0
    text = layers.table(measured)
    assert text.splitlines()[5].startswith(f"| {worst['name']} | {worst['count']} | 1000.00 | 1 % |")
    assert f"1 of {len(measured['rows'])} layers slower" in text
    assert f"- {worst['name']} x{worst['count']}: 1000.0 against" in text
    assert {row["family"] for row in measured["rows"]} == {"stem", "1x1", "3x3", "3x3/2", "dw7", "dw3"}
    assert all(f"\n| {family} |" in text for family in ("stem", "1x1", "3x3", "3x3/2", "dw7", "dw3", "all"))
    assert "cudnn: fused graphs have no groups" in text
    assert layers.table(measured, None).count("\n") > text.count("\n")
    # A layer without our time leaves no sum that is too small.
    unmeasured["times"]["ours"] = None
    unmeasured["notes"]["ours"] = "wrong result"
    assert benchmark.records.sums(measured["rows"])["ours"] is None
    assert "ours: wrong result" in layers.table(measured)


def test_collected_records_reach_plot_and_readme(benchmark, a_set, checkout, layers, files):
    pytest.importorskip("matplotlib")
    file = checkout / "from-a-gpu.json"
    files.write(file, a_record(a_set(), a_set(batch=1, complete=False)))
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


def test_both_kinds_of_record_stand_side_by_side(benchmark, a_set, checkout, layers, files):
    real = SCRIPTS.parent / "docs" / "benchmarks"
    for path in real.glob("*.json"):
        if not json.loads(path.read_text()).get("kind"):
            benchmark.records.RECORDS.mkdir(parents=True, exist_ok=True)
            (benchmark.records.RECORDS / path.name).write_text(path.read_text())
    files.write(benchmark.records.RECORDS / "nvidia-test-1-layers.json", a_record(a_set()))
    text = benchmark.records.table()
    assert "GPU tests passed" in text and "Conv blocks alone on one NVIDIA Test 1" in text


def test_layers_measures_each_shape_once_and_keeps_to_its_budget(
    benchmark, checkout, monkeypatch, capsys, layers, files
):
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
    monkeypatch.setattr(layers.time, "monotonic", lambda: now[0])
    arguments = ["layers", "model=yolo12m,yolo12l", "batch=1", f"out={checkout / 'out'}"]
    assert benchmark.main(arguments) == 0
    record = files.read(checkout / "out" / "nvidia-test-1-layers.json")
    medium, large = ([case.name.partition("-")[2] for case in cases.conv_shapes(scale)] for scale in "ml")
    assert [[row["name"] for row in one["rows"]] for one in record["sets"]] == [medium, large]
    assert len(measured) == len({*medium, *large}) < len(medium) + len(large)
    assert record["complete"] and "yolo12l batch 1 fp16" in capsys.readouterr().out

    measured.clear()
    assert benchmark.main([*arguments, f"out={checkout / 'cut'}", "budget=9.5"]) == 0
    record = files.read(checkout / "cut" / "nvidia-test-1-layers.json")
    assert [(one["complete"], len(one["rows"])) for one in record["sets"]] == [(False, 10)]
    assert len(measured) == 10 and not record["complete"]
    assert "stopped by budget=9.5" in capsys.readouterr().out


# ------------------------------------------------------------------------------------ whole models, predict, training


FACTS = {
    "date": "2026-01-02",
    "sources": {"csrc": "c" * 16, "package": "p" * 16},
    "environment": {"versions": {"torch": "2.14.1", "ultralytics": "8.4.190"}},
}


def a_row(module, name, **values):
    return {"contender": name, **dict.fromkeys(module.FIELDS), "ok": True, "note": ""} | values


@pytest.fixture
def samples(benchmark):
    """A complete set of each kind that benchmark.py measures with whole models."""
    models, iterations, passes = (
        importlib.import_module(name) for name in ("model_benchmark", "train_iterations", "train_passes")
    )
    times = {"stock": 12.6, "channels_last": 9.2, "stock-graph": 8.0, "ours": 3.0, "ours-graph": 2.5}
    counts = {"kernels": 300, "launches": 300, "peak_gib": 1.5, "spread": 0.02, "error": 0.3}
    model = [a_row(models, name, ms=ms, images_s=32000 / ms, **counts) for name, ms in times.items()]
    model[3] |= {"patch_s": 0.21, "first_ms": 43.0, "first_extra_ms": 40.0}
    model.append(a_row(models, "ours-plain-graph", ok=None, note="not in this version"))
    model.append(a_row(models, "compile", ms=5.5, compile_s=53.0))
    model.append(a_row(models, "ours-compile", ms=2.9, compile_s=21.0))
    phases = {"data": 1.0, "forward": 20.0, "loss": 5.0, "backward": 30.0, "optimizer": 4.0, "ema": 2.0}
    whole = {"model": "yolo12n", "batch": 32, "imgsz": 640, "dtype": "fp16", "complete": True, **FACTS}
    predict = {
        "preprocess": 1.0,
        "inference": 2.0,
        "postprocess": 0.5,
        "rest": 1.5,
        "spread": 0.1,
        "detections": 9,
    }
    curve = [9.0 - 0.05 * step for step in range(60)]
    runs = [("stock, pictures as they come", 1.0), ("stock, pictures reversed", 1.004), ("ours", 1.002)]
    return {
        "model": {**whole, "tf32": False, "rows": model},
        "predict": {**whole, "sizes": "mixed", "rows": [
            {"contender": "stock", "ms": 6.0, "ok": None, "note": "", **predict},
            {"contender": "ours", "ms": 5.0, "ok": True, "note": "", **predict},
        ]},
        "train": {**whole, "scope": "model", "mode": "deterministic", "rows": [
            a_row(passes, name, ms=ms, peak_gib=6.1, host_ms=20.0, kernel_ms=ms - 1, kernels=900)
            for name, ms in (("stock", 55.8), ("channels_last", 49.9), ("ours", 19.5), ("ours-graph", 14.5))
        ]},
        "iteration": {**whole, "scope": "iteration", "mode": "deterministic", "rows": [
            a_row(iterations, name, ms=ms, images_s=32000 / ms, gpu_busy=0.4, phases=phases, peak_gib=7.0)
            for name, ms in (("channels_last", 105.9), ("ours", 48.0))
        ]},
        "blocks": {**whole, "scope": "layers", "mode": "free", "rows": [
            {"contender": "a", "name": "a", "count": 2, "ok": True, "note": "", "ours_us": 1500.0, "eager_us": 4000.0,
             "ours_kernels": 5, "eager_kernels": 9, "ours_graph_us": 1250.0, "eager_graph_us": 3500.0},
        ]},
        "ddp": {**whole, "rows": [
            {"contender": name, "ok": None, "note": "", "ms_1": 100.0, "images_s_1": 320.0, "ms_2": 110.0,
             "images_s_2": 582.0} for name in ("stock", "ours")
        ]},
        "convergence": {**whole, "steps": 60, "seed": 0, **importlib.import_module("convergence").compare([
            {"contender": name, "losses": [factor * loss for loss in curve], "last": 6.0, "map50": 0.8, "map": 0.6}
            for name, factor in runs
        ])},
        "soak": {**whole, "rows": [importlib.import_module("soak").judge("ours-graph", epochs_of(0.0))]},
    }  # fmt: skip


def epochs_of(growth, count=14):
    """Memory after each epoch of a training that grows by so many MiB an epoch after the first two."""
    return [
        {
            "steps": 25 * (i + 1),
            "seconds": 60.0 * (i + 1),
            "allocated_mib": 700.0,
            "reserved_mib": 4000.0,
            "host_mib": 3000.0 + growth * max(i - 1, 0),
        }
        for i in range(count)
    ]


def kind_of(name):
    return {"iteration": "train", "blocks": "train"}.get(name, name)


@pytest.fixture
def sample_files(files, samples, tmp_path):
    """One file of every kind, as a run elsewhere leaves it."""
    for name, one in samples.items():
        files.add(tmp_path / f"elsewhere-{kind_of(name)}.json", kind_of(name), "NVIDIA Test 1", one)
    return sorted(tmp_path.glob("elsewhere-*.json"))


def test_every_kind_of_record_reaches_the_readme(benchmark, files, checkout, sample_files):
    pytest.importorskip("matplotlib")
    assert benchmark.main(["collect", *map(str, sample_files)]) == 0
    folder = checkout / "docs" / "benchmarks"
    assert {path.name for path in folder.iterdir()} == {
        *(
            f"nvidia-test-1-{kind}.json"
            for kind in ("model", "predict", "train", "ddp", "convergence", "soak")
        ),
        "nvidia-test-1-convergence.png",
    }
    assert len(files.read(folder / "nvidia-test-1-train.json")["sets"]) == 3
    assert benchmark.main(["readme"]) == 0 and benchmark.main(["readme", "--check"]) == 0
    text = (checkout / "README.md").read_text()
    assert (
        "| yolo12n | 32 | 640 | fp16 | 12.6 | 9.2 | 8 | 5.5 (53 s) | 3 | 2.5 | 2.9 (21 s) | 12800 | 5.04 |"
        in text
    )
    assert "Patching took at most 0.21 s, the first patched call at most 40 ms more" in text
    assert "| yolo12n | 32 | mixed | fp16 | ours | 5 | 1 | 2 | 0.5 | 1.5 | 1.20 |" in text
    assert "| yolo12n | 32 | 640 | fp16 | deterministic | 55.8 | 49.9 | - | 19.5 | 14.5 | 3.44 |" in text
    assert "| yolo12n | 32 | fp16 | ours | 48 | 40 % | 1 | - | 20 | 5 | 30 | 4 | 2 | - | 7.00 |" in text
    assert "| yolo12n | 32 | 640 | fp16 | free | 3.0 | 8.0 | 2.67 | 2.5 | 7.0 | 2.80 |" in text
    assert "| yolo12n | 32 | fp16 | ours | 100 | 320 | 110 | 582 | 1.82 |" in text
    assert "| ours-graph | 14.0 | 350 | 14 | 700 | 0.0 | 4000 | 0.0 | 3000 | 0.0 | steady |" in text
    assert "| inside |" in text and "![Loss curves](docs/benchmarks/nvidia-test-1-convergence.png)" in text
    assert benchmark.records.stale() == 0


def test_blocks_have_sums_of_busy_and_of_replays(benchmark, samples):
    tables = importlib.import_module("run_tables")
    one = samples["blocks"]
    assert (
        "busy, ms: ours 3.00, eager 8.00, to reach 5.5; sums of graph replays, ms: ours 2.50, eager 7.00"
        in (tables.train_table([one]))
    )
    (row,) = one["rows"]
    before = {**one, "rows": [{key: value for key, value in row.items() if "graph" not in key}]}
    assert "| 3.0 | 8.0 | 2.67 | - | - | - |" in "\n".join(tables._blocks_part([before]))


def test_no_record_gives_no_table(benchmark, files, samples, checkout):
    assert benchmark.records.table() == "No GPU record yet."
    cut = {**samples["model"], "complete": False}
    files.add(benchmark.records.RECORDS / "nvidia-test-1-model.json", "model", "NVIDIA Test 1", cut)
    assert benchmark.records.table() == "No GPU record yet."


def test_a_wrong_result_has_no_number_in_the_readme(benchmark, samples):
    tables = importlib.import_module("run_tables")
    ours = next(row for row in samples["model"]["rows"] if row["contender"] == "ours")
    ours |= {"ok": False, "note": "wrong: output[0].scores has 3.0 times the error that is allowed"}
    record = {"gpu": "NVIDIA Test 1", "sets": [samples["model"]]}
    text = "\n".join(tables.model_part(record))
    assert (
        "| 5.5 (53 s) | - | 2.5 | 2.9 (21 s) |" in text
        and "**1 results did not, and have no number.**" in text
    )
    assert "**WRONG** wrong: output[0].scores" in tables.model_table([samples["model"]])


def test_ways_to_use_memory_have_a_table_of_their_own(benchmark, samples):
    tables = importlib.import_module("run_tables")
    one = samples["train"]
    assert "memory=" not in "\n".join(tables._passes_part([one]))
    figures = {"ours-graph": (20, 3), "ours-graph-low": (21, 2)}
    rows = [{"contender": name, "ok": True, "ms": ms, "peak_gib": gib} for name, (ms, gib) in figures.items()]
    text = "\n".join(tables._passes_part([{**one, "rows": rows}]))
    assert (
        '| memory="low" | memory="auto" | memory="fast" |' in text
        and "| 21, 2.00 | 20, 3.00 | -, - |" in text
    )


def test_a_kind_is_not_added_to_another(benchmark, files, samples, tmp_path):
    path = tmp_path / "a.json"
    files.add(path, "model", "NVIDIA Test 1", samples["model"])
    with pytest.raises(benchmark.UsageError, match=r"not a record of scripts/benchmark.py predict"):
        files.add(path, "predict", "NVIDIA Test 1", samples["predict"])
    assert benchmark.main(["plot", str(path)]) == 2


@pytest.mark.parametrize(
    ("command", "argument", "said"),
    [
        (
            "model",
            "peers=tensorrt",
            "peers must be some of channels_last,stock-graph,channels_last-graph,compile",
        ),
        ("model", "dtype=fp8", "dtype must be some of fp16,bf16,fp32"),
        ("predict", "dtype=bf16", "Ultralytics predicts in no other"),
        ("predict", "weights=nowhere.pt", "weights must be a file"),
        ("train", "scope=all", "scope must be some of model,iteration,layers"),
        ("train", "mode=fast", "mode must be some of deterministic,free"),
        ("train", "cache=disk", "cache must be ram or False"),
        ("ddp", "iterations=3", "give at least 13"),
        ("convergence", "stock=1", "stock must be 2, 3 or 4"),
        ("convergence", "pictures=3", "there must be a batch of them"),
        ("soak", "contenders=compile", "contenders must be some of stock,ours,ours-graph"),
        ("profile", "model=yolo12n", "'profile model=yolo12n' is no command"),
    ],
)
def test_a_wrong_argument_of_any_command_is_named(benchmark, capsys, command, argument, said):
    assert benchmark.main([command, argument]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_every_command_says_how_it_is_used(benchmark, capsys):
    for command in benchmark.COMMANDS:
        assert benchmark.main([command, "--help"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{command}:") and "default" in text


def test_options_of_the_other_commands(benchmark):
    def parse(module, *arguments):
        return importlib.import_module(module).parse(arguments)

    assert parse("model_benchmark", "peers=none").peers == ()
    assert parse("model_benchmark").batch == (1, 8, 32)
    assert parse("model_benchmark", "peers=compile,channels_last").peers == ("compile", "channels_last")
    assert parse("train_benchmark", "scope=layers", "cache=ram", "mode=free").cache == "ram"
    assert parse("convergence", "dtype=bf16", "steps=40").steps == 40


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_model_runs_on_a_cpu_and_is_no_record(benchmark, no_gpu, tmp_path, capsys):
    arguments = ["model=yolo12n", "batch=1", "imgsz=64", "dtype=fp32", "replays=1", f"out={tmp_path}"]
    assert benchmark.main(["model", *arguments]) == 0
    text = capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith(("| stock", "| ours"))]
    assert [row[0] for row in rows] == ["| stock", "| ours"]
    assert all(float(row[1]) > 0 and row[-1].startswith("right") for row in rows)
    assert "no GPU record, nothing was written" in text
    assert not list(tmp_path.iterdir())


def test_a_wrong_model_is_marked_and_fails(benchmark, no_gpu, tmp_path, capsys, monkeypatch):
    models = importlib.import_module("model_benchmark")
    patched = models.patched

    def damaged(net, **options):
        with torch.no_grad():
            net.model[4].cv1.conv.weight.mul_(1.02)
        return patched(net, **options)

    monkeypatch.setattr(models, "patched", damaged)
    arguments = ["model=yolo12n", "batch=1", "imgsz=64", "dtype=fp32", "replays=1", f"out={tmp_path}"]
    assert benchmark.main(["model", *arguments]) == 1
    output = capsys.readouterr()
    assert "**WRONG**" in output.out and "times the error that is allowed" in output.err


def test_training_passes_run_on_a_cpu_and_find_a_wrong_gradient(benchmark, no_gpu, capsys, monkeypatch):
    passes = importlib.import_module("train_passes")
    arguments = ["train", "scope=model", "model=yolo12n", "batch=2", "imgsz=64", "dtype=fp32", "replays=1"]
    assert benchmark.main([*arguments, "memory=low,fast"]) == 0
    text = capsys.readouterr().out
    assert (
        all(f"| {name} |" in text for name in ("ours", "ours-low", "ours-fast"))
        and text.count("right, ") == 4
    )
    patched = passes.patched

    def damaged(net, cuda_graph, memory):
        net, seconds = patched(net, cuda_graph, memory)
        net.model[6].cv1.conv.weight.register_hook(lambda gradient: 1.05 * gradient)
        return net, seconds

    monkeypatch.setattr(passes, "patched", damaged)
    assert benchmark.main(arguments) == 1
    assert "gradient: wrong: gradient has" in capsys.readouterr().err


def test_training_with_graphs_is_judged_by_a_replayed_step(benchmark, monkeypatch):
    """The gate of `ours-graph` looks at the last of enough steps, of a copy, so that the timed graph stays."""
    passes = importlib.import_module("train_passes")
    options = types.SimpleNamespace(peers=("stock", "compile"), memory=("low",))
    assert passes._names(types.SimpleNamespace(quick=False), options) == (
        "stock", "ours", "ours-graph", "ours-graph-low", "compile",
    )  # fmt: skip
    from yolo12_fastconv import graphs

    assert passes.WARM > graphs.REPEATS
    seen = []

    class Net(torch.nn.Linear):
        def forward(self, x):
            seen.append(self)
            return {"boxes": super().forward(x), "scores": super().forward(x) * len(seen)}

    net = Net(2, 2)
    step = passes.Step(net, net, torch.device("cpu"), "fp32")
    gate = object.__new__(passes.Gate)
    results = gate._results(step.twin(), torch.ones(1, 2), 3)
    assert len(seen) == 3 and all(one is seen[0] and one is not net for one in seen)
    assert torch.equal(results["scores"], 3 * results["boxes"]) and net.weight.grad is None


def test_iterations_of_a_trainer_are_timed_by_phase(benchmark, no_gpu, capsys):
    arguments = ["scope=iteration", "model=yolo12n", "batch=2", "imgsz=64", "dtype=fp32", "iterations=2"]
    assert benchmark.main(["train", *arguments]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| channels_last", "| ours"]
    for row in rows:
        whole, phases = float(row[1]), [float(cell) for cell in row[5:13]]
        assert whole > 0 and min(phases) >= 0 and sum(phases) > 0


def test_a_watch_times_profiles_and_ends_the_training(benchmark, monkeypatch):
    iterations = importlib.import_module("train_iterations")
    watch = iterations.Watch(1, 3, 2, 2)
    seen = []
    monkeypatch.setattr(watch, "_start_profiler", lambda: seen.append(("start", watch.done)))
    monkeypatch.setattr(watch, "_stop_profiler", lambda count: seen.append(("stop", watch.done, count)))
    with pytest.raises(iterations.Finished):
        while True:
            watch.on_train_batch_start(None)
            watch.mark("forward")
            watch.on_train_batch_end(None)
    assert watch.done == 8 and len(watch.whole) == 3
    assert [set(phases) for phases in watch.phases] == [{"data", "forward", "rest"}] * 2
    assert seen == [("start", 6), ("stop", 8, 2)]
    watch.whole, watch.busy_us = [9.0, 10.0, 11.0], 4000.0
    assert watch.results(32) | {"phases": None} == {
        "ms": 10.0, "spread": 0.16, "images_s": 3200.0, "gpu_busy": 0.4, "phases": None, "peak_gib": None,
    }  # fmt: skip


def test_predict_runs_on_a_cpu(benchmark, no_gpu, capsys):
    arguments = ["imgsz=64", "batch=2", "dtype=fp32", "pictures=4", "replays=1", "sizes=mixed"]
    assert benchmark.main(["predict", *arguments]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    assert [row[0] for row in rows] == ["| stock", "| ours"]
    assert rows[0][7] == rows[1][7] != "0"


def test_convergence_runs_on_a_cpu(benchmark, no_gpu, capsys):
    arguments = ["steps=4", "batch=4", "imgsz=32", "pictures=8", "stock=2"]
    assert benchmark.main(["convergence", *arguments]) == 0
    text = capsys.readouterr().out
    assert "| ours |" in text and "| inside |" in text and "| stock, pictures reversed |" in text


def test_ddp_says_how_many_gpus_there_are(benchmark, no_gpu, capsys):
    assert benchmark.main(["ddp"]) == 2
    assert capsys.readouterr().err == "benchmark: ddp needs two GPUs, torch sees 0 here\n"


def test_a_run_that_does_not_converge_is_outside(benchmark):
    convergence = importlib.import_module("convergence")
    curve = [9.0 - 0.05 * step for step in range(60)]

    def rows(factor, map50):
        runs = [("stock, pictures as they come", 1.0, 0.80), ("stock, pictures reversed", 1.01, 0.82)]
        return [
            {"contender": name, "losses": [f * loss for loss in curve], "map50": value}
            for name, f, value in [*runs, ("ours", factor, map50)]
        ]

    def ours(factor, map50):
        return convergence.compare(rows(factor, map50))["rows"][-1]

    assert ours(1.005, 0.81)["ok"] and ours(1.02, 0.84)["ok"]
    assert "its loss is" in ours(1.1, 0.81)["note"] and not ours(1.1, 0.81)["ok"]
    assert "its mAP50 is 0.100 outside" in ours(1.0, 0.70)["note"]
    assert not ours(float("nan"), 0.81)["ok"]


def test_soak_runs_on_a_cpu(benchmark, no_gpu, capsys, monkeypatch):
    soak = importlib.import_module("soak")
    monkeypatch.setattr(soak, "LEAST", 3)
    monkeypatch.setattr(soak, "LIMITS", dict.fromkeys(soak.LIMITS, 1e4))  # five epochs are all warm-up
    arguments = ["seconds=1", "batch=2", "imgsz=64", "contenders=ours"]
    assert benchmark.main(["soak", *arguments]) == 0
    rows = [
        line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| yolo12n")
    ]
    # Epochs go on until there are enough of them; three batches and a smaller one each.
    epochs = int(rows[0][6])
    assert epochs >= 5 and int(rows[0][5]) == 4 * epochs
    assert float(rows[0][11]) > 100 and rows[0][-1] == "steady |"


def test_soak_finds_memory_that_grows(benchmark):
    soak = importlib.import_module("soak")
    steady, growing = (soak.judge("ours", epochs_of(growth)) for growth in (0.0, 20.0))
    assert steady["ok"] and steady["host_mib_growth"] == 0
    # Twelve epochs count: the middles of the last four and of the four before them are four apart.
    assert growing["ok"] is False and growing["note"] == "host_mib grew by 80, more than 48"
    short = soak.judge("ours", epochs_of(20.0, 5))
    assert short["ok"] is None and "too few" in short["note"]


def test_reordered_pictures_keep_their_boxes(benchmark):
    convergence = importlib.import_module("convergence")

    class Trainer:
        def preprocess_batch(self, batch):
            return dict(batch)

    batch = {
        "img": torch.arange(4.0).view(4, 1, 1, 1),
        "batch_idx": torch.tensor([0.0, 1.0, 1.0, 3.0]),
        "cls": torch.tensor([[0.0], [10.0], [11.0], [30.0]]),
        "bboxes": torch.tensor([0.0, 1.0, 1.0, 3.0]).view(4, 1),
    }
    for order in range(4):
        trainer = Trainer()
        convergence._reorder(trainer, order)
        found = trainer.preprocess_batch(batch)
        assert (found["img"].flatten().tolist() == [0, 1, 2, 3]) == (order == 0)
        assert found["batch_idx"].tolist() == sorted(found["batch_idx"].tolist())
        assert torch.equal(found["img"].flatten()[found["batch_idx"].long()], found["bboxes"].flatten())
        assert torch.equal((found["cls"] // 10).flatten(), found["bboxes"].flatten())


def test_counts_of_a_profile(benchmark):
    timing = importlib.import_module("timing")
    cuda, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    class Event:
        def __init__(self, name, device_type, start=0.0, end=0.0, is_user_annotation=False):
            self.name, self.device_type, self.is_user_annotation = name, device_type, is_user_annotation
            self.time_range = types.SimpleNamespace(start=start, end=end)

    class Profile:
        def events(self):
            return [
                Event("cudaLaunchKernelExC", cpu), Event("cudaLaunchKernel", cpu), Event("cudaMemcpyAsync", cpu),
                Event("aten::conv2d", cpu), Event("gemm", cuda, 0, 4), Event("Memcpy DtoD", cuda, 10, 12),
                Event("silu", cuda, 3, 5.5), Event("Optimizer.step#SGD.step", cuda, 0, 99, True),
            ]  # fmt: skip

    assert timing.totals(Profile()) == {"launches": 3, "kernels": 3, "busy_us": 7.5}


@pytest.mark.parametrize(
    "intervals, covered",
    [
        ([], 0),
        ([(0, 2), (5, 6)], 3),  # a gap
        ([(5, 6), (0, 2)], 3),  # events come in no order
        ([(0, 4), (1, 7)], 7),  # starts early, and waits
        ([(0, 9), (1, 3), (2, 5), (8, 10)], 10),  # within another, on a stream beside it
        ([(0, 2), (2, 3), (2, 3)], 3),
    ],
)
def test_time_that_several_kernels_share_counts_once(benchmark, intervals, covered):
    assert importlib.import_module("timing").union(intervals) == covered


# ----------------------------------------------------------------------------------- parity, run by run (gpu_record.py)


@pytest.fixture
def matrix(scripts):
    return importlib.import_module("parity_check")


def a_parity_row(model="yolo12n", ok=True, **values):
    row = dict.fromkeys(("worst", "used", "ratio", "detections"))
    row |= {"model": model, "precision": "fp32", "mode": "eval", "ok": ok, "layers": 113, "tensors": 113}
    return row | {"kernels": [], "problems": [], "environment": {}, "problem": ""} | values


def test_the_matrix_is_written_after_every_run(matrix, monkeypatch, tmp_path):
    file = tmp_path / "matrix.json"

    def row(model, precision, mode, arguments):
        if (precision, mode) == ("fp16", "eval"):
            raise KeyboardInterrupt
        if mode == "train":
            raise RuntimeError("out of memory\nsomewhere")
        return a_parity_row(precision=precision, mode=mode)

    monkeypatch.setattr(matrix, "_row", row)
    with pytest.raises(KeyboardInterrupt):
        matrix.main(["--matrix", "n", "--json", str(file)])
    written = json.loads(file.read_text())
    assert [(one["mode"], one["ok"]) for one in written["rows"]] == [
        ("eval", True), ("eval, fused", True), ("train", False),
    ]  # fmt: skip
    assert written["rows"][-1]["problem"] == "could not run: RuntimeError: out of memory"
    assert not written["complete"] and not written["ok"]


def test_a_run_that_raises_is_a_line_and_the_next_follows(matrix, monkeypatch, tmp_path, capsys):
    file = tmp_path / "matrix.json"

    def row(model, precision, mode, arguments):
        if model == "yolo12n.yaml" and mode == "train":
            raise RuntimeError("no kernel")
        return a_parity_row(model.removesuffix(".yaml"), precision=precision, mode=mode)

    monkeypatch.setattr(matrix, "_row", row)
    assert matrix.main(["--matrix", "n,x", "--json", str(file)]) == 2
    written = json.loads(file.read_text())
    assert (
        written["complete"] and len(written["rows"]) == 18 and sum(one["ok"] for one in written["rows"]) == 15
    )
    assert "**could not run: RuntimeError: no kernel**" in capsys.readouterr().out


def test_the_matrix_has_tasks_and_a_budget(matrix, monkeypatch, tmp_path, capsys):
    now = [0.0]

    def row(model, precision, mode, arguments):
        now[0] += 10
        return a_parity_row(model.removesuffix(".yaml"), precision=precision, mode=mode)

    monkeypatch.setattr(matrix, "_row", row)
    monkeypatch.setattr(matrix.time, "monotonic", lambda: now[0])
    file = tmp_path / "matrix.json"
    assert matrix.main(["--matrix", "n-seg,x-cls", "--budget", "95", "--json", str(file)]) == 2
    written = json.loads(file.read_text())
    assert [one["model"] for one in written["rows"]] == ["yolo12n-seg"] * 9 + ["yolo12x-cls"]
    assert not written["complete"] and written["ok"]
    assert "10 of 18 runs made" in capsys.readouterr().out
    assert matrix.main(["--matrix", "n-seg", "--budget", "90"]) == 0
    assert matrix.main(["--matrix", "n-segment"]) == matrix.main(["--matrix", "n", "--budget", "soon"]) == 2
    said = capsys.readouterr().err
    assert "tasks -seg, -pose, -obb, -cls" in said and "--budget soon" in said


def test_parity_of_models_is_run_and_collected_one_by_one(benchmark, checkout, monkeypatch, tmp_path):
    gpu_record = importlib.import_module("gpu_record")
    facts = {
        "gpu": "NVIDIA Test 1",
        "sources": {"csrc": "c", "package": "p"},
        **{k: FACTS[k] for k in ("date",)},
    }
    commands = []

    class Done:
        returncode = 0

    def run(command, **settings):
        scale, file = command[3], Path(command[5])
        commands.append(scale)
        if scale != "m":  # which crashes before its first line
            row = a_parity_row(f"yolo12{scale}")
            file.write_text(json.dumps({"ok": True, "complete": scale != "x", "rows": [row]}))
        done = Done()
        done.returncode = int(scale == "m")
        return done

    monkeypatch.setattr(gpu_record, "RECORDS", benchmark.records.RECORDS)
    monkeypatch.setattr(gpu_record, "ROOT", checkout)
    monkeypatch.setattr(gpu_record, "why_not", lambda: None)
    monkeypatch.setattr(gpu_record, "facts", lambda: dict(facts))
    monkeypatch.setattr(gpu_record.subprocess, "run", run)
    folder = tmp_path / "results"
    assert gpu_record.run(folder, "parity", "n-seg,x,m", 1) == 1
    assert gpu_record.run(folder, "parity", "n", 1) == 0  # added to what is there
    assert commands == ["n-seg", "x", "m", "n"]
    assert gpu_record.collect(folder) == 0
    record = json.loads((benchmark.records.RECORDS / "nvidia-test-1.json").read_text())
    assert [row["model"] for row in record["parity"]["rows"]] == ["yolo12n", "yolo12x", "yolo12n-seg"]
    assert not record["parity"]["complete"]
    facts["sources"] = {"csrc": "d", "package": "p"}
    assert gpu_record.run(folder, "parity", "m", 1) == 1  # of other sources now: the older results are gone
    assert gpu_record.collect(folder) == 2
    (folder / "junit.xml").write_text(
        '<testsuites><testsuite time="1"><testcase name="a"/></testsuite></testsuites>'
    )
    assert gpu_record.collect(folder) == 0  # tests alone are a record too
    record = json.loads((benchmark.records.RECORDS / "nvidia-test-1.json").read_text())
    assert record["parity"]["rows"] == [] and record["tests"]["passed"] == 1
    # What a later run says of a test stands.
    (folder / "junit.xml").write_text(
        '<testsuites><testsuite time="1"><testcase classname="tests.x" name="a"><failure/></testcase>'
        '<testcase classname="tests.x" name="b"/><testcase classname="tests.y" name="a"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    (folder / "rerun.xml").write_text(
        '<testsuites><testsuite time="1"><testcase classname="tests.x" name="a"/></testsuite></testsuites>'
    )
    assert gpu_record.collect(folder) == 0
    tests = json.loads((benchmark.records.RECORDS / "nvidia-test-1.json").read_text())["tests"]
    assert [tests[kind] for kind in ("passed", "failed", "skipped", "rerun")] == [2, 0, 1, 1]
    assert tests["files"] == {"x": 2, "y": 1} and tests["failures"] == []
