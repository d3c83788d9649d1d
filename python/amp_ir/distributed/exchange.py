# SPDX-License-Identifier: Apache-2.0
"""The exchange of a step while it runs: the two functions that the virtual machine calls.

A start hands the range of a bucket to the process group, whose own thread reduces it in place; a
wait blocks until that is done. Nothing of the transport is ours, and nothing is copied: the group
works on the arena.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import tvm

from amp_ir.dialect.collectives import START_SYMBOL, WAIT_SYMBOL
from amp_ir.distributed import meeting
from amp_ir.distributed.agreement import Agreement
from amp_ir.distributed.carried_digest import CarriedDigest
from amp_ir.distributed.compared_calls import ReadNumbers, no_numbers
from amp_ir.distributed.contract import Contract
from amp_ir.distributed.process_group import Group, first_line
from amp_ir.distributed.replicas import Ranks
from amp_ir.errors import RankFailedError, RanksDifferError
from amp_ir.ir.collective_call import Collective, described
from amp_ir.ir.external_call import register_in_run

log = logging.getLogger("amp_ir")


@attrs.frozen
class Traffic:
    """One collective of a run, in seconds of `time.perf_counter`: when the group worked on it.

    The step is idle until it is handed over, at `launched`, and from `waited_from` to `waited_to`.
    """

    collective: Collective
    nbytes: int
    begun: float
    launched: float
    ended: float
    waited_from: float
    waited_to: float


@attrs.define(eq=False)
class _Pending:
    """A collective that was started: PyTorch's handle, and the tensor that it works on."""

    collective: Collective
    work: Any
    tensor: torch.Tensor
    begun: float
    launched: float
    ended: list[float]


class _Current(threading.local):
    exchange: Exchange | None = None


_current = _Current()


@contextlib.contextmanager
def called_by_program(exchange: Exchange) -> Iterator[None]:
    """Let the program that runs inside, on this thread, start and wait with an exchange."""
    _current.exchange = exchange
    try:
        yield
    finally:
        _current.exchange = None


