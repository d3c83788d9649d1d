# SPDX-License-Identifier: Apache-2.0
"""Both matmul libraries against PyTorch in float64, in every layout that a training step uses."""

from __future__ import annotations

import threading

import pytest
import torch
import tvm_ffi

from amp_ir.host import native
from matmul_calls import EPILOGUES, LAYOUTS, check, nan, random
from native_calls import LIBRARIES, TOLERANCE, matmul, memory, relative_error, shape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> str:
    if not native.has(f"amp_ir.{request.param}.matmul"):
        pytest.skip(f"{request.param} is not in this build")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("full_out", [False, True])
def test_every_transposition(library, dtype, transpose_a, transpose_b, batch, full_out):
    a = (
        random(*batch, 33, 17, dtype=dtype).mT
        if transpose_a
        else random(*batch, 17, 33, dtype=dtype)
    )
    b = (
        random(*batch, 21, 33, dtype=dtype).mT
        if transpose_b
        else random(*batch, 33, 21, dtype=dtype)
    )
    check(library, a, b, nan(*batch, 17, 21, dtype=torch.float32 if full_out else dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_bias_and_epilogue_are_applied_before_the_one_rounding(
    library, dtype, epilogue, bias_dtype
):
    bias = None if bias_dtype is None else random(21, dtype=bias_dtype)
    a, b = random(2, 17, 33, dtype=dtype), random(21, 33, dtype=dtype).mT
    check(library, a, b, nan(2, 17, 21, dtype=dtype), bias=bias, epilogue=epilogue)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(library, name, dtype):
    a, b, out = LAYOUTS[name](
        lambda *dims: random(*dims, dtype=dtype), lambda *dims: nan(*dims, dtype=dtype)
    )
    check(library, a, b, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_layout_falls_to_a_reference_implementation(name, dtype):
    if not native.has("amp_ir.onednn.matmul"):
        pytest.skip("onednn is not in this build")
    native.function("amp_ir.onednn.clear_cache")()
    test_layouts("onednn", name, dtype)
    assert not [i for i in native.function("amp_ir.onednn.implementations")() if "ref" in i]


@pytest.mark.parametrize(
    ("columns", "spread"), [((512, 100), 1), ((512, 1024), 0), ((512, 40), 0), ((500, 100), 0)]
)
def test_rows_that_share_sets_of_the_cache_are_copied_apart(columns, spread):
    isa = native.function("amp_ir.onednn.isa")() if native.has("amp_ir.onednn.isa") else ""
    if "avx2" not in isa:
        pytest.skip("oneDNN copies operands itself on this CPU")
    native.function("amp_ir.onednn.clear_cache")()
    a, b = (random(64, n) for n in columns)
    check("onednn", a.t(), b, nan(*columns))
    found = str(list(native.function("amp_ir.onednn.implementations")()))
    assert found.count("spread") == spread, found


def test_nothing_outside_the_result_is_written(library):
    wide = torch.zeros(20, 90)
    matmul(library, random(20, 33), random(33, 40), wide[:, 3:43])
    assert wide[:, :3].abs().sum() == 0 and wide[:, 43:].abs().sum() == 0


def test_low_sums_are_accumulated_in_float32(library):
    # 4096 ones sum to 4096 exactly; in bfloat16 the sum would stop at 256, where 256 + 1 is 256.
    ones = torch.ones(4, 4096, dtype=torch.bfloat16)
    out = nan(4, 4)
    matmul(library, ones, ones.t(), out)
    assert torch.equal(out, torch.full((4, 4), 4096.0))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 15, 16, 17, 31, 100])
def test_float16_conversion_handles_every_tail(library, count):
    one = torch.ones(1, 1, dtype=torch.float16)
    row = torch.randn(1, count).half()
    row[0, 0] = 65504.0  # the largest float16
    row[0, -1] = 6e-8  # the smallest subnormal one
    out = torch.full((1, count), float("nan"), dtype=torch.float16)
    matmul(library, one, row, out)
    assert torch.equal(out, row)


def test_float16_overflow_is_infinity(library):
    a = torch.full((1, 2), 300.0, dtype=torch.float16)
    out = torch.zeros(1, 1, dtype=torch.float16)
    matmul(library, a, a.t(), out)  # 180000 is past 65504
    assert torch.isposinf(out).all()


def test_nan_is_kept(library):
    for dtype in DTYPES:
        a = torch.ones(2, 3, dtype=dtype)
        a[0, 1] = float("nan")
        out = torch.zeros(2, 2, dtype=dtype)
        matmul(library, a, torch.ones(3, 2, dtype=dtype), out)
        assert out[0].isnan().all() and not out[1].isnan().any()


def test_plans_are_bounded_in_number():
    if not native.has("amp_ir.onednn.matmul"):
        pytest.skip("onednn is not in this build")
    native.function("amp_ir.onednn.clear_cache")()
    for rows in range(1, 531):
        matmul("onednn", random(rows, 4), random(4, 4), nan(rows, 4))
    assert len(native.function("amp_ir.onednn.implementations")()) == 512


def test_two_threads_at_once(library):
    """Threads that share plans must not share memory objects or workspace."""
    failures = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for rows in [16, 17, 18] * 20:
            a = torch.randn(rows, 64, generator=generator).half()
            b = torch.randn(64, 48, generator=generator).half()
            out = nan(rows, 48)
            matmul(library, a, b, out)
            error = relative_error(out, a.double() @ b.double())
            if error > TOLERANCE[torch.float32]:
                failures.append((seed, rows, error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def message(call) -> str:
    with pytest.raises(Exception) as caught:  # noqa: B017 - the text is what is asserted
        call()
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("name", LIBRARIES)
def test_messages(name):
    if not native.has(f"amp_ir.{name}.matmul"):
        pytest.skip(f"{name} is not in this build")
    f = f"amp_ir.{name}.matmul"
    a, b, out = random(2, 3), random(3, 4), nan(2, 4)
    assert message(lambda: matmul(name, a, random(5, 4), out)) == (
        f"{f}: a [2, 3] @ b [5, 4] does not give out [2, 4]; "
        "expected [batch..., m, k] @ [batch..., k, n] -> [batch..., m, n]"
    )
    assert message(lambda: matmul(name, a, b, out, bias=random(3))) == (
        f"{f}: bias [3]; expected [4], the last extent of out"
    )
    assert message(lambda: matmul(name, a, b, out, epilogue="tanh")) == (
        f'{f}: epilogue "tanh"; expected none, relu, gelu or gelu_tanh'
    )
    assert message(lambda: matmul(name, a.double(), b, out)) == (
        f"{f}: a is float64; expected float32, bfloat16 or float16"
    )
    call = native.function(f)
    ok_a, ok_b, ok_out = (a.shape, a.stride()), (b.shape, b.stride()), (out.shape, out.stride())

    def with_a(dims, strides):
        pairs = [dims, strides, *ok_b, *ok_out]
        return lambda: call(
            memory(a), memory(b), None, *(shape(p) for p in pairs), "none", memory(out)
        )

    assert message(with_a((2, 3), (4, 1))) == (
        f"{f}: a of [2, 3] by strides [4, 1] reaches element 6 of a tensor that holds 6"
    )
    assert message(with_a((2, 3), (-3, 1))) == (
        f"{f}: a has a negative dim or stride: [2, 3] by [-3, 1]"
    )
    assert message(with_a((2, 3), (3,))) == (
        f"{f}: a has 2 dims and 1 strides; expected as many of each, at most 6"
    )
    with_a(*ok_a)()
    assert relative_error(out, a @ b) <= TOLERANCE[torch.float32]


def test_an_empty_result_is_left_alone(library):
    matmul(library, torch.empty(0, 3), random(3, 4), torch.empty(0, 4))


def test_what_this_cpu_does_fast_is_told():
    if not native.has("amp_ir.onednn.matmul"):
        pytest.skip("onednn is not in this build")
    is_native = native.function("amp_ir.onednn.is_native")
    assert is_native("float32")
    isa = native.function("amp_ir.onednn.isa")()
    if isa.startswith("avx512_core_") and isa not in ("avx512_core_vnni",):
        assert is_native("bfloat16")
    if "avx512" not in isa:
        assert not is_native("float16")
    assert isinstance(tvm_ffi.get_global_func("amp_ir.onednn.isa")(), str)


def test_an_algorithm_in_a_file_of_an_earlier_version_is_ignored():
    if not native.has("amp_ir.onednn.matmul"):
        pytest.skip("oneDNN is not in this build")
    a, b = random(5, 7), random(7, 3)
    plain, named = nan(5, 3), nan(5, 3)
    matmul("onednn", a, b, plain, epilogue="relu")
    matmul("onednn", a, b, named, epilogue="relu+gemm")
    assert torch.equal(plain, named)
