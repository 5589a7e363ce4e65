"""scripts/check_library.py finds what it looks for."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "check_library.py"
# A library of PyTorch that is what ours must not be: tied to libc10, to C++ symbols and to a search path.
TIED = Path(torch.__file__).parent / "lib" / "libshm.so"

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z20implicit_gemm_kernelI4TileEv' for 'sm_90a'
ptxas info    : Function properties for _Z20implicit_gemm_kernelI4TileEv
    {gemm} bytes stack frame, {gemm} bytes spill stores, {gemm} bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z13direct_kernelv' for 'sm_90a'
ptxas info    : Function properties for _Z13direct_kernelv
    {direct} bytes stack frame, {direct} bytes spill stores, {direct} bytes spill loads
"""


@pytest.fixture(scope="module")
def check_library():
    spec = importlib.util.spec_from_file_location("check_library", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("gemm", "direct", "problems"), [(0, 0, 0), (0, 16, 0), (16, 0, 1)])
def test_spills_count_in_hot_kernels_only(check_library, tmp_path, gemm, direct, problems):
    log = tmp_path / "a.cu.o.ptxas.log"
    log.write_text(REPORT.format(gemm=gemm, direct=direct))
    found = list(check_library.check_spills([log]))
    assert len(found) == problems
    assert all("implicit_gemm" in text and "sm_90a: 16 bytes" in text for text in found)


def test_reports_without_kernels_are_no_proof(check_library, tmp_path):
    log = tmp_path / "empty.ptxas.log"
    log.write_text("")
    for logs in ([], [log]):
        with pytest.raises(check_library.CheckUnavailable, match="name no kernel"):
            list(check_library.check_spills(logs))


@pytest.mark.skipif(
    sys.platform != "linux" or not (shutil.which("readelf") and shutil.which("nm")),
    reason="needs binutils on Linux",
)
def test_ties_to_one_pytorch_and_one_machine(check_library):
    text = "\n".join(check_library.check_links(TIED))
    assert "links to libc10.so" in text
    assert "C++ symbol c10::" in text
    assert "holds the search path $ORIGIN" in text


def test_a_foreign_file_does_not_say_what_it_is(check_library):
    content = TIED.read_bytes()
    text = "\n".join(check_library.check_file(TIED, content))
    assert "does not say which architectures" in text and "csrc/ has" in text


def test_a_missing_file_is_exit_status_2(check_library, tmp_path, capsys):
    assert check_library.main([str(tmp_path / "none.so")]) == 2
    assert "none.so" in capsys.readouterr().err
