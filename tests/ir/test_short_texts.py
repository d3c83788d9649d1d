# SPDX-License-Identifier: Apache-2.0
"""What a notebook or `print` shows of amp_ir's objects is a line that says how to see the rest."""

from __future__ import annotations

import torch

import amp_ir

MODEL = torch.nn.Linear(8, 3)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
BATCH = torch.randn(4, 8), torch.randn(4, 3)


def step(x, y):
    loss = torch.nn.functional.mse_loss(MODEL(x), y)
    loss.backward()
    OPTIMIZER.step()
    OPTIMIZER.zero_grad()
    return loss.detach()


def test_a_step_its_signature_and_its_plan_are_one_line_each():
    mod, args = amp_ir.trace_step(step, BATCH, model=MODEL, optimizer=OPTIMIZER)
    tensors = "takes 3 tensors of state and 2 of the batch, returns 1"
    assert repr(mod).startswith("StepModule(") and "\n" not in repr(mod)
    assert f" ops, {tensors}; .script() is the program)" in str(mod)
    assert repr(mod.signature) == f"Signature({tensors}; .inputs and .outputs name them)"
    low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    assert f"{tensors}, bfloat16; .script() is the program, .plan its dtypes)" in repr(low)
    plan = low.plan
    assert repr(plan) == (
        f"CastPlan(bfloat16, policy default: {len(plan.ops)} ops, {len(plan.casts)} casts; "
        ".summary(), .explain(module) and .list_casts() show them)"
    )
    # The text that the line names is whole.
    assert "def main(" in low.script() and len(plan.explain().splitlines()) > len(plan.ops)


def test_an_examination_an_override_and_a_verification_are_one_line_each():
    owners = {"model": MODEL, "optimizer": OPTIMIZER}
    found = amp_ir.examine(step, BATCH, **owners)
    assert repr(found) == f"Examination({found.headline()})"
    assert repr(amp_ir.Override(op="a", to="low")) == "Override(to='low', op='a')"
    errors = amp_ir.error_report(step, BATCH, seconds=0.0, **owners)
    assert repr(errors) == f"ErrorReport({str(errors).splitlines()[0]})"
