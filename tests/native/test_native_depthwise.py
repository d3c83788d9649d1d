# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions of images with channels last, and gradients, against PyTorch in float64.

On a CPU without AVX-512 they are kernels of ours; on others, those that oneDNN has no kernel for
depthwise windows for, and those of a process with a lower ISA.
"""

from __future__ import annotations

from random import Random

import pytest
import torch

from amp_ir.host import native
from convolution_calls import DTYPES, Case, channels_last, operands, run_with_isa
from native_calls import TOLERANCE, convolve, relative_error

has_onednn = native.has("amp_ir.onednn.conv")
needs_onednn = pytest.mark.skipif(not has_onednn, reason="onednn is not in this build")
has_avx512 = has_onednn and "avx512" in native.function("amp_ir.onednn.isa")()


def random_case(random: Random) -> tuple[Case, int]:
    """A case and its channels: windows up to 9 x 9, odd sizes, padding beyond the window."""
    rank = random.choice([1, 2, 2, 2])
    kernel = tuple(random.choice([1, 2, 3, 3, 5, 7, 7, 8, 9]) for _ in range(rank))
    dilation = tuple(random.choice([1, 1, 2, 3]) for _ in range(rank))
    strides = tuple(random.choice([1, 1, 2, 3]) for _ in range(rank))
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    padding = tuple(random.choice([0, n // 2, n // 2, n + 1]) for n in spans)
    size = tuple(
        max(random.choice([1, 4, 7, 13, 20]), n - 2 * p)
        for n, p in zip(spans, padding, strict=True)
    )
    case = Case(size, kernel, strides, padding, dilation, samples=random.randint(1, 3))
    return case, random.choice([2, 8, 15, 16, 17, 32, 40])


def check(random: Random) -> None:
    case, channels = random_case(random)
    for dtypes in DTYPES:
        problem = operands(case, (channels, channels, channels), dtypes, channels_last)
        for verb, (first, second, out, expected) in problem.items():
            if not expected.any():  # a window of padding alone
                continue
            convolve("onednn", verb, first, second, out, groups=channels, **case.options)
            error = relative_error(out, expected)
            # Where oneDNN computes in float32, its chains of sums are longer than ours.
            tolerance = max(TOLERANCE[out.dtype], 4e-6 if has_avx512 else 0)
            assert error <= tolerance, (verb, case, channels, dtypes, error)


@needs_onednn
@pytest.mark.parametrize("seed", range(40))
def test_against_float64(seed):
    torch.manual_seed(seed)
    check(Random(seed))


@needs_onednn
@pytest.mark.parametrize("isa", ["AVX2", "SSE41"])
def test_on_a_lesser_cpu(isa):
    program = (
        "from random import Random\n"
        "from amp_ir.host import native\n"
        "import test_native_depthwise as tests\n"
        "for seed in range(100, 130): tests.check(Random(seed))\n"
        "names = native.function('amp_ir.onednn.implementations')()\n"
        "assert {'conv depthwise rows', 'conv_backward_input depthwise rows',\n"
        "        'conv_backward_weight depthwise rows'} <= set(map(str, names)), list(names)\n"
    )
    run_with_isa(isa, __file__, program)


def implementation() -> str:
    """What the one call since `clear_cache` was computed by."""
    return str(*native.function("amp_ir.onednn.implementations")())


def weight_gradient(case: Case, channels: int, dtypes) -> str:
    """Check a weight's gradient, and return what computed it."""
    operands_of = operands(case, (channels, channels, channels), dtypes, channels_last)
    first, second, out, expected = operands_of["conv_backward_weight"]
    native.function("amp_ir.onednn.clear_cache")()
    convolve("onednn", "conv_backward_weight", first, second, out, groups=channels, **case.options)
    assert relative_error(out, expected) <= TOLERANCE[out.dtype], implementation()
    return implementation()


@needs_onednn
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [33, 96])
@pytest.mark.parametrize("strides", [(1, 1), (2, 2)])
def test_weights_of_7_x_7_windows_are_ours_in_every_dtype(dtypes, channels, strides):
    case = Case((17, 18), (7, 7), strides, (3, 3), (1, 1))
    assert "depthwise rows" in weight_gradient(case, channels, dtypes)


@needs_onednn
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(33, 33), (16, 100), (9, 40)])
@pytest.mark.parametrize("kernel", [(3, 3), (3, 1), (1, 3), (5, 5)])
def test_weights_of_dilated_windows(dtypes, size, kernel):
    # oneDNN's in bfloat16 are of memory that it did not write, for most of these.
    dilation = (2, 3)
    padding = tuple(d * (k // 2) for d, k in zip(dilation, kernel, strict=True))
    weight_gradient(Case(size, kernel, (1, 1), padding, dilation), 32, dtypes)


@needs_onednn
def test_weight_of_a_dilated_window_with_rows_too_long_for_a_buffer():
    bfloat16 = (torch.bfloat16, torch.bfloat16)
    case = Case((9, 4100), (3, 3), (1, 1), (2, 2), (2, 2), samples=1)
    assert "depthwise rows" not in weight_gradient(case, 32, bfloat16)


@needs_onednn
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_results_do_not_depend_on_the_number_of_threads(dtypes):
    case = Case((33, 29), (7, 7), (1, 1), (3, 3), (1, 1), samples=3)
    problem = operands(case, (40, 40, 40), dtypes, channels_last)
    if has_avx512:  # others are oneDNN's there
        problem = {"conv_backward_weight": problem["conv_backward_weight"]}
    before = torch.get_num_threads()
    for verb, (first, second, out, _) in problem.items():
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            try:
                convolve("onednn", verb, first, second, out, groups=40, **case.options)
            finally:
                torch.set_num_threads(before)
            results.append(out.clone())
        assert torch.equal(results[0], results[1]), verb
        assert torch.equal(results[0], results[2]), verb


@needs_onednn
def test_channels_of_a_larger_image():
    # As a part of a concatenation along the channels: a position is further from the next.
    x = channels_last(torch.randn(2, 56, 9, 10))[:, 16:40]
    w, grad = torch.randn(24, 1, 3, 3), channels_last(torch.randn(2, 24, 9, 10))
    options = {"strides": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 24}
    out = torch.full((24, 1, 3, 3), float("nan"))
    convolve("onednn", "conv_backward_weight", grad, x, out, **options)
    exact = w.double().requires_grad_()
    torch.nn.functional.conv2d(x.double(), exact, padding=1, groups=24).backward(grad.double())
    assert relative_error(out, exact.grad) <= TOLERANCE[torch.float32]


@needs_onednn
def test_rows_too_long_for_a_buffer_are_left_to_onednn():
    case = Case((20000,), (3,), (1,), (1,), (1,), samples=1)
    float32 = (torch.float32, torch.float32)
    first, second, out, expected = operands(case, (16, 16, 16), float32, channels_last)["conv"]
    native.function("amp_ir.onednn.clear_cache")()
    convolve("onednn", "conv", first, second, out, groups=16, **case.options)
    assert relative_error(out, expected) <= TOLERANCE[torch.float32]
    assert "depthwise rows" not in str(native.function("amp_ir.onednn.implementations")())
