"""Blocks as programs: the same numbers as op by op, and never an old program.

Programs are for CUDA; here the CPU's tensors are let in, and ATen runs them.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import support
import torch
from torch import nn
from torch.library import opcheck
from ultralytics.nn.modules.block import A2C2f, AAttn, ABlock, Bottleneck, C2f, C3k, C3k2

from yolo12_fastconv import _program, ops, patch_model, programs
from yolo12_fastconv.patching import unpatch_modules

BLOCKS = {
    "Bottleneck": lambda: Bottleneck(16, 16, e=0.5),
    "C2f of odd width": lambda: C2f(16, 33, 2, True),
    "C3k2": lambda: C3k2(16, 32, 2),
    "C3k2 of C3k": lambda: C3k2(16, 32, 1, True),
    "C3k": lambda: C3k(16, 32, 2),
    "AAttn of areas": lambda: AAttn(16, 2, 4),
    "ABlock": lambda: ABlock(16, 2, 1.2, 4),
    "A2C2f": lambda: A2C2f(16, 64, 2, True, 4),
    "A2C2f with gamma": lambda: A2C2f(64, 64, 1, True, 1, True, 1.2),
    "A2C2f of C3k": lambda: A2C2f(16, 64, 1, False),
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(programs, "_is_served", lambda t: True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors: more threads only wait for one another
    yield
    torch.set_num_threads(threads)


def block(name: str, fused: bool = False) -> nn.Module:
    torch.manual_seed(0)
    made = support.patched_copy(support.uneven(BLOCKS[name]()).eval())
    if fused:
        model = support.build(support.TINY)
        model.model = nn.Sequential(made)
        model.fuse(verbose=False)
    return made


def picture(made: nn.Module, *size: int) -> torch.Tensor:
    channels = next(p.shape[1] for p in made.parameters() if p.dim() == 4)
    return torch.randn(*(size[:1] or (2,)), channels, *(size[1:] or (4, 6)))


def op_by_op(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "_is_served", lambda t: False)
        return made(x)


def has_program(made: nn.Module) -> bool:
    return any(text.startswith("a program") for text in programs.describe(made))


def learned(name: str = "C3k2 of C3k") -> tuple[nn.Module, torch.Tensor]:
    """A block, and an input for which it has a program."""
    made = block(name)
    x = picture(made)
    for _ in range(2):
        made(x)
    assert has_program(made)
    return made, x


@pytest.mark.parametrize("name", list(BLOCKS))
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_same_bits_as_op_by_op(name, fused, context):
    made = block(name, fused)
    with context():
        for _ in range(4):
            x = picture(made)
            expected = op_by_op(made, x)
            y = made(x)
            assert torch.equal(y, expected)
            assert y.stride() == expected.stride() and y.dtype is expected.dtype and not y.requires_grad
    assert has_program(made)


def test_a_program_is_one_op(monkeypatch):
    with torch.no_grad():
        made, x = learned()
        calls, call_op = [], ops._autograd.call_op
        monkeypatch.setattr(
            ops._autograd, "call_op", lambda op, *args: calls.append(op) or call_op(op, *args)
        )
        made(x)
    assert calls == [torch.ops.yolo12_fastconv.run_program.default]


def test_a_whole_model():
    model = patch_model(support.build("yolo12n.yaml"), inplace=False)
    with torch.inference_mode():
        for _ in range(4):
            x = torch.randn(1, 3, 64, 96)
            for ours, expected in zip(
                support.tensors(model(x)), support.tensors(op_by_op(model, x)), strict=True
            ):
                assert torch.equal(ours, expected)
    assert sum(has_program(module) for module in model.modules()) == 10  # 8 blocks, 2 branches of the head


def double_weight(made: nn.Module) -> None:
    made.cv2.conv.weight.mul_(2)


def double_data(made: nn.Module) -> None:
    made.cv2.conv.weight.data = made.cv2.conv.weight.data * 2


def move_statistics(made: nn.Module) -> None:
    made.cv1.bn.running_mean.add_(0.5)


def new_weight(made: nn.Module) -> None:
    made.cv2.conv.weight = nn.Parameter(made.cv2.conv.weight * 2)


def new_child(made: nn.Module) -> None:
    made.cv2.conv = copy.deepcopy(made.cv2.conv)


def another_eps(made: nn.Module) -> None:
    made.cv1.bn.eps = 0.5


def another_activation(made: nn.Module) -> None:
    made.cv2.act = nn.Identity()


def foreign_activation(made: nn.Module) -> None:
    made.cv2.act = nn.Hardswish()


def without_shortcut(made: nn.Module) -> None:
    made.m[0].m[0].add = False


def own_forward(made: nn.Module) -> None:
    forward = made.cv2.forward
    made.cv2.forward = lambda x: forward(x) + 1


def a_hook(made: nn.Module) -> None:
    made.m[0].cv1.register_forward_hook(lambda module, args, y: y + 1)


def a_dilation(made: nn.Module) -> None:
    conv = made.m[0].m[0].cv1.conv
    conv.dilation, conv.padding = (2, 2), (2, 2)


def less_channels(made: nn.Module) -> None:
    conv, bn = made.cv2.conv, made.cv2.bn
    conv.weight.data = conv.weight.data[:8]
    for name in ("weight", "bias", "running_mean", "running_var"):
        getattr(bn, name).data = getattr(bn, name).data[:8]


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (double_weight, True),
        (double_data, True),
        (move_statistics, True),
        (new_weight, False),
        (new_child, False),
        (another_eps, False),
        (another_activation, False),
        (foreign_activation, False),
        (without_shortcut, False),
        (own_forward, False),
        (a_hook, False),
        (a_dilation, False),
        (less_channels, False),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_changes_are_seen(change, kept):
    with torch.no_grad():
        made, x = learned()
        before = made(x)
        change(made)
        expected = op_by_op(made, x)
        if change is not new_child:
            assert expected.shape != before.shape or not torch.equal(expected, before)
        for _ in range(4):
            assert torch.equal(made(x), expected)
            assert has_program(made) is kept or not kept
        fits = change not in (foreign_activation, own_forward, a_hook)
        assert has_program(made) is fits


def test_a_changed_dtype_is_an_error_as_before():
    with torch.no_grad():
        made, x = learned()
        made.cv2.conv.weight.data = made.cv2.conv.weight.data.double()
        with pytest.raises(RuntimeError, match="type"):
            made(x)


def test_training_and_gradients_do_not_use_it():
    with torch.no_grad():
        made, x = learned()
    text = programs.describe(made)
    made.train()
    y = made(x)
    y.sum().backward()
    assert made.cv2.conv.weight.grad is not None
    made.eval()
    made(x).sum().backward()
    assert programs.describe(made) == text
    with torch.no_grad():
        assert torch.equal(made(x), op_by_op(made, x))


def test_training_mode_without_gradients_moves_statistics():
    with torch.no_grad():
        made, x = learned()
        made.train()
        mean = made.cv1.bn.running_mean.clone()
        for _ in range(3):
            made(x)
            assert not torch.equal(mean, made.cv1.bn.running_mean)
            mean = made.cv1.bn.running_mean.clone()
    assert not has_program(made)


def test_autocast_modes_and_switches_do_not_use_it(monkeypatch):
    monkeypatch.setattr(programs, "_plans", {})  # looked up by every call that could have a program
    made, x = block("C3k2"), picture(block("C3k2"))
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            made(x)
        with support.OpLog():
            made(x)
        with torch.device("cpu"):
            made(x)
        monkeypatch.setenv("YOLO12_FASTCONV_DISABLE", "1")
        made(x)
        monkeypatch.delenv("YOLO12_FASTCONV_DISABLE")
        made(x.to_mkldnn().to_dense()[:0])
        assert not programs._plans
        made(x)
    assert programs._plans


def test_kinds_of_input_are_bounded_and_apart():
    made = block("C3k2")
    with torch.no_grad():
        for width in range(3, 3 + 3 * programs._MAX_SIGNATURES):
            x = picture(made, 1, 4, width)
            for _ in range(3):
                assert torch.equal(made(x), op_by_op(made, x))
            wide = x.contiguous(memory_format=torch.channels_last)
            assert torch.equal(made(wide), op_by_op(made, wide))
    assert 0 < len(programs.describe(made)) <= programs._MAX_SIGNATURES


def test_a_block_that_always_changes_is_left_alone():
    with torch.no_grad():
        made, x = block("C3k2"), picture(block("C3k2"))
        for i in range(4 * programs._MAX_CHANGES):
            made.note = i // 3  # a program takes two calls to learn
            made(x)
    assert not has_program(made)


def test_programs_belong_to_their_block():
    with torch.no_grad():
        made, x = learned()
        twin = copy.deepcopy(made)
        assert programs.describe(twin) == []
        assert torch.equal(twin(x), made(x))
        stock = pickle.loads(pickle.dumps(made))
        assert type(stock) is C3k2
        assert unpatch_modules(made) is not None
        assert type(made) is C3k2
        made(x)


def test_a_program_ends_with_its_block():
    with torch.no_grad():
        made, _ = learned()
    weight = weakref.ref(made.cv2.conv.weight)
    gc.disable()  # a cycle would keep the weights until it is found
    try:
        del made
        assert weight() is None
    finally:
        gc.enable()


def test_threads():
    made = block("C3k2")
    pictures = [picture(made, 1, 4, width) for width in range(3, 9)]
    with torch.no_grad():
        expected = [op_by_op(made, x) for x in pictures]

    def work(first: int) -> bool:
        with torch.no_grad():
            order = [*range(first, len(pictures)), *range(first)] * 5
            return all(torch.equal(made(pictures[i]), expected[i]) for i in order)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))
    assert len(programs.describe(made)) == len(pictures) and has_program(made)


def test_inputs_that_share_memory_have_no_program():
    head = nn.ModuleList([nn.Identity(), nn.Identity()])
    x = torch.randn(2, 8, 4, 4)
    weight = torch.randn(4, 4, 1, 1)

    def compute(a, b):
        return [ops.conv_bn_act(a, weight), ops.conv_bn_act(b, weight)]

    with torch.no_grad():
        for _ in range(3):
            programs.call(head, compute, x[:, :4], x[:, 4:])
            programs.call(head, compute, x[:, :4].contiguous(), x[:, 4:].contiguous())
    assert programs.describe(head) == [
        "its inputs differ in dtype or share memory",
        "an op reads a parameter that the block does not hold",
    ]


def test_an_input_is_no_result():
    identity = nn.Identity()
    x = torch.randn(1, 8, 4, 4)
    with torch.no_grad():
        for _ in range(3):
            assert programs.call(identity, lambda x: x, x) is x
            assert programs.call(identity, lambda x: x[:, :4], x).data_ptr() == x.data_ptr()
    assert not has_program(identity)


# ------------------------------------------------------------------------------------------------------------- the op


def example() -> tuple[list[torch.Tensor], list[torch.Tensor], list[int], list[int]]:
    """Inputs, constants, program and outputs of a convolution into the second half of a tensor."""
    x, weight = torch.randn(1, 4, 3, 5), torch.randn(8, 4, 1, 1)
    geometry = (1, 1, 0, 0, 1, 1, 1, 0)
    code = [
        *(_program.EXPECT, 0, 1, 4, 8, 4, 1, 1),
        *(_program.EMPTY, 1, 16, 3, 5, 240, 1, 80, 16),
        *(_program.VIEW, 1, 1, 8, 3, 5, 240, 1, 80, 16, 8),
        *(_program.CONVOLUTION, 2, 0, -1, 0, -1, -1, -1, -1, -1, _program.bits(0.0), *geometry),
        *(_program.CONVOLUTION, -1, 0, 2, 0, -1, -1, -1, -1, -1, _program.bits(0.0), *geometry),
        *(_program.FREE, 1, _program.FREE, 2, _program.RETURN, 3),
    ]
    y = ops.conv_bn_act(x, weight, act="identity")
    return [x], [weight], code, [*y.shape, *y.stride()]


def test_the_op():
    inputs, constants, code, outputs = example()
    program = torch.tensor(code)
    (y,) = ops.run_program(inputs, constants, program, outputs)
    assert torch.allclose(y, 2 * ops.conv_bn_act(inputs[0], constants[0], act="identity"))
    opcheck(
        torch.ops.yolo12_fastconv.run_program.default,
        (inputs, constants, program, outputs, torch.float32, False),
    )
    assert ops.run_program(inputs, [constants[0].double()], program, outputs) == []
    assert ops.run_program(inputs, [constants[0][:4]], program, outputs) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ([99], "instruction 99"),
        ([_program.RETURN, 7], "not there"),
        ([_program.EMPTY, 1, 2], "not there"),
        ([_program.FREE, 0, _program.RETURN, 0], "freed"),
    ],
)
def test_bad_programs(code, message):
    inputs, constants, _, outputs = example()
    with pytest.raises(RuntimeError, match=message):
        ops.run_program(inputs, constants, torch.tensor(code), outputs)


def test_it_has_no_gradient():
    inputs, constants, code, outputs = example()
    constants[0].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        ops.run_program(inputs, constants, torch.tensor(code), outputs)


FRESH = """
import sys, torch
from ultralytics.nn.modules.conv import Conv
from yolo12_fastconv import patch_model, programs
model = patch_model(torch.nn.Sequential(Conv(8, 8))).eval().requires_grad_(False)
programs._is_served = lambda t: True
with torch.inference_mode():
    for _ in range(3):
        model[0](torch.rand(1, 8, 4, 4))
        programs.call(model[0], lambda x: model[0](x), torch.rand(1, 8, 4, 4))
assert any("a program of" in text for text in programs.describe(model[0])), programs.describe(model[0])
sys.exit("torch._dynamo" in sys.modules)
"""


def test_recording_does_not_import_a_compiler():
    """Which takes seconds, in the second call of a process."""
    assert subprocess.run([sys.executable, "-c", FRESH], check=False).returncode == 0
