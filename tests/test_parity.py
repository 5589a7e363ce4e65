"""check_parity: clean models pass, planted faults are named, nothing is left behind; the command."""

from __future__ import annotations

import copy
import json
import math
import random
import types
from pathlib import Path

import numpy as np
import pytest
import support
import torch
import torch.nn.functional as F
import yaml
from torch import nn

from yolo12_fastconv import ParityReport, check_parity, ops, parity_cli, patch_model, reference
from yolo12_fastconv.parity import main, natural_batch, randomise_

DTYPES = [torch.float32, torch.bfloat16]
FAULTY = "model.2.m.0.m.0.cv1"  # of support.TINY: a 3x3 inside a C3k


@pytest.fixture
def tiny():
    """A small stock classifier with uneven batch norms; input (N, 3, 32, 32)."""
    return support.build(support.TINY)


@pytest.fixture
def pictures():
    return natural_batch(2, 3, 32, 32)


def names(report: ParityReport) -> set[str]:
    return {row.layer for row in report.rows if not row.ok}


# ---------------------------------------------------------------------------------------------------------- it passes


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_yolo12n_has_parity(yolo12n, images, mode, dtype):
    report = check_parity(yolo12n, images, mode=mode, dtype=dtype)
    assert report.ok, str(report)
    assert report.first_bad is None and not report.unreached and not report.kept
    layers = dict(report.layers())
    assert len(layers) == 113
    quantities = {row.quantity for row in report.rows}
    if mode == "eval":
        assert quantities == {"y"}
        assert report.detections is not None
    else:
        assert quantities == {
            "y", "grad_x", "grad_weight", "grad_bn_weight", "grad_bn_bias", "running_mean", "running_var",
            "num_batches_tracked",
        }  # fmt: skip
        assert all(len(rows) == 8 for rows in layers.values())
    assert {row.layer for row in report.outputs} == {"model"}
    assert all(row.kernel == "ATen (cpu)" for row in report.rows)
    assert all(max(row.comparison.stock) > 0 for row in report.rows if row.quantity == "y"), (
        "stock is no truth"
    )


@pytest.mark.parametrize("task", ["seg", "pose", "obb", "cls"])
def test_every_task(task):
    model = support.build(f"yolo12n-{task}.yaml")
    report = check_parity(model, imgsz=64)
    assert report.ok, str(report)
    kinds = {"seg": "boxes", "pose": "boxes", "obb": "rotated boxes", "cls": "classes"}
    assert report.detections is not None and report.detections.kind == kinds[task]
    assert {"seg": "[0].extras", "pose": "[0].extras", "obb": "[0].extras", "cls": "output[0]"}[task] in str(
        report
    )


def test_half_precision_and_fused(tiny, pictures):
    tiny.fuse(verbose=False)
    report = check_parity(tiny, pictures, dtype=torch.float16)
    assert report.ok, str(report)
    report = check_parity(tiny, pictures, mode="train")
    assert report.ok, str(report)
    assert {row.quantity for row in report.rows} == {"y", "grad_x", "grad_weight", "grad_bias"}


def test_evaluation_under_autocast(tiny, pictures):
    """As the validation during training: float32 parameters, batch norms in place, half inputs."""
    report = check_parity(tiny, pictures, dtype=torch.bfloat16, autocast=True)
    assert report.ok, str(report)
    assert "autocast" in report.environment["precision"]


def test_patched_and_wrapped_models(tiny, pictures):
    for model in (
        patch_model(copy.deepcopy(tiny)),
        nn.DataParallel(tiny),
        patch_model(nn.DataParallel(tiny)),
    ):
        report = check_parity(model, pictures)
        assert report.ok and {row.layer for row in report.rows} >= {"model.0", FAULTY}


def test_single_block_and_plain_module():
    block = support.uneven(support.build(support.TINY).model[2])
    report = check_parity(block, torch.rand(2, 8, 9, 11), mode="train")
    assert report.ok and "m.0.m.0.cv1" in names_of(report)
    conv = block.cv1
    report = check_parity(conv, torch.rand(2, conv.conv.in_channels, 9, 11))
    assert report.ok and names_of(report) == {""}
    assert "(model)" in str(report)


def names_of(report: ParityReport) -> set[str]:
    return {row.layer for row in report.rows}


