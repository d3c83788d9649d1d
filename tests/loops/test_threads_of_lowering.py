# SPDX-License-Identifier: Apache-2.0
"""Threads that lower steps side by side write the programs that each would write alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tvm

from amp_ir.ir.step_module import StepModule
from amp_ir.ir.target import CompileTarget, cpu, parse_target
from amp_ir.pipeline import lower
from planned_steps import traced


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    """Let threads take turns after each microsecond, which mixes up what they share."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_switches")
def test_threads_that_lower_side_by_side_write_what_each_writes_alone() -> None:
    steps = [
        (traced("bfloat16", 24)[0], cpu()),
        (traced(None, 40)[0], parse_target("sm_90")),
    ]

    def written(step: tuple[StepModule, CompileTarget]) -> tvm.IRModule:
        return lower(step[0], target=step[1]).ir

    alone = [written(step) for step in steps]
    with ThreadPoolExecutor(len(steps)) as threads:
        together = list(threads.map(written, steps))
    for one, other in zip(alone, together, strict=True):
        tvm.ir.assert_structural_equal(one, other)
