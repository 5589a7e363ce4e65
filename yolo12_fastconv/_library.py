"""Finds, checks and loads the compiled library, and says which GPUs it serves.

Nothing here raises for a missing, damaged or foreign file: the ops then run on ATen, `load()` says why, and one line
is logged. A file is checked before the dynamic linker touches it, since that kills the process on a damaged one.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import torch

import yolo12_fastconv
from yolo12_fastconv import _compat

FILE_NAME = "libyolo12_fastconv.so"

# Families of instructions that kernels are written for; the library reads the switch at every call
# (csrc/host/tile_menu.cpp), "aten" is decided here.
TARGETS = ("sm80", "sm90")

# Cards with compute capability 7.5 or below it, mostly without tensor cores, whose half precision gives NaN or zeros
# in convolutions; recognised by name, since the capability does not tell them from sound ones. GTX 16xx and MX450/550
# hold TU116 or TU117 chips, as do the T-series workstation cards (T4 is another chip, and sound).
_BROKEN_HALF = re.compile(
    r"\b(GTX 16[0-9]{2}|MX[45]50|T(400|500|550|600|1000|1200|2000)|CMP 30HX)\b", re.IGNORECASE
)

_EMBEDDED_INFO = re.compile(rb"yolo12_fastconv library: ([^\0]+)\0")


@dataclass(frozen=True)
class LibraryStatus:
    """What became of the compiled library in this process."""

    loaded: bool
    path: str | None
    """The file that was loaded, or that was chosen and could not be."""
    reason: str
    """Why it was not loaded, in one sentence; empty if it was."""
    tried: tuple[str, ...]
    """Every place that was looked at, in order."""
    arch_list: tuple[str, ...] = ()
    """Architectures in the library, as in TORCH_CUDA_ARCH_LIST: "8.0", "9.0a", "12.0+PTX"."""
    source_hash: str = ""
    """Hash of the csrc/ that it was built from, see `source_hash`."""
    cuda_version: str = ""
    """Version of the nvcc that built it."""
    version: str = ""
    """Version of the package that it was built from."""


@functools.cache
def load() -> LibraryStatus:
    """Loads the compiled library at the first call; every call returns the same status. Raises nothing."""
    status = _load()
    logger = _compat.get_logger()
    if not status.loaded:
        # A file that should have worked deserves a warning; an installation without one is a normal way to run.
        level = logging.WARNING if status.path else logging.INFO
        logger.log(level, "yolo12_fastconv: ops run on ATen: %s", status.reason)
    else:
        current = _checkout_hash()
        if current and current != status.source_hash:
            logger.warning(
                "yolo12_fastconv: %s was built from other sources than csrc/ (%s, now %s): run scripts/build.sh --dev",
                status.path,
                status.source_hash,
                current,
            )
    return status


def _load() -> LibraryStatus:
    tried: list[str] = []
    facts: dict = {}

    def failed(reason: str, path: Path | None = None) -> LibraryStatus:
        return LibraryStatus(False, str(path) if path else None, reason, tuple(tried), **facts)

    if _compat.env_flag("YOLO12_FASTCONV_DISABLE"):
        return failed(f"YOLO12_FASTCONV_DISABLE={os.environ['YOLO12_FASTCONV_DISABLE']} turns the plugin off")
    target = os.environ.get("YOLO12_FASTCONV_TARGET", "")
    if target == "aten":
        return failed("YOLO12_FASTCONV_TARGET=aten asks for ATen")
    if target and target not in TARGETS:
        return failed(f"YOLO12_FASTCONV_TARGET={target} is none of {', '.join(TARGETS)}, aten")
    problem = _compat.torch_problem()
    if problem:
        return failed(problem)
    if torch.version.cuda is None:
        return failed(f"PyTorch {torch.__version__} was built without CUDA")

    explicit = os.environ.get("YOLO12_FASTCONV_LIBRARY")
    path = None
    for candidate in [Path(explicit)] if explicit else _places():
        tried.append(str(candidate))
        if candidate.is_file():
            path = candidate.resolve()
            break
    if path is None:
        if explicit:
            return failed(f"YOLO12_FASTCONV_LIBRARY={explicit} is no file", Path(explicit))
        return failed("the compiled library is not installed (python -m yolo12_fastconv.info says more)")

    try:
        content = path.read_bytes()
        problem = file_problem(path, content)
    except OSError as error:
        return failed(f"{path} can't be read: {error.strerror}", path)
    facts = embedded_info(content)
    if problem:
        return failed(f"{path} {problem}", path)
    if facts.get("version") != yolo12_fastconv.__version__:
        # Its ops have other schemas, and what it registers in the process can't be taken back.
        return failed(
            f"{path} belongs to version {facts.get('version') or 'unknown'} of yolo12_fastconv, this is "
            f"{yolo12_fastconv.__version__}: reinstall or rebuild it",
            path,
        )
    try:
        torch.ops.load_library(str(path))
    except (OSError, RuntimeError) as error:
        # PyTorch wraps the linker's sentence in one that says less.
        sentence = str(error.__cause__ or error).splitlines()[0]
        return failed(f"{path} can't be loaded: {sentence}", path)
    return LibraryStatus(True, str(path), "", tuple(tried), **facts)


def _places() -> list[Path]:
    """Where the library may be: in every folder of the package, of which an editable installation has two."""
    return [Path(folder) / "lib" / FILE_NAME for folder in yolo12_fastconv.__path__]


def file_problem(path: Path, content: bytes) -> str | None:
    """What is wrong with a library file, as the end of a sentence that starts with its path, or None.

    Checks that `content`, the bytes of the file, is an ELF library for this machine, that every segment and section
    lies within the file, and that it matches the checksum beside the file (`FILE.sha256`, written when the library is
    built) if there is one.
    Raises OSError if the checksum can't be read.
    """
    if content[:4] != b"\x7fELF":
        return "is no shared library (no ELF header)"
    problem = _elf_problem(content)
    if problem:
        return f"is damaged ({problem}): reinstall or rebuild it"
    checksum = path.with_name(path.name + ".sha256")
    if checksum.is_file():
        expected = checksum.read_text(encoding="ascii", errors="replace").split()
        if expected[:1] != [hashlib.sha256(content).hexdigest()]:
            return "is damaged (its checksum differs): reinstall or rebuild it"
    return None


def _elf_problem(content: bytes) -> str | None:
    machine = {"x86_64": 62, "aarch64": 183}.get(platform.machine())
    size = len(content)
    try:
        if size > 5 and content[4:6] != b"\x02\x01":
            return "not a 64-bit little-endian file"
        kind, its_machine = struct.unpack_from("<HH", content, 16)
        segments_at, sections_at = struct.unpack_from("<QQ", content, 32)
        segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", content, 54)
        if kind != 3:
            return "not a shared library"
        if its_machine != machine:
            return f"built for another processor, ELF machine {its_machine}"
        if not segments:
            return "no program headers"
        for i in range(segments):
            at = segments_at + i * segment_size
            offset = struct.unpack_from("<Q", content, at + 8)[0]
            length = struct.unpack_from("<Q", content, at + 32)[0]
            if offset + length > size:
                return f"truncated: a segment ends at byte {offset + length}, the file at {size}"
        for i in range(sections):
            at = sections_at + i * section_size
            section_kind = struct.unpack_from("<I", content, at + 4)[0]
            offset, length = struct.unpack_from("<QQ", content, at + 24)
            if section_kind != 8 and offset + length > size:  # 8: occupies no bytes of the file
                return f"truncated: a section ends at byte {offset + length}, the file at {size}"
    except struct.error:
        return f"truncated: its headers end behind the file's {size} bytes"
    return None


def embedded_info(content: bytes) -> dict:
    """What a library file says about itself, as fields of `LibraryStatus`; empty if it says nothing."""
    found = _EMBEDDED_INFO.search(content)
    if not found:
        return {}
    text = found.group(1).decode("ascii", errors="replace")
    facts = dict(item.split("=", 1) for item in text.split(";") if "=" in item)
    return {
        "arch_list": tuple(facts.get("arch_list", "").split()),
        "source_hash": facts.get("source_hash", ""),
        "cuda_version": facts.get("cuda", ""),
        "version": facts.get("version", ""),
    }


def source_hash(csrc: Path) -> str:
    """The hash of the library's sources, 16 hexadecimal digits; csrc/cmake/build_info.cmake computes the same."""
    patterns = ("*.cpp", "*.cu", "*.h", "*.cuh", "*.inc", "CMakeLists.txt", "*.cmake", "*.sh")
    names = sorted(
        {path.relative_to(csrc).as_posix() for pattern in patterns for path in csrc.rglob(pattern)}
    )
    listing = "".join(f"{hashlib.sha256((csrc / name).read_bytes()).hexdigest()}  {name}\n" for name in names)
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def _checkout_hash() -> str:
    """The hash of csrc/ beside this package if it runs from a checkout, else an empty string."""
    csrc = Path(__file__).resolve().parent.parent / "csrc"
    return source_hash(csrc) if (csrc / "registration.cpp").is_file() else ""


