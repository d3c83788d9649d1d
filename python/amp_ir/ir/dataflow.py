# SPDX-License-Identifier: Apache-2.0
"""The view of `main` that passes work with: its bindings, their readers, their replacements.

A pass is `module -> module`: it reads a `Dataflow`, writes bindings, and finishes with those that
the result needs. No other file knows that `main` consists of blocks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Op

from amp_ir.dialect.collectives import WAIT_SYMBOL, WAITS
from amp_ir.errors import OptionError
from amp_ir.ir.short_list import short_names

# The op that calls a kernel.
KERNEL_CALL = "relax.call_tir"
# The op that calls a function of a library, with its results as last arguments.
DPS_CALL = "relax.call_dps_packed"


def variables_of(expr: relax.Expr) -> list[relax.Var]:
    """Return the variables that an expression reads, in order, with repetitions."""
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
    """Return the kind of node that a class is; `relax.Expr`: a node without variables."""
    if class_ not in _kinds:
        known = (relax.Var, relax.Call, relax.Tuple, relax.TupleGetItem)
        _kinds[class_] = next((one for one in known if issubclass(class_, one)), relax.Expr)
    return _kinds[class_]


def op_name(expr: Any) -> str:
    """Return the name of the op that `expr` calls; "" where it calls none."""
    if _kind_of(type(expr)) is not relax.Call:
        return ""
    op = expr.op
    return str(op.name) if isinstance(op, Op) else ""


def with_arguments(
    call: relax.Call, args: Sequence[relax.Expr], ty: relax.Type | None = None
) -> relax.Call:
    """Return a call of the same op with `args`, its options and location; `ty` if that changes."""
    result = call.ty if ty is None else ty
    return relax.Call(call.op, list(args), call.attrs, call.ty_args, call.span, result)


def replaced(expr: relax.Expr, now: Mapping[relax.Var, relax.Expr]) -> relax.Expr:
    """Return an expression that reads `now[variable]` instead of each variable of `now`."""
    if not any(variable in now for variable in variables_of(expr)):
        return expr
    if isinstance(expr, relax.Var):
        return now[expr]
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([replaced(field, now) for field in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(replaced(expr.tuple_value, now), expr.index)
    return with_arguments(expr, [replaced(argument, now) for argument in expr.args])


def _main_of(ir: tvm.IRModule) -> relax.Function:
    try:
        main = ir["main"]
    except ValueError:  # asked for, since to list all functions takes longer
        main = None
    if not isinstance(main, relax.Function):
        functions = {one.name_hint: ir[one] for one in ir.get_global_vars()}
        names = sorted(k for k, one in functions.items() if isinstance(one, relax.Function))
        raise OptionError(
            "amp_ir reads the Relax function `main`, and the module has "
            f"{short_names(names) or 'no Relax function'}; give the program's function this name"
        )
    return main


class Dataflow:
    """`main` of a module, read once: its bindings in order, and what it returns.

    A view of the module as it is: a pass stores its new bindings itself, until `finish`.

    Raises:
        OptionError: there is no `main`.
    """

    def __init__(self, ir: tvm.IRModule) -> None:
        self.ir = ir
        self.main: relax.Function = _main_of(ir)
        # A slice fetches an array of TVM at once.
        blocks = self.main.body.blocks[:]
        self.bindings: list[relax.VarBinding] = [b for one in blocks for b in one.bindings[:]]
        self.result: relax.Expr = self.main.body.body

    @functools.cached_property
    def values(self) -> dict[relax.Var, Any]:
        """What each variable is bound to, in order."""
        return {binding.var: binding.value for binding in self.bindings}

    @functools.cached_property
    def readers(self) -> dict[relax.Var, list[relax.Var]]:
        """For each variable that is read: what its readers are bound to, as often as they do."""
        readers: dict[relax.Var, list[relax.Var]] = {}
        for reader, value in self.values.items():
            for variable in variables_of(value):
                readers.setdefault(variable, []).append(reader)
        return readers

    @functools.cached_property
    def uses(self) -> Counter[relax.Var]:
        """How often each variable is read, by bindings and by the result."""
        uses = Counter({variable: len(found) for variable, found in self.readers.items()})
        uses.update(variables_of(self.result))
        return uses

    @functools.cached_property
    def fields(self) -> list[relax.Expr]:
        """What `main` returns: the fields of its tuple, or the one value."""
        whole = self.values.get(self.result, self.result)
        return list(whole.fields[:]) if isinstance(whole, relax.Tuple) else [whole]

    def calls(self, *names: str) -> dict[relax.Var, relax.Call]:
        """Return the calls of these ops by what they are bound to, in order."""
        return {one: value for one, value in self.values.items() if op_name(value) in names}

    def only_readers(self, name: str) -> dict[relax.Var, relax.Var]:
        """Map a variable whose only use is as first argument of this op to that op's variable."""
        sources = {one: call.args[0] for one, call in self.calls(name).items()}
        return {source: one for one, source in sources.items() if self.uses[source] == 1}

    def finish(
        self,
        bindings: Sequence[relax.VarBinding],
        result: relax.Expr | None = None,
        parameters: Sequence[relax.Var] | None = None,
        kept: Collection[relax.Var] = (),
    ) -> tvm.IRModule:
        """Return the module whose `main` has the needed `bindings` in one dataflow block.

        `result` is what it returns, `parameters` what it takes, if other than before; they may have
        other types. `kept` is needed by other ranks.
        """
        main = self.main
        type_ = main.body.ty if result is None else result.ty
        result = self.result if result is None else result
        block = relax.DataflowBlock(live_bindings(bindings, result, kept))
        body = relax.SeqExpr([block], result)
        relax.expr._update_type(body, type_)
        takes = main.params if parameters is None else list(parameters)
        new = relax.Function(takes, body, type_, main.is_pure, main.attrs, main.span)
        functions = {**self.ir.functions, self.ir.get_global_var("main"): new}
        return tvm.IRModule(functions, attrs=self.ir.attrs)


def _is_wait(value: Any) -> bool:
    """Return whether a binding ends an exchange, before or after it is written as a call."""
    if op_name(value) in WAITS:
        return True
    callee = value.args[0] if op_name(value) == DPS_CALL else None
    return str(getattr(callee, "global_symbol", "")) == WAIT_SYMBOL


def live_bindings(
    bindings: Sequence[relax.VarBinding], result: relax.Expr, kept: Collection[relax.Var] = ()
) -> list[relax.VarBinding]:
    """Return the bindings that the result needs, in order, and those that other ranks need.

    A rank that uses nothing of an exchange takes part in it all the same; `kept` are such exchanges
    that are not begun yet.
    """
    needed = {*variables_of(result), *kept}
    live = []
    for binding in reversed(bindings):
        if binding.var in needed or _is_wait(binding.value):
            live.append(binding)
            needed.update(variables_of(binding.value))
    return live[::-1]
