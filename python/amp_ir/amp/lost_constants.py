# SPDX-License-Identifier: Apache-2.0
"""Constants that the low dtype cannot hold and that are read low all the same: a warning.

`keep_full` keeps ops with such constants in float32. An override, a function of
`ir/annotations.py` or a rule of the user's may still ask for the low dtype; that is followed, and
said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from amp_ir.amp.constants import Holds, holds
from amp_ir.amp.decisions import Decision, Mode
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.host.user_warning import warn_user
from amp_ir.ir.short_list import short_list
from amp_ir.ir.step_graph import Op, StepGraph


@attrs.frozen
class _Lost:
    """One constant, what it becomes, and the op that reads it."""

    number: float
    becomes: float
    op: Op
    decision: Decision

    def __str__(self) -> str:
        return (
            f"{self.number:g} becomes {self.becomes:g} in {self.op.label} of {self.op.location}: "
            f"{self.decision.reason} [{self.decision.rule}]"
        )


def warn_of_lost_constants(graph: StepGraph, decisions: Sequence[Decision], amp_dtype: str) -> None:
    """Warn of constants that overflow, or become 0, where an op reads them low."""
    found = list(_lost(graph, decisions, amp_dtype))
    if not found:
        return
    op = found[0].op
    where = f', module="{op.location.module}"' if op.location.module else ""
    warn_user(
        f"{amp_dtype} cannot hold constants that are to be read low: {short_list(found)}. An "
        "infinity makes NaN of a difference or of a product with 0; to keep such an op in float32, "
        f'add Override(op="{op.label}"{where}, to="float32") as the last one'
    )


def _lost(graph: StepGraph, decisions: Sequence[Decision], amp_dtype: str) -> Iterator[_Lost]:
    for op, decision in zip(graph.ops, decisions, strict=True):
        for leaf, mode in zip(op.reads, decision.modes, strict=True):
            is_low = mode is Mode.LOW or (mode is Mode.VARY and decision.label == "low")
            root = graph.values[graph.values[leaf].root]
            if not is_low or not root.is_constant or root.dtype != FULL_DTYPE:
                continue
            assert root.expr is not None
            lost = _first_lost(root.expr.value.numpy(), amp_dtype)
            if lost is not None:
                yield _Lost(*lost, op, decision)


def _first_lost(values: np.ndarray, amp_dtype: str) -> tuple[float, float] | None:
    """Return the number of the largest error that overflows or becomes 0, and what it becomes."""
    if holds(values, amp_dtype) not in (Holds.OVERFLOWS, Holds.UNDERFLOWS):
        return None
    full = torch.from_numpy(np.array(values, "float32")).reshape(-1)
    low = full.to(getattr(torch, amp_dtype)).to(torch.float32)
    is_lost = full.isfinite() & (~low.isfinite() | ((low == 0) & (full != 0)))
    if not is_lost.any():
        return None
    at = int((is_lost * full.abs().nan_to_num(posinf=0.0)).argmax())
    return float(full[at]), float(low[at])
