# SPDX-License-Identifier: Apache-2.0
"""The view of `main` that passes work with: what it binds, what reads it, what stands instead.

Passes are `module -> module`: they read the bindings of `main`, write others, and finish with the
ones that the result needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Op


def variables_of(expr: relax.Expr) -> list[relax.Var]:
    """The variables that an expression reads, in order and as often as it does."""
    kind = _kind_of(type(expr))
    if kind is relax.Var:
        return [expr]
    if kind is relax.TupleGetItem:
        return variables_of(expr.tuple_value)
    if kind is relax.Expr:
        return []
    found: list[relax.Var] = []
    # A slice fetches an array of TVM at once, and passes ask this of thousands of bindings.
    for part in (expr.args if kind is relax.Call else expr.fields)[:]:
        if _kind_of(type(part)) is relax.Var:
            found.append(part)
        else:
            found += variables_of(part)
    return found


# Asked once a class: TVM's have a metaclass whose `isinstance` is slow where the answer is no.
_kinds: dict[type, Any] = {}


def _kind_of(class_: type) -> Any:
    """Which of the kinds told apart here a class is of; `relax.Expr`: one without variables."""
    if class_ not in _kinds:
        known = (relax.Var, relax.Call, relax.Tuple, relax.TupleGetItem)
        _kinds[class_] = next((one for one in known if issubclass(class_, one)), relax.Expr)
    return _kinds[class_]


def op_name(expr: Any) -> str:
    """The name of the op that `expr` calls; "" where it calls none."""
    is_op = isinstance(expr, relax.Call) and isinstance(expr.op, Op)
    return str(expr.op.name) if is_op else ""


def with_arguments(
    call: relax.Call, args: Sequence[relax.Expr], ty: relax.Type | None = None
) -> relax.Call:
    """A new call of the same op with `args`, its options and location; `ty` if that changes."""
    result = call.ty if ty is None else ty
    return relax.Call(call.op, list(args), call.attrs, call.ty_args, call.span, result)


def with_bindings(
    main: relax.Function, bindings: Sequence[relax.Binding], result: relax.Expr | None = None
) -> relax.Function:
    """`main` with one dataflow block of `bindings`; `result` is what it returns, if another.

    Requires: `result` has the type that `main` returns.
    """
    block = relax.DataflowBlock(list(bindings))
    body = relax.SeqExpr([block], main.body.body if result is None else result)
    relax.expr._update_type(body, main.body.ty)
    return relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs, main.span)


def with_main(ir: tvm.IRModule, main: relax.Function) -> tvm.IRModule:
    """The module with another `main`; its other functions and attributes stay."""
    return tvm.IRModule({**ir.functions, ir.get_global_var("main"): main}, attrs=ir.attrs)


def count_uses(bindings: list[relax.Binding], result: relax.Expr) -> dict[relax.Var, int]:
    """How often each variable is used by the bindings and by the result."""
    uses: dict[relax.Var, int] = {}
    for expr in (*(binding.value for binding in bindings), result):
        for variable in variables_of(expr):
            uses[variable] = uses.get(variable, 0) + 1
    return uses


def only_readers(
    bindings: list[relax.Binding], uses: dict[relax.Var, int], op_name: str
) -> dict[relax.Var, relax.Var]:
    """For each variable with a single use, which is by this op, the variable bound to that."""
    readers = {}
    for binding in bindings:
        value = binding.value
        if isinstance(value, relax.Call) and value.op.name == op_name:
            source = value.args[0]
            if isinstance(source, relax.Var) and uses.get(source) == 1:
                readers[source] = binding.var
    return readers


def live_bindings(bindings: list[relax.VarBinding], result: relax.Expr) -> list[relax.VarBinding]:
    """The bindings that the result needs, in order."""
    needed = set(variables_of(result))
    kept = []
    for binding in reversed(bindings):
        if binding.var in needed:
            kept.append(binding)
            needed.update(variables_of(binding.value))
    return kept[::-1]
