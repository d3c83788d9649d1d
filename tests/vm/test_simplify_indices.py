# SPDX-License-Identifier: Apache-2.0
"""Indices of kernels: fewer divisions, the same elements."""

from __future__ import annotations

import itertools
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from amp_ir.loops.builders import flatten, unflatten
from amp_ir.vm.simplify_indices import simplify_indices


def copy_of(index: Any, loops: dict[tirx.Var, int], size: int, value: Any = None) -> tirx.PrimFunc:
    """Return a kernel that stores `value`, by default the source's element, at `index`."""
    source = tirx.decl_buffer((size,), "float32", "x")
    target = tirx.decl_buffer((size,), "float32", "y")
    element = tirx.BufferLoad(source, [index]) if value is None else value(source)
    body: Any = tirx.BufferStore(target, element, [index])
    for variable, extent in reversed(loops.items()):
        body = tirx.For(variable, 0, extent, tirx.ForKind.SERIAL, body)
    return tirx.PrimFunc([source, target], body)


def stored(kernel: tirx.PrimFunc) -> tirx.BufferStore:
    """Return the innermost statement of a kernel."""
    body = kernel.body
    while isinstance(body, tirx.For):
        body = body.body
    return body


def values_of(index: Any, loops: dict[tirx.Var, int]) -> list[int]:
    """Return the index for all values of the loop variables; TVM prints it as Python."""
    names = [variable.name for variable in loops]
    code = compile(str(index), "index", "eval")
    points = itertools.product(*(range(extent) for extent in loops.values()))
    return [eval(code, dict(zip(names, point, strict=True))) for point in points]


def test_a_position_taken_apart_and_put_together_is_itself():
    row, lane = tirx.Var("row", "int32"), tirx.Var("lane", "int32")
    loops = {row: 1568, lane: 64}
    seen = flatten(unflatten(row * 64 + lane, (2, 28, 28, 64)), (2, 28, 28, 64))
    kernel = copy_of(seen, loops, 1568 * 64)
    assert "//" in str(stored(kernel).indices[0])
    result = stored(simplify_indices(kernel))
    assert str(result.indices[0]) == str(result.value.indices[0]) == "row * 64 + lane"


def test_flipped_positions_stay_what_they_are():
    # FlattenBuffer of TVM 0.27 makes 4 - i of it.
    i = tirx.Var("i", "int32")
    index = tirx.floordiv(5 - i, 2) * 2 + tirx.floormod(5 - i, 2)
    kernel = simplify_indices(copy_of(index, {i: 6}, 6))
    assert values_of(stored(kernel).indices[0], {i: 6}) == [5, 4, 3, 2, 1, 0]


def test_values_stay_as_they_are_written():
    i = tirx.Var("i", "int32")

    def difference(source: Any) -> Any:
        element = tirx.BufferLoad(source, [tirx.floordiv(i * 4, 4)])
        return element - element

    value = stored(simplify_indices(copy_of(i, {i: 8}, 8, difference))).value
    assert str(value) == "x[i] - x[i]"


def test_nothing_is_known_of_a_variable_of_two_loops():
    i = tirx.Var("i", "int32")
    short, long = (copy_of(tirx.floormod(i, 4), {i: n}, 16) for n in (4, 16))
    both = short.with_body(tirx.SeqStmt([short.body, long.body]))
    simplified = simplify_indices(both)
    assert [str(one.body.indices[0]) for one in simplified.body] == ["i % 4", "i % 4"]


@st.composite
def chains(draw: st.DrawFn) -> tuple[Any, dict[tirx.Var, int], int]:
    """Draw an index that goes through reshapes, flips, transposes and slices."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    loops = {tirx.Var(f"i{d}", "int32"): n for d, n in enumerate(shape)}
    index: list[Any] = list(loops)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["reshape", "flip", "transpose", "slice"]))
        d = draw(st.integers(0, len(shape) - 1))
        if kind == "reshape":
            size = math.prod(shape)
            first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            flat, shape = flatten(index, shape), [first, size // first]
            index = list(unflatten(flat, shape))
        elif kind == "flip":
            index[d] = shape[d] - 1 - index[d]
        elif kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            index, shape = [index[k] for k in order], [shape[k] for k in order]
        else:
            before, step = draw(st.integers(0, 2)), draw(st.integers(1, 2))
            index[d], shape[d] = index[d] * step + before, before + step * shape[d]
    return flatten(index, shape), loops, math.prod(shape)


@given(chains())
def test_every_chain_of_views_reads_the_same_elements(chain):
    index, loops, size = chain
    if isinstance(index, int):
        return
    result = stored(simplify_indices(copy_of(index, loops, size)))
    expected = values_of(index, loops)
    assert values_of(result.indices[0], loops) == expected
    assert values_of(result.value.indices[0], loops) == expected
