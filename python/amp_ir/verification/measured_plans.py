# SPDX-License-Identifier: Apache-2.0
"""Compile the step under several plans and time them in turns, on copies of the state."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from amp_ir.api.compile import compile_into
from amp_ir.ir.step_module import StepModule
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.program import Program

# Steps of each plan at least and at most, and about how long all of them together take.
_LEAST_TURNS, _MOST_TURNS, _SECONDS = 3, 25, 5.0


@attrs.frozen
class MeasuredPlans:
    """The shortest step of each plan, in milliseconds, of so many turns."""

    milliseconds: Mapping[str, float]
    turns: int
    threads: int

    def __str__(self) -> str:
        """Say how they were measured."""
        return f"the shortest of {self.turns} steps in turns on this CPU, {self.threads} threads"


def measure_plans(
    steps: Mapping[str, StepModule], batch: Sequence[torch.Tensor], show: Callable[[str], None]
) -> MeasuredPlans:
    """Time steps of one capture that differ in their plans alone; nothing of the user's changes.

    Equal plans are one program. Each step comes right after one of its own, as in a training.

    Requires: they run on a CPU and exchange nothing with other ranks.
    """
    same = _first_of_equal(steps)
    arena = Arena()
    # One copy for all of them: each goes on training from where the one before it stopped.
    state = next(iter(steps.values())).copied_state()
    programs = {}
    for name in dict.fromkeys(same.values()):
        show(f"compiling {name}")
        programs[name] = _on(compile_into(arena, steps[name]).program, state, arena)
    show("timing steps in turns")
    started = time.perf_counter()
    for program in programs.values():
        program.run(batch)
    round_seconds = 2 * (time.perf_counter() - started)
    turns = min(_MOST_TURNS, max(_LEAST_TURNS, int(_SECONDS / max(round_seconds, 1e-9))))
    best = dict.fromkeys(programs, float("inf"))
    names, shuffled = list(programs), random.Random(0)
    for _ in range(turns):
        shuffled.shuffle(names)
        for name in names:
            programs[name].run(batch)
            started = time.perf_counter()
            programs[name].run(batch)
            best[name] = min(best[name], (time.perf_counter() - started) * 1e3)
    times = {name: best[first] for name, first in same.items()}
    return MeasuredPlans(times, turns, torch.get_num_threads())


def _first_of_equal(steps: Mapping[str, StepModule]) -> dict[str, str]:
    """Return for each step the first one with an equal plan."""
    first: dict[str, str] = {}
    hashes = {n: "" if mod.plan is None else str(mod.plan.hash) for n, mod in steps.items()}
    return {name: first.setdefault(one, name) for name, one in hashes.items()}


def _on(program: Program, state: Mapping[str, Any], arena: Arena) -> Program:
    """Return a program on other state, in an arena that others use, too."""
    return Program(
        *(program.executable, program.plan, program.signature, state, program.device),
        checks=program.checks,
        arena=arena,
    )
