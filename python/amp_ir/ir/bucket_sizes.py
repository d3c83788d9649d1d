# SPDX-License-Identifier: Apache-2.0
"""How many of the tensors that are exchanged together go into each bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

_MIB = 2**20


@attrs.frozen
class BucketSizes:
    """The bytes of buckets: `nbytes` of each, and of the first ones `first_nbytes`.

    0 is no limit. With `last_nbytes` buckets get smaller towards the end: the last has at most so
    many, the one before at most twice as many, and so on up to `nbytes`. What is exposed of an
    exchange is the bucket whose gradients are known last, and what still waits for it.
    """

    nbytes: int = 25 * _MIB
    first_nbytes: int = _MIB
    last_nbytes: int = 0

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """Return how many tensors each bucket has, of their bytes in the order of exchange.

        Without `last_nbytes` a bucket goes on until it has its bytes, as PyTorch's. With it, only
        the first does. Another ends before it has too many; a quarter of `last_nbytes` is no bucket
        of its own where there is another: what it would hide takes less time than a message more.
        """
        if not self.last_nbytes:
            return list(self._filled(sizes))
        first = next(BucketSizes(self.first_nbytes, self.first_nbytes)._filled(sizes), 0)
        return [first, *self._tapered(sizes[first:])] if sizes else []

    def _filled(self, sizes: Sequence[int]) -> Iterator[int]:
        limit, count, nbytes = self.first_nbytes, 0, 0
        for size in sizes:
            count, nbytes = count + 1, nbytes + size
            if limit and nbytes >= limit:
                yield count
                limit, count, nbytes = self.nbytes, 0, 0
        if count:
            yield count

    def _tapered(self, sizes: Sequence[int]) -> list[int]:
        """Return the counts of the buckets after the first, which are filled from the end."""
        limit, least = min(self.last_nbytes, self.nbytes), self.last_nbytes // 4
        counts, nbytes = [0], 0
        for size in reversed(sizes):
            if nbytes + size > limit and nbytes > least:
                limit = min(2 * limit, self.nbytes)
                counts.append(0)
                nbytes = 0
            counts[-1] += 1
            nbytes += size
        if nbytes <= least and len(counts) > 1:
            rest = counts.pop()
            counts[-1] += rest
        return [one for one in reversed(counts) if one]
