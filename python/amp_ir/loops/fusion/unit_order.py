# SPDX-License-Identifier: Apache-2.0
"""Order of units (kernels, library calls and opaque kernels): which must run before which."""

from __future__ import annotations

from collections.abc import Iterator


class UnitOrder:
    """Order of units as bit sets that stay transitively closed.

    A unit knows its direct readers, not what follows from them: a new predecessor propagates from
    reader to reader, as far as it is new there.
    """

    def __init__(self) -> None:
        self.ancestors: list[int] = []
        self._readers: list[set[int]] = []

    def add(self, before: set[int]) -> int:
        """Add a unit that runs after the units `before` and all that these wait for."""
        unit = len(self.ancestors)
        self.ancestors.append(0)
        self._readers.append(set())
        self.add_before(unit, before)
        return unit

    def add_before(self, unit: int, before: set[int]) -> None:
        """Let `unit` also run after those in `before`."""
        behind = 0
        for one in before:
            behind |= (1 << one) | self.ancestors[one]
            self._readers[one].add(unit)
        self._hand_on(unit, behind)

    def _hand_on(self, unit: int, behind: int) -> None:
        waiting = [unit]
        while waiting:
            top = waiting.pop()
            if behind & ~self.ancestors[top]:
                self.ancestors[top] |= behind
                waiting += self._readers[top]

    def waits(self, unit: int, other: int) -> bool:
        """Return whether `unit` runs after `other`."""
        return bool(self.ancestors[unit] >> other & 1)

    def can_merge(self, a: int, b: int) -> bool:
        """Return whether one unit can do the work of both: no third one is between them."""
        return not self._stands_between(a, b) and not self._stands_between(b, a)

    def _stands_between(self, first: int, last: int) -> bool:
        between = self.ancestors[last] & ~self.ancestors[first] & ~(1 << first)
        return any(self.waits(unit, first) for unit in bits_of(between))

    def merge(self, gone: int, into: int) -> None:
        """Replace `gone` by `into`."""
        readers = self._readers[gone] - {into}
        # What turns out to come before `gone` later comes before `into`.
        self._readers[gone].add(into)
        self._hand_on(into, self.ancestors[gone] & ~(1 << into))
        for reader in readers:
            self.add_before(reader, {into})
        self.ancestors[into] &= ~(1 << gone)


def bits_of(bits: int) -> Iterator[int]:
    """Return the positions of the ones in a bit set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
