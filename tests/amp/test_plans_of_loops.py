# SPDX-License-Identifier: Apache-2.0
"""Decisions inside of loops: overrides select there, and the plan lists, explains and replays."""

from __future__ import annotations

import json

import attrs
import pytest
import torch
import tvm_ffi

import amp_ir
from amp_ir.amp import PrimType
from amp_ir.amp.autocast import autocast
from amp_ir.dialect.loop import NAME, loop_of
from amp_ir.errors import FileFormatError, OptionError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.report.explain import rows_of
from amp_ir.rewrites.unroll_loops import unroll_loops
from loop_models import DropoutDecoder, captured, loop_lengths

WIDTH, STEPS = 8, 20
BATCH = (torch.randn(3, STEPS, WIDTH),)
OVERRIDES = [
    amp_ir.Override(op="relax.nn.softmax", to="low"),
    amp_ir.Override(module="query", phase="forward", to="float32"),
    amp_ir.Override(parameter="*out.weight", to="float32"),
    amp_ir.Override(op="amp_ir.tanh_backward", phase="backward", to="low"),
]


@pytest.fixture(scope="module")
def step():
    torch.manual_seed(0)
    return captured(DropoutDecoder(WIDTH), BATCH, rolls=True)


@pytest.fixture(scope="module")
def unrolled():
    torch.manual_seed(0)
    return captured(DropoutDecoder(WIDTH), BATCH, rolls=False)


def bodies(mod):
    return [loop_of(call).body for call in Dataflow(mod.ir).calls(NAME).values()]


def all_ops(plan):
    return [*plan.ops, *(op for loop in plan.loops for op in loop.plan.ops)]


def selected(plan):
    """What overrides decided: the kinds of calls, without how often they are there."""
    return {
        (op.name, op.module, op.phase, op.line, op.reads, op.results, op.reason)
        for op in all_ops(plan)
        if op.rule == "override"
    }


@pytest.mark.parametrize("override", OVERRIDES)
def test_an_override_selects_in_loops_what_it_selects_in_unrolled_steps(step, unrolled, override):
    plans = [
        autocast(mod, amp_dtype="bfloat16", overrides=[override]).plan for mod in (step, unrolled)
    ]
    assert len(plans[0].loops) == 2 and not plans[1].loops
    assert selected(plans[0]) == selected(plans[1]) != set()
    assert any(op.rule == "override" for loop in plans[0].loops for op in loop.plan.ops)


def test_an_override_never_changes_the_operands_of_a_loop(step):
    mod = autocast(step, amp_dtype="bfloat16", overrides=[amp_ir.Override(op="*", to="low")])
    for call in Dataflow(mod.ir).calls(NAME).values():
        parameters = loop_of(call).body["main"].params
        for operand, parameter in zip(call.args, parameters, strict=True):
            assert str(operand.ty.dtype) == str(parameter.ty.dtype)
    assert loop_lengths(mod) == loop_lengths(step)
    back = mod.without_casts().ir
    for one, other in zip(bodies(step.with_ir(back)), bodies(step), strict=True):
        assert tvm_ffi.structural_equal(one, other)


def test_an_override_that_selects_nothing_anywhere_is_refused_with_near_names(step):
    with pytest.raises(OptionError) as caught:
        autocast(
            step, amp_dtype="bfloat16", overrides=[amp_ir.Override(op="relax.softmax", to="low")]
        )
    assert str(caught.value) == (
        "Override(to='low', op='relax.softmax') selects nothing: no op matches 'relax.softmax'; "
        "near: 'relax.nn.softmax', 'relax.sum', 'relax.tanh'"
    )


def test_rules_and_annotations_decide_in_loops(step):
    def never(args, ret_type, amp_dtype):
        return [PrimType("float32") for _ in args]

    with amp_ir.CustomTypeHint({"relax.matmul": never}):
        mod = autocast(step, amp_dtype="bfloat16")
    assert len(mod.plan.loops) == 2
    matmuls = [op for op in all_ops(mod.plan) if op.name == "relax.matmul"]
    assert {dtype for op in matmuls for dtype in op.reads} == {"float32"}


def test_each_cast_of_the_step_is_in_the_plan_once(step):
    mod = amp_ir.autocast(step, BATCH, amp_dtype="bfloat16")
    found = [(mod.ir, mod.plan)]
    found += zip(bodies(mod), [one.plan for one in mod.plan.loops], strict=True)
    for ir, plan in found:
        casts = Dataflow(ir).calls("amp_ir.cast")
        assert [
            (str(var.name), str(call.args[0].ty.dtype), str(call.ty.dtype))
            for var, call in casts.items()
        ] == [(one.variable, one.from_dtype, one.to_dtype) for one in plan.casts]
    beside = [one for one in mod.plan.casts if mod.plan.ops[one.consumer].name == NAME]
    assert beside, "weights are cast before the loop"


