# SPDX-License-Identifier: Apache-2.0
"""Slices of whole axes, which a capture leaves out: `with_whole_slices`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name, with_arguments
from amp_ir.ir.static_shape import shape_of

_SLICE = "relax.strided_slice"


def with_whole_slices(ir: tvm.IRModule, other: tvm.IRModule) -> tvm.IRModule:
    """Return a step with the slices that its capture with another length has.

    Before:  y = take(positions, ids)                        # positions of 512 entries, length 512
             other: p = positions[:200]; y = take(p, ids)    # length 200
    After:   p = positions[0:512]; y = take(p, ids)

    Ensures: the same values. Where the two differ otherwise, the rest is left as it is.
    """
    return _Slices(Dataflow(ir), Dataflow(other)).run()


class _Slices:
    def __init__(self, flow: Dataflow, other: Dataflow) -> None:
        self.flow, self.other = flow, other
        params = zip(other.main.params, flow.main.params, strict=False)
        self.mine: dict[relax.Var, relax.Expr] = dict(params)
        # What a slice that was put in is a slice of.
        self.sources: dict[relax.Var, relax.Expr] = {}

    def run(self) -> tvm.IRModule:
        """Walk through both programs side by side."""
        own, done = list(self.flow.bindings), 0
        bindings: list[relax.VarBinding] = []
        for binding in self.other.bindings:
            here = own[done] if done < len(own) else None
            if self._is_left_out(binding.value, here):
                added = self._whole(binding.value)
                if added is None:
                    break
                bindings.append(added)
                self.mine[binding.var] = added.var
                continue
            if here is None or op_name(binding.value) != op_name(here.value):
                break
            value = self._sliced(here.value, binding.value)
            bindings.append(here if value is here.value else relax.VarBinding(here.var, value))
            self.mine[binding.var] = here.var
            done += 1
        return self.flow.finish([*bindings, *own[done:]]) if self.sources else self.flow.ir

    def _is_left_out(self, value: Any, here: relax.VarBinding | None) -> bool:
        if op_name(value) != _SLICE:
            return False
        source = self.mine.get(value.args[0])
        if here is None or op_name(here.value) != _SLICE:
            return True
        return source is None or not source.same_as(here.value.args[0])

    def _whole(self, value: relax.Call) -> relax.VarBinding | None:
        """Return the slice of all that the other capture takes a part of; None if it is none."""
        source = self.mine.get(value.args[0])
        axes, begin, _end, *strides = ([int(one.value) for one in arg] for arg in value.args[1:])
        if source is None or any(begin) or any(one != 1 for row in strides for one in row):
            return None
        extents = shape_of(source)
        call = relax.op.strided_slice(source, axes, begin, [extents[axis] for axis in axes])
        relax.expr._update_type(call, source.ty)
        call = relax.Call(call.op, list(call.args), call.attrs, [], value.span, source.ty)
        var = relax.Var("whole", source.ty)
        self.sources[var] = source
        return relax.VarBinding(var, call)

    def _sliced(self, expr: Any, other: Any) -> Any:
        """Return an expression that reads the slices where that of the other capture does."""
        if isinstance(other, relax.Var) and isinstance(expr, relax.Var):
            mine = self.mine.get(other)
            source = self.sources.get(mine) if isinstance(mine, relax.Var) else None
            return mine if source is not None and source.same_as(expr) else expr
        if isinstance(expr, relax.Tuple) and isinstance(other, relax.Tuple):
            fields = self._all(expr.fields, other.fields)
            return expr if fields is None else relax.Tuple(fields)
        if isinstance(expr, relax.Call) and isinstance(other, relax.Call):
            args = self._all(expr.args, other.args)
            return expr if args is None else with_arguments(expr, args)
        return expr

    def _all(self, own: Sequence[Any], others: Sequence[Any]) -> list[Any] | None:
        """Return the expressions, each with its slices; None where none has any."""
        pairs = list(zip(own, others, strict=False))
        found = [self._sliced(one, other) for one, other in pairs]
        changed = any(new is not one for new, (one, _) in zip(found, pairs, strict=True))
        return [*found, *list(own)[len(found) :]] if changed else None
