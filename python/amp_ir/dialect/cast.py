# SPDX-License-Identifier: Apache-2.0
"""The cast that autocast inserts; no pass removes the user's own casts, `relax.astype`."""

from __future__ import annotations

import torch

from amp_ir.dialect.define import FLOAT_DTYPES, Tensor, check_choice, define


def _cast(x: torch.Tensor, *, dtype: str) -> torch.Tensor:
    return x


@define("amp_ir.cast", "x", reference=_cast)
def cast(x: Tensor, *, dtype: str) -> Tensor:
    """Round to `dtype`: f[...] -> dtype[...]; both floating."""
    x.expect_float()
    check_choice("amp_ir.cast", "dtype", dtype, FLOAT_DTYPES)
    return Tensor(x.shape, dtype)
