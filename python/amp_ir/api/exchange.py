# SPDX-License-Identifier: Apache-2.0
"""What a step of several ranks exchanges while it runs; imported for such steps alone."""

from __future__ import annotations

from amp_ir.distributed.contract import contract_of
from amp_ir.distributed.exchange import Exchange, agreement_of
from amp_ir.distributed.rank_options import check_backends
from amp_ir.distributed.replicas import Ranks
from amp_ir.distributed.stand_in_exchange import StandInExchange
from amp_ir.distributed.stream_exchange import StreamExchange
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.step_module import StepModule


def exchange_between(ranks: Ranks, mod: StepModule, plan: MemoryPlan, *, is_cuda: bool) -> Exchange:
    """Return what starts and waits for the collectives of a planned step.

    Raises:
        DeviceError: a process group exchanges no tensors of the device.
    """
    if ranks.are_simulated:
        return StandInExchange()
    check_backends(ranks.groups, is_cuda=is_cuda)
    made = StreamExchange if is_cuda else Exchange
    return made(ranks, contract_of(mod, plan, agreement_of(ranks).step))
