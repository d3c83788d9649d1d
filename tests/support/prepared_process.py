# SPDX-License-Identifier: Apache-2.0
"""Programs in processes of their own that have imported PyTorch and amp_ir already.

To import them takes longer than most programs. A server has them imported and nothing run, and
forks itself for each program.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
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


def run_code(
    code: str, variables: Mapping[str, str] | None = None, *, folders: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run code as `python -W error::RuntimeWarning -c CODE`, with variables and import folders.

    Libraries read their variables when they are first used: in the new process, not in the server.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = [os.path.join(folder, name) for name in ("stdout", "stderr")]
        process = _SERVED.Process(
            target=_run_code, args=(code, dict(variables or {}), list(folders), written)
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        output, errors = (Path(one).read_text() for one in written)
    return subprocess.CompletedProcess(code, process.exitcode, output, errors)


def spawn(function: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
    """Stand for `torch.multiprocessing.spawn`."""
    torch.multiprocessing.start_processes(function, args, nprocs, start_method="forkserver")


def _write_to(path: str, *streams: int) -> None:
    output = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in streams:
        os.dup2(output, stream)


def _run_code(code: str, variables: dict[str, str], folders: list[str], written: list[str]) -> None:
    _write_to(written[0], 1)
    _write_to(written[1], 2)
    os.environ.update(variables)
    sys.path[:0] = folders
    warnings.resetwarnings()
    warnings.filterwarnings("error", category=RuntimeWarning)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(code, "<string>", "exec"), main.__dict__)


def _run(program: str, folder: str, written: str) -> None:
    _write_to(written, 1, 2)
    os.chdir(folder)
    warnings.resetwarnings()
    warnings.filterwarnings("error", category=UserWarning)
    sys.argv = [program]
    sys.path.insert(0, str(Path(program).parent))
    runpy.run_path(program, run_name="__main__")
