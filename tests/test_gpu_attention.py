"""Area attention on CUDA against a float64 truth and stock's formula: lengths of all kinds, layouts, large logits.

pytest -m gpu tests/test_gpu_attention.py
"""

from __future__ import annotations

import itertools
import math

import op_checks
import pytest
import torch
from torch.library import opcheck

from yolo12_fastconv import error_rule, ops, reference

pytestmark = pytest.mark.gpu

OPS = torch.ops.yolo12_fastconv
HALF = ["float16", "bfloat16"]
KERNELS = [*HALF, "float32"]
# Pixels of an area as (height, width) of the map with one area: below, at and above multiples of 16, and such that are
# held in shared memory (416 at most) and such that are not; 208 and 400 are the most for the passes of the backward
# kernel for wgmma, 384 leaves nothing for the warp that has the last keys.
MAPS = [(1, 1), (1, 2), (3, 5), (4, 4), (1, 17), (10, 10), (1, 193), (13, 16), (11, 19), (16, 24), (1, 385)]
MAPS += [(20, 20), (1, 401), (13, 32), (1, 417), (20, 34), (40, 40)]


def check(
    qkv: torch.Tensor,
    heads: int,
    area: int,
    precision: str,
    scale: float | None = None,
    with_values: bool = True,
) -> list[str]:
    """Runs the op and its gradient, twice, and compares; the problems found."""
    dtype = op_checks.PRECISIONS[precision]
    batch, channels, height, width = qkv.shape
    scale = (channels // 3 // heads) ** -0.5 if scale is None else scale
    grads = [torch.randn(batch, channels // 3, height, width, device=qkv.device, dtype=dtype) for _ in "ov"]
    grads = [g.contiguous(memory_format=torch.channels_last) for g in grads]

    def run(side: str) -> dict[str, torch.Tensor]:
        x = (qkv.double() if side == "truth" else qkv).detach().requires_grad_()
        if side == "ours":
            outputs = ops.area_attention(x, heads, area, scale, with_values=True)
        else:
            outputs = reference.area_attention(x, heads, area, scale)
        outputs = outputs if with_values else outputs[:1]
        grad = torch.autograd.grad(outputs, x, [g.to(x.dtype) for g in grads[: len(outputs)]])[0]
        named = dict(zip(("out", "values"), (t.detach() for t in outputs), strict=False))
        return named | dict(zip(("grad_q", "grad_k", "grad_v"), split(grad, heads), strict=True))

    truth, stock = run("truth"), run("stock")
    op_checks.poison([*stock.values(), qkv])
    ours = run("ours")
    op_checks.poison([*stock.values(), qkv])
    again = run("ours")
    length = height * width // area
    problems = []
    for name, value in ours.items():
        quantity = {"out": "y", "values": "y"}.get(name, "grad_x")
        floor = error_rule.tolerances().floor(quantity, precision, length)
        # Of one key, the gradients of query and key are zero but for rounding: as large as those of the value are.
        size = float(truth["grad_v"].abs().max()) if length == 1 and name in ("grad_q", "grad_k") else 0.0
        compared = error_rule.compare(value, stock[name], truth[name], floor, scale=size)
        what = f"{precision} {tuple(qkv.shape)} heads {heads} areas {area} {name}"
        if not compared.ok:
            problems.append(f"{what}: ours {compared.ours} stock {compared.stock} {compared.problem}")
        if not op_checks._same(value, again[name]):
            problems.append(f"{what}: two runs differ")
    return problems


def split(grad: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """Gradients of query, key and value, which differ in size and are therefore compared apart."""
    return [t.contiguous() for t in grad.unflatten(1, (heads, 3, -1)).unbind(2)]


def make(
    batch: int, heads: int, size: tuple[int, int], precision: str, device, channels: int = 32
) -> torch.Tensor:
    dtype = op_checks.PRECISIONS[precision]
    qkv = torch.randn(batch, 3 * heads * channels, *size, device=device).to(dtype)
    return qkv.contiguous(memory_format=torch.channels_last)


def judge(problems: list[str]) -> None:
    assert not problems, "\n".join(problems[:30])


@pytest.mark.parametrize("precision", KERNELS)
@pytest.mark.parametrize("size", MAPS, ids=str)
def test_lengths(cuda, size, precision):
    problems = []
    for batch, heads, area in ((2, 2, 1), (1, 1, 1), (1, 4, size[0]), (3, 12, 1), (19, 3, 1)):
        if batch * heads * (size[0] * size[1]) ** 2 > 8e7:
            continue
        problems += check(make(batch, heads, size, precision, cuda), heads, area, precision)
    judge(problems)


@pytest.mark.parametrize("precision", KERNELS)
def test_sizes_of_the_models(cuda, precision):
    """Maps of 40x40 in four areas and 20x20 in one, few and many pictures: every plan of the kernels."""
    problems = []
    for batch, heads in ((1, 2), (1, 4), (2, 4), (4, 8), (16, 2), (32, 2), (8, 12)):
        problems += check(make(batch, heads, (40, 40), precision, cuda), heads, 4, precision)
        problems += check(make(batch, heads, (20, 20), precision, cuda), heads, 1, precision)
    judge(problems)


@pytest.mark.parametrize("precision", HALF)
def test_backward_without_wgmma(cuda, precision, monkeypatch):
    """Where wgmma would serve, as on other GPUs."""
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", "sm80")
    problems = []
    for batch, heads, size, area in ((8, 8, (40, 40), 4), (16, 4, (20, 20), 1), (19, 3, (11, 19), 1)):
        problems += check(make(batch, heads, size, precision, cuda), heads, area, precision)
    judge(problems)


@pytest.mark.parametrize("precision", KERNELS)
def test_layouts_are_read_in_place_or_copied(cuda, precision):
    heads, area = 2, 4
    qkv = make(2, heads, (8, 10), precision, cuda)
    out, values = ops.area_attention(qkv, heads, area, with_values=True)
    for before, after in ((16, 8), (4, 4), (1, 2)):
        wide = torch.randn(2, before + qkv.size(1) + after, 8, 10, device=cuda).to(qkv.dtype)
        wide = wide.contiguous(memory_format=torch.channels_last)
        wide[:, before:-after] = qkv
        for x in (wide[:, before:-after], qkv.contiguous()):
            again = ops.area_attention(x, heads, area, with_values=True)
            assert torch.equal(again[0], out) and torch.equal(again[1], values)
            judge(check(x, heads, area, precision))
    for t in (out, values):
        assert t.stride() == (64 * 80, 1, 64 * 10, 64)
    judge(check(qkv, heads, area, precision, with_values=False))


@pytest.mark.parametrize("precision", KERNELS)
def test_other_head_sizes_and_scales(cuda, precision):
    problems = []
    for channels, scale in ((16, None), (64, None), (24, 0.3), (32, 1.7), (32, 0.0), (32, -0.5)):
        qkv = make(2, 3, (10, 12), precision, cuda, channels)
        problems += check(qkv, 3, 4, precision, scale)
    judge(problems)


@pytest.mark.parametrize("precision", KERNELS)
@pytest.mark.parametrize("ascending", [False, True])
def test_large_logits_do_not_overflow(cuda, precision, ascending):
    """Logits of +-1e4, in an order that moves the reference at every step, and in one that never does."""
    heads, size = 2, (20, 20)
    qkv = make(2, heads, size, precision, cuda)
    q, k, _v = qkv.unflatten(1, (heads, 3, 32)).unbind(2)
    steps = torch.linspace(-1, 1, 400, device=cuda).view(1, 1, 1, *size) * (1 if ascending else -1)
    k.copy_(steps * 100 + k * 0.1)
    q.copy_(q.abs() + 1)
    expected = reference.area_attention(qkv.double(), heads, 1, 32**-0.5)[0]
    out = ops.area_attention(qkv, heads, 1)
    assert out.isfinite().all()
    # Logits of 1e4 in half have steps of 8: what stock computes is no measure.
    limit = {"float16": 2e-2, "bfloat16": 0.16, "float32": 1e-3}[precision]
    assert (out.double() - expected).norm() / expected.norm() < limit


@pytest.mark.parametrize("precision", KERNELS)
def test_peaked_and_growing_weights(cuda, precision):
    """Rows whose largest logit comes late, by more and by less than what moves the reference."""
    problems = []
    for factor in (1.0, 2.0, 4.0, 8.0):
        qkv = make(1, 2, (20, 20), precision, cuda)
        _q, k, _v = qkv.unflatten(1, (2, 3, 32)).unbind(2)
        k.mul_(torch.linspace(0, factor, 400, device=cuda).view(1, 1, 1, 20, 20))
        problems += check(qkv, 2, 1, precision)
    judge(problems)


@pytest.mark.parametrize("channels", [32, 16])  # of a head: 16 on ATen
@pytest.mark.parametrize("precision", KERNELS)
@pytest.mark.parametrize("size", [(8, 10), (20, 20), (20, 34)], ids=str)
def test_infinite_and_nan_inputs_reach_what_they_reach_in_stock(cuda, size, precision, channels):
    heads = 2
    for value, part, batch in itertools.product((math.nan, math.inf, -math.inf), range(3), (1, 40)):
        qkv = make(batch, heads, size, precision, cuda, channels)
        qkv[0, channels * (3 + part) + 5, 3, 4] = value
        ours = ops.area_attention(qkv, heads, 2)
        stock = reference.area_attention(qkv.double(), heads, 2, channels**-0.5)[0]
        for same in (torch.isnan, torch.isposinf, torch.isneginf):
            differ = same(ours) != same(stock)
            assert not differ.any(), f"{value} in {part}: {same.__name__} differs at {differ.nonzero()[:4]}"


@pytest.mark.parametrize("batch", [1, 40])
def test_rows_beside_infinite_keys_are_as_accurate_as_stocks(cuda, batch):
    """In float32 such rows are computed without tensor cores: those with an infinite logit are NaN, the rest is not."""
    for size in ((20, 20), (1, 417), (3, 5)):
        qkv = make(batch, 2, size, "float32", cuda)
        q, k, v = qkv.unflatten(1, (2, 3, 32)).unbind(2)
        k[0, 1, 7, 0, 2] = math.inf  # weights 0 for queries with a negative channel 7
        v[batch - 1, 0, 9, 0, 4] = -math.inf
        scale = 32**-0.5
        stock, truth = (reference.area_attention(t, 2, 1, scale)[0] for t in (qkv, qkv.double()))
        infinite = (q[0, 1, 7] > 0).expand(32, *size)
        assert infinite.any() and not infinite.all()
        assert torch.equal(stock[0, 32:].isnan(), infinite)
        op_checks.poison([stock, qkv])
        ours, _v, lse = OPS.area_attention.default(qkv, 2, 1, scale, False)
        floor = error_rule.tolerances().floor("y", "float32", size[0] * size[1])
        compared = error_rule.compare(ours, stock, truth, floor)
        assert compared.ok, f"{size}: ours {compared.ours} stock {compared.stock} {compared.problem}"
        logits = torch.einsum("bhci,bhcj->bhij", q.double().flatten(3), k.double().flatten(3)) * scale
        expected = logits.logsumexp(-1)
        known = expected.isfinite()
        assert torch.equal(lse.isfinite(), known)
        assert (lse.double() - expected)[known].abs().max() < 1e-5


def test_float32_is_one_kernel_without_copies(cuda):
    """Of the compiled library: neither ATen's attention nor what it needs around it."""
    for batch, heads, size, area in ((1, 2, (40, 40), 4), (32, 4, (40, 40), 4), (3, 1, (3, 5), 1)):
        qkv = make(batch, heads, size, "float32", cuda)
        ops.area_attention(qkv, heads, area, with_values=True)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ops.area_attention(qkv, heads, area, with_values=True)
            torch.cuda.synchronize()
        events = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = [name for name in events if "Activity Buffer" not in name]  # the profiler's own
        assert len(kernels) == 1 and "attention_float_kernel" in kernels[0], kernels


@pytest.mark.parametrize("magnitude", [1e-15, 1e15])
def test_float32_keeps_its_range(cuda, magnitude):
    """Values of any size, and queries whose products with keys are of ordinary size."""
    qkv = make(2, 2, (20, 20), "float32", cuda)
    q, k, v = qkv.unflatten(1, (2, 3, 32)).unbind(2)
    q.mul_(magnitude), k.div_(magnitude), v.mul_(magnitude)
    judge(check(qkv, 2, 1, "float32"))


@pytest.mark.parametrize("part", range(3), ids=["query", "key", "value"])
@pytest.mark.parametrize("factor", [1e-5, 1e3, 1e5])
def test_float32_beside_a_pixel_of_another_size(cuda, part, factor):
    """Queries, keys and values that the kernel scales together, of very different sizes.

    Beside a large key the error rule says nothing: most rows give it a weight of 0 or 1, whatever its logit's rounding,
    and the largest error is that of the few rows whose products cancel to an ordinary logit. Of one or two numbers the
    roundings of ours and of stock stand in any ratio: 0.1 to 7 times what is allowed, by how they are added up, at the
    same mean error of all logits. So each row gets the bound of its own logit: 2^-22 of the sum of its absolute
    products. 32 additions in float32 may err by 2^-19.
    """
    for batch in (1, 40):
        qkv = make(batch, 2, (20, 20), "float32", cuda)
        qkv.unflatten(1, (2, 3, 32))[:, :, part, :, 3, 4] *= factor
        stock, truth = (reference.area_attention(t, 2, 1, 32**-0.5)[0] for t in (qkv, qkv.double()))
        op_checks.poison([stock, qkv])
        ours = ops.area_attention(qkv, 2, 1)
        floor = error_rule.tolerances().floor("y", "float32", 400)
        if part == 1 and factor > 1:
            limit = beside_a_large_key(qkv, truth, 3 * 20 + 4) + 2 * floor * truth.abs().max()
            worst = ((ours - truth).abs() / limit).max().item()
            assert worst <= 1, f"{worst} of the limit"
        else:
            compared = error_rule.compare(ours, stock, truth, floor)
            assert compared.ok, f"ours {compared.ours} stock {compared.stock} {compared.problem}"


def beside_a_large_key(qkv, truth, pixel):
    """How far off the result of two heads is if logits of a pixel's key err by 2^-22 of their absolute products."""
    q, k, v = qkv.double().unflatten(1, (2, 3, 32)).flatten(4).unbind(2)
    weight = torch.einsum("bhci,bhcj->bhij", q, k).mul_(32**-0.5).softmax(-1)[..., pixel]
    error = 2**-22 * (q * k[..., pixel, None]).abs().sum(2) * 32**-0.5
    # 1.2: to first order alone the weight changes by this, and errors reach 0.1.
    moved = (
        1.2
        * (weight * error).unsqueeze(2)
        * (v[..., pixel, None] - truth.unflatten(1, (2, 32)).flatten(3)).abs()
    )
    return moved.view_as(truth)


@pytest.mark.parametrize(("precision", "limit"), [("float16", 2e-3), ("float32", 1e-5)])
def test_logsumexp(cuda, precision, limit):
    for size, area in (((20, 20), 4), ((20, 34), 1), ((1, 1), 1)):
        qkv = make(2, 2, size, precision, cuda)
        _out, _v, lse = OPS.area_attention.default(qkv, 2, area, 32**-0.5, False)
        q, k, _v = (
            t.double().flatten(3).unflatten(3, (area, -1)) for t in qkv.unflatten(1, (2, 3, 32)).unbind(2)
        )
        logits = torch.einsum("bhcai,bhcaj->bhaij", q, k) * 32**-0.5
        assert (lse.double() - logits.logsumexp(-1).flatten(2)).abs().max() < limit


@pytest.mark.parametrize("precision", KERNELS)
def test_opcheck(cuda, precision):
    qkv = make(2, 2, (4, 6), precision, cuda)
    out, values, lse = OPS.area_attention.default(qkv, 2, 4, 0.2, True)
    opcheck(OPS.area_attention.default, (qkv, 2, 4, 0.2, True))
    opcheck(OPS.area_attention.default, (qkv.clone().requires_grad_(), 2, 4, 0.2, False))
    opcheck(OPS.area_attention_backward.default, (out, values, qkv, out, lse, 2, 4, 0.2))
    opcheck(OPS.area_attention_backward.default, (out, None, qkv, out, lse, 2, 4, 0.2))


def test_runs_in_a_graph_and_on_a_side_stream(cuda):
    qkv, other = (make(2, 4, (40, 40), "float16", cuda) for _ in "ab")
    expected = ops.area_attention(other, 4, 4)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ops.area_attention(qkv, 4, 4)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.area_attention(qkv, 4, 4)
    qkv.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    late = torch.full_like(other, math.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(other)
        out = ops.area_attention(late, 4, 4)
    side.synchronize()
    assert torch.equal(out, expected)


def test_a_foreign_logsumexp_is_refused(cuda):
    qkv = make(1, 1, (4, 4), "float16", cuda)
    out = ops.area_attention(qkv, 1, 1)
    with pytest.raises(RuntimeError, match="logsumexp must be"):
        OPS.area_attention_backward.default(out, None, qkv, out, out.new_empty(0), 1, 1, 1.0)
