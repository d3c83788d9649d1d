# SPDX-License-Identifier: Apache-2.0
"""The loops stage: every op that is not a library call becomes part of a fused kernel."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.dialect.registry import options_of
from amp_ir.errors import UnsupportedOpError
from amp_ir.ir.dataflow import DPS_CALL, Dataflow
from amp_ir.ir.location import from_span
from amp_ir.ir.static_shape import extents_of
from amp_ir.loops import lowerings  # noqa: F401  (registers the lowerings)
from amp_ir.loops.codegen.kernel import Emitter
from amp_ir.loops.cpu import emit_cpu
from amp_ir.loops.fusion.accumulate_rows import Accumulations, find_accumulations
from amp_ir.loops.fusion.grouping import Grouping
from amp_ir.loops.fusion.kernel_cache import KernelCache
from amp_ir.loops.fusion.origins import Origins
from amp_ir.loops.fusion.write_fused import FusedWriter, LibraryCall, flat_values, relax_constant
from amp_ir.loops.group import Group, storage_of
from amp_ir.loops.ir import Buffer, Constant, Opaque, Pointwise, TensorSpec, Value
from amp_ir.loops.lowering_registry import LOWERINGS, Lowering


def fuse_loops(
    ir: tvm.IRModule,
    *,
    strict: bool = False,
    emitter: Emitter = emit_cpu,
    disable_fusion: bool = False,
    arithmetic_is_free: bool = False,
) -> tvm.IRModule:
    """Group all ops that are not library calls into kernels.

    Before:  y = add(x, b); z = nn.relu(y); w = call_dps_packed("matmul", z, v)
    After:   z = call_tir(kernel_0, (x, b)); w = call_dps_packed("matmul", z, v)

    Requires: one function `main`, one dataflow block, static shapes; dispatch has run.
    Ensures:  only call_tir, call_dps_packed, tuples and constants are left; equal kernels are one
              function; kernels see bfloat16 as uint16 and bool as uint8, in flat buffers.
              With `disable_fusion` no kernel computes two ops; views are part of their readers.
              With `arithmetic_is_free`, as on a GPU, what saves bytes may take more arithmetic.
    Errors:   UnsupportedOpError, once, listing every op without a lowering.
    """
    program = _Program(
        ir, strict, disable_fusion=disable_fusion, arithmetic_is_free=arithmetic_is_free
    )
    program.read()
    return program.write(emitter)


def group_values(ir: tvm.IRModule) -> tuple[dict[relax.Var, Any], Grouping]:
    """Lower each variable of `main` to a value and group the values; nothing is written."""
    program = _Program(ir, strict=False)
    program.read()
    program.grouping.finish()
    return program.values, program.grouping


class _Program:
    def __init__(
        self,
        ir: tvm.IRModule,
        strict: bool,
        *,
        disable_fusion: bool = False,
        arithmetic_is_free: bool = False,
    ) -> None:
        self.ir = ir
        self.strict = strict
        self.disable_fusion = disable_fusion
        self.flow = Dataflow(ir)
        self.main = self.flow.main
        self.arithmetic_is_free = arithmetic_is_free
        self.grouping = Grouping(arithmetic_is_free=arithmetic_is_free)
        # The collective that was begun last, as a unit.
        self.last_start: set[int] = set()
        self.values: dict[relax.Var, Any] = {}
        self.calls: list[LibraryCall] = []
        self.opaque_units: dict[int, tuple[int, list[Opaque]]] = {}
        self.origins = Origins()
        self.accumulations = Accumulations() if disable_fusion else find_accumulations(self.flow)
        self.missing: dict[str, list[relax.Call]] = {}
        # The name of the variable whose value is being read.
        self.reading = ""

    # Reading: bindings become values.

    def read(self) -> None:
        for parameter in self.main.params:
            spec = spec_of(parameter.ty)
            self.values[parameter] = Buffer(spec, source=parameter)
        for variable, value in self.flow.values.items():
            self._read_binding(variable, value)
        if self.missing:
            raise UnsupportedOpError(_missing_message(self.missing))
        for value in flat_values(self._value(self.flow.result)):
            self._materialise(value)

    def _read_binding(self, variable: relax.Var, value: relax.Expr) -> None:
        self.reading = str(variable.name)
        if variable in self.accumulations.sums:
            found = self.accumulations.sums[variable]
            self.values[variable] = self._lowered(found.call, found.arguments)
        elif variable not in self.accumulations.fused:
            self.values[variable] = self._value(value)
        if isinstance(value, relax.TupleGetItem) and isinstance(self.values[variable], Value):
            self.origins.rename(self.values[variable], self.reading)

    def _value(self, expr: relax.Expr) -> Any:
        if isinstance(expr, relax.Var):
            return self.values[expr]
        if isinstance(expr, GenericConst):
            return _constant(expr)
        if isinstance(expr, relax.Tuple):
            return tuple(self._value(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self._value(expr.tuple_value)[expr.index]
        if isinstance(expr, relax.Call):
            return self._call(expr)
        return expr

    def _call(self, call: relax.Call) -> Any:
        name = call.op.name
        if name == DPS_CALL:
            return self._library_call(call)
        if name not in LOWERINGS:
            self.missing.setdefault(name, []).append(call)
            return _placeholders(call)
        return self._lowered(call, call.args[:])

    def _lowered(self, call: relax.Call, given: list[relax.Expr]) -> Any:
        name = call.op.name
        lowering = LOWERINGS[name]
        arguments = _flat_arguments(self._value(argument) for argument in given)
        op = Lowering(name, specs_of(call.ty), call, self.arithmetic_is_free)
        if self.disable_fusion:
            self.grouping.close_groups()
        results = lowering(op, *arguments, **options_of(call))
        values = flat_values(results)
        self.origins.note(values, name, call.span, self.reading)
        for value in [*_opaque_parts(values), *values]:
            if isinstance(value, Opaque):
                self._opaque_unit(value)
            elif self.disable_fusion:
                self._materialise(value)
        return results

    def _opaque_unit(self, value: Opaque) -> None:
        key = id(value.kernel)
        if key not in self.opaque_units:
            unit = self.grouping.add_unit(
                self._materialise(argument) for argument in value.kernel.inputs
            )
            self.opaque_units[key] = (unit, [])
        unit, results = self.opaque_units[key]
        if any(value is one for one in results):
            return  # a view of the same shape, whose lowering returns what it was given
        results.append(value)
        self.grouping.produced_by(value, unit)

    def _library_call(self, call: relax.Call) -> Any:
        arguments: dict[int, Value] = {}
        for k, argument in enumerate(call.args[1].fields):
            if isinstance(argument.ty, relax.TensorType):
                arguments[k] = self._materialise(self._value(argument))
        unit = self.grouping.add_unit(arguments.values())
        if str(call.args[0].global_symbol) == START_SYMBOL:
            # Exchanges begin in this order on every rank: no kernel may need it to be another.
            self.grouping.units.add_before(unit, self.last_start)
            self.last_start = {unit}
        results = [Buffer(spec) for spec in specs_of(call.ty_args[0])]
        for value in results:
            self.grouping.produced_by(value, unit)
            self.origins.rename(value, self.reading)
        self.calls.append(LibraryCall(call, unit, arguments, results))
        return results[0] if isinstance(call.ty_args[0], relax.TensorType) else tuple(results)

    def _materialise(self, value: Value) -> Value:
        """Return the value that will own memory for `value`; scalar constants get a buffer."""
        owner = storage_of(value)
        if isinstance(owner, Constant):
            return Buffer(owner.spec, source=relax_constant(owner))
        if isinstance(owner, Pointwise):
            owner.log_softmax = None  # who reads it from now on reads memory, not its parts
        return self.grouping.demand(owner)

    # Writing: groups and calls become bindings.

    def write(self, emitter: Emitter) -> tvm.IRModule:
        groups = self.grouping.finish()
        writer = FusedWriter(
            self.main, self.origins, emitter, KernelCache(emitter, strict=self.strict)
        )
        units: dict[int, Any] = {group.number: group for group in groups}
        units |= {call.unit: call for call in self.calls}
        units |= {unit: results for unit, results in self.opaque_units.values()}
        for number in order_units(units, self.grouping):
            writer.unit(units[number])
        return writer.finish(self._value(self.flow.result), self.ir)


def order_units(units: dict[int, Any], grouping: Grouping) -> list[int]:
    """Order the units by their dependencies, near to program order."""
    done = 0
    known = sum(1 << unit for unit in units)
    ordered: list[int] = []
    waiting = sorted(units, key=lambda unit: _last_serial(units[unit]))
    while waiting:
        later = []
        for unit in waiting:
            if grouping.units.ancestors[unit] & known & ~done:
                later.append(unit)
            else:
                done |= 1 << unit
                ordered.append(unit)
        waiting = later
    return ordered


def _last_serial(unit: Any) -> int:
    if isinstance(unit, Group):
        return max(value.serial for value in unit.members)
    results = unit.results if isinstance(unit, LibraryCall) else unit
    return max(value.serial for value in results)


def _opaque_parts(values: list[Value]) -> list[Value]:
    """Return the results of hand-written kernels that these values, whose readers compute, read."""
    views = [value for value in values if isinstance(value, Pointwise)]
    read = (one.value for value in views for one in value.reads)
    return [one for one in read if isinstance(one, Opaque)]


def spec_of(type_: relax.Type) -> TensorSpec:
    """Return the shape and dtype of a tensor type with static shape."""
    return TensorSpec(extents_of(type_), str(type_.dtype))


def specs_of(type_: relax.Type) -> tuple[TensorSpec, ...]:
    """Return the tensors of a tensor or tuple type."""
    fields = type_.fields if isinstance(type_, relax.TupleType) else [type_]
    return tuple(spec_of(field) for field in fields)


def _flat_arguments(arguments: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for argument in arguments:
        flat += list(argument) if isinstance(argument, tuple) else [argument]
    return flat


def _constant(expr: GenericConst) -> Value:
    data = expr.value
    spec = TensorSpec(tuple(int(n) for n in data.shape), str(data.dtype))
    if spec.size == 1 and spec.dtype not in ("bfloat16", "float16"):
        number = data.numpy().item()
        return Constant(spec, number=number)
    return Buffer(spec, source=expr)


def _placeholders(call: relax.Call) -> Any:
    results = tuple(Buffer(spec) for spec in specs_of(call.ty))
    return results[0] if isinstance(call.ty, relax.TensorType) else results


def _missing_message(missing: dict[str, list[relax.Call]]) -> str:
    lines = [
        f"{name} ({len(calls)} {'call' if len(calls) == 1 else 'calls'}, first: "
        f"{from_span(calls[0].span)})"
        for name, calls in sorted(missing.items())
    ]
    return (
        "no kernel can be made for: " + "; ".join(lines)
        + ". Register a lowering with @lowers(...) in amp_ir/loops/."
    )  # fmt: skip
