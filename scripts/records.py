"""What gpu_record.py and benchmark.py share: the records of docs/benchmarks/, and the part of the README made of them.

There are two families of files for a GPU: <gpu>.json, tests and parity, of gpu_record.py, and <gpu>-<kind>.json, sets
of measurements, of benchmark.py, which say their kind: one of `ORDER`, but parity.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "docs" / "benchmarks"
BEGIN, END = "<!-- gpu record: written by scripts/gpu_record.py readme -->", "<!-- end of gpu record -->"
SLOWER = 1.05
"""A layer counts as slower than the best peer from this ratio on: less is within the spread of a run."""


def package_hash() -> str:
    """Hash of the Python sources of the package, 16 hexadecimal digits."""
    listing = hashlib.sha256()
    for path in sorted((ROOT / "yolo12_fastconv").glob("*.py")):
        listing.update(path.name.encode() + b"\0" + path.read_bytes())
    return listing.hexdigest()[:16]


def source_hashes() -> dict[str, str]:
    from yolo12_fastconv import _library

    return {"csrc": _library.source_hash(ROOT / "csrc"), "package": package_hash()}


def facts() -> dict[str, Any]:
    """What a record says of the run that made it: GPU, date, sources, library, versions. Needs a GPU."""
    import torch

    from yolo12_fastconv import info, ops

    return {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "sources": source_hashes(),
        "library": {"source_hash": ops.LIBRARY.source_hash, "arch_list": list(ops.LIBRARY.arch_list)},
        "environment": _public(info.collect()),
    }


def _public(facts: dict[str, Any]) -> dict[str, Any]:
    """Versions and GPUs out of `info.collect()`, without paths of the machine."""
    return {
        "versions": {
            "yolo12_fastconv": facts["yolo12_fastconv"]["version"],
            "python": facts["python"]["version"],
            "torch": facts["torch"]["version"],
            "cuda": facts["torch"]["cuda"],
            "cudnn": facts["torch"]["cudnn"],
            "ultralytics": facts["ultralytics"]["version"],
            "driver": facts["driver"],
        },
        "gpus": [{key: gpu[key] for key in ("name", "capability")} for gpu in facts["gpus"]],
    }


def why_not() -> str | None:
    """Why nothing can be measured here, in one line, or None."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU here"
    from yolo12_fastconv import ops

    return None if ops.LIBRARY.loaded else f"the library is not loaded: {ops.LIBRARY.reason}"


def slug(gpu: str) -> str:
    """A GPU's name as a file's: "NVIDIA H200" gives "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def shown(path: Path) -> str:
    """`path` as seen from the checkout, if it lies in there."""
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)


ORDER = ("model", "predict", "train", "convergence", "soak", "ddp", "layers", "parity")
"""Kinds of records as the README shows them."""


def kind_of(record: dict[str, Any]) -> str:
    return record.get("kind", "parity")


def records() -> list[tuple[Path, dict[str, Any]]]:
    found = [(path, json.loads(path.read_text())) for path in sorted(RECORDS.glob("*.json"))]
    return sorted(found, key=lambda item: ORDER.index(kind_of(item[1])))


# ------------------------------------------------------------------------------------------------ records of layers


def family(row: dict[str, Any]) -> str:
    """stem, or kernel size with the stride, depthwise with "dw"."""
    if row["groups"] > 1:
        return f"dw{row['k']}"
    if row["ci"] <= 4:
        return "stem"
    stride = f"/{row['s']}" if row["s"] > 1 else ""
    return f"{row['k']}x{row['k']}{stride}"


def best_peer(row: dict[str, Any]) -> float | None:
    """Time of the fastest contender but ours, in µs; None if none ran."""
    return min((time["us"] for name, time in row["times"].items() if name != "ours" and time), default=None)


def our_time(row: dict[str, Any]) -> float | None:
    return row["times"]["ours"]["us"] if row["times"]["ours"] else None


def ratio(row: dict[str, Any]) -> float | None:
    """Our time over the best peer's, or None where one of them is missing."""
    ours, best = our_time(row), best_peer(row)
    return ours / best if ours and best else None


