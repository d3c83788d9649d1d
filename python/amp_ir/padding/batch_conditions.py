# SPDX-License-Identifier: Apache-2.0
"""Conditions on the numbers of a batch under which its padding is inert: `BatchCondition`.

A step that reads `x[rows, lengths - 1]` reads data as long as no length exceeds the batch's. The
proof cannot know; each batch is looked at before its step runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import torch
from tvm import relax

from amp_ir.errors import IndexOutOfRangeError
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.interpreter import can_evaluate, evaluate
from amp_ir.ir.step_graph import Op, StepGraph
from amp_ir.ir.step_module import Role, Signature
from amp_ir.padding.axes import Factor, Limit
from amp_ir.padding.padded_call import PaddedTensor


@attrs.frozen(eq=False)
class BatchCondition:
    """Numbers that the batch alone determines must be in [least, limit), apart from padding.

    `reader` is the op that takes them. `parameters` are the tensors of the batch that `variable`
    depends on, each with its position.
    """

    reader: str
    parameters: Sequence[tuple[relax.Var, int]]
    bindings: Sequence[relax.VarBinding]
    variable: relax.Var
    factors: Sequence[Factor]
    limit: Limit
    least: int | None

    @property
    def expectation(self) -> str:
        """Say what is expected of the numbers: "expected 0 to 1 less than axis 1 of ids"."""
        shift = self.limit.shift - 1
        distance = f"{abs(shift)} {'more' if shift > 0 else 'less'} than " if shift else ""
        least = "at most" if self.least is None else f"{self.least} to"
        return f"expected {least} {distance}the length of {self.limit.dimension.name}"

    def holds(self, batch: Sequence[torch.Tensor], lengths: Mapping[str, int]) -> bool:
        """Return whether it does for the tensors of a padded batch with these lengths."""
        values = {parameter: batch[position].cpu() for parameter, position in self.parameters}
        try:
            numbers = evaluate(self.variable, self.bindings, values)
        except IndexOutOfRangeError:
            return False  # the step without padding says so
        numbers = numbers.reshape([one.size for one in self.factors])
        for k, one in enumerate(self.factors):
            if one.dimension is not None:
                numbers = numbers.narrow(k, 0, lengths[one.dimension.name] + one.shift)
        if not numbers.numel():
            return True
        smallest, largest = numbers.aminmax()
        is_above = self.least is None or bool(smallest >= self.least)
        return is_above and bool(largest < lengths[self.limit.dimension.name] + self.limit.shift)


class RequiredNumbers:
    """The conditions that a proof has come to need, each once."""

    def __init__(self, flow: Dataflow, graph: StepGraph, signature: Signature) -> None:
        self._flow = flow
        self._graph = graph
        specs = zip(flow.main.params, signature.inputs, strict=True)
        batch = (parameter for parameter, spec in specs if spec.role is Role.BATCH)
        self._positions = {parameter: k for k, parameter in enumerate(batch)}
        self.conditions: dict[object, BatchCondition] = {}

    def require(
        self, op: Op, leaf: int, tensor: PaddedTensor, limit: Limit, least: int | None
    ) -> bool:
        """Require numbers that an op takes of each batch.

        Return whether the batch alone says what they are; else nothing is required.
        """
        key = leaf, limit, least
        if key in self.conditions:
            return True
        factors = list(tensor.factors)
        if any(one.is_padded and one.dimension is None for one in factors):
            return False
        variable = self._variable(leaf)
        found = None if variable is None else slice_of_batch(self._flow, variable, self._positions)
        if variable is None or found is None:
            return False
        reader = f"{op.label} in {op.location}"
        self.conditions[key] = BatchCondition(reader, *found, variable, factors, limit, least)
        return True

    def _variable(self, leaf: int) -> relax.Var | None:
        """Return the variable that holds a tensor; None for one of several results."""
        if leaf in self._graph.inputs:
            return self._flow.main.params[self._graph.inputs.index(leaf)]
        op = self._graph.maker(leaf)
        return None if op is None or len(op.results) > 1 else op.variable


# Ops whose results are the same numbers in every program, of the floats that count entries.
_EXACT = frozenset(
    f"relax.{name}"
    for name in (
        "astype add subtract minimum maximum where sum reshape permute_dims broadcast_to squeeze "
        "expand_dims strided_slice concat negative abs full zeros ones"
    ).split()
)


def _is_exact(binding: relax.VarBinding) -> bool:
    """Return whether the interpreter computes what the compiled step does, to the last bit."""
    name = op_name(binding.value)
    if not name:
        return True
    dtype = str(getattr(binding.var.ty, "dtype", ""))
    return can_evaluate(name) and (name in _EXACT or dtype == "bool" or "int" in dtype)


def slice_of_batch(
    flow: Dataflow, variable: relax.Var, positions: Mapping[relax.Var, int]
) -> tuple[list[tuple[relax.Var, int]], list[relax.VarBinding]] | None:
    """Return the parameters and bindings that a value depends on.

    `positions` are the parameters that are tensors of the batch. None where the value depends on
    others, or on an op that the interpreter cannot compute.
    """
    needed, parameters, bindings = {variable}, [], []
    for binding in reversed(flow.bindings):
        if binding.var not in needed:
            continue
        if not _is_exact(binding):
            return None
        bindings.append(binding)
        needed.update(variables_of(binding.value))
    made = {binding.var for binding in bindings}
    for one in needed - made:
        if one not in positions:
            return None
        parameters.append((one, positions[one]))
    return parameters, bindings[::-1]
