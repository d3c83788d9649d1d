# SPDX-License-Identifier: Apache-2.0
"""Inside the emulating process: whole steps of amp_ir, on PyTorch tensors of the host."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import tvm
import tvm_ffi

import amp_ir
from amp_ir import pipeline
from amp_ir.api.replay import overflow_finder
from amp_ir.host import native
from amp_ir.ir import target as targets
from amp_ir.ir.executable import Executable
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.runtime import program, program_input
from amp_ir.runtime.step import CompiledStep, CompileReport
from amp_ir.vm import build as build_stage
from cuda_emulator import device

ARCH = device.ARCH


def compile_step(mod: amp_ir.StepModule, **options: Any) -> CompiledStep:
    """As `amp_ir.compile`, for the emulated GPU; model and batch stay PyTorch's CPU tensors."""
    target = targets.cuda(ARCH)
    planned = pipeline.lower(mod, target=target, **options)
    return load_step(mod, planned, build_stage.compile_executable(planned, target))


def load_step(mod: amp_ir.StepModule, planned: PlannedStep, built: Any) -> CompiledStep:
    """A compiled step, ready to run."""
    vm = tvm.relax.VirtualMachine(built, device.device())
    executable = Executable(vm, device.device(), 0, built)
    signature = planned.signature(mod.signature)
    running = EmulatedProgram(executable, planned.plan, signature, mod.state, checks=planned.checks)
    report = CompileReport({}, 0, planned.plan, planned.dispatched)
    finder = overflow_finder(mod, running, "fast")
    return CompiledStep(mod, running, report, lambda stage: f"not asked for: {stage}", finder)


class EmulatedProgram(program.Program):
    """A program whose tensors the emulated device shares; its arena starts as NaN."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with _sharing():
            super().__init__(*arguments, **options)
        if self._arena._memory is not None:
            self._arena._memory.fill_(0xFF)

    def run(self, batch: Any, **options: Any) -> list[torch.Tensor]:
        """One step."""
        with _sharing():
            return super().run(batch, **options)


# A graph reads the memory of its recording, which must not go back to PyTorch before.
_kept: list[Any] = []


@contextlib.contextmanager
def _sharing() -> Iterator[None]:
    with (
        mock.patch.object(program, "flat_view", shared),
        mock.patch.object(program_input, "flat_view", shared),
    ):
        yield


def shared(tensor: torch.Tensor) -> Any:
    """A flat view of a tensor, of physical dtype, as one of the device's."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        flat = flat.new_empty(1)
    physical = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}.get(flat.dtype)
    view = device.share(flat if physical is None else flat.view(physical))
    _kept.append(view)
    return view


# Stand-ins for libraries: what their functions promise, computed by PyTorch on the host.


def register_libraries() -> None:
    """Put the stand-ins in the places of the CUDA libraries' functions."""
    for name in _own_functions():
        function = _VERBS[name.rpartition(".")[2]]
        tvm_ffi.register_global_func(name, function, override=True)


def restore_libraries() -> None:
    """Put amp_ir's own functions back, which call cuBLASLt and PyTorch, or fakes of those."""
    for name, function in _own_functions().items():
        tvm_ffi.register_global_func(name, function, override=True)


@functools.cache
def _own_functions() -> dict[str, Any]:
    """amp_ir's own functions that the stand-ins replace; first called before they do."""
    native.load()
    names = [
        f"amp_ir.{library}.{verb}" for library in ("cublaslt", "torch_cuda") for verb in _VERBS
    ]
    # Each library has some of the verbs, and steps call what is there.
    found = {name: tvm_ffi.get_global_func(name, allow_missing=True) for name in names}
    return {name: function for name, function in found.items() if function is not None}


def _strided(tensor: Any, shape: Any, strides: Any) -> torch.Tensor:
    return torch.as_strided(_host(tensor), tuple(shape), tuple(strides))


