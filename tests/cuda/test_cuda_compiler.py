# SPDX-License-Identifier: Apache-2.0
"""CUDA source becomes machine code without a GPU, is kept, and tells what it holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys

import pytest
import torch
import tvm
from tvm import tirx

from amp_ir.cuda import compiler, driver, machine_code, nvcc, nvrtc, toolkit
from amp_ir.cuda.cubin_cache import CubinCache, key
from amp_ir.cuda.prelude import PRELUDE
from amp_ir.errors import BuildError, DeviceError, OptionError
from amp_ir.ir import target
from cuda_kernels import allocate, load, local, loop, one_launch, parameter, sequence, store, vector
from kernel_accesses import Accesses, accesses_of, disassemble

SOURCE = """
extern "C" __global__ void __launch_bounds__(128) scaled(float4* x, float divisor) {
  float4 v = x[threadIdx.x];
  v.x /= divisor, v.y /= divisor, v.z = sqrtf(v.z), v.w = __expf(v.w);
  x[threadIdx.x] = v;
}
extern "C" __global__ void __launch_bounds__(128) indexed(float* x, int k) {
  __shared__ float seen[32];
  float own[256];  // more than registers are, which some compilers would choose from instead
  for (int i = 0; i < 256; ++i) own[i] = x[i];
  own[k] = 1;
  seen[threadIdx.x % 32] = own[threadIdx.x % 256];
  __syncthreads();
  x[threadIdx.x] = seen[k % 32] + own[k / 2];
}
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    """A cache that nothing is in, and that goes away."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_machine_code_tells_registers_memory_and_wide_accesses(arch):
    cubin = compiler.compile_source(SOURCE, arch)
    indexed, scaled = machine_code.kernels_of(cubin)
    assert (indexed.name, indexed.shared_nbytes, indexed.frame_nbytes) == ("indexed", 128, 1024)
    assert (scaled.name, scaled.shared_nbytes, scaled.frame_nbytes) == ("scaled", 0, 0)
    assert 8 <= scaled.registers <= 64
    accesses = accesses_of(cubin)
    assert accesses["scaled"] == Accesses(1, 1, 1, 1, 0)
    assert accesses["indexed"].local > 0
    assert accesses["indexed"].wide_global_stores == 0


@pytest.mark.parametrize(
    ("expression", "exact"),
    [
        # Fast math flushes subnormals and divides by a reciprocal's estimate, without the check for
        # operands where that goes wrong.
        ("x[1] * x[2] + x[3]", lambda instructions: ".FTZ" not in instructions),
        ("x[1] / x[2]", lambda instructions: "FCHK" in instructions),
    ],
)
def test_arithmetic_is_exact(expression, exact):
    source = f'extern "C" __global__ void exact(float* x) {{ x[0] = {expression}; }}'
    assert exact(disassemble(compiler.compile_source(source, "sm_90")))


@pytest.mark.parametrize("find", [nvrtc.find, nvcc.find], ids=["nvrtc", "nvcc"])
def test_every_compiler_makes_a_cubin(find):
    found = find()
    if found is None:
        pytest.skip("this machine does not have it")
    cubin = compiler.compile_source(SOURCE, "sm_90", compiler=found)
    assert [kernel.name for kernel in machine_code.kernels_of(cubin)] == ["indexed", "scaled"]


def test_an_unknown_architecture_is_refused_with_those_there_are():
    with pytest.raises(OptionError) as caught:
        compiler.compile_source(SOURCE, "sm_77")
    known = ", ".join(compiler.architectures())
    assert {"sm_80", "sm_90"} <= set(compiler.architectures())
    identity = compiler.find_compiler().identity
    assert str(caught.value) == (
        f"'sm_77' is not an architecture that {identity} compiles for; expected one of {known}"
    )


def test_a_kernel_that_does_not_compile_is_shown_with_the_log():
    with pytest.raises(BuildError) as caught:
        compiler.compile_source(SOURCE.replace("sqrtf(v.z)", "sqroot(v.z)"), "sm_90")
    identity = re.escape(compiler.find_compiler().identity)
    begun, first, second, third, fourth = (re.escape(line) for line in SOURCE.splitlines()[1:6])
    # Between them is the compiler's log.
    assert re.fullmatch(
        rf"{identity} refuses a generated kernel for sm_90; please report this message\.\n"
        r'.*identifier "sqroot" is undefined.*\n'
        rf"The kernel:\n{begun}\n    3 {first}\n    4 {second.replace('sqrtf', 'sqroot')}\n"
        rf"    5 {third}",
        str(caught.value),
        re.DOTALL,
    ), caught.value


def test_a_library_that_is_not_there_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(BuildError) as caught:
        driver._load_first("libnothing.so.13", None)
    assert str(caught.value) == (
        f"libnothing.so.13 was not found, which TVM's CUDA runtime needs; {toolkit.PIP_REMEDY}"
    )
    damaged = tmp_path / "libnothing.so.13"
    damaged.write_bytes(b"no library")
    with pytest.raises(BuildError) as caught:
        driver._load_first("libnothing.so.13", damaged)
    assert str(caught.value) == (
        f"libnothing.so.13 cannot be loaded ({damaged}: file too short); {toolkit.PIP_REMEDY}"
    )


def test_no_compiler_is_an_error_with_the_remedy(monkeypatch):
    monkeypatch.setattr(nvrtc, "find", lambda: None)
    monkeypatch.setattr(nvcc, "find", lambda: None)
    with pytest.raises(BuildError) as caught:
        compiler.find_compiler()
    assert str(caught.value) == (
        "no CUDA compiler was found: neither NVRTC with its headers among the pip packages or in "
        'CUDA_HOME, nor nvcc on the path; pip install "amp_ir[cuda]" (the wheels '
        "nvidia-cuda-nvrtc and nvidia-cuda-runtime, which PyTorch's CUDA builds bring too), or put "
        "nvcc of CUDA 13 on the path"
    )


def test_without_a_toolkit_nothing_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(toolkit, "roots", lambda: (tmp_path,))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert toolkit.library("libnvrtc.so.1?") is None
    assert toolkit.header_directory() is None
    assert toolkit.tool("nvcc") is None


# The cache


class CountingCompiler:
    """NVRTC's stand-in: counts how often it is asked."""

    identity = "counting 1.0"

    def __init__(self) -> None:
        self.count = 0

    def architectures(self):
        return ("sm_90",)

    def compile(self, source, arch, options):
        self.count += 1
        return source.encode(), ""


