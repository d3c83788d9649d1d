# SPDX-License-Identifier: Apache-2.0
"""The program of a step as text: a line a value, with its dtype, module, phase and source line.

    lv1   f32[6, 16]   matmul(batch0_low, lv, out_dtype=float32)    # forward 0, train.py:8

Further results of a call follow it, without an expression. After "loops", the indented lines
below a kernel's call are the ops that it computes, as they stood before fusion. After "memory",
what a call writes follows `->`, and a value in the arena carries its offset in bytes:
`lv3 f32[96] @11648` where it is written, `lv3 @11648` where it is read.
"""

from __future__ import annotations

import functools
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

from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.ir.collective_call import Collective, read_collective
from amp_ir.ir.dataflow import KERNEL_CALL, Dataflow, op_name
from amp_ir.ir.external_call import read_external
from amp_ir.ir.library_call import read, written_by
from amp_ir.ir.location import META_KEY, Location, locations_of
from amp_ir.ir.loop_call import PlannedLoop, planned_loop
from amp_ir.ir.memory_plan import MemoryPlan, PlannedStep, PlannedValue
from amp_ir.ir.stages import Stage
from amp_ir.report.expression_text import (
    expression_text,
    library_text,
    short_dtype,
    tensor_text,
    type_text,
)

_VIEW = "amp_ir.view"
_ARENA = "arena"
# Where the comment with the place begins, for lines that are shorter.
_COMMENT_COLUMN = 96


@attrs.frozen
class Line:
    """One binding or call: its variable, results and expression, where it comes from.

    `results` are pairs of a name and a type; a call with several has a tuple as its `variable`.
    `computes` are the lines, as they stood before fusion, that a kernel computes.
    """

    variable: str
    results: tuple[tuple[str, str], ...]
    text: str
    places: tuple[Location, ...] = ()
    computes: tuple[Line, ...] = ()
    is_library: bool = False


def program_text(record: Stage) -> str:
    """Return what a stage left as text, under a header: its name, calls before and after, time."""
    before = record.before if isinstance(record.before, tvm.IRModule) else None
    earlier = [] if before is None else list(_of_ir(before, {}))
    milliseconds = f"{1e3 * record.seconds:.1f} ms"
    if before is not None and _is_equal(before, record.program):
        return f"after {record.name}: unchanged, {len(earlier)} lines, {milliseconds}\n"
    lines = _lines(record.program, earlier)
    counts = f"{len(lines)} lines" + ("" if before is None else f", {len(earlier)} before")
    results = [result for one in lines for result in one.results]
    width = min(max((len(name) for name, _ in results), default=0), 24)
    columns = min(max((len(type_) for _, type_ in results), default=0), 28)
    body = [text for one in lines for text in _written(one, width, columns)]
    header = f"after {record.name}: {counts}, {milliseconds}"
    return "\n".join([header, *_inputs(record.program), "", *body, ""])


def _is_equal(before: tvm.IRModule, after: Any) -> bool:
    if not isinstance(after, tvm.IRModule):
        return False
    return before is after or bool(tvm_ffi.structural_equal(before, after))


def _lines(program: Any, earlier: list[Line]) -> list[Line]:
    """Return the lines of a program in its order; `earlier` are those before the stage."""
    if isinstance(program, torch.fx.GraphModule):
        return [_of_node(node) for node in program.graph.nodes if node.op == "call_function"]
    if isinstance(program, PlannedStep):
        return list(_of_plan(program))
    known = {name: one for one in earlier for name in (*dict(one.results), one.variable)}
    return list(_of_ir(program, known))


def _inputs(program: Any) -> list[str]:
    """Return the inputs of `main`, one line each."""
    if isinstance(program, torch.fx.GraphModule):
        nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
        return [f"  input {node.name}: {_value_type(node.meta.get('val'))}" for node in nodes]
    ir = program.ir if isinstance(program, PlannedStep) else program
    return [f"  input {one.name}: {type_text(one.ty)}" for one in ir["main"].params]


