# SPDX-License-Identifier: Apache-2.0
"""The program after every stage, a text file each: `amp-ir compile --dump-ir`, `AMP_IR_DUMP`."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from amp_ir.errors import OptionError
from amp_ir.files.atomic_file import write_text
from amp_ir.ir.stages import OnStage, Stage

# A folder, under which every process that compiles makes one of its own.
DUMP_VARIABLE = "AMP_IR_DUMP"
_current: contextvars.ContextVar[OnStage | None] = contextvars.ContextVar("stages", default=None)


def stage_files(folder: Path) -> OnStage:
    """Return a callback that writes each stage to `folder` as `00-capture.txt`, `01-import.txt` ...

    Raises:
        OptionError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(
            f"no folder for the programs of the stages can be made at {folder}: {error.strerror}; "
            f"name another one with --dump-ir or the environment variable {DUMP_VARIABLE}"
        ) from error
    from amp_ir.report.program_text import program_text

    numbers = itertools.count()

    def write(record: Stage) -> None:
        write_text(folder / f"{next(numbers):02}-{record.name}.txt", program_text(record))

    return write


@contextlib.contextmanager
def writing_stages(folder: Path | None) -> Iterator[None]:
    """Write the stages of what is compiled inside to `folder`; None: as around it."""
    token = _current.set(_current.get() if folder is None else stage_files(folder))
    try:
        yield
    finally:
        _current.reset(token)


def current_stage_files() -> OnStage | None:
    """Return what writes the stages: by `writing_stages`, by `AMP_IR_DUMP`, or None."""
    current = _current.get()
    if current is not None:
        return current
    folder = os.environ.get(DUMP_VARIABLE, "")
    return _files_of_process(folder, os.getpid()) if folder else None


@functools.cache
def _files_of_process(folder: str, pid: int) -> OnStage:
    """Return the files of this process, numbered across all steps that it compiles."""
    return stage_files(Path(folder) / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{pid}")
