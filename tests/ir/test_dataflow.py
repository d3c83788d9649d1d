# SPDX-License-Identifier: Apache-2.0
"""The variables of an expression, wherever they stand in it."""

from __future__ import annotations

import pytest
from tvm import relax, tirx
from tvm.relax import op

from amp_ir.dialect.registry import call_op
from amp_ir.ir.dataflow import variables_of

TYPE = relax.TensorType((4, 8), "float32")
X, Y = relax.Var("x", TYPE), relax.DataflowVar("y", TYPE)
PAIR = relax.Var("pair", relax.TupleType([TYPE, TYPE]))


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (X, [X]),
        (Y, [Y]),
        (op.add(X, Y), [X, Y]),
        (op.add(Y, Y), [Y, Y]),
        (op.add(X, relax.const(1.0)), [X]),
        (op.reshape(Y, (8, 4)), [Y]),
        (call_op("amp_ir.cast", [X], dtype="float16"), [X]),
        (relax.Tuple([X, relax.Tuple([Y, X])]), [X, Y, X]),
        (relax.TupleGetItem(PAIR, 1), [PAIR]),
        (op.concat([Y, X], 0), [Y, X]),
        (relax.const(1.0), []),
        (relax.ShapeExpr([4, 8]), []),
        (relax.prim_value(3), []),
        (relax.Call(X, [relax.Tuple([Y, tirx.IntImm("int32", 3)])]), [Y]),
    ],
    ids=str,
)
def test_variables_in_order_and_as_often_as_they_are_read(expr, expected):
    found = variables_of(expr)
    assert len(found) == len(expected)
    assert all(one.same_as(other) for one, other in zip(found, expected, strict=True))
