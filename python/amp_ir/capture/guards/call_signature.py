# SPDX-License-Identifier: Apache-2.0
"""The properties of a call's arguments that a program depends on, as a lookup key.

Two calls with equal signatures run the same program, whatever the values of their tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, TypeVar

import attrs
import torch

from amp_ir.capture.batch import (
    KnownTensors,
    can_follow,
    identity_of,
    leaf_error,
    leaf_errors,
    path_text,
    structure_in_words,
)
from amp_ir.capture.containers import flatten_with_path
from amp_ir.capture.guards.call_structure import rebuild, structure_of
from amp_ir.capture.guards.places import is_number
from amp_ir.errors import ArgumentError
from amp_ir.ir.memory_order import strides_in_words, strides_unless_contiguous


@attrs.frozen(cache_hash=True)
class TensorKind:
    """The properties of one batch tensor that a program depends on.

    `strides` is None for a contiguous tensor: a step may read it, and branch on it.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorKind:
        """Return the kind of a tensor."""
        strides = strides_unless_contiguous(tensor)
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides)

    def in_words(self, other: TensorKind) -> str:
        """Describe how the other kind differs."""
        words = []
        if self.shape != other.shape:
            words.append(f"of shape {tuple(self.shape)}")
        if self.dtype != other.dtype:
            words.append(str(self.dtype))
        if self.device != other.device:
            words.append(f"on {self.device}")
        if self.requires_grad != other.requires_grad:
            words.append("with" + ("" if self.requires_grad else "out") + " requires_grad")
        if self.strides != other.strides:
            words.append(strides_in_words(self.strides))
        return ", ".join(words)


S = TypeVar("S", bound="CallSignature")


@attrs.frozen
class CallSignature:
    """The arguments of one call without the values of their tensors.

    `structure` is the key of their containers, of `structure_of`. `kinds` has an entry per leaf,
    None for a plain value; `values` are the plain values in order, as `identity_of` returns them,
    and `plain` the values themselves. `followed` are the positions
    among them of the numbers that a program of this signature reads at each call.
    """

    structure: Hashable
    kinds: tuple[TensorKind | None, ...]
    values: tuple[tuple[type, str], ...]
    plain: tuple[Any, ...] = attrs.field(eq=False, repr=False, default=())
    followed: frozenset[int] = frozenset()

    @classmethod
    def of(cls: type[S], args: tuple[Any, ...]) -> tuple[S, list[torch.Tensor]]:
        """Return the signature of a call, and its tensors in order.

        Raises:
            ArgumentError: leaves that are neither usable tensors nor plain values, all of them.
        """
        leaves: list[Any] = []
        structure = structure_of(args, leaves)
        if any(map(leaf_error, leaves)):
            raise ArgumentError("; ".join(leaf_errors(args, "argument ")))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kinds = tuple(
            TensorKind.of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        )
        plain = tuple(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
        return cls(structure, kinds, tuple(map(identity_of, plain)), plain), tensors

    @property
    def key(self) -> Any:
        """Return all but the plain values: the key that groups programs."""
        return self.structure, self.kinds

    def fits(self, call: CallSignature) -> bool:
        """Return whether a program of this signature fits a call of the same key."""
        return self.values == call.values or (bool(self.followed) and not call._changed(self))

    def changed_numbers(self, earlier: CallSignature) -> list[str]:
        """Return the positions of numbers of one type that differ, if the structure is the same."""
        if self.structure != earlier.structure or not self._has_plain_where(earlier):
            return []
        paths = [path for path, kind in zip(self._paths(), self.kinds, strict=True) if kind is None]
        return [
            paths[position]
            for position in self._changed(earlier)
            if is_number(now := self.plain[position]) and can_follow(now, earlier.plain[position])
        ]

    def _has_plain_where(self, other: CallSignature) -> bool:
        """Return whether the plain values are the same leaves of a call of one structure."""
        plain, others = ([kind is None for kind in one.kinds] for one in (self, other))
        return plain == others

    def _changed(self, program: CallSignature) -> list[int]:
        """Return the positions of the plain values that differ from a program's."""
        pairs = zip(self.values, program.values, strict=True)
        return [
            position
            for position, (now, was) in enumerate(pairs)
            if now != was
            and not (
                position in program.followed
                and can_follow(self.plain[position], program.plain[position])
            )
        ]

    def _paths(self) -> list[str]:
        found = flatten_with_path(self._unflatten(range(len(self.kinds))))
        return ["argument " + path_text(path) for path, _ in found]

    def differences(self, earlier: CallSignature) -> list[str]:
        """Describe how this call differs from an earlier one."""
        if self.structure != earlier.structure:
            was, now = earlier._structure(), self._structure()
            return [f"the structure of the arguments was {was} and is {now}"]
        values = list(self.values)
        if self._has_plain_where(earlier):
            # Numbers that the earlier call's program reads at each call do not count.
            changed = self._changed(earlier)
            values = [values[i] if i in changed else was for i, was in enumerate(earlier.values)]
        pairs = zip(self._leaves(values), earlier._leaves(earlier.values), strict=True)
        return [
            f"{path} {text}"
            for path, (now, was) in zip(self._paths(), pairs, strict=True)
            if (text := _difference(was, now))
        ]

    def _leaves(self, plain: Iterable[tuple[type, str]]) -> Iterator[TensorKind | str]:
        """Return for each leaf its kind, or its value as text."""
        values = iter(plain)
        return (next(values)[1] if kind is None else kind for kind in self.kinds)

    def _unflatten(self, leaves: Any) -> Any:
        return rebuild(self.structure, iter(leaves))

    def _structure(self) -> str:
        values = iter(self.values)
        names = ("Tensor" if kind else next(values)[0].__name__ for kind in self.kinds)
        return structure_in_words(self._unflatten(names), str)


class SignatureReader:
    """`CallSignature.of` for the calls of one step, quick for a call like the one before."""

    def __init__(self) -> None:
        self._known = KnownTensors()
        self._last: CallSignature | None = None

    def of(self, args: tuple[Any, ...]) -> tuple[CallSignature, list[torch.Tensor]]:
        """Return the signature of a call, and its tensors in order.

        Raises:
            ArgumentError: leaves that are neither usable tensors nor plain values, all of them.
        """
        if self._last is not None and self._known.fit(args):
            return self._last, list(args)
        self._last, tensors = CallSignature.of(args)
        self._known.remember(args)
        return self._last, tensors


def _difference(was: TensorKind | str, now: TensorKind | str) -> str:
    """Return what differs in one leaf, as "was ... and is ..."; "" where nothing does."""
    if was == now:
        return ""
    if isinstance(was, str) or isinstance(now, str):
        texts = ["a tensor" if isinstance(one, TensorKind) else one for one in (was, now)]
        return f"was {texts[0]} and is {texts[1]}"
    text = f"was {was.in_words(now)} and is {now.in_words(was)}"
    if was.shape == now.shape or len(was.shape) != len(now.shape):
        return text
    extents = enumerate(zip(was.shape, now.shape, strict=True))
    axes = [str(axis) for axis, (before, after) in extents if before != after]
    return f"{text} (dimension{'s' * (len(axes) > 1)} {' and '.join(axes)})"
