# SPDX-License-Identifier: Apache-2.0
"""The program of a step as text: a line a value, with its dtype, module, phase and source line.

    lv1   f32[6, 16]   matmul(batch0_low, lv, out_dtype=float32)    # forward 0, train.py:8

After "loops", the lines below a kernel's call are the ops that it computes, as they stood before
fusion. After "memory", tensors in the arena carry their offset in bytes: `f32[96] @11648`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import attrs
import torch
import tvm
import tvm_ffi
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.library_call import ARGUMENTS, DPS_CALL, LibraryCall, read, written_by
from amp_ir.ir.location import META_KEY, Location, locations_of
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.stages import Stage
from amp_ir.ir.strided_view import StridedView

SHORT_DTYPES = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8", "bool": "bool",
}  # fmt: skip
_INFIX = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
_CASTS = ("amp_ir.cast", "relax.astype")
_KERNEL_CALL = "relax.call_tir"
_VIEW = "amp_ir.view"
# What the names of library functions begin with, without "amp_ir.".
_LIBRARIES = ("onednn.", "torch.", "torch_cuda.", "cublaslt.")
# Where the comment with the place begins, for lines that are shorter.
_COMMENT_COLUMN = 96


@attrs.frozen
class Line:
    """One value or call: its name, type and expression, where it comes from, what it computes."""

    name: str
    type: str
    text: str
    places: tuple[Location, ...] = ()
    computes: tuple[Line, ...] = ()


def program_text(record: Stage) -> str:
    """Return what a stage left as text, under a header: its name, calls before and after, time."""
    lines = lines_of(record)
    if is_unchanged(record):
        return _header(record, len(lines)) + "\n"
    width = min(max((len(one.name) for one in lines), default=0), 24)
    columns = min(max((len(one.type) for one in lines), default=0), 28)
    body = [text for one in lines for text in _written(one, width, columns)]
    return "\n".join([_header(record, len(lines)), *_inputs(record.program), "", *body, ""])


def lines_of(record: Stage) -> list[Line]:
    """Return the lines of a stage's program, in the order of the program."""
    if isinstance(record.program, torch.fx.GraphModule):
        return [_of_node(node) for node in record.program.graph.nodes if node.op == "call_function"]
    if isinstance(record.program, PlannedStep):
        return list(_of_plan(record.program))
    before = record.before if isinstance(record.before, tvm.IRModule) else None
    known = {} if before is None else {one.name: one for one in _of_ir(before, {})}
    return list(_of_ir(record.program, known))


def is_unchanged(record: Stage) -> bool:
    """Return whether the stage left the program as it was given."""
    before, after = record.before, record.program
    if not isinstance(before, tvm.IRModule) or not isinstance(after, tvm.IRModule):
        return False
    return before is after or bool(tvm_ffi.structural_equal(before, after))


def _header(record: Stage, count: int) -> str:
    time = f"{1e3 * record.seconds:.1f} ms"
    if is_unchanged(record):
        return f"after {record.name}: unchanged, {count} lines, {time}"
    if not isinstance(record.before, tvm.IRModule):
        return f"after {record.name}: {count} lines, {time}"
    earlier = len(lines_of(Stage("", 0.0, None, record.before)))
    return f"after {record.name}: {count} lines, {earlier} before, {time}"


def _inputs(program: Any) -> list[str]:
    """Return the inputs of `main`, one line each."""
    if isinstance(program, torch.fx.GraphModule):
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        return [f"  input {node.name}: {_value_type(node.meta.get('val'))}" for node in nodes]
    ir = program.ir if isinstance(program, PlannedStep) else program
    return [f"  input {one.name}: {type_text(one.ty)}" for one in ir["main"].params]


def _written(line: Line, width: int, columns: int) -> Iterator[str]:
    start = f"{line.name:<{width}}  {line.type:<{columns}}  {line.text}"
    place = _places_text(line.places)
    yield f"{start:<{_COMMENT_COLUMN}}  # {place}" if place else start
    inside = max((len(one.name) for one in line.computes), default=0)
    for one in line.computes:
        yield f"{'':<{width}}    {one.name:<{inside}} = {one.text}"


def _places_text(places: tuple[Location, ...]) -> str:
    """Each phase with its modules, and the first source line: `backward 0, 2, train.py:8`."""
    phases: dict[str, dict[str, None]] = {}
    for one in places:
        phases.setdefault(one.phase, {})[one.module or "step"] = None
    parts = [f"{phase} {', '.join(modules)}" for phase, modules in phases.items()]
    source = next((one for one in places if one.file), None)
    if source is not None:
        parts.append(f"{PurePath(source.file).name}:{source.line}")
    return "; ".join(parts)


def _of_node(node: torch.fx.Node) -> Line:
    """Return a node of a torch.fx graph as text."""
    arguments = [_argument_text(one) for one in node.args]
    arguments += [f"{name}={_argument_text(one)}" for name, one in node.kwargs.items()]
    called = str(node.target).removesuffix(".default")
    text = f"{called}({', '.join(arguments)})"
    if node.target is operator.getitem:
        text = f"{arguments[0]}[{arguments[1]}]"
    place = node.meta.get(META_KEY)
    places = () if place is None else (place,)
    return Line(node.name, _value_type(node.meta.get("val")), text, places)


def _argument_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument_text(one) for one in value)}]"
    return value.name if isinstance(value, torch.fx.Node) else str(value)


def _value_type(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value_type(one) for one in value)})"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return _tensor_text(dtype, [str(one) for one in value.shape])
    return type(value).__name__


