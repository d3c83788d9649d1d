# SPDX-License-Identifier: Apache-2.0
"""Origins: the op of the step for which the loops stage made each value."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import tvm

from amp_ir.loops.builders import channels_last
from amp_ir.loops.group import storage_of
from amp_ir.loops.ir import Value


class Origin(NamedTuple):
    """An op without its dialect, where it comes from, and the variable that it was bound to."""

    op: str
    span: tvm.ir.Span | None
    variable: str


class Origins:
    """Op and location of every value.

    Results of an op are recorded; values that its lowering makes on the way, such as the sums
    inside of a softmax, come between them and the results of the op before in the order of
    creation.
    """

    def __init__(self) -> None:
        self._last: list[int] = []
        self._made_for: list[Origin] = []
        # Serials are unique, so that no value can be mistaken for another.
        self._results: dict[int, Origin] = {}

    def note(
        self, results: Sequence[Value], op: str, span: tvm.ir.Span | None, variable: str
    ) -> None:
        """Record that `results`, and values made for them, belong to `op`; the first op wins."""
        origin = Origin(op.rpartition(".")[2], span, variable)
        before = self._last[-1] if self._last else -1
        for value in results:
            self._results.setdefault(value.serial, origin)
            # What is in memory: to move it to where it is already makes no result of another op.
            inner = channels_last(value)
            if inner is not None and storage_of(inner).serial > before:
                self._results.setdefault(storage_of(inner).serial, origin)
        last = max(value.serial for value in results)
        if not self._last or last > self._last[-1]:
            self._last.append(last)
            self._made_for.append(origin)

    def op(self, value: Value) -> str:
        """Return the op's name without its dialect; "" for a value made after the last op."""
        return self._origin(value).op

    def rename(self, value: Value, variable: str) -> None:
        """Record the name of one result of an op with several, or of a library's result."""
        origin = self._results.get(value.serial, Origin("", None, ""))
        self._results[value.serial] = origin._replace(variable=variable)

    def variable(self, value: Value) -> str:
        """Return the name that the op is bound to; "" for a value made after the last op."""
        return self._origin(value).variable

    def result_of(self, value: Value) -> str:
        """Return the name of a value that is itself the result of an op, "" for another."""
        origin = self._results.get(value.serial)
        return "" if origin is None else origin.variable

    def span(self, value: Value) -> tvm.ir.Span | None:
        """Return the location of the op."""
        return self._origin(value).span

    def _origin(self, value: Value) -> Origin:
        if value.serial in self._results:
            return self._results[value.serial]
        at = bisect.bisect_left(self._last, value.serial)
        return self._made_for[at] if at < len(self._made_for) else Origin("", None, "")
