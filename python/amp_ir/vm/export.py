# SPDX-License-Identifier: Apache-2.0
"""A compiled step as a file that TVM's runtime loads, without amp_ir and TVM's compiler.

`standalone.py`, a file to copy, runs it.

`step.so.json` is stored beside `step.so` and says how to call it:

    kind, format     "step of amp_ir" and 2
    file             {"nbytes", "sha256"} of `step.so`
    sha256           of this description itself, see files/sealed_json.py
    target           "cpu" or an architecture such as "sm_90"
    main             the function's arguments in order: {"name", "role", "shape", "dtype",
                     "stored_dtype", "count", "is_updated"}. Each is a flat dense tensor of `count`
                     elements of `stored_dtype`, aligned to 64 bytes, on the target's device;
                     bfloat16 is stored as uint16 and bool as uint8. The first is the arena,
                     memory for values that need not be kept between steps; those with
                     `is_updated` are the step's state and its results. Roles:
                       parameter, buffer, gradient, optimizer_state   of model and optimizer
                       hyper_parameter   one number, such as a learning rate, read at every call
                                         and never written; "value" is what it was
                       scaler_state      of a loss scaler: "scale", "growth_tracker" (steps since
                                         an overflow), "hysteresis_tracker", and its log of steps
                       random_state      the seed, and the number of the next step
                       batch, result     what a call takes and gives
                       index_extremes    where the step computes indices that may be out of range:
                                         int64[2 * checks], the smallest index of each of them,
                                         then the largest; if one is wrong, no state has changed
    indices          what must hold: {"input", "least", "extent", "ignored", "expectation"}. Indices
                     that batch tensor `input` holds are at least `least` and below `extent`, or
                     `ignored` if that is a number; without `input` it is about the extremes, in
                     order. `expectation` is the text of it for an error
    libraries        what must be loaded before: {"file", "wheel", "functions", "needs", "sha256"};
                     "wheel" is the package on PyPI that has it, or null for a library of
                     amp_ir/lib, whose build "sha256" names; `needs` are libraries to load before
                     it, {"file", "wheel"}: null is the system's
    kernels          of machine code, for CUDA: {"name", "registers", "local_nbytes",
                     "shared_nbytes"}
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import tvm
from rich.table import Table
from tvm import relax, tirx

from amp_ir.cuda import machine_code
from amp_ir.errors import BuildError
from amp_ir.files.atomic_file import atomic_file, write_bytes, write_text
from amp_ir.files.sealed_json import sealed
from amp_ir.host import native
from amp_ir.ir.collective_call import SYMBOLS as COLLECTIVES
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import OWN_KERNEL, DispatchNote
from amp_ir.ir.external_call import SYMBOL as EXTERNAL
from amp_ir.ir.loop_call import SYMBOL as LOOP
from amp_ir.ir.loop_call import planned_loop
from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.planned_checks import PlannedChecks
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.ir.target import CompileTarget
from amp_ir.ir.tensor_layout import physical_dtype
from amp_ir.standalone import FORMAT, KIND, STATE_DIGEST, state_digest
from amp_ir.vm.build_library import missing_linker

# A function's second name -> the library that holds it, where they differ.
_HOLDER = {"view": "openmp", "loop": "openmp", "torch_cuda": "torch"}
_OPENMP = ("libgomp.so.1", None)
_NEEDS: dict[str, tuple[tuple[str, str | None], ...]] = {
    "openmp": (_OPENMP,),
    "onednn": (_OPENMP, ("libdnnl.so.3", "onednn-cpu-gomp")),
    "torch": (_OPENMP, ("libtorch_cpu.so", "torch")),
    "torch_cuda": (_OPENMP, ("libtorch_cpu.so", "torch"), ("libtorch_cuda.so", "torch")),
    "cublaslt": (("libcublasLt.so.13", "nvidia-cublas"),),
}
_CUDA_RUNTIME = {
    "file": "libtvm_runtime_cuda.so",
    "wheel": "apache-tvm",
    "functions": ["device_api.cuda"],
    "needs": [
        {"file": "libcuda.so.1", "wheel": None},  # comes with the driver
        {"file": "libcudart.so.13", "wheel": "nvidia-cuda-runtime"},
    ],
}


@attrs.frozen
class ExportedStep:
    """The written file, its size and its kernels, for the command's table."""

    path: Path
    nbytes: int
    kernel_count: int
    kernels: tuple[machine_code.KernelCode, ...]
    library_calls: dict[str, int]
    dispatched: tuple[DispatchNote, ...]
    description: dict[str, Any] = attrs.field(repr=False)

    def table(self, seconds: dict[str, float]) -> Table:
        """Return a table of the file, its kernels, its library calls and the seconds per stage."""
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_row("file", f"{self.path}, {self.nbytes / 2**20:.2f} MiB")
        table.add_row("kernels", self._kernels())
        calls = [f"{name} x {count}" for name, count in self.library_calls.items()]
        table.add_row("library calls", ", ".join(calls) or "none")
        for one in self.description["libraries"]:
            table.add_row("needs", f"{one['file']} ({', '.join(map(_named, one['needs']))})")
        own = [f"{one.op} x {one.calls}" for one in self.dispatched if one.library == OWN_KERNEL]
        if own:
            table.add_row("by own kernels", f"{', '.join(own)} (slow where they are large)")
        arena = self.description["main"][0]["count"]
        table.add_row("arena", f"{arena / 2**20:.2f} MiB")
        stages = [f"{stage} {spent:.1f}" for stage, spent in seconds.items()]
        table.add_row("seconds", ", ".join(stages))
        return table

    def _kernels(self) -> str:
        if not self.kernels:
            return str(self.kernel_count)
        code = sum(kernel.code_nbytes for kernel in self.kernels)
        most = max(self.kernels, key=lambda kernel: kernel.registers)
        text = f"{self.kernel_count}, {len(self.kernels)} launches of {code / 2**10:.0f} KiB"
        text += f"; up to {most.registers} registers ({most.name})"
        local = [one.name for one in self.kernels if one.frame_nbytes]
        return text + (f"; local memory in {', '.join(local)}" if local else "; none spills")


