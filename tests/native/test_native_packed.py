# SPDX-License-Identifier: Apache-2.0
"""oneDNN's matmul on a packed operand, and where it leaves oneDNN's first choice, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amp_ir.host import native
from matmul_calls import MATMUL_PACKED, PACK, multiply, pack, packed_nbytes
from native_calls import TOLERANCE, layout, matmul, memory, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPILOGUES = {"none": lambda x: x, "relu": torch.relu, "gelu": torch.nn.functional.gelu}
pytestmark = pytest.mark.skipif(not native.has(PACK), reason="this build has no oneDNN")


def implementations() -> list[str]:
    return [str(one) for one in native.function("amp_ir.onednn.implementations")()]


def check(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, nbytes: int, **options) -> None:
    out = torch.full((a.shape[0], b.shape[1]), float("nan"), dtype=out_dtype)
    multiply(a, pack(b, nbytes), b.shape, out, **options)
    expected = a.double() @ b.double()
    if options.get("bias") is not None:
        expected = expected + options["bias"].double()
    expected = EPILOGUES[options.get("epilogue", "none")](expected)
    assert relative_error(out, expected) <= TOLERANCE[out_dtype]


def matrix(rows: int, columns: int, dtype: torch.dtype, is_transposed: bool) -> torch.Tensor:
    if is_transposed:
        return torch.randn(columns, rows).to(dtype).t()
    return torch.randn(rows, columns).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("out", ["low", "float32"])
@pytest.mark.parametrize("dims", [(16, 64, 128), (5, 33, 47), (1, 7, 1), (300, 96, 65)])
def test_every_transposition_and_odd_extents(dtype, transposed, out, dims):
    rows, terms, columns = dims
    a, b = matrix(rows, terms, dtype, transposed[0]), matrix(terms, columns, dtype, transposed[1])
    nbytes = packed_nbytes(b) or b.numel() * b.element_size()
    assert nbytes >= b.numel() * b.element_size()
    check(a, b, dtype if out == "low" else torch.float32, nbytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_bias_and_epilogue(dtype, epilogue, has_bias):
    a, b = matrix(16, 64, dtype, False), matrix(64, 96, dtype, True)
    nbytes = packed_nbytes(b) or b.numel() * b.element_size()
    check(a, b, dtype, nbytes, bias=torch.randn(96) if has_bias else None, epilogue=epilogue)


@given(
    rows=st.integers(1, 70),
    terms=st.integers(1, 70),
    columns=st.integers(1, 140),
    dtype=st.sampled_from(DTYPES),
    is_transposed=st.booleans(),
    is_plain=st.booleans(),
)
def test_any_extents_packed_or_in_a_buffer_for_a_plain_copy(
    rows, terms, columns, dtype, is_transposed, is_plain
):
    """A buffer as another CPU's oneDNN asked for it may be too small for this one's layout."""
    a, b = matrix(rows, terms, dtype, False), matrix(terms, columns, dtype, is_transposed)
    least = b.numel() * b.element_size()
    check(a, b, torch.float32, least if is_plain else max(packed_nbytes(b), least))


def test_a_copy_that_does_not_fit_is_plain():
    b = torch.randn(48, 65)  # 65 columns are padded to a block's multiple
    least = b.numel() * b.element_size()
    if not packed_nbytes(b):
        pytest.skip("this CPU's oneDNN has no layout of its own for float32")
    assert packed_nbytes(b) > least
    assert torch.equal(pack(b, least).view(torch.float32), b.view(-1))
    assert not torch.equal(pack(b, packed_nbytes(b))[:least].view(torch.float32), b.view(-1))


@pytest.mark.parametrize("rows", [1, 2, 16, 100, 512])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_call_brings_the_copy_back_to_a_plain_layout(dtype, rows, has_bias):
    a, b = matrix(rows, 512, dtype, False), matrix(512, 256, dtype, True)
    if not packed_nbytes(b):
        pytest.skip("this CPU's oneDNN has no layout of its own for this dtype")
    native.function("amp_ir.onednn.clear_cache")()
    check(a, b, dtype, packed_nbytes(b), bias=torch.randn(256) if has_bias else None)
    (of_pack,) = [one for one in implementations() if "matmul" not in one]
    (of_matmul,) = [one for one in implementations() if "matmul" in one]
    assert of_pack == "pack"
    assert not [word for word in ("reorder", "widen", "ref") if word in of_matmul]


def test_the_copy_is_the_same_each_time():
    b = torch.randn(64, 65)
    nbytes = packed_nbytes(b) or b.numel() * b.element_size()
    first, second = pack(b, nbytes), pack(b, nbytes)
    assert torch.equal(first, second)


def message(call) -> str:
    with pytest.raises(Exception) as caught:  # noqa: B017 - the text is what is asserted
        call()
    return str(caught.value).splitlines()[0]


def test_messages():
    a, b, out = torch.randn(2, 3), torch.randn(3, 4), torch.zeros(2, 4)
    assert message(lambda: pack(b, 47)) == (
        f"{PACK}: b has 2 dims and packed has 47 bytes; expected 2 dims and at least 48 bytes "
        "(amp_ir.onednn.packed_nbytes)"
    )
    wrong = torch.zeros(48)
    assert message(lambda: native.function(PACK)(memory(b), *layout(b), wrong)) == (
        f"{PACK}: packed has dtype float32; expected uint8, the bytes that amp_ir.onednn.pack wrote"
    )
    assert message(lambda: multiply(a, torch.zeros(47, dtype=torch.uint8), b.shape, out)) == (
        f"{MATMUL_PACKED}: packed has 47 bytes; expected at least 48, what amp_ir.onednn.pack "
        "wrote for b"
    )
    packed = torch.zeros(48, dtype=torch.uint8)
    assert message(lambda: multiply(a[None], packed, b.shape, out)) == (
        f"{MATMUL_PACKED}: a, b and out have 3, 2 and 2 dims; expected 2 of each"
    )
    assert message(lambda: multiply(a, packed, (4, 3), out)) == (
        f"{MATMUL_PACKED}: a [2, 3] @ b [4, 3] does not give out [2, 4]; "
        "expected [batch..., m, k] @ [batch..., k, n] -> [batch..., m, n]"
    )


# Extents at which Matmul leaves oneDNN's first choice; the other algorithm's name in its plan.
OTHER_ALGORITHMS = {
    "a copy of b with rows 12 KiB apart": ((130, 24, 3072), torch.float32, (True, False), "pack+"),
    "gemm for very long sums": ((512, 16384, 8), torch.float32, (False, False), "gemm"),
    "gemm for very long low sums": ((512, 16384, 8), torch.bfloat16, (False, False), "gemm"),
}


@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
@pytest.mark.parametrize("epilogue", ["none", "gelu"])
def test_other_algorithms_than_the_first_choice(name, epilogue):
    (rows, terms, columns), dtype, transposed, algorithm = OTHER_ALGORITHMS[name]
    if dtype == torch.bfloat16 and "amx" not in native.function("amp_ir.onednn.isa")():
        pytest.skip("only with AMX")
    if algorithm == "pack+" and not packed_nbytes(torch.randn(terms, columns).to(dtype)):
        pytest.skip("this CPU's oneDNN has gemm for its first choice, which copies")
    a, b = matrix(rows, terms, dtype, transposed[0]), matrix(terms, columns, dtype, transposed[1])
    bias, out = torch.randn(columns), torch.full((rows, columns), float("nan"))
    native.function("amp_ir.onednn.clear_cache")()
    matmul("onednn", a, b, out, bias=bias, epilogue=epilogue)
    expected = EPILOGUES[epilogue](a.double() @ b.double() + bias.double())
    # Sums of up to 16384 products: 2^-24 for each of some hundred blocks that are added up.
    assert relative_error(out, expected) <= 2e-5
    assert algorithm in implementations()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_gemm_takes_from_the_system_is_planned(dtype):
    """It is not a workspace of ours, stays taken, and grows with the extents of the result."""
    if dtype == torch.bfloat16 and "amx" not in native.function("amp_ir.onednn.isa")():
        pytest.skip("only with AMX")
    asked = []
    for columns in (8, 200):
        a, b = matrix(512, 16384, dtype, False), matrix(16384, columns, dtype, False)
        out = torch.empty(512, columns)
        given = [memory(a), memory(b), None, *layout(a), *layout(b), *layout(out), "none"]
        query = native.function("amp_ir.onednn.kept_nbytes")
        asked.append(int(query("amp_ir.onednn.matmul", *given, memory(out))))
    assert asked[0] >= 512 * 3000 and asked[1] - asked[0] >= 192 * 3000


@pytest.mark.parametrize("transposed", [False, True])
def test_one_matrix_for_a_batch_has_the_first_choice_in_either_order(transposed):
    """A batch axis of one matrix has no stride that makes it seem to overlap the next."""
    if "avx512" not in native.function("amp_ir.onednn.isa")():
        pytest.skip("this CPU's oneDNN has gemm for its first choice")
    a, b, out = torch.randn(40, 64), torch.randn(3, 64, 48), torch.zeros(3, 40, 48)
    native.function("amp_ir.onednn.clear_cache")()
    if transposed:  # out^T = b^T @ a^T, as the gradient of the other operand has it
        matmul("onednn", b.mT, a.T, out.mT)
    else:
        matmul("onednn", a, b, out)
    # Sums of 64 products in float32.
    assert relative_error(out, a.double() @ b.double()) <= 1e-6
    assert "gemm" not in implementations()[0]
