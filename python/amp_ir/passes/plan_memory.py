# SPDX-License-Identifier: Apache-2.0
"""Gives every intermediate value its bytes in one arena, and every result its destination."""

from __future__ import annotations

import math
from collections.abc import Iterator

import attrs
import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from amp_ir import native
from amp_ir.errors import BuildError
from amp_ir.memory_plan import Interval, MemoryPlan, PlannedStep
from amp_ir.module import InputSpec, OutputSpec

ALIGNMENT_BYTES = 64
_KERNEL_TYPE = relax.FuncType.opaque_func(ret=relax.TupleType([]))
INPLACE = "amp_ir.inplace"
_PHYSICAL = {"bfloat16": "uint16", "bool": "uint8"}


def plan_memory(
    ir: tvm.IRModule, inputs: tuple[InputSpec, ...], outputs: tuple[OutputSpec, ...]
) -> PlannedStep:
    """Fix where every value lies and pass it there by destination.

    Before:  y = call_tir(kernel_0, (x, p)); return (y,)         # y updates input p
    After:   kernel_0(x, p, p)                                   # written where p lies

    Requires: the loops stage has run (only call_tir, call_dps_packed, tuples, result reshapes).
    Ensures:  values alive at the same time never share a byte, except an output that a kernel may
              write over an input it reads for the last time; a state input is overwritten only
              after its last reader; one arena holds everything else.
    Source:   offsets by src/passes/memory_plan.cc.
    """
    return _Planner(ir, inputs, outputs).run()


@attrs.define(eq=False)
class _Slot:
    """A piece of memory: a parameter of main, or a stay in the arena."""

    dtype: str
    size: int
    parameter: relax.Var | None = None
    constant: relax.Expr | None = None
    first_use: int = -1
    last_use: int = -1
    offset_bytes: int = 0
    span: tvm.ir.Span | None = None
    over: _Slot | None = None

    @property
    def root(self) -> _Slot:
        """The slot whose bytes this one takes over, at the end of the chain."""
        slot = self
        while slot.over is not None:
            slot = slot.over
        return slot

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(_PHYSICAL.get(self.dtype, self.dtype)).itemsize

    @property
    def is_in_arena(self) -> bool:
        return self.parameter is None and self.constant is None


@attrs.define(eq=False)
class _Step:
    """One call: its expression, argument slots by position, result slots."""

    call: relax.Call
    function: tirx.PrimFunc | None
    arguments: list[_Slot | relax.Expr]
    results: list[_Slot]


