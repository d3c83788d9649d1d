# SPDX-License-Identifier: Apache-2.0
"""Tuning cache: oneDNN's algorithms for a matmul, and which was measured to be the fastest.

oneDNN chooses by the shape, and so do the rules of `src/kernels/onednn/matmul.cc`, which were
measured on one CPU. Measuring a matmul of this step on this machine gives a better choice.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from amp_ir.errors import FileFormatError
from amp_ir.files.atomic_file import write_text
from amp_ir.files.cache_directory import cache_directory, drop_damaged
from amp_ir.files.sealed_json import check_seal, read_document, sealed
from amp_ir.host import native
from amp_ir.ir.library_call import RULES
from amp_ir.ir.target import cpu

# "rules" is the choice without measurements. "plain" is oneDNN's first choice, "gemm" its older
# implementation; the others bring one operand or both into oneDNN's own layout before.
ALGORITHMS = (RULES, "plain", "gemm", "copy_a", "copy_b", "copy_both")
# Smallest gain for which another algorithm is used: smaller ones are within measurement noise.
LEAST_GAIN = 0.03

# Format 1, of amp_ir 0.1.0, had no digest; it is measured again.
KIND, FORMAT = "matmul times of amp_ir", 2

Milliseconds = Mapping[str, float]


def fastest_algorithm(milliseconds: Milliseconds) -> str:
    """Return the fastest algorithm, or "rules" where no other is faster by 3 %."""
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    is_better = milliseconds[fastest] < (1 - LEAST_GAIN) * milliseconds[RULES]
    return fastest if is_better else RULES


def this_machine() -> str:
    """Name what measurements are valid for: this kind of CPU, the threads, this oneDNN."""
    version = native.function("amp_ir.onednn.version")()
    return f"{cpu().arch}-{torch.get_num_threads()}-threads-onednn-{version}"


def default_directory() -> Path | None:
    """Return the directory of a user's measurements; None where there is none to write to."""
    return cache_directory("matmuls")


@attrs.define
class TuningCache:
    """Milliseconds of matmuls by algorithm, stored in a file of JSON with a digest.

    A file that cannot be read or written counts as empty, and a damaged one is removed: measuring
    again costs seconds, and measurements before an interruption stay. Several processes may write:
    each adds to the file, and only what two add at the same moment may be lost. `file` is None
    where this user has no home directory.
    """

    file: Path | None
    milliseconds: dict[str, Milliseconds] = attrs.field(factory=dict)

    @classmethod
    def read(cls, machine: str) -> TuningCache:
        """Read the measurements of a machine; those of others say nothing about it."""
        directory = default_directory()
        file = None if directory is None else directory / f"{machine}.json"
        return cls(file, _read(file))

    def add(self, matmul: str, times: Milliseconds) -> None:
        """Store the times of one matmul, at once on disk."""
        self.milliseconds[matmul] = dict(times)
        if self.file is None:
            return
        stored = {**_read(self.file), **self.milliseconds}
        head = {"kind": KIND, "format": FORMAT, "machine": self.file.stem}
        text = json.dumps(sealed({**head, "milliseconds": stored}), indent=1)
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, text + "\n")

    def best(self, matmul: str) -> str:
        """Return the algorithm for a matmul; "rules" for one that was not measured."""
        times = self.milliseconds.get(matmul)
        return RULES if times is None else fastest_algorithm(times)


def _read(file: Path | None) -> dict[str, Milliseconds]:
    """Return the matmuls in a file; none where it is missing or damaged; remove a damaged one."""
    if file is None:
        return {}
    remedy = "amp_ir.tune measures again"
    try:
        document = read_document(file, what=KIND, remedy=remedy)
        check_seal(document, file, what=KIND, remedy=remedy, newest=FORMAT)
    except OSError:
        return {}
    except FileFormatError as error:
        drop_damaged(file, str(error))
        return {}
    stored: Any = document.get("milliseconds")
    if document.get("machine") == file.stem and _are_times(stored):
        return dict(stored)
    drop_damaged(file, f"its times are of another machine, or no times; {remedy}")
    return {}


def _are_times(stored: Any) -> bool:
    return isinstance(stored, dict) and all(
        isinstance(times, dict)
        and {RULES} <= set(times) <= set(ALGORITHMS)
        and all(type(one) in (int, float) and 0 < one < math.inf for one in times.values())
        for times in stored.values()
    )
