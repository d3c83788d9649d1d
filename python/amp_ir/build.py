# SPDX-License-Identifier: Apache-2.0
"""IR with planned memory -> an executable of TVM's virtual machine."""

from __future__ import annotations

import ctypes
import functools
import platform
import time
from typing import Any

import torch
import tvm
from tvm import relax, tirx
from tvm.tirx import compilation_pipeline

from amp_ir import native
from amp_ir.errors import DeviceError, OptionError
from amp_ir.executable import Executable
from amp_ir.memory_plan import PlannedStep

_SET_LAUNCH = "amp_ir_use_openmp"
# Kernels reach their thread pool through this variable of the compiled module.
_LAUNCH_SETTER = f"""
@__TVMBackendParallelLaunch = external global ptr
define void @{_SET_LAUNCH}_in_module(ptr %launch) {{
  store ptr %launch, ptr @__TVMBackendParallelLaunch
  ret void
}}
"""


@functools.cache
def cpu_target() -> tvm.target.Target:
    """The target for this machine's own CPU."""
    host = tvm.target.codegen.llvm_get_system_cpu()
    return tvm.target.Target({"kind": "llvm", "mcpu": host})


def resolve_device(device: Any) -> tvm.runtime.Device:
    """The device called `device`.

    Raises:
        OptionError: no device has that name. DeviceError: this build does not run on it.
    """
    name = str(device) if isinstance(device, (str, torch.device)) else ""
    if name == "cpu":
        return tvm.cpu()
    if name == "cuda" or name.startswith("cuda:"):
        raise DeviceError(
            f'device={name!r}: this version compiles for the CPU only; pass device="cpu"'
        )
    raise OptionError(f'device={device!r} is not a device; expected "cpu"')


@tvm.transform.module_pass(opt_level=0, name="LowerKernels")
def lower_kernels(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Lower kernels to what code generation takes.

    TVM's default list minus the passes for scheduled blocks; above all without StorageRewrite,
    which retypes a buffer that is read both as scalars and as vectors and then reads it wrongly.
    """
    transform = tirx.transform
    if not all(_promises_no_alias(function) for function in mod.functions.values()):
        # Code generation keeps one such flag for the whole module (TVM 0.27): a kernel that writes
        # over its input next to one that promises not to would be compiled under that promise.
        functions = {name: _may_alias(function) for name, function in mod.functions.items()}
        mod = tvm.IRModule(functions, attrs=mod.attrs)
    passes = [
        transform.StmtSimplify(),
        transform.FlattenBuffer(),
        transform.NarrowDataType(32),
        transform.VectorizeLoop(True),
        transform.UnrollLoop(),
        transform.StmtSimplify(),
        transform.RemoveNoOp(),
        transform.CommonSubexprElim(),
        transform.VerifyMemory(),
        transform.AnnotateEntryFunc(),
        transform.SplitHostDevice(),
        transform.MakePackedAPI(),
        # Checks of each argument at each call, which take LLVM as long as the kernels themselves.
        # Program checks state and batch before a run; everything else is planned here.
        transform.SkipAssert(),
    ]
    return tvm.transform.Sequential(passes)(mod)


def _promises_no_alias(function: Any) -> bool:
    attributes = getattr(function, "attrs", None)
    return attributes is not None and bool(attributes.get("tirx.noalias", False))


def _may_alias(function: Any) -> Any:
    is_kernel = isinstance(function, tirx.PrimFunc)
    return function.with_attr("tirx.noalias", False) if is_kernel else function


def _kernel_pipeline() -> tuple[Any, Any, Any]:
    """Our lowering in the form TVM looks pipelines up in."""
    finish_host = compilation_pipeline.finalize_host_passes
    return lower_kernels, finish_host, compilation_pipeline.finalize_device_passes


KERNEL_PIPELINE = "amp_ir"
compilation_pipeline.register_tir_pipeline(KERNEL_PIPELINE, _kernel_pipeline)


def build(step: PlannedStep, device: str = "cpu", *, opt_level: int = 3) -> Executable:
    """Compile every kernel and load the result.

    Requires: the output of `plan_memory`.
    Ensures:  kernels run on OpenMP's threads, the pool that PyTorch and oneDNN use too.
    """
    started = time.perf_counter()
    tvm_device = resolve_device(device)
    native.load()
    kernels = sum(isinstance(f, tirx.PrimFunc) for f in step.ir.functions.values())
    ir = tvm.IRModule({**step.ir.functions, **_launch_setter()})
    lowering = tvm.transform.Sequential(
        [
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.ComputePrimValue(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )
    target = cpu_target()
    with tvm.transform.PassContext(opt_level=opt_level), target:
        executable = relax.build(ir, target, relax_pipeline=lowering, tir_pipeline=KERNEL_PIPELINE)
    vm = relax.VirtualMachine(executable, tvm_device)
    if native.has("amp_ir.openmp.launch_address"):
        address = native.function("amp_ir.openmp.launch_address")()
        set_launch = vm.module.get_function(_SET_LAUNCH, query_imports=True)
        set_launch(ctypes.c_void_p(address))
    seconds = time.perf_counter() - started
    return Executable(vm, tvm_device, kernels, seconds, executable)


def _launch_setter() -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    """A function that points the module's parallel loops at another thread pool."""
    address = tirx.Var("address", "handle")
    call = tirx.call_extern("int32", f"{_SET_LAUNCH}_in_module", address)
    body = tirx.AttrStmt(
        tirx.IntImm("int32", 0),
        "pragma_import_llvm",
        tvm.ir.StringImm(_LAUNCH_SETTER),
        tirx.Evaluate(call),
    )
    function = tirx.PrimFunc([address], body).with_attr("global_symbol", _SET_LAUNCH)
    return {tvm.ir.GlobalVar(_SET_LAUNCH): function}


def host_description() -> str:
    """The machine in a few words, for reports."""
    return f"{platform.machine()}, {tvm.target.codegen.llvm_get_system_cpu()}"
