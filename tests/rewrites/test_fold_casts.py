# SPDX-License-Identifier: Apache-2.0
"""Casts that change no value go; casts that round stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from amp_ir.amp.autocast import autocast
from amp_ir.dialect.registry import call_op
from amp_ir.ir.interpreter import interpret
from amp_ir.rewrites.fold_casts import fold_casts
from random_steps import random_inputs, random_step
from small_programs import W, X, calls, program


def cast(x, dtype):
    return call_op("amp_ir.cast", [x], dtype=dtype)


def names(mod):
    """The ops of `main` in order."""
    values = [binding.value for binding in mod["main"].body.blocks[0].bindings]
    return [v.op.name.split(".")[-1] for v in values if isinstance(v, relax.Call)]


def chain(*steps, start="float32"):
    def build(e, x):
        for step in steps:
            x = e(step(x))
        return e(op.abs(x))

    return program(build, X, dtypes=[start])


def ours(dtype):
    return lambda x: cast(x, dtype)


def users(dtype):
    return lambda x: op.astype(x, dtype)


def view(x):
    return op.permute_dims(x)


@pytest.mark.parametrize(
    ("steps", "start", "left"),
    [
        ([ours("float32")], "float32", []),
        ([users("float32")], "float32", []),
        ([users("float32"), ours("float16")], "float16", []),
        ([users("float32"), users("float16")], "float16", []),
        ([ours("float32"), ours("bfloat16")], "float16", ["cast"]),
        ([users("float32"), view, ours("float16")], "float16", ["permute_dims"]),
        ([users("float32"), op.nn.relu, users("float16")], "float16", ["relu"]),
        (
            [users("float32"), op.negative, view, users("float16")],
            "float16",
            ["negative", "permute_dims"],
        ),
        ([users("float32"), op.nn.relu, ours("float16")], "float16", ["astype", "relu", "cast"]),
        (
            [users("float32"), op.nn.relu, users("bfloat16")],
            "float16",
            ["astype", "relu", "astype"],
        ),
        ([users("float32"), op.exp, users("float16")], "float16", ["astype", "exp", "astype"]),
        ([ours("float16"), ours("float32")], "float32", ["cast", "cast"]),
        ([users("float16"), ours("float32")], "float32", ["astype", "cast"]),
        ([users("bfloat16"), users("float32"), users("bfloat16")], "float32", ["astype"]),
        ([users("int64"), users("float32")], "float32", ["astype", "astype"]),
        # RAF, simplify_expr: float32 -> 16 -> 32 -> 16 -> 32 keeps the one rounding there is.
        ([ours("float16"), ours("float32")] * 2, "float32", ["cast", "cast"]),
    ],
)
def test_only_casts_that_change_no_value_are_folded(steps, start, left):
    mod = chain(*steps, start=start)
    folded = fold_casts(mod)
    relax.analysis.well_formed(folded)
    assert names(folded)[:-1] == left
    x = [torch.linspace(-3, 3, 32).reshape(X).to(getattr(torch, start))]
    assert torch.equal(interpret(folded, x)[0], interpret(mod, x)[0])


def test_casts_of_constants_are_done_at_compile_time():
    mod = program(lambda e, x: e(op.add(x, e(cast(relax.const(0.1), "float16")))), X,
                  dtypes=["float16"])  # fmt: skip
    folded = fold_casts(mod)
    assert names(folded) == ["add"]
    x = [torch.ones(X, dtype=torch.float16)]
    assert torch.equal(interpret(folded, x)[0], interpret(mod, x)[0])


def test_one_narrowing_cast_a_value_and_private_widenings():
    def build(e, x, w):
        y = e(op.matmul(e(cast(x, "float16")), e(cast(w, "float16"))))
        z = e(op.matmul(e(cast(x, "float16")), e(cast(w, "float16"))))
        return [e(op.exp(e(cast(y, "float32")))), e(op.sin(e(cast(y, "float32")))), z]

    folded = fold_casts(program(build, X, W))
    casts = [str(variable.ty.dtype) for variable, _ in calls(folded, "amp_ir.cast")]
    assert sorted(casts) == ["float16", "float16", "float32", "float32"]


def test_dead_code_goes_and_small_repeats_are_shared():
    def build(e, x, rate):
        e(op.exp(x))
        rates = [e(op.astype(rate, "float32")) for _ in range(3)]
        return [e(op.multiply(x, one)) for one in rates]

    folded = fold_casts(program(build, X, (), dtypes=["float32", "float64"]))
    assert names(folded).count("astype") == 1
    assert "exp" not in names(folded)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=20, max_size=80), st.booleans())
def test_folding_changes_no_bit_and_is_idempotent(draws, is_low):
    mod = random_step(draws)
    if is_low:
        mod = autocast(mod, amp_dtype="bfloat16")
    folded = fold_casts(mod)
    relax.analysis.well_formed(folded)
    inputs = random_inputs()
    for got, expected in zip(interpret(folded, inputs), interpret(mod, inputs), strict=True):
        assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))
    assert names(fold_casts(folded)) == names(folded)
