# SPDX-License-Identifier: Apache-2.0
"""Settings of a thread or process, PyTorch's and ours, that change what a step computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from amp_ir.ir.annotations import described_registrations
from amp_ir.ir.location import current_precision

# Not part of PyTorch's public interface; without it, PyTorch is asked at every call.
_function_mode_count: Callable[[], int] = getattr(torch._C, "_len_torch_function_stack", lambda: 1)


def _default_device() -> str:
    # PyTorch looks through the function modes, which takes 3 us also where there are none.
    if not _function_mode_count():
        context = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
        if context is not None and getattr(context, "device_context", None) is None:
            return "cpu"
    return str(torch.get_default_device())


def _autocast_of(device: str) -> Callable[[], Any]:
    def state() -> Any:
        enabled = torch.is_autocast_enabled(device)
        return str(torch.get_autocast_dtype(device)) if enabled else "off"

    return state


# (name in a message, function that returns the current value).
_SETTINGS: tuple[tuple[str, Callable[[], Any]], ...] = (
    ("torch.autocast of the CPU", _autocast_of("cpu")),
    ("torch.autocast of the GPU", _autocast_of("cuda")),
    ("the cache of torch.autocast", torch.is_autocast_cache_enabled),
    ("the recording of gradients", torch.is_grad_enabled),
    ("the inference mode", torch.is_inference_mode_enabled),
    ("the default dtype", torch.get_default_dtype),
    ("the default device", _default_device),
    ("the use of deterministic algorithms", torch.are_deterministic_algorithms_enabled),
    ("the matmul precision of float32", torch.get_float32_matmul_precision),
    ("the precision that autocast_off or an annotation sets around the call", current_precision),
    ("what register_half_function and its like annotate", described_registrations),
)
_READERS = tuple(read for _, read in _SETTINGS)


class Ambient:
    """The settings above, as they were when this object was made."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> list[Any]:
        return [read() for read in _READERS]

    def holds(self) -> bool:
        """Return whether all settings are unchanged."""
        return self._now() == self._before

    def changes(self) -> list[str]:
        """Describe what differs."""
        return [
            f"{name} was {before} and is {now}"
            for (name, _), before, now in zip(_SETTINGS, self._before, self._now(), strict=True)
            if now != before
        ]
