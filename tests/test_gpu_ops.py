"""The ops on CUDA against a float64 truth: every convolution of the five YOLO12 models, and the awkward ones.

    pytest -m gpu tests/test_gpu_ops.py
    YOLO12_FASTCONV_RESULTS=docs/benchmarks pytest -m gpu tests/test_gpu_ops.py   # also writes gpu-ops-accuracy.json

Each test runs many shapes and reports all that fail at once, with the worst first.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import cases
import op_checks
import pytest
import torch
from torch.library import opcheck

import yolo12_fastconv
from yolo12_fastconv import ops, reference

pytestmark = pytest.mark.gpu

PRECISIONS = list(op_checks.PRECISIONS)
HALF = ["float16", "bfloat16"]
LAYOUTS = ("nhwc", "nchw", "slice")
# What a block may be besides a convolution with batch norm: fused, fused with the other activation, with a residual.
VARIANTS = ({"bn": False, "bias": True}, {"bn": False, "bias": True, "act": "other"}, {"residual": True})


@pytest.fixture(scope="module")
def collected():
    """All findings of this file; at its end the worst of each kind is printed, and written where asked for."""
    findings: list[op_checks.Finding] = []
    yield findings
    if not findings:
        return
    print("\n" + op_checks.table(op_checks.summary(findings)))
    folder = os.environ.get("YOLO12_FASTCONV_RESULTS")
    if folder:
        environment = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "yolo12_fastconv": yolo12_fastconv.__version__,
            "architectures": list(ops.LIBRARY.arch_list),
            "source_hash": ops.LIBRARY.source_hash,
        }
        # Parallel processes write a file each, which scripts/gpu_record.py puts together.
        worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        op_checks.write_summary(Path(folder) / f"gpu-ops-accuracy{worker}.json", findings, environment)


def new_shapes(scale: str) -> list[cases.Case]:
    """The convolutions of a model that no smaller one has."""
    smaller = cases.SCALES[: cases.SCALES.index(scale)]
    known = {replace(case, name="", count=1) for other in smaller for case in cases.conv_shapes(other)}
    return [case for case in cases.conv_shapes(scale) if replace(case, name="", count=1) not in known]


def variants(case: cases.Case) -> list[dict[str, object]]:
    other = "identity" if case.act == "silu" else "silu"
    return [{key: other if value == "other" else value for key, value in v.items()} for v in VARIANTS]


def judge(collected: list[op_checks.Finding], findings: list[op_checks.Finding]) -> None:
    assert findings
    collected += findings
    text = op_checks.failures(findings)
    assert not text, text


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scale", cases.SCALES)
def test_shapes_of_the_models(cuda, collected, scale, precision):
    """Inference and training with all gradients, in three layouts; fused blocks and residuals."""
    findings = []
    for case in new_shapes(scale):
        # bfloat16 takes float16's path, and TF32 that of both: other layouts are packed before any of them.
        layouts = LAYOUTS if precision in ("float16", "float32") else LAYOUTS[:1]
        findings += op_checks.check_case(case, precision, cuda, layouts=layouts)
        if scale == "n":  # the epilogue does not depend on the shape; AWKWARD has all variants too
            findings += op_checks.check_case(case, precision, cuda, variants=variants(case), train=False)
    judge(collected, findings)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_awkward_cases(cuda, collected, precision):
    """As above, with the gradients of the inference op too, and every case fused and in a sliced layout."""
    findings = []
    for case in cases.AWKWARD:
        findings += op_checks.check_case(case, precision, cuda, eval_gradients=True)
        findings += op_checks.check_case(case, precision, cuda, layouts=("nchw", "misaligned", "crop"))
        findings += op_checks.check_case(case, precision, cuda, variants=variants(case), train=False)
    judge(collected, findings)


@pytest.mark.parametrize(
    ("target", "precision"), [("sm80", "float16"), ("sm80", "bfloat16"), ("sm90", "float16")]
)
def test_forced_target(cuda, collected, monkeypatch, target, precision):
    """Every shape on the kernels that the tile menu would not choose for it on this GPU."""
    monkeypatch.setenv("YOLO12_FASTCONV_TARGET", target)
    if target == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        with pytest.raises(RuntimeError, match="needs a GPU of compute capability"):
            op_checks.check_case(cases.AWKWARD[0], precision, cuda)
        return
    findings = []
    for case in [*(case for scale in cases.SCALES for case in new_shapes(scale)), *cases.AWKWARD]:
        findings += op_checks.check_case(case, precision, cuda, train=False)
    kernels = {finding.kernel for finding in findings if finding.kernel.startswith("implicit_gemm")}
    assert f"implicit_gemm/{target}" in kernels
    assert target == "sm90" or kernels == {f"implicit_gemm/{target}"}
    judge(collected, findings)


@pytest.mark.parametrize("kernel", ["aten/float", "direct/simt"])
def test_strict_float_on_either_kernel(cuda, collected, monkeypatch, kernel):
    monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", kernel)
    shapes = [replace(case, batch=2) for case in cases.conv_shapes("n", 320) if case.groups == 1]
    findings = [f for case in shapes for f in op_checks.check_case(case, "float32", cuda)]
    case = shapes[7]
    findings += op_checks.check_case(case, "float32", cuda, layouts=LAYOUTS, variants=variants(case))
    assert {finding.kernel for finding in findings} == {kernel}
    judge(collected, findings)


def test_strict_float_on_cudnn_uses_no_tf32(cuda, monkeypatch):
    monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", "aten/float")
    torch.backends.cudnn.allow_tf32 = False  # the fixture puts it back
    x = torch.randn(2, 128, 32, 32, device=cuda).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(128, 128, 3, 3, device=cuda) / 34
    y = ops.conv_bn_act(x, weight, padding=(1, 1), act="identity")
    truth = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
    assert (y - truth).norm() < 1e-5 * truth.norm()


@pytest.mark.parametrize("precision", HALF)
def test_autocast_with_float32_parameters(cuda, collected, precision):
    """The inference op as validation during training calls it."""
    findings = []
    for case in cases.conv_shapes("n", 320) + cases.AWKWARD:
        findings += op_checks.check_case(
            case, precision, cuda, autocast=True, eval_gradients=True, train=False
        )
    judge(collected, findings)


@pytest.mark.parametrize("precision", ["float16", "tf32"])
@pytest.mark.parametrize(
    ("scale", "imgsz"), [("n", (416, 608)), ("m", (352, 640)), ("x", (32, 640)), ("l", (288, 96))]
)
def test_rectangular_inputs(cuda, collected, scale, imgsz, precision):
    findings = []
    for case in cases.conv_shapes(scale, imgsz, batch=3):
        findings += op_checks.check_case(case, precision, cuda, layouts=("nhwc", "slice"))
    judge(collected, findings)


@pytest.mark.parametrize("task", ["segment", "pose", "obb", "classify"])
def test_shapes_of_other_tasks(cuda, collected, task):
    findings = []
    for scale in cases.SCALES:
        for case in cases.conv_shapes(scale, task=task):
            findings += op_checks.check_case(case, "float16", cuda)
    judge(collected, findings)


@pytest.mark.parametrize("precision", ["float16", "float32"])
def test_large_batches(cuda, collected, precision):
    """One of each kind from the smallest and the largest model, at batch 32."""
    findings = []
    for scale in ("n", "x"):
        kinds = {}
        for case in cases.conv_shapes(scale, batch=32):
            kinds.setdefault((case.family, case.kernel, case.stride, case.ci % 8 == 0), case)
        for case in kinds.values():
            findings += op_checks.check_case(case, precision, cuda)
    judge(collected, findings)


def test_more_values_than_32_bits_count(cuda):
    """A tensor of more than 2**31 values: the last picture comes out as it does alone."""
    n, c, k, size = 33, 64, 64, 1024
    assert n * c * size * size > 2**31
    x = torch.empty(n, c, size, size, dtype=torch.float16, device=cuda, memory_format=torch.channels_last)
    x.fill_(float("nan"))
    generator = torch.Generator(cuda).manual_seed(0)
    for i in (0, n - 1):
        x[i].normal_(generator=generator)
    for case in (
        cases.Case("pointwise", c, k, size, size),
        cases.Case("dense", c, k, size, size, kernel=(3, 3), padding=(1, 1)),
        cases.Case("depthwise", c, k, size, size, kernel=(3, 3), padding=(1, 1), groups=c),
    ):
        weight = replace(case, h=8, w=8).inputs(torch.float16, cuda).weight
        geometry = dict(padding=case.padding, groups=case.groups)
        y = ops.conv_bn_act(x, weight, **geometry)
        for i in (0, n - 1):
            alone = torch.nn.functional.silu(
                torch.nn.functional.conv2d(x[i : i + 1].float(), weight.float(), **geometry)
            )
            error = (y[i : i + 1].float() - alone).abs().max() / alone.abs().max()
            assert error < 2e-3, f"{case}: picture {i} is off by {error:.1e}"
        assert y[1:-1].isnan().all(), f"{case}: pictures of NaN came out as numbers"
        del y, alone


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize(
    "case",
    [
        *(
            cases.Case(
                f"depthwise {k}x{k}",
                24,
                24,
                23,
                41,
                (k, k),
                padding=(k // 2, k // 2),
                groups=24,
                act="identity",
            )
            for k in (3, 5, 7)
        ),
        cases.Case("pointwise", 64, 48, 23, 41, act="identity"),
        cases.Case("dense", 64, 48, 23, 41, (3, 3), padding=(1, 1), act="identity"),
        cases.Case("stem", 3, 16, 64, 96, (3, 3), (2, 2), (1, 1), act="identity"),
        cases.Case("stem", 3, 16, 64, 96, (3, 3), (2, 2), (1, 1)),
    ],
    ids=lambda case: f"{case.name} {case.act}",
)
def test_infinite_and_nan_inputs_reach_no_further_than_in_stock(cuda, case, precision):
    """Kernels that multiply by zeros of their own would make NaN of outputs that do not depend on the value."""
    case = replace(case, bn=False)
    inputs = case.inputs(op_checks.PRECISIONS[precision], cuda)
    # The middle, a corner, and columns on either side of a multiple of 8, 16 and 32, each in another channel.
    bad = (float("nan"), float("inf"), float("-inf"))
    places = [(11, 20), (0, 0), (case.h - 1, case.w - 1), (5, 7), (6, 8), (17, 15), (18, 32), (2, 31)]
    for i, (h, w) in enumerate(places):
        inputs.x[i % 2, 5 * i % case.ci, h, w] = bad[i % 3]
    y = ops.conv_bn_act(**inputs.eval_arguments()).cpu()
    # On the CPU, where no algorithm for float64 transforms its input.
    truth = torch.nn.functional.conv2d(
        inputs.x.double().cpu(),
        inputs.weight.double().cpu(),
        None,
        case.stride,
        case.padding,
        groups=case.groups,
    )
    if case.act == "silu":
        truth = torch.nn.functional.silu(truth)
    assert 0 < (~truth.isfinite()).sum() < truth.numel()
    for same in (torch.isnan, torch.isposinf, torch.isneginf):
        differ = same(y) != same(truth)
        assert not differ.any(), f"{same.__name__} differs at {differ.nonzero()[:8].tolist()}"


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_statistics_of_any_shape(cuda, monkeypatch, precision, offset):
    """Rows from 2 to many, channels of whole and of odd words; a mean that dwarfs the spread. z is x."""
    monkeypatch.setenv("YOLO12_FASTCONV_KERNEL", "direct/simt")  # float on cuDNN may round x
    dtype = op_checks.PRECISIONS[precision]
    eps = torch.finfo(dtype).eps
    problems = []
    for channels in (1, 8, 13, 24, 40, 64, 136, 264, 307, 520):
        weight = torch.eye(channels, device=cuda, dtype=dtype)[:, :, None, None]
        for size in ((1, 1, 2), (1, 1, 3), (3, 5, 7), (2, 33, 31), (7, 64, 65), (4, 160, 160)):
            generator = torch.Generator(cuda).manual_seed(channels)
            x = torch.randn(
                size[0], channels, *size[1:], device=cuda, generator=generator, dtype=torch.float64
            )
            x = (x * max(0.3, 4 * eps * offset) + offset).to(dtype).to(memory_format=torch.channels_last)
            buffers = [
                (
                    torch.zeros(channels, device=cuda),
                    torch.ones(channels, device=cuda),
                    torch.tensor(1, device=cuda),
                )
                for _ in range(2)
            ]
            arguments = (x, weight, None, None, None, 1e-3)
            op_checks.poison([x])
            y, mean, var = ops.conv_bn_act_train(*arguments, running=ops.RunningStats(*buffers[0], 0.1))
            op_checks.poison([x])
            again = ops.conv_bn_act_train(*arguments)
            ops.update_running_stats_(*buffers[1], mean, var, 0.1, x.numel() // channels)
            exact_var, exact_mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
            what = f"{channels} channels, {size}"
            names = ("y", "mean", "var", "running_mean", "running_var", "num_batches_tracked")
            for name, a, b in zip(names, (y, mean, var, *buffers[0]), (*again, *buffers[1]), strict=True):
                if not torch.equal(a, b):
                    problems.append(f"{what}: {name} differs between two runs")
            # Of the spread, with what float keeps of the offset.
            error = (mean - exact_mean).abs().max() / (exact_var.max().sqrt() + offset * 2**-2)
            if not error < 2e-6:
                problems.append(f"{what}: mean is off by {error:.1e}")
            # Partial means are floats: of the size of the offset, whose rounding is that share of the spread.
            kept = 5e-6 + offset / float(exact_var.min().clamp_min(1e-12)) ** 0.5 * 2**-24
            error = ((var - exact_var).abs() / exact_var.clamp_min(1e-12)).max()
            if not error < kept:
                problems.append(f"{what}: variance is off by {error:.1e}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("precision", HALF)
def test_float_pictures_in_training(cuda, precision, layout):
    """The first layer under autocast, as training feeds it: float pictures come out as if they had been cast before."""
    dtype = op_checks.PRECISIONS[precision]
    for case in (
        cases.Case("stem", 3, 16, 64, 96, (3, 3), (2, 2), (1, 1)),
        cases.Case("stem", 3, 64, 64, 96, (3, 3), (2, 2), (1, 1)),
    ):
        inputs = case.inputs(torch.float32, cuda, param_dtype=torch.float32)
        arguments = inputs.train_arguments()
        grads = []
        for x in (inputs.x, inputs.x.to(dtype)):
            arguments["x"] = cases.relayout(x, layout)
            arguments["weight"] = inputs.weight.detach().requires_grad_()
            with torch.autocast("cuda", dtype):
                out = ops.conv_bn_act_train(**arguments)
            grads.append((*out, *torch.autograd.grad(out[0], arguments["weight"], inputs.grad_y.to(dtype))))
        for a, b in zip(*grads, strict=True):
            assert torch.equal(a, b), f"{case}, {layout}"


@pytest.mark.parametrize("precision", HALF)
def test_weights_in_any_layout_and_dtype(cuda, precision):
    """Packs of float weights, in PyTorch's layout, channels_last and sliced: what the same numbers in half give."""
    dtype = op_checks.PRECISIONS[precision]
    generator = torch.Generator(cuda).manual_seed(0)
    for k, c, size in ((64, 64, 3), (40, 72, 3), (24, 136, 5), (48, 64, 1), (17, 13, 3)):
        x = torch.randn(2, c, 12, 12, device=cuda, generator=generator).to(dtype)
        x = x.to(memory_format=torch.channels_last)
        weight = torch.randn(k, c, size, size, device=cuda, generator=generator)
        padding = (size // 2, size // 2)
        wide = torch.randn(k, 2 * c, size, size, device=cuda, generator=generator)
        wide[:, c:] = weight
        outputs = []
        for given in (
            weight.to(dtype).float().to(dtype).to(memory_format=torch.channels_last),
            weight,
            weight.to(memory_format=torch.channels_last),
            wide[:, c:],
            wide.to(memory_format=torch.channels_last)[:, c:],
        ):
            leaf, picture = given.detach().requires_grad_(), x.detach().requires_grad_()
            op_checks.poison([x, weight])
            with torch.autocast("cuda", dtype):
                y = ops.conv_bn_act_train(picture, leaf, padding=padding)[0]
            grads = torch.autograd.grad(y, (picture, leaf), torch.ones_like(y))
            assert grads[1].dtype is given.dtype
            outputs.append((y, grads[0]))
        for other in outputs[1:]:
            assert all(map(torch.equal, outputs[0], other)), f"{k}x{c}x{size}x{size}"


def test_poison_reaches_what_an_op_allocates(cuda):
    """The check of the check: memory that an op gets holds NaN beforehand."""
    for numel in (64, 100_000, 5_000_000):
        like = torch.empty(numel, dtype=torch.float16, device=cuda)
        op_checks.poison([like])
        assert torch.empty_like(like).isnan().all()
        assert torch.empty(numel // 2, dtype=torch.float32, device=cuda).isnan().all()


def test_ops_run_on_the_current_stream(cuda):
    """Behind slow work on another stream: an op launched elsewhere would read the input before it is written."""
    for case in (cases.AWKWARD[0], *cases.with_layouts(cases.conv_shapes("n", 320)[3], LAYOUTS)):
        inputs = case.inputs(torch.float16, cuda, param_dtype=torch.float32)
        x = torch.empty_like(inputs.x).copy_(inputs.x)
        arguments = {**inputs.train_arguments(), "x": x}
        with torch.autocast("cuda"):
            expected = ops.conv_bn_act_train(**arguments)
            late = torch.full_like(x, float("nan"))
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(20_000_000)
                late.copy_(x)
                outputs = ops.conv_bn_act_train(**{**arguments, "x": late})
            stream.synchronize()
        for a, b in zip(outputs, expected, strict=True):
            assert torch.equal(a, b), f"{case}: differs on a side stream"


def test_ops_can_be_captured_in_a_graph(cuda):
    for case in (*cases.conv_shapes("n", 64)[:4], cases.AWKWARD[0]):
        inputs, others = (case.inputs(torch.float16, cuda, seed=seed) for seed in (0, 1))
        expected = ops.conv_bn_act(**{**inputs.eval_arguments(), "x": others.x})
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ops.conv_bn_act(**inputs.eval_arguments())  # lazy initialisation happens before the capture
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ops.conv_bn_act(**inputs.eval_arguments())
        inputs.x.copy_(others.x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, expected), f"{case}: the replay differs"


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "case",
    [
        cases.Case("pointwise", 64, 48, 20, 20, bias=True, layout="slice"),
        cases.Case("dense", 32, 64, 20, 18, (3, 3), (1, 1), (1, 1)),
        cases.Case("strided", 32, 64, 21, 18, (3, 3), (2, 2), (1, 1), bias=True),
        cases.Case("depthwise", 64, 64, 20, 18, (3, 3), (1, 1), (1, 1), groups=64),
        cases.Case("odd", 60, 52, 20, 18, (1, 1), layout="misaligned"),
    ],
    ids=str,
)
def test_the_halves_of_a_backward_make_the_whole(cuda, case, precision):
    """`bn_act_backward` and `conv_backward`, the latter in two calls, find what one op does: in half bit by bit.

    In float32 gradients of dense filters are cuDNN's, asked for both at once or one by one, and differ in rounding.
    """
    dtype = op_checks.PRECISIONS[precision]
    t = case.inputs(dtype, cuda, bn_dtype=torch.float32)
    namespace = torch.ops.yolo12_fastconv
    convolution = [list(case.stride), list(case.padding), list(case.dilation), case.groups]
    geometry = [*convolution, reference.SILU, dtype, False]
    train = [t.gamma, t.beta, case.eps]
    _y, z, mean, var = namespace.conv_bn_act_train.default(t.x, t.weight, t.bias, *train, None, *geometry)
    biased = t.bias is not None
    added = torch.randn_like(t.x)
    arguments = [t.grad_y, t.x, t.weight, t.bias, z, mean, var, *train, *geometry]
    whole = namespace.conv_bn_act_train_backward.default(
        *arguments, [True, True, biased, True, True], None, added
    )
    grad_z, *vectors = namespace.bn_act_backward.default(
        t.grad_y, z, mean, var, *train, reference.SILU, [True] * 3
    )
    rest = [grad_z, t.x, t.weight, t.bias, *convolution, dtype, False]
    grad_x, *_ = namespace.conv_backward.default(*rest, [True, False, False], None, added)
    _, *weights = namespace.conv_backward.default(*rest, [False, True, biased])
    for ours, expected in zip((grad_x, *weights, *vectors), whole, strict=True):
        assert ours.stride() == expected.stride()
        if dtype is torch.float32 and expected.numel():
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
        else:
            assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        (cases.Case("pointwise", 32, 48, 6, 7, bias=True, layout="slice"), "float16"),
        (cases.Case("pointwise", 32, 48, 6, 7, bias=True, layout="nchw"), "float32"),
        (cases.Case("dense", 16, 24, 7, 6, (3, 3), (2, 2), (1, 1), bias=True), "bfloat16"),
        (cases.Case("depthwise", 16, 16, 7, 6, (3, 3), (1, 1), (1, 1), groups=16, bias=True), "float16"),
        (cases.Case("odd", 13, 17, 6, 7, (3, 3), (1, 1), (1, 1), bias=True, layout="misaligned"), "float32"),
    ],
    ids=str,
)
def test_opcheck(cuda, case, precision):
    """Schema, fake kernel, autograd registration and AOT dispatch of every op."""
    dtype = op_checks.PRECISIONS[precision]
    t = case.inputs(dtype, cuda, bn_dtype=torch.float32)
    namespace = torch.ops.yolo12_fastconv
    geometry = [
        list(case.stride), list(case.padding), list(case.dilation), case.groups, reference.SILU, dtype, False
    ]  # fmt: skip
    bn, mask = [t.gamma, t.beta, t.mean, t.var, case.eps], [True] * 5
    train = [t.gamma, t.beta, case.eps]
    _y, z, mean, var = namespace.conv_bn_act_train.default(t.x, t.weight, t.bias, *train, None, *geometry)
    for op, arguments in (
        ("conv_bn_act", [t.x, t.weight, t.bias, *bn, None, *geometry]),
        ("conv_bn_act_train", [t.x, t.weight, t.bias, *train, None, *geometry]),
        ("conv_bn_act_backward", [t.grad_y, t.x, t.weight, t.bias, *bn, *geometry, mask]),
        (
            "conv_bn_act_train_backward",
            [t.grad_y, t.x, t.weight, t.bias, z, mean, var, *train, *geometry, mask],
        ),
        ("conv_bn_act_train_", [t.x, t.weight, t.bias, *train, None, *geometry, None, None, None, None]),
        (
            "conv_bn_act_train_",
            [
                t.x,
                t.weight.float(),
                t.bias,
                *train,
                None,
                *geometry,
                t.mean.clone(),
                t.var.clone(),
                torch.tensor(3, device=cuda),
                0.03,
            ],
        ),
        ("bn_act_backward", [t.grad_y, z, mean, var, *train, reference.SILU, mask[:3]]),
        ("conv_backward", [z, t.x, t.weight, t.bias, *geometry[:4], *geometry[5:], mask[:3], None, t.x]),
        ("update_running_stats_", [t.mean, t.var, torch.tensor(3, device=cuda), mean, var, 0.03, 240]),
    ):
        opcheck(getattr(namespace, op).default, arguments)
        if op in ("conv_bn_act", "conv_bn_act_train"):
            leaves = {id(tensor) for tensor in (t.x, t.weight, t.bias, t.gamma, t.beta)}
            opcheck(
                getattr(namespace, op).default,
                [a.detach().requires_grad_() if id(a) in leaves else a for a in arguments],
            )


