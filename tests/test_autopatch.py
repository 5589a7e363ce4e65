"""The opt-in by environment: what the ``.pth`` file does with and without ``YOLO12_FASTCONV``."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shapes_dataset
from logs import logged

import yolo12_fastconv
from yolo12_fastconv import _autopatch, training

PACKAGES = str(Path(yolo12_fastconv.__file__).resolve().parent.parent)  # of the package under test
PTH = Path(__file__).resolve().parent.parent / "yolo12_fastconv" / "_autopatch.pth"

STATE = """
import site, sys
before = list(sys.meta_path)
site.addsitedir(sys.argv[1])
print([type(finder).__name__ for finder in sys.meta_path if finder not in before],
      [name for name in ("torch", "ultralytics", "yolo12_fastconv") if name in sys.modules])
"""


@pytest.fixture(scope="module")
def site_folder(tmp_path_factory) -> Path:
    """A site folder as the wheel leaves it; on PYTHONPATH it is processed at interpreter start, as site-packages is."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(PTH, folder / _autopatch.PTH)
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(folder)!r})\n")
    return folder


def state(folder: Path, value: str | None, path: str = PACKAGES) -> str:
    """What processing the folder's ``.pth`` file adds to a bare interpreter: finders, and heavy modules."""
    environment = {key: v for key, v in os.environ.items() if key != _autopatch.ENABLE}
    if value is not None:
        environment[_autopatch.ENABLE] = value
    done = subprocess.run(
        [sys.executable, "-S", "-c", STATE, str(folder)],
        env={**environment, "PYTHONPATH": path},
        cwd=folder,  # not the checkout, where the package would be found
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def start(
    folder: Path, code: str, *arguments: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds the package and the folder's ``.pth`` file."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), PACKAGES]),
            "YOLO_VERBOSE": "true",
            **environment,
        },
        capture_output=True,
        text=True,
    )


def test_file_is_one_line_of_code():
    lines = PTH.read_text().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("import ")  # the one kind of line that the site module executes


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", "off"])
def test_without_the_variable_nothing_changes(site_folder, value):
    assert state(site_folder, value) == "[] []"


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_with_the_variable_a_finder_waits_and_nothing_heavy_is_imported(site_folder, value):
    assert state(site_folder, value) == "['AfterImport'] ['yolo12_fastconv']"


def test_a_package_that_is_gone_or_broken_does_no_harm(site_folder, tmp_path):
    assert state(site_folder, "1", path="") == "[] []"
    (tmp_path / "yolo12_fastconv").mkdir()
    (tmp_path / "yolo12_fastconv" / "__init__.py").write_text("raise RuntimeError('broken')\n")
    assert state(site_folder, "1", path=str(tmp_path)) == "[] []"


IMPORTED = """
import importlib, inspect, sys
assert "torch" not in sys.modules
importlib.import_module(sys.argv[1])
from yolo12_fastconv import _autopatch, training
from ultralytics.models.yolo import model
assert training._in_force()
assert not [finder for finder in sys.meta_path if isinstance(finder, _autopatch.AfterImport)]
assert "class YOLO(Model)" in inspect.getsource(model)
assert not isinstance(model.__spec__.loader, _autopatch.AfterImport)
assert model.YOLO("yolo12n.yaml")._smart_load("trainer") is training.FastDetectionTrainer
"""


@pytest.mark.parametrize("first", ["ultralytics.models.rtdetr", "ultralytics.models.yolo.detect"])
def test_the_patch_is_in_force_after_any_first_import(site_folder, first):
    done = start(site_folder, IMPORTED, first, YOLO12_FASTCONV="1")
    assert done.returncode == 0, done.stderr


YOLO_COMMAND = """
import sys
sys.argv[0] = "yolo"
from ultralytics.cfg import entrypoint
entrypoint()
"""


