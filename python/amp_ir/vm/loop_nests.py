# SPDX-License-Identifier: Apache-2.0
"""How the loops of a kernel lie in each other, read once for all questions about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.tirx import For, ForKind

from amp_ir.ir.row_loops import is_over_rows


class LoopNests:
    """The loops of a kernel: `of_vectors` are those that contain vectors of elements."""

    def __init__(self, body: tirx.Stmt) -> None:
        order: dict[For, int] = {}

        def enter(loop: For) -> None:
            order.setdefault(loop, len(order))

        tvm_ffi.structural_walk(body, (For, enter), order="pre")
        # The loops directly in each loop; inner loops come first.
        self._inner: dict[For, list[For]] = {}
        self.of_vectors: set[For] = set()
        self.is_parallel = any(loop.kind == ForKind.PARALLEL for loop in order)
        left: list[For] = []

        def leave(loop: For) -> None:
            inner: list[For] = []
            self._inner[loop] = inner
            while left and order[left[-1]] > order[loop]:
                inner.append(left.pop())
            left.append(loop)
            if any(one.kind == ForKind.VECTORIZED or one in self.of_vectors for one in inner):
                self.of_vectors.add(loop)

        tvm_ffi.structural_walk(body, (For, leave), order="post")

    def elements(self, *, unknown: int) -> int:
        """Return the iterations of the largest nest; `unknown` for a loop of unknown extent."""
        return self._most(lambda loop: _known(loop.extent, otherwise=unknown))

    def row_elements(self) -> int:
        """Return the iterations of the loops in a row, as far as they are known."""

        def extent(loop: For) -> int:
            is_of_rows = loop.kind == ForKind.PARALLEL or is_over_rows(loop)
            return 1 if is_of_rows else _known(loop.extent, otherwise=1)

        return self._most(extent)

    def _most(self, extent: Callable[[For], int]) -> int:
        """Return the product of the extents of the largest nest."""
        most: dict[For, int] = {}
        for loop, inner in self._inner.items():
            most[loop] = extent(loop) * max((most[one] for one in inner), default=1)
        return max(most.values(), default=1)


def _known(extent: Any, *, otherwise: int) -> int:
    return int(extent) if type(extent) is tirx.IntImm else otherwise
