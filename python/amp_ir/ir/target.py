# SPDX-License-Identifier: Apache-2.0
"""Compile target: a kind of device, its architecture, and the libraries to call there."""

from __future__ import annotations

import functools
import os
import platform
import re
import reprlib
from typing import Any, Literal

import attrs
import torch
import tvm

from amp_ir.cuda import driver
from amp_ir.errors import DeviceError, OptionError

# Names the CPU that kernels are compiled for, as LLVM calls it: to build or test for a lesser one.
CPU_VARIABLE = "AMP_IR_LLVM_CPU"
# What a CUDA step is compiled for where nothing says otherwise and no GPU is there to ask.
DEFAULT_ARCH = "sm_80"
# LLVM's optimisation level. Its third takes a tenth longer, and makes no kernel faster: they are in
# vectors and blocks already. At its first, losses over a vocabulary take twice the time.
_LLVM_LEVEL = 2
_ARCH = re.compile(r"sm_(\d+)a?")
# Kernels use bfloat16 tensor cores and asynchronous allocation-free reductions: Ampere on.
_OLDEST = 80


@attrs.frozen
class CompileTarget:
    """A kind of device and its architecture.

    `libraries` are the prefixes of library functions (`amp_ir.<library>.<verb>`) that heavy ops
    may go to, the preferred one first. `allow_tf32`: float32 matmuls may round to TF32 there.
    `features`: those of a CPU beyond what `arch` has, as LLVM calls them. `takes_fastest`: an op
    may go to a later one of the libraries where that is faster.
    """

    kind: Literal["cpu", "cuda"]
    arch: str
    libraries: tuple[str, ...]
    allow_tf32: bool = False
    features: tuple[str, ...] = ()
    takes_fastest: bool = True

    @property
    def is_cuda(self) -> bool:
        """Return whether kernels are launched on a GPU."""
        return self.kind == "cuda"

    @property
    def tvm_target(self) -> tvm.target.Target:
        """Return the target in the form of TVM's code generation."""
        if not self.is_cuda:
            features = [*(f"+{one}" for one in self.features), *_unused_features()]
            return tvm.target.Target(
                {"kind": "llvm", "mcpu": self.arch, "mattr": features, "opt-level": _LLVM_LEVEL}
            )
        # The host part only launches: any CPU of this machine's kind may run it.
        return tvm.target.Target({"kind": "cuda", "arch": self.arch}, host="llvm")

    def has(self, feature: str) -> bool:
        """Return whether kernels for a CPU may use the instructions that LLVM calls `feature`."""
        return not self.is_cuda and _has(self, feature)

    def __str__(self) -> str:
        """Return the architecture, as options name it."""
        return self.arch if self.is_cuda else "cpu"


@functools.cache
def _has(target: CompileTarget, feature: str) -> bool:
    return bool(tvm.target.codegen.llvm_cpu_has_features(feature, target.tvm_target))


@functools.cache
def cpu() -> CompileTarget:
    """Return this machine's CPU, or the lesser one that `AMP_IR_LLVM_CPU` names.

    Raises:
        OptionError: LLVM has no CPU of that name.
    """
    host = os.environ.get(CPU_VARIABLE) or tvm.target.codegen.llvm_get_system_cpu()
    known = tvm.target.codegen.llvm_get_cpu_archlist(tvm.target.Target("llvm"))
    if host not in known:
        raise OptionError(
            f"{CPU_VARIABLE}={host} is not a CPU that LLVM knows; expected a name such as "
            '"x86-64-v3", "haswell", "skylake-avx512" or "znver4", or no such variable for this '
            "machine's own"
        )
    # LLVM goes by the model, which a virtual machine may hide.
    is_named = bool(os.environ.get(CPU_VARIABLE))
    more = () if is_named or not torch.cpu._is_avx512_bf16_supported() else ("avx512bf16",)
    return CompileTarget("cpu", host, ("onednn", "torch"), features=more)


