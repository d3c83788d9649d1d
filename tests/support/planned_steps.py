# SPDX-License-Identifier: Apache-2.0
"""Steps whose memory is planned: how they are built, and what every plan holds."""

from __future__ import annotations

from typing import Any

import torch
import tvm
from hypothesis import strategies as st
from torch import nn
from tvm import relax

import amp_ir
from amp_ir.dispatch.dispatch import dispatch
from amp_ir.ir.memory_plan import MemoryPlan, PlannedStep
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature, StepModule
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.memory.buffers import BufferizedStep
from amp_ir.rewrites.fold_casts import fold_casts
from amp_ir.runtime.program import Program
from amp_ir.vm.build import build
from random_steps import random_step


def signature_of(ir: tvm.IRModule, updated: dict[int, int]) -> Signature:
    """All inputs are state; output k updates input `updated[k]` if it is listed."""

    def described(type_: relax.Type) -> tuple[tuple[int, ...], str]:
        return tuple(int(n) for n in type_.shape), str(type_.dtype)

    main = ir["main"]
    results = main.ret_ty.fields if isinstance(main.ret_ty, relax.TupleType) else [main.ret_ty]
    return Signature(
        tuple(
            InputSpec(f"i{k}", Role.PARAMETER, *described(parameter.ty))
            for k, parameter in enumerate(main.params)
        ),
        tuple(
            OutputSpec(f"o{k}", Role.RESULT, *described(type_), updated.get(k))
            for k, type_ in enumerate(results)
        ),
        lambda args: list(args),
        lambda tensors: tensors,
    )


UPDATES = st.sampled_from([{}, {0: 0}, {0: 0, 1: 1}, {0: 1, 1: 0}, {1: 0}])


DRAWS = st.lists(st.integers(0, 400), min_size=20, max_size=50)


class Deep(nn.Module):
    """Eight layers with dropout, whose activations wait for the backward pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [
            part
            for _ in range(8)
            for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(width))
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def traced(amp_dtype: str | None, width: int = 32) -> tuple[StepModule, tuple[Any, ...], nn.Module]:
    torch.manual_seed(3)
    model = Deep(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mod, args = amp_ir.trace_step(
        step, (torch.randn(512, width),), model=model, optimizer=optimizer
    )
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    return mod, args, model


def results_of(mod: StepModule, planned: PlannedStep, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Results of three steps, and the state after them, of a plan run on copies of the state."""
    copies = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in mod.state.items()
    }
    program = Program(build(planned), planned.plan, mod.signature, copies)
    results = [out for _ in range(3) for out in program.run(list(args))]
    return results + [value for value in copies.values() if isinstance(value, torch.Tensor)]


def fused(draws: list[int]) -> Any:
    return fuse_loops(dispatch(fold_casts(random_step(draws))))


def check_plan(plan: MemoryPlan) -> None:
    """Values that are alive together share no byte, and the arena holds them all."""
    held = [one for one in plan.values if one.offset_bytes is not None and one.nbytes]
    for k, a in enumerate(held):
        assert a.offset_bytes is not None and a.offset_bytes + a.nbytes <= plan.arena_bytes
        for b in held[:k]:
            if a.first_use <= b.last_use and b.first_use <= a.last_use:
                assert b.offset_bytes is not None
                apart = a.offset_bytes + a.nbytes <= b.offset_bytes
                assert apart or b.offset_bytes + b.nbytes <= a.offset_bytes


def well_ordered(program: BufferizedStep) -> bool:
    """Whether every value is written before it is read, by one call."""
    written: set[int] = {id(buffer) for buffer in program.inputs}
    for call in program.calls:
        reads = [buffer for buffer in call.reads if buffer.constant is None]
        if not all(id(buffer) in written for buffer in reads):
            return False
        written |= {id(buffer) for buffer in call.results}
    return True
