# SPDX-License-Identifier: Apache-2.0
"""The ranks of a step agree on its program before they exchange anything, in each of its groups.

A program that differs between ranks would hang in a collective, or add gradients of other
parameters. So each rank compares its contract with rank 0's and waits until all have: ranks that
compile longer are waited for here, with a message, and not in a collective. A rank that fails says
so in the store, where the others look while they wait. See meeting.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from amp_ir.distributed.compared_calls import Numbers, ReadNumbers, no_numbers
from amp_ir.distributed.contract import Contract
from amp_ir.distributed.meeting import meeting_of
from amp_ir.distributed.process_group import first_line
from amp_ir.errors import RankFailedError, RanksDifferError, StepFailedError

if TYPE_CHECKING:
    from amp_ir.distributed.replicas import Ranks

log = logging.getLogger("amp_ir")


class Agreement:
    """One step's part in the meetings of its groups.

    `step` names it for the other ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._meetings = [meeting_of(group) for group in ranks.groups if group.size > 1]
        names = [one.name_of(ranks.step) for one in self._meetings]
        self.step = names[0] if names else ranks.step
        self._has_begun = self._has_agreed = False

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Call the step inside; tell ranks that wait if it fails before it exchanges."""
        self._begin_attempt()
        try:
            self._ranks.refuse_changed_wrappers()
            yield
        except BaseException as error:
            self._failed_alone(error)
            raise

    def _begin_attempt(self) -> None:
        self._has_begun = self._has_agreed = False
        for one in self._meetings:
            one.begin_attempt()

    def _failed_alone(self, error: BaseException) -> None:
        if self._has_agreed or isinstance(error, RankFailedError | RanksDifferError):
            return  # known to all, or told
        first = first_line(error, otherwise="")
        for one in self._meetings:
            text = (
                f"rank {one.group.rank} of {one.group.size} failed before its first exchange: "
                f"{type(error).__name__}: {first}"
            )
            try:
                one.failed_alone(text, has_begun=self._has_begun)
            except RuntimeError as gone:
                log.warning("the other ranks cannot be told of a failure: %s", gone)

    def begin_call(
        self, contract: Contract, read: ReadNumbers = no_numbers, *, can_carry: bool = False
    ) -> int:
        """Agree on a program, if it is new in the group; count the call.

        `read` gives the values that updates read, which are compared too: with `can_carry` in an
        exchange of the step, where `carried` says so.

        Raises:
            RanksDifferError: another rank has another program. RankFailedError: one failed.
        """
        if not self._meetings or not contract.collectives:
            return self._calls
        self._has_begun = True
        for one in self._meetings:
            one.begin_call(contract, self._with_loads(read), can_carry=can_carry)
        self._has_agreed = True
        if not self._ranks.are_alike:
            self.meet()
            self._make_alike()
            self._ranks.are_alike = True
        return self._calls

    def _with_loads(self, read: ReadNumbers) -> ReadNumbers:
        """Return what reads how often split state was loaded, too: on all ranks, or on none."""
        shards = self._ranks.shards
        if shards is None:
            return read

        def with_loads(names: Sequence[str], may_wait: bool) -> Numbers:  # noqa: FBT001
            return {**read(names, may_wait), "load_state_dict() calls": str(len(shards.loads))}

        return with_loads

    @property
    def _calls(self) -> int:
        return self._meetings[0].calls if self._meetings else 0

    def meet(self) -> None:
        """Wait until all ranks are at this call, before its first exchange.

        Raises:
            RanksDifferError: they are at calls of different programs. RankFailedError: one failed.
        """
        for one in self._meetings:
            try:
                one.meet(self.check_others)
            except RuntimeError as error:
                if isinstance(error, RankFailedError | RanksDifferError):
                    raise
                first = first_line(error)
                rank = f"rank {one.group.rank} of {one.group.size}"
                lost = f"{rank} lost the others at the beginning of a call: {first}"
                raise RankFailedError(self.failure() or lost) from error

    @property
    def carried(self) -> str:
        """The digest of this call that an exchange of the step takes along; "" for none."""
        return self._meetings[0].carried if self._has_agreed else ""

    def raise_difference(self) -> None:
        """Say what differs between the ranks at this call.

        Raises:
            RanksDifferError: always.
        """
        self._meetings[0].raise_difference()

    def failure(self) -> str:
        """Return what another rank said of its failure; "" where none did."""
        return next((text for one in self._meetings if (text := one.failure())), "")

    def check_others(self) -> None:
        """Look whether another rank failed, or runs another program at this call.

        Raises:
            RankFailedError: one does.
        """
        for one in self._meetings:
            one.check_others()

    def failed(self, call: int, error: BaseException) -> None:
        """Tell the others that this rank's call failed."""
        if not self._has_agreed:
            return  # a program without exchanges, for which nobody waits
        cause = error.__cause__ if isinstance(error, StepFailedError) else error
        if isinstance(cause, RanksDifferError) or any(one.broken for one in self._meetings):
            return
        what = f"{type(cause).__name__}: {cause}"
        for one in self._meetings:
            text = f"rank {one.group.rank} of {one.group.size} failed at call {call}: {what}"
            one.tell(str(cause) if isinstance(cause, RankFailedError) else text)

    def break_group(self, left: Sequence[Any]) -> None:
        """Keep what unfinished exchanges work on; later calls are refused."""
        for one in self._meetings:
            one.keep(left)

    def say_waiting(self, what: str, seconds: float) -> None:
        """Say that this rank waits for others."""
        self._meetings[0].say_waiting(what, seconds)

    def _make_alike(self) -> None:
        """Give plain models rank 0's parameters and buffers, as a wrapper does when it is made."""
        for replica in self._ranks.replicas:
            if replica.wrapper is None and replica.group.size > 1:
                tensors = [one for _, one in (*replica.parameters(), *replica.buffers())]
                replica.group.send_from_first(tensors)
