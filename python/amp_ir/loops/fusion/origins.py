# SPDX-License-Identifier: Apache-2.0
"""Which op of the step each value of the loops stage was made for."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import tvm

from amp_ir.loops.ir import Value


class Origins:
    """Op and place of every value.

    Results of an op are noted; what its lowering makes on the way, such as the sums inside of a
    softmax, lies between them and the results of the op before in the order in which values are
    made.
    """

    def __init__(self) -> None:
        self._last: list[int] = []
        self._made_for: list[tuple[str, tvm.ir.Span | None]] = []
        # Serials are unique, so that no value can be mistaken for another.
        self._results: dict[int, tuple[str, tvm.ir.Span | None]] = {}

    def note(self, results: Sequence[Value], op: str, span: tvm.ir.Span | None) -> None:
        """`results` belong to `op`, unless they are another's already, and so does what is new."""
        origin = (op.rpartition(".")[2], span)
        for value in results:
            self._results.setdefault(value.serial, origin)
        last = max(value.serial for value in results)
        if not self._last or last > self._last[-1]:
            self._last.append(last)
            self._made_for.append(origin)

    def op(self, value: Value) -> str:
        """The op's name without its dialect; "" for a value made after the last op."""
        return self._origin(value)[0]

    def span(self, value: Value) -> tvm.ir.Span | None:
        """Where the op comes from."""
        return self._origin(value)[1]

    def _origin(self, value: Value) -> tuple[str, tvm.ir.Span | None]:
        if value.serial in self._results:
            return self._results[value.serial]
        at = bisect.bisect_left(self._last, value.serial)
        return self._made_for[at] if at < len(self._made_for) else ("", None)
