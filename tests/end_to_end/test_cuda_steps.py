# SPDX-License-Identifier: Apache-2.0
"""Whole training steps for CUDA, run in the emulator with stand-ins for the libraries."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch

import amp_ir
from amp_ir.demo.workloads import WORKLOADS
from cuda_emulator import in_emulator

STEPS = 2


def made(name: str) -> Any:
    """A workload; the second word of its name is the layout of its parameters."""
    name, _, form = name.partition(" ")
    training = WORKLOADS[name].make(small=True)
    if form:
        training.model.to(memory_format=getattr(torch, form))
    return training


def captured(name: str, amp_dtype: str | None) -> tuple[Any, amp_ir.StepModule]:
    training = made(name)
    mod, args = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    if amp_dtype is not None:
        mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    return training, mod


# Of the loss, relative. In float32 only the order of sums differs; in low precision a value that
# rounds the other way is 2^-9 (bfloat16) or 2^-12 (float16) off, of which a loss is the average.
# ssd keeps the 3 hardest negatives, and a rounding changes which these are: float32 alone.
@pytest.mark.parametrize(
    ("name", "amp_dtype", "rtol"),
    [
        ("mlp", None, 1e-5),
        ("mlp", "float16", 2e-4),
        ("lstm", "bfloat16", 2e-3),
        ("bert1", "bfloat16", 2e-3),
        ("gpt2", "float16", 2e-4),
        ("resnet50", "bfloat16", 2e-3),
        ("resnet50 channels_last", "bfloat16", 4e-3),
        ("resnet50 channels_last", None, 1e-5),
        ("ssd", None, 1e-5),
    ],
)
@in_emulator
def test_a_step_trains_as_pytorch_does_and_asks_for_launches_alone(name, amp_dtype, rtol):
    from cuda_emulator import device, steps

    steps.register_libraries()
    eager = made(name)
    expected = [eager.step(*eager.batch).item() for _ in range(STEPS)]
    training, mod = captured(name, amp_dtype)
    step = steps.compile_step(mod)
    state = [one for one in mod.state.values() if isinstance(one, torch.Tensor)]
    before = [one.detach().clone() for one in state]
    losses, after = [], []
    for order in (contextlib.nullcontext(), device.reversed_order()):
        with torch.no_grad():
            torch._foreach_copy_(state, before)
        device.counters()
        with order:
            losses.append([step(*training.batch).item() for _ in range(STEPS)])
        seen = device.counters()
        assert seen.launches > 0
        assert (seen.allocations, seen.frees, seen.copies, seen.synchronisations) == (0, 0, 0, 0)
        after.append([one.detach().clone() for one in state])
    np.testing.assert_allclose(losses[0], expected, rtol=rtol)
    # No race, in no kernel: every thread and every block in the other order, and not a bit differs.
    assert losses[0] == losses[1]
    for forward, backward in zip(*after, strict=True):
        assert torch.equal(forward, backward)


@in_emulator
def test_a_captured_step_is_replayed_with_what_is_in_memory():
    from cuda_emulator import device, steps

    steps.register_libraries()
    eager = WORKLOADS["mlp"].make(small=True)
    expected = [eager.step(*eager.batch).item() for _ in range(4)]
    training, mod = captured("mlp", None)
    step = steps.compile_step(mod)
    program = step._program
    losses = [step(*training.batch).item()]  # loads modules, as a recording must not
    with device.captured() as graph:
        (result,) = program.run(training.batch)
    for _ in range(3):
        device.counters()
        graph.launch()
        assert device.counters().graph_launches == 1
        losses.append(result.item())
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
