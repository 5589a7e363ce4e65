"""scripts/sanitize.py without a GPU: what counts as clean, and which kernels have to be launched."""

from __future__ import annotations

import json
import sys
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
    assert sanitize.verdict(output, status)[0] is clean


READ = "Race reported between Read access at TileWriter<__half>::finish+0x1 in a.cuh:639\n"
KNOWN = (
    f"========= Error: {READ}=========     and Write access at fold_channels<__half>(int)+0x2 [2 hazards]\n"
)
OTHER = f"========= Error: {READ}=========     and Write access at another<__half>(int)+0x2 [2 hazards]\n"
BOTH = KNOWN + "=========     and Write access at another<__half>(int)+0x2 [2 hazards]\n"


@pytest.mark.parametrize(
    ("reports", "shown", "clean"),
    [
        ([KNOWN, KNOWN], 2, True),
        ([KNOWN, OTHER], 2, False),
        ([BOTH], 1, False),
        ([KNOWN], 2, False),  # one was not printed
        ([KNOWN.replace("Read", "Write")], 1, False),  # two writers, of which one is another
    ],
)
def test_known_races(reports, shown, clean):
    output = RAN + "=========\n".join(reports) + RACES.format(shown, shown, 0)
    assert sanitize.verdict(output, 0)[0] is clean
    assert not sanitize.verdict(output, 1)[0]


def test_every_kernel_of_the_sources_is_asked_for():
    found = sanitize_cases.declared_kernels()
    sources = [*(SCRIPTS.parent / "csrc").rglob("*.cu"), *(SCRIPTS.parent / "csrc").rglob("*.cuh")]
    assert len(found) == sum(path.read_text().count("__global__") for path in sources)
    assert {"add_rows_kernel", "attention_backward_sm90_kernel", "window_gemm_kernel"} <= found


def test_cases_without_a_gpu(monkeypatch, tmp_path, capsys):
    """Names are told before a case runs, and errors say which it was."""

    def fail():
        raise ValueError("a result is not finite")

    cases = [("good", lambda: None), ("bad", fail)]
    monkeypatch.setattr(sanitize_cases, "all_cases", lambda: iter(cases))
    log = tmp_path / "log"
    with log.open("w") as file, pytest.raises(RuntimeError, match="case bad: a result is not finite"):
        sanitize_cases.run("", file)
    assert log.read_text().splitlines() == ["case good", "case bad"]
    assert sanitize_cases.run("goo", sys.stdout) == 1


def test_goes_on_behind_a_failure_of_the_tool(monkeypatch):
    """Which is no clean result."""
    runs = [
        (
            KNOWN + "========= Internal Sanitizer Error: it failed\n" + RACES.format(2, 2, 0),
            6,
            ["case a", "case b"],
        ),
        (RAN + KNOWN + RACES.format(1, 1, 0), 0, ["case c"]),
    ]
    firsts = []
    monkeypatch.setattr(
        sanitize, "_run_once", lambda tool, only, first, limit: firsts.append(first) or runs[len(firsts) - 1]
    )
    result = sanitize.run_tool("racecheck", "", 60.0)
    assert firsts == [0, 2] and result["cases"] == 3 and result["broken"] == ["b"] and not result["clean"]
    runs[0] = runs[1]
    firsts.clear()
    assert sanitize.run_tool("racecheck", "", 60.0)["clean"]


def test_the_record_shows_it(tmp_path, monkeypatch):
    tools = [
        {"tool": tool, "clean": tool != "racecheck", "cases": 544, "summary": "-", "seconds": 1.0}
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
        json.dumps({**facts, "only": "", "all_kernels": True, "tools": tools})
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
        json.dumps({**changed, "only": "", "all_kernels": True, "tools": tools})
    )
    assert gpu_record.collect(tmp_path) == 0 and "compute-sanitizer" not in records.table()
