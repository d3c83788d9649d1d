# SPDX-License-Identifier: Apache-2.0
"""The methods of torch.nn.Module that torch.fx replaces while it traces, kept from other threads.

What torch.fx puts there passes every call on, so it is needed in no thread: the graphs here are
made by the dispatcher. But it registers what it finds with the trace that is going on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import patch


@attrs.frozen
class ModuleMethods:
    """PyTorch's own methods, taken before a trace begins."""

    call: Callable[..., Any]
    lookup: Callable[..., Any]

    @classmethod
    def now(cls) -> ModuleMethods:
        """Those that are there now."""
        return cls(torch.nn.Module.__call__, torch.nn.Module.__getattr__)

    def patch_call(self, restores: Restores) -> None:
        """Let modules be called by PyTorch's own method inside of a trace."""
        patch(restores, torch.nn.Module, "__call__", self.call)

    def patch_lookup(self, restores: Restores) -> None:
        """Let attributes be found by PyTorch's own method inside of a trace."""
        patch(restores, torch.nn.Module, "__getattr__", self.lookup)
