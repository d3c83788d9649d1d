# SPDX-License-Identifier: Apache-2.0
"""An op that makes an infinity or NaN, as the user knows it: its name, place, and overrides."""

from __future__ import annotations

import attrs
from tvm import relax

from amp_ir.amp.overrides import Override
from amp_ir.amp.plan import CastPlan
from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.dialect.external_call import NAME as EXTERNAL
from amp_ir.dialect.external_call import external_op
from amp_ir.ir.dataflow import op_name
from amp_ir.ir.location import Location, from_span
from amp_ir.ir.step_graph import VIEWS
from amp_ir.replay.non_finite_origins import call_of, read_by
from amp_ir.replay.observed_run import ObservedRun

_CAST = "amp_ir.cast"


@attrs.frozen(eq=False)
class Origin:
    """An op that makes an infinity or NaN, as the user knows it.

    A cast of what the plan stores low, or that others undo, is the rounding of an op's result; any
    other is the cast for the op that reads it. `neighbour` is the call at a cast's other end.
    """

    call: relax.Call
    cast: str = ""
    neighbour: relax.Call | None = None

    @classmethod
    def of(cls, run: ObservedRun, variable: relax.Var, plan: CastPlan | None) -> Origin:
        """Return the op of a variable that `find_origins` gave; `plan` is that of the step."""
        call = call_of(run.flow, variable)
        assert call is not None
        if op_name(call) != _CAST:
            return cls(call)
        source, reader = _source_of(run, variable), _reader_of(run, variable)
        dtypes = f"{call.args[0].ty.dtype} -> {call.ty.dtype}"
        if source is None:
            return cls(call if reader is None else reader, dtypes)
        is_stored_low = _stores_low(plan, call.args[0]) or _is_cast_back(run, variable)
        if reader is None or is_stored_low:
            return cls(source, "", reader)
        return cls(reader, dtypes, source)

    @property
    def op(self) -> str:
        """The op's name, as plans and overrides have it."""
        return _label(self.call)

    @property
    def location(self) -> Location:
        """Where the user wrote it."""
        return from_span(self.call.span)

    def overrides(self) -> list[Override]:
        """Return the overrides that may help: for the op, then for the cast's other end."""
        calls = [self.call] if self.neighbour is None else [self.call, self.neighbour]
        return [_override(one) for one in calls]

    def __str__(self) -> str:
        """Format for people."""
        what = f"the cast for {self.op}" if self.cast else self.op
        return f"{what} in {self.location}"


def _override(call: relax.Call) -> Override:
    place = from_span(call.span)
    return Override(module=place.module, op=_label(call), phase=place.phase, to="float32")


def _label(call: relax.Call) -> str:
    name = op_name(call)
    return external_op(call) if name == EXTERNAL else name


def _source_of(run: ObservedRun, variable: relax.Var) -> relax.Call | None:
    """Return the call whose result a cast reads, through views and other casts."""
    for one in read_by(run.flow, variable):
        call = call_of(run.flow, one)
        if call is not None and op_name(call) not in (*VIEWS, _CAST):
            return call
        found = None if call is None else _source_of(run, one)
        if found is not None:
            return found
    return None


def _reader_of(run: ObservedRun, variable: relax.Var) -> relax.Call | None:
    """Return the first call that reads a value, through views and casts."""
    for one in run.flow.readers.get(variable, ()):
        call = call_of(run.flow, one)
        if call is not None and op_name(call) not in (*VIEWS, _CAST):
            return call
        found = _reader_of(run, one)
        if found is not None:
            return found
    return None


def _is_cast_back(run: ObservedRun, variable: relax.Var) -> bool:
    """Return whether an op reads a value as float32 again, as what its maker stores low."""
    for one in run.flow.readers.get(variable, ()):
        name = op_name(run.flow.values[one])
        if name == _CAST or (name in VIEWS and _is_cast_back(run, one)):
            return True
    return False


def _stores_low(plan: CastPlan | None, source: relax.Expr) -> bool:
    """Return whether the plan says that the op of a variable leaves its result low."""
    name = getattr(source, "name", "")
    ops = () if plan is None else plan.ops
    return any(set(one.results) & set(LOW_DTYPES) for one in ops if one.variable == name)
