# SPDX-License-Identifier: Apache-2.0
"""The rounds of moves that are left out would repeat earlier ones."""

from __future__ import annotations

import copy

import attrs
import pytest

import amp_ir
from amp_ir.api import lower
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.memory import order_calls as ordering
from amp_ir.memory import plan_memory as planning
from amp_ir.memory.liveness import Liveness
from amp_ir.memory.order_calls import order_calls


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rounds", [7, 8])
@pytest.mark.parametrize("name", ["bert1", "gpt2", "lstm"])
def test_the_order_is_that_after_all_rounds(
    name: str, rounds: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = WORKLOADS[name].make(small=True)
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )
    found: list[list[int]] = []
    counts: list[int] = []
    one_round = ordering._Moves.round

    def counted(moves: ordering._Moves) -> bool:
        counts[-1] += 1
        return one_round(moves)

    def both(live: Liveness, **_options: bool) -> None:
        calls = [copy.copy(call) for call in live.program.calls]
        other = Liveness(attrs.evolve(live.program, calls=calls), live.outputs)
        moves = ordering._Moves(other, together=together)
        for _ in range(rounds):
            one_round(moves)
        counts.append(0)
        order_calls(live, together=together)
        # Copies of a call share its results.
        found.extend([id(c.results[0]) for c in one.program.calls] for one in (live, other))

    monkeypatch.setattr(ordering, "_MAX_ROUNDS", rounds)
    monkeypatch.setattr(ordering._Moves, "round", counted)
    monkeypatch.setattr(planning, "order_calls", both)
    lower(mod)
    assert found[0] == found[1]
    assert counts[0] < rounds
