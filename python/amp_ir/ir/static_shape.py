# SPDX-License-Identifier: Apache-2.0
"""Fast access to the extents of a tensor type as Python numbers.

Iterating over an array of TVM asks for its length and for each element through several Python
functions; a slice asks once. Passes read the types of thousands of bindings.
"""

from __future__ import annotations

import math

from tvm import relax

from amp_ir.ir.tensor_layout import dtype_nbytes


def extents_of(type_: relax.TensorType) -> tuple[int, ...]:
    """Return the extents of a tensor type.

    Requires: a static shape.
    """
    return tuple([extent.value for extent in type_.shape.values[:]])


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """Return the extents of a tensor; see `extents_of`."""
    return extents_of(expr.ty)


def nbytes_of(type_: relax.TensorType) -> int:
    """Return the bytes of a stored tensor.

    Requires: a static shape.
    """
    return math.prod(extents_of(type_)) * dtype_nbytes(str(type_.dtype))
