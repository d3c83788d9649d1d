# SPDX-License-Identifier: Apache-2.0
"""The tensors of a converted model: copies, shared by its programs for all shapes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import attrs
import torch

from amp_ir.errors import OptionError, StateError
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.rewrites.fold_parameters import Computed

# What identifies a tensor: its own recipe, and those of the values that it is computed from.
_Key = tuple[str, ...]


@attrs.define(eq=False)
class StoredParameters:
    """Tensors by name, and what each was computed from.

    A tensor of the model that a program reads as it is becomes a copy: training the model, or
    loading other weights into it, does not change what was converted.
    """

    tensors: dict[str, torch.Tensor] = attrs.field(factory=dict)
    _names: dict[_Key, str] = attrs.field(factory=dict)
    _digests: dict[str, str] = attrs.field(factory=dict)
    # Values of the program that is being made that may never be needed as they are.
    _pending: dict[str, _Key] = attrs.field(factory=dict)

    def begin(self, mod: StepModule) -> None:
        """Begin a program; the model's own tensors must be as they were for the first one.

        Raises:
            StateError: some have changed.
        """
        self._pending = {}
        roles = (Role.PARAMETER, Role.BUFFER)
        owned = {one.name for one in mod.signature.inputs if one.role in roles}
        changed = []
        for name, tensor in mod.state.items():
            if name in owned and isinstance(tensor, torch.Tensor):
                digest = _digest(tensor)
                if self._digests.setdefault(name, digest) != digest:
                    changed.append(name)
        if changed:
            listed = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
            raise StateError(
                f"the model's {listed} changed after amp_ir.convert_model, which copied them; a "
                "program for another shape would mix old and new values. Convert the model again"
            )

    def postpone(self, computed: Computed) -> tuple[str, Callable[[], torch.Tensor]]:
        """Return a name, and what computes the value: a low copy may be all that is needed."""
        name = _free_name(computed.name, {*computed.taken, *self._pending})
        self._pending[name] = self._key(computed)
        return name, computed.value

    def store(self, computed: Computed) -> tuple[str, torch.Tensor]:
        """Return the name and the tensor of a value, computed when first asked for.

        Raises:
            OptionError: a finite value is infinite in float16.
        """
        name = self._stored(self._key(computed), computed.name, computed.value)
        value = self.tensors[name]
        if value.dtype is torch.float16:
            _refuse_overflow(computed.name, value)
        # Only within the program: `finish` gives inputs the names of their tensors.
        return _free_name(name, computed.taken), value

    def finish(self, mod: StepModule) -> StepModule:
        """Return the program on stored tensors alone, its inputs named after these."""
        names = {id(one): name for name, one in self.tensors.items()}
        state: dict[str, Any] = {}
        inputs = []
        for one in mod.signature.inputs:
            if one.is_state:
                held = mod.state[one.name]
                key = self._pending.get(one.name, (one.name,))
                make = functools.partial(_copied, held)
                name = names.get(id(held)) or self._stored(key, one.name, make)
                state[name] = self.tensors[name]
                one = attrs.evolve(one, name=name, order=())  # a contiguous copy
            inputs.append(one)
        signature = attrs.evolve(mod.signature, inputs=tuple(inputs))
        return attrs.evolve(mod, signature=signature, state=state)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(one.numel() * one.element_size() for one in self.tensors.values())

    def _key(self, computed: Computed) -> _Key:
        parts = (self._pending.get(source, (source,)) for source in computed.sources)
        return (computed.recipe, *(text for part in parts for text in part))

    def _stored(self, key: _Key, name: str, value: Callable[[], torch.Tensor]) -> str:
        if key not in self._names:
            self._names[key] = _free_name(name, self.tensors)
            self.tensors[self._names[key]] = value()
        return self._names[key]


def _free_name(name: str, taken: Any) -> str:
    found, count = name, 1
    while found in taken:
        count += 1
        found = f"{name}.{count}"
    return found


def _copied(held: Any) -> torch.Tensor:
    """Return a tensor of its own memory; a value that was postponed has that already."""
    if callable(held):
        value: torch.Tensor = held()
        return value
    copy: torch.Tensor = held.detach().clone(memory_format=torch.contiguous_format)
    return copy


def _digest(tensor: torch.Tensor) -> str:
    """Return what tells values apart: `.data =`, NumPy and fused optimizers leave the version."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype}{tuple(tensor.shape)}{hashlib.sha256(flat.numpy().data).hexdigest()}"


def _refuse_overflow(name: str, value: torch.Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise OptionError(
            f'{name}: a value is beyond float16\'s range (65504). Convert to "bfloat16", or '
            "exclude its module with excluded_names="
        )