def test_the_same_source_compiles_once():
    counting = CountingCompiler()
    for source in ("a", "b", "a", "b"):
        cubin = compiler.compile_source(source, "sm_90", compiler=counting)
        assert cubin == (PRELUDE + source).encode()
    assert counting.count == 2


@pytest.mark.parametrize("instruction", ["F2FP.BF16", "FMNMX.NAN"])
def test_functions_of_the_prelude_are_one_instruction(instruction):
    source = """extern "C" __global__ void k(float* x, unsigned short* y) {
        *y = amp_ir_bfloat16_bits(amp_ir_maximum(x[0], amp_ir_minimum(x[1], x[2])));
    }"""
    assert instruction in disassemble(compiler.compile_source(source, "sm_90"))


def test_the_prelude_compiles_for_what_lacks_the_instructions():
    oldest = min(compiler.architectures(), key=lambda arch: int(arch[3:]))
    assert compiler.compile_source('extern "C" __global__ void k() {}', oldest)


def test_what_decides_the_code_is_in_its_name():
    assert key(["ab", "c"]) != key(["a", "bc"])
    assert key(["a"]) == key(["a"])


def test_the_cache_drops_what_was_unused_for_longest(tmp_path):
    cache = CubinCache(tmp_path, limit_nbytes=2500)
    for age, name in enumerate("abc"):
        cache.put(name, bytes(1000))
        os.utime(tmp_path / name, ns=(age, age)) if (tmp_path / name).exists() else None
        if name == "b":
            assert cache.get("a") is not None  # now the newest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def test_a_cache_that_cannot_be_written_is_an_empty_one(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    cache = CubinCache(file / "cache")
    cache.put("a", b"1")
    assert cache.get("a") is None


