# SPDX-License-Identifier: Apache-2.0
"""What an error says of the ops by which padding gets in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from amp_ir.ir.step_graph import Op, StepGraph
from amp_ir.padding.padded_call import PaddedTensor

# How many places an error lists.
_SHOWN = 8


def message_of(leaks: Mapping[str, str]) -> str:
    """Return the error's message; `leaks` are texts by the phase of their op."""
    forward = [text for text, phase in leaks.items() if phase == "forward"]
    texts = forward or list(leaks)
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return (
        "padding may change what the step computes:\n  "
        + "\n  ".join([*texts[:_SHOWN], *more])
        + "\nMask the padding there (masked attention, ignored labels, sums of masked values over "
        "the mask's sum), or call the step without buckets="
    )


def cause_of(op: Op, graph: StepGraph, tensors: Sequence[PaddedTensor | None]) -> str:
    """Return where what an op reads may become infinite or NaN; "" where it stays finite."""
    waiting, seen = list(op.reads), set(op.reads)
    while waiting:
        leaf = waiting.pop()
        tensor, maker = tensors[leaf], graph.maker(leaf)
        if maker is None or tensor is None or tensor.everything.is_finite:
            continue
        known = [tensors[one] for one in maker.reads]
        if all(one is not None and one.everything.is_finite for one in known):
            return (
                f"; it may be infinite or NaN there, and stays so times 0, by {maker.label} in "
                f"{maker.location}: mask what that takes"
            )
        waiting += [one for one in maker.reads if one not in seen]
        seen.update(maker.reads)
    return ""
