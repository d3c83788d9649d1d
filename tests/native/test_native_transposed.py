# SPDX-License-Identifier: Apache-2.0
"""Sums over the rows of two bfloat16 matrices, the gradient of a weight, against PyTorch's float64.

With AMX they are a kernel of ours from 2^20 products on; on other CPUs the same tests hold.
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


def implementations() -> list[str]:
    return [str(one) for one in native.function("amp_ir.onednn.implementations")()]


def operands(rows: int, columns: int, terms: int, gap: int = 0):
    a = random(terms, rows + gap, dtype=LOW)[:, :rows].mT
    b = random(terms, columns + gap, dtype=LOW)[:, gap:]
    return a, b, torch.full((rows, columns + gap), float("nan"))[:, :columns]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(16, 420),
    columns=st.integers(16, 800),
    terms=st.integers(32, 700),
    gap=st.sampled_from([0, 1, 5]),
)
@example(rows=385, columns=769, terms=513, gap=1)  # one more than a block in each direction
@example(rows=384, columns=768, terms=512, gap=0)
@example(rows=16, columns=2048, terms=32, gap=0)
@example(rows=33, columns=47, terms=5000, gap=3)  # several tasks sum parts of the terms
@example(rows=100, columns=70, terms=16411, gap=0)
def test_products_and_sums_are_those_of_pytorch(rows, columns, terms, gap):
    a, b, out = operands(rows, columns, terms, gap)
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


@needs_amx
@pytest.mark.parametrize("sizes", [(768, 770, 300), (70, 100, 16400), (90, 600, 2000)])
def test_results_do_not_depend_on_the_number_of_threads(sizes):
    a, b, _ = operands(*sizes)
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
    assert "matmul transposed tiles" in implementations()
    assert all(torch.equal(results[0], one) for one in results[1:])


@needs_amx
def test_a_column_major_result_is_the_same_product():
    a, b = random(300, 64, dtype=LOW).mT, random(300, 96, dtype=LOW)
    native.function("amp_ir.onednn.clear_cache")()
    out = torch.zeros(96, 64).t()
    matmul("onednn", a, b, out)
    assert implementations() == ["matmul transposed tiles"]
    assert relative_error(out, a.double() @ b.double()) <= TOLERANCE


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
    assert "matmul transposed tiles" not in implementations()
