# SPDX-License-Identifier: Apache-2.0
"""Represent a fused step as calls that read and write buffers, for the memory planner."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import tvm
from tvm import relax, tirx

from amp_ir.ir.collective_call import HALVES
from amp_ir.ir.dataflow import KERNEL_CALL, Dataflow
from amp_ir.ir.library_call import WRITTEN_OVER
from amp_ir.ir.location import Location, locations_of
from amp_ir.ir.step_module import InputSpec, OutputSpec
from amp_ir.ir.tensor_layout import dtype_nbytes, physical_dtype
from amp_ir.ir.workspace import CallMemories

# Pairs (result, argument) of a kernel that may share memory; set by the loops stage.
INPLACE = "amp_ir.inplace"


@attrs.define(eq=False)
class Buffer:
    """A buffer: a parameter of main, a constant, or a live interval in the arena.

    One that is `part_of` a bucket is stored `part_offset` bytes after the bucket's first.
    """

    dtype: str
    size: int
    name: str = ""
    op: str = ""
    parameter: relax.Var | None = None
    constant: relax.Expr | None = None
    offset_bytes: int = 0
    span: tvm.ir.Span | None = None
    over: Buffer | None = None
    part_of: Buffer | None = None
    part_offset: int = 0

    @property
    def root(self) -> Buffer:
        """Return the buffer whose bytes this one takes over, at the end of the chain."""
        buffer = self
        while buffer.over is not None:
            buffer = buffer.over
        return buffer

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
class Call:
    """One call of a kernel or library: argument and result buffers by position, and workspace.

    `workspace` is the caller-provided one, in the arena; `persistent_nbytes` is what the library
    allocates itself and keeps. `is_rerun` marks the second run of a call whose results were not
    held. `collective` is "start" or "wait" for half of a collective, "" for any other call;
    `places` are the bytes in its bucket's range at which its results are, for a wait whose results
    are not where its arguments are.
    """

    expr: relax.Call
    function: tirx.PrimFunc | None
    arguments: list[Buffer | relax.Expr]
    results: list[Buffer]
    workspace: Buffer | None = None
    persistent_nbytes: int = 0
    is_rerun: bool = False
    collective: str = ""
    places: tuple[int, ...] = ()
    # Read once from the function: each access to a TVM array costs a call.
    _pairs: tuple[tuple[int, int], ...] | None = attrs.field(default=None, init=False)
    # Of a kernel: what `overwritten_by` returns, by the id of the result.
    _sources: dict[int, list[int]] | None = attrs.field(default=None, init=False)
    _symbol: str = attrs.field(default="", init=False)
    # What rerun_cost.py estimated: a library call is read from TVM for it.
    rerun_milliseconds: float | None = attrs.field(default=None, init=False)

    @property
    def reads(self) -> list[Buffer]:
        """Return the buffers it reads."""
        return [argument for argument in self.arguments if isinstance(argument, Buffer)]

    @property
    def workspace_nbytes(self) -> int:
        """Return the bytes of its workspace in the arena."""
        return 0 if self.workspace is None else self.workspace.nbytes

    @property
    def symbol(self) -> str:
        """Return the kernel's or library function's name."""
        if not self._symbol:
            callee = self.expr.args[0]
            named = isinstance(callee, relax.ExternFunc)
            self._symbol = str(callee.global_symbol if named else callee.name_hint)
        return self._symbol

    @property
    def ops(self) -> tuple[str, ...]:
        """Return the names of the ops that it computes, each once."""
        found = attribute(self.expr, "ops")
        return tuple(found.split(",")) if found else (self.symbol.rpartition(".")[2],)

    @property
    def locations(self) -> tuple[Location, ...]:
        """Return the source locations of its ops, each once."""
        return locations_of(self.expr.span)

    @property
    def phases(self) -> set[str]:
        """Return the phases of the user's step that it takes part in."""
        return {location.phase for location in self.locations} or {"forward"}

    def inplace_pairs(self) -> tuple[tuple[int, int], ...]:
        """Return the results that may be written over an argument, as (result, argument)."""
        if self.places:
            return ()
        if self.collective:
            # The first argument is a description.
            return tuple((k, k + 1) for k in range(len(self.results)))
        if self.function is None:
            return self._library_pairs()
        if self._pairs is None:
            noted = {} if self.function is None else self.function.attrs
            pairs = noted[INPLACE] if INPLACE in noted else ()
            self._pairs = tuple((int(pair[0]), int(pair[1])) for pair in pairs)
        return self._pairs

    def overwritten_by(self, result: Buffer) -> Sequence[int]:
        """Return the arguments that a result may be written over."""
        if self.function is None:
            return [source for k, source in self.inplace_pairs() if self.results[k] is result]
        if self._sources is None:
            self._sources = {}
            for k, source in self.inplace_pairs():
                self._sources.setdefault(id(self.results[k]), []).append(source)
        return self._sources.get(id(result), ())

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
class BufferizedStep:
    """A step after bufferization: its calls in order, the buffers of its inputs and its results."""

    main: relax.Function
    inputs: list[Buffer]
    calls: list[Call]
    results: list[Buffer]


