# SPDX-License-Identifier: Apache-2.0
"""Types and expressions of a program as text: `bf16[32, 768]`, `lv1 + bias`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.dialect.loop import loop_of
from amp_ir.ir.collective_call import read_collective
from amp_ir.ir.dataflow import DPS_CALL, KERNEL_CALL, Dataflow, op_name
from amp_ir.ir.external_call import read_external
from amp_ir.ir.library_call import ARGUMENTS, LibraryCall, read
from amp_ir.ir.strided_view import StridedView

_SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8", "bool": "bool",
}  # fmt: skip
_INFIX = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
_CASTS = ("amp_ir.cast", "relax.astype")


def type_text(ty: relax.Type) -> str:
    """Return a type in short: `bf16[32, 768]`, `(f32[], i64[4])`."""
    if isinstance(ty, relax.TensorType):
        return tensor_text(str(ty.dtype), [str(one.value) for one in ty.shape.values[:]])
    if isinstance(ty, relax.TupleType):
        return f"({', '.join(type_text(one) for one in ty.fields[:])})"
    return str(ty)


def tensor_text(dtype: str, extents: list[str]) -> str:
    """Return the type of a tensor in short: `bf16[32, 768]`."""
    return f"{short_dtype(dtype)}[{', '.join(extents)}]"


def short_dtype(dtype: str) -> str:
    """Return a dtype in short: `bf16`, `i64`."""
    return _SHORT_DTYPES.get(dtype, dtype)


def expression_text(expr: Any) -> str:
    """Return an expression of Relax in short: `lv1 + bias`, `bf16(lv2)`, `gelu(x)`."""
    if isinstance(expr, relax.Var):
        return str(expr.name)
    if isinstance(expr, relax.Tuple):
        return f"({', '.join(expression_text(one) for one in expr.fields[:])})"
    if isinstance(expr, relax.TupleGetItem):
        return f"{expression_text(expr.tuple_value)}[{expr.index}]"
    if isinstance(expr, relax.ShapeExpr):
        return f"[{', '.join(str(one.value) for one in expr.values[:])}]"
    if isinstance(expr, tvm.ir.GenericConst):
        data = expr.value.numpy()
        return str(data.item()) if data.size == 1 else f"constant {type_text(expr.ty)}"
    if isinstance(expr, relax.Call):
        return _call_text(expr)
    value = getattr(expr, "value", None)
    return str(expr) if value is None else str(value)


def _call_text(call: relax.Call) -> str:
    name = op_name(call)
    library, external = read(call), read_external(call)
    if library is not None:
        return f"{library.library}.{library.verb}({library_text(library, expression_text)})"
    collective = read_collective(call)
    if collective is not None:
        tensors = ", ".join(map(expression_text, call.args[1].fields[1:]))
        half = "start" if str(call.args[0].global_symbol) == START_SYMBOL else "wait"
        return f"{collective.kind}_{half}({tensors}), bucket {collective.bucket}"
    if external is not None:
        return f"{external.op}({external.arguments_text(expression_text)})"
    if name == LOOP:
        loop = loop_of(call)
        operands = ", ".join(map(expression_text, call.args[:]))
        return (
            f"loop({operands}), {loop.length} steps of {len(Dataflow(loop.body).bindings) - 1} ops"
        )
    if name in (KERNEL_CALL, DPS_CALL):
        callee = call.args[0]
        called = getattr(callee, "name_hint", None) or str(callee.global_symbol)
        given = [one for one in call.args[1].fields[:] if not _is_absent(one)]
        return f"{called.removeprefix('amp_ir.')}({', '.join(map(expression_text, given))})"
    arguments = [expression_text(one) for one in call.args[:]]
    if name in _CASTS:
        dtype = str(call.ty.dtype)
        return f"{short_dtype(dtype)}({arguments[0]})"
    short = name.rpartition(".")[2] or str(getattr(call.op, "name_hint", call.op))
    if short in _INFIX and len(arguments) == 2:
        return f"{arguments[0]} {_INFIX[short]} {arguments[1]}"
    return f"{short}({', '.join([*arguments, *_options(call)])})"


def _is_absent(expr: Any) -> bool:
    """Return whether an argument of a library call stands for none: no bias, no epilogue."""
    return op_name(expr) == "relax.null_value"


def _options(call: relax.Call) -> list[str]:
    """Return the options of a call as `name=value`, without those that are None or empty."""
    if call.attrs is None:
        return []
    if isinstance(call.attrs, tvm.ir.DictAttrs):
        pairs = [(str(name), value) for name, value in call.attrs.items()]
    else:
        fields = [one.name for one in type(call.attrs).__tvm_ffi_type_info__.fields]
        pairs = [(name, getattr(call.attrs, name)) for name in fields]
    return [f"{name}={_short(value)}" for name, value in pairs if str(value) not in ("None", "")]


def _short(value: Any) -> str:
    return re.sub(r'"', "", str(value))


def library_text(call: LibraryCall, tensor_text: Callable[[relax.Expr], str]) -> str:
    """Return the arguments of a library call by name; a transposed matrix as `w.T`."""
    found = []
    for name in ARGUMENTS[call.verb]:
        stem, _, part = name.rpartition("_")
        if stem and part in ("dims", "strides") and hasattr(call, stem):
            continue
        value = call.argument(name)
        if value is None or (name, value) == ("epilogue", "none"):
            continue
        text = tensor_text(value) if isinstance(value, relax.Expr) else str(value)
        if _is_transposed(getattr(call, name, None)):
            tensor, space, place = text.partition(" ")
            text = f"{tensor}.T{space}{place}"
        found.append(f"{name}={text}")
    return ", ".join(found)


def _is_transposed(view: Any) -> bool:
    """Return whether the last two dims of a view are in the other order in memory."""
    if not isinstance(view, StridedView) or len(view.strides) < 2:
        return False
    rows, columns = view.strides[-2:]
    return rows < columns
