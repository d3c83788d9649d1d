# SPDX-License-Identifier: Apache-2.0
"""The inputs of a program: where each one's tensor is, and its view for kernels."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import tvm

from amp_ir.errors import StateError
from amp_ir.ir.captured_step import NumberReader
from amp_ir.ir.held_tensors import HeldTensors
from amp_ir.ir.memory_order import (
    extents_in_memory,
    from_memory,
    in_memory,
    memory_order,
    strides_in_words,
    strides_unless_contiguous,
)
from amp_ir.ir.step_module import InputSpec, Role
from amp_ir.ir.tensor_layout import ALIGNMENT_BYTES, PHYSICAL_DTYPES
from amp_ir.ir.unusable_tensors import memory_error

_PHYSICAL = {getattr(torch, dtype): getattr(torch, seen) for dtype, seen in PHYSICAL_DTYPES.items()}
# Of more, a digest is compared.
_SHOWN_ELEMENTS = 4
State = Mapping[str, "torch.Tensor | Callable[[], torch.Tensor]"]


def flat_view(tensor: torch.Tensor) -> tvm.runtime.Tensor:
    """Return a contiguous tensor as kernels take it: flat, of physical dtype, sharing memory."""
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() != 1:
        flat = flat.view(-1)
    if flat.numel() == 0:
        flat = flat.new_empty(1)
    physical = _PHYSICAL.get(flat.dtype)
    return tvm.runtime.from_dlpack(flat if physical is None else flat.view(physical))


class ProgramInput:
    """The source of one input's tensor; `source` is None for the batch."""

    def __init__(
        self,
        spec: InputSpec,
        source: torch.Tensor | Callable[[], torch.Tensor] | None,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.source = source
        self.device = device
        self.address = 0
        self._dtype = getattr(torch, spec.dtype)
        self._view: tvm.runtime.Tensor | None = None
        # A number of the host, such as a learning rate, as kernels read it, and what it is there.
        self._number: torch.Tensor | None = None
        self._last_number: float | None = None

    @classmethod
    def bind(cls, spec: InputSpec, state: State, device: torch.device) -> ProgramInput:
        """Return the input of a spec, whose tensor is in `state` unless it is of the batch."""
        return cls(spec, state[spec.name] if spec.is_state else None, device)

    def current_view(self) -> tvm.runtime.Tensor:
        """Return the view of the current state tensor, made again only when its memory moved."""
        assert self.source is not None
        if isinstance(self.source, NumberReader):
            return self._view_of_number(self.source.value())
        if not isinstance(self.source, torch.Tensor):
            value = self.source()
            if self.spec.role is Role.GRADIENT:
                self._check(value)
                return self._view_of(value)
            return flat_view(value) if self.device.type == "cpu" else self._on_gpu(value)
        self._check(self.source)
        return self._view_of(self.source)

    def _on_gpu(self, value: torch.Tensor) -> tvm.runtime.Tensor:
        """Return a value on the GPU, without waiting; a number is written when it has changed."""
        if value.dim() or value.device == self.device:
            return self._copied_to_gpu(value)
        return self._view_of_number(float(value))

    def _view_of_number(self, number: float) -> tvm.runtime.Tensor:
        """Return memory that holds a number, written only when that has changed."""
        if self._number is None:
            self._number = torch.empty((), dtype=self._dtype, device=self.device)
        last = self._last_number
        # 0.0 and -0.0 are equal, and a NaN is not equal to itself.
        if number is not last and (number != last or number == 0):
            self._number.fill_(number)
            self._last_number = number
        return self._view_of(self._number)

    def _copied_to_gpu(self, value: torch.Tensor) -> tvm.runtime.Tensor:
        """Copy a tensor that kernels cannot read where it is to memory that stays for the graph."""
        if self._number is None:
            self._number = torch.empty(value.shape, dtype=self._dtype, device=self.device)
        self._number.copy_(value)
        return self._view_of(self._number)

    def _view_of(self, tensor: torch.Tensor) -> tvm.runtime.Tensor:
        address = tensor.data_ptr()
        if self._view is None or address != self.address:
            self._view = flat_view(in_memory(tensor, self.spec.order))
            self.address = address
        return self._view

    def _check(self, tensor: torch.Tensor) -> None:
        error = memory_error(tensor)
        if error:
            raise StateError(f"{self.spec.role.value} {self.spec.name} {error}")
        if tensor.shape != self.spec.shape or tensor.dtype is not self._dtype:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise StateError(
                f"{self.spec.role.value} {self.spec.name} was {self.spec.dtype}"
                f"{list(self.spec.shape)} at the capture and is now {dtype}{list(tensor.shape)}, "
                "changed in its place, as resize_ and .data = do; assign a new tensor instead, for "
                "which amp_ir.jit compiles again, or call amp_ir.trace_step and amp_ir.compile "
                "again"
            )
        if tensor.device != self.device:
            raise StateError(
                f"{self.spec.role.value} {self.spec.name} is on {tensor.device}, and the step was "
                f'compiled for {self.device}; move the model with .to("{self.device}") before the '
                "optimizer is made and the step is captured"
            )
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            raise StateError(
                f"{self.spec.role.value} {self.spec.name} is at an address that is not a multiple "
                f"of {ALIGNMENT_BYTES} bytes, as a slice of another tensor does; give it memory of "
                "its own before the capture: tensor.data = tensor.data.clone()"
            )
        if not in_memory(tensor, self.spec.order).is_contiguous():
            raise StateError(self._layout_error(tensor))

    def _layout_error(self, tensor: torch.Tensor) -> str:
        subject = f"{self.spec.role.value} {self.spec.name}"
        if memory_order(tensor) is None:
            return (
                f"{subject} has elements that overlap or gaps between them in memory (shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}), as expand and slices leave "
                "it; give it memory of its own before the capture: "
                f"{_how_to_make_contiguous(self.spec.role)}"
            )
        extents = extents_in_memory(self.spec.shape, self.spec.order)
        captured = from_memory(torch.empty(extents, device="meta"), self.spec.order)
        was, now = (strides_in_words(strides_unless_contiguous(one)) for one in (captured, tensor))
        return (
            f"{subject} was {was} at the capture and is now {now}, changed in its place, as .data "
            "= does; assign a new tensor instead, for which amp_ir.jit compiles again, or call "
            "amp_ir.trace_step and amp_ir.compile again"
        )


class ComparedInputs:
    """The values of inputs as text, by their names: what ranks compare at each call.

    Of a tensor of many elements it is a digest.
    """

    def __init__(self, inputs: Sequence[ProgramInput]) -> None:
        places = itertools.count()
        # Of the batch, the place in it.
        self._sources = {
            one.spec.name: next(places) if one.source is None else one.source for one in inputs
        }

    def reader(
        self, batch: Sequence[torch.Tensor]
    ) -> Callable[[Sequence[str], bool], dict[str, str]]:
        """Return a function that reads inputs by their names, at a call with this batch.

        What is on a GPU is read only where that may wait.
        """

        def read(names: Sequence[str], may_wait: bool) -> dict[str, str]:  # noqa: FBT001 (a callback)
            found = {}
            for name in names:
                source = self._sources.get(name)
                if isinstance(source, NumberReader):
                    found[name] = str(source.value())
                    continue
                value = batch[source] if isinstance(source, int) else source
                value = value() if callable(value) else value
                if value is not None and (may_wait or value.device.type == "cpu"):
                    found[name] = _as_text(value)
            return found

        return read


def _as_text(value: torch.Tensor) -> str:
    if value.numel() <= _SHOWN_ELEMENTS:
        return str(value.tolist())
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"a tensor [{hashlib.sha256(data).hexdigest()[:16]}]"


class StateViews:
    """The views of a program's state, checked at each call, mostly all at once.

    `version` is another one after each check that finds them changed.
    """

    def __init__(self, inputs: Sequence[ProgramInput]) -> None:
        self._inputs = inputs
        tensors = [one.source for one in inputs if isinstance(one.source, torch.Tensor)]
        self._held = HeldTensors(tensors)
        self._views: list[Any] = []
        self.version = 0
        # Numbers and gradients: read at each call.
        self._read = [
            (position, one)
            for position, one in enumerate(inputs)
            if one.source is not None and not isinstance(one.source, torch.Tensor)
        ]
        self._gradients = [one for one in inputs if one.spec.role is Role.GRADIENT]
        self._distinct: list[int] = []

    def current(self) -> list[Any]:
        """Return the views of all inputs in order as a new list, None for those of the batch.

        Raises:
            StateError: a tensor is not as the program needs it, or a number is none.
        """
        if not self._held.hold():
            self._views = [
                None if one.source is None else one.current_view() for one in self._inputs
            ]
            self._held.remember()
            self.version += 1
            views = list(self._views)
        else:
            views = list(self._views)
            for position, one in self._read:
                views[position] = one.current_view()
        self._refuse_shared_gradients()
        return views

    def _refuse_shared_gradients(self) -> None:
        """Refuse one gradient of two parameters, as a capture does: the program has two."""
        addresses = [one.address for one in self._gradients]
        if addresses == self._distinct:
            return
        owners: dict[int, str] = {}
        for address, one in zip(addresses, self._gradients, strict=True):
            other = owners.setdefault(address, one.spec.name)
            if address and other != one.spec.name:
                raise StateError(
                    f"{other} and {one.spec.name} share memory, where in PyTorch a write to one is "
                    "a write to the other; give each its own before the step: p.grad = "
                    "p.grad.clone() for one of the parameters"
                )
        self._distinct = addresses


def _how_to_make_contiguous(role: Role) -> str:
    """Return code that makes all tensors of a role contiguous."""
    if role is Role.OPTIMIZER_STATE:
        return (
            "for one in optimizer.state.values(): one.update({key: value.contiguous() for key, "
            "value in one.items() if torch.is_tensor(value)})"
        )
    if role in (Role.PARAMETER, Role.BUFFER):
        return (
            "for one in [*model.parameters(), *model.buffers()]: one.data = one.data.contiguous()"
        )
    if role is Role.GRADIENT:
        return "for one in model.parameters(): one.grad = one.grad.contiguous()"
    return "tensor.data = tensor.data.contiguous()"
