# SPDX-License-Identifier: Apache-2.0
"""Turn ops that only some libraries have fused into their calls, or into smaller ops.

What amp_ir has no kernel of becomes a call of PyTorch's own.
"""

from __future__ import annotations

import tvm

from amp_ir.dispatch.decompose_attention import decompose_attention
from amp_ir.dispatch.decompose_recurrence import decompose_recurrence
from amp_ir.dispatch.pointwise_convolutions import pointwise_convolutions
from amp_ir.dispatch.write_collectives import write_collectives
from amp_ir.dispatch.write_external_calls import write_external_calls
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.target import CompileTarget


def decompose(ir: tvm.IRModule, target: CompileTarget, log: DispatchLog) -> tvm.IRModule:
    """Turn attention and recurrent layers into library calls, or into matmuls and smaller ops.

    External calls become calls of PyTorch, and a GPU's convolutions of single pixels matmuls.

    Requires: nothing of the step is dispatched yet.
    Ensures:  neither attention nor a recurrent layer is left; `log` says which library has which.
    """
    ir = write_collectives(write_external_calls(ir, log=log), log=log)
    if target.is_cuda:
        ir = pointwise_convolutions(ir)
    ir = decompose_attention(ir, libraries=target.libraries, log=log)
    return decompose_recurrence(ir, libraries=target.libraries, log=log)
