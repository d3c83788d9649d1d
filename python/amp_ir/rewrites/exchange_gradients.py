# SPDX-License-Identifier: Apache-2.0
"""The rewrites of a step that several ranks train; imported by pipeline.py for such steps."""

from __future__ import annotations

import attrs

from amp_ir.distributed.shard_balance import note_of_excess
from amp_ir.distributed.split_updates import refuse_own_updates
from amp_ir.ir.step_module import StepModule
from amp_ir.rewrites.number_buckets import number_buckets
from amp_ir.rewrites.order_gradients import order_gradients
from amp_ir.rewrites.shard_plan import shard_plan
from amp_ir.rewrites.shard_updates import shard_updates
from amp_ir.rewrites.start_collectives import start_collectives


def exchange_gradients(mod: StepModule) -> StepModule:
    """Begin and wait for what ranks exchange, and update the part that this rank holds.

    Ensures: gradients are exchanged in buckets, each begun and waited for.

    Raises:
        ShardingError: the state is split, and some is computed from a rank's own batch.
    """
    mod = attrs.evolve(mod, notes=(*mod.notes, *note_of_excess(mod)))
    mod = mod.with_ir(order_gradients(mod.ir))
    plan = shard_plan(mod)
    if plan is None:
        return mod.with_ir(start_collectives(mod.ir))
    refuse_own_updates(mod)
    split = shard_updates(mod, plan)
    ir = number_buckets(start_collectives(split.ir))
    return attrs.evolve(split.with_ir(ir), whole=mod)
