# SPDX-License-Identifier: Apache-2.0
"""NVRTC, CUDA's compiler as a library, through its C interface."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence

import attrs

from amp_ir.cuda import toolkit

# TVM's sources, and cuda_fp16.h, include these headers of CUDA's C++ libraries for the names below
# and nothing else. The real ones take NVRTC a second a program, and come in a wheel that PyTorch
# does not bring; these take none, and give the same code. A name that is only declared fails to
# compile where it is used.
_PROVIDED = "".join(
    f"""#if __CUDA_ARCH__ >= {version}0
#define NV_PROVIDES_SM_{version} 1
#else
#define NV_PROVIDES_SM_{version} 0
#endif
"""
    for version in (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120)
)
_HEADERS = {
    "nv/target": f"""#pragma once
{_PROVIDED}
#define NV_IS_DEVICE 1
#define NV_IS_HOST 0
#define AMP_IR_LIST(...) __VA_ARGS__
#define AMP_IR_WHERE_1(yes, no) AMP_IR_LIST yes
#define AMP_IR_WHERE_0(yes, no) AMP_IR_LIST no
#define AMP_IR_JOINED(condition, yes, no) AMP_IR_WHERE_##condition(yes, no)
#define NV_IF_ELSE_TARGET(condition, yes, no) AMP_IR_JOINED(condition, yes, no)
#define NV_IF_TARGET(condition, ...) AMP_IR_JOINED(condition, __VA_ARGS__, ())
""",
    "cuda/std/cstdint": """#pragma once
namespace cuda { namespace std {
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
} }
""",
    "cuda/std/type_traits": """#pragma once
namespace cuda { namespace std {
template <class A, class B> struct is_same { static constexpr bool value = false; };
template <class A> struct is_same<A, A> { static constexpr bool value = true; };
template <class A, class B> constexpr bool is_same_v = is_same<A, B>::value;
template <bool Condition, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool Condition, class A, class B> struct conditional { using type = A; };
template <class A, class B> struct conditional<false, A, B> { using type = B; };
template <class A> struct is_integral;
template <class A> struct is_signed;
template <class A> struct is_unsigned;
template <class A> struct is_floating_point;
} }
""",
}


@attrs.frozen
class Nvrtc:
    """A loaded NVRTC and the headers it compiles with."""

    _library: ctypes.CDLL
    _header_directory: str

    @property
    def identity(self) -> str:
        """Return name and version, as far as they determine the generated code."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"NVRTC {major.value}.{minor.value}"

    def architectures(self) -> tuple[str, ...]:
        """Return the architectures it has, as "sm_90"."""
        count = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._library.nvrtcGetSupportedArchs(numbers)
        return tuple(f"sm_{number}" for number in numbers)

    def compile(self, source: str, arch: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """Return the cubin, or None where the source has errors; and the compiler's log."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program),
                source.encode(),
                b"kernels.cu",
                len(_HEADERS),
                _strings(_HEADERS.values()),
                _strings(_HEADERS),
            )
        )
        try:
            arguments = [
                f"--gpu-architecture={arch}",
                f"--include-path={self._header_directory}",
                *options,
            ]
            failed = self._library.nvrtcCompileProgram(program, len(arguments), _strings(arguments))
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            return (None if failed else self._text(program, "CUBIN")), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, what: str) -> bytes:
        nbytes = ctypes.c_size_t()
        self._check(self._function(f"nvrtcGet{what}Size")(program, ctypes.byref(nbytes)))
        buffer = ctypes.create_string_buffer(nbytes.value)
        self._check(self._function(f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        return self._library[name]

    def _check(self, status: int) -> None:
        assert not status, f"NVRTC returns {status}"


@functools.cache
def find() -> Nvrtc | None:
    """Return NVRTC with its headers, or None where either is missing."""
    path = toolkit.library("libnvrtc.so.1?")
    headers = toolkit.header_directory()
    if path is None or headers is None:
        return None
    try:
        # NVRTC asks for these by name when it compiles, and that of CUDA 13.0 looks for them only
        # where the linker does: what is loaded is found.
        for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    return Nvrtc(library, str(headers))


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)
