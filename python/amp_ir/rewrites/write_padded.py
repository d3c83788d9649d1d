# SPDX-License-Identifier: Apache-2.0
"""Write a step of which some values are padded; align_matmuls.py says which, and why."""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.static_shape import shape_of
from amp_ir.rewrites.padded_sources import CASTS, MOVES, TABLE, Shape, Wanted, sources_of


class PaddedWriter:
    """Writes the bindings of a step with `wanted` values padded, and with padded `matmuls`.

    `matmuls` maps to the padded m, k and n.
    """

    def __init__(
        self, flow: Dataflow, matmuls: Mapping[relax.Var, Shape], wanted: Mapping[relax.Var, Wanted]
    ) -> None:
        self.flow, self.matmuls, self.wanted = flow, matmuls, wanted
        self.builder = relax.BlockBuilder()
        self.out: list[relax.VarBinding] = []
        # What is bound to each value padded, and whether the padding is known to be zeros.
        self.padded: dict[tuple[relax.Expr, Shape], relax.Var] = {}
        self.zeros: set[relax.Expr] = set()

    def write(self) -> tvm.IRModule:
        """Write the bindings, the wanted ones padded."""
        for binding in self.flow.bindings:
            if not self._write_padded(binding):
                self.out.append(binding)
        return self.flow.finish(self.out)

    def _write_padded(self, binding: relax.VarBinding) -> bool:
        """Bind a value padded, and the value itself to a slice of that, if it is to be padded."""
        variable, call = binding.var, binding.value
        wanted = self.wanted.get(variable)
        if variable in self.matmuls:
            m, k, n = self.matmuls[variable]
            is_added_up = k != shape_of(call.args[0])[1]
            wanted_of = (Wanted((m, k), is_added_up), Wanted((k, n), is_added_up))
            sides = [self._as(one, each) for one, each in zip(call.args, wanted_of, strict=True)]
            new: relax.Expr = relax.op.matmul(*sides, out_dtype=call.attrs.out_dtype)
            has_zeros = False
        elif wanted is not None:
            new, has_zeros = self._computed_padded(call, wanted)
        else:
            return self._write_reader(variable, call)
        if wanted is None:
            self._bind(variable, new, call.span)
            return True
        padded = self._emit(new, call.span, f"{variable.name}_padded")
        if wanted.is_zero and not has_zeros:
            zero = relax.const(0.0, str(variable.ty.dtype))
            padded, has_zeros = self._masked(padded, variable, zero, call.span), True
        if has_zeros:
            self.zeros.add(padded)
        self.padded[variable, wanted.shape] = padded
        self._bind(variable, _sliced(padded, shape_of(variable)), call.span)
        return True

    def _computed_padded(self, call: relax.Call, wanted: Wanted) -> tuple[relax.Expr, bool]:
        """Return the call for padded arguments, and whether it pads its result with zeros."""
        name = op_name(call)
        sources = sources_of(call, wanted)
        assert sources is not None, "only values that can be padded are wanted"
        taken = {source: self._as(source, each) for source, each in sources}
        has_zeros = name in (*CASTS, *MOVES) and self.zeros.issuperset(taken.values())
        if name == "relax.reshape":
            return relax.op.reshape(taken[call.args[0]], list(wanted.shape)), has_zeros
        if name == "relax.concat":
            parts = [taken[part] for part in call.args[0].fields]
            return relax.op.concat(parts, call.attrs.axis), has_zeros
        if name == "relax.full":
            shape = relax.ShapeExpr(list(wanted.shape))
            return relax.op.full(shape, call.args[1], str(call.ty.dtype)), _is_zero(call.args[1])
        if name == "amp_ir.nll_loss_backward":
            options = {**options_of(call), "input_shape": wanted.shape}
            return call_op(name, self._with_weights(call, wanted.shape, 3), **options), True
        if name == TABLE:
            options = {**options_of(call), "num_embeddings": wanted.shape[0]}
            return call_op(name, call.args[:], **options), True
        args = [taken.get(one, one) for one in call.args]
        if name == "relax.nn.log_softmax":
            # So that the padding is not the largest and adds 0 to the sum.
            lowest = relax.const(-math.inf, str(call.args[0].ty.dtype))
            args = [self._masked(args[0], call.args[0], lowest, call.span)]
        return relax.Call(call.op, args, call.attrs, call.ty_args, call.span), has_zeros

    def _write_reader(self, variable: relax.Var, call: relax.Expr) -> bool:
        """Read a padded value as it is where that is right, so that one kernel does both."""
        name = op_name(call)
        if name not in ("relax.sum", "amp_ir.nll_loss") or not isinstance(call, relax.Call):
            return False
        wanted = self.wanted.get(call.args[0])
        own = shape_of(call.args[0])
        if wanted is None or (call.args[0], wanted.shape) not in self.padded:
            return False
        padded = self.padded[call.args[0], wanted.shape]
        grown = {d for d, (n, p) in enumerate(zip(own, wanted.shape, strict=True)) if n != p}
        if name == "amp_ir.nll_loss":
            if grown != {len(own) - 1} or len(own) != 2:
                return False
            args = [padded, *self._with_weights(call, wanted.shape, 2)[1:]]
            self._bind(variable, call_op(name, args, **options_of(call)), call.span)
            return True
        axes = call.attrs.axis
        if axes is None or grown & {int(axis) % len(own) for axis in axes}:
            return False
        total = self._emit(relax.op.sum(padded, axes, call.attrs.keepdims), call.span, "sums")
        self._bind(variable, _sliced(total, shape_of(variable)), call.span)
        return True

    def _with_weights(self, call: relax.Call, shape: Shape, first: int) -> list[relax.Expr]:
        """Return the arguments of a loss with weights of the classes for `shape[-1]` classes."""
        wanted = Wanted(shape[-1:], False)
        return [*call.args[:first], *(self._as(one, wanted) for one in call.args[first:])]

    def _masked(
        self, padded: relax.Expr, own: relax.Expr, fill: GenericConst, span: tvm.ir.Span | None
    ) -> relax.Expr:
        """Return `padded` with `fill` for all elements that `own` does not have."""
        shape = shape_of(padded)
        for axis, extent in enumerate(shape_of(own)):
            if extent == shape[axis]:
                continue
            places = self._emit(relax.op.arange(0, shape[axis], 1, "int32"), span, "places")
            is_own = relax.op.less(places, relax.const(extent, "int32"))
            is_own = self._emit(is_own, span, "is_own")
            if axis < len(shape) - 1:
                column = relax.op.reshape(is_own, [shape[axis], *(1 for _ in shape[axis + 1 :])])
                is_own = self._emit(column, span, "is_own")
            padded = self._emit(relax.op.where(is_own, padded, fill), span, "masked")
        return padded

    def _as(self, expr: relax.Expr, wanted: Wanted) -> relax.Expr:
        """Return a value as it is wanted; where it is not computed so, zeros are put behind it."""
        shape, dtype = wanted.shape, str(expr.ty.dtype)
        if shape_of(expr) == shape:
            return expr
        zero = relax.const(0.0, dtype)
        new = self.padded.get((expr, shape))
        if new is None:
            new = expr
            for axis, extent in enumerate(shape):
                have = list(shape_of(new))
                if have[axis] != extent:
                    have[axis] = extent - have[axis]
                    fill = relax.op.full(relax.ShapeExpr(have), zero, dtype)
                    parts = relax.Tuple([new, self._emit(fill, None, "zeros")])
                    new = self._emit(relax.op.concat(parts, axis), None, "padded")
        elif not wanted.is_zero or new in self.zeros:
            return new
        else:
            new = self._masked(new, expr, zero, None)
        self.padded[expr, shape] = new
        self.zeros.add(new)
        return new

    def _bind(self, variable: relax.Var, value: relax.Expr, span: tvm.ir.Span | None) -> None:
        self.out.append(relax.VarBinding(variable, self._located(value, span)))

    def _emit(self, value: relax.Expr, span: tvm.ir.Span | None, name: str) -> relax.Var:
        value = self._located(value, span)
        variable = relax.DataflowVar(name, value.ty)
        self.out.append(relax.VarBinding(variable, value))
        return variable

    def _located(self, value: relax.Expr, span: tvm.ir.Span | None) -> relax.Expr:
        located = relax.Call(value.op, value.args, value.attrs, value.ty_args, span)
        return self.builder.normalize(located)


def _is_zero(fill: relax.Expr) -> bool:
    return isinstance(fill, GenericConst) and float(fill.value.numpy()) == 0.0


def _sliced(padded: relax.Expr, shape: Shape) -> relax.Expr:
    """Return the first elements of `padded` along each axis."""
    axes = [d for d, (n, p) in enumerate(zip(shape, shape_of(padded), strict=True)) if n != p]
    return relax.op.strided_slice(
        padded, axes, [0 for _ in axes], [shape[d] for d in axes], assume_inbound=True
    )
