# SPDX-License-Identifier: Apache-2.0
"""Pad what a GPU's matmuls read and write, so that rows begin at 16 bytes.

Tensor cores are fed 16 bytes at a time. Where a row of a matrix is not a multiple of that, as with
a vocabulary of 50257 or 30522, cuBLAS has only kernels of older designs: on an H200 they reach 96
TFLOP/s where rows begin at 2 bytes and 215 at 4, and the aligned ones 740 (8192 x 768 x 50257 in
bfloat16: 6.6 and 0.86 ms).

In low precision the padding is written by kernels that write the matrix anyway: the cast of a
weight, the gradient of a loss. Results are computed padded, and read as slices, which are index
arithmetic. Under TF32 nothing writes a weight anew, so the padded one is a copy. Float32 without
TF32 is multiplied by other units, at the same rate wherever rows begin: it is left alone.
"""

from __future__ import annotations

import math
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.strided_view import permutation, view_of
from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.rewrites.padded_sources import (
    CASTS,
    MOVES,
    TABLE,
    TRANSPOSE,
    VIEWS,
    Shape,
    Wanted,
    sources_of,
)
from amp_ir.rewrites.write_padded import PaddedWriter

_LOW_DTYPES = ("bfloat16", "float16")
# FLOP a second of an H200 by the elements at whose multiples rows begin, up to those in 16 bytes;
# _ADDED_UP is for odd rows along which products are added up. Measured, but for 4 of a low dtype.
_ADDED_UP = 0
_RATES = {
    "low": {_ADDED_UP: 1.0e14, 1: 1.0e14, 2: 2.2e14, 4: 3.5e14, 8: 7.0e14},
    # cuBLASLt 13.0 has no kernel of tensor cores for 512 x 50257 x 768, odd rows added up: 8.2 ms.
    "tf32": {_ADDED_UP: 4.8e12, 1: 1.1e14, 2: 1.1e14, 4: 4.0e14},
}
# Of kernels that copy: bytes a second, and seconds that each takes at least.
_COPIED_A_SECOND, _LAUNCH = 4.0e12, 2.0e-6
# How many times what it costs a padding has to save: other GPUs have other rates.
_MARGIN = 2.0
# Ops whose arguments are in memory of their own, by how their names begin.
_IN_MEMORY = (
    "relax.matmul", "relax.call", "amp_ir.conv", "amp_ir.attention", "amp_ir.external",
    "amp_ir.all_", "amp_ir.reduce_scatter",
)  # fmt: skip
# Readers that read a padded value as well as its own elements, or that are views.
_READ_PADDED = ("relax.sum", "amp_ir.nll_loss", *MOVES)


def align_matmuls(ir: tvm.IRModule, *, allow_tf32: bool = False) -> tvm.IRModule:
    """Pad the dims of matmuls along which memory is not a multiple of 16 bytes.

    Before:  low = cast(w); y = matmul(x, permute_dims(low)); p = log_softmax(cast(y))
             g = cast(log_softmax_backward(nll_loss_backward(d, labels, total), p))
             dx = matmul(g, low); dw = matmul(permute_dims(g), x)
    After:   low = cast(concat([w, zeros]))
             y = matmul(x, permute_dims(low)); p = log_softmax(where(is_own, cast(y), -inf))
             g = cast(where(is_own, log_softmax_backward(...), 0))
             dx = matmul(g, low); dw = strided_slice(matmul(permute_dims(g), x))

    Requires: one function `main`, one dataflow block, static shapes, all in float32 or narrower
              where matmuls are; indices are checked by now.
    Ensures:  no padded element reaches a result: it is 0 where a matmul adds it up, -inf where a
              softmax does, and not read elsewhere. Sums over padded rows have another order. What
              nothing pads on the way is read through a slice of the padded value. A matmul is
              padded where that saves twice what it costs, as `_Aligner` counts it.
    """
    aligner = _Aligner(ir, allow_tf32=allow_tf32)
    aligner.choose()
    if not aligner.matmuls:
        return ir
    return PaddedWriter(aligner.flow, aligner.matmuls, aligner.wanted).write()


@attrs.define
class _Search:
    """What the padding of one matmul asks of other values, and the seconds that it costs."""

    wanted: dict[relax.Var, Wanted] = attrs.field(factory=dict)
    seconds: float = 0.0


