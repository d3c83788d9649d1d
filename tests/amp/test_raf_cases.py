# SPDX-License-Identifier: Apache-2.0
"""The cast counts of RAF's own AutoCast tests, and ours with the reason where they differ.

A count alone says little here: a cast that fuses into a kernel is free, so the number of casts that
are kernels of their own (`alone`) is stated too. RAF's outputs are float16, hence `out_dtype`.
"""

from __future__ import annotations

import pytest
from tvm.relax import op

from amp_ir.amp.autocast import autocast, plan_of
from amp_ir.amp.custom_type_hint import CustomTypeHint
from amp_ir.amp.hints import PrimType
from amp_ir.rewrites.fold_casts import fold_casts
from small_programs import W, X, calls, dtypes_of, program

IMAGE, KERNEL, BIAS = (1, 4, 8, 8), (4, 4, 3, 3), (4, 1, 1)


def counts(mod, out_dtype="float16"):
    """(casts in the folded module, casts that are kernels of their own)."""
    plan = plan_of(mod, out_dtype=out_dtype)
    folded = fold_casts(autocast(mod, out_dtype=out_dtype))
    casts = len(calls(folded, "amp_ir.cast")) + len(calls(folded, "relax.astype"))
    return casts, sum(cast.is_alone for cast in plan.casts)


def conv_bias(e, x, w, b):
    return e(op.add(e(op.nn.conv2d(x, w)), b))


def never(args, ret_type, amp_dtype):
    """Always float32."""
    return [PrimType("float32"), PrimType("float32")]


def test_basic():
    """RAF: 3 (x, w, bias). Ours: 4, and no bias is rounded: it is added in float32 registers."""
    mod = program(conv_bias, IMAGE, KERNEL, BIAS)
    assert counts(mod) == (4, 2)
    with CustomTypeHint({"relax.add": never}):
        # RAF: 3 (x, w, conv -> float32). Ours: 2, the convolution writes float32 itself.
        assert counts(mod, out_dtype=None) == (2, 2)


@pytest.mark.parametrize(("out_dtype", "expected"), [("float16", 2), ("float32", 3)])
def test_tuple_and_output_dtype(out_dtype, expected):
    """RAF: 2 and 4. Ours: 2, and 3: the convolution, whose readers want both, is widened once."""

    def build(e, x, w):
        y = e(op.nn.conv2d(x, w))
        return [y, e(op.nn.relu(y))]

    casts, _ = counts(program(build, IMAGE, KERNEL), out_dtype)
    assert casts <= expected


def test_tuple_from_op():
    """RAF: 2; ours too: no cast appears between the parts of a tuple."""

    def build(e, x, w):
        parts = e(op.split(e(op.nn.conv2d(x, w)), 2, 1))
        return e(op.concat([parts[0], parts[1]], 1))

    assert counts(program(build, IMAGE, KERNEL)) == (2, 2)


@pytest.mark.parametrize(("out_dtype", "expected"), [("float16", 0), ("float32", 1)])
def test_existing_cast_with_always_op(out_dtype, expected):
    """RAF: 0 and 1; ours too: widenings of the user's before a low op fold."""

    def build(e, x, w):
        wide = [e(op.astype(one, "float32")) for one in (x, w)]
        y = e(op.nn.conv2d(*wide))
        return y if out_dtype == "float32" else e(op.astype(y, "float16"))

    mod = program(build, IMAGE, KERNEL, dtypes=["float16", "float16"])
    assert counts(mod, None)[0] <= expected + (out_dtype == "float16")


def test_existing_cast_with_infer_op():
    """RAF: 0; ours too: a relu of a float16 number is a float16 number."""

    def build(e, x):
        return e(op.astype(e(op.nn.relu(e(op.astype(x, "float32")))), "float16"))

    assert counts(program(build, X, dtypes=["float16"]), None) == (0, 0)


def test_infer_op_cast_num():
    """RAF: 3 (x, w, ones). Ours: 3: x, w, and the product widened in the comparison's kernel."""

    def build(e, x, w, ones):
        return e(op.less_equal(e(op.matmul(x, w)), ones))

    out = autocast(program(build, X, W, X))
    assert len(calls(out, "amp_ir.cast")) == 3
    assert dtypes_of(out, "relax.less_equal")[0][1] == "bool"


def test_cast_reuse():
    """RAF: 5. Ours: 2 alone (x and w, shared by both matmuls) and the others fused."""

    def build(e, x, w):
        one, six = e(op.matmul(x, w)), e(op.matmul(x, w))
        total = e(op.add(e(op.nn.softmax(one)), e(op.exp(one))))
        return e(op.add(total, six))

    casts, alone = counts(program(build, X, W))
    assert alone == 2
    assert casts <= 6


@pytest.mark.parametrize(("full", "low"), [(3, 2), (2, 2), (4, 4)])
def test_concatenate(full, low):
    """RAF: 2, 2 and 4 (the majority, and nothing low above 5 inputs). Ours: none is alone."""

    def build(e, *inputs):
        wide = [e(op.astype(x, "float32")) for x in inputs[full:]]
        return e(op.concat([*inputs[:full], *wide], 0))

    dtypes = ["float32"] * full + ["float16"] * low
    assert counts(program(build, *[X] * (full + low), dtypes=dtypes), None)[1] == 0


def test_where():
    """RAF: 3 (x, w, y; the condition is not cast). Ours: x and w alone, the rest in registers."""

    def build(e, x, w, y, condition):
        return e(op.where(condition, e(op.matmul(x, w)), y))

    mod = program(build, X, W, X, X, dtypes=["float32", "float32", "float32", "bool"])
    assert counts(mod) == (4, 2)
    assert dtypes_of(autocast(mod), "relax.where")[0][0][0] == "bool"
