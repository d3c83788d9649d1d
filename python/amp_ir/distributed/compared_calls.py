# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a group compare at one call: its program, and the numbers that updates read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from amp_ir.distributed.contract import Contract

# Values as text, by the names of inputs.
Numbers = dict[str, str]
_OF_GRADIENTS = (
    ". What was in p.grad before the step is exchanged by nothing in it: let the step call "
    "backward(), or average p.grad over the ranks before"
)
# Takes names, and whether it may wait for a GPU to read what is there.
ReadNumbers = Callable[[Sequence[str], bool], Numbers]


def no_numbers(_names: Sequence[str], _may_wait: bool) -> Numbers:  # noqa: FBT001 (a callback)
    """Read nothing."""
    return {}


def digest_of_call(contract: Contract, numbers: Numbers) -> str:
    """Return a digest of what has to be alike on all ranks at a call."""
    if not numbers:
        return contract.exchange_digest
    text = json.dumps([contract.exchange_digest, numbers])
    return hashlib.sha256(text.encode()).hexdigest()


def difference_of_calls(number: int, found: Mapping[int, tuple[str, Numbers]]) -> str:
    """Describe what differs at a call between ranks, of which each has a step and its numbers."""
    by_step = _ranks_of({k: step for k, (step, _) in found.items()})
    first = next(iter(found.values()))[1]
    differing = [
        name for name in first if len({numbers.get(name) for _, numbers in found.values()}) > 1
    ]
    if len(by_step) == 1 and differing:
        named = [f"{one} is {_values_of(one, found)}" for one in differing[:3]]
        rest = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        left = any(one.endswith(".grad") for one in differing)
        return (
            f"the ranks of the process group have different numbers at call {number} of "
            f"{next(iter(by_step))}: {'; '.join(named)}{rest}. Nothing has changed. With shard= "
            "each rank updates a part of the model, so all need the same: set them alike on all "
            f"ranks, and call the step again{_OF_GRADIENTS if left else ''}"
        )
    at = ", ".join(f"{ranks_in_words(some)} at {step}" for step, some in by_step.items())
    if len(by_step) == 1:
        at += ", with other exchanges (a frozen parameter, no_sync or another mode)"
    return (
        f"the ranks of the process group are at different steps in its call {number}: {at}. "
        "Nothing has changed. All ranks have to call their steps in the same order, as often"
    )


def _values_of(name: str, found: Mapping[int, tuple[str, Numbers]]) -> str:
    """Return "0.1 on rank 0, 0.2 on rank 1"."""
    by_value = _ranks_of({k: numbers.get(name, "none") for k, (_, numbers) in found.items()})
    return ", ".join(f"{value} on {ranks_in_words(some)}" for value, some in by_value.items())


def _ranks_of(by_rank: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, what in sorted(by_rank.items()):
        found.setdefault(what, []).append(rank)
    return found


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1, 2", or "the other ranks" for none."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" if ranks else "the other ranks"
