# SPDX-License-Identifier: Apache-2.0
"""The ways in which oneDNN can compute one product, and which of them was measured to be fastest.

oneDNN's own choice goes by the shape, and so do the rules of `src/kernels/onednn_matmul.cc`, which
were measured on one CPU. What a product of this step takes on this machine is best found out here.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import attrs

from amp_ir.cache_directory import cache_directory

# "rules" is what is done without measuring. "plain" is oneDNN's first choice, "gemm" its older
# implementation; the others bring one operand or both into oneDNN's own layout before.
WAYS = ("rules", "plain", "gemm", "copy_a", "copy_b", "copy_both")
RULES = WAYS[0]
# Another way is taken from this gain on: smaller ones are within what measurements differ by.
LEAST_GAIN = 0.03

Milliseconds = Mapping[str, float]


def best_way(milliseconds: Milliseconds) -> str:
    """The fastest way, or "rules" where no other is faster by 3 %."""
    fastest = min(milliseconds, key=milliseconds.__getitem__)
    is_better = milliseconds[fastest] < (1 - LEAST_GAIN) * milliseconds[RULES]
    return fastest if is_better else RULES


def with_way(finish: str, way: str) -> str:
    """An epilogue as a call takes it that is to be computed in this way."""
    return finish if way == RULES else f"{finish}+{way}"


def default_directory() -> Path:
    """Where a user's measurements are kept."""
    return cache_directory("matmuls")


@attrs.define
class MeasuredWays:
    """Milliseconds of products by way, kept in a file.

    A file that cannot be read or written is an empty one: measuring again costs seconds, and what
    was measured before an interruption is there. Several processes may write; the last one wins.
    """

    file: Path
    milliseconds: dict[str, Milliseconds] = attrs.field(factory=dict)

    @classmethod
    def read(cls, machine: str) -> MeasuredWays:
        """What is known of a machine; measurements on others say nothing about it."""
        file = default_directory() / f"{machine}.json"
        measured = cls(file)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for product, times in json.loads(file.read_text()).items():
                if isinstance(times, dict) and {RULES} <= set(times) <= set(WAYS):
                    measured.milliseconds[product] = times
        return measured

    def add(self, product: str, times: Milliseconds) -> None:
        """Keep the times of one product, at once on disk."""
        self.milliseconds[product] = dict(times)
        text = json.dumps(self.milliseconds, indent=1)
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.file.parent, suffix=".part")
            with os.fdopen(descriptor, "w") as part:
                part.write(text)
            os.replace(temporary, self.file)

    def best(self, product: str) -> str:
        """The way to take for a product; "rules" for one that was not measured."""
        times = self.milliseconds.get(product)
        return RULES if times is None else best_way(times)
