# SPDX-License-Identifier: Apache-2.0
"""Lengths of packed sequences, which the capture checks by a custom op."""

from __future__ import annotations

from tvm import relax

from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.registry import converts


@converts("amp_ir.checked_lengths.default")
def checked_lengths(
    ops: Emitter, lengths: relax.Expr, checked: relax.Expr, least: int, extent: int, message: str
) -> relax.Expr:
    """Return the lengths; the step is refused where they are not what it takes."""
    limits = {"least": int(least), "extent": int(extent)}
    result: relax.Expr = ops.call(
        "amp_ir.checked_lengths", lengths, checked, message=message, **limits
    )
    return result
