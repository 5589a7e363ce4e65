#!/usr/bin/env python3
"""Times the kernels that the menu chooses among, and fits its estimates (csrc/device/tile_costs.h) to the times.

Layers whose fastest kernel the estimates miss go into a table (csrc/host/tuned_layers.inc, and tuned_layers_tf32.inc);
those where a plan by which blocks share work is faster still, of which there are no estimates, into
tuned_layers_shared.inc.

    scripts/tune.py sweep out=FILE [KEY=VALUE ...]       time the candidates of each dense layer; needs a GPU
    scripts/tune.py fit sweep=FILE[,FILE] [KEY=VALUE ...]    fit, and print what the choices lose on the best ones

sweep: model=n,s,m,l,x  default: all    batch=1,32  default    dtype=fp16|bf16|tf32    default: fp16
       imgsz=640        default         top=N       candidates of a layer; default: all, which are 150 at most
       replays=5        default         budget=SECONDS  stop after that and write what there is; default: none
fit:   seconds=60       of search; default          validate=True    fit half of the layers, judge by the other half
       write=True       the constants and the table; default: False, print them
       least=0.025      what a layer of the table gains at least; default
       Of sweeps in TF32 only the table is made: the constants are those of half.

A sweep visits the layers of all models and batches in turn, the best estimates of each first, so that what a budget
cuts off are the least promising kernels. fit needs g++ and no GPU; it starts from the constants that are there, and is
drawn towards them. Exit status: 0 done, 2 could not run.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import records
from numpy.typing import NDArray
from records import ROOT

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the package of this checkout, and tests/cases.py
import bench_options  # noqa: E402
import cases  # noqa: E402
import layer_benchmark  # noqa: E402

from yolo12_fastconv._arguments import Keys, UsageError, positive  # noqa: E402

Vector = NDArray[np.float64]

HEADER = ROOT / "csrc" / "device" / "tile_costs.h"
TABLE = ROOT / "csrc" / "host" / "tuned_layers.inc"
TF32_TABLE = TABLE.with_name("tuned_layers_tf32.inc")
SHARED_TABLE = TABLE.with_name("tuned_layers_shared.inc")
SOURCES = ("scripts/tile_costs.cpp", "csrc/host/tile_costs.cpp", "csrc/host/sm90_plan.cpp")
CYCLES_PER_US = 1755
"""The clock of an H200 under load."""
CHUNK = 16
"""Candidates of a layer that are timed before the next layer's turn."""


@dataclass
class Options:
    model: tuple[str, ...] = cases.SCALES
    batch: tuple[int, ...] = (1, 32)
    dtype: str = "fp16"
    imgsz: int = 640
    top: int = 150
    replays: int = 5
    budget: float = float("inf")
    out: Path | None = None
    sweep: tuple[Path, ...] = ()
    seconds: float = 60
    validate: bool = False
    least: float = 0.025
    write: bool = False


_SWEEP_KEYS: Keys = {
    "model": (bench_options.several(cases.SCALES), f"some of {','.join(cases.SCALES)}"),
    "batch": (bench_options.batches, "numbers from 1, as in 1,32"),
    "dtype": (lambda text: {name: name for name in ("fp16", "bf16", "tf32")}[text], "fp16, bf16 or tf32"),
    "imgsz": (bench_options.image_size, "a multiple of 32"),
    "top": (positive, "a number from 1"),
    "replays": (positive, "a number from 1"),
    "budget": (bench_options.seconds_of, "seconds"),
    "out": (bench_options.path_of, "a file"),
}
_FIT_KEYS: Keys = {
    "sweep": (lambda text: tuple(Path(part) for part in text.split(",")), "files that sweep wrote"),
    "seconds": (bench_options.seconds_of, "seconds"),
    "validate": (bench_options.flag, "True or False"),
    "least": (float, "a share, as in 0.025"),
    "write": (bench_options.flag, "True or False"),
}


def parse(arguments: Sequence[str], keys: Keys) -> Options:
    """Options out of KEY=VALUE arguments; raises as `bench_options.fill`."""
    return bench_options.fill(Options(), arguments, keys)


def layer_of(case: cases.Case) -> tuple[Any, ...]:
    """What a layer of a sweep is known by."""
    return (
        *(case.batch, case.ci, case.co, case.h, case.w),
        *(case.kernel[0], case.stride[0], case.padding[0], case.act),
    )


