# SPDX-License-Identifier: Apache-2.0
"""nvcc, CUDA's compiler driver: slower to start than NVRTC, but part of every installed toolkit."""

from __future__ import annotations

import functools
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import attrs

from amp_ir.cuda import toolkit


@attrs.frozen
class Nvcc:
    """An nvcc that runs on this machine."""

    _path: str
    identity: str

    def architectures(self) -> tuple[str, ...]:
        """Return the architectures it has, as "sm_90"."""
        listed = _run([self._path, "--list-gpu-code"])
        return tuple(line for line in listed.stdout.split() if line.startswith("sm_"))

    def compile(self, source: str, arch: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the cubin, or None where the source has errors; and the compiler's log."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.cu"
            path.write_text(source)
            cubin = path.with_suffix(".cubin")
            command = [self._path, "-cubin", f"-arch={arch}", *options, "-o", cubin.name, path.name]
            done = _run(command, folder)
            log = done.stdout + done.stderr
            return (cubin.read_bytes() if done.returncode == 0 else None), log


@functools.cache
def find() -> Nvcc | None:
    """Return an nvcc that runs, or None."""
    path = toolkit.tool("nvcc")
    if path is None:
        return None
    try:
        version = _run([str(path), "--version"])
    except OSError:
        return None
    lines = version.stdout.strip().splitlines()
    return Nvcc(str(path), f"nvcc {lines[-1]}") if version.returncode == 0 and lines else None


def _run(command: Sequence[str], folder: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
