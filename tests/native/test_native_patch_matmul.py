# SPDX-License-Identifier: Apache-2.0
"""Convolutions in bfloat16 with more weights than positions, as matmuls of patches, against
PyTorch in float64.

They are matmuls where the CPU multiplies bfloat16; on others, in a process with a lower ISA, they
are what they were.
"""

from __future__ import annotations

import pytest
import torch

from amp_ir.host import native
from convolution_calls import ORDERS, Case, channels_last, operands, run_with_isa
from native_calls import TOLERANCE, convolve, relative_error

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
has_onednn = native.has("amp_ir.onednn.conv")
isa = native.function("amp_ir.onednn.isa")() if has_onednn else ""
has_amx = "amx" in isa
has_bfloat16 = has_amx or "bf16" in isa
pytestmark = pytest.mark.skipif(not has_onednn, reason="onednn is not in this build")
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="this CPU has no bfloat16 arithmetic")
needs_amx = pytest.mark.skipif(not has_amx, reason="this CPU has no AMX")

# Odd sizes, strides that leave a rest, and channels that are no multiple of a vector or a tile.
# All three of each are matmuls, those of `OVERLAPPING` with AMX; without it, the gradients of their
# weights.
SEPARATE = {
    "single positions": (Case((3, 5), (1, 1), (1, 1), (0, 0), (1, 1), samples=1), (81, 77)),
    "strided": (Case((5, 8), (1, 1), (2, 3), (0, 0), (1, 1), samples=1), (193, 201)),
    "one row of samples": (Case((1, 1), (1, 1), (1, 1), (0, 0), (1, 1), samples=7), (50, 65)),
    "patches": (Case((5, 7), (2, 3), (2, 3), (0, 0), (1, 1), samples=3), (47, 181)),
    "patches of few channels": (Case((9, 9), (8, 8), (8, 8), (0, 0), (1, 1)), (3, 77)),
    "gaps": (Case((9, 7), (2, 1), (4, 3), (0, 0), (1, 1), samples=1), (150, 203)),
    "padded": (Case((4, 4), (1, 1), (2, 2), (1, 1), (1, 1), samples=1), (195, 193)),
    "a signal": (Case((7,), (3,), (3,), (1,), (1,)), (101, 167)),
}
OVERLAPPING = {
    "3 x 3": (Case((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), samples=1), (131, 225)),
    "strided 3 x 3": (Case((5, 4), (3, 3), (2, 2), (1, 1), (1, 1)), (150, 203)),
    "dilated": (Case((4, 5), (3, 2), (1, 1), (2, 1), (2, 3), samples=1), (203, 225)),
    "a signal": (Case((9,), (5,), (1,), (2,), (1,), samples=1), (171, 187)),
}
# Which of the two operands and the result are x and its window.
IMAGE_AND_WINDOW = {
    "conv": (0, 1),
    "conv_backward_input": (2, 1),
    "conv_backward_weight": (1, 2),
}


# As parameters are stored: contiguous, or after model.to(memory_format=torch.channels_last).
WINDOWS = {"plain window": torch.Tensor.contiguous, "channels last": channels_last}


def check(case: Case, channels: tuple[int, int], window: str = "plain window") -> None:
    """Compare all three, rounded to bfloat16 and in float32.

    Products of bfloat16 numbers are exact in float32, and so sums of up to some 2000 of them keep
    to the tolerance of float32; a result in bfloat16 is rounded once.
    """
    for out_dtype in (BFLOAT16, FLOAT32):
        problem = operands(case, (*channels, 1), (BFLOAT16, out_dtype), channels_last)
        for verb, (first, second, out, expected) in problem.items():
            tensors = [first, second, out]
            at = IMAGE_AND_WINDOW[verb][1]
            tensors[at] = WINDOWS[window](tensors[at])
            convolve("onednn", verb, *tensors, groups=1, **case.options)
            error = relative_error(tensors[2], expected)
            assert error <= TOLERANCE[out_dtype], (verb, case, channels, out_dtype, error)


def names_after_check(
    case: Case, channels: tuple[int, int], window: str = "plain window"
) -> list[str]:
    native.function("amp_ir.onednn.clear_cache")()
    check(case, channels, window)
    return [str(name) for name in native.function("amp_ir.onednn.implementations")()]


@needs_bfloat16
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", SEPARATE)
def test_separate_patches(name, window):
    names = names_after_check(*SEPARATE[name], window)
    assert len(names) == 6 and all("conv" not in one for one in names), names


@needs_amx
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_patches(name, window):
    names = names_after_check(*OVERLAPPING[name], window)
    assert len(names) == 6 and all("conv" not in one for one in names), names


@needs_bfloat16
def test_only_other_positions_are_copied():
    plain = names_after_check(*SEPARATE["single positions"])
    assert not any("patches" in one for one in plain), plain
    strided = names_after_check(*SEPARATE["strided"])
    assert sum(one.startswith("patches+matmul") for one in strided) == 4, strided
    assert sum(one.endswith("+patches") for one in strided) == 2, strided


