# SPDX-License-Identifier: Apache-2.0
"""A step's name for people: its function and where that is defined."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any


def step_name(step: Any) -> str:
    """Return a step's name and where it is defined: "step (train.py:12)"."""
    name = function_name(step)
    code = getattr(step, "__code__", None)
    return f"{name} ({os.path.basename(code.co_filename)}:{code.co_firstlineno})" if code else name


def function_name(step: Any) -> str:
    """Return the name of a step's function, or of its class where it has none."""
    name: str = getattr(step, "__qualname__", type(step).__qualname__)
    return name.replace("<locals>.", "")


def name_between_ranks(step: Any) -> str:
    """Return the name of a step without what one rank may have wrapped around it."""
    while isinstance(step, functools.partial):
        step = step.func
    return step_name(inspect.unwrap(step))
