"""Finding, checking and loading the compiled library, and which devices it serves."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import yolo12_fastconv
from yolo12_fastconv import _library

ROOT = Path(__file__).resolve().parent.parent
# A sound shared library that every PyTorch for Linux brings, to damage and to disguise.
SHARED_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the compiled library exists for Linux only")


def info_mark(version=yolo12_fastconv.__version__):
    text = f"yolo12_fastconv library: arch_list=8.0 9.0a 12.0+PTX;cuda=13.0.88;source_hash=0123;version={version}"
    return text.encode() + b"\0"


@pytest.fixture
def cuda_build(monkeypatch):
    """PyTorch that says it was built for CUDA, and no switch of the plugin set."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("YOLO12_FASTCONV_DISABLE", "YOLO12_FASTCONV_LIBRARY", "YOLO12_FASTCONV_TARGET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def load_file(monkeypatch, cuda_build, tmp_path):
    """Loads a file with this content, named by YOLO12_FASTCONV_LIBRARY, and returns the status."""

    def load(content, checksum=None):
        path = tmp_path / _library.FILE_NAME
        path.write_bytes(content)
        if checksum is not None:
            path.with_name(path.name + ".sha256").write_text(f"{checksum}  {path.name}\n")
        monkeypatch.setenv("YOLO12_FASTCONV_LIBRARY", str(path))
        status = _library._load()
        assert not status.loaded
        assert status.path == str(path) and status.tried == (str(path),)
        return status

    return load


def test_load_gives_one_status_for_the_process():
    assert _library.load() is _library.load()
    assert _library.load().loaded or _library.load().reason


def test_missing_library_lists_every_place(monkeypatch, cuda_build, tmp_path):
    monkeypatch.setattr(yolo12_fastconv, "__path__", [str(tmp_path / "a"), str(tmp_path / "b")])
    status = _library._load()
    assert not status.loaded and status.path is None
    assert status.tried == tuple(str(tmp_path / name / "lib" / _library.FILE_NAME) for name in "ab")
    assert "is not installed" in status.reason and "yolo12_fastconv.info" in status.reason


def test_explicit_library_that_does_not_exist(monkeypatch, cuda_build, tmp_path):
    monkeypatch.setenv("YOLO12_FASTCONV_LIBRARY", str(tmp_path / "none.so"))
    status = _library._load()
    assert not status.loaded and status.reason == f"YOLO12_FASTCONV_LIBRARY={tmp_path / 'none.so'} is no file"


def test_disable_switch(monkeypatch, cuda_build):
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    status = _library._load()
    assert not status.loaded and status.tried == () and "YOLO12_FASTCONV_DISABLE=1" in status.reason


@pytest.mark.parametrize(("target", "words"), [("aten", "asks for ATen"), ("sm120", "sm120 is none of sm80")])
def test_target_that_is_no_kernels(monkeypatch, cuda_build, target, words):
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", target)
    status = _library._load()
    assert not status.loaded and status.tried == () and words in status.reason


def test_cpu_only_torch_is_not_tried(monkeypatch, cuda_build):
    monkeypatch.setattr(torch.version, "cuda", None)
    status = _library._load()
    assert not status.loaded and status.tried == () and "built without CUDA" in status.reason


def test_too_old_torch_is_not_tried(monkeypatch, cuda_build):
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    status = _library._load()
    assert not status.loaded and status.tried == () and "torch>=2.11" in status.reason


@pytest.mark.parametrize("content", [b"", b"\x7f", b"<html>404</html>", bytes(1000)], ids=repr)
def test_what_is_no_library(load_file, content):
    assert "no ELF header" in load_file(content).reason


@pytest.mark.parametrize("size", [4, 20, 63, 64, 100, 4096])
def test_truncated_to_headers(load_file, size):
    assert "is damaged (truncated" in load_file(SHARED_LIBRARY.read_bytes()[:size]).reason


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_truncated_library(load_file, share):
    content = SHARED_LIBRARY.read_bytes()
    status = load_file(content[: int(len(content) * share)])
    assert "is damaged (truncated" in status.reason and "reinstall or rebuild" in status.reason


def test_library_for_another_processor(load_file):
    content = bytearray(SHARED_LIBRARY.read_bytes())
    content[18:20] = (243).to_bytes(2, "little")  # RISC-V
    assert "another processor" in load_file(content).reason


