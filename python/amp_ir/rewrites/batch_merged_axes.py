# SPDX-License-Identifier: Apache-2.0
"""Multiply matrices whose axis is two axes merged in a copy as a batch of matmuls in place.

PyTorch writes a contraction of three axes with two as one matrix product: `torch.matmul` of a
matrix with a batch of weights (a mixture of experts) and `torch.einsum` merge two axes of the
larger operand into one. Where these are not neighbours in memory the merged operand is a transposed
copy, in forward and in both gradients, and the result is stored in the merged order. A batch of
matmuls over one of the two axes reads the operand where it is. Where the merged axis is summed
over, its products are added up afterwards.

This runs before autocast, for the step as it was captured, as `concat_matmuls` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.strided_view import permutation, view_of

_PERMUTE, _RESHAPE, _MATMUL = "relax.permute_dims", "relax.reshape", "relax.matmul"
# Smaller matrices than this do not run at a library's full speed, and heads of attention, whose
# products write them merged at no cost, are smaller.
_LEAST_EXTENT = 128
_MOST_MATRICES = 64


def batch_merged_axes(ir: tvm.IRModule) -> tvm.IRModule:
    """Turn matmuls of operands that are copied to merge two axes into batches of matmuls.

    Before:  b [d, e * f] = reshape(permute_dims(w [e, d, f], [1, 0, 2])); y = matmul(a [t, d], b)
    After:   y3 [e, t, f] = matmul(a, w); y = reshape(permute_dims(y3, [1, 0, 2]), [t, e * f])

    Before:  a [t, e * f], b [e * f, d], one of them such a copy; y = matmul(a, b)
    After:   y = sum(matmul(a3 [e, t, f], b3 [e, f, d]), axis=0)

    - Reshapes and transposes that read the result read the batch, so that an order that was given
      up again costs nothing.
    - A sum over the batch is written only where its terms are no larger than the copies.

    Requires: one function `main`, one dataflow block, static shapes.
    Ensures:  only matmuls of two float32 or float64 matrices of at least 128 x 128 change, of which
              one is a copy by its order; sums are added up in another order, and after autocast
              each of their terms may be rounded; the new calls have the matmul's location.
    """
    rewriter = _Rewriter(ir)
    return rewriter.run() if rewriter.matmuls else ir


@attrs.frozen(eq=False)
class _Merged:
    """A matrix that is a copy: `base` seen with the three axes that its two are made of.

    Attributes:
        base: what is copied, dense.
        extents: of the three axes, as the copy has them.
        memory_order: the axes from the outermost in memory to the innermost.
        axis: the axis of the matrix that is two of the three, 0 or 1.
        is_transposed: whether the matmul reads the matrix transposed; `axis` is as it reads it.
    """

    base: relax.Expr
    extents: tuple[int, int, int]
    memory_order: tuple[int, ...]
    axis: int
    is_transposed: bool

    @property
    def parts(self) -> tuple[int, int]:
        """Return the extents that are merged, the outer first."""
        first = self._first
        return self.extents[first], self.extents[first + 1]

    @property
    def _first(self) -> int:
        return self.axis ^ self.is_transposed

    @property
    def batch(self) -> int:
        """Return which of the two parts, 0 or 1, is further apart in memory."""
        place = self.memory_order.index
        return int(place(self._first) > place(self._first + 1))

    def order(self, batch: int) -> list[int]:
        """Return the axes in memory that are the batch, the rows and the columns of matrices."""
        first = self._first
        kept, rest = first + 1 - batch, 2 if first == 0 else 0
        matrix = [kept, rest] if self.axis == 0 else [rest, kept]
        return [self.memory_order.index(axis) for axis in (first + batch, *matrix)]


@attrs.frozen(eq=False)
class _Atoms:
    """A result of a batch: `value` and its axes, in whose order a reader has them."""

    value: relax.Var
    order: tuple[int, ...]


class _Rewriter:
    def __init__(self, ir: tvm.IRModule) -> None:
        self.flow = Dataflow(ir)
        self.values = dict(self.flow.values)
        self.matmuls = {
            variable: found
            for variable, call in self.flow.calls(_MATMUL).items()
            if (found := self._found(call)) is not None
        }

    def run(self) -> tvm.IRModule:
        self.builder = relax.BlockBuilder()
        self.out: list[relax.VarBinding] = []
        self.atoms: dict[relax.Var, _Atoms] = {}
        for binding in self.flow.bindings:
            value = binding.value
            if binding.var in self.matmuls:
                value = self._batched(binding.var, value, *self.matmuls[binding.var])
            elif op_name(value) in (_PERMUTE, _RESHAPE) and value.args[0] in self.atoms:
                value = self._reread(binding.var, value)
            self.out.append(relax.VarBinding(binding.var, value))
        return self.flow.finish(self.out)

    # Search.

    def _found(self, call: relax.Call) -> tuple[_Merged | None, _Merged | None] | None:
        """Return what is merged of a matmul's operands, where a batch is better."""
        shapes = [shape_of(argument) for argument in call.args]
        dtypes = {str(one.ty.dtype) for one in (*call.args, call)}
        if len(dtypes) > 1 or not dtypes <= {"float32", "float64"}:
            return None
        if any(min(shape[-2:]) < _LEAST_EXTENT or math.prod(shape[:-2]) != 1 for shape in shapes):
            return None
        left, right = (self._merged(argument) for argument in call.args)
        summed = [one for one, axis in ((left, 1), (right, 0)) if one and one.axis == axis]
        if summed:
            copied = sum(math.prod(one.extents) for one in summed)
            terms = summed[0].parts[summed[0].batch] * math.prod(shape_of(call))
            if terms > copied or not _is_large(summed[0]):
                return None
            parts = summed[0].parts
            matching = (one if one in summed and one.parts == parts else None
                        for one in (left, right))  # fmt: skip
            left, right = matching
            return left, right
        if left and _is_large(left):
            return left, None
        return (None, right) if right and _is_large(right) else None

    def _merged(self, argument: relax.Expr) -> _Merged | None:
        seen = view_of(argument, self.values)
        copy = self.values.get(seen.base)
        if copy is None or op_name(copy) != _RESHAPE:
            return None
        source = view_of(copy.args[0], self.values)
        if source.base in self.values and self._writes_merged(source.base):
            return None
        axes = [(n, s) for n, s in zip(source.shape, source.strides, strict=True) if n != 1]
        matrix = [n for n in shape_of(copy) if n != 1]
        if len(axes) != 3 or len(matrix) != 2:
            return None
        extents = (axes[0][0], axes[1][0], axes[2][0])
        if matrix[0] == extents[0] * extents[1]:
            axis = 0
        elif matrix[0] == extents[0]:
            axis = 1
        else:
            return None
        is_transposed = seen.strides[-1] != 1
        order = tuple(sorted(range(3), key=lambda axis: -axes[axis][1]))
        return _Merged(source.base, extents, order, axis ^ is_transposed, is_transposed)

    def _writes_merged(self, base: relax.Var) -> bool:
        """Return whether what computes `base` writes the copy itself."""
        name = op_name(self.values[base])
        is_heavy = name == _MATMUL or name.startswith("amp_ir.attention")
        return is_heavy and self.flow.uses[base] == 1

    # Construction.

    def _batched(
        self, variable: relax.Var, call: relax.Call, left: _Merged | None, right: _Merged | None
    ) -> relax.Expr:
        known = left or right
        assert known is not None
        batch, parts = known.batch, known.parts
        is_summed = known.axis == (1 if known is left else 0)
        operands = [
            self._matrices(one, batch, call) if one else
            self._beside(argument, (1 - side, parts, batch) if is_summed else None, call)
            for side, (one, argument) in enumerate(zip((left, right), call.args, strict=True))
        ]  # fmt: skip
        terms = self._emit(relax.op.matmul(*operands, out_dtype=call.attrs.out_dtype), call)
        shape = shape_of(call)
        if is_summed:
            total = relax.op.sum(terms, [0])
            return self._located(relax.op.reshape(self._emit(total, call), shape), call)
        # The axes of the batch in the order of the matrix.
        rows_and_columns = (1, 2)
        at = 0 if known is left else 1
        pair = (0, rows_and_columns[at]) if batch == 0 else (rows_and_columns[at], 0)
        order = (*pair, 2) if at == 0 else (1, *pair)
        self.atoms[variable] = _Atoms(terms, order)
        return self._ordered(self.atoms[variable], shape, call)

    def _matrices(self, one: _Merged, batch: int, call: relax.Call) -> relax.Expr:
        """Return the batch of matrices [batch, rows, columns] that views `one.base`."""
        shape = [one.extents[axis] for axis in one.memory_order]
        order = one.order(batch)
        return self._permuted(self._reshaped(one.base, shape, call), order, call)

    def _beside(
        self, argument: relax.Expr, split: tuple[int, tuple[int, int], int] | None, call: relax.Call
    ) -> relax.Expr:
        """Return the other operand: the matrix, or its summed axis split as `split` says."""
        matrix = shape_of(argument)[-2:]
        if split is None:
            return self._reshaped(argument, matrix, call)
        axis, parts, batch = split
        shape = [*matrix[:axis], *parts, *matrix[axis + 1 :]]
        at = axis + batch
        order = [at, *(k for k in range(3) if k != at)]
        return self._permuted(self._reshaped(argument, shape, call), order, call)

    def _reread(self, variable: relax.Var, call: relax.Call) -> relax.Expr:
        """Return a reader of a batch's result, as it reads the batch itself."""
        known, source = self.atoms[call.args[0]], shape_of(call.args[0])
        extents, shape = shape_of(known.value), shape_of(call)
        if op_name(call) == _RESHAPE:
            order = list(known.order)
        else:
            groups = _groups([extents[axis] for axis in known.order], source)
            if groups is None:
                return call
            order = [known.order[atom] for dim in permutation(call) for atom in groups[dim]]
        if _groups([extents[axis] for axis in order], shape) is None:
            return call
        self.atoms[variable] = _Atoms(known.value, tuple(order))
        return self._ordered(self.atoms[variable], shape, call)

    def _ordered(self, atoms: _Atoms, shape: Sequence[int], call: relax.Call) -> relax.Expr:
        value = self._permuted(atoms.value, list(atoms.order), call)
        return self._reshaped(value, shape, call)

    def _reshaped(self, value: relax.Expr, shape: Sequence[int], call: relax.Call) -> relax.Expr:
        if list(shape_of(value)) == list(shape):
            return value
        return self._emit(relax.op.reshape(value, list(shape)), call)

    def _permuted(self, value: relax.Expr, order: list[int], call: relax.Call) -> relax.Expr:
        if order == sorted(order):
            return value
        return self._emit(relax.op.permute_dims(value, order), call)

    def _located(self, new: relax.Call, call: relax.Call) -> relax.Expr:
        located = relax.Call(new.op, new.args, new.attrs, new.ty_args, call.span)
        return self.builder.normalize(located)

    def _emit(self, new: relax.Call, call: relax.Call) -> relax.Var:
        value = self._located(new, call)
        variable = relax.DataflowVar(f"batched{len(self.out)}", value.ty)
        self.values[variable] = value
        self.out.append(relax.VarBinding(variable, value))
        return variable


def _is_large(one: _Merged) -> bool:
    """Return whether a batch of few, large matrices is what `one` becomes."""
    count, kept = one.parts[one.batch], one.parts[1 - one.batch]
    return count <= _MOST_MATRICES and kept >= _LEAST_EXTENT


def _groups(extents: Sequence[int], shape: Sequence[int]) -> list[list[int]] | None:
    """Return which of the axes of these extents each dimension of `shape` is made of, in order."""
    groups: list[list[int]] = []
    following = 0
    for n in shape:
        group: list[int] = []
        while math.prod(extents[atom] for atom in group) < n and following < len(extents):
            group.append(following)
            following += 1
        if math.prod(extents[atom] for atom in group) != n:
            return None
        groups.append(group)
    return groups
