# SPDX-License-Identifier: Apache-2.0
"""The public functions: they check their arguments and call the stages of pipeline.py."""

from amp_ir.api.compile import compile_into, compile_step, lower, step_of_built, text_after
from amp_ir.api.examine import examine
from amp_ir.api.measure import (
    get_gflops,
    get_param_size,
    get_peak_memory,
    memory_report,
    profile_kernels,
    profile_vm_model,
    trace_memory,
)
from amp_ir.api.plan_ranks import plan_ranks
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
    "Models", "Optimizers", "autocast", "autocast_between_ranks",
    "compile_into", "compile_step", "examine", "explain_plan",
    "get_gflops", "get_param_size", "get_peak_memory", "lower", "memory_report", "plan_ranks",
    "profile_kernels", "profile_vm_model", "rewrite", "step_of_built", "text_after", "trace_memory",
    "trace_model", "trace_step", "trace_unchanged",
]  # fmt: skip
