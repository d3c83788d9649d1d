# SPDX-License-Identifier: Apache-2.0
"""The kernel that an emitter returns to the pass that calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
from tvm import tirx

from amp_ir.loops.codegen.coordinates import Axis
from amp_ir.loops.codegen.kernel_buffers import FlatBuffer
from amp_ir.loops.codegen.levels import inplace_pairs
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.group import Group, storage_of
from amp_ir.loops.ir import Opaque, OpaqueKernel, TensorSpec, Value

# Function attribute: the (output, input) pairs that may share memory.
INPLACE = "amp_ir.inplace"


@attrs.frozen
class Kernel:
    """A kernel's function and the values of its parameters: inputs, outputs, workspace.

    `workspace` is memory that the caller provides and that nothing reads after the kernel.
    """

    function: tirx.PrimFunc
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    workspace: tuple[TensorSpec, ...] = ()


class Emitter(Protocol):
    """Emitter of loops for one kind of device."""

    def emit_group(self, group: Group, *, strict: bool) -> Kernel:
        """Emit the kernel of a group."""

    def emit_opaque(self, results: list[Opaque]) -> Kernel:
        """Emit the kernel that computes these results."""

    def emit_copy(self, size: int, dtype: str) -> tirx.PrimFunc:
        """Emit a kernel (source, copy) for `size` elements of a physical dtype."""


@attrs.frozen
class GroupBuffers:
    """The parameters of a group's kernel: what it reads, in order, then what it stores."""

    group: Group
    inputs: tuple[Value, ...]
    by_value: dict[int, FlatBuffer]

    @classmethod
    def declare(cls, group: Group) -> GroupBuffers:
        """Declare buffers for the inputs and the stored values of `group`, by value id."""
        inputs = group.ordered_inputs
        buffers: dict[int, FlatBuffer] = {}
        for k, value in enumerate(inputs):
            buffers[id(value)] = FlatBuffer.declare(value.spec, f"in{k}")
        for k, value in enumerate(group.stored):
            buffers[id(value)] = FlatBuffer.declare(value.spec, f"out{k}")
        return cls(group, inputs, buffers)

    def finish(self, body: tirx.Stmt, workspace: Sequence[FlatBuffer] = ()) -> Kernel:
        """Return the kernel of this body; `workspace` buffers follow the outputs."""
        values = [*self.inputs, *self.group.stored]
        parameters = [self.by_value[id(value)].buffer for value in values]
        parameters += [one.buffer for one in workspace]
        pairs = inplace_pairs(self.group, list(self.inputs))
        function = with_pairs(tirx.PrimFunc(parameters, body), pairs)
        specs = tuple(one.spec for one in workspace)
        return Kernel(function, self.inputs, tuple(self.group.stored), specs)


@attrs.frozen
class OpaqueBuffers:
    """The parameters of a hand-written kernel; inputs that are one tensor share a parameter."""

    kernel: OpaqueKernel
    owners: tuple[Value, ...]
    inputs: list[FlatBuffer]
    outputs: list[FlatBuffer]
    places: list[int]

    @classmethod
    def declare(cls, kernel: OpaqueKernel) -> OpaqueBuffers:
        """Declare buffers for the inputs and outputs of `kernel`."""
        owners: list[Value] = []
        places = []
        for value in kernel.inputs:
            owner = storage_of(value)
            if not any(owner is other for other in owners):
                owners.append(owner)
            places.append(next(k for k, other in enumerate(owners) if other is owner))
        inputs = [FlatBuffer.declare(value.spec, f"in{k}") for k, value in enumerate(owners)]
        outputs = [FlatBuffer.declare(spec, f"out{k}") for k, spec in enumerate(kernel.specs)]
        return cls(kernel, tuple(owners), inputs, outputs, places)

    @property
    def arguments(self) -> tuple[list[FlatBuffer], list[FlatBuffer]]:
        """Return the arguments of `OpaqueKernel.emit`."""
        return [self.inputs[k] for k in self.places], self.outputs

    def finish(self, statements: Sequence[tirx.Stmt], results: list[Opaque]) -> Kernel:
        """Return the kernel of these statements.

        What they allocate outside of loops is shared, and becomes workspace: parameters that follow
        the outputs. What they allocate inside is private to a task.
        """
        workspace = [one.buffer for one in statements if isinstance(one, tirx.AllocBuffer)]
        body = sequence([one for one in statements if not isinstance(one, tirx.AllocBuffer)])
        parameters = [buffer.buffer for buffer in [*self.inputs, *self.outputs]] + workspace
        function = with_pairs(tirx.PrimFunc(parameters, body), self._pairs())
        ordered = sorted(results, key=lambda value: value.position)
        specs = tuple(TensorSpec((int(b.ty.shape[0]),), str(b.ty.dtype)) for b in workspace)
        return Kernel(function, self.owners, tuple(ordered), specs)

    def _pairs(self) -> list[tuple[int, int]]:
        """Return the pairs of the kernel, except where it reads the tensor as another input too."""
        pairs = [(output, self.places[source]) for output, source in self.kernel.inplace]
        return [(output, at) for output, at in pairs if self.places.count(at) == 1]


def with_pairs(function: tirx.PrimFunc, pairs: list[tuple[int, int]]) -> tirx.PrimFunc:
    """Mark the function with the (output, input) pairs that may share memory."""
    function = function.with_attr("tirx.noalias", not pairs)
    return function.with_attr(INPLACE, [list(pair) for pair in pairs]) if pairs else function


def unflatten_axes(variable: Any, axes: list[Axis]) -> list[Any]:
    """Return the position along each axis of the flat position `variable`."""
    parts: list[Any] = []
    for k, axis in enumerate(reversed(axes)):
        is_last = k == len(axes) - 1
        parts.append(variable if is_last else tirx.floormod(variable, axis.extent))
        if not is_last:
            variable = tirx.floordiv(variable, axis.extent)
    return list(reversed(parts))
