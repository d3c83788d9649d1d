# SPDX-License-Identifier: Apache-2.0
"""The arguments of a step as a flat list of tensors, and its results rebuilt from one."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy
import torch
import torch.utils._pytree as pytree
from torch.nn.utils.rnn import PackedSequence

from amp_ir.capture.call_arguments import NameKey, bound, signature_of
from amp_ir.capture.containers import flatten, flatten_with_path
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.later_number import LaterNumber
from amp_ir.errors import ArgumentError, ShapeMismatchError
from amp_ir.ir.held_tensors import TensorKinds
from amp_ir.ir.step_module import Signature
from amp_ir.ir.unusable_tensors import memory_error, tensor_error

_LARGEST = 2**52  # float64 holds every integer twice as large
_ANEW = "Call it as it was captured, or capture (jit) the step again"
PLAIN = (
    int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device,
    torch.memory_format, torch.Size, slice, type(Ellipsis), numpy.generic, enum.Enum,
)  # fmt: skip


@attrs.frozen
class Arguments:
    """The structure of the captured arguments.

    `leaves` holds a tensor (its shape, dtype and device count) or the plain value that is frozen
    into the graph; `paths` is the text of each leaf's position. `plain` are the plain values of the
    current call in order, and `followed` the positions of those that each call reads. `names` is
    the signature of the step, None where it is not known. `takes_packed` says that a PackedSequence
    is among them.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...] = attrs.field(eq=False)
    paths: tuple[str, ...]
    plain: list[Any] = attrs.field(eq=False, factory=list)
    followed: frozenset[int] = frozenset()
    names: inspect.Signature | None = attrs.field(eq=False, default=None)
    takes_packed: bool = attrs.field(eq=False, default=False)
    _known: KnownTensors = attrs.field(eq=False, repr=False, init=False)

    @_known.default
    def _none_known(self) -> KnownTensors:
        return KnownTensors()

    @classmethod
    def of(cls, args: tuple[Any, ...], step: Any = None) -> Arguments:
        """Return the structure of an example of what `step` is called with."""
        found, (_, spec) = flatten_with_path(args), flatten(args)
        paths = tuple("argument " + path_text(path) for path, _ in found)
        leaves = tuple(leaf for _, leaf in found)
        plain = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        names, takes_packed = signature_of(step), _holds_packed(args)
        return cls(spec, leaves, paths, plain, names=names, takes_packed=takes_packed)

    def take(self, plain: Sequence[Any]) -> None:
        """Set the plain values of the current call."""
        if self.followed:
            self.plain[:] = plain

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def tensor_paths(self) -> list[str]:
        """Return the text of each tensor's position."""
        leaves = zip(self.paths, self.leaves, strict=True)
        return [path for path, leaf in leaves if isinstance(leaf, torch.Tensor)]

    @property
    def plain_paths(self) -> list[str]:
        """Return the text of each plain value's position."""
        leaves = zip(self.paths, self.leaves, strict=True)
        return [path for path, leaf in leaves if not isinstance(leaf, torch.Tensor)]

    def with_tensors(
        self, tensors: list[torch.Tensor], plain: Sequence[Any] | None = None
    ) -> tuple[Any, ...]:
        """Return the arguments with other tensors, and plain values, instead of the example's."""
        rest, values = iter(tensors), iter(self.plain if plain is None else plain)
        leaves = [next(rest if isinstance(x, torch.Tensor) else values) for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def flatten(
        self, args: tuple[Any, ...], named: Mapping[str, Any] | None = None
    ) -> list[torch.Tensor]:
        """Return the tensors of a call, in order; `named` are its arguments by keyword.

        Raises:
            ArgumentError: structure, dtype, device or a plain value differs.
            ShapeMismatchError: only shapes differ.
        """
        if not named and self._known.fit(args):
            return list(args)
        args = bound(self.names, tuple(args), named or {})
        leaves, spec = flatten(args)
        if any(map(leaf_error, leaves)):
            raise ArgumentError("; ".join(leaf_errors(args, "argument ")))
        if spec != self.spec:
            raise ArgumentError(
                f"the step was called with the structure {_structure(args)}, but was captured "
                f"with {_structure(self.with_tensors(self.tensors))}. {_ANEW}"
            )
        paths = self.plain_paths if self.followed else []
        followed = {paths[position] for position in self.followed}
        places = [
            place
            for place in zip(self.paths, leaves, self.leaves, strict=True)
            if place[0] not in followed or not can_follow(*place[1:])
        ]
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
            raise ShapeMismatchError(f"{'; '.join(shapes)}. {_ANEW}")
        self.take([leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)])
        self._known.remember(args)
        return tensors


class KnownTensors:
    """The last arguments that were checked, if they were plain tensors and nothing else.

    Most calls of a step have the same kinds of them as the one before.
    """

    def __init__(self) -> None:
        self._kinds: TensorKinds | None = None

    def remember(self, args: tuple[Any, ...]) -> None:
        """Take arguments for checked, and so all that are like them."""
        # Whether a tensor that requires a gradient is a leaf is not among what is compared.
        is_plain = bool(args) and all(
            type(one) is torch.Tensor and not one.requires_grad for one in args
        )
        self._kinds = TensorKinds(args) if is_plain else None

    def fit(self, args: tuple[Any, ...]) -> bool:
        """Return whether a check passes as it did then; may be False where it does."""
        kinds = self._kinds  # read once: another thread may set it
        # Where PyTorch's check (2.13) asks a nested tensor for strides, the process ends.
        return (
            kinds is not None
            and not any(isinstance(one, torch.Tensor) and one.is_nested for one in args)
            and kinds.fit(args)
            and not any(map(memory_error, args))
        )