FIELDS = ("batch", "ci", "co", "h", "w", "k", "s", "p", "act")


def dense_layers(scale: str, imgsz: int, batch: int) -> list[cases.Case]:
    """The blocks of a model that the two implicit GEMM kernels serve."""
    return [case for case in cases.conv_shapes(scale, imgsz, batch=batch) if case.groups == 1 and case.ci > 4]


# ------------------------------------------------------------------------------------------------------------ sweep


def sweep(options: Options) -> int:
    """Time candidates and write them to `options.out`. Returns the exit status."""
    if options.out is None:
        raise UsageError("sweep needs out=FILE")
    problem = records.why_not()
    if problem:
        raise UsageError(problem)
    import layer_timing
    import torch

    from yolo12_fastconv import ops

    start = time.monotonic()
    tf32 = options.dtype == "tf32"
    layer_timing.use_tf32(tf32)
    dtype = torch.float32 if tf32 else getattr(torch, bench_options.DTYPES[options.dtype])
    # In turn, so that all models and batches get their share of a budget.
    sets = [dense_layers(scale, options.imgsz, batch) for batch in options.batch for scale in options.model]
    in_turn = [case for row in itertools.zip_longest(*sets) for case in row if case is not None]
    layers = list({layer_of(case): case for case in in_turn}.values())
    candidates = {layer_of(case): candidates_of(case, dtype, tf32)[: options.top] for case in layers}
    found: dict[tuple[Any, ...], dict[str, float]] = {layer: {} for layer in candidates}
    complete = True
    written = start

    def write() -> None:
        rows = [
            dict(zip(FIELDS, layer, strict=True)) | {"us": times} for layer, times in found.items() if times
        ]
        head = {"kind": "tiles", "complete": complete, "dtype": options.dtype, **records.facts()}
        lines = ",\n".join(json.dumps(row) for row in rows)
        assert options.out is not None
        part = options.out.with_suffix(".part")
        part.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
        part.replace(options.out)

    visits = [
        (case, first)
        for first in range(0, options.top, CHUNK)
        for case in layers
        if first < len(candidates[layer_of(case)])
    ]
    progress = layer_benchmark.Progress(len(visits))
    for case, first in visits:
        if time.monotonic() - start > options.budget:
            complete = False
            break
        progress.show(f"batch {case.batch}: {case}, candidates from {first}")
        layer = layer_of(case)
        arguments = case.inputs(dtype, "cuda").eval_arguments()
        for name in ("x", "weight"):  # as a fused model has them
            arguments[name] = layer_timing.as_in_a_model(arguments[name])
        with torch.inference_mode():
            for name in candidates[layer][first : first + CHUNK]:
                os.environ["YOLO12_FASTCONV_KERNEL"] = name  # the library reads it at every call
                graph = layer_timing.capture(lambda: ops.conv_bn_act(**arguments))  # noqa: B023
                found[layer][name] = layer_timing.alternate({name: graph}, options.replays)[name]["us"]
        torch.cuda.empty_cache()  # the CUDA graphs' own pools, of gigabytes in large maps
        if time.monotonic() - written > 60:
            written = time.monotonic()
            write()
    progress.clear()
    write()
    count = sum(map(len, found.values()))
    print(
        f"tune: {'all' if complete else 'out of time:'} {count} of {sum(map(len, candidates.values()))} timed"
    )
    print(f"tune: wrote {records.shown(options.out)}")
    return 0


def candidates_of(case: cases.Case, dtype: Any, tf32: bool) -> list[str]:
    """Names of the kernels that can serve a layer on this GPU, the best estimate first."""
    import layer_timing

    from yolo12_fastconv import ops

    return ops.kernel_candidates(**layer_timing.menu_query(case, dtype, tf32))


# -------------------------------------------------------------------------------------------------------------- fit


