# SPDX-License-Identifier: Apache-2.0
"""The gradients of a captured step, as its optimizer reads them, for one batch or several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import from_span
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.rewrites.unroll_loops import unroll_loops

_CAST = "amp_ir.cast"
Tensors = dict[str, torch.Tensor]


def inputs_of(mod: StepModule, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the inputs of `main` for a flat batch: copies of the state, and the batch."""
    copies, given = mod.copied_state(), iter(batch)
    held = [copies[one.name] if one.is_state else next(given) for one in mod.signature.inputs]
    return [one if isinstance(one, torch.Tensor) else one() for one in held]


class StepGradients:
    """The gradients of a step, by the interpreter, under any plan of it.

    They are what the optimizer's ops read and other ops make (before unscaling and clipping), and
    what the step leaves in `p.grad`; the results of a step that has neither.
    """

    def __init__(self, mod: StepModule, batches: Sequence[Sequence[torch.Tensor]]) -> None:
        self.mod = mod.with_ir(unroll_loops(mod.ir))
        self.inputs = [inputs_of(mod, batch) for batch in batches]
        self._places = _read_by_optimizer(Dataflow(self.mod.ir))

    def exact(self, batch: int) -> Tensors:
        """Return those of the step in float64."""
        return self.evaluated(self.mod, batch, float_dtype=torch.float64)

    def wanted(self, mod: StepModule) -> dict[str, relax.Expr]:
        """Return them as expressions of a version of the step whose loops are unrolled."""
        flow = Dataflow(mod.ir)
        outputs = [
            (spec, value)
            for spec, value in zip(mod.signature.outputs, flow.fields, strict=True)
            if str(value.ty.dtype).startswith(("float", "bfloat"))
        ]
        found = {name: variable for variable, name in _named_reads(flow, self._places)}
        found |= {spec.name: value for spec, value in outputs if spec.role is Role.GRADIENT}
        results = [value for spec, value in outputs if spec.role is Role.RESULT]
        return found or {str(n): value for n, value in enumerate(results)}

    def evaluated(self, mod: StepModule, batch: int, **options: Any) -> Tensors:
        """Return those of a version of the step whose loops are unrolled; see `interpret`."""
        wanted = dict(_named_reads(Dataflow(mod.ir), self._places))
        found: Tensors = {}

        def note(variable: relax.Var, value: torch.Tensor) -> torch.Tensor:
            if variable in wanted:
                found[wanted[variable]] = value.double()
            return value

        outputs = interpret(mod, self.inputs[batch], on_value=note, **options)
        specs = list(zip(mod.signature.outputs, outputs, strict=True))
        found |= {
            spec.name: value.double()
            for spec, value in specs
            if spec.role is Role.GRADIENT and value.is_floating_point()
        }
        if found:
            return found
        results = [value for spec, value in specs if spec.role is Role.RESULT]
        return {str(n): one.double() for n, one in enumerate(results) if one.is_floating_point()}


def _read_by_optimizer(flow: Dataflow) -> dict[tuple[int, int], str]:
    """Return the places where an op of the optimizer reads a tensor that others make.

    A place is the number of the op among the optimizer's and that of the variable that it reads.
    Numbers beside tensors are none: the inverse of a loss scale is one.
    """
    found: dict[tuple[int, int], str] = {}
    numbers: dict[tuple[int, int], str] = {}
    seen: set[relax.Var] = set()
    for place, variable in _optimizer_reads(flow):
        maker = flow.values.get(variable)
        is_made = maker is not None and from_span(getattr(maker, "span", None)).phase != "optimizer"
        ty = variable.ty
        if not is_made or variable in seen or not isinstance(ty, relax.TensorType):
            continue
        seen.add(variable)
        if str(ty.dtype).startswith(("float", "bfloat")):
            is_number = all(int(extent) == 1 for extent in ty.shape)
            (numbers if is_number else found)[place] = f"{variable.name}"
    return found or numbers


def _named_reads(
    flow: Dataflow, places: dict[tuple[int, int], str]
) -> Iterator[tuple[relax.Var, str]]:
    for place, variable in _optimizer_reads(flow):
        if place in places:
            yield variable, places[place]


def _optimizer_reads(flow: Dataflow) -> Iterator[tuple[tuple[int, int], relax.Var]]:
    """Yield what each op of the optimizer reads; the casts of autocast are no such ops."""
    number = 0
    for value in flow.values.values():
        place = from_span(getattr(value, "span", None))
        if place.phase != "optimizer" or op_name(value) in ("", _CAST):
            continue
        yield from (((number, k), variable) for k, variable in enumerate(variables_of(value)))
        number += 1
