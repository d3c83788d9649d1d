# SPDX-License-Identifier: Apache-2.0
"""The emulating process: runs the tests that it is sent by name."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.connection
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

import numpy
import torch

from cuda_emulator import libraries
from cuda_emulator.client import FOLDER


def main(descriptor: int) -> None:
    """Serve the session at the other end of a pipe until it hangs up."""
    connection = multiprocessing.connection.Connection(descriptor)
    with _folder() as folder:
        libraries.build(Path(folder))
        stand_ins = libraries.load(Path(folder))

        # It imports TVM.
        from cuda_emulator import device

        device.start(Path(folder), *stand_ins)
        while True:
            try:
                module, name, arguments = connection.recv()
            except EOFError:
                return
            connection.send(_run(module, name, arguments))


def _folder() -> contextlib.AbstractContextManager[str]:
    """Where compiled kernels lie: beside those of the run's other emulating processes."""
    shared = os.environ.get(FOLDER)
    return contextlib.nullcontext(shared) if shared else tempfile.TemporaryDirectory()


def _run(module: str, name: str, arguments: dict[str, object]) -> str | None:
    """Run a test; the text of its failure, or None."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        getattr(importlib.import_module(module), name)(**arguments)
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
