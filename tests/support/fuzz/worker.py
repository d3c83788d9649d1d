# SPDX-License-Identifier: Apache-2.0
"""A process that runs programs, so that a crash ends it and not the fuzzer."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from fuzz.program import Program
from fuzz.run_program import Outcome, run_program

# A program takes one to three; a machine may be loaded.
SECONDS_A_PROGRAM = 240.0
# Compiled programs are never unloaded, so a worker grows with each.
PROGRAMS_A_WORKER = 150


def _serve(pipe: Connection) -> None:
    import os

    import torch

    os.nice(5)
    torch.set_num_threads(1)
    while True:
        program = pipe.recv()
        if program is None:
            return
        pipe.send(run_program(program))


class Worker:
    """Runs one program at a time; a new process takes the place of one that dies or hangs."""

    def __init__(self, seconds: float = SECONDS_A_PROGRAM) -> None:
        self.seconds = seconds
        self._process: Any = None
        self._done = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._end()

    def run(self, program: Program) -> Outcome:
        """Run it; a crash and a hang are outcomes too."""
        if self._process is None or self._done >= PROGRAMS_A_WORKER:
            self._start()
        self._done += 1
        try:
            self._pipe.send(program)
            if not self._pipe.poll(self.seconds):
                self._end()
                return Outcome("timeout", "timeout", f"no result after {self.seconds:.0f} s")
            return self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            self._end()
            return Outcome("crash", f"exit {code}", f"the process died with exit code {code}")

    def _start(self) -> None:
        self._end()
        # A fresh interpreter: TVM and OpenMP do not survive a fork with threads.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._done = 0

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
        self._process = None
