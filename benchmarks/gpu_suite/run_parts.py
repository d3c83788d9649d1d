# SPDX-License-Identifier: Apache-2.0
"""Runs parts in a budget of time; what happens to one hides no other."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from benchmarks.gpu_suite.parts import ROOT, Part, Together
from benchmarks.gpu_suite.summary import Outcome, write_summary

# To write the last summary, and for the machine to be left in order.
_RESERVED_SECONDS = 10.0
# From the request to end to the end.
_GRACE_SECONDS = 5.0
_POLL_SECONDS = 0.1
# Of a row that has its turn; those that are not ready are stopped in time for the turns of others.
_TURN_SECONDS = 12.0
_LONGEST_TURN_SECONDS = 60.0
_SHOWN_LINES = 15


def run_parts(
    parts: Iterable[Part | Together], out: Path, *, seconds: float
) -> tuple[list[Outcome], bool]:
    """Run what fits into `seconds`; return what became of each part, and if it was interrupted.

    The output of a part goes to a file of its name in `out`; its last lines are printed where it
    failed. The summary in `out` is written again after each part.
    """
    deadline = time.monotonic() + seconds - _RESERVED_SECONDS
    outcomes: list[Outcome] = []
    for one in parts:
        for outcome in _ended(one, out, deadline):
            outcomes.append(outcome)
            print(outcome, flush=True)
            write_summary(outcomes, out)
        if any(outcome.status == "interrupted" for outcome in outcomes):
            return outcomes, True
    return outcomes, False


def _ended(one: Part | Together, out: Path, deadline: float) -> Iterator[Outcome]:
    if isinstance(one, Together):
        yield from _Side(one.parts, out, deadline).run()
    else:
        yield _alone(one, out, deadline)


def _alone(part: Part, out: Path, deadline: float) -> Outcome:
    left = deadline - time.monotonic()
    if left < part.least_seconds:
        return _not_run(part, left)
    limit = min(left, part.limit_seconds)
    try:
        process = _Process.start(part, out)
    except OSError as error:
        return Outcome(part.name, "failed", f"it cannot be started: {error}")
    try:
        process.popen.wait(limit)
    except subprocess.TimeoutExpired:
        return process.ended("timed out", f"after {limit:.0f} s")
    except KeyboardInterrupt:
        return process.ended("interrupted")
    return process.outcome()


class _Side:
    """Parts that run side by side; those that take turns are alone on the machine in their turn."""

    def __init__(self, parts: Sequence[Part], out: Path, deadline: float) -> None:
        self._waiting = list(parts)
        self._out = out
        self._deadline = deadline
        turns = sum(part.turn is not None for part in parts)
        self._set_up_until = deadline - _TURN_SECONDS * turns
        self._running: list[_Process] = []

    def run(self) -> Iterator[Outcome]:
        """Yield what became of each part, in the order of their ends."""
        try:
            while self._waiting or self._running:
                yield from self._start()
                yield from self._ended()
                is_late = time.monotonic() > self._set_up_until
                if self._running and (is_late or not self._busy()) and self._ready():
                    self._give_turn(self._ready()[0])
                elif self._running:
                    time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            yield from [one.ended("interrupted") for one in self._running]

    def _busy(self) -> list[_Process]:
        """Return the processes that use the machine."""
        return [one for one in self._running if not one.is_ready]

    def _ready(self) -> list[_Process]:
        return [one for one in self._running if one.is_ready]

    def _start(self) -> Iterator[Outcome]:
        while self._waiting and len(self._busy()) < (os.cpu_count() or 1):
            part = self._waiting.pop(0)
            left = self._deadline - time.monotonic()
            if left < part.least_seconds:
                yield _not_run(part, left)
                continue
            try:
                self._running.append(_Process.start(part, self._out))
            except OSError as error:
                yield Outcome(part.name, "failed", f"it cannot be started: {error}")

    def _ended(self) -> Iterator[Outcome]:
        now = time.monotonic()
        for one in list(self._running):
            limit = min(self._deadline, one.started + one.part.limit_seconds)
            if one.popen.poll() is not None:
                self._running.remove(one)
                yield one.outcome()
            elif now > limit and (not one.is_ready or now > self._deadline):
                self._running.remove(one)
                yield one.ended("timed out", f"after {now - one.started:.0f} s")

    def _give_turn(self, process: _Process) -> None:
        assert process.part.turn is not None
        left = self._deadline - time.monotonic()
        with _stopped(self._busy()):
            process.part.turn.give()
            # One that takes longer is ended with those that are over their limit.
            with suppress(subprocess.TimeoutExpired):
                process.popen.wait(max(0.0, min(left, _LONGEST_TURN_SECONDS)))


@contextmanager
def _stopped(processes: Sequence[_Process]) -> Iterator[None]:
    """Keep other processes from the CPU and the GPU for a while."""
    for one in processes:
        one.send(signal.SIGSTOP)
    try:
        yield
    finally:
        for one in processes:
            one.send(signal.SIGCONT)


@attrs.frozen(eq=False)
class _Process:
    """A part that was started, in a session of its own, and its log."""

    part: Part
    popen: subprocess.Popen[bytes]
    log: Path
    started: float

    @classmethod
    def start(cls, part: Part, out: Path) -> _Process:
        log = out / f"{part.name}.log"
        # Results lie beside the code that is measured, whatever folder the suite was called from.
        paths = [str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment["PYTHONUNBUFFERED"] = "1"
        with log.open("w") as file:
            popen = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return cls(part, popen, log, time.monotonic())

    @property
    def is_ready(self) -> bool:
        """Return whether it waits for its turn."""
        return self.part.turn is not None and self.part.turn.is_ready

    def outcome(self) -> Outcome:
        """Return what became of a process that has ended by itself."""
        code = self.popen.returncode
        return self._outcome("failed", f"exit code {code}") if code else self._outcome("ok")

    def ended(self, status: str, detail: str = "") -> Outcome:
        """End it with everything that it started."""
        self.send(signal.SIGCONT)
        for how in (signal.SIGTERM, signal.SIGKILL):
            self.send(how)
            with suppress(subprocess.TimeoutExpired):
                self.popen.wait(_GRACE_SECONDS)
                break
        return self._outcome(status, detail)

    def send(self, what: signal.Signals) -> None:
        """Send a signal to it and to all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, what)

    def _outcome(self, status: str, detail: str = "") -> Outcome:
        lines = self.log.read_text(errors="replace").rstrip().splitlines()
        shown = lines[-1:] if status == "ok" else lines[-_SHOWN_LINES:]
        seconds = time.monotonic() - self.started
        return Outcome(self.part.name, status, detail, seconds, tuple(shown))


def _not_run(part: Part, left: float) -> Outcome:
    return Outcome(part.name, "not run", f"{max(left, 0):.0f} s were left")
