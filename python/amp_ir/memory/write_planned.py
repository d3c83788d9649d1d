# SPDX-License-Identifier: Apache-2.0
"""Write a step whose memory is planned: calls on views of one arena."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import tvm
from tvm import relax, tirx

from amp_ir.ir.dataflow import with_arguments
from amp_ir.ir.loop_call import is_loop_call
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.workspace import with_workspace
from amp_ir.memory.buffers import Buffer, BufferizedStep, Call
from amp_ir.memory.loop_bodies import LoopBodies

_KERNEL_TYPE = relax.FuncType.opaque_func(ret=relax.TupleType([]))


@attrs.define(eq=False)
class Destinations:
    """Where results go: parameters for them, and copies before the first and after the last call.

    A copy is (from, to).
    """

    results: list[Buffer] = attrs.field(factory=list)
    first_copies: list[tuple[Buffer, Buffer]] = attrs.field(factory=list)
    last_copies: list[tuple[Buffer, Buffer]] = attrs.field(factory=list)


# Writes a kernel that copies so many elements of a dtype: (source, copy).
CopyKernel = Callable[[int, str], tirx.PrimFunc]


def write_planned(
    ir: tvm.IRModule,
    program: BufferizedStep,
    destinations: Destinations,
    arena_bytes: int,
    copy_kernel: CopyKernel,
    bodies: Mapping[str, PlannedStep] | None = None,
) -> tvm.IRModule:
    """Write the step as `main(arena, inputs..., results...)`, every value passed by destination.

    `bodies` are those of its loops, by the names that the calls have; each becomes one function
    more.
    """
    return _Writer(ir, program, destinations, arena_bytes, copy_kernel, bodies or {}).write()


def copy_symbol(target: Buffer) -> str:
    """Return the name of the kernel that copies into `target`."""
    return f"copy_{target.physical_dtype}_{max(target.size, 1)}"


class _Writer:
    def __init__(
        self,
        ir: tvm.IRModule,
        program: BufferizedStep,
        destinations: Destinations,
        arena_bytes: int,
        copy_kernel: CopyKernel,
        bodies: Mapping[str, PlannedStep],
    ) -> None:
        self.ir = ir
        self.bodies = LoopBodies(bodies)
        self.copy_kernel = copy_kernel
        self.program = program
        self.destinations = destinations
        self.arena = relax.Var("arena", relax.TensorType([max(arena_bytes, 1)], "uint8"))
        self.bindings: list[relax.Binding] = []
        self.views: dict[tuple[relax.Expr, int, int, str], relax.Expr] = {}
        self.kernels: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}

    def write(self) -> tvm.IRModule:
        for source, target in self.destinations.first_copies:
            self._copy(source, target)
        for call in self.program.calls:
            self._write_call(call)
        for source, target in self.destinations.last_copies:
            self._copy(source, target)
        parameters = [self.arena]
        parameters += [buffer.parameter for buffer in self.program.inputs]
        parameters += [buffer.parameter for buffer in self.destinations.results]
        nothing = relax.Tuple([])
        body = relax.SeqExpr([relax.BindingBlock(self.bindings)], nothing)
        function = relax.Function(parameters, body, relax.TupleType([]), is_pure=False)
        functions = {**self.ir.functions, **self.kernels, **self.bodies.functions()}
        for variable in functions:
            if variable.ty.is_missing():
                relax.expr._update_type(variable, _KERNEL_TYPE)
        functions[self.ir.get_global_var("main")] = function
        return tvm.IRModule(functions)

    def _copy(self, source: Buffer, target: Buffer) -> None:
        views = [self._view(source, "kernel"), self._view(target, "kernel")]
        self._call(self._copy_kernel(target), views)

    def _copy_kernel(self, target: Buffer) -> tvm.ir.GlobalVar:
        size, dtype = max(target.size, 1), target.physical_dtype
        name = copy_symbol(target)
        known = next((v for v in self.kernels if v.name_hint == name), None)
        if known is not None:
            return known
        variable = tvm.ir.GlobalVar(name)
        function = self.copy_kernel(size, dtype)
        self.kernels[variable] = function.with_attr("global_symbol", name)
        return variable

    def _write_call(self, call: Call) -> None:
        if call.collective:
            self._write_collective(call)
            return
        is_kernel = call.function is not None
        is_loop = is_loop_call(call.expr)
        arguments: list[relax.Expr] = []
        for argument in [*call.arguments, *call.results]:
            is_buffer = isinstance(argument, Buffer)
            # A loop's body has the types of kernels.
            kind = "kernel" if is_kernel or is_loop else "library"
            arguments.append(self._view(argument, kind) if is_buffer else _unshared(argument))
        if is_loop and call.workspace is not None:
            name, *rest = arguments
            workspace = self._view(call.workspace, "kernel")
            self._bind(self.bodies.call(str(name.value), [workspace, *rest], call.expr.span))
            return
        callee = call.expr.args[0]
        if call.workspace is not None:
            workspace = self._view(call.workspace, "library")
            arguments = [tvm.ir.StringImm(call.symbol), workspace, *arguments]
            callee = relax.ExternFunc(with_workspace(call.symbol))
        self._call(callee, arguments, call.expr.span)

    def _write_collective(self, call: Call) -> None:
        """Write a call on a whole bucket, then what it is copied to: pairs of part and result."""
        description, *parts = call.arguments
        first = next(one for one in parts if isinstance(one, Buffer))
        whole = first.root.part_of
        assert whole is not None, call
        arguments = [description, self._view(whole, "library")]
        if call.places:
            parts = [
                _part(whole, one, place)
                for one, place in zip(call.results, call.places, strict=True)
            ]
        for part, result in zip(parts, call.results, strict=True):
            if not _is_there(result, part):
                arguments += [self._view(part, "library"), self._view(result, "library")]
        self._call(call.expr.args[0], arguments, call.expr.span)

    def _view(self, buffer: Buffer, kind: str) -> relax.Expr:
        """Return the buffer as a flat tensor; libraries see bfloat16 as such.

        A view is a call of the virtual machine, as costly as that of a kernel: buffers that follow
        one another in the same bytes, with the same size and dtype, share it.
        """
        dtype = buffer.dtype if kind == "library" else buffer.physical_dtype
        # What a result is written over may have another dtype: int32 numbers, then float32 ones.
        if buffer.parameter is not None and dtype == str(buffer.parameter.ty.dtype):
            return buffer.parameter
        base = buffer.parameter if buffer.constant is None else buffer.constant
        base = self.arena if base is None else base
        key = (base, buffer.offset_bytes, max(buffer.size, 1), dtype)
        if key not in self.views:
            self.views[key] = self._make_view(*key)
        return self.views[key]

    def _make_view(self, base: relax.Expr, offset: int, size: int, dtype: str) -> relax.Expr:
        arguments = [
            base,
            relax.prim_value(offset),
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
        return self._bind(call)

    def _bind(self, call: relax.Call) -> relax.Var:
        variable = relax.Var(f"r{len(self.bindings)}", call.ty)
        self.bindings.append(relax.VarBinding(variable, call))
        return variable


def _part(whole: Buffer, like: Buffer, offset_bytes: int) -> Buffer:
    """Return the buffer of what lies at an offset in a bucket's range."""
    return Buffer(
        whole.dtype,
        like.size,
        part_of=whole,
        part_offset=offset_bytes,
        offset_bytes=whole.offset_bytes + offset_bytes,
    )


def _is_there(result: Buffer, part: Buffer) -> bool:
    """Return whether a result of a wait is where the exchange leaves it."""
    if result.root is part.root:
        return True
    is_in_range = result.is_in_arena and result.part_of is not None
    return is_in_range and result.part_of is part.part_of and result.over is None


def _unshared(argument: relax.Expr) -> relax.Expr:
    """Copy an argument that is a call itself (the null of an absent bias), for one call alone.

    A call that runs twice has its arguments twice. Where two calls hold the same inner call, TVM's
    LowerRuntimeBuiltin (0.27) makes a variable of the second and fails.
    """
    if not isinstance(argument, relax.Call):
        return argument
    return with_arguments(argument, argument.args)