class _Query(ctypes.Structure):
    """`Query` of scripts/tile_costs.cpp."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            *(
                "batch",
                "in_channels",
                "in_h",
                "in_w",
                "out_channels",
                "out_h",
                "out_w",
                "kernel_h",
                "kernel_w",
            ),
            *(
                "stride_h",
                "stride_w",
                "pad_h",
                "pad_w",
                "dilation_h",
                "dilation_w",
                "groups",
                "element",
                "tile",
            ),
            *("pixels", "channels", "depth", "mode", "resident", "split", "pixel_stages", "weight_stages"),
        )
    ]


_TILE = re.compile(r"\{(\d+), (\d+), (\d+), (\d+), (\d+), (\d+), \d+(?:, (true))?\}")
_SM80 = re.compile(r"implicit_gemm/sm80/(\d+)x(\d+)x(\d+)x(\d+)(?:-(wide))?(?:-(window))?")
_SM90 = re.compile(
    r"implicit_gemm/sm90/(\d+)x(\d+)x(\d+)-(\w+)-(\w+)-(?:ring-)?(?:paired-)?(?:rest-)?(?:split(\d)-)?(\d+)\+(\d+)"
)
_SHARED = re.compile("-(ring|paired|rest)-")
_ONCE = re.compile(r"implicit_gemm/sm90/(\d+)x(\d+)x(\d+)-\w+-once")
_MODES = ("rows", "window", "taps")
_COST = re.compile(r"^  double (\w+) = ([\d.]+);", re.MULTILINE)


def _tile_in_source(found: re.Match[str]) -> tuple[int | bool, ...]:
    """Of a tile in gemm_tiles.h, what its name says: sizes, whether its warps are wide, whether it keeps windows."""
    *sizes, warps_pixels, warps_channels, window = found.groups()
    warp = int(sizes[0]) // int(warps_pixels) * (int(sizes[1]) // int(warps_channels))
    return *map(int, sizes), warp > 2048, window is not None


def _tile_in_name(found: re.Match[str]) -> tuple[int | bool, ...]:
    *sizes, wide, window = found.groups()
    return *map(int, sizes), wide is not None, window is not None


class Model:
    """The estimates of the library's sources, for any constants. element: bytes of x, weights and y; 4 is TF32."""

    def __init__(self, element: int = 2) -> None:
        self.element = element
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "tile_costs.so"
            command = ["g++", "-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-Icsrc"]
            try:
                subprocess.run([*command, *SOURCES, "-o", str(library)], cwd=ROOT, check=True)
            except (OSError, subprocess.CalledProcessError) as error:
                raise UsageError(f"could not compile {', '.join(SOURCES)}: {error}") from None
            self._function = ctypes.CDLL(str(library)).tile_costs
        defaults = _COST.findall(HEADER.read_text())
        self.names = [name for name, _ in defaults]
        self.defaults = np.array([float(value) for _, value in defaults])
        tiles = _TILE.finditer((ROOT / "csrc" / "device" / "gemm_tiles.h").read_text())
        self._tiles = {_tile_in_source(tile): index for index, tile in enumerate(tiles)}

    def query(self, layer: tuple[Any, ...], kernel: str) -> _Query:
        batch, ci, co, h, w, k, s, p, _act = layer
        out_h, out_w = (h + 2 * p - k) // s + 1, (w + 2 * p - k) // s + 1
        shape = (batch, ci, h, w, co, out_h, out_w, k, k, s, s, p, p, 1, 1, 1, self.element)
        if found := _SM80.fullmatch(kernel):
            return _Query(*shape, self._tiles[_tile_in_name(found)])
        if found := _ONCE.fullmatch(kernel):
            return _Query(*shape, -2, *map(int, found.groups()))
        found = _SM90.fullmatch(kernel)
        if not found:
            raise UsageError(f"no estimate for {kernel!r}")
        pixels, channels, depth, mode, weights, split, *stages = found.groups()
        sizes = map(int, (pixels, channels, depth))
        ways = _MODES.index(mode), weights == "resident", int(split or 1)
        return _Query(*shape, -1, *sizes, *ways, *map(int, stages))

    def cycles(self, queries: ctypes.Array[_Query], costs: Vector) -> Vector:
        cycles = np.empty(len(queries))
        given = np.array([len(costs), *costs])
        double = ctypes.POINTER(ctypes.c_double)
        status = self._function(
            given.ctypes.data_as(double), len(queries), queries, cycles.ctypes.data_as(double)
        )
        if status == 2:
            raise UsageError("a timing of a kernel that its layer does not have")
        assert status == 0, "TileCosts has other members than tile_costs.h shows"
        return cycles


