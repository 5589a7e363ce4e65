"""The command ``yolo12-fastconv``, mostly in this process; see test_autopatch.py for the literal ``yolo`` command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import shapes_dataset
import torch
import ultralytics
from logs import logged
from ultralytics import YOLO
from ultralytics.engine.model import Model
from ultralytics.nn.autobackend import AutoBackend
from ultralytics.utils import ARGV

import yolo12_fastconv
from yolo12_fastconv import _autopatch, _compat, cli, info, parity, training

PACKAGES = str(Path(yolo12_fastconv.__file__).resolve().parent.parent)  # of the package under test
COMMON = ["imgsz=64", "device=cpu"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return shapes_dataset.make(tmp_path_factory.mktemp("shapes"), size=64, train=4, val=2)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`cli.main`, with the process put back as it was: arguments, environment, patch."""
    before = list(sys.argv)
    monkeypatch.setenv(_autopatch.ENABLE, "")
    monkeypatch.chdir(tmp_path)
    yield cli.main
    sys.argv[:] = before
    training.uninstall()


@pytest.fixture
def backends(monkeypatch):
    """The patched and eligible blocks of every model that a predictor or validator runs."""
    found: list[tuple[int, int]] = []
    forward = AutoBackend.forward

    def counting(self, *args, **kwargs):
        found.append(training.count_blocks(self.model))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(AutoBackend, "forward", counting)
    return found


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": PACKAGES, "YOLO_VERBOSE": "true", **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("argument", ["--help", "-h", "help"])
def test_help(argument, capsys):
    assert cli.main([argument]) == 0
    output = capsys.readouterr()
    for word in ("yolo", "parity", "info", "--version", "YOLO12_FASTCONV=1"):
        assert word in output.out
    assert output.err == ""


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"yolo12-fastconv {yolo12_fastconv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [([], "a command is missing"), (["train"], "no command 'train'"), ([""], "a command")],
)
def test_unknown_command_is_one_error(arguments, problem, capsys):
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert problem in output.err
    assert "yolo, parity or info" in output.err


@pytest.mark.parametrize(("command", "module"), [("parity", parity), ("info", info)])
def test_commands_pass_their_arguments_and_status_on(command, module, monkeypatch):
    got = []
    monkeypatch.setattr(module, "main", lambda arguments: got.append(arguments) or 7)
    assert cli.main([command, "model=yolo12n.pt", "--json"]) == 7
    assert got == [["model=yolo12n.pt", "--json"]]


def test_without_arguments_the_process_arguments_count(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["yolo12-fastconv", "--version"])
    assert cli.main() == 0
    assert capsys.readouterr().out.startswith("yolo12-fastconv ")


def test_missing_ultralytics_is_one_error(run, monkeypatch, capsys):
    def fail():
        raise ImportError("yolo12_fastconv needs ultralytics>=8.3.242, and none is installed")

    monkeypatch.setattr(_compat, "require_ultralytics", fail)
    assert run(["yolo", "version"]) == 1
    assert capsys.readouterr().err == (
        "yolo12-fastconv: yolo12_fastconv needs ultralytics>=8.3.242, and none is installed\n"
    )


def test_module_is_the_command_and_trains_patched(data, tmp_path):
    arguments = (
        f"train model=yolo12n.yaml data={data} epochs=1 batch=4 plots=False project={tmp_path}".split()
    )
    done = process("-m", "yolo12_fastconv", "yolo", *arguments, *COMMON)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert "yolo12_fastconv: training with 113 of 113 Conv blocks patched" in output
    (best,) = tmp_path.rglob("best.pt")
    assert training.count_blocks(YOLO(best).model) == (0, 113)


def test_predict_runs_patched_saves_pictures_and_leaves_the_arguments_alone(run, backends, data, tmp_path):
    arguments = [
        "predict",
        "model=yolo12n.yaml",
        f"source={data.parent / 'images' / 'val'}",
        f"project={tmp_path}",
    ]
    assert run(["yolo", *arguments, *COMMON]) == 0
    assert set(backends) == {(113, 113)}
    assert len(list((tmp_path / "predict").glob("*.jpg"))) == 2
    assert sys.argv == [cli.PROGRAM, *arguments, *COMMON]
    assert sys.argv == ARGV
    assert os.environ[_autopatch.ENABLE] == "1"


def test_val_runs_patched(run, backends, data, tmp_path):
    arguments = [f"data={data}", "plots=False", f"project={tmp_path}"]
    assert run(["yolo", "val", "model=yolo12n.yaml", *arguments, *COMMON]) == 0
    assert backends
    assert set(backends) == {(113, 113)}


def test_disable_switch_runs_stock(run, backends, data, tmp_path, monkeypatch):
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    before = vars(Model)["_smart_load"]
    arguments = [f"source={data.parent / 'images' / 'val'}", f"project={tmp_path}"]
    assert run(["yolo", "predict", "model=yolo12n.yaml", *arguments, *COMMON]) == 0
    assert set(backends) == {(0, 113)}
    assert vars(Model)["_smart_load"] is before


def test_export_holds_standard_operators(run, tmp_path):
    YOLO("yolo12n.yaml").save(tmp_path / "model.pt")
    assert run(["yolo", "export", f"model={tmp_path / 'model.pt'}", "format=torchscript", *COMMON]) == 0
    module = torch.jit.load(tmp_path / "model.torchscript")
    operators = {node.kind().partition("::")[0] for node in module.inlined_graph.nodes()}
    assert "aten" in operators
    assert operators <= {"aten", "prim"}


def test_special_commands_of_ultralytics(run):
    with logged() as messages:
        assert run(["yolo", "version"]) == 0
    assert messages == [ultralytics.__version__]


@pytest.mark.parametrize("argument", ["modell=yolo12n.yaml", "epochs=many"])
def test_wrong_arguments_raise_what_ultralytics_raises(run, argument):
    from ultralytics.cfg import entrypoint

    with pytest.raises((SyntaxError, TypeError, ValueError)) as stock:
        entrypoint(f"yolo train model=yolo12n.yaml {argument}")
    with pytest.raises(stock.type) as ours:
        run(["yolo", "train", "model=yolo12n.yaml", argument])
    assert str(ours.value).splitlines()[0] == str(stock.value).splitlines()[0]


def test_wrong_arguments_end_with_the_status_of_ultralytics():
    stock = process("-c", "from ultralytics.cfg import entrypoint; entrypoint('yolo train modell=x')")
    ours = process("-m", "yolo12_fastconv", "yolo", "train", "modell=x")
    assert ours.returncode == stock.returncode == 1
    assert "modell" in ours.stderr
    assert ours.stderr.splitlines()[-1].partition(":")[0] == stock.stderr.splitlines()[-1].partition(":")[0]
