# SPDX-License-Identifier: Apache-2.0
"""Timing of whole steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from amp_ir.errors import OptionError
from amp_ir.runtime.program import Program


def time_program(
    program: Program,
    batch: Sequence[torch.Tensor],
    *,
    warmup: int,
    number: int,
    repeat: int,
    in_graph: bool = True,
) -> list[float]:
    """Return milliseconds per step: `repeat` means of `number` steps, after `warmup` steps.

    On a GPU a step is one graph from the third run on, or launched call by call where `in_graph`
    is False.

    Raises:
        OptionError: `number` or `repeat` is below 1, or `warmup` below 0, or one is not an integer.
    """
    check_counts(("warmup", warmup, 0), ("number", number, 1), ("repeat", repeat, 1))
    for _ in range(warmup):
        program.run(batch, in_graph=in_graph)
    program.synchronise()
    means = []
    for _ in range(repeat):
        started = time.perf_counter()
        for _ in range(number):
            program.run(batch, in_graph=in_graph)
        program.synchronise()
        means.append((time.perf_counter() - started) / number * 1e3)
    return means


def check_counts(*counts: tuple[str, Any, int]) -> None:
    """Refuse numbers of steps below their least; each is (name, count, least).

    Raises:
        OptionError: a count is too small or no integer.
    """
    for name, count, least in counts:
        if not isinstance(count, int) or count < least:
            raise OptionError(
                f"{name}={count!r} steps cannot be run; expected a whole number of at least {least}"
            )
