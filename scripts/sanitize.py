#!/usr/bin/env python3
"""compute-sanitizer over every CUDA kernel of the library: memcheck, racecheck, initcheck of scripts/sanitize_cases.py.

    scripts/sanitize.py [--tools memcheck,racecheck,initcheck] [--only WORD] [--out FILE] [--limit SECONDS]

Needs a GPU, the compiled library and compute-sanitizer (of the CUDA toolkit). Prints what a tool reports, and one line
each with its verdict; exits with 1 if one of them found something or did not come to its end. ``--out`` writes the
verdicts as JSON: as FOLDER/sanitizer.json, `gpu_record.py collect FOLDER` puts them into the record.

PyTorch's allocator is switched to one cudaMalloc a tensor: in its large blocks nothing would be seen of what is read or
written beside a tensor. memcheck and racecheck look at this library's kernels only; initcheck has to see who else
writes. Cases run once before, without a tool, and have to launch every kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from records import ROOT, facts, why_not

TOOLS = ("memcheck", "racecheck", "initcheck")
CASES = ROOT / "scripts" / "sanitize_cases.py"
OURS = "kernel_substring=yolo12_fastconv"  # the namespace, in mangled names


KNOWN_WRITER = "fold_channels<"
"""The function whose writes racecheck takes for races: a warp writes scale and shift of the channels, ``__syncwarp()``
orders its lanes' writes before lane 0's arrive at a barrier, and who reads waits for that. racecheck knows of writes
of the lane that arrives only: in a list of 4000 hazards, the writers were lanes 1 to 15, and never lane 0."""


TOOL_ERROR = "Internal Sanitizer Error"
MOST_BROKEN = 30


def races(output: str) -> tuple[int, int]:
    """How many of the races in a report of racecheck are those of `KNOWN_WRITER`, and how many are others."""
    known = others = 0
    for record in output.split("Race reported between ")[1:]:
        first, *lines = record.splitlines()
        accesses = [first, *(line for line in lines if re.match(r"=========\s+and ", line))]
        writes = [access for access in accesses if "Write access" in access]
        if writes and len(writes) < len(accesses) and all(KNOWN_WRITER in write for write in writes):
            known += 1
        else:
            others += 1
    return known, others


def verdict(output: str, status: int) -> tuple[bool, str]:
    """Whether a tool's output says that everything was run and nothing found, and its last line on it."""
    summaries = re.findall(r"(?:ERROR|RACECHECK|LEAK) SUMMARY: .*", output)
    ran = re.search(r"^\d+ cases ran$", output, re.MULTILINE)
    if not summaries or not ran:
        return False, f"did not come to its end (status {status})"
    clean = all(re.search(r"SUMMARY: 0 (?:errors|hazards)\b", summary) for summary in summaries)
    known, others = races(output)
    displayed = re.search(r"SUMMARY: (\d+) hazards? displayed", summaries[-1])
    if known and not others and displayed and int(displayed.group(1)) == known:
        return (
            status == 0,
            f"nothing but {known} known reports: writes of {KNOWN_WRITER[:-1]}, ordered by __syncwarp()",
        )
    return clean and status == 0, summaries[-1]


def run_tool(tool: str, only: str, limit: float) -> dict[str, Any]:
    """All cases under one tool. Where the tool itself ends the process, it goes on behind the case."""
    started = time.monotonic()
    begun, broken, problems = 0, [], False
    while True:
        left = limit - (time.monotonic() - started)
        output, status, names = _run_once(tool, only, begun, left)
        begun += len(names)
        clean, summary = verdict(output, status)
        if not clean:
            print(output if len(output) < 16000 else output[:8000] + "\n...\n" + output[-8000:])
        if TOOL_ERROR in output and names and len(broken) < MOST_BROKEN:
            _, others = races(output)
            problems |= others > 0
            broken.append(names[-1].removeprefix("case "))
            continue
        break
    if broken:
        summary += f"; the tool itself failed in {len(broken)} cases: {', '.join(broken)}"
    clean = clean and not problems and not broken
    seconds = round(time.monotonic() - started, 1)
    print(f"{tool}: {'clean' if clean else 'NOT CLEAN'}, {begun} cases, {seconds} s: {summary}", flush=True)
    return {
        "tool": tool,
        "clean": clean,
        "cases": begun,
        "summary": summary,
        "broken": broken,
        "seconds": seconds,
    }


def _run_once(tool: str, only: str, first: int, limit: float) -> tuple[str, int, list[str]]:
    """Output, exit status, and the cases that were begun."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "cases"
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10000", "--show-backtrace", "no"]
        if tool != "initcheck":
            command += ["--kernel-name", OURS]
        command += [sys.executable, str(CASES), "--only", only, "--log", str(log), "--first", str(first)]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": _path()}
        environment["TORCH_SHOW_CPP_STACKTRACES"] = "0"
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=max(limit, 1),
                env=environment, cwd=ROOT, check=False,
            )  # fmt: skip
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as expired:
            text = expired.stdout or b""
            output, status = text.decode(errors="replace") if isinstance(text, bytes) else text, 124
        return output, status, log.read_text().splitlines() if log.exists() else []


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose names contain it")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of each tool")
    arguments = parser.parse_args()
    problem = why_not()
    if problem is None and not shutil.which("compute-sanitizer"):
        problem = "compute-sanitizer is not in PATH: install the CUDA toolkit, or add its bin folder"
    if problem:
        print(f"sanitize: {problem}", file=sys.stderr)
        return 2
    command = [sys.executable, str(CASES), "--only", arguments.only]
    if not arguments.only:
        command.append("--kernels")
    environment = {**os.environ, "PYTHONPATH": _path()}
    covered = subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == 0
    results = [run_tool(tool, arguments.only, arguments.limit) for tool in arguments.tools.split(",")]
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        verdicts = {**facts(), "only": arguments.only, "all_kernels": covered, "tools": results}
        arguments.out.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
    return int(not covered or not all(result["clean"] for result in results))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
