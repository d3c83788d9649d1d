# SPDX-License-Identifier: Apache-2.0
"""Choose for each matmul the algorithm that was measured to be fastest for it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs
import tvm
from tvm import relax

from amp_ir.dispatch.accumulate_matmuls import ACCUMULATE, MATMUL
from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import RULES, LibraryMatmul, read, write
from amp_ir.ir.tuning_cache import TuningCache, this_machine


def matmuls_of(ir: tvm.IRModule) -> dict[str, relax.Call]:
    """Return the distinct matmuls that oneDNN computes for a step, by the key of their time."""
    found: dict[str, relax.Call] = {}
    for value in Dataflow(ir).values.values():
        if _matmul(value) is not None:
            found.setdefault(matmul_key(value), value)
    return found


def choose_measured_algorithms(
    ir: tvm.IRModule, libraries: Collection[str], *, log: DispatchLog
) -> tvm.IRModule:
    """Name the measured algorithm in the calls of oneDNN's matmuls, where `amp_ir.tune` has run."""
    if "onednn" not in libraries or not native.has("amp_ir.onednn.matmul"):
        return ir
    cache = TuningCache.read(this_machine())
    # Naming every matmul of a step takes time and is useless where `tune` has not run.
    return choose_algorithms(ir, cache.best, log=log) if cache.milliseconds else ir


def choose_algorithms(
    ir: tvm.IRModule, best: Callable[[str], str], *, log: DispatchLog | None = None
) -> tvm.IRModule:
    """Name the algorithm in the calls of oneDNN's matmuls.

    Before:  y = onednn.matmul(a, b)
    After:   y = onednn.matmul(a, b, algorithm="gemm")

    Requires: `dispatch` has run; `best` gives the algorithm for a matmul by its name, "rules" for
              leaving the choice to the call.
    Ensures:  nothing else changes; sums may be added up in another order. The pass records
              its choices in `log`.
    """
    flow, log = Dataflow(ir), DispatchLog() if log is None else log
    bindings = []
    for binding in flow.bindings:
        matmul = _matmul(binding.value)
        algorithm = RULES if matmul is None else best(matmul_key(binding.value))
        if matmul is not None and algorithm != RULES:
            log.add("matmul", "onednn", f"measured: {algorithm} is the fastest algorithm")
            new = write(attrs.evolve(matmul, algorithm=algorithm))
            binding = relax.VarBinding(binding.var, new)
        bindings.append(binding)
    return flow.finish(bindings)


def matmul_key(call: relax.Call) -> str:
    """Return what determines the time of a matmul: dtypes, dims, strides and epilogue."""
    parts = [str(call.args[0].global_symbol).rpartition(".")[2]]
    for argument in call.args[1].fields:
        if isinstance(argument, relax.ShapeExpr):
            parts.append("x".join(str(int(n)) for n in argument.values))
        elif isinstance(argument, tvm.ir.StringImm):
            parts.append(argument.value)
        elif isinstance(argument.ty, relax.TensorType):
            parts.append(str(argument.ty.dtype))
        else:
            parts.append("-")
    return " ".join([*parts, str(call.ty.dtype)])


def matmul_label(call: relax.Call) -> str:
    """Return a readable label: extents, dtypes, which operands are transposed, the epilogue."""
    matmul = _matmul(call)
    assert matmul is not None, "matmuls_of found the call"
    a, b = (str(one.base.ty.dtype) for one in (matmul.a, matmul.b))
    parts = [" x ".join(str(n) for n in (*matmul.a.shape, matmul.b.shape[-1]))]
    dtypes = dict.fromkeys([a if a == b else f"{a} and {b}", str(call.ty.dtype)])
    parts.append(" to ".join(dtypes))
    swapped = [name for name in ("a", "b") if getattr(matmul, name).strides[-1] != 1]
    parts += [f"{' and '.join(swapped)} transposed"] if swapped else []
    parts += [] if matmul.c is None else ["added"]
    parts += [] if matmul.bias is None else ["with bias"]
    return ", ".join(parts)


def _matmul(value: relax.Expr) -> LibraryMatmul | None:
    """Return a matmul of oneDNN's that takes the name of an algorithm; None for other values."""
    call = read(value)
    return call if isinstance(call, LibraryMatmul) and call.symbol in (MATMUL, ACCUMULATE) else None
