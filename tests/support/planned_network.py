# SPDX-License-Identifier: Apache-2.0
"""A small network captured and cast: matmuls, an activation, a normalization."""

from __future__ import annotations

import torch
from torch import nn

import amp_ir


def captured(amp_dtype="bfloat16"):
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    batch = (torch.randn(6, 8),)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    mod, args = amp_ir.trace_step(step, batch, model=model)
    return amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
