# SPDX-License-Identifier: Apache-2.0
"""A matrix that many matmuls read is packed once, and training is what it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tvm
from torch import nn
from tvm import relax
from tvm.relax import op as R

import amp_ir
from amp_ir.api import lower
from amp_ir.dispatch import prepack_weights as packing
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.dispatch.prepack_weights import prepack_weights
from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import read
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.step_module import StepModule
from amp_ir.ir.strided_view import StridedView
from amp_ir.ir.target import cpu
from amp_ir.memory.call_cost import flop_of_calls
from amp_ir.vm import export
from amp_ir.vm.build import compile_executable
from compiled_steps import assert_compiled_alike
from planned_steps import check_plan, results_of
from relax_functions import build
from standalone_runs import run_alone, write_batch
from step_comparison import Training

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.onednn.pack")
    or not native.function("amp_ir.onednn.packed_nbytes")((32, 64), "float32"),
    reason="this build or CPU has no packed layout",
)
STEPS = 9


def calls_of(ir: tvm.IRModule) -> list[tuple[relax.Var, Any]]:
    """The library calls of main by their variables."""
    found = [(variable, read(value)) for variable, value in Dataflow(ir).values.items()]
    return [(variable, call) for variable, call in found if call is not None]


def shared(count: int, rows: int = 4, *, dtype: str = "float32", turned: bool = False) -> Any:
    """`count` products with one matrix, and one with another."""

    def body(w: Any, v: Any, *xs: Any) -> Any:
        emit = relax.BlockBuilder.current().emit
        right = emit(R.permute_dims(w)) if turned else w
        return (*(R.matmul(x, right) for x in xs), R.matmul(xs[0], v))

    w = (64, 32) if turned else (32, 64)
    operands = [((rows, 32), dtype)] * count
    return build([(w, dtype), ((32, 64), dtype), *operands], body)


@pytest.mark.parametrize("turned", [False, True])
def test_matmuls_on_one_matrix_read_one_packed_copy(turned: bool) -> None:
    log = DispatchLog()
    before = dispatch(shared(8, turned=turned))
    ir = prepack_weights(before, log=log)
    given, calls = calls_of(before), calls_of(ir)
    assert [call.symbol for _, call in calls] == [
        "amp_ir.onednn.pack",
        *["amp_ir.onednn.matmul_packed"] * 8,
        "amp_ir.onednn.matmul",
    ]
    packed, pack = calls[0]
    assert pack.b == StridedView(ir["main"].params[0], (32, 64), (1, 32) if turned else (64, 1))
    nbytes = native.function("amp_ir.onednn.packed_nbytes")((32, 64), "float32")
    assert str(packed.ty.dtype) == "uint8" and [int(n) for n in packed.ty.shape] == [nbytes]
    for (old, plain), (new, call) in zip(given[:8], calls[1:9], strict=True):
        assert new.same_as(old) and call.b == StridedView(packed, (32, 64), ())
        # But for b all is as it was.
        assert (call.a, call.out, call.epilogue) == (plain.a, plain.out, plain.epilogue)
        assert call.bias is None and plain.bias is None
    (note,) = log.notes
    assert str(note) == ("pack: 1 call -> onednn, because 8 matmuls read one prepacked matrix")


@pytest.mark.parametrize(
    "mod",
    [
        lambda: shared(7),  # too few calls to be worth a copy
        lambda: shared(8, rows=257),  # beside so many rows oneDNN's own copies cost little
        lambda: (
            shared(8, dtype="float16", turned=True)
            if not native.function("amp_ir.onednn.is_native")("float16")
            else shared(1)
        ),  # computed in float32, from a copy in it
    ],
)
def test_what_is_not_worth_it_is_left_alone(mod: Callable[[], tvm.IRModule]) -> None:
    ir = dispatch(mod())
    assert prepack_weights(ir) is ir


def test_other_libraries_are_left_alone() -> None:
    ir = dispatch(shared(8), libraries=("torch",))
    assert prepack_weights(ir) is ir


class Recurrent(nn.Module):
    """A recurrence over STEPS time steps on one weight, with a bias and an activation."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inward = nn.Linear(width, width)
        self.again = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[0])
        for one in x:
            state = torch.tanh(self.inward(one) + self.again(state))
        return state


def training() -> Training:
    model = Recurrent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(model, optimizer, step)


def batch(index: int, rows: int = 4) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(STEPS, rows, 32, generator=generator)
    return x, torch.randn(rows, 32, generator=generator)