class Timings:
    """Times of sweeps: one array of all, of which a layer is a part."""

    def __init__(self, model: Model, layers: dict[tuple[Any, ...], dict[str, float]]) -> None:
        self.layers = list(layers)
        self.kernels = [kernel for times in layers.values() for kernel in times]
        self.us = np.array([us for times in layers.values() for us in times.values()])
        sizes = [len(times) for times in layers.values()]
        self.sizes = sizes
        self.first = np.cumsum([0, *sizes[:-1]])
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        self.best = np.minimum.reduceat(self.us, self.first)
        queries = [model.query(layer, kernel) for layer, times in layers.items() for kernel in times]
        self.queries = (_Query * len(queries))(*queries)
        index = {layer: i for i, layer in enumerate(self.layers)}
        self.sets: dict[tuple[str, int], list[tuple[int, int, str]]] = {}
        """Of each model and batch, at 640 pixels: layer, how many such blocks, family."""
        for scale, batch in itertools.product(cases.SCALES, sorted({layer[0] for layer in self.layers})):
            blocks = dense_layers(scale, 640, batch)
            found = [
                (index[layer_of(case)], case.count, f"{case.kernel[0]}x{case.kernel[1]}/{case.stride[0]}")
                for case in blocks
                if layer_of(case) in index
            ]
            if 2 * len(found) > len(blocks):  # of a model that was not swept a few layers are there by chance
                self.sets[scale, batch] = found
        # A model's time counts as much as another's: n with one image as much as x with 32.
        self.weight = np.zeros(len(self.layers))
        for rows in self.sets.values():
            total = sum(count * self.best[layer] for layer, count, _ in rows)
            for layer, count, _ in rows:
                self.weight[layer] += count / total / len(self.sets)

    def chosen(self, cycles: Vector) -> NDArray[np.int64]:
        """Of each layer the kernel with the lowest estimate."""
        order = np.lexsort((cycles, self.owner))
        return order[self.first]

    def loss(self, cycles: Vector, layers: NDArray[np.bool_]) -> float:
        """What is minimised: the time of choices in proportion to the weight of their layer, made smooth by letting
        estimates that are 2 % apart share, and a little of the estimates' own error, near each layer's best."""
        logarithm = np.log(cycles)
        lowest = np.minimum.reduceat(logarithm, self.first)
        share = np.exp((lowest[self.owner] - logarithm) / 0.02)
        expected = np.add.reduceat(share * self.us, self.first) / np.add.reduceat(share, self.first)
        near = (self.us < 1.5 * self.best[self.owner]) & layers[self.owner]
        error = np.square(logarithm - np.log(self.us * CYCLES_PER_US))[near].mean()
        weight = self.weight * layers
        return float((weight * expected).sum() / (weight * self.best).sum() + 0.2 * error)


