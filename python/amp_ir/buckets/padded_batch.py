# SPDX-License-Identifier: Apache-2.0
"""A batch that is padded to buckets, and results without the padding."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree

from amp_ir.buckets.bucket_options import BucketOptions, PaddedTensorOption
from amp_ir.buckets.chosen_sizes import ChosenSizes
from amp_ir.capture.containers import flatten, flatten_with_path
from amp_ir.padding.axes import Dimension
from amp_ir.padding.batch_conditions import BatchCondition
from amp_ir.padding.inert_padding import InertPadding, PaddedInput

# How much shorter than needed a second size may be, and what must not divide its difference from
# the size, the best first.
_NEAR = 16
_FACTORS = (2 * 3 * 5 * 7, 2 * 3 * 5, 2 * 3)


@attrs.frozen(eq=False)
class PaddedBatch:
    """The arguments of a call, padded; `exact_args` are those that the user passed.

    `lengths` maps the name of each padded dimension to its length without padding, `sizes` to that
    with it; `places` are the dimensions of each tensor of the batch, by axis, and `chosen` has
    those whose sizes are chosen as steps run.
    """

    args: tuple[Any, ...]
    exact_args: tuple[Any, ...]
    lengths: Mapping[str, int]
    sizes: Mapping[str, int]
    places: tuple[tuple[tuple[int, str], ...], ...]
    chosen: Mapping[str, ChosenSizes]
    _least: Mapping[str, int]
    _options: tuple[PaddedTensorOption | None, ...]

    @classmethod
    def of(cls, options: BucketOptions, args: tuple[Any, ...]) -> PaddedBatch | str:
        """Return the arguments padded; where a length fits no bucket, a text that says so.

        Axes of one length with the same sizes to choose from are one dimension.

        Raises:
            ArgumentError: a key names no tensor of the batch, or one without that axis.
        """
        leaves, spec = flatten(args)
        by_leaf = options.of(leaves, spec)
        names: dict[tuple[object, int], str] = {}
        lengths: dict[str, int] = {}
        sizes: dict[str, int] = {}
        least: dict[str, int] = {}
        chosen: dict[str, ChosenSizes] = {}
        places = []
        padded = list(leaves)
        for k, (leaf, option) in enumerate(zip(leaves, by_leaf, strict=True)):
            here = []
            for axis, given in ({} if option is None else option.sizes).items():
                assert option is not None
                length = leaf.shape[axis]
                if length < 2:
                    # One entry is broadcast where several are not, so that it stays one.
                    has = (
                        f"axis {axis} of {option.name} has {'1 entry' if length else 'no entries'}"
                    )
                    return f"{has}, and buckets are for 2 and more. Such a batch runs unpadded"
                choices = option.choices(axis, length)
                at = bisect.bisect_left(choices, length)
                if at == len(choices):
                    has = f"axis {axis} of {option.name} has {length} entries"
                    return (
                        f"{has}, and its largest bucket has {choices[-1]}. Such a batch runs "
                        "unpadded; add a larger size to buckets="
                    )
                served = choices[at - 1] + 1 if at else 2
                name = names.setdefault((given, length), f"axis {axis} of {option.name}")
                lengths[name], sizes[name], least[name] = length, choices[at], served
                here.append((axis, name))
                if isinstance(given, ChosenSizes):
                    chosen[name] = given
            if option is not None:
                shape = _with_sizes(leaf.shape, [(axis, sizes[name]) for axis, name in here])
                padded[k] = _padded(leaf, shape, option.number)
            if isinstance(leaf, torch.Tensor):
                places.append(tuple(here))
        tensors = zip(leaves, by_leaf, strict=True)
        kept = tuple(option for leaf, option in tensors if isinstance(leaf, torch.Tensor))
        return cls(
            pytree.tree_unflatten(padded, spec),
            args,
            lengths,
            sizes,
            tuple(places),
            chosen,
            least,
            kept,
        )

    @property
    def padded_dimensions(self) -> frozenset[str]:
        """The dimensions that are longer than their data."""
        return frozenset(name for name, size in self.sizes.items() if self.lengths[name] < size)

    @property
    def filled_integers(self) -> list[tuple[str, int]]:
        """The tensors of integers that hold padding, with its number."""
        tensors = [one for one in pytree.tree_leaves(self.args) if isinstance(one, torch.Tensor)]
        return [
            (option.name, int(option.number))
            for tensor, place, option in zip(tensors, self.places, self._options, strict=True)
            if option is not None
            and not tensor.is_floating_point()
            and any(name in self.padded_dimensions for _, name in place)
        ]

    def shorten(self) -> str | None:
        """Take away the chosen size that holds most padding; return which one that is.

        None where the chosen sizes hold no padding.
        """
        longest = max(
            self.chosen, key=lambda name: self.sizes[name] / self.lengths[name], default=None
        )
        if longest is None or self.sizes[longest] == self.lengths[longest]:
            return None
        self.chosen[longest].drop(self.sizes[longest])
        return f"{longest} is not padded to {self.sizes[longest]}"

    def unpadded_axes(self) -> list[tuple[tuple[Any, ...], int, int, Any]]:
        """Return the axes that are not padded and as long as the data of one that is.

        Each with its tensor's path, its length, and the sizes that the other has to choose from.
        """
        padded = iter(self.places)
        given = {
            self.lengths[name]: option.sizes[axis]
            for place, option in zip(self.places, self._options, strict=True)
            if option is not None
            for axis, name in place
        }
        return [
            (path, axis, length, given[length])
            for path, leaf in flatten_with_path(self.exact_args)
            if isinstance(leaf, torch.Tensor)
            for here in [dict(next(padded))]
            for axis, length in enumerate(leaf.shape)
            if length in given and axis not in here
        ]

    def dimensions(
        self, offset: int = 0, shortest: int = 2, *, only_served: bool = False
    ) -> dict[str, Dimension]:
        """Return the padded dimensions, each with a second size for the proof.

        That is the shortest length that the size is chosen for, but at least `shortest`, or one
        near it (no shorter one with `only_served`), so that a step that branches on the length is
        seen to; or one longer by `offset`, shorter than the size. Its difference from the size is
        odd and, where there is such a one, no multiple of 3, 5 and 7: a number such as the length %
        3 is then another one. No difference divides another one: it tells which dimension an extent
        follows.
        """
        found: dict[str, Dimension] = {}
        for name, size in self.sizes.items():
            least = max(self._least[name], min(shortest, size - 1))
            first = max(min(least + offset, size - 1), least)
            shorter = range(least - 1, max(least - _NEAR, shortest - 1), -1)
            near = (first, *(() if offset else shorter), min(first + 1, size - 1))
            nearest = ((factors, near) for factors in _FACTORS)
            others = [one.size - one.other_size for one in found.values()]
            other = next(
                one
                for factors, choices in (
                    *([(_FACTORS[-1], range(first, size))] if only_served else nearest),
                    (2, range(first, size)),
                    (2, reversed(range(least, first))),
                    (2, itertools.count(size + 1)),
                )
                for one in choices
                if math.gcd(size - one, factors) == 1
                and all((size - one) % d and d % (size - one) for d in others)
                # 1 divides every other difference.
                and (len(self.sizes) == 1 or abs(size - one) > 1)
            )
            found[name] = Dimension(name, size, other)
        return found

    def has_shorter(self, dimensions: Mapping[str, Dimension]) -> bool:
        """Return whether a second size is shorter than the lengths that its size is chosen for."""
        return any(one.other_size < self._least[name] for name, one in dimensions.items())

    def offsets(self) -> Iterator[int]:
        """Yield by how much the second sizes may exceed the shortest lengths, doubling."""
        longest = max(size - self._least[name] for name, size in self.sizes.items())
        yield 0
        yield from itertools.takewhile(lambda one: one < longest, (2**k for k in itertools.count()))
        yield max(longest, 1)

    def example(self, dimensions: Mapping[str, Dimension]) -> tuple[Any, ...]:
        """Return arguments of the second sizes; their values do not count."""
        leaves, spec = flatten(self.args)
        places = iter(self.places)
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                new = [(axis, dimensions[name].other_size) for axis, name in next(places)]
                leaves[k] = leaf.new_zeros(_with_sizes(leaf.shape, new)) if new else leaf
        return pytree.tree_unflatten(leaves, spec)

    def lengths_text(self) -> str:
        """Return the lengths without padding for an error."""
        return ", ".join(f"{length} for {name}" for name, length in self.lengths.items())

    def inputs(self, dimensions: Mapping[str, Dimension]) -> list[PaddedInput | None]:
        """Return the padding of each tensor, for the proof."""
        return [
            None
            if option is None
            else PaddedInput({axis: dimensions[name] for axis, name in place}, option.number)
            for place, option in zip(self.places, self._options, strict=True)
        ]

    def is_long_enough(self, padding: InertPadding) -> bool:
        """Return whether no dimension is shorter than the step needs."""
        least = padding.least_sizes
        return all(length >= least[name] for name, length in self.lengths.items())

    def unmet(self, padding: InertPadding) -> BatchCondition | None:
        """Return a condition of the proof that the numbers of the batch do not meet, if any."""
        if not padding.conditions:
            return None
        leaves = pytree.tree_leaves(self.args)
        tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
        unmet = (one for one in padding.conditions if not one.holds(tensors, self.lengths))
        return next(unmet, None)

    def without_padding(
        self, value: Any, places: Sequence[int | None], padding: InertPadding
    ) -> Any:
        """Return the data of the results of a step.

        `places` are the outputs that the leaves of the results are, None for a constant.
        """
        leaves, spec = flatten(value)
        for k, place in enumerate(places):
            for one in () if place is None else padding.results[place]:
                length = self.lengths[one.dimension.name] + one.shift
                leaves[k] = leaves[k].narrow(one.axis, 0, length)
        return pytree.tree_unflatten(leaves, spec)


def padded_examples(options: BucketOptions, examples: Any) -> Any:
    """Return the batches of a list padded; what fits no bucket, or is no batch, as it is."""
    if not isinstance(examples, (list, tuple)):
        return examples
    found = [PaddedBatch.of(options, one) if isinstance(one, tuple) else one for one in examples]
    return [
        one.args if isinstance(one, PaddedBatch) else example
        for one, example in zip(found, examples, strict=True)
    ]


def _with_sizes(shape: torch.Size, sizes: Sequence[tuple[int, int]]) -> list[int]:
    new = list(shape)
    for axis, size in sizes:
        new[axis] = size
    return new


def _padded(tensor: torch.Tensor, shape: list[int], number: float) -> torch.Tensor:
    """Return a tensor of a shape that begins with these entries, and has the number beyond."""
    if list(tensor.shape) == shape:
        return tensor.contiguous()
    whole = tensor.new_full(shape, number)
    whole[tuple(slice(0, extent) for extent in tensor.shape)] = tensor
    return whole
