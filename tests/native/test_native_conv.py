# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their gradients, in both libraries, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from amp_ir.host import native
from convolution_calls import CASES, CHANNELS, ORDERS, Case, channels_last, operands
from native_calls import LIBRARIES, TOLERANCE, convolve, relative_error

VERBS = ("conv", "conv_backward_input", "conv_backward_weight")

DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "->".join(str(t)[6:] for t in d))
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("name", CASES)
def test_against_float64(library, name, channels, dtypes):
    if not native.has(f"amp_ir.{library}.conv"):
        pytest.skip(f"{library} is not in this build")
    case, groups = CASES[name], CHANNELS[channels][2]
    for order_name, order in ORDERS.items():
        for verb, parts in operands(case, CHANNELS[channels], dtypes, order).items():
            first, second, out, expected = parts
            convolve(library, verb, first, second, out, groups=groups, **case.options)
            error = relative_error(out, expected)
            assert error <= TOLERANCE[out.dtype], f"{verb}, {order_name}: {error}"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 7, 8, 9])
def test_strided_pointwise_weight_gradients_channels_last(library, channels):
    # oneDNN's jit_1x1:avx2 writes past its workspace with 2 to 7 channels: eager PyTorch 2.13 is
    # wrong in 116 of 200 gradients of a convolution of 3 channels with 5 kernels, and may hang.
    if not native.has(f"amp_ir.{library}.conv"):
        pytest.skip(f"{library} is not in this build")
    float32 = (torch.float32, torch.float32)
    for size, strides in [((8, 8), (2, 2)), ((11, 9), (1, 3)), ((12, 6), (2, 1))] * 10:
        case = Case(size, (1, 1), strides, (0, 0), (1, 1))
        problem = operands(case, (channels, 5, 1), float32, channels_last)
        first, second, out, expected = problem["conv_backward_weight"]
        convolve(library, "conv_backward_weight", first, second, out, groups=1, **case.options)
        assert relative_error(out, expected) <= TOLERANCE[out.dtype], (size, strides)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("channels", CHANNELS)
def test_no_reference_implementation_is_used(name, channels):
    if not native.has("amp_ir.onednn.conv"):
        pytest.skip("onednn is not in this build")
    native.function("amp_ir.onednn.clear_cache")()
    for dtypes in DTYPES:
        test_against_float64("onednn", name, channels, dtypes)
    assert not [i for i in native.function("amp_ir.onednn.implementations")() if "ref" in i]


def test_weight_gradients_of_low_inputs_are_not_rounded():
    # 4096 products of 1 sum to 4096 + 1; bfloat16 would give 4096.
    if not native.has("amp_ir.onednn.conv_backward_weight"):
        pytest.skip("onednn is not in this build")
    x = torch.ones(1, 1, 17, 241, dtype=torch.bfloat16)
    grad = torch.ones(1, 1, 17, 241, dtype=torch.bfloat16)
    out = torch.zeros(1, 1, 1, 1)
    options = {"strides": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    convolve("onednn", "conv_backward_weight", grad, x, out, groups=1, **options)
    assert out.item() == 17 * 241


@pytest.mark.parametrize("library", LIBRARIES)
def test_messages(library):
    if not native.has(f"amp_ir.{library}.conv"):
        pytest.skip(f"{library} is not in this build")
    x, w, y = torch.zeros(2, 3, 8, 8), torch.zeros(5, 3, 3, 3), torch.zeros(2, 5, 8, 8)
    options = {"strides": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    with pytest.raises(ValueError) as caught:
        convolve(library, "conv", x, w, y, groups=1, **options)
    assert str(caught.value) == (
        f"amp_ir.{library}.conv: x [2, 3, 8, 8] and w [5, 3, 3, 3] do not give y [2, 5, 8, 8] "
        "with strides [1, 1], padding [0, 0], dilation [1, 1], groups 1"
    )
    options["padding"] = (1,)
    with pytest.raises(ValueError) as caught:
        convolve(library, "conv_backward_input", y, w, x, groups=1, **options)
    assert str(caught.value) == (
        f"amp_ir.{library}.conv_backward_input: x [2, 3, 8, 8], w [5, 3, 3, 3], y [2, 5, 8, 8], "
        "strides [1, 1], padding [1], dilation [1, 1]; "
        "expected 1 to 3 spatial dims, the same in all of them"
    )
