# SPDX-License-Identifier: Apache-2.0
"""Search for CUDA's compilers, headers and libraries: pip's wheels, then an installed toolkit."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

PIP_REMEDY = (
    'pip install "amp_ir[cuda]" (the wheels nvidia-cuda-nvrtc and nvidia-cuda-runtime, which '
    "PyTorch's CUDA builds bring too), or put nvcc of CUDA 13 on the path"
)
# Below a toolkit's root, in the layouts of wheels, of installers and of distributions.
_HEADERS = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")
_LIBRARIES = ("lib", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")


@functools.cache
def roots() -> tuple[Path, ...]:
    """Return directories that hold (parts of) a CUDA toolkit, most trusted first."""
    return tuple(dict.fromkeys(path for path in _candidates() if path.is_dir()))


def _candidates() -> Iterator[Path]:
    wheels = importlib.util.find_spec("nvidia")
    for location in (wheels.submodule_search_locations or []) if wheels is not None else []:
        # Every wheel of CUDA 13 unpacks into this one directory.
        yield Path(location) / "cu13"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            yield Path(os.environ[variable])
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        yield Path(nvcc).resolve().parents[1]
    yield Path("/usr/local/cuda")


def library(pattern: str) -> Path | None:
    """Return the first shared library whose name matches, such as "libnvrtc.so.1?"."""
    for root in roots():
        for folder in _LIBRARIES:
            found = sorted((root / folder).glob(pattern))
            if found:
                return found[-1]
    return None


def tool(name: str) -> Path | None:
    """Return an executable of the toolkit, or of the path."""
    for root in roots():
        path = root / "bin" / name
        if path.is_file():
            return path
    found = shutil.which(name)
    return Path(found) if found is not None else None


def header_directory() -> Path | None:
    """Return the folder where a device compiler finds cuda_fp16.h and its includes; else None."""
    candidates = (root / folder for root in roots() for folder in _HEADERS)
    return next((path for path in candidates if (path / "cuda_fp16.h").is_file()), None)
