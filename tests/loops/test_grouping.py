# SPDX-License-Identifier: Apache-2.0
"""Which values share a kernel and which are stored, where casts, reshapes and siblings meet."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.relax import op

from amp_ir.dialect.registry import call_op
from amp_ir.errors import UnsupportedOpError
from amp_ir.loops.fusion.fuse import fuse_loops, group_values
from amp_ir.loops.fusion.kernel_assignment import assign_kernels
from amp_ir.loops.fusion.unit_order import UnitOrder
from small_programs import program

KERNEL = "relax.call_tir"
LIBRARY = "relax.call_dps_packed"


def cast(x, dtype):
    return call_op("amp_ir.cast", [x], dtype=dtype)


def library(e, *arguments, shape, dtype="float32"):
    """A call that fusion must leave alone: it reads and writes memory."""
    ty = relax.TensorType(shape, dtype)
    call = relax.call_dps_packed("tests.opaque", list(arguments), out_ty=ty)
    return e(call)


def calls(ir, kind, **options):
    fused = fuse_loops(ir, **options)
    values = [binding.value for binding in fused["main"].body.blocks[0].bindings]
    return [v for v in values if isinstance(v, relax.Call) and v.op.name == kind]


def stored(ir, **options):
    """Shape and dtype of everything that kernels write, in order."""
    return [
        (tuple(int(n) for n in ty.shape), str(ty.dtype))
        for call in calls(ir, KERNEL, **options)
        for ty in (call.ty.fields if isinstance(call.ty, relax.TupleType) else [call.ty])
    ]


@pytest.mark.parametrize("is_cuda", [False, True])
def test_readers_of_two_low_tensors_read_them_again_where_arithmetic_is_free(is_cuda):
    """As much as the float32 value that they would read, which nobody writes then."""

    def build(e, x):
        low = [library(e, x, shape=(64, 32), dtype="bfloat16") for _ in range(2)]
        total = e(op.add(*[e(cast(one, "float32")) for one in low]))
        sums = e(op.sum(total, [0]))
        return e(op.multiply(total, sums))

    ir = program(build, (64, 32))
    written = stored(ir, arithmetic_is_free=is_cuda)
    assert written == [((64, 32), "float32")] * (not is_cuda) + [
        ((1, 32), "float32"),
        ((64, 32), "float32"),
    ]


def test_an_integer_is_stored_before_it_is_widened():
    def build(e, x):
        places = e(op.astype(e(op.add(x, library(e, x, shape=(64, 32)))), "int32"))
        wide = e(op.astype(places, "int64"))
        of_library = library(e, e(op.sum(wide, [0])), shape=(64, 32), dtype="int64")
        return e(op.add(of_library, wide))

    written = stored(program(build, (64, 32)))
    assert sorted(written) == [((1, 32), "int64"), ((64, 32), "int32"), ((64, 32), "int64")]


def test_what_other_kernels_read_widened_is_stored_narrow():
    def build(e, x):
        low = e(cast(e(op.tanh(x)), "bfloat16"))
        of_library = library(e, low, shape=(64, 32))
        # The sum over rows waits for the library and cannot share the first kernel.
        wide = e(cast(low, "float32"))
        return e(op.sum(e(op.add(wide, of_library)), [0]))

    ir = program(build, (64, 32))
    assert ((64, 32), "bfloat16") in stored(ir)
    assert ((64, 32), "float32") not in stored(ir)


def test_a_cast_of_a_library_result_costs_no_kernel():
    def build(e, x):
        low = library(e, x, shape=(64, 32), dtype="bfloat16")
        wide = e(cast(low, "float32"))
        return e(op.concat([wide, e(op.negative(wide))], 0))

    ir = program(build, (64, 32))
    assert len(calls(ir, KERNEL)) == 1
    assert not any(place.only_casts for place in assign_kernels(ir).values())


def test_a_hand_written_kernel_reads_the_narrow_value():
    def build(e, x, ids):
        low = library(e, x, shape=(6, 16), dtype="bfloat16")
        wide = e(cast(low, "float32"))
        return e(call_op("amp_ir.embedding_backward", [wide, ids], num_embeddings=9))

    ir = program(build, (6, 16), (6,), dtypes=["float32", "int64"])
    assert len(calls(ir, KERNEL)) == 1


def test_sums_that_read_the_same_result_of_a_library_share_a_kernel():
    def build(e, x):
        y = library(e, x, shape=(64, 32))
        return e(relax.Tuple([e(op.sum(y, [1])), e(op.max(y, [1])), e(op.sum(y, [0]))]))

    assert len(calls(program(build, (64, 32)), KERNEL)) == 1


def test_arithmetic_is_not_drawn_into_an_early_kernel_by_what_it_reads():
    """It would have to wait in memory for its reader."""

    def build(e, x):
        y = library(e, x, shape=(64, 32))
        early = e(op.tanh(y))
        between = library(e, early, shape=(64, 32))
        late = e(op.multiply(e(op.exp(y)), between))
        return e(relax.Tuple([early, late]))

    assert len(calls(program(build, (64, 32)), KERNEL)) == 2


def test_a_rounding_after_a_reshape_stays_in_a_kernel_with_sums_over_outer_dimensions():
    """The gradient of batch normalization: [n, c, s] inside, [n, c, h, w] outside."""

    def build(e, x):
        planes = e(op.reshape(x, (4, 8, 36)))
        mean = e(op.mean(planes, [0, 2], keepdims=True))
        centered = e(op.subtract(planes, mean))
        low = e(cast(e(op.reshape(centered, (4, 8, 6, 6))), "bfloat16"))
        return library(e, low, shape=(4, 8, 6, 6))

    ir = program(build, (4, 8, 6, 6))
    assert len(calls(ir, KERNEL)) == 1
    assert ((4, 8, 6, 6), "bfloat16") in stored(ir)


def test_a_parameter_that_only_a_library_reads_low_is_a_cast_alone_and_a_fill_is_none():
    def build(e, x):
        low = e(cast(x, "bfloat16"))
        zeros = e(op.full((64, 32), relax.const(0.0, "float32"), "float32"))
        filled = e(cast(zeros, "bfloat16"))
        return library(e, low, filled, shape=(64, 32))

    places = assign_kernels(program(build, (64, 32)))
    assert [place.only_casts for place in places.values()].count(True) == 1


def test_grouping_writes_nothing():
    ir = program(lambda e, x: e(op.tanh(x)), (4, 4))
    before = ir.script()
    group_values(ir)
    assert isinstance(ir, tvm.IRModule)
    assert ir.script() == before


def test_what_comes_before_a_unit_late_comes_before_all_that_wait_for_it():
    order = UnitOrder()
    first = order.add(set())
    middle = order.add({first})
    last = order.add({middle})
    late = order.add(set())
    order.add_before(first, {late})
    assert order.waits(last, late)
    assert not order.waits(late, last)


def test_a_merged_unit_waits_for_what_both_wait_for_and_passes_on_what_comes_later():
    order = UnitOrder()
    source = order.add(set())
    gone, into = order.add({source}), order.add(set())
    reader = order.add({gone})
    assert order.can_merge(gone, into)
    order.merge(gone, into)
    assert order.waits(into, source)
    assert order.waits(reader, into)
    late = order.add(set())
    order.add_before(source, {late})
    assert order.waits(into, late)
    assert order.waits(reader, late)
    # `reader` stands between: one unit cannot do the work of `into` and of what waits for it.
    assert not order.can_merge(into, order.add({reader}))


def test_ops_without_a_lowering_are_listed_together():
    def build(e, x, y):
        small = e(op.image.resize2d(x, (2, 2)))
        return [
            e(op.image.resize2d(small, (8, 8))),
            e(op.linear_algebra.einsum([y, y], "ij,ij->i")),
        ]

    with pytest.raises(UnsupportedOpError) as caught:
        fuse_loops(program(build, (1, 2, 4, 4), (4, 8)))
    assert str(caught.value) == (
        "no kernel can be made for: relax.einsum (1 call, first: step (forward)); "
        "relax.image.resize2d (2 calls, first: step (forward)). Register a lowering with "
        "@lowers(...) in amp_ir/loops/."
    )
