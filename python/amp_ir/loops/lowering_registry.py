# SPDX-License-Identifier: Apache-2.0
"""The table of lowerings: from the name of an op to its loop values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
from tvm import relax

from amp_ir.loops.ir import TensorSpec, Value


@attrs.frozen
class Lowering:
    """Arguments of a lowering: the declared results and the call itself.

    `arithmetic_is_free`: a kernel takes the time of its bytes, float64 included.
    """

    name: str
    results: tuple[TensorSpec, ...]
    call: relax.Call
    arithmetic_is_free: bool = False


LOWERINGS: dict[str, Callable[..., Value | tuple[Value, ...]]] = {}


def lowers(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the lowering of one or more ops; a second registration is an error."""

    def register(lowering: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            if name in LOWERINGS:
                raise ValueError(f"{name} has a lowering already: {LOWERINGS[name]}")
            LOWERINGS[name] = lowering
        return lowering

    return register
