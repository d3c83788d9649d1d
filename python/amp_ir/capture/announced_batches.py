# SPDX-License-Identifier: Apache-2.0
"""Batches that a step will be called with, announced before its first call."""

from __future__ import annotations

from typing import Any

from amp_ir.capture.guards.call_signature import CallSignature
from amp_ir.errors import ArgumentError, OptionError

_A_BATCH = "the tuple of the step's arguments: (inputs, targets), or (batch,) for a single one"

AnnouncedBatch = tuple[CallSignature, tuple[Any, ...]]


def announced_batches(precompile: Any, max_shapes: int) -> list[AnnouncedBatch]:
    """Return the batches of the option `precompile`, each behind its signature.

    Raises:
        OptionError: it is no list of tuples, or has more shapes than `max_shapes`, which are kept.
        ArgumentError: a batch has leaves that a step cannot take.
    """
    if not isinstance(precompile, (list, tuple)):
        kind = type(precompile).__name__
        raise OptionError(f"precompile= is a {kind}, expected a list of batches, each {_A_BATCH}")
    announced: list[AnnouncedBatch] = []
    for position, batch in enumerate(precompile):
        if not isinstance(batch, tuple):
            kind = type(batch).__name__
            raise OptionError(f"precompile[{position}] is a {kind}, expected {_A_BATCH}")
        try:
            announced.append((CallSignature.of(batch)[0], batch))
        except ArgumentError as error:
            raise ArgumentError(f"precompile[{position}]: {error}") from None
    count = len({signature.key for signature, _ in announced})
    if count > max_shapes:
        raise OptionError(
            f"precompile= has batches of {count} shapes, dtypes or structures, and programs for "
            f"max_shapes={max_shapes} are kept; pass max_shapes= of at least {count}"
        )
    return announced
