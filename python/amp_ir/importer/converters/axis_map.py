# SPDX-License-Identifier: Apache-2.0
"""A sparse linear map along one axis, as gathers with constant weights.

Upsampling and padding, and the gradients of both, are such maps: no result depends on the order
in which a kernel adds.
"""

from __future__ import annotations

import torch
from tvm import relax

from amp_ir.importer.converters.creation import static_indices
from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import dtype_of, shape_of


def apply_axis_map(ops: Emitter, x: relax.Expr, axis: int, weights: torch.Tensor) -> relax.Expr:
    """Return y[..., j, ...] = sum over i of weights[i, j] * x[..., i, ...] along one axis.

    Column j has few nonzero entries; term k gathers the k-th of every column.
    """
    count = max(1, int((weights != 0).sum(0).max()))
    # A stable sort by "is zero" puts the nonzero entries first, in ascending order of position.
    order = torch.sort((weights == 0).to(torch.int8), dim=0, stable=True).indices[:count]
    factors = torch.gather(weights, 0, order)
    shape = [1] * len(shape_of(x))
    shape[axis] = weights.shape[1]
    total: relax.Expr | None = None
    for places, factor in zip(order, factors, strict=True):
        term = ops.emit(relax.op.take(x, static_indices(ops, places), axis))
        if not bool((factor == 1).all()):
            values = factor.to(getattr(torch, dtype_of(x))).reshape(shape)
            term = ops.multiply(term, ops.tensor(values))
        total = term if total is None else ops.add(total, term)
    assert total is not None, "count is at least 1"
    return total
