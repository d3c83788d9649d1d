# SPDX-License-Identifier: Apache-2.0
"""Facts from machine code about its kernels: registers and memory."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import attrs

from amp_ir.cuda.compiler import compile_source

# Attributes of `.nv.info`, an undocumented section that cuobjdump and the driver read too.
_REGISTER_COUNT, _FRAME_NBYTES = 0x2F, 0x11
_WITH_SIZE = 4
# From Hopper on, the system has the first bytes of shared memory; this symbol tells.
_RESERVED_SYMBOL, _RESERVED_NBYTES = "__nv_reservedSMEM_offset_0_alias", 1024
_KERNEL_CODE = ".text."


@attrs.frozen
class KernelCode:
    """The resources that a kernel of a cubin uses."""

    name: str
    registers: int
    # Bytes of local memory a thread: spilled registers, and arrays that are not indexed by
    # constants. Both mean traffic that the source does not show.
    frame_nbytes: int
    # Static shared memory a block.
    shared_nbytes: int
    code_nbytes: int


def kernels_of(cubin: bytes) -> tuple[KernelCode, ...]:
    """Return the kernels of a cubin, in the order of their names."""
    sections = list(_sections(cubin))
    nbytes = {name: size for name, _, size in sections}
    contents = {name: cubin[at : at + size] for name, at, size in sections}
    symbols = _symbol_names(contents[".symtab"], contents[".strtab"])
    registers: dict[str, int] = {}
    frames: dict[str, int] = {}
    for attribute, value in _attributes(contents[".nv.info"]):
        if attribute in (_REGISTER_COUNT, _FRAME_NBYTES):
            symbol, number = struct.unpack("<II", value)
            table = registers if attribute == _REGISTER_COUNT else frames
            table[symbols[symbol]] = number
    reserved = _RESERVED_NBYTES if _RESERVED_SYMBOL in symbols else 0
    names = sorted(name[len(_KERNEL_CODE) :] for name in nbytes if name.startswith(_KERNEL_CODE))
    return tuple(
        KernelCode(
            name=name,
            registers=registers[name],
            frame_nbytes=frames[name],
            shared_nbytes=max(nbytes.get(f".nv.shared.{name}", 0) - reserved, 0),
            code_nbytes=nbytes[_KERNEL_CODE + name],
        )
        for name in names
    )


def cubins_of(module: Any, arch: str) -> Iterator[bytes]:
    """Return the cubins of a module that was built for `arch`, and of its imports.

    TVM gives a module's source and not its machine code, so this compiles again: from the cache.
    """
    if module.kind == "cuda":
        yield compile_source(module.inspect_source("cuda"), arch)
    for imported in module.imports:
        yield from cubins_of(imported, arch)


def _sections(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """Return name, offset and bytes of every section of a 64-bit little-endian ELF file."""
    assert elf[:4] == b"\x7fELF", f"no cubin: it begins with {elf[:4]!r}"
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    entry_nbytes, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    entries = [
        # name, type, flags, address, offset, bytes
        struct.unpack_from("<IIQQQQ", elf, table + k * entry_nbytes)
        for k in range(count)
    ]
    names = entries[names_index][4]
    for name, _, _, _, offset, nbytes in entries:
        start = names + name
        yield elf[start : elf.index(b"\0", start)].decode(), offset, nbytes


def _symbol_names(symbols: bytes, names: bytes) -> list[str]:
    starts = [entry[0] for entry in struct.iter_unpack("<IBBHQQ", symbols)]
    return [names[start : names.index(b"\0", start)].decode() for start in starts]


def _attributes(information: bytes) -> Iterator[tuple[int, bytes]]:
    """Return number and value of every attribute of an `.nv.info` section."""
    at = 0
    while at < len(information):
        form, attribute, size = struct.unpack_from("<BBH", information, at)
        at += 4
        # Without a size, the value is in its place.
        if form == _WITH_SIZE:
            yield attribute, information[at : at + size]
            at += size
