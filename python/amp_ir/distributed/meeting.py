# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of one process group meet before they exchange anything, through its store.

All steps of a process share it: a group has one order of exchanges, whichever step makes them. Each
call of a program with exchanges has a number in the group, and at each number all ranks run the
same program, or all raise. A program that is new in the group is compared through the store; where
a group has several, a small all-reduce at the start of each call says whether all ranks are at the
same one.
"""

from __future__ import annotations

import base64
import collections
import functools
import json
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from amp_ir.distributed.compared_calls import (
    Numbers,
    ReadNumbers,
    difference_of_calls,
    digest_of_call,
    no_numbers,
    ranks_in_words,
)
from amp_ir.distributed.contract import Contract
from amp_ir.distributed.process_group import RESTART, Group, first_line
from amp_ir.errors import RankFailedError, RanksDifferError

log = logging.getLogger("amp_ir")

LOOK_SECONDS, SAY_SECONDS = 1.0, 5.0
_SAME = (
    "All ranks have to run the same step with the same options; their batches may differ in values "
    "and in shapes"
)
# How long ranks that are at different programs wait for the names of the others'.
_NAME_SECONDS = 5.0
# The groups of this process, and how many had a name: one may be destroyed and made again.
_meetings: weakref.WeakKeyDictionary[Any, Meeting] = weakref.WeakKeyDictionary()
_groups_of_name: collections.Counter[str] = collections.Counter()


def meeting_of(group: Group) -> Meeting:
    """Return where the ranks of a group meet, the same for every step of this process."""
    found = _meetings.get(group.handle)
    if found is None:
        found = _meetings[group.handle] = Meeting(group)
    return found


class _RollCall:
    """An all-reduce that says whether all ranks are at a call of the same program."""

    def __init__(self, group: Group, digest: str) -> None:
        number = int(digest[:15], 16)
        # The largest number, and the smallest one's negative.
        self._numbers = torch.tensor([number, -number])
        options: Any = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX
        self._work = group.handle.allreduce([self._numbers], options)

    def is_done(self) -> bool:
        """Wait a little for the other ranks, and return whether all have come.

        Raises:
            RuntimeError: the all-reduce failed.
        """
        try:
            self._work.wait(timedelta(seconds=LOOK_SECONDS))
        except RuntimeError:  # the time is over, or the exchange failed
            if not self._work.is_completed():
                return False
            self._work.wait()
        return True

    def are_alike(self) -> bool:
        """Return whether they are; all have come."""
        largest, smallest = self._numbers.tolist()
        return bool(largest == -smallest)


class _StoreRollCall:
    """The same through the store, for a group that exchanges no tensors of the host.

    Ranks on GPUs meet on the host, while the GPU still works on the step before.
    """

    def __init__(self, group: Group, digest: str, key: Callable[..., str]) -> None:
        self._store, self._key = group.store, key
        if self._store.compare_set(key("digest"), "", digest).decode() != digest:
            self._store.set(key("differ"), "")
        if self._store.add(key("here"), 1) == group.size:
            self._store.set(key("all"), "")

    def is_done(self) -> bool:
        """Wait a little for the other ranks, and return whether all have come."""
        try:
            self._store.wait([self._key("all")], timedelta(seconds=LOOK_SECONDS))
        except RuntimeError:  # the time is over, or the store does not answer
            return bool(self._store.check([self._key("all")]))
        return True

    def are_alike(self) -> bool:
        """Return whether they are; all have come."""
        return not self._store.check([self._key("differ")])

    def forget(self) -> None:
        """Take the keys out of the store, once no rank can read them any more."""
        for name in ("digest", "differ", "here", "all"):
            self._store.delete_key(self._key(name))


class Meeting:
    """The calls of a group so far, what its ranks have agreed on, and whether one has failed.

    `calls` counts those of programs with exchanges, of every step. `broken` says what failed, from
    then on: the group may have exchanges that did not end, and is not used again.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        name = str(group.handle.group_name)
        self._prefix = f"amp_ir/{name}/{_groups_of_name[name]}"
        _groups_of_name[name] += 1
        self._steps_of_name: collections.Counter[str] = collections.Counter()
        self.calls = 0
        self.broken = ""
        self._agreed: set[str] = set()
        self._compared: set[str] = set()
        self._roll_call: _RollCall | _StoreRollCall | None = None
        # Of the calls before, whose keys are in the store until all ranks are past them.
        self._past: collections.deque[_StoreRollCall] = collections.deque()
        self._own_name = ""
        self._numbers: Numbers = {}
        # A digest of the call that travels in an exchange of the step; "" where none does.
        self.carried = ""
        # The call that this rank told the others to have failed before its exchanges.
        self._told_alone = 0
        # What the group may still write to.
        self._left: list[Sequence[Any]] = []

    def name_of(self, step: str) -> str:
        """Return a step's name in the group: a second one of that name gets a number."""
        self._steps_of_name[step] += 1
        count = self._steps_of_name[step]
        return step if count == 1 else f"{step}, number {count} of this name"

    def begin_attempt(self) -> None:
        """Take back that an earlier call failed alone, if no other rank has seen it."""
        told, self._told_alone = self._told_alone, 0
        if not told:
            return
        self.broken = self.broken or self.failure()
        if not self.broken:
            self.group.store.delete_key(self._key("alone", told))

    def begin_call(
        self, contract: Contract, read: ReadNumbers = no_numbers, *, can_carry: bool = False
    ) -> None:
        """Agree on a program that is new in the group, or begin to compare which one this call is.

        `read` gives the values that updates read, which have to be alike too. With `can_carry` an
        exchange of the step takes their digest along, where all ranks are at one program.

        Raises:
            RanksDifferError: another rank has another program. RankFailedError: one failed.
        """
        if self.broken:
            raise RankFailedError(
                f"{self.broken}. The group may have exchanges that did not end, so it is not used "
                f"again: {RESTART}"
            )
        self.calls += 1
        self._roll_call, self._own_name, self.carried = None, contract.step, ""
        is_new = contract.exchange_digest not in self._agreed
        if is_new:
            self._agree(contract)
            self._agreed.add(contract.exchange_digest)
            self._compared.add(contract.digest)
        elif contract.digest not in self._compared:
            self._compared.add(contract.digest)
            self._compare(contract)
        names = (*contract.numbers, *contract.kept_numbers) if is_new else contract.numbers
        self._numbers = read(names, is_new)
        # With one program, a rank that has another one agrees on that first.
        is_only = len(self._agreed) == 1
        if self._numbers and can_carry and is_only and not is_new:
            self.carried = digest_of_call(contract, self._numbers)
        elif self._numbers or not (is_new or is_only):
            self._roll_call = self._begin_roll_call(contract)

    def meet(self, check_others: Callable[[], None]) -> None:
        """Wait until all ranks are at this call, before its first exchange.

        Raises:
            RanksDifferError: they are at calls of different programs.
        """
        roll_call = self._roll_call
        if roll_call is None:
            return
        since = said = time.monotonic()
        while not roll_call.is_done():
            check_others()
            now = time.monotonic()
            if now - said >= SAY_SECONDS:
                said = now
                self.say_waiting(f"call {self.calls} of the group, {self._own_name}", now - since)
        self._roll_call = None
        if not roll_call.are_alike():
            self.raise_difference()
        if isinstance(roll_call, _StoreRollCall) and self.group.rank == 0:
            self._past.append(roll_call)
            # At the next call all ranks have left this one.
            while len(self._past) > 1:
                self._past.popleft().forget()

    def raise_difference(self) -> None:
        """Say what differs at this call; all ranks do, at the same place.

        Raises:
            RanksDifferError: always.
        """
        raise RanksDifferError(self._difference_of_calls(), rank=self.group.rank)

    def _begin_roll_call(self, contract: Contract) -> _RollCall | _StoreRollCall:
        digest = digest_of_call(contract, self._numbers)
        if self.group.backend_for("cpu"):
            return _RollCall(self.group, digest)
        key = functools.partial(self._key, "call", self.calls)
        return _StoreRollCall(self.group, digest, key)

    def _difference_of_calls(self) -> str:
        """Describe which step each rank is at; all of them ask at the same time."""
        number, size = self.calls, self.group.size
        self._set(json.dumps([self._own_name, self._numbers]), "at", number, self.group.rank)
        until = time.monotonic() + min(_NAME_SECONDS, self.group.timeout_seconds)
        found: dict[int, tuple[str, Numbers]] = {}
        while len(found) < size and time.monotonic() < until:
            for k in range(size):
                if k not in found and self._has("at", number, k):
                    found[k] = tuple(json.loads(self._get("at", number, k)))
            time.sleep(0.01)
        return difference_of_calls(number, {k: found[k] for k in sorted(found)})

    def _agree(self, contract: Contract) -> None:
        group, number = self.group, self.calls
        self._raise_failure()
        self._set(contract.step, "entered", number)
        self._set("", "arrived", number, group.rank)
        if group.rank == 0:
            self._set(contract.to_bytes(), "first", number)
        self._wait_for(("first", number), lambda: [0])
        first = Contract.from_bytes(self._get("first", number))
        difference = contract.difference(first)
        if difference:
            self._set(f"{group.rank}|{difference}", "different", number)
        if group.store.add(self._key("count", number), 1) == group.size:
            self._set("", "all", number)

        def missing() -> list[int]:
            return [k for k in range(group.size) if not self._has("arrived", number, k)]

        self._wait_for(("all", number), missing)
        if self._has("different", number):
            rank, _, text = self._get("different", number).decode().partition("|")
            raise RanksDifferError(
                f"the ranks of the process group have different programs: on rank {rank}, {text}. "
                f"Nothing has changed. {_SAME}",
                rank=int(rank),
            )

    def _compare(self, contract: Contract) -> None:
        """Compare a program of agreed exchanges with those of ranks that begin theirs at this call.

        Nobody waits for that: the first of them leaves its program in the store, and the others
        look at it. Ranks whose batches have other shapes have other programs.

        Raises:
            RanksDifferError: an op differs; the others see it as a failure of this rank.
        """
        key = self._key("later", self.calls, contract.exchange_digest, contract.batch_digest)
        own = base64.b64encode(contract.to_bytes()).decode()
        first = self.group.store.compare_set(key, "", own)
        difference = contract.difference(Contract.from_bytes(base64.b64decode(first)))
        if difference:
            theirs = difference.replace("on rank 0", "on the rank that compiled first")
            text = (
                f"the ranks of the process group have different programs from call "
                f"{self.calls} on: on rank {self.group.rank}, {theirs}"
            )
            self.tell(text)
            raise RanksDifferError(
                f"{text}. Nothing has changed on this rank. {_SAME}", rank=self.group.rank
            )

    def _wait_for(self, key: tuple[object, ...], missing: Callable[[], list[int]]) -> None:
        """Wait until a key is in the store, with a message where that takes long.

        Raises:
            RankFailedError: a rank failed, or did not come within the group's timeout.
        """
        group, since = self.group, time.monotonic()
        said = since
        while not self._is_there(key):
            now = time.monotonic()
            self.raise_failure()
            if now - since > group.timeout_seconds:
                text = (
                    f"rank {group.rank} waited {now - since:.0f} s, the group's timeout, for "
                    f"{ranks_in_words(missing())} to compile the step; see what that does, or "
                    "pass timeout= to init_process_group"
                )
                self.tell(text)
                raise RankFailedError(text)
            if now - said >= SAY_SECONDS:
                said = now
                log.info(
                    "rank %d of %d has compiled the step and has waited %.0f s for %s",
                    *(group.rank, group.size, now - since, ranks_in_words(missing())),
                )

    def _is_there(self, key: tuple[object, ...]) -> bool:
        seconds = min(LOOK_SECONDS, self.group.timeout_seconds)
        try:
            self.group.store.wait([self._key(*key)], timedelta(seconds=seconds))
        except RuntimeError:  # the time is over, or the store does not answer
            return self._answered(key)
        return True

    def raise_failure(self) -> None:
        """Look whether another rank has failed, in this call or before its exchanges.

        Raises:
            RankFailedError: one has.
        """
        self._raise_failure()
        if self._answered(("alone", self.calls)):
            # That rank may call the step again, and must not wait for this one.
            text = self._get("alone", self.calls).decode()
            self.tell(text)
            raise RankFailedError(text)

    def _raise_failure(self) -> None:
        if self._answered(("failed",)):
            self.broken = self._get("failed").decode()
            raise RankFailedError(self.broken)

    def failure(self) -> str:
        """Return what another rank said of its failure; "" where none did."""
        try:
            return self._get("failed").decode() if self._has("failed") else ""
        except RuntimeError:
            return ""

    def check_others(self) -> None:
        """Look whether another rank failed, or has a new program at this call.

        Raises:
            RankFailedError: one does.
        """
        self.raise_failure()
        if not self._answered(("entered", self.calls)):
            return
        theirs = self._get("entered", self.calls).decode()
        if theirs == self._own_name:
            raise RankFailedError(
                f"another rank has a program with other exchanges at call {self.calls} of the "
                f"step, which rank {self.group.rank} runs as before: a frozen parameter, "
                "no_sync or another mode on one rank. Change it on all ranks"
            )
        raise RankFailedError(
            f"the ranks of the process group are at different steps in its call {self.calls}: rank "
            f"{self.group.rank} at {self._own_name}, another rank at {theirs}, which it calls for "
            "the first time. All ranks have to call their steps in the same order, as often"
        )

    def failed_alone(self, text: str, *, has_begun: bool) -> None:
        """Tell those who wait that this rank failed before it exchanged anything."""
        self._told_alone = self.calls + (not has_begun)
        self._set(text, "alone", self._told_alone)

    def tell(self, text: str) -> None:
        """Tell the others that the group is broken, unless one of them has said so."""
        self.broken = self.broken or text
        try:
            if not self._has("failed"):
                self._set(text, "failed")
        except RuntimeError as gone:
            log.warning("the other ranks cannot be told of a failure: %s", gone)

    def keep(self, left: Sequence[Any]) -> None:
        """Keep what unfinished exchanges work on."""
        self._left.append(left)
        if self._roll_call is not None:
            self._left.append([self._roll_call])

    def say_waiting(self, what: str, seconds: float) -> None:
        """Say that this rank waits for others."""
        rank, size = self.group.rank, self.group.size
        log.info("rank %d of %d has waited %.0f s in the %s", rank, size, seconds, what)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def _has(self, *parts: object) -> bool:
        return bool(self.group.store.check([self._key(*parts)]))

    def _get(self, *parts: object) -> bytes:
        return bytes(self.group.store.get(self._key(*parts)))

    def _set(self, value: bytes | str, *parts: object) -> None:
        self.group.store.set(self._key(*parts), value)

    def _answered(self, key: tuple[object, ...]) -> bool:
        """Return whether a key is in the store.

        Raises:
            RankFailedError: the store does not answer.
        """
        try:
            return self._has(*key)
        except RuntimeError as error:
            first = first_line(error)
            raise RankFailedError(
                f"rank {self.group.rank} of {self.group.size} lost the store of the process group, "
                f"which is rank 0's: {first}. See why rank 0 ended, and start all processes again"
            ) from error
