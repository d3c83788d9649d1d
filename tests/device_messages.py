# SPDX-License-Identifier: Apache-2.0
"""What is said where a test's machine has no GPU."""

from __future__ import annotations

import torch


def no_gpu(device: str) -> str:
    """What is said of a GPU that is not here, in this build of PyTorch."""
    why = "finds no NVIDIA driver or no GPU" if torch.version.cuda else "was built without CUDA"
    return (
        f"device={device!r} is not here: PyTorch {why}. Without a GPU a step can be compiled, "
        "not run: amp-ir compile FILE --target sm_90 --out step.so"
    )
