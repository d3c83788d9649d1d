# SPDX-License-Identifier: Apache-2.0
"""Cast traffic: the bytes that a compiled step moves because of dtypes, by reason.

Three things cost bytes. A kernel that only casts reads and writes. A kernel that stores a value in
both dtypes also writes the low copy. And each time a kernel or library call reads or writes a
tensor in float32, it moves two bytes per element more than in the low dtype. What the optimizer
stores is not counted: it is float32 without mixed precision, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import attrs
import tvm
from tvm import relax

from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.amp.plan import CastPlan, Moved, PlannedCast, PlannedOp
from amp_ir.ir.dataflow import Dataflow

_NBYTES = {"float16": 2, "bfloat16": 2, FULL_DTYPE: 4}
_BETWEEN_KERNELS = "what an op keeps between its kernels: a mean, the logarithm of a sum"
_OF_INPUTS = "the low copy of a parameter or of the batch, which a library call reads"


class Stored(Protocol):
    """A tensor in memory, and the kernels that write and read it."""

    @property
    def variables(self) -> Sequence[relax.Var]:
        """The variables that share this memory."""

    @property
    def dtype(self) -> str:
        """Its dtype."""

    @property
    def elements(self) -> int:
        """Number of elements."""

    @property
    def written_by(self) -> int | None:
        """The kernel that writes it; None for inputs and constants."""

    @property
    def read_by(self) -> Sequence[int]:
        """The kernels that read it."""


def traffic_by_reason(
    plan: CastPlan,
    ir: tvm.IRModule,
    stored: Sequence[Stored],
    cast_kernels: Collection[int],
) -> tuple[Moved, ...]:
    """Return the bytes by reason, the largest first.

    Args:
        plan: of the step.
        ir: the input of fusion: the step's bindings, folded and dispatched.
        stored: the tensors in memory while `ir` runs.
        cast_kernels: kernels that do nothing but cast.
    """
    return _Account(plan, ir, stored, cast_kernels).run()


@attrs.define
class _Account:
    plan: CastPlan
    ir: tvm.IRModule
    stored: Sequence[Stored]
    cast_kernels: Collection[int]
    found: dict[tuple[str, str, bool], int] = attrs.field(factory=dict)

    def run(self) -> tuple[Moved, ...]:
        makers = _makers(self.plan, self.ir)
        written_full = {
            variable
            for one in self.stored
            if one.dtype == FULL_DTYPE and one.written_by is not None
            for variable in one.variables
        }
        sources = _cast_sources(self.ir)
        for one in self.stored:
            if one.dtype not in _NBYTES:
                continue
            makes = [makers[variable] for variable in one.variables if variable in makers]
            maker = makes[0] if makes else None
            copied = any(sources.get(variable) in written_full for variable in one.variables)
            self.add(one, maker, is_copy=copied)
        ordered = sorted(self.found.items(), key=lambda item: (-item[1], item[0]))
        return tuple(Moved(*key, nbytes) for key, nbytes in ordered if nbytes)

    def add(self, one: Stored, maker: PlannedOp | None, *, is_copy: bool) -> None:
        if maker is not None and maker.phase == "optimizer":
            return
        by_casts = [kernel in self.cast_kernels for kernel in one.read_by]
        written_by_cast = one.written_by is not None and one.written_by in self.cast_kernels
        self.note(
            "cast alone",
            maker,
            one.elements * _NBYTES[one.dtype] * (sum(by_casts) + written_by_cast),
        )
        if one.written_by is None or written_by_cast:
            return
        if is_copy and one.dtype in LOW_DTYPES:
            self.note("second copy", maker, 2 * one.elements)
        if one.dtype == FULL_DTYPE:
            self.note("float32", maker, 2 * one.elements * (1 + len(by_casts) - sum(by_casts)))

    def note(self, what: str, maker: PlannedOp | None, nbytes: int) -> None:
        reason, is_free = _OF_INPUTS if what == "cast alone" else _BETWEEN_KERNELS, False
        if maker is not None:
            reason, is_free = f"{maker.reason} [{maker.rule}]", maker.is_free
        key = (what, reason, is_free)
        self.found[key] = self.found.get(key, 0) + nbytes


def _makers(plan: CastPlan, ir: tvm.IRModule) -> dict[relax.Var, PlannedOp | None]:
    """Return the op of the plan that each variable comes from; None for copies of inputs.

    A variable that the plan does not know is an intermediate value of the next one that it does:
    passes that decompose an op bind its result to the op's own variable.
    """
    ops = {one.variable: one for one in reversed(plan.ops)}
    casts: Mapping[str, PlannedCast] = {one.variable: one for one in reversed(plan.casts)}
    found: dict[relax.Var, PlannedOp | None] = {}
    latest: PlannedOp | None = None
    for variable, value in reversed(Dataflow(ir).values.items()):
        name = str(variable.name)
        if name in ops:
            latest = ops[name]
        elif name in casts:
            source = casts[name].source
            latest = plan.ops[source] if source >= 0 else None
        elif isinstance(value, relax.TupleGetItem):
            latest = ops.get(str(getattr(value.tuple_value, "name", "")), latest)
        found[variable] = latest
    return found


def _cast_sources(ir: tvm.IRModule) -> dict[relax.Var, relax.Expr]:
    """Return what each cast of autocast reads, by the variable that it is bound to."""
    return {one: call.args[0] for one, call in Dataflow(ir).calls("amp_ir.cast").items()}
