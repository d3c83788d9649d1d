# SPDX-License-Identifier: Apache-2.0
"""Ids in the batch that must lie inside a table: checked before a step, as kernels do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.dialect.registry import options_of
from amp_ir.errors import IdError
from amp_ir.location import Location, from_span
from amp_ir.module import InputSpec

# Ops that pass ids on unchanged.
_PASSING = ("relax.reshape", "relax.astype", "amp_ir.cast", "relax.strided_slice",
            "relax.permute_dims", "relax.broadcast_to")  # fmt: skip


@attrs.frozen
class IdBound:
    """Ids of the batch input at `position` must lie in [0, extent), or equal `ignored`."""

    position: int
    extent: int
    ignored: int | None
    op: str
    location: Location


def find_bounds(ir: tvm.IRModule, inputs: Sequence[InputSpec]) -> list[IdBound]:
    """The bounds that embeddings and class losses set for integers of the batch.

    Only ids that reach the op unchanged (through views and casts) are known; ids that the step
    computes are clamped by the kernels.
    """
    main = ir["main"]
    values = {b.var: b.value for block in main.body.blocks for b in block.bindings}
    position_of = {}
    batch = [p for p, spec in zip(main.params, inputs, strict=True) if not spec.is_state]
    for position, parameter in enumerate(batch):
        position_of[parameter] = position
    bounds = set()
    for value in values.values():
        if isinstance(value, relax.Call) and value.op.name in _TABLES:
            ids, extent, ignored = _TABLES[value.op.name](value)
            source = _source(ids, values)
            if source in position_of:
                place = from_span(value.span)
                position = position_of[source]
                bounds.add(IdBound(position, extent, ignored, value.op.name, place))
    return sorted(bounds, key=lambda bound: (bound.position, bound.extent, str(bound.location)))


def _embedding(call: relax.Call) -> tuple[relax.Expr, int, int | None]:
    return call.args[1], int(call.args[0].ty.shape[0]), None


def _nll_loss(call: relax.Call) -> tuple[relax.Expr, int, int | None]:
    shape = [int(n) for n in call.args[0].ty.shape]
    ignored = int(options_of(call).get("ignore_index", -100))
    return call.args[1], shape[1] if len(shape) > 1 else shape[0], ignored


_TABLES: dict[str, Callable[[relax.Call], tuple[relax.Expr, int, int | None]]] = {
    "amp_ir.embedding": _embedding,
    "amp_ir.nll_loss": _nll_loss,
}


def _source(expr: relax.Expr, values: dict[relax.Var, relax.Expr]) -> relax.Expr:
    value = values.get(expr)
    while isinstance(value, relax.Call) and value.op.name in (*_PASSING, "relax.concat"):
        if value.op.name == "relax.concat":
            # Beside ids there may be ones that the step knows; others are not followed.
            parts = [one for one in value.args[0].fields if not _is_filled(values.get(one))]
            if len(parts) != 1:
                return expr
            expr = parts[0]
        else:
            expr = value.args[0]
        value = values.get(expr)
    return expr


def _is_filled(value: relax.Expr | None) -> bool:
    return isinstance(value, relax.Call) and value.op.name == "relax.full"


def check_ids(bounds: Sequence[IdBound], batch: Sequence[torch.Tensor]) -> None:
    """Refuse a batch with ids outside of their tables.

    Ids on a GPU are not looked at, since that would wait for it; kernels clamp them.

    Raises:
        IdError: names every such input, the id, the bound and the op that sets it.
    """
    faults = [fault for bound in bounds if (fault := _fault(bound, batch[bound.position]))]
    if faults:
        raise IdError("; ".join(faults) + ". Nothing was run and nothing has changed")


def _fault(bound: IdBound, ids: torch.Tensor) -> str | None:
    if ids.numel() == 0 or ids.device.type != "cpu":
        return None
    low, high = (int(extreme) for extreme in ids.aminmax())
    if bound.ignored is not None and not 0 <= bound.ignored < bound.extent and low < 0:
        counted = ids[ids != bound.ignored]
        if counted.numel() == 0:
            return None
        low = int(counted.min())
    wrong = low if low < 0 else high
    if 0 <= wrong < bound.extent:
        return None
    but = f" (or {bound.ignored}, which is ignored)" if bound.ignored is not None else ""
    return (
        f"batch{bound.position} holds the id {wrong}, expected ids from 0 to "
        f"{bound.extent - 1}{but}, for {bound.op} in {bound.location}"
    )
