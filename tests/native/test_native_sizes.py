# SPDX-License-Identifier: Apache-2.0
"""Every library entry on extents of 0 and 1, in any memory order, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ir.host import native
from matmul_calls import accumulate, multiply, number, pack, packed_nbytes
from native_calls import LIBRARIES, TOLERANCE, convolve, matmul, relative_error, shape
from recurrence_calls import KINDS, check_all
from strided_problems import DTYPES, exact_product, idle_strides, problems, views

# 17 is past a vector of 16 float32; 40 past a block of 32 columns.
SIZES = (0, 1, 1, 2, 3, 17, 40)


def needs(name: str) -> None:
    if not native.has(name):
        pytest.skip(f"{name} is not in this build")


def outside(out: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that holds `out`, with those of `out` cleared."""
    whole = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
    copy = whole.clone()
    copy.as_strided(out.shape, out.stride(), out.storage_offset()).zero_()
    return copy.view(torch.uint8)


def assert_product(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> None:
    exact, size = exact_product(a, b, bias)
    if out.numel():
        error = float((out.double() - exact).abs().max()) / max(size, 1e-30)
        assert error <= TOLERANCE[out.dtype]


@pytest.mark.parametrize("library", LIBRARIES)
@given(problem=problems(SIZES), data=st.data())
@settings(max_examples=150)
def test_matmul(library, problem, data):
    needs(f"amp_ir.{library}.matmul")
    a, b, out = problem
    bias_dtype = data.draw(st.sampled_from([None, torch.float32, out.dtype]))
    bias = None if bias_dtype is None else torch.randn(out.shape[-1]).to(bias_dtype)
    if bias is not None:
        bias = data.draw(idle_strides(bias))
    before = outside(out)
    matmul(library, a, b, out.fill_(float("nan")), bias=bias)
    assert_product(out, a, b, bias)
    assert torch.equal(outside(out), before)


@given(problem=problems(SIZES), data=st.data())
@settings(max_examples=150)
def test_accumulate(problem, data):
    needs("amp_ir.onednn.matmul_accumulate")
    a, b, like = problem
    out = data.draw(views(like.shape, torch.float32))
    bias = torch.randn(out.shape[-1]) if data.draw(st.booleans()) else None
    factors = st.sampled_from([None, 0.0, -0.5, 2.0])
    alpha, beta = data.draw(factors), data.draw(factors)
    c = out if data.draw(st.booleans()) else torch.empty_strided(out.shape, out.stride())
    old = c.copy_(torch.randn(out.shape)).clone()
    before = outside(out)
    accumulate(a, b, c, out, bias=bias, alpha=number(alpha), beta=number(beta))
    exact, size = exact_product(a, b, bias)
    alpha, beta = (1.0 if one is None else one for one in (alpha, beta))
    expected = beta * old.double() + alpha * exact
    if out.numel():
        # Those of the product, and three roundings for the factors and the sum.
        most = abs(alpha) * size + abs(beta) * float(old.abs().max())
        error = float((out.double() - expected).abs().max())
        assert error <= 2 * TOLERANCE[torch.float32] * most
    assert torch.equal(outside(out), before)


@given(data=st.data())
@settings(max_examples=100)
def test_packed(data):
    needs("amp_ir.onednn.pack")
    m, n, k = (data.draw(st.sampled_from(SIZES)) for _ in range(3))
    low = data.draw(st.sampled_from(DTYPES))
    a, b = data.draw(views([m, k], low)), data.draw(views([k, n], low))
    out = data.draw(views([m, n], data.draw(st.sampled_from([low, torch.float32]))))
    bias = torch.randn(n) if data.draw(st.booleans()) else None
    packed = pack(b, max(packed_nbytes(b), b.numel() * b.element_size()))
    multiply(a, packed, b.shape, out.fill_(float("nan")), bias=bias)
    assert_product(out, a, b, bias)


@pytest.mark.parametrize("library", LIBRARIES)
@given(data=st.data())
@settings(max_examples=60)
def test_convolution(library, data):
    needs(f"amp_ir.{library}.conv")
    sizes = st.sampled_from([1, 1, 2, 5])
    groups = data.draw(st.sampled_from([1, 1, 2]))
    rows, inputs, outputs = (data.draw(sizes) for _ in range(3))
    size = data.draw(st.lists(st.sampled_from([1, 1, 3, 4]), min_size=1, max_size=2))
    kernel = [data.draw(st.sampled_from([1, min(n, 3)])) for n in size]
    spatial = len(size)
    ones, zeros = (1,) * spatial, (0,) * spatial
    low = data.draw(st.sampled_from(DTYPES))
    # Positive, so that no sum cancels: an error is then as large as roundings make it.
    x = (torch.rand(rows, inputs * groups, *size) + 0.5).to(low)
    w = (torch.rand(outputs * groups, inputs, *kernel) + 0.5).to(low)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    exact_y = (F.conv1d, F.conv2d)[spatial - 1](exact_x, exact_w, groups=groups)
    grad = (torch.rand(exact_y.shape) + 0.5).to(low)
    exact_y.backward(grad.double())

    def placed(t: torch.Tensor) -> torch.Tensor:
        return data.draw(views(t.shape, low)).copy_(t)

    x, w, grad = placed(x), placed(w), placed(grad)
    for verb, first, second, expected in (
        ("conv", x, w, exact_y.detach()),
        ("conv_backward_input", grad, w, exact_x.grad),
        ("conv_backward_weight", grad, x, exact_w.grad),
    ):
        out = data.draw(views(expected.shape, low)).fill_(float("nan"))
        options = {"strides": ones, "padding": zeros, "dilation": ones, "groups": groups}
        convolve(library, verb, first, second, out, **options)
        assert relative_error(out, expected) <= TOLERANCE[low], verb


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extents", [(1, 1, 33), (2, 17, 1), (3, 33, 33), (2, 1, 65)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_recurrence(kind, extents, dtype):
    needs(f"amp_ir.onednn.{kind}")
    check_all(kind, extents, dtype, is_reverse=False)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_row_that_is_described_by_column(library):
    """oneDNN's gemm takes the stride of the one row for the distance between rows."""
    needs(f"amp_ir.{library}.matmul")
    a, b = torch.randn(1, 8), torch.randn(8, 8)
    out = torch.full((8,), float("nan")).as_strided((1, 8), (1, 1))
    matmul(library, a, b, out)
    assert relative_error(out, a.double() @ b.double()) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("library", LIBRARIES)
def test_extents_past_64_bits_are_refused(library):
    name = f"amp_ir.{library}.matmul"
    needs(name)
    a, one, huge = torch.randn(1), shape((1, 1)), shape((1 << 40, 1 << 40))
    layouts = (huge, shape((0, 0)), one, one, one, one)
    with pytest.raises(ValueError, match="has more elements than a 64-bit number counts"):
        native.function(name)(a, a, None, *layouts, "none", torch.zeros(1))


_LARGEST = 2**63 - 1
_HALF = 2**62

# Numbers that a 64-bit sum or product of theirs does not hold, and what is said of them.
OVERFLOWS = {
    "lengths to plan": (
        "amp_ir.plan_memory",
        lambda: (shape((_HALF, _HALF)), shape((0, 0)), shape((1, 1)), 64),
        "the lengths of all intervals add up to more bytes than a 64-bit number holds",
    ),
    "lengths that are rounded up": (
        "amp_ir.plan_memory",
        lambda: (shape((_LARGEST,)), shape((0,)), shape((1,)), 64),
        "the lengths of all intervals add up to more bytes than a 64-bit number holds",
    ),
    "the last time there is": (
        "amp_ir.plan_memory",
        lambda: (shape((1,)), shape((0,)), shape((_LARGEST,)), 64),
        "interval 0 ends at the last of all 64-bit numbers",
    ),
    "capacities": (
        "amp_ir.min_cut",
        lambda: (3, shape((0, 1, _HALF, 1, 2, _HALF)), 0, 2),
        "the capacities of 2 edges add up to more than a 64-bit number holds",
    ),
    "vertices": (
        "amp_ir.min_cut",
        lambda: (2**31, shape(()), 0, 1),
        "min_cut got 2147483648 vertices and 0 edges; it takes at most 2^30 of each",
    ),
    "a view": (
        "amp_ir.view",
        lambda: (torch.zeros(64, dtype=torch.uint8), 0, shape((2**40, 2**40)), "float32"),
        "a view of [1099511627776, 1099511627776] is of no tensor that fits into memory",
    ),
    "a view with a negative extent": (
        "amp_ir.view",
        lambda: (torch.zeros(64, dtype=torch.uint8), 0, shape((-1,)), "float32"),
        "a view of [-1] is of no tensor that fits into memory",
    ),
    "an offset": (
        "amp_ir.view",
        lambda: (torch.zeros(64, dtype=torch.uint8), _LARGEST, shape((1,)), "float32"),
        f"a view of 4 bytes at offset {_LARGEST} does not lie inside an arena of 64 bytes",
    ),
    "a packed matrix": (
        "amp_ir.onednn.packed_nbytes",
        lambda: (shape((2**40, 2**40)), "float32"),
        "amp_ir.onednn.packed_nbytes: b has dims [1099511627776, 1099511627776]; expected extents "
        "of a matrix that fits into memory",
    ),
    "a recurrent layer": (
        "amp_ir.onednn.lstm",
        lambda: (*[torch.zeros(1)] * 4, shape((1, 2**40, 2**40)), 0, *[torch.zeros(1)] * 3),
        "amp_ir.onednn.lstm: dims are [1, 1099511627776, 1099511627776], more than memory holds",
    ),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_numbers_that_overflow_are_refused(name):
    function, arguments, expected = OVERFLOWS[name]
    needs(function)
    with pytest.raises(ValueError) as caught:
        native.function(function)(*arguments())
    assert str(caught.value).splitlines()[0] == expected
