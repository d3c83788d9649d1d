# SPDX-License-Identifier: Apache-2.0
"""Compiles the stand-ins for libcuda and libcudart, and sources of kernels, with g++.

Each is compiled once a folder, which emulating processes may share: ranks run the same kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import re
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DRIVER = "libcuda.so.1"
# PyTorch with CUDA loads the real runtime under its real name, for which its own libraries ask. So
# the stand-in has another, just as long, and a copy of TVM's library for CUDA asks for that.
RUNTIME = "libcudaem.so.13"
_REAL_RUNTIME = "libcudart.so.13"
_OF_TVM = "tvm_runtime_cuda"
_SHARED = ["g++", "-std=c++17", "-fPIC", "-shared", "-I", str(HERE / "include")]
# Faults of a kernel are traps, which the emulator reports: see OnFault in threads.cc.
_CHECKS = (
    "-fsanitize=alignment,bounds,shift-exponent,integer-divide-by-zero,signed-integer-overflow",
    "-fsanitize-undefined-trap-on-error",
)
# Numbers as written: no fused multiply-add, and bits read through pointers of another type.
_NUMBERS = ("-ffp-contract=off", "-fno-strict-aliasing", "-mf16c")
_KERNEL_OPTIONS = ("-O1", "-w", *_NUMBERS, *_CHECKS)
_HEADER = "cuda_emulator.h"
_KERNEL = re.compile(
    r'^extern "C" __global__ void (?:__launch_bounds__\((\d+)[^)]*\) )?(\w+)\(.*\) \{$', re.M
)
_STATIC = re.compile(r"__shared__ (alignas\(\d+\) )?")
_DYNAMIC = re.compile(r"extern __shared__ [^;]*?(\w+)\[\];")
_MOST_DYNAMIC_NBYTES = 227 << 10


def build(folder: Path) -> None:
    """Compile both stand-ins and the kernels' header into `folder`, if they are not there.

    Beside them is TVM's library, linked to them.
    """
    built = folder / "built"
    with _alone(built):
        if not built.exists():
            _build(folder)
            built.touch()


def _build(folder: Path) -> None:
    driver = [str(HERE / name) for name in ("driver.cc", "threads.cc", "memory.cc")]
    # A jump out of a fiber is what fortified longjmp refuses.
    command = [*_SHARED, "-O2", "-Wall", "-Wextra", "-Werror", "-U_FORTIFY_SOURCE"]
    _run([*command, f"-Wl,-soname,{DRIVER}", *driver, "-o", str(folder / DRIVER), "-ldl"])
    # A library's name is also that of its symbols' version.
    symbols = folder / "runtime.map"
    symbols.write_text(f"{RUNTIME} {{ global: cuda*; local: *; }};\n")
    named = [f"-Wl,-soname,{RUNTIME}", f"-Wl,--version-script,{symbols}"]
    runtime = [str(HERE / "runtime.cc"), str(folder / DRIVER)]
    _run([*command, *named, *runtime, "-o", str(folder / RUNTIME)])
    # Read once instead of for each source: two thirds of the time of a small one.
    header = ["-x", "c++-header", str(HERE / "include" / _HEADER)]
    _run([*_SHARED, *_KERNEL_OPTIONS, *header, "-o", str(folder / f"{_HEADER}.gch")])
    tvm = importlib.util.find_spec("tvm")
    assert tvm is not None and tvm.origin is not None
    file = f"lib{_OF_TVM}.so"
    (folder / file).write_bytes(_renamed((Path(tvm.origin).parent / "lib" / file).read_bytes()))


def load(folder: Path) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load what `build` made, the driver's and the runtime's stand-in; before `import tvm`.

    TVM then has its library for CUDA from `folder`, even where a driver is installed.
    """
    from tvm_ffi import libinfo

    stand_ins = ctypes.CDLL(str(folder / DRIVER)), ctypes.CDLL(str(folder / RUNTIME))
    load_library = libinfo.load_lib_ctypes

    def load_lib_ctypes(package: str, target_name: str, *rest: Any, **options: Any) -> ctypes.CDLL:
        if target_name == _OF_TVM:
            return ctypes.CDLL(str(folder / f"lib{_OF_TVM}.so"))
        return load_library(package, target_name, *rest, **options)

    libinfo.load_lib_ctypes = load_lib_ctypes
    return stand_ins


def compile_kernels(source: str, folder: Path) -> Path:
    """A shared library with the kernels of a CUDA source, for the driver's stand-in to load."""
    translated = translate(source)
    path = folder / f"kernels_{hashlib.sha256(translated.encode()).hexdigest()[:16]}.so"
    with _alone(path):
        if not path.exists():
            written, made = path.with_suffix(".cc"), path.with_suffix(".part")
            written.write_text(translated)
            # Looked for in `folder` first, where it is compiled.
            options = ["-I", str(folder), *_SHARED[1:], *_KERNEL_OPTIONS, "-include", _HEADER]
            _run(["g++", *options, str(written), str(folder / DRIVER), "-o", str(made)])
            made.replace(path)
    return path


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold off other processes that would make this file too."""
    lock = os.open(path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


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


def _renamed(library: bytes) -> bytes:
    """A library that links to RUNTIME instead of the real one: by name, and by the name's hash."""
    for spell in (lambda name: b"\0" + name.encode() + b"\0", _elf_hash):
        assert library.count(spell(_REAL_RUNTIME)) == 1
        library = library.replace(spell(_REAL_RUNTIME), spell(RUNTIME))
    return library


def _elf_hash(name: str) -> bytes:
    """The hash by which the linker looks a version up, as a file for x86-64 has it."""
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return struct.pack("<I", value)
