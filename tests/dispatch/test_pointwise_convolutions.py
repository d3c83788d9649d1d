# SPDX-License-Identifier: Apache-2.0
"""Convolutions of single pixels as matmuls: which, how, and with the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import tvm
from tvm import relax

from amp_ir.dialect import call_op
from amp_ir.dispatch.pointwise_convolutions import pointwise_convolutions
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import Location, from_span, to_span
from relax_functions import build, sample

X, Y, W = (2, 16, 3, 5), (2, 8, 3, 5), (8, 16, 1, 1)
WIDE = (2, 16, 6, 15)
POINTWISE = {"strides": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1}
# The op, the shapes of its two tensors, and its further option.
OPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "conv": (X, W, {}),
    "conv_backward_input": (Y, W, {"input_shape": list(X)}),
    "conv_backward_weight": (Y, X, {"weight_shape": list(W), "out_dtype": "float32"}),
    "conv with a stride": (WIDE, W, {"strides": [2, 3]}),
    "conv_backward_input with a stride": (Y, W, {"input_shape": list(WIDE), "strides": [2, 3]}),
    "conv_backward_weight with a stride": (Y, WIDE, {"weight_shape": list(W), "strides": [2, 3]}),
}
SIGNAL = {"strides": [1], "padding": [0], "dilation": [1]}
STAYS: dict[str, tuple[Any, ...]] = {
    "float32": ("float32", X, W, {}),
    "a window": ("bfloat16", X, (8, 16, 3, 3), {"padding": [1, 1]}),
    "a stride that leaves a rest": ("bfloat16", X, W, {"strides": [2, 1]}),
    "padding": ("bfloat16", X, W, {"padding": [0, 1]}),
    "groups": ("bfloat16", X, (8, 8, 1, 1), {"groups": 2}),
    "few channels": ("bfloat16", (2, 4, 3, 5), (8, 4, 1, 1), {}),
    "a signal": ("bfloat16", (2, 16, 5), (8, 16, 1), SIGNAL),
}


def module(op: str, dtype: str, *shapes: tuple[int, ...], **options: Any) -> tvm.IRModule:
    def body(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        span = to_span(Location(file="model.py", line=7, phase="forward"))
        return call_op(f"amp_ir.{op.partition(' ')[0]}", [a, b], span, **{**POINTWISE, **options})

    return build([(shape, dtype) for shape in shapes], body)


def ops_of(mod: tvm.IRModule) -> list[str]:
    bindings = mod["main"].body.blocks[0].bindings
    return [one.value.op.name for one in bindings if isinstance(one.value, relax.Call)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_it_is_a_matmul_with_the_same_numbers(op: str, dtype: str) -> None:
    *shapes, options = OPS[op]
    mod = module(op, dtype, *shapes, **options)
    rewritten = pointwise_convolutions(mod)
    relax.analysis.well_formed(rewritten)
    assert [name for name in ops_of(rewritten) if name.startswith("amp_ir")] == []
    assert ops_of(rewritten).count("relax.matmul") == 1
    inputs = [sample(shape, dtype) for shape in shapes]
    ((got,), (expected,)) = interpret(rewritten, inputs), interpret(mod, inputs)
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    wide = [one.double() for one in inputs]
    (exact,) = interpret(module(op, "float64", *shapes, **{**options, "out_dtype": None}), wide)
    torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=2**-6)


def test_the_matmul_reads_images_with_their_channels_last() -> None:
    rewritten = pointwise_convolutions(module("conv", "bfloat16", X, W))
    lines = [
        f"{one.var.name}: {[int(n) for n in one.var.ty.shape]} = {one.value.op.name}"
        for one in rewritten["main"].body.blocks[0].bindings
        if isinstance(one.value, relax.Call)
    ]
    assert [line.partition(": ")[2] for line in lines] == [
        "[2, 3, 5, 16] = relax.permute_dims",
        "[30, 16] = relax.reshape",
        "[8, 16] = relax.reshape",
        "[16, 8] = relax.permute_dims",
        "[30, 8] = relax.matmul",
        "[2, 3, 5, 8] = relax.reshape",
        "[2, 8, 3, 5] = relax.permute_dims",
    ]


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    dtype, *shapes, options = STAYS[name]
    mod = module("conv", dtype, *shapes, **options)
    tvm.ir.assert_structural_equal(pointwise_convolutions(mod), mod)


def test_the_new_ops_have_the_location_of_the_convolution() -> None:
    rewritten = pointwise_convolutions(module("conv", "bfloat16", X, W))
    spans = [
        one.value.span
        for one in rewritten["main"].body.blocks[0].bindings
        if isinstance(one.value, relax.Call)
    ]
    assert [from_span(span).line for span in spans] == [7] * 7
