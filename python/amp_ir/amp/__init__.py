# SPDX-License-Identifier: Apache-2.0
"""Choice of low precision: rules, placement, the pass and its plan.

In the order of use: `hints` (what a rule returns), `type_hints` (the rules), `overrides` (how a
user changes them), `step_graph` (the IR as records), `decisions` (the rules applied to a step),
`kernels` and `placement` (the dtype of free ops), `reads` and `rewrite` (casts), `autocast` (the
pass), `plan` (the decisions as data), `amp_ir.ir.uncast` (the proof that only dtypes changed).
"""

from amp_ir.amp.autocast import plan_of
from amp_ir.amp.custom_type_hint import CustomTypeHint
from amp_ir.amp.hints import (
    FREE,
    PrimType,
    RuleResult,
    TupleType,
    check_dtype,
    hint_for_floats,
    type_hint,
)
from amp_ir.amp.overrides import Override
from amp_ir.amp.plan import CastPlan
from amp_ir.amp.policies import list_ops
from amp_ir.deprecation import renamed_in

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

# `gen_hint_helper` is RAF's name.
__getattr__ = renamed_in(__name__, {"Hints": "RuleResult", "gen_hint_helper": "hint_for_floats"})
