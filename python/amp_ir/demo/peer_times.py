# SPDX-License-Identifier: Apache-2.0
"""The time of a step beside its float32 step and PyTorch's, taken in turns in one run."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import amp_ir

_FULL = "float32"


def peer_times(
    training: Any, full: Any, low: Any, *, device: str, amp_dtype: str, turns: int
) -> dict[str, float]:
    """Return the median milliseconds of a step by who runs it, the first being amp_ir in `low`.

    The steps train the user's own model and optimizer.

    Args:
        training: a workload's or a file's step, batch, model and optimizer.
        full: its captured step.
        low: the same with casts, or `full` for float32.
        device: where to run.
        amp_dtype: the dtype of `low`.
        turns: how often each takes a turn.
    """
    steps: dict[str, Callable[..., Any]] = {f"amp_ir {amp_dtype}": _compiled(low, device)}
    if amp_dtype != _FULL:
        steps[f"amp_ir {_FULL}"] = _compiled(full, device)
    steps[f"PyTorch {_FULL}"] = training.step
    autocast_step = getattr(training, "autocast_step", None)
    if autocast_step is not None and amp_dtype != _FULL:
        dtype = getattr(torch, amp_dtype)
        steps[f"PyTorch {amp_dtype}"] = functools.partial(autocast_step, dtype=dtype)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(turns + 1):
        for name, step in steps.items():
            begin = time.perf_counter()
            step(*training.batch)
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize()
            if turn:  # the first warms up
                found[name].append((time.perf_counter() - begin) * 1e3)
    return {name: statistics.median(spent) for name, spent in found.items()}


def _compiled(mod: Any, device: str) -> Callable[..., Any]:
    step: Callable[..., Any] = amp_ir.compile(mod, device=device)
    return step
