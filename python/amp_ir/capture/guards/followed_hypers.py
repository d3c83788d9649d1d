# SPDX-License-Identifier: Apache-2.0
"""Refuse what would keep the value of a hyper-parameter that it had at the capture.

PyTorch's optimizers compute with symbolic floats, whose arithmetic is recorded. What C computes
from one is not: `"%f" % lr`, `math.fsum`, `.item()` of a tensor made of it, the exponent of a
derivative (`x ** lr`). Where other code reads hyper-parameters, traces with other values show it,
as they do for other numbers (`followed_numbers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import torch

from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.guards.followed_numbers import first_difference
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.symbolic_float import FloatTape
from amp_ir.capture.traced import Traced
from amp_ir.ir.location import META_KEY, Location

_WAYS_TO_GROUPS = frozenset({"param_groups", "state_dict"})


@attrs.frozen
class OtherHypers:
    """Values in the place of the hyper-parameters' own, as symbolic floats or plain."""

    values: list[float]
    symbolic: bool


def computes_with_hypers(observer: Observer, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return whether other code than PyTorch's optimizers may read hyper-parameters."""
    if any(not type(one).__module__.startswith("torch.optim.") for one in optimizers):
        return True
    return observer.users_code_names(_WAYS_TO_GROUPS)


def other_values(tape: FloatTape, count: int) -> list[float]:
    """Return other values of the first `count` inputs; all that was compared comes out the same."""
    guards, values = tape.all_guards(), list(tape.inputs)
    for index in range(count):
        own = values[index]
        for values[index] in (*_near(own), own):
            if all(guard.holds(values) for guard in guards):
                break
    return values[:count]


def _near(value: float) -> Iterator[float]:
    """Yield values near enough to stay in the range of a rate or a decay."""
    yield from (value * 0.9375, value * 1.0625) if value else (0.0625, -0.0625)


def check_hypers_followed(
    symbolic: Traced, tape: FloatTape, values: list[float], other: Traced, plain: FloatTape
) -> None:
    """Check that a graph with symbols equals the `other` graph when they have these `values`.

    Raises:
        CaptureError: it does not; names the first place that differs.
    """
    inputs = [*values, *tape.inputs[len(values) :]]
    found = first_difference(symbolic, tape, inputs, other, plain)
    if found is None:
        return
    diagnostics = Diagnostics()
    diagnostics.add(
        "computes with a hyper-parameter of an optimizer in a way that would keep its value of now",
        found.meta.get(META_KEY) or Location(),
        "Make a tensor by torch.full((), number) and compute with that, or pass the number to the "
        "step as an argument",
    )
    raise diagnostics.error()
