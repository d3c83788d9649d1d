# SPDX-License-Identifier: Apache-2.0
"""Modes for PyTorch's fake tensors that are safe in threads that end.

Where a PyTorch with CUDA sees no GPU, the first thread that enters such a mode registers a stand-in
for the device. It ends with the thread, but PyTorch keeps its address: the next mode that any
thread enters reads freed memory (`ensureCUDADeviceGuardSet` in c10; 2.11 ends the process).
"""

from __future__ import annotations

import functools
import threading

import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def fake_tensor_mode(*, allow_non_fake_inputs: bool = False) -> FakeTensorMode:
    """Return a mode that any thread may enter."""
    _keep_stand_in()
    return FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)


@functools.cache
def _keep_stand_in() -> None:
    """Let a thread that never ends register PyTorch's stand-in for a GPU, if one is needed."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return
    is_registered = threading.Event()

    def hold() -> None:
        torch._C._ensureCUDADeviceGuardSet()
        is_registered.set()
        threading.Event().wait()

    threading.Thread(target=hold, name="amp_ir keeps a stand-in for a GPU", daemon=True).start()
    is_registered.wait()
