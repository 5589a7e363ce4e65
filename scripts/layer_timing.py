"""Times one Conv block on a GPU: ours and its peers on the same numbers, alternating. For scripts/benchmark.py."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import cases
import torch
import torch.nn.functional as F
from timing import Call, alternate, capture, use_tf32
from torch import Tensor

from yolo12_fastconv import blocks, ops

__all__ = ["alternate", "capture", "measure", "measure_ceilings", "menu_query", "use_tf32"]

PLANS = 5
"""cuDNN plans that are built and tried for a layer, in the order of its heuristics."""
TOLERANCE = 1e-2
"""Relative l2 distance from eager that makes a result wrong: above what rounding to bfloat16 gives (some 4e-3)."""


class Unsupported(Exception):
    """A contender has nothing for this layer; the message says why."""


def measure_ceilings(dtype: torch.dtype, replays: int) -> dict[str, float]:
    """TB/s of a large copy, read and written bytes counted, and TFLOP/s of an 8192 x 8192 x 8192 product in `dtype`."""
    size = 8192
    source = torch.randint(-(1 << 31), 1 << 31, (1 << 28,), dtype=torch.int32, device="cuda")
    copy = torch.empty_like(source)
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    # Not copy_: a graph's memory copy node moves 2.8 TB/s on an H200, a kernel 4.2.
    copied = alternate({"copy": capture(lambda: torch.neg(source, out=copy))}, replays)["copy"]["us"]
    multiplied = alternate({"product": capture(lambda: a @ b)}, replays)["product"]["us"]
    return {"tb_s": 2 * source.nbytes / copied / 1e6, "tflop_s": 2 * size**3 / multiplied / 1e6}


def measure(
    case: cases.Case, dtype: torch.dtype, peers: list[str], *, tf32: bool, replays: int
) -> dict[str, Any]:
    """Times in µs of ours and `peers` for one block: {"times": {name: {us, spread} or None}, "notes": {name: why}}.

    A contender that has nothing for the layer, fails, or returns something else than eager has no time but a note.
    """
    inputs = case.inputs(dtype, "cuda")
    weight = as_in_a_model(inputs.weight)
    # As fuse() leaves a block: batch norm in the weights, computed in float, and a bias.
    assert inputs.gamma is not None and inputs.beta is not None
    assert inputs.mean is not None and inputs.var is not None
    scale = inputs.gamma.float() / (inputs.var.float() + case.eps).sqrt()
    folded = (
        (weight.float() * scale.view(-1, 1, 1, 1)).to(dtype).contiguous(memory_format=torch.channels_last)
    )
    bias = (inputs.beta.float() - inputs.mean.float() * scale).to(dtype)

    def eager() -> Tensor:
        y = F.conv2d(inputs.x, folded, bias, case.stride, case.padding, case.dilation, case.groups)
        # Ultralytics' activations are in place.
        return F.silu(y, inplace=True) if case.act == "silu" else y

    arguments = inputs.eval_arguments() | {"x": as_in_a_model(inputs.x), "weight": weight}
    notes: dict[str, str] = {}
    facts: dict[str, dict[str, Any]] = {}
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    with torch.inference_mode():
        expected = eager().float()

        def distance(call: Call) -> float:
            return ((call().float() - expected).norm() / expected.norm()).item()

        def compiled() -> tuple[Call, dict[str, Any]]:
            torch._dynamo.reset()  # one shape after the other would end in a kernel for any shape, or in eager
            function = torch.compile(eager, mode="max-autotune-no-cudagraphs", dynamic=False)
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            return function, {"compile_s": round(time.perf_counter() - start, 2)}

        makers: dict[str, Callable[[], tuple[Call, dict[str, Any]]]] = {
            "ours": lambda: (
                lambda: ops.conv_bn_act(**arguments),
                {"kernel": ops.describe_kernel(**menu_query(case, dtype, tf32))},
            ),
            "eager": lambda: (eager, {}),
            "cudnn": lambda: _cudnn(case, inputs.x, folded, bias, tf32, distance),
            "compile": compiled,
        }
        for name in ("ours", *peers):
            try:
                call, facts[name] = makers[name]()
                error = distance(call)
                if not error < TOLERANCE:
                    raise Unsupported(f"wrong result: {error:.1e} from eager in relative l2")
                graphs[name] = capture(call)
            except Exception as problem:  # reported as a note: one contender must not end the run
                notes[name] = " ".join(str(problem).split())[:300] or type(problem).__name__
        times = alternate(graphs, replays)
    return {
        "times": {
            name: {**times[name], **facts[name]} if name in times else None for name in ("ours", *peers)
        },
        "notes": notes,
    }


def as_in_a_model(tensor: Tensor) -> Tensor:
    """A weight with the strides that a fused block gives it, or a picture with those that the op before returns."""
    return blocks.padded_channels_last(tensor) if tensor.shape[1] >= 8 else tensor


def menu_query(case: cases.Case, dtype: torch.dtype, tf32: bool) -> dict[str, Any]:
    """What `ops.describe_kernel` and `ops.kernel_candidates` ask for, on this GPU."""
    major, minor = torch.cuda.get_device_capability()
    return {
        "x_size": (case.batch, case.ci, case.h, case.w),
        "weight_size": (case.co, case.ci // case.groups, *case.kernel),
        "stride": case.stride,
        "padding": case.padding,
        "dilation": case.dilation,
        "groups": case.groups,
        "dtype": dtype,
        "tf32": tf32 and dtype is torch.float32,
        "capability": 10 * major + minor,
    }


# -------------------------------------------------------------------------------------------------------- the peers


def _cudnn(
    case: cases.Case, x: Tensor, weight: Tensor, bias: Tensor, tf32: bool, distance: Callable[[Call], float]
) -> tuple[Call, dict[str, Any]]:
    """cuDNN's convolution + bias + swish in one graph: the fastest right one of its first plans.

    Raises:
        Unsupported: the layer is depthwise, the package is missing, or no plan can be built or is right.
    """
    if case.groups > 1:
        raise Unsupported("fused graphs have no groups")
    try:
        import cudnn
    except ImportError as error:
        raise Unsupported(f"no nvidia-cudnn-frontend ({error}): pip install '.[bench]'") from None
    kind = {
        torch.float16: cudnn.data_type.HALF,
        torch.bfloat16: cudnn.data_type.BFLOAT16,
        torch.float32: cudnn.data_type.FLOAT,
    }[x.dtype]
    handle = _cudnn_handle(cudnn)
    graph = cudnn.pygraph(
        io_data_type=kind,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=handle,
    )
    y = torch.empty(case.out_size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    vector = bias.view(1, -1, 1, 1).as_strided((1, case.co, 1, 1), (case.co, 1, case.co, case.co))

    def tensor(value: Tensor, name: str) -> Any:
        strides = _nhwc_strides(value)
        return graph.tensor(name=name, dim=list(value.shape), stride=strides, data_type=kind)

    image, kernel, shift = tensor(x, "x"), tensor(weight, "weight"), tensor(vector, "bias")
    result = graph.conv_fprop(
        image=image,
        weight=kernel,
        padding=list(case.padding),
        stride=list(case.stride),
        dilation=list(case.dilation),
    )
    result = graph.add(a=result, b=shift)
    if case.act == "silu":
        result = graph.swish(input=result)
    result.set_output(True).set_data_type(kind).set_dim(list(y.shape)).set_stride(_nhwc_strides(y))
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    if x.dtype is torch.float32 and not tf32:
        # What PyTorch filters out for allow_tf32=False.
        graph.deselect_numeric_notes([cudnn.numerical_note.TENSOR_CORE])
    graph.check_support()
    pack = {image: x, kernel: weight, shift: vector, result: y}

    def call_of(index: int) -> Call:
        size = graph.get_workspace_size_plan_at_index(index)
        workspace = torch.empty(max(size, 1), dtype=torch.uint8, device=x.device)

        def call() -> Tensor:
            cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
            graph.execute_plan_at_index(pack, workspace, index=index, handle=handle)
            return y

        return call

    best: tuple[float, int, Call] | None = None
    problem, built = "no plan", 0
    for index in range(graph.get_execution_plan_count()):
        if built == PLANS:
            break
        try:
            graph.build_plan_at_index(index)
            call = call_of(index)
            y.fill_(float("nan"))  # a plan that writes nothing must not pass with the last one's output
            built += 1
            error = distance(call)
            if not error < TOLERANCE:
                raise Unsupported(f"wrong result: {error:.1e} from eager in relative l2")
            duration = alternate({"plan": capture(call)}, 3)["plan"]["us"]
        except Exception as failure:  # a plan that is not for this GPU or shape: the next one may be
            problem = str(failure)
            continue
        if best is None or duration < best[0]:
            best = (duration, index, call)
    if best is None:
        raise Unsupported(problem)
    return best[2], {"plan": best[1], "plans_tried": built}


def _nhwc_strides(value: Tensor) -> list[int]:
    """The strides of a channels_last tensor, spelled out: PyTorch's own are arbitrary along axes of size 1."""
    _, c, h, w = value.shape
    return [c * h * w, 1, c * w, c]


_handles: list[Any] = []


def _cudnn_handle(cudnn: Any) -> Any:
    if not _handles:
        _handles.append(cudnn.create_handle())
    return _handles[0]
