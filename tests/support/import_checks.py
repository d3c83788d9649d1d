# SPDX-License-Identifier: Apache-2.0
"""Trace a small function as the capture would, import it, evaluate it, compare with PyTorch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from tvm import relax

from amp_ir.capture.decompositions.attention import scaled_dot_product_attention
from amp_ir.capture.functional import FUSED_OPS
from amp_ir.capture.trace import capture_step
from amp_ir.importer.import_step import import_step
from amp_ir.ir.captured_step import CapturedInput, CapturedOutput, CapturedStep
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import Role, StepModule

# Ops with a converter that the capture decomposes today, as PyTorch does.
ALSO_FUSED = frozenset(
    """
    hardswish hardswish_backward hardsigmoid hardsigmoid_backward mish mish_backward
    log_sigmoid_forward log_sigmoid_backward softshrink hardshrink celu prelu _prelu_kernel
    _prelu_kernel_backward select_backward slice_backward select_scatter slice_scatter
    std var_mean roll tril triu masked_fill stack split unbind
    index_add eye linspace zeros_like ones_like new_full new_zeros squeeze t transpose square
    addmv dot mv repeat diagonal clamp_min clamp_max rsub floor_divide threshold argsort all
    unsafe_split reflection_pad1d reflection_pad2d reflection_pad1d_backward
    reflection_pad2d_backward replication_pad2d replication_pad3d
    """.split()
)


@functools.cache  # PyTorch looks through all its ops for the table, in half the time of a test.
def decompositions(whole: frozenset[str]) -> Mapping[Any, Callable[..., Any]]:
    """PyTorch's core decompositions without the ops that stay whole."""
    return {
        overload: function
        for overload, function in core_aten_decompositions().items()
        if overload.name().removeprefix("aten::").split(".")[0] not in whole
    }


