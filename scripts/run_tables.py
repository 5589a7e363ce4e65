"""Markdown tables of the records of whole models: printed after a run, and the README's parts made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from records import precision

Rows = list[dict[str, Any]]
Part = Callable[[dict[str, Any]], list[str]]


def lines(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    heads = list(heads)
    return [
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
        *("| " + " | ".join(map(str, cells)) + " |" for cells in rows),
    ]


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Three digits, so that 0.6 ms and 75 ms both say enough."""
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def by_name(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in measured["rows"]}


def value_of(measured: dict[str, Any], contender: str, key: str = "ms") -> float | None:
    """A number of a contender that ran and was right, or None."""
    row = by_name(measured).get(contender)
    return row[key] if row and row["ok"] is not False else None


def quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def title(measured: dict[str, Any]) -> str:
    unfinished = "" if measured["complete"] else ", NOT COMPLETE"
    tf32 = " with TF32" if measured.get("tf32") else ""
    what = (
        f"{measured['model']} batch {measured['batch']} {measured['dtype']}{tf32}, {measured['imgsz']} pixels"
    )
    more = [measured[key] for key in ("scope", "mode", "sizes") if key in measured]
    return f"## {', '.join([what, *more])}{unfinished}"


def verdict(row: dict[str, Any]) -> str:
    if row["ok"] is None:
        return row["note"] or "-"
    return f"right, {percent(row['error'])} of limit" if row["ok"] else f"**WRONG** {row['note']}"


def conditions(record: dict[str, Any]) -> str:
    """GPU, dates and versions of the complete sets."""
    whole = complete(record)
    dates = sorted({measured["date"] for measured in whole})
    versions = [measured["environment"]["versions"] for measured in whole]
    torches = sorted({str(version["torch"]) for version in versions})
    others = sorted({str(version.get("ultralytics", "-")) for version in versions})
    return (
        f"{record['gpu']} ({', '.join(dates)}, torch {', '.join(torches)}, Ultralytics {', '.join(others)})"
    )


