# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric: `jit`, which compiles the body of a loop that calls a Fabric."""

from amp_ir.integrations.fabric.jit import jit

__all__ = ["jit"]
