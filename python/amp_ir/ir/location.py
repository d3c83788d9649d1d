# SPDX-License-Identifier: Apache-2.0
"""Where an op comes from: the user's module, source line and phase of the step.

A location travels with its op through every stage: on an FX node as `node.meta["amp_ir_location"]`,
in the IR as the `span` of the `relax.Call`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterable, Iterator
from typing import Literal

import attrs
import tvm

Phase = Literal["forward", "backward", "optimizer"]
# The precision that the user chose for a region: by the rules, without casts, low, float32, or the
# widest dtype among an op's arguments; "widened": by the rules, and the user casts the results.
Precision = Literal["rules", "off", "low", "float32", "promote", "widened"]
META_KEY = "amp_ir_location"
_SEPARATOR = "|"
# What follows the phase in a span.
_MARKS: dict[Precision, str] = {
    "rules": "", "off": "!", "low": "<", "float32": ">", "promote": "^", "widened": "+",
}  # fmt: skip
_PRECISIONS = {mark: precision for precision, mark in _MARKS.items()}
_precision: contextvars.ContextVar[Precision] = contextvars.ContextVar(
    "amp_ir_precision", default="rules"
)


@contextlib.contextmanager
def autocast_off() -> Iterator[None]:
    """Leave the ops inside, and their backward pass, in the user's dtypes::

        with amp_ir.autocast_off():
            weights = torch.softmax(scores / temperature, -1)

    For code inside of a model or step that is captured; elsewhere it does nothing.
    """
    with precision_of_region("off"):
        yield


@contextlib.contextmanager
def precision_of_region(precision: Precision) -> Iterator[None]:
    """Set the precision of what is traced inside; the innermost region decides."""
    token = _precision.set(precision)
    try:
        yield
    finally:
        _precision.reset(token)


def current_precision() -> Precision:
    """Return what the innermost region around this says."""
    return _precision.get()


@attrs.frozen
class Location:
    """One place in the user's program.

    `module` is the dotted path as in `model.named_modules()` ("" for the root or for code outside
    of any module; the second and later models of a step are prefixed "model1.", "model2.", ...).
    `precision` is "off" inside of `autocast_off()` and `torch.autocast(enabled=False)`, and
    another one inside of the functions of `ir/annotations.py`; "widened" if the results are cast by
    `x.float()` where they are float32 already.
    """

    module: str = ""
    phase: Phase = "forward"
    file: str = ""
    line: int = 0
    precision: Precision = "rules"

    def __str__(self) -> str:
        """Format for people: `encoder.layer.0 (backward), model.py:12`."""
        place = f"{self.module or 'step'} ({self.phase})"
        return f"{place}, {self.file}:{self.line}" if self.file else place


@functools.lru_cache(maxsize=65536)
def to_span(location: Location) -> tvm.ir.Span:
    """Encode a location as the span of a `relax.Call`."""
    phase = location.phase + _MARKS[location.precision]
    name = _SEPARATOR.join((phase, location.module, location.file))
    line = location.line
    return tvm.ir.Span(tvm.ir.SourceName(name), line, line, 0, 0)


def from_span(span: tvm.ir.Span | None) -> Location:
    """Decode what `to_span` made; a span of another origin, or none, is the empty location.

    Of several, as a fused kernel has them, the first counts.
    """
    if isinstance(span, tvm.ir.SequentialSpan):
        span = span.spans[0] if span.spans else None
    if span is None or not hasattr(span, "source_name"):
        return Location()
    return _decode(span.source_name.name, int(span.line))


def join_spans(spans: Iterable[tvm.ir.Span | None]) -> tvm.ir.Span | None:
    """Return the span of an op made from several: each place once, in order; None for none."""
    distinct: dict[tuple[str, int], tvm.ir.Span] = {}
    for span in spans:
        if isinstance(span, tvm.ir.Span):
            distinct.setdefault((span.source_name.name, int(span.line)), span)
    known = list(distinct.values())
    return tvm.ir.SequentialSpan(known) if len(known) > 1 else next(iter(known), None)


def locations_of(span: tvm.ir.Span | None) -> tuple[Location, ...]:
    """Return every place that a span names, in order; () for a span of another origin."""
    parts = list(span.spans) if isinstance(span, tvm.ir.SequentialSpan) else [span]
    found = (from_span(part) for part in parts if part is not None)
    return tuple(dict.fromkeys(place for place in found if place != Location()))


@functools.lru_cache(maxsize=65536)
def _decode(name: str, line: int) -> Location:
    parts = name.split(_SEPARATOR, 2)
    phase = parts[0].rstrip("".join(_PRECISIONS))
    if len(parts) != 3 or phase not in ("forward", "backward", "optimizer"):
        return Location()
    precision = _PRECISIONS[parts[0].removeprefix(phase)]
    return Location(parts[1], phase, parts[2], line, precision)  # type: ignore[arg-type]
