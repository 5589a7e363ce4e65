"""Autograd of the ops: kernels that `ops.py` registers under the dispatcher's Autograd key and calls in eager mode.

Written by hand instead of through ``torch.library.register_autograd``, whose generic wrapper looks up the schema's 18
arguments at every call: that took longer than the convolutions of a small model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from yolo12_fastconv import _aten_maps, _library, _recompute, _side_stream, _slices, _weight_casts, reference

_ops = torch.ops.yolo12_fastconv
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_is_deterministic = torch._C._get_deterministic_algorithms
_fills_memory = torch._C._get_deterministic_fill_uninitialized_memory
_set_fills_memory = torch._C._set_deterministic_fill_uninitialized_memory

# Positions of the differentiable arguments, the same in both forward ops; the residual comes after them.
_DIFFERENTIABLE = 5  # x, weight, bias, bn_weight, bn_bias
_RESIDUAL = {"conv_bn_act": 8, "conv_bn_act_train": 6}
# Arguments of conv_bn_act_train; those of its twin that moves the running statistics follow, then where to write y.
_TRAIN_ARGUMENTS = 14
_OUT = 18
_CAST = 19  # and the weight in the compute dtype
_ACT, _DTYPE = 11, 12  # of conv_bn_act_train
_GEOMETRY_ACT = 4  # of what follows the residual: stride, padding, dilation, groups, act, dtype, allow_tf32
_IDENTITY = reference.ACTIVATIONS["identity"]


def call_op(op: Callable[..., Any], *arguments: Any) -> Any:
    """``op(*arguments)`` below autograd, and without torch's filling of the memory that the op allocates.

    Under ``torch.use_deterministic_algorithms(True)`` torch fills every uninitialised tensor with NaN, so that reading
    it gives the same result each time (``torch.utils.deterministic.fill_uninitialized_memory``). The ops write all of
    what they allocate before they read it, and the fills took a tenth of the GPU time of a training step. The switch is
    one for all threads: while an op runs, tensors that another thread allocates are not filled either. Whoever found it
    on puts it back on.
    """
    if not (_is_deterministic() and _fills_memory()):
        if torch.is_inference_mode_enabled():  # below autograd already
            return op(*arguments)
        with _BelowAutograd():
            return op(*arguments)
    _set_fills_memory(False)
    try:
        with _BelowAutograd():
            return op(*arguments)
    finally:
        _set_fills_memory(True)


def _needs_grad(tensors: Iterable[Any]) -> bool:
    """Whether gradients are recorded, and one of these, of which some may be no tensors, wants one."""
    if torch.is_grad_enabled():
        for t in tensors:
            if isinstance(t, Tensor) and t.requires_grad:
                return True
    return False


_USE_FORWARD = "differentiate conv_bn_act_train with create_graph=True instead"


def _refuse_gradient(op: str, tensors: Iterable[Any], remedy: str) -> None:
    """Raise if a gradient would be recorded of an op that writes to its argument."""
    if _needs_grad(tensors):
        raise RuntimeError(
            f"yolo12_fastconv: {op} has no gradient, since it writes to its argument: {remedy}"
        )


def conv_bn_act(*arguments: Any) -> Tensor:
    if torch.is_grad_enabled() and _needs_grad(
        (*arguments[:_DIFFERENTIABLE], arguments[_RESIDUAL["conv_bn_act"]])
    ):
        return _Inference.apply(*arguments)
    return call_op(_ops.conv_bn_act.default, *arguments)


def conv_bn_act_out(*arguments: Any) -> None:
    _refuse_gradient("conv_bn_act_out", arguments, "use conv_bn_act, or call it under torch.no_grad()")
    call_op(_ops.conv_bn_act_out.default, *arguments)


def conv_bn_act_train(*arguments: Any) -> tuple[Tensor, ...]:
    return _train(_ops.conv_bn_act_train.default, arguments)


def conv_bn_act_train_(*arguments: Any, memory: str = "fast") -> tuple[Tensor, ...]:
    return _train(_ops.conv_bn_act_train_.default, _with_cast(arguments), memory)


def _train(
    op: Callable[..., Any], arguments: tuple[Any, ...], memory: str = "fast", passes: int = 0
) -> tuple[Tensor, ...]:
    """The outputs of `op`, and behind them `x`, as often as `passes` says."""
    x, residual = arguments[0], arguments[_RESIDUAL["conv_bn_act_train"]]
    sources = (*arguments[:_DIFFERENTIABLE], residual)
    if not _needs_grad(sources):
        outputs = call_op(op, *arguments)
        return (*outputs, *(x,) * passes)
    x_source = None if memory == "fast" else _recompute.source_of(x, memory)
    # What gets no gradient goes in, and what needs none comes out, in one object each: `apply` looks at every argument
    # and result, which takes longer than a launch.
    others: list[Tensor] = []
    passed: Sequence[Tensor] = (x,) * passes
    if passes and x.requires_grad:
        if x_source is not None and x_source.shared is None:
            x_source = x_source._replace(shared=_recompute.Shared())
        y, *passed = _TrainingAndPass.apply(*sources, op, arguments, x_source, others, passes)
        if x_source is not None:
            _recompute.hand_on(x_source, passed)
    else:
        y = _Training.apply(*sources, op, arguments, x_source, others)
    # What lies in a concat is kept with it in any case.
    if memory != "fast" and residual is None and _out_of(arguments) is None:
        _recompute.note(y, (*others[:3], *arguments[3:5]), arguments[_DIFFERENTIABLE], arguments[_ACT])
    return (y, *others, *passed)


def bn_act(*arguments: Any) -> Tensor:
    if _needs_grad(arguments):
        return _OnceDifferentiable.apply(_ops.bn_act.default, *arguments)
    return call_op(_ops.bn_act.default, *arguments)


def conv_bn_act_train_and_pass(*arguments: Any, memory: str, passes: int) -> tuple[Tensor, ...]:
    """`conv_bn_act_train_`, and `x` behind its outputs: see `ops.conv_bn_act_train_and_pass`."""
    return _train(_ops.conv_bn_act_train_.default, _with_cast(arguments), memory, passes)


def _with_cast(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of ``conv_bn_act_train_``, and behind them the weight's cast if there is one."""
    if not _weight_casts.known() or len(arguments) != _CAST:
        return arguments
    return (*arguments, _weight_casts.cast_of(arguments[1], arguments[_DTYPE]))


