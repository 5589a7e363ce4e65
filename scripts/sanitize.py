#!/usr/bin/env python3
"""compute-sanitizer over every CUDA kernel of the library: memcheck, racecheck, initcheck of scripts/sanitize_cases.py.

    scripts/sanitize.py [--tools memcheck,racecheck,initcheck] [--families NAME,NAME] [--only WORD] [--limit SECONDS]
                        [--jobs N] [--out FILE [--resume]]

Needs a GPU, the compiled library and compute-sanitizer (of the CUDA toolkit). Each family of cases is a process of its
own under each tool, `--jobs` of them at once. Prints what a tool reports, and one line each with its verdict; exits
with 1 if one of them found something, or did not come to its end within `--limit`. ``--out`` writes the verdicts as
JSON after every family, and with ``--resume`` goes on with what is missing there; as FOLDER/sanitizer.json,
`gpu_record.py collect FOLDER` puts them into the record.

Cases that a tool cannot judge are listed in `LIMITS`, with the reason. They are left out for it, which is printed.

PyTorch's allocator is switched to one cudaMalloc a tensor: in its large blocks nothing would be seen of what is read or
written beside a tensor. The tools look at this library's kernels only. Cases run once before, without a tool, and have
to launch every kernel.
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from records import ROOT, facts, why_not
from sanitize_cases import FAMILIES, OUT_OF_TIME

TOOLS = ("memcheck", "racecheck", "initcheck")
CASES = ROOT / "scripts" / "sanitize_cases.py"
OURS = "kernel_substring=yolo12_fastconv"  # the namespace, in mangled names
OPTIONS = {
    "memcheck": (),
    "racecheck": ("--racecheck-indirect-barrier-dependency",),
    # Copies to the host read what kernels of PyTorch have written, at which the tool does not look here.
    "initcheck": ("--check-api-memory-access=no",),
}
TOOL_ERROR = "Internal Sanitizer Error"
MOST_BROKEN = 30
STUCK = 60
"""Seconds that a case may take beyond the limit."""


class Limit(NamedTuple):
    """What a tool cannot judge: cases that are left out for it."""

    tool: str
    reason: str
    cases: str
    """Expression for their names."""


LIMITS = (
    Limit(
        "racecheck",
        "ends with an exception that it does not handle; the same with 32 channels on 8x8 pixels is run",
        cases=r"^train 1x1 sm80",
    ),
    Limit(
        "initcheck",
        "what the copy engine (TMA) has written counts as not written, and so does what kernels of PyTorch have; so "
        "all runs with the sm80 target",
        cases=r" sm90|/sm90/|^network ",
    ),
)


class Verdict(NamedTuple):
    clean: bool
    """All cases were run, and nothing was reported."""
    summary: str


def verdict(output: str, status: int) -> Verdict:
    """What a tool's output says."""
    summaries = re.findall(r"(?:ERROR|RACECHECK|LEAK) SUMMARY: .*", output)
    ran = re.search(rf"^\d+ cases ran($|{OUT_OF_TIME})", output, re.MULTILINE)
    if not summaries or not ran:
        return Verdict(False, f"did not come to its end (status {status})")
    clean = all(re.search(r"SUMMARY: 0 (?:errors|hazards)\b", summary) for summary in summaries)
    return Verdict(clean and status == 0, summaries[-1])


def left_out(tool: str) -> list[Limit]:
    return [limit for limit in LIMITS if limit.tool == tool]


