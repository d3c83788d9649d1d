# SPDX-License-Identifier: Apache-2.0
"""What decides how a step is built, beside the step: versions, libraries, CPU, settings.

It is part of every entry's key. What is missing here would be a wrong program, loaded silently;
what is here without need only costs a compilation.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import torch
import tvm
import tvm_ffi

from amp_ir.dialect.registry import DECLARATIONS
from amp_ir.host import native
from amp_ir.ir.collective_call import SYMBOLS as COLLECTIVES
from amp_ir.ir.target import CompileTarget
from amp_ir.loops.lowering_registry import LOWERINGS
from amp_ir.version import VERSION

PACKAGE = Path(__file__).parents[1]
_IMPORTED_AT = time.time()
# Settings of compilers and libraries, by the start of their names.
_PREFIXES = (
    "AMP_IR_", "ATEN_", "TORCH_", "DNNL_", "ONEDNN_", "MKL_", "OMP_", "KMP_", "GOMP_", "TVM_",
    "LLVM_",
)  # fmt: skip
# How entries are kept, and what is written beside a compilation, decides nothing.
_OTHERS = ("AMP_IR_CACHE", "AMP_IR_CACHE_NBYTES", "AMP_IR_DUMP")
# Shared libraries whose code plans, compiles or is asked for sizes, by the start of their names.
_LIBRARIES = ("libtvm", "libdnnl", "libtorch_cpu", "libgomp", "libiomp", "libomp")
# Loaded with a process's first program for a GPU; it is of the same release as TVM's others.
_LATER = "libtvm_runtime_cuda"
# Of libraries of hundreds of megabytes, whose releases are named above, both ends are read: those
# hold the linker's build number, the symbols and all sizes.
_END_NBYTES = 1 << 16
_CPU_FIELDS = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features",
)  # fmt: skip


class UnknownEnvironmentError(RuntimeError):
    """What decides how a step is built cannot be told; the message says what."""


def environment(target: CompileTarget) -> dict[str, Any]:
    """Return what decides how steps are built here and now, as what JSON holds.

    Raises:
        UnknownEnvironmentError: something of it cannot be told.
    """
    native.load()
    _refuse_foreign()
    # Python registers the exchanges between ranks where a step has some.
    functions = set(tvm_ffi.registry.list_global_func_names()) - COLLECTIVES
    return {
        **_of_process(),
        "target": attrs.asdict(target),
        "tvm_target": str(target.tvm_target),
        "functions": sorted(name for name in functions if name.startswith("amp_ir.")),
        "pass_context": _pass_context(),
        "ambient_target": str(tvm.target.Target.current(allow_none=True)),
        # Constants are folded by this processor, which may have been told to flush them to zero.
        "has_subnormals": float.fromhex("0x1p-1074") * float("1") != 0.0,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "has_fast_bfloat16": native.has_fast_bfloat16(),
        "isa": _answer("amp_ir.onednn.isa"),
        # Libraries are asked how much memory a call takes by this many threads.
        "threads": [torch.get_num_threads(), _answer("amp_ir.openmp.max_threads")],
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and name not in _OTHERS
        },
    }


@functools.cache
def _of_process() -> dict[str, Any]:
    """Return what stays the same while a process runs."""
    try:
        return {
            "amp_ir": VERSION,
            "sources": _sources(PACKAGE, _IMPORTED_AT),
            "python": [sys.implementation.cache_tag, platform.python_version()],
            "torch": [torch.__version__, str(torch.version.git_version)],
            "tvm": tvm.__version__,
            "tvm_ffi": tvm_ffi.__version__,
            "llvm": int(tvm.target.codegen.llvm_version_major(allow_none=True) or 0),
            "llvm_cpu": tvm.target.codegen.llvm_get_system_cpu(),
            "machine": [platform.machine(), platform.system()],
            "cpu": [os.cpu_count(), *_cpu()],
            "libraries": _libraries(),
        }
    except OSError as error:
        raise UnknownEnvironmentError(str(error)) from error


def _sources(package: Path, imported_at: float) -> str:
    """Return the digest of this package's own sources and native libraries.

    Raises:
        UnknownEnvironmentError: there are no sources, or other ones than those that run.
    """
    digest, count = hashlib.sha256(), 0
    for folder, folders, names in os.walk(package):
        folders.sort()
        for name in sorted(names):
            if not name.endswith((".py", ".so", ".dylib")):
                continue
            path = Path(folder, name)
            if path.stat().st_mtime > imported_at:
                raise UnknownEnvironmentError(f"{path} has changed since this process began")
            content = path.read_bytes()
            count += name.endswith(".py")
            digest.update(f"{path.relative_to(package)}:{len(content)}:".encode() + content)
    if not count:
        raise UnknownEnvironmentError(f"there are no sources in {package}")
    return digest.hexdigest()


def _refuse_foreign() -> None:
    """Refuse ops of somebody else's, whose sources are not known.

    Raises:
        UnknownEnvironmentError: there is one.
    """
    functions = {name: one.infer for name, one in DECLARATIONS.items()} | LOWERINGS
    for name, function in functions.items():
        module = str(function.__module__)
        if not module.startswith("amp_ir."):
            raise UnknownEnvironmentError(f"{name} is an op of {module}, which is not amp_ir's")


def _cpu() -> list[str]:
    """Return what the system says about the first CPU and its caches, less what changes."""
    text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    lines = [line.partition(":") for line in text.splitlines()]
    # Libraries choose blocks, and workspace, by the sizes of the caches and who shares them.
    files = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/[lst]*"))
    caches = [
        f"{one.parent.name} {one.name}: {one.read_text().strip()}"
        for one in files
        if one.name in ("level", "type", "size", "shared_cpu_list")
    ]
    fields = [f"{name.strip()}:{value}" for name, _, value in lines if name.strip() in _CPU_FIELDS]
    return fields + caches


def _libraries() -> list[list[Any]]:
    """Return name, size and digest of the ends of each loaded library that matters."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(None, 5)) == 6}
    found = []
    for path in paths:
        name = os.path.basename(path)
        if name.startswith(_LIBRARIES) and not name.startswith(_LATER):
            with open(path, "rb") as file:
                ends = file.read(_END_NBYTES)
                nbytes = file.seek(0, os.SEEK_END)
                file.seek(max(nbytes - _END_NBYTES, 0))
                ends += file.read()
            found.append([name, nbytes, hashlib.sha256(ends).hexdigest()])
    return sorted(found)


def _pass_context() -> list[Any]:
    """Return the settings of TVM around this compilation; lowering runs passes in them."""
    current = tvm.transform.PassContext.current()
    return [
        int(current.opt_level),
        sorted(map(str, current.required_pass)),
        sorted(map(str, current.disabled_pass)),
        sorted(f"{name}={value}" for name, value in current.config.items()),
    ]


def _answer(name: str) -> str:
    """Return what a native function of no arguments says; "" where there is none."""
    return str(native.function(name)()) if native.has(name) else ""