class _VisibleStatistics(TorchDispatchMode):
    """Show what `native_batch_norm` writes without saying so, as the capture does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        aten = torch.ops.aten
        if func is not aten.native_batch_norm.default or not args[5] or args[3] is None:
            return func(*args, **(kwargs or {}))
        *results, mean, variance = aten._native_batch_norm_legit_functional.default(*args)
        args[3].copy_(mean)
        args[4].copy_(variance)
        return tuple(results)


@contextlib.contextmanager
def without_mkldnn() -> Iterator[None]:
    """Keep recurrent layers from becoming one opaque op.

    `torch.backends.mkldnn.flags` does this with a warning about TF32.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def traced(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    whole: frozenset[str] = FUSED_OPS,
) -> CapturedStep:
    """The function as a captured step, each input a BATCH input and each output a RESULT."""

    def visible(*tensors: torch.Tensor) -> Any:
        with _VisibleStatistics():
            return function(*tensors)

    with (
        without_mkldnn(),
        mock.patch.object(
            torch.nn.functional, "scaled_dot_product_attention", scaled_dot_product_attention
        ),
    ):
        first = make_fx(visible, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        with torch.no_grad():
            graph = make_fx(
                torch.func.functionalize(first, remove="mutations"),
                decomposition_table=decompositions(whole),
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
            )(*(x.detach() for x in inputs))
    graph.graph.eliminate_dead_code()
    output = next(node for node in graph.graph.nodes if node.op == "output")
    fields, structure = pytree.tree_flatten(output.args[0])
    output.args = (tuple(fields),)
    return CapturedStep(
        graph,
        tuple(CapturedInput(f"batch{i}", Role.BATCH, x) for i, x in enumerate(inputs)),
        tuple(CapturedOutput(f"result{i}", Role.RESULT) for i in range(len(fields))),
        flatten_batch=lambda batch, _named=None: list(batch),
        unflatten_results=lambda values: pytree.tree_unflatten(list(values), structure),
    )


def imported(
    function: Callable[..., Any], *inputs: torch.Tensor, whole: frozenset[str] = FUSED_OPS
) -> StepModule:
    """The function as a module, well formed."""
    mod = import_step(traced(function, inputs, whole=whole))
    relax.analysis.well_formed(mod.ir)
    return mod


def evaluated(function: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The results of the imported function."""
    return run(imported(function, *inputs), inputs)


def run(mod: StepModule, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a module for its batch, with the random state that it holds, if any."""
    given = [x.detach() for x in inputs]
    if "random_state" not in mod.state:
        return interpret(mod, given)
    return interpret(mod, [*given, mod.state["random_state"]])[:-1]


def with_gradients(function: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """The function's results and the gradients of its inputs that require one.

    Results are weighted with numbers of different size and sign, so that a gradient that only
    fits a sum of ones shows.
    """

    def apply(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = pytree.tree_leaves(function(*inputs))
        wanted = [x for x in inputs if x.requires_grad]
        terms = [(one * _weights(one)).sum() for one in results if one.requires_grad]
        if not terms:
            return results
        total = sum(terms[1:], terms[0])
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        return [*results, *(one for one in gradients if one is not None)]

    return apply


def _weights(result: torch.Tensor) -> torch.Tensor:
    count = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape)
    return torch.cos(count * 1.7 + 0.3)


def check(
    function: Callable[..., Any],
    *inputs: torch.Tensor,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    whole: frozenset[str] = FUSED_OPS,
) -> StepModule:
    """Import function and gradients, and compare dtype, shape and values with PyTorch's own.

    The interpreter runs PyTorch's own kernels, in another order or composition: a few float32
    roundings (6e-8 each) apart, so 1e-5 relative and 1e-6 of values near 1.
    """
    function_and_gradients = with_gradients(function)
    expected = [one.detach() for one in function_and_gradients(*inputs)]
    mod = imported(function_and_gradients, *inputs, whole=whole)
    actual = run(mod, inputs)
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
    return mod


def check_module(
    module: torch.nn.Module,
    *inputs: torch.Tensor,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    whole: frozenset[str] = FUSED_OPS,
) -> StepModule:
    """As `check`, for a module: its parameters (which get gradients) and buffers are inputs too.

    Sums over windows and batches are added in another order: some 30 roundings of values near 1.
    """
    names = [name for name, _ in module.named_parameters()]
    parameters = [parameter.detach().requires_grad_() for parameter in module.parameters()]
    names += [name for name, _ in module.named_buffers()]
    parameters += [buffer.detach() for buffer in module.buffers()]

    def stateless(*tensors: torch.Tensor) -> Any:
        state = dict(zip(names, tensors[len(inputs) :], strict=True))
        for name, _ in module.named_buffers():
            state[name] = state[name].clone()
        result = torch.func.functional_call(module, state, tensors[: len(inputs)])
        return result, [state[name] for name, _ in module.named_buffers()]

    return check(stateless, *inputs, *parameters, rtol=rtol, atol=atol, whole=whole)


class Runner:
    """An imported step that is called as the user's step is, on the user's tensors."""

    def __init__(self, step: Callable[..., Any], batch: tuple[Any, ...], **owners: Any) -> None:
        self.mod = import_step(capture_step(step, batch, **owners))
        relax.analysis.well_formed(self.mod.ir)
        self.mod.hooks.install_state()

    def __call__(self, *batch: Any) -> Any:
        """One step, evaluated op by op."""
        signature, state = self.mod.signature, self.mod.state
        tensors = iter(signature.flatten_batch(batch))
        inputs = [
            next(tensors) if spec.role is Role.BATCH else self._read(state[spec.name])
            for spec in signature.inputs
        ]
        results, gradients = [], []
        for spec, value in zip(signature.outputs, interpret(self.mod, inputs), strict=True):
            if spec.role is Role.RESULT:
                results.append(value)
            elif spec.updates is None:
                gradients.append(value)
            else:
                target = state[signature.inputs[spec.updates].name]
                assert isinstance(target, torch.Tensor)
                target.detach().copy_(value)
        self.mod.hooks.after_step(gradients)
        return signature.unflatten_results(results)

    @staticmethod
    def _read(entry: Any) -> torch.Tensor:
        return entry.detach() if isinstance(entry, torch.Tensor) else entry()
