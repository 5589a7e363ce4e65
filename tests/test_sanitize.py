"""scripts/sanitize.py without a GPU: what counts as clean, and which kernels have to be launched."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import gpu_record  # noqa: E402
import records  # noqa: E402
import sanitize  # noqa: E402
import sanitize_cases  # noqa: E402

RAN = "544 cases ran\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
RACES = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, {} warnings)\n"


@pytest.mark.parametrize(
    ("output", "status", "clean"),
    [
        (RAN + CLEAN, 0, True),
        (RAN + RACES.format(0, 0, 0), 0, True),
        (RAN + "========= ERROR SUMMARY: 10 errors\n", 0, False),
        (RAN + RACES.format(1, 0, 1), 0, False),
        (RAN + CLEAN, 1, False),
        (CLEAN, 0, False),  # ended before the last case
        (RAN, 0, False),  # nobody looked
        ("", 124, False),
    ],
)
def test_verdict(output, status, clean):
    assert sanitize.verdict(output, status).clean is clean


RACE = """\
========= Error: Race reported between Read access at TileWriter<__half>::finish+0x1 in a.cuh:639
=========     and Write access at another<__half>(int)+0x2 [2 hazards]
"""


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("tile implicit_gemm/sm90/64x64x64-rows-2+2 1x1", "tiles"),
        ("tile wgrad/sm90/window/64x64x64x10/3 3x3", "weight gradients"),
        ("train 3x3/2 16to8 sm90 float16", "strided gradients"),
        ("train 3x3/2 sm90 float16", "training"),
        ("train stem nhwc float16", "stem"),
        ("train depthwise 7 64 float16", "depthwise"),
        ("depthwise float64", "depthwise"),
        ("grouped by two float16", "training"),
        ("slice sm80 float16", "forward"),
        ("running statistics", "maps"),
        ("backward in one pass 24to56", "one pass"),
    ],
)
def test_families(name, family):
    assert sanitize_cases.family_of(name) == family


def test_every_case_has_a_family(monkeypatch):
    """On a GPU of another architecture: names are made without one."""
    monkeypatch.setattr(sanitize_cases, "capability", lambda: 80)
    monkeypatch.setattr(sanitize_cases, "tiles", lambda: iter(()))
    names = [name for name, _ in sanitize_cases.all_cases()]
    assert len(names) == len(set(names)) > 100
    found = {sanitize_cases.family_of(name) for name in names}
    assert found == set(sanitize_cases.FAMILIES) - {
        "tiles", "weight gradients", "strided gradients", "one pass",
    }  # fmt: skip


def test_every_kernel_of_the_sources_is_asked_for():
    found = sanitize_cases.declared_kernels()
    sources = [*(SCRIPTS.parent / "csrc").rglob("*.cu"), *(SCRIPTS.parent / "csrc").rglob("*.cuh")]
    assert len(found) == sum(path.read_text().count("__global__") for path in sources)
    assert {"add_rows_kernel", "attention_backward_sm90_kernel", "window_gemm_kernel"} <= found


def test_cases_without_a_gpu(monkeypatch, tmp_path, capsys):
    """Names are told before a case runs, and errors say which it was."""

    def fail():
        raise ValueError("a result is not finite")

    cases = [("maps good", lambda: None), ("maps bad", fail)]
    monkeypatch.setattr(sanitize_cases, "all_cases", lambda: iter(cases))
    log = tmp_path / "log"
    with log.open("w") as file, pytest.raises(RuntimeError, match="case maps bad: a result is not finite"):
        sanitize_cases.run("", file)
    assert log.read_text().splitlines() == ["case maps good", "case maps bad"]
    assert sanitize_cases.run("goo", sys.stdout) == "1 cases ran"
    assert sanitize_cases.run("", sys.stdout, limit=-1) == "0 cases ran, then time was over"


def of_tool(monkeypatch, *runs):
    """Lets a tool have these outputs, statuses and cases, one after the other. Returns the first cases of its runs."""
    left, firsts = list(runs), []

    def once(tool, family, only, first, limit):
        firsts.append(first)
        return left.pop(0)

    monkeypatch.setattr(sanitize, "_run_once", once)
    return firsts


BROKEN = (
    "========= Internal Sanitizer Error: it failed\n" + RACES.format(1, 1, 0),
    6,
    ["case a", "case b"],
)
GOOD = (RAN + RACES.format(0, 0, 0), 0, ["case c"])
BAD = (RAN + RACE + RACES.format(1, 1, 0), 0, ["case c"])
SLOW = ("1 cases ran, then time was over\n" + RACES.format(0, 0, 0), 0, ["case c"])
STUCK = ("", 124, ["case c", "case d"])


def run_tool(tool="racecheck"):
    part = sanitize.run_family(tool, "forward", "", 0, time.monotonic() + 60)
    return part, sanitize.summarize(tool, [part])


def test_goes_on_behind_a_failure_of_the_tool(monkeypatch):
    """Which is no clean result."""
    firsts = of_tool(monkeypatch, BROKEN, GOOD)
    part, result = run_tool()
    assert firsts == [0, 2] and part["ended"] and result["cases"] == 3
    assert result["broken"] == ["b"] and not result["clean"] and "failed in 1 cases: b" in result["summary"]
    of_tool(monkeypatch, GOOD)
    _, result = run_tool()
    assert result["clean"] and result["limits"][0].startswith("cases /^train 1x1 sm80/ left out: ")


def test_errors_are_errors(monkeypatch):
    of_tool(monkeypatch, BAD)
    part, result = run_tool()
    assert part["ended"] and part["problems"] and not result["clean"]


def test_goes_on_with_what_is_missing(monkeypatch):
    """Behind the case that time ran out in, and with the families that have not been run."""
    of_tool(monkeypatch, SLOW)
    part, result = run_tool()
    assert part["cases"] == 1 and not part["ended"] and not result["clean"]
    done = {**part, "family": "maps", "ended": True}
    firsts, saved = of_tool(monkeypatch, GOOD, GOOD), []
    parts = sanitize.run_all(
        ["racecheck"], ["forward", "maps", "stem"], "", 60, 1, [part, done], saved.append
    )
    assert firsts == [1, 0] and saved[-1] == parts
    assert {p["family"]: p["cases"] for p in parts} == {"forward": 2, "maps": 1, "stem": 1}
    assert sanitize.summarize("racecheck", parts)["clean"]


def test_killed_cases_are_run_again(monkeypatch):
    of_tool(monkeypatch, STUCK)
    part, result = run_tool()
    assert part["cases"] == 0 and not part["ended"] and not result["clean"]


def test_reports_before_time_is_over_are_errors(monkeypatch):
    of_tool(monkeypatch, (SLOW[0].replace("0 hazards", "1 hazards") + RACE, 0, SLOW[2]))
    part, _ = run_tool()
    assert part["problems"] and not part["ended"]


def test_no_time_is_not_clean():
    part = sanitize.run_family("memcheck", "maps", "", 0, time.monotonic() - 1)
    assert not part["ended"] and not sanitize.summarize("memcheck", [part])["clean"]


def test_the_record_shows_it(tmp_path, monkeypatch):
    tools = [
        {
            "tool": tool,
            "clean": tool != "racecheck",
            "cases": 544,
            "summary": "-",
            "limits": [],
            "seconds": 1.0,
        }
        for tool in sanitize.TOOLS
    ]
    facts = {
        "gpu": "Some GPU",
        "date": "2026-01-01",
        "sources": {"csrc": "1", "package": "2"},
        "environment": {"versions": {"torch": "2", "ultralytics": "8"}},
    }
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    (tmp_path / "junit.xml").write_text("<testsuites/>")
    (tmp_path / "sanitizer.json").write_text(
        json.dumps({**facts, "only": "", "whole": True, "all_kernels": True, "tools": tools})
    )
    for module in (gpu_record, records):
        monkeypatch.setattr(module, "RECORDS", tmp_path / "records")
        monkeypatch.setattr(module, "ROOT", tmp_path)
    assert gpu_record.collect(tmp_path) == 0
    text = records.table()
    assert "compute-sanitizer" in text and "memcheck and initcheck clean, racecheck **not clean**" in text
    # Of other sources it says nothing of these.
    changed = {**facts, "sources": {"csrc": "other", "package": "2"}}
    (tmp_path / "sanitizer.json").write_text(
        json.dumps({**changed, "only": "", "whole": True, "all_kernels": True, "tools": tools})
    )
    assert gpu_record.collect(tmp_path) == 0 and "compute-sanitizer" not in records.table()
