# SPDX-License-Identifier: Apache-2.0
"""The page docs/coverage.md, from the rows of the programs."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterator, Sequence

from benchmarks.programs.measure import DTYPES, RIGHT, Row

_MOST_NOTE = 220
_EXPLAINED = """\
Each program trains three steps as `amp_ir.jit` compiles it, beside eager PyTorch (float32) and
eager PyTorch under `torch.autocast` (bfloat16), from the same numbers. Both are compared with eager
PyTorch in float64, also where the model asks for float32: the losses, and all parameters and
buffers as a share of how far they moved, which is the error in the table. A program is right where
our errors are at most 1.5 times PyTorch's, plus a few roundings; where one draw of weights is not,
those of three are taken together. Models are small: the list says what is captured, compiled and
right, not how fast it is. `s` is the time to the end of the first step, without the compile cache,
on a machine that other processes used too; `external` counts calls of PyTorch's own ops in the
step."""


def page(rows: Sequence[Row], machine: str) -> str:
    """Return the page: how many are right, a table for each kind, and why the rest are not."""
    return "\n".join(_lines(rows, machine)) + "\n"


def _lines(rows: Sequence[Row], machine: str) -> Iterator[str]:
    programs: dict[str, dict[str, Row]] = {}
    for row in rows:
        programs.setdefault(row.name, {})[row.dtype] = row
    right = sum(all(r.status == RIGHT for r in by.values()) for by in programs.values())
    in_dtype = {
        dtype: sum(dtype in by and by[dtype].status == RIGHT for by in programs.values())
        for dtype in ("float32", "bfloat16")
    }
    yield "# Coverage: real programs, beside PyTorch"
    yield ""
    yield "`python -m benchmarks.programs --write` writes this page."
    yield ""
    yield (
        f"{right} of {len(programs)} programs run and are right in float32 and in bfloat16 "
        f"({in_dtype['float32']} in float32, {in_dtype['bfloat16']} in bfloat16)."
    )
    yield ""
    yield _EXPLAINED
    yield ""
    yield f"Measured on {machine}."
    for kind in dict.fromkeys(row.kind for row in rows if row.kind):
        yield from _of_kind(kind, programs)
    yield from _not_right(rows)


def _of_kind(kind: str, programs: dict[str, dict[str, Row]]) -> Iterator[str]:
    yield ""
    yield f"## {kind[0].upper()}{kind[1:]}"
    yield ""
    yield (
        "| program | "
        + " | ".join(f"{one} | error / PyTorch's | s" for one in DTYPES)
        + " | external |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for name, by_dtype in programs.items():
        if all(row.kind != kind for row in by_dtype.values()):
            continue
        cells = [_cells(by_dtype.get(dtype)) for dtype in ("float32", "bfloat16")]
        external = max(row.external for row in by_dtype.values())
        yield f"| {name} | {cells[0]} | {cells[1]} | {external or ''} |"


def _cells(row: Row | None) -> str:
    if row is None:
        return "not run | | "
    if not row.seconds:
        return f"{row.status} | | "
    errors = f"{row.update_error:.1e} / {row.peer_update_error:.1e}"
    return f"{row.status} | {errors} | {row.seconds:.1f}"


def _not_right(rows: Sequence[Row]) -> Iterator[str]:
    notes: dict[str, list[str]] = collections.defaultdict(list)
    for row in rows:
        if row.status != RIGHT:
            notes[f"{row.status}: {_short(row)}"].append(f"{row.name} ({row.dtype})")
    if not notes:
        return
    yield ""
    yield "## What is not right, and why"
    yield ""
    for note, names in notes.items():
        yield f"- {', '.join(names)}: {note}"


def _short(row: Row) -> str:
    if not row.note and row.seconds:
        return (
            f"loss {row.loss_error:.1e}, PyTorch's {row.peer_loss_error:.1e}; parameters "
            f"{row.update_error:.1e}, PyTorch's {row.peer_update_error:.1e}"
        )
    text = re.sub(r"/\S*?site-packages/", "", " ".join(row.note.split()))
    text = text.replace("|", "/")
    return text if len(text) <= _MOST_NOTE else text[: _MOST_NOTE - 3] + "..."
