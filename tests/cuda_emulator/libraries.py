# SPDX-License-Identifier: Apache-2.0
"""Compiles the stand-ins for libcuda and libcudart, and sources of kernels, with g++."""

from __future__ import annotations

import hashlib
import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
DRIVER = "libcuda.so.1"
RUNTIME = "libcudart.so.13"
_SHARED = ["g++", "-std=c++17", "-fPIC", "-shared", "-I", str(HERE / "include")]
# Faults of a kernel are traps, which the emulator reports: see OnFault in threads.cc.
_CHECKS = (
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
)
# Numbers as written: no fused multiply-add, and bits read through pointers of another type.
_NUMBERS = ("-ffp-contract=off", "-fno-strict-aliasing", "-mf16c")
_KERNEL = re.compile(
    r'^extern "C" __global__ void (?:__launch_bounds__\((\d+)[^)]*\) )?(\w+)\(.*\) \{$', re.M
)
_STATIC = re.compile(r"__shared__ (alignas\(\d+\) )?")
_DYNAMIC = re.compile(r"extern __shared__ [^;]*?(\w+)\[\];")
_MOST_DYNAMIC_NBYTES = 227 << 10


def build(folder: Path) -> None:
    """Compile both stand-ins into `folder`."""
    driver = [str(HERE / name) for name in ("driver.cc", "threads.cc", "memory.cc")]
    # A jump out of a fiber is what fortified longjmp refuses.
    command = [*_SHARED, "-O2", "-Wall", "-Wextra", "-Werror", "-U_FORTIFY_SOURCE"]
    _run([*command, f"-Wl,-soname,{DRIVER}", *driver, "-o", str(folder / DRIVER), "-ldl"])
    symbols = f"-Wl,--version-script,{HERE / 'runtime.map'}"
    runtime = [str(HERE / "runtime.cc"), str(folder / DRIVER)]
    _run(
        [*command, f"-Wl,-soname,{RUNTIME}", symbols, *runtime, "-o", str(folder / RUNTIME)],
    )


def compile_kernels(source: str, folder: Path) -> Path:
    """A shared library with the kernels of a CUDA source, for the driver's stand-in to load."""
    translated = translate(source)
    path = folder / f"kernels_{hashlib.sha256(translated.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        written = path.with_suffix(".cc")
        written.write_text(translated)
        options = ["-O1", "-w", *_NUMBERS, *_CHECKS, "-include", "cuda_emulator.h"]
        _run([*_SHARED, *options, str(written), str(folder / DRIVER), "-o", str(path)])
    return path


def translate(source: str) -> str:
    """The source for g++: shared variables of each kernel in a section, and a table of kernels."""
    parts = []
    kernels = list(_KERNEL.finditer(source))
    ends = [kernel.start() for kernel in kernels[1:]] + [len(source)]
    parts.append(source[: kernels[0].start()] if kernels else source)
    dynamic: dict[str, None] = {}
    for kernel, end in zip(kernels, ends, strict=True):
        text = source[kernel.start() : end]
        for match in _DYNAMIC.finditer(text):
            dynamic[match[1]] = None
        text = _DYNAMIC.sub("", text)
        section = f'static __attribute__((section("shared_{kernel[2]}")))'
        parts.append(_STATIC.sub(rf"\1{section} ", text))
        parts.append(f"EMULATED_KERNEL({kernel[2]}, {kernel[1] or 0})\n")
    arrays = [f"alignas(1024) unsigned char {name}[{_MOST_DYNAMIC_NBYTES}];\n" for name in dynamic]
    return "".join([parts[0], *arrays, *parts[1:]])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[:8000]}")
