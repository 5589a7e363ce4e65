"""The error rule for single ops: ours, stock's own computation and a float64 truth on the tensors of one case.

Used on a CPU by test_cases.py and on CUDA by test_gpu_ops.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cases
import torch
import torch.nn.functional as F
from torch import Tensor

from yolo12_fastconv import error_rule, ops, reference

PRECISIONS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "tf32": torch.float32,
}
GRADIENTS = {
    "x": "grad_x",
    "weight": "grad_weight",
    "bias": "grad_bias",
    "gamma": "grad_bn_weight",
    "beta": "grad_bn_bias",
    "residual": "grad_residual",
}


@dataclass(frozen=True)
class Finding:
    """One compared tensor, or one broken promise (`problem`)."""

    case: cases.Case
    op: str
    precision: str
    layout: str
    quantity: str
    comparison: error_rule.Comparison
    kernel: str
    """What serves the forward convolution: "family/target" of the tile menu, or "ATen"."""

    def __str__(self) -> str:
        c = self.comparison
        numbers = f"ours {c.ours[0]:.1e}/{c.ours[1]:.1e} stock {c.stock[0]:.1e}/{c.stock[1]:.1e} max/l2"
        what = c.problem or f"{numbers}, {100 * c.used:.0f} % of the limit"
        return f"{self.op} {self.precision} {self.layout} {self.case} ({self.kernel}) {self.quantity}: {what}"


@contextlib.contextmanager
def numerics(*, tf32: bool) -> Iterator[None]:
    """TF32 allowed or not, and cuDNN held to deterministic algorithms: gradients of weights come from it, in float32 by
    default from an algorithm whose sums run in no fixed order. What was set before is put back."""
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.deterministic
    cudnn.allow_tf32, cudnn.deterministic = tf32, True
    try:
        yield
    finally:
        cudnn.allow_tf32, cudnn.deterministic = before


def check_case(
    case: cases.Case,
    precision: str,
    device: torch.device | str,
    *,
    layouts: Sequence[str] = (),
    train: bool = True,
    eval_gradients: bool = False,
    autocast: bool = False,
    variants: Sequence[dict[str, Any]] = ({},),
) -> list[Finding]:
    """Runs the ops of one case, and compares.

    Args:
        precision: key of PRECISIONS.
        layouts: of `x`, with the same numbers; by default the case's own.
        train: also the training op with all gradients. In half precision with float32 parameters, under autocast.
        eval_gradients: also the gradients of the inference op.
        autocast: the inference op with float32 parameters under autocast, instead of half ones.
        variants: replacements of the case's fields for the inference op, such as ``{"bn": False, "bias": True}``.
    """
    dtype = PRECISIONS[precision]
    findings: list[Finding] = []
    with numerics(tf32=precision == "tf32"):
        for changes in variants:
            inputs = replace(case, **changes).inputs(
                dtype, device, param_dtype=torch.float32 if autocast else dtype
            )
            findings += _check(inputs, precision, layouts or [case.layout], "eval", eval_gradients, autocast)
        # Of one value per channel there are no statistics.
        if train and case.bn and case.batch * case.out_size[2] * case.out_size[3] > 1:
            inputs = case.inputs(dtype, device, param_dtype=torch.float32)
            findings += _check(inputs, precision, layouts or [case.layout], "train", True, True)
    return findings


def _check(
    inputs: cases.Inputs, precision: str, layouts: Sequence[str], op: str, gradients: bool, autocast: bool
) -> list[Finding]:
    dtype, case = PRECISIONS[precision], inputs.case
    stock = _values(inputs, op, "stock", dtype, gradients, autocast)
    truth = _values(inputs, op, "truth", dtype, gradients, autocast)
    granted: dict[str, Tensor] = {}
    if precision == "tf32":
        rounded = replace(
            inputs, x=error_rule.round_tf32(inputs.x), weight=error_rule.round_tf32(inputs.weight)
        )
        granted = _values(rounded, op, "truth", dtype, gradients, autocast)
    scales = {"mean": float(truth["var"].max()) ** 0.5} if "var" in truth else {}
    if "z" in truth:
        grad_z = truth.pop("z")
        scales["grad_bias"] = float(grad_z.abs().sum((0, 2, 3)).max())
        # A sum of n products of random sign. Batch norm makes the gradient of a single weight vanish: its size is no
        # measure of its rounding errors.
        count = grad_z.numel() // grad_z.shape[1]
        scales["grad_weight"] = count**0.5 * float(
            grad_z.square().mean().sqrt() * inputs.x.double().square().mean().sqrt()
        )
    findings = []
    kernel = _kernel(inputs, dtype)
    for layout in layouts:
        given = replace(inputs, x=cases.relayout(inputs.x, layout))
        before = given.x.clone()
        # What an op leaves unwritten in its outputs then holds NaN, and never a right answer of an earlier run.
        poison(stock.values())
        ours = _values(given, op, "ours", dtype, gradients, autocast)
        again = ours
        if layout == layouts[0]:  # a kernel is the same for all layouts that it reads in place
            poison(stock.values())
            again = _values(given, op, "ours", dtype, gradients, autocast)

        def add(
            quantity: str,
            comparison: error_rule.Comparison | str,
            layout: str = layout,
            case: cases.Case = case,
        ) -> None:
            if isinstance(comparison, str):
                comparison = error_rule.Comparison.impossible(comparison)
            findings.append(Finding(case, op, precision, layout, quantity, comparison, kernel))

        for quantity, value in ours.items():
            floor = _floor(quantity, case, precision)
            scale = scales.get(quantity, 0.0)
            add(
                quantity,
                error_rule.compare(
                    value, stock[quantity], truth[quantity], floor, scale=scale, granted=granted.get(quantity)
                ),
            )
            if not _same(value, again[quantity]):
                add(quantity, "two runs differ")
        if not _same(given.x, before):
            add("x", "the op wrote to its input")
        for quantity, problem in _layout_problems(given, ours):
            add(quantity, problem)
    return findings


def _values(
    inputs: cases.Inputs, op: str, side: str, dtype: torch.dtype, gradients: bool, autocast: bool
) -> dict[str, Tensor]:
    """Outputs and gradients of "ours", "stock" or "truth", by quantity. "truth" adds the gradient of z in training."""
    case = inputs.case
    tensors: dict[str, Tensor] = {}
    for name in ("x", "weight", "bias", "gamma", "beta", "mean", "var", "residual"):
        tensor = getattr(inputs, name)
        if tensor is None:
            continue
        if side == "truth":
            # Under autocast both sides convolve with rounded numbers.
            tensor = (tensor.to(dtype) if autocast and name in ("x", "weight", "bias") else tensor).double()
        tensors[name] = tensor.detach().requires_grad_(gradients and name in GRADIENTS)
    leaves = replace(inputs, **tensors)
    with torch.set_grad_enabled(gradients):
        if side == "ours":
            with torch.autocast(inputs.x.device.type, dtype, enabled=autocast and dtype is not torch.float32):
                if op == "eval":
                    outputs = {"y": ops.conv_bn_act(**leaves.eval_arguments())}
                else:
                    outputs = dict(
                        zip(
                            ("y", "mean", "var"),
                            ops.conv_bn_act_train(**leaves.train_arguments()),
                            strict=True,
                        )
                    )
        else:
            compute = torch.float64 if side == "truth" else dtype
            geometry = (
                case.stride,
                case.padding,
                case.dilation,
                case.groups,
                reference.ACTIVATIONS[case.act],
            )
            vectors = (leaves.x, leaves.weight, leaves.bias, leaves.gamma, leaves.beta)
            if op == "eval":
                y = reference.conv_bn_act(
                    *vectors, leaves.mean, leaves.var, case.eps, leaves.residual, *geometry, compute
                )
                outputs = {"y": y}
            else:
                y, z, mean, var = reference.conv_bn_act_train(
                    *vectors, case.eps, leaves.residual, *geometry, compute
                )
                if side == "stock":
                    mean, var = _batch_norm_statistics(z)
                outputs = {"y": y, "mean": mean, "var": var}
        if gradients:
            wanted = {GRADIENTS[name]: tensor for name, tensor in tensors.items() if name in GRADIENTS}
            if op == "train" and side == "truth":
                wanted["z"] = z
            grads = torch.autograd.grad(
                outputs["y"], list(wanted.values()), inputs.grad_y.to(outputs["y"].dtype)
            )
            outputs |= dict(zip(wanted, grads, strict=True))
    return {name: tensor.detach() for name, tensor in outputs.items()}


def _batch_norm_statistics(z: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance as stock has them: what `torch.nn.BatchNorm2d` moves its buffers by."""
    count = z.numel() // z.shape[1]
    mean, var = (torch.zeros(z.shape[1], device=z.device) for _ in range(2))
    F.batch_norm(z.detach(), mean, var, training=True, momentum=1.0)
    return mean, var * ((count - 1) / count)


