# SPDX-License-Identifier: Apache-2.0
"""Lengths that PyTorch checks on the host, checked by the step: `torch.ops.amp_ir.checked_lengths`.

Its result is what the op returns, so that it is there in a graph of torch.compile, too.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_ir.capture.define_op import define_op

_SCHEMA = (
    "checked_lengths(Tensor lengths, Tensor checked, int least, int extent, str message) -> Tensor"
)


def _checked(lengths: torch.Tensor, *_limits: Any) -> torch.Tensor:
    return lengths.clone()


def _checked_types(lengths: torch.Tensor, *_limits: Any) -> torch.Tensor:
    return torch.empty_like(lengths)


define_op(_SCHEMA, _checked, _checked_types)


def require_lengths(
    lengths: torch.Tensor, checked: torch.Tensor, least: int, most: int, message: str
) -> torch.Tensor:
    """Return `lengths` of a step that is refused unless all of `checked` are in [least, most]."""
    result: torch.Tensor = torch.ops.amp_ir.checked_lengths(
        lengths, checked, least, most + 1, message
    )
    return result
