# SPDX-License-Identifier: Apache-2.0
"""A step that is evaluated again and again, each time with other values rounded.

The first sweep keeps what its ops make, as far as memory allows. A later one computes what its
roundings reach, and what was not kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from tvm import relax

from amp_ir.host.free_memory import free_nbytes
from amp_ir.ir.dataflow import Dataflow, live_bindings, variables_of
from amp_ir.ir.interpreter import check_ops, evaluate
from amp_ir.ir.step_module import StepModule

# Of the free memory, for what the first sweep keeps.
_KEPT_SHARE = 0.4
# The gradients of a step: variables of its program, or constants, by name.
Wanted = Mapping[str, relax.Expr]


class RoundedStep:
    """The gradients of a step in one wide dtype, with chosen values rounded to a low one.

    Args:
        mod: a step without loops, whose ops the interpreter can evaluate.
        inputs: the arguments of `main`.
        wanted: what to evaluate.
        wide: what is not rounded is evaluated in this dtype.
        low: what is rounded, is rounded to this one.
        kept_nbytes: what the first sweep may keep; by default a share of the free memory.

    Raises:
        UnsupportedOpError: ops that the interpreter cannot evaluate; the message lists them.
    """

    def __init__(
        self,
        mod: StepModule,
        inputs: Sequence[torch.Tensor],
        wanted: Wanted,
        wide: torch.dtype,
        low: torch.dtype,
        kept_nbytes: int | None = None,
    ) -> None:
        flow = Dataflow(mod.ir)
        self.wide, self.low = wide, low
        self.wanted = {name: one for name, one in wanted.items() if isinstance(one, relax.Var)}
        self._constants = {
            name: evaluate(one, (), {}, float_dtype=wide)
            for name, one in wanted.items()
            if name not in self.wanted
        }
        self.bindings = live_bindings(flow.bindings, relax.Tuple(list(self.wanted.values())))
        check_ops(self.bindings)
        self._reads = {one.var: variables_of(one.value) for one in self.bindings}
        read = {one for reads in self._reads.values() for one in reads} | set(self.wanted.values())
        pairs = zip(flow.main.params, inputs, strict=True)
        self._kept: dict[relax.Var, Any] = {
            param: _in_dtype(one.detach(), wide) for param, one in pairs if param in read
        }
        self._may_keep = self._smallest(
            int(_KEPT_SHARE * free_nbytes()) if kept_nbytes is None else kept_nbytes
        )
        self.exact = self._sweep(frozenset(), self._may_keep)

    def rounded(self, variables: Set[relax.Var]) -> dict[str, torch.Tensor]:
        """Return the gradients with these values rounded alone.

        A gradient that they do not reach is the very tensor of `exact`.
        """
        return self._sweep(variables, frozenset())

    def _smallest(self, nbytes: int) -> set[relax.Var]:
        """Return as many of the variables, the smallest first, as fit into these bytes."""
        size = torch.finfo(self.wide).bits // 8
        found: set[relax.Var] = set()
        for variable in sorted(self._reads, key=lambda one: _elements(one.ty)):
            nbytes -= size * _elements(variable.ty)
            if nbytes < 0:
                break
            found.add(variable)
        return found

    def _sweep(self, rounded: Set[relax.Var], keep: Set[relax.Var]) -> dict[str, torch.Tensor]:
        needed = self._needed(rounded)
        left = Counter(one for variable in needed for one in self._reads[variable])
        left.update(self.wanted.values())
        made: dict[relax.Var, Any] = {}
        for binding in self.bindings:
            variable = binding.var
            if variable in needed:
                reads = self._reads[variable]
                values = {one: made.get(one, self._kept.get(one)) for one in reads}
                value = evaluate(binding.value, (), values, float_dtype=self.wide)
                for one in reads:
                    left[one] -= 1
                    if not left[one]:
                        made.pop(one, None)
            elif variable in rounded and variable in self._kept:
                value = self._kept[variable]
            else:
                continue
            if variable in rounded:
                value = value.to(self.low).to(self.wide)
            made[variable] = value
            if variable in keep:
                self._kept[variable] = value
        found = {name: made.get(one, self._kept.get(one)) for name, one in self.wanted.items()}
        return {**self._constants, **found}

    def _needed(self, rounded: Set[relax.Var]) -> set[relax.Var]:
        """Return what has to be computed: what roundings reach, and what it reads and nobody kept.

        A value that is rounded itself, and kept, is not computed again.
        """
        reached: set[relax.Var] = set()
        for variable, reads in self._reads.items():
            if any(one in reached or one in rounded for one in reads):
                reached.add(variable)
        read, needed = set(self.wanted.values()), set()
        for variable in reversed(self._reads):
            if variable in read and (variable in reached or variable not in self._kept):
                needed.add(variable)
                read.update(self._reads[variable])
        return needed


def squared_errors(
    got: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Return |got - exact|^2 of each tensor, infinite where it is not a number."""
    found = {}
    for name, one in exact.items():
        error = 0.0 if got[name] is one else squared_norm(got[name] - one)
        found[name] = math.inf if math.isnan(error) else error
    return found


def squared_norm(value: torch.Tensor) -> float:
    """Return |value|^2, summed in float64."""
    return float(torch.linalg.vector_norm(value, dtype=torch.float64)) ** 2


def _in_dtype(value: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return value.to(wide) if value.is_floating_point() else value


def _elements(ty: relax.Type) -> int:
    if isinstance(ty, relax.TupleType):
        return sum(_elements(field) for field in ty.fields)
    return math.prod(int(extent) for extent in ty.shape) if isinstance(ty, relax.TensorType) else 0
