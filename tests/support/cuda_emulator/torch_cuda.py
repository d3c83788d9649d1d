# SPDX-License-Identifier: Apache-2.0
"""Inside the emulating process: what amp_ir calls of torch.cuda, for the emulated device.

Tensors stay those of the host, whose memory the device shares (`steps`); streams have one order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import tvm_ffi

from cuda_emulator import device

CAPABILITY = (9, 0)
NAME = "emulated GPU"
# Little, so that what is measured at sizes that fit is small.
FREE_NBYTES = 4 << 20


class CUDAGraph:
    """What a captured stream was asked to do, as PyTorch has it."""

    recorded: device.Graph

    def replay(self) -> None:
        """Do it."""
        self.recorded.launch()


@contextlib.contextmanager
def graph(made: CUDAGraph, stream: object, capture_error_mode: str) -> Iterator[None]:
    """Record into `made`; PyTorch waits for the device before."""
    del stream, capture_error_mode
    device.synchronise()
    with device.captured() as made.recorded:
        yield


def use_torch_stream(context: Any = None) -> Any:
    """tvm_ffi's, which enters the recording where there is one."""
    return context or contextlib.nullcontext()


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Put these in the places of PyTorch's."""
    pieces: dict[str, Any] = {
        "CUDAGraph": CUDAGraph,
        "Event": device.Event,
        "Stream": object,
        "_sleep": lambda cycles: None,
        "current_device": lambda: 0,
        "current_stream": object,
        "device": lambda index: contextlib.nullcontext(),
        "device_count": lambda: 1,
        "get_device_capability": lambda index=0: CAPABILITY,
        "get_device_name": lambda index=0: NAME,
        "graph": graph,
        "is_available": lambda: True,
        "mem_get_info": lambda index=0: (FREE_NBYTES, FREE_NBYTES),
        "set_stream": lambda stream: None,
        "synchronize": lambda index=0: device.synchronise(),
    }
    with (
        mock.patch.multiple(torch.cuda, **pieces),
        mock.patch.object(tvm_ffi, "use_torch_stream", use_torch_stream),
    ):
        yield


@contextlib.contextmanager
def free_memory(nbytes: int) -> Iterator[None]:
    """PyTorch's allocator as it is on a GPU that has so many bytes left."""
    empty = torch.empty

    def allocated(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        if tensor.nbytes > nbytes:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return tensor

    left = mock.patch.object(torch.cuda, "mem_get_info", lambda index=0: (nbytes, 80 << 30))
    with left, mock.patch.object(torch, "empty", allocated):
        yield
