# SPDX-License-Identifier: Apache-2.0
"""Overflow: where a step's first infinity or NaN comes from, and what helps; a record to print."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import attrs

from amp_ir.amp.overrides import Override
from amp_ir.ir.short_list import short_names

Cause = Literal["none", "batch", "state", "constant", "op", "kernels"]


@attrs.frozen(kw_only=True)
class Overflow:
    """What `find_overflow` found out; `str()` says it in sentences.

    Attributes:
        cause: "op": arithmetic made it; "batch" or "state": it was in an argument or in a
            parameter, buffer, gradient or optimizer state before the step; "constant": it is a
            number of the program, which `op` reads; "kernels": the compiled step makes it and the
            plan does not; "none": the step is finite.
        value: "infinity" or "NaN"; "" where there is none.
        op: the op's name, as an Override and the plan have it; of a cast, the op that reads it.
        cast: the two dtypes, if it is a cast that autocast inserted: "float32 -> float16".
        module: path of the module, as in `model.named_modules()`; "" outside of all modules.
        phase: "forward", "backward" or "optimizer".
        file: the source file of the op, or of the forward op that this one is the backward of.
        line: the line in it.
        dtype: the dtype of the op's result, or of the tensor that held it before the step.
        largest_input: the largest finite magnitude that the op reads.
        tensor: the name of the batch's or the state's tensor, or of an output for "kernels".
        scales: the loss scale of each scaler in the step.
        helping_scale: the largest scale, a power of two below the one in use, with which the step
            is finite; None if none is, or there is no scaler.
        overrides: the overrides with which the step is finite; () if none help, or if the step is
            not in mixed precision.
        overrides_scale: the loss scale that these overrides need; None: the one in use.
        is_in_float32: whether the step without casts is not finite either; None if there are none.
        others: further ops that make one from finite numbers, each in a few words.
        reached: what of the step is not finite: how many checked gradients, which outputs.
        note: a sentence more.
    """

    cause: Cause
    value: str = ""
    op: str = ""
    cast: str = ""
    module: str = ""
    phase: str = ""
    file: str = ""
    line: int = 0
    dtype: str = ""
    largest_input: float = 0.0
    tensor: str = ""
    scales: tuple[float, ...] = ()
    helping_scale: float | None = None
    overrides: tuple[Override, ...] = ()
    overrides_scale: float | None = None
    is_in_float32: bool | None = None
    others: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """Say what was found and what to do, a sentence a line."""
        return "\n".join(self._lines())

    @property
    def place(self) -> str:
        """Return the module, the phase and the source line of the op, in words."""
        named = f"{self.module or 'the step'} ({self.phase})"
        return f"{named}, {self.file}:{self.line}" if self.file else named

    def _lines(self) -> Iterator[str]:
        what = "A NaN" if self.value == "NaN" else "An infinity"
        yield _FOUND[self.cause].format(self=self, op=self._op_in_words(), what=what)
        if self.cause == "op":
            yield f"    The largest finite number that it reads is {self.largest_input:.4g}."
        if self.reached:
            yield f"    It reaches {short_names(self.reached)}."
        if self.others:
            yield f"    So do, from finite numbers, {short_names(self.others)}."
        if self.note:
            yield f"    {self.note}"
        yield from self._advice()

    def _op_in_words(self) -> str:
        return f"the cast {self.cast} for {self.op}" if self.cast else self.op

    def _advice(self) -> Iterator[str]:
        if self.cause in _ADVICE:
            yield f"    {_ADVICE[self.cause]}"
        if self.cause != "op":
            return
        if self.helping_scale is not None:
            yield (
                f"    With a loss scale of {_power(self.helping_scale)} or less the step is finite "
                f"(it was {_power(max(self.scales))}); a dynamic scale gets there by itself."
            )
        elif self.scales:
            yield "    No loss scale from the one in use down to 1 makes the step finite."
        if self.overrides:
            scale = self.overrides_scale
            also = "" if scale is None else f" and at a loss scale of {_power(scale)} or less"
            yield f"    In float32 there{also} the step is finite:"
            yield f"        overrides=[{', '.join(map(override_text, self.overrides))}]"
        elif self.is_in_float32 is False and not self.note:
            yield "    In float32 throughout the step is finite; no set of few overrides is."
        elif self.is_in_float32:
            yield "    It happens in float32 too: change the arithmetic of that line."


_FOUND = {
    "none": "The step on this batch is finite, from the state as it is now.",
    "batch": "{what} in the batch: {self.tensor} ({self.dtype}) holds it before the step.",
    "state": "{what} in the state: {self.tensor} ({self.dtype}) holds it before the step.",
    "constant": "{what} that your program holds as a number enters in {op} in {self.place}.",
    "op": "{what} is made by {op} ({self.dtype}) in {self.place}.",
    "kernels": (
        "The compiled step makes an infinity or NaN, and the same plan, evaluated op by op, does "
        "not; the first output that has it is {self.tensor}."
    ),
}
_ADVICE = {
    "batch": "Look at where the batch is made; no precision and no loss scale helps.",
    "state": "An earlier step wrote it: load a checkpoint from before that step.",
    "kernels": (
        'Sums in another order may differ by rounding; if rounding="strict" makes it too, it is a '
        "fault of amp_ir: please report it with this text and the output of amp-ir doctor."
    ),
}


def _power(scale: float) -> str:
    exponent = math.log2(scale) if scale > 0 else 0.5
    return f"2**{exponent:.0f}" if exponent == round(exponent) and exponent > 6 else f"{scale:g}"


def override_text(one: Override) -> str:
    """Return an override as Python code that makes it."""
    given = [
        f"{field.name}={getattr(one, field.name)!r}"
        for field in attrs.fields(Override)
        if getattr(one, field.name) is not None and field.name != "to"
    ]
    return f"amp_ir.Override({', '.join([*given, f'to={one.to!r}'])})"
