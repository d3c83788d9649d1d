# SPDX-License-Identifier: Apache-2.0
"""The programs that one jitted step was compiled to, and what they were compiled for.

A program is valid for calls of one signature (structure, shapes, dtypes), for the plain values
among their arguments, and while its guards hold. Programs whose guards fail at the moment are
kept: training and evaluation, or the steps of an accumulation, alternate.

As PyTorch does, it reports compiles through `logging` at INFO (the logger "amp_ir.recompiles"), and
warns (WARNING) only when compiles do not stop.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import attrs

from amp_ir.host.logs import logger_of
from amp_ir.ir.short_list import short_list
from amp_ir.ir.step_module import StepHooks
from amp_ir.runtime.step import CompiledStep

log = logger_of("recompiles")

# What torch.compile allows too. Four switches that users turn make eight programs: training or
# evaluation, frozen or not, gradients there or not.
DEFAULT_LIMIT = 8
# Lengths padded to multiples of 32 up to 512 are as many.
DEFAULT_SHAPES = 16
# A list of a batch's file names differs in every entry.
_MOST_DIFFERENCES = 4
# Names of files differ at every call; a word that decides what runs has few values.
_MOST_TEXTS = 3
_OF_TEXT = re.compile(r""" was ['"].* and is ['"]""")


class Signature(Protocol):
    """The signature of a call: what a program is compiled for."""

    @property
    def key(self) -> Any:
        """The key by which programs are grouped."""

    @property
    def plain(self) -> Sequence[Any]:
        """The plain values, in order."""

    def fits(self, call: Any) -> bool:
        """Return whether a program for this signature serves a call of the same key."""

    def differences(self, earlier: Any) -> list[str]:
        """Describe how it differs from an earlier one."""


@attrs.frozen
class Recompile:
    """One time that a step was compiled again: why, and how long it took.

    `reason` names each argument that differs from those of the program most alike, and the
    dimensions; or it is the guard that failed. `program` is the number of the new program, the
    first is 0, and `unlike` that of the program it was compared with. `in_background` says that
    `jit(..., precompile=)` asked for it, and that steps ran meanwhile. `stages` are the seconds of
    each stage, as `train.report.seconds` has them, whose sum is `seconds` but for milliseconds.
    """

    reason: str
    seconds: float
    program: int = 0
    unlike: int = 0
    in_background: bool = False
    stages: Mapping[str, float] = attrs.field(factory=dict, repr=False)


S = TypeVar("S", bound=Signature)


@attrs.frozen(eq=False)
class Variant(Generic[S]):
    """One program, with its signature and guards; programs are numbered as they are made."""

    signature: S
    guards: StepHooks
    program: CompiledStep
    number: int = 0


@attrs.frozen
class Users:
    """The user's words in messages: an object's kind and name, what it is called with and differs
    in from program to program, and where its recompilations are listed.
    """

    kind: str
    name: str
    arguments: str
    keyed_by: str
    recompiles: str