@pytest.mark.parametrize("disabled", [False, True])
def test_the_literal_yolo_command_trains_patched(site_folder, tmp_path, disabled):
    data = shapes_dataset.make(tmp_path / "shapes", size=64, train=4, val=2)
    arguments = (
        f"train model=yolo12n.yaml data={data} imgsz=64 epochs=1 batch=4 device=cpu plots=False".split()
    )
    environment = {"YOLO12_FASTCONV": "1", **({"YOLO12_FASTCONV_DISABLE": "1"} if disabled else {})}
    done = start(site_folder, YOLO_COMMAND, *arguments, f"project={tmp_path}", **environment)
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert ("yolo12_fastconv: training with 113 of 113 Conv blocks patched" in output) is not disabled
    assert (
        "yolo12_fastconv: 113 of 113 Conv blocks patched" in output
    ) is not disabled  # the final validation
    assert list(tmp_path.rglob("best.pt"))


TUNE = """
import sys
from ultralytics import YOLO
from yolo12_fastconv import _autopatch, patch_model
_autopatch.installed = lambda: True
yolo = patch_model(YOLO("yolo12n.yaml"))
yolo.tune(data=sys.argv[1], project=sys.argv[2], iterations=1, imgsz=64, epochs=1, batch=4, device="cpu", plots=False,
          val=False, optimizer="SGD")
"""


def test_tuning_runs_are_patched(site_folder, tmp_path):
    """They are new processes, one for each data set; so are the runs of ``yolo train data=[...]``."""
    data = shapes_dataset.make(tmp_path / "shapes", size=64, train=4, val=2)
    done = start(site_folder, TUNE, data, tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "yolo12_fastconv: training with 113 of 113 Conv blocks patched" in done.stdout + done.stderr


# ---------------------------------------------------------------------------------------------------- in this process


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A stand-in for the module that is waited for, and a list that receives an entry at every `install`."""
    (tmp_path / "fastconv_target.py").write_text(
        "import sys\nVALUE = sys.modules.get('fastconv_wanted', 7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_autopatch, "TARGET", "fastconv_target")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "fastconv_target", raising=False)
    installed: list[str] = []
    monkeypatch.setattr(training, "install", lambda: installed.append("installed"))
    importlib.invalidate_caches()
    yield installed
    sys.modules.pop("fastconv_target", None)


def waiting() -> int:
    return sum(isinstance(finder, _autopatch.AfterImport) for finder in sys.meta_path)


def test_finder_installs_once_the_module_is_executed(target):
    _autopatch.register()
    _autopatch.register()
    assert waiting() == 1
    specification = importlib.util.find_spec("fastconv_target")
    assert specification.loader.get_source("fastconv_target").startswith("import sys")
    assert target == []
    module = importlib.import_module("fastconv_target")
    assert (module.VALUE, target, waiting()) == (7, ["installed"], 0)
    assert type(module.__loader__) is type(module.__spec__.loader) is importlib.machinery.SourceFileLoader
    _autopatch.register()  # imported before
    assert (target, waiting()) == (["installed", "installed"], 0)


def test_finder_waits_on_when_the_import_fails(target, tmp_path):
    source = (tmp_path / "fastconv_target.py").read_text()
    (tmp_path / "fastconv_target.py").write_text("raise ImportError('not now')\n")
    _autopatch.register()
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module("fastconv_target")
    assert (target, waiting()) == ([], 1)
    (tmp_path / "fastconv_target.py").write_text(source + "\n# other size, so no stale bytecode\n")
    importlib.import_module("fastconv_target")
    assert (target, waiting()) == (["installed"], 0)


def test_missing_module_is_reported_as_without_the_finder(target, tmp_path):
    (tmp_path / "fastconv_target.py").unlink()
    importlib.invalidate_caches()
    _autopatch.register()
    with pytest.raises(ModuleNotFoundError, match="fastconv_target"):
        importlib.import_module("fastconv_target")
    assert (target, waiting()) == ([], 1)


def test_a_patch_that_cannot_be_installed_is_one_warning(monkeypatch):
    def fail():
        raise ImportError("yolo12_fastconv needs ultralytics>=8.3.242, found 8.0.0")

    monkeypatch.setattr(training, "install", fail)
    with logged() as messages:
        _autopatch.install()
    assert messages == [
        "yolo12_fastconv: YOLO12_FASTCONV is set, but nothing is patched: "
        "yolo12_fastconv needs ultralytics>=8.3.242, found 8.0.0"
    ]


def test_installed_looks_into_the_site_folders(site_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path)])
    assert not _autopatch.installed()
    monkeypatch.setattr("site.getsitepackages", lambda: [str(tmp_path), str(site_folder)])
    assert _autopatch.installed()