def test_checksum_tells_damage_that_no_header_shows(load_file, tmp_path):
    content = SHARED_LIBRARY.read_bytes() + info_mark()
    checksum = hashlib.sha256(content).hexdigest()
    damaged = bytearray(content)
    damaged[len(damaged) // 2] ^= 0xFF
    assert "checksum differs" in load_file(damaged, checksum).reason
    assert _library.file_problem(tmp_path / "without_checksum.so", content) is None


def test_library_of_another_version(load_file):
    status = load_file(SHARED_LIBRARY.read_bytes() + info_mark(version="0.0.1"))
    assert "belongs to version 0.0.1" in status.reason and yolo12_fastconv.__version__ in status.reason
    assert status.version == "0.0.1"


def test_foreign_library_is_not_loaded(load_file):
    assert "belongs to version unknown" in load_file(SHARED_LIBRARY.read_bytes()).reason


def test_library_that_the_linker_refuses(load_file):
    content = SHARED_LIBRARY.read_bytes() + info_mark()
    assert b"libstdc++.so.6" in content
    status = load_file(content.replace(b"libstdc++.so.6", b"libstdc--.so.6"))
    assert "can't be loaded" in status.reason and "libstdc--.so.6" in status.reason
    assert status.arch_list == ("8.0", "9.0a", "12.0+PTX") and status.cuda_version == "13.0.88"


@pytest.mark.parametrize("content", [None, b"no library", "truncated"])
def test_import_survives_a_bad_library_and_convolves_on_aten(tmp_path, content):
    path = tmp_path / "bad.so"
    if content is not None:
        path.write_bytes(SHARED_LIBRARY.read_bytes()[:50_000] if content == "truncated" else content)
    code = """
import torch
torch.version.cuda = torch.version.cuda or "13.0"
from yolo12_fastconv import _library, ops
assert not ops.LIBRARY.loaded and ops.LIBRARY.reason, ops.LIBRARY
x, weight, shift = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(4)
y = ops.conv_bn_act(x, weight, shift, stride=(2, 2), padding=(1, 1))
expected = torch.nn.functional.silu(torch.nn.functional.conv2d(x, weight, shift, 2, 1))
torch.testing.assert_close(y, expected)
print("survived:", ops.LIBRARY.reason)
"""
    env = {**os.environ, "YOLO12_FASTCONV_LIBRARY": str(path), "PYTHONPATH": str(ROOT)}
    env.pop("YOLO12_FASTCONV_DISABLE", None)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(path) in done.stdout


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("8.0", (8, 0), True),
        ("8.0", (8, 9), True),
        ("8.6", (8, 0), False),
        ("8.0", (9, 0), False),
        ("9.0a", (9, 0), True),
        ("9.0a", (10, 0), False),
        ("9.0a+PTX", (10, 0), False),
        ("10.0f", (10, 3), True),
        ("10.0f", (12, 0), False),
        ("12.0+PTX", (12, 1), True),
        ("12.0+PTX", (13, 0), True),
        ("12.0+PTX", (10, 0), False),
        ("7.5", (7, 5), True),
        ("7.5", (7, 0), False),
    ],
)
def test_arch_runs_on(arch, capability, runs):
    assert _library.arch_runs_on(arch, capability) is runs


def test_arch_runs_on_refuses_another_spelling():
    with pytest.raises(ValueError, match="'sm_90' is no CUDA architecture"):
        _library.arch_runs_on("sm_90", (9, 0))


@pytest.fixture
def device(monkeypatch):
    """Sets the name and capability of cuda:0 under a library that was loaded."""
    archs = ("7.5", "8.0", "9.0a", "12.0+PTX")
    monkeypatch.setattr(
        _library, "load", lambda: _library.LibraryStatus(True, "lib.so", "", ("lib.so",), archs)
    )

    def become(name, capability):
        monkeypatch.setattr(_library, "device_facts", lambda index: (name, capability))
        _library.device_supported.cache_clear()

    yield become
    _library.device_supported.cache_clear()


def test_device_in_the_library(device):
    device("NVIDIA H200", (9, 0))
    assert _library.device_supported(0) == (True, "")


def test_device_outside_the_library_names_the_card_and_the_list(device):
    device("NVIDIA B200", (10, 0))
    supported, reason = _library.device_supported(0)
    assert not supported
    assert "NVIDIA B200" in reason and "10.0" in reason and "7.5 8.0 9.0a 12.0+PTX" in reason


def test_device_newer_than_the_library_runs_its_ptx(device):
    device("NVIDIA of 2028", (13, 0))
    assert _library.device_supported(0) == (True, "")


@pytest.mark.parametrize(
    "name", ["NVIDIA GeForce GTX 1660 Ti", "NVIDIA GeForce GTX 1650 SUPER", "NVIDIA T1000 8GB"]
)
def test_cards_with_broken_half_precision(device, name):
    device(name, (7, 5))
    for dtype in (None, torch.float16, torch.bfloat16):
        supported, reason = _library.device_supported(0, dtype)
        assert not supported and name in reason and "half precision" in reason
    assert _library.device_supported(0, torch.float32) == (True, "")


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA GeForce RTX 2080 Ti", "NVIDIA TITAN RTX"])
def test_sound_turing_cards(device, name):
    device(name, (7, 5))
    assert _library.device_supported(0) == (True, "")


def test_device_is_asked_once(device, monkeypatch):
    calls = []
    device("NVIDIA H200", (9, 0))
    monkeypatch.setattr(
        _library, "device_facts", lambda index: calls.append(index) or ("NVIDIA H200", (9, 0))
    )
    for _ in range(3):
        _library.device_supported(0)
        _library.device_supported(1)
    assert calls == [0, 1]


def test_no_library_no_device(monkeypatch):
    monkeypatch.setattr(_library, "load", lambda: _library.LibraryStatus(False, None, "it is missing", ()))
    _library.device_supported.cache_clear()
    assert _library.device_supported(0) == (False, "it is missing")
    _library.device_supported.cache_clear()


def test_source_hash_changes_with_contents_and_names(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cu").write_text("one")
    first = _library.source_hash(tmp_path)
    (tmp_path / "notes.md").write_text("not compiled")
    assert _library.source_hash(tmp_path) == first
    (tmp_path / "kernels" / "a.cu").write_text("two")
    second = _library.source_hash(tmp_path)
    (tmp_path / "kernels" / "a.cu").rename(tmp_path / "kernels" / "b.cu")
    assert len({first, second, _library.source_hash(tmp_path)}) == 3
