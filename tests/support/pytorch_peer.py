# SPDX-License-Identifier: Apache-2.0
"""What PyTorch is to be compared with, also where its oneDNN was capped by a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def on_any_machine(run: Callable[[], T]) -> T:
    """The result of `run`; without PyTorch's oneDNN where that has no kernel for it.

    Under ONEDNN_MAX_CPU_ISA=AVX2 PyTorch asks oneDNN for bfloat16 LSTMs, since the CPU has the
    instructions, and is refused. A real such CPU takes PyTorch's own kernels.
    """
    try:
        return run()
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
    # Not by torch.backends.mkldnn.flags, which warns of TF32 on a CPU.
    torch._C._set_mkldnn_enabled(False)
    try:
        return run()
    finally:
        torch._C._set_mkldnn_enabled(True)
