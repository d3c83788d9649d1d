# SPDX-License-Identifier: Apache-2.0
"""Kernels that read only inputs are fused: fewer calls, the same bits, the same peak."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tvm import relax, tirx
from tvm.relax import op as R

from amp_ir import pipeline
from amp_ir.api import lower
from amp_ir.dialect.registry import call_op
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.ir import target as targets
from amp_ir.ir.memory_plan import MemoryRole
from amp_ir.loops.fusion import cpu_tasks
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.loops.fusion.merged_kernel import KernelMerger
from amp_ir.memory.buffers import BufferizedStep, bufferize
from amp_ir.memory.fuse_input_kernels import fuse_input_kernels
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.order_calls import order_calls
from planned_steps import (
    DRAWS,
    UPDATES,
    check_plan,
    fused,
    results_of,
    signature_of,
    traced,
    well_ordered,
)
from random_steps import random_step
from relax_functions import build as build_ir

ON_CPU = KernelMerger(cpu_tasks)


def low(x: relax.Expr) -> relax.Expr:
    return relax.BlockBuilder.current().emit(call_op("amp_ir.cast", [x], dtype="bfloat16"))


def chain(rows: int, widths: list[int]) -> tuple[Liveness, Any]:
    """Low matmuls one after another, [rows, widths[0]] to [rows, widths[-1]], of float32 inputs."""

    def body(x, *weights):
        emit = relax.BlockBuilder.current().emit
        x = low(x)
        for weight in weights:
            x = emit(R.matmul(x, low(weight), out_dtype="bfloat16"))
        return x

    shapes = [(rows, widths[0]), *zip(widths, widths[1:], strict=False)]
    ir = build_ir([(shape, "float32") for shape in shapes], body)
    signature = signature_of(ir, {})
    ir = fuse_loops(dispatch(ir, libraries=("cublaslt",)))
    live = Liveness(bufferize(ir, signature.inputs), signature.outputs)
    order_calls(live)
    return live, ir


def symbols(program: BufferizedStep) -> list[str]:
    return [call.symbol.removeprefix("amp_ir.") for call in program.calls]


MATMUL = "cublaslt.matmul"


@pytest.mark.parametrize(
    ("rows", "widths", "expected"),
    [
        # The last cast, of 512 x 512, would be held while the widest product needs all there is.
        (16, [8, 8, 8, 512, 512], ["merged_0", MATMUL, MATMUL, MATMUL, "kernel_3", MATMUL]),
        # The first matmul is the peak: what comes after it waits until it is over.
        (512, [64, 8, 8, 8], ["merged_0", MATMUL, "merged_1", MATMUL, MATMUL]),
        # Every product is the peak.
        (8, [64, 64, 64], ["merged_0", MATMUL, "kernel_1", MATMUL]),
    ],
)
def test_casts_of_weights_are_merged_as_far_as_the_peak_allows(rows, widths, expected):
    live, ir = chain(rows, widths)
    program = live.program
    calls = len(program.calls)
    assert calls == 2 * len(widths) - 1
    before = live.most
    merged = fuse_input_kernels(ir, live, ON_CPU)
    assert symbols(program) == expected
    assert Liveness(program, live.outputs).most == before
    assert well_ordered(program)
    kernels = {v.name_hint for v, f in merged.functions.items() if isinstance(f, tirx.PrimFunc)}
    assert kernels == {one for one in symbols(program) if one != MATMUL}


def test_a_merged_kernel_has_no_more_parameters_than_it_may(monkeypatch):
    monkeypatch.setattr(cpu_tasks, "MOST_PARAMETERS", 4)
    live, ir = chain(16, [8, 8, 8, 8, 512])
    merged = fuse_input_kernels(ir, live, ON_CPU)
    made = [f for v, f in merged.functions.items() if v.name_hint.startswith("merged_")]
    assert len(made) == 2 and all(len(one.params) == 4 for one in made)


@settings(max_examples=30, deadline=None)
@given(DRAWS, UPDATES)
def test_whatever_is_merged_is_in_order_and_the_peak_stays(draws, updated):
    signature = signature_of(random_step(draws), updated)
    ir = fused(draws)
    program = bufferize(ir, signature.inputs)
    live = Liveness(program, signature.outputs)
    order_calls(live)
    before = live.most
    made = [id(buffer) for call in program.calls for buffer in call.results]
    fuse_input_kernels(ir, live, ON_CPU)
    assert live.most == Liveness(program, signature.outputs).most <= before
    assert well_ordered(program)
    assert sorted(made) == sorted(id(buffer) for call in program.calls for buffer in call.results)


def test_a_step_gives_the_same_bits_in_fewer_calls(monkeypatch):
    mod, args, _ = traced("bfloat16")
    apart = lower(mod)
    expected = results_of(mod, apart, args)
    on_cpu = {"merger": ON_CPU}
    plan = pipeline.plan_memory
    monkeypatch.setattr(
        pipeline, "plan_memory", lambda *given, **by_name: plan(*given, **by_name | on_cpu)
    )
    merged = lower(mod)
    found = results_of(mod, merged, args)
    # Eight weights, and what else needs nothing but the step's inputs.
    assert len(merged.plan.calls) <= len(apart.plan.calls) - 7
    assert merged.plan.lower_bound_bytes <= apart.plan.lower_bound_bytes
    check_plan(merged.plan)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_gpus_step_casts_its_weights_in_a_launch_or_two():
    mod, _, _ = traced("bfloat16")
    planned = lower(mod, target=targets.cuda("sm_90"))
    casts = [one for one in planned.plan.calls if one.is_cast]
    assert 1 <= len(casts) <= 2
    copies = [one for one in planned.plan.values if one.role is MemoryRole.LOW_COPY]
    assert len(copies) >= 8
