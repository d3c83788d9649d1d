# SPDX-License-Identifier: Apache-2.0
"""R torch's regions and scaler: `with_autocast`, `set_autocast`, `cuda_amp_grad_scaler`."""

from __future__ import annotations

import torch

from amp_ir.loss_scaling.grad_scaler import GradScaler


def with_autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,  # noqa: FBT001, FBT002 - R torch's own signature
    cache_enabled: bool | None = None,  # noqa: FBT001
) -> torch.autocast:
    """Return a region that casts as `torch.autocast`, in eager code and in a captured step.

    A captured step has PyTorch's casts as written. Without the region, `amp_ir.jit(...,
    amp_dtype=)` chooses the casts itself, in the backward pass and the optimizer too.
    """
    return torch.autocast(device_type, dtype, enabled=enabled, cache_enabled=cache_enabled)


def set_autocast(
    device_type: str,
    dtype: torch.dtype | None = None,
    enabled: bool = True,  # noqa: FBT001, FBT002
    cache_enabled: bool | None = None,  # noqa: FBT001
) -> torch.autocast:
    """Begin a region, and return what `unset_autocast` takes."""
    region = with_autocast(device_type, dtype, enabled, cache_enabled)
    region.__enter__()
    return region


def unset_autocast(context: torch.autocast) -> None:
    """End a region; everything is as before, the cache too."""
    context.__exit__(None, None, None)


def cuda_amp_grad_scaler(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,  # noqa: FBT001, FBT002
) -> GradScaler:
    """Return an `amp_ir.GradScaler`, for CPUs too."""
    return GradScaler(None, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