def _written(line: Line, width: int, columns: int) -> Iterator[str]:
    (name, type_), *more = line.results
    start = f"{name:<{width}}  {type_:<{columns}}  {line.text}"
    place = _places_text(line.places)
    yield f"{start:<{_COMMENT_COLUMN}}  # {place}" if place else start
    for name, type_ in more:
        yield f"{name:<{width}}  {type_}"
    names = [", ".join(name for name, _ in one.results) for one in line.computes]
    inside = max(map(len, names), default=0)
    for name, one in zip(names, line.computes, strict=True):
        yield f"{'':<{width}}    {name:<{inside}} = {one.text}"


def _places_text(places: tuple[Location, ...]) -> str:
    """Return phases with their modules, and the first source line: `backward 0, 2, train.py:8`."""
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
    return Line(node.name, ((node.name, _value_type(node.meta.get("val"))),), text, places)


def _argument_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument_text(one) for one in value)}]"
    return value.name if isinstance(value, torch.fx.Node) else str(value)


def _value_type(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_value_type(one) for one in value)})"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return tensor_text(dtype, [str(one) for one in value.shape])
    return type(value).__name__


def _of_ir(ir: tvm.IRModule, known: Mapping[str, Line]) -> Iterator[Line]:
    """Return the bindings of `main`; `known` are the lines of values before fusion."""
    flow = Dataflow(ir)
    stored = {name for one in flow.bindings for name in _names(one.value, "stores")}
    fields = _fields(flow)
    for binding in flow.bindings:
        call, variable = binding.value, binding.var
        if isinstance(call, relax.Tuple):
            yield Line("return", (("return", ""),), expression_text(call))
        elif not (isinstance(call, relax.TupleGetItem) and call.tuple_value in fields):
            yield Line(
                str(variable.name),
                fields.get(variable, ((str(variable.name), type_text(variable.ty)),)),
                expression_text(call),
                locations_of(call.span),
                _formula(_names(call, "computes"), known, stored),
                is_library=any(
                    found is not None
                    for found in (read(call), read_external(call), read_collective(call))
                ),
            )


def _fields(flow: Dataflow) -> dict[relax.Var, tuple[tuple[str, str], ...]]:
    """Return name and type of every field of the tuples that are only read field by field, once."""
    names: dict[relax.Var, dict[int, str]] = {}
    for variable, value in flow.values.items():
        if isinstance(value, relax.TupleGetItem):
            names.setdefault(value.tuple_value, {})[int(value.index)] = str(variable.name)
    return {
        variable: tuple(
            # What nothing reads has no name.
            (found.get(k, "_"), type_text(field))
            for k, field in enumerate(variable.ty.fields[:])
        )
        for variable, found in names.items()
        if flow.uses[variable] == len(found)
    }


def _names(call: Any, attribute: str) -> list[str]:
    """Return the variables from before fusion that a kernel's call notes as `attribute`."""
    if op_name(call) != KERNEL_CALL or attribute not in call.attrs:
        return []
    return [name for name in str(call.attrs[attribute]).split(",") if name]


def _formula(names: list[str], known: Mapping[str, Line], stored: set[str]) -> tuple[Line, ...]:
    """Return the lines that a kernel computes: those of `names` and their inputs not in memory."""
    wanted = [known[name] for name in names if name in known]
    found: set[int] = set()
    while wanted:
        line = wanted.pop()
        if line.is_library or id(line) in found:
            continue
        found.add(id(line))
        read_here = [one for one in re.findall(r"\w+", line.text) if one in known]
        wanted += [known[one] for one in read_here if not {one, known[one].variable} & stored]
    # A line with several results is known by each of their names.
    return tuple({id(one): one for one in known.values() if id(one) in found}.values())


