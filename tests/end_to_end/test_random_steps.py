# SPDX-License-Identifier: Apache-2.0
"""Random programs, compiled: fusion, memory plan and in-place updates against the interpreter."""

from __future__ import annotations

import math

import pytest
import torch
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax

from amp_ir.dispatch.dispatch import dispatch
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.step_module import Signature
from amp_ir.loops.cpu.emit_cpu import emit_copy
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.memory.plan_memory import plan_memory
from amp_ir.rewrites.fold_casts import fold_casts
from amp_ir.runtime.program import Program
from amp_ir.vm.build import build
from planned_steps import signature_of
from random_steps import random_inputs, random_step

# Products of up to 12 ops in float32, summed in another order than PyTorch's.
TOLERANCE = 2e-4


def compiled(ir: tvm.IRModule, signature: Signature, state: dict[str, torch.Tensor]) -> Program:
    fused = fuse_loops(dispatch(fold_casts(ir)))
    planned = plan_memory(fused, signature.inputs, signature.outputs, copy_kernel=emit_copy)
    return Program(build(planned), planned.plan, signature, state)


def check_plan(plan: MemoryPlan) -> None:
    """No two values that are alive together share a byte, unless one takes over the other's."""
    for i, a in enumerate(plan.intervals):
        assert a.offset_bytes % 64 == 0
        assert a.offset_bytes + a.nbytes <= plan.arena_bytes
        for b in plan.intervals[:i]:
            if a.first_use <= b.last_use and b.first_use <= a.last_use:
                assert (
                    a.offset_bytes + a.nbytes <= b.offset_bytes
                    or b.offset_bytes + b.nbytes <= a.offset_bytes
                )


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 400), min_size=30, max_size=60),
    st.sampled_from([{}, {0: 0}, {0: 0, 1: 1}, {0: 1, 1: 0}, {1: 0}]),
)
def test_three_steps_equal_the_interpreter(draws: list[int], updated: dict[int, int]) -> None:
    ir = random_step(draws)
    signature = signature_of(ir, updated)
    state = {f"i{k}": tensor.clone() for k, tensor in enumerate(random_inputs())}
    expected = [tensor.clone() for tensor in state.values()]
    program = compiled(ir, signature, state)
    check_plan(program.plan)
    for _ in range(3):
        outputs = interpret(ir, expected)
        results = program.run([])
        kept = [o for spec, o in zip(signature.outputs, outputs, strict=True)
                if spec.updates is None]  # fmt: skip
        for got, wanted in zip(results, kept, strict=True):
            assert_near(got, wanted)
        for spec, output in zip(signature.outputs, outputs, strict=True):
            if spec.updates is not None:
                expected[spec.updates] = torch.nan_to_num(output).clamp(-2, 2)
        for k, (name, tensor) in enumerate(state.items()):
            if k in updated.values():
                tensor.copy_(torch.nan_to_num(tensor).clamp(-2, 2))
            assert_near(tensor, expected[k])
            expected[k] = tensor.clone()
            assert name == f"i{k}"


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    scale = max(1.0, wanted.abs().nan_to_num(0, 0, 0).max().item())
    if not math.isfinite(scale):
        return
    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE * scale, equal_nan=True)


def test_an_update_that_swaps_two_states_reads_both_first() -> None:
    builder = relax.BlockBuilder()
    a, b = (relax.Var(n, relax.TensorType([4, 8], "float32")) for n in "ab")
    with builder.function("main", [a, b]):
        with builder.dataflow():
            twice = builder.emit(relax.op.add(b, b))
            thrice = builder.emit(relax.op.multiply(a, relax.const(3.0)))
            result = builder.emit_output(relax.Tuple([twice, thrice]))
        builder.emit_func_output(result)
    ir = builder.get()
    state = {"i0": torch.full((4, 8), 1.0), "i1": torch.full((4, 8), 10.0)}
    compiled(ir, signature_of(ir, {0: 0, 1: 1}), state).run([])
    assert state["i0"].eq(20.0).all() and state["i1"].eq(3.0).all()


@pytest.mark.parametrize("columns", [8, 100])
def test_a_state_read_after_its_update_keeps_its_old_value_for_the_reader(columns: int) -> None:
    builder = relax.BlockBuilder()
    a = relax.Var("a", relax.TensorType([4, columns], "float32"))
    with builder.function("main", [a]):
        with builder.dataflow():
            new = builder.emit(relax.op.multiply(a, relax.const(2.0)))
            old = builder.emit(relax.op.permute_dims(a))
            total = builder.emit(relax.op.sum(relax.op.multiply(old, old), [0]))
            result = builder.emit_output(relax.Tuple([new, old, total]))
        builder.emit_func_output(result)
    ir = builder.get()
    before = torch.randn(4, columns)
    state = {"i0": before.clone()}
    old, total = compiled(ir, signature_of(ir, {0: 0}), state).run([])
    assert torch.equal(state["i0"], before * 2) and torch.equal(old, before.T)
    torch.testing.assert_close(total, before.square().sum(1))