def test_the_row_of_a_loop_has_the_dtypes_of_its_operands_and_results(step):
    mod = amp_ir.autocast(step, BATCH, amp_dtype="bfloat16")
    planned = {op.variable: op for op in mod.plan.ops if op.name == NAME}
    calls = Dataflow(mod.ir).calls(NAME)
    for variable, call in calls.items():
        row = planned[str(variable.name)]
        assert row.reads == tuple(str(one.ty.dtype) for one in call.args)
        assert row.results == tuple(str(one.dtype) for one in call.ty.fields)
    forward, backward = planned.values()
    assert set(forward.reads) == {"float32", "bfloat16", "int64"}
    assert set(backward.results) == {"float32", "bfloat16"}
    after = [op for op in mod.plan.ops if backward.id in op.sources]
    stored = {pair for op in after for pair in zip(op.left, op.reads, strict=True)}
    assert ("bfloat16", "float32") in stored, "a cast widens what the loop stores low"
    assert "amp_ir.loop  float32+bfloat16+int64 -> float32+bool" in mod.plan.explain(NAME)


def test_texts_say_in_which_loop_and_how_often(step):
    plan = amp_ir.autocast(step, BATCH, amp_dtype="bfloat16").plan
    forward = plan.ops[plan.loops[0].id]
    where = f", in each of {STEPS - 1} steps of {forward.variable}"
    cast = "drop (forward): bfloat16 -> float32 for amp_ir.dropout, 48 elements, of lv15, fused"
    assert cast + where in plan.list_casts().splitlines()
    heads = [line for line in plan.explain("*softmax").splitlines() if " = " in line]
    assert any(line.endswith(where) for line in heads)
    assert any("in each" not in line for line in heads)
    lines = plan.summary().splitlines()
    assert lines[2].startswith(f"of these{where.replace(',', '')}, the loop in ")
    total = len(plan.ops) + sum(len(one.plan.ops) for one in plan.loops)
    assert f" of {total} ops touch bfloat16" in lines[0]
    shown = rows_of(plan, "query", views=True)
    assert {row.steps for row in shown if row.is_in_loop} == {STEPS - 1, STEPS - 3}


def test_a_saved_plan_with_loops_gives_the_same_program_again(step, tmp_path):
    mod = autocast(step, amp_dtype="bfloat16", overrides=OVERRIDES)
    mod.plan.save(tmp_path / "plan.json")
    plan = amp_ir.CastPlan.load(tmp_path / "plan.json")
    assert plan == mod.plan and plan.hash == mod.plan.hash
    again = autocast(step, amp_dtype="bfloat16", plan=plan)
    assert tvm_ffi.structural_equal(again.ir, mod.ir, map_free_vars=True)
    plain = autocast(step, amp_dtype="bfloat16").plan
    assert plain.hash != plan.hash
    assert "in each of" in plain.diff(plan) and not plan.diff(again.plan)


def test_a_plan_without_the_bodies_of_loops_is_refused(step):
    plan = autocast(step, amp_dtype="bfloat16").plan
    with pytest.raises(OptionError) as caught:
        autocast(step, amp_dtype="bfloat16", plan=attrs.evolve(plan, loops=()))
    assert str(caught.value) == (
        f"the plan has no decisions for the body of the loop that is op {plan.loops[0].id} of the "
        "step; make a new plan"
    )
    data = json.loads(json.dumps(plan.to_json()))
    data["loops"][0]["id"] += 1
    with pytest.raises(FileFormatError, match="which is that of no loop"):
        amp_ir.CastPlan.from_json(data)


def test_a_plan_of_unrolled_steps_unrolls(step):
    flat = step.with_ir(unroll_loops(step.ir))
    plan = amp_ir.autocast(flat, BATCH, amp_dtype="bfloat16").plan
    again = amp_ir.autocast(step, BATCH, amp_dtype="bfloat16", plan=plan)
    assert not loop_lengths(again) and again.plan == plan


def test_kernels_and_traffic_of_bodies_are_counted_for_all_steps(step):
    plan = amp_ir.explain_plan(amp_ir.autocast(step, BATCH, amp_dtype="bfloat16"))
    for loop in plan.loops:
        assert any(op.kernel >= 0 for op in loop.plan.ops)
        assert loop.plan.moved
    inside = sum(one.nbytes * loop.length for loop in plan.loops for one in loop.plan.moved)
    assert 0 < inside < sum(one.nbytes for one in plan.moved)