def run_family(tool: str, family: str, only: str, begun: int, until: float) -> dict[str, Any]:
    """The cases of a family from number `begun` on under a tool, up to a time of time.monotonic(). Where the tool
    itself ends the process, it goes on behind the case."""
    started = time.monotonic()
    broken: list[str] = []
    problems: list[str] = []
    ended = False
    while (left := until - time.monotonic()) > 0:
        output, status, names = _run_once(tool, family, only, begun, left)
        if status == 124:  # killed in a case, with what has not been printed of the others
            break
        begun += len(names)
        clean, summary = verdict(output, status)
        if clean:
            ended = OUT_OF_TIME not in output
            break
        print(output if len(output) < 16000 else output[:8000] + "\n...\n" + output[-8000:], flush=True)
        if TOOL_ERROR in output and names and len(broken) < MOST_BROKEN:
            broken.append(names[-1].removeprefix("case "))
            if "Race reported between " in output:
                problems.append(f"{family}: {summary}")
            continue
        ended = "SUMMARY" in output and " cases ran\n" in output
        problems.append(f"{family}: {summary}")
        break
    return {
        "tool": tool, "family": family, "ended": ended, "cases": begun, "problems": problems,
        "broken": broken, "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def _run_once(tool: str, family: str, only: str, first: int, limit: float) -> tuple[str, int, list[str]]:
    """Output, exit status (124: killed), and the cases that were begun. They end by themselves when time is over; a
    case that takes a minute more is stuck."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "cases"
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "10000", "--show-backtrace", "no"]
        command += [*OPTIONS[tool], "--kernel-name", OURS, sys.executable, str(CASES), "--only", only]
        command += ["--families", family, "--log", str(log), "--first", str(first), "--limit", str(limit)]
        if skipped := left_out(tool):
            command += ["--skip", "|".join(f"(?:{limit.cases})" for limit in skipped)]
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": _path()}
        environment["TORCH_SHOW_CPP_STACKTRACES"] = "0"
        if tool == "initcheck":
            environment["YOLO12_FASTCONV_TARGET"] = "sm80"
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit + STUCK,
                env=environment, cwd=ROOT, check=False, errors="replace",
            )  # fmt: skip
            output, status = done.stdout, done.returncode
        except subprocess.TimeoutExpired as expired:
            text = expired.stdout or b""
            output, status = text.decode(errors="replace") if isinstance(text, bytes) else text, 124
        return output, status, log.read_text().splitlines() if log.exists() else []


def _path() -> str:
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def summarize(tool: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on a tool out of those on its families."""
    problems = [problem for part in parts for problem in part["problems"]]
    broken = [name for part in parts for name in part["broken"]]
    missing = [part["family"] for part in parts if not part["ended"]]
    limits = [f"cases /{limit.cases}/ left out: {limit.reason}" for limit in left_out(tool)]
    words = list(problems)
    if broken:
        words.append(f"the tool itself failed in {len(broken)} cases: {', '.join(broken)}")
    if missing:
        words.append(f"not at their end: {', '.join(missing)}")
    return {
        "tool": tool,
        "clean": not words,
        "cases": sum(part["cases"] for part in parts),
        "summary": "; ".join(words) or "nothing found",
        "limits": limits,
        "broken": broken,
        "seconds": round(sum(part["seconds"] for part in parts), 1),
    }


def run_all(
    tools: list[str],
    families: list[str],
    only: str,
    limit: float,
    jobs: int,
    before: list[dict[str, Any]],
    save: Any,
) -> list[dict[str, Any]]:
    """The parts, one for each tool and family: those of `before` that are at their end are not run again."""
    until = time.monotonic() + limit
    earlier = {(part["tool"], part["family"]): part for part in before}
    parts = dict(earlier)
    lock = threading.Lock()

    def run(key: tuple[str, str]) -> None:
        old = earlier.get(key)
        part = run_family(*key, only, old["cases"] if old else 0, until)
        if old:
            for name in ("problems", "broken"):
                part[name] = old[name] + part[name]
            part["seconds"] = round(part["seconds"] + old["seconds"], 1)
        state = "clean" if part["ended"] and not part["problems"] and not part["broken"] else "NOT CLEAN"
        print(f"{key[0]} {key[1]}: {state}, {part['cases']} cases, {part['seconds']} s", flush=True)
        with lock:
            parts[key] = part
            save(list(parts.values()))

    wanted = [(tool, family) for tool in tools for family in families]
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(run, (key for key in wanted if not (key in earlier and earlier[key]["ended"]))))
    return list(parts.values())


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(known)):
        raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}: there are {', '.join(known)}")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", type=lambda text: _names(text, TOOLS), default=list(TOOLS))
    parser.add_argument(
        "--families",
        type=lambda text: _names(text, tuple(FAMILIES)),
        default=list(FAMILIES),
        metavar="NAME,NAME",
    )
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose names contain it")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="go on with what is missing in FILE")
    parser.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of all tools together")
    parser.add_argument("--jobs", type=int, default=4, metavar="N", help="processes at once")
    arguments = parser.parse_args()
    problem = why_not()
    if problem is None and not shutil.which("compute-sanitizer"):
        problem = "compute-sanitizer is not in PATH: install the CUDA toolkit, or add its bin folder"
    if arguments.resume and arguments.out is None:
        problem = "--resume goes on with the file of --out, which is not given"
    if problem:
        print(f"sanitize: {problem}", file=sys.stderr)
        return 2
    now = {**facts(), "only": arguments.only}
    old = None
    if arguments.resume and arguments.out.is_file():
        old = json.loads(arguments.out.read_text(encoding="utf-8"))
        if old["sources"] != now["sources"] or old["only"] != arguments.only:
            print("sanitize: the file is of other sources or cases, everything is run", flush=True)
            old = None
    covered = bool(old and old["all_kernels"])
    if not covered:
        command = [
            sys.executable,
            str(CASES),
            "--only",
            arguments.only,
            "--families",
            ",".join(arguments.families),
        ]
        whole = not arguments.only and set(arguments.families) == set(FAMILIES)
        environment = {**os.environ, "PYTHONPATH": _path()}
        ran = subprocess.run([*command, *["--kernels"] * whole], env=environment, cwd=ROOT, check=False)
        covered = ran.returncode == 0

    def save(parts: list[dict[str, Any]]) -> None:
        if arguments.out is None:
            return
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        whole = {part["family"] for part in parts} == set(FAMILIES)
        tools = [summarize(tool, [part for part in parts if part["tool"] == tool]) for tool in TOOLS]
        tools = [tool for tool in tools if any(part["tool"] == tool["tool"] for part in parts)]
        verdicts = {**now, "whole": whole, "all_kernels": covered, "tools": tools, "parts": parts}
        arguments.out.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")

    before = old["parts"] if old else []
    parts = run_all(
        arguments.tools, arguments.families, arguments.only, arguments.limit, arguments.jobs, before, save
    )
    save(parts)
    results = []
    for tool in arguments.tools:
        result = summarize(tool, [part for part in parts if part["tool"] == tool])
        state = "clean" if result["clean"] else "NOT CLEAN"
        print(f"{tool}: {state}, {result['cases']} cases, {result['seconds']} s: {result['summary']}")
        for text in result["limits"]:
            print(f"  limit of the tool: {text}")
        results.append(result)
    return int(not covered or not all(result["clean"] for result in results))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
