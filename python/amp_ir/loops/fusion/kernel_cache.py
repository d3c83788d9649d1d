# SPDX-License-Identifier: Apache-2.0
"""Kernel cache: groups of the same structure share a kernel, which is written once.

A step repeats itself, with its layers or the time steps of a recurrence, and writing a kernel
takes milliseconds where comparing its inputs takes a fraction of one. An emitter sees the specs of
a group's values, their order, and their bodies: Python functions, identified by their code and
what they close over. A closure over anything else has no key, and the group is written again;
`write_fused.py` finds equal functions afterwards in any case.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Iterable
from typing import Any

import attrs

from amp_ir.loops.codegen.kernel import Emitter, GroupBuffers, Kernel
from amp_ir.loops.codegen.statements import sequence
from amp_ir.loops.group import Group, is_inlined
from amp_ir.loops.ir import Constant, Pointwise, Reduction, TensorSpec, Value

_NUMBERS = (bool, int, str, type(None))


class KernelCache:
    """The kernels that one emitter has written for the groups of one program."""

    def __init__(self, emitter: Emitter, *, strict: bool) -> None:
        self._emitter = emitter
        self._strict = strict
        # The first group of a structure stays alive: tokens are ids of what its bodies close over.
        self._kernels: dict[tuple[Any, ...], tuple[Group, Kernel]] = {}

    def of(self, group: Group) -> Kernel:
        """Return the kernel of a group: the same function for groups of the same structure."""
        structure = structure_of(group)
        if structure is None:
            return self._write(group)
        if structure not in self._kernels:
            self._kernels[structure] = group, self._write(group)
        _, kernel = self._kernels[structure]
        return attrs.evolve(kernel, inputs=group.ordered_inputs, outputs=tuple(group.stored))

    def _write(self, group: Group) -> Kernel:
        if not any(value.size for value in group.stored):
            # Results without elements: there is nothing to do.
            return GroupBuffers.declare(group).finish(sequence([]))
        return self._emitter.emit_group(group, strict=self._strict)


def structure_of(group: Group) -> tuple[Any, ...] | None:
    """Return all that a kernel of a group depends on; None if a body closes over something unknown.

    Two groups of the same structure differ at most in the tensors they read and write. Valid as
    long as the group lives.
    """
    writer = _Writer(group)
    try:
        writer.add_group()
    except _UnknownError:
        return None
    return tuple(writer.tokens)


class _UnknownError(TypeError):
    """A body closes over a kind of object that has no token."""


class _Writer:
    """Writer of a group as a sequence of tokens; values and functions are numbered in order."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.tokens: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.members = {id(value) for value in group.members}

    def add_group(self) -> None:
        domain = self.group.domain
        self.tokens += [domain.shape, domain.axes]
        for values in (
            self.group.stored, self.group.full, self.group.row, self.group.column,
            self.group.ordered_inputs,
        ):  # fmt: skip
            self._add_all(values)

    def _add_all(self, values: Iterable[Any]) -> None:
        values = list(values)
        self.tokens.append(len(values))
        for one in values:
            self._add(one)

    def _add(self, one: Any) -> None:
        """Add an object that a body may see."""
        kind = type(one)
        if kind in _NUMBERS:
            self.tokens += [kind, one]
        elif kind is float:
            self.tokens += [kind, one.hex()]  # 0.0 and -0.0 are equal, and NaN is not NaN.
        elif isinstance(one, Value):
            self._add_value(one)
        elif kind is types.FunctionType:
            self._add_function(one)
        elif kind in (tuple, list):
            self.tokens.append(kind)
            self._add_all(one)
        elif kind is dict:
            self.tokens.append(kind)
            self._add_all(one.items())
        elif kind is TensorSpec:
            self.tokens += [kind, one.shape, one.dtype]
        elif isinstance(one, (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum)):
            self.tokens += [kind, id(one)]
        else:
            raise _UnknownError(f"a body closes over a {kind.__name__}")

    def _is_new(self, one: Any) -> bool:
        """Add the object's number; return whether it is new."""
        cached = self.numbers.get(id(one))
        number = self.numbers.setdefault(id(one), len(self.numbers))
        self.tokens.append(number)
        return cached is None

    def _add_value(self, value: Value) -> None:
        self.tokens.append(type(value))
        if not self._is_new(value):
            return
        self.tokens += [value.spec.shape, value.spec.dtype]
        if isinstance(value, Constant):
            self._add(value.number)
        elif self._is_computed(value):
            assert isinstance(value, (Pointwise, Reduction))
            if isinstance(value, Pointwise):
                self.tokens += [
                    value.is_cast, value.is_held, value.is_reshape, value.is_view, value.rounds,
                    value.part_axis,
                ]  # fmt: skip
                self._add_all(value.parts)
            else:
                self.tokens += [value.kind, value.source_shape, value.axes]
                self.tokens += [value.is_gate, value.divisor]
            self.tokens.append(len(value.reads))
            for read in value.reads:
                self.tokens += [read.place, read.is_scattered]
                self._add_value(read.value)
            self._add_function(value.body)

    def _is_computed(self, value: Value) -> bool:
        """Return whether the kernel computes the value rather than reads it from memory."""
        if id(value) in self.members:
            return True
        return isinstance(value, Pointwise) and (value.is_reshape or is_inlined(value))

    def _add_function(self, function: Any) -> None:
        if type(function) is not types.FunctionType:
            raise _UnknownError(f"a body is a {type(function).__name__}")
        self.tokens.append(types.FunctionType)
        if not self._is_new(function):
            return
        # Code objects are constants of the modules that define them, and live as long.
        self.tokens.append(id(function.__code__))
        self._add(function.__defaults__)
        self._add(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            self._add(_content(cell))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        raise _UnknownError("a body closes over a name without a value") from None
