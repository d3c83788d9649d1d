# SPDX-License-Identifier: Apache-2.0
"""Numbers of classes in bytes: `nll_loss` takes them, but not of fake tensors (PyTorch 2.13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten


def _widened(op: Any, position: int) -> Callable[..., Any]:
    """Return the op with the argument at `position` in int64, where it has bytes."""

    def call(*args: Any) -> Any:
        classes = args[position]
        if classes.dtype is torch.uint8:
            args = (*args[:position], classes.to(torch.int64), *args[position + 1 :])
        return op(*args)

    return call


CLASS_LOSSES: Mapping[Any, Callable[..., Any]] = {
    aten.nll_loss_forward.default: _widened(aten.nll_loss_forward.default, 1),
    aten.nll_loss_backward.default: _widened(aten.nll_loss_backward.default, 2),
}
