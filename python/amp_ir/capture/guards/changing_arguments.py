# SPDX-License-Identifier: Apache-2.0
"""The numbers among the arguments of a step that change from call to call."""

from __future__ import annotations

import collections
from typing import Any

from amp_ir.capture.guards.call_signature import CallSignature


class ChangingArguments:
    """Counts of the changes of each number, by the structure of the arguments.

    Calls of other shapes count together: the last batch of an epoch has fewer rows.
    """

    def __init__(self) -> None:
        self._counts: dict[Any, collections.Counter[str]] = {}
        self._last: dict[Any, CallSignature] = {}

    def counts(self, signature: CallSignature) -> collections.Counter[str]:
        """Return how often each number has changed, this call included, by its path."""
        counts = collections.Counter(self._counts.get(signature.structure, ()))
        last = self._last.get(signature.structure)
        if last is not None:
            counts.update(signature.changed_numbers(last))
        return counts

    def add(self, signature: CallSignature) -> None:
        """Count a call that was compiled for."""
        self._counts[signature.structure] = self.counts(signature)
        self._last[signature.structure] = signature
