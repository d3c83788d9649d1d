# SPDX-License-Identifier: Apache-2.0
"""Guards on modules and parameters: modes, submodules, hooks, `forward`, kinds of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import attrs
import torch
from torch.utils.hooks import RemovableHandle

from amp_ir.capture.guards.gradient_flags import GradientFlags
from amp_ir.capture.guards.objects import Tier
from amp_ir.capture.state import StateTensor
from amp_ir.ir.memory_order import strides_in_words, strides_unless_contiguous

try:
    # Not part of PyTorch's public interface; without it, kinds are compared in Python.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

_MODULE = torch.nn.modules.module
_HOOK_TABLES = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks",
    "_global_backward_pre_hooks", "_global_buffer_registration_hooks",
    "_global_module_registration_hooks", "_global_parameter_registration_hooks",
)  # fmt: skip


def _global_hooks() -> tuple[int, ...]:
    return tuple(id(hook) for name in _HOOK_TABLES for hook in getattr(_MODULE, name, {}).values())


_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
_OF_TENSORS = {
    "_backward_hooks": "gradient hooks",
    "_post_accumulate_grad_hooks": "post-accumulate gradient hooks",
}
_TENSOR_GETTERS = tuple(attrgetter(name) for name in _OF_TENSORS)
_forward_of = attrgetter("forward")


class HookCount:
    """The number of hooks registered in the process when all were last found unchanged.

    Registering a hook, of a module or tensor, creates a RemovableHandle, which counts them.
    """

    def __init__(self) -> None:
        self.refresh()

    def holds(self) -> bool:
        """Return whether no hook was added anywhere since."""
        return RemovableHandle.next_id == self._count

    def refresh(self) -> None:
        """Record all hooks as unchanged."""
        self._count = RemovableHandle.next_id


@attrs.frozen(eq=False)
class _Seen:
    """The attributes of a module that the guards compare, as they were at the capture."""

    module: torch.nn.Module
    name: Callable[[], str]
    training: bool
    children: tuple[Any, ...]
    tensors: tuple[tuple[str, Any], ...]
    hooks: tuple[tuple[int, ...], ...]
    forward: Any
    kind: type

    @classmethod
    def of(cls, module: torch.nn.Module, name: Callable[[], str]) -> _Seen:
        """Return the module as it is now."""
        return cls(module, name, *_form(module))

    def changes(self) -> Iterator[str]:
        """Describe what differs now."""
        training, children, tensors, hooks, forward, kind = _form(self.module)
        name = self.name()
        if training != self.training:
            modes = ("train", "eval") if training else ("eval", "train")
            yield f"{name} is in {modes[0]} mode now, and was in {modes[1]} mode"
        if children != self.children or [key for key, _ in tensors] != [k for k, _ in self.tensors]:
            yield f"{name} has other submodules or parameters"
        for (key, now), (_, before) in zip(tensors, self.tensors, strict=False):
            if now is not before:
                path = name.removeprefix("module ").replace("(the model itself)", "")
                yield f"{path}{'.' if path else ''}{key} was replaced by another tensor"
        for word, now_hooks, before_hooks in zip(_HOOKS.values(), hooks, self.hooks, strict=True):
            if now_hooks != before_hooks:
                yield f"{name} has other {word}: {len(before_hooks)} then, {len(now_hooks)} now"
        if forward is not self.forward or kind is not self.kind:
            yield f"{name} has another forward"


def _form(module: torch.nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    return (
        module.training,
        tuple((key, id(child)) for key, child in module._modules.items()),
        (*module._parameters.items(), *module._buffers.items()),
        tuple(tuple(map(id, own.get(key, {}).values())) for key in _HOOKS),
        own.get("forward", getattr(type(module), "forward", None)),
        type(module),
    )


class GuardedModules:
    """The modules of the models, and those that ran.

    `dictionaries` are the dictionaries to watch: a new version means a possible change.
    """

    def __init__(self, modules: list[tuple[torch.nn.Module, Callable[[], str]]]) -> None:
        self._seen = [_Seen.of(module, name) for module, name in modules]
        self._modules = [one.module for one in self._seen]
        self._classes = list(map(type, self._modules))
        self._kinds = list({id(one.kind): one.kind for one in self._seen}.values())
        self._forwards = list(map(_forward_of, self._kinds))
        self._global_hooks = _global_hooks()
        self._count = HookCount()
        self.dictionaries: list[dict[Any, Any]] = [vars(one.module) for one in self._seen]
        # Most tables of most modules are empty, and whether they are is asked in less time.
        self._empty: list[dict[Any, Any]] = []
        for one in self._seen:
            module = one.module
            for table in (module._modules, module._parameters, module._buffers):
                (self.dictionaries if table else self._empty).append(table)
            hooks = [vars(module).get(key) for key in _HOOKS]
            self.dictionaries += [table for table in hooks if table]

    def hold(self) -> bool:
        """Return whether nothing differs, given that nothing was written to `dictionaries`."""
        # A new hook is counted; one that goes is not.
        return (
            self._count.holds()
            and not any(self._empty)
            and not (self._global_hooks and _global_hooks() != self._global_hooks)
            and list(map(_forward_of, self._kinds)) == self._forwards
            # Another class writes to no dictionary.
            and list(map(type, self._modules)) == self._classes
        )

    def refresh(self) -> None:
        """Record everything as unchanged."""
        self._count.refresh()

    def changes(self) -> Iterator[str]:
        """Describe what differs."""
        for one in self._seen:
            yield from one.changes()
        hooks = _global_hooks()
        if hooks != self._global_hooks:
            yield f"modules have {len(hooks)} global hooks, and had {len(self._global_hooks)}"


_Kind = tuple[bool, torch.dtype, torch.device, torch.Size, tuple[int, ...] | None]


class GuardedParameters:
    """Kinds and hooks of the parameters; `equal` are flags with which the step is the same."""

    def __init__(self, parameters: list[StateTensor], equal: GradientFlags | None = None) -> None:
        self._parameters = parameters
        self._equal = equal
        self._tensors = [parameter.tensor for parameter in parameters]
        self._kinds = [_kind(tensor) for tensor in self._tensors]
        self._hooks = [_hooks(tensor) for tensor in self._tensors]
        self._count = HookCount()
        self._with = [
            (tensor, hooks)
            for tensor, hooks in zip(self._tensors, self._hooks, strict=True)
            if any(hooks)
        ]
        self._refresh()

    def tier(self) -> Tier:
        """Return these guards as a tier."""
        return Tier(self._hold, self._changes, self._refresh)

    def _refresh(self) -> None:
        self._count.refresh()
        if TensorGuards is None:
            self._check = lambda *tensors: list(map(_kind, tensors)) == self._kinds
        else:
            guards = TensorGuards(
                *self._tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
            )
            self._check = guards.check

    def _hold(self) -> bool:
        return (
            self._check(*self._tensors)
            and self._count.holds()
            and all(_hooks(tensor) == hooks for tensor, hooks in self._with)
        )

    def _changes(self) -> Iterator[str]:
        # All of them, for a mixture may be another step.
        equal = self._equal if self._equal is not None and self._equal.is_left() else None
        for parameter, kind, hooks in zip(self._parameters, self._kinds, self._hooks, strict=True):
            now = _kind(parameter.tensor)
            if equal is not None and equal.has(parameter.tensor):
                kind = (now[0], *kind[1:])
            if now != kind:
                yield f"parameter {parameter.name} {_kind_in_words(kind, now)}"
            for word, before, present in zip(
                _OF_TENSORS.values(), hooks, _hooks(parameter.tensor), strict=True
            ):
                if before != present:
                    yield (
                        f"parameter {parameter.name} has other {word}: {len(before)} then, "
                        f"{len(present)} now"
                    )


def _hooks(tensor: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(id, (getter(tensor) or {}).values())) for getter in _TENSOR_GETTERS)


def _kind(tensor: torch.Tensor) -> _Kind:
    """Return the properties that the graph depends on and the user may change."""
    strides = strides_unless_contiguous(tensor)
    return tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape, strides


def _kind_in_words(before: _Kind, now: _Kind) -> str:
    """Describe the difference, as "was ... and is ..."."""
    words = []
    for kind, other in ((before, now), (now, before)):
        requires_grad, dtype, device, shape, strides = kind
        texts = (
            *("trained" if requires_grad else "frozen", dtype, f"on {device}", tuple(shape)),
            strides_in_words(strides),
        )
        differing = [str(t) for t, a, b in zip(texts, kind, other, strict=True) if a != b]
        words.append(", ".join(differing))
    return f"was {words[0]} and is {words[1]}"