class _Planner:
    def __init__(
        self, ir: tvm.IRModule, inputs: tuple[InputSpec, ...], outputs: tuple[OutputSpec, ...]
    ) -> None:
        self.ir = ir
        self.inputs = inputs
        self.outputs = outputs
        self.main: relax.Function = ir["main"]
        self.slots: dict[relax.Var, _Slot] = {}
        self.tuples: dict[relax.Var, list[_Slot]] = {}
        self.steps: list[_Step] = []
        self.result_slots: list[_Slot] = []
        # Copies before the first and after the last call, as (from, to).
        self.first_copies: list[tuple[_Slot, _Slot]] = []
        self.copies: list[tuple[_Slot, _Slot]] = []
        self.kept: list[_Slot] = []

    def run(self) -> PlannedStep:
        self._read_parameters()
        results = self._read_bindings()
        self._find_lifetimes(results)
        self._choose_destinations(results)
        self._reuse_inputs()
        plan = self._place()
        return PlannedStep(_Rewriter(self, plan).write(), plan)

    def _read_parameters(self) -> None:
        for variable, spec in zip(self.main.params, self.inputs, strict=True):
            self.slots[variable] = _parameter_slot(spec.name, spec.shape, spec.dtype)

    def _read_bindings(self) -> list[_Slot]:
        results: list[_Slot] = []
        for block in self.main.body.blocks:
            for binding in block.bindings:
                value = binding.value
                if isinstance(value, relax.Call) and value.op.name == "relax.reshape":
                    self.slots[binding.var] = self._slot(value.args[0])
                elif isinstance(value, relax.Call):
                    self._read_call(binding.var, value)
                elif isinstance(value, relax.TupleGetItem):
                    self.slots[binding.var] = self.tuples[value.tuple_value][value.index]
                elif isinstance(value, relax.Tuple):
                    results = [self._slot(field) for field in value.fields]
                else:
                    raise BuildError(f"plan_memory does not know the binding {binding}")
        return results

    def _read_call(self, variable: relax.Var, call: relax.Call) -> None:
        type_ = call.ty_args[0]
        types = list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]
        results = [_slot_of(t, call.span) for t in types]
        function = None
        if call.op.name == "relax.call_tir":
            function = self.ir[call.args[0]]
        arguments: list[_Slot | relax.Expr] = []
        for field in call.args[1].fields:
            is_tensor = isinstance(field.ty, relax.TensorType)
            arguments.append(self._slot(field) if is_tensor else field)
        self.steps.append(_Step(call, function, arguments, results))
        if isinstance(type_, relax.TupleType):
            self.tuples[variable] = results
        else:
            self.slots[variable] = results[0]

    def _slot(self, expr: relax.Expr) -> _Slot:
        if isinstance(expr, relax.Var):
            return self.slots[expr]
        type_ = expr.ty
        slot = _slot_of(type_, None)
        slot.constant = expr
        return slot

    def _find_lifetimes(self, results: list[_Slot]) -> None:
        for position, step in enumerate(self.steps):
            for slot in step.results:
                slot.first_use = slot.last_use = position
            for slot in _slots(step.arguments):
                slot.last_use = position
        for slot in results:
            slot.last_use = len(self.steps)

    def _reuse_inputs(self) -> None:
        """Let a kernel write a result over an argument that dies there."""
        for position, step in enumerate(self.steps):
            overwritten: set[int] = set()
            for output, source in _inplace_pairs(step):
                old, new = step.arguments[source], step.results[output]
                if not isinstance(old, _Slot) or new.over is not None:
                    continue
                if not old.is_in_arena or not new.is_in_arena or old.nbytes != new.nbytes:
                    continue
                if old.last_use == position and id(old) not in overwritten:
                    overwritten.add(id(old))
                    new.over = old

    def _choose_destinations(self, results: list[_Slot]) -> None:
        """Write each output where it belongs, at once where that is safe, else by a copy."""
        for spec, slot in zip(self.outputs, results, strict=True):
            if spec.updates is None:
                name = f"result.{spec.name}"
                target = _parameter_slot(name, spec.shape, spec.dtype)
                self.result_slots.append(target)
            else:
                target = self.slots[self.main.params[spec.updates]]
            self._send(slot, target)

    def _send(self, slot: _Slot, target: _Slot) -> None:
        if slot is target:
            return
        if slot.is_in_arena and slot.nbytes == target.nbytes and self._can_write(slot, target):
            slot.parameter = target.parameter
        elif any(slot is old for old in self.slots_of_inputs):
            self._send_old_value(slot, target)
        else:
            self.copies.append((slot, target))

    @property
    def slots_of_inputs(self) -> list[_Slot]:
        """Where the inputs lie."""
        return [self.slots[variable] for variable in self.main.params]

    def _send_old_value(self, source: _Slot, target: _Slot) -> None:
        """Send what an input holds before the step, which the step may overwrite."""
        if any(target is result for result in self.result_slots):
            self.first_copies.append((source, target))
            return
        # Another input takes it: its own old value may be needed until the end of the step.
        kept = _Slot(source.dtype, source.size, first_use=0, last_use=len(self.steps))
        self.kept.append(kept)
        self.first_copies.append((source, kept))
        self.copies.append((kept, target))

    def _can_write(self, slot: _Slot, target: _Slot) -> bool:
        """Whether nothing reads the target's old value once `slot` is written there."""
        readers = [p for p, step in enumerate(self.steps) if target in _slots(step.arguments)]
        writers = [p for p, step in enumerate(self.steps) if slot in step.results]
        first = min(writers)
        if any(p > first for p in readers):
            return False
        if first not in readers:
            return True
        step = self.steps[first]
        output = step.results.index(slot)
        pairs = set(_inplace_pairs(step))
        sources = [k for k, argument in enumerate(step.arguments) if argument is target]
        return all((output, k) in pairs for k in sources)

    def _place(self) -> MemoryPlan:
        produced = [slot for step in self.steps for slot in step.results if slot.is_in_arena]
        produced += self.kept
        for slot in produced:
            slot.root.last_use = max(slot.root.last_use, slot.last_use)
        slots = [slot for slot in produced if slot.over is None]
        shapes = [
            tvm_ffi.Shape(tuple(s.nbytes for s in slots)),
            tvm_ffi.Shape(tuple(s.first_use for s in slots)),
            tvm_ffi.Shape(tuple(s.last_use for s in slots)),
        ]
        planned = list(native.function("amp_ir.plan_memory")(*shapes, ALIGNMENT_BYTES))
        peak, lower_bound, offsets = planned[0], planned[1], planned[2:]
        for slot, offset in zip(slots, offsets, strict=True):
            slot.offset_bytes = int(offset)
        for slot in produced:
            slot.offset_bytes = slot.root.offset_bytes
        intervals = tuple(
            Interval(f"v{k}", s.nbytes, s.first_use, s.last_use, s.offset_bytes, s.dtype, s.span)
            for k, s in enumerate(slots)
        )
        return MemoryPlan(
            int(peak),
            int(lower_bound),
            intervals,
            sum(_nbytes(spec) for spec in self.inputs if spec.is_state),
            sum(_nbytes(spec) for spec in self.inputs if not spec.is_state),
            sum(_nbytes(spec) for spec in self.outputs if spec.updates is None),
        )


def _parameter_slot(name: str, shape: tuple[int, ...], dtype: str) -> _Slot:
    size = math.prod(shape)
    slot = _Slot(dtype, size)
    type_ = relax.TensorType([max(size, 1)], _PHYSICAL.get(dtype, dtype))
    slot.parameter = relax.Var(name, type_)
    return slot


def _slot_of(type_: relax.Type, span: tvm.ir.Span | None) -> _Slot:
    return _Slot(str(type_.dtype), math.prod(int(n) for n in type_.shape), span=span)


