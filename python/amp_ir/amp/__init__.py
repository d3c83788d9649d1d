# SPDX-License-Identifier: Apache-2.0
"""Choice of low precision: rules, placement, the pass and its plan.

In the order of use: `hints` (what a rule returns), `type_hints` (the rules), `overrides` (how a
user changes them), `step_graph` (the IR as records), `decisions` (the rules applied to a step),
`kernels` and `placement` (the dtype of free ops), `reads` and `rewrite` (casts), `autocast` (the
pass), `plan` (the decisions as data), `amp_ir.ir.uncast` (the proof that only dtypes changed).
"""

import warnings
from typing import Any

from amp_ir.amp.autocast import plan_of
from amp_ir.amp.hints import (
    FREE,
    PrimType,
    RuleResult,
    TupleType,
    check_dtype,
    hint_for_floats,
    type_hint,
)
from amp_ir.amp.overrides import CustomTypeHint, Override
from amp_ir.amp.plan import CastPlan
from amp_ir.amp.policies import list_ops

__all__ = [
    "FREE",
    "CastPlan",
    "CustomTypeHint",
    "RuleResult",
    "Override",
    "PrimType",
    "TupleType",
    "check_dtype",
    "hint_for_floats",
    "list_ops",
    "plan_of",
    "type_hint",
]

# Names of 0.1 -> what they are called now. `gen_hint_helper` is RAF's.
_RENAMED = {"Hints": "RuleResult", "gen_hint_helper": "hint_for_floats"}


def __getattr__(name: str) -> Any:
    """Return an object by the name that it had in the last minor version."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"amp_ir.amp.{name} is called amp_ir.amp.{_RENAMED[name]} now; the old name goes in the "
        "next minor version",
        DeprecationWarning,
        stacklevel=2,
    )
    return globals()[_RENAMED[name]]
