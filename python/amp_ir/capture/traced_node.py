# SPDX-License-Identifier: Apache-2.0
"""The node of a tensor in the graph that is being traced."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot


def traced_node(tensor: torch.Tensor) -> torch.fx.Node | None:
    """Return the node that makes a tensor; None where it has none, or nothing is traced."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node