class Exchange:
    """What the program of a step exchanges with other ranks; used for one run at a time."""

    def __init__(self, ranks: Ranks, contract: Contract) -> None:
        self._ranks = ranks
        self._contract = contract
        self._agreement = agreement_of(ranks)
        self._pending: dict[tuple[int, int], _Pending] = {}
        self._call = 0
        self._carried = CarriedDigest(ranks.groups[0].rank)
        # Where `is_timed`: what each collective of each run took.
        self.is_timed = False
        self.traffic: list[list[Traffic]] = []

    def telling_ranks(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a call of the step; other ranks hear of its failure."""
        return self._agreement.telling()

    @contextlib.contextmanager
    def running(self, read: ReadNumbers = no_numbers) -> Iterator[None]:
        """Exchange inside; the ranks agree on the program before its first run.

        `read` gives the values of inputs, as text by their names.

        Raises:
            RanksDifferError: another rank has another program; nothing has changed.
            RankFailedError: another rank failed earlier, or fails now.
        """
        self._call = call = self._begin_call(read)
        self._pending.clear()
        if self.is_timed:
            self.traffic.append([])
        try:
            with called_by_program(self):
                yield
        except BaseException as error:
            self._agreement.failed(call, error)
            self._abandon()
            if isinstance(error.__cause__, RanksDifferError):
                # Found by all ranks before the first exchange, which they can do without.
                raise error.__cause__ from None
            raise

    def _begin_call(self, read: ReadNumbers) -> int:
        """Agree on the program; return the number of the call."""
        call = self._agreement.begin_call(self._contract, read, can_carry=self._contract.carries)
        self._carried.begin(self._agreement.carried)
        return call

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error at once: it takes a while to come out of the program."""
        try:
            yield
        except BaseException as error:
            self._agreement.failed(self._call, error)
            raise

    def start(self, collective: Collective, flat: tvm.runtime.Tensor) -> None:
        """Hand a bucket to its group; the first of a call waits until all ranks are at it.

        Raises:
            RanksDifferError: the ranks are at calls of different programs, or of other numbers.
        """
        self._agreement.meet()
        tensor = shared(flat)
        if self._carried.is_open:
            self._carried.send(collective, tensor)
            if collective.kind == "all_gather":
                self._compare_carried()
        ended: list[float] = []
        begun = time.perf_counter()
        work = self._launch(collective, tensor)
        launched = time.perf_counter()
        if self.is_timed:
            work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
        key = collective.group, collective.bucket
        self._pending[key] = _Pending(collective, work, tensor, begun, launched, ended)

    def _compare_carried(self) -> None:
        """Compare what ranks told each other, before any of them sends what it has updated.

        Raises:
            RanksDifferError: it differs. What has begun has ended on all ranks, so all may go on.
        """
        for key, pending in self._pending.items():
            if key == self._carried.key:
                self._wait(pending, time.perf_counter())
                self._carried.receive(pending.collective, pending.tensor)
        if self._carried.close():
            return
        for pending in self._pending.values():
            self._wait(pending, time.perf_counter())
        self._pending.clear()
        self._agreement.raise_difference()

    def _launch(self, collective: Collective, tensor: torch.Tensor) -> Any:
        return _LAUNCHES[collective.kind](self._ranks.groups[collective.group], tensor)

    def wait(
        self, collective: Collective, _flat: tvm.runtime.Tensor, *pairs: tvm.runtime.Tensor
    ) -> None:
        """Wait for a bucket, and copy parts of it to where their results belong.

        Raises:
            RankFailedError: another rank failed, or the group's timeout is over.
        """
        key = collective.group, collective.bucket
        pending = self._pending[key]
        waited_from = time.perf_counter()
        self._wait(pending, waited_from)
        self._carried.receive(collective, pending.tensor)
        if collective.kind == "all_gather":
            # What it copies may be the state: none of it may be new if a later one fails.
            for other in self._pending.values():
                self._wait(other, time.perf_counter())
        del self._pending[key]
        waited_to = time.perf_counter()
        if self.is_timed:
            ended = pending.ended[0] if pending.ended else waited_to
            nbytes = pending.tensor.numel() * pending.tensor.element_size()
            times = pending.begun, pending.launched, min(ended, waited_to), waited_from, waited_to
            self.traffic[-1].append(Traffic(collective, nbytes, *times))
        copy_parts(pairs)

    def _wait(self, pending: _Pending, since: float) -> None:
        said = since
        while True:
            try:
                pending.work.wait(timedelta(seconds=meeting.LOOK_SECONDS))
                return
            except RuntimeError:  # the time is over, or the exchange failed
                if pending.work.is_completed():
                    self._finish(pending)
                    return
            now = time.perf_counter()
            self._agreement.check_others()
            if now - said >= meeting.SAY_SECONDS:
                said = now
                self._agreement.say_waiting(str(pending.collective), now - since)

    def _finish(self, pending: _Pending) -> None:
        """End a completed exchange, which may have failed."""
        try:
            pending.work.wait()
        except RuntimeError as error:
            raise RankFailedError(self._lost(pending, error)) from error

    def _lost(self, pending: _Pending, error: RuntimeError) -> str:
        told = self._agreement.failure()
        if told:
            return told
        group = self._ranks.groups[pending.collective.group]
        first = first_line(error)
        return (
            f"rank {group.rank} of {group.size} lost the others in the {pending.collective}: "
            f"{first}"
        )

    def _abandon(self) -> None:
        """Keep what the group may still write to, and refuse the group from now on."""
        left = list(self._pending.values())
        self._pending.clear()
        if left:
            self._agreement.break_group(left)


def shared(flat: tvm.runtime.Tensor) -> torch.Tensor:
    """Return a tensor of the program as PyTorch's, in the same memory."""
    return torch.utils.dlpack.from_dlpack(flat)


def copy_parts(pairs: Sequence[tvm.runtime.Tensor]) -> None:
    """Copy parts of a bucket, each followed by the tensor that it belongs in."""
    views = [shared(one) for one in pairs]
    for part, result in zip(views[::2], views[1::2], strict=True):
        result.copy_(part)


def agreement_of(ranks: Ranks) -> Agreement:
    """Return the agreement of a step's ranks, which all of its programs share."""
    if ranks.agreement is None:
        ranks.agreement = Agreement(ranks)
    found: Agreement = ranks.agreement
    return found


def _all_reduce(group: Group, tensor: torch.Tensor) -> Any:
    options: Any = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.SUM
    return group.handle.allreduce([tensor], options)


def _broadcast(group: Group, tensor: torch.Tensor) -> Any:
    options = torch.distributed.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    return group.handle.broadcast([tensor], options)


def _reduce_scatter(group: Group, tensor: torch.Tensor) -> Any:
    """Sum a range over the ranks; of the result only this rank's part counts."""
    if group.backend_for(tensor.device.type) == "gloo":
        # Its own is an all-reduce of a copy.
        _say_of_gloo()
        return _all_reduce(group, tensor)
    options: Any = torch.distributed.ReduceScatterOptions()
    options.reduceOp = torch.distributed.ReduceOp.SUM
    return group.handle._reduce_scatter_base(_own_part(group, tensor), tensor, options)


def _all_gather(group: Group, tensor: torch.Tensor) -> Any:
    return group.all_gather(tensor, _own_part(group, tensor))


def _own_part(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    count = tensor.numel() // group.size
    return tensor[group.rank * count : (group.rank + 1) * count]


@functools.cache
def _say_of_gloo() -> None:
    log.info(
        "gloo has no reduce-scatter of its own: each rank receives all sums of gradients, and "
        "keeps its part"
    )


_LAUNCHES: dict[str, Callable[[Group, torch.Tensor], Any]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
}


def _exchange() -> Exchange:
    assert _current.exchange is not None, "a collective runs in a step of this process's ranks"
    return _current.exchange


def _start(description: str, flat: tvm.runtime.Tensor) -> None:
    exchange = _exchange()
    with exchange.telling():
        exchange.start(described(description), flat)


def _wait(description: str, flat: tvm.runtime.Tensor, *pairs: tvm.runtime.Tensor) -> None:
    exchange = _exchange()
    with exchange.telling():
        exchange.wait(described(description), flat, *pairs)


register_in_run(START_SYMBOL, _start)
register_in_run(WAIT_SYMBOL, _wait)
