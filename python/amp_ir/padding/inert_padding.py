# SPDX-License-Identifier: Apache-2.0
"""What the padding proof is asked, and what it proves: `PaddedInput` and `InertPadding`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs

from amp_ir.padding.axes import Dimension
from amp_ir.padding.batch_conditions import BatchCondition


@attrs.frozen
class PaddedInput:
    """The padding of one tensor of the batch: its dimension by axis, and its number."""

    dimensions: Mapping[int, Dimension]
    number: float


@attrs.frozen
class PaddedResult:
    """A padded axis of a result of the step: its first n + shift entries are data."""

    axis: int
    dimension: Dimension
    shift: int


@attrs.frozen
class InertPadding:
    """What holds of a padded step: the padded axes of each result.

    It does from the least n of each dimension on, for batches that meet the conditions.
    """

    results: tuple[tuple[PaddedResult, ...], ...]
    least_sizes: Mapping[str, int]
    conditions: tuple[BatchCondition, ...] = ()

    def for_lengths_from(self, dimensions: Iterable[Dimension]) -> InertPadding:
        """Return what holds from the second sizes on: a step may branch on shorter lengths."""
        least = dict(self.least_sizes)
        for one in dimensions:
            # Of a longer second size no shorter length is known.
            least[one.name] = max(least[one.name], min(one.other_size, one.size))
        return attrs.evolve(self, least_sizes=least)
