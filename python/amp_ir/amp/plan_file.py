# SPDX-License-Identifier: Apache-2.0
"""A CastPlan as a file of JSON: one op or cast a line, sealed with a digest.

Format 2 has `kind` and `sha256`. Format 1, of amp_ir 0.1.0, has no digest: it is read with a
warning, for the decisions in it cannot be made again where the step has changed since.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from typing import Any

from amp_ir.amp.decisions import Mode
from amp_ir.amp.plan_fields import from_fields
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.errors import FileFormatError
from amp_ir.files.atomic_file import write_text
from amp_ir.files.sealed_json import check_seal, read_document, sealed

FORMAT = 2
_OLD_FORMAT = 1
KIND = "plan of amp_ir"
_REMEDY = (
    "make a new plan with amp_ir.autocast and save it again; decisions are changed with "
    "autocast(..., overrides=[...])"
)
_CAST_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
_MODES = frozenset(mode.value for mode in Mode)


def write_plan(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """Write the result of `CastPlan.to_json` so that text tools can compare it line by line."""
    write_text(path, f"{_text(sealed({'kind': KIND, **data}))}\n")


def _text(plan: dict[str, Any]) -> str:
    """Return a plan, or that of a loop's body, as JSON with a line for each op and cast."""
    rest = dict(plan)
    lists = {name: [json.dumps(one) for one in rest.pop(name)] for name in ("ops", "casts")}
    lists["loops"] = [
        f'{{"id": {one["id"]}, "length": {one["length"]}, "plan": {_text(one["plan"])}}}'
        for one in rest.pop("loops")
    ]
    inner = ", ".join(f'"{name}": [\n' + ",\n".join(lines) + "\n]" for name, lines in lists.items())
    return f"{json.dumps(rest)[:-1]}, {inner}}}"


def read_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a plan's data, as `CastPlan.from_json` takes it.

    Raises:
        FileFormatError: the file is not a plan, was altered, or is of a newer format.
    """
    document = read_document(path, what=KIND, remedy=_REMEDY)
    if document.get("format") == _OLD_FORMAT and "sha256" not in document:
        warnings.warn(
            f"{path} has format {_OLD_FORMAT}, which has no digest: whether it was altered cannot "
            "be told. Load it and save it again to have it in the new format",
            stacklevel=3,
        )
        return {**document, "format": FORMAT}
    check_seal(document, path, what=KIND, remedy=_REMEDY, newest=FORMAT)
    return {key: value for key, value in document.items() if key not in ("kind", "sha256")}


def plan_from(cls: Any, data: Any) -> Any:
    """Make a `CastPlan` (`cls`) of its JSON data.

    Raises:
        FileFormatError: another format, or a field that is missing, unknown, of another type, or
            that names what the plan does not have.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise FileFormatError(f"the plan has format {found!r}; expected {FORMAT}; {_REMEDY}")
    rest = {key: value for key, value in data.items() if key != "format"}
    try:
        plan = from_fields(cls, rest, "plan")
    except ValueError as error:
        raise FileFormatError(f"this is not a {KIND}: {error}; {_REMEDY}") from None
    errors = list(_plan_errors(plan))
    if errors:
        raise FileFormatError(f"this is not a {KIND}: {'; '.join(errors[:5])}; {_REMEDY}")
    return plan


def _plan_errors(plan: Any) -> Iterator[str]:
    """Return what in a plan names an op or a mode that does not exist."""
    count = len(plan.ops)
    yield from _loop_errors(plan)
    for position, one in enumerate(plan.ops):
        if one.id != position:
            yield f"op {position} has the id {one.id}"
        if any(mode not in _MODES for mode in one.modes):
            yield f"op {position} has the modes {one.modes}, expected {sorted(_MODES)}"
        if any(not -2 <= source < count for source in one.sources):
            yield f"op {position} has the sources {one.sources}, of {count} ops"
    for position, cast in enumerate(plan.casts):
        if not (-1 <= cast.source < count and -1 <= cast.consumer < count):
            yield f"cast {position} is from op {cast.source} to {cast.consumer}, of {count} ops"
        if not {cast.from_dtype, cast.to_dtype} <= _CAST_DTYPES:
            yield f"cast {position} is of {cast.from_dtype} to {cast.to_dtype}"
        if cast.elements < 0:
            yield f"cast {position} has {cast.elements} elements"


def _loop_errors(plan: Any) -> Iterator[str]:
    for one in plan.loops:
        if not 0 <= one.id < len(plan.ops) or plan.ops[one.id].name != LOOP:
            yield f"a loop has the id {one.id}, which is that of no loop"
        if one.length < 1:
            yield f"a loop has {one.length} steps"
        yield from _plan_errors(one.plan)
