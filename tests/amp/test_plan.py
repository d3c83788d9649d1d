# SPDX-License-Identifier: Apache-2.0
"""A plan can be read, compared, kept and replayed."""

from __future__ import annotations

import json

import pytest
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.relax import op

from amp_ir.amp.autocast import autocast, plan_of
from amp_ir.amp.overrides import Override
from amp_ir.amp.plan import CastPlan
from amp_ir.errors import FileFormatError, OptionError
from random_steps import random_step
from small_programs import W, X, calls, program, two_layers


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=20, max_size=80))
def test_replaying_a_plan_gives_the_identical_module(draws):
    mod = random_step(draws)
    plan = plan_of(mod, amp_dtype="bfloat16")
    again = CastPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.hash == plan.hash
    replayed = autocast(mod, amp_dtype="bfloat16", plan=again)
    assert tvm_ffi.structural_equal(replayed, autocast(mod, amp_dtype="bfloat16"), True)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=20, max_size=80))
def test_every_cast_of_the_module_has_exactly_one_record(draws):
    mod = random_step(draws)
    out = autocast(mod, amp_dtype="bfloat16")
    recorded = [(c.variable, c.to_dtype) for c in plan_of(mod, amp_dtype="bfloat16").casts]
    found = [(v.name, str(v.ty.dtype)) for v, _ in calls(out, "amp_ir.cast")]
    assert sorted(recorded) == sorted(found)


def test_saving_and_loading(tmp_path):
    plan = plan_of(two_layers())
    plan.save(tmp_path / "plan.json")
    assert CastPlan.load(tmp_path / "plan.json") == plan


def test_one_override_changes_only_the_lines_it_is_about():
    plan = plan_of(two_layers(), amp_dtype="bfloat16")
    override = Override(module="layer.0", op="relax.matmul", to="float32")
    other = plan_of(two_layers(), amp_dtype="bfloat16", overrides=[override])
    lines = plan.diff(other).splitlines()
    assert len(lines) == 3  # the matmul, the tanh that reads it, and the count of casts
    assert lines[0].startswith(
        "lv = relax.matmul in layer.0.attention: bfloat16 -> bfloat16 becomes"
    )
    assert "Selected by Override(to='float32', op='relax.matmul', module='layer.0')" in lines[0]
    assert lines[2].startswith("casts: ")
    assert plan.diff(plan) == ""
    assert plan.hash != other.hash


def test_explain_says_why():
    text = plan_of(two_layers(), amp_dtype="bfloat16").explain("layer.0.attention")
    assert "lv = relax.matmul  bfloat16 -> bfloat16  in layer.0.attention (forward)" in text
    assert "Low inputs, float32 accumulation" in text
    assert "cast of an input: float32 -> bfloat16, shared, alone, 192 bytes" in text
    with pytest.raises(OptionError, match="no op or module of the step matches 'nowhere'"):
        plan_of(two_layers()).explain("nowhere")


def test_the_summary_counts_casts_and_dtypes():
    mod = program(lambda e, x, w: e(op.nn.softmax(e(op.matmul(x, w)))), X, W)
    lines = plan_of(mod).summary().splitlines()
    assert lines[0].startswith(
        "float16, policy default, placement cut: 1 of 2 ops touch float16; 3"
    )
    assert lines[1].startswith("values of free ops move 128 B a step, with the greedy placement")
    assert lines[2:] == [
        "  relax.matmul      float16 -> float16  x1",
        "  relax.nn.softmax  float32 -> float32  x1",
    ]


def wrong_format():
    return {**plan_of(two_layers()).to_json(), "format": 99}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (wrong_format, "the plan has format 99; expected 2; make a new plan"),
        (
            lambda: {"format": 2},
            "this is not a plan of amp_ir: plan has no amp_dtype, casts, cost_nbytes",
        ),
        (dict, "the plan has format None; expected 2"),
    ],
)
def test_what_is_no_plan_is_refused(data, message):
    with pytest.raises(FileFormatError, match=message):
        CastPlan.from_json(data())


def test_a_plan_of_another_step_or_dtype_is_refused():
    plan = plan_of(two_layers())
    with pytest.raises(OptionError, match="the plan has 7 ops and the step has 1"):
        autocast(program(lambda e, x: e(op.abs(x)), X), plan=plan)
    with pytest.raises(OptionError, match="the plan is for float16, and amp_dtype is 'bfloat16'"):
        autocast(two_layers(), plan=plan, amp_dtype="bfloat16")
