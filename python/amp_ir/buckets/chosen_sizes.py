# SPDX-License-Identifier: Apache-2.0
"""Sizes of a padded dimension that are chosen while steps run, from the lengths that come.

A size costs a compilation, padding costs time in each step. Neither is known in advance, so a size
is added when the time that padding to the next larger one has cost exceeds that of a compilation:
in all, then, at most about twice what the best choice would have cost (the ski-rental rule, Karlin
et al. 1988, "Competitive snoopy caching").
"""

from __future__ import annotations

import bisect
import collections
import math

# Sizes are multiples of this, which kernels and libraries like; the first ones are powers of 2.
GRANULE = 8
_SMALLEST = 16
# Lengths that are remembered of each size.
_REMEMBERED = 512


class ChosenSizes:
    """The sizes of a dimension, of which there are at most `limit`; `first` is one of them."""

    def __init__(self, limit: int, first: int | None = None) -> None:
        self._limit = limit
        self._sizes: list[int] = []
        # Too large for the step, such as for a table of positions.
        self._too_large: int | None = None
        self._lengths: dict[int, collections.deque[int]] = {}
        self._padding_seconds: dict[int, float] = collections.defaultdict(float)
        if first is not None:
            self._add(first)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, ascending."""
        return tuple(self._sizes)

    def of(self, length: int) -> tuple[int, ...]:
        """Return the sizes, one of which holds `length`."""
        if not self._sizes or length > self._sizes[-1]:
            self._add(self._size_for(length))
        return self.sizes

    def drop(self, size: int) -> None:
        """Take a size away that is too large for the step."""
        self._sizes.remove(size)
        self._too_large = size

    def add_step(self, size: int, length: int, seconds: float, compile_seconds: float) -> None:
        """Note a step of some seconds that was padded to a size; maybe add a smaller size."""
        self._lengths[size].append(length)
        self._padding_seconds[size] += seconds * (size - length) / size
        if self._padding_seconds[size] <= compile_seconds or len(self._sizes) >= self._limit:
            return
        self._padding_seconds[size] = 0.0
        best = self._best_split(size)
        if best is not None:
            self._add(best)

    def _size_for(self, length: int) -> int:
        """Return the first size for a length: as few sizes as the step allows."""
        choices = (
            max(_SMALLEST, 1 << (length - 1).bit_length()),
            math.ceil(length / GRANULE) * GRANULE,
            length,
        )
        if self._too_large is None:
            return choices[0]
        return next((one for one in choices if one < self._too_large), length)

    def _best_split(self, size: int) -> int | None:
        """Return the size that would have saved most of the padding to this one."""
        lengths = sorted(self._lengths[size])
        granules = {math.ceil(one / GRANULE) * GRANULE for one in lengths}
        return max(
            (one for one in granules if 2 <= one < size),
            key=lambda one: bisect.bisect_right(lengths, one) * (size - one),
            default=None,
        )

    def _add(self, size: int) -> None:
        bisect.insort(self._sizes, size)
        larger = self._sizes[self._sizes.index(size) + 1 :]
        known = self._lengths.get(larger[0], ()) if larger else ()
        kept: collections.deque[int] = collections.deque(maxlen=_REMEMBERED)
        kept.extend(one for one in known if one <= size)
        self._lengths[size] = kept
        if larger:
            rest = [one for one in known if one > size]
            self._lengths[larger[0]] = collections.deque(rest, maxlen=_REMEMBERED)
