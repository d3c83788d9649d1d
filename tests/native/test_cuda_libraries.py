# SPDX-License-Identifier: Apache-2.0
"""cuBLASLt's and PyTorch's own kernels on a GPU, through the calls that a CUDA step makes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from amp_ir.host import native
from attention_calls import attend, attend_backward, exact_attention, heads_inside
from convolution_calls import CASES, CHANNELS, ORDERS, operands
from cublaslt_calls import NAME, arguments, launches, workspace_nbytes
from native_calls import TOLERANCE, convolve, layout, matmul, memory, relative_error
from strided_problems import DTYPE_PAIRS, DTYPES, problems

pytestmark = pytest.mark.gpu


def on_gpu(t: torch.Tensor) -> torch.Tensor:
    """The tensor on the GPU with the same strides, gaps and offset."""
    flat = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()).cuda()
    return flat.as_strided(t.shape, t.stride(), t.storage_offset())


def stored(*dims: int, dtype: torch.dtype, is_transposed: bool = False) -> torch.Tensor:
    *batch, m, n = dims
    t = torch.randn(*batch, n, m).mT if is_transposed else torch.randn(*dims)
    return on_gpu(t.to(dtype))


# Of PTX's tanh.approx.f32, which cuBLASLt's GELU may use: PTX ISA, "Floating Point Instructions".
TANH_ERROR = 2**-11
# cuDNN may choose Winograd, whose sums of transformed tiles lose some bits in float32.
WINOGRAD_ERROR = 5e-5


def check(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **options: Any) -> None:
    matmul("cublaslt", a, b, out.fill_(float("nan")), **options)
    expected = a.cpu().double() @ b.cpu().double()
    # Tensor cores sum in another order, and of low products exactly enough for one rounding.
    tolerance = 2 * TOLERANCE[out.dtype]
    if options.get("bias") is not None:
        expected = expected + options["bias"].cpu().double()
    if options.get("epilogue") == "gelu_tanh":
        expected = torch.nn.functional.gelu(expected, approximate="tanh")
        tolerance += TANH_ERROR
    assert relative_error(out.cpu(), expected) <= tolerance


@pytest.mark.parametrize(("low", "out"), DTYPE_PAIRS)
@pytest.mark.parametrize("dims", [(17, 33, 21), (128, 256, 64), (1, 64, 64)])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_every_transposition(low, out, dims, batch):
    m, k, n = dims
    for order in itertools.product([False, True], repeat=3):
        a = stored(*batch, m, k, dtype=low, is_transposed=order[0])
        b = stored(*batch, k, n, dtype=low, is_transposed=order[1])
        check(a, b, stored(*batch, m, n, dtype=out, is_transposed=order[2]))


@pytest.mark.parametrize(("low", "out"), DTYPE_PAIRS)
@pytest.mark.parametrize("epilogue", ["none", "gelu_tanh"])
def test_bias_and_epilogue(low, out, epilogue):
    a, b = stored(96, 64, dtype=low), stored(64, 80, dtype=low, is_transposed=True)
    bias = torch.randn(80).to(out).cuda()
    check(a, b, stored(96, 80, dtype=out), bias=bias, epilogue=epilogue)
    check(a, b, stored(96, 80, dtype=out), epilogue=epilogue)


@given(problem=problems())
@settings(max_examples=100)
def test_any_strides(problem):
    a, b, out = map(on_gpu, problem)
    if launches(*problem) == 0:
        return
    matmul("cublaslt", a, b, out)
    exact = problem[0].double() @ problem[1].double()
    size = (problem[0].double().abs() @ problem[1].double().abs()).max()
    assert ((out.cpu().double() - exact).abs().max() / size) <= 2 * TOLERANCE[out.dtype]


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_long_sums_are_float32_with_and_without_workspace(dtype):
    """Where a sum is split over k, its parts are not rounded to the result's dtype."""
    a, b = stored(64, 1 << 16, dtype=dtype), stored(1 << 16, 64, dtype=dtype)
    out = stored(64, 64, dtype=dtype)
    check(a, b, out)
    given = arguments(a, b, out)
    workspace = torch.empty(workspace_nbytes(given), dtype=torch.uint8, device="cuda")
    native.function("amp_ir.cublaslt.with_scratch")(NAME, workspace, *given)
    expected = a.cpu().double() @ b.cpu().double()
    assert relative_error(out.cpu(), expected) <= 2 * TOLERANCE[dtype]


def test_tf32_only_where_the_call_says_so():
    a, b = stored(256, 512, dtype=torch.float32), stored(512, 256, dtype=torch.float32)
    out, expected = stored(256, 256, dtype=torch.float32), a.cpu().double() @ b.cpu().double()
    matmul("cublaslt", a, b, out)
    assert relative_error(out.cpu(), expected) <= 4e-6
    matmul("cublaslt", a, b, out, epilogue="none+tf32")
    # Of 11 significant bits, 2^-11 a product, and many of them cancel.
    assert 4e-6 < relative_error(out.cpu(), expected) <= 2**-10


def test_nan_goes_through_every_epilogue():
    a, b = stored(64, 64, dtype=torch.float16), stored(64, 64, dtype=torch.float16)
    a[3] = float("nan")
    for epilogue in ("none", "gelu_tanh"):
        out = stored(64, 64, dtype=torch.float16)
        matmul("cublaslt", a, b, out, epilogue=epilogue)
        assert bool(out[3].isnan().all()) and not bool(out[4].isnan().any())


