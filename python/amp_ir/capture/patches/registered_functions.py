# SPDX-License-Identifier: Apache-2.0
"""Functions that the user registered with a precision, annotated for the time of a capture."""

from __future__ import annotations

from typing import Any

from amp_ir.capture.patches.restores import Restores
from amp_ir.capture.patches.thread_patches import here, patch
from amp_ir.ir.annotations import Registration

# The attribute by which a guard knows what is there outside of a capture.
REPLACES = "__amp_ir_replaces__"


def patch_annotated(restores: Restores, one: Registration) -> None:
    """Replace a registered function in this thread until `restores` run."""
    owner: Any = one.owner
    function = getattr(owner, one.name)
    held = vars(owner).get(one.name, function)
    replacement: Any = here(one.annotated(function), function)
    setattr(replacement, REPLACES, held)
    is_bound = isinstance(held, (staticmethod, classmethod))
    patch(restores, owner, one.name, staticmethod(replacement) if is_bound else replacement)