@pytest.mark.parametrize("precision", ["float16", "float32"])
@pytest.mark.parametrize(
    "size",
    [(8, 64, 40, 40), (32, 256, 20, 20), (8, 64, 160, 160), (8, 13, 40, 40), (1, 64, 3, 3)],
    ids=str,
)
def test_bad_values_stay_in_their_channels_in_training(cuda, precision, size):
    """Statistics, batch norm and its gradient, in words and in single elements; and no bit changes in a second run."""
    dtype, channels = op_checks.PRECISIONS[precision], size[1]
    generator = torch.Generator(cuda).manual_seed(3)
    x = torch.randn(size, device=cuda, generator=generator).to(dtype).to(memory_format=torch.channels_last)
    grad_y = torch.randn(size, device=cuda, generator=generator).to(dtype)
    grad_y = grad_y.to(memory_format=torch.channels_last)
    weight = torch.ones(channels, 1, 3, 3, device=cuda, dtype=dtype)
    clean, bad = x.clone(), {0: float("nan"), channels - 2: float("inf")}
    for channel, value in bad.items():
        x[-1, channel, -1, size[3] // 2] = value
    good = [channel for channel in range(channels) if channel not in bad]

    def results(pictures):
        leaf = pictures.clone().requires_grad_()
        op_checks.poison([leaf])
        y, mean, var = ops.conv_bn_act_train(leaf, weight, padding=(1, 1), groups=channels)
        y.backward(grad_y)
        return {"y": y.detach(), "mean": mean, "var": var, "grad_x": leaf.grad}

    expected, found, again = results(clean), results(x), results(x)
    for name, value in found.items():
        along = 0 if value.dim() == 1 else 1
        index = torch.tensor(good, device=cuda)
        assert torch.equal(value.index_select(along, index), expected[name].index_select(along, index)), name
        spoilt = value.index_select(along, torch.tensor(list(bad), device=cuda))
        # The mean of a channel with an infinite value is infinite.
        assert not spoilt.isfinite().any(), f"{name}: numbers out of channels with NaN and infinity"
        assert torch.equal(value.nan_to_num(7.0), again[name].nan_to_num(7.0)), (
            f"{name} differs between two runs"
        )
