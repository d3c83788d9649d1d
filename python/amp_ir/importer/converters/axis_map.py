# SPDX-License-Identifier: Apache-2.0
"""A sparse linear map along one axis, as gathers with constant weights.

Upsampling and padding, and the gradients of both, are such maps: no result depends on the order
in which a kernel adds.
"""

from __future__ import annotations

import attrs
import torch
from tvm import relax

from amp_ir.importer.converters.creation import static_indices
from amp_ir.importer.converters.emitter import Emitter
from amp_ir.importer.converters.promotion import dtype_of, shape_of


@attrs.frozen
class AxisMap:
    """A linear map along one axis: f64[extent, out extent] `weights`.

    `nan_of_infinity`: bool of the same shape, where the map makes NaN of an infinite element: it
    multiplies it by 0, or sums several multiples of it with different signs.
    """

    weights: torch.Tensor
    nan_of_infinity: torch.Tensor | None = None

    def terms(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (places, factors, present), each [count, out extent]; count is at least 1.

        The nonzero weights of a column come first, in ascending order of place, then a factor of 0
        for each place that is in `nan_of_infinity`. A column with fewer terms lacks the last ones.
        """
        zeros = torch.zeros_like(self.weights)
        factors = torch.cat([self.weights, zeros])
        more = self.nan_of_infinity
        present = torch.cat([self.weights != 0, zeros.bool() if more is None else more])
        order = torch.sort((~present).to(torch.int8), dim=0, stable=True).indices
        order = order[: max(1, int(present.sum(0).max()))]
        places = order % len(self.weights)
        return places, torch.gather(factors, 0, order), torch.gather(present, 0, order)


def apply_axis_map(ops: Emitter, x: relax.Expr, axis: int, axis_map: AxisMap) -> relax.Expr:
    """Return y[..., j, ...] = sum over i of weights[i, j] * x[..., i, ...] along one axis.

    Term k gathers the k-th element of every column. What a column lacks is not 0 times some
    element, which may be infinite.
    """
    places, factors, present = axis_map.terms()
    shape = [1] * len(shape_of(x))
    shape[axis] = places.shape[1]
    total: relax.Expr | None = None
    for place, factor, is_there in zip(places, factors, present, strict=True):
        term = ops.emit(relax.op.take(x, static_indices(ops, place), axis))
        if not bool((factor[is_there] == 1).all()):
            values = factor.to(getattr(torch, dtype_of(x))).reshape(shape)
            term = ops.multiply(term, ops.tensor(values))
        if not bool(is_there.all()):
            term = ops.where(ops.tensor(is_there.reshape(shape)), term, 0)
        total = term if total is None else ops.add(total, term)
    assert total is not None, "count is at least 1"
    return total
