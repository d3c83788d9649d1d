# SPDX-License-Identifier: Apache-2.0
"""The loads and stores of each kernel of a cubin, with their width, from nvdisasm."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import attrs

from amp_ir.cuda import toolkit

_KERNEL_CODE = ".text."
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")


@attrs.frozen
class Accesses:
    """The memory accesses in a kernel's code, by instruction."""

    global_loads: int
    wide_global_loads: int
    global_stores: int
    wide_global_stores: int
    local: int


def accesses_of(cubin: bytes) -> dict[str, Accesses]:
    """Return loads and stores of each kernel of a cubin; nvdisasm has to be there."""
    counts: dict[str, Counter[str]] = {}
    for line in disassemble(cubin).splitlines():
        if line.startswith(_KERNEL_CODE):
            counts[line[len(_KERNEL_CODE) :].rstrip(":")] = current = Counter[str]()
        elif (found := _INSTRUCTION.search(line)) is not None:
            current[found[1]] += 1
    return {name: _accesses(count) for name, count in counts.items()}


def _accesses(count: Counter[str]) -> Accesses:
    def number(*parts: str) -> int:
        return sum(n for name, n in count.items() if set(parts) <= set(name.split(".")))

    return Accesses(
        global_loads=number("LDG"),
        wide_global_loads=number("LDG", "128"),
        global_stores=number("STG"),
        wide_global_stores=number("STG", "128"),
        local=number("LDL") + number("STL"),
    )


def disassemble(cubin: bytes) -> str:
    """Return the instructions of a cubin."""
    disassembler = toolkit.tool("nvdisasm")
    assert disassembler is not None, "pip install nvidia-cuda-nvdisasm"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.cubin"
        path.write_bytes(cubin)
        command = [str(disassembler), "--print-code", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
