# SPDX-License-Identifier: Apache-2.0
"""Every Relax op that the importer emits: its compiled kernel against the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax import op as R

from amp_ir.ir.interpreter import interpret
from amp_ir.loops.fusion.fuse import fuse_loops
from kernel_check import run_kernels
from relax_functions import build, sample

# One rounding of the result (float32: 2^-24 relative) plus the polynomials' stated errors.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-10}


def check(mod: tvm.IRModule, inputs: list[torch.Tensor]) -> None:
    for got, expected in zip(run_kernels(mod, inputs), interpret(mod, inputs), strict=True):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        name = str(expected.dtype).removeprefix("torch.")
        if name in TOLERANCE:
            torch.testing.assert_close(
                got, expected, rtol=TOLERANCE[name], atol=TOLERANCE[name], equal_nan=True
            )
        else:
            torch.testing.assert_close(got, expected)


UNARY = [
    R.abs, R.negative, R.exp, R.sin, R.cos, R.tan, R.atan, R.sinh, R.cosh, R.tanh, R.sigmoid,
    R.erf, R.floor, R.ceil, R.round, R.trunc, R.sign, R.square, R.nn.relu, R.nn.silu, R.nn.gelu,
    R.nn.gelu_tanh, R.isnan, R.isinf, R.isfinite,
]  # fmt: skip
POSITIVE = [R.log, R.sqrt, R.rsqrt]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("op", UNARY + POSITIVE, ids=lambda op: op.__name__)
def test_unary_op_equals_its_meaning(op: Callable[..., Any], dtype: str) -> None:
    mod = build([((3, 37), dtype)], op)
    check(mod, [sample((3, 37), dtype, positive=op in POSITIVE)])


BINARY = [
    R.add, R.subtract, R.multiply, R.divide, R.maximum, R.minimum, R.equal, R.not_equal, R.less,
    R.less_equal, R.greater, R.greater_equal, R.floor_divide, R.mod,
]  # fmt: skip


@pytest.mark.parametrize("shapes", [((2, 5, 17), (2, 5, 17)), ((2, 5, 17), (17,)),
                                    ((2, 1, 17), (5, 1)), ((2, 5, 17), ())])  # fmt: skip
@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_binary_op_broadcasts(op: Callable[..., Any], shapes: Any) -> None:
    a, b = shapes
    mod = build([(a, "float32"), (b, "float32")], op)
    check(mod, [sample(a, "float32"), sample(b, "float32", positive=True)])


INTEGER = [R.add, R.subtract, R.multiply, R.maximum, R.equal, R.floor_divide, R.bitwise_and,
           R.left_shift]  # fmt: skip


@pytest.mark.parametrize("op", INTEGER, ids=lambda op: op.__name__)
def test_integer_op(op: Callable[..., Any]) -> None:
    mod = build([((40,), "int64"), ((40,), "int64")], op)
    check(mod, [sample((40,), "int64"), sample((40,), "int64") + 1])


@pytest.mark.parametrize("op", [R.logical_and, R.logical_or, R.logical_xor, R.equal],
                         ids=lambda op: op.__name__)  # fmt: skip
def test_bool_op(op: Callable[..., Any]) -> None:
    mod = build([((3, 33), "bool"), ((3, 33), "bool")], op)
    check(mod, [sample((3, 33), "bool"), sample((3, 33), "bool").flip(1)])


@pytest.mark.parametrize("exponent", [-2.0, -1.0, -0.5, 0.0, 0.5, 1.5, 2.0, 3.0, 2.3])
def test_power_with_a_constant_exponent(exponent: float) -> None:
    mod = build([((3, 21), "float32")], lambda x: R.power(x, relax.const(exponent, "float32")))
    check(mod, [sample((3, 21), "float32", positive=True)])


REDUCTION_AXES = [[0], [1], [2], [0, 1], [1, 2], [0, 2], [0, 1, 2], None]


@pytest.mark.parametrize("axes", REDUCTION_AXES, ids=str)
@pytest.mark.parametrize("op", [R.sum, R.mean, R.max, R.min, R.prod], ids=lambda op: op.__name__)
@pytest.mark.parametrize("keepdims", [True, False])
def test_reduction_over_any_axes(op: Callable[..., Any], axes: Any, keepdims: bool) -> None:
    mod = build([((3, 5, 19), "float32")], lambda x: op(x, axes, keepdims))
    check(mod, [sample((3, 5, 19), "float32")])


@pytest.mark.parametrize("shape, axes", [((300, 200), [0, 1]), ((70000,), [0]), ((20, 3000), [1]),
                                         ((3000, 150), [0]), ((4, 100, 100), [1, 2]),
                                         ((50, 8, 100), [0, 2])], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_reduction_is_parallel_and_right(shape: Any, axes: list[int], dtype: str) -> None:
    mod = build([(shape, dtype)], lambda x: R.sum(R.astype(x, "float32"), axes))
    inputs = [sample(shape, dtype)]
    (got,), (expected,) = run_kernels(mod, inputs), interpret(
        mod, inputs, float_dtype=torch.float64
    )  # fmt: skip
    # Sums of n terms in 16 or more partial sums: error below n / 16 roundings of the running sum.
    torch.testing.assert_close(got.double(), expected.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("op", [R.max, R.min, R.prod], ids=lambda op: op.__name__)
def test_a_reduction_of_many_rows_is_right_and_its_kernel_is_short(op: Callable[..., Any]) -> None:
    # Sixteen parts of the rows, combined: written out as one expression a maximum is 3^16 terms.
    mod = build([((64, 200), "float32")], lambda x: op(x, [0]))
    inputs = [sample((64, 200), "float32").clamp(-1.5, 1.5)]
    inputs[0][5, 3] = torch.nan
    (kernel,) = [f for f in fuse_loops(mod).functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    assert "parallel" in str(kernel)
    assert len(str(kernel)) < 20_000
    check(mod, inputs)


def test_a_sum_does_not_depend_on_the_number_of_threads() -> None:
    mod = build([((300, 301), "float32")], lambda x: R.sum(x, [0, 1]))
    inputs = [sample((300, 301), "float32")]
    first = run_kernels(mod, inputs)[0]
    assert all(torch.equal(run_kernels(mod, inputs)[0], first) for _ in range(3))


MOVES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "transpose": ((6, 18), lambda x: R.permute_dims(x)),
    "permute": ((2, 3, 4, 20), lambda x: R.permute_dims(x, [0, 2, 1, 3])),
    "permute_last": ((2, 3, 20), lambda x: R.permute_dims(x, [2, 0, 1])),
    "reshape": ((2, 3, 20), lambda x: R.reshape(x, (6, 4, 5))),
    "reshape_of_transpose": ((4, 6), lambda x: R.reshape(R.permute_dims(x), (2, 12))),
    "broadcast": ((1, 5, 1), lambda x: R.broadcast_to(x, (3, 5, 17))),
    "slice": ((7, 20), lambda x: R.strided_slice(x, [0, 1], [1, 2], [6, 19], [2, 3])),
    "negative_slice": ((7, 20), lambda x: R.strided_slice(x, [1], [-5], [20])),
    "flip": ((3, 17), lambda x: R.flip(x, 1)),
    "concat": ((3, 17), lambda x: R.concat([x, R.negative(x), x], axis=1)),
    "concat_rows": ((3, 17), lambda x: R.concat([x, R.exp(x)], axis=0)),
    "tril": ((9, 9), lambda x: R.tril(x, 0)),
    "triu": ((9, 12), lambda x: R.triu(x, 2)),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_moving_elements(name: str, dtype: str) -> None:
    shape, move = MOVES[name]
    if dtype == "bool" and name in ("concat", "concat_rows", "tril", "triu"):
        pytest.skip("arithmetic on bool is not what this case is about")
    mod = build([(shape, dtype)], move)
    check(mod, [sample(shape, dtype)])


def test_take_and_gather() -> None:
    mod = build(
        [((5, 40), "float32"), ((2, 3), "int64"), ((5, 7), "int64")],
        lambda x, rows, ids: (R.take(x, rows, axis=0), R.gather_elements(x, ids, axis=1)),
    )
    check(mod, [sample((5, 40), "float32"), sample((2, 3), "int64"), sample((5, 7), "int64")])


@pytest.mark.parametrize("axis", [0, 1, -1, None])
def test_argmax(axis: int | None) -> None:
    mod = build([((6, 18), "float32")], lambda x: (R.argmax(x, axis), R.argmin(x, axis)))
    check(mod, [sample((6, 18), "float32")])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("op", [R.nn.softmax, R.nn.log_softmax], ids=lambda op: op.__name__)
def test_softmax_along_any_axis(op: Callable[..., Any], axis: int) -> None:
    mod = build([((3, 5, 33), "float32")], lambda x: op(x, axis))
    check(mod, [sample((3, 5, 33), "float32") * 20])


def test_arange_full_and_where() -> None:
    def body(x: Any) -> Any:
        steps = R.astype(R.arange(0, 34, 2, "int64"), "float32")
        fill = R.full((3, 17), relax.const(2.5, "float32"), "float32")
        return R.where(R.greater(x, steps), x, fill)

    check(build([((3, 17), "float32")], body), [sample((3, 17), "float32") * 20])


CASTS = ["float32", "float64", "bfloat16", "float16", "int32", "int64", "bool"]


@pytest.mark.parametrize("source", CASTS)
@pytest.mark.parametrize("target", CASTS)
def test_cast_between_any_two_dtypes(source: str, target: str) -> None:
    mod = build([((4, 19), source)], lambda x: R.astype(x, target))
    check(mod, [sample((4, 19), source)])


def test_rounding_to_bfloat16_is_pytorchs_for_every_kind_of_number() -> None:
    bits = torch.tensor(
        [0x7F800001, 0x7FFFFFFF, -0x363F, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000, 0x7F800000],
        dtype=torch.int32,
    )  # fmt: skip
    x = torch.cat([bits, -bits]).view(torch.float32)
    mod = build([((16,), "float32")], lambda x: R.astype(x, "bfloat16"))
    (got,) = run_kernels(mod, [x])
    expected = x.to(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


@pytest.mark.parametrize("columns", [9, 24, 88, 89])
def test_deep_elements_in_the_odd_columns_of_a_column_kernel(columns: int) -> None:
    # 88 = 64 + 16 + 8: a block, a vector and single elements, each with local memory of its own.
    shape = (2, 4, columns)
    body = lambda x: R.nn.log_softmax(x, axis=1)  # noqa: E731
    check(build([(shape, "float32")], body), [sample(shape, "float32")])


@pytest.mark.parametrize("columns", [5, 128, 1024])
def test_a_softmax_of_large_products_is_of_their_rounded_values(columns):
    x = torch.randn(64, columns, generator=torch.Generator().manual_seed(0)) * 400
    shape = ([64, columns], "float32")
    build_op = relax.op.nn.softmax
    mod = build([shape], lambda a: build_op(relax.op.multiply(a, relax.const(0.3535534)), axis=-1))
    (found,) = run_kernels(mod, [x])
    # A few roundings of 2**-24; with `x * c - max` contracted in one loop alone it is 1e-5.
    assert (found.double().sum(-1) - 1).abs().max() <= 4e-7
    exact = torch.softmax((x * 0.3535534).double(), -1)
    likely = exact > 1e-30
    # x - max is rounded, by half of 2**-17 where it is 69 and the probability is 1e-30.
    torch.testing.assert_close(found.double()[likely], exact[likely], rtol=5e-6, atol=0.0)
