# SPDX-License-Identifier: Apache-2.0
"""Represent a fused step as calls that read and write buffers, for the memory planner."""

from __future__ import annotations

import math

import attrs
import tvm
from tvm import relax, tirx

from amp_ir.errors import BuildError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.library_call import WRITTEN_OVER
from amp_ir.ir.location import Location, locations_of
from amp_ir.ir.step_module import InputSpec, OutputSpec
from amp_ir.ir.tensor_layout import dtype_nbytes, physical_dtype
from amp_ir.ir.workspace import kept_nbytes, scratch_nbytes

# Pairs (result, argument) of a kernel that may share memory; set by the loops stage.
INPLACE = "amp_ir.inplace"


@attrs.define(eq=False)
class Slot:
    """A buffer: a parameter of main, a constant, or a live interval in the arena."""

    dtype: str
    size: int
    name: str = ""
    op: str = ""
    parameter: relax.Var | None = None
    constant: relax.Expr | None = None
    first_use: int = -1
    last_use: int = -1
    offset_bytes: int = 0
    span: tvm.ir.Span | None = None
    over: Slot | None = None

    @property
    def root(self) -> Slot:
        """Return the buffer whose bytes this one takes over, at the end of the chain."""
        slot = self
        while slot.over is not None:
            slot = slot.over
        return slot

    @property
    def physical_dtype(self) -> str:
        """Return the dtype that kernels see."""
        return physical_dtype(self.dtype)

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return self.size * dtype_nbytes(self.dtype)

    @property
    def is_in_arena(self) -> bool:
        """Return whether the planner assigns its offset."""
        return self.parameter is None and self.constant is None