def sums(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """µs over all blocks, each layer times its count: ours, best, eager, roofline. None where a layer has no time."""

    def total(values: list[float | None]) -> float | None:
        if None in values:
            return None
        return sum(value * row["count"] for value, row in zip(values, rows, strict=True) if value)

    eager = [row["times"]["eager"]["us"] if row["times"].get("eager") else None for row in rows]
    return {
        "ours": total([our_time(row) for row in rows]),
        "best": total([best_peer(row) for row in rows]),
        "eager": total(eager),
        "roofline": total([row["roofline_us"] for row in rows]),
    }


def slower(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers that the best peer beats by more than 5 %."""
    return [row for row in rows if (ratio(row) or 0) > SLOWER]


def _set_name(measured: dict[str, Any]) -> str:
    more = [str(measured[key]) for key in ("scope", "mode", "sizes", "steps") if key in measured]
    return ", ".join([f"{measured['model']} batch {measured['batch']} {precision(measured)}", *more])


def precision(measured: dict[str, Any]) -> str:
    """A set's dtype, "tf32" for fp32 with TF32 allowed, and the target if one was forced."""
    dtype = "tf32" if measured.get("tf32") else measured["dtype"]
    return dtype if measured.get("target", "default") == "default" else f"{dtype}, {measured['target']}"


# ------------------------------------------------------------------------------------------------------- the README


def table() -> str:
    """The README's part made of all records. A record without a complete set gives none."""
    parts = [part for path, record in records() if (part := _part(path, record))]
    return "\n\n".join(parts) if parts else "No GPU record yet."


def _part(path: Path, record: dict[str, Any]) -> str:
    kind = kind_of(record)
    if kind == "parity":
        return _parity_part(path, record)
    if not any(measured["complete"] for measured in record["sets"]):
        return ""
    return _layers_part(path, record) if kind == "layers" else _runs_part(path, record)


def _runs_part(path: Path, record: dict[str, Any]) -> str:
    import run_tables

    lines = run_tables.PARTS[record["kind"]](record)
    return "\n".join([*lines, *_picture(path, "Loss curves"), "", _sources(path, record)])


def _picture(path: Path, text: str) -> list[str]:
    picture = path.with_suffix(".png")
    return ["", f"![{text}]({picture.relative_to(ROOT).as_posix()})"] if picture.is_file() else []


def _sources(path: Path, record: dict[str, Any]) -> str:
    """The last line of a part made of sets: where the numbers are, and what sources they are of."""
    hashes = {_hashes(measured["sources"]) for measured in record["sets"] if measured["complete"]}
    return _source_line(path, " and ".join(sorted(hashes)))


def _source_line(path: Path, sources: str) -> str:
    return (
        f"Full record: [{path.relative_to(ROOT)}]({path.relative_to(ROOT).as_posix()}), of {sources}; "
        "`scripts/gpu_record.py stale` says whether they have changed since."
    )


def _hashes(sources: dict[str, str]) -> str:
    return f"csrc/ `{sources['csrc']}` and package `{sources['package']}`"


def _parity_part(path: Path, record: dict[str, Any]) -> str:
    versions = record["environment"]["versions"]
    tests = record["tests"]
    suite = "the GPU tests were not run to their end"
    if tests["complete"]:
        suite = f"{tests['passed']} GPU tests passed, {tests['failed']} failed"
        if tests.get("rerun"):
            suite += f"; {tests['rerun']} of these were run once more on later sources"
    if tests["ops"]:
        compared, beyond = tests["ops"]["comparisons"], tests["ops"]["failed"]
        suite += f"; of {compared} outputs and gradients of single ops, {beyond} were beyond the limit"
    lines = [
        f"On one {record['gpu']} ({record['date']}, torch {versions['torch']}, Ultralytics "
        f"{versions['ultralytics']}): {suite}.",
        "",
    ]
    if record.get("sanitizer"):
        lines[0] += f" {_sanitizer_text(record['sanitizer'])}"
    source = _source_line(path, _hashes(record["sources"]))
    if not record["parity"]["rows"]:
        lines.append(
            "The runs over whole models, block by block, were not made on these sources, but for YOLO12n's tests."
        )
        return "\n".join([*lines, "", source])
    lines += [
        "Parity with stock: every block on the same input, against a float64 truth (random weights; the limit is "
        "twice stock's own error plus rounding, `configs/tolerances.yaml`):",
        "",
        "| model | precision | mode | blocks | closest to its limit | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["parity"]["rows"]:
        if row.get("problem"):
            lines.append(
                f"| {row['model']} | {row['precision']} | {row['mode']} | - | - | **{row['problem']}** |"
            )
            continue
        used = "-" if row["used"] is None else f"{100 * row['used']:.0f} %"
        verdict = "parity" if row["ok"] else "**broken**"
        cells = (row["model"], row["precision"], row["mode"], row["layers"], used, verdict)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if not record["parity"].get("complete", True):
        lines += ["", "Not all of these runs were made: the check was ended before."]
    return "\n".join([*lines, "", source])


def _sanitizer_text(found: dict[str, Any]) -> str:
    tools = found["tools"]
    words = [
        f"{' and '.join(tool['tool'] for tool in tools if tool['clean'] is clean)} {text}"
        for clean, text in ((True, "clean"), (False, "**not clean**"))
        if any(tool["clean"] is clean for tool in tools)
    ]
    kernels = "every kernel" if found["all_kernels"] else "not every kernel"
    return f"compute-sanitizer over {min(tool['cases'] for tool in tools)} cases, with {kernels}: {', '.join(words)}."


def _layers_part(path: Path, record: dict[str, Any]) -> str:
    whole = [measured for measured in record["sets"] if measured["complete"]]
    dates = sorted({measured["date"] for measured in whole})
    torches = sorted({measured["environment"]["versions"]["torch"] for measured in whole})
    lines = [
        f"Conv blocks alone on one {record['gpu']} ({', '.join(dates)}, torch {', '.join(torches)}): each distinct "
        "block alone in channels_last, ten calls on one input in a CUDA graph, the median time, times its count; sums "
        "in µs. Best peer: layer by layer the fastest of eager PyTorch (batch norm folded) and the other contenders. "
        "Roofline: the larger of FLOP and bytes over the GPU's ceilings, measured in the same run. Slower: distinct "
        "blocks that the best peer beats by more than 5 %.",
        "",
        "| model | batch | imgsz | precision | ours | best peer | eager | roofline | ours / best peer | slower |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for measured in whole:
        rows = measured["rows"]
        total = sums(rows)
        ours, best = total["ours"], total["best"]
        times = ["-" if value is None else f"{value:.0f}" for value in total.values()]
        cells = (
            measured["model"],
            measured["batch"],
            measured["imgsz"],
            precision(measured),
            *times,
            f"{ours / best:.2f}" if ours and best else "-",
            f"{len(slower(rows))} of {len(rows)}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += _picture(path, "Each layer's time against its roofline")
    return "\n".join([*lines, "", _sources(path, record)])


def readme(check: bool) -> int:
    """Write the part into README.md, or compare. Returns the exit status."""
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        print(f"README.md lacks the lines {BEGIN!r} and {END!r}", file=sys.stderr)
        return 1
    head, rest = text.split(BEGIN, 1)
    new = head + BEGIN + "\n" + table() + "\n" + END + rest.split(END, 1)[1]
    if check:
        if new != text:
            print(
                "README.md does not show docs/benchmarks: run scripts/gpu_record.py readme", file=sys.stderr
            )
        return int(new != text)
    path.write_text(new, encoding="utf-8")
    return 0


def stale() -> int:
    """Say of every record whether the sources have changed since."""
    now = source_hashes()
    for path, record in records():
        for measured in record.get("sets", [record]):
            name = shown(path)
            if "sets" in record:
                name += f", {_set_name(measured)}"
            changed = [key for key, value in now.items() if measured["sources"].get(key) != value]
            since = f"stale: {' and '.join(changed)} changed since {measured['date']}"
            print(f"{name}: {since if changed else 'current'}")
    if not records():
        print("docs/benchmarks: no record")
    return 0