def _out_of(arguments: tuple[Any, ...]) -> Tensor | None:
    """Argument `out` of ``conv_bn_act_train_``; its functional twin has none."""
    return arguments[_OUT] if len(arguments) > _OUT else None


def alias(out: Tensor) -> Tensor:
    """The memory of `out`, but no view of it: to autograd a new tensor, like any other result."""
    return out.data


def conv_bn_act_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _once_differentiable(_ops.conv_bn_act_backward.default, arguments)


def bn_act_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _once_differentiable(_ops.bn_act_backward.default, arguments)


def conv_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _once_differentiable(_ops.conv_backward.default, arguments)


def conv_backward_(*arguments: Any) -> None:
    _refuse_gradient("conv_backward_", arguments, _USE_FORWARD)
    call_op(_ops.conv_backward_.default, *arguments)


def conv_bn_act_train_backward(*arguments: Any) -> tuple[Tensor, ...]:
    return _once_differentiable(_ops.conv_bn_act_train_backward.default, arguments)


def conv_bn_act_train_backward_(*arguments: Any) -> tuple[Tensor, ...]:
    _refuse_gradient("conv_bn_act_train_backward_", arguments, _USE_FORWARD)
    return call_op(_ops.conv_bn_act_train_backward_.default, *arguments)


def concat_channels(tensors: list[Tensor], scales: list[int], dtype: torch.dtype) -> Tensor:
    if _needs_grad(tensors):
        return _Concat.apply(scales, dtype, *tensors)
    return call_op(_ops.concat_channels.default, tensors, scales, dtype)


def concat_channels_out(tensors: list[Tensor], scales: list[int], out: Tensor) -> None:
    _refuse_gradient(
        "concat_channels_out", (*tensors, out), "use concat_channels, or call it under torch.no_grad()"
    )
    call_op(_ops.concat_channels_out.default, tensors, scales, out)


