# SPDX-License-Identifier: Apache-2.0
"""State that PyTorch leaves behind when an interrupt cuts off its own cleanup of a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import _symbolic_trace

from amp_ir.capture.patches.restores import Restores

_functorch: Any = torch._C._functorch


def clear_leftovers(restores: Restores) -> None:
    """Restore this thread's modes, and PyTorch's methods, to those of now."""
    before = vars(_symbolic_trace).get("CURRENT_PATCHER")
    functions = torch._C._len_torch_function_stack()
    dispatchers = torch._C._len_torch_dispatch_stack()
    depth = _functorch.get_dynamic_layer_stack_depth()
    records_gradients = torch.is_grad_enabled()

    def clear() -> None:
        patcher = vars(_symbolic_trace).get("CURRENT_PATCHER")
        if patcher is not before and patcher is not None:
            # PyTorch's generator restores the name itself when it is closed, and expects it.
            patcher.revert_all_patches()
        if _functorch.get_dynamic_layer_stack_depth() > depth:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while torch._C._len_torch_function_stack() > functions:
            torch._C._pop_torch_function_stack()
        while torch._C._len_torch_dispatch_stack() > dispatchers:
            _pop_dispatcher()
        torch.set_grad_enabled(records_gradients)

    restores.add(clear)


def _pop_dispatcher() -> None:
    """Remove the top mode of the stack; PyTorch's own modes are stored beside it, each by a key."""
    for key in (
        torch._C._TorchDispatchModeKey.PROXY,
        torch._C._TorchDispatchModeKey.FUNCTIONAL,
        torch._C._TorchDispatchModeKey.FAKE,
    ):
        if torch._C._get_dispatch_mode(key) is not None:
            torch._C._unset_dispatch_mode(key)
            return
    torch._C._pop_torch_dispatch_stack()
