# SPDX-License-Identifier: Apache-2.0
"""The memory of a training step, by the operating system's count of the resident set."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from amp_ir.demo.workloads import Training


def measured_bytes(step: Callable[[], Any], known: Iterable[torch.Tensor]) -> int:
    """Return the bytes in use at most during two steps: `known`, allocated before, and the rise.

    Freed memory is returned to the system first, so that a step cannot reuse it uncounted.
    """

    def two_steps() -> None:
        step()
        step()

    tensors = {id(one): one for one in known}
    there = {key: one.numel() * one.element_size() for key, one in tensors.items()}
    for one in tensors.values():
        # The pages of new state are the system's zeros until they are written.
        one.detach().copy_(one.detach().clone())
    return sum(there.values()) + rise_of_peak(two_steps)


def rise_of_peak(work: Callable[[], Any]) -> int:
    """Return by how many bytes the resident set rises at most during `work`."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak of the resident set
    work()
    return _status("VmHWM") - before


def tensors_of(training: Training, *, with_optimizer: bool) -> Iterator[torch.Tensor]:
    """Return the tensors before a step: parameters, buffers, batch, perhaps optimizer state."""
    yield from training.model.parameters()
    yield from training.model.buffers()
    yield from training.batch
    if with_optimizer:
        for state in training.optimizer.state.values():
            yield from (one for one in state.values() if isinstance(one, torch.Tensor))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
