# SPDX-License-Identifier: Apache-2.0
"""Kernel template: a kernel written once with variables for load offsets, and its copies."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.analysis import undefined_vars

from amp_ir.loops.codegen.kernel import Kernel
from amp_ir.loops.group import Group

_ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add,
    tirx.Sub: operator.sub,
    tirx.Mul: operator.mul,
    tirx.FloorDiv: tirx.floordiv,
    tirx.FloorMod: tirx.floormod,
    tirx.Min: tirx.min,
    tirx.Max: tirx.max,
}


@attrs.frozen(eq=False)
class KernelTemplate:
    """A kernel with `variables` for its load offsets."""

    kernel: Kernel
    variables: list[tirx.Var]

    @classmethod
    def of(cls, kernel: Kernel, variables: list[tirx.Var]) -> KernelTemplate | None:
        """Return the template; None if a variable occurs where `at` would not find it."""
        template = cls(kernel, variables)
        function = template._with_numbers([1] * len(variables))
        left = undefined_vars(function.body, list(function.params))
        return None if any(one in variables for one in left) else template

    def at(self, group: Group, numbers: Sequence[int]) -> Kernel:
        """Return the kernel for a group of the same structure with these load offsets.

        Ensures: the same function, but for the names of variables, as is written for the group.
        """
        # Two functions of a module may not define the same variables.
        function = _renewed(self._with_numbers(numbers))
        return attrs.evolve(
            self.kernel,
            function=function,
            inputs=group.ordered_inputs,
            outputs=tuple(group.stored),
        )

    def _with_numbers(self, numbers: Sequence[int]) -> tirx.PrimFunc:
        literals = {
            variable: tirx.const(number, "int32")
            for variable, number in zip(self.variables, numbers, strict=True)
        }

        def closed(index: Any) -> Any:
            """Return the index with numbers, folded as if it had been written with them."""
            if isinstance(index, tirx.Var):
                return literals.get(index, index)
            fold = _ARITHMETIC.get(type(index))
            if fold is None:
                return index
            a, b = closed(index.a), closed(index.b)
            return index if a is index.a and b is index.b else fold(a, b)

        def closed_load(load: TensorLoad) -> TensorLoad:
            old = load.indices[:]
            new = [closed(index) for index in old]
            if all(map(operator.is_, new, old)):
                return load
            return tirx.BufferLoad(load.source, new)

        function = self.kernel.function
        body = tvm_ffi.structural_map(function.body, (TensorLoad, closed_load))
        return tirx.PrimFunc(function.params, body, function.ret_type, function.attrs)


def _renewed(function: tirx.PrimFunc) -> tirx.PrimFunc:
    return tvm.get_global_func("s_tir.RenewDefs")(function)
