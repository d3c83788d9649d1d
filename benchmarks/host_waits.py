# SPDX-License-Identifier: Apache-2.0
"""How often a step makes the host wait for the GPU, counted by PyTorch's profiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_STEP = "amp_ir host_waits"
# Of the runtime and of the driver: calls that return when the GPU is done, and that free its
# memory.
_WAITS = {
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy",
    "cudaMemcpy2D", "cudaFree", "cudaFreeHost", "cuCtxSynchronize", "cuStreamSynchronize",
    "cuEventSynchronize", "cuMemcpyDtoH", "cuMemcpyDtoH_v2", "cuMemFree", "cuMemFree_v2",
}  # fmt: skip
# A GPU activity: a copy to the host's pageable memory, for which the call waits. A copy to pinned
# memory goes on beside the host, and whoever reads it waits for an event.
_TO_HOST = "Memcpy DtoH (Device -> Pageable)"


def calls_of(step: Callable[[], Any]) -> Counter[str]:
    """Return the calls of CUDA's runtime and driver in a step, and its copies to the host, by name.

    Requires: the device is idle or busy with steps alone; the step has run before.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        with record_function(_STEP):
            step()
    return calls_in(found.events())


def calls_in(events: Iterable[Any]) -> Counter[str]:
    """Return the calls among a profile's events, without the profiler's own wait at its end."""
    events = list(events)
    is_host = torch.autograd.DeviceType.CPU
    (span,) = [one.time_range for one in events if one.name == _STEP and one.device_type == is_host]
    return Counter(
        one.name
        for one in events
        if (one.name.startswith("cu") and span.start <= one.time_range.start <= span.end)
        or one.name.startswith(_TO_HOST)
    )


def waits_in(calls: Counter[str]) -> dict[str, int]:
    """Return the calls that make the host wait."""
    return {
        name: count for name, count in calls.items() if name in _WAITS or name.startswith(_TO_HOST)
    }


def host_waits(step: Callable[[], Any]) -> int:
    """Return how often the step makes the host wait."""
    return sum(waits_in(calls_of(step)).values())