def export_step(
    executable: relax.VMExecutable,
    planned: PlannedStep,
    mod: StepModule,
    target: CompileTarget,
    path: Path,
) -> ExportedStep:
    """Write the step to `path` and its description beside it.

    Each file is replaced as a whole. If a kill comes between the two, the new file has the old
    description, whose digest refuses it.

    Raises:
        BuildError: the step calls ops of PyTorch itself, or the file cannot be linked or written.
    """
    # `save_state` writes contiguous tensors: the step is one `with_contiguous_state`.
    assert not any(one.order for one in mod.signature.inputs)
    _check_exportable(planned)
    library = linked_library(executable, path)
    kernels: tuple[machine_code.KernelCode, ...] = ()
    if target.is_cuda:
        cubins = machine_code.cubins_of(executable.mod, target.arch)
        kernels = tuple(kernel for cubin in cubins for kernel in machine_code.kernels_of(cubin))
    calls = collections.Counter(_library_calls(planned.ir))
    description = {
        "kind": KIND,
        "format": FORMAT,
        "file": {"nbytes": len(library), "sha256": hashlib.sha256(library).hexdigest()},
        "target": str(target),
        "main": list(_arguments(planned, mod)),
        "indices": list(_index_checks(planned.checks)),
        "libraries": list(_libraries(planned.ir, target)),
        "kernels": [_described(kernel) for kernel in kernels],
    }
    description = sealed(description)
    text = json.dumps(description, indent=1) + "\n"
    try:
        write_bytes(path, library)
        write_text(path.with_name(path.name + ".json"), text)
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error}") from error
    count = sum(isinstance(function, tirx.PrimFunc) for function in planned.ir.functions.values())
    return ExportedStep(
        path, len(library), count, kernels, dict(calls), planned.dispatched, description
    )


def _check_exportable(planned: PlannedStep) -> None:
    """Refuse calls of Python: what runs the file has neither PyTorch's ops nor its groups."""
    exchanged = next((call for call in planned.plan.calls if call.symbol in COLLECTIVES), None)
    if exchanged is not None:
        raise BuildError(
            f"the step cannot be written to a file: {exchanged.ops[0]} ({exchanged.locations[0]}) "
            "is a call of PyTorch's process group, which what runs the file does not have. Write "
            "the step of one rank, without data_parallel= and DistributedDataParallel, or run it "
            "with amp_ir.jit on every rank"
        )
    external = [call for call in planned.plan.calls if call.symbol == EXTERNAL]
    if not external:
        return
    first = {call.ops[0]: call for call in reversed(external)}
    listed = "; ".join(
        f"{op} ({', '.join(map(str, call.locations[:1])) or 'somewhere'})"
        for op, call in sorted(first.items())
    )
    raise BuildError(
        f"the step cannot be written to a file: {listed} would be called in PyTorch, which what "
        "runs the file does not have. Write that part of the step with other ops, or run the step "
        "in this process with amp_ir.compile"
    )


def linked_library(executable: relax.VMExecutable, path: Path) -> bytes:
    """Return the shared library for a file at `path`, linked in a private folder.

    Raises:
        BuildError: it cannot be linked.
    """
    missing = missing_linker()
    if missing:
        raise BuildError(f"{path} cannot be linked: {missing}; install g++")
    try:
        with tempfile.TemporaryDirectory() as folder:
            linked = Path(folder) / "step.so"
            executable.export_library(str(linked))
            return linked.read_bytes()
    except (OSError, RuntimeError) as error:
        raise BuildError(
            f"{path} cannot be linked; g++ or clang++ must work, and the folder for temporary "
            f"files must be writable. What failed: {error}"
        ) from error


