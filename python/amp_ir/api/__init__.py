# SPDX-License-Identifier: Apache-2.0
"""The public functions: they check their arguments and call the stages of pipeline.py.

Those of `examine`, `measure` and `plan_ranks` are imported from there: few programs measure.
"""

from amp_ir.api.compile import compile_into, compile_step, lower, step_of_built, text_after
from amp_ir.api.precision import autocast, autocast_between_ranks, explain_plan
from amp_ir.api.trace import (
    Models,
    Optimizers,
    rewrite,
    trace_model,
    trace_step,
    trace_unchanged,
)

__all__ = [
    "Models", "Optimizers", "autocast", "autocast_between_ranks", "compile_into", "compile_step",
    "explain_plan", "lower", "rewrite", "step_of_built", "text_after", "trace_model", "trace_step",
    "trace_unchanged",
]  # fmt: skip
