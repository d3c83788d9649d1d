# SPDX-License-Identifier: Apache-2.0
"""Find the part of a step around a large tensor that can be computed for some rows at a time."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import attrs
from tvm import relax

from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import variables_of
from amp_ir.ir.static_shape import shape_of
from amp_ir.memory.chunking.row_rules import Axes, is_tensor, row_axes, summed_axes

NLL_LOSS = "amp_ir.nll_loss"
# Ops without a reader elsewhere that are computed with the rows which need them.
_VIEWS_AND_NUMBERS = ("relax.permute_dims", "relax.full", "relax.zeros", "relax.ones")


# The rows of a concatenation's parts are along different axes: no rule agrees.
_NO_AXIS = -1


class _Kind(enum.Enum):
    ROWS = enum.auto()
    SUM = enum.auto()
    EARLY = enum.auto()
    BEYOND = enum.auto()


@attrs.frozen(eq=False)
class RowRegion:
    """The ops computed in chunks of rows, and what the chunks give to the rest of the step.

    `units` is the most equal chunks into which the rows of every tensor divide. `axis` has the
    axis of the rows of each variable in the region, None for a sum over all rows; `axes` those of
    the arguments of the calls. `sunk` are variables from outside that are moved into the region,
    since nothing else reads them. `live_outs` are what the rest of the step reads; `totals` the nll
    losses whose total weight is needed before the loss; `late` what has to come after the region.
    """

    root: relax.Var
    units: int
    axis: dict[relax.Var, int | None]
    axes: dict[relax.Var, Axes]
    sunk: dict[relax.Var, int]
    live_outs: frozenset[relax.Var]
    totals: dict[relax.Var, relax.Var]
    late: frozenset[relax.Var]


def find_region(
    bindings: Sequence[relax.VarBinding], result: relax.Expr, root: relax.Var
) -> RowRegion | None:
    """Return the region around `root`; None where its rows cannot be chunked.

    It holds every reader of a tensor that is about as large as `root`, and the ops between. So
    there is none if `root` itself, or what is computed from it element by element, is a result of
    the step, or if an op reads it that mixes rows, draws random numbers or is not known here.
    """
    for axis in range(len(shape_of(root))):
        if shape_of(root)[axis] > 1:
            region = _Search(bindings, result, root, axis).run()
            if region is not None:
                return region
    return None


class _Search:
    """Find the region for rows along one axis of the root.

    `kind` of a variable that depends on the root: ROWS, its rows come from rows of the root; SUM,
    every row adds to it; EARLY, it depends on the root in name only, being computed from an nll
    loss's total weight, which depends on labels; BEYOND, all others.
    """

    def __init__(
        self,
        bindings: Sequence[relax.VarBinding],
        result: relax.Expr,
        root: relax.Var,
        axis: int,
    ) -> None:
        self.position = {binding.var: k for k, binding in enumerate(bindings)}
        self.values = {binding.var: binding.value for binding in bindings}
        self.bindings = bindings
        self.root = root
        self.large = math.prod(shape_of(root)) // 2
        self.units = shape_of(root)[axis]
        self.kind: dict[relax.Var, _Kind] = {root: _Kind.ROWS}
        self.rows: dict[relax.Var, int] = {root: axis}
        self.axes: dict[relax.Var, Axes] = {}
        self.totals: dict[relax.Var, relax.Var] = {}
        self.readers: dict[relax.Var, list[relax.Var | None]] = {}
        for binding in bindings:
            for one in variables_of(binding.value):
                self.readers.setdefault(one, []).append(binding.var)
        for one in variables_of(result):
            self.readers.setdefault(one, []).append(None)

    def run(self) -> RowRegion | None:
        first = row_axes(self.values[self.root], self.rows[self.root], self.units)
        if first is None:
            return None
        self.axes[self.root] = first
        for binding in self.bindings[self.position[self.root] + 1 :]:
            self._classify(binding.var, binding.value)
        members = self._members()
        if not self._has_loss(members):
            return None
        if not all(self._may_be_chunked(one, members) for one in members):
            return None
        # Ops outside of the region may mix rows.
        self.units = math.gcd(*(shape_of(m)[self.rows[m]] for m in members if m in self.rows))
        sunk = self._sink(members)
        if sunk is None or self.units < 2:
            return None
        dependent = {one for one, kind in self.kind.items() if kind is not _Kind.EARLY}
        return RowRegion(
            root=self.root,
            units=self.units,
            axis={one: self.rows.get(one) for one in members},
            axes=self.axes,
            sunk=sunk,
            live_outs=frozenset(one for one in members if self._is_live_out(one, members)),
            totals=self.totals,
            late=frozenset(dependent - members),
        )

    def _classify(self, variable: relax.Var, value: relax.Expr) -> None:
        kinds = {self.kind[one] for one in variables_of(value) if one in self.kind}
        if not kinds:
            return
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.axes:
            self._classify_loss(variable, value)
        elif kinds == {_Kind.EARLY}:
            self.kind[variable] = _Kind.EARLY
        elif kinds & {_Kind.SUM, _Kind.BEYOND} or not isinstance(value, relax.Call):
            self.kind[variable] = _Kind.BEYOND
        else:
            self.kind[variable] = self._classify_call(variable, value)

    def _classify_loss(self, variable: relax.Var, item: relax.TupleGetItem) -> None:
        """Classify the loss of each row or of all rows, and the total weight from the labels."""
        loss = self.values[item.tuple_value]
        if item.index == 1 and not any(one in self.kind for one in loss.args[1:]):
            self.kind[variable] = _Kind.EARLY
            self.totals[variable] = item.tuple_value
        elif item.index == 0 and options_of(loss)["reduction"] == "none":
            self.kind[variable] = _Kind.ROWS
            self.rows[variable] = 0
        else:
            self.kind[variable] = _Kind.SUM

    def _classify_call(self, variable: relax.Var, call: relax.Call) -> _Kind:
        """Classify a call: whether its rows, or their sum, follow from rows of its arguments."""
        given = tuple(self._rows_of(argument) for argument in call.args)
        best: tuple[int, int, Axes] | None = None
        for axis, extent in enumerate(shape_of(call) if is_tensor(call) else ()):
            axes = row_axes(call, axis, self.units)
            if axes is not None and _agree(given, axes):
                units = math.gcd(self.units, extent)
                if best is None or units > best[0]:
                    best = (units, axis, axes)
        if best is not None:
            self.units, self.rows[variable], self.axes[variable] = best
            return _Kind.ROWS
        summed = summed_axes(call, given)
        if summed is None or self._waits_for_labels(call):
            return _Kind.BEYOND
        self.axes[variable] = summed
        # An nll loss has two results, which are classified one by one.
        return _Kind.SUM if is_tensor(call) else _Kind.ROWS

    def _waits_for_labels(self, call: relax.Call) -> bool:
        """Return whether it is a mean nll loss whose total weight is unknown before the scores."""
        is_mean = call.op.name == NLL_LOSS and options_of(call)["reduction"] == "mean"
        return is_mean and any(one in self.kind for one in call.args[1:])

    def _rows_of(self, argument: relax.Expr) -> int | None:
        fields = argument.fields if isinstance(argument, relax.Tuple) else [argument]
        found = {self.rows[one] for one in fields if one in self.rows}
        return found.pop() if len(found) == 1 else _NO_AXIS if found else None

    def _is_large(self, variable: relax.Var) -> bool:
        """Return whether it has about as many rows and columns as the root."""
        if not is_tensor(variable) or self.kind.get(variable) in (_Kind.SUM, _Kind.BEYOND):
            return False
        return math.prod(shape_of(variable)) > self.large

    def _members(self) -> set[relax.Var]:
        """Return the ops between the root and the readers of large tensors, these included."""
        members: set[relax.Var] = {self.root}
        for binding in reversed(self.bindings):
            if self.kind.get(binding.var) in (_Kind.ROWS, _Kind.SUM):
                sources = variables_of(binding.value)
                readers = self.readers.get(binding.var, [])
                if any(self._is_large(one) for one in (binding.var, *sources)) or any(
                    one in members for one in readers
                ):
                    members.add(binding.var)
        for binding in self.bindings:
            is_result = isinstance(binding.value, relax.TupleGetItem)
            if is_result and self.kind.get(binding.var) in (_Kind.ROWS, _Kind.SUM):
                if binding.value.tuple_value in members:
                    members.add(binding.var)
        return members

    def _has_loss(self, members: set[relax.Var]) -> bool:
        """Return whether the root's rows add up to a number, or an nll loss's gradient is read.

        Elsewhere, between two layers, computing values again is better.
        """
        sums = (one for one, kind in self.kind.items() if kind is _Kind.SUM)
        is_summed = any(math.prod(shape_of(one)) == 1 for one in sums)
        reads_total = any(
            self.kind.get(one) is _Kind.EARLY
            for member in members
            for one in variables_of(self.values[member])
        )
        return is_summed or reads_total

    def _may_be_chunked(self, variable: relax.Var, members: set[relax.Var]) -> bool:
        """Return whether the variable may be held in chunks, or is small."""
        return not self._is_large(variable) or not self._is_live_out(variable, members)

    def _is_live_out(self, variable: relax.Var, members: set[relax.Var]) -> bool:
        if not is_tensor(variable):
            return False
        return any(r is None or r not in members for r in self.readers.get(variable, []))

    def _sink(self, members: set[relax.Var]) -> dict[relax.Var, int] | None:
        """Sink large values that only the region reads into it, the latest first."""
        inside = set(members)
        sunk: dict[relax.Var, int] = {}
        wanted: dict[relax.Var, set[int]] = {}
        for member in members:
            self._want(self.values[member], self.axes.get(member, ()), wanted, members)
        for binding in reversed(self.bindings):
            variable, value = binding.var, binding.value
            along = wanted.get(variable, set())
            if not along or variable in members:
                continue
            if self.kind.get(variable, _Kind.EARLY) is not _Kind.EARLY:
                return None
            axis = next(iter(along))
            axes = row_axes(value, axis, self.units) if isinstance(value, relax.Call) else None
            if len(along) > 1 or axes is None or not self._may_sink(variable, value, inside):
                continue
            sunk[variable] = axis
            inside.add(variable)
            self.axes[variable] = axes
            self.units = math.gcd(self.units, shape_of(variable)[axis])
            self._want(value, axes, wanted, members)
        return sunk

    def _may_sink(self, variable: relax.Var, value: relax.Call, inside: set[relax.Var]) -> bool:
        if value.op.name in _VIEWS_AND_NUMBERS:
            return True
        return self._is_large(variable) and all(r in inside for r in self.readers[variable])

    def _want(
        self,
        value: relax.Expr,
        axes: Axes,
        wanted: dict[relax.Var, set[int]],
        members: set[relax.Var],
    ) -> None:
        if not isinstance(value, relax.Call):
            return
        for argument, axis in zip(value.args, axes, strict=True):
            if axis is None:
                continue
            fields = argument.fields if isinstance(argument, relax.Tuple) else [argument]
            for one in fields:
                self.units = math.gcd(self.units, shape_of(one)[axis])
                if isinstance(one, relax.Var) and one not in members:
                    wanted.setdefault(one, set()).add(axis)


def _agree(given: Sequence[int | None], needed: Axes) -> bool:
    return all(one is None or one == need for one, need in zip(given, needed, strict=True))
