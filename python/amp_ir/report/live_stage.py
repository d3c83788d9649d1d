# SPDX-License-Identifier: Apache-2.0
"""A line on the terminal while a compilation takes long: the stage and the time so far."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from amp_ir.ir.stages import StageWatch, watched, watching

_PATIENCE = 2.0
_REFRESH = 0.1
_QUIET_UNDER = "pytest"


@contextlib.contextmanager
def live_stage(what: str) -> Iterator[None]:
    """Show `what` with its stage on stderr if the block takes more than two seconds.

    It shows nothing where stderr is no terminal, under pytest, in other threads than the main one,
    and inside of a block that shows already. The line is gone when the block ends.
    """
    if not _is_shown():
        yield
        return
    watch, done = StageWatch(), threading.Event()
    thread = threading.Thread(target=_show, args=(what, watch, done), daemon=True)
    thread.start()
    try:
        with watching(watch):
            yield
    finally:
        done.set()
        thread.join()


def _is_shown() -> bool:
    if watched() is not None or threading.current_thread() is not threading.main_thread():
        return False
    return _QUIET_UNDER not in sys.modules and sys.stderr is not None and sys.stderr.isatty()


def _show(what: str, watch: StageWatch, done: threading.Event) -> None:
    started = time.monotonic()
    if done.wait(_PATIENCE):
        return
    with Console(stderr=True).status("") as status:
        while not done.wait(_REFRESH):
            status.update(Text(line(what, watch, time.monotonic() - started)))


def line(what: str, watch: StageWatch, seconds: float) -> str:
    """Return the text of the moment."""
    return f"amp_ir compiles {what}: {watch.name}, {seconds:.0f} s"
