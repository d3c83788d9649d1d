# SPDX-License-Identifier: Apache-2.0
"""Where the infinities and NaN that reach a sink come from: inputs, constants, or ops."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, variables_of
from amp_ir.replay.observed_run import FINITE, Extent, ObservedRun, extent_of


@attrs.frozen(eq=False)
class Origins:
    """The origins of a run's sinks that are not finite, each in the order of the program.

    Attributes:
        inputs: parameters of `main` that hold infinities or NaN.
        ops: variables whose op made an infinity from finite arguments, or NaN from others.
        readers: variables whose op reads an infinity or NaN that the program itself holds, such as
            the value that a mask is filled with.
    """

    inputs: tuple[relax.Var, ...]
    ops: tuple[relax.Var, ...]
    readers: tuple[relax.Var, ...]


def find_origins(run: ObservedRun) -> Origins:
    """Walk from the sinks back through values that are not finite.

    A value that a mask or a selection drops before a sink is not on the way, and so no origin.
    """
    flow = run.flow
    reached: set[relax.Var] = set()
    waiting = list(run.sinks)
    while waiting:
        variable = waiting.pop()
        if variable in reached:
            continue
        reached.add(variable)
        waiting += [one for one in read_by(flow, variable) if not _extent(run, one).is_finite]
    return Origins(
        tuple(one for one in flow.main.params if one in reached),
        tuple(one for one in flow.values if one in reached and _makes_it(run, one)),
        tuple(one for one in flow.values if one in reached and reads_constant(run, one)),
    )


def read_by(flow: Dataflow, variable: relax.Var) -> list[relax.Var]:
    """Return the tensors that a variable's op reads; of a tuple's field, those of its op."""
    value = flow.values.get(variable)
    if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
        return read_by(flow, value.tuple_value)
    return [] if value is None else variables_of(value)


def call_of(flow: Dataflow, variable: relax.Var) -> relax.Call | None:
    """Return the call that makes a variable, or the tuple that it is a field of."""
    value = flow.values.get(variable)
    if isinstance(value, relax.TupleGetItem) and isinstance(value.tuple_value, relax.Var):
        return call_of(flow, value.tuple_value)
    return value if isinstance(value, relax.Call) else None


def largest_read(run: ObservedRun, variable: relax.Var) -> float:
    """Return the largest finite magnitude that the op of a variable reads."""
    return max((one.largest for one in _read_extents(run, variable)), default=0.0)


def reads_constant(run: ObservedRun, variable: relax.Var) -> bool:
    """Return whether the op of a variable reads an infinity or NaN that the program holds."""
    return any(not one.is_finite for one in _constant_extents(call_of(run.flow, variable)))


def reads_finite(run: ObservedRun, variable: relax.Var) -> bool:
    """Return whether all that the op of a variable reads is finite."""
    return all(one.is_finite for one in _read_extents(run, variable))


def _makes_it(run: ObservedRun, variable: relax.Var) -> bool:
    """Return whether an op's arguments do not explain what it makes."""
    if call_of(run.flow, variable) is None:
        return False
    if reads_finite(run, variable):
        return True
    read = _read_extents(run, variable)
    return _extent(run, variable).has_nan and not any(one.has_nan for one in read)


def _read_extents(run: ObservedRun, variable: relax.Var) -> list[Extent]:
    read = [_extent(run, one) for one in read_by(run.flow, variable)]
    return read + _constant_extents(call_of(run.flow, variable))


def _extent(run: ObservedRun, variable: relax.Var) -> Extent:
    return run.extents.get(variable, FINITE)


def _constant_extents(expr: Any) -> list[Extent]:
    """Return the extents of the constants in an expression."""
    if isinstance(expr, relax.Call):
        return [found for one in expr.args for found in _constant_extents(one)]
    if isinstance(expr, relax.Tuple):
        return [found for one in expr.fields for found in _constant_extents(one)]
    data = getattr(expr, "value", getattr(expr, "data", None))
    if isinstance(data, tvm.runtime.Tensor):
        return [extent_of(torch.utils.dlpack.from_dlpack(data))]
    return []
