# SPDX-License-Identifier: Apache-2.0
"""Sends tests to the emulating process, which starts with the first of them."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

IN_EMULATOR = "AMP_IR_CUDA_EMULATOR"
# Names a folder in which the emulating processes of a run, several at once, share what g++ makes.
FOLDER = "AMP_IR_CUDA_EMULATOR_FOLDER"


def in_emulator(test: Callable[..., None]) -> Callable[..., None]:
    """Make a test run in the emulating process, where tvm.cuda() is there."""
    if os.environ.get(IN_EMULATOR):
        return test

    @functools.wraps(test)
    def sent(**arguments: Any) -> None:
        __tracebackhide__ = True
        worker().run(test.__module__, test.__qualname__, arguments)

    return pytest.mark.emulator(_skipped(sent))


def _skipped(test: Callable[..., None]) -> Callable[..., None]:
    """Skip where the emulator cannot be built: its fibers are written for x86-64."""
    is_able = platform.machine() == "x86_64" and sys.platform == "linux" and shutil.which("g++")
    return pytest.mark.skipif(not is_able, reason="needs g++ on x86-64 Linux")(test)


class Worker:
    """A process that runs tests one after another."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        command = [sys.executable, "-m", "cuda_emulator.worker", str(theirs.fileno())]
        tests = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, IN_EMULATOR: "1", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, env=environment, stderr=self._log, pass_fds=[theirs.fileno()]
        )
        # So that its end is the end of the pipe.
        theirs.close()
        atexit.register(self.stop)

    def run(self, module: str, name: str, arguments: dict[str, Any]) -> None:
        """Run one test there; fails as it does."""
        __tracebackhide__ = True
        try:
            self._connection.send((module, name, arguments))
            trace = self._connection.recv()
        except (EOFError, ConnectionError):
            worker.cache_clear()
            pytest.fail(f"the emulating process {self._end()}", pytrace=False)
        if trace is not None:
            pytest.fail(trace, pytrace=False)

    def stop(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.wait()

    def _end(self) -> str:
        status = self._process.wait()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._log.seek(0)
        return f"died of {how}:\n{self._log.read()[-4000:].decode(errors='replace')}"


@functools.cache
def worker() -> Worker:
    """The process of this session."""
    return Worker()
