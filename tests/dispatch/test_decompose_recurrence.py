# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers decomposed: the ops of their steps, dtypes and locations, and the numbers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from amp_ir.dialect import DECLARATIONS, call_op
from amp_ir.dispatch.decompose_recurrence import OPS, decompose_recurrence, recurrence_as_calls
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import Location, from_span, to_span
from dialect_cases import CASES, STEPS, Case
from kernel_check import module_of

RECURRENCES = [case for case in CASES if case.op in OPS]
# bfloat16: the state or the gradient of the gates is rounded at each step (2^-9), and so read by
# the sums of the next one, 5 terms of ordinary size; the results are rounded once more.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2**-5}
# What is float32 beside low tensors.
WIDE = {"amp_ir.lstm": (3,), "amp_ir.lstm_backward": (2, 4)}


def in_dtype(case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    """The case's tensors in `dtype`, cells in float32 beside low ones."""
    tensors = case.tensors(dtype)
    for k in WIDE.get(case.op, ()):
        tensors[k] = tensors[k].to(torch.promote_types(dtype, torch.float32))
    return tensors


def calls(mod: tvm.IRModule) -> list[relax.Call]:
    bound = [one.value for one in mod["main"].body.blocks[0].bindings]
    return [one for one in bound if isinstance(one, relax.Call)]


def check(op: str, inputs: list[torch.Tensor], dtype: torch.dtype, *, reverse: bool) -> None:
    mod = module_of(op, inputs, reverse=reverse)
    decomposed = decompose_recurrence(mod)
    relax.analysis.well_formed(decomposed)
    assert not {str(one.op.name) for one in calls(decomposed)} & set(OPS)
    for got, expected in zip(interpret(decomposed, inputs), interpret(mod, inputs), strict=True):
        assert got.dtype == expected.dtype
        scale = max(float(expected.abs().max()), 1.0)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype] * scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", RECURRENCES, ids=str)
def test_the_steps_are_the_whole_op(case: Case, dtype: torch.dtype):
    check(case.op, in_dtype(case, dtype), dtype, **case.options)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(OPS), st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_the_steps_are_the_whole_op_for_any_shape(
    op: str, steps: int, rows: int, width: int, reverse: bool
):
    torch.manual_seed(steps)
    gates = 4 if "lstm" in op else 3 if "gru" in op else 1
    state, weight = (rows, width), (gates * width, width)
    shapes = {
        "amp_ir.lstm": [(steps, rows, 4 * width), weight, state, state],
        "amp_ir.lstm_backward": [
            (steps, *state), state, state, (steps, rows, 4 * width), (steps + 1, *state), weight,
        ],
        "amp_ir.gru": [(steps, rows, 3 * width), weight, (3 * width,), state],
        "amp_ir.gru_backward": [
            (steps, *state), state, (steps, rows, 4 * width), (steps + 1, *state), weight,
        ],
        **{
            f"amp_ir.rnn_{one}": shapes
            for one in ("tanh", "relu")
            for one, shapes in (
                (one, [(steps, *state), weight, state]),
                (f"{one}_backward", [(steps, *state), state, (steps + 1, *state), weight]),
            )
        },
    }  # fmt: skip
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes[op]]
    check(op, inputs, torch.float64, reverse=reverse)


def test_a_step_is_a_matmul_and_its_gates():
    (case, *_) = [one for one in RECURRENCES if one.op == "amp_ir.lstm"]
    inputs = [one[:1] if k == 0 else one for k, one in enumerate(in_dtype(case, torch.bfloat16))]
    decomposed = decompose_recurrence(module_of(case.op, inputs, reverse=False))
    ops = [str(one.op.name).rpartition(".")[2] for one in calls(decomposed)]
    # Left out: what takes parts of tensors and puts them together.
    moving = {"strided_slice", "reshape", "concat", "cast"}
    assert [one for one in ops if one not in moving] == [
        "permute_dims", "matmul", "add", "sigmoid", "sigmoid", "sigmoid", "tanh",
        "multiply", "multiply", "add", "tanh", "multiply",
    ]  # fmt: skip
    arithmetic = [one for one in calls(decomposed) if not str(one.op.name).endswith("permute_dims")]
    dtypes = {
        str(one.ty.dtype) for one in arithmetic if str(one.op.name).rpartition(".")[2] not in moving
    }
    assert dtypes == {"float32"}
    results = decomposed["main"].ret_ty.fields
    assert [str(one.dtype) for one in results] == ["bfloat16", "float32", "bfloat16"]