def _holds_packed(args: Any) -> bool:
    leaves = pytree.tree_leaves(args, is_leaf=lambda one: isinstance(one, PackedSequence))
    return any(isinstance(leaf, PackedSequence) for leaf in leaves)


def path_text(path: tuple[Any, ...]) -> str:
    """Return the position of a leaf among the arguments, as "0['ids'][2]"."""
    first, *rest = path
    if rest and isinstance(rest[0], NameKey):
        first, *rest = rest
        return str(first.key) + pytree.keystr(tuple(rest))
    return str(getattr(first, "idx", first)) + pytree.keystr(tuple(rest))


def identity_of(value: Any) -> tuple[type, str]:
    """Return a key of a plain value: 0.0, -0.0, 0 and False differ, and all NaN are equal."""
    return type(value), repr(value)


def can_follow(now: Any, before: Any) -> bool:
    """Return whether a number can be read as float64 where the capture saw `before`."""
    return type(now) is type(before) and (type(now) is float or abs(now) <= _LARGEST)


def leaf_error(leaf: object) -> str | None:
    """Return why a leaf of the arguments cannot be used; None where it can."""
    if not isinstance(leaf, torch.Tensor):
        if isinstance(leaf, PLAIN):
            return None
        hint = "torch.from_numpy makes a tensor of an array" if _is_numpy(leaf) else (
            "pass tensors and plain values in tuples, lists, dicts and dataclasses"
        )  # fmt: skip
        return f"is a {type(leaf).__module__}.{type(leaf).__name__}, expected a tensor; {hint}"
    if leaf.requires_grad and not leaf.is_leaf:
        return "is the result of another computation with gradients; pass it detached"
    return tensor_error(leaf)


def leaf_errors(args: tuple[Any, ...], prefix: str) -> Iterator[str]:
    """Return what is wrong with every leaf of the arguments, each after `prefix` and position."""
    for path, leaf in flatten_with_path(args):
        error = leaf_error(leaf)
        if error:
            yield f"{prefix}{path_text(path)} {error}"


def _is_numpy(value: object) -> bool:
    return type(value).__module__ == "numpy"


def structure_in_words(value: Any, name_of: Callable[[Any], str]) -> str:
    """Describe nested containers; `name_of` gives the text of a leaf."""
    if isinstance(value, dict):
        items = (f"{key!r}: {structure_in_words(one, name_of)}" for key, one in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        inner = ", ".join(structure_in_words(one, name_of) for one in value)
        inner += "," if isinstance(value, tuple) and len(value) == 1 else ""
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    return name_of(value)


def _structure(value: Any) -> str:
    """Return the containers of arguments: a tensor is `Tensor`, a plain value its type."""
    return structure_in_words(
        value, lambda one: "Tensor" if isinstance(one, torch.Tensor) else type(one).__name__
    )


def _difference(path: str, got: Any, expected: Any) -> str | None:
    """Return what is wrong with one leaf, except its shape."""
    if isinstance(expected, torch.Tensor):
        if not isinstance(got, torch.Tensor):
            return f"{path} is a {type(got).__name__}, expected a tensor"
        for what in ("dtype", "device", "layout"):
            if getattr(got, what) != getattr(expected, what):
                found, wanted = getattr(got, what), getattr(expected, what)
                return f"{path} has {what} {found}, captured with {wanted}"
        if got.requires_grad and not expected.requires_grad:
            return f"{path} requires a gradient, captured without; pass it detached"
        return None
    same = not isinstance(got, torch.Tensor) and identity_of(got) == identity_of(expected)
    return None if same else f"{path} is {got!r}, captured as the fixed value {expected!r}"


@attrs.frozen
class Results:
    """The structure that rebuilds the results of the step from its RESULT outputs.

    `places` has an entry per leaf: the position of its tensor among the outputs, or None for a
    constant. `numbers` are the leaves that the step returned as Python numbers, `integers` those
    that are float64 in the graph.
    """

    spec: pytree.TreeSpec
    places: tuple[int | None, ...]
    constants: tuple[Any, ...] = attrs.field(eq=False)
    numbers: frozenset[int] = frozenset()
    integers: frozenset[int] = frozenset()

    @property
    def holds_numbers_alone(self) -> bool:
        """Whether no leaf is a tensor."""
        return all(
            place is None or index in self.numbers for index, place in enumerate(self.places)
        )

    def build(self, tensors: list[torch.Tensor]) -> Any:
        """Return what the user's step returns."""
        leaves = list(self.constants)
        for index, place in enumerate(self.places):
            if place is not None:
                leaves[index] = tensors[place]
            if index in self.numbers:
                leaves[index] = leaves[index].item()
            if index in self.integers:
                leaves[index] = int(leaves[index])
        return pytree.tree_unflatten(leaves, self.spec)


def structures_of(signature: Signature) -> tuple[Arguments, Results]:
    """Return the structures that the functions of a captured step's signature use."""
    arguments = getattr(signature.flatten_batch, "__self__", None)
    results = getattr(signature.unflatten_results, "__self__", None)
    assert isinstance(arguments, Arguments) and isinstance(results, Results)
    return arguments, results


def unusable_result(leaf: Any) -> str | None:
    """Return why a compiled step cannot return a leaf of the results; None where it can."""
    if isinstance(leaf, PackedPart):
        return f"the step returns {leaf.part}, whose shape depends on the data"
    if isinstance(leaf, (torch.Tensor, LaterNumber, *PLAIN)):
        return None
    return f"the step returns an object of type {type(leaf).__name__}"
