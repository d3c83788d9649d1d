# SPDX-License-Identifier: Apache-2.0
"""The public names of amp_ir, one line each; `amp_ir` gets all of them when one is first used."""

# First: with another PyTorch, an import below may fail without saying why.
import amp_ir.host.torch_version  # noqa: F401
from amp_ir import amp, errors, testing
from amp_ir.amp.custom_type_hint import CustomTypeHint
from amp_ir.amp.policies import list_ops
from amp_ir.api import explain_plan, trace_model
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
from amp_ir.capture.call_arguments import call_arguments
from amp_ir.distributed.links import Links, measure_links
from amp_ir.distributed.split_optimizers import gather_state_dict
from amp_ir.inference.convert import convert_model
from amp_ir.inference.converted_model import ConvertedModel
from amp_ir.inference.model_file import load, save
from amp_ir.ir.step_log import StepLog, StepRecord
from amp_ir.ir.step_module import Role, Signature
from amp_ir.replay.overflow import Overflow
from amp_ir.replay.watch import Watch, WatchRecord
from amp_ir.report.examination import Examination
from amp_ir.report.kernel_profile import KernelProfile
from amp_ir.report.memory import MemoryReport
from amp_ir.report.rank_plan import RankPlan
from amp_ir.runtime.checkpoint import load_checkpoint, save_checkpoint
from amp_ir.step_names import (
    CastPlan,
    CompiledStep,
    GradScaler,
    Override,
    StepModule,
    autocast,
    autocast_off,
    compile,  # noqa: A004  (torch.compile's name)
    float_function,
    half_function,
    jit,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
    scale_loss,
    trace_step,
)
from amp_ir.verification.advice import Advice
from amp_ir.verification.advise import advise
from amp_ir.verification.error_report import ErrorReport, error_report
from amp_ir.verification.precision_search import PrecisionSearch
from amp_ir.verification.search_precision import search_precision
from amp_ir.verification.verification import Verification
from amp_ir.verification.verify import verify

__all__ = [
    "Advice",
    "CastPlan",
    "CompiledStep",
    "ConvertedModel",
    "CustomTypeHint",
    "ErrorReport",
    "Examination",
    "KernelProfile",
    "Links",
    "MemoryReport",
    "GradScaler",
    "Overflow",
    "Override",
    "PrecisionSearch",
    "RankPlan",
    "Role",
    "Signature",
    "StepLog",
    "StepModule",
    "StepRecord",
    "Verification",
    "Watch",
    "WatchRecord",
    "advise",
    "amp",
    "autocast",
    "autocast_off",
    "call_arguments",
    "compile",
    "convert_model",
    "error_report",
    "errors",
    "examine",
    "explain_plan",
    "float_function",
    "gather_state_dict",
    "get_gflops",
    "get_param_size",
    "get_peak_memory",
    "half_function",
    "jit",
    "list_ops",
    "load",
    "load_checkpoint",
    "measure_links",
    "memory_report",
    "plan_ranks",
    "profile_kernels",
    "profile_vm_model",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "save",
    "save_checkpoint",
    "scale_loss",
    "search_precision",
    "testing",
    "trace_memory",
    "trace_model",
    "trace_step",
    "verify",
]
