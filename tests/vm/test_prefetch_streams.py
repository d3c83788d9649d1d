# SPDX-License-Identifier: Apache-2.0
"""Prefetches of kernels: along tensors that a loop over vectors reads in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.relax import op as R

from amp_ir.ir.target import cpu
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.vm.build import KERNEL_PIPELINE
from amp_ir.vm.prefetch_streams import AHEAD, prefetch_streams
from kernel_check import kernels_of, run_kernels
from relax_functions import build

LANES = 16
# What `read_at` is given: the source, ids, local memory, the step and the lane.
Read = Callable[[Any, Any, Any, Any, Any], Any]


def vectors(read_at: Read) -> tirx.PrimFunc:
    """A kernel that stores 64 vectors of what it reads at `read_at`."""
    step, lane = tirx.Var("step", "int32"), tirx.Var("lane", "int32")
    source = tirx.decl_buffer((4096,), "float32", "x")
    ids = tirx.decl_buffer((4096,), "int32", "ids")
    target = tirx.decl_buffer((4096,), "float32", "y")
    local = tirx.decl_buffer((4096,), "float32", "local")
    store = tirx.BufferStore(target, read_at(source, ids, local, step, lane), [step * LANES + lane])
    vector = tirx.For(lane, 0, LANES, tirx.ForKind.VECTORIZED, store)
    loop = tirx.For(step, 0, 64, tirx.ForKind.SERIAL, vector)
    return tirx.PrimFunc([source, ids, target], tirx.SeqStmt([tirx.AllocBuffer(local), loop]))


def prefetched(kernel: tirx.PrimFunc) -> list[str]:
    """The addresses that a kernel asks for, as text."""
    found: list[str] = []

    def note(call: Call) -> None:
        if getattr(call.op, "name", None) == "tirx.address_of":
            load = call.args[0]
            found.append(f"{load.source.name}[{load.indices[0]}]")

    tvm_ffi.structural_walk(kernel.body, [(Call, note)])
    return sorted(found)


def load(tensor: Any, index: Any) -> Any:
    return tirx.BufferLoad(tensor, [index])


CASES: dict[str, tuple[Read, list[str]]] = {
    "in order": (
        lambda x, ids, local, step, lane: load(x, step * LANES + lane),
        [f"x[step * 16 + {AHEAD}]"],
    ),
    "twice the same": (
        lambda x, ids, local, step, lane: (
            load(x, step * LANES + lane) * load(x, step * LANES + lane)
        ),
        [f"x[step * 16 + {AHEAD}]"],
    ),
    "every other": (lambda x, ids, local, step, lane: load(x, (step * LANES + lane) * 2), []),
    "the same vector each time": (lambda x, ids, local, step, lane: load(x, lane), []),
    "where ids say": (
        lambda x, ids, local, step, lane: load(x, load(ids, step) + step * LANES + lane),
        [],
    ),
    "local memory": (lambda x, ids, local, step, lane: load(local, step * LANES + lane), []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_each_other_is_asked_for(name: str) -> None:
    read_at, asked = CASES[name]
    assert prefetched(prefetch_streams(vectors(read_at))) == asked


def test_an_index_of_a_number_that_the_vector_computes_stays() -> None:
    """Before the vector there is no such number."""
    step, lane = tirx.Var("step", "int32"), tirx.Var("lane", "int32")
    start = tirx.Var("start", "int32")
    source = tirx.decl_buffer((4096,), "float32", "x")
    target = tirx.decl_buffer((1024,), "float32", "y")
    element = load(source, start + step * LANES + lane)
    store = tirx.BufferStore(target, element, [step * LANES + lane])
    body = tirx.SeqStmt([tirx.Bind(start, tirx.const(7, "int32")), store])
    vector = tirx.For(lane, 0, LANES, tirx.ForKind.VECTORIZED, body)
    loop = tirx.For(step, 0, 64, tirx.ForKind.SERIAL, vector)
    assert prefetched(prefetch_streams(tirx.PrimFunc([source, target], loop))) == []


def test_machine_code_has_a_prefetch_for_each_tensor_that_is_read() -> None:
    mod = build([((64, 4096), "bfloat16")] * 2, lambda x, y: R.multiply(x, R.exp(y)))
    compiled = tvm.compile(
        kernels_of(fuse_loops(mod)), cpu().tvm_target, tir_pipeline=KERNEL_PIPELINE
    )
    count = compiled.mod.inspect_source("ll").count("call void @llvm.prefetch")
    # LLVM repeats the body of the loop for some CPUs.
    assert count in (2, 4, 8)


def test_the_last_elements_of_a_tensor_are_computed() -> None:
    """What is asked for past the end is not there, and nothing happens."""
    x = torch.randn(3, 48)
    (got,) = run_kernels(build([((3, 48), "float32")], R.exp), [x])
    torch.testing.assert_close(got, x.exp())