def test_yolo_objects(tmp_path):
    from ultralytics import YOLO

    yolo = patch_model(YOLO(tiny_yaml(tmp_path)))
    report = check_parity(yolo, imgsz=32)
    assert report.ok and report.environment["model"] == "ClassificationModel"


def test_other_activations_biases_and_momenta(pictures):
    """What a block may be and YOLO12's are not: the op serves it, and the truth has to know it."""
    tiny = support.build(support.TINY)
    blocks = [m for m in tiny.modules() if type(m).__name__ == "Conv"]
    blocks[0].act = nn.PReLU(8)
    blocks[1].conv.bias = nn.Parameter(torch.randn(blocks[1].conv.out_channels))
    blocks[2].bn.momentum = None
    blocks[3].bn.momentum = 0.4
    blocks[4].conv.padding_mode = "reflect"
    for mode in ("eval", "train"):
        report = check_parity(tiny, pictures, mode=mode)
        assert report.ok, str(report)
    rows = {(row.layer, row.quantity): row for row in report.rows}
    assert ("model.0", "grad[act.weight]") in rows
    assert sum(quantity == "grad_bias" for _layer, quantity in rows) == 1
    assert [row.layer for row in report.rows if "padding_mode is 'reflect'" in row.kernel]


def test_layers_that_are_kept_or_not_reached_are_told(tiny, pictures):
    tiny.model[4].spare = copy.deepcopy(tiny.model[0])
    patched = patch_model(tiny, exclude="model.0")
    report = check_parity(patched, pictures)
    assert report.ok
    assert list(report.kept) == ["model.0"]
    assert report.unreached == ["model.4.spare"]
    text = str(report)
    assert "not patched: model.0" in text and "not compared: model.4.spare" in text


def test_block_that_runs_twice_has_two_rows(pictures):
    block = support.build(support.TINY).model[1]

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block

        def forward(self, x):
            return self.block(self.block(x))

    report = check_parity(Twice(), torch.rand(2, 8, 8, 8), mode="train")
    assert report.ok and names_of(report) == {"block", "block (call 2)"}


def another_rounding(x, weight, bias=None, bn=None, residual=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1),
                     groups=1, act="silu"):  # fmt: skip
    """`ops.conv_bn_act` as a fused kernel computes it: float32 to the end, sums in another order, rounded once."""
    dtype = ops.compute_dtype(x)
    a, w = x.to(dtype).float(), weight.to(dtype).float()
    if groups == 1:
        order = torch.randperm(a.shape[1], generator=torch.Generator().manual_seed(1))
        a, w = a[:, order], w[:, order]
    u = F.conv2d(a, w, None, stride, padding, dilation, groups)
    if bn is not None:
        scale = bn.weight.float() * torch.rsqrt(bn.running_var.float() + bn.eps)
        shift = bn.bias.float() - bn.running_mean.float() * scale
        u = u * scale[:, None, None] + shift[:, None, None]
    if bias is not None:
        u = u + bias.float()[:, None, None]
    y = reference.activate(u, reference.ACTIVATIONS[act]).to(dtype)
    return y if residual is None else y + residual


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_another_correct_rounding_passes(yolo12n, monkeypatch, dtype, fused):
    """The floors leave room for a kernel that is right and rounds differently."""
    batch = natural_batch(2, 3, 128, 96)
    randomise_(yolo12n, batch)
    if fused:
        yolo12n.eval().fuse(verbose=False)
    monkeypatch.setattr(ops, "conv_bn_act", another_rounding)
    report = check_parity(yolo12n, batch, dtype=dtype)
    assert report.ok, str(report)
    assert any(row.comparison.ours != row.comparison.stock for row in report.rows)
    assert report.worst.comparison.used < 0.7


# ------------------------------------------------------------------------------------------------------ planted faults


def bind(block: nn.Module, forward) -> None:
    """An instance's forward that copies of the block take along, bound to them."""
    block.forward = types.MethodType(forward, block)


def scaled_weight(block):
    block.conv.weight.data *= 1.001


def one_scaled_weight(block):
    block.conv.weight.data[3, 2, 1, 1] *= 1.01


def wrong_eps(block):
    block.bn.eps += 1e-3


def skipped_activation(block):
    block.act = nn.Identity()


def stale_statistics(block):
    block.bn.running_mean += 1e-4


def shifted_beta(block):
    block.bn.bias.data += 1e-4


def nan_weight(block):
    block.conv.weight.data[1] = math.nan


