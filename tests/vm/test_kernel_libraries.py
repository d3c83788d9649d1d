# SPDX-License-Identifier: Apache-2.0
"""Kernels built by several threads are those that one builds."""

from __future__ import annotations

import pytest
import torch
import tvm
from tvm import tirx

import amp_ir
from amp_ir import pipeline
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.ir.target import cpu, cuda
from amp_ir.vm import build as build_stage
from amp_ir.vm import kernel_libraries
from cuda_emulator import in_emulator

EXTENT = 32


def adding(number: float) -> tirx.PrimFunc:
    """A kernel (source, result) that adds a number."""
    source = tirx.decl_buffer((EXTENT,), "float32", "source")
    result = tirx.decl_buffer((EXTENT,), "float32", "result")
    i = tirx.Var("i", "int32")
    value = tirx.BufferLoad(source, [i]) + tirx.const(number, "float32")
    body = tirx.For(i, 0, EXTENT, tirx.ForKind.SERIAL, tirx.BufferStore(result, value, [i]))
    return tirx.PrimFunc([source, result], body).with_attr("tirx.noalias", True)


def named(**functions: tirx.PrimFunc) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
    return {
        tvm.ir.GlobalVar(name): function.with_attr("global_symbol", name)
        for name, function in functions.items()
    }


@pytest.fixture
def threads():
    """Sets PyTorch's number of threads for the time of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("count", "kernels", "libraries"), [(1, 8, 1), (2, 8, 2), (4, 8, 2)])
def test_each_kernel_is_in_one_library_and_does_its_own(threads, count, kernels, libraries):
    threads(count)
    functions = named(**{f"add_{k}": adding(k) for k in range(kernels)})
    built = kernel_libraries.build_side_by_side(
        kernel_libraries.one_part_a_thread(functions), build_stage.KERNEL_PIPELINE,
        cpu().tvm_target, opt_level=3, finish=lambda library, _part: library,
        beside=lambda: named(add_half=adding(0.5)),
    )  # fmt: skip
    assert len(built) == libraries
    for names, library in built:
        assert all(library.implements_function(name) for name in names)
    assert sorted(name for names, _ in built for name in names) == sorted(
        variable.name_hint for variable in functions
    )
    built = [library for _, library in built]
    source, result = torch.arange(float(EXTENT)), torch.empty(EXTENT)

    def added(library: tvm.runtime.Module, name: str) -> float:
        library[name](tvm.runtime.from_dlpack(source), tvm.runtime.from_dlpack(result))
        (difference,) = set((result - source).tolist())
        return difference

    for k in range(kernels):
        homes = [one for one in built if one.implements_function(f"add_{k}")]
        assert [added(one, f"add_{k}") for one in homes] == [k]
    assert [added(one, "add_half") for one in built] == [0.5] * libraries


def test_an_error_in_a_thread_is_raised(threads):
    threads(2)
    kernels = named(**{f"add_{k}": adding(k) for k in range(8)})
    name = next(iter(kernels))
    result = tirx.decl_buffer((EXTENT,), "float32", "result")
    store = tirx.BufferStore(result, tirx.Var("nowhere", "float32"), [0])
    kernels[name] = tirx.PrimFunc([result], store).with_attr("global_symbol", name.name_hint)
    with pytest.raises(Exception, match="nowhere"):
        kernel_libraries.build_side_by_side(
            kernel_libraries.one_part_a_thread(kernels), build_stage.KERNEL_PIPELINE,
            cpu().tvm_target, opt_level=3, finish=lambda library, _part: library,
        )  # fmt: skip


def test_a_step_is_the_same_to_the_bit_whatever_number_of_threads_built_it(threads):
    def trained(count: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        training = WORKLOADS["lstm"].make(small=True)
        mod, _ = amp_ir.trace_step(
            training.step, training.batch, model=training.model, optimizer=training.optimizer
        )
        threads(count)
        build_stage.LIBRARIES.clear()
        train = amp_ir.compile(amp_ir.autocast(mod, amp_dtype="bfloat16"))
        threads(1)
        losses = [train(*training.batch).clone() for _ in range(3)]
        return [*losses, *training.model.parameters()]

    for one, other in zip(trained(1), trained(3), strict=True):
        assert torch.equal(one, other)


@in_emulator
def test_steps_on_a_gpu_are_the_same_in_parts():
    """Kernels of both have the same names, and some are the same."""
    from cuda_emulator import steps

    def trained(build, dtype: str, count: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        training = WORKLOADS["bert1"].make(small=True)
        mod, _ = amp_ir.trace_step(
            training.step, training.batch, model=training.model, optimizer=training.optimizer
        )
        mod = mod if dtype == "float32" else amp_ir.autocast(mod, amp_dtype=dtype)
        target = cuda(steps.ARCH)
        planned = pipeline.lower(mod, target=target)
        before = torch.get_num_threads()
        torch.set_num_threads(count)
        built = build(planned, target, opt_level=3)
        torch.set_num_threads(before)
        assert len(built.mod.imports) == count
        train = steps.load_step(mod, planned, built)
        losses = [train(*training.batch).clone() for _ in range(3)]
        return [*losses, *training.model.parameters()]

    steps.register_libraries()
    dtypes = ("float32", "bfloat16")
    wholes = [trained(build_stage.compile_executable, dtype, 1) for dtype in dtypes]
    in_parts = [trained(build_stage.compile_in_memory, dtype, 3) for dtype in dtypes]
    for whole, parts in zip(wholes, in_parts, strict=True):
        assert all(map(torch.equal, whole, parts))


def test_kernels_that_may_overwrite_an_input_make_all_of_a_step_careful(threads):
    # Otherwise what a kernel is compiled to would depend on which others are in its library.
    threads(2)
    seen: list[dict[str, bool]] = []
    training = WORKLOADS["mlp"].make(small=True)
    mod, _ = amp_ir.trace_step(
        training.step, training.batch, model=training.model, optimizer=training.optimizer
    )

    def noted(parts, *arguments, **options):
        kernels = {variable: kernel for part in parts for variable, kernel in part.items()}
        seen.append({v.name_hint: bool(f.attrs["tirx.noalias"]) for v, f in kernels.items()})
        return kernel_libraries.build_side_by_side(parts, *arguments, **options)

    planned = pipeline.lower(mod)
    with pytest.MonkeyPatch.context() as patch:
        build_stage.LIBRARIES.clear()
        patch.setattr(build_stage, "build_side_by_side", noted)
        build_stage.build(planned)
    (promises,) = seen
    assert len(promises) > 1 and set(promises.values()) == {False}
