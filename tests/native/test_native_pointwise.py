# SPDX-License-Identifier: Apache-2.0
"""Convolutions of single positions of images with channels last: matmuls on AVX2, in PyTorch's
numbers everywhere."""

from __future__ import annotations

import pytest
import torch

from amp_ir.host import native
from convolution_calls import DTYPES, Case, channels_last, operands
from native_calls import TOLERANCE, convolve, relative_error

has_onednn = native.has("amp_ir.onednn.conv")
isa = native.function("amp_ir.onednn.isa")() if has_onednn else ""
on_avx2 = "avx2" in isa and "avx512" not in isa
pytestmark = pytest.mark.skipif(not has_onednn, reason="onednn is not in this build")


def implementations() -> str:
    return str(list(native.function("amp_ir.onednn.implementations")()))


@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "->".join(str(t)[6:] for t in d))
@pytest.mark.parametrize("channels", [(24, 40), (17, 33), (2, 64), (16, 96), (40, 1)])
@pytest.mark.parametrize("size", [(7,), (9, 10), (1, 1), (5, 1), (3, 4, 5)])
def test_against_float64(size, channels, dtypes):
    rank = len(size)
    case = Case(size, (1,) * rank, (1,) * rank, (0,) * rank, (1,) * rank, samples=3)
    problem = operands(case, (*channels, 1), dtypes, channels_last)
    for verb, (first, second, out, expected) in problem.items():
        convolve("onednn", verb, first, second, out, groups=1, **case.options)
        error = relative_error(out, expected)
        assert error <= TOLERANCE[out.dtype], (verb, error)


@pytest.mark.skipif(not on_avx2, reason="these are convolutions of oneDNN's on this CPU")
@pytest.mark.parametrize(
    ("case", "channels", "matmuls"),
    [
        (Case((8, 8), (1, 1), (1, 1), (0, 0), (1, 1)), (24, 40), 3),
        # tiles of few columns
        (Case((8, 8), (1, 1), (1, 1), (0, 0), (1, 1)), (16, 40), 2),
        (Case((16, 32), (1, 1), (1, 1), (0, 0), (1, 1), samples=1), (256, 256), 3),
        (Case((8, 8), (1, 1), (2, 2), (0, 0), (1, 1)), (24, 40), 0),
        (Case((8, 8), (1, 1), (1, 1), (1, 1), (1, 1)), (24, 40), 0),
    ],
)
def test_what_is_a_matmul(case, channels, matmuls):
    float32 = (torch.float32, torch.float32)
    problem = operands(case, (*channels, 1), float32, channels_last)
    native.function("amp_ir.onednn.clear_cache")()
    for verb, (first, second, out, expected) in problem.items():
        convolve("onednn", verb, first, second, out, groups=1, **case.options)
        assert relative_error(out, expected) <= TOLERANCE[torch.float32], verb
    assert implementations().count("matmul ") == matmuls, implementations()


@pytest.mark.parametrize("part", ["channels", "columns"])
def test_parts_of_a_larger_image(part):
    # A part of the channels has rows further apart; one of the columns is no matrix.
    wide = channels_last(torch.randn(2, 56, 9, 10))
    x = wide[:, 16:40] if part == "channels" else wide[:, :24, :, 2:8]
    y = channels_last(torch.full((2, 30, *x.shape[2:]), float("nan")))
    w = torch.randn(30, 24, 1, 1)
    options = {"strides": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    convolve("onednn", "conv", x, w, y, groups=1, **options)
    exact = torch.nn.functional.conv2d(x.double(), w.double())
    assert relative_error(y, exact) <= TOLERANCE[torch.float32]
    dw, grad = torch.full_like(w, float("nan")), channels_last(torch.randn_like(y))
    convolve("onednn", "conv_backward_weight", grad, x, dw, groups=1, **options)
    exact = torch.einsum("nohw,nchw->oc", grad.double(), x.double())[..., None, None]
    assert relative_error(dw, exact) <= TOLERANCE[torch.float32]
