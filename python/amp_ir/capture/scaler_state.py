# SPDX-License-Identifier: Apache-2.0
"""The tensors of loss scalers as state of a step."""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.capture.state import ScalerState, StateTensor
from amp_ir.ir.step_log import StepLog
from amp_ir.ir.step_module import Role

# The attribute of a scaler's log; torch's own scalers get one too.
LOG_KEY = "_amp_ir_log"


def find_scaler_state(scalers: list[Any], device: torch.device) -> list[ScalerState]:
    """Return the state of each scaler; make the tensors that PyTorch makes at the first use."""
    return [_state_of(scaler, f"scaler{index}", device) for index, scaler in enumerate(scalers)]


def _state_of(scaler: Any, name: str, device: torch.device) -> ScalerState:
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    own = vars(scaler)
    if own.get("_hysteresis_tracker") is None:
        own["_hysteresis_tracker"] = torch.ones((), dtype=torch.int32, device=device)
    if own.get(LOG_KEY) is None:
        own[LOG_KEY] = StepLog.empty(device)

    def named(key: str, tensor: torch.Tensor) -> StateTensor:
        return StateTensor(f"{name}.{key}", Role.SCALER_STATE, tensor)

    log = own[LOG_KEY]
    return ScalerState(
        scaler,
        scale=named("scale", scaler._scale),
        growth_tracker=named("growth_tracker", scaler._growth_tracker),
        hysteresis_tracker=named("hysteresis_tracker", own["_hysteresis_tracker"]),
        ring=named("ring", log.ring),
        counts=named("counts", log.counts),
    )
