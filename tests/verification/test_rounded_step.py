# SPDX-License-Identifier: Apache-2.0
"""A step that is evaluated again with other roundings gives what a whole evaluation does."""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from tvm import relax

import amp_ir
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import StepModule
from amp_ir.verification.contributions import roundings
from amp_ir.verification.gradients import StepGradients
from amp_ir.verification.rounded_step import RoundedStep, squared_errors, squared_norm

WIDE = {"float64": torch.float64, "float32": torch.float32}


@functools.cache
def low_step() -> tuple[StepModule, list[torch.Tensor], dict[str, relax.Expr]]:
    """A step with attention, whose gradient op has several results, and its gradients."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"qkv": nn.Linear(8, 24), "norm": nn.LayerNorm(8), "out": nn.Linear(8, 8)}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        q, k, v = model["qkv"](x).chunk(3, -1)
        h = F.scaled_dot_product_attention(q, k, v)
        loss = model["out"](model["norm"](F.gelu(h) + x)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    batch = (torch.randn(2, 1, 4, 8),)
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    low = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    gradients = StepGradients(mod, [mod.signature.flatten_batch(batch)])
    return low, gradients.inputs[0], gradients.wanted(low)


def evaluated(wide: torch.dtype, rounded: Set[relax.Var]) -> dict[str, torch.Tensor]:
    """Evaluate all of the step by the interpreter, with these values rounded."""
    low, inputs, wanted = low_step()
    values: dict[Any, torch.Tensor] = {}

    def on_value(variable: relax.Var, value: torch.Tensor) -> torch.Tensor:
        values[variable] = value.bfloat16().to(wide) if variable in rounded else value
        return values[variable]

    interpret(low, inputs, on_value=on_value, float_dtype=wide)
    return {name: values[variable] for name, variable in wanted.items()}


@functools.cache
def exactly_evaluated(wide: torch.dtype) -> dict[str, torch.Tensor]:
    return evaluated(wide, frozenset())


@functools.cache
def rounded_step(wide: torch.dtype, kept_nbytes: int | None) -> RoundedStep:
    """One for all examples: what any evaluation made is in no later one."""
    low, inputs, wanted = low_step()
    return RoundedStep(low, inputs, wanted, wide, torch.bfloat16, kept_nbytes)


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("kept_nbytes", [0, 2000, None])
@given(data=st.data())
def test_it_computes_what_the_interpreter_does(wide: str, kept_nbytes: int | None, data: Any):
    step = rounded_step(WIDE[wide], kept_nbytes)
    everything = [one.variable for one in roundings(low_step()[0])]
    assert len(everything) > 10
    for _ in range(2):
        rounded = set(data.draw(st.lists(st.sampled_from(everything), unique=True)))
        got, expected = step.rounded(rounded), evaluated(WIDE[wide], rounded)
        assert set(got) == set(expected)
        for name in expected:
            assert torch.equal(got[name], expected[name]), name
    assert all(torch.equal(one, step.exact[k]) for k, one in exactly_evaluated(WIDE[wide]).items())


def test_what_roundings_do_not_reach_is_not_computed_again():
    low, inputs, wanted = low_step()
    step = RoundedStep(low, inputs, wanted, torch.float64, torch.bfloat16)
    everything = [one.variable for one in roundings(low)]
    assert len(step._needed(set(everything[-1:]))) < len(step._needed(set(everything[:1])))
    assert step._needed(set()) == set()
    got = step.rounded({everything[-1]})
    assert any(got[name] is one for name, one in step.exact.items())
    assert any(got[name] is not one for name, one in step.exact.items())


def test_errors_are_squares_of_norms():
    exact = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0]), "c": torch.tensor([2.0])}
    got = {**exact, "a": torch.tensor([3.0, 6.0]), "b": torch.tensor([float("nan")])}
    assert squared_errors(got, exact) == {"a": 4.0, "b": float("inf"), "c": 0.0}
    # In float32 the square is beyond the largest number.
    assert squared_norm(torch.tensor([1e30])) == pytest.approx(1e60, rel=1e-6)