def _of_plan(step: PlannedStep) -> Iterator[Line]:
    """Yield the calls of a planned step, with what they read and write."""
    tensors = _Tensors(step.plan)
    calls = iter(enumerate(step.plan.calls))
    for binding in Dataflow(step.ir).bindings:
        call = binding.value
        if not isinstance(call, relax.Call):
            continue
        symbol = str(getattr(call.op, "global_symbol", "") or getattr(call.op, "name_hint", ""))
        if symbol == _VIEW:
            tensors.views[str(binding.var.name)] = call
            continue
        position, planned = next(calls)
        library, external, loop = read(call), read_external(call), planned_loop(step.ir, call)
        collective = read_collective(call)
        read_here = functools.partial(tensors.read, position=position)
        count = len(call.args) - planned.result_count
        if loop is not None:
            count = len(loop.arguments) - planned.result_count
            workspace, _numbers, *operands = loop.arguments[:count]
            name, written = loop.name, list(loop.arguments[count:])
            text = f"{loop.length} steps of {_steps_text(loop)}: "
            text += ", ".join(map(read_here, operands))
            text += f", workspace={tensors.written(workspace, position)}"
        elif collective is not None:
            name, text, written = _collective_text(call, collective, tensors, position)
        elif external is not None:
            name, written = external.op, call.args[count:]
            text = external.arguments_text(read_here)
        elif library is None:
            name, written = symbol, call.args[count:]
            text = f"{', '.join(planned.ops)}: "
            text += ", ".join(map(read_here, call.args[:count]))
        else:
            name = f"{library.library}.{library.verb}"
            workspace, written = written_by(call)
            text = library_text(library, read_here)
            if workspace is not None:
                text += f", workspace={tensors.written(workspace, position)}"
        if written:
            text += f" -> {', '.join(tensors.written(one, position) for one in written)}"
        yield Line(name, ((name, ""),), text, planned.locations)


def _collective_text(
    call: relax.Call, one: Collective, tensors: _Tensors, position: int
) -> tuple[str, str, list[relax.Expr]]:
    """Return the name, the text and the results of half of a collective.

    A result that stays in its bucket is not named.
    """
    is_start = str(call.op.global_symbol) == START_SYMBOL
    name = f"{one.kind}_{'start' if is_start else 'wait'}"
    pairs = call.args[2:]
    text = f"bucket {one.bucket} of {one.ranks} ranks, {short_dtype(one.dtype)}[{one.size}]"
    text += f" {tensors.place(call.args[1])}"
    if is_start:
        text += f": {one.names.replace(',', ', ')}"
    return name, text, list(pairs[1::2])


def _steps_text(loop: PlannedLoop) -> str:
    """Return how many calls a step of a loop makes."""
    values = Dataflow(loop.body).values.values()
    calls = [one for one in values if str(getattr(one.op, "global_symbol", "")) != _VIEW]
    return f"{len(calls)} calls"


class _Tensors:
    """The tensors that calls of a planned step read and write, by what is in the arena then."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.views: dict[str, relax.Call] = {}
        self.values: dict[int, list[PlannedValue]] = {}
        for value in plan.values:
            if value.offset_bytes is not None:
                self.values.setdefault(value.offset_bytes, []).append(value)

    def read(self, expr: relax.Expr, position: int) -> str:
        """Return `name @offset`, of the last value that is written there before the call."""
        name, base, offset, _ = self._view(expr)
        if base != _ARENA:
            return name
        before = [one for one in self.values.get(offset, ()) if one.first_use < position]
        return f"{max(before, key=_first_use).name if before else base} @{offset}"

    def place(self, expr: relax.Expr) -> str:
        """Return `@offset` of an argument in the arena."""
        return f"@{self._view(expr)[2]}"

    def written(self, expr: relax.Expr, position: int) -> str:
        """Return `name dtype[size] @offset`, of the value that the call writes."""
        name, base, offset, type_ = self._view(expr)
        if base != _ARENA:
            return name
        now = [one for one in self.values.get(offset, ()) if one.first_use == position]
        if not now:
            return f"{type_} @{offset}"
        count = type_.partition("[")[2]
        dtype = short_dtype(now[0].dtype)
        return f"{now[0].name} {dtype}[{count} @{offset}"

    def _view(self, expr: relax.Expr) -> tuple[str, str, int, str]:
        """Return the text of an argument, the name of its memory, the offset there and its type."""
        text = expression_text(expr)
        if text not in self.views:
            return text, text, 0, ""
        base, offset, shape, dtype = self.views[text].args[:]
        extents = [str(one.value) for one in shape.values[:]]
        name = expression_text(base)
        return name, name, int(offset.value), tensor_text(str(dtype.value), extents)


def _first_use(value: PlannedValue) -> int:
    return value.first_use
