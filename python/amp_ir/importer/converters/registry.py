# SPDX-License-Identifier: Apache-2.0
"""The table from ATen overloads to the converters that emit their Relax ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Converter: TypeAlias = Callable[..., Any]

CONVERTERS: dict[Any, Converter] = {}


class ConversionError(Exception):
    """A call that a converter cannot express; `import_step` collects all of them."""


def converts(*overloads: torch._ops.OpOverload | str) -> Callable[[Converter], Converter]:
    """Register `converter(ops, *args, **kwargs)` for the overloads given.

    An overload outside of ATen may be given by its name ("amp_ir.attention.default").

    `ops` is the `Emitter`; the other arguments are those of the overload's schema, with each FX
    node replaced by the Relax expression (or the tuple of expressions) that it became.

    Raises:
        ValueError: an overload has a converter already.
    """

    def register(converter: Converter) -> Converter:
        for overload in overloads:
            if overload in CONVERTERS:
                raise ValueError(f"{overload} has two converters; first {CONVERTERS[overload]}")
            CONVERTERS[overload] = converter
        return converter

    return register


def converter_of(overload: Any) -> Converter | None:
    """Return the converter of an overload, or None."""
    return CONVERTERS.get(overload) or CONVERTERS.get(str(overload))
