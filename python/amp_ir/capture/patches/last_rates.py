# SPDX-License-Identifier: Apache-2.0
"""`scheduler.get_last_lr()` in a step: what is in the param groups now, which is an input.

A scheduler keeps the learning rates that it set in a list of its own. Where they are those of the
param groups, as until someone else sets one, the step reads these. That they are is a guard.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.capture.guards.readings import Readings
from amp_ir.capture.patches.restores import restoring
from amp_ir.capture.patches.thread_patches import patch_function


class LastRates:
    """The learning rates of optimizers before a trace puts others into their param groups."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._rates = {id(one): _rates(one) for one in optimizers}

    @contextlib.contextmanager
    def followed(self, readings: Readings) -> Iterator[None]:
        """Let schedulers return the learning rates of the param groups inside."""
        original: Any = LRScheduler.get_last_lr

        def get_last_lr(scheduler: LRScheduler) -> Any:
            kept = list(scheduler._last_lr)
            own = self._rates.get(id(scheduler.optimizer))
            is_equal = own == kept and all(type(one) is float for one in kept)
            name = functools.partial(str, f"get_last_lr() of a {type(scheduler).__name__}")
            read: Callable[[], Any]
            if is_equal:
                # The param groups of a trace hold other numbers.
                read = functools.partial(_is_of_groups, scheduler)
                readings.known((id(scheduler), "get_last_lr"), name, read, before=True)
                return [group["lr"] for group in scheduler.optimizer.param_groups]
            read = functools.partial(_kept, scheduler)
            readings.add((id(scheduler), "_last_lr"), name, read)
            return original(scheduler)

        with restoring() as restores:
            patch_function(restores, LRScheduler, "get_last_lr", get_last_lr)
            yield


def _rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group.get("lr") for group in optimizer.param_groups]


def _is_of_groups(scheduler: LRScheduler) -> bool:
    return list(scheduler._last_lr) == _rates(scheduler.optimizer)


def _kept(scheduler: LRScheduler) -> tuple[float, ...]:
    with _disable_current_modes():
        return tuple(map(float, scheduler._last_lr))
