# SPDX-License-Identifier: Apache-2.0
"""A built step with its arena and the tensors it works on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
import tvm

from amp_ir.errors import StateError
from amp_ir.executable import Executable
from amp_ir.memory_plan import MemoryPlan
from amp_ir.module import InputSpec, OutputSpec, Role, Signature

# Kernels see these dtypes as integers of the same width (loops/kernel_buffers.py says why).
_PHYSICAL = {torch.bfloat16: torch.uint16, torch.bool: torch.uint8}

# Kernels load whole vectors; PyTorch's allocator gives such addresses, a slice of a tensor may not.
ALIGNMENT_BYTES = 64

State = Mapping[str, "torch.Tensor | Callable[[], torch.Tensor]"]


def flat_view(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    """A dense tensor as kernels take it: flat, of physical dtype, sharing memory."""
    flat = tensor.detach().view(-1) if tensor.dim() != 1 else tensor.detach()
    if flat.numel() == 0:
        flat = flat.new_empty(1)
    physical = _PHYSICAL.get(flat.dtype)
    return tvm.runtime.from_dlpack(flat if physical is None else flat.view(physical))


def _placed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the batch as kernels can read it: dense and aligned; copied if it is not."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor


class Program:
    """Runs a planned step on given state tensors, which it updates in place."""

    def __init__(
        self, executable: Executable, plan: MemoryPlan, signature: Signature, state: State
    ) -> None:
        self.executable = executable
        self.plan = plan
        self.signature = signature
        self._main = executable.vm["main"]
        self._arena = torch.empty(max(plan.arena_bytes, 1), dtype=torch.uint8)
        self._arena_view = flat_view(self._arena)
        self._inputs = [_Input.bind(spec, state) for spec in signature.inputs]
        self._lock = threading.Lock()
        self.check_state()

    def check_state(self) -> None:
        """Make sure that a run can take the state as it is now.

        Raises:
            StateError: a tensor has another shape or dtype than the program, or is not dense; or
                a hyper-parameter is no number any more.
        """
        for one in self._inputs:
            if one.source is not None:
                one.current_view()

    def run(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One step; returns the outputs that update no input, in order."""
        results = [
            torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in self.signature.outputs
            if spec.updates is None
        ]
        tensors = iter(batch)
        with self._lock:
            arguments = [
                flat_view(_placed(next(tensors))) if one.source is None else one.current_view()
                for one in self._inputs
            ]
            self._main(self._arena_view, *arguments, *map(flat_view, results))
        return results

    def results_of(
        self, outputs: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Split the outputs of `run` into results and gradients."""
        specs: list[OutputSpec] = [s for s in self.signature.outputs if s.updates is None]
        pairs = list(zip(specs, outputs, strict=True))
        results = [tensor for spec, tensor in pairs if spec.role is Role.RESULT]
        gradients = [tensor for spec, tensor in pairs if spec.role is Role.GRADIENT]
        return results, gradients


class _Input:
    """Where one input's tensor comes from; `source` is None for the batch."""

    def __init__(
        self, spec: InputSpec, source: torch.Tensor | Callable[[], torch.Tensor] | None
    ) -> None:
        self.spec = spec
        self.source = source
        self._dtype = getattr(torch, spec.dtype)
        self._address = 0
        self._view: tvm.runtime.Tensor | None = None

    @classmethod
    def bind(cls, spec: InputSpec, state: State) -> _Input:
        return cls(spec, state[spec.name] if spec.is_state else None)

    def current_view(self) -> tvm.runtime.Tensor:
        """The state tensor as it is now; the view is made anew only when its memory moved."""
        if not isinstance(self.source, torch.Tensor):
            assert self.source is not None
            return flat_view(self.source())
        self._check(self.source)
        address = self.source.data_ptr()
        if self._view is None or address != self._address:
            self._view = flat_view(self.source)
            self._address = address
        return self._view

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.shape != self.spec.shape or tensor.dtype is not self._dtype:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise StateError(
                f"{self.spec.role.value} {self.spec.name} was {self.spec.dtype}"
                f"{list(self.spec.shape)} at the capture and is now {dtype}{list(tensor.shape)}; "
                "capture and compile the step again"
            )
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            raise StateError(
                f"{self.spec.role.value} {self.spec.name} lies at an address that is no multiple "
                f"of {ALIGNMENT_BYTES} bytes, as a slice of another tensor does; give it memory of "
                "its own before the capture: tensor.data = tensor.data.clone()"
            )
        if not tensor.is_contiguous():
            raise StateError(
                f"{self.spec.role.value} {self.spec.name} is not contiguous "
                f"(strides {tuple(tensor.stride())}); make it so before the capture: "
                "tensor.data = tensor.data.contiguous()"
            )
