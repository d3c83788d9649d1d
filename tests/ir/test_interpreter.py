# SPDX-License-Identifier: Apache-2.0
"""The interpreter: dtypes, rounding, hooks, the float64 oracle, errors, and each Relax op."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op as R

from amp_ir.dialect import call_op
from amp_ir.errors import ArgumentError, UnsupportedOpError
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.relax_reference import RELAX_OPS
from relax_cases import RELAX_CASES, module


def run(call: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """The result of one Relax call on `inputs`."""
    types = [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in inputs]
    (result,) = interpret(module(types, lambda _, *params: call(*params)), list(inputs))
    return result


@pytest.mark.parametrize("name", RELAX_CASES)
def test_relax_op_is_pytorchs(name: str):
    call, inputs, expected = RELAX_CASES[name]
    torch.testing.assert_close(run(call, *inputs), expected)


POINTWISE = (
    "abs negative exp log sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh sigmoid erf floor "
    "ceil round trunc sign square isfinite isinf isnan nn.relu nn.gelu nn.silu"
).split()


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_op_computes_low_precision_in_float32_and_rounds_once(name: str):
    call = RELAX_OPS[f"relax.{name}"]
    function = getattr(R.nn, name.removeprefix("nn.")) if "nn." in name else getattr(R, name)
    x = torch.linspace(0.1, 0.9, 50).bfloat16()
    expected = call(None, x.float())
    expected = expected if expected.dtype == torch.bool else expected.bfloat16()
    assert torch.equal(run(function, x), expected)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=20), st.data())
def test_binary_ops_are_exact_in_float32(numbers: list[float], data: st.DataObject):
    name = data.draw(st.sampled_from(["add", "subtract", "multiply", "maximum", "minimum", "less"]))
    x = torch.tensor(numbers)
    y = x.flip(0)
    torch.testing.assert_close(
        run(getattr(R, name), x, y), getattr(torch, name)(x, y), rtol=0, atol=0
    )


def test_matmul_accumulates_in_float32_and_keeps_out_dtype():
    x, y = torch.randn(4, 300).bfloat16(), torch.randn(300, 5).bfloat16()
    wide = run(lambda a, b: R.matmul(a, b, out_dtype="float32"), x, y)
    assert wide.dtype == torch.float32
    assert torch.equal(wide, x.float() @ y.float())
    assert torch.equal(run(R.matmul, x, y), wide.bfloat16())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "bool"])
def test_a_constant_has_its_value_and_dtype(dtype: str):
    (got,) = interpret(module([], lambda _: R.full((2,), relax.const(1, dtype), dtype)), [])
    assert torch.equal(got, torch.ones(2, dtype=getattr(torch, dtype)))


def rounding_chain(builder: relax.BlockBuilder, x: relax.Var) -> Any:
    """((x + 1) - 1) in bfloat16, then float32."""
    low = builder.emit(R.astype(x, "bfloat16"))
    one = relax.const(1.0, "bfloat16")
    there = builder.emit(R.add(low, one))
    back = builder.emit(R.subtract(there, one))
    return R.astype(back, "float32")


def test_every_op_rounds_to_its_declared_dtype():
    x = torch.tensor([1e-3, 0.5])
    (got,) = interpret(module([((2,), "float32")], rounding_chain), [x])
    assert got.tolist() == [0.0, 0.5]


def test_float_dtype_ignores_the_declared_dtypes():
    x = torch.tensor([1e-3, 0.5], dtype=torch.float64)
    mod = module([((2,), "float32")], rounding_chain)
    (got,) = interpret(mod, [x], float_dtype=torch.float64)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, x, rtol=1e-12, atol=0)


def test_float_dtype_reaches_statistics_casts_and_weights_of_the_dialect():
    def body(builder: relax.BlockBuilder, x: relax.Var) -> Any:
        low = builder.emit(call_op("amp_ir.cast", [x], dtype="bfloat16"))
        options = {"has_weight": False, "has_bias": False}
        norm = builder.emit(
            call_op("amp_ir.layer_norm", [low], ndim_normalized=1, eps=0.0, **options)
        )
        return relax.TupleGetItem(norm, 0), relax.TupleGetItem(norm, 1)

    x = torch.randn(3, 8, dtype=torch.float64)
    mod = module([((3, 8), "float32")], body)
    # In float32 sums of 8 numbers are rounded a few times, by 2^-24 each.
    for dtype, error in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        given_x = x.to(dtype)
        y, mean = interpret(mod, [given_x], float_dtype=dtype)
        assert (y.dtype, mean.dtype) == (dtype, dtype)
        torch.testing.assert_close(mean, given_x.mean(1, keepdim=True), rtol=error, atol=error)
        expected = torch.nn.functional.layer_norm(given_x, (8,), eps=0.0)
        torch.testing.assert_close(y, expected, rtol=error, atol=error)


def test_on_value_sees_every_tensor_and_can_replace_it():
    def body(builder: relax.BlockBuilder, x: relax.Var) -> Any:
        both = builder.emit(R.topk(x, 1))
        largest = builder.emit(relax.TupleGetItem(both, 0))
        return R.multiply(largest, relax.const(2.0))

    seen: list[tuple[str, tuple[int, ...]]] = []

    def fault(var: relax.Var, value: torch.Tensor) -> torch.Tensor:
        seen.append((var.name, tuple(value.shape)))
        return torch.full_like(value, 5.0) if len(seen) == 1 else value

    mod = module([((3,), "float32")], body)
    (got,) = interpret(mod, [torch.arange(3.0)], on_value=fault)
    assert got.tolist() == [10.0]
    assert [shape for _, shape in seen] == [(1,), (1,)]


def test_dead_values_are_freed():
    def body(builder: relax.BlockBuilder, x: relax.Var) -> Any:
        for _ in range(5):
            x = builder.emit(R.add(x, relax.const(1.0)))
        return R.negative(x)

    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watch(_var: relax.Var, value: torch.Tensor) -> torch.Tensor:
        nonlocal most
        alive.append(weakref.ref(value))
        most = max(most, sum(one() is not None for one in alive))
        return value

    interpret(module([((2,), "float32")], body), [torch.zeros(2)], on_value=watch)
    assert most <= 2  # an argument and its result


def test_inputs_are_not_written_to():
    x = torch.zeros(2, 3)
    kept = x.clone()

    def body(builder: relax.BlockBuilder, x: relax.Var) -> Any:
        ids = builder.emit(R.arange(0, 2, 1, "int64"))
        ones = builder.emit(R.full((2, 3), relax.const(1.0), "float32"))
        return call_op("amp_ir.index_put", [x, ones, ids], axes=(0,), accumulate=True)

    (got,) = interpret(module([((2, 3), "float32")], body), [x])
    assert torch.equal(x, kept) and torch.equal(got, torch.ones(2, 3))


def test_all_ops_without_an_entry_are_listed():
    def body(builder: relax.BlockBuilder, x: relax.Var) -> Any:
        y = builder.emit(R.nn.selu(x))
        z = builder.emit(R.nn.softplus(y))
        return R.nn.selu(z)

    with pytest.raises(UnsupportedOpError) as error:
        interpret(module([((2,), "float32")], body), [torch.zeros(2)])
    assert str(error.value) == (
        "the interpreter cannot evaluate relax.nn.selu (first: lv at step (forward)), "
        "relax.nn.softplus (first: lv1 at step (forward)); give a Relax op an entry in RELAX_OPS, "
        "declare any other in amp_ir.dialect"
    )


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "main has 1 parameters, got 0 inputs"),
        (
            [torch.zeros(3)],
            "input x0 has shape (3,) and dtype float32, expected (2,) and float32",
        ),
        (
            [torch.zeros(2).double()],
            "input x0 has shape (2,) and dtype float64, expected (2,) and float32",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: list[torch.Tensor], message: str):
    with pytest.raises(ArgumentError) as error:
        interpret(module([((2,), "float32")], lambda _, x: R.abs(x)), inputs)
    assert str(error.value) == message
