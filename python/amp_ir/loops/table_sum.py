# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a table's gradient compute, on any device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops import math as m
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.elements import dtype_of


@attrs.frozen(eq=False)
class TableSum:
    """A table: `base`, or zeros, to whose row `id_of(k)` row k of `rows` is added for all `items`.

    The rows of an id are summed first, times all `factors`: added one by one to a weight, each
    could be too small to change it. Or they are added `in_order`, as PyTorch's `index_add` does.
    Rows without an id get zero times the factors: nothing, unless one of these is infinite or NaN.
    The table has `height` rows of `width` elements. `counts` says whether a row is added at all.
    """

    rows: FlatBuffer
    items: int
    id_of: Callable[[Any], Any]
    out: FlatBuffer
    padding_idx: int | None
    base: FlatBuffer | None
    height: int
    width: int
    factors: Sequence[FlatBuffer] = ()
    in_order: bool = False

    def counts(self, id_: Any) -> Any:
        """Return whether the rows of an id count: outside of the table they must not be written."""
        inside = m.inside(id_, self.height)
        if self.padding_idx is None:
            return inside
        return tirx.all(inside, tirx.NE(id_, tirx.const(self.padding_idx, "int32")))

    def scaled(self, total: Any) -> Any:
        """Return the sum of an id's rows times the factors."""
        for factor in self.factors:
            total = total * m.cast(factor.load(0), dtype_of(total))
        return total

    @property
    def reaches_all(self) -> Any | None:
        """Return whether rows without an id become NaN; None where they cannot."""
        found = None
        for factor in self.factors:
            number = factor.load(0)
            largest = m.constant(math.inf, dtype_of(number))
            infinite = tirx.any(tirx.EQ(number, largest), tirx.EQ(number, -largest))
            this = tirx.any(m.isnan(number), infinite)
            found = this if found is None else tirx.any(found, this)
        return found
