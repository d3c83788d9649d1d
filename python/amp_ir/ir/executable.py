# SPDX-License-Identifier: Apache-2.0
"""A built step, loaded into TVM's virtual machine."""

from __future__ import annotations

import attrs
import tvm
from tvm import relax


@attrs.frozen
class Executable:
    """A loaded program: `run(arena, inputs..., results...)`, and its number of kernels."""

    vm: relax.VirtualMachine
    device: tvm.runtime.Device
    kernel_count: int
    executable: relax.VMExecutable = attrs.field(repr=False)