def _floor(quantity: str, case: cases.Case, precision: str) -> float:
    n, k, p, q = case.out_size
    taps = case.kernel[0] * case.kernel[1]
    terms = {"y": case.terms, "grad_x": k // case.groups * taps, "grad_residual": 1}.get(quantity, n * p * q)
    known = {"mean": "running_mean", "var": "running_var", "grad_residual": "y"}.get(quantity, quantity)
    return error_rule.tolerances().floor(known, precision, terms)


def _kernel(inputs: cases.Inputs, dtype: torch.dtype) -> str:
    x, weight, case = inputs.x, inputs.weight, inputs.case
    if x.device.type != "cuda" or not ops.LIBRARY.loaded:
        return "ATen"
    major, minor = torch.cuda.get_device_capability(x.device)
    name = ops.describe_kernel(
        x.shape, weight.shape, case.stride, case.padding, case.dilation, case.groups, dtype,
        tf32=ops.allow_tf32(x.device, dtype), capability=10 * major + minor,
    )  # fmt: skip
    return "/".join(name.split("/")[:2])


def _layout_problems(inputs: cases.Inputs, ours: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """What the ops promise about layouts: on CUDA channels_last (y with padded pixels), and weight gradients like the
    weight.
    """
    if inputs.x.device.type == "cuda":
        for quantity in ("y", "grad_x"):
            tensor = ours.get(quantity)
            if tensor is None:
                continue
            _n, c, h, w = tensor.shape
            pitch = c
            padded = quantity == "y" and inputs.case.groups == 1 and c > 8
            if padded and tensor.dtype.itemsize == 2:
                pitch = (c + 7) // 8 * 8
            if tensor.stride() != (h * w * pitch, 1, w * pitch, pitch):
                yield (
                    quantity,
                    f"strides are {tensor.stride()} for shape {tuple(tensor.shape)}, not channels_last",
                )
    grad = ours.get("grad_weight")
    if grad is not None and grad.stride() != inputs.weight.stride():
        yield "grad_weight", f"strides are {grad.stride()}, the weight's {inputs.weight.stride()}"


def poison(like: Any) -> None:
    """Fill free blocks of CUDA's caching allocator with NaN in every float format, of the sizes of these tensors."""
    tensors = [tensor for tensor in like if tensor.device.type == "cuda"]
    blocks = [
        torch.full((tensor.numel() * tensor.element_size(),), 0xFF, dtype=torch.uint8, device=tensor.device)
        for tensor in tensors
        for _ in range(3)
    ]
    del blocks


def moments_used(mean: Tensor, var: Tensor, z: Tensor, offset: float) -> float:
    """What part of their limit the errors of a half `z`'s statistics use, where some of its rows are unlike the others.

    Args:
        mean, var: of the channels of `z` (N, C, H, W), biased.
        offset: around which the values lie.
    """
    exact_var, exact_mean = torch.var_mean(z.double(), (0, 2, 3), correction=0)
    spread = exact_var.sqrt()
    # Differences of a few values are rounded to 11 or 8 bits: in bfloat16, with 243 pixels, the mean was off by up to
    # 2.5e-4 of the spread or the variance by 5e-4.
    limit = torch.finfo(z.dtype).eps * (0.01 + 8 / (z.numel() // z.shape[1]))
    return max(
        ((mean - exact_mean).abs() / (spread + offset * 0.1)).max().item() / limit,
        ((var - exact_var).abs() / exact_var).max().item()
        / (2 * limit + offset / spread.min().item() * 2**-23),
    )


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def failures(findings: Sequence[Finding]) -> str:
    """One line for each broken finding, the worst first; empty if there is none."""
    broken = [finding for finding in findings if not finding.comparison.ok]
    broken.sort(key=lambda finding: -finding.comparison.used)
    lines = [str(finding) for finding in broken[:40]]
    return (
        "\n".join([f"{len(broken)} of {len(findings)} comparisons are outside the rule", *lines])
        if broken
        else ""
    )


def summary(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The worst of every kind of convolution, kernel, op, precision and quantity."""
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.case.family, finding.kernel, finding.op, finding.precision, finding.quantity)
        groups.setdefault(key, []).append(finding)
    rows = []
    for (family, kernel, op, precision, quantity), group in sorted(groups.items()):
        worst = max(group, key=lambda finding: finding.comparison.used)
        c = worst.comparison
        rows.append(
            {
                "family": family, "kernel": kernel, "op": op, "precision": precision, "quantity": quantity,
                "comparisons": len(group), "failed": sum(not finding.comparison.ok for finding in group),
                "worst_case": str(worst.case), "worst_layout": worst.layout, "used": error_rule.finite(c.used),
                "ratio": error_rule.finite(c.ratio), "ours": [*map(error_rule.finite, c.ours)],
                "stock": [*map(error_rule.finite, c.stock)], "problem": c.problem,
            }
        )  # fmt: skip
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `summary` as text."""
    header = f"{'family':12}{'kernel':20}{'op':6}{'precision':10}{'quantity':15}"
    lines = [f"{header}{'n':>6}{'failed':>7}{'used':>7}{'ratio':>7}  worst"]
    for row in rows:
        used, ratio = (f"{row[key]:.2f}" if row[key] is not None else "-" for key in ("used", "ratio"))
        lines.append(
            f"{row['family']:12}{row['kernel']:20}{row['op']:6}{row['precision']:10}{row['quantity']:15}{row['comparisons']:6}"
            f"{row['failed']:7}{used:>7}{ratio:>7}  {row['worst_case']} {row['worst_layout']}"
        )
    return "\n".join(lines)


def write_summary(path: Path, findings: Sequence[Finding], environment: dict[str, Any]) -> None:
    """`summary` as a JSON file, with what the numbers depend on."""
    broken = [str(finding) for finding in findings if not finding.comparison.ok]
    content = {
        "environment": environment,
        "comparisons": len(findings),
        "failed": len(broken),
        "failures": broken[:200],
        "rows": summary(findings),
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
