# SPDX-License-Identifier: Apache-2.0
"""Builds and loads fake_torch_cuda.cc, PyTorch's CUDA kernels for machines without a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from amp_ir.host import native

HERE = Path(__file__).parent


@attrs.frozen
class State:
    """What the stand-in has seen since it was loaded."""

    stream: int
    device: int
    open_guards: int
    calls: int
    calls_without_guard: int


@attrs.frozen
class Fake:
    """The loaded stand-in."""

    library: ctypes.CDLL

    def state(self) -> State:
        """What it has seen."""
        numbers = (ctypes.c_int64 * 5)()
        self.library.amp_ir_fake_state(numbers)
        return State(*numbers)


def build(directory: Path) -> Path:
    """Compile the stand-in into `directory`; an older one there is kept if it is up to date.

    Raises subprocess.CalledProcessError where our declarations are not those of PyTorch's headers.
    """
    source, path = HERE / "fake_torch_cuda.cc", directory / "libfake_torch_cuda.so"
    headers = HERE.parents[1] / "src" / "kernels"
    newest = max(file.stat().st_mtime for file in (source, headers / "torch" / "api.h"))
    if not path.exists() or path.stat().st_mtime < newest:
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall"]
        command += [f"-I{headers}", f"-I{Path(torch.__path__[0]) / 'include'}"]
        subprocess.run([*command, str(source), "-ldl", "-o", str(path)], check=True)
    return path


@contextlib.contextmanager
def installed(path: Path) -> Iterator[Fake]:
    """Make `amp_ir.torch_cuda.*` call the stand-in at `path`; afterwards, PyTorch's own again."""
    fake = Fake(ctypes.CDLL(str(path)))
    native.function("amp_ir.torch_cuda.use")(str(path))
    try:
        yield fake
    finally:
        native.function("amp_ir.torch_cuda.use")("")
