# SPDX-License-Identifier: Apache-2.0
"""Compute a loss over some rows of the logits over all rows, with the others ignored.

A language model's loss drops the last position of each sequence, `logits[:, :-1]`, and the gradient
of that slice puts zeros in its place. Between the two the step holds a tensor of nearly the logits'
size with its own rows, and a copy of it: for GPT-2's vocabulary each as large as a weight. With an
ignored label at each dropped position instead, the rows keep their addresses, so that the gradient
may be written over the logits.

This runs before autocast, for the step as it was captured, as `concat_matmuls` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeGuard

import attrs
import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.dialect.registry import call_op, options_of
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.static_shape import shape_of

# Ops allowed between the slice and the loss, and between the gradient and the zeros around it.
_RESHAPE, _CAST = "relax.reshape", "relax.astype"
# A mean or a sum of an ignored row's loss has no term for it; single losses would be one more.
_REDUCTIONS = ("mean", "sum")


def unslice_loss(ir: tvm.IRModule) -> tvm.IRModule:
    """Compute a cross entropy over a slice of the rows on all rows, the dropped ones ignored.

    Before:  s = reshape(strided_slice(x), [r, v]); p = log_softmax(s); nll_loss(p, labels)
             g = log_softmax_backward(nll_loss_backward(d, labels, total), p)
             y = concat([reshape(g), zeros])
    After:   s = reshape(x, [R, v]); p = log_softmax(s); nll_loss(p, [labels, ignored])
             g = log_softmax_backward(nll_loss_backward(d, [labels, ignored], total), p)
             y = reshape(where([true, false], g, 0))

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  gradients are bit-identical, the loss differs by the order of its sum: an ignored
              row adds nothing to it and to the total weight, and its gradient is set to zero
              whatever its logits are; a loss whose rows something else reads, one that is not
              reduced, and one with other ops between the slice and the zeros are left alone.
    """
    rewriter = _Rewriter(ir)
    return rewriter.run() if rewriter.losses else ir


@attrs.frozen(eq=False)
class _SlicedLoss:
    """One loss over rows `[first, last)` along `axis` of `logits`, by the variables of its ops.

    `before` and `after` are the dtypes of casts on the way to the loss and from its gradient.
    """

    logits: relax.Expr
    axis: int
    first: int
    last: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    log_softmax: relax.Var
    loss: relax.Var
    loss_gradient: relax.Var
    gradient: relax.Var
    padded: relax.Var

    @property
    def shape(self) -> list[int]:
        """Return the shape of all logits."""
        return _shape(self.logits)

    @property
    def rows(self) -> list[int]:
        """Return all rows, by the dimensions they are counted in."""
        return self.shape[:-1]

    def beside(self, leads: bool) -> list[int]:
        """Return the dropped rows before or after the slice, by the dims they are counted in."""
        count = self.first if leads else self.rows[self.axis] - self.last
        return [count if k == self.axis else n for k, n in enumerate(self.rows)]


class _Rewriter:
    def __init__(self, ir: tvm.IRModule) -> None:
        self.flow = Dataflow(ir)
        self.values = self.flow.values
        self.losses: list[_SlicedLoss] = []
        if any(_named(value, "amp_ir.nll_loss_backward") for value in self.values.values()):
            self.losses = list(self._find())

    # Search for losses.

    def _find(self) -> Iterator[_SlicedLoss]:
        readers: dict[relax.Expr, list[relax.Var]] = {}
        for binding in self.flow.bindings:
            if _named(binding.value, "amp_ir.nll_loss"):
                readers.setdefault(binding.value.args[0], []).append(binding.var)
        for binding in self.flow.bindings:
            pad = _as_pad(binding.value, self.values)
            found = None if pad is None else self._after_pad(binding.var, *pad, readers)
            if found is not None:
                yield found

    def _after_pad(
        self,
        padded: relax.Var,
        inner: relax.Expr,
        axis: int,
        readers: dict[relax.Expr, list[relax.Var]],
    ) -> _SlicedLoss | None:
        """Return the loss whose gradient `inner` is, between zeros along `axis` of `padded`."""
        gradient, after = self._through_casts(inner)
        backward = self._sole(gradient, "amp_ir.log_softmax_backward")
        if backward is None:
            return None
        loss_gradient, normalized = backward.args
        seed = self._sole(loss_gradient, "amp_ir.nll_loss_backward")
        softmax = self.values.get(normalized)
        losses = readers.get(normalized, [])
        if seed is None or not _named(softmax, "relax.nn.log_softmax") or len(losses) != 1:
            return None
        is_reduced = options_of(seed)["reduction"] in _REDUCTIONS
        is_same = self.values[losses[0]].args[1].same_as(seed.args[1])
        if not is_reduced or not is_same or self.flow.uses[normalized] != 2:
            return None
        rows, before = self._through_casts(softmax.args[0])
        window = self._sole(rows, "relax.strided_slice")
        extent = None if window is None else _window(window, axis)
        if window is None or extent is None or _shape(window.args[0]) != _shape(padded):
            return None
        last_is_classes = axis < len(_shape(padded)) - 1 and len(_shape(softmax)) == 2
        if not last_is_classes or _shape(softmax)[1] != _shape(padded)[-1]:
            return None
        names = (normalized, losses[0], loss_gradient, gradient, padded)
        return _SlicedLoss(window.args[0], axis, *extent, tuple(reversed(before)), after, *names)

    def _through_casts(self, expr: relax.Expr) -> tuple[relax.Expr, tuple[str, ...]]:
        """Return the sole-use source of reshapes and casts in `expr`, and dtypes from the last."""
        dtypes = []
        while (call := self.values.get(expr)) is not None and self.flow.uses.get(expr) == 1:
            if _named(call, _CAST):
                dtypes.append(str(call.ty.dtype))
            elif not _named(call, _RESHAPE):
                break
            expr = call.args[0]
        return expr, tuple(dtypes)

    def _sole(self, expr: relax.Expr, name: str) -> relax.Call | None:
        """Return the call of op `name` bound to `expr`, if the use at hand is its only one."""
        value = self.values.get(expr)
        return value if _named(value, name) and self.flow.uses.get(expr) == 1 else None

    # Construction of the new bindings.

    def run(self) -> tvm.IRModule:
        self.builder = relax.BlockBuilder()
        self.out: list[relax.VarBinding] = []
        self.renamed: dict[relax.Expr, relax.Expr] = {}
        self.labels: dict[_SlicedLoss, relax.Expr] = {}
        writers = {}
        for loss in self.losses:
            writers[loss.log_softmax] = (self._write_log_softmax, loss)
            writers[loss.loss] = (self._write_loss, loss)
            writers[loss.loss_gradient] = (self._write_loss_gradient, loss)
            writers[loss.gradient] = (self._write_gradient, loss)
            writers[loss.padded] = (self._write_padded, loss)
        for binding in self.flow.bindings:
            if binding.var in writers:
                write, loss = writers[binding.var]
                write(loss)
            else:
                self.out.append(binding)
        return self.flow.finish(self.out)

    def _write_log_softmax(self, loss: _SlicedLoss) -> None:
        call, logits = self.values[loss.log_softmax], loss.logits
        for dtype in loss.before:
            logits = self._emit(relax.op.astype(logits, dtype), call.span)
        logits = self._reshaped(logits, [math.prod(loss.rows), loss.shape[-1]], call.span)
        new = self._emit(relax.op.nn.log_softmax(logits, axis=1), call.span)
        self.renamed[loss.log_softmax] = new

    def _write_loss(self, loss: _SlicedLoss) -> None:
        call = self.values[loss.loss]
        labels, ignored = call.args[1], options_of(call)["ignore_index"]
        fill = relax.const(ignored, str(labels.ty.dtype))
        self.labels[loss] = self._with_dropped(labels, fill, loss, call.span)
        args = [self.renamed[loss.log_softmax], self.labels[loss], *call.args[2:]]
        self._bind(loss.loss, relax.Call(call.op, args, call.attrs, [], call.span))

    def _write_loss_gradient(self, loss: _SlicedLoss) -> None:
        call = self.values[loss.loss_gradient]
        grad, _, *rest = call.args
        options = {**options_of(call), "input_shape": (math.prod(loss.rows), loss.shape[-1])}
        args = [grad, self.labels[loss], *rest]
        new = call_op("amp_ir.nll_loss_backward", args, call.span, **options)
        self.renamed[loss.loss_gradient] = self._emit(new, call.span)

    def _write_gradient(self, loss: _SlicedLoss) -> None:
        call = self.values[loss.gradient]
        args = [self.renamed[argument] for argument in call.args]
        new = self._emit(relax.Call(call.op, args, call.attrs, [], call.span), call.span)
        # Not a number where the dropped row's logits are: 0 of them is not 0.
        slice_shape = relax.ShapeExpr(self._slice_rows(loss))
        kept = self._emit(relax.op.full(slice_shape, relax.const(True, "bool"), "bool"), call.span)
        is_kept = self._with_dropped(kept, relax.const(False, "bool"), loss, call.span)
        is_kept = self._reshaped(is_kept, [math.prod(loss.rows), 1], call.span)
        zero = relax.const(0.0, str(new.ty.dtype))
        self.renamed[loss.gradient] = self._emit(relax.op.where(is_kept, new, zero), call.span)

    def _write_padded(self, loss: _SlicedLoss) -> None:
        gradient, span = self.renamed[loss.gradient], self.values[loss.padded].span
        for dtype in reversed(loss.after):
            gradient = self._emit(relax.op.astype(gradient, dtype), span)
        self._bind(loss.padded, relax.op.reshape(gradient, loss.shape))

    def _slice_rows(self, loss: _SlicedLoss) -> list[int]:
        return [loss.last - loss.first if k == loss.axis else n for k, n in enumerate(loss.rows)]

    def _with_dropped(
        self,
        rows: relax.Expr,
        fill: GenericConst,
        loss: _SlicedLoss,
        span: tvm.ir.Span | None,
    ) -> relax.Expr:
        """Return a number for each row [R]: `rows` for the slice, `fill` for the dropped rows."""
        parts = [self._reshaped(rows, self._slice_rows(loss), span)]
        for leads in (True, False):
            dropped = loss.beside(leads)
            if math.prod(dropped):
                shape = relax.ShapeExpr(dropped)
                part = self._emit(relax.op.full(shape, fill, str(fill.ty.dtype)), span)
                parts.insert(0 if leads else len(parts), part)
        whole = self._emit(relax.op.concat(parts, loss.axis), span) if parts[1:] else parts[0]
        return self._reshaped(whole, [math.prod(loss.rows)], span)

    def _reshaped(self, expr: relax.Expr, shape: list[int], span: tvm.ir.Span | None) -> relax.Expr:
        return expr if _shape(expr) == shape else self._emit(relax.op.reshape(expr, shape), span)

    def _bind(self, variable: relax.Var, call: relax.Call) -> None:
        self.out.append(relax.VarBinding(variable, self.builder.normalize(call)))

    def _emit(self, call: relax.Call, span: tvm.ir.Span | None) -> relax.Var:
        located = relax.Call(call.op, call.args, call.attrs, call.ty_args, span)
        value = self.builder.normalize(located)
        variable = relax.DataflowVar(f"rows{len(self.out)}", value.ty)
        self.out.append(relax.VarBinding(variable, value))
        return variable


def _named(value: relax.Expr | None, name: str) -> TypeGuard[Any]:
    return isinstance(value, relax.Call) and value.op.name == name


def _shape(expr: relax.Expr) -> list[int]:
    return list(shape_of(expr))


def _as_pad(
    value: relax.Expr, values: dict[relax.Var, relax.Expr]
) -> tuple[relax.Expr, int] | None:
    """Return the value between zeros in a concatenation, and the axis; None for other values."""
    if not _named(value, "relax.concat") or not isinstance(value.args[0], relax.Tuple):
        return None
    inner = [one for one in value.args[0].fields if not _is_zero(values.get(one))]
    if len(inner) != 1 or len(inner) == len(value.args[0].fields):
        return None
    return inner[0], int(value.attrs.axis) % len(value.ty.shape)


def _is_zero(value: relax.Expr | None) -> bool:
    if not _named(value, "relax.full") or not isinstance(value.args[1], GenericConst):
        return False
    return float(value.args[1].value.numpy()) == 0.0


def _window(call: relax.Call, axis: int) -> tuple[int, int] | None:
    """Return the begin and end of a slice with stride 1 along `axis` alone; None for others."""
    source, sliced = _shape(call.args[0]), _shape(call)
    axes, begins, _, *strides = ([int(n.value) for n in one.fields] for one in call.args[1:])
    if axes != [axis] or strides not in ([], [[1]]):
        return None
    first = begins[0] + source[axis] if begins[0] < 0 else begins[0]
    return first, first + sliced[axis]