class StepVariants(Generic[S]):
    """Programs by signature, the most recently used first.

    At most `limit` are kept for one signature, and those of at most `max_shapes` signatures; beyond
    it the one not used for longest is dropped.
    """

    def __init__(self, limit: int, max_shapes: int, users: Users) -> None:
        self._limit, self._max_shapes, self._users = limit, max_shapes, users
        self._by_key: dict[Any, list[Variant[S]]] = {}
        self._recent: list[Variant[S]] = []
        self._count = 0
        self._reasons: dict[Any, list[str]] = {}
        self._has_warned = self._has_warned_of_shapes = False
        self.recompiles: list[Recompile] = []

    @property
    def last(self) -> Variant[S] | None:
        """The one used last; None before the first."""
        return self._recent[0] if self._recent else None

    @property
    def in_order(self) -> list[Variant[S]]:
        """The programs that are kept, in the order in which they were made."""
        return sorted(self._recent, key=lambda one: one.number)

    def find(self, signature: S) -> Variant[S] | None:
        """Return the program for a call; the common case checks one guard."""
        variant = self.find_only(signature)
        if variant is not None and variant is not self._recent[0]:
            self._use(variant)
        return variant

    def find_only(self, signature: S) -> Variant[S] | None:
        """Return the program for a call as `find` does, without recording that it is used."""
        for variant in self._matching(signature):
            variant.guards.take_numbers(signature.plain)
            if not variant.guards.recompile_reason():
                return variant
        return None

    def matching(self, signature: S) -> Variant[S] | None:
        """Return the last used program for the same signature and values, valid or not."""
        return next(self._matching(signature), None)

    def why_none(self, signature: S) -> tuple[str, int]:
        """Explain why no program fits a call; "" without programs.

        Returns:
            The guard that fails, or how the call differs from that of the program most alike; and
            the number of that program.
        """
        matching = self.matching(signature)
        if matching is not None:
            return matching.guards.recompile_reason(), matching.number
        known = self._by_key.get(signature.key) or self._recent
        found = [(signature.differences(one.signature), one.number) for one in known]
        differences, number = min(found, key=lambda one: len(one[0]), default=([], 0))
        return short_list(differences, most=_MOST_DIFFERENCES), number

    def keep(
        self, signature: S, guards: StepHooks, program: CompiledStep, *, behind: int = 0
    ) -> Variant[S]:
        """Add a program, and drop those that cannot be used again.

        It counts as used after all others but the last `behind`.
        """
        variant = Variant(signature, guards, program, self._count)
        self._count += 1
        for one in [one for one in self._recent if one.guards.is_over()]:
            self._drop(one)
        self._by_key.setdefault(signature.key, []).insert(0, variant)
        self._recent.insert(behind, variant)
        return variant

    def add_in_background(
        self, signature: S, guards: StepHooks, program: CompiledStep, seconds: float
    ) -> None:
        """Keep a program that no call has asked for yet; `last` stays as it is."""
        reason, unlike = self.why_none(signature)
        variant = self.keep(signature, guards, program, behind=1)
        log.info(
            "compiled %s in the background in %.1f s as program %d, unlike program %d: %s",
            *(self._users.name, seconds, variant.number, unlike, reason),
        )
        self.recompiles.append(
            Recompile(reason, seconds, variant.number, unlike, True, program.report.seconds)
        )
        self._keep_recent_shapes()

    def add(
        self,
        signature: S,
        guards: StepHooks,
        program: CompiledStep,
        why: tuple[str, int],
        seconds: float,
    ) -> Variant[S]:
        """Keep a program that was compiled for a call, log it, and drop others beyond the limits.

        `why` is what `why_none` returned before.
        """
        variant, key, name = self.keep(signature, guards, program), signature.key, self._users.name
        reason, unlike = why
        if not reason:
            log.info("compiled %s in %.1f s", name, seconds)
            return variant
        log.info(
            "compiled %s again in %.1f s as program %d, unlike program %d: %s",
            *(name, seconds, variant.number, unlike, reason),
        )
        self.recompiles.append(
            Recompile(reason, seconds, variant.number, unlike, stages=program.report.seconds)
        )
        reasons = self._reasons.setdefault(key, [])
        reasons.append(reason)
        if len(self._by_key[key]) > self._limit:
            self._drop(self._by_key[key][-1])
        self._keep_recent_shapes()
        texts = [one for one in reasons if _OF_TEXT.search(one)]
        if (len(reasons) >= self._limit or len(texts) >= _MOST_TEXTS) and not self._has_warned:
            self._has_warned = True
            is_of_text = len(texts) >= _MOST_TEXTS
            log.warning("%s", self._warning_of(texts) if is_of_text else self._warning(reasons))
        return variant

    def _keep_recent_shapes(self) -> None:
        """Drop the programs of the signature that was not used for longest, if there are many."""
        keys = list(dict.fromkeys(one.signature.key for one in self._recent))
        if len(keys) <= self._max_shapes:
            return
        for one in list(self._by_key[keys[-1]]):
            self._drop(one)
        del self._by_key[keys[-1]]
        self._reasons.pop(keys[-1], None)
        if not self._has_warned_of_shapes:
            self._has_warned_of_shapes = True
            log.warning("%s", self._warning_of_shapes())

    def _matching(self, signature: S) -> Iterator[Variant[S]]:
        group = self._by_key.get(signature.key, ())
        return (one for one in group if one.signature.fits(signature))

    def _use(self, variant: Variant[S]) -> None:
        for variants in (self._recent, self._by_key[variant.signature.key]):
            variants.remove(variant)
            variants.insert(0, variant)

    def _drop(self, variant: Variant[S]) -> None:
        self._recent.remove(variant)
        self._by_key[variant.signature.key].remove(variant)

    def _warning_of_shapes(self) -> str:
        users, seconds = self._users, sum(one.seconds for one in self.recompiles)
        return (
            f"{users.kind} {users.name} was called with {users.arguments} of more than "
            f"{self._max_shapes} {users.keyed_by} (the last new one: {self.recompiles[-1].reason})."
            f" Programs for the {self._max_shapes} used last are kept; results stay right, and a "
            f"shape that comes back is compiled again. Compiling took {seconds:.1f} s so far. Pad "
            f"the {users.arguments} to fewer shapes, or pass max_shapes= of at least their number: "
            f"they share one arena. Said once; {users.recompiles} lists every time"
        )

    def _warning_of(self, texts: list[str]) -> str:
        users, seconds = self._users, sum(one.seconds for one in self.recompiles)
        return (
            f"{users.kind} {users.name} was compiled {len(texts)} times more for other text among "
            f"its arguments (the last time: {texts[-1]}). Compiling took {seconds:.1f} s so far "
            "and goes on with other text: results stay right. Leave text that it does not use, "
            "such as names of files, out of its arguments; where it decides what runs, and all "
            "its values come back, pass recompile_limit= of at least their number. Said once; "
            f"{users.recompiles} lists every time"
        )

    def _warning(self, reasons: list[str]) -> str:
        subjects = collections.Counter(map(_subject, reasons))
        ((subject, count),) = subjects.most_common(1)
        last = next(one for one in reversed(reasons) if _subject(one) == subject)
        users, seconds = self._users, sum(one.seconds for one in self.recompiles)
        return (
            f"{users.kind} {users.name} was compiled {len(reasons)} times more for arguments of "
            f"the same shapes and dtypes, {count} times for one reason (the last time: {last}). "
            f"Compiling took {seconds:.1f} s so far and goes on where it changes again: results "
            f"stay right, and {self._limit} programs are kept. Leave it as it is between steps; "
            "where it decides what runs (if i in steps), pass what is decided instead, a bool; "
            "where it is computed with, make it a tensor that is an argument or a buffer of the "
            "model; where all its values come back, pass recompile_limit= of at least their "
            f"number. Said once; {users.recompiles} lists every time"
        )


def _subject(reason: str) -> str:
    """Return the subject of a reason, without its old and new values."""
    return re.split(r",? (?:which |and )?(?:was|is|has|had|were) ", reason, maxsplit=1)[0]