def cuda(arch: str | None = None) -> CompileTarget:
    """Return a CUDA GPU of architecture `arch` ("sm_90"); by default the one in this machine.

    TF32 follows PyTorch's current setting: `torch.backends.cuda.matmul.fp32_precision`, or the
    older `allow_tf32`, which sets it.

    Raises:
        OptionError: `arch` is not an architecture, or an older one than sm_80.
    """
    arch = arch or _present_arch() or DEFAULT_ARCH
    found = _ARCH.fullmatch(arch)
    if found is None or int(found[1]) < _OLDEST:
        raise OptionError(
            f"target={arch!r} is not a CUDA architecture that amp_ir compiles for; expected "
            f"sm_{_OLDEST} or newer, such as sm_80 (A100), sm_89 (L4, RTX 40) or sm_90 (H100, H200)"
        )
    # Not `.allow_tf32`: reading that is an error where `fp32_precision` was set.
    allow_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return CompileTarget("cuda", arch, ("cublaslt", "torch_cuda"), allow_tf32)


def parse_target(name: str | torch.device) -> CompileTarget:
    """Return the target called "cpu", "cuda" or by a CUDA architecture ("sm_90"), or of a device.

    Raises:
        OptionError: nothing has that name.
    """
    name = name.type if isinstance(name, torch.device) else name
    if name == "cpu":
        return cpu()
    if name == "cuda":
        return cuda()
    if isinstance(name, str) and name.startswith("sm_"):
        return cuda(name)
    raise OptionError(
        f"target={reprlib.repr(name)} is not known; "
        'expected "cpu", "cuda" or an architecture such as "sm_90"'
    )


def with_libraries(target: CompileTarget, names: str | None) -> CompileTarget:
    """Return the target with only the libraries of `names`: "cublaslt", "onednn,torch", "none".

    None: with those it has. An op that no library takes is a kernel of our own, which is slow for
    large matmuls and convolutions.

    Raises:
        OptionError: the kind of device has no such library.
    """
    if names is None:
        return target
    chosen = () if names == "none" else tuple(names.split(","))
    if not set(chosen) <= set(target.libraries):
        raise OptionError(
            f"--libraries={names}: for target {target} there are {', '.join(target.libraries)}; "
            'name some of them, with commas in between, or "none"'
        )
    return attrs.evolve(target, libraries=chosen)


def target_of(device: Any) -> CompileTarget:
    """Return the target for running on `device`: "cpu", "cuda", "cuda:1" or a torch.device.

    Raises:
        OptionError: no device has that name.
        DeviceError: this machine does not have it, or it is too old.
    """
    name = str(device) if isinstance(device, (str, torch.device)) else ""
    if name == "cpu":
        return cpu()
    if name != "cuda" and re.fullmatch(r"cuda:\d+", name) is None:
        raise OptionError(f'device={device!r} is not a device; expected "cpu" or "cuda"')
    if not torch.cuda.is_available():
        why = "was built without CUDA"
        if torch.version.cuda:
            why = f"sees no GPU: {driver.missing_reason() or 'the driver is older than its CUDA'}"
        raise DeviceError(
            f"device={name!r} is not here: PyTorch {why}. Without a GPU a step can be compiled, "
            "not run: amp-ir compile FILE --target sm_90 --out step.so"
        )
    index = torch.device(name).index or 0
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"device={name!r} is not here: this machine has {torch.cuda.device_count()} GPU(s)"
        )
    major, minor = torch.cuda.get_device_capability(index)
    if 10 * major + minor < _OLDEST:
        raise DeviceError(
            f"device={name!r} is a {torch.cuda.get_device_name(index)} of architecture "
            f"sm_{major}{minor}, and amp_ir compiles for sm_{_OLDEST} (A100) and newer; train on "
            'such a GPU, or on device="cpu"'
        )
    return cuda(f"sm_{major}{minor}")


def _unused_features() -> list[str]:
    """Return the features that LLVM must not use although the CPU has them.

    With float16 arithmetic it would multiply and add in float16 at once, without the rounding in
    between that the plan asks for. Kernels widen float16 when they read it.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ["-avx512fp16"] if is_x86 else []


def _present_arch() -> str | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"
