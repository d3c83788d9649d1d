# SPDX-License-Identifier: Apache-2.0
"""CUDA source to machine code, on any machine: by NVRTC, else by nvcc."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Protocol

import tvm
import tvm_ffi

from amp_ir.cuda import cubin_cache, nvcc, nvrtc, toolkit
from amp_ir.cuda.prelude import PRELUDE
from amp_ir.errors import BuildError, OptionError

# What decides numbers. TVM's own callback compiles with --use_fast_math, which divides, takes roots
# and exponentials to within a few units in the last place and flushes subnormals: gradients in
# float16 are checked for such values. Contraction to fused multiply-add stays on: it rounds once.
_EXACT = ("--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true")
# Warnings of generated sources are no use to anybody, and hide the errors.
_OPTIONS = ("--std=c++17", "--disable-warnings", *_EXACT)
_ARCHITECTURE = re.compile(r"sm_(\d{2,3})[af]?")
_CALLBACK = "tvm_callback_cuda_compile"
_LONGEST_LOG = 4000
_SHOWN_LINES = 30


class Compiler(Protocol):
    """Interface of a CUDA compiler."""

    @property
    def identity(self) -> str:
        """Return name and version, as far as they determine the generated code."""

    def architectures(self) -> tuple[str, ...]:
        """Return the architectures it has, as "sm_90"."""

    def compile(self, source: str, arch: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the cubin, or None where the source has errors; and the compiler's log."""


def find_compiler() -> Compiler:
    """Return the best compiler of this machine; raise BuildError where there is none."""
    found = nvrtc.find() or nvcc.find()
    if found is None:
        raise BuildError(
            "no CUDA compiler was found: neither NVRTC with its headers among the pip packages or "
            "in CUDA_HOME, nor nvcc on the path; " + toolkit.PIP_REMEDY
        )
    return found


@functools.cache
def architectures() -> tuple[str, ...]:
    """Return the architectures that steps can be compiled for on this machine."""
    return find_compiler().architectures()


def check_architecture(arch: str) -> None:
    """Raise OptionError unless `arch` is one that the compiler of this machine has."""
    known = architectures()
    written = _ARCHITECTURE.fullmatch(arch)
    if written is None or f"sm_{written[1]}" not in known:
        raise OptionError(
            f"{arch!r} is not an architecture that {find_compiler().identity} compiles for; "
            f"expected one of {', '.join(known)}"
        )


def compile_source(source: str, arch: str, *, compiler: Compiler | None = None) -> bytes:
    """Compile CUDA C++ to a cubin for `arch`, as a GPU's driver loads it.

    Raises:
        OptionError: the compiler lacks the architecture.
        BuildError: there is no compiler, or the source has errors: with the kernel and the log.
    """
    chosen = compiler or find_compiler()
    check_architecture(arch)
    cache = cubin_cache.CubinCache()
    name = cubin_cache.key([chosen.identity, arch, *_OPTIONS, PRELUDE, source])
    cubin = cache.get(name)
    if cubin is None:
        cubin, log = chosen.compile(PRELUDE + source, arch, _OPTIONS)
        if cubin is None:
            raise BuildError(_failure(chosen.identity, arch, source, log))
        cache.put(name, cubin)
    return cubin


@functools.cache
def register() -> None:
    """Make TVM compile CUDA kernels by `compile_source` from now on."""
    # An error keeps its kind on its way through TVM.
    for kind in (BuildError, OptionError):
        tvm_ffi.register_error(kind.__name__, kind)
    tvm_ffi.register_global_func(_CALLBACK, _compile_for_tvm, override=True)


def _compile_for_tvm(source: str) -> bytes:
    """Compile for TVM's callback, which passes no target: the build runs in `with target:`."""
    target = tvm.target.Target.current(allow_none=True)
    if target is None or "arch" not in target.attrs:
        raise BuildError(
            "TVM asks for CUDA machine code outside of a target; build inside `with target:`, "
            'where target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})'
        )
    return compile_source(source, str(target.attrs["arch"]))


def _failure(identity: str, arch: str, source: str, log: str) -> str:
    """Return the compiler's log, and the kernel with its first error."""
    message = f"{identity} refuses a generated kernel for {arch}; please report this message.\n"
    message += log.strip()[:_LONGEST_LOG]
    place = re.search(r"kernels\.cu\((\d+)\): (?:catastrophic )?error", log)
    if place is None:
        return message
    lines = source.splitlines()
    at = min(int(place[1]), len(lines))
    starts = [k for k in range(at) if "__global__" in lines[k] and lines[k].endswith("{")]
    first = max(starts[-1] if starts else 0, at - _SHOWN_LINES)
    if starts:
        message += f"\nThe kernel:\n{lines[starts[-1]]}"
        first = max(first, starts[-1] + 1)
    end = next((k for k in range(at, len(lines)) if lines[k].startswith("}")), len(lines))
    shown = [f"{k + 1:5} {lines[k]}" for k in range(first, min(at + 3, end))]
    return message + "\n" + "\n".join(shown)
