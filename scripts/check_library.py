"""Checks a compiled library: what it links to, what it was built for, and what the compiler made of the hot kernels.

    python scripts/check_library.py yolo12_fastconv/lib/libyolo12_fastconv.so --log build/dev

--log: a ptxas report, or a folder that is searched for the reports (*.ptxas.log) that a build leaves.
Exit status: 0 all right, 1 something is wrong, 2 a check could not run. Needs readelf and nm (binutils), and cuobjdump
from the CUDA toolkit or the package nvidia-cuda-cuobjdump.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from yolo12_fastconv import _library

CSRC = Path(__file__).resolve().parent.parent / "csrc"

HOT = ("implicit_gemm", "depthwise", "pointwise", "stem", "attention", "wgrad", "dgrad", "transpose_filter")
# Mangled names have the length before the name.
TENSOR_CORE_FAMILIES = (
    "implicit_gemm", "attention", r"\dwgrad_sm90_kernel", r"\ddgrad_strided_sm90_kernel",
    r"\dpointwise_backward_sm90_kernel", r"\dwgrad_depthwise_sm90_kernel",
)  # fmt: skip
# 7.5 is served and not tuned: the GEMM's instructions begin with 8.0 (the tile menu gives 7.5 other kernels), and
# bfloat16, which it has no instructions for, spills a word in one kernel.
UNTUNED = ("sm_75",)
TENSOR_CORE_INSTRUCTION = re.compile(r"\b(HMMA|HGMMA)\b")


class CheckUnavailable(Exception):
    """A check can't run here; the text says what is missing."""


def run(*command: str | Path) -> str:
    """Standard output of a command. Raises CheckUnavailable if it can't run or fails."""
    try:
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise CheckUnavailable(f"{command[0]} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise CheckUnavailable(f"{' '.join(map(str, command))}: {error.stderr.strip()}") from None
    return done.stdout


def find_cuobjdump() -> Path:
    """cuobjdump of the pip package (beside its nvdisasm), of CUDA_HOME, or of PATH. Raises CheckUnavailable."""
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    places = sorted(packages.glob("**/bin/cuobjdump"))
    if "CUDA_HOME" in os.environ:
        places.append(Path(os.environ["CUDA_HOME"]) / "bin" / "cuobjdump")
    places.append(Path(shutil.which("cuobjdump") or "cuobjdump"))
    for place in places:
        if place.is_file():
            return place
    raise CheckUnavailable(
        "cuobjdump is not installed: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"
    )


def check_file(library: Path, content: bytes) -> Iterator[str]:
    """Damage, and what the file says about itself."""
    problem = _library.file_problem(library, content)
    if problem:
        yield f"{library} {problem}"
    info = _library.embedded_info(content)
    if not info.get("arch_list"):
        yield f"{library} does not say which architectures it was built for"
    sources = _library.source_hash(CSRC)
    if info.get("source_hash") != sources:
        yield f"was built from sources with the hash {info.get('source_hash')}, csrc/ has {sources}"


def check_links(library: Path) -> Iterator[str]:
    """Dependencies that would tie the library to one CUDA major version, one PyTorch or one machine."""
    dynamic = run("readelf", "--dynamic", "--wide", library)
    for name in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic):
        if name.startswith(("libcudart", "libc10", "libtorch_python", "libcudnn", "libcublas")):
            yield f"links to {name}"
    for path in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", dynamic):
        yield f"holds the search path {path}"
    for line in run("nm", "--dynamic", "--undefined-only", "--demangle", library).splitlines():
        symbol = line.split(maxsplit=1)[-1]
        if re.search(r"\b(c10|at|caffe2)::", symbol):
            yield f"needs the C++ symbol {symbol}, which is no part of PyTorch's stable ABI"


def check_architectures(library: Path, arch_list: tuple[str, ...]) -> Iterator[str]:
    """Machine code and PTX that the library claims and does not hold, or the other way round."""
    cuobjdump = find_cuobjdump()
    claimed = {("sm_" + arch.removesuffix("+PTX").replace(".", "")) for arch in arch_list}
    claimed_ptx = {"sm_" + arch.removesuffix("+PTX").replace(".", "") for arch in arch_list if "+PTX" in arch}
    held = set(re.findall(r"\.(sm_\w+)\.cubin", run(cuobjdump, "--list-elf", library)))
    held_ptx = set(re.findall(r"\.(sm_\w+)\.ptx", run(cuobjdump, "--list-ptx", library)))
    if held != claimed:
        yield f"holds machine code for {sorted(held)}, and says {sorted(claimed)}"
    if held_ptx != claimed_ptx:
        yield f"holds PTX for {sorted(held_ptx)}, and says {sorted(claimed_ptx)}"