class _Aligner:
    """Chooses matmuls and the values to be padded for them.

    Chosen is by counted time: a matmul saves its FLOP at the rate of unaligned kernels less those
    at the aligned rate. It costs a copy where nothing writes an operand anew, and where a value
    that is only computed inside of a kernel has to be stored, because kernels for padded and for
    plain elements differ.
    """

    def __init__(self, ir: tvm.IRModule, *, allow_tf32: bool) -> None:
        self.flow = Dataflow(ir)
        self.allow_tf32 = allow_tf32
        self.values = self.flow.values
        self.only_transpose = self.flow.only_readers(TRANSPOSE)
        self.wanted: dict[relax.Var, Wanted] = {}
        # The dims m, k, n of each padded matmul.
        self.matmuls: dict[relax.Var, Shape] = {}

    def choose(self) -> None:
        """Choose matmuls until none follows from those that are chosen."""
        calls = self.flow.calls("relax.matmul")
        left = {one: call for one, call in calls.items() if self._rates_of(call)}
        chosen = 1
        while chosen:
            chosen = 0
            for variable, call in list(left.items()):
                if self._choose_one(variable, call):
                    chosen += 1
                    del left[variable]
        for matmul in self.matmuls:
            if (wanted := self.wanted.get(matmul)) is not None:
                shape = wanted.shape
                for one in self._finishes(matmul):
                    shape = shape[::-1] if op_name(self.values[one]) == TRANSPOSE else shape
                    parts = [one, *filter(self._is_table, self.values[one].args)]
                    if any(self._sources(each, Wanted(shape, False)) is None for each in parts):
                        break
                    for each in parts:
                        self._want(self.wanted, each, Wanted(shape, False))

    def _rates_of(self, call: relax.Call) -> dict[int, float]:
        """Return the rates of a matmul by the alignment of its rows; none of one left alone."""
        dtypes = {str(one.ty.dtype) for one in call.args}
        if len(dtypes) != 1 or any(len(shape_of(one)) != 2 for one in call.args):
            return {}
        (dtype,) = dtypes
        if dtype in _LOW_DTYPES:
            return _RATES["low"]
        return _RATES["tf32"] if dtype == "float32" and self.allow_tf32 else {}

    def _dims_of(self, variable: relax.Var, call: relax.Call) -> tuple[Shape, Shape]:
        """Return m, k and n of a matmul, and those aligned along which its memory is dense."""
        alignment = max(self._rates_of(call))
        own = (*shape_of(call.args[0]), shape_of(call)[1])
        along = set()
        for position, argument in enumerate(call.args):
            strides = view_of(argument, self.values).strides
            along.add(position + (1 if strides[1] == 1 else 0))
        transpose = self.only_transpose.get(variable)
        along.add(2 if transpose is None else 0)
        aligned = (_aligned(n, alignment) if k in along else n for k, n in enumerate(own))
        return own, tuple(aligned)

    def _shape_in_memory(self, operand: relax.Expr) -> Shape:
        """Return the shape that an operand has by what is wanted of the value that it views."""
        views, base = [], operand
        while base not in self.wanted and self._is_view(base):
            views.append(base)
            base = self.values[base].args[0]
        shape = self.wanted[base].shape if base in self.wanted else shape_of(base)
        for view in reversed(views):
            call = self.values[view]
            source = call.args[0]
            if op_name(call) == TRANSPOSE:
                shape = tuple(shape[d] for d in permutation(call))
            elif shape == shape_of(source):
                shape = shape_of(view)
            elif shape[:-1] == shape_of(source)[:-1] and shape_of(source)[-1] == shape_of(view)[-1]:
                shape = (*shape_of(view)[:-1], shape[-1])
            else:
                return shape_of(operand)
        return shape

    def _choose_one(self, variable: relax.Var, call: relax.Call) -> bool:
        own, aligned = self._dims_of(variable, call)
        stored = [self._shape_in_memory(one) for one in call.args]
        dims = zip(aligned, (*stored[0], 0), (0, *stored[1]), strict=True)
        m, k, n = padded = tuple(max(each) for each in dims)
        if padded == own:
            return False
        search = _Search()
        for argument, shape in zip(call.args, ((m, k), (k, n)), strict=True):
            self._search(argument, Wanted(shape, k != own[1]), search)
        if shape_of(call) != (m, n):
            search.seconds += self._seconds_of_result(variable)
        rates = self._rates_of(call)
        best = max(rates)
        unaligned = [math.gcd(n, best) for n, p in zip(own, aligned, strict=True) if n != p]
        is_odd_sum = own[1] != aligned[1] and own[1] % 2
        now = _ADDED_UP if is_odd_sum else min(unaligned, default=best)
        flop = 2.0 * math.prod(own)
        saved = flop / rates[now] - flop / rates[best]
        for one, in_memory in zip(call.args, stored, strict=True):
            # Unpadded it would be a copy.
            saved += 0.0 if in_memory == shape_of(one) else _seconds_to_copy(one)
        if saved < _MARGIN * (search.seconds + _LAUNCH):
            return False
        for one, wanted in search.wanted.items():
            self._want(self.wanted, one, wanted)
        self.matmuls[variable] = padded
        if shape_of(call) != (m, n):
            self._want(self.wanted, variable, Wanted((m, n), False))
        return True

    @staticmethod
    def _want(known: dict[relax.Var, Wanted], one: relax.Var, wanted: Wanted) -> bool:
        """Note what is wanted of a value beside what is known; return whether that is more."""
        before = known.get(one)
        if before is None:
            known[one] = wanted
            return True
        shape = tuple(map(max, before.shape, wanted.shape))
        merged = Wanted(shape, before.is_zero or wanted.is_zero)
        known[one] = merged
        return merged != before

    def _search(self, expr: relax.Expr, wanted: Wanted, search: _Search) -> None:
        """Find the values that are padded so that `expr` is; add what that costs."""
        stack = [(expr, wanted, True)]
        while stack:
            one, wanted, is_operand = stack.pop()
            if wanted.shape == shape_of(one) or self._is_known(one, wanted):
                continue
            sources = self._sources(one, wanted)
            if sources is None:
                search.seconds += self._seconds_of_leaf(one, is_operand)
            elif self._want(search.wanted, one, wanted):
                views = self._is_view(one)
                stack += [(source, each, is_operand and views) for source, each in sources]
                search.seconds += self._seconds_of_readers(one, search)

    def _is_known(self, expr: relax.Expr, wanted: Wanted) -> bool:
        known = self.wanted.get(expr) if isinstance(expr, relax.Var) else None
        return known is not None and known.shape == wanted.shape and known.is_zero >= wanted.is_zero

    def _is_view(self, variable: relax.Expr) -> bool:
        return op_name(self.values.get(variable)) in VIEWS

    def _seconds_of_leaf(self, expr: relax.Expr, is_operand: bool) -> float:
        """Return the seconds for the padding of a value that nothing computes padded."""
        if is_operand:
            return _seconds_to_copy(expr)
        # A kernel reads it in any case, unless it is computed inside of that kernel.
        is_stored = expr not in self.values or op_name(self.values[expr]) == "relax.matmul"
        return 0.0 if is_stored else _seconds_to_copy(expr)

    def _seconds_of_readers(self, variable: relax.Expr, search: _Search) -> float:
        """Return the seconds for storing a value for readers of its own, unpadded elements."""
        for reader in self.flow.readers.get(variable, ()):
            is_padded = reader in search.wanted or reader in self.wanted or reader in self.matmuls
            call = self.values[reader]
            is_matmul = op_name(call) == "relax.matmul" and self._rates_of(call)
            if not (is_padded or is_matmul or op_name(call) in _READ_PADDED):
                return _seconds_to_copy(variable)
        return 0.0

    def _seconds_of_result(self, matmul: relax.Var) -> float:
        """Return the seconds for a copy of a padded result without its padding, if one is needed.

        Kernels read a slice in place; libraries and the user need it in memory of its own.
        """
        stack, seen = [matmul, *self._finishes(matmul)], set()
        while stack:
            one = stack.pop()
            readers = self.flow.readers.get(one, [])
            calls = {reader: self.values[reader] for reader in readers}
            if self.flow.uses[one] > len(readers) or any(map(_is_library_call, calls.values())):
                return _seconds_to_copy(one)
            seen.add(one)
            views = [reader for reader, call in calls.items() if op_name(call) in VIEWS]
            stack += [view for view in views if view not in seen]
        return 0.0

    def _sources(self, expr: relax.Expr, wanted: Wanted) -> list[tuple[Any, Wanted]] | None:
        """Return what has to be padded, and how, for `expr` to be; None: nothing pads it."""
        call = self.values.get(expr) if isinstance(expr, relax.Var) else None
        if not isinstance(call, relax.Call):
            return None
        if expr in self.matmuls:
            m, _, n = self.matmuls[expr]
            return [] if wanted.shape == (m, n) and not wanted.is_zero else None
        return sources_of(call, wanted)

    def _finishes(self, matmul: relax.Var) -> list[relax.Var]:
        """Return what decides how the result's memory is written: a transpose, sums and casts.

        The sums are with a bias, and with the other gradient of a table that is also looked up, of
        which `fuse_loops` adds the rows to the result in place.
        """
        found: list[relax.Var] = []
        variable = matmul
        while self.flow.uses[variable] == 1 and self.flow.readers.get(variable):
            (reader,) = self.flow.readers[variable]
            if not self._is_finish(self.values[reader], variable):
                break
            found.append(variable := reader)
        return found

    def _is_finish(self, call: Any, variable: relax.Var) -> bool:
        if op_name(call) in (*CASTS, TRANSPOSE):
            return True
        others = [one for one in getattr(call, "args", ()) if not one.same_as(variable)]
        if op_name(call) != "relax.add" or len(others) != 1:
            return False
        return len(shape_of(others[0])) == 1 or self._is_table(others[0])

    def _is_table(self, expr: relax.Expr) -> bool:
        """Return whether a value is the gradient of a table that one sum reads."""
        is_gradient = isinstance(expr, relax.Var) and op_name(self.values.get(expr)) == TABLE
        return is_gradient and self.flow.uses[expr] == 1


def _aligned(extent: int, alignment: int) -> int:
    # What is 1 may be there once for many.
    return -(-extent // alignment) * alignment if extent > 1 else 1


def _is_library_call(call: relax.Expr) -> bool:
    """Return whether an op reads its arguments from memory of their own."""
    name = op_name(call)
    return not name or name.startswith(_IN_MEMORY)


def _seconds_to_copy(expr: relax.Expr) -> float:
    nbytes = math.prod(shape_of(expr)) * dtype_nbytes(str(expr.ty.dtype))
    return 2.0 * nbytes / _COPIED_A_SECOND + _LAUNCH
