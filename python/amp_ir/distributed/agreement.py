# SPDX-License-Identifier: Apache-2.0
"""The ranks of a step agree on its program before they exchange anything, through the store.

A program that differs between ranks would hang in a collective, or add gradients of other
parameters. So each rank compares its contract with rank 0's and waits until all have: ranks that
compile longer are waited for here, with a message, and not in a collective. A rank that fails says
so in the store, where the others look while they wait.
"""

from __future__ import annotations

import base64
import collections
import logging
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs

from amp_ir.distributed.contract import Contract
from amp_ir.distributed.process_group import Group
from amp_ir.errors import RankFailedError, RanksDifferError, StepFailedError

if TYPE_CHECKING:
    from amp_ir.distributed.replicas import Ranks

log = logging.getLogger("amp_ir")

_LOOK_SECONDS, _SAY_SECONDS = 1.0, 5.0
RESTART = "save the state, end the processes, and start them again from it"
# How many steps of a group have agreements: all ranks begin them in the same order.
_steps_of_group: collections.Counter[str] = collections.Counter()


@attrs.define(eq=False)
class _Place:
    """Where one group agrees: its part of the store."""

    group: Group
    prefix: str

    def key(self, *parts: object) -> str:
        return "/".join(map(str, (self.prefix, *parts)))

    def has(self, *parts: object) -> bool:
        return bool(self.group.store.check([self.key(*parts)]))

    def get(self, *parts: object) -> bytes:
        return bytes(self.group.store.get(self.key(*parts)))

    def set(self, value: bytes | str, *parts: object) -> None:
        self.group.store.set(self.key(*parts), value)