def _host(tensor: Any) -> torch.Tensor:
    """A tensor of the device as PyTorch's, in the same memory."""
    dtype = getattr(torch, str(tensor.dtype))
    count = math.prod(tensor.shape)
    nbytes = max(count, 1) * dtype.itemsize
    memory = (ctypes.c_uint8 * nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=dtype, count=count).reshape(tuple(tensor.shape))


def _matmul(a, b, bias, a_shape, a_strides, b_shape, b_strides, shape, strides, finish, out):
    left, right = _strided(a, a_shape, a_strides), _strided(b, b_shape, b_strides)
    assert finish.removesuffix("+tf32") == "none", finish
    place = _strided(out, shape, strides)
    shift = None if bias is None else _host(bias)

    def work() -> None:
        product = left.float() @ right.float()
        place.copy_(product if shift is None else product + shift.float())

    device.enqueue(work)


def _convolution(compute: Callable[..., torch.Tensor]) -> Callable[..., None]:
    def call(a, b, a_shape, a_strides, b_shape, b_strides, *rest):
        shape, strides, stride, padding, dilation, groups, out = rest
        left, right = _strided(a, a_shape, a_strides), _strided(b, b_shape, b_strides)
        place = _strided(out, shape, strides)
        options = {
            "stride": tuple(stride),
            "padding": tuple(padding),
            "dilation": tuple(dilation),
            "groups": int(groups),
        }

        def work() -> None:
            place.copy_(compute(left.float(), right.float(), tuple(shape), options))

        device.enqueue(work)

    return call


def _conv(data, weight, _shape, options):
    return torch.conv2d(data, weight, None, **options)


def _conv_backward_input(grad, weight, shape, options):
    return torch.nn.grad.conv2d_input(shape, weight, grad, **options)


def _conv_backward_weight(grad, data, shape, options):
    return torch.nn.grad.conv2d_weight(data, shape, grad, **options)


def _probabilities(q, k, is_causal, scale):
    """Scores, in float32, and their logarithm of the sum of exponentials."""
    scores = q.float() @ k.float().mT * scale
    if is_causal:
        rows, columns = scores.shape[-2:]
        keep = torch.ones(rows, columns, dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp(), lse


def _views(tensors, layouts):
    pairs = zip(layouts[::2], layouts[1::2], strict=True)
    return [_strided(one, *layout) for one, layout in zip(tensors, pairs, strict=True)]


def _place_rows(out, value):
    """Write [n, h, s, d] as [n, s, h, d], dense."""
    rows = value.transpose(1, 2)
    _host(out).view(rows.shape).copy_(rows)


def _attention(q, k, v, *rest):
    *layouts, is_causal, scale, out, lse = rest
    queries, keys, values = _views((q, k, v), layouts)

    def work() -> None:
        found, logarithms = _probabilities(queries, keys, is_causal, scale)
        _place_rows(out, found @ values.float())
        _host(lse).view(logarithms.shape).copy_(logarithms)

    device.enqueue(work)


def _attention_backward(grad, q, k, v, out, _lse, *rest):
    *layouts, is_causal, scale, grad_q, grad_k, grad_v = rest
    views = _views((grad, q, k, v, out), layouts)

    def work() -> None:
        above, queries, keys, values, made = (one.float() for one in views)
        found, _ = _probabilities(queries, keys, is_causal, scale)
        inner = above @ values.mT - (above * made).sum(-1, keepdim=True)
        scores = found * inner * scale
        _place_rows(grad_q, scores @ keys)
        _place_rows(grad_k, scores.mT @ queries)
        _place_rows(grad_v, found.mT @ above)

    device.enqueue(work)


def _with_workspace(symbol: str, _workspace: Any, *arguments: Any) -> None:
    tvm_ffi.get_global_func(symbol)(*arguments)


_VERBS = {
    "matmul": _matmul,
    "conv": _convolution(_conv),
    "conv_backward_input": _convolution(_conv_backward_input),
    "conv_backward_weight": _convolution(_conv_backward_weight),
    "attention": _attention,
    "attention_backward": _attention_backward,
    "with_scratch": _with_workspace,
}
