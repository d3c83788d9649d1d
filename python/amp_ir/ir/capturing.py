# SPDX-License-Identifier: Apache-2.0
"""What code around a step asks: whether it is captured, and who takes its first call."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from typing import Any

# The scalers that the capture was given, in their order; None where nothing is captured.
captured_scalers: contextvars.ContextVar[tuple[Any, ...] | None] = contextvars.ContextVar(
    "amp_ir_captured_scalers", default=None
)

# Called with a jitted step's function, its owners by name and the batch, before it is captured or
# run: the commands take a script's parts from the first call. None everywhere else.
before_call: contextvars.ContextVar[Callable[..., None] | None] = contextvars.ContextVar(
    "amp_ir_before_call", default=None
)