@attrs.define(eq=False)
class Step:
    """One call: argument and result buffers by position, and workspace for the library.

    `kept_nbytes` is what the library allocates from the system itself; `is_rerun` marks the second
    run of a call whose results were not held.
    """

    call: relax.Call
    function: tirx.PrimFunc | None
    arguments: list[Slot | relax.Expr]
    results: list[Slot]
    scratch: Slot | None = None
    kept_nbytes: int = 0
    is_rerun: bool = False
    # Read once from the function: each access to a TVM array costs a call.
    _pairs: tuple[tuple[int, int], ...] | None = attrs.field(default=None, init=False)

    @property
    def reads(self) -> list[Slot]:
        """Return the buffers it reads."""
        return [argument for argument in self.arguments if isinstance(argument, Slot)]

    @property
    def symbol(self) -> str:
        """Return the kernel's or library function's name."""
        callee = self.call.args[0]
        named = isinstance(callee, relax.ExternFunc)
        return str(callee.global_symbol if named else callee.name_hint)

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops that it computes, each once."""
        found = attribute(self.call, "ops")
        return tuple(found.split(",")) if found else (self.symbol.rpartition(".")[2],)

    @property
    def locations(self) -> tuple[Location, ...]:
        """Return the source locations of its ops, each once."""
        return locations_of(self.call.span)

    @property
    def phases(self) -> set[str]:
        """Return the phases of the user's step that it takes part in."""
        return {location.phase for location in self.locations} or {"forward"}

    def inplace_pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the results that may be written over an argument, as (result, argument)."""
        if self.function is None:
            return self._library_pairs()
        if self._pairs is None:
            noted = {} if self.function is None else self.function.attrs
            pairs = noted[INPLACE] if INPLACE in noted else ()
            self._pairs = tuple((int(pair[0]), int(pair[1])) for pair in pairs)
        return self._pairs

    def _library_pairs(self) -> tuple[tuple[int, int], ...]:
        """Return `inplace_pairs`, except where the library reads the argument twice."""
        source = WRITTEN_OVER.get(self.symbol)
        if source is None or sum(one is self.arguments[source] for one in self.arguments) > 1:
            return ()
        return ((0, source),)


def attribute(call: relax.Call, name: str) -> str:
    """Return what the loops stage noted on a call; "" where it noted nothing."""
    if isinstance(call.attrs, tvm.ir.DictAttrs) and name in call.attrs.keys():  # noqa: SIM118
        return str(call.attrs[name])
    return ""


@attrs.define(eq=False)
class StepSlots:
    """The contents of `main`: its calls in order, the buffers of its inputs, and its results."""

    main: relax.Function
    inputs: list[Slot]
    steps: list[Step]
    results: list[Slot]


def read_steps(ir: tvm.IRModule, inputs: tuple[InputSpec, ...]) -> StepSlots:
    """Return the calls of a fused step with a buffer for every value.

    Requires: the loops stage has run (only call_tir, call_dps_packed, tuples, result reshapes).
    """
    return _Reader(ir, inputs).read()


class _Reader:
    def __init__(self, ir: tvm.IRModule, inputs: tuple[InputSpec, ...]) -> None:
        self.ir = ir
        self.main: relax.Function = ir["main"]
        self.inputs = [parameter_slot(spec.name, spec) for spec in inputs]
        self.slots = dict(zip(self.main.params, self.inputs, strict=True))
        self.tuples: dict[relax.Var, list[Slot]] = {}
        self.steps: list[Step] = []

    def read(self) -> StepSlots:
        results: list[Slot] = []
        for variable, value in Dataflow(self.ir).values.items():
            if isinstance(value, relax.Call) and value.op.name == "relax.reshape":
                self.slots[variable] = self._slot(value.args[0])
            elif isinstance(value, relax.Call):
                self._read_call(variable, value)
            elif isinstance(value, relax.TupleGetItem):
                slot = self.tuples[value.tuple_value][value.index]
                slot.span = variable.span or slot.span
                self.slots[variable] = slot
            elif isinstance(value, relax.Tuple):
                results = [self._slot(field) for field in value.fields]
            else:
                raise BuildError(f"plan_memory does not know what {variable} is bound to: {value}")
        return StepSlots(self.main, self.inputs, self.steps, results)

    def _read_call(self, variable: relax.Var, call: relax.Call) -> None:
        type_ = call.ty_args[0]
        types = list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]
        position = len(self.steps)
        arguments: list[Slot | relax.Expr] = []
        for field in call.args[1].fields:
            is_tensor = isinstance(field.ty, relax.TensorType)
            arguments.append(self._slot(field) if is_tensor else field)
        is_kernel = call.op.name == "relax.call_tir"
        step = Step(call, self.ir[call.args[0]] if is_kernel else None, arguments, [])
        ops = attribute(call, "result_ops").split(",")
        for k, one in enumerate(types):
            op = ops[k] if k < len(ops) and ops[k] else step.ops[0]
            name = f"{op}_{position}" if len(types) == 1 else f"{op}_{position}.{k}"
            step.results.append(_slot_of(one, name, op, call.span))
        nbytes = 0 if is_kernel else scratch_nbytes(call)
        if nbytes:
            name = f"scratch_{position}"
            step.scratch = Slot("uint8", nbytes, name, step.ops[0], span=call.span)
        step.kept_nbytes = 0 if is_kernel else kept_nbytes(call)
        self.steps.append(step)
        if isinstance(type_, relax.TupleType):
            self.tuples[variable] = step.results
        else:
            step.results[0].span = variable.span or call.span
            self.slots[variable] = step.results[0]

    def _slot(self, expr: relax.Expr) -> Slot:
        if isinstance(expr, relax.Var):
            return self.slots[expr]
        slot = _slot_of(expr.ty, "constant", "constant", None)
        slot.constant = expr
        return slot


def find_lifetimes(program: StepSlots) -> None:
    """Set the first and last use of every buffer, by the present order of the calls.

    This clears the decisions of an earlier plan: a value's offset and whose bytes it takes.
    """
    for position, step in enumerate(program.steps):
        for slot in step.results:
            slot.first_use = slot.last_use = position
            slot.parameter = slot.over = None
        if step.scratch is not None:
            step.scratch.first_use = step.scratch.last_use = position
        for slot in step.reads:
            slot.last_use = position
    for slot in program.results:
        slot.last_use = len(program.steps)  # past the last call: it is held afterwards


def parameter_slot(name: str, spec: InputSpec | OutputSpec) -> Slot:
    """Return the memory that main gets as a parameter: state, the batch, or a result."""
    slot = Slot(spec.dtype, math.prod(spec.shape), spec.name, spec.role.value)
    type_ = relax.TensorType([max(slot.size, 1)], slot.physical_dtype)
    slot.parameter = relax.Var(name, type_)
    return slot


def _slot_of(type_: relax.Type, name: str, op: str, span: tvm.ir.Span | None) -> Slot:
    size = math.prod(int(n) for n in type_.shape)
    return Slot(str(type_.dtype), size, name, op, span=span)
