# SPDX-License-Identifier: Apache-2.0
"""How far numbers are from what they should be, in units of the last place (ULP)."""

from __future__ import annotations

import torch

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# A result of float16 or bfloat16 is one rounding of a float32, which may be 4 ULP off: 1 ULP.
ULPS = {torch.float32: 4, torch.float64: 4, torch.bfloat16: 1, torch.float16: 1}


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 that counts the numbers of a dtype from 0 on; -0 is 0."""
    bits = x.view(_BITS[x.element_size()]).long()
    lowest = torch.iinfo(_BITS[x.element_size()]).min
    return torch.where(bits < 0, lowest - bits, bits)


def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many numbers of the dtype lie between a and b, of finite ones."""
    return (_ordered(a) - _ordered(b)).abs()


def is_as(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where `got` is NaN, an infinity, a signed zero or a number as `wanted` is."""
    if not wanted.dtype.is_floating_point:
        return got == wanted
    both_nan = got.isnan() & wanted.isnan()
    same = (got == wanted) & ((got != 0) | (got.signbit() == wanted.signbit()))
    finite = got.isfinite() & wanted.isfinite() & ((got != 0) | (wanted != 0))
    near = finite & (ulps_apart(got, wanted) <= ULPS[wanted.dtype])
    return both_nan | same | near


def is_near_exact(
    got: torch.Tensor, exact: torch.Tensor, references: list[torch.Tensor]
) -> torch.Tensor:
    """Where `got` is within 4 ULP of the exact float64, or nearer than PyTorch's own is."""
    rounded = exact.to(got.dtype)
    near = rounded.isfinite() & got.isfinite() & (ulps_apart(got, rounded) <= ULPS[got.dtype])
    infinite = rounded.isinf() & (got == rounded)
    error = (got.double() - exact).abs()
    theirs = torch.stack([(one.double() - exact).abs() for one in references]).amax(0)
    # Zeros have a sign.
    is_zero = (got == 0) & (rounded == 0)
    return (near | infinite | (error <= theirs)) & ~(is_zero & (got.signbit() != rounded.signbit()))
