# SPDX-License-Identifier: Apache-2.0
"""Resizing to the nearest element, where PyTorch's result depends on the order in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.capture.trace import capture_step
from amp_ir.errors import CaptureError

VOLUME = torch.arange(216.0).view(2, 4, 3, 3, 3)
PLANE = torch.arange(2 * 4 * 70 * 70.0).view(2, 4, 70, 70)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def resizing(options: dict[str, Any]) -> tuple[nn.Module, Any]:
    model = nn.ReLU()
    return model, lambda x: F.interpolate(model(x), **options)


@pytest.mark.parametrize(
    ("x", "extent", "scale", "out"),
    [(VOLUME, 3, 1.3, 3), (PLANE, 70, 2.009, 140)],
    ids=["volume", "plane"],
)
def test_a_scale_that_pytorch_passes_over_is_refused(
    x: torch.Tensor, extent: int, scale: float, out: int
) -> None:
    model, step = resizing({"scale_factor": scale})
    last = x.contiguous(memory_format=LAST[x.dim()])
    assert not torch.equal(step(x), step(last))
    with pytest.raises(CaptureError) as caught:
        capture_step(step, (last,), model=model)
    line = step.__code__.co_firstlineno
    assert str(caught.value) == (
        f"this step cannot be captured, 1 place:\n  1. step (forward), {__file__}:{line}: "
        f"F.interpolate to the nearest element of {extent} by {scale:g}, to {out}, reads other "
        "elements in PyTorch where its input has its channels last in memory. Pass size= instead "
        "of scale_factor=, or make the input contiguous: "
        f"F.interpolate(x.contiguous(), scale_factor={scale:g})"
    )


@pytest.mark.parametrize(
    ("options", "is_last"),
    [
        ({"scale_factor": 1.3}, False),
        ({"size": (3, 3, 3)}, True),
        ({"scale_factor": 2}, True),
        ({"scale_factor": 1.7}, True),
        ({"scale_factor": 1.3, "mode": "nearest-exact"}, True),
        ({"scale_factor": 1.3, "recompute_scale_factor": True}, True),
    ],
)
def test_others_read_what_pytorch_reads(options: dict[str, Any], is_last: bool) -> None:
    model, step = resizing(options)
    x = VOLUME.contiguous(memory_format=torch.channels_last_3d) if is_last else VOLUME
    assert torch.equal(amp_ir.jit(step, model=model)(x), step(x))