def upsample_nearest(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """`x` magnified by 2, in `out` if there is one: see `ops.upsample_nearest`."""
    if _needs_grad((x,)):
        return _Upsample.apply(x, dtype, (out,))
    return _upsampled(x, dtype, out)


def _upsampled(x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if out is None:
        return call_op(_ops.concat_channels.default, [x], [2], dtype)
    call_op(_ops.concat_channels_out.default, [x], [2], out)
    return alias(out)


def upsample_nearest_backward(grad_y: Tensor) -> Tensor:
    if _needs_grad((grad_y,)):
        return _UpsampleBackward.apply(grad_y)
    return call_op(_ops.upsample_nearest_backward.default, grad_y)


def upsample_nearest_backward_(grad_y: Tensor, grad_x: Tensor) -> None:
    _refuse_gradient("upsample_nearest_backward_", (grad_y, grad_x), "use upsample_nearest_backward")
    call_op(_ops.upsample_nearest_backward_.default, grad_y, grad_x)


def detect_decode(
    boxes: list[Tensor],
    scores: list[Tensor],
    bin_values: Tensor | None,
    points: Tensor,
    steps: Tensor,
    xywh: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if _needs_grad((*boxes, *scores, bin_values, points, steps)):  # training decodes nothing
        return _aten_maps.detect_decode(boxes, scores, bin_values, points, steps, xywh)
    return call_op(_ops.detect_decode.default, boxes, scores, bin_values, points, steps, xywh)


def run_program(
    inputs: list[Tensor],
    constants: list[Tensor],
    program: Tensor,
    outputs: list[int],
    dtype: torch.dtype,
    allow_tf32: bool,
) -> list[Tensor]:
    if _needs_grad((*inputs, *constants)):
        raise RuntimeError("yolo12_fastconv: run_program has no gradient: call it under torch.no_grad()")
    results: list[Tensor] = call_op(
        _ops.run_program.default, inputs, constants, program, outputs, dtype, allow_tf32
    )
    return results


class _Concat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scales: list[int], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        y = call_op(_ops.concat_channels.default, list(tensors), scales, dtype)
        ctx.parts = [(t.shape[1], scale, t.dtype) for t, scale in zip(tensors, scales, strict=True)]
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        grads: list[Tensor | None] = []
        begin = 0
        for (channels, scale, dtype), wanted in zip(ctx.parts, ctx.needs_input_grad[2:], strict=True):
            grad: Tensor | None = None
            if wanted:
                grad = grad_y.narrow(1, begin, channels)  # a view, as from the backward of torch.cat
                if scale != 1:
                    grad = upsample_nearest_backward(grad)
                grad = grad.to(dtype)
            grads.append(grad)
            begin += channels
        return (None, None, *grads)


def join(buffer: Tensor, parts: list[Tensor]) -> Tensor:
    """`buffer`, in which `parts` lie one behind the other along the channels, as their concatenation."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in parts):
        whole = _Join.apply((buffer,), *parts)
        setattr(whole, _JOINED, True)
        return whole
    return buffer


_JOINED = "_fc_joined"


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: tuple[Tensor], *parts: Tensor) -> Tensor:
        ctx.widths = [t.shape[1] for t in parts]
        ctx.mails = [_slices.mail_of(t) for t in parts]
        return buffer[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        edges = ctx.next_functions
        # Views, as from the backward of torch.cat.
        parts = _slices.split(grad, ctx, ctx.widths, [node for node, _ in edges])
        grads: list[Tensor | None] = []
        for part, mail, edge, needed in zip(parts, ctx.mails, edges, ctx.needs_input_grad[1:], strict=True):
            given = not needed or (mail is not None and mail.post(part, edge))
            grads.append(None if given else part)
        return (None, *grads)


def halves(y: Tensor) -> tuple[Tensor, Tensor]:
    """``y.chunk(2, 1)`` of an even number of channels. The gradients are put together by `concat_channels`, where they
    do not lie side by side."""
    if torch.is_grad_enabled() and y.requires_grad:
        return _Halves.apply(y)
    first, second = y.chunk(2, 1)
    return first, second


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        first, second = y.chunk(2, 1)
        return first, second

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        whole = _slices.side_by_side(first, second, ctx)
        return concat_channels([first, second], [1, 1], first.dtype) if whole is None else whole


class _Upsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, out: tuple[Tensor | None]) -> Tensor:
        ctx.dtype = x.dtype
        ctx.mail = _slices.reads(x, ctx)
        return _upsampled(x, dtype, out[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        other = None if ctx.mail is None else ctx.mail.take()
        if other is not None and grad.dtype is other.dtype and _slices.own([other], ctx) is not None:
            upsample_nearest_backward_(grad, other)
            _slices.give(other, ctx.next_functions[0][0])
            return other, None, None
        grad_x = upsample_nearest_backward(grad).to(ctx.dtype)
        return grad_x if other is None else other + grad_x, None, None


class _UpsampleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad_y: Tensor) -> Tensor:
        return call_op(_ops.upsample_nearest_backward.default, grad_y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return concat_channels([grad], [2], grad.dtype)


def area_attention(
    qkv: Tensor, num_heads: int, area: int, scale: float, with_values: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if _needs_grad((qkv,)):
        return _AreaAttention.apply(qkv, num_heads, area, scale, with_values)
    return call_op(_ops.area_attention.default, qkv, num_heads, area, scale, with_values)


def area_attention_backward(*arguments: Any) -> Tensor:
    if _needs_grad(arguments):
        return _OnceDifferentiable.apply(_ops.area_attention_backward.default, *arguments)
    return call_op(_ops.area_attention_backward.default, *arguments)


class _AreaAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, num_heads: int, area: int, scale: float, with_values: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, values, logsumexp = call_op(
            _ops.area_attention.default, qkv, num_heads, area, scale, with_values
        )
        ctx.save_for_backward(qkv, out, logsumexp)
        ctx.mark_non_differentiable(*(() if with_values else (values,)), logsumexp)
        ctx.set_materialize_grads(False)  # no zero-filled gradients for what nobody used
        ctx.geometry = (num_heads, area, scale)
        return out, values, logsumexp

    @staticmethod
    def backward(
        ctx: Any, grad_out: Tensor | None, grad_values: Tensor | None, _: None
    ) -> tuple[Tensor | None, None, None, None, None]:
        nothing = (None, None, None, None)
        if grad_out is None and grad_values is None:
            return (None, *nothing)
        qkv, out, logsumexp = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True

            def forward(qkv: Tensor) -> tuple[Tensor, ...]:
                outputs = reference.area_attention(qkv, *ctx.geometry)
                return tuple(
                    y for y, g in zip(outputs, (grad_out, grad_values), strict=True) if g is not None
                )

            given = [g for g in (grad_out, grad_values) if g is not None]
            return (_differentiable_grads([qkv], (True,), given, forward)[0], *nothing)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        grad = call_op(
            _ops.area_attention_backward.default, grad_out, grad_values, qkv, out, logsumexp, *ctx.geometry
        )
        return (grad, *nothing)


class _Inference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        y = call_op(_ops.conv_bn_act.default, *arguments)
        x, weight, bias, bn_weight, bn_bias, mean, var, ctx.eps, residual, *ctx.geometry = arguments
        # Copies: training may move the running statistics before this call is differentiated.
        statistics = (None, None) if mean is None else (mean.clone(), var.clone())
        ctx.save_for_backward(x, weight, bias, bn_weight, bn_bias, *statistics)
        ctx.residual_dtype = None if residual is None else residual.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        *inputs, mean, var = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:_DIFFERENTIABLE]
        if torch.is_grad_enabled():  # create_graph=True

            def forward(x, weight, bias, bn_weight, bn_bias):
                return reference.conv_bn_act(
                    x, weight, bias, bn_weight, bn_bias, mean, var, ctx.eps, None, *ctx.geometry[:-1]
                )

            grads = _differentiable_grads(inputs, wanted, grad_y, forward)
        elif (
            mean is None
            and ctx.geometry[_GEOMETRY_ACT] == _IDENTITY
            and (branches := _branches(ctx, inputs[1], inputs[2])) is not None
        ):
            # Of a level's part of a larger gradient both branches would make a copy.
            if not grad_y.is_contiguous(memory_format=torch.channels_last):
                grad_y = call_op(_ops.concat_channels.default, [grad_y], [1], grad_y.dtype)
            x, weight, bias = inputs[:3]
            grads = [
                *_conv_backward(branches, grad_y, x, weight, bias, ctx.geometry, wanted), None, None
            ]  # fmt: skip
        else:
            out = call_op(
                _ops.conv_bn_act_backward.default, grad_y, *inputs, mean, var, ctx.eps, *ctx.geometry, wanted
            )
            grads = _asked_for(out, wanted)
        return (
            *grads,
            None,
            None,
            None,
            _residual_grad(ctx, grad_y, _RESIDUAL["conv_bn_act"]),
            *[None] * len(ctx.geometry),
        )


class _Training(torch.autograd.Function):
    """Of both training ops, the functional one and the one that moves the running statistics: ``op(*arguments)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        bn_weight: Tensor | None,
        bn_bias: Tensor | None,
        residual: Tensor | None,
        op: Callable[..., Any],
        arguments: tuple[Any, ...],
        x_source: _recompute.Source | None,
        others: list[Tensor],
    ) -> Any:
        """`others` is filled with all results but the first."""
        y, *rest = call_op(op, *arguments)
        out = _out_of(arguments)
        if out is not None:
            y = alias(out)
        others += rest
        z, mean, var, *cast = rest
        cast_weight = cast[0] if cast and cast[0].numel() else None
        if len(arguments) > _CAST:
            cast_weight = arguments[_CAST] if arguments[_CAST] is not None else cast_weight
        kept = (weight, bias, bn_weight, bn_bias, z, mean, var, cast_weight)
        again = None
        if x_source is None:
            ctx.save_for_backward(x, *kept)
        else:
            ctx.save_for_backward(None, *kept, *x_source.tensors)
            again = x_source._replace(tensors=())
            if x_source.shared is not None:
                x_source.shared.readers += 1
        ctx.call = (
            arguments[_DIFFERENTIABLE],
            arguments[_RESIDUAL["conv_bn_act_train"] + 1 : _TRAIN_ARGUMENTS],
            again,
        )
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.reads_join = _JOINED in x.__dict__
        ctx.mail = _slices.reads(x, ctx)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        return _training_backward(ctx, grad_y)


class _TrainingAndPass(torch.autograd.Function):
    """`_Training` that also returns `x`, for whatever else reads it: its backward adds their gradients to its own."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # no zero-filled gradient where only one of the results was used
        return (_Training.forward(ctx, *inputs[:-1]), *(inputs[0],) * inputs[-1])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, *passed: Tensor | None) -> tuple[Any, ...]:
        others = [grad for grad in passed if grad is not None]
        if grad_y is None:
            if ctx.mail is not None and (grad := ctx.mail.take()) is not None:
                others.append(grad)
            return (_sum(others), *(None,) * (len(ctx.needs_input_grad) - 1))
        return (*_training_backward(ctx, grad_y, others), None)


def _sum(grads: Sequence[Tensor]) -> Tensor | None:
    """As autograd adds what comes to one tensor: of three, the last two first."""
    if len(grads) > 1:
        return grads[0] + _sum(grads[1:])  # type: ignore[operator]
    return grads[0] if grads else None


def _training_backward(ctx: Any, grad_y: Tensor, passed: Sequence[Tensor] = ()) -> tuple[Any, ...]:
    """`passed`: gradients to add to that of `x`; a concat's may come to them."""
    if ctx.mail is not None and (grad := ctx.mail.take()) is not None:
        passed = (*passed, grad)
    x, weight, bias, bn_weight, bn_bias, z, mean, var, cast_weight, *source = ctx.saved_tensors
    eps, geometry, again = ctx.call
    wanted = ctx.needs_input_grad[:_DIFFERENTIABLE]
    if again is not None:
        x = _recompute.again(_bn_act, tuple(source), again)
    if torch.is_grad_enabled():  # create_graph=True

        def forward(x, weight, bias, bn_weight, bn_bias):
            return reference.conv_bn_act_train(
                x, weight, bias, bn_weight, bn_bias, eps, None, *geometry[:-1]
            )[0]

        grads = _differentiable_grads([x, weight, bias, bn_weight, bn_bias], wanted, grad_y, forward)
        if passed and grads[0] is not None:
            grads[0] = _sum([grads[0], *passed])
    else:
        place = _slices.own(passed, ctx) if passed and wanted[0] else None
        added = _sum([grad for grad in passed if grad is not place])
        branches = _branches(ctx, weight, bias)
        if branches is not None and not (wanted[0] and _is_one_pass(x, weight, geometry)):
            grad_z, *others = call_op(
                _ops.bn_act_backward.default, grad_y, z, mean, var, bn_weight, bn_bias, eps,
                geometry[_GEOMETRY_ACT], (True, *wanted[3:]),
            )  # fmt: skip
            grads = _conv_backward(
                branches, grad_z, x, weight, bias, geometry, wanted, cast_weight, added, place
            )
            grads += _asked_for(tuple(others), wanted[3:])
        else:
            call = (
                grad_y, x, weight, bias, z, mean, var, bn_weight, bn_bias, eps, *geometry, wanted, cast_weight,
            )  # fmt: skip
            if place is None:
                out = call_op(_ops.conv_bn_act_train_backward.default, *call, added)
                grads = _asked_for(out, wanted)
            else:
                out = call_op(_ops.conv_bn_act_train_backward_.default, *call, place, added)
                grads = [place, *_asked_for(out, wanted)[1:]]
        if grads[0] is not None and (place is not None or (ctx.reads_join and not _slices.is_seen(x))):
            _slices.give(grads[0], ctx.next_functions[0][0])
    return (*grads, _residual_grad(ctx, grad_y, _DIFFERENTIABLE), None, None, None, None)


def _is_one_pass(x: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> bool:
    """Whether one kernel computes the gradients of x and of the weight, so that none is left for a branch."""
    if not (x.is_cuda and _library.load().loaded):
        return False
    *form, groups, _act, dtype, tf32 = geometry
    major, minor = torch.cuda.get_device_capability(x.device)
    in_one: bool = _ops.backward_in_one_pass.default(
        x.shape, weight.shape, *form, groups, dtype, tf32, 10 * major + minor
    )
    return in_one


def _branches(ctx: Any, weight: Tensor, bias: Tensor | None) -> _side_stream.Branches | None:
    """Where the gradients of weight and bias can be computed beside the others: only while a backward is captured."""
    if not ctx.needs_input_grad[1] or torch.is_grad_enabled():
        return None
    branches = _side_stream.current()
    if branches is None or not branches.takes(weight, bias if ctx.needs_input_grad[2] else None):
        return None
    return branches


def _conv_backward(
    branches: _side_stream.Branches,
    grad_z: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: tuple[Any, ...],
    wanted: tuple[bool, ...],
    cast_weight: Tensor | None = None,
    added: Tensor | None = None,
    place: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of x, weight and bias, the latter two in a branch.

    They are those of the ops that find all at once: bit for bit, but for float32 filters whose gradients cuDNN finds,
    which rounds otherwise when it is asked for one at a time.

    `added` comes to the gradient of x, which is added to `place` if there is one. The branch forks off before that
    gradient: behind it, it was slower (YOLO12m 23.1 against 22.8 ms).
    """
    *form, groups, _act, dtype, tf32 = geometry
    form = [*form, groups, dtype, tf32]

    def grads_of(mask: tuple[bool, ...], *more: Tensor | None) -> tuple[Tensor, ...]:
        return call_op(_ops.conv_backward.default, grad_z, x, weight, bias, *form, mask, cast_weight, *more)

    _, *grads = branches.run(lambda: grads_of((False, *wanted[1:3])), (grad_z, x, cast_weight))
    grad_x: Tensor | None = None
    if place is not None:
        call_op(_ops.conv_backward_.default, grad_z, x, weight, *form, cast_weight, place, added)
        grad_x = place
    elif wanted[0]:
        grad_x = grads_of((True, False, False), added)[0]
    return [grad_x, *_asked_for(tuple(grads), wanted[1:3])]


def _bn_act(*arguments: Any) -> Tensor:
    return call_op(_ops.bn_act.default, *arguments)


def _asked_for(grads: tuple[Tensor, ...], wanted: tuple[bool, ...]) -> list[Tensor | None]:
    return [grad if needed else None for grad, needed in zip(grads, wanted, strict=True)]


def _residual_grad(ctx: Any, grad_y: Tensor, position: int) -> Tensor | None:
    return grad_y.to(ctx.residual_dtype) if ctx.needs_input_grad[position] else None


def _differentiable_grads(
    inputs: list[Tensor | None],
    wanted: tuple[bool, ...],
    grad_y: Tensor | list[Tensor],
    forward: Callable[..., Tensor | tuple[Tensor, ...]],
) -> list[Tensor | None]:
    """Gradients as a differentiable function of everything saved: what ``create_graph=True`` asks for.

    Recomputes the op with `forward(*inputs)` from `reference.py`; slower than the kernels and right at any order. The
    saved tensors enter as themselves, so that the result hangs on their history.
    """
    device = (grad_y[0] if isinstance(grad_y, list) else grad_y).device
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        y = forward(*inputs)
        sources = [t for t, needed in zip(inputs, wanted, strict=True) if needed and t is not None]
        grads = iter(torch.autograd.grad(y, sources, grad_y, create_graph=True, allow_unused=True))
    return [next(grads) if needed else None for needed in wanted]


class _OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Callable[..., Any], *arguments: Any) -> Any:
        return call_op(op, *arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "yolo12_fastconv: the backward ops are not differentiable by themselves. "
            "Differentiate the forward op with create_graph=True instead."
        )


def _once_differentiable(
    op: Callable[..., tuple[Tensor, ...]], arguments: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    if _needs_grad(arguments):
        return _OnceDifferentiable.apply(op, *arguments)
    return call_op(op, *arguments)
