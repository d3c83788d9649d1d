# SPDX-License-Identifier: Apache-2.0
"""What is said where a test's machine has no GPU."""

from __future__ import annotations

import torch

from amp_ir.cuda import driver


def no_gpu(device: str) -> str:
    """What is said of a GPU that is not here, in this build of PyTorch."""
    why = "was built without CUDA"
    if torch.version.cuda:
        why = f"sees no GPU: {driver.missing_reason()}"
    return (
        f"device={device!r} is not here: PyTorch {why}. Without a GPU a step can be compiled, "
        "not run: amp-ir compile FILE --target sm_90 --out step.so"
    )