def save_state(mod: StepModule, path: Path) -> None:
    """Write the step's current state to a .npz file, by the description's names.

    One more entry is the digest of the others.

    Raises:
        BuildError: the file cannot be written.
    """
    values: dict[str, Any] = {}
    for name in mod.state:
        tensor = _tensor_of(mod, name).detach().cpu().contiguous()
        # numpy has no bfloat16.
        is_bfloat16 = tensor.dtype is torch.bfloat16
        values[name] = (tensor.view(torch.uint16) if is_bfloat16 else tensor).numpy()
    values[STATE_DIGEST] = np.array(state_digest(values))
    try:
        # As numpy.savez, which has arguments of its own that a parameter's name may be.
        with atomic_file(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, value in values.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, value, allow_pickle=False)
    except OSError as error:
        raise BuildError(f"{path} cannot be written: {error}") from error


def _tensor_of(mod: StepModule, name: str) -> torch.Tensor:
    """Return the current tensor of a state input."""
    held = mod.state[name]
    return held if isinstance(held, torch.Tensor) else held()


def _arguments(planned: PlannedStep, mod: StepModule) -> Iterator[dict[str, Any]]:
    """Return the arguments of `main`, in order: arena, inputs, results that update no input."""
    signature = planned.signature(mod.signature)
    yield _argument("arena", "arena", (planned.plan.arena_bytes,), "uint8", is_updated=False)
    updated = {one.updates for one in signature.outputs}
    for k, given in enumerate(signature.inputs):
        argument = _argument(
            given.name, given.role.value, given.shape, given.dtype, is_updated=k in updated
        )
        if given.role is Role.HYPER_PARAMETER:
            argument["value"] = float(_tensor_of(mod, given.name))
        yield argument
    for made in signature.outputs:
        if made.updates is None:
            yield _argument(made.name, made.role.value, made.shape, made.dtype, is_updated=True)


def _index_checks(checks: PlannedChecks) -> Iterator[dict[str, Any]]:
    """Return the checks of the batch's indices, then of those whose extremes the step returns."""
    # What runs the file cannot compute indices: such a step is planned with host_checks="batch".
    assert not any(one.bindings for one in checks.on_host)
    held = [(one.names[0], one.check) for one in checks.on_host]
    for name, check in [*held, *((None, check) for check in checks.in_step)]:
        yield {
            "input": name,
            "least": check.least,
            "extent": check.extent,
            "ignored": check.ignored,
            "expectation": check.expectation,
        }


def _argument(
    name: str, role: str, shape: tuple[int, ...], dtype: str, *, is_updated: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "role": role,
        "shape": list(shape),
        "dtype": dtype,
        "stored_dtype": physical_dtype(dtype),
        # An empty tensor takes one element, which nobody reads.
        "count": max(math.prod(shape), 1),
        "is_updated": is_updated,
    }


def _functions(ir: tvm.IRModule) -> Iterator[str]:
    """Return the native functions that `main` calls, with repetitions; also under a workspace."""
    for call in Dataflow(ir).values.values():
        loop = planned_loop(ir, call)
        if loop is not None:
            yield LOOP
            yield from _functions(loop.body)
        if not isinstance(call, relax.Call) or not isinstance(call.op, relax.ExternFunc):
            continue
        name = str(call.op.global_symbol)
        yield name
        if name.endswith(".with_scratch"):
            yield str(call.args[0].value)


def _library_calls(ir: tvm.IRModule) -> Iterator[str]:
    for name in _functions(ir):
        if name != "amp_ir.view" and not name.endswith(".with_scratch"):
            yield name


def _libraries(ir: tvm.IRModule, target: CompileTarget) -> Iterator[dict[str, Any]]:
    """Return the shared libraries that hold these functions, and their own dependencies."""
    if target.is_cuda:
        yield _CUDA_RUNTIME
    held: dict[str, set[str]] = collections.defaultdict(set)
    for name in _functions(ir):
        held[name.split(".")[1]].add(name)
    for second, functions in sorted(held.items()):
        library = _HOLDER.get(second, second)
        built = native.LIBRARY_DIRECTORY / f"libamp_ir_{library}.so"
        yield {
            "file": built.name,
            "wheel": None,
            "sha256": hashlib.sha256(built.read_bytes()).hexdigest() if built.exists() else None,
            "functions": sorted(functions),
            "needs": [
                {"file": file, "wheel": wheel}
                for file, wheel in _NEEDS.get(second, _NEEDS.get(library, ()))
            ],
        }


def _named(need: dict[str, Any]) -> str:
    wheel = need["wheel"]
    return str(need["file"]) if wheel is None else f"{need['file']}, pip: {wheel}"


def _described(kernel: machine_code.KernelCode) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "registers": kernel.registers,
        "local_nbytes": kernel.frame_nbytes,
        "shared_nbytes": kernel.shared_nbytes,
    }
