# SPDX-License-Identifier: Apache-2.0
"""Where an op comes from: the user's module, source line and phase of the step.

A location travels with its op through every stage: on an FX node as `node.meta["amp_ir_location"]`,
in the IR as the `span` of the `relax.Call`.
"""

from __future__ import annotations

import functools
from typing import Literal

import attrs
import tvm

Phase = Literal["forward", "backward", "optimizer"]
META_KEY = "amp_ir_location"
_SEPARATOR = "|"


@attrs.frozen
class Location:
    """One place in the user's program.

    `module` is the dotted path as in `model.named_modules()` ("" for the root or for code outside
    of any module; the second and later models of a step are prefixed "model1.", "model2.", ...).
    """

    module: str = ""
    phase: Phase = "forward"
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        """Read as a person would say it: `encoder.layer.0 (backward), model.py:12`."""
        place = f"{self.module or 'step'} ({self.phase})"
        return f"{place}, {self.file}:{self.line}" if self.file else place


@functools.lru_cache(maxsize=65536)
def to_span(location: Location) -> tvm.ir.Span:
    """Encode a location as the span of a `relax.Call`."""
    name = _SEPARATOR.join((location.phase, location.module, location.file))
    line = location.line
    return tvm.ir.Span(tvm.ir.SourceName(name), line, line, 0, 0)


def from_span(span: tvm.ir.Span | None) -> Location:
    """Decode what `to_span` made; a span of another origin, or none, is the empty location."""
    if span is None or not hasattr(span, "source_name"):
        return Location()
    return _decode(span.source_name.name, int(span.line))


@functools.lru_cache(maxsize=65536)
def _decode(name: str, line: int) -> Location:
    parts = name.split(_SEPARATOR, 2)
    if len(parts) != 3 or parts[0] not in ("forward", "backward", "optimizer"):
        return Location()
    return Location(module=parts[1], phase=parts[0], file=parts[2], line=line)  # type: ignore[arg-type]
