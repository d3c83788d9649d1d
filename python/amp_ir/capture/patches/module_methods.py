# SPDX-License-Identifier: Apache-2.0
"""The methods of torch.nn.Module that torch.fx replaces while it traces, left as they are.

The dispatcher makes the graphs here, and torch.fx's replacements forward every call. But they also
register modules with the active trace, and other threads see them. And after each replacement
Python updates every class of modules that is imported: 0.2 ms for 800, and eight times a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import _symbolic_trace

from amp_ir.capture.patches.restores import restoring
from amp_ir.capture.patches.thread_patches import patch_function


@contextlib.contextmanager
def module_methods_kept() -> Iterator[None]:
    """Let the next trace of torch.fx in this thread replace no method of torch.nn.Module.

    A trace inside of that one, which a user's step may begin, replaces them as ever.
    """
    plain: Any = _symbolic_trace._new_patcher
    is_next = True

    @contextlib.contextmanager
    def new_patcher() -> Iterator[Any]:
        nonlocal is_next
        is_ours, is_next = is_next, False
        with plain() as patcher:
            if is_ours:
                patcher.patch_method = _unless_of_modules(patcher.patch_method)
            yield patcher

    with restoring() as restores:
        patch_function(restores, _symbolic_trace, "_new_patcher", new_patcher)
        yield


def _unless_of_modules(patch_method: Callable[..., None]) -> Callable[..., None]:
    def patch(owner: type, *args: Any, **kwargs: Any) -> None:
        if owner is not torch.nn.Module:
            patch_method(owner, *args, **kwargs)

    return patch