def wrong_padding(block):
    block.conv.padding = (0, 0)


def wrong_stride_of_padding(block):
    """The same shape, with the padding on the other side."""

    def forward(self, x):
        return type(self).forward(self, F.pad(x, (0, 1, 0, 1))[..., 1:, 1:])

    bind(block, forward)


def one_infinite_value(block):
    def forward(self, x):
        y = type(self).forward(self, x)
        return y.index_put([torch.tensor(0)] * 4, torch.tensor(math.inf))

    bind(block, forward)


def raising(block):
    def forward(self, x):
        raise RuntimeError("planted")

    bind(block, forward)


def other_dtype(block):
    def forward(self, x):
        return type(self).forward(self, x).double()

    bind(block, forward)


def writes_to_input(block):
    def forward(self, x):
        y = type(self).forward(self, x)
        x.data[0, 0, 0, 0] += 1
        return y

    bind(block, forward)


FAULTS = [
    scaled_weight, one_scaled_weight, wrong_eps, skipped_activation, stale_statistics, shifted_beta, nan_weight,
    wrong_padding, wrong_stride_of_padding, one_infinite_value, raising, other_dtype, writes_to_input,
]  # fmt: skip
MESSAGES = {
    nan_weight: "NaN or infinity differs",
    wrong_padding: "shape is",
    one_infinite_value: "in 1 of",
    raising: "raises RuntimeError: planted",
    other_dtype: "dtype is float64",
    writes_to_input: "wrote to its input",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda f: f.__name__)
def test_fault_is_found_in_its_layer(tiny, pictures, plant):
    patched = patch_model(copy.deepcopy(tiny))
    plant(patched.get_submodule(FAULTY))
    report = check_parity(patched, pictures, reference=tiny)
    assert not report.ok
    assert names(report) == {FAULTY}
    assert report.first_bad.layer == FAULTY
    assert MESSAGES.get(plant, "error") in report.summary() and FAULTY in report.summary()


def momentum_off(block):
    block.bn.momentum += 0.01


def not_updated(block):
    def forward(self, x):
        before = [buffer.clone() for buffer in self.buffers()]
        y = type(self).forward(self, x)
        for buffer, value in zip(self.buffers(), before, strict=True):
            buffer.copy_(value)
        return y

    bind(block, forward)


def biased_variance(block):
    """A variance tracked without the n / (n - 1) of 2 pictures of 8x8."""

    def forward(self, x):
        old = self.bn.running_var.clone()
        y = type(self).forward(self, x)
        n = y.numel() // y.shape[1]
        self.bn.running_var -= (self.bn.running_var - old * (1 - self.bn.momentum)) / n
        return y

    bind(block, forward)


def not_counted(block):
    def forward(self, x):
        y = type(self).forward(self, x)
        self.bn.num_batches_tracked -= 1
        return y

    bind(block, forward)


def scaled_gradient(block):
    def forward(self, x):
        y = type(self).forward(self, x)
        return y + 1e-4 * (y - y.detach())

    bind(block, forward)


def no_weight_gradient(block):
    def forward(self, x):
        weight = self.conv.weight
        self.conv.weight = nn.Parameter(weight.detach())
        try:
            return type(self).forward(self, x)
        finally:
            self.conv.weight = weight

    bind(block, forward)


def changes_a_parameter(block):
    def forward(self, x):
        y = type(self).forward(self, x)
        self.bn.bias.data += 1
        return y

    bind(block, forward)


TRAINING_FAULTS = {
    scaled_weight: {"grad_weight", "running_var", "running_mean"},
    wrong_eps: {"y", "grad_x", "grad_weight"},
    skipped_activation: {"y", "grad_x", "grad_bn_bias"},
    momentum_off: {"running_mean", "running_var"},
    not_updated: {"running_mean", "running_var", "num_batches_tracked"},
    biased_variance: {"running_var"},
    not_counted: {"num_batches_tracked"},
    scaled_gradient: {"grad_x", "grad_weight", "grad_bn_weight", "grad_bn_bias"},
    no_weight_gradient: {"grad_weight"},
    changes_a_parameter: {"state"},
    nan_weight: {"y", "grad_x", "grad_weight", "running_mean", "running_var"},
    raising: {"y"},
}


