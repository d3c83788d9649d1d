# SPDX-License-Identifier: Apache-2.0
"""`amp-ir doctor`: what of this machine amp_ir uses, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import torch
from torch import nn

from amp_ir.api import compile_step, trace_step
from amp_ir.compile_cache.cache import compile_cache
from amp_ir.cuda import driver, nvrtc
from amp_ir.errors import AmpIrError
from amp_ir.files.strict_json import strict_json
from amp_ir.host import native
from amp_ir.host.free_memory import memory_nbytes
from amp_ir.host.machine_load import WAIT_ADVICE, waits_awake
from amp_ir.version import VERSION
from amp_ir.vm.build import host_description
from amp_ir.vm.build_library import missing_linker

OK, NOTE, WRONG = "ok", "note", "WRONG"
# Packages that amp_ir pins or works closely with.
_PACKAGES = ("torch", "apache-tvm", "apache-tvm-ffi", "onednn-cpu-gomp", "numpy", "transformers")
_FREE_GIB = 2.0


@attrs.frozen
class Finding:
    """One fact about the machine: ok, a note (it works, slower or less), or wrong.

    `remedy` says what to do, where there is something.
    """

    topic: str
    value: str
    status: str = OK
    remedy: str = ""


@attrs.frozen
class Diagnosis:
    """All findings, in order."""

    findings: tuple[Finding, ...]

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return all(one.status != WRONG for one in self.findings)

    def to_json(self) -> str:
        """Return the findings as JSON."""
        return strict_json([attrs.asdict(one) for one in self.findings]) + "\n"

    def __str__(self) -> str:
        """Return a line for each finding, and one more for what to do; for an issue report too."""
        width = max(len(one.topic) for one in self.findings)
        lines = []
        for one in self.findings:
            lines.append(f"{one.status:<6}{one.topic:<{width}}  {one.value}")
            if one.remedy:
                lines.append(f"{'':<6}{'':<{width}}  -> {one.remedy}")
        counts = [sum(one.status == status for one in self.findings) for status in (WRONG, NOTE)]
        lines.append(f"{counts[0]} wrong, {counts[1]} to note")
        return "\n".join(lines)


def diagnose() -> Diagnosis:
    """Look at the machine; takes a few seconds, and leaves nothing behind."""
    return Diagnosis(tuple(one for part in PARTS for one in part()))


def versions() -> Iterator[Finding]:
    """Look at Python, amp_ir and the packages that it needs in one version."""
    yield Finding("amp_ir", f"{VERSION} in {Path(__file__).parents[1]}")
    yield Finding("Python", f"{platform.python_version()}, {platform.platform()}")
    pins = _pins()
    for name in _PACKAGES:
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in pins:
                yield Finding(name, "not installed", WRONG, f"pip install '{name}=={pins[name]}'")
            continue
        if found.partition("+")[0] == pins.get(name, found.partition("+")[0]):
            yield Finding(name, found)
        else:
            wanted = f"pip install '{name}=={pins[name]}'"
            yield Finding(name, f"{found}, and amp_ir needs {pins[name]}", WRONG, wanted)


def _pins() -> dict[str, str]:
    """Return the packages that this amp_ir was installed with one version of."""
    try:
        required = importlib.metadata.requires("amp_ir") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([\w.-]+)==([\w.]+)", one) for one in required if "extra" not in one)
    return {one[1]: one[2] for one in found if one is not None}


def processor() -> Iterator[Finding]:
    """Look at the CPU: its instructions, threads and load."""
    capability = torch.backends.cpu.get_cpu_capability()
    yield Finding("CPU", f"{host_description()}, PyTorch uses {capability}")
    if native.has_fast_bfloat16():
        yield Finding("bfloat16", "by the CPU's own instructions")
    else:
        remedy = "expect less memory and no speed-up of matmuls from bfloat16 here"
        yield Finding("bfloat16", "emulated around float32", NOTE, remedy)
    threads, usable = torch.get_num_threads(), usable_cpus()
    value = f"{threads}, on {usable} CPUs that this process may use"
    if threads > usable:
        remedy = f"set OMP_NUM_THREADS={usable}, or call torch.set_num_threads({usable})"
        yield Finding("threads", value, NOTE, remedy)
    else:
        yield Finding("threads", value)
    yield from _load(usable)


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, _quota() or count or 1)


def _quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Return the CPUs that a control group grants, rounded up; None without a limit."""
    try:
        granted, period = file.read_text().split()[:2]
        return max(1, -(-int(granted) // int(period)))
    except (OSError, ValueError):
        # No such file, or "max".
        return None


def _load(usable: int) -> Iterator[Finding]:
    if not hasattr(os, "getloadavg"):
        return
    load = os.getloadavg()[0]
    if load > usable + 0.5:
        remedy = "other processes compete; times measured now are not this machine's best"
        remedy += f"; {WAIT_ADVICE}" if waits_awake() else ""
        yield Finding("load", f"{load:.1f} on {usable} CPUs", NOTE, remedy)
    else:
        yield Finding("load", f"{load:.1f}")


def memory() -> Iterator[Finding]:
    """Look at the free memory."""
    found = memory_nbytes()
    if not found:
        return
    free, total = (found.get(name, 0) / 2**30 for name in ("MemAvailable", "MemTotal"))
    value = f"{free:.1f} of {total:.1f} GiB free"
    if free < _FREE_GIB:
        remedy = "free memory, make the batch smaller, or pass memory_budget= to amp_ir.jit"
        yield Finding("memory", value, NOTE, remedy)
    else:
        yield Finding("memory", value)


def libraries() -> Iterator[Finding]:
    """Look at the native libraries, and at a C++ compiler for files of steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            missing = native.load()
        except AmpIrError as error:
            yield Finding("libraries", str(error), WRONG, f"change {native.DISABLE_VARIABLE}")
            return
    disabled = os.environ.get(native.DISABLE_VARIABLE, "")
    there = [one for one in native.CONSEQUENCES if one not in missing and one not in disabled]
    yield Finding("libraries", ", ".join(there))
    for name, reason in missing.items():
        status = WRONG if name == "passes" else NOTE
        remedy = native.remedy_of(name)
        yield Finding(name, f"{reason}: {native.CONSEQUENCES[name]}", status, remedy)
    if disabled:
        remedy = f"unset {native.DISABLE_VARIABLE} to have them"
        yield Finding("disabled", disabled, NOTE, remedy)
    reason = missing_linker()
    if reason:
        remedy = "install g++; it is needed by the compile cache, amp_ir.save and amp-ir compile"
        yield Finding("linker", reason, NOTE, remedy)
    else:
        yield Finding("linker", "there is one")


def gpu() -> Iterator[Finding]:
    """Look at CUDA: PyTorch's, the driver, the compiler, the devices."""
    if torch.version.cuda is None:
        remedy = "steps run on the CPU; for a GPU install PyTorch with CUDA (pytorch.org)"
        yield Finding("CUDA", "PyTorch is built without it", OK, remedy)
        return
    if not torch.cuda.is_available():
        remedy = "check nvidia-smi and the driver; steps for a GPU can be compiled all the same"
        yield Finding("CUDA", f"{torch.version.cuda}, no device is seen", NOTE, remedy)
        return
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        value = f"{facts.name}, sm_{facts.major}{facts.minor}, {facts.total_memory / 2**30:.0f} GiB"
        yield Finding(f"cuda:{number}", value)
    reason = driver.missing_reason()
    if reason:
        yield Finding("driver", reason, WRONG, "install a driver that fits PyTorch's CUDA")
    if nvrtc.find() is None:
        remedy = "pip install nvidia-cuda-nvrtc-cu12 (or the CUDA that PyTorch has)"
        yield Finding("NVRTC", "not found: kernels cannot be compiled", WRONG, remedy)


def caches() -> Iterator[Finding]:
    """Look at the folder of compiled steps."""
    try:
        cache = compile_cache()
    except AmpIrError as error:
        yield Finding("compile cache", str(error), WRONG, "change the variable, or unset it")
        return
    if cache is None:
        remedy = (
            "every start of a script compiles again; unset AMP_IR_CACHE, or name a folder in it"
        )
        yield Finding("compile cache", "off", NOTE, remedy)
        return
    directory = cache.files.directory
    reason = _why_not_writable(directory)
    if reason:
        remedy = "make it writable, or name another folder in AMP_IR_CACHE"
        yield Finding("compile cache", f"{directory}: {reason}", NOTE, remedy)
        return
    entries = cache.files.entries()
    size = sum(one.nbytes for one in entries) / 2**20
    yield Finding("compile cache", f"{directory}: {len(entries)} steps, {size:.1f} MiB")


def _why_not_writable(directory: Path) -> str:
    """Return why no file can be written there; "" where it can. Makes nothing that stays."""
    place = directory
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def variables() -> Iterator[Finding]:
    """List the variables of the environment that change what amp_ir or its threads do."""
    names = ("AMP_IR_", "OMP_", "KMP_", "ATEN_CPU_", "ONEDNN_", "DNNL_", "TVM_", "CUDA_VISIBLE")
    found = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(names)]
    if found:
        yield Finding("environment", ", ".join(found))


def small_step() -> Iterator[Finding]:
    """Compile a small step, and compare it with PyTorch."""
    started = time.perf_counter()
    # The user's random numbers stay as they are.
    generator = torch.Generator().manual_seed(0)
    model = nn.utils.skip_init(nn.Linear, 8, 4)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn(one.shape, generator=generator))
    x = torch.randn(16, 8, generator=generator)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = torch.tanh(model(x)).square().mean()
        loss.backward()
        return loss.detach()

    expected = float(step(x))
    gradient = model.weight.grad.clone()
    model.zero_grad()
    try:
        got = float(compile_step(trace_step(step, (x,), model=model)[0])(x))
    except (AmpIrError, RuntimeError, OSError) as error:
        remedy = "run python -m amp_ir.selftest, and report what it prints"
        yield Finding("small step", f"{type(error).__name__}: {error}", WRONG, remedy)
        return
    off = max(abs(got - expected), float((model.weight.grad - gradient).abs().max()))
    value = f"compiled and run in {time.perf_counter() - started:.1f} s"
    if off < 1e-5:
        yield Finding("small step", f"{value}, as PyTorch's")
    else:
        remedy = "run python -m amp_ir.selftest, and report what it prints"
        yield Finding("small step", f"{value}, {off:.1e} off PyTorch's", WRONG, remedy)


PARTS: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions, processor, memory, libraries, gpu, caches, variables, small_step,
)  # fmt: skip
