# SPDX-License-Identifier: Apache-2.0
"""The library calls of a dispatched step."""

from __future__ import annotations

import re

import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.library_call import LibraryMatmul, read


def calls_of(ir: tvm.IRModule) -> list[relax.Call]:
    """The calls in main, in order."""
    return [value for value in Dataflow(ir).values.values() if isinstance(value, relax.Call)]


def library_calls(ir: tvm.IRModule) -> list[relax.Call]:
    return [c for c in calls_of(ir) if c.op.name == "relax.call_dps_packed"]


def matmul_of(call: relax.Call) -> LibraryMatmul:
    """The call as a matmul."""
    found = read(call)
    assert isinstance(found, LibraryMatmul)
    return found


LIBRARIES = ("cublaslt", "torch_cuda")


def lines_of(ir: tvm.IRModule) -> list[str]:
    """What is bound in main, without the types."""
    lines = [line.strip() for line in ir.script().splitlines()]
    lines = lines[lines.index("with R.dataflow():") + 1 : lines.index("R.output(out)")]
    return [re.sub(r"^(\w+): .*? = ", r"\1 = ", line) for line in lines]
