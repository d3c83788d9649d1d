# SPDX-License-Identifier: Apache-2.0
"""Queries about the capture for code that a step calls while it is captured."""

from __future__ import annotations

import contextvars
from typing import Any

# The scalers that the capture was given, in their order; None where nothing is captured.
captured_scalers: contextvars.ContextVar[tuple[Any, ...] | None] = contextvars.ContextVar(
    "amp_ir_captured_scalers", default=None
)