@pytest.mark.parametrize("plant", TRAINING_FAULTS, ids=lambda f: f.__name__)
def test_fault_in_training_is_found_in_its_layer(tiny, pictures, plant):
    patched = patch_model(copy.deepcopy(tiny))
    plant(patched.get_submodule(FAULTY))
    report = check_parity(patched, pictures, mode="train", reference=tiny)
    assert names(report) == {FAULTY}
    found = {row.quantity for row in report.rows if not row.ok}
    assert found >= TRAINING_FAULTS[plant]
    if plant in (
        momentum_off,
        not_updated,
        biased_variance,
        not_counted,
        no_weight_gradient,
    ):
        assert found == TRAINING_FAULTS[plant]
    if plant is scaled_gradient:
        assert "y" not in found


def test_changed_buffer_in_evaluation_is_found(tiny, pictures):
    patched = patch_model(copy.deepcopy(tiny))

    def forward(self, x):
        y = type(self).forward(self, x)
        self.bn.running_mean += 1
        return y

    bind(patched.get_submodule(FAULTY), forward)
    report = check_parity(patched, pictures)
    assert names(report) == {FAULTY} and "bn.running_mean" in report.first_bad.comparison.problem


def test_fault_in_an_op_is_found(yolo12n, images, monkeypatch):
    """The stock side doesn't run our ops: no reference model is needed for a fault in them."""
    right = ops.conv_bn_act

    def wrong(x, weight, *args, **kwargs):
        return right(x, weight * 1.001 if weight.shape[2] == 7 else weight, *args, **kwargs)

    monkeypatch.setattr(ops, "conv_bn_act", wrong)
    report = check_parity(yolo12n, images)
    assert names(report) == {row.layer for row in report.rows if row.geometry.startswith("7x7")}
    assert report.first_bad.layer == "model.6.m.0.0.attn.pe"


def test_scaled_weight_is_found_in_every_layer_of_yolo12n(yolo12n, images):
    patched = patch_model(copy.deepcopy(yolo12n))
    for block in patched.modules():
        if type(block).__name__ in ("FastConv", "FastDWConv"):
            block.conv.weight.data *= 1.001
    for mode in ("eval", "train"):
        report = check_parity(patched, images, mode=mode, reference=yolo12n)
        assert len(names(report)) == 113, f"{mode}: {names_of(report) - names(report)}"


def test_both_sides_with_the_same_nan_agree(tiny, pictures):
    tiny.get_submodule(FAULTY).conv.weight.data[1] = math.nan
    report = check_parity(tiny, pictures)
    assert report.ok, str(report)


