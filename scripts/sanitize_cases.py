#!/usr/bin/env python3
"""Every CUDA kernel of the library on small shapes: what scripts/sanitize.py runs under compute-sanitizer.

    scripts/sanitize_cases.py [--families NAME,NAME] [--only WORD] [--kernels]      needs a GPU

Without a sanitizer it is a quick check that the cases run and are finite. ``--kernels`` profiles them and exits with 1
if a kernel of csrc/ was never launched. Inputs are made on the CPU, so that few kernels but ours run.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_iterations import environment

ROOT = Path(__file__).resolve().parent.parent
CUDA = "cuda"
KERNEL, TARGET, GRADIENTS, WGRAD = (
    f"YOLO12_FASTCONV_{n}" for n in ("KERNEL", "TARGET", "GRADIENTS", "WGRAD")
)
HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def capability() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def tensor(*size: int, dtype: torch.dtype = HALF, layout: str = "nhwc", scale: float = 1.0) -> Tensor:
    """Random values on the GPU. Layouts "slice" and "odd" are channel slices of a wider NHWC tensor, that begin at
    multiples of 16 bytes or not."""
    x = (torch.randn(*size) * scale).to(dtype)
    if layout in ("slice", "odd"):
        before = 8 if layout == "slice" else 3
        wide = torch.randn(size[0], size[1] + 16, *size[2:]).to(dtype)
        wide = wide.contiguous(memory_format=torch.channels_last).to(CUDA)
        return wide[:, before : before + size[1]]
    if len(size) == 4 and layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    return x.to(CUDA)


def finite(*tensors: Tensor | None) -> None:
    torch.cuda.synchronize()
    for t in tensors:
        assert t is None or bool(t.detach().cpu().isfinite().all()), "a result is not finite"


class Conv:
    """A convolution: sizes, geometry, and inputs for it."""

    def __init__(
        self, n: int, c: int, h: int, w: int, k: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        self.size, self.weight_size = (n, c, h, w), (k, c // groups, kernel, kernel)
        self.stride, self.padding, self.groups = (stride,) * 2, (kernel // 2,) * 2, groups
        out = tuple((s + 2 * (kernel // 2) - kernel) // stride + 1 for s in (h, w))
        self.y_size = (n, k, *out)

    def query(self, dtype: torch.dtype, allow_tf32: bool = False) -> dict[str, Any]:
        return dict(
            x_size=self.size, weight_size=self.weight_size, stride=self.stride, padding=self.padding,
            dilation=(1, 1), groups=self.groups, dtype=dtype, tf32=allow_tf32, capability=capability(),
        )  # fmt: skip

    def weight(self, dtype: torch.dtype) -> Tensor:
        _, c, r, s = self.weight_size
        return tensor(*self.weight_size, dtype=dtype, scale=(c * r * s) ** -0.5)

    def geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, (1, 1), self.groups


def batch_norm(channels: int, double: bool = False) -> Any:
    from yolo12_fastconv import ops

    values = [(torch.rand(channels) + 0.5).to(DOUBLE if double else FLOAT).to(CUDA) for _ in range(4)]
    return ops.BatchNormState(*values, 1e-3)


def forward(conv: Conv, dtype: torch.dtype, layout: str = "nhwc", residual: str = "") -> None:
    from yolo12_fastconv import ops

    x, weight = tensor(*conv.size, dtype=dtype, layout=layout), conv.weight(dtype)
    bn = batch_norm(conv.y_size[1], dtype is DOUBLE)
    added = tensor(*conv.y_size, dtype=dtype, layout=residual) if residual else None
    with torch.no_grad():
        finite(ops.conv_bn_act(x, weight, None, bn, added, *conv.geometry()))


def into_slice(conv: Conv, dtype: torch.dtype) -> None:
    from yolo12_fastconv import ops

    x, weight, out = (
        tensor(*conv.size, dtype=dtype),
        conv.weight(dtype),
        tensor(*conv.y_size, dtype=dtype, layout="slice"),
    )
    with torch.no_grad():
        ops.conv_bn_act_out(x, weight, out, None, batch_norm(conv.y_size[1]), None, *conv.geometry())
    finite(out)


def train(
    conv: Conv,
    dtype: torch.dtype,
    layout: str = "nhwc",
    residual: bool = False,
    x_dtype: Any = None,
    grad_x: bool = True,
) -> None:
    """Forward with running statistics, and backward, as autocast makes them: weights and batch norm in float32."""
    from yolo12_fastconv import ops

    exact = DOUBLE if dtype is DOUBLE else FLOAT
    x = tensor(*conv.size, dtype=x_dtype or dtype, layout=layout).requires_grad_(grad_x)
    weight = conv.weight(exact).requires_grad_()
    k = conv.y_size[1]
    gamma, beta = ((torch.rand(k, dtype=exact) + 0.5).to(CUDA).requires_grad_() for _ in range(2))
    running = ops.RunningStats(
        torch.zeros(k, dtype=exact).to(CUDA),
        torch.ones(k, dtype=exact).to(CUDA),
        torch.tensor(0).to(CUDA),
        0.03,
    )
    added = tensor(*conv.y_size, dtype=dtype) if residual else None
    with torch.autocast(CUDA, dtype if dtype in (HALF, BF16) else HALF, enabled=dtype in (HALF, BF16)):
        y, _, _ = ops.conv_bn_act_train(
            x, weight, None, gamma, beta, 1e-3, added, *conv.geometry(), "silu", running
        )
    y.backward(tensor(*conv.y_size, dtype=y.dtype))
    finite(y, weight.grad, gamma.grad, beta.grad, x.grad, running.mean)


def gradients_in_place(conv: Conv, dtype: torch.dtype, begin: int, more: bool) -> None:
    """The gradient of x added to a slice of a wider tensor, with another gradient or without."""
    ops = torch.ops.yolo12_fastconv
    x, weight = tensor(*conv.size, dtype=dtype), conv.weight(FLOAT)
    n, c, h, w = conv.size
    k = conv.y_size[1]
    gamma, beta = ((torch.rand(k) + 0.5).to(CUDA) for _ in range(2))
    geometry = ([*conv.stride], [*conv.padding], [1, 1], conv.groups)
    arguments = (weight, None, gamma, beta, 1e-3, None, *geometry, 1, dtype, False)
    _, z, mean, var = ops.conv_bn_act_train.default(x, *arguments)
    buffer = tensor(n, c + 16, h, w, dtype=dtype)
    mask = [True, True, False, True, True]
    call = (
        tensor(*conv.y_size, dtype=dtype),
        x,
        weight,
        None,
        z,
        mean,
        var,
        gamma,
        beta,
        1e-3,
        *geometry,
        1,
        dtype,
        False,
    )
    added = tensor(*conv.size, dtype=dtype) if more else None
    made = ops.conv_bn_act_train_backward_.default(*call, mask, None, buffer[:, begin : begin + c], added)
    finite(buffer, *made)


def attention(
    size: tuple[int, int], heads: int, area: int, dtype: torch.dtype, channels: int = 32, batch: int = 1
) -> None:
    from yolo12_fastconv import ops

    qkv = tensor(batch, 3 * heads * channels, *size, dtype=dtype).requires_grad_()
    out, values = ops.area_attention(qkv, heads, area, with_values=True)
    grads = [tensor(*out.shape, dtype=dtype) for _ in range(2)]
    finite(out, *torch.autograd.grad([out, values], qkv, grads))


def maps(dtype: torch.dtype, layout: str) -> None:
    """Concat with upsampling and its gradient; decoding of a head's maps."""
    from yolo12_fastconv import ops

    parts = [
        tensor(2, c, 8 // s, 12 // s, dtype=dtype, layout=layout).requires_grad_()
        for c, s in ((16, 2), (13, 1), (8, 1))
    ]
    y = ops.concat_channels(parts, [2, 1, 1])
    finite(y, *torch.autograd.grad(y, parts, tensor(*y.shape, dtype=dtype)))
    sizes = ((6, 8), (3, 4), (1, 13))
    boxes, scores = ([tensor(2, c, h, w, dtype=dtype, layout=layout) for h, w in sizes] for c in (64, 7))
    anchors = sum(h * w for h, w in sizes)
    points, steps = ((torch.rand(rows, anchors) + 0.5).to(dtype).to(CUDA) for rows in (2, 1))
    values = torch.arange(16).to(dtype).to(CUDA).view(1, -1, 1, 1)
    with torch.no_grad():
        finite(*ops.detect_decode(boxes, scores, values, points, steps))


def running_statistics() -> None:
    from yolo12_fastconv import ops

    mean, var, batch_mean = ((torch.rand(72) + 0.5).to(CUDA) for _ in range(3))
    batches = torch.tensor(0).to(CUDA)
    ops.update_running_stats_(mean, var, batches, batch_mean, batch_mean, 0.03, 200)
    finite(mean, var)


def network(training: bool) -> None:
    """A whole YOLO12n: the programs of its blocks in inference, a step under autocast in training."""
    from ultralytics import YOLO

    from yolo12_fastconv.patching import patch_modules

    torch.manual_seed(0)
    model = copy.deepcopy(YOLO("yolo12n.yaml").model)
    patch_modules(model)
    if not training:
        model = model.to(CUDA, HALF).eval()
        with torch.no_grad():
            for _ in range(3):  # from the third call of a kind on it is a program
                outputs = model(tensor(1, 3, 64, 96, layout="nchw"))
        finite(outputs[0])
        return
    model = model.to(CUDA, memory_format=torch.channels_last).train()
    with torch.autocast(CUDA, HALF):
        outputs = model(tensor(2, 3, 64, 64, dtype=FLOAT, layout="nchw"))
    grown = [y for y in (outputs.values() if isinstance(outputs, dict) else outputs) if isinstance(y, Tensor)]
    sum(y.float().square().mean() for y in grown).backward()
    finite(*(p.grad for p in model.parameters()))


Case = tuple[str, Callable[[], None]]
FAMILIES = {
    "tiles": r"tile implicit_gemm/",
    "weight gradients": r"tile wgrad/",
    "attention": r"attention ",
    "stem": r"(train )?stem ",
    "depthwise": r"(train )?depthwise ",
    "strided gradients": r"train 3x3/2 \d",
    "forward": r"(forward|slice) ",
    "training": r"(train|grouped) ",
    "sums in place": r"sum in place ",
    "one pass": r"backward in one pass ",
    "maps": r"(maps|running statistics)",
    "network": r"network ",
}
"""Names of families of cases, and how the names of their cases begin: a case is of the first that fits."""


def family_of(name: str) -> str:
    return next(family for family, pattern in FAMILIES.items() if re.match(pattern, name))


def _kind(name: str) -> tuple[Any, ...]:
    """What tells a tile's code apart: not how many stages, nor how many workers beyond the first."""
    pixels, channels, *rest = re.split(r"x|-", name.rpartition("/")[2])
    if "/sm90/" not in name:
        return (name,)
    return pixels == "64", channels, *(word for word in rest if not word[0].isdigit())


def tiles() -> Iterator[Case]:
    """Tiles of every width and mode that the menu weighs for some convolutions, of both targets, by name."""
    from yolo12_fastconv import ops

    convs = {
        "1x1": Conv(2, 72, 12, 10, 104, 1),
        "1x1 odd": Conv(1, 51, 7, 9, 61, 1),
        "3x3": Conv(2, 40, 17, 19, 72, 3),
        "3x3 wide": Conv(1, 96, 13, 11, 128, 3),
        "3x3/2": Conv(1, 64, 21, 18, 96, 3, 2),
        # 34 tiles of pixels for 16 or 33 blocks: those whose blocks share work.
        "1x1 shared": Conv(1, 128, 34, 64, 1024, 1),
        "3x3 shared": Conv(1, 64, 34, 64, 1024, 3),
    }
    # Of the sm90 kernel for small grids: through a ring.
    small = {
        "1x1 long": Conv(1, 1144, 9, 15, 128, 1),
        "3x3 long": Conv(1, 512, 13, 11, 64, 3),
        "3x3/2 long": Conv(1, 256, 21, 18, 64, 3, 2),
    }
    seen: set[tuple[Any, ...]] = set()
    for target in ("sm90", "sm80") if capability() == 90 else ("sm80",):
        with environment(**{TARGET: target}):
            for what, conv in (convs | small).items():
                for name in ops.kernel_candidates(**conv.query(HALF)):
                    key = (what, target, *_kind(name))
                    if key in seen or not name.startswith("implicit_gemm/"):
                        continue
                    if what.endswith(" shared") and not re.search("-(ring|paired|rest)-", name):
                        continue
                    if what in small and not name.endswith("-once"):
                        continue
                    seen.add(key)
                    residual = ("", "slice", "odd", "nhwc")[len(seen) % 4]

                    def run(
                        conv: Conv = conv, name: str = name, residual: str = residual, target: str = target
                    ) -> None:
                        with environment(**{TARGET: target, KERNEL: name}):
                            forward(conv, HALF, "slice" if conv.size[1] % 8 == 0 else "nhwc", residual)

                    yield f"tile {name} {what}", run


def weight_gradient_tiles() -> Iterator[Case]:
    from yolo12_fastconv import ops

    if capability() != 90:
        return
    for what, conv in {
        "1x1": Conv(4, 250, 24, 24, 200, 1),
        "3x3": Conv(4, 80, 23, 20, 104, 3),
        "3x3/2": Conv(4, 72, 23, 20, 104, 3, 2),
    }.items():
        kind, seen = "rows" if what == "1x1" else "window", set()
        for filters in (64, 96, 128, 192, 256):
            for channels in (16, 32, 48, 64, 80, 96, 128, 192, 256):
                for pixels, stages in ((p, s) for p in (64, 80, 128, 256) for s in range(2, 17)):
                    name = f"wgrad/sm90/{kind}/{filters}x{channels}x{pixels}x{stages}/3"
                    if (filters, channels) in seen:
                        continue
                    with environment(**{WGRAD: name, GRADIENTS: "own"}):
                        found = ops.describe_gradients(**conv.query(HALF))[1]
                    if found != name:
                        continue
                    seen.add((filters, channels))

                    def run(conv: Conv = conv, name: str = name) -> None:
                        with environment(**{WGRAD: name, GRADIENTS: "own"}):
                            train(conv, HALF)

                    yield f"tile {name} {what}", run


def backward_in_one_pass() -> Iterator[Case]:
    """Each number of slices of output channels with each number of columns."""
    if capability() != 90:
        return
    for co, widths in ((56, (24, 64, 88, 120, 184, 200, 328)), (128, (64, 80, 128, 200)), (136, (40, 72))):
        for ci in widths:
            conv = Conv(3, ci, 19, 23, co, 1)

            def run(conv: Conv = conv) -> None:
                with environment(**{GRADIENTS: "fused"}):
                    train(conv, HALF)

            yield f"backward in one pass {ci}to{co}", run


def all_cases() -> Iterator[Case]:
    """Name and function of each."""
    dense = {
        "3x3": Conv(2, 64, 20, 23, 64, 3),
        "1x1": Conv(2, 128, 20, 20, 192, 1),
        "1x1 small": Conv(1, 32, 8, 8, 32, 1),
        "3x3/2": Conv(2, 32, 17, 20, 48, 3, 2),
        "5x5": Conv(1, 32, 20, 20, 32, 5),
        "odd": Conv(2, 13, 9, 12, 21, 3),
        "460": Conv(1, 460, 10, 10, 64, 1),
    }
    for target in ("sm90", "sm80"):
        for dtype in (HALF, BF16):
            short = f"{target} {str(dtype)[6:]}"

            def run(
                function: Callable[..., None], *args: Any, target: str = target, **kw: Any
            ) -> Callable[[], None]:
                def call() -> None:
                    with environment(**{TARGET: target, GRADIENTS: "own"}):
                        function(*args, **kw)

                return call

            if target == "sm90" and capability() != 90:
                continue
            for what, conv in dense.items():
                yield f"forward {what} {short}", run(forward, conv, dtype, residual="slice")
                yield f"train {what} {short}", run(train, conv, dtype, residual=what.startswith("1x1"))
            yield f"slice {short}", run(into_slice, dense["3x3"], dtype)
            yield f"attention 20x20 {short}", run(attention, (20, 20), 2, 1, dtype)
            yield f"attention 20x20 area 4 {short}", run(attention, (20, 20), 4, 4, dtype, batch=2)
            yield f"attention 11x19 {short}", run(attention, (11, 19), 3, 1, dtype)
            yield f"attention 20x34 {short}", run(attention, (20, 34), 1, 1, dtype)
            for size in ((8, 8), (13, 16), (20, 20)):  # enough of them for the kernel for wgmma
                yield f"attention {size} of 48 heads {short}", run(attention, size, 4, 1, dtype, batch=12)
            if target == "sm90":  # every width of tiles, and several of them
                for c, k in ((16, 8), (32, 72), (48, 40), (64, 136), (104, 64)):
                    yield f"train 3x3/2 {c}to{k} {short}", run(train, Conv(2, c, 21, 18, k, 3, 2), dtype)
    yield from tiles()
    yield from weight_gradient_tiles()
    yield from backward_in_one_pass()
    for dtype in (HALF, BF16):
        short = str(dtype)[6:]
        for k in (16, 24, 64, 96):
            stem = Conv(2, 3, 64, 40, k, 3, 2)
            yield f"stem {k} {short}", lambda c=stem, d=dtype: forward(c, d, "nchw")
            yield f"train stem {k} {short}", lambda c=stem, d=dtype: train(c, d, "nchw", False, FLOAT, False)
        yield (
            f"train stem nhwc {short}",
            lambda d=dtype: train(Conv(2, 3, 33, 31, 16, 3, 2), d, "nhwc", False, FLOAT, False),
        )
        yield (
            f"train stem with gradient {short}",
            lambda d=dtype: train(Conv(2, 3, 32, 31, 16, 3, 2), d, "nchw"),
        )
        for r in (3, 5, 7):
            for c in (64, 72, 24):
                conv = Conv(2, c, 13, 21, c, r, 1, c)
                yield f"depthwise {r} {c} {short}", lambda v=conv, d=dtype: forward(v, d, residual="slice")
                yield f"train depthwise {r} {c} {short}", lambda v=conv, d=dtype: train(v, d)
        yield f"depthwise 3/2 {short}", lambda d=dtype: train(Conv(1, 32, 9, 11, 32, 3, 2, 32), d)
        yield f"grouped {short}", lambda d=dtype: train(Conv(1, 64, 9, 11, 64, 3, 1, 8), d)
        yield f"grouped by two {short}", lambda d=dtype: train(Conv(1, 64, 9, 11, 64, 3, 1, 32), d)
        for begin, more in ((8, False), (3, True), (8, True)):
            for what in ("1x1", "3x3", "odd"):
                name = f"sum in place {what} {begin} {more} {short}"
                yield name, lambda c=dense[what], d=dtype, b=begin, m=more: gradients_in_place(c, d, b, m)
        for layout in ("nhwc", "odd", "nchw"):
            yield f"maps {layout} {short}", lambda d=dtype, t=layout: maps(d, t)
    for allowed in (False, True):
        name = "tf32" if allowed else "float32"

        def exactly(function: Callable[..., None], *args: Any, allowed: bool = allowed) -> Callable[[], None]:
            def call() -> None:
                with tf32(allowed), environment(**{GRADIENTS: "own"}):
                    function(*args)

            return call

        for what, conv in dense.items():
            yield f"forward {what} {name}", exactly(forward, conv, FLOAT)
            if not allowed:
                yield f"train {what} {name}", exactly(train, conv, FLOAT)
        for c in (64, 40):
            for r in (3, 7):
                yield f"depthwise {r} {c} {name}", exactly(train, Conv(1, c, 13, 11, c, r, 1, c), FLOAT)
        yield f"stem {name}", exactly(train, Conv(2, 3, 32, 33, 16, 3, 2), FLOAT, "nchw", False, None, False)
        yield f"grouped {name}", exactly(train, Conv(1, 64, 9, 11, 64, 3, 1, 8), FLOAT)
    with_target = environment(**{TARGET: "sm80"})

    def older() -> None:
        with with_target, tf32(True):
            forward(dense["3x3"], FLOAT)

    yield "forward 3x3 tf32 sm80", older
    for what in ("3x3", "odd"):
        yield f"train {what} float64", lambda c=dense[what]: train(c, DOUBLE)
    yield "depthwise float64", lambda: train(Conv(1, 24, 9, 11, 24, 7, 1, 24), DOUBLE)
    for dtype in (FLOAT, DOUBLE):
        yield f"maps {dtype}", lambda d=dtype: maps(d, "nhwc")
    for size, area in (((20, 20), 1), ((20, 20), 4), ((11, 19), 1)):
        yield f"attention {size} {area} float32", lambda s=size, a=area: attention(s, 2, a, FLOAT)
    yield "running statistics", running_statistics
    yield "network in inference", lambda: network(False)
    yield "network in training", lambda: network(True)


def declared_kernels() -> set[str]:
    """Names of the __global__ functions of csrc/."""
    found: set[str] = set()
    for path in (*(ROOT / "csrc").rglob("*.cu"), *(ROOT / "csrc").rglob("*.cuh")):
        for match in re.finditer(r"__global__(.*?)\{", path.read_text(encoding="utf-8"), re.DOTALL):
            found.update(re.findall(r"void (\w+)\(", match.group(1)))
    return found


OUT_OF_TIME = ", then time was over"


def run(
    only: str,
    log: Any,
    skip: str = "",
    first: int = 0,
    families: Sequence[str] = tuple(FAMILIES),
    limit: float = float("inf"),
) -> str:
    """Run the cases of some families whose names contain `only` and do not match `skip`, from number `first` on, until
    `limit` seconds are over. Returns in words how many ran."""
    until = time.monotonic() + limit
    count = 0
    chosen = (
        (name, function)
        for name, function in all_cases()
        if only in name and family_of(name) in families and not (skip and re.search(skip, name))
    )
    for number, (name, function) in enumerate(chosen):
        if number >= first:
            if time.monotonic() > until:
                return f"{count} cases ran{OUT_OF_TIME}"
            print(f"case {name}", file=log, flush=True)
            torch.manual_seed(0)
            try:
                function()
            except Exception as error:
                raise RuntimeError(f"case {name}: {error}") from error
            count += 1
    return f"{count} cases ran"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose names contain it")
    parser.add_argument("--families", default=",".join(FAMILIES), metavar="NAME,NAME")
    parser.add_argument("--skip", default="", metavar="PATTERN", help="no cases whose names match it")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="leave out the first N of them")
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--kernels", action="store_true", help="fail if a kernel was never launched")
    parser.add_argument("--log", type=Path, help="file for the name of each case, before it runs")
    arguments = parser.parse_args()
    options = (arguments.skip, arguments.first, arguments.families.split(","), arguments.limit)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((arguments.log or Path(os.devnull)).open("w"))
        if not arguments.kernels:
            print(run(arguments.only, log, *options))
            return 0
        activity = torch.profiler.ProfilerActivity.CUDA
        with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
            ran = run(arguments.only, log, *options)
            torch.cuda.synchronize()
        launched = {event.name for event in profile.events()}
        declared = declared_kernels()
        missing = sorted(k for k in declared if not any(re.search(rf"\b{k}\b", name) for name in launched))
        print(f"{ran}, and launched {len(declared) - len(missing)} of {len(declared)} kernels")
        if missing:
            print(f"never launched: {', '.join(missing)}", file=sys.stderr)
        return int(bool(missing))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ.setdefault("YOLO_OFFLINE", "true")
    os.environ.setdefault("YOLO_AUTOINSTALL", "false")
    sys.exit(main())
