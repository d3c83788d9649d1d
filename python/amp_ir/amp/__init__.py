# SPDX-License-Identifier: Apache-2.0
"""Where low precision is used: rules, placement, the pass and its plan.

In the order of use: `hints` (the words of a rule), `type_hints` (the rules), `overrides` (how a
user changes them), `step_graph` (the IR as records), `decisions` (what the rules say of a step),
`kernels` and `placement` (the dtype of free ops), `reads` and `rewrite` (casts), `autocast` (the
pass), `plan` (what was decided, as data), `erasure` (the proof that only dtypes changed).
"""

from amp_ir.amp.autocast import plan_of
from amp_ir.amp.hints import (
    FREE,
    Hints,
    PrimType,
    TupleType,
    check_dtype,
    gen_hint_helper,
    type_hint,
)
from amp_ir.amp.overrides import CustomTypeHint, Override
from amp_ir.amp.plan import CastPlan
from amp_ir.amp.policies import list_ops

__all__ = [
    "FREE",
    "CastPlan",
    "CustomTypeHint",
    "Hints",
    "Override",
    "PrimType",
    "TupleType",
    "check_dtype",
    "gen_hint_helper",
    "list_ops",
    "plan_of",
    "type_hint",
]
