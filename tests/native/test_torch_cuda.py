# SPDX-License-Identifier: Apache-2.0
"""amp_ir.torch_cuda.* through a stand-in for libtorch_cuda that computes on the CPU."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import tvm_ffi

import fake_torch_cuda
from amp_ir.host import native
from attention_calls import attend, attend_backward, exact_attention, heads_inside
from convolution_calls import CASES, CHANNELS, ORDERS, operands
from fake_torch_cuda import Fake
from matmul_calls import LAYOUTS
from native_calls import TOLERANCE, convolve, matmul, relative_error

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_torch_cuda.build(tmp_path_factory.mktemp("torch_cuda"))


@pytest.fixture
def fake(library: Path) -> Iterator[Fake]:
    """The stand-in; every kernel runs inside of a stream guard, and all guards are closed."""
    with fake_torch_cuda.installed(library) as fake:
        before = fake.state()
        yield fake
        after = fake.state()
        assert after.open_guards == 0
        assert after.calls_without_guard == before.calls_without_guard


@pytest.mark.parametrize(
    ("low", "out"),
    [(d, d) for d in DTYPES] + [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
)
def test_matmul_in_every_layout(fake, low, out):
    for name, make in LAYOUTS.items():
        a, b, result = make(
            lambda *dims: torch.randn(*dims).to(low),
            lambda *dims: torch.full(dims, float("nan"), dtype=out),
        )
        matmul("torch_cuda", a, b, result)
        assert relative_error(result, a.double() @ b.double()) <= TOLERANCE[out], name


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
     (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)  # fmt: skip
@pytest.mark.parametrize("channels", CHANNELS)
def test_convolutions_and_their_gradients(fake, channels, dtypes):
    # A float32 result of low operands is rounded to their dtype once.
    tolerance = max(TOLERANCE[dtype] for dtype in dtypes)
    for name in ("1d strided and dilated", "2d uneven", "3d"):
        case = CASES[name]
        for order in ORDERS.values():
            for verb, parts in operands(case, CHANNELS[channels], dtypes, order).items():
                first, second, out, expected = parts
                groups = CHANNELS[channels][2]
                convolve("torch_cuda", verb, first, second, out, groups=groups, **case.options)
                assert relative_error(out, expected) <= tolerance, f"{verb}, {name}"


def dense(n: int, h: int, s: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, h, s, d).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("make", [heads_inside, dense])
@pytest.mark.parametrize(("is_causal", "keys"), [(False, 11), (False, 7), (True, 7)])
def test_attention_and_its_gradient(fake, dtype, make, is_causal, keys):
    q, grad = make(2, 3, 7, 16, dtype), make(2, 3, 7, 16, dtype)
    k, v = make(2, 3, keys, 16, dtype), make(2, 3, keys, 16, dtype)
    options = {"is_causal": is_causal, "scale": 0.3}
    out, lse = attend(q, k, v, **options)
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    exact, exact_lse = exact_attention(*inputs, **options)
    # Weights and scores are rounded too, each once: the error of a sum of a dozen such terms.
    assert relative_error(out, exact.detach()) <= 4 * TOLERANCE[dtype]
    assert float((lse - exact_lse.detach()).abs().max()) <= 1e-5
    exact.backward(grad.double())
    for ours, theirs in zip(
        attend_backward(grad, q, k, v, out, lse, **options), inputs, strict=True
    ):
        assert relative_error(ours, theirs.grad) <= 8 * TOLERANCE[dtype]


def test_the_environments_stream_and_device_are_pytorchs(fake):
    a, b, out = torch.ones(2, 2), torch.ones(2, 2), torch.empty(2, 2)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cpu", 0), 0x1230):
        matmul("torch_cuda", a, b, out)
    state = fake.state()
    assert (state.stream, state.device) == (0x1230, 0)


def message(call) -> str:
    with pytest.raises(Exception) as caught:  # noqa: B017 - the text is what is asserted
        call()
    return str(caught.value)


def test_a_guard_is_closed_after_an_error(fake):
    x, w, y = torch.zeros(1, 8, 4), torch.zeros(8, 8, 3), torch.zeros(1, 8, 2)
    options = {"strides": (1,), "padding": (0,), "dilation": (1,), "groups": 1}
    convolve("torch_cuda", "conv", x, w, y, **options)
    assert message(
        lambda: matmul("torch_cuda", torch.ones(2, 2), torch.ones(2, 2), torch.ones(2, 2),
                       epilogue="relu")
    ) == (
        "amp_ir.torch_cuda.matmul: it adds no bias and has no epilogue; expected none of either "
        "(amp_ir.cublaslt.matmul has both)"
    )  # fmt: skip


@pytest.mark.parametrize("change", ["dtype", "width", "causal", "strides", "heads"])
def test_attention_that_flash_attention_lacks_is_refused(fake, change):
    dtype = torch.float32 if change == "dtype" else torch.bfloat16
    width = 12 if change == "width" else 16
    q, k = dense(1, 2, 5, width, dtype), dense(1, 3 if change == "heads" else 2, 6, width, dtype)
    if change == "strides":
        k = k.mT.contiguous().mT
    found = message(
        lambda: attend(q, k, k, is_causal=change == "causal", scale=1 / math.sqrt(width))
    )
    assert found.startswith(f"amp_ir.torch_cuda.attention: q [1, 2, 5, {width}], k [1, ")
    assert found.endswith(
        "expected bfloat16 or float16 [n, h, s, d], [n, h, t, d] twice, dense along d, a multiple "
        "of 8 up to 256, and s = t if causal"
    )


def test_pytorch_has_every_function_that_is_looked_up():
    """All of those for the CPU, and in a build with CUDA those for it too."""
    source = Path(__file__).parents[2] / "src" / "kernels" / "torch" / "api.cc"
    names = set(re.findall(r'"(aoti_torch_\w+)"', source.read_text()))
    of_cuda = {name for name in names if "_cuda_" in name}
    assert len(names) > 20 and len(of_cuda) == 8
    folder = Path(torch.__path__[0]) / "lib"
    libraries = {"libtorch_cpu.so": names - of_cuda}
    if torch.version.cuda is not None:
        libraries["libtorch_cuda.so"] = of_cuda
    for file, expected in libraries.items():
        library = ctypes.CDLL(str(folder / file))
        assert [name for name in sorted(expected) if not hasattr(library, name)] == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch has CUDA kernels")
def test_without_cuda_only_a_call_fails():
    assert native.has("amp_ir.torch_cuda.conv_backward_weight")
    t = torch.ones(2, 2)
    assert message(lambda: matmul("torch_cuda", t, t, t)) == (
        "PyTorch's CUDA kernels, which convolutions and attention of a CUDA step call, are not in "
        "this PyTorch: it is a build without CUDA, or `import torch` has not run; install a CUDA "
        "build of PyTorch 2.11 or newer (pytorch.org)"
    )
