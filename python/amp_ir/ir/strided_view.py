# SPDX-License-Identifier: Apache-2.0
"""Strided views of a value in another's memory, so that libraries read transposes in place."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
from tvm import relax


@attrs.frozen
class StridedView:
    """`shape` and `strides` (elements) of a view that starts where the dense `base` starts.

    Equal views have equal strides: those of `without_idle_strides`.
    """

    base: relax.Expr
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def dense(cls, base: relax.Expr) -> StridedView:
        """Return the view of all of `base`, row-major."""
        shape = tuple(int(n) for n in base.ty.shape)
        return cls(base, shape, dense_strides(shape))

    def permuted(self, order: list[int]) -> StridedView:
        """Return the view with its dimensions in another order."""
        shape = tuple(self.shape[d] for d in order)
        strides = tuple(self.strides[d] for d in order)
        return StridedView(self.base, shape, without_idle_strides(shape, strides))

    def reshaped(self, shape: tuple[int, ...]) -> StridedView | None:
        """Return the same elements in order as `shape`, or None where that needs a copy."""
        strides = _reshape_strides(self.shape, self.strides, shape)
        if strides is None:
            return None
        return StridedView(self.base, shape, without_idle_strides(shape, strides))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def without_idle_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides with those of dimensions of one element, never used, as in dense memory.

    Libraries take the stride of a single row for the distance between rows.
    """
    found = list(strides)
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            found[d] = max(1, shape[d + 1] * found[d + 1]) if d + 1 < len(shape) else 1
    return tuple(found)


def view_of(expr: relax.Expr, values: Mapping[relax.Var, relax.Expr]) -> StridedView:
    """Look through the transposes and reshapes that lead to `expr`."""
    value = values.get(expr) if isinstance(expr, relax.Var) else None
    if isinstance(value, relax.Call) and value.op.name == "relax.permute_dims":
        return view_of(value.args[0], values).permuted(permutation(value))
    if isinstance(value, relax.Call) and value.op.name == "relax.reshape":
        shape = tuple(int(n) for n in value.ty.shape)
        found = view_of(value.args[0], values).reshaped(shape)
        if found is not None:
            return found
    return StridedView.dense(expr)


def permutation(call: relax.Call) -> list[int]:
    """Return the order of dimensions that a `relax.permute_dims` gives."""
    rank = len(call.args[0].ty.shape)
    axes = call.attrs.axes
    return [int(a) % rank for a in axes] if axes is not None else list(reversed(range(rank)))


def _reshape_strides(
    shape: tuple[int, ...], strides: tuple[int, ...], wanted: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return strides of `wanted` in the same memory (PyTorch's computeStride), or None."""
    runs: list[tuple[int, int]] = []
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        if runs and runs[-1][1] == n * stride:
            runs[-1] = (runs[-1][0] * n, stride)
        else:
            runs.append((n, stride))
    result: list[int] = []
    remaining, stride = runs.pop() if runs else (1, 1)
    for n in reversed(wanted):
        if n == 1:
            result.append(stride)
            continue
        if remaining == 1 and runs:
            remaining, stride = runs.pop()
        if remaining % n:
            return None
        result.append(stride)
        remaining //= n
        stride *= n
    return tuple(reversed(result)) if remaining == 1 and not runs else None
