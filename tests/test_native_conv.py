# SPDX-License-Identifier: Apache-2.0
"""Convolutions and their gradients, in both libraries, against PyTorch in float64."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from native_calls import LIBRARIES, TOLERANCE, convolve, relative_error

from amp_ir import native

VERBS = ("conv", "conv_backward_input", "conv_backward_weight")


@attrs.frozen
class Case:
    """One convolution of 2 samples; spatial vectors have one entry a dim."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {"strides": self.strides, "padding": self.padding, "dilation": self.dilation}


CASES = {
    "1d": Case((9,), (3,), (1,), (1,), (1,)),
    "1d strided and dilated": Case((11,), (3,), (2,), (1,), (2,)),
    "2d": Case((7, 8), (3, 3), (1, 1), (1, 1), (1, 1)),
    "2d uneven": Case((9, 7), (3, 2), (2, 1), (0, 1), (1, 2)),
    "2d strided": Case((9, 9), (3, 3), (2, 2), (1, 1), (1, 1)),
    "2d pointwise, strided": Case((8, 8), (1, 1), (2, 2), (0, 0), (1, 1)),
    "3d": Case((5, 6, 7), (3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2)),
}
CHANNELS = {"few": (3, 5, 1), "blocks": (16, 32, 1), "groups": (4, 6, 2), "depthwise": (8, 8, 8)}
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
]


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.movedim(1, -1).contiguous().movedim(-1, 1)


def batch_inside(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


ORDERS = {"plain": lambda t: t, "channels last": channels_last, "batch inside": batch_inside}


def operands(case: Case, channels: tuple[int, int, int], dtypes, order):
    """For each verb, its two operands, its result to fill, and the result in float64."""
    inputs, outputs, groups = channels
    low, out = dtypes
    x = torch.randn(2, inputs, *case.size).to(low)
    w = torch.randn(outputs, inputs // groups, *case.kernel).to(low)
    exact_x, exact_w = x.double().requires_grad_(), w.double().requires_grad_()
    forward = (F.conv1d, F.conv2d, F.conv3d)[len(case.size) - 1]
    exact_y = forward(
        exact_x, exact_w, None, case.strides, case.padding, case.dilation, groups=groups
    )
    grad = torch.randn(exact_y.shape).to(low)
    exact_y.backward(grad.double())
    x, w, grad = order(x), order(w), order(grad)

    def empty(like: torch.Tensor) -> torch.Tensor:
        return order(torch.full(like.shape, float("nan"), dtype=out))

    return {
        "conv": (x, w, empty(exact_y), exact_y.detach()),
        "conv_backward_input": (grad, w, empty(x), exact_x.grad),
        "conv_backward_weight": (grad, x, empty(w), exact_w.grad),
    }


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


def test_no_reference_implementation_is_used():
    if not native.has("amp_ir.onednn.conv"):
        pytest.skip("onednn is not in this build")
    native.function("amp_ir.onednn.clear_cache")()
    for dtypes in DTYPES:
        test_against_float64("onednn", "2d", "blocks", dtypes)
        test_against_float64("onednn", "3d", "few", dtypes)
        test_against_float64("onednn", "1d", "depthwise", dtypes)
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
