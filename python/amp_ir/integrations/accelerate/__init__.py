# SPDX-License-Identifier: Apache-2.0
"""Accelerate: `jit`, which compiles the body of a loop that calls an Accelerator."""

from amp_ir.integrations.accelerate.jit import jit

__all__ = ["jit"]
