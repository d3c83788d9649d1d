# SPDX-License-Identifier: Apache-2.0
"""The machine that the time of a step is estimated for."""

from __future__ import annotations

import torch

from amp_ir.errors import OptionError
from amp_ir.host.machine_model import GPUS, MachineModel, measured_cpu, published_gpu
from amp_ir.ir.step_module import StepModule


def estimated_machine(
    mod: StepModule, gpu: str | None = None, *, allow_tf32: bool = False
) -> MachineModel:
    """Return a GPU by its published peaks, or this CPU, whose rates are measured.

    Raises:
        OptionError: there is no GPU of this name, or the step's tensors are on a GPU and its name
            is not given.
    """
    if gpu is not None:
        return published_gpu(gpu, allow_tf32=allow_tf32)
    held = [one.device for one in mod.state.values() if isinstance(one, torch.Tensor)]
    elsewhere = next((device for device in held if device.type != "cpu"), None)
    if elsewhere is not None:
        raise OptionError(
            f"the step's tensors are on {elsewhere}, whose rates are not measured; give gpu= the "
            f"name of one whose published peaks are known: {', '.join(GPUS)}"
        )
    return measured_cpu(torch.get_num_threads())
