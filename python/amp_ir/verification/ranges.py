# SPDX-License-Identifier: Apache-2.0
"""Ranges of a step's low tensors: how near they come to the ends of their dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from tvm import relax

from amp_ir.dialect.define import LOW_DTYPES
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.location import from_span
from amp_ir.ir.step_graph import VIEWS
from amp_ir.ir.step_module import StepModule
from amp_ir.replay.non_finite_origins import call_of


@attrs.frozen
class Range:
    """The values of one low tensor; shares are of its elements that are not zero before rounding.

    Attributes:
        variable: the value's name in the IR.
        op: the op that makes it.
        module: where, as are `phase`, `file` and `line`.
        phase: "forward", "backward" or "optimizer".
        file: the source file.
        line: the line in it.
        dtype: "float16" or "bfloat16".
        largest: the largest magnitude.
        headroom_bits: how often it may double before it overflows; negative: it did.
        subnormal: share below the smallest normal number, where precision is lost.
        flushed: share that became 0.
        infinite: share that became infinite, or was.
    """

    variable: str
    op: str
    module: str
    phase: str
    file: str
    line: int
    dtype: str
    largest: float
    headroom_bits: float
    subnormal: float
    flushed: float
    infinite: float

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares that are subnormal, that became 0, and that are infinite."""
        return self.subnormal, self.flushed, self.infinite

    @property
    def lost(self) -> float:
        """The share of elements that lost precision or their value."""
        return sum(self.shares)


def ranges_of(mod: StepModule, inputs: Sequence[torch.Tensor]) -> list[Range]:
    """Return the range of every low tensor of a step, in order; views are left out."""
    flow = Dataflow(mod.ir)
    low = {
        one: call
        for one in flow.values
        if isinstance(one.ty, relax.TensorType) and str(one.ty.dtype) in LOW_DTYPES
        if (call := call_of(flow, one)) is not None
    }
    # Of a tuple, such as an LSTM's results, the fields are measured.
    tuples = {value.tuple_value for one in low if _is_field(value := flow.values[one])}
    found = []

    def measure(variable: relax.Var, value: torch.Tensor) -> torch.Tensor:
        if variable not in low:
            return value
        rounded = value.to(getattr(torch, str(variable.ty.dtype)))
        call = low[variable]
        if op_name(call) not in VIEWS and value.numel():
            found.append(_range(variable, call, value, rounded))
        return rounded

    # Unrounded, so that `measure` sees what rounding does; it gives the rounded values back.
    interpret(mod, inputs, on_value=measure, unrounded={*low, *tuples})
    return found


def _is_field(value: relax.Expr) -> bool:
    return isinstance(value, relax.TupleGetItem)


def _range(
    variable: relax.Var, call: relax.Call, value: torch.Tensor, rounded: torch.Tensor
) -> Range:
    place = from_span(call.span)
    dtype = str(variable.ty.dtype)
    limits = torch.finfo(getattr(torch, dtype))
    magnitudes = rounded.float().abs()
    counted = int((value != 0).sum())
    is_finite = torch.isfinite(magnitudes)
    largest = float(torch.where(is_finite, magnitudes, 0.0).max())
    unrounded = float(value.float().abs().max())

    def share(where: torch.Tensor) -> float:
        return int(where.sum()) / counted if counted else 0.0

    return Range(
        variable=str(variable.name),
        op=op_name(call),
        module=place.module,
        phase=place.phase,
        file=place.file,
        line=place.line,
        dtype=dtype,
        largest=largest,
        headroom_bits=_bits(limits.max, unrounded),
        subnormal=share((magnitudes > 0) & (magnitudes < limits.smallest_normal)),
        flushed=share((value != 0) & (magnitudes == 0)),
        infinite=share(~is_finite),
    )


def _bits(limit: float, largest: float) -> float:
    if math.isnan(largest) or largest == math.inf:
        return -math.inf
    return math.log2(limit / largest) if largest > 0 else math.inf
