# SPDX-License-Identifier: Apache-2.0
"""Fast access to the extents of a tensor type as Python numbers.

Iterating over an array of TVM asks for its length and for each element through several Python
functions; a slice asks once. Passes read the types of thousands of bindings.
"""

from __future__ import annotations

from tvm import relax


def extents_of(type_: relax.TensorType) -> tuple[int, ...]:
    """Return the extents of a tensor type.

    Requires: a static shape.
    """
    return tuple([extent.value for extent in type_.shape.values[:]])


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """Return the extents of a tensor; see `extents_of`."""
    return extents_of(expr.ty)
