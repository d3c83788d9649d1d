# SPDX-License-Identifier: Apache-2.0
"""Large matmuls in bfloat16, gradients of weights before all, against PyTorch in float64.

With AMX many are a kernel of ours; on other CPUs the same tests hold.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amp_ir.host import native
from matmul_calls import NAME, accumulate, number, random
from native_calls import matmul, relative_error

pytestmark = pytest.mark.skipif(not native.has(NAME), reason="oneDNN is not in this build")
has_amx = native.has("amp_ir.onednn.isa") and "amx" in native.function("amp_ir.onednn.isa")()
needs_amx = pytest.mark.skipif(not has_amx, reason="this CPU has no AMX")

LOW = torch.bfloat16
# Products of bfloat16 numbers are exact in float32. A sum of k of them, in blocks of 256, is off by
# some 2^-24 sqrt(k), of which the largest element is some sqrt(k).
TOLERANCE = 3e-6
# One rounding to bfloat16.
ROUNDED = 2**-8


def implementations() -> list[str]:
    return [str(one) for one in native.function("amp_ir.onednn.implementations")()]


def operands(rows: int, columns: int, terms: int, gap: int = 0, layout: str = "columns rows"):
    """Return a and b, each stored as rows or as columns that are `gap` elements apart, and out."""
    a_layout, b_layout = layout.split()
    is_by_rows = a_layout == "rows"
    a = random(*((rows, terms + gap) if is_by_rows else (terms, rows + gap)), dtype=LOW)
    a = a[:, :terms] if is_by_rows else a[:, :rows].mT
    is_by_rows = b_layout == "rows"
    b = random(*((terms, columns + gap) if is_by_rows else (columns, terms + gap)), dtype=LOW)
    b = b[:, gap:] if is_by_rows else b[:, gap:].mT
    return a, b, torch.full((rows, columns + gap), float("nan"))[:, :columns]


LAYOUTS = ["columns rows", "rows rows", "rows columns", "columns columns"]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(16, 420),
    columns=st.integers(16, 800),
    terms=st.integers(32, 700) | st.integers(2048, 2400),
    gap=st.sampled_from([0, 1, 5]),
    layout=st.sampled_from(LAYOUTS),
)
@example(rows=385, columns=769, terms=513, gap=1, layout=LAYOUTS[0])  # one more than a block
@example(rows=384, columns=768, terms=512, gap=0, layout=LAYOUTS[0])
@example(rows=16, columns=2048, terms=32, gap=0, layout=LAYOUTS[0])
@example(rows=33, columns=300, terms=5000, gap=3, layout=LAYOUTS[0])  # several tasks sum a block
@example(rows=100, columns=270, terms=16411, gap=0, layout=LAYOUTS[1])
@example(rows=512, columns=768, terms=64, gap=0, layout=LAYOUTS[1])  # oneDNN has it without AMX
@example(rows=64, columns=3072, terms=250, gap=3, layout=LAYOUTS[1])
@example(rows=128, columns=2048, terms=64, gap=0, layout=LAYOUTS[2])
@example(rows=300, columns=534, terms=768, gap=1, layout=LAYOUTS[2])  # one more than a block
@example(rows=257, columns=401, terms=1024, gap=0, layout=LAYOUTS[1])  # b's tiles are made once
@example(rows=257, columns=400, terms=1025, gap=3, layout=LAYOUTS[2])  # and of more terms, not
@example(rows=4099, columns=256, terms=40, gap=0, layout=LAYOUTS[1])
def test_products_and_sums_are_those_of_pytorch(rows, columns, terms, gap, layout):
    a, b, out = operands(rows, columns, terms, gap, layout)
    around = out._base.clone()
    matmul("onednn", a, b, out)
    product = a.double() @ b.double()
    assert relative_error(out, product) <= TOLERANCE
    before = out.copy_(torch.randn(rows, columns)).clone()
    accumulate(a, b, out, out, alpha=number(-0.5), beta=number(0.9))
    assert relative_error(out, 0.9 * before.double() - 0.5 * product) <= TOLERANCE
    accumulate(a, b, out.copy_(before), out)
    assert relative_error(out, before.double() + product) <= TOLERANCE
    if gap:  # nothing beside the result is written
        assert torch.equal(out._base[:, columns:].isnan(), around[:, columns:].isnan())
    low = torch.full_like(around, 7.0, dtype=LOW)
    matmul("onednn", a, b, low[:, :columns])
    assert relative_error(low[:, :columns], product) <= ROUNDED
    assert (low[:, columns:] == 7).all()


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(16, 420),
    columns=st.integers(256, 800),
    terms=st.integers(32, 1300),
    out_dtype=st.sampled_from([torch.float32, LOW]),
    bias_dtype=st.sampled_from([torch.float32, LOW]),
    layout=st.sampled_from(LAYOUTS),
)
@example(
    rows=300, columns=300, terms=768, out_dtype=LOW, bias_dtype=LOW, layout=LAYOUTS[2]
)  # a layer of a network
@example(
    rows=260, columns=577, terms=1100, out_dtype=LOW, bias_dtype=torch.float32, layout=LAYOUTS[1]
)
@example(
    rows=260, columns=289, terms=64, out_dtype=torch.float32, bias_dtype=LOW, layout=LAYOUTS[0]
)
def test_a_bias_is_added_before_the_one_rounding(
    rows, columns, terms, out_dtype, bias_dtype, layout
):
    a, b, _ = operands(rows, columns, terms, layout=layout)
    # Large beside the product, so that a sum that was rounded before it would be seen.
    bias = random(columns, dtype=bias_dtype) * 64
    out = torch.full((rows, columns), float("nan"), dtype=out_dtype)
    matmul("onednn", a, b, out, bias=bias)
    expected = a.double() @ b.double() + bias.double()
    assert relative_error(out, expected) <= (ROUNDED if out_dtype == LOW else TOLERANCE)


@needs_amx
@pytest.mark.parametrize("layout", LAYOUTS[1:3])
def test_large_layers_are_ours_with_their_bias(layout):
    a, b, _ = operands(512, 600, 768, layout=layout)
    native.function("amp_ir.onednn.clear_cache")()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        matmul("onednn", a, b, torch.zeros(512, 600, dtype=LOW), bias=random(600, dtype=LOW))
    finally:
        torch.set_num_threads(threads)
    assert implementations() == ["matmul tiles"]


@needs_amx
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ((768, 770, 300), LAYOUTS[0]),
        ((70, 100, 16400), LAYOUTS[0]),
        ((90, 600, 2000), LAYOUTS[0]),
        ((800, 700, 768), LAYOUTS[1]),
        ((800, 700, 3000), LAYOUTS[2]),
    ],
)
def test_results_do_not_depend_on_the_number_of_threads(sizes, layout):
    a, b, _ = operands(*sizes, layout=layout)
    native.function("amp_ir.onednn.clear_cache")()
    results, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2, 3, 8):
            torch.set_num_threads(count)
            out = torch.zeros(sizes[:2])
            matmul("onednn", a, b, out)
            results.append(out)
    finally:
        torch.set_num_threads(threads)
    assert "matmul tiles" in implementations()
    assert all(torch.equal(results[0], one) for one in results[1:])


@needs_amx
def test_a_column_major_result_is_the_same_product():
    a, b = random(300, 64, dtype=LOW).mT, random(300, 96, dtype=LOW)
    native.function("amp_ir.onednn.clear_cache")()
    out = torch.zeros(96, 64).t()
    matmul("onednn", a, b, out)
    assert implementations() == ["matmul tiles"]
    assert relative_error(out, a.double() @ b.double()) <= TOLERANCE


@needs_amx
def test_what_onednn_would_multiply_without_amx_is_ours():
    a, b, out = operands(1024, 768, 64, layout="rows rows")
    native.function("amp_ir.onednn.clear_cache")()
    matmul("onednn", a, b, out)
    assert implementations() == ["matmul tiles"]


def test_infinity_and_nan_stay_where_they_are():
    a, b, out = operands(64, 96, 300)
    a[3, 7], a[40, 299], b[5, 90] = float("inf"), float("nan"), float("-inf")
    matmul("onednn", a, b, out)
    expected = a.double() @ b.double()
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    is_finite = expected.isfinite()
    assert relative_error(out[is_finite], expected[is_finite]) <= TOLERANCE


@needs_amx
def test_small_products_are_onednns():
    a, b, out = operands(64, 64, 64)
    native.function("amp_ir.onednn.clear_cache")()
    matmul("onednn", a, b, out)
    assert "matmul tiles" not in implementations()
