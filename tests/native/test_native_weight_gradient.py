# SPDX-License-Identifier: Apache-2.0
"""Gradients of a window's weight from images with channels last, against PyTorch in float64.

With AVX2 and no AVX-512 they are kernels of ours; on others, those of a process with that ISA.
"""

from __future__ import annotations

from random import Random

import pytest
import torch

from amp_ir.host import native
from convolution_calls import DTYPES, Case, channels_last, operands, run_with_isa
from native_calls import TOLERANCE, convolve, relative_error

VERB = "conv_backward_weight"
has_onednn = native.has("amp_ir.onednn.conv")
isa = native.function("amp_ir.onednn.isa")() if has_onednn else ""
needs_ours = pytest.mark.skipif(
    "avx2" not in isa or "avx512" in isa, reason="these gradients are oneDNN's on this CPU"
)


def random_case(random: Random) -> tuple[Case, int, int]:
    """A case and its channels: windows up to 7 x 7, odd sizes, padding beyond the window."""
    rank = random.choice([1, 2, 2, 2])
    kernel = tuple(random.choice([1, 2, 3, 3, 4, 5, 7]) for _ in range(rank))
    dilation = tuple(random.choice([1, 1, 2, 3]) for _ in range(rank))
    strides = tuple(random.choice([1, 1, 2, 3, 4]) for _ in range(rank))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = tuple(random.choice([0, n // 2, n // 2, n + 1]) for n in spans)
    size = tuple(
        max(random.choice([1, 4, 7, 13, 20, 40]), n - 2 * p)
        for n, p in zip(spans, padding, strict=True)
    )
    case = Case(size, kernel, strides, padding, dilation, samples=random.choice([1, 2, 3, 9]))
    channels, outputs = (random.choice([8, 12, 13, 15, 16, 17, 24, 33, 40]) for _ in range(2))
    return case, channels, outputs


def check(random: Random) -> None:
    case, channels, outputs = random_case(random)
    for dtypes in DTYPES:
        problem = operands(case, (channels, outputs, 1), dtypes, channels_last)
        grad, x, out, expected = problem[VERB]
        if not expected.any():  # a window of padding alone
            continue
        convolve("onednn", VERB, grad, x, out, groups=1, **case.options)
        error = relative_error(out, expected)
        assert error <= TOLERANCE[out.dtype], (case, channels, outputs, dtypes, error)


@needs_ours
@pytest.mark.parametrize("seed", range(60))
def test_against_float64(seed):
    torch.manual_seed(seed)
    check(Random(seed))


@pytest.mark.skipif(not has_onednn, reason="onednn is not in this build")
@pytest.mark.skipif("avx2" not in isa and "avx512" not in isa, reason="this CPU has no AVX2")
def test_on_a_cpu_with_avx2_alone():
    program = (
        "from random import Random\n"
        "from amp_ir.host import native\n"
        "import test_native_weight_gradient as tests\n"
        "for seed in range(100, 140): tests.check(Random(seed))\n"
        "names = set(map(str, native.function('amp_ir.onednn.implementations')()))\n"
        "ours = 'conv_backward_weight outer products'\n"
        "assert {ours, f'widen+widen+{ours}+narrow', f'widen+widen+{ours}'} <= names, names\n"
    )
    run_with_isa("AVX2", __file__, program)


@needs_ours
@pytest.mark.parametrize(
    ("case", "channels"),
    [
        (Case((33, 29), (3, 3), (1, 1), (1, 1), (1, 1), samples=5), (40, 50)),  # several parts
        (Case((4, 5), (3, 3), (1, 1), (1, 1), (1, 1), samples=3), (200, 70)),  # one block
        (Case((24, 24), (3, 3), (1, 1), (1, 1), (1, 1), samples=2), (96, 48)),  # blocks, one part
    ],
)
def test_results_do_not_depend_on_the_number_of_threads(case, channels):
    float32 = (torch.float32, torch.float32)
    grad, x, out, _ = operands(case, (*channels, 1), float32, channels_last)[VERB]
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            convolve("onednn", VERB, grad, x, out, groups=1, **case.options)
        finally:
            torch.set_num_threads(before)
        results.append(out.clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_ours
def test_weights_and_channels_in_other_orders():
    # Images are parts of a concatenation along the channels, the weight has its channels last.
    x = channels_last(torch.randn(2, 56, 9, 10))[:, 16:40]
    grad = channels_last(torch.randn(2, 30, 9, 10))[:, 3:21]
    out = channels_last(torch.full((18, 24, 3, 3), float("nan")))
    options = {"strides": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    native.function("amp_ir.onednn.clear_cache")()
    convolve("onednn", VERB, grad, x, out, groups=1, **options)
    exact = torch.zeros(18, 24, 3, 3, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.conv2d(x.double(), exact, padding=1).backward(grad.double())
    assert relative_error(out, exact.grad) <= TOLERANCE[torch.float32]
    assert "outer products" in str(native.function("amp_ir.onednn.implementations")())


@needs_ours
def test_padding_is_not_multiplied():
    # An infinity beside the border meets no zero of padding.
    x = channels_last(torch.ones(1, 16, 4, 4))
    grad = channels_last(torch.zeros(1, 16, 4, 4))
    grad[:, :, 0, 0] = float("inf")
    out = torch.zeros(16, 16, 3, 3)
    options = {"strides": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    convolve("onednn", VERB, grad, x, out, groups=1, **options)
    assert torch.equal(out[..., 0, :], torch.zeros(16, 16, 3))
    assert torch.equal(out[..., 0], torch.zeros(16, 16, 3))
    assert torch.isinf(out[..., 1:, 1:]).all()


@pytest.mark.skipif(not has_onednn, reason="onednn is not in this build")
@pytest.mark.parametrize(
    ("case", "channels"),
    [
        (Case((40000,), (3,), (1,), (1,), (1,), samples=1), (16, 16)),  # rows too long to copy
        (Case((8, 8), (1, 1), (1, 1), (0, 0), (1, 1)), (16, 16)),  # a single position
        (Case((8, 8), (3, 3), (1, 1), (0, 0), (1, 1)), (16, 8)),  # few channels
    ],
)
def test_what_is_left_to_onednn(case, channels):
    float32 = (torch.float32, torch.float32)
    grad, x, out, expected = operands(case, (*channels, 1), float32, channels_last)[VERB]
    native.function("amp_ir.onednn.clear_cache")()
    convolve("onednn", VERB, grad, x, out, groups=1, **case.options)
    # oneDNN adds 40000 terms one after the other: their roundings by 2^-24 add up.
    assert relative_error(out, expected) <= 2**-14
    assert "outer products" not in str(native.function("amp_ir.onednn.implementations")())
