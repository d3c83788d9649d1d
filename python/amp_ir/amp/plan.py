# SPDX-License-Identifier: Apache-2.0
"""CastPlan: the decisions of autocast and their reasons as data, to read, compare and replay.

amp_mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
print(amp_mod.plan.summary())
print(amp_mod.plan.explain("encoder.layer.0"))
amp_mod.plan.save("plan.json")
again = amp_ir.autocast(mod, args, plan=amp_ir.CastPlan.load("plan.json"))   # identical IR
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import attrs

from amp_ir.amp import plan_text
from amp_ir.amp.decisions import Label
from amp_ir.amp.plan_diff import differences
from amp_ir.amp.plan_file import FORMAT, plan_from, read_plan, write_plan
from amp_ir.deprecation import Renamed

_NBYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@attrs.frozen
class PlannedOp:
    """One op of the step: its decision, the rule and the reason.

    `label` is the dtype class of the op's result; `modes` is how it reads each tensor ("full",
    "low", "either" takes the low copy where there is one, "vary" follows the label, "keep").
    `kernel` numbers the op's kernel in the cost model, -1 for what is computed by the kernels that
    read it. `is_free` says that the placement chose the dtype in which the result is stored. For
    each tensor read, `sources` has the op that makes it, views looked through, -1 for an input and
    -2 for a constant, and `left` the dtype in which it is stored.
    """

    id: int
    name: str
    variable: str
    module: str
    phase: str
    line: str
    rule: str
    reason: str
    label: Label
    modes: tuple[str, ...]
    follows: tuple[bool, ...]
    reads: tuple[str, ...]
    results: tuple[str, ...]
    accumulate: str | None
    sets_result: bool
    kernel: int
    is_free: bool = False
    sources: tuple[int, ...] = ()
    left: tuple[str, ...] = ()


@attrs.frozen
class PlannedCast:
    """One inserted cast. `source` and `consumer` are op ids; -1 is an input, constant or output.

    `nbytes` is what the cast alone moves: read plus written for a kernel of its own, 0 where it
    fuses into the kernel of its source or of its consumer.
    """

    variable: str
    from_dtype: str
    to_dtype: str
    elements: int
    source: int
    consumer: int
    is_shared: bool
    is_alone: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes that this cast moves."""
        width = _NBYTES[self.from_dtype] + _NBYTES[self.to_dtype]
        return self.elements * width if self.is_alone else 0


@attrs.frozen
class PlanCost:
    """Bytes that the values of free ops move in a step, under the cost model of placement.py.

    `chosen` is this plan's, `greedy` that of RAF's placement, `full` that of float32 throughout.
    No placement has less than `bound`, the value of a maximum flow.
    """

    chosen: int
    greedy: int
    full: int
    bound: int = 0


@attrs.frozen
class Moved:
    """Bytes that the kernels of a step move because of dtypes, for one reason.

    Attributes:
        what: "cast alone", a kernel that only casts, what it reads and writes; "second copy", a
            low copy that a kernel writes beside the float32 one; "float32", what kernels move for
            tensors in float32 above what they would if these were low.
        reason: why the tensor has its dtype.
        is_free: whether the placement chose that dtype.
    """

    what: str
    reason: str
    is_free: bool
    nbytes: int


@attrs.frozen
class LoopPlan:
    """The decisions in the body of a loop: those of each of its `length` steps.

    `id` is that of the loop among the ops of the step; `plan` numbers the body's own ops from 0.
    """

    id: int
    length: int
    plan: CastPlan


@attrs.frozen
class CastPlan:
    """All decisions of one autocast, in program order.

    `loops` has those in the bodies of loops, which are one op each in `ops`. `moved`, what the
    compiled step moves because of dtypes, is known after `explain_plan` only.
    """

    amp_dtype: str
    policy: str
    placement: str
    output_dtypes: tuple[str, ...]
    cost_nbytes: PlanCost
    ops: tuple[PlannedOp, ...]
    casts: tuple[PlannedCast, ...]
    moved: tuple[Moved, ...] = ()
    loops: tuple[LoopPlan, ...] = ()

    def __repr__(self) -> str:
        """Describe the plan in one line; `summary()` has two and one per kind of op."""
        inside = sum(len(one.plan.ops) for one in self.loops)
        loops = f" and {inside} in loops" if inside else ""
        return (
            f"CastPlan({self.amp_dtype}, policy {self.policy}: {len(self.ops)} ops{loops}, "
            f"{len(self.casts)} casts; .summary(), .explain(module) and .list_casts() show them)"
        )

    @property
    def hash(self) -> str:
        """Return the SHA-256 of the decisions; equal for equal decisions, wherever files are."""
        data = _without_lines(self.to_json())
        del data["format"]
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists, strings and numbers."""
        return {"format": FORMAT, **attrs.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CastPlan:
        """Make the plan from the result of `to_json`.

        Raises:
            FileFormatError: another format, or a field is missing, unknown or of another type.
        """
        return plan_from(cls, data)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, one op or cast per line, so that text tools can compare it.

        The file has a digest, and a process that is killed meanwhile leaves the previous file
        intact.
        """
        write_plan(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> CastPlan:
        """Read the file that `save` wrote.

        Raises:
            FileFormatError: the file is not a plan, was altered, or is of a newer format.
        """
        return cls.from_json(read_plan(path))

    def diff(self, other: CastPlan) -> str:
        """Return what `other` decides differently, one line per difference; empty if nothing."""
        return "\n".join(differences(self, other))

    def summary(self) -> str:
        """Return casts, bytes and dtypes in numbers: two lines in all, then one per op name.

        Between these, a line per loop; its bytes are those of all its steps, in the first two, too.
        """
        return "\n".join(plan_text.summary(self))

    def cast_traffic(self) -> str:
        """Return the bytes that dtypes cost the compiled step, by reason; fixed reasons come last.

        Under the cost model, no placement moves less than the bound for the values of free ops.
        """
        return "\n".join(plan_text.cast_traffic(self))

    certificate = Renamed("cast_traffic")

    def explain(self, what: str = "*") -> str:
        """Explain the dtypes of each op of a module, or of a name, and each of its casts.

        `what` is a glob over module paths (what is inside of a module included) or op names. Ops in
        the body of a loop follow the loop, and say of how many steps they are.

        Raises:
            OptionError: it matches nothing.
        """
        return "\n".join(plan_text.explain(self, what))

    def list_casts(self) -> str:
        """Return every cast in one line, under the path of the module whose op reads it."""
        return "\n".join(plan_text.casts(self))


def _without_lines(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's data without the lines of source files."""
    ops = [{key: value for key, value in one.items() if key != "line"} for one in data["ops"]]
    loops = [{**one, "plan": _without_lines(one["plan"])} for one in data["loops"]]
    return {**data, "ops": ops, "loops": loops}
