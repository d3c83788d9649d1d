# SPDX-License-Identifier: Apache-2.0
"""The exchange of a step whose other ranks are not there: its kernels can be timed in one process.

The program is that of the ranks, with every start and wait where it is. A bucket comes back as this
rank sent it, and what others would fill of a gathered one has this rank's numbers: sums are not
right, but as large as real ones, so that kernels take as long.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import attrs
import torch
import tvm

from amp_ir.distributed.compared_calls import ReadNumbers, no_numbers
from amp_ir.distributed.exchange import Exchange, called_by_program
from amp_ir.ir.collective_call import Collective


@attrs.frozen
class Half:
    """A start or a wait of a run; `stand_in_seconds` are what it did in the place of others."""

    collective: Collective
    nbytes: int
    is_start: bool
    stand_in_seconds: float


class StandInExchange(Exchange):
    """Starts and waits without other ranks; `halves` are those of the last run, in order."""

    def __init__(self) -> None:
        self.is_timed = False
        self.traffic = []
        self.halves: list[Half] = []

    def telling_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Nobody has to be told."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def running(self, read: ReadNumbers = no_numbers) -> Iterator[None]:  # noqa: ARG002
        """Take starts and waits inside."""
        self.halves = []
        with called_by_program(self):
            yield

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Nobody has to be told."""
        yield

    def start(self, collective: Collective, flat: tvm.runtime.Tensor) -> None:
        """Fill what others would have sent; what a reduction reads is there already."""
        tensor = torch.utils.dlpack.from_dlpack(flat)
        started = time.perf_counter()
        if collective.kind == "all_gather":
            rows = tensor.view(collective.ranks, -1)
            rows[1:] = rows[0]
        spent = time.perf_counter() - started
        self.halves.append(Half(collective, tensor.nbytes, True, spent))

    def wait(
        self, collective: Collective, flat: tvm.runtime.Tensor, *pairs: tvm.runtime.Tensor
    ) -> None:
        """Copy parts of the bucket to where their results belong, as a real wait does."""
        views = [torch.utils.dlpack.from_dlpack(one) for one in (flat, *pairs)]
        self.halves.append(Half(collective, views[0].nbytes, False, 0.0))
        for part, result in zip(views[1::2], views[2::2], strict=True):
            result.copy_(part)
