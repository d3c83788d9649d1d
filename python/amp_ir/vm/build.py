# SPDX-License-Identifier: Apache-2.0
"""IR with planned memory -> an executable of TVM's virtual machine."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.relax import vm_build
from tvm.tirx import compilation_pipeline

from amp_ir.cuda import driver
from amp_ir.host import native
from amp_ir.ir.executable import Executable
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.target import CompileTarget, cpu
from amp_ir.standalone import LAUNCH_ADDRESS, SET_LAUNCH
from amp_ir.vm.kernel_libraries import build_side_by_side, one_part_a_thread
from amp_ir.vm.library_cache import LibraryCache
from amp_ir.vm.open_kernels import open_kernels
from amp_ir.vm.prefetch_streams import prefetch_streams
from amp_ir.vm.simplify_indices import simplify_indices
from amp_ir.vm.unpack_arguments import unpack_arguments
from amp_ir.vm.whole_vectors import whole_vectors

# Kernels reach their thread pool through this variable of the compiled module.
_LAUNCH_SETTER = f"""
@__TVMBackendParallelLaunch = external global ptr
define void @{SET_LAUNCH}_in_module(ptr %launch) {{
  store ptr %launch, ptr @__TVMBackendParallelLaunch
  ret void
}}
"""


@tvm.transform.module_pass(opt_level=0, name="LowerKernels")
def lower_kernels(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Lower kernels to the input of code generation.

    TVM's default list minus the passes for scheduled blocks and for devices, and without five
    others. For MakePackedAPI, see `unpack_arguments`.
    FlattenBuffer has nothing to flatten, since the buffers of a kernel have one axis, and it makes
    wrong indices: (5 - i) // 2 * 2 + (5 - i) % 2 becomes 4 - i (TVM 0.27, for i below 6). Indices
    are simplified by `simplify_indices` instead.
    StorageRewrite retypes a buffer that is read both as scalars and as vectors, and then reads it
    wrongly. StmtSimplify, and RemoveNoOp where it searches for stores of existing values, treat
    floats as real numbers (see `loops.math.optimization_barrier`), and LLVM simplifies by itself.
    """
    transform = tirx.transform
    mod = _equally_careful(mod)
    passes = [
        transform.prim_func_pass(lambda kernel, *_: simplify_indices(kernel), opt_level=0),
        transform.prim_func_pass(lambda kernel, *_: prefetch_streams(kernel), opt_level=0),
        transform.NarrowDataType(32),
        transform.VectorizeLoop(True),
        transform.prim_func_pass(lambda kernel, *_: whole_vectors(kernel), opt_level=0),
        transform.UnrollLoop(),
        transform.CommonSubexprElim(),
        transform.prim_func_pass(lambda kernel, *_: unpack_arguments(kernel), opt_level=0),
    ]
    return tvm.transform.Sequential(passes)(mod)