def check_tensor_cores(library: Path) -> Iterator[str]:
    """Kernels of the GEMM and attention families that were compiled without a tensor-core instruction on every
    architecture.

    A kernel for one architecture has an empty body on the others, so one architecture with the instruction is enough
    for a kernel, and one kernel for an architecture.
    """
    kernel, arch = "", ""
    compiled: set[tuple[str, str]] = set()
    with_instruction: set[tuple[str, str]] = set()
    for line in run(find_cuobjdump(), "--dump-sass", library).splitlines():
        if line.startswith("arch = "):
            arch = line.removeprefix("arch = ").strip()
        elif line.strip().startswith("Function : "):
            kernel = line.split(" : ", 1)[1].strip()
            if any(re.search(family, kernel) for family in TENSOR_CORE_FAMILIES):
                compiled.add((kernel, arch))
        elif (kernel, arch) in compiled and TENSOR_CORE_INSTRUCTION.search(line):
            with_instruction.add((kernel, arch))
    for family in TENSOR_CORE_FAMILIES:
        if not any(re.search(family, kernel) for kernel, _ in compiled):
            yield f"holds no kernel named {family}"
    for kernel in sorted({kernel for kernel, _ in compiled} - {kernel for kernel, _ in with_instruction}):
        yield f"kernel without tensor-core instructions: {kernel}"
    for arch in sorted({arch for _, arch in compiled} - {arch for _, arch in with_instruction} - {*UNTUNED}):
        yield f"no kernel with tensor-core instructions for {arch}"


def check_spills(logs: list[Path]) -> Iterator[str]:
    """Hot kernels whose registers spill to memory, from the compiler's reports."""
    seen = 0
    for log in logs:
        kernel = arch = ""
        for line in log.read_text(errors="replace").splitlines():
            entry = re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line)
            if entry:
                kernel, arch = entry.groups()
                seen += 1
            spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
            hot = arch not in UNTUNED and any(family in kernel for family in HOT)
            if hot and spill and spill.groups() != ("0", "0"):
                yield f"{arch}: {spill[1]} bytes spill stores, {spill[2]} bytes spill loads in {kernel}"
    if not seen:
        raise CheckUnavailable("the compiler's reports name no kernel; build with scripts/build.sh")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", type=Path)
    parser.add_argument(
        "--log", type=Path, action="append", default=[], help="ptxas report, or folder of reports"
    )
    options = parser.parse_args(argv)
    try:
        content = options.library.read_bytes()
    except OSError as error:
        print(f"check_library: {options.library}: {error.strerror}", file=sys.stderr)
        return 2
    logs = [
        file
        for path in options.log
        for file in (sorted(path.rglob("*.ptxas.log")) if path.is_dir() else [path])
    ]
    info = _library.embedded_info(content)
    checks = [
        ("file", lambda: check_file(options.library, content)),
        ("links", lambda: check_links(options.library)),
        ("architectures", lambda: check_architectures(options.library, info.get("arch_list", ()))),
        ("tensor cores", lambda: check_tensor_cores(options.library)),
    ]
    if options.log:
        checks.append(("spills", lambda: check_spills(logs)))

    print(f"{options.library}: {len(content) / 2**20:.1f} MiB, {' '.join(info.get('arch_list', ()))}")
    wrong = unavailable = False
    for name, check in checks:
        try:
            problems = list(check())
        except (CheckUnavailable, OSError) as error:
            print(f"  {name}: could not run: {error}")
            unavailable = True
            continue
        print(f"  {name}: {'ok' if not problems else f'{len(problems)} problems'}")
        for problem in problems:
            print(f"    {problem}")
        wrong = wrong or bool(problems)
    return 1 if wrong else 2 if unavailable else 0


if __name__ == "__main__":
    sys.exit(main())
