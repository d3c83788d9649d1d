# SPDX-License-Identifier: Apache-2.0
"""Regions of the user's step in which `torch.autocast` is disabled: their ops keep their dtypes.

The step is traced without autocast, so such a region changes nothing there; `amp_ir.autocast` must
later leave its ops alone, and their backward pass too. Two calls make such a region:
`torch.autocast(..., enabled=False)`, and `torch.amp.custom_fwd(cast_inputs=torch.float32)`.
An enabled region needs no mark: PyTorch itself writes its casts into the trace.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from amp_ir.capture.chosen_rows import as_tensors
from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import here, patch, patch_function
from amp_ir.ir.location import precision_of_region


def mark_autocast_regions(restores: Restores, device_types: frozenset[str]) -> None:
    """Mark ops traced in regions without autocast; regions of other devices have no effect."""
    open_regions: list[contextlib.AbstractContextManager[None]] = []
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def marked_enter(region: Any) -> Any:
        # Inside of a custom function's backward, PyTorch repeats the settings of its forward.
        mark: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if region.device in device_types and torch._C._current_autograd_node() is None:
            mark = precision_of_region("rules" if region._enabled else "off")
        result = enter(region)
        mark.__enter__()
        open_regions.append(mark)
        return result

    def marked_leave(region: Any, *error: Any) -> Any:
        open_regions.pop().__exit__(*error)
        return leave(region, *error)

    patch_function(restores, torch.autocast, "__enter__", marked_enter)
    patch_function(restores, torch.autocast, "__exit__", marked_leave)
    apply: Any = torch.autograd.Function.apply
    marked = here(_marked_apply(apply, device_types), apply.__func__)
    patch(restores, torch.autograd.Function, "apply", classmethod(marked))


def _marked_apply(apply: Any, device_types: frozenset[str]) -> Callable[..., Any]:
    def marked(function: Any, *args: Any, **kwargs: Any) -> Any:
        args = as_tensors(function, args)
        if not _runs_in_float32(function.forward, device_types):
            return apply.__func__(function, *args, **kwargs)
        with precision_of_region("off"):
            return apply.__func__(function, *args, **kwargs)

    return marked


def _runs_in_float32(forward: Callable[..., Any], device_types: frozenset[str]) -> bool:
    """Return whether a custom function's forward has custom_fwd(cast_inputs=float32)."""
    if getattr(forward, "__module__", None) is None or not hasattr(forward, "__wrapped__"):
        return False
    bound = inspect.getclosurevars(forward).nonlocals
    return bound.get("cast_inputs") is torch.float32 and bound.get("device_type") in device_types
