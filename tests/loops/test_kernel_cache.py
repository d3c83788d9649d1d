# SPDX-License-Identifier: Apache-2.0
"""Groups of the same structure are written once, and the program is as if each had been written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tvm
import tvm_ffi
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tvm import relax, tirx
from tvm.relax import op

from amp_ir.loops.builders import pointwise
from amp_ir.loops.cpu import emit_cpu
from amp_ir.loops.cuda import emit_cuda
from amp_ir.loops.fusion import kernel_cache
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.loops.group import Domain, Group
from amp_ir.loops.ir import Buffer, Constant, Pointwise, TensorSpec
from random_steps import random_step
from small_programs import program

ROWS, COLUMNS = 16, 32
SPEC = TensorSpec((64,), "float32")


def row_of(x: Any, row: int) -> Any:
    return op.strided_slice(x, axes=[0], begin=[row], end=[row + 1])


def summed(e: Any, x: Any) -> Any:
    # A reduction has a kernel of its own, which concat cannot draw in.
    return e(op.sum(e(op.tanh(x)), [1], keepdims=True))


def of_rows(*rows: int) -> tvm.IRModule:
    """A kernel for each of some rows of a matrix, and one for all of them together."""
    return program(
        lambda e, x: e(op.concat([summed(e, e(row_of(x, row))) for row in rows], 0)),
        (ROWS, COLUMNS),
    )


def counting(emitter: Any, written: list[Group]) -> Any:
    """The emitter, which notes what it is asked to write."""

    def emit_group(group: Group, *, strict: bool) -> Any:
        written.append(group)
        return emitter.emit_group(group, strict=strict)

    return SimpleNamespace(
        emit_group=emit_group,
        emit_opaque=emitter.emit_opaque,
        emit_copy=emitter.emit_copy,
    )


def assert_the_same_either_way(ir: tvm.IRModule) -> None:
    """What is remembered makes no difference, on either device."""
    for emitter in (emit_cpu, emit_cuda):
        for strict in (False, True):
            quick = fuse_loops(ir, strict=strict, emitter=emitter)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kernel_cache, "structure_of", lambda _: None)
                slow = fuse_loops(ir, strict=strict, emitter=emitter)
            assert [one.name_hint for one in quick.functions] == [
                one.name_hint for one in slow.functions
            ]
            assert tvm_ffi.structural_equal(quick, slow)


def test_a_group_like_one_before_is_not_written_again():
    written: list[Group] = []
    ir = program(
        lambda e, x, y, z: e(op.concat([summed(e, x), summed(e, y), summed(e, z)], 0)),
        *[(ROWS, COLUMNS)] * 3,
    )
    fused = fuse_loops(ir, emitter=counting(emit_cpu, written))
    assert len(written) == 2  # The sums, and concat.
    calls = [one.value for one in fused["main"].body.blocks[0].bindings]
    names = [one.args[0].name_hint for one in calls if isinstance(one, relax.Call)]
    assert names == ["kernel_0"] * 3 + ["kernel_1"]
    first, second, third = (list(call.args[1].fields) for call in calls[:3])
    assert [first, second, third] == [[one] for one in fused["main"].params]
    assert_the_same_either_way(ir)


@pytest.mark.parametrize("emitter", [emit_cpu, emit_cuda])
def test_a_load_offset_is_part_of_the_structure(emitter):
    written: list[Group] = []
    ir = of_rows(3, 5, 9, 5)
    fuse_loops(ir, emitter=counting(emitter, written))
    assert len(written) == 4  # Rows 3, 5 and 9, and concat.
    assert_the_same_either_way(ir)


UNARY = (op.tanh, op.sigmoid, op.abs, op.negative)
BINARY = (op.subtract, op.multiply, op.maximum)
NUMBERS = (0.0, -0.0, 1.0, -1.0, 0.5, float("inf"), float("nan"))
piece = st.tuples(
    st.integers(0, ROWS - 1),
    st.integers(0, ROWS - 1),
    st.sampled_from(range(len(UNARY))),
    st.sampled_from(range(len(BINARY))),
    st.sampled_from(NUMBERS),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
)


def built(e: Any, x: Any, choice: tuple[Any, ...]) -> Any:
    """A row of sums from two rows, with what tells groups apart: wiring, numbers, ops, dtypes."""
    first, second, unary, binary, number, dtype, turned = choice
    a, b = e(row_of(x, first)), e(row_of(x, second))
    a = e(UNARY[unary](a))
    if dtype != "float32":
        a = e(op.astype(e(op.astype(a, dtype)), "float32"))
    c = e(BINARY[binary](b, a) if turned else BINARY[binary](a, b))
    return e(op.sum(e(op.add(c, relax.const(number, "float32"))), [1], keepdims=True))


# Each compiles kernels.
@settings(max_examples=20)
@given(st.lists(piece, min_size=2, max_size=6))
@example([(1, 2, 0, 0, 0.0, "float32", False), (1, 2, 0, 0, -0.0, "float32", False)])
@example([(1, 2, 0, 0, 0.5, "float32", False), (1, 2, 0, 0, 0.5, "float32", True)])
@example([(1, 1, 0, 0, 0.5, "float32", False), (1, 2, 0, 0, 0.5, "float32", False)])
@example([(1, 0, 0, 0, 0.5, "float32", False), (2, 3, 0, 0, 0.5, "float32", False)])
@example([(k, k + 1, 0, 0, float("nan"), "bfloat16", False) for k in (1, 4, 7)])
def test_groups_that_differ_are_not_confused(pieces):
    def body(e: Any, x: Any) -> Any:
        return e(op.concat([built(e, x, one) for one in pieces], 0))

    assert_the_same_either_way(program(body, (ROWS, COLUMNS)))


# Each compiles kernels.
@settings(max_examples=20)
@given(st.lists(st.integers(0, 10**6), min_size=3, max_size=12))
def test_a_random_step_twice_over_is_the_same_either_way(draws):
    assert_the_same_either_way(random_step(draws * 2))


def group_of(value: Pointwise, *inputs: Buffer) -> Group:
    """A kernel that stores one value."""
    return Group(
        0,
        Domain(value.shape, None),
        full=[value],
        inputs={id(one): one for one in inputs},
        stored=[value],
    )


def tokens_of(body: Any, *inputs: Buffer) -> Any:
    group = group_of(pointwise(SPEC.shape, SPEC.dtype, body), *inputs)
    found = kernel_cache.structure_of(group)
    # The group is kept, as by who remembers: ids of what its bodies close over are tokens.
    return None if found is None else (found, group)


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), (0, False), (2.0, 3.0), ((1,), (True,))]
)
def test_equal_numbers_of_other_kinds_are_told_apart(one, other):
    x = Buffer(SPEC)

    def tokens(number: Any) -> Any:
        return tokens_of(lambda i: x[i] if number is not None else None, x)[0]

    assert tokens(one) == tokens(one)
    assert tokens(one) != tokens(other)


def test_a_constant_is_told_apart_by_its_number_and_dtype():
    x = Buffer(SPEC)

    def tokens(number: Any, dtype: str) -> Any:
        constant = Constant(TensorSpec((), dtype), number=number)
        return tokens_of(lambda i: x[i] * constant[()], x)[0]

    found = [tokens(0.0, "float32"), tokens(-0.0, "float32"), tokens(0.0, "bfloat16")]
    assert len(set(found)) == 3


def test_what_closes_over_something_unknown_is_written_anew():
    x = Buffer(SPEC)

    def tokens(seen: Any) -> Any:
        return tokens_of(lambda i: x[i] if seen is not None else None, x)

    assert tokens((2.0, "two", {"two": [2]})) is not None
    for unknown in (object(), tirx.Var("n", "float32"), SimpleNamespace(n=2)):
        assert tokens(unknown) is None
