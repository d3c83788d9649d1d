# SPDX-License-Identifier: Apache-2.0
"""The library calls of a dispatched step."""

from __future__ import annotations

import re

import tvm
from tvm import relax


def calls_of(ir: tvm.IRModule) -> list[relax.Call]:
    """The calls in main, in order."""
    bindings = [b for block in ir["main"].body.blocks for b in block.bindings]
    return [b.value for b in bindings if isinstance(b.value, relax.Call)]


def library_calls(ir: tvm.IRModule) -> list[relax.Call]:
    return [c for c in calls_of(ir) if c.op.name == "relax.call_dps_packed"]


def numbers(call: relax.Call, position: int) -> list[int]:
    return [int(n) for n in call.args[1].fields[position].values]


LIBRARIES = ("cublaslt", "torch_cuda")


def lines_of(ir: tvm.IRModule) -> list[str]:
    """What is bound in main, without the types."""
    lines = [line.strip() for line in ir.script().splitlines()]
    lines = lines[lines.index("with R.dataflow():") + 1 : lines.index("R.output(out)")]
    return [re.sub(r"^(\w+): .*? = ", r"\1 = ", line) for line in lines]