def _slots(arguments: list[_Slot | relax.Expr]) -> list[_Slot]:
    return [argument for argument in arguments if isinstance(argument, _Slot)]


def _inplace_pairs(step: _Step) -> Iterator[tuple[int, int]]:
    if step.function is not None and INPLACE in step.function.attrs:
        for pair in step.function.attrs[INPLACE]:
            yield int(pair[0]), int(pair[1])


def _nbytes(spec: InputSpec | OutputSpec) -> int:
    itemsize = np.dtype(_PHYSICAL.get(spec.dtype, spec.dtype)).itemsize
    return math.prod(spec.shape) * itemsize


class _Rewriter:
    """Writes the planned `main`."""

    def __init__(self, planner: _Planner, plan: MemoryPlan) -> None:
        self.planner = planner
        self.plan = plan
        self.arena = relax.Var("arena", relax.TensorType([max(plan.arena_bytes, 1)], "uint8"))
        self.bindings: list[relax.Binding] = []
        self.views: dict[tuple[int, str], relax.Expr] = {}
        self.kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}

    def write(self) -> tvm.IRModule:
        planner = self.planner
        for source, target in planner.first_copies:
            self._copy(source, target)
        for step in planner.steps:
            self._step(step)
        for source, target in planner.copies:
            self._copy(source, target)
        parameters = [self.arena]
        parameters += [planner.slots[v].parameter for v in planner.main.params]
        parameters += [slot.parameter for slot in planner.result_slots]
        nothing = relax.Tuple([])
        body = relax.SeqExpr([relax.BindingBlock(self.bindings)], nothing)
        function = relax.Function(parameters, body, relax.TupleType([]), is_pure=False)
        functions = {**planner.ir.functions, **self.kernels}
        for variable in functions:
            if variable.ty.is_missing():
                relax.expr._update_type(variable, _KERNEL_TYPE)
        functions[planner.ir.get_global_var("main")] = function
        return tvm.IRModule(functions)

    def _copy(self, source: _Slot, target: _Slot) -> None:
        views = [self._view(source, "kernel"), self._view(target, "kernel")]
        self._call(self._copy_kernel(target), views)

    def _copy_kernel(self, target: _Slot) -> tvm.ir.GlobalVar:
        size, dtype = max(target.size, 1), _PHYSICAL.get(target.dtype, target.dtype)
        name = f"copy_{dtype}_{size}"
        known = next((v for v in self.kernels if v.name_hint == name), None)
        if known is not None:
            return known
        source = tirx.decl_buffer((size,), dtype, "source")
        copy = tirx.decl_buffer((size,), dtype, "copy")
        i = tirx.Var("i", "int32")
        store = tirx.BufferStore(copy, tirx.BufferLoad(source, [i]), [i])
        body = tirx.For(i, 0, size, tirx.ForKind.SERIAL, store)
        function = tirx.PrimFunc([source, copy], body).with_attr("tirx.noalias", True)
        variable = tvm.ir.GlobalVar(name)
        self.kernels[variable] = function.with_attr("global_symbol", name)
        return variable

    def _step(self, step: _Step) -> None:
        is_kernel = step.function is not None
        arguments: list[relax.Expr] = []
        for argument in [*step.arguments, *step.results]:
            is_slot = isinstance(argument, _Slot)
            kind = "kernel" if is_kernel else "library"
            arguments.append(self._view(argument, kind) if is_slot else argument)
        self._call(step.call.args[0], arguments, step.call.span)

    def _view(self, slot: _Slot, kind: str) -> relax.Expr:
        """The slot as a flat tensor; libraries see bfloat16 as such."""
        physical = _PHYSICAL.get(slot.dtype, slot.dtype)
        dtype = slot.dtype if kind == "library" else physical
        key = (id(slot), dtype)
        if key not in self.views:
            self.views[key] = self._make_view(slot, dtype, physical)
        return self.views[key]

    def _make_view(self, slot: _Slot, dtype: str, physical: str) -> relax.Expr:
        size = max(slot.size, 1)
        if slot.constant is not None:
            base: relax.Expr = slot.constant
        elif slot.parameter is not None:
            if dtype == physical:
                return slot.parameter
            base = slot.parameter
        else:
            base = self.arena
        arguments = [
            base,
            relax.prim_value(slot.offset_bytes),
            relax.ShapeExpr([size]),
            tvm.ir.StringImm(dtype),
        ]
        type_ = relax.TensorType([size], dtype)
        return self._call(relax.ExternFunc("amp_ir.view"), arguments, None, type_)

    def _call(
        self,
        function: relax.Expr,
        arguments: list[relax.Expr],
        span: tvm.ir.Span | None = None,
        type_: relax.Type | None = None,
    ) -> relax.Var:
        result = type_ if type_ is not None else relax.TupleType([])
        call = relax.Call(function, arguments, None, [result], span)
        relax.expr._update_type(call, result)
        variable = relax.Var(f"r{len(self.bindings)}", result)
        self.bindings.append(relax.VarBinding(variable, call))
        return variable
