# SPDX-License-Identifier: Apache-2.0
"""The options `buckets=` and `pad=` of `amp_ir.jit`, and the tensors of a batch that they name."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from amp_ir.buckets.chosen_sizes import ChosenSizes
from amp_ir.buckets.varying_axes import Axis, VaryingAxes
from amp_ir.capture.batch import path_text
from amp_ir.capture.call_arguments import Key
from amp_ir.capture.containers import flatten, flatten_with_path
from amp_ir.errors import ArgumentError, OptionError

log = logging.getLogger("amp_ir")

AUTO = "auto"
# How many names an error lists.
_SHOWN = 12
_CHECKS = ("proof", "values")


@attrs.frozen
class PaddedTensorOption:
    """What is padded of one tensor of the batch: by axis the sizes to choose from, ascending."""

    name: str
    sizes: Mapping[int, tuple[int, ...] | ChosenSizes]
    number: float

    def choices(self, axis: int, length: int) -> tuple[int, ...]:
        """Return the sizes of an axis; those that are chosen as steps run hold the length."""
        sizes = self.sizes[axis]
        return sizes.of(length) if isinstance(sizes, ChosenSizes) else sizes


class BucketOptions:
    """The checked options; `of` finds the tensors of a batch that they are for."""

    def __init__(
        self,
        step: Callable[..., Any],
        buckets: Mapping[Key, Mapping[int, Sequence[int] | str]] | str,
        pad: Mapping[Key, float] | None,
        check: str = "proof",
        most_sizes: int = 12,
    ) -> None:
        """Check the options; `check` is "proof", or "values" where numbers are to be compared.

        At most `most_sizes` are chosen where an axis has "auto". "auto" alone is for the axes of
        the tensors in `pad` whose lengths differ between calls.

        Raises:
            OptionError: listing everything that is wrong.
        """
        pad = {} if pad is None else pad
        errors = list(_errors(buckets, pad))
        if check not in _CHECKS:
            errors.append(f'pad_check= is {check!r}, expected "proof" or "values"')
        if errors:
            raise OptionError("; ".join(errors))
        self._most_sizes = most_sizes
        self.is_auto = isinstance(buckets, str)
        by_key = dict.fromkeys(pad, {}) if isinstance(buckets, str) else buckets
        self._sizes = {
            key: {
                axis: None if isinstance(sizes, str) else tuple(sorted(sizes))
                for axis, sizes in by_axis.items()
            }
            for key, by_axis in by_key.items()
        }
        self.check = check
        self._numbers = dict(pad)
        self._names = _parameter_names(step)
        self._known: dict[Any, tuple[PaddedTensorOption | None, ...]] = {}
        self._varying: dict[Any, VaryingAxes] = {}

    def of(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> tuple[PaddedTensorOption | None, ...]:
        """Return an option for each leaf of the arguments; None for one that is not padded.

        Raises:
            ArgumentError: a key names no tensor of the batch, or one without that axis.
        """
        structure = _structure_of(leaves, spec)
        if structure not in self._known:
            self._known[structure] = self._found(leaves, spec)
        options = self._known[structure]
        return self._with_varying_axes(structure, leaves, options) if self.is_auto else options

    def leave_out(self, args: tuple[Any, ...]) -> str:
        """Pad no longer the axes found last that vary in a batch; return their names.

        Requires: `is_auto`, and `of` finds an axis to pad in this batch.
        """
        leaves, spec = flatten(args)
        structure = _structure_of(leaves, spec)
        options = self.of(leaves, spec)
        padded = {(k, axis) for k, one in enumerate(options) if one for axis in one.sizes}
        return _names_of(self._varying[structure].leave_out(padded), options)

    def _with_varying_axes(
        self, structure: Any, leaves: Sequence[Any], options: Sequence[PaddedTensorOption | None]
    ) -> tuple[PaddedTensorOption | None, ...]:
        shapes = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in leaves]
        varying = self._varying.setdefault(structure, VaryingAxes(shapes, self._most_sizes))
        left_out = varying.see(shapes, {k for k, one in enumerate(options) if one is not None})
        if left_out:
            log.warning(
                "%s varies together with a tensor that pad= has no number for. Batches that differ "
                "there have programs of their own. Said once",
                _names_of(left_out, options),
            )
        return tuple(
            None if one is None else attrs.evolve(one, sizes=varying.sizes(k))
            for k, one in enumerate(options)
        )

    def _found(
        self, leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> tuple[PaddedTensorOption | None, ...]:
        args = pytree.tree_unflatten(list(leaves), spec)
        paths = [path for path, _ in flatten_with_path(args)]
        found: list[PaddedTensorOption | None] = [None] * len(leaves)
        errors = []
        # Lengths that are equal in the first batch are of one dimension.
        chosen: dict[int, ChosenSizes] = {}
        for key, sizes in self._sizes.items():
            positions = [k for k, path in enumerate(paths) if key in self._keys_of(path)]
            if len(positions) != 1:
                errors.append(self._misnamed(key, positions, paths))
                continue
            (position,) = positions
            leaf = leaves[position]
            if not isinstance(leaf, torch.Tensor):
                errors.append(f"buckets= names {key!r}, a {type(leaf).__name__}, expected a tensor")
            elif not all(-leaf.dim() <= axis < leaf.dim() for axis in sizes):
                wrong = next(axis for axis in sizes if not -leaf.dim() <= axis < leaf.dim())
                errors.append(f"buckets= pads axis {wrong} of {key!r}, which has {leaf.dim()} axes")
            elif len({axis % leaf.dim() for axis in sizes}) < len(sizes):
                errors.append(f"buckets= pads an axis of {key!r} twice, counted from both ends")
            elif leaf.requires_grad:
                errors.append(f"buckets= pads {key!r}, which requires a gradient; pass it detached")
            elif not _holds(leaf, self._numbers[key]):
                errors.append(
                    f"pad= has {self._numbers[key]!r} for {key!r}, which {leaf.dtype} cannot hold"
                )
            else:
                by_axis = {
                    axis % leaf.dim(): one
                    or chosen.setdefault(leaf.shape[axis], ChosenSizes(self._most_sizes))
                    for axis, one in sizes.items()
                }
                name = key if isinstance(key, str) else f"argument {key}"
                found[position] = PaddedTensorOption(name, by_axis, self._numbers[key])
        if errors:
            raise ArgumentError("; ".join(errors))
        return tuple(found)

    def _misnamed(
        self, key: Key, positions: Sequence[int], paths: Sequence[tuple[Any, ...]]
    ) -> str:
        """Say that a key names no tensor of the batch, or several."""
        start = f"{'pad' if self.is_auto else 'buckets'}= names {key!r}, which is"
        if positions:
            named = ", ".join(repr(path_text(paths[k])) for k in positions)
            return f"{start} {len(positions)} arguments of this call; name one as {named}"
        parts = [path for path in paths if key in self._keys_of(path[:1])]
        if parts:
            return (
                f"{start} no tensor but a container of {len(parts)} values; pass a tensor, or name "
                "those of them that are tensors"
            )
        names = [repr(self._keys_of(path)[0]) for path in paths]
        more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
        return f"{start} no argument of this call; it has {', '.join([*names[:_SHOWN], *more])}"

    def best_key(self, path: tuple[Any, ...]) -> Key:
        """Return the key by which `buckets=` names a tensor of the batch best."""
        return self._keys_of(path)[0]

    def _keys_of(self, path: tuple[Any, ...]) -> list[Key]:
        """Return the keys that name a leaf, the best one first."""
        position = int(getattr(path[0], "idx", 0))
        keys: list[Key] = [path_text(path)]
        if len(path) == 1:
            keys = [position]
            if position < len(self._names):
                keys.insert(0, self._names[position])
        else:
            key = getattr(path[-1], "key", getattr(path[-1], "name", None))
            keys = [key, *keys] if isinstance(key, str) else keys
        return keys


def _holds(tensor: torch.Tensor, number: float) -> bool:
    """Return whether a tensor can hold a number: integers exactly, floats rounded."""
    if tensor.is_floating_point():
        return math.isinf(number) or abs(number) <= torch.finfo(tensor.dtype).max
    if tensor.dtype is torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(tensor.dtype)
    return math.isfinite(number) and number == int(number) and limits.min <= number <= limits.max


def _structure_of(leaves: Sequence[Any], spec: pytree.TreeSpec) -> Any:
    kinds = ((one.dim(), one.dtype) for one in leaves if isinstance(one, torch.Tensor))
    return spec, tuple(kinds)


def _names_of(axes: Iterable[Axis], options: Sequence[PaddedTensorOption | None]) -> str:
    named = [(options[position], axis) for position, axis in sorted(axes)]
    return " and ".join(f"axis {axis} of {one.name}" for one, axis in named if one is not None)


def _parameter_names(step: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):  # a callable without a signature
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [one.name for one in parameters if one.kind in positional]


def _errors(buckets: Any, pad: Any) -> Iterator[str]:
    """Yield what is wrong with the options, whatever the batch is."""
    is_auto = isinstance(buckets, str) and buckets == AUTO
    if not is_auto and (not isinstance(buckets, Mapping) or not buckets):
        yield (
            f"buckets= is {buckets!r}, expected sizes by argument and axis, as {_EXAMPLE}, or "
            '"auto"'
        )
    elif not isinstance(pad, Mapping):
        yield f"pad= is {pad!r}, expected a number by argument"
    elif is_auto and not pad:
        yield 'buckets="auto" pads the arguments for which pad= has a number, and it has none'
    else:
        yield from _key_errors(dict.fromkeys(pad, {0: AUTO}) if is_auto else buckets, pad)


def _key_errors(buckets: Mapping[Any, Any], pad: Mapping[Any, Any]) -> Iterator[str]:
    for key, by_axis in buckets.items():
        if not isinstance(key, (int, str)) or isinstance(key, bool):
            yield f"buckets= has the key {key!r}, expected an argument's position or name"
        elif not isinstance(by_axis, Mapping) or not by_axis:
            yield f"buckets[{key!r}] is {by_axis!r}, expected sizes by axis, as {_EXAMPLE}"
        else:
            yield from _axis_errors(key, by_axis)
        if key not in pad:
            yield f"pad= has no number for {key!r}, which buckets= pads"
    for key, number in pad.items():
        if key not in buckets:
            yield f"pad= has a number for {key!r}, which buckets= does not pad"
        elif not isinstance(number, (int, float)) or math.isnan(number):
            yield f"pad[{key!r}] is {number!r}, expected a number"


def _axis_errors(key: Key, by_axis: Mapping[Any, Any]) -> Iterator[str]:
    for axis, sizes in by_axis.items():
        if not isinstance(axis, int) or isinstance(axis, bool):
            yield f"buckets[{key!r}] has the axis {axis!r}, expected a number"
        if sizes == AUTO:
            continue
        is_list = isinstance(sizes, (tuple, list, range)) and len(sizes) > 0
        if not is_list or not all(type(one) is int and one >= 2 for one in sizes):
            yield (
                f"buckets[{key!r}][{axis!r}] is {sizes!r}, expected one or more sizes of at least "
                '2, or "auto"'
            )


_EXAMPLE = '{"input_ids": {1: (64, 128, 256)}}'
