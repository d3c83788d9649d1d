# SPDX-License-Identifier: Apache-2.0
"""Trace a small function as the capture would, import it, evaluate it, compare with PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from tvm import relax

from amp_ir.frontend.captured import CapturedInput, CapturedOutput, CapturedStep
from amp_ir.frontend.importer import import_step
from amp_ir.interpreter import interpret
from amp_ir.module import Role, StepModule

# Ops of ATen that the capture does not decompose (by packet name).
KEPT = """
convolution convolution_backward addmm mm bmm baddbmm native_layer_norm native_layer_norm_backward
_fused_rms_norm _fused_rms_norm_backward native_group_norm native_group_norm_backward
native_batch_norm native_batch_norm_backward _native_batch_norm_legit _native_batch_norm_legit_functional
_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data embedding
embedding_dense_backward nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
max_pool3d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
_adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
adaptive_max_pool3d_backward gelu gelu_backward silu silu_backward tanh_backward sigmoid_backward
threshold_backward relu leaky_relu leaky_relu_backward elu elu_backward softplus softplus_backward
hardtanh hardtanh_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward mish
mish_backward log_sigmoid_forward log_sigmoid_backward softshrink hardshrink native_dropout
native_dropout_backward mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss
huber_loss_backward binary_cross_entropy binary_cross_entropy_backward soft_margin_loss
soft_margin_loss_backward index index_put scatter scatter_add gather upsample_nearest1d
upsample_nearest2d upsample_nearest3d upsample_nearest2d_backward upsample_linear1d upsample_bilinear2d
upsample_bilinear2d_backward upsample_trilinear3d cumsum sort topk
_upsample_nearest_exact2d select_backward slice_backward
""".split()


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's core decompositions without the ops that stay whole."""
    return {
        overload: function
        for overload, function in core_aten_decompositions().items()
        if overload.name().removeprefix("aten::").split(".")[0] not in KEPT
    }


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


def traced(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> CapturedStep:
    """The function as a captured step, each input a BATCH input and each output a RESULT."""
    with without_mkldnn():
        first = make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
        with torch.no_grad():
            graph = make_fx(
                torch.func.functionalize(first, remove="mutations"),
                decomposition_table=decompositions(),
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
        flatten_batch=list,
        unflatten_results=lambda values: pytree.tree_unflatten(list(values), structure),
    )


def imported(function: Callable[..., Any], *inputs: torch.Tensor) -> StepModule:
    """The function as a module; well formed, and every op with a location."""
    mod = import_step(traced(function, inputs))
    relax.analysis.well_formed(mod.ir)
    return mod


def evaluated(function: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The results of the imported function."""
    return interpret(imported(function, *inputs), [x.detach() for x in inputs])


def with_gradients(function: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    """The function's results and the gradients of its inputs that require one.

    Results are weighted with numbers of different size and sign, so that a gradient that only
    fits a sum of ones shows.
    """

    def apply(*inputs: torch.Tensor) -> list[torch.Tensor]:
        results = pytree.tree_leaves(function(*inputs))
        wanted = [x for x in inputs if x.requires_grad]
        if not wanted:
            return results
        total = sum((result * _weights(result)).sum() for result in results if result.requires_grad)
        gradients = torch.autograd.grad(total, wanted, allow_unused=True)
        return [*results, *(one for one in gradients if one is not None)]

    return apply


def _weights(result: torch.Tensor) -> torch.Tensor:
    count = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape)
    return torch.cos(count * 1.7 + 0.3)


def check(
    function: Callable[..., Any], *inputs: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-6
) -> StepModule:
    """Import function and gradients, and compare dtype, shape and values with PyTorch's own.

    The interpreter runs PyTorch's own kernels, in another order or composition: a few float32
    roundings (6e-8 each) apart, so 1e-5 relative and 1e-6 of values near 1.
    """
    whole = with_gradients(function)
    expected = [one.detach() for one in whole(*inputs)]
    mod = imported(whole, *inputs)
    actual = interpret(mod, [x.detach() for x in inputs])
    assert len(actual) == len(expected)
    for got, wanted in zip(actual, expected, strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=atol, equal_nan=True)
    return mod
