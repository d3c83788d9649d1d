# SPDX-License-Identifier: Apache-2.0
"""PyTorch's float32 as float32, whatever precision the user lets PyTorch's own ops have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from amp_ir.host.fork_safe_lock import ForkSafeLock

# Where PyTorch may round operands on a CPU: to bfloat16 after
# `torch.set_float32_matmul_precision("medium")`, to TF32 with "high" where the CPU can.
_SETTINGS: tuple[Any, ...] = tuple(
    getattr(torch.backends.mkldnn, name) for name in ("matmul", "conv")
)
_UNROUNDED = ("none", "ieee")


class _Holders:
    """The runs, of any thread, that need float32 now, and the settings to give back after them."""

    def __init__(self) -> None:
        self.lock = ForkSafeLock("PyTorch's precision was being set")
        self.count = 0
        self.changed: list[tuple[Any, str]] = []


_holders = _Holders()


@contextmanager
def full_float32() -> Iterator[None]:
    """Let PyTorch's matmuls and convolutions of float32 on a CPU round no operand.

    A step's dtypes are those of its plan: its calls of PyTorch do not follow a global setting, as
    those of other libraries and kernels cannot. Other threads see the setting meanwhile.
    """
    with _holders.lock:
        _holders.count += 1
        for setting in _SETTINGS:
            chosen = setting.fp32_precision
            if chosen not in _UNROUNDED:
                _holders.changed.append((setting, chosen))
                setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _holders.lock:
            _holders.count -= 1
            if not _holders.count:
                _give_back()


def _give_back() -> None:
    for setting, chosen in _holders.changed:
        # "none" follows a setting for more than this op, which may be where it came from.
        setting.fp32_precision = "none"
        if setting.fp32_precision != chosen:
            setting.fp32_precision = chosen
    _holders.changed.clear()