def test_a_call_allocates_nothing_and_can_be_recorded():
    a, b = stored(128, 256, dtype=torch.bfloat16), stored(256, 64, dtype=torch.bfloat16)
    out, side = stored(128, 64, dtype=torch.float32), torch.cuda.Stream()
    given = arguments(a, b, out)
    workspace = torch.empty(workspace_nbytes(given), dtype=torch.uint8, device="cuda")
    call = native.function("amp_ir.cublaslt.with_scratch")
    call(NAME, workspace, *given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call(NAME, workspace, *given)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    a.copy_(stored(128, 256, dtype=torch.bfloat16))
    out.zero_()
    graph.replay()
    expected = a.cpu().double() @ b.cpu().double()
    assert relative_error(out.cpu(), expected) <= 2 * TOLERANCE[torch.float32]


def test_matmul_runs_on_pytorchs_stream():
    a, b = stored(512, 512, dtype=torch.float32), stored(512, 512, dtype=torch.float32)
    out, stream = torch.zeros(512, 512, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        a.mul_(2)
        matmul("cublaslt", a, b, out)
        found = out.cpu()
    assert relative_error(found, a.cpu().double() @ b.cpu().double()) <= 4e-6


@pytest.mark.parametrize(("low", "out"), [*DTYPE_PAIRS, (torch.float32, torch.bfloat16)])
def test_pytorchs_matmul(low, out):
    a, b = stored(2, 3, 17, 33, dtype=low), stored(3, 33, 21, dtype=low, is_transposed=True)
    result = stored(2, 3, 17, 21, dtype=out)
    matmul("torch_cuda", a, b, result)
    expected = a.cpu().double() @ b.cpu().double()
    assert relative_error(result.cpu(), expected) <= 2 * max(TOLERANCE[low], TOLERANCE[out])


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16),
     (torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
)  # fmt: skip
@pytest.mark.parametrize("channels", CHANNELS)
def test_convolutions_and_their_gradients(monkeypatch, channels, dtypes):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    tolerance = max(4 * max(TOLERANCE[dtype] for dtype in dtypes), WINOGRAD_ERROR)
    for name, case in CASES.items():
        for order in ORDERS.values():
            for verb, parts in operands(case, CHANNELS[channels], dtypes, order).items():
                first, second, out = map(on_gpu, parts[:3])
                groups = CHANNELS[channels][2]
                convolve("torch_cuda", verb, first, second, out, groups=groups, **case.options)
                assert relative_error(out.cpu(), parts[3]) <= tolerance, f"{verb}, {name}"


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("width", [8, 64, 128, 256])
@pytest.mark.parametrize(("is_causal", "keys"), [(False, 77), (False, 40), (True, 40)])
def test_attention_and_its_gradient(dtype, width, is_causal, keys):
    q, grad = (heads_inside(2, 3, 40, width, dtype) for _ in range(2))
    k, v = (heads_inside(2, 3, keys, width, dtype) for _ in range(2))
    options = {"is_causal": is_causal, "scale": width**-0.5}
    inputs = [t.double().requires_grad_() for t in (q, k, v)]
    exact, exact_lse = exact_attention(*inputs, **options)
    exact.backward(grad.double())
    q, k, v, grad = map(on_gpu, (q, k, v, grad))
    out, lse = attend(q, k, v, **options)
    assert relative_error(out.cpu(), exact.detach()) <= 4 * TOLERANCE[dtype]
    assert float((lse.cpu() - exact_lse.detach()).abs().max()) <= 1e-4
    gradients = attend_backward(grad, q, k, v, out, lse, **options)
    for ours, theirs in zip(gradients, inputs, strict=True):
        assert relative_error(ours.cpu(), theirs.grad) <= 8 * TOLERANCE[dtype]


def test_pytorchs_kernels_wait_for_nothing_and_can_be_recorded():
    """Their memory comes from PyTorch's allocator, which knows of a recording of PyTorch's."""
    options = {"strides": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    x, w = on_gpu(torch.randn(2, 8, 9, 9).half()), on_gpu(torch.randn(16, 8, 3, 3).half())
    y, of_w = on_gpu(torch.zeros(2, 16, 9, 9).half()), on_gpu(torch.zeros(16, 8, 3, 3))
    q = on_gpu(heads_inside(2, 3, 40, 64, torch.float16))
    seen, lse = attend(q, q, q, is_causal=True, scale=0.125)

    def run() -> None:
        convolve("torch_cuda", "conv", x, w, y, **options)
        convolve("torch_cuda", "conv_backward_weight", y, x, of_w, **options)
        native.function("amp_ir.torch_cuda.attention")(
            *map(memory, (q, q, q)), *layout(q) * 3, True, 0.125, memory(seen.transpose(1, 2)), lse
        )

    run()
    expected = [t.clone() for t in (y, of_w, seen, lse)]
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for t in (y, of_w, seen, lse):
        t.zero_()
    graph.replay()
    for t, value in zip((y, of_w, seen, lse), expected, strict=True):
        torch.testing.assert_close(t, value)
