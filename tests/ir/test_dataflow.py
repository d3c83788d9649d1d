# SPDX-License-Identifier: Apache-2.0
"""The view of `main`: variables of expressions, values, readers, uses, and what is left."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op

from amp_ir.dialect.registry import call_op
from amp_ir.ir.dataflow import Dataflow, variables_of

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


def _program():
    """y = x + x; t = y^T; e = exp(y); dead = exp(t); result = t."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", TYPE)
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(op.add(x, x), "y")
            t = builder.emit(op.permute_dims(y), "t")
            builder.emit(op.exp(y), "e")
            builder.emit(op.exp(t), "dead")
            result = builder.emit_output(t, "result")
        builder.emit_func_output(result)
    return builder.finalize().with_attr("noted", 1)


def _names(variables):
    return [one.name for one in variables]


def test_values_readers_and_uses_of_main():
    flow = Dataflow(_program())
    x, (y, t, *_) = flow.main.params[0], flow.values
    assert _names(flow.values) == ["y", "t", "e", "dead", "result"]
    assert flow.values[y].op.name == "relax.add"
    assert _names(flow.readers[x]) == ["y", "y"]
    assert _names(flow.readers[t]) == ["dead", "result"]
    assert [flow.uses[one] for one in (x, y, t, flow.result)] == [2, 2, 2, 1]
    assert _names(flow.calls("relax.exp")) == ["e", "dead"]


def test_only_readers_are_the_single_use_of_what_they_read():
    ir = _program()
    assert not Dataflow(ir).only_readers("relax.permute_dims")  # e reads y, too
    flow = Dataflow(ir)
    ir = flow.finish(flow.bindings)
    found = Dataflow(ir).only_readers("relax.permute_dims")
    assert [(source.name, one.name) for source, one in found.items()] == [("y", "t")]


def test_finish_keeps_what_the_result_needs_and_the_rest_of_the_module():
    ir = _program()
    other = tvm.ir.GlobalVar("other")
    ir[other] = tirx.PrimFunc([], tirx.Evaluate(0))
    flow = Dataflow(ir)
    new = flow.finish(flow.bindings)
    assert _names(Dataflow(new).values) == ["y", "t", "result"]
    assert new["other"].same_as(ir["other"]) and int(new.attrs["noted"]) == 1
    relax.analysis.well_formed(new)  # raises where it is not


def test_finish_with_another_result_has_its_type():
    flow = Dataflow(_program())
    y = next(iter(flow.values))
    result = relax.Var("y", TYPE)
    new = flow.finish([*flow.bindings, relax.VarBinding(result, y)], result)
    assert _names(Dataflow(new).values) == ["y", "y"]
    assert [int(n) for n in new["main"].ret_ty.shape] == [4, 8]
    relax.analysis.well_formed(new)  # raises where it is not
