# SPDX-License-Identifier: Apache-2.0
"""What a program depends on of the arguments of its call, as something to look programs up by.

Two calls with equal signatures run the same program, whatever their tensors hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from amp_ir.errors import ArgumentError
from amp_ir.frontend.batch import faults_of, identity_of, leaf_fault, path_text, structure_in_words


@attrs.frozen
class TensorKind:
    """What a program depends on of one tensor of the batch."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def in_words(self, other: TensorKind) -> str:
        """What the other one has otherwise."""
        words = []
        if self.shape != other.shape:
            words.append(f"of shape {tuple(self.shape)}")
        if self.dtype != other.dtype:
            words.append(str(self.dtype))
        if self.device != other.device:
            words.append(f"on {self.device}")
        if self.requires_grad != other.requires_grad:
            words.append("with" + ("" if self.requires_grad else "out") + " requires_grad")
        return ", ".join(words)


@attrs.frozen
class CallSignature:
    """The arguments of one call without the values of their tensors.

    `kinds` has an entry a leaf, None for a plain value; `values` are the plain values in order, as
    `identity_of` gives them.
    """

    spec: pytree.TreeSpec
    kinds: tuple[TensorKind | None, ...]
    values: tuple[tuple[type, str], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> tuple[CallSignature, list[torch.Tensor]]:
        """The signature of a call, and its tensors in order.

        Raises:
            ArgumentError: leaves that are neither usable tensors nor plain values, all of them.
        """
        leaves, spec = pytree.tree_flatten(args)
        if any(map(leaf_fault, leaves)):
            raise ArgumentError("; ".join(faults_of(args, "argument ")))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kinds = tuple(
            TensorKind(leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
            if isinstance(leaf, torch.Tensor)
            else None
            for leaf in leaves
        )
        values = tuple(identity_of(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        return cls(spec, kinds, values), tensors

    @property
    def key(self) -> Any:
        """All but the plain values: what programs are grouped by."""
        return self.spec, self.kinds

    def differences(self, earlier: CallSignature) -> list[str]:
        """How this call differs from an earlier one, in words."""
        if self.spec != earlier.spec:
            was, now = earlier._structure(), self._structure()
            return [f"the structure of the arguments was {was} and is {now}"]
        paths = pytree.tree_flatten_with_path(self._unflatten(range(len(self.kinds))))[0]
        pairs = zip(self._leaves(), earlier._leaves(), strict=True)
        return [
            f"argument {path_text(path)} {text}"
            for (path, _), (now, was) in zip(paths, pairs, strict=True)
            if (text := _difference(was, now))
        ]

    def _leaves(self) -> Iterator[TensorKind | str]:
        """Each leaf: its kind, or its value as text."""
        values = iter(self.values)
        return (next(values)[1] if kind is None else kind for kind in self.kinds)

    def _unflatten(self, leaves: Any) -> Any:
        return pytree.tree_unflatten(list(leaves), self.spec)

    def _structure(self) -> str:
        values = iter(self.values)
        names = ("Tensor" if kind else next(values)[0].__name__ for kind in self.kinds)
        return structure_in_words(self._unflatten(names), str)


def _difference(was: TensorKind | str, now: TensorKind | str) -> str:
    """What differs of one leaf, as "was ... and is ..."; "" where nothing does."""
    if was == now:
        return ""
    if isinstance(was, str) or isinstance(now, str):
        texts = ["a tensor" if isinstance(one, TensorKind) else one for one in (was, now)]
        return f"was {texts[0]} and is {texts[1]}"
    return f"was {was.in_words(now)} and is {now.in_words(was)}"
