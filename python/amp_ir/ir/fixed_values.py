# SPDX-License-Identifier: Apache-2.0
"""The values of a program that no call changes: computed from fixed inputs and constants alone."""

from __future__ import annotations

from collections.abc import Iterable

from tvm import relax

from amp_ir.ir.dataflow import Dataflow, variables_of
from amp_ir.ir.step_module import Role, StepModule

_FIXED_ROLES = (Role.PARAMETER, Role.BUFFER)


def fixed_inputs(mod: StepModule) -> set[relax.Var]:
    """Return the parameters and buffers that the program reads and never writes."""
    updated = {one.updates for one in mod.signature.outputs}
    parameters = Dataflow(mod.ir).main.params
    return {
        variable
        for position, (variable, one) in enumerate(
            zip(parameters, mod.signature.inputs, strict=True)
        )
        if one.role in _FIXED_ROLES and position not in updated
    }


def fixed_values(flow: Dataflow, inputs: Iterable[relax.Var]) -> set[relax.Var]:
    """Return the tensors that `inputs` alone determine, these included; all of them are pure."""
    fixed = set(inputs)
    for variable, value in flow.values.items():
        is_tensor = isinstance(variable.ty, relax.TensorType)
        if is_tensor and isinstance(value, relax.Call) and isinstance(variable, relax.DataflowVar):
            read = variables_of(value)
            if read and all(one in fixed for one in read):
                fixed.add(variable)
    return fixed