def test_a_matmul_reads_the_rounded_state_and_leaves_float32():
    for name in OPS:
        (case, *_) = [one for one in RECURRENCES if one.op == name]
        decomposed = decompose_recurrence(
            module_of(name, in_dtype(case, torch.bfloat16), **case.options)
        )
        matmuls = [one for one in calls(decomposed) if str(one.op.name) == "relax.matmul"]
        assert len(matmuls) == STEPS
        for one in matmuls:
            assert [str(argument.ty.dtype) for argument in one.args] == ["bfloat16"] * 2
            assert str(one.ty.dtype) == "float32"


def both_directions(*, backward_reads: bool) -> tvm.IRModule:
    """An LSTM whose output is returned, and its gradient."""
    types = [(STEPS, 2, 20), (20, 5), (2, 5), (2, 5), (STEPS, 2, 5)]
    params = [
        relax.Var(f"x{k}", relax.TensorType(shape, "float32")) for k, shape in enumerate(types)
    ]
    gates, weight, hidden, cell, grad = params
    span = to_span(Location("layers.lstm", "backward", "model.py", 12))
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            forward = builder.emit(
                call_op("amp_ir.lstm", [gates, weight, hidden, cell], span, reverse=False)
            )
            states, cells, activated = (
                builder.emit(relax.TupleGetItem(forward, k)) for k in range(3)
            )
            results = [states]
            if backward_reads:
                given = [grad, hidden, cell, activated, cells, weight]
                backward = builder.emit(call_op("amp_ir.lstm_backward", given, span, reverse=False))
                results.append(builder.emit(relax.TupleGetItem(backward, 0)))
            out = builder.emit_output(relax.Tuple(results))
        builder.emit_func_output(out)
    return builder.get()


def test_what_nobody_reads_is_not_made():
    decomposed = decompose_recurrence(both_directions(backward_reads=False))
    count = Counter(str(one.op.name) for one in calls(decomposed))
    # The states, put together once; neither cells nor activated gates.
    assert count["relax.concat"] == 1
    assert len(decomposed["main"].body.blocks[0].bindings) == len(calls(decomposed)) + 2


def test_the_gradient_reads_the_steps_of_the_forward_and_not_their_stack():
    decomposed = decompose_recurrence(both_directions(backward_reads=True))
    stacks = [
        one
        for one in calls(decomposed)
        if str(one.op.name) == "relax.concat" and len(one.ty.shape) == 3
    ]
    # The states that are returned, and the gradient of the gates.
    assert [int(one.ty.shape[0]) for one in stacks] == [STEPS + 1, STEPS]


def test_new_ops_carry_the_location_of_the_old_one():
    decomposed = decompose_recurrence(both_directions(backward_reads=True))
    places = {str(from_span(one.span)) for one in calls(decomposed)}
    assert places == {str(Location("layers.lstm", "backward", "model.py", 12))}


def test_the_log_says_that_no_library_does_it():
    log = DispatchLog()
    decompose_recurrence(both_directions(backward_reads=True), log=log)
    assert [str(note) for note in log.notes] == [
        f"{name}: 1 call -> matmuls and own kernels, because no library that amp_ir calls does it "
        "whole"
        for name in ("amp_ir.lstm", "amp_ir.lstm_backward")
    ]


def test_a_module_without_recurrence_is_left_alone():
    mod = module_of("amp_ir.cast", [torch.zeros(2, 3)], dtype="bfloat16")
    assert decompose_recurrence(mod).same_as(mod)


def test_results_that_are_returned_as_a_tuple_stay():
    inputs = in_dtype(RECURRENCES[0], torch.float32)
    mod = module_of("amp_ir.lstm", inputs, reverse=False)
    flow = Dataflow(mod)
    returned = flow.finish(flow.bindings[:1], flow.bindings[0].var)
    got = interpret(decompose_recurrence(returned), inputs)
    torch.testing.assert_close(got, interpret(returned, inputs), rtol=0, atol=1e-6)


def test_as_calls_there_is_one_call_an_op_of_the_same_type():
    mod = both_directions(backward_reads=True)
    as_calls = recurrence_as_calls(mod)
    relax.analysis.well_formed(as_calls)
    found = [one for one in calls(as_calls) if one.op.name == "relax.call_dps_packed"]
    assert [str(one.args[0].global_symbol) for one in found] == [
        "amp_ir.lstm",
        "amp_ir.lstm_backward",
    ]
    whole = [one for one in calls(mod) if str(one.op.name) in OPS]
    assert [one.ty for one in found] == [one.ty for one in whole]
    assert set(OPS) <= set(DECLARATIONS)
