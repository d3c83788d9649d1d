# SPDX-License-Identifier: Apache-2.0
"""The ways in which oneDNN can compute one product, and which of them was measured to be fastest.

oneDNN's own choice goes by the shape, and so do the rules of `src/kernels/onednn/matmul.cc`, which
were measured on one CPU. What a product of this step takes on this machine is best found out here.
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
from amp_ir.ir.target import cpu

# "rules" is what is done without measuring. "plain" is oneDNN's first choice, "gemm" its older
# implementation; the others bring one operand or both into oneDNN's own layout before.
WAYS = ("rules", "plain", "gemm", "copy_a", "copy_b", "copy_both")
RULES = WAYS[0]
# Another way is taken from this gain on: smaller ones are within what measurements differ by.
LEAST_GAIN = 0.03

# Format 1, of amp_ir 0.1.0, had no digest; it is measured again.
KIND, FORMAT = "matmul times of amp_ir", 2

Milliseconds = Mapping[str, float]


def best_way(milliseconds: Milliseconds) -> str:
    """The fastest way, or "rules" where no other is faster by 3 %."""
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    is_better = milliseconds[fastest] < (1 - LEAST_GAIN) * milliseconds[RULES]
    return fastest if is_better else RULES


def with_way(finish: str, way: str) -> str:
    """An epilogue as a call takes it that is to be computed in this way."""
    return finish if way == RULES else f"{finish}+{way}"


def this_machine() -> str:
    """What measurements hold for: this kind of CPU, as many threads, this oneDNN."""
    version = native.function("amp_ir.onednn.version")()
    return f"{cpu().arch}-{torch.get_num_threads()}-threads-onednn-{version}"


def default_directory() -> Path | None:
    """Where a user's measurements are kept; None where nothing can be."""
    return cache_directory("matmuls")


@attrs.define
class MeasuredWays:
    """Milliseconds of products by way, kept in a file of JSON with a digest.

    A file that cannot be read or written is an empty one, and a damaged one is dropped: measuring
    again costs seconds, and what was measured before an interruption is there. Several processes
    may write: each adds to what is there, and only what two add at the same moment may be lost.
    `file` is None where this user has no home directory.
    """

    file: Path | None
    milliseconds: dict[str, Milliseconds] = attrs.field(factory=dict)

    @classmethod
    def read(cls, machine: str) -> MeasuredWays:
        """What is known of a machine; measurements on others say nothing about it."""
        directory = default_directory()
        file = None if directory is None else directory / f"{machine}.json"
        return cls(file, _read(file))

    def add(self, product: str, times: Milliseconds) -> None:
        """Keep the times of one product, at once on disk."""
        self.milliseconds[product] = dict(times)
        if self.file is None:
            return
        known = {**_read(self.file), **self.milliseconds}
        head = {"kind": KIND, "format": FORMAT, "machine": self.file.stem}
        text = json.dumps(sealed({**head, "milliseconds": known}), indent=1)
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, text + "\n")

    def best(self, product: str) -> str:
        """The way to take for a product; "rules" for one that was not measured."""
        times = self.milliseconds.get(product)
        return RULES if times is None else best_way(times)


def _read(file: Path | None) -> dict[str, Milliseconds]:
    """The products in a file; none where it is missing or damaged, and a damaged one is dropped."""
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
    known: Any = document.get("milliseconds")
    if document.get("machine") == file.stem and _are_times(known):
        return dict(known)
    drop_damaged(file, f"its times are of another machine, or no times; {remedy}")
    return {}


def _are_times(known: Any) -> bool:
    return isinstance(known, dict) and all(
        isinstance(times, dict)
        and {RULES} <= set(times) <= set(WAYS)
        and all(type(one) in (int, float) and 0 < one < math.inf for one in times.values())
        for times in known.values()
    )