def traced(amp_dtype: str | None, rows: int = 4) -> tuple[StepModule, tuple[Any, ...]]:
    torch.manual_seed(5)
    one = training()
    mod, args = amp_ir.trace_step(
        one.step, batch(0, rows), model=one.model, optimizer=one.optimizer
    )
    return (
        (mod, args)
        if amp_dtype is None
        else (amp_ir.autocast(mod, args, amp_dtype=amp_dtype), args)
    )


def names(plan: MemoryPlan) -> list[str]:
    return [call.name for call in plan.calls]


def test_a_step_packs_what_its_time_steps_share() -> None:
    """Forward the recurrent and the input's weight, backward the recurrent one, transposed."""
    planned = lower(traced(None)[0])
    assert names(planned.plan).count("onednn.pack") >= 2
    assert names(planned.plan).count("onednn.matmul_packed") >= 2 * (STEPS - 1)
    assert any(note.op == "pack" for note in planned.dispatched)


def test_an_updated_weight_is_packed_again() -> None:
    """A large learning rate: with the packed copy of the step before, losses would be far off."""
    assert_compiled_alike(training, batch, steps=4)


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_the_pack_is_read_before_the_weight_is_written(amp_dtype: str | None) -> None:
    plan = lower(traced(amp_dtype)[0]).plan
    check_plan(plan)
    last_pack = max(k for k, name in enumerate(names(plan)) if name == "onednn.pack")
    phases = [{place.phase for place in call.locations} for call in plan.calls]
    first_update = min(k for k, found in enumerate(phases) if "optimizer" in found)
    packed = [value for value in plan.values if value.op == "pack"]
    assert last_pack < first_update
    assert packed and all(value.last_use < first_update for value in packed)


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_a_budget_holds_with_packed_copies_and_changes_no_bit(amp_dtype: str | None) -> None:
    mod, args = traced(amp_dtype, rows=200)  # activations are then more than packed weights
    free = lower(mod)
    expected = results_of(mod, free, args)
    outside = free.plan.peak_bytes - free.plan.arena_bytes
    budget = outside + int(0.9 * free.plan.arena_bytes)
    planned = lower(mod, memory_budget=budget)
    assert planned.plan.peak_bytes <= budget
    assert "onednn.pack" in names(planned.plan)
    found = results_of(mod, planned, args)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("amp_dtype", [None, "bfloat16"])
def test_packed_and_plain_agree(amp_dtype: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    mod, args = traced(amp_dtype)
    packed = results_of(mod, lower(mod), args)
    monkeypatch.setattr(packing, "_LEAST_CALLS", 10**6)
    plain_step = lower(mod)
    assert "onednn.pack" not in names(plain_step.plan)
    plain = results_of(mod, plain_step, args)
    # Sums in another order, over three steps: some float32 roundings, bfloat16's in the state.
    tolerance = 1e-5 if amp_dtype is None else 2e-2
    assert all(
        torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance)
        for a, b in zip(packed, plain, strict=True)
    )


def test_the_arithmetic_of_packed_matmuls_is_counted() -> None:
    planned = lower(traced(None)[0])
    flop = dict(zip(names(planned.plan), flop_of_calls(planned), strict=True))
    assert flop["onednn.pack"] == 0
    assert flop["onednn.matmul_packed"] == 2 * 4 * 32 * 32


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_exported_step_packs_as_the_cpu_that_it_runs_on_wants_it(tmp_path: Path) -> None:
    """With AVX2 alone, oneDNN wants plain matrices: the buffer then holds a plain copy."""
    mod, args = traced(None)
    planned = lower(mod)
    assert "onednn.pack" in names(planned.plan)
    executable = compile_executable(planned, cpu())
    export.export_step(executable, planned, mod, cpu(), tmp_path / "step.so")
    export.save_state(mod, tmp_path / "state.npz")
    write_batch(SimpleNamespace(batch=args), mod, tmp_path)
    train = amp_ir.compile(mod)
    expected = [[float(train(*args))] for _ in range(3)]
    here, _, _ = run_alone(tmp_path)
    elsewhere, _, _ = run_alone(tmp_path, ONEDNN_MAX_CPU_ISA="AVX2")
    assert here == expected
    # Sums in another order: some float32 roundings.
    assert torch.allclose(torch.tensor(elsewhere), torch.tensor(expected), rtol=1e-5)
