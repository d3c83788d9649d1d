# SPDX-License-Identifier: Apache-2.0
"""Silence of a step that is refused: the numbers that it goes on with are made up."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable
from typing import Any

from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import patch_function


def patch_output(restores: Restores, diagnostics: Diagnostics) -> None:
    """Let `print` and loggers show nothing in this thread, once there are diagnostics."""
    for owner, name in ((builtins, "print"), (logging.Logger, "handle")):
        patch_function(restores, owner, name, _unless_refused(getattr(owner, name), diagnostics))


def _unless_refused(show: Callable[..., None], diagnostics: Diagnostics) -> Callable[..., None]:
    def function(*values: Any, **options: Any) -> None:
        if not diagnostics:
            show(*values, **options)

    return function
