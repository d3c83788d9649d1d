# SPDX-License-Identifier: Apache-2.0
"""The names of public_names.py that come with a jitted step: it imports all that they need.

`amp_ir` gets these when one of them is first used, and the others when one of those is.
"""

# First: with another PyTorch, an import below may fail without saying why.
import amp_ir.host.torch_version  # noqa: F401
from amp_ir.amp.overrides import Override
from amp_ir.amp.plan import CastPlan
from amp_ir.api import autocast, trace_step
from amp_ir.api import compile_step as compile  # noqa: A004  (torch.compile's name)
from amp_ir.ir.annotations import (
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from amp_ir.ir.location import autocast_off
from amp_ir.ir.step_module import StepModule
from amp_ir.jit_function import jit
from amp_ir.loss_scaling.grad_scaler import GradScaler
from amp_ir.loss_scaling.scale_loss import scale_loss
from amp_ir.runtime.step import CompiledStep

__all__ = [
    "CastPlan",
    "CompiledStep",
    "GradScaler",
    "Override",
    "StepModule",
    "autocast",
    "autocast_off",
    "compile",
    "float_function",
    "half_function",
    "jit",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "trace_step",
]