def _equally_careful(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with kernels that all promise disjoint arguments, or none.

    Code generation keeps one such flag for the whole module (TVM 0.27): a kernel that writes over
    its input next to one that promises not to would be compiled under that promise.
    """
    if all(_promises_no_alias(function) for function in mod.functions.values()):
        return mod
    functions = {name: _may_alias(function) for name, function in mod.functions.items()}
    return tvm.IRModule(functions, attrs=mod.attrs)


def _promises_no_alias(function: Any) -> bool:
    attributes = getattr(function, "attrs", None)
    return attributes is not None and bool(attributes.get("tirx.noalias", False))


def _may_alias(function: Any) -> Any:
    is_kernel = isinstance(function, tirx.PrimFunc)
    return function.with_attr("tirx.noalias", False) if is_kernel else function


@tvm.transform.module_pass(opt_level=0, name="LowerCudaKernels")
def lower_cuda_kernels(mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    """Split kernels into launches and the code of their threads.

    Barriers are in the kernels already, and shared memory has static sizes. Unrolled loops stay
    loops: as text they would be many times the source, and the CUDA compiler unrolls them itself.
    """
    return tvm.transform.Sequential(cuda_passes())(mod)


def cuda_passes(*before_split: tvm.transform.Pass) -> list[tvm.transform.Pass]:
    """Return the passes of `lower_cuda_kernels`, with others before host and device are split."""
    transform = tirx.transform
    return [
        transform.StmtSimplify(),
        transform.NarrowDataType(32),
        transform.VectorizeLoop(True),
        transform.VerifyMemory(),
        transform.AnnotateEntryFunc(),
        *before_split,
        transform.SplitHostDevice(),
        transform.MakePackedAPI(),
        transform.SkipAssert(),
    ]


def _register_pipeline(name: str, lowering: tvm.transform.Pass) -> str:
    """Register our lowering in the form and the place where TVM looks up pipelines."""
    finish = compilation_pipeline

    def stages() -> tuple[Any, Any, Any]:
        return lowering, finish.finalize_host_passes, finish.finalize_device_passes

    finish.register_tir_pipeline(name, stages)
    return name


# What this process has compiled; emptied by those who time a compilation.
LIBRARIES = LibraryCache()

KERNEL_PIPELINE = _register_pipeline("amp_ir", lower_kernels)
CUDA_PIPELINE = _register_pipeline("amp_ir_cuda", lower_cuda_kernels)


def compile_executable(
    step: PlannedStep, target: CompileTarget, *, opt_level: int = 3
) -> relax.VMExecutable:
    """Compile every kernel for `target`; nothing is loaded, so the target need not be here.

    Requires: the output of `plan_memory`, its kernels emitted for the same kind of target.

    Raises:
        BuildError: the CUDA compiler is missing or refuses a kernel.
    """
    native.load()
    functions = dict(step.ir.functions)
    if target.is_cuda:
        driver.prepare_build()
    else:
        functions |= launch_setter()
    pipeline = CUDA_PIPELINE if target.is_cuda else KERNEL_PIPELINE
    ir = tvm.IRModule(functions)
    with tvm.transform.PassContext(opt_level=opt_level), target.tvm_target as built_for:
        return relax.build(ir, built_for, relax_pipeline=_lower_main(), tir_pipeline=pipeline)


def _lower_main() -> tvm.transform.Pass:
    # Without ComputePrimValue: of each literal float it makes a function that LLVM compiles.
    return tvm.transform.Sequential(
        [
            relax.transform.LowerRuntimeBuiltin(),
            relax.transform.VMShapeLower(),
            relax.transform.AttachGlobalSymbol(),
        ]
    )


def program_and_kernels(step: PlannedStep) -> tuple[relax.ExecBuilder, tvm.IRModule]:
    """Return the virtual machine's program of a step, to be linked, and the kernels to compile.

    Requires: the pass context and the target of the compilation.
    """
    ir = _lower_main()(step.ir)
    builder = relax.ExecBuilder()
    kernels = vm_build._filter_tir(vm_build._vmcodegen(builder, ir, "bytecode"))
    return builder, tvm.IRModule({}) if kernels is None else _equally_careful(kernels)


def compile_in_memory(
    step: PlannedStep, target: CompileTarget, *, opt_level: int
) -> relax.VMExecutable:
    """Compile as `compile_executable`, to run in this process, with the kernels in several parts.

    They cannot be exported: each library has its own copy of what a shared library has once.
    """
    native.load()
    if target.is_cuda:
        driver.prepare_build()
    else:
        step = open_kernels(step)
    with tvm.transform.PassContext(opt_level=opt_level), target.tvm_target as built_for:
        builder, kernels = program_and_kernels(step)
        libraries = []
        # The linker finds a kernel by its name, which another step has too where none is opened.
        if not target.is_cuda:
            # Nothing else decides what the machine code does; not how many threads compiled it.
            compiled_for = f"{built_for} at opt_level {opt_level}"
            libraries = LIBRARIES.of(
                kernels,
                compiled_for,
                lambda missing, _linked: _build_libraries(missing, built_for, opt_level),
            )
        if not libraries:  # TVM's linker needs one, even without a kernel
            libraries = [one for _, one in _build_libraries(kernels, built_for, opt_level)]
        first, *others = libraries
        linked = vm_build._ffi_api.VMLink(builder, built_for, first, [], {})
        for library in others:
            linked.import_module(library)
        return relax.VMExecutable(linked)


def _build_libraries(
    kernels: tvm.IRModule, target: tvm.target.Target, opt_level: int
) -> list[tuple[list[str], tvm.runtime.Module]]:
    """Return libraries of the kernels, ready to run, each with the names of those in it."""
    is_cuda = target.kind.name == "cuda"

    def finish(library: tvm.runtime.Module, _part: int) -> tvm.runtime.Module:
        if not is_cuda:
            # Machine code is made at once, not at the first call, which would be by one thread.
            library.get_function(SET_LAUNCH)
            _use_openmp(library)
        return library

    return build_side_by_side(
        one_part_a_thread(dict(kernels.functions)),
        CUDA_PIPELINE if is_cuda else KERNEL_PIPELINE,
        target,
        opt_level=opt_level,
        finish=finish,
        beside=dict if is_cuda else launch_setter,
    )


def _use_openmp(library: tvm.runtime.Module) -> None:
    """Let a library's parallel loops run on OpenMP's threads, where the native part is built."""
    if native.has(LAUNCH_ADDRESS):
        address = native.function(LAUNCH_ADDRESS)()
        library.get_function(SET_LAUNCH)(ctypes.c_void_p(address))


def build(
    step: PlannedStep,
    target: CompileTarget | None = None,
    device: Any = "cpu",
    *,
    opt_level: int = 3,
) -> Executable:
    """Compile every kernel and load the result on `device`; without a target: on this CPU.

    Ensures: a CPU's kernels run on OpenMP's threads, the pool that PyTorch and oneDNN use too.
    """
    target = target or cpu()
    kernels = count_kernels(step)
    executable = compile_in_memory(step, target, opt_level=opt_level)
    tvm_device = tvm.device(str(device))
    vm = relax.VirtualMachine(executable, tvm_device)
    return Executable(vm, tvm_device, kernels, executable)


def count_kernels(step: PlannedStep) -> int:
    """Return the number of kernels of a step."""
    return sum(isinstance(one, tirx.PrimFunc) for one in step.ir.functions.values())


def launch_setter() -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    """Return a function that points a module's parallel loops at another thread pool."""
    address = tirx.Var("address", "handle")
    call = tirx.call_extern("int32", f"{SET_LAUNCH}_in_module", address)
    body = tirx.AttrStmt(
        tirx.IntImm("int32", 0),
        "pragma_import_llvm",
        tvm.ir.StringImm(_LAUNCH_SETTER),
        tirx.Evaluate(call),
    )
    function = tirx.PrimFunc([address], body).with_attr("global_symbol", SET_LAUNCH)
    return {tvm.ir.GlobalVar(SET_LAUNCH): function}


def host_description() -> str:
    """Describe the machine in a few words, for reports."""
    return f"{platform.machine()}, {tvm.target.codegen.llvm_get_system_cpu()}"
