"""The kernels behind tests/test_gradient_sums.py: sums in the gradient of x, and results written into slices.

pytest -m gpu tests/test_gpu_gradient_sums.py
"""

from __future__ import annotations

import op_checks
import pytest
import support
import torch
from ultralytics import YOLO
from ultralytics.nn.modules.block import A2C2f, C2f, C3k2

from yolo12_fastconv import _places, _slices, unpatch_model
from yolo12_fastconv.patching import patch_modules

pytestmark = pytest.mark.gpu

OPS = torch.ops.yolo12_fastconv
# Name: channels in, channels out, height and width, kernel, stride, groups.
CASES = {
    "pointwise": (64, 32, 40, 1, 1, 1),
    "pointwise, many": (256, 768, 20, 1, 1, 1),
    "odd": (61, 37, 13, 1, 1, 1),
    "dense": (64, 64, 40, 3, 1, 1),
    "stride 2": (64, 96, 40, 3, 2, 1),
    "depthwise": (256, 256, 20, 3, 1, 256),
    "depthwise, small": (64, 64, 40, 7, 1, 64),
}
ERRORS = {"float16": 6e-4, "bfloat16": 5e-3, "float32": 5e-6}  # l2, of two roundings


def train_arguments(case: str, dtype: torch.dtype, device: torch.device):
    ci, co, size, kernel, stride, groups = CASES[case]
    torch.manual_seed(0)
    wide = torch.randn(4, 2 * ci, size, size, device=device).to(dtype, memory_format=torch.channels_last)
    weight = torch.randn(co, ci // groups, kernel, kernel, device=device) / (ci // groups * kernel**2) ** 0.5
    gamma, beta = torch.rand(2, co, device=device).unbind()
    geometry = ([stride] * 2, [kernel // 2] * 2, [1, 1], groups)
    return wide, (weight, None, gamma, beta, 1e-3, None, *geometry, 1, dtype, False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("sliced", [False, True])
def test_sum_in_the_gradient_of_x(cuda, case, precision, sliced):
    dtype = op_checks.PRECISIONS[precision]
    wide, arguments = train_arguments(case, dtype, cuda)
    x = wide[:, : wide.shape[1] // 2]
    added = torch.randn_like(wide)[:, wide.shape[1] // 2 :]
    if not sliced:
        x, added = (t.contiguous(memory_format=torch.channels_last) for t in (x, added))
    y, z, mean, var = OPS.conv_bn_act_train.default(x, *arguments)
    grad_y = torch.randn_like(y)
    weight, bias, gamma, beta, eps, _, *geometry = arguments
    mask = [True, True, False, True, True]

    def run(t: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        op_checks.poison([x, added, grad_y, z])
        call = (grad_y, x, weight, bias, z, mean, var, gamma, beta, eps, *geometry, mask, None, t)
        return OPS.conv_bn_act_train_backward.default(*call)

    with op_checks.numerics(tf32=False):
        plain, first, second = run(None), run(added), run(added)
    right = (
        OPS.conv_bn_act_train_backward.default(
            grad_y.cpu().double(), x.cpu().double(), weight.to(dtype).cpu().double(), bias, z.cpu().double(),
            mean.cpu().double(), var.cpu().double(), gamma.cpu().double(), beta.cpu().double(), eps, *geometry[:5],
            torch.float64, False, mask, None, added.cpu().double(),
        )[0].to(cuda)
    )  # fmt: skip
    error = float((first[0].double() - right).norm() / right.norm())
    assert error <= ERRORS[precision], f"{error:.1e}"
    for ours, again in zip(first, second, strict=True):
        assert torch.equal(ours, again)
    assert first[0].is_contiguous(memory_format=torch.channels_last)
    for ours, without in zip(first[1:], plain[1:], strict=True):
        assert torch.equal(ours, without)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("begin", [8, 3])
def test_result_in_a_slice(cuda, case, precision, begin):
    dtype = op_checks.PRECISIONS[precision]
    wide, arguments = train_arguments(case, dtype, cuda)
    x = wide[:, : wide.shape[1] // 2]
    expected = OPS.conv_bn_act_train_.default(x, *arguments, None, None, None, None)
    n, c, h, w = expected[0].shape
    buffer = torch.full((n, c + 16, h, w), 7.0, dtype=dtype, device=cuda).to(
        memory_format=torch.channels_last
    )
    out = buffer[:, begin : begin + c]
    made = OPS.conv_bn_act_train_.default(x, *arguments, None, None, None, None, out)
    assert torch.equal(out, expected[0]) and torch.equal(made[1], expected[1])
    assert (buffer[:, :begin] == 7).all() and (buffer[:, begin + c :] == 7).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("begin", [8, 3])
@pytest.mark.parametrize("own", [False, True], ids=["fastest", "own dgrad"])
def test_sum_in_place(cuda, case, precision, begin, own, monkeypatch):
    """In a slice, bit for bit what the functional op gives for the rounded sum of the two others, and nothing beside
    it is written."""
    if own:
        monkeypatch.setenv("YOLO12_FASTCONV_GRADIENTS", "own")
    dtype = op_checks.PRECISIONS[precision]
    wide, arguments = train_arguments(case, dtype, cuda)
    x = wide[:, : wide.shape[1] // 2].contiguous(memory_format=torch.channels_last)
    y, z, mean, var = OPS.conv_bn_act_train.default(x, *arguments)
    grad_y = torch.randn_like(y)
    weight, bias, gamma, beta, eps, _, *geometry = arguments
    mask = [True, True, False, True, True]
    call = (grad_y, x, weight, bias, z, mean, var, gamma, beta, eps, *geometry, mask, None)
    c = x.shape[1]
    buffer = torch.randn(x.shape[0], c + 16, *x.shape[2:], device=cuda).to(
        dtype, memory_format=torch.channels_last
    )
    more = torch.randn_like(x)
    with op_checks.numerics(tf32=False):
        for added in (None, more):
            filled = buffer.clone()
            place = filled[:, begin : begin + c]
            total = place.clone() if added is None else place + added
            expected = OPS.conv_bn_act_train_backward.default(*call, total)
            op_checks.poison([x, buffer, filled, more, grad_y, z, *expected])
            made = OPS.conv_bn_act_train_backward_.default(*call, place, added)
            assert made[0].numel() == 0
            assert torch.equal(place, expected[0])
            assert all(torch.equal(a, b) for a, b in zip(made[1:], expected[1:], strict=True))
            assert torch.equal(filled[:, :begin], buffer[:, :begin])
            assert torch.equal(filled[:, begin + c :], buffer[:, begin + c :])


BLOCKS = {  # with the input's channels
    "C2f": (lambda: C2f(64, 128, 2, True), 64),
    "C3k2 of C3k": (lambda: C3k2(128, 256, 1, True, 0.25), 128),
    "C3k2 of odd widths": (lambda: C3k2(64, 72, 1, True, 0.25), 64),
    "A2C2f": (lambda: A2C2f(128, 128, 2, True, 4), 128),
    "A2C2f of C3k": (lambda: A2C2f(192, 128, 2, False), 192),
    "A2C2f with gamma": (lambda: A2C2f(64, 64, 1, True, 1, True, 1.2), 64),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_in_place_bit_for_bit(cuda, name, dtype, monkeypatch):
    """The gradients of autograd's own sums, and from run to run."""
    make, channels = BLOCKS[name]
    torch.manual_seed(0)
    block = support.uneven(make()).to(cuda).train()
    patch_modules(block)
    x = torch.randn(4, channels, 20, 20, device=cuda).to(memory_format=torch.channels_last).requires_grad_()

    def grads() -> tuple[torch.Tensor, ...]:
        with torch.autocast("cuda", dtype, enabled=dtype is torch.float16):
            y = block(x)
        g = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        return torch.autograd.grad(y, [x, *block.parameters()], g)

    places = []
    own = _slices.own

    def counted(passed, node):
        place = own(passed, node)
        places.append(place is not None)
        return place

    with op_checks.numerics(tf32=False):
        monkeypatch.setattr(_slices, "own", counted)
        first, second = grads(), grads()
        assert any(places)
        monkeypatch.setattr(_slices, "own", lambda passed, node: None)
        expected = grads()
    for ours, again, theirs in zip(first, second, expected, strict=True):
        assert torch.equal(ours, again)
        if "odd" in name:  # rows that are not aligned are summed by other threads
            norm = theirs.double().norm()
            error = float((ours.double() - theirs.double()).norm() / norm) if norm else 0.0
            assert error <= (2e-3 if dtype is torch.float16 else 1e-5), f"{error:.1e}"
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_concats_between_layers_bit_for_bit(cuda, graph, monkeypatch):
    """Of a model: the gradients of copies and of autograd's own sums, and from run to run."""
    torch.manual_seed(0)
    model = support.uneven(YOLO("yolo12n.yaml").model).to(cuda).train().to(memory_format=torch.channels_last)
    pictures = [torch.rand(2, 3, 96, 160, device=cuda) for _ in range(3)]
    parameters = [p for p in model.parameters() if p.requires_grad]
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def steps() -> list[torch.Tensor]:
        model.load_state_dict(state)
        patch_modules(model, cuda_graph=graph)
        found = []
        for x in (*pictures, *pictures):
            with torch.autocast("cuda", torch.float16):
                y = model(x)
            loss = y["boxes"].float().square().mean() + y["scores"].float().square().mean()
            found += [loss.detach(), *torch.autograd.grad(loss, parameters)]
        unpatch_model(model)
        return found

    posted = []
    post = _slices.Mail.post

    def counted(self, *arguments):
        posted.append(post(self, *arguments))
        return posted[-1]

    monkeypatch.setattr(_slices.Mail, "post", counted)
    first, second = steps(), steps()
    assert sum(posted) >= 8
    monkeypatch.setattr(_places.Link, "fill", lambda self, index, layer, x: layer.run(x))
    assert all(
        torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, second, steps(), strict=True)
    )
