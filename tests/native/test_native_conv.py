# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their gradients, in both libraries, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from amp_ir.host import native
from convolution_calls import CASES, CHANNELS, DTYPES, ORDERS, Case, channels_last, operands
from native_calls import LIBRARIES, TOLERANCE, convolve, relative_error

VERBS = ("conv", "conv_backward_input", "conv_backward_weight")


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


# One activation has few channels, stored plainly, the other has many, stored last.
FEW_AND_MANY = {
    "first layer": (Case((17, 19), (3, 3), (1, 1), (1, 1), (1, 1)), (3, 24)),
    "last layer": (Case((12, 13), (3, 3), (1, 1), (1, 1), (1, 1)), (20, 3)),
    "strided": (Case((33, 37), (7, 7), (2, 2), (3, 3), (1, 1)), (3, 32)),
    "patches": (Case((40, 36), (4, 4), (4, 4), (0, 0), (1, 1)), (3, 48)),
    "one channel": (Case((20, 21), (3, 3), (1, 1), (1, 1), (1, 1)), (1, 16)),
    "scores": (Case((9, 11), (1, 1), (1, 1), (0, 0), (1, 1)), (33, 1)),
    "1d": (Case((300,), (5,), (2,), (2,), (1,)), (4, 17)),
    "3d": (Case((6, 9, 8), (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1)), (2, 40)),
}


@pytest.mark.parametrize("order", ["plain", "batch inside"])
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "->".join(str(t)[6:] for t in d))
@pytest.mark.parametrize("name", FEW_AND_MANY)
def test_few_channels_beside_channels_last(name, dtypes, order):
    if not native.has("amp_ir.onednn.conv"):
        pytest.skip("onednn is not in this build")
    case, channels = FEW_AND_MANY[name]
    for verb, parts in operands(case, (*channels, 1), dtypes, lambda t: t).items():
        first, second, out = (
            (channels_last if t.shape[1] == max(channels) else ORDERS[order])(t) for t in parts[:3]
        )
        convolve("onednn", verb, first, second, out, groups=1, **case.options)
        assert relative_error(out, parts[3]) <= TOLERANCE[out.dtype], verb


# What oneDNN 3.2 computes from memory that it did not write, on one CPU or another.
UNWRITTEN = {
    "a window at a stride over one place": Case((1,), (3,), (2,), (1,), (1,)),
    "an idle tap at a stride": Case((9, 2), (2, 3), (2, 3), (0, 1), (1, 1)),
    "a window wider than the row": Case((12, 2), (1, 5), (2, 3), (0, 2), (1, 1)),
    "two frames": Case((2, 6, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "a window higher than the frame": Case((4, 5, 4), (3, 7, 1), (1, 2, 1), (0, 1, 0), (1, 1, 1)),
    "frames at a stride in padding": Case((4, 8, 8), (5, 3, 3), (2, 4, 1), (3, 0, 1), (1, 1, 1)),
    "many frames, too": Case((8, 13, 8), (7, 7, 2), (4, 1, 3), (5, 2, 1), (1, 1, 1)),
}


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "->".join(str(t)[6:] for t in d))
@pytest.mark.parametrize("name", UNWRITTEN)
def test_weight_gradients_do_not_read_unwritten_memory(name, dtypes):
    if not native.has("amp_ir.onednn.conv_backward_weight"):
        pytest.skip("onednn is not in this build")
    case = UNWRITTEN[name]
    for channels in [(16, 32), (17, 4), (1, 16), (64, 17)]:
        for order in (ORDERS["plain"], channels_last):
            problem = operands(case, (*channels, 1), dtypes, order)
            first, second, out, expected = problem["conv_backward_weight"]
            # What was freed last is what the next allocation has in it.
            del problem
            freed = [torch.full((1 << size,), 1e30) for size in range(6, 18)]
            del freed
            convolve("onednn", "conv_backward_weight", first, second, out, groups=1, **case.options)
            assert relative_error(out, expected) <= TOLERANCE[out.dtype], (channels, order)


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
