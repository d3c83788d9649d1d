# SPDX-License-Identifier: Apache-2.0
"""The casts of a step: what of them has to be alike on all ranks.

Where updates are split, the parts differ between ranks, and with them ops and their order. What
gradients are computed from does not. Where batches differ in shapes, ops do, and options do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amp_ir.dialect.collectives import REDUCE_SCATTER
from amp_ir.ir.step_module import StepModule


def options_of_casts(mod: StepModule) -> tuple[str, ...]:
    """Return what was asked of autocast, which no shape changes; nothing without casts."""
    if mod.plan is None:
        return ()
    options = mod.cast_options
    given = () if options.get("plan") is None else ("a plan that was given",)
    overrides = map(str, options.get("overrides", ()))
    return (f"dtype {mod.plan.amp_dtype}", f"policy {mod.plan.policy}", *given, *overrides)


def own_decisions(mod: StepModule) -> tuple[str, ...]:
    """Return what the user's own rules, or a plan of theirs, decide at each place of the model.

    Functions of several processes cannot be compared: they read what they like. Where they decide
    alike, they may differ. One that decides by the shape of a batch is another for another batch.
    """
    if mod.plan is None:
        return ()
    is_given = mod.cast_options.get("plan") is not None
    ops = [one for plan in (mod.plan, *(one.plan for one in mod.plan.loops)) for one in plan.ops]
    if mod.whole is not None:
        # Rules leave updates alone, of which a rank has its part.
        ops = [one for one in ops if one.phase != "optimizer"]
    found = {_decision(one) for one in ops if is_given or one.name in mod.own_rules}
    return tuple(sorted(found))


def rules_of_gradients(mod: StepModule) -> tuple[str, ...]:
    """Return the rule of each op that leads to a gradient of split updates, and what it asks for.

    Where a rule leaves the dtype open, the placement decides by bytes, also those of the parts.
    """
    return () if mod.plan is None else tuple(_rules(mod.plan))


def _rules(plan: Any) -> Iterator[str]:
    ops = {one.id: one for one in plan.ops}
    due = [one.id for one in plan.ops if one.name == f"{REDUCE_SCATTER}_start"]
    found: set[int] = set()
    while due:
        number = due.pop()
        if number in found or number not in ops or ops[number].name.endswith("_wait"):
            continue
        found.add(number)
        due += ops[number].sources
    for number in sorted(found):
        yield _decision(ops[number])


def _decision(one: Any) -> str:
    place = f"{one.module or 'step'} ({one.phase})"
    return f"{one.name} of {place} cast by {one.rule}, reading {', '.join(one.modes)}"