def bufferize(ir: tvm.IRModule, inputs: tuple[InputSpec, ...]) -> BufferizedStep:
    """Return the calls of a fused step with a buffer for every value.

    Requires: the loops stage has run (only call_tir, call_dps_packed, tuples, result reshapes).
    """
    return _Bufferizer(ir, inputs).run()


class _Bufferizer:
    def __init__(self, ir: tvm.IRModule, inputs: tuple[InputSpec, ...]) -> None:
        self.ir = ir
        self.main: relax.Function = ir["main"]
        self.inputs = [parameter_buffer(spec.name, spec) for spec in inputs]
        self.buffers = dict(zip(self.main.params, self.inputs, strict=True))
        self.tuples: dict[relax.Var, list[Buffer]] = {}
        self.calls: list[Call] = []
        self.memories = CallMemories()

    def run(self) -> BufferizedStep:
        results: list[Buffer] = []
        for variable, value in Dataflow(self.ir).values.items():
            if isinstance(value, relax.Call) and value.op.name == "relax.reshape":
                self.buffers[variable] = self._buffer(value.args[0])
            elif isinstance(value, relax.Call):
                self._read_call(variable, value)
            elif isinstance(value, relax.TupleGetItem):
                buffer = self.tuples[value.tuple_value][value.index]
                buffer.span = variable.span or buffer.span
                self.buffers[variable] = buffer
            else:
                assert isinstance(value, relax.Tuple), value
                results = [self._buffer(field) for field in value.fields]
        return BufferizedStep(self.main, self.inputs, self.calls, results)

    def _read_call(self, variable: relax.Var, expr: relax.Call) -> None:
        type_ = expr.ty_args[0]
        types = list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]
        position = len(self.calls)
        arguments: list[Buffer | relax.Expr] = []
        for field in expr.args[1].fields:
            is_tensor = isinstance(field.ty, relax.TensorType)
            arguments.append(self._buffer(field) if is_tensor else field)
        is_kernel = expr.op.name == KERNEL_CALL
        call = Call(expr, self.ir[expr.args[0]] if is_kernel else None, arguments, [])
        ops = attribute(expr, "result_ops").split(",")
        for k, one in enumerate(types):
            op = ops[k] if k < len(ops) and ops[k] else call.ops[0]
            name = f"{op}_{position}" if len(types) == 1 else f"{op}_{position}.{k}"
            call.results.append(_buffer_of(one, name, op, expr.span))
        if not is_kernel:
            self._add_memory(call, f"workspace_{position}")
        call.collective = "" if is_kernel else HALVES.get(call.symbol, "")
        self.calls.append(call)
        if isinstance(type_, relax.TupleType):
            self.tuples[variable] = call.results
        else:
            call.results[0].span = variable.span or expr.span
            self.buffers[variable] = call.results[0]

    def _add_memory(self, call: Call, name: str) -> None:
        memory = self.memories.of(call.expr)
        call.persistent_nbytes = memory.persistent_nbytes
        if memory.workspace_nbytes:
            call.workspace = Buffer(
                "uint8", memory.workspace_nbytes, name, call.ops[0], span=call.expr.span
            )

    def _buffer(self, expr: relax.Expr) -> Buffer:
        if isinstance(expr, relax.Var):
            return self.buffers[expr]
        buffer = _buffer_of(expr.ty, "constant", "constant", None)
        buffer.constant = expr
        return buffer


def parameter_buffer(name: str, spec: InputSpec | OutputSpec) -> Buffer:
    """Return the memory that main gets as a parameter: state, the batch, or a result."""
    buffer = Buffer(spec.dtype, math.prod(spec.shape), spec.name, spec.role.value)
    type_ = relax.TensorType([max(buffer.size, 1)], buffer.physical_dtype)
    buffer.parameter = relax.Var(name, type_)
    return buffer


def _buffer_of(type_: relax.Type, name: str, op: str, span: tvm.ir.Span | None) -> Buffer:
    size = math.prod(int(n) for n in type_.shape)
    return Buffer(str(type_.dtype), size, name, op, span=span)
