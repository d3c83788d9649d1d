# SPDX-License-Identifier: Apache-2.0
"""Lowering of the random ops: each element computes the bits of `dialect/random.py`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

from amp_ir.dialect.random import (
    GOLDEN,
    KEY_STARTS,
    MULTIPLIERS,
    SECOND_DRAW,
    SHIFTS,
    survivor_scale,
)
from amp_ir.loops import math as m
from amp_ir.loops.body_context import let
from amp_ir.loops.builders import flatten, pointwise
from amp_ir.loops.ir import Value, compute_dtype
from amp_ir.loops.lowering_registry import Lowering, lowers


def _word(number: int) -> Any:
    return tirx.const(number, "uint32")


def _wrap(operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Return a sum or product modulo 2^32.

    TVM (0.27) marks uint32 arithmetic for LLVM as free of overflow, so it must not overflow: the
    operation runs in 64 bits, and LLVM narrows it to 32 again.
    """
    return tirx.Cast("uint32", operation(tirx.Cast("uint64", a), tirx.Cast("uint64", b)))


def _mix(x: Any) -> Any:
    for shift, multiplier in zip(SHIFTS, (*MULTIPLIERS, None), strict=True):
        x = let(tirx.bitwise_xor(x, tirx.shift_right(x, _word(shift))))
        if multiplier is not None:
            x = let(_wrap(operator.mul, x, _word(multiplier)))
    return x


def keys_of(random_state: Value, index: int) -> Value:
    """Return uint32[2]: the two keys of a random op, from (seed, step, index)."""

    def body(which: Any) -> Any:
        words = []
        for k in range(2):
            state = random_state[(tirx.const(k, "int32"),)]
            high = tirx.shift_right(state, tirx.const(32, "int64"))
            words += [tirx.Cast("uint32", state), tirx.Cast("uint32", high)]
        first = which == tirx.const(0, "int32")
        key = tirx.Select(first, _word(KEY_STARTS[0]), _word(KEY_STARTS[1]))
        for word in (*words, _index_word(random_state, index)):
            key = _mix(let(tirx.bitwise_xor(key, word)))
            key = let(_wrap(operator.add, key, _word(GOLDEN)))
        return key

    return pointwise((2,), "uint32", body)


def _index_word(random_state: Value, index: int) -> Any:
    """Return the index; in a loop's body, the state says what its step adds."""
    if random_state.shape[0] == 2:
        return _word(index)
    added = random_state[(tirx.const(2, "int32"),)]
    return tirx.Cast("uint32", added + tirx.const(index, "int64"))


def _bits(keys: Value, flat: Any, draw: int = 0) -> Any:
    first, second = (keys[(tirx.const(k, "int32"),)] for k in range(2))
    if draw:
        first = tirx.bitwise_xor(first, _word(SECOND_DRAW))
    element = _word(flat) if isinstance(flat, int) else tirx.Cast("uint32", flat)
    mixed = _mix(let(_wrap(operator.add, element, first)))
    return _mix(let(tirx.bitwise_xor(mixed, second)))


def _unit(bits: Any, add: int = 0) -> Any:
    """Return the upper 24 bits (plus `add`) as a multiple of 2^-24; exact in float32."""
    # Through int32: a vector of uint32 has no conversion instruction to float32 before AVX-512.
    top = tirx.Cast("int32", tirx.shift_right(bits, _word(8))) + tirx.const(add, "int32")
    return tirx.Cast("float32", top) * m.constant(2.0**-24)


def uniform_element(keys: Value, index: Sequence[Any], shape: Sequence[int]) -> Any:
    """Return the uniform number in [0, 1) of one element of a random tensor of `shape`."""
    return let(_unit(_bits(keys, flatten(tuple(index), shape))))


@lowers("amp_ir.random_uniform")
def random_uniform(op: Lowering, random_state: Value, *, shape: Sequence[int], index: int) -> Value:
    """Compute one hash per element."""
    keys = keys_of(random_state, index)
    return pointwise(shape, "float32", lambda *i: uniform_element(keys, i, shape))


@lowers("amp_ir.random_normal")
def random_normal(op: Lowering, random_state: Value, *, shape: Sequence[int], index: int) -> Value:
    """Compute two hashes per element."""
    keys = keys_of(random_state, index)

    def body(*i: Any) -> Any:
        flat = flatten(i, shape)
        radius = _unit(_bits(keys, flat), add=1)
        angle = _unit(_bits(keys, flat, draw=1)) * m.constant(2.0 * math.pi)
        return m.sqrt(m.constant(-2.0) * m.log(radius)) * tirx.cos(angle)

    return pointwise(shape, "float32", body)


@lowers("amp_ir.dropout")
def dropout(
    op: Lowering, x: Value, random_state: Value, *, p: float, index: int
) -> tuple[Value, Value]:
    """Compute the mask, and x where it is true."""
    keys = keys_of(random_state, index)
    scale = m.constant(survivor_scale(p), compute_dtype(x.dtype))
    mask = pointwise(x.shape, "bool", lambda *i: uniform_element(keys, i, x.shape) >= m.constant(p))
    zero = m.constant(0.0, compute_dtype(x.dtype))
    y = pointwise(x.shape, op.results[0].dtype, lambda *i: m.select(mask[i], x[i] * scale, zero))
    return y, mask


@lowers("amp_ir.dropout_backward")
def dropout_backward(op: Lowering, grad: Value, mask: Value, *, scale: float) -> Value:
    """Return grad where the mask is true."""
    dtype = compute_dtype(grad.dtype)
    factor, zero = m.constant(scale, dtype), m.constant(0.0, dtype)
    return pointwise(
        grad.shape, op.results[0].dtype, lambda *i: m.select(mask[i], grad[i] * factor, zero)
    )