@pytest.mark.parametrize(
    ("case", "channels", "groups"),
    [
        # More positions than weights, few channels, groups.
        (Case((16, 16), (1, 1), (1, 1), (0, 0), (1, 1)), (64, 30), 1),
        (Case((2, 2), (1, 1), (1, 1), (0, 0), (1, 1), samples=1), (800, 31), 1),
        (Case((4, 4), (3, 3), (1, 1), (1, 1), (1, 1), samples=1), (900, 127), 1),
        (Case((2, 2), (1, 1), (1, 1), (0, 0), (1, 1), samples=1), (160, 160), 2),
    ],
)
def test_what_stays_a_convolution(case, channels, groups):
    native.function("amp_ir.onednn.clear_cache")()
    problem = operands(case, (*channels, groups), (BFLOAT16, BFLOAT16), channels_last)
    for verb, (first, second, out, expected) in problem.items():
        convolve("onednn", verb, first, second, out, groups=groups, **case.options)
        assert relative_error(out, expected) <= TOLERANCE[BFLOAT16], verb
    names = [str(name) for name in native.function("amp_ir.onednn.implementations")()]
    if has_bfloat16:
        assert len(names) == 3 and all("conv" in one for one in names), names


@needs_bfloat16
@pytest.mark.parametrize("order", ["plain", "batch inside", "positions outside"])
@pytest.mark.parametrize("name", ["strided", "patches", "patches of few channels"])
def test_images_in_any_order(name, order):
    case, channels = SEPARATE[name]
    problem = operands(case, (*channels, 1), (BFLOAT16, FLOAT32), channels_last)
    native.function("amp_ir.onednn.clear_cache")()
    for verb, (first, second, out, expected) in problem.items():
        tensors = [first, second, out]
        image, window = IMAGE_AND_WINDOW[verb]
        tensors[image] = ORDERS[order](tensors[image].contiguous())
        tensors[window] = tensors[window].contiguous()
        convolve("onednn", verb, *tensors, groups=1, **case.options)
        assert relative_error(tensors[2], expected) <= TOLERANCE[FLOAT32], verb
    names = [str(one) for one in native.function("amp_ir.onednn.implementations")()]
    assert sum("matmul" in one for one in names) == 3, names


@needs_bfloat16
def test_results_in_another_order_are_convolutions():
    case, channels = SEPARATE["single positions"]
    problem = operands(case, (*channels, 1), (BFLOAT16, BFLOAT16), lambda t: t)
    native.function("amp_ir.onednn.clear_cache")()
    for verb, (first, second, out, expected) in problem.items():
        convolve("onednn", verb, first, second, out, groups=1, **case.options)
        assert relative_error(out, expected) <= TOLERANCE[BFLOAT16], verb
    assert "matmul" not in str(list(native.function("amp_ir.onednn.implementations")()))


@needs_bfloat16
def test_sums_are_not_rounded_before_the_end():
    # Three patches have 0.75 + 256 + 0.75 of an element's gradient, which is 258 in bfloat16; the
    # first two alone are 256, and so is what a sum in bfloat16 makes of all.
    grad = torch.zeros(1, 128, 1, 3, dtype=BFLOAT16)
    grad[0, 0] = torch.tensor([0.75, 256, 0.75])
    w = torch.zeros(128, 900, 1, 3, dtype=BFLOAT16)
    w[0] = 1
    out = channels_last(torch.zeros(1, 900, 1, 3, dtype=BFLOAT16))
    options = {"strides": (1, 1), "padding": (0, 1), "dilation": (1, 1), "groups": 1}
    convolve("onednn", "conv_backward_input", channels_last(grad), w, out, **options)
    assert out[0, 5, 0].tolist() == [256, 258, 256]


@needs_bfloat16
def test_with_avx512_alone():
    program = (
        "import test_native_patch_matmul as tests\n"
        "for case in tests.SEPARATE.values():\n"
        "    names = tests.names_after_check(*case)\n"
        "    assert all('matmul' in one for one in names), names\n"
        "for case in tests.OVERLAPPING.values():\n"
        "    names = tests.names_after_check(*case)\n"
        "    assert sum('matmul' in one for one in names) == 2, names\n"
        "    assert sum('conv_backward_input' in one for one in names) == 2, names\n"
        "    assert sum('conv ' in one for one in names) == 2, names\n"
    )
    run_with_isa("AVX512_CORE_BF16", __file__, program)


@pytest.mark.parametrize("lesser", ["AVX512_CORE", "AVX2"])
def test_on_a_cpu_without_bfloat16(lesser):
    # On AVX2 single positions without a stride are matmuls of widened operands.
    program = (
        "import test_native_patch_matmul as tests\n"
        "for cases in (tests.SEPARATE, tests.OVERLAPPING):\n"
        "    for case in cases.values():\n"
        "        names = tests.names_after_check(*case)\n"
        "        assert not any('patches' in one for one in names), names\n"
    )
    run_with_isa(lesser, __file__, program)
