# SPDX-License-Identifier: Apache-2.0
"""Autocast on captured steps: only dtypes change, and gradients are as good as PyTorch's.

Gradient errors are against float64, in bfloat16, beside `torch.autocast` on the same step.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.amp.autocast import autocast
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_module import Role
from dataflow_graph import nodes_of
from pytorch_peer import on_any_machine
from small_workloads import WORKLOADS


class Captured:
    """A workload's step, its inputs, and gradients by name."""

    def __init__(self, name: str, seed: int) -> None:
        make, shape = WORKLOADS[name]
        torch.manual_seed(seed)
        self.model = make()
        self.batch = (torch.randn(shape), torch.randint(0, 10, shape[:1]))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def step(x, y):
            optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        self.mod, _ = amp_ir.trace_step(step, self.batch, model=self.model, optimizer=optimizer)

    @functools.cached_property
    def inputs(self) -> list[torch.Tensor]:
        batch = iter(self.mod.signature.flatten_batch(self.batch))
        values = []
        for one in self.mod.signature.inputs:
            value = next(batch) if one.role is Role.BATCH else self.mod.state[one.name]
            values.append(value.detach() if isinstance(value, torch.Tensor) else value())
        return values

    def gradients(self, mod, **options):
        outputs = zip(mod.signature.outputs, interpret(mod, self.inputs, **options), strict=True)
        return {spec.name: value for spec, value in outputs if spec.role is Role.GRADIENT}

    def torch_gradients(self):
        model = copy.deepcopy(self.model)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(model(self.batch[0]), self.batch[1])
        loss.backward()
        return {f"{name}.grad": one.grad for name, one in model.named_parameters()}


def relative_error(got, exact):
    squares = [((got[name].double() - exact[name]) ** 2).sum() for name in exact]
    return float((sum(squares) / sum((one**2).sum() for one in exact.values())) ** 0.5)


@pytest.mark.parametrize("amp_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_erasing_the_casts_gives_the_captured_step_bit_for_bit(name, amp_dtype):
    captured = Captured(name, 0)
    plain = autocast(captured.mod, amp_dtype=amp_dtype).without_casts()
    expected = interpret(captured.mod, captured.inputs)
    for got, value in zip(interpret(plain, captured.inputs), expected, strict=True):
        assert torch.equal(got, value)


@pytest.mark.parametrize("out_dtype", [None, "bfloat16"])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_step_without_its_casts_is_the_captured_one_node_for_node(name, out_dtype):
    mod = Captured(name, 0).mod
    plain = autocast(mod, amp_dtype="bfloat16", out_dtype=out_dtype).without_casts()
    assert nodes_of(plain.ir) == nodes_of(mod.ir)
    assert plain.signature == mod.signature and plain.plan is None


@pytest.mark.parametrize("name", WORKLOADS)
def test_gradients_are_as_exact_as_those_of_torch_autocast(name):
    ours, theirs = 0.0, 0.0
    for seed in range(3):
        captured = Captured(name, seed)
        exact = captured.gradients(captured.mod, float_dtype=torch.float64)
        low = autocast(captured.mod, amp_dtype="bfloat16")
        ours += relative_error(captured.gradients(low), exact)
        theirs += relative_error(on_any_machine(captured.torch_gradients), exact)
    assert ours <= 1.1 * theirs  # one draw of roundings against another, three of each


def test_state_keeps_its_dtype_and_only_results_take_out_dtype():
    captured = Captured("mlp", 0)
    low = autocast(captured.mod, amp_dtype="bfloat16", out_dtype="bfloat16")
    for before, after in zip(captured.mod.signature.outputs, low.signature.outputs, strict=True):
        is_result = before.role is Role.RESULT
        assert after.dtype == ("bfloat16" if is_result else before.dtype)


def test_weight_gradients_leave_their_matmul_in_float32():
    captured = Captured("mlp", 0)
    low = autocast(captured.mod, amp_dtype="bfloat16")
    matmuls = [one for one in low.plan.ops if one.name == "relax.matmul"]
    backward = [one for one in matmuls if one.phase == "backward"]
    gradients = [one for one in backward if "gradient of a parameter" in one.reason]
    assert len(gradients) == 2
    assert all(one.results == ("float32",) for one in gradients)
    assert all(set(one.reads) == {"bfloat16"} for one in matmuls)


def test_autocast_off_leaves_a_region_as_it_is_backward_included():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            x = self.first(x)
            with amp_ir.autocast_off():
                return self.second(x)

    model = Half()

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    mod, _ = amp_ir.trace_step(step, (torch.randn(4, 8),), model=model)
    plan = autocast(mod, amp_dtype="bfloat16").plan
    matmuls = {(one.module, one.phase, one.reads) for one in plan.ops if one.name == "relax.matmul"}
    low, full = ("bfloat16", "bfloat16"), ("float32", "float32")
    assert {reads for module, _, reads in matmuls if module == "first"} == {low}
    assert {(phase, reads) for module, phase, reads in matmuls if module == "second"} == {
        ("forward", full),
        ("backward", full),
    }
