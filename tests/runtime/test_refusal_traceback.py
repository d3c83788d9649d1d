# SPDX-License-Identifier: Apache-2.0
"""The traceback of a refusal ends at the public function; the text has the user's line."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import errors


def functions_of(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_a_refused_step_has_no_frames_of_pytorch_and_ours() -> None:
    model = nn.Linear(2, 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x) if model(x).sum() > 0 else x

    train = amp_ir.jit(step, model=model)
    with pytest.raises(
        errors.CaptureError, match=r"test_refusal_traceback.py:\d+: a tensor's val"
    ) as caught:
        train(torch.ones(1, 2))
    here = "test_a_refused_step_has_no_frames_of_pytorch_and_ours"
    assert functions_of(caught.value) == [here, "__call__"]
    with pytest.raises(errors.CaptureError) as caught:
        amp_ir.trace_step(step, (torch.ones(1, 2),), model=model)
    assert functions_of(caught.value) == [here, "call"]
    with pytest.raises(errors.OptionError) as wrong:
        amp_ir.jit(step, model=model, rounding="often")
    assert functions_of(wrong.value) == [here, "call"]


def test_what_the_step_itself_raised_keeps_its_frames() -> None:
    model = nn.Linear(2, 2)

    def loss_of(x: torch.Tensor) -> Any:
        raise KeyError("labels")

    def step(x: torch.Tensor) -> Any:
        return loss_of(model(x))

    train = amp_ir.jit(step, model=model)
    with pytest.raises(errors.CaptureError) as caught:
        train(torch.ones(1, 2))
    assert len(functions_of(caught.value)) == 2
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError) and functions_of(cause)[-2:] == ["step", "loss_of"]
