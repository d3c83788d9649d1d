# SPDX-License-Identifier: Apache-2.0
"""Matmuls accumulated into their output, against PyTorch in float64."""

from __future__ import annotations

import pytest
import torch

from amp_ir.host import native
from matmul_calls import LAYOUTS, NAME, accumulate, number, random
from native_calls import layout, memory, relative_error

# Sums of some tens of float32 products, and three roundings for the factors: 2^-24 each.
TOLERANCE = 3e-6
pytestmark = pytest.mark.skipif(not native.has(NAME), reason="oneDNN is not in this build")


def check(a, b, out, *, in_place: bool, bias=None, alpha=None, beta=None) -> None:
    c = (
        out.copy_(torch.randn(out.shape))
        if in_place
        else torch.empty_strided(out.shape, out.stride())
    )
    if not in_place:
        c.copy_(torch.randn(out.shape))
    product = a.double() @ b.double() + (0 if bias is None else bias.double())
    beta_, alpha_ = (1.0 if one is None else one for one in (beta, alpha))
    expected = torch.tensor(beta_).double() * c.double() + torch.tensor(alpha_).double() * product
    accumulate(a, b, c, out, bias=bias, alpha=number(alpha), beta=number(beta))
    assert relative_error(out, expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout_of", LAYOUTS)
@pytest.mark.parametrize("in_place", [True, False])
def test_every_layout(dtype, layout_of, in_place):
    a, b, out = LAYOUTS[layout_of](
        lambda *dims: random(*dims, dtype=dtype), lambda *dims: torch.zeros(dims)
    )
    check(a, b, out, in_place=in_place, alpha=-0.5, beta=0.9)


@pytest.mark.parametrize("alpha", [None, -1e-3, 0.0])
@pytest.mark.parametrize("beta", [None, 0.9, 0.0, 1e-9])
@pytest.mark.parametrize("with_bias", [False, True])
def test_factors_are_numbers_of_the_run(alpha, beta, with_bias):
    a, b = random(40, 33, dtype=torch.bfloat16).mT, random(40, 21, dtype=torch.bfloat16)
    bias = random(21) if with_bias else None
    if alpha == 0.0 and beta == 0.0:
        pytest.skip("the result is zero, which has no relative error")
    check(a, b, torch.zeros(33, 21), in_place=True, bias=bias, alpha=alpha, beta=beta)


@pytest.mark.parametrize("beta", [1e-9, 0.5])
def test_infinity_that_is_kept_stays_infinity(beta):
    """A factor so small that the old values are multiplied by it before the sum."""
    a, b, out = random(8, 16), random(16, 8), torch.zeros(8, 8)
    out[3, 4] = float("inf")
    accumulate(a, b, out, out, alpha=number(-0.5), beta=number(beta))
    assert out[3, 4] == float("inf") and out.isfinite().sum() == 63


def test_a_large_gradient_of_a_weight_is_added_from_copies_of_its_operands():
    """Extents from which both operands are copied where the CPU has AMX; without, it is plain."""
    a, b = random(64, 2048, dtype=torch.bfloat16).mT, random(64, 2048, dtype=torch.bfloat16)
    check(a, b, torch.zeros(2048, 2048), in_place=True, alpha=-0.1, beta=0.9)


def wrong(**changes) -> str:
    given = {"c": torch.zeros(2, 2), "alpha": torch.tensor(1.0), "epilogue": "none", **changes}
    a, out = torch.ones(2, 2), torch.zeros(2, 2)
    with pytest.raises((TypeError, ValueError)) as caught:
        native.function(NAME)(
            memory(a), memory(a), memory(given["c"]), None, given["alpha"], None,
            *layout(a), *layout(a), *layout(out), given["epilogue"], memory(out),
        )  # fmt: skip
    return str(caught.value).strip()


def test_wrong_uses_say_what_is_expected():
    assert wrong(c=torch.zeros(2, 2).bfloat16()) == (
        "amp_ir.onednn.matmul_accumulate: c is bfloat16 and out is float32; expected float32, in "
        "which sums are accumulated"
    )
    assert wrong(alpha=torch.ones(2)) == (
        "amp_ir.onednn.matmul_accumulate: alpha has 2 elements of float32; expected one float32"
    )
    assert wrong(epilogue="relu") == (
        'amp_ir.onednn.matmul_accumulate: epilogue "relu"; expected none, since nothing is done to '
        "a sum"
    )
