"""What `pip install` gives: wheel contents, metadata, and an import of the installed package."""

import email
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import yolo12_fastconv

ROOT = Path(__file__).resolve().parent.parent
VERSION = yolo12_fastconv.__version__


def environment(**changes):
    env = {**os.environ, **changes}
    for name in ("FORCE_CUDA", "PYTHONPATH", "YOLO12_FASTCONV"):
        if name not in changes:
            env.pop(name, None)
    return env


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The wheel that `pip install .` builds without FORCE_CUDA."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        "pip",
        "wheel",
        "--quiet",
        "--no-build-isolation",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    done = subprocess.run([sys.executable, "-m", *command], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="session")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="session")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"yolo12_fastconv-{VERSION}.dist-info/METADATA"))


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory):
    """A virtual environment with the wheel in it, which sees this environment's other packages."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    scheme = "nt" if os.name == "nt" else "posix_prefix"
    packages = Path(sysconfig.get_path("purelib", scheme, {"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Their .pth files are not read from there: an editable installation of the checkout stays out.
    others = dict.fromkeys(
        [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    )
    (packages / "environment.pth").write_text("\n".join(others))
    return packages


@pytest.fixture(scope="session")
def run_installed(installed, tmp_path_factory):
    """Runs Python code in that environment, away from the checkout; returns its standard output."""
    script = "Scripts/python.exe" if os.name == "nt" else "bin/python"
    python = next(folder / script for folder in installed.parents if (folder / "pyvenv.cfg").is_file())
    here = tmp_path_factory.mktemp("elsewhere")

    def run(code, **changes):
        done = subprocess.run(
            [python, "-c", code], env=environment(**changes), capture_output=True, text=True, cwd=here
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_wheel_without_the_library_is_for_any_platform(wheel, names):
    assert wheel.name == f"yolo12_fastconv-{VERSION}-py3-none-any.whl"
    assert not [name for name in names if name.endswith((".so", ".sha256", ".cu", ".cpp", ".h"))]


def test_wheel_holds_all_modules_and_nothing_else(names):
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "yolo12_fastconv").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == {
        "yolo12_fastconv",
        "yolo12_fastconv_autopatch.pth",
        f"yolo12_fastconv-{VERSION}.dist-info",
    }


def test_wheel_holds_every_configuration_file(names):
    files = {f"yolo12_fastconv/configs/{path.name}" for path in (ROOT / "configs").iterdir()}
    assert "yolo12_fastconv/configs/tolerances.yaml" in files
    assert {name for name in names if name.startswith("yolo12_fastconv/configs/")} == files


def test_startup_hook_lies_at_the_root_and_only_there(names, installed):
    assert [name for name in names if name.endswith(".pth")] == ["yolo12_fastconv_autopatch.pth"]
    (line,) = (installed / "yolo12_fastconv_autopatch.pth").read_text("utf-8").splitlines()
    assert line.startswith("import ") and "YOLO12_FASTCONV" in line


def test_version_is_the_same_everywhere(metadata):
    assert metadata["Version"] == VERSION


def test_ultralytics_is_no_hard_requirement(metadata):
    requirements = metadata.get_all("Requires-Dist")
    hard = {re.split(r"[^\w-]", text)[0].lower() for text in requirements if "extra ==" not in text}
    assert hard == {"numpy", "pyyaml", "torch"}
    extras = {re.sub(r"\s", "", text).replace('"', "'") for text in requirements if "extra ==" in text}
    assert "ultralytics>=8.3.242;extra=='ultralytics'" in extras
    assert "ultralytics-opencv-headless>=8.3.242;extra=='headless'" in extras


def test_license_and_python_versions(metadata, names):
    assert metadata["License-Expression"] == "AGPL-3.0-only"
    assert f"yolo12_fastconv-{VERSION}.dist-info/licenses/LICENSE" in names
    assert metadata["Requires-Python"] == ">=3.10"


def test_console_script(installed):
    text = (installed / f"yolo12_fastconv-{VERSION}.dist-info" / "entry_points.txt").read_text()
    assert re.search(r"^yolo12-fastconv ?= ?yolo12_fastconv\.cli:main$", text, re.MULTILINE)


def test_installed_package_works_outside_the_checkout(installed, run_installed):
    code = """
import yolo12_fastconv
from yolo12_fastconv import _compat, ops
assert not ops.LIBRARY.loaded
print(yolo12_fastconv.__file__)
print(_compat.config_path("tolerances.yaml"))
"""
    package, tolerances = (Path(line).resolve() for line in run_installed(code).splitlines())
    assert package == (installed / "yolo12_fastconv" / "__init__.py").resolve()
    assert tolerances == (installed / "yolo12_fastconv" / "configs" / "tolerances.yaml").resolve()


def test_startup_does_nothing_without_the_switch(run_installed):
    code = "import sys; print([name for name in sys.modules if 'yolo12' in name or name in ('torch', 'ultralytics')])"
    assert run_installed(code).strip() == "[]"
    assert run_installed(code, YOLO12_FASTCONV="0").strip() == "[]"


def test_startup_with_the_switch_imports_no_torch(run_installed):
    code = "import sys; print('yolo12_fastconv._autopatch' in sys.modules, 'torch' in sys.modules)"
    assert run_installed(code, YOLO12_FASTCONV="1").split() == ["True", "False"]


def test_source_distribution_holds_what_a_build_needs(tmp_path):
    backend = pytest.importorskip("scikit_build_core.build")
    here = os.getcwd()
    try:
        os.chdir(ROOT)
        name = backend.build_sdist(str(tmp_path))
    finally:
        os.chdir(here)
    with tarfile.open(tmp_path / name) as archive:
        files = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    sources = {
        path.relative_to(ROOT).as_posix()
        for pattern in ("*.cpp", "*.cu", "*.h", "*.cuh", "CMakeLists.txt", "*.cmake", "*.sh")
        for path in (ROOT / "csrc").rglob(pattern)
    }
    assert sources and sources <= files
    assert {"pyproject.toml", "README.md", "LICENSE", "configs/tolerances.yaml"} <= files
    assert not [name for name in files if name.startswith((".venv", "build", "dist")) or name.endswith(".so")]


@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++") and (shutil.which("ninja") or shutil.which("make"))),
    reason="needs cmake, a C++ compiler, and ninja or make",
)
def test_source_build_without_nvcc_says_what_to_do(tmp_path):
    command = [
        "cmake",
        "-S",
        str(ROOT / "csrc"),
        "-B",
        str(tmp_path),
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    done = subprocess.run(command, env=environment(CUDACXX="no-such-nvcc"), capture_output=True, text=True)
    assert done.returncode != 0
    text = re.sub(r"\s+", " ", done.stderr)
    assert "Building the CUDA library needs nvcc" in text and "install without FORCE_CUDA" in text
