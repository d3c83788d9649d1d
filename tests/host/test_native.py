# SPDX-License-Identifier: Apache-2.0
"""Loading, the shared thread pool, and views of an arena."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import tvm_ffi
from tvm_ffi.libinfo import find_libtvm_ffi

from amp_ir.errors import BuildError
from amp_ir.host import native
from prepared_process import run_code

LAMBDA = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class ParallelGroup(ctypes.Structure):
    """TVMParallelGroupEnv."""

    _fields_ = [("sync_handle", ctypes.c_void_p), ("num_task", ctypes.c_int32)]


def launch(task, num_task: int) -> int:
    """Call the function that compiled kernels call, with a Python task(id, count) -> status."""

    def body(task_id: int, group: int, _cdata: int) -> int:
        count = ctypes.cast(group, ctypes.POINTER(ParallelGroup)).contents.num_task
        return task(task_id, count)

    address = native.function("amp_ir.openmp.launch_address")()
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, LAMBDA, ctypes.c_void_p, ctypes.c_int)
    return prototype(address)(LAMBDA(body), None, num_task)


def raise_in_tvm(kind: bytes, text: bytes) -> int:
    """What a failing kernel does: leave an error for this thread, and return -1."""
    tvm_ffi_c().TVMFFIErrorSetRaisedFromCStr(kind, text)
    return -1


def tvm_ffi_c() -> ctypes.CDLL:
    return ctypes.CDLL(find_libtvm_ffi())


@pytest.mark.parametrize("num_task", [1, 2, 7, 64])
def test_every_task_runs_once(num_task):
    seen = []
    assert launch(lambda task_id, count: seen.append((task_id, count)) or 0, num_task) == 0
    assert sorted(seen) == [(i, num_task) for i in range(num_task)]


def test_no_number_means_one_task_a_thread():
    seen = []
    assert launch(lambda task_id, count: seen.append((task_id, count)) or 0, 0) == 0
    threads = native.function("amp_ir.openmp.max_threads")()
    assert sorted(seen) == [(i, threads) for i in range(threads)]


def test_an_error_of_any_task_reaches_the_caller():
    def failing(task_id: int, _count: int) -> int:
        return raise_in_tvm(b"ValueError", b"task 5 is bad") if task_id == 5 else 0

    assert launch(failing, 8) == -1
    error = ctypes.c_void_p()
    tvm_ffi_c().TVMFFIErrorMoveFromRaised(ctypes.byref(error))
    assert error.value, "the error of the task must be raised on the thread that launched it"
    tvm_ffi_c().TVMFFIObjectDecRef(error)


def test_launching_inside_a_task_works():
    inner = []

    def outer(_task_id: int, _count: int) -> int:
        return launch(lambda task_id, _count: inner.append(task_id) or 0, 3)

    assert launch(outer, 2) == 0
    assert sorted(inner) == [0, 0, 1, 1, 2, 2]


def test_torch_and_our_kernels_share_one_pool():
    native.load()
    with open("/proc/self/maps") as maps:
        pools = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(pools) == 1, pools
    assert native.function("amp_ir.openmp.max_threads")() == torch.get_num_threads()


def test_view_starts_inside_the_arena_and_keeps_it_alive():
    arena = tvm_ffi.from_dlpack(torch.arange(256, dtype=torch.uint8))
    view = native.function("amp_ir.view")(arena, 64, tvm_ffi.Shape((2, 4)), "float32")
    del arena
    assert str(view.dtype) == "float32" and tuple(view.shape) == (2, 4)
    assert torch.from_dlpack(view).view(torch.uint8).flatten().tolist() == list(range(64, 96))


@pytest.mark.parametrize("offset_bytes", [-64, 192, 256])
def test_view_outside_the_arena_is_refused(offset_bytes):
    arena = tvm_ffi.from_dlpack(torch.zeros(256, dtype=torch.uint8))
    with pytest.raises(ValueError) as caught:
        native.function("amp_ir.view")(arena, offset_bytes, tvm_ffi.Shape((32,)), "float32")
    assert str(caught.value) == (
        f"a view of 128 bytes at offset {offset_bytes} does not lie inside an arena of 256 bytes"
    )


def test_has_and_function():
    assert native.has("amp_ir.plan_memory")
    assert not native.has("amp_ir.no_such_function")
    with pytest.raises(BuildError) as caught:
        native.function("amp_ir.no_such_function")
    assert str(caught.value) == (
        "the native function amp_ir.no_such_function is not in this build; "
        "rebuild amp_ir (pip install -e .)"
    )


def test_missing_libraries_are_named_once_with_their_consequence(tmp_path):
    program = textwrap.dedent("""
        import sys, warnings, pathlib
        from amp_ir.host import native
        native.LIBRARY_DIRECTORY = pathlib.Path(sys.argv[1])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert not native.has("amp_ir.onednn.matmul")
            assert not native.has("amp_ir.torch.matmul")
        assert len(caught) == 1, caught
        print(caught[0].message)
    """)
    # A library that the user does without is not missing.
    environment = {k: v for k, v in os.environ.items() if k != native.DISABLE_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    rebuild = "rebuild amp_ir (pip install -e .)"
    assert done.stdout.splitlines() == [
        "some native libraries of amp_ir are missing:",
        "  passes (not built): no program can be compiled, since memory cannot be planned; "
        + rebuild,
        "  openmp (not built): compiled kernels run on a thread pool of their own and compete with "
        "PyTorch's; " + rebuild,
        "  torch (not built): matmul and convolution have no PyTorch kernels to fall back on; "
        + rebuild,
        "  onednn (not built): matmul and convolution run through PyTorch, whose float32 is "
        "slower; pip install onednn-cpu-gomp==2023.2.0 onednn-devel-cpu-gomp==2023.2.0, "
        "then rebuild",
        # Where PyTorch has no CUDA, nobody misses it.
        *(
            ["  cublaslt (not built): no step can be compiled for a GPU; " + rebuild]
            if torch.version.cuda
            else []
        ),
    ]


def test_libraries_are_loaded_once_by_many_threads():
    threads = [threading.Thread(target=native.load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert native.load() == {} or native.has("amp_ir.plan_memory")


LOW_ISA_PROGRAM = """
import torch
from amp_ir.host import native
from native_calls import matmul, relative_error
assert native.function("amp_ir.onednn.isa")() == "avx2"
torch.manual_seed(0)
for dtype, tolerance in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
    assert not native.function("amp_ir.onednn.is_native")(str(dtype)[6:])
    a, b, out = (torch.randn(2, n, m).to(dtype) for n, m in ((17, 33), (33, 21), (17, 21)))
    matmul("onednn", a, b, out)
    assert relative_error(out, a.double() @ b.double()) <= tolerance
"""


def test_a_cpu_without_low_arithmetic_computes_in_float32():
    if not native.has("amp_ir.onednn.isa"):
        pytest.skip("onednn is not in this build")
    if "avx512" not in native.function("amp_ir.onednn.isa")():
        pytest.skip("this CPU cannot be told to be a lesser one")
    done = run_code(LOW_ISA_PROGRAM, {"ONEDNN_MAX_CPU_ISA": "AVX2"}, folders=sys.path)
    assert done.returncode == 0, done.stderr
