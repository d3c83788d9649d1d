# SPDX-License-Identifier: Apache-2.0
"""Dispatch log: the library that each heavy op of a step goes to, and why not a better one."""

from __future__ import annotations

import attrs

OWN_KERNEL = "own kernel"
EXTERNAL_CALL = "PyTorch (external call)"


@attrs.frozen
class DispatchNote:
    """The destination of `calls` calls of one op: a library, or OWN_KERNEL where none takes them.

    `reason` says why it is not the first choice; "" where it is.
    """

    op: str
    library: str
    calls: int
    reason: str = ""

    @property
    def is_external(self) -> bool:
        """Whether the calls are of PyTorch's own op, which amp_ir has no kernel of."""
        return self.library == EXTERNAL_CALL

    def __str__(self) -> str:
        """Return one line for a report."""
        times = "call" if self.calls == 1 else "calls"
        line = f"{self.op}: {self.calls} {times} -> {self.library}"
        return f"{line}, because {self.reason}" if self.reason else line


class DispatchLog:
    """Counts of dispatch decisions: one note per op, destination and reason."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str], int] = {}

    def add(self, op: str, library: str, reason: str = "") -> None:
        """Record that one call of `op` went to `library`."""
        key = (op, library, reason)
        self._calls[key] = self._calls.get(key, 0) + 1

    def move(self, op: str, library: str, to: str, reason: str) -> None:
        """Record that a call of `op`, logged for `library` as the first choice, goes elsewhere."""
        first = (op, library, "")
        left = self._calls.pop(first, 0) - 1
        if left > 0:
            self._calls[first] = left
        self.add(op, to, reason)

    @property
    def notes(self) -> tuple[DispatchNote, ...]:
        """Return the notes in the order of first occurrence; first choices before the others."""
        found = [DispatchNote(op, to, n, why) for (op, to, why), n in self._calls.items()]
        return tuple(sorted(found, key=lambda note: bool(note.reason)))
