# SPDX-License-Identifier: Apache-2.0
"""Products are computed in the way that was measured to be fastest for them."""

from __future__ import annotations

from collections.abc import Callable, Collection

import tvm
from tvm import relax

from amp_ir.dispatch.accumulate_matmuls import ACCUMULATE, MATMUL
from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import library_call
from amp_ir.ir.tuning_cache import RULES, TuningCache, this_machine, with_algorithm

# Calls that take the name of a way behind the epilogue, as in "relu+gemm"; the argument before
# the result is the epilogue.
_MATMULS = (MATMUL, ACCUMULATE)


def products_of(ir: tvm.IRModule) -> dict[str, relax.Call]:
    """The different products that oneDNN computes for a step, by what makes their time."""
    found: dict[str, relax.Call] = {}
    for value in Dataflow(ir).values.values():
        if _is_matmul(value):
            found.setdefault(product_name(value), value)
    return found


def choose_measured_ways(
    ir: tvm.IRModule, libraries: Collection[str], *, log: DispatchLog
) -> tvm.IRModule:
    """Name the measured algorithm in the calls of oneDNN's matmuls, where `amp_ir.tune` has run."""
    if "onednn" not in libraries or not native.has("amp_ir.onednn.matmul"):
        return ir
    known = TuningCache.read(this_machine())
    # Naming every matmul of a step takes time; where `tune` has not run, for nothing.
    return choose_ways(ir, known.best, log=log) if known.milliseconds else ir


def choose_ways(
    ir: tvm.IRModule, best: Callable[[str], str], *, log: DispatchLog | None = None
) -> tvm.IRModule:
    """Name the way in the calls of oneDNN's matmuls.

    Before:  y = onednn.matmul(a, b, ..., "relu")
    After:   y = onednn.matmul(a, b, ..., "relu+gemm")

    Requires: `dispatch` has run; `best` gives the way for a product by its name, "rules" for
              leaving the choice to the call.
    Ensures:  nothing else changes; sums may be added up in another order. `log` is told.
    """
    flow, log = Dataflow(ir), DispatchLog() if log is None else log
    bindings = []
    for binding in flow.bindings:
        way = best(product_name(binding.value)) if _is_matmul(binding.value) else RULES
        if way != RULES:
            log.add("matmul", "onednn", f"measured: {way} is the fastest way")
            binding = relax.VarBinding(binding.var, _with_way(binding.value, way))
        bindings.append(binding)
    return flow.finish(bindings)


def product_name(call: relax.Call) -> str:
    """What makes the time of a product: dtypes, dims and strides, and what is done beside it."""
    words = [str(call.args[0].global_symbol).rpartition(".")[2]]
    for argument in call.args[1].fields:
        if isinstance(argument, relax.ShapeExpr):
            words.append("x".join(str(int(n)) for n in argument.values))
        elif isinstance(argument, tvm.ir.StringImm):
            words.append(argument.value)
        elif isinstance(argument.ty, relax.TensorType):
            words.append(str(argument.ty.dtype))
        else:
            words.append("-")
    return " ".join([*words, str(call.ty.dtype)])


def product_label(call: relax.Call) -> str:
    """The same for people: extents, dtypes, which operands lie transposed, what is done beside."""
    fields = list(call.args[1].fields)
    a, b = (str(one.ty.dtype) for one in fields[:2])
    numbers = [[int(n) for n in one.values] for one in fields if isinstance(one, relax.ShapeExpr)]
    a_dims, a_strides, b_dims, b_strides, _, _ = numbers
    words = [" x ".join(str(n) for n in (*a_dims[:-2], a_dims[-2], a_dims[-1], b_dims[-1]))]
    dtypes = dict.fromkeys([a if a == b else f"{a} and {b}", str(call.ty.dtype)])
    words.append(" to ".join(dtypes))
    swapped = [name for name, strides in (("a", a_strides), ("b", b_strides)) if strides[-1] != 1]
    words += [f"{' and '.join(swapped)} transposed"] if swapped else []
    is_added = str(call.args[0].global_symbol) == ACCUMULATE
    words += ["added"] if is_added else []
    words += ["with bias"] if isinstance(fields[3 if is_added else 2].ty, relax.TensorType) else []
    return ", ".join(words)


def _is_matmul(value: relax.Expr) -> bool:
    if not isinstance(value, relax.Call) or value.op.name != "relax.call_dps_packed":
        return False
    return str(value.args[0].global_symbol) in _MATMULS


def _with_way(call: relax.Call, way: str) -> relax.Call:
    *arguments, finish = call.args[1].fields
    arguments.append(tvm.ir.StringImm(with_algorithm(finish.value, way)))
    return library_call(str(call.args[0].global_symbol), arguments, call.ty_args[0], call.span)
