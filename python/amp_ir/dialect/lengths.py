# SPDX-License-Identifier: Apache-2.0
"""Lengths of sequences that a step was compiled for, which it checks as it checks indices."""

from __future__ import annotations

import torch

from amp_ir.dialect.define import Tensor, define


def _lengths(lengths: torch.Tensor, checked: torch.Tensor, **_limits: object) -> torch.Tensor:
    return lengths


@define("amp_ir.checked_lengths", "lengths", "checked", reference=_lengths)
def checked_lengths(
    lengths: Tensor, checked: Tensor, *, least: int, extent: int, message: str
) -> Tensor:
    """Return `lengths`, int64[n].

    A step is refused where a number of `checked`, int64[...], is not in [least, extent): the error
    begins with `message`. Ops take this result and not `lengths`, so that none escapes the check.
    """
    lengths.expect_index()
    checked.expect_index()
    return lengths