def search(loss: Callable[[Vector], float], start: Vector, seconds: float) -> Vector:
    """The best constants that an evolution strategy (CMA-ES, Hansen 2016) finds. It moves their logarithms, and starts
    again from the best when it has come to rest."""
    rng = np.random.default_rng(0)
    end = time.monotonic() + seconds
    best, best_loss = np.log(start), loss(start)
    n = len(start)
    count = 4 + int(3 * np.log(n))
    weights = np.log(count / 2 + 0.5) - np.log(np.arange(1, count // 2 + 1))
    weights /= weights.sum()
    effective = 1 / np.square(weights).sum()
    path_rate, sigma_rate = (4 + effective / n) / (n + 4), (effective + 2) / (n + effective + 5)
    one_rate = 2 / ((n + 1.3) ** 2 + effective)
    many_rate = min(1 - one_rate, 2 * (effective - 2 + 1 / effective) / ((n + 2) ** 2 + effective))
    damping = 1 + 2 * max(0, np.sqrt((effective - 1) / (n + 1)) - 1) + sigma_rate
    usual = np.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n * n))  # length of a normal vector
    while time.monotonic() < end:
        mean, sigma, covariance = best, 0.15, np.eye(n)
        path, sigma_path = np.zeros(n), np.zeros(n)
        while time.monotonic() < end and sigma > 1e-3:
            values, axes = np.linalg.eigh(covariance)
            lengths = np.sqrt(np.maximum(values, 1e-12))
            steps = rng.standard_normal((count, n)) @ (axes * lengths).T
            losses = np.array([loss(np.exp(mean + sigma * step)) for step in steps])
            order = np.argsort(losses)[: count // 2]
            if losses[order[0]] < best_loss:
                best, best_loss = mean + sigma * steps[order[0]], float(losses[order[0]])
            step = weights @ steps[order]
            mean = mean + sigma * step
            whitened = axes @ (axes.T @ step / lengths)
            sigma_path *= 1 - sigma_rate
            sigma_path += np.sqrt(sigma_rate * (2 - sigma_rate) * effective) * whitened
            path = (1 - path_rate) * path + np.sqrt(path_rate * (2 - path_rate) * effective) * step
            covariance *= 1 - one_rate - many_rate
            covariance += one_rate * np.outer(path, path)
            covariance += many_rate * (steps[order].T * weights) @ steps[order]
            sigma *= np.exp(sigma_rate / damping * (np.linalg.norm(sigma_path) / usual - 1))
    return np.exp(best)


def fit(options: Options) -> int:
    """Fit the constants, print them and what the choices lose. Returns the exit status."""
    layers: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    shared: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    precisions = set()
    for path in options.sweep:
        try:
            head = json.loads(path.read_text(encoding="utf-8"))
            rows = head["rows"]
            precisions.add(head.get("dtype") == "tf32")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path}: not a file of scripts/tune.py sweep: {error}") from None
        for row in rows:
            layer = tuple(row[field] for field in FIELDS)
            for name, us in row["us"].items():
                (shared if _SHARED.search(name) else layers)[layer][name] = us
    if not layers:
        raise UsageError("fit needs sweep=FILE with timings")
    if len(precisions) > 1:
        raise UsageError("fit takes sweeps in half or in TF32, not both at once")
    tf32 = precisions == {True}
    model = Model(4 if tf32 else 2)
    timings = Timings(model, layers)
    everything = np.ones(len(timings.layers), bool)

    def fitted(part: NDArray[np.bool_]) -> Vector:
        def loss(costs: Vector) -> float:
            # What the timings say nothing about stays where it is.
            distance = np.square(np.log(costs / model.defaults)).mean()
            return timings.loss(model.cycles(timings.queries, costs), part) + 0.003 * float(distance)

        return search(loss, model.defaults, options.seconds)

    if options.validate:
        half = np.random.default_rng(1).permutation(len(everything)) % 2 == 0
        chosen = np.empty(len(everything), np.int64)
        for part in (half, ~half):
            cycles = model.cycles(timings.queries, fitted(part))
            chosen[~part] = timings.chosen(cycles)[~part]
        print("Each half of the layers chosen by a fit to the other half:")
        print(regrets(timings, chosen))
        return 0
    costs = model.defaults if tf32 else fitted(everything)
    before, after = (
        timings.chosen(model.cycles(timings.queries, constants)) for constants in (model.defaults, costs)
    )
    print("Before:")
    print(regrets(timings, before))
    print("After:")
    print(regrets(timings, after))
    table = tuned_layers(timings, after, options.least)
    print(f"With the table of {len(table)} layers:")
    print(regrets(timings, after))
    print(worst(timings, after))
    shared_table = shared_layers(timings, after, shared, options.least)
    print(f"Faster where blocks share work: {len(shared_table)} layers")
    for name, old, new in zip(model.names, model.defaults, costs, strict=True):
        print(f"{name:20} {old:8g} -> {new:.3g}")
    if options.write:
        if not tf32:
            rounded = {
                name: f"{float(f'{value:.3g}'):g}" for name, value in zip(model.names, costs, strict=True)
            }
            text = HEADER.read_text()
            HEADER.write_text(
                _COST.sub(lambda found: f"  double {found[1]} = {rounded[found[1]]};", text), encoding="utf-8"
            )
            print(f"tune: wrote {records.shown(HEADER)}")
        tables = {TF32_TABLE: table} if tf32 else {TABLE: table, SHARED_TABLE: shared_table}
        for path, named in tables.items():
            rows = (", ".join([*map(str, shape), f'"{name}"']) for shape, name in sorted(named.items()))
            path.write_text("".join(f"{{{row}}},\n" for row in rows), encoding="utf-8")
            print(f"tune: wrote {records.shown(path)}")
    return 0


def shapes_of(timings: Timings) -> dict[tuple[int, ...], list[int]]:
    """The layers of each shape that a table may hold: (batch, input and output channels, map, filter, stride)."""
    shapes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, (batch, ci, co, h, w, k, s, p, _act) in enumerate(timings.layers):
        if h == w and p == k // 2:
            shapes[batch, ci, co, h, k, s].append(index)
    return shapes


