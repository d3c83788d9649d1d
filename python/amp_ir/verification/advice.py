# SPDX-License-Identifier: Apache-2.0
"""Advice: what mixed precision is expected to gain on a machine, why, and what to change."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from amp_ir.files.strict_json import strict_json


@attrs.frozen
class Finding:
    """Something that limits the gain, with its time of a mixed-precision step and what to do."""

    kind: str
    text: str
    milliseconds: float


@attrs.frozen(kw_only=True)
class Advice:
    """The expected time of a step in float32 and in mixed precision; nothing was trained.

    Attributes:
        machine: what it is for, and where its rates are from.
        full_milliseconds: the step in float32.
        low_milliseconds: the step with the plan of autocast.
        full_peak_nbytes: the planned peak of memory in float32.
        low_peak_nbytes: that with the plan.
        arithmetic_share: of the float32 step, in matmuls and convolutions that become low.
        memory_share: of the mixed-precision step, in calls that wait for memory.
        call_share: of the mixed-precision step, in the start of calls.
        cast_share: of the mixed-precision step, in kernels that only cast.
        findings: what limits the gain, the most time first.
    """

    amp_dtype: str
    machine: str
    source: str
    full_milliseconds: float
    low_milliseconds: float
    full_peak_nbytes: int
    low_peak_nbytes: int
    arithmetic_share: float
    memory_share: float
    call_share: float
    cast_share: float
    findings: tuple[Finding, ...]

    @property
    def gain(self) -> float:
        """How many times as fast the step is in mixed precision."""
        return self.full_milliseconds / self.low_milliseconds

    @property
    def _verdict(self) -> str:
        if self.gain >= 1.1:
            return "pays"
        if self.gain > 1.0:
            return "hardly pays"
        return "changes no time here" if self.gain == 1.0 else "costs time"

    def to_json(self) -> str:
        """Return everything as JSON."""
        return strict_json(attrs.asdict(self) | {"gain": self.gain}) + "\n"

    def __str__(self) -> str:
        """Return the advice as text."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        mebibyte = 2.0**20
        yield f"{self.amp_dtype} on {self.machine} (rates: {self.source}), estimated, nothing run:"
        yield f"  {'':<10} {'ms a step':>10}  {'peak MiB':>9}"
        for name, milliseconds, nbytes in (
            ("float32", self.full_milliseconds, self.full_peak_nbytes),
            (self.amp_dtype, self.low_milliseconds, self.low_peak_nbytes),
        ):
            yield f"  {name:<10} {milliseconds:>10.4g}  {nbytes / mebibyte:>9.1f}"
        yield f"Mixed precision {self._verdict}: {self.gain:.2f} times as fast."
        yield f"Of the float32 step {self.arithmetic_share:.0%} is arithmetic that becomes low."
        yield (
            f"Of the {self.amp_dtype} step {self.memory_share:.0%} waits for memory, "
            f"{self.call_share:.0%} is the start of kernels, {self.cast_share:.0%} casts alone."
        )
        for one in self.findings:
            yield f"- {one.text} ({_rounded(one.milliseconds)} ms)"
        if not self.findings:
            yield "Nothing stands out that would be worth a change."


def _rounded(milliseconds: float) -> str:
    """Format an estimate with three digits, and no power of ten for a long one."""
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
