# SPDX-License-Identifier: Apache-2.0
"""What a step needs, from its plan alone: bytes call by call, parameters, arithmetic."""

from __future__ import annotations

import pytest
import torch

import amp_ir
from amp_ir import errors
from amp_ir.api import lower
from amp_ir.api.measure import program_on_copies
from amp_ir.demo.workloads import WORKLOADS

ROWS, WIDTH = 8, 32


def traced(name: str = "mlp", amp_dtype: str = "bfloat16") -> amp_ir.StepModule:
    training = WORKLOADS[name].make(small=True)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    return amp_ir.autocast(mod, args, amp_dtype=amp_dtype)


@pytest.mark.parametrize("disable_fusion", [False, True])
def test_the_trace_of_memory_has_every_call_and_its_largest_entry_is_the_peak(disable_fusion: bool):
    mod = traced("lstm")
    trace = amp_ir.trace_memory(mod, "cpu", disable_fusion=disable_fusion)
    plan = lower(mod, disable_fusion=disable_fusion).plan
    assert [name for name, _ in trace] == [", ".join(call.ops) for call in plan.calls]
    gaps = plan.arena_bytes - plan.lower_bound_bytes
    assert max(live for _, live in trace) == pytest.approx((plan.peak_bytes - gaps) / 2**20)
    if not disable_fusion:
        assert max(live for _, live in trace) <= amp_ir.get_peak_memory(mod, "cpu")
    without = amp_ir.trace_memory(mod, "cpu", disable_fusion=disable_fusion, include_param=False)
    state = plan.state_bytes / 2**20
    for (_, all_of_it), (_, rest) in zip(trace, without, strict=True):
        assert all_of_it - rest == pytest.approx(state)


def test_the_size_of_parameters_has_a_tied_one_once():
    first, second = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    model = torch.nn.Sequential(first, torch.nn.ReLU(), second)
    mod, _ = amp_ir.trace_model(model, (torch.randn(ROWS, WIDTH),))
    assert amp_ir.get_param_size(mod) == (WIDTH**2 + 2 * WIDTH) * 4 / 2**20


def test_the_arithmetic_of_three_layers_is_that_of_their_matmuls_and_little_more():
    # Three layers forward; backward two products each, but none for the batch.
    products = 8 * 2 * ROWS * WIDTH * WIDTH / 1e9
    mod = traced()
    # The update is a product and a sum for each of 3 (32^2 + 32) parameters; the loss, ReLU and
    # the biases' sums, on a GPU by 32 threads whatever the rows, some for each of 8 * 32 values.
    rest = (2 * 3 * (WIDTH**2 + WIDTH) + 24 * ROWS * WIDTH) / 1e9
    # On a CPU oneDNN adds a gradient to its parameter; what a library adds is not counted.
    assert products < amp_ir.get_gflops(mod) < amp_ir.get_gflops(mod, "sm_90") < products + rest


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_without_fusion_each_op_has_a_kernel_and_results_stay(name: str):
    mod = traced(name, "float32")
    fused, single = lower(mod).plan.calls, lower(mod, disable_fusion=True).plan.calls
    assert len(single) > len(fused)
    assert {len(call.ops) for call in single} == {1}
    assert max(len(call.ops) for call in fused) > 1


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_without_fusion_a_step_computes_the_same(name: str):
    """Strictly rounded, so that nothing depends on what stays in registers."""
    results = []
    for disable_fusion in (False, True):
        mod = traced(name)
        batch = WORKLOADS[name].make(small=True).batch
        program, _, inputs = program_on_copies(
            mod, "cpu", batch, 3, rounding="strict", disable_fusion=disable_fusion
        )
        results.append([one.clone() for _ in range(3) for one in program.run(inputs)])
    for fused, single in zip(*results, strict=True):
        torch.testing.assert_close(single, fused, rtol=1e-4, atol=1e-6)


def test_profiling_takes_the_word():
    mod = traced()
    batch = WORKLOADS["mlp"].make(small=True).batch
    times = amp_ir.profile_vm_model(
        mod, "cpu", batch, warmup=1, number=2, repeat=2, disable_fusion=True
    )
    assert len(times) == 2 and all(one > 0 for one in times)


@pytest.mark.parametrize(
    "report",
    [amp_ir.get_gflops, amp_ir.get_param_size, lambda mod: amp_ir.trace_memory(mod, "cpu")],
)
def test_what_is_no_step_is_refused(report):
    with pytest.raises(errors.OptionError, match="StepModule"):
        report(torch.nn.Linear(2, 2))