# ---------------------------------------------------------------------------------------------------- nothing changes


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything that a check must leave as it was."""
    return {
        "tensors": {name: (id(t), t.clone()) for name, t in [*model.named_parameters(), *model.named_buffers()]},
        "grads": {
            name: None if p.grad is None else (id(p.grad), p.grad.clone()) for name, p in model.named_parameters()
        },
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "modules": {
            name: (type(m), m.training, sorted(vars(m)), [list(v) for k, v in vars(m).items() if "_hooks" in k])
            for name, m in model.named_modules()
        },
        "rng": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "random": random.getstate(),
        "flags": (
            torch.backends.cudnn.allow_tf32, torch.backends.cudnn.conv.fp32_precision,
            torch.backends.cudnn.rnn.fp32_precision, torch.backends.cuda.matmul.allow_tf32,
            torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic,
            torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_default_dtype(),
        ),
    }  # fmt: skip


def assert_equal_state(a: dict[str, object], b: dict[str, object]) -> None:
    for key in a:
        if key in ("tensors", "grads"):
            assert a[key].keys() == b[key].keys()
            for name, before in a[key].items():
                after = b[key][name]
                assert (before is None) == (after is None), f"{key} {name}"
                if before is not None:
                    assert before[0] == after[0] and torch.equal(before[1], after[1]), f"{key} {name}"
        elif key == "rng":
            assert torch.equal(a[key], b[key])
        else:
            assert a[key] == b[key], key


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_left_behind(tiny, pictures, mode, patched, training):
    if patched:
        patch_model(tiny)
    calls = []
    hooked = tiny.get_submodule(FAULTY)
    hooked.register_forward_hook(lambda *args: calls.append("forward"))
    hooked.register_full_backward_hook(lambda *args: calls.append("backward"))
    tiny.model[0].conv.register_forward_pre_hook(calls.append)
    tiny.train(training)
    tiny.model[1].bn.eval()
    for parameter in tiny.model[2].parameters():
        parameter.requires_grad = False
    for parameter in tiny.model[3].parameters():
        parameter.grad = torch.rand_like(parameter)
    before, given = state_of(tiny), pictures.clone()
    report = check_parity(tiny, pictures, mode=mode)
    assert report.ok, str(report)
    assert_equal_state(before, state_of(tiny))
    assert torch.equal(pictures, given)
    assert not calls, "the user's hooks were called"
    kernels = {row.layer: row.kernel for row in report.rows}
    assert "stock: conv has hooks" in kernels["model.0"] and kernels[FAULTY] == "ATen (cpu)"


def test_hooks_that_cannot_be_copied(tiny, pictures):
    class Uncopyable:
        def __call__(self, *args):
            raise AssertionError("a user's hook was called")

        def __deepcopy__(self, memo):
            raise AssertionError("a user's hook was copied")

    tiny.get_submodule(FAULTY).register_forward_hook(Uncopyable())
    assert check_parity(tiny, pictures, mode="train").ok


def test_nothing_is_left_behind_after_an_error(tiny):
    batch = torch.rand(1, 5, 32, 32)
    before = state_of(tiny)
    with pytest.raises(RuntimeError):  # stock's own: 5 channels for a model of 3
        check_parity(tiny, batch, mode="train")
    assert_equal_state(before, state_of(tiny))


@pytest.mark.parametrize("newer", [False, True])
def test_tf32_switch_is_pinned_and_put_back(tiny, pictures, monkeypatch, newer):
    cudnn = torch.backends.cudnn
    seen = []
    right = ops.conv_bn_act
    monkeypatch.setattr(
        ops,
        "conv_bn_act",
        lambda *a, **k: (seen.append(cudnn.conv.fp32_precision == "tf32"), right(*a, **k))[1],
    )
    before = (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    try:
        if newer:  # convolutions set apart from RNNs: the older switch can't be read then
            cudnn.conv.fp32_precision = "ieee"
        state = (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
        for allowed in (False, True):
            seen.clear()
            report = check_parity(tiny, pictures, allow_tf32=allowed)
            assert seen and set(seen) == {allowed}
            assert f"allow_tf32={allowed}" in report.environment["TF32"]
            assert (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) == state
    finally:
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = before
    assert cudnn.allow_tf32 is True


def test_callers_modes_do_not_reach_the_check(tiny, pictures):
    expected = check_parity(tiny, pictures, mode="train").to_dict()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert check_parity(tiny, pictures, mode="train").to_dict() == expected
    with torch.inference_mode():
        batch = pictures.clone()
        assert check_parity(tiny, batch, mode="train").to_dict() == expected


# ------------------------------------------------------------------------------------------------------------ reports


def test_report_as_text_json_and_markdown(tiny, pictures):
    patched = patch_model(copy.deepcopy(tiny))
    patched.get_submodule(FAULTY).conv.weight.data[1] = math.nan
    bad = check_parity(patched, pictures, mode="train", reference=tiny)
    good = check_parity(tiny, pictures)
    for report, verdict in ((bad, "BROKEN"), (good, "parity")):
        values = json.loads(report.to_json())
        assert values["ok"] is report.ok is (verdict == "parity")
        assert len(values["layers"]) == len(report.rows)
        assert {"torch", "ultralytics", "CUDA", "cuDNN"} <= set(
            values["environment"]["versions"].replace(",", "").split()
        )
        assert values["summary"].startswith(verdict)
        row = values["layers"][0]
        assert (
            row["ours"]["max"] >= 0
            and row["stock"]["l2"] >= 0
            and row["limit"]["max"] > 0
            and row["ratio"] > 0
        )
        markdown = report.to_markdown()
        assert markdown.startswith(f"# Layer-by-layer check: {verdict}") and values["summary"] in markdown
        table = [line for line in markdown.splitlines() if line.startswith("|")]
        assert len(table) == 2 + sum(
            len(list(part)) for part in (report.layers(), report.larger_blocks(), report.outputs)
        )
        assert len({line.count("|") for line in table}) == 1
        text = str(report)
        assert text.splitlines()[-1] == report.summary()
        for layer in names_of(report):
            assert layer in text and layer in markdown
    assert json.loads(bad.to_json())["first_bad"] == {"layer": FAULTY, "quantity": "y"}
    assert json.loads(good.to_json())["first_bad"] is None
    line = next(line for line in str(bad).splitlines() if line.startswith(FAULTY))
    assert "BROKEN NaN or infinity differs" in line


def test_report_without_rows_is_no_parity(tiny):
    assert not ParityReport("eval", {}).ok
    assert "nothing was compared" in ParityReport("eval", {}).summary()


def test_progress_is_for_terminals(tiny, pictures, capsys):
    check_parity(tiny, pictures)
    assert "parity: layer" not in capsys.readouterr().err
    check_parity(tiny, pictures, progress=True)
    error = capsys.readouterr().err
    assert "layer 1 of" in error and FAULTY in error and error.endswith("\r\033[K")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "test"}, "mode must be one of eval, train, got 'test'"),
        ({"dtype": torch.float64}, "dtype must be one of"),
        ({"dtype": torch.float16, "mode": "train", "autocast": False}, "autocast"),
        ({"batch": torch.rand(3, 32, 32)}, r"\(3, 32, 32\)"),
        ({"batch": torch.zeros(1, 3, 32, 32, dtype=torch.uint8)}, "uint8"),
        ({"reference": nn.Linear(2, 2)}, "reference has no Conv named 'model.0'"),
    ],
)
def test_bad_arguments(tiny, arguments, message):
    with pytest.raises(ValueError, match=message):
        check_parity(tiny, **arguments)


def test_models_without_anything_to_compare(tiny, pictures, monkeypatch):
    with pytest.raises(ValueError, match="nothing to compare"):
        check_parity(nn.Linear(2, 2), pictures)
    with pytest.raises(TypeError, match="got str"):
        check_parity("yolo12n.pt")
    with pytest.raises(ValueError, match="fused on one side"):
        check_parity(copy.deepcopy(tiny).fuse(verbose=False), pictures, reference=tiny)
    monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
    with pytest.raises(ValueError, match="YOLO12_FASTCONV_DISABLE"):
        check_parity(tiny, pictures)


# -------------------------------------------------------------------------------------------------------- the command


def tiny_yaml(folder: Path) -> str:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(support.TINY))
    return str(path)


@pytest.fixture
def config(tmp_path):
    return tiny_yaml(tmp_path)


def test_command_prints_the_table_and_returns_0(config, tmp_path, capsys):
    files = [tmp_path / "report.json", tmp_path / "report.md"]
    state = torch.get_rng_state()
    status = main(
        [
            f"model={config}",
            "imgsz=64",
            "mode=train",
            "bf16",
            "--json",
            str(files[0]),
            f"--markdown={files[1]}",
        ]
    )
    assert status == 0
    assert torch.equal(torch.get_rng_state(), state)
    text = capsys.readouterr().out
    assert FAULTY in text and "random weights, seed 0" in text and "bus.jpg (2 in the batch)" in text
    values = json.loads(files[0].read_text())
    assert values["ok"] and values["mode"] == "train" and "bfloat16" in values["environment"]["precision"]
    assert values["environment"]["input"] == "2 × 3 × 64 × 64"
    assert "| " + FAULTY in files[1].read_text()


def test_command_on_a_detector(tmp_path, capsys):
    """Letterboxed to a rectangle as predict does, fused, in half."""
    status = main(["model=yolo12n.yaml", "imgsz=96", "quantize=16", "fuse=True", "seed=3", "conf=0.5"])
    text = capsys.readouterr().out
    assert status == 0, text
    assert (
        "input: 1 × 3 × 96 × 96" in text
        or "input: 1 × 3 × 96 × 72" in text
        or "input: 1 × 3 × 96 × 64" in text
    )
    assert "fused" in text and "float16" in text and "boxes after NMS" in text


def test_command_returns_1_for_a_fault(config, monkeypatch, capsys):
    right = ops.conv_bn_act
    monkeypatch.setattr(ops, "conv_bn_act", lambda x, weight, *a, **k: right(x, weight * 1.001, *a, **k))
    assert main([f"model={config}", "imgsz=32"]) == 1
    assert "BROKEN" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model=FILE is missing"),
        (["model=nowhere.pt"], "model=nowhere.pt: no such file"),
        (["model=nowhere.yaml"], "model=nowhere.yaml: no such file"),
        (["model=yolo12n.onnx"], "must be a .pt or .yaml file"),
        (["model={config}", "sauce=bus.jpg"], "unknown key 'sauce'; the keys are model, source, batch"),
        (["model={config}", "bus.jpg"], "'bus.jpg' is not KEY=VALUE"),
        (["model={config}", "--xml", "x"], "unknown option '--xml'"),
        (["model={config}", "--json"], "--json needs a file name"),
        (["model={config}", "--json", "{tmp}/no/x.json"], "there is no folder"),
        (["model={config}", "source={tmp}/nothing.jpg"], "no such picture or folder"),
        (["model={config}", "source={tmp}/empty"], "no picture in this folder"),
        (["model={config}", "source={tmp}/broken.jpg"], "not a picture"),
        (["model={config}", "source="], "source= is empty"),
        (["model={config}", "imgsz=big"], "imgsz=big: imgsz must be a positive number"),
        (["model={config}", "imgsz=1,2,3"], "imgsz=1,2,3"),
        (["model={config}", "mode=test"], "mode=test: mode must be eval or train"),
        (["model={config}", "quantize=8"], "quantize=8: quantize must be 16 or 32"),
        (["model={config}", "half=maybe"], "half=maybe: half must be True or False"),
        (["model={config}", "half=True", "dtype=bf16"], "'dtype=bf16' contradicts"),
        (["model={config}", "conf=1.5"], "conf=1.5: conf must be a number from 0 to 1"),
        (["model={config}", "batch=0"], "batch=0: batch must be a positive number"),
        (["model={config}", "fuse", "mode=train"], "no meaning for mode=train"),
        (["model={config}", "device=frog"], "device=frog: device must be"),
        (["model={config}", "device=9"], "device=9: torch sees"),
        (["model={tmp}/broken.pt"], "could not run"),
        (["model={tmp}/broken.yaml"], "could not run"),
    ],
)
def test_command_that_cannot_run_returns_2_with_one_line(config, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    for name in ("broken.jpg", "broken.pt", "broken.yaml"):
        (tmp_path / name).write_bytes(b"no such thing: [")
    arguments = [argument.format(config=config, tmp=tmp_path) for argument in arguments]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert message in lines[-1] and lines[-1].startswith("yolo12-fastconv parity: "), captured.err
    assert "Traceback" not in captured.err


def test_command_help_names_every_key(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(key in text for key in parity_cli._KEYS) and "--json" in text and "Exit status" in text


def test_bare_words_and_aliases():
    def dtype(*words: str) -> torch.dtype | None:
        return parity_cli._parse(["model=x.pt", *words]).dtype

    assert dtype() is None
    assert {dtype("quantize=16"), dtype("half=True"), dtype("half"), dtype("dtype=fp16")} == {torch.float16}
    assert {dtype("bf16"), dtype("dtype=bf16"), dtype("half=False", "bf16=True")} == {torch.bfloat16}
    assert {dtype("quantize=32"), dtype("dtype=fp32")} == {torch.float32}
    options = parity_cli._parse(["model=x.pt", "imgsz=[480, 640]", "mode=val", "tf32"])
    assert (options.imgsz, options.mode, options.tf32) == ((480, 640), "eval", True)


def test_folder_of_pictures_and_repeats(config, tmp_path):
    import cv2

    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(3):
        cv2.imwrite(str(folder / f"{i}.png"), np.random.randint(0, 256, (40, 50, 3), np.uint8))
    (folder / "notes.txt").write_text("no picture")
    report = parity_cli.run([f"model={config}", f"source={folder}", "imgsz=32"])
    assert report.environment["source"] == "0.png, 1.png, 2.png (3 in the batch)"
    assert report.environment["input"] == "3 × 3 × 32 × 32"
    report = parity_cli.run([f"model={config}", f"source={folder}", "imgsz=32", "batch=5"])
    assert report.environment["input"].startswith("5 × 3")


def test_script_is_the_command(config, capsys):
    import runpy

    script = runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "parity_check.py"))[
        "main"
    ]
    assert script([f"model={config}", "imgsz=32"]) == 0
    assert "parity:" in capsys.readouterr().out
    assert script(["model=nowhere.pt"]) == 2


def test_script_matrix(tmp_path, capsys):
    import runpy

    script = runpy.run_path(str(Path(__file__).resolve().parent.parent / "scripts" / "parity_check.py"))[
        "main"
    ]
    files = [str(tmp_path / "matrix.json"), str(tmp_path / "matrix.md")]
    assert script(["--matrix", "n", "imgsz=64", "--json", files[0], "--markdown", files[1]]) == 0
    values = json.loads(Path(files[0]).read_text())
    assert values["ok"] and len(values["rows"]) == 9
    assert {(row["precision"], row["mode"]) for row in values["rows"]} >= {
        ("bf16", "train"),
        ("fp16", "eval, fused"),
    }
    assert {row["layers"] for row in values["rows"]} == {113}
    assert Path(files[1]).read_text().count("| yolo12n |") == 9
    assert script(["--matrix", "q"]) == 2 and script(["--matrix", "n", "model=x"]) == 2
    assert "scales are" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------- trained weights


@pytest.fixture(scope="module")
def detector():
    import trained
    from ultralytics import YOLO

    return YOLO(str(trained.trained_weights()))


@pytest.fixture(scope="module")
def shapes():
    import trained

    return trained.shapes_yaml().parent / "images" / "val"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("fuse", [False, True])
def test_trained_detector_finds_the_same_boxes(detector, shapes, precision, fuse, monkeypatch):
    """On real detections, with the rounding of a fused kernel: box by box."""
    monkeypatch.setattr(ops, "conv_bn_act", another_rounding)
    report = parity_cli.run(
        [f"model={detector.ckpt_path}", f"source={shapes}", "batch=16", f"dtype={precision}", f"fuse={fuse}"]
    )
    assert report.ok, f"{report.detections}\n{report.summary()}"
    found = report.detections
    assert found.stock >= 16 and found.matched >= 0.9 * found.stock
    assert "trained weights" in report.environment["model"]


def test_shifted_boxes_are_found(detector, shapes):
    """A head that moves every box by two pixels passes no box comparison."""
    patched = patch_model(copy.deepcopy(detector.model)).float()
    batch = parity_cli._pictures(parity_cli._parse([f"source={shapes}", "model=x.pt", "batch=8"]), detector)[
        0
    ]
    head = patched.model[-1]
    head.decode_bboxes = types.MethodType(
        lambda self, *args, **kwargs: type(self).decode_bboxes(self, *args, **kwargs) + 0.25, head
    )
    report = check_parity(patched, batch, reference=copy.deepcopy(detector.model).float())
    assert not report.ok and not names(report)
    # Of the head as a block, and of the model.
    assert report.first_bad.layer == "model.21" and report.first_bad.quantity == "y[0].boxes"
    assert {row.quantity for row in report.outputs if not row.ok} == {"output[0].boxes"}
    assert not report.detections.ok and "no counterpart" in str(report.detections)
    assert "BROKEN" in report.summary()


# ---------------------------------------------------------------------------------------------------------------- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gpu_yolo12n_has_parity(cuda, yolo12n, dtype, mode):
    batch = natural_batch(2, 3, 320, 224)
    randomise_(yolo12n, batch)
    state = torch.cuda.get_rng_state()
    flags = torch.backends.cudnn.allow_tf32
    report = check_parity(yolo12n, batch, dtype=dtype, mode=mode, device=cuda)
    assert report.ok, str(report)
    assert torch.equal(torch.cuda.get_rng_state(), state) and torch.backends.cudnn.allow_tf32 is flags
    assert all("/" in row.kernel for row in report.rows), "a layer ran without a kernel of the library"
    assert next(yolo12n.parameters()).device.type == "cpu"
    if dtype is torch.float32:
        assert max(row.comparison.ours[1] for row in report.rows) < 1e-5


@pytest.mark.gpu
def test_gpu_tf32_on_both_sides(cuda, yolo12n):
    batch = natural_batch(2, 3, 320, 224)
    randomise_(yolo12n, batch)
    exact, rounded = (
        check_parity(yolo12n, batch, device=cuda, allow_tf32=allowed) for allowed in (False, True)
    )
    assert exact.ok and rounded.ok, str(rounded)

    def largest(report, side):
        return max(getattr(row.comparison, side)[1] for row in report.rows)

    for side in ("ours", "stock"):
        assert largest(rounded, side) > 10 * largest(exact, side), f"{side} does not follow the switch"


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_gpu_trained_detector_finds_the_same_boxes(cuda, detector, shapes, precision):
    report = parity_cli.run(
        [f"model={detector.ckpt_path}", f"source={shapes}", "batch=40", f"dtype={precision}"]
    )
    assert report.ok, str(report)
    assert report.detections.stock >= 40 and report.detections.matched >= 0.9 * report.detections.stock
