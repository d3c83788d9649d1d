# SPDX-License-Identifier: Apache-2.0
"""Steps and kernel families compile for GPUs that are not here, to the machine code they should."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import tirx
from tvm.relax import op as R

import amp_ir
from amp_ir import pipeline
from amp_ir.cuda import compiler, driver, machine_code
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.ir import target as targets
from amp_ir.loops.cuda import emit_cuda
from amp_ir.loops.fusion.fuse import fuse_loops
from amp_ir.vm.build import CUDA_PIPELINE, compile_executable
from kernel_accesses import accesses_of
from relax_functions import build

ARCHITECTURES = ("sm_80", "sm_90")
LOW_DTYPES = ("float16", "bfloat16")


@functools.cache
def traced(name: str) -> tuple[amp_ir.StepModule, Any]:
    training = WORKLOADS[name].make(small=True)
    return amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )


def source_of(module: Any) -> str:
    """The CUDA source in a built module and its imports."""
    own = module.inspect_source("cuda") if module.kind == "cuda" else ""
    return own + "".join(map(source_of, module.imports))


# Two registers of one merged kernel, 37 KiB of code whose 1024 threads have 64 registers each: exp
# keeps subnormal numbers since it was made as exact as PyTorch's.
# In the networks with images, two registers of each kernel that sums a batch normalization's
# gradient behind the mask of a ReLU in float16: one in ResNet-50, seven in SSD. The mask is read
# low, eight elements at once, since activations are not held in float32.
SPILLED_NBYTES = {"lstm": 8, "resnet50": 8, "ssd": 56}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_compiles_in_both_low_dtypes_without_spills(name):
    """For both architectures; a kernel that both dtypes have is compiled once."""
    mod, args = traced(name)
    kernels = Distinct()
    for dtype in LOW_DTYPES:
        low = amp_ir.autocast(mod, args, amp_dtype=dtype)
        planned = pipeline.lower(low, target=targets.cuda(ARCHITECTURES[-1]))
        kernels.add(planned.ir, dtype)
    cubins = cubins_of(kernels.functions)
    for cubin in cubins:
        codes = machine_code.kernels_of(cubin)
        assert len(codes) >= len(kernels.functions) > 8
        spilled = sum(code.frame_nbytes for code in codes)
        assert spilled <= SPILLED_NBYTES.get(name, 0), [c.name for c in codes if c.frame_nbytes]
    accesses = accesses_of(cubins[-1]).values()
    assert any(one.wide_global_loads and one.wide_global_stores for one in accesses)


class Distinct:
    """The kernels of several modules, those that are the same but for their name once."""

    def __init__(self) -> None:
        self.functions: dict[str, tirx.PrimFunc] = {}
        self._known: dict[int, list[tirx.PrimFunc]] = {}

    def add(self, ir: tvm.IRModule, prefix: str) -> None:
        for variable, function in ir.functions.items():
            if not isinstance(function, tirx.PrimFunc):
                continue
            nameless = function.without_attr("global_symbol")
            alike = self._known.setdefault(tvm_ffi.structural_hash(nameless), [])
            if not any(tvm_ffi.structural_equal(nameless, other) for other in alike):
                alike.append(nameless)
                name = f"{prefix}_{variable.name_hint}"
                self.functions[name] = function.with_attr("global_symbol", name)


def test_the_source_of_a_step_is_the_same_for_both_architectures():
    mod, args = traced("mlp")
    mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    sources = set()
    for arch in ARCHITECTURES:
        target = targets.cuda(arch)
        sources.add(source_of(compile_executable(pipeline.lower(mod, target=target), target).mod))
    assert len(sources) == 1


# Kernel families: those of the first group read and write all they move in low precision.

IN_LOW = {
    "elements": ((256, 1024), R.exp),
    "softmax": ((256, 1024), R.nn.softmax),
    "softmax, several rows a block": ((1024, 64), R.nn.softmax),
    "centred rows": ((256, 1024), lambda x: R.subtract(x, R.mean(x, axis=1, keepdims=True))),
    "sum of columns": ((512, 1024), lambda x: R.sum(R.astype(x, "float32"), axis=0)),
    "sum of rows": ((512, 1024), lambda x: R.sum(R.astype(x, "float32"), axis=1)),
    "sum of everything": ((512, 1024), lambda x: R.sum(R.astype(x, "float32"))),
    "cast to full": ((256, 1024), lambda x: R.astype(x, "float32")),
}
SUMS = ("sum of columns", "sum of rows", "sum of everything")


@pytest.mark.parametrize("dtype", LOW_DTYPES)
def test_kernel_families_load_and_store_sixteen_bytes_at_a_time(dtype):
    functions = {}
    for name, (shape, body) in IN_LOW.items():
        ir = fuse_loops(build([(shape, dtype)], body), emitter=emit_cuda)
        (kernel,) = [one for one in ir.functions.values() if isinstance(one, tirx.PrimFunc)]
        functions[name] = kernel.with_attr("global_symbol", name.translate(WITHOUT_SPACES))
    for cubin in cubins_of(functions):
        kernels = {kernel.name: kernel for kernel in machine_code.kernels_of(cubin)}
        accesses = accesses_of(cubin)
        assert not [kernel.name for kernel in kernels.values() if kernel.frame_nbytes]
        for name in IN_LOW:
            # A reduction's second launch adds a few numbers up; the first one moves the data.
            seen = accesses[f"{name.translate(WITHOUT_SPACES)}_kernel"]
            assert seen.wide_global_loads > 0, name
            assert seen.wide_global_loads == seen.global_loads, name
            if name not in SUMS:
                assert seen.wide_global_stores == seen.global_stores > 0, name


WITHOUT_SPACES = str.maketrans({" ": "_", ",": "_"})


def cubins_of(functions: dict[str, tirx.PrimFunc]) -> list[bytes]:
    """The kernels compiled for both architectures."""
    driver.prepare_build()
    target = targets.cuda(ARCHITECTURES[-1])
    named = {str(one.attrs["global_symbol"]): one for one in functions.values()}
    with target.tvm_target as built_for:
        module = tvm.compile(tvm.IRModule(named), target=built_for, tir_pipeline=CUDA_PIPELINE)
    source = source_of(module.mod)
    return [compiler.compile_source(source, arch) for arch in ARCHITECTURES]


class Classifier(nn.Module):
    """An embedding, a block with a norm and dropout, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(512, 256)
        self.norm = nn.LayerNorm(256)
        self.wide = nn.Linear(256, 512)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(512, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.table(ids))
        return self.head(self.dropout(nn.functional.gelu(self.wide(rows))))


@pytest.mark.parametrize("amp_dtype", LOW_DTYPES)
def test_a_scaled_step_with_norm_dropout_clipping_and_adamw_is_wide_and_does_not_spill(amp_dtype):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.randint(0, 512, (256,)), torch.randint(0, 128, (256,)))

    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(ids), labels)
        with amp_ir.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    scaler = amp_ir.GradScaler()
    mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer, scaler=scaler)
    mod = amp_ir.autocast(mod, args, amp_dtype=amp_dtype)
    target = targets.cuda("sm_90")
    executable = compile_executable(pipeline.lower(mod, target=target), target)
    (cubin,) = machine_code.cubins_of(executable.mod, target.arch)
    assert not [one.name for one in machine_code.kernels_of(cubin) if one.frame_nbytes]
    # AdamW reads weight, gradient and two moments, and writes all but the gradient.
    updates = [
        one
        for one in accesses_of(cubin).values()
        if one.wide_global_loads >= 4 and one.wide_global_stores >= 3
    ]
    assert updates
