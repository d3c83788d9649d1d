# SPDX-License-Identifier: Apache-2.0
"""Calls of the native recurrent layers."""

from __future__ import annotations

import torch

from native_calls import TOLERANCE, relative_error
from recurrence_reference import (
    Layer,
    backward,
    expected_backward,
    expected_forward,
    forward,
)

DTYPES = list(TOLERANCE)


KINDS = ["lstm", "gru", "rnn_tanh", "rnn_relu"]


def check_all(
    kind: str, extents: tuple[int, int, int], dtype: torch.dtype, is_reverse: bool
) -> None:
    layer = Layer(kind, extents, dtype)
    saved = forward(layer, is_reverse)
    pairs = list(zip(saved, expected_forward(layer, is_reverse), strict=True))
    found = backward(layer, is_reverse, saved)
    pairs += zip(found, expected_backward(layer, is_reverse, saved), strict=True)
    # A sum in float32 may round to the other neighbour, and what follows sees that: once more.
    tolerance = TOLERANCE[dtype] * (1 if dtype == torch.float32 else 2)
    assert max(relative_error(actual, expected) for actual, expected in pairs) <= tolerance
