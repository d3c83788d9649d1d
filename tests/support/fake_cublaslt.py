# SPDX-License-Identifier: Apache-2.0
"""Builds and loads fake_cublaslt.cc, a cuBLASLt for machines without a GPU; see there."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs

from amp_ir.host import native

HERE = Path(__file__).parent


@attrs.frozen
class Counts:
    """Calls since the last reset; `alive` counts descriptors and layouts of the process."""

    heuristics: int
    launches: int
    alive: int
    workspace: int
    stream: int


@attrs.frozen
class Fake:
    """What the stand-in recorded."""

    library: ctypes.CDLL

    def misuses(self) -> list[str]:
        """What was called as the real library forbids, in order."""
        text = ctypes.create_string_buffer(1 << 16)
        self.library.amp_ir_fake_misuses(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def counts(self) -> Counts:
        """How often it was called."""
        numbers = (ctypes.c_int64 * 5)()
        self.library.amp_ir_fake_counts(numbers)
        return Counts(*numbers)

    def reset(self) -> None:
        """Forget misuses and counts, but not what is alive."""
        self.library.amp_ir_fake_reset()


def build(directory: Path) -> Path:
    """Compile the stand-in into `directory`; an older one there is kept if it is up to date."""
    source, path = HERE / "fake_cublaslt.cc", directory / "libfake_cublaslt.so"
    headers = HERE.parents[1] / "src" / "kernels"
    newest = max(file.stat().st_mtime for file in (source, headers / "cublaslt" / "api.h"))
    if not path.exists() or path.stat().st_mtime < newest:
        command = ["g++", "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-Wall"]
        command += ["-fvisibility=hidden", f"-I{headers}", str(source), "-o", str(path)]
        subprocess.run(command, check=True)
    return path


@contextlib.contextmanager
def installed(path: Path) -> Iterator[Fake]:
    """Make `amp_ir.cublaslt.*` call the stand-in at `path`; afterwards, look for cuBLASLt again."""
    fake = Fake(ctypes.CDLL(str(path)))
    fake.reset()
    native.function("amp_ir.cublaslt.use")(str(path))
    try:
        yield fake
    finally:
        native.function("amp_ir.cublaslt.use")("")
