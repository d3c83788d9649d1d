# SPDX-License-Identifier: Apache-2.0
"""The exchange of a step on GPUs: collectives in the order of the device's stream.

NCCL works on a stream of its own that begins where the step's stream is at a start; a wait lets the
step's stream wait for it. The host waits for neither, so that both are recorded in a CUDA graph,
whose launches do not come back here. Ranks meet on the host before the run instead of in its first
start.

What differs from a CPU: the host learns of a failed collective after it has gone on. PyTorch's
watchdog ends the process then, or at the group's timeout.
"""

from __future__ import annotations

from typing import Any

import torch
import tvm

from amp_ir.distributed.compared_calls import ReadNumbers
from amp_ir.distributed.contract import Contract
from amp_ir.distributed.exchange import Exchange, copy_parts, shared
from amp_ir.distributed.replicas import Ranks
from amp_ir.ir.collective_call import Collective


class StreamExchange(Exchange):
    """What a step exchanges with other ranks on the current stream of a GPU."""

    def __init__(self, ranks: Ranks, contract: Contract) -> None:
        super().__init__(ranks, contract)
        # What was started and not waited for: PyTorch's handle, and the tensor that it works on.
        self._started: dict[tuple[int, int], tuple[Any, torch.Tensor]] = {}

    def _begin_call(self, read: ReadNumbers) -> int:
        self._started.clear()
        call = self._agreement.begin_call(self._contract, read)
        self._agreement.meet()
        return call

    def start(self, collective: Collective, flat: tvm.runtime.Tensor) -> None:
        """Let the group work on a bucket once the stream is here."""
        tensor = shared(flat)
        if collective.kind == "reduce_scatter":
            # Behind it is room for what ranks on CPUs tell each other.
            tensor = tensor[: collective.size]
        key = collective.group, collective.bucket
        self._started[key] = self._launch(collective, tensor), tensor

    def wait(
        self, collective: Collective, _flat: tvm.runtime.Tensor, *pairs: tvm.runtime.Tensor
    ) -> None:
        """Let the stream wait for a bucket, and copy parts of it to where their results belong."""
        work, _ = self._started.pop((collective.group, collective.bucket))
        work.wait()
        copy_parts(pairs)

    def _abandon(self) -> None:
        if self._started:
            self._agreement.break_group(list(self._started.values()))
            self._started = {}
