# SPDX-License-Identifier: Apache-2.0
"""Programs in processes of their own that have imported PyTorch and amp_ir already.

To import them takes longer than most programs. A server has them imported and nothing run, and
forks itself for each program.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing

_SERVED = multiprocessing.get_context("forkserver")
_SERVED.set_forkserver_preload(["torch._dynamo", "amp_ir.api", "amp_ir.jit_step", __name__])


def run_program(program: Path, folder: Path) -> tuple[int, str]:
    """Run a file as `python -W error::UserWarning FILE` in `folder`: exit code and output."""
    written = folder / "output.txt"
    process = _SERVED.Process(target=_run, args=(str(program), str(folder), str(written)))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, written.read_text()


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Stand for `torch.multiprocessing.spawn`."""
    torch.multiprocessing.start_processes(function, args, nprocs, start_method="forkserver")


def _run(program: str, folder: str, written: str) -> None:
    output = os.open(written, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(folder)
    warnings.resetwarnings()
    warnings.filterwarnings("error", category=UserWarning)
    sys.argv = [program]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