def _write_often(directory, letter) -> None:
    cache = CubinCache(directory, limit_nbytes=1 << 20)
    for k in range(50):
        cache.put(f"name{k % 5}", letter * 10000)


def test_parallel_writers_leave_whole_files(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(tmp_path, one)) for one in (b"a", b"b")]
    for writer in writers:
        writer.start()
    cache = CubinCache(tmp_path, limit_nbytes=1 << 20)
    while any(writer.is_alive() for writer in writers):
        for k in range(5):
            assert cache.get(f"name{k}") in (None, b"a" * 10000, b"b" * 10000)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert {path.suffix for path in tmp_path.iterdir()} == {""}


# TVM


def copied(dtype: str, lanes: int):
    """y = x of 1024 elements, 16 bytes at a time."""
    x, y = parameter(1024, dtype, "x"), parameter(1024, dtype, "y")
    own = local(lanes, dtype, "own")

    def body(block, thread):
        at = vector((block * 64 + thread) * lanes, lanes)
        kept = loop(lanes, lambda i: store(own, i, load(own, i) + tirx.const(1, dtype)))
        whole = vector(0, lanes)
        return sequence(
            allocate(own), store(own, whole, load(x, at)), kept, store(y, at, load(own, whole))
        )

    return tirx.PrimFunc([x, y], one_launch(16 // lanes, 64, body))


@pytest.mark.parametrize(
    ("dtype", "lanes"), [("float16", 8), ("uint16", 8), ("float32", 4), ("uint8", 16), ("int64", 2)]
)
def test_tvm_builds_modules_that_hold_machine_code(dtype, lanes, tmp_path):
    driver.prepare_build()
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")
    function = copied(dtype, lanes).with_attr("global_symbol", "copied")
    with target:
        built = tvm.compile(tvm.IRModule({"copied": function}), target=target)
    (cubin,) = machine_code.cubins_of(built.mod, "sm_90")
    assert accesses_of(cubin)["copied_kernel"] == Accesses(1, 1, 1, 1, 0)
    path = tmp_path / "copied.so"
    built.export_library(str(path))
    content = path.read_bytes()
    assert cubin in content
    assert b"__global__" not in content


def test_a_build_without_a_target_is_refused():
    driver.prepare_build()
    compile_for_tvm = tvm.get_global_func("tvm_callback_cuda_compile")
    with pytest.raises(BuildError) as caught:
        compile_for_tvm(SOURCE)
    # TVM adds where in its own code it was.
    assert str(caught.value).splitlines()[0] == (
        "TVM asks for CUDA machine code outside of a target; build inside `with target:`, where "
        'target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})'
    )


def test_a_gpu_that_pytorch_does_not_see_is_refused_with_the_drivers_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(driver, "missing_reason", lambda: "this machine has no NVIDIA driver")
    with pytest.raises(DeviceError) as caught:
        target.target_of("cuda")
    assert str(caught.value) == (
        "device='cuda' is not here: PyTorch sees no GPU: this machine has no NVIDIA driver. "
        "Without a GPU a step can be compiled, not run: amp-ir compile FILE --target sm_90 --out "
        "step.so"
    )


def test_the_stub_is_not_taken_for_a_driver():
    driver.load_runtime()
    assert (driver.missing_reason() is None) == tvm.cuda(0).exist


def test_users_of_the_cpu_load_nothing_of_cuda():
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    script = (
        "import torch, tvm\n"
        "before = open('/proc/self/maps').read()\n"
        "import amp_ir, amp_ir.host.native\n"
        "amp_ir.jit\n"
        "amp_ir.host.native.load()\n"
        "import json; print(json.dumps([before, open('/proc/self/maps').read()]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # A CUDA build of PyTorch has loaded its own NVRTC.
    before, after = (
        {line.rsplit("/", 1)[-1] for line in maps.splitlines() if ".so" in line}
        for maps in json.loads(done.stdout)
    )
    assert not {name for name in after - before if "nvrtc" in name or "cuda" in name}
