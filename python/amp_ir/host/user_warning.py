# SPDX-License-Identifier: Apache-2.0
"""Warnings that point at the user's line."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from pathlib import Path

# amp_ir, and what decorates its functions.
_OURS = (str(Path(__file__).parents[1]), contextlib.__file__, functools.__file__)


def warn_user(message: str) -> None:
    """Warn with the innermost line of the call stack that is outside of amp_ir.

    Python's default filter shows each message once a line.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)
