# SPDX-License-Identifier: Apache-2.0
"""`explain_plan`: the plan with the kernels that the step really gets."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.api import lower
from planned_network import captured


def test_ops_of_one_kernel_share_a_number_and_decisions_stay():
    mod = captured()
    plan = amp_ir.explain_plan(mod)
    for real, estimated in zip(plan.ops, mod.plan.ops, strict=True):
        assert (real.name, real.reads, real.results) == (
            estimated.name,
            estimated.reads,
            estimated.results,
        )
    matmuls = [one.kernel for one in plan.ops if one.name == "relax.matmul" and one.kernel >= 0]
    assert len(set(matmuls)) == len(matmuls)  # each a library call
    forward = {one.name: one.kernel for one in plan.ops if one.phase == "forward"}
    assert forward["relax.multiply"] == forward["relax.mean"]
    assert forward["relax.mean"] not in matmuls
    # Read by two kernels, it is computed in each from the matmul's low result.
    assert forward["relax.nn.gelu"] == -1


def test_no_more_kernels_than_the_lowered_step_has():
    mod = captured()
    kernels = {one.kernel for one in amp_ir.explain_plan(mod).ops if one.kernel >= 0}
    bindings = lower(mod).ir["main"].body.blocks[0].bindings
    assert kernels
    assert len(kernels) <= len(bindings)


def test_casts_beside_loops_are_not_alone_and_weights_are():
    plan = amp_ir.explain_plan(captured())
    for cast in plan.casts:
        if cast.source >= 0 and plan.ops[cast.source].name == "relax.nn.gelu":
            assert not cast.is_alone
    assert any(cast.is_alone and cast.source < 0 for cast in plan.casts)


def test_a_step_without_a_plan_is_refused():
    model = nn.Linear(2, 2)
    mod, _ = amp_ir.trace_model(model, (torch.randn(1, 2),))
    with pytest.raises(amp_ir.errors.OptionError, match="has no plan; pass it through"):
        amp_ir.explain_plan(mod)


def test_a_bias_that_the_library_adds_leaves_no_cast_alone():
    plan = amp_ir.explain_plan(captured())
    sums = [cast for cast in plan.casts if plan.ops[cast.source].name == "relax.add"]
    assert not any(cast.is_alone for cast in sums if cast.source >= 0)
