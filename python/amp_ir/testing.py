# SPDX-License-Identifier: Apache-2.0
"""Helpers for the tests of a project that uses amp_ir.

def test_the_plan_of_my_step_is_as_it_was():
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)
    amp_mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    amp_ir.testing.assert_plan_matches(amp_mod, "tests/golden/plan.json")
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from amp_ir.amp.plan import CastPlan
from amp_ir.errors import OptionError

# With it set, golden plans are written instead of compared.
UPDATE_VARIABLE = "AMP_IR_UPDATE_PLANS"


def assert_plan_matches(planned: Any, golden: str | os.PathLike[str]) -> None:
    """Fail if a step's cast plan decides anything differently from a file that was saved before.

    Lines of source may move; dtypes, ops and casts may not. With AMP_IR_UPDATE_PLANS=1 in the
    environment the file is written instead.

    Args:
        planned: a CastPlan, or a step that went through `autocast`.
        golden: the file of `plan.save`.

    Raises:
        AssertionError: the plans differ, with a line for each difference; or there is no file.
        OptionError: `planned` has no plan, or `golden` is a folder.
        FileFormatError: the file is no plan.
    """
    plan = planned if isinstance(planned, CastPlan) else getattr(planned, "plan", None)
    if not isinstance(plan, CastPlan):
        raise OptionError(
            f"{type(planned).__name__} has no cast plan; pass a step that amp_ir.autocast "
            "returned, or its plan"
        )
    path = Path(golden)
    if path.is_dir():
        raise OptionError(
            f"{path} is a folder; name the file of the plan, such as {path / 'plan.json'}"
        )
    remedy = f"set {UPDATE_VARIABLE}=1 and run the test once to write it"
    if os.environ.get(UPDATE_VARIABLE, "") not in ("", "0"):
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
        return
    if not path.exists():
        raise AssertionError(f"there is no golden plan {path}; {remedy}")
    found = CastPlan.load(path).diff(plan)
    if found:
        raise AssertionError(
            f"the cast plan is not that of {path}:\n{found}\nIf that is meant, {remedy} again"
        )
