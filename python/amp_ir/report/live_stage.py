# SPDX-License-Identifier: Apache-2.0
"""What is said while a compilation takes long: a line on the terminal, or lines of a log."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator

from amp_ir.host.kept_random import kept_random
from amp_ir.host.logs import logger_of
from amp_ir.ir.stages import StageWatch, watched, watching

log = logger_of("recompiles")

_PATIENCE = 2.0
_REFRESH = 0.1
_QUIET_UNDER = "pytest"


@contextlib.contextmanager
def live_stage(what: str) -> Iterator[None]:
    """Show `what` with its stage on stderr if the block takes more than two seconds.

    The line is gone when the block ends. Where stderr is no terminal, each stage that takes more
    than two seconds is a line of the logger "amp_ir.recompiles", at level INFO. Nothing is said
    under pytest, in other threads than the main one, and inside of a block that says it already.
    """
    show = _way_to_show()
    if show is None:
        yield
        return
    watch, done = StageWatch(), threading.Event()
    thread = threading.Thread(target=show, args=(what, watch, done), daemon=True)
    thread.start()
    try:
        with watching(watch):
            yield
    finally:
        done.set()
        thread.join()


def _way_to_show() -> Callable[[str, StageWatch, threading.Event], None] | None:
    if watched() is not None or threading.current_thread() is not threading.main_thread():
        return None
    if _QUIET_UNDER in sys.modules:
        return None
    if sys.stderr is not None and sys.stderr.isatty():
        # Here and not in the thread, which cannot tell what the importing draws from what the
        # user's step does.
        with kept_random():
            importlib.import_module("rich.console")
        return _show
    return _log if log.isEnabledFor(logging.INFO) else None


def _show(what: str, watch: StageWatch, done: threading.Event) -> None:
    started = time.monotonic()
    if done.wait(_PATIENCE):
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status("") as status:
        while not done.wait(_REFRESH):
            status.update(Text(line(what, watch, time.monotonic() - started)))


def _log(what: str, watch: StageWatch, done: threading.Event) -> None:
    began = stage_began = time.monotonic()
    count, logged = watch.count, -1
    while not done.wait(_REFRESH):
        now = time.monotonic()
        if watch.count != count:
            count, stage_began = watch.count, now
        if now - stage_began >= _PATIENCE and logged != count:
            logged = count
            log.info("%s", line(what, watch, now - began))


def line(what: str, watch: StageWatch, seconds: float) -> str:
    """Return the text of the moment."""
    return f"amp_ir compiles {what}: {watch.name}, {seconds:.0f} s"