def shared_layers(
    timings: Timings,
    chosen: NDArray[np.int64],
    shared: dict[tuple[Any, ...], dict[str, float]],
    least: float,
) -> dict[tuple[int, ...], str]:
    """Shapes that are `least` faster with one of the `shared` kernels than with the chosen one, and that kernel."""
    table = {}
    for shape, layers in shapes_of(timings).items():
        times = [shared.get(timings.layers[layer], {}) for layer in layers]
        sums = {
            name: sum(one[name] for one in times) for name in times[0] if all(name in one for one in times)
        }
        best = min(sums, key=lambda name: sums[name], default=None)
        if best is not None and sum(timings.us[chosen[layer]] for layer in layers) > (1 + least) * sums[best]:
            table[shape] = best
    return table


def tuned_layers(timings: Timings, chosen: NDArray[np.int64], least: float) -> dict[tuple[int, ...], str]:
    """Shapes that are `least` faster with another kernel than the chosen one, and that kernel, which becomes chosen.

    A shape is (batch, input and output channels, map, filter, stride). Layers that differ in their activation have one
    kernel: the fastest in sum.
    """
    table = {}
    for shape, layers in shapes_of(timings).items():
        parts = [slice(timings.first[layer], timings.first[layer] + timings.sizes[layer]) for layer in layers]
        times = [dict(zip(timings.kernels[part], timings.us[part], strict=True)) for part in parts]
        sums = {
            name: sum(one[name] for one in times) for name in times[0] if all(name in one for one in times)
        }
        if not sums:
            continue
        best = min(sums, key=lambda name: sums[name])
        now = sum(timings.us[chosen[layer]] for layer in layers)
        if now > (1 + least) * sums[best]:
            table[shape] = best
            for layer, part in zip(layers, parts, strict=True):
                chosen[layer] = part.start + timings.kernels[part].index(best)
    return table


def regrets(timings: Timings, chosen: NDArray[np.int64]) -> str:
    """µs of chosen and best kernels, and their ratio, by model and batch, and the ratio by family."""
    families = sorted({family for rows in timings.sets.values() for _, _, family in rows})
    lines = [f"{'':6}{'chosen':>9}{'best':>9}{'ratio':>8}" + "".join(f"{family:>8}" for family in families)]
    for (scale, batch), rows in timings.sets.items():
        sums = {family: np.zeros(2) for family in families}
        for layer, count, family in rows:
            sums[family] += count * np.array([timings.us[chosen[layer]], timings.best[layer]])
        ours, best = np.sum(list(sums.values()), axis=0)
        ratios = [f"{one[0] / one[1]:8.3f}" if one[1] else " " * 8 for one in sums.values()]
        lines.append(f"{scale + '/' + str(batch):6}{ours:9.0f}{best:9.0f}{ours / best:8.3f}{''.join(ratios)}")
    ratio = (timings.weight * timings.us[chosen]).sum() / (timings.weight * timings.best).sum()
    return "\n".join([*lines, f"all, weighted equally: {ratio:.4f}"])


def worst(timings: Timings, chosen: NDArray[np.int64], count: int = 12) -> str:
    """The layers whose choices lose most."""
    lost = timings.weight * (timings.us[chosen] - timings.best)
    lines = ["Layers that lose most:"]
    for layer in np.argsort(-lost)[:count]:
        best = timings.first[layer] + int(np.argmin(timings.us[timings.owner == layer]))
        shape = " ".join(
            f"{field}={value}" for field, value in zip(FIELDS, timings.layers[layer], strict=True)
        )
        lines.append(
            f"  {100 * lost[layer]:.2f} %  {shape}: {timings.us[chosen[layer]]:.2f} µs "
            f"{timings.kernels[chosen[layer]]}, best {timings.us[best]:.2f} {timings.kernels[best]}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; see the module's documentation. Returns the exit status."""
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    rest = rest[:-1]
    try:
        if command == "sweep":
            return sweep(parse(rest, _SWEEP_KEYS))
        if command == "fit":
            return fit(parse(rest, _FIT_KEYS))
        raise UsageError(
            f"{command!r} is no command: sweep out=FILE [KEY=VALUE ...], fit sweep=FILE [KEY=VALUE ...]"
        )
    except UsageError as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
