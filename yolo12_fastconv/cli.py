"""The command ``yolo12-fastconv``: the Ultralytics command line patched, the parity check, and what is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import yolo12_fastconv
from yolo12_fastconv import _autopatch

HELP = """\
usage: yolo12-fastconv COMMAND [ARGUMENTS]

  yolo ...      the Ultralytics command line with patched models; its arguments are untouched
                  yolo12-fastconv yolo train model=yolo12n.yaml data=coco8.yaml epochs=3
  parity ...    layer-by-layer check of the patched model against the stock one; exit status 0 if they agree
                  yolo12-fastconv parity model=yolo12n.pt source=bus.jpg quantize=16
  info [--json] versions, GPU, and which CUDA library was loaded or why none was

  --help        this text, or the help of a command: yolo12-fastconv parity --help
  --version     the version of this package

YOLO12_FASTCONV_CUDA_GRAPH=1 lets `yolo` replay CUDA graphs, as patch_model(..., cuda_graph=True) does.
YOLO12_FASTCONV=1 patches the literal `yolo` command, YOLO12_FASTCONV_DISABLE=1 turns the package off,
YOLO12_FASTCONV_STRICT=1 makes an error of every layer that would not run on a CUDA kernel."""

# Ultralytics saves pictures and streams results only for a program whose name ends in "yolo".
PROGRAM = "yolo12-fastconv-yolo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's), without the program's name. Returns the exit status.

    ``yolo`` raises what Ultralytics raises. Without a command, or with one that does not exist: status 2.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if command in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if command in ("--version", "version"):
        print(f"yolo12-fastconv {yolo12_fastconv.__version__}")
        return 0
    if command == "info":
        from yolo12_fastconv import info

        return info.main(rest)
    if command == "parity":
        from yolo12_fastconv import parity

        return parity.main(rest)
    if command == "yolo":
        return _yolo(rest)
    problem = f"there is no command {command!r}" if command else "a command is missing"
    print(f"yolo12-fastconv: {problem}: it is yolo, parity or info (yolo12-fastconv --help)", file=sys.stderr)
    return 2


def _yolo(arguments: list[str]) -> int:
    # In place: Ultralytics keeps the list object, and reads it in several modules.
    sys.argv[:] = [PROGRAM, *arguments]
    # The processes that it starts (ranks of DDP, one for each of several data sets) patch themselves.
    os.environ[_autopatch.ENABLE] = "1"
    from yolo12_fastconv import _compat

    try:
        ultralytics = _compat.require_ultralytics()
    except ImportError as error:
        print(f"yolo12-fastconv: {error}", file=sys.stderr)
        return 1
    from yolo12_fastconv import training

    # A program that calls `main` may have imported Ultralytics when `sys.argv` was another list.
    ultralytics.utils.ARGV[:] = ultralytics.cfg.ARGV[:] = sys.argv
    training.install()
    ultralytics.cfg.entrypoint()
    return 0
