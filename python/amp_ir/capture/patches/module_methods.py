# SPDX-License-Identifier: Apache-2.0
"""The methods of torch.nn.Module that torch.fx replaces while it traces, hidden from other threads.

torch.fx's replacements forward every call, so no thread needs them: the dispatcher makes the graphs
here. But they also register modules with the active trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import patch


@attrs.frozen
class ModuleMethods:
    """PyTorch's own methods, saved before a trace begins."""

    call: Callable[..., Any]
    lookup: Callable[..., Any]

    @classmethod
    def current(cls) -> ModuleMethods:
        """Return the current methods."""
        return cls(torch.nn.Module.__call__, torch.nn.Module.__getattr__)

    def patch_call(self, restores: Restores) -> None:
        """Let modules be called by PyTorch's own method inside of a trace."""
        patch(restores, torch.nn.Module, "__call__", _forwarding(self.call))

    def patch_lookup(self, restores: Restores) -> None:
        """Let attributes be found by PyTorch's own method inside of a trace."""
        patch(restores, torch.nn.Module, "__getattr__", _forwarding(self.lookup))


def _forwarding(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a new function that calls `method`.

    `patch` restores an attribute only where it finds its own replacement. After an interrupt,
    torch.fx may have restored the method itself already, which must then stay.
    """

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return function
