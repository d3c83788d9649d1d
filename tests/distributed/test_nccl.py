# SPDX-License-Identifier: Apache-2.0
"""NCCL with one rank, on a GPU: an exchange in a CUDA graph, and the end of its process group."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import tvm
from torch import nn

from amp_ir.distributed.contract import Contract
from amp_ir.distributed.exchange import called_by_program
from amp_ir.distributed.process_group import Group
from amp_ir.distributed.rank_options import check_exchange
from amp_ir.distributed.replicas import Ranks, Replica
from amp_ir.distributed.stream_exchange import StreamExchange
from amp_ir.ir.collective_call import Collective
from amp_ir.runtime.graph_run import GraphRun

pytestmark = pytest.mark.gpu
SECONDS = 60


def test_an_exchange_is_recorded_and_the_group_can_be_destroyed(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    group = Group.of(None)
    ranks = Ranks([], [Replica(nn.Linear(2, 2), group)], [group])
    check_exchange(ranks, is_cuda=True, amp_dtype=None)
    exchange = StreamExchange(ranks, Contract((), (), (), ""))
    kinds = ("all_reduce", "broadcast", "reduce_scatter", "all_gather")
    flat = torch.arange(8.0, device="cuda")
    received = torch.zeros(8, device="cuda")
    views = [tvm.runtime.from_dlpack(one) for one in (flat, received)]

    def main() -> None:
        flat.mul_(2)
        for bucket, kind in enumerate(kinds):
            collective = Collective(kind, 0, bucket, 1, "float32", (8,))
            exchange.start(collective, views[0])
            exchange.wait(collective, views[0], *views)

    class Launches:
        def __call__(self, *_: object) -> None:
            main()

        def fail_as_a_whole(self, error: Exception) -> None:
            raise error

    run = GraphRun(main, torch.device("cuda", 0), Launches(), exchanges=True)
    with called_by_program(exchange):
        for _ in range(4):
            run((), (flat.data_ptr(),))
    torch.cuda.synchronize()
    assert run.is_recorded
    assert torch.equal(received, 16 * torch.arange(8.0, device="cuda"))
    # NCCL waits for graphs that have its collectives in them.
    destroy = threading.Thread(target=torch.distributed.destroy_process_group, daemon=True)
    destroy.start()
    destroy.join(SECONDS)
    assert not destroy.is_alive(), "destroy_process_group hangs"
    assert not run.is_recorded
