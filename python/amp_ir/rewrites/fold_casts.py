# SPDX-License-Identifier: Apache-2.0
"""Clean up a step after autocast: fold casts, share small repeated work, drop dead code."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.dialect.registry import call_op
from amp_ir.ir.dataflow import Dataflow, with_arguments
from amp_ir.ir.static_shape import extents_of

CASTS = ("amp_ir.cast", "relax.astype")
_VIEWS = ("relax.reshape", "relax.permute_dims", "relax.expand_dims", "relax.squeeze")
# Their result for a narrow number is a narrow number, and the same in both dtypes.
_EXACT = ("relax.nn.relu", "relax.negative", "relax.abs")
# Every value of the first dtype is a value of each that follows.
_WIDENS_TO = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}
# Larger results are not shared: a step that computes one twice may mean to (checkpointing).
_SHARED_NBYTES = 4096


def fold_casts(ir: tvm.IRModule) -> tvm.IRModule:
    """Fold casts that change no value, and drop dead code.

    Before:  w = astype(x: f16, "float32"); c = cast(reshape(w), "float16"); y = relu(c)
    After:   y = relu(reshape(x))

    - A cast to the dtype that a value has is dropped.
    - Widening is exact, so a cast after it starts from the narrow value; back to that value's own
      dtype there is nothing left. This sees through reshapes and transposes.
    - A narrowing is never dropped, whether the user wrote it or autocast: it rounds.
    - Casts of constants are folded here. One narrowing cast per value is kept; widening casts
      remain private to their readers, in whose kernels they fuse.
    - Repeated calls with small results are made once.

    Requires: one function `main`, one dataflow block of pure calls.
    Ensures:  bit-identical values; calls keep their spans.
    """
    return _Folder(ir).run()


class _Folder:
    def __init__(self, ir: tvm.IRModule) -> None:
        self.flow = Dataflow(ir)
        self.now: dict[relax.Var, relax.Expr] = {}
        self.value_of: dict[relax.Var, relax.Expr] = {}
        self.known: dict[tuple[Any, ...], relax.Var] = {}
        self.bindings: list[relax.VarBinding] = []

    def run(self) -> tvm.IRModule:
        for binding in self.flow.bindings:
            self.visit(binding)
        return self.flow.finish(self.bindings, self.current(self.flow.result))

    def visit(self, binding: relax.VarBinding) -> None:
        """Bind the variable as before, or replace it by an equal expression."""
        variable, old = binding.var, binding.value
        value: relax.Expr
        if isinstance(old, relax.Call):
            call = self.with_current_args(old)
            name = call.op.name
            value = self.folded(call) if name in CASTS else call
            value = self.shared(variable, value, name) if isinstance(value, relax.Call) else value
        else:
            value = self.current(old)
        replaceable = isinstance(variable, relax.DataflowVar)
        if replaceable and isinstance(value, (relax.Var, GenericConst)):
            self.now[variable] = value
            return
        self.bindings.append(binding if value is old else relax.VarBinding(variable, value))
        self.value_of[variable] = value

    def with_current_args(self, call: relax.Call) -> relax.Call:
        old = call.args[:]
        args = [self.current(argument) for argument in old]
        if all(map(operator.is_, args, old)):
            return call
        return with_arguments(call, args)

    def current(self, expr: relax.Expr) -> relax.Expr:
        """Return the expression that now replaces `expr`; the same object where nothing changed."""
        if isinstance(expr, relax.Var):
            return self.now.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            old = expr.fields[:]
            fields = [self.current(field) for field in old]
            return expr if all(map(operator.is_, fields, old)) else relax.Tuple(fields)
        if isinstance(expr, relax.TupleGetItem):
            source = self.current(expr.tuple_value)
            return expr if source is expr.tuple_value else relax.TupleGetItem(source, expr.index)
        return expr

    def folded(self, call: relax.Call) -> relax.Expr:
        """Return a cast without the inner casts that change no value."""
        source, dtype = call.args[0], str(call.ty.dtype)
        if str(source.ty.dtype) == dtype:
            return source
        if isinstance(source, GenericConst):
            return _cast_constant(source, dtype)
        narrow, views = self.before_widening(source)
        if narrow is None:
            return call
        narrow_dtype = str(narrow.ty.dtype)
        is_back = narrow_dtype == dtype and call.op.name == "relax.astype"
        if not is_back and any(view.op.name in _EXACT for view in views):
            return call
        for view in reversed(views):
            ty = relax.TensorType(view.ty.shape, narrow_dtype)
            narrow = self.bind_new(with_arguments(view, [narrow, *view.args[1:]], ty))
        return narrow if narrow_dtype == dtype else _cast_like(call, narrow, dtype)

    def before_widening(self, source: relax.Expr) -> tuple[relax.Expr | None, list[relax.Call]]:
        """Return the narrow value that `source` widens and the views between; None without one."""
        views: list[relax.Call] = []
        while isinstance(source, relax.Var):
            value = self.value_of.get(source)
            if not isinstance(value, relax.Call):
                break
            if value.op.name in CASTS:
                inner = value.args[0]
                widens = str(value.ty.dtype) in _WIDENS_TO.get(str(inner.ty.dtype), ())
                return (inner, views) if widens else (None, views)
            is_exact = value.op.name in _EXACT and self.flow.uses[source] == 1
            if value.op.name not in _VIEWS and not is_exact:
                break
            views.append(value)
            source = value.args[0]
        return None, views

    def bind_new(self, call: relax.Call) -> relax.Var:
        variable = relax.DataflowVar("narrow", call.ty)
        shared = self.shared(variable, call, call.op.name)
        if isinstance(shared, relax.Var):
            return shared
        self.bindings.append(relax.VarBinding(variable, call))
        self.value_of[variable] = call
        return variable

    def shared(self, variable: relax.Var, call: relax.Call, name: str) -> relax.Expr:
        """Return the variable that already has this value, where sharing it is allowed."""
        key = _key_of(call, name) if _may_share(call, name) else None
        if key is None:
            return call
        first = self.known.setdefault(key, variable)
        return call if first is variable else first


def _cast_like(call: relax.Call, source: relax.Expr, dtype: str) -> relax.Call:
    """Return a cast of `source` by the same op: the user's remains the user's."""
    if call.op.name == "relax.astype":
        return with_arguments(call, [source])
    new = call_op("amp_ir.cast", [source], call.span, dtype=dtype)
    relax.expr._update_type(new, call.ty)
    return new


def _cast_constant(constant: GenericConst, dtype: str) -> relax.Expr:
    # As in PyTorch, what overflows is an infinity; autocast warns where that is its own doing.
    with np.errstate(over="ignore", invalid="ignore"):
        return relax.const(constant.value.numpy().astype(dtype), dtype)


def _may_share(call: relax.Call, name: str) -> bool:
    type_ = call.ty
    if not isinstance(type_, relax.TensorType) or not isinstance(type_.shape, relax.ShapeExpr):
        return False
    if name in _VIEWS:
        return True
    if name in CASTS:
        return str(type_.dtype) not in _WIDENS_TO.get(str(call.args[0].ty.dtype), ())
    return math.prod(extents_of(type_)) * 8 <= _SHARED_NBYTES


def _key_of(call: relax.Call, name: str) -> tuple[Any, ...] | None:
    """Return the key of equal calls; None where an argument is not a variable, shape or scalar."""
    parts: list[Any] = [name, str(call.attrs)]
    for argument in call.args[:]:
        if isinstance(argument, relax.Var):
            parts.append(argument)
        elif isinstance(argument, GenericConst) and not argument.ty.shape.values:
            parts.append((str(argument.ty.dtype), argument.value.numpy().tobytes()))
        elif isinstance(argument, relax.ShapeExpr):
            parts.append(tuple([extent.value for extent in argument.values[:]]))
        else:
            return None
    return tuple(parts)