def type_text(ty: relax.Type) -> str:
    """Return a type in short: `bf16[32, 768]`, `(f32[], i64[4])`."""
    if isinstance(ty, relax.TensorType):
        return _tensor_text(str(ty.dtype), [str(one.value) for one in ty.shape.values[:]])
    if isinstance(ty, relax.TupleType):
        return f"({', '.join(type_text(one) for one in ty.fields[:])})"
    return str(ty)


def _tensor_text(dtype: str, extents: list[str]) -> str:
    return f"{SHORT_DTYPES.get(dtype, dtype)}[{', '.join(extents)}]"


def _of_ir(ir: tvm.IRModule, known: Mapping[str, Line]) -> Iterator[Line]:
    """Return the bindings of `main`; `known` are the lines of values before fusion."""
    bindings = Dataflow(ir).bindings
    stored = {name for one in bindings for name in _names(one.value, "stores")}
    for binding in bindings:
        call, variable = binding.value, binding.var
        if isinstance(call, relax.Tuple):
            yield Line("return", "", expression_text(call))
            continue
        text = expression_text(call)
        computed = _formula(_names(call, "computes"), known, stored)
        yield Line(variable.name, type_text(variable.ty), text, locations_of(call.span), computed)


def _names(call: Any, attribute: str) -> list[str]:
    """Return the variables from before fusion that a kernel's call notes as `attribute`."""
    if op_name(call) != _KERNEL_CALL or attribute not in call.attrs:
        return []
    return [name for name in str(call.attrs[attribute]).split(",") if name]


def _formula(names: list[str], known: Mapping[str, Line], stored: set[str]) -> tuple[Line, ...]:
    """Return the lines that a kernel computes: those of `names` and their inputs not in memory."""
    wanted, found = list(names), set()
    while wanted:
        name = wanted.pop()
        if name in found or name not in known:
            continue
        found.add(name)
        read = re.findall(r"\w+", known[name].text)
        wanted += [one for one in read if one not in stored and not _is_library(known.get(one))]
    return tuple(line for name, line in known.items() if name in found)


def _is_library(line: Line | None) -> bool:
    return line is None or line.text.startswith(_LIBRARIES)


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
    library = read(call)
    if library is not None:
        return f"{library.library}.{library.verb}({_library_text(library, {})})"
    if name in (_KERNEL_CALL, DPS_CALL):
        callee = call.args[0]
        called = getattr(callee, "name_hint", None) or str(callee.global_symbol)
        given = [one for one in call.args[1].fields[:] if not _is_absent(one)]
        return f"{called.removeprefix('amp_ir.')}({', '.join(map(expression_text, given))})"
    arguments = [expression_text(one) for one in call.args[:]]
    if name in _CASTS:
        dtype = str(call.ty.dtype)
        return f"{SHORT_DTYPES.get(dtype, dtype)}({arguments[0]})"
    short = name.rpartition(".")[2] or str(getattr(call.op, "name_hint", call.op))
    if short in _INFIX and len(arguments) == 2:
        return f"{arguments[0]} {_INFIX[short]} {arguments[1]}"
    return f"{short}({', '.join([*arguments, *_options(call)])})"


def _is_absent(expr: Any) -> bool:
    """Whether an argument of a library call stands for none: no bias, no epilogue."""
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


def _of_plan(step: PlannedStep) -> Iterator[Line]:
    """Yield the calls of a planned step; a tensor in the arena with its offset."""
    views: dict[str, str] = {}
    calls = iter(step.plan.calls)
    for binding in Dataflow(step.ir).bindings:
        call = binding.value
        if not isinstance(call, relax.Call):
            continue
        symbol = str(getattr(call.op, "global_symbol", "") or getattr(call.op, "name_hint", ""))
        if symbol == _VIEW:
            views[binding.var.name] = _view_text(call)
            continue
        planned = next(calls, None)
        places = () if planned is None else planned.locations
        library = read(call)
        if library is not None:
            name, text = f"{library.library}.{library.verb}", _library_text(library, views)
            workspace, results = written_by(call)
            made = [expression_text(one) for one in results]
            text += f" -> {', '.join(views.get(one, one) for one in made)}"
            if workspace is not None:
                text += f", workspace={views[expression_text(workspace)]}"
        else:
            arguments = [expression_text(one) for one in call.args[:]]
            name, text = symbol, ", ".join(views.get(one, one) for one in arguments)
        ops = "" if planned is None or library is not None else f"{', '.join(planned.ops)}: "
        yield Line(name, "", ops + text, places)


def _library_text(call: LibraryCall, views: Mapping[str, str]) -> str:
    """Return the arguments of a library call by name; a transposed matrix as `w.T`."""
    found = []
    for name in ARGUMENTS[call.verb]:
        stem, _, part = name.rpartition("_")
        if stem and part in ("dims", "strides") and hasattr(call, stem):
            continue
        value = call.argument(name)
        if value is None or (name, value) == ("epilogue", "none"):
            continue
        text = expression_text(value) if isinstance(value, relax.Expr) else str(value)
        text = views.get(text, text) + (".T" if _is_transposed(getattr(call, name, None)) else "")
        found.append(f"{name}={text}")
    return ", ".join(found)


def _is_transposed(view: Any) -> bool:
    """Return whether the last two dims of a view stand in the other order in memory."""
    if not isinstance(view, StridedView) or len(view.strides) < 2:
        return False
    rows, columns = view.strides[-2:]
    return rows < columns


def _view_text(call: relax.Call) -> str:
    _arena, offset, shape, dtype = call.args[:]
    extents = [str(one.value) for one in shape.values[:]]
    return f"{_tensor_text(str(dtype.value), extents)} @{expression_text(offset)}"
