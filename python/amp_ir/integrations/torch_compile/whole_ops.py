# SPDX-License-Identifier: Apache-2.0
"""PyTorch functions that AOTAutograd traces as ops of ours, as a capture does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from amp_ir.capture.decompositions.attention import scaled_dot_product_attention
from amp_ir.capture.decompositions.torch_functions import decompose
from amp_ir.capture.patches.restores import restoring
from amp_ir.capture.patches.thread_patches import patch_function


class _Decomposed(TorchFunctionMode):
    """A mode that calls the capture's decompositions of PyTorch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make one call of the torch API."""
        out = decompose(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if out is NotImplemented else out


@contextlib.contextmanager
def whole_ops() -> Iterator[None]:
    """Trace attention as one op inside, and what has no backward op as ops that have one."""
    with restoring() as restores, _Decomposed():
        # The mode is off inside of functions that PyTorch writes in Python, such as that of
        # torch.nn.MultiheadAttention.
        functions = torch.nn.functional
        patch_function(
            restores, functions, "scaled_dot_product_attention", scaled_dot_product_attention
        )
        patch_function(restores, torch.backends.mha, "get_fastpath_enabled", lambda: False)
        yield