class Agreement:
    """What the ranks of one step have agreed on, and whether one has failed."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._places: list[_Place] = []
        for group in ranks.groups:
            if group.size > 1:
                name = str(group.handle.group_name)
                prefix = f"amp_ir/{name}/{_steps_of_group[name]}"
                _steps_of_group[name] += 1
                self._places.append(_Place(group, prefix))
        self._agreed: set[str] = set()
        self._programs = 0
        self._calls = 0
        # Calls of the step, also those that fail before anything is exchanged.
        self._attempts = 0
        self._compared: set[str] = set()
        self._broken = ""
        # What the group may still write to.
        self._left: list[Sequence[Any]] = []

    def begin_attempt(self) -> None:
        """Count a call of the step, before anything is compiled or checked."""
        self._attempts += 1

    def failed_alone(self, error: BaseException) -> None:
        """Tell those who wait in the store that this call failed before it exchanged anything."""
        if isinstance(error, RankFailedError | RanksDifferError | StepFailedError):
            return  # known to all, or told
        first = (str(error).strip().splitlines() or [""])[0]
        for place in self._places:
            text = f"rank {place.group.rank} of {place.group.size} failed before its first exchange"
            try:
                place.set(f"{text}: {type(error).__name__}: {first}", "alone", self._attempts)
            except RuntimeError as gone:
                log.warning("the other ranks cannot be told of a failure: %s", gone)

    def begin_call(self, contract: Contract) -> int:
        """Agree on a program, if no program of the same exchanges is agreed on; count the call.

        Raises:
            RanksDifferError: another rank has another program. RankFailedError: one failed.
        """
        if not self._places or not contract.collectives:
            return self._calls
        if self._broken:
            raise RankFailedError(
                f"{self._broken}. The group may have exchanges that did not end, so it is not used "
                f"again: {RESTART}"
            )
        self._calls += 1
        if contract.exchange_digest not in self._agreed:
            self._programs += 1
            for place in self._places:
                self._agree(place, contract)
            self._agreed.add(contract.exchange_digest)
            self._compared.add(contract.digest)
        elif contract.digest not in self._compared:
            self._compared.add(contract.digest)
            self._compare(contract)
        if not self._ranks.are_alike:
            self._make_alike()
            self._ranks.are_alike = True
        return self._calls

    def _agree(self, place: _Place, contract: Contract) -> None:
        group, number = place.group, self._programs
        place.set(str(self._calls), "entered", number)
        place.set("", "arrived", number, group.rank)
        if group.rank == 0:
            place.set(contract.to_bytes(), "first", number)
        self._wait_for(place, ("first", number), lambda: [0])
        first = Contract.from_bytes(place.get("first", number))
        difference = contract.difference(first)
        if difference:
            place.set(f"{group.rank}|{difference}", "different", number)
        if group.store.add(place.key("count", number), 1) == group.size:
            place.set("", "all", number)

        def missing() -> list[int]:
            return [k for k in range(group.size) if not place.has("arrived", number, k)]

        self._wait_for(place, ("all", number), missing)
        if place.has("different", number):
            rank, _, text = place.get("different", number).decode().partition("|")
            raise RanksDifferError(
                f"the ranks of the process group have different programs: on rank {rank}, {text}. "
                "Nothing has changed. All ranks have to run the same step with the same options; "
                "their batches may differ in values and in shapes",
                rank=int(rank),
            )

    def _compare(self, contract: Contract) -> None:
        """Compare a program of agreed exchanges with those of ranks that begin theirs at this call.

        Nobody waits for that: the first of them leaves its program in the store, and the others
        look at it. Ranks whose batches have other shapes have other programs.

        Raises:
            RanksDifferError: an op differs; the others see it as a failure of this rank.
        """
        for place in self._places:
            key = place.key("later", self._calls, contract.batch_digest)
            own = base64.b64encode(contract.to_bytes()).decode()
            first = place.group.store.compare_set(key, "", own)
            difference = contract.difference(Contract.from_bytes(base64.b64decode(first)))
            if difference:
                theirs = difference.replace("on rank 0", "on the rank that compiled first")
                text = (
                    f"the ranks of the process group have different programs from call "
                    f"{self._calls} on: on rank {place.group.rank}, {theirs}"
                )
                self._broken = text
                place.set(text, "failed")
                raise RanksDifferError(
                    f"{text}. Nothing has changed on this rank", rank=place.group.rank
                )

    def _wait_for(
        self, place: _Place, key: tuple[object, ...], missing: Callable[[], list[int]]
    ) -> None:
        """Wait until a key is in the store, with a message where that takes long.

        Raises:
            RankFailedError: a rank failed, or did not come within the group's timeout.
        """
        group, since = place.group, time.monotonic()
        said = since
        while not self._is_there(place, key):
            now = time.monotonic()
            self._raise_failure(place)
            self._raise_failure_of_one(place)
            if now - since > group.timeout_seconds:
                raise RankFailedError(
                    f"rank {group.rank} waited {now - since:.0f} s, the group's timeout, for "
                    f"{_ranks_in_words(missing())} to compile the step; see what that does, or "
                    "pass timeout= to init_process_group"
                )
            if now - said >= _SAY_SECONDS:
                said = now
                log.info(
                    "rank %d of %d has compiled the step and has waited %.0f s for %s",
                    *(group.rank, group.size, now - since, _ranks_in_words(missing())),
                )

    @staticmethod
    def _is_there(place: _Place, key: tuple[object, ...]) -> bool:
        seconds = min(_LOOK_SECONDS, place.group.timeout_seconds)
        try:
            place.group.store.wait([place.key(*key)], timedelta(seconds=seconds))
        except RuntimeError:  # the time is over, or the store does not answer
            return _answered(place, key)
        return True

    def _raise_failure(self, place: _Place) -> None:
        if _answered(place, ("failed",)):
            self._broken = place.get("failed").decode()
            raise RankFailedError(self._broken)

    def _raise_failure_of_one(self, place: _Place) -> None:
        if _answered(place, ("alone", self._attempts)):
            self._broken = place.get("alone", self._attempts).decode()
            # That rank may call the step again, and must not wait for this one.
            place.set(self._broken, "failed")
            raise RankFailedError(self._broken)

    def failure(self) -> str:
        """Return what another rank said of its failure; "" where none did."""
        for place in self._places:
            try:
                if place.has("failed"):
                    return place.get("failed").decode()
            except RuntimeError:
                return ""
        return ""

    def check_others(self) -> None:
        """Look whether another rank failed, or runs another program at this step.

        Raises:
            RankFailedError: one does.
        """
        for place in self._places:
            self._raise_failure(place)
            number = self._programs + 1
            if not _answered(place, ("entered", number)):
                continue
            if int(place.get("entered", number)) == self._calls:
                raise RankFailedError(
                    f"another rank has a program with other exchanges at call {self._calls} of the "
                    f"step, which rank {place.group.rank} runs as before: a frozen parameter, "
                    "no_sync or another mode on one rank. Change it on all ranks"
                )

    def failed(self, call: int, error: BaseException) -> None:
        """Tell the others that this rank's call failed."""
        if isinstance(error, RanksDifferError) or self._broken:
            return
        cause = error.__cause__ if isinstance(error, StepFailedError) else error
        what = f"{type(cause).__name__}: {cause}"
        for place in self._places:
            text = f"rank {place.group.rank} of {place.group.size} failed at call {call}: {what}"
            if isinstance(cause, RankFailedError):
                text = str(cause)
            self._broken = self._broken or text
            try:
                if not place.has("failed"):
                    place.set(text, "failed")
            except RuntimeError as gone:
                log.warning("the other ranks cannot be told of a failure: %s", gone)

    def break_group(self, left: Sequence[Any]) -> None:
        """Keep what unfinished exchanges work on; later calls are refused."""
        self._left.append(left)

    def say_waiting(self, what: str, seconds: float) -> None:
        """Say that this rank waits for others."""
        group = self._places[0].group
        log.info("rank %d of %d has waited %.0f s in the %s", group.rank, group.size, seconds, what)

    def _make_alike(self) -> None:
        """Give plain models rank 0's parameters and buffers, as a wrapper does when it is made."""
        for replica in self._ranks.replicas:
            if replica.wrapper is None and replica.group.size > 1:
                tensors = [one for _, one in (*replica.parameters(), *replica.buffers())]
                replica.group.send_from_first(tensors)


def _answered(place: _Place, key: tuple[object, ...]) -> bool:
    """Return whether a key is in the store.

    Raises:
        RankFailedError: the store does not answer.
    """
    try:
        return place.has(*key)
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or ["?"])[0]
        raise RankFailedError(
            f"rank {place.group.rank} of {place.group.size} lost the store of the process group, "
            f"which is rank 0's: {first}"
        ) from error


def _ranks_in_words(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}" if ranks else "the other ranks"
