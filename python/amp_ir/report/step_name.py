# SPDX-License-Identifier: Apache-2.0
"""A step's name for people: its function and where that is defined."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any


def step_name(step: Any) -> str:
    """Return a step's name and where it is defined: "step (train.py:12)"."""
    kind = type(step)
    name = getattr(step, "__qualname__", kind.__qualname__).replace("<locals>.", "")
    code = getattr(step, "__code__", None)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name


def name_between_ranks(step: Any) -> str:
    """Return the name of a step without what one rank may have wrapped around it."""
    while isinstance(step, functools.partial):
        step = step.func
    return step_name(inspect.unwrap(step))
