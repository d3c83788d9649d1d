# SPDX-License-Identifier: Apache-2.0
"""The low dtype that this CPU computes fastest in, and why."""

from __future__ import annotations

import attrs
import torch

from amp_ir.host import native

LOW_DTYPES = ("bfloat16", "float16")
_QUERY = "amp_ir.onednn.is_native"


@attrs.frozen
class LowDtype:
    """A low dtype and the reason for it, one line for a person."""

    dtype: str
    reason: str


def choose_low_dtype(wanted: str | None = None, device: str = "cpu") -> LowDtype:
    """Return the low dtype that this CPU multiplies in hardware, or `wanted` with its drawbacks.

    bfloat16 comes first where the CPU has both: with float32's exponent it needs no loss scaling.
    GPUs that are compiled for (sm_80 on) have both.
    """
    if device != "cpu":
        name = torch.cuda.get_device_name(device)
        return LowDtype(wanted or "bfloat16", f"{name} multiplies it on tensor cores")
    hardware = [dtype for dtype in LOW_DTYPES if _is_native(dtype)]
    has = f"this CPU multiplies {' and '.join(hardware)} in hardware ({_instructions()})"
    if wanted is not None:
        if wanted in hardware:
            return LowDtype(wanted, f"as asked; {has}")
        return LowDtype(wanted, "as asked; no hardware for it on this CPU: expect it to be slow")
    if "bfloat16" in hardware:
        why = ", whose range needs no loss scaling" if len(hardware) > 1 else ""
        return LowDtype("bfloat16", has + why)
    if hardware:
        return LowDtype(hardware[0], has)
    return LowDtype(
        "bfloat16", f"this CPU ({_instructions()}) has no low-precision hardware: expect no gain"
    )


def _is_native(dtype: str) -> bool:
    """Return whether oneDNN, or PyTorch without oneDNN, reports hardware support for the dtype."""
    if native.has(_QUERY):
        return bool(native.function(_QUERY)(dtype))
    flags = {"bfloat16": "_is_avx512_bf16_supported", "float16": "_is_amx_fp16_supported"}
    return bool(getattr(torch.cpu, flags[dtype], lambda: False)())


def _instructions() -> str:
    if native.has("amp_ir.onednn.isa"):
        return str(native.function("amp_ir.onednn.isa")())
    return torch.backends.cpu.get_cpu_capability()
