# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step as a flat list of tensors, and its results built up again."""

from __future__ import annotations

import dataclasses
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from amp_ir.errors import ArgumentError, ShapeChanged

_ANEW = "Call it as it was captured, or capture (jit) the step again"
PLAIN = (
    int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device,
    torch.memory_format, torch.Size, slice, type(Ellipsis),
)  # fmt: skip


@attrs.frozen
class Arguments:
    """The structure of the captured arguments.

    `leaves` holds a tensor (its shape, dtype and device count) or the plain value that is frozen
    into the graph; `paths` says in words where each leaf is.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...] = attrs.field(eq=False)
    paths: tuple[str, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Arguments:
        """The structure of an example."""
        found, spec = pytree.tree_flatten_with_path(args)
        paths = tuple("argument " + _path_text(path) for path, _ in found)
        return cls(spec, tuple(leaf for _, leaf in found), paths)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        """The arguments with other tensors in the places of the example's."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def flatten(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        """The tensors of a call, in order.

        Raises:
            ArgumentError: structure, dtype, device or a plain value differs.
            ShapeChanged: only shapes differ.
        """
        leaves, spec = pytree.tree_flatten(tuple(args))
        if spec != self.spec:
            raise ArgumentError(
                f"the step was called with the structure {_structure(args)}, but was captured "
                f"with {_structure(self.with_tensors(self.tensors))}. {_ANEW}"
            )
        places = list(zip(self.paths, leaves, self.leaves, strict=True))
        wrong = [text for place in places if (text := _difference(*place))]
        if wrong:
            raise ArgumentError(f"{'; '.join(wrong)}. {_ANEW}")
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        shapes = [
            f"{path} has shape {tuple(got.shape)}, captured with {tuple(expected.shape)}"
            for path, got, expected in places
            if isinstance(expected, torch.Tensor) and got.shape != expected.shape
        ]
        if shapes:
            raise ShapeChanged(f"{'; '.join(shapes)}. {_ANEW}")
        return tensors


def _path_text(path: tuple[Any, ...]) -> str:
    first, *rest = path
    return str(getattr(first, "idx", first)) + pytree.keystr(tuple(rest))


def _structure(value: Any) -> str:
    """Nested containers in short: a tensor is `Tensor`, a plain value its type."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_structure(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        inner = ", ".join(map(_structure, value))
        inner += "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return type(value).__name__ if not isinstance(value, torch.Tensor) else "Tensor"


def _difference(path: str, got: Any, expected: Any) -> str | None:
    """What is wrong with one leaf, shapes aside."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{path} is a {type(got).__name__}, expected a tensor{_from_numpy(got)}"
        for what in ("dtype", "device", "layout"):
            if getattr(got, what) != getattr(expected, what):
                found, wanted = getattr(got, what), getattr(expected, what)
                return f"{path} has {what} {found}, captured with {wanted}"
        if got.requires_grad and not expected.requires_grad:
            return f"{path} requires a gradient, captured without; pass it detached"
        return None
    same = type(got) is type(expected) and (got == expected or got is expected)
    return None if same else f"{path} is {got!r}, captured as the fixed value {expected!r}"


def _from_numpy(value: Any) -> str:
    return " (torch.from_numpy makes one)" if type(value).__module__ == "numpy" else ""


@attrs.frozen
class Results:
    """How the results of the step are built from its RESULT outputs.

    `places` has an entry a leaf: the position of its tensor among the outputs, or None for a
    constant. `numbers` are the leaves that the step returned as Python floats.
    """

    spec: pytree.TreeSpec
    places: tuple[int | None, ...]
    constants: tuple[Any, ...] = attrs.field(eq=False)
    numbers: frozenset[int] = frozenset()

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """What the user's step returns."""
        leaves = list(self.constants)
        for index, place in enumerate(self.places):
            if place is not None:
                leaves[index] = tensors[place]
            if index in self.numbers:
                leaves[index] = float(leaves[index])
        return pytree.tree_unflatten(leaves, self.spec)


def unusable_result(leaf: Any) -> str | None:
    """Why a leaf of the results cannot be returned by a compiled step, if so."""
    if isinstance(leaf, (torch.Tensor, *PLAIN)):
        return None
    kind = type(leaf).__name__
    if dataclasses.is_dataclass(leaf):
        return f"the step returns the dataclass {kind}, which torch's pytree does not know"
    return f"the step returns an object of type {kind}"