def complete(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [measured for measured in record["sets"] if measured["complete"]]


# ------------------------------------------------------------------------------------------------------------- model


def model_table(sets: list[dict[str, Any]]) -> str:
    """Every row of the sets, in full."""
    text = []
    for measured in sets:
        heads = (
            *(
                "contender",
                "ms",
                "spread",
                "images/s",
                "GPU busy, ms",
                "host ms",
                "launches / image",
                "kernels",
            ),
            *("peak GiB", "compile s", "patch s", "first call, ms more", "against float64"),
        )
        rows = [
            (
                row["contender"],
                significant(row["ms"]),
                percent(row["spread"]),
                number(row["images_s"]),
                significant(row["kernel_ms"]),
                significant(row["host_ms"]),
                significant(quotient(row["launches"], measured["batch"])),
                number(row["kernels"]),
                number(row["peak_gib"], 2),
                number(row["compile_s"]),
                number(row["patch_s"], 2),
                number(row["first_extra_ms"]),
                verdict(row),
            )
            for row in measured["rows"]
        ]
        text += [title(measured), "", *lines(heads, rows), ""]
    return "\n".join(text)


_COMPILED = ("compile", "compile-reduce-overhead", "compile-max-autotune")
_OURS_COMPILED = ("ours-compile", "ours-compile-reduce-overhead")


def _fastest(measured: dict[str, Any], names: Iterable[str]) -> tuple[str, float] | None:
    times = {name: value_of(measured, name) for name in names}
    known = {name: ms for name, ms in times.items() if ms}
    return min(known.items(), key=lambda item: item[1]) if known else None


def _with_seconds(measured: dict[str, Any], names: Iterable[str]) -> str:
    """ms of the fastest of these ways to compile, and the seconds that compiling took."""
    fastest = _fastest(measured, names)
    if fastest is None:
        return "-"
    return f"{significant(fastest[1])} ({number(value_of(measured, fastest[0], 'compile_s'))} s)"


def model_part(record: dict[str, Any]) -> list[str]:
    rows = []
    for measured in complete(record):
        graph = _fastest(measured, ("stock-graph", "channels_last-graph"))
        ours = _fastest(measured, ("ours", "ours-graph"))
        memory = [number(value_of(measured, name, "peak_gib"), 2) for name in ("stock", "ours")]
        launches = [number(value_of(measured, name, "launches")) for name in ("stock", "ours")]
        rows.append(
            (
                measured["model"],
                measured["batch"],
                measured["imgsz"],
                precision(measured),
                significant(value_of(measured, "stock")),
                significant(value_of(measured, "channels_last")),
                significant(graph[1] if graph else None),
                _with_seconds(measured, _COMPILED),
                significant(value_of(measured, "ours")),
                significant(value_of(measured, "ours-graph")),
                _with_seconds(measured, _OURS_COMPILED),
                number(1000 * measured["batch"] / ours[1] if ours else None),
                number(quotient(value_of(measured, "stock"), ours[1] if ours else None), 2),
                " → ".join(memory),
                " → ".join(launches),
            )
        )
    heads = (
        *("model", "batch", "imgsz", "precision", "stock", "channels_last", "stock, CUDA graph"),
        *("torch.compile (compiling)", "ours", "ours, CUDA graph", "ours, torch.compile (compiling)"),
        *("images/s", "stock / ours"),
        *("peak GiB", "launches"),
    )
    wrong = [row for measured in record["sets"] for row in measured["rows"] if row["ok"] is False]
    patching = [row["patch_s"] for one in complete(record) for row in one["rows"] if row["patch_s"]]
    first = [
        row["first_extra_ms"]
        for one in complete(record)
        for row in one["rows"]
        if row["contender"] == "ours" and row["first_extra_ms"] is not None
    ]
    text = (
        f"Whole models in inference on one {conditions(record)}: ms of one call, host and GPU, median; all contenders "
        "of a line in one run, fused as `predict` runs them; stock is Ultralytics as it comes (NCHW), the others of "
        "stock the best that a user can do by hand. "
    )
    if patching and first:
        text += (
            f"Patching took at most {max(patching):.2f} s, the first patched call at most {max(first):.0f} ms more "
            "than a later one. "
        )
    text += "Every number here passed the error rule against stock and a float64 truth."
    if wrong:
        text += f" **{len(wrong)} results did not, and have no number.**"
    return [text, "", *lines(heads, rows)]


# ----------------------------------------------------------------------------------------------------------- predict


def predict_table(sets: list[dict[str, Any]]) -> str:
    text = []
    for measured in sets:
        heads = (
            *("contender", "ms / picture", "spread", "preprocess", "inference", "postprocess", "rest"),
            *("detections", "verdict"),
        )
        rows = [
            (
                row["contender"],
                significant(row["ms"]),
                percent(row["spread"]),
                *(significant(row[key]) for key in ("preprocess", "inference", "postprocess", "rest")),
                number(row["detections"]),
                "right" if row["ok"] else row["note"] or "-",
            )
            for row in measured["rows"]
        ]
        text += [title(measured), "", *lines(heads, rows), ""]
    return "\n".join(text)


def predict_part(record: dict[str, Any]) -> list[str]:
    rows = []
    for measured in complete(record):
        for row in measured["rows"]:
            if row["ms"] is None:
                continue
            phases = (significant(row[key]) for key in ("preprocess", "inference", "postprocess", "rest"))
            share = quotient(value_of(measured, "stock"), row["ms"])
            rows.append(
                (
                    measured["model"],
                    measured["batch"],
                    measured["sizes"],
                    measured["dtype"],
                    row["contender"],
                    significant(row["ms"]),
                    *phases,
                    number(share, 2),
                )
            )
    heads = (
        *("model", "batch", "pictures", "precision", "contender", "all", "preprocess", "inference"),
        *("postprocess", "rest", "stock / this"),
    )
    text = (
        f"`YOLO.predict` on a folder of generated pictures, on one {conditions(record)}: ms per picture, phases as "
        "Ultralytics reports them; the rest is reading pictures and Ultralytics' own loop. Pictures: all of one size, "
        "or of five sizes, mixed."
    )
    return [text, "", *lines(heads, rows)]


# ------------------------------------------------------------------------------------------------------------- train


def train_table(sets: list[dict[str, Any]]) -> str:
    return "\n".join(line for one in sets for line in [title(one), "", *_TRAIN_TABLES[one["scope"]](one), ""])


def _passes_table(measured: dict[str, Any]) -> list[str]:
    heads = (
        *("contender", "ms", "spread", "GPU busy, ms", "host ms", "host share", "kernels", "peak GiB"),
        *("compile s", "against float64"),
    )
    return lines(
        heads,
        (
            (
                row["contender"],
                significant(row["ms"]),
                percent(row["spread"]),
                significant(row["kernel_ms"]),
                significant(row["host_ms"]),
                percent(quotient(row["host_ms"], row["ms"])),
                number(row["kernels"]),
                number(row["peak_gib"], 2),
                number(row["compile_s"]),
                verdict(row),
            )
            for row in measured["rows"]
        ),
    )


PHASES = ("data", "preprocess", "forward", "loss", "backward", "optimizer", "ema", "rest")


def _iteration_table(measured: dict[str, Any]) -> list[str]:
    heads = ("contender", "ms", "spread", "images/s", "GPU busy", *PHASES, "peak GiB", "note")
    return lines(
        heads,
        (
            (
                row["contender"],
                significant(row["ms"]),
                percent(row["spread"]),
                number(row["images_s"]),
                percent(row["gpu_busy"]),
                *(significant((row["phases"] or {}).get(name)) for name in PHASES),
                number(row["peak_gib"], 2),
                row["note"] or "-",
            )
            for row in measured["rows"]
        ),
    )


TARGETS_MS = {"yolo12n": 5.5, "yolo12m": 24.0, "yolo12x": 58.0}
"""What the Conv blocks alone should take at batch 32 on an H200: 1.3 times what their passes over memory cost."""


def block_sums(measured: dict[str, Any], what: str = "us") -> tuple[float | None, float | None]:
    """ms of ours and of eager over all blocks of the model; None where a layer has no time. `what`: "us", GPU busy, or
    "graph_us", a replay."""

    def total(key: str) -> float | None:
        values = [(row.get(key), row["count"]) for row in measured["rows"]]
        if any(us is None for us, _ in values):
            return None
        return sum(us * count for us, count in values) / 1000

    return total(f"ours_{what}"), total(f"eager_{what}")


def _blocks_table(measured: dict[str, Any], shown: int = 20) -> list[str]:
    def lost(row: dict[str, Any]) -> float:
        return float("inf") if row["ours_us"] is None else row["ours_us"] * row["count"]

    rows = sorted(measured["rows"], key=lost, reverse=True)
    ours, eager = block_sums(measured)
    ours_graph, eager_graph = block_sums(measured, "graph_us")
    target = TARGETS_MS.get(measured["model"]) if measured["batch"] == 32 else None
    table = lines(
        (
            *("layer", "count", "ours busy, µs", "kernels", "eager busy, µs", "kernels", "ours / eager"),
            *("ours graph, µs", "eager graph, µs", "note"),
        ),
        (
            (
                row["name"],
                row["count"],
                number(row["ours_us"], 1),
                number(row["ours_kernels"]),
                number(row["eager_us"], 1),
                number(row["eager_kernels"]),
                number(quotient(row["ours_us"], row["eager_us"]), 2),
                number(row.get("ours_graph_us"), 1),
                number(row.get("eager_graph_us"), 1),
                row["note"] or "-",
            )
            for row in rows[:shown]
        ),
    )
    more = f"; {len(rows) - shown} more layers in the record" if len(rows) > shown else ""
    sums = f"sums of GPU busy, ms: ours {number(ours, 2)}, eager {number(eager, 2)}, to reach {number(target, 1)}"
    replays = f"sums of graph replays, ms: ours {number(ours_graph, 2)}, eager {number(eager_graph, 2)}"
    return [*table, "", f"{sums}; {replays}{more}"]


_TRAIN_TABLES = {"model": _passes_table, "iteration": _iteration_table, "layers": _blocks_table}


def train_part(record: dict[str, Any]) -> list[str]:
    whole = complete(record)
    parts = [(scope, [one for one in whole if one["scope"] == scope]) for scope in _TRAIN_TABLES]
    text = [f"Training on one {conditions(record)}, under autocast:"]
    for scope, sets in parts:
        if sets:
            text += ["", *_TRAIN_PARTS[scope](sets)]
    return text


def _passes_part(sets: list[dict[str, Any]]) -> list[str]:
    rows = []
    for one in sets:
        names = ("stock", "channels_last", "compile", "ours", "ours-graph")
        times = [significant(value_of(one, name)) for name in names]
        ours = [value_of(one, name) for name in names[3:]]
        fastest = min((ms for ms in ours if ms is not None), default=None)
        memory = [number(value_of(one, name, "peak_gib"), 2) for name in ("channels_last", "ours")]
        best = value_of(one, "channels_last")
        rows.append(
            (
                *(one["model"], one["batch"], one["imgsz"], one["dtype"], one["mode"], *times),
                number(quotient(best, fastest), 2),
                " → ".join(memory),
            )
        )
    heads = (
        *("model", "batch", "imgsz", "precision", "mode", "stock NCHW", "stock channels_last"),
        *("torch.compile", "ours", "ours, CUDA graphs", "channels_last / ours", "peak GiB"),
    )
    text = [
        "Forward and backward of the model, ms (without the loss; deterministic mode as Ultralytics sets it); the "
        "ratio is that of the faster of ours:",
        "",
        *lines(heads, rows),
    ]
    kept = [
        (one["model"], one["batch"], one["imgsz"], one["dtype"], *_memory_cells(one))
        for one in sets
        if any(row["contender"].endswith(("-low", "-fast")) for row in one["rows"])
    ]
    if kept:
        heads = ("model", "batch", "imgsz", "precision", *(f'memory="{name}"' for name in _MEMORY))
        text += ["", "By `memory=`, ms and peak GiB:", "", *lines(heads, kept)]
    return text


_MEMORY = {"low": "-low", "auto": "", "fast": "-fast"}


def _memory_cells(one: dict[str, Any]) -> list[str]:
    graphs = any(row["contender"].startswith("ours-graph-") for row in one["rows"])
    names = [("ours-graph" if graphs else "ours") + end for end in _MEMORY.values()]
    return [
        f"{significant(value_of(one, name))}, {number(value_of(one, name, 'peak_gib'), 2)}" for name in names
    ]


def _iteration_part(sets: list[dict[str, Any]]) -> list[str]:
    rows = []
    for one in sets:
        for row in one["rows"]:
            if row["ms"] is None:
                continue
            parts = [significant((row["phases"] or {}).get(name)) for name in PHASES]
            rows.append(
                (
                    *(one["model"], one["batch"], one["dtype"], row["contender"], significant(row["ms"])),
                    *(percent(row["gpu_busy"]), *parts, number(row["peak_gib"], 2)),
                )
            )
    heads = ("model", "batch", "precision", "contender", "ms", "GPU busy", *PHASES, "peak GiB")
    return [
        "A whole iteration of `YOLO.train` on generated pictures, median in ms; then the phases of iterations in which "
        "each phase waits for the GPU, so that their sum is larger:",
        "",
        *lines(heads, rows),
    ]


def _blocks_part(sets: list[dict[str, Any]]) -> list[str]:
    rows = []
    for one in sets:
        cells = [one["model"], one["batch"], one["imgsz"], one["dtype"], one["mode"]]
        for what in ("us", "graph_us"):
            ours, eager = block_sums(one, what)
            cells += [number(ours, 1), number(eager, 1), number(quotient(eager, ours), 2)]
        rows.append(cells)
    heads = ("model", "batch", "imgsz", "precision", "mode")
    heads += ("ours busy", "eager channels_last busy", "eager / ours")
    heads += ("ours graph", "eager channels_last graph", "eager / ours")
    return [
        "All Conv blocks alone, forward and backward, sums over the blocks, ms. Busy: launched one by one, the time in "
        "which the GPU is busy. Graph: ten calls of a block captured in one CUDA graph, a tenth of a replay:",
        "",
        *lines(heads, rows),
    ]


_TRAIN_PARTS: dict[str, Callable[[list[dict[str, Any]]], list[str]]] = {
    "model": _passes_part,
    "iteration": _iteration_part,
    "layers": _blocks_part,
}


# --------------------------------------------------------------------------------------------------------------- ddp


def ddp_table(sets: list[dict[str, Any]]) -> str:
    text = []
    for one in sets:
        text += [title(one), "", *lines(_DDP_HEADS, _ddp_rows(one)), ""]
        text += [f"{row['contender']}: {row['note']}" for row in one["rows"] if row["note"]]
    return "\n".join(text)


_DDP_HEADS = (
    *("model", "batch per GPU", "precision", "contender", "1 GPU, ms", "images/s", "2 GPUs, ms"),
    *("images/s", "scaling"),
)


def _ddp_rows(one: dict[str, Any]) -> list[tuple[object, ...]]:
    return [
        (
            *(one["model"], one["batch"], one["dtype"], row["contender"]),
            *(significant(row["ms_1"]), number(row["images_s_1"])),
            *(significant(row["ms_2"]), number(row["images_s_2"])),
            number(quotient(row["images_s_2"], row["images_s_1"]), 2),
        )
        for row in one["rows"]
    ]


def ddp_part(record: dict[str, Any]) -> list[str]:
    rows = [row for one in complete(record) for row in _ddp_rows(one)]
    text = f"`YOLO.train` on two {conditions(record)}, median iteration, each GPU with the same batch:"
    return [text, "", *lines(_DDP_HEADS, rows)]


# ------------------------------------------------------------------------------------------------------- convergence


def convergence_table(sets: list[dict[str, Any]]) -> str:
    text = []
    for one in sets:
        heads = ("run", "last loss", "mAP50", "mAP50-95", "distance from stock", "band of stock", "verdict")
        rows = [
            (
                row["contender"],
                number(row["last"], 3),
                number(row["map50"], 3),
                number(row["map"], 3),
                *(number(row["distance"], 4), number(one["band"], 4), row["note"] or "-"),
            )
            for row in one["rows"]
        ]
        text += [title(one) + f", {one['steps']} steps", "", *lines(heads, rows), ""]
    return "\n".join(text)


def convergence_part(record: dict[str, Any]) -> list[str]:
    rows = []
    for one in complete(record):
        ours = by_name(one)["ours"]
        stock = [row for row in one["rows"] if row["contender"] != "ours"]
        maps = [row["map50"] for row in stock]
        rows.append(
            (
                *(one["model"], one["batch"], one["imgsz"], one["dtype"], one["steps"]),
                *(number(ours["distance"], 4), number(one["band"], 4)),
                *(number(ours["map50"], 3), f"{min(maps):.3f} to {max(maps):.3f}"),
                "inside" if ours["ok"] else "**outside**",
            )
        )
    heads = (
        *("model", "batch", "imgsz", "precision", "steps", "distance of ours", "largest of stock"),
        *("mAP50 of ours", "of stock", "verdict"),
    )
    text = (
        f"Convergence on one {conditions(record)}: from one seed, on the same pictures in the same order, patched "
        "training beside stock runs that differ only in the order of summation (the pictures of a batch in another "
        "order). Distance: root mean square between two smoothed loss curves, relative to the loss."
    )
    return [text, "", *lines(heads, rows)]


# -------------------------------------------------------------------------------------------------------------- soak


_SOAK_HEADS = (
    *("model", "batch", "precision", "contender", "minutes", "steps", "epochs", "allocated, MiB", "growth"),
    *("reserved, MiB", "growth", "host, MiB", "growth", "verdict"),
)


def _soak_rows(one: dict[str, Any]) -> list[tuple[object, ...]]:
    def pair(row: dict[str, Any], name: str) -> tuple[str, str]:
        return number(row[name]), number(row[f"{name}_growth"], 1)

    return [
        (
            *(one["model"], one["batch"], one["dtype"], row["contender"]),
            *(number(quotient(row["seconds"], 60), 1), number(row["steps"]), row["epochs"]),
            *(*pair(row, "allocated_mib"), *pair(row, "reserved_mib"), *pair(row, "host_mib")),
            row["note"] or "steady",
        )
        for row in one["rows"]
    ]


def soak_table(sets: list[dict[str, Any]]) -> str:
    return "\n".join("\n".join([title(one), "", *lines(_SOAK_HEADS, _soak_rows(one)), ""]) for one in sets)


def soak_part(record: dict[str, Any]) -> list[str]:
    rows = [row for one in complete(record) for row in _soak_rows(one)]
    text = (
        f"Memory while `YOLO.train` runs, {conditions(record)}: an epoch ends with a smaller batch, validation and a "
        "checkpoint. Growth is from the second third of the epochs to the last."
    )
    return [text, "", *lines(_SOAK_HEADS, rows)]


PARTS: dict[str, Part] = {
    "model": model_part,
    "predict": predict_part,
    "train": train_part,
    "ddp": ddp_part,
    "convergence": convergence_part,
    "soak": soak_part,
}
"""The README's part of each kind of record, without the line that names the file."""