def device_facts(device_index: int) -> tuple[str, tuple[int, int]]:
    """Name and compute capability of a CUDA device; tests replace this function."""
    return torch.cuda.get_device_name(device_index), torch.cuda.get_device_capability(device_index)


@functools.cache
def device_supported(device_index: int, dtype: torch.dtype | None = None) -> tuple[bool, str]:
    """Whether the loaded library has code that a CUDA device can run, and if not, why, in one sentence.

    `dtype`: the type of the data; None asks for all types at once. The answer is computed once for each device and
    type; `device_supported.cache_clear()` forgets it.
    """
    status = load()
    if not status.loaded:
        return False, status.reason
    name, capability = device_facts(device_index)
    if not any(arch_runs_on(arch, capability) for arch in status.arch_list):
        return False, (
            f"cuda:{device_index} ({name}, compute capability {capability[0]}.{capability[1]}) is not served by the "
            f"library, which was built for {' '.join(status.arch_list)}: rebuild it with "
            f"TORCH_CUDA_ARCH_LIST={capability[0]}.{capability[1]}"
        )
    if dtype in (None, torch.float16, torch.bfloat16) and capability <= (7, 5) and _BROKEN_HALF.search(name):
        return False, f"cuda:{device_index} ({name}) computes wrong results in half precision"
    return True, ""


def arch_runs_on(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch`, such as "8.0", "9.0a" or "12.0+PTX", runs on a device of this compute capability.

    Machine code runs within its major version on the same or a later minor one, with suffix "a" on exactly its own;
    PTX runs on everything later, with a suffix only as its machine code does. Raises ValueError for another spelling.
    """
    parts = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
    if parts is None:
        raise ValueError(f"{arch!r} is no CUDA architecture; expected the form '8.0', '9.0a' or '12.0+PTX'")
    built = (int(parts[1]), int(parts[2]))
    if parts[3] == "a":
        return capability == built
    if parts[4] and not parts[3]:
        return capability >= built
    return capability[0] == built[0] and capability[1] >= built[1]
