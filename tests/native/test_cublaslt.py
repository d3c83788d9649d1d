# SPDX-License-Identifier: Apache-2.0
"""amp_ir.cublaslt.matmul through a stand-in for cuBLASLt that computes on the CPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

import fake_cublaslt
from amp_ir.host import native
from cublaslt_calls import NAME, arguments, launches, workspace_nbytes
from fake_cublaslt import Fake
from matmul_calls import EPILOGUES, LAYOUTS
from native_calls import TOLERANCE, layout, matmul, memory, relative_error, shape
from strided_problems import DTYPE_PAIRS, DTYPES, exact_product, problems

SUPPORT = Path(__file__).parents[1] / "support"
KERNELS = Path(__file__).parents[2] / "src" / "kernels"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cublaslt.build(tmp_path_factory.mktemp("cublaslt"))


@pytest.fixture
def fake(library: Path) -> Iterator[Fake]:
    """The stand-in; whatever a test calls must be allowed by cuBLASLt."""
    with fake_cublaslt.installed(library) as fake:
        yield fake
        assert fake.misuses() == []


def nan(*dims: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(dims, float("nan"), dtype=dtype)


def check(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options) -> None:
    matmul("cublaslt", a, b, out, **options)
    expected = a.double() @ b.double()
    if options.get("bias") is not None:
        expected = expected + options["bias"].double()
    expected = EPILOGUES[options.get("epilogue", "none")](expected)
    assert relative_error(out, expected) <= TOLERANCE[out.dtype]


def stored(dims: Sequence[int], dtype: torch.dtype, is_transposed: bool) -> torch.Tensor:
    """A random tensor whose last two dims lie in the order or the other."""
    *batch, m, n = dims
    t = torch.randn(*batch, n, m).mT if is_transposed else torch.randn(*dims)
    return t.to(dtype)


@pytest.mark.parametrize(("low", "out"), DTYPE_PAIRS)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_every_transposition(fake, low, out, batch):
    for order in itertools.product([False, True], repeat=3):
        a = stored((*batch, 17, 33), low, order[0])
        b = stored((*batch, 33, 21), low, order[1])
        result = stored((*batch, 17, 21), out, order[2])
        assert launches(a, b, result) == 1
        check(a, b, result.fill_(float("nan")))
    assert fake.counts().launches == 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("epilogue", ["none", "gelu_tanh"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_bias_and_epilogue_are_applied_before_the_one_rounding(
    fake, dtype, epilogue, has_bias, is_full
):
    out_dtype = torch.float32 if is_full else dtype
    bias = torch.randn(21).to(out_dtype) if has_bias else None
    a, b = torch.randn(2, 17, 33).to(dtype), torch.randn(21, 33).to(dtype).mT
    check(a, b, nan(2, 17, 21, dtype=out_dtype), bias=bias, epilogue=epilogue)
    # One of 34 rows: b does not depend on the batch.
    assert fake.counts().launches == 1


# Where cuBLASLt has no form, and how many launches the others take.
REFUSED = {"no unit stride in the operands", "no unit stride in the result", "batch innermost"}
REFUSED |= {"repeated rows", "repeated columns"}
SEVERAL = {
    "attention heads": 2, "batches broadcast both ways": 3, "ranks differ": 4,
    "six dims in another order": 8,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(fake, name, dtype):
    a, b, out = LAYOUTS[name](
        lambda *dims: torch.randn(*dims).to(dtype), lambda *dims: nan(*dims, dtype=dtype)
    )
    expected = 0 if name in REFUSED else SEVERAL.get(name, 1)
    assert launches(a, b, out) == expected
    if expected == 0:
        with pytest.raises(ValueError, match="cuBLASLt cannot multiply"):
            matmul("cublaslt", a, b, out)
        return
    check(a, b, out)
    assert fake.counts().launches == expected


@given(problem=problems(), has_bias=st.booleans(), nbytes=st.sampled_from([0, 1000, 1 << 21]))
@settings(deadline=None)
def test_any_strides_are_right_or_refused(library, problem, has_bias, nbytes):
    a, b, out = problem
    bias = torch.randn(out.shape[-1]).to(out.dtype) if has_bias else None
    before = out.untyped_storage().tolist() if out.numel() < 64 else None
    with fake_cublaslt.installed(library) as fake:
        expected = launches(a, b, out, bias=bias)
        given = [memory(a), memory(b), bias, *layout(a), *layout(b), *layout(out), "none"]
        workspace = torch.zeros(nbytes, dtype=torch.uint8)
        call = native.function("amp_ir.cublaslt.with_scratch")
        if expected == 0:
            with pytest.raises(ValueError, match="cuBLASLt cannot multiply"):
                call(NAME, workspace, *given, memory(out))
            assert before is None or out.untyped_storage().tolist() == before
            return
        call(NAME, workspace, *given, memory(out))
        exact, size = exact_product(a, b, bias)
        assert ((out.double() - exact).abs().max() / size) <= TOLERANCE[out.dtype]
        assert fake.misuses() == []
        assert fake.counts().launches == expected


def test_batches_that_do_not_join_are_looped_over_the_shorter(fake):
    q = torch.randn(7, 5, 12, 4).transpose(1, 2)  # [7, 12, 5, 4], heads inside of rows
    out = torch.empty(7, 12, 5, 5)
    check(q, q.mT, out)
    assert fake.counts().launches == 7


def test_nothing_outside_the_result_is_written(fake):
    wide = torch.zeros(20, 90)
    matmul("cublaslt", torch.randn(20, 33), torch.randn(33, 40), wide[:, 3:43])
    assert wide[:, :3].abs().sum() == 0 and wide[:, 43:].abs().sum() == 0


def test_low_sums_are_accumulated_in_float32(fake):
    ones = torch.ones(4, 4096, dtype=torch.bfloat16)
    out = torch.zeros(4, 4)
    matmul("cublaslt", ones, ones.T, out)
    assert (out == 4096).all()


def test_tf32_is_off_unless_the_call_says_so(fake):
    # 1 + 2^-12 is 1 in TF32, of 11 significant bits.
    a, b, out = torch.full((1, 1), 1 + 2**-12), torch.ones(1, 1), torch.zeros(1, 1)
    matmul("cublaslt", a, b, out)
    assert out.item() == 1 + 2**-12
    matmul("cublaslt", a, b, out, epilogue="none+tf32")
    assert out.item() == 1
    matmul("cublaslt", a, b, out, epilogue="gelu_tanh+tf32")
    assert out.item() == torch.nn.functional.gelu(torch.ones(()), approximate="tanh")
    low = a.bfloat16()
    matmul("cublaslt", low, low, out, epilogue="none+tf32")


def test_the_callers_workspace_is_used_and_none_otherwise(fake):
    a, b, out = torch.randn(17, 33), torch.randn(33, 21), torch.zeros(17, 21)
    given = arguments(a, b, out)
    workspace = torch.zeros(workspace_nbytes(given), dtype=torch.uint8)
    assert fake.counts().launches == 0 and out.abs().sum() == 0
    native.function("amp_ir.cublaslt.with_scratch")(NAME, workspace, *given)
    assert fake.counts().workspace > 0 and bool((workspace == 0xA5).any())
    assert relative_error(out, a.double() @ b.double()) <= TOLERANCE[torch.float32]
    native.function(NAME)(*given)
    assert fake.counts().workspace == 0


def test_workspace_is_known_without_cublaslt():
    """A step is planned where there is no GPU: the shapes alone say how much is needed."""
    native.function("amp_ir.cublaslt.use")("/nowhere")
    try:
        few, many = (
            workspace_nbytes(
                arguments(torch.empty(n, 8), torch.empty(8, n), torch.empty(n, n))
            )
            for n in (8, 2048)
        )  # fmt: skip
    finally:
        native.function("amp_ir.cublaslt.use")("")
    assert few < many <= (32 << 20) + 256


def test_a_problem_is_looked_up_once(fake):
    native.function("amp_ir.cublaslt.clear_cache")()
    a, b, out = torch.randn(64), torch.randn(64), torch.empty(64)

    def run(offset: int = 0, epilogue: str = "none") -> None:
        views = (t[offset : offset + 16].view(4, 4) for t in (a, b, out))
        matmul("cublaslt", *views, epilogue=epilogue)

    run(), run()
    assert fake.counts().heuristics == 1
    run(1)  # aligned to 4 bytes only
    assert fake.counts().heuristics == 2
    run(epilogue="gelu_tanh"), run(epilogue="none+tf32")
    assert fake.counts().heuristics == 4
    assert native.function("amp_ir.cublaslt.cached_plans")() == 4


def test_calls_with_workspace_at_another_place_share_what_was_looked_up(fake):
    native.function("amp_ir.cublaslt.clear_cache")()
    given = arguments(torch.randn(17, 33), torch.randn(33, 21), torch.zeros(17, 21))
    nbytes = workspace_nbytes(given)
    workspace = torch.zeros(nbytes + 192, dtype=torch.uint8)
    for start in (0, 64, 128, 192):
        part = workspace[start : start + nbytes]
        native.function("amp_ir.cublaslt.with_scratch")(NAME, part, *given)
    assert fake.counts().heuristics == 1 and fake.counts().workspace > 0


def test_the_cache_is_bounded_and_drops_what_it_made(fake):
    native.function("amp_ir.cublaslt.clear_cache")()
    alive = fake.counts().alive
    for n in range(1, 601):
        matmul("cublaslt", torch.ones(1, 1), torch.ones(1, n), torch.empty(1, n))
    assert native.function("amp_ir.cublaslt.cached_plans")() == 512
    assert fake.counts().alive == alive + 3 * 512
    native.function("amp_ir.cublaslt.clear_cache")()
    assert fake.counts().alive == alive


def test_threads_share_the_cache(fake):
    native.function("amp_ir.cublaslt.clear_cache")()
    failures = []

    def run(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for n in (3, 5, 8, 13) * 10:
            a, bias = (torch.randn(*d, generator=generator) for d in ((n, 6), (7,)))
            b, out = torch.randn(6, 7, generator=generator), torch.empty(n, 7)
            matmul("cublaslt", a, b, out, bias=bias)
            if relative_error(out, a.double() @ b.double() + bias) > TOLERANCE[torch.float32]:
                failures.append(n)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_it_runs_on_the_environments_stream(fake):
    device = tvm_ffi.device("cpu", 0)
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.empty(2, 2)
    with tvm_ffi.use_raw_stream(device, 0x1234):
        matmul("cublaslt", a, b, out)
    assert fake.counts().stream == 0x1234


def message(call) -> str:
    with pytest.raises(Exception) as caught:  # noqa: B017 - the text is what is asserted
        call()
    return str(caught.value)


def test_messages(fake):
    a, b, out = torch.randn(2, 3), torch.randn(3, 4), torch.empty(2, 4)
    advice = (
        "; ask amp_ir.cublaslt.launches first: where it says 0, copy the operand, leave the "
        "epilogue to a kernel, or use amp_ir.torch_cuda.matmul"
    )
    begin = f"{NAME}: cuBLASLt cannot multiply a [2, 3] @ b [3, 4] -> out [2, 4]: "
    wide = torch.empty(2, 4, 2)[..., 0]
    cases = [
        ((a, b, wide), {}, "a, b or out has no unit stride among its last two dims, or rows that "
         "overlap"),
        ((a, b.half(), out), {}, "a and b differ in dtype"),
        ((a, b, out.half()), {}, "out is neither float32 nor of the operands' dtype"),
        ((a, b, out), {"bias": torch.ones(4).half()}, "bias is not of out's dtype"),
        ((a, b, torch.empty(4, 2).mT), {"bias": torch.ones(4)},
         "out has no unit stride along n, which a bias needs, or a or b has none at all"),
        ((a, b, out), {"epilogue": "relu"}, "cuBLASLt's relu turns NaN into 0"),
        ((a, b, out), {"epilogue": "gelu"},
         "gelu is exact, and cuBLASLt's is the tanh approximation"),
    ]  # fmt: skip
    for tensors, options, why in cases:
        assert message(lambda t=tensors, o=options: matmul("cublaslt", *t, **o)) == (
            begin + why + advice
        )
        assert launches(*tensors, **options) == 0
    assert message(lambda: matmul("cublaslt", a, torch.randn(5, 4), out)) == (
        f"{NAME}: a [2, 3] @ b [5, 4] does not give out [2, 4]; "
        "expected [batch..., m, k] @ [batch..., k, n] -> [batch..., m, n]"
    )
    assert message(lambda: matmul("cublaslt", a, b, out, epilogue="tanh+tf32")) == (
        f'{NAME}: epilogue "tanh"; expected none, relu, gelu or gelu_tanh'
    )


def test_sums_of_no_terms_are_left_to_another_library(fake):
    a, b, out = torch.empty(2, 0), torch.empty(0, 3), torch.zeros(2, 3)
    assert launches(a, b, out) == 0
    with pytest.raises(ValueError, match="cuBLASLt cannot multiply .*: the sums have no terms"):
        matmul("cublaslt", a, b, out)


def test_an_empty_result_is_left_alone(fake):
    matmul("cublaslt", torch.empty(0, 3), torch.randn(3, 4), torch.empty(0, 4))
    assert fake.counts().launches == 0


def run_python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(SUPPORT), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_the_environment_names_a_library(library):
    program = """
        from amp_ir.host import native
        print(native.function("amp_ir.cublaslt.available")(),
              native.function("amp_ir.cublaslt.version")())
    """
    assert run_python(program, AMP_IR_CUBLASLT=str(library)) == "True 130000\n"


def test_without_cublaslt_only_a_call_fails():
    program = """
        import warnings, torch
        from amp_ir.host import native
        from native_calls import matmul
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            native.load()
        print(native.has("amp_ir.cublaslt.matmul"), native.function("amp_ir.cublaslt.available")())
        try:
            matmul("cublaslt", torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2))
        except RuntimeError as error:
            print(error)
    """
    lines = run_python(program, AMP_IR_CUBLASLT="/nowhere/libcublasLt.so.13").splitlines()
    assert lines[0] == "True False"
    assert lines[1:] == [
        "cuBLASLt, which the matmuls of a CUDA step call, cannot be loaded:",
        "  /nowhere/libcublasLt.so.13: cannot open shared object file: No such file or directory",
        "Install a CUDA build of PyTorch, or `pip install nvidia-cublas`, or set AMP_IR_CUBLASLT "
        "to the path of libcublasLt.so.13 or .12",
    ]


def test_a_library_of_the_hosts_memory_is_not_mistaken_for_a_gpus(tmp_path):
    """Without the mark of the stand-in, tensors of the CPU are refused before they are touched."""
    source, path = SUPPORT / "fake_cublaslt.cc", tmp_path / "libunmarked.so"
    command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{KERNELS}", str(source)]
    command += ["-o", str(path)]
    subprocess.run([*command, "-Damp_ir_cublaslt_is_on_host=amp_ir_unmarked"], check=True)
    native.function("amp_ir.cublaslt.use")(str(path))
    try:
        t = torch.ones(2, 2)
        assert message(lambda: matmul("cublaslt", t, t, t)) == (
            f"{NAME}: the tensors are on device type 1; expected CUDA tensors (2)"
        )
    finally:
        native.function("amp_ir.cublaslt.use")("")


def test_shapes_and_strides_must_come_in_pairs(fake):
    count = native.function("amp_ir.cublaslt.launches")
    dims = [shape(d) for d in ((2, 3), (3,), (3, 4), (4, 1), (2, 4), (4, 1))]
    assert message(lambda: count(*dims, *["float32"] * 3, None, "none")) == (
        "amp_ir.cublaslt.launches: a has 2 dims and 1 strides; expected as many of each, at most 6"
    )


def cuda_headers() -> list[Path]:
    """Folders that hold cublasLt.h and what it includes, of wheels or of a toolkit; or nothing."""
    folders = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"]
    for wheel in ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-runtime"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(wheel) or []:
                if file.name in ("cublasLt.h", "library_types.h"):
                    folders.append(Path(str(file.locate())).parent)
    needed = ("cublasLt.h", "library_types.h")
    has_all = all(any((folder / name).exists() for folder in folders) for name in needed)
    return folders if has_all else []


def test_our_declarations_are_nvidias():
    folders = cuda_headers()
    if not folders:
        pytest.skip("no cublasLt.h here (it comes with a CUDA toolkit or the wheel nvidia-cublas)")
    command = ["g++", "-std=c++17", "-fsyntax-only", f"-I{KERNELS}"]
    command += [f"-I{folder}" for folder in folders]
    subprocess.run([*command, str(SUPPORT / "cublaslt_declarations.cc")], check=True)
