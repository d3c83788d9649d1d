# SPDX-License-Identifier: Apache-2.0
"""Which library each heavy op of a step went to, and why not to a better one."""

from __future__ import annotations

import attrs

OWN_KERNEL = "own kernel"


@attrs.frozen
class DispatchNote:
    """Where `calls` calls of one op went: a library, or OWN_KERNEL where no library takes them.

    `reason` says why it is not the first choice; "" where it is.
    """

    op: str
    library: str
    calls: int
    reason: str = ""

    def __str__(self) -> str:
        """One line for a report."""
        times = "call" if self.calls == 1 else "calls"
        line = f"{self.op}: {self.calls} {times} -> {self.library}"
        return f"{line}, because {self.reason}" if self.reason else line


class DispatchLog:
    """Counts decisions while they are made; a note for each op, place and reason."""

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str, str], int] = {}

    def add(self, op: str, library: str, reason: str = "") -> None:
        """One call of `op` went to `library`."""
        key = (op, library, reason)
        self._calls[key] = self._calls.get(key, 0) + 1

    @property
    def notes(self) -> tuple[DispatchNote, ...]:
        """In the order in which they were first met; first choices before the others."""
        found = [DispatchNote(op, to, n, why) for (op, to, why), n in self._calls.items()]
        return tuple(sorted(found, key=lambda note: bool(note.reason)))
