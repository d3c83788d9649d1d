# SPDX-License-Identifier: Apache-2.0
"""Merge calls of arbitrary kernels into one kernel."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import attrs
from tvm import tirx

from amp_ir.loops.codegen.kernel import INPLACE
from amp_ir.loops.fusion.horizontal_groups import HorizontalGroup, Merger, like


@attrs.frozen(eq=False)
class Member:
    """One of the calls to merge: its kernel, by name, and what it reads, in order."""

    name: str
    function: tirx.PrimFunc
    arguments: Sequence[Hashable]


@attrs.frozen
class KernelMerger:
    """Kernel merger for one kind of device, for passes that know which calls may run at once."""

    merger: Merger

    def most_parameters(self) -> int:
        """Return how many parameters a fused kernel may have."""
        return self.merger.most_parameters()

    def takes(self, function: tirx.PrimFunc) -> bool:
        """Return whether the kernel can be merged."""
        return self.merger.body_of(function) is not None

    def merge(
        self, calls: Sequence[tuple[str, tirx.PrimFunc, Sequence[Any]]]
    ) -> tuple[tirx.PrimFunc, list[Any]]:
        """Merge calls (name, function, arguments), as `merged_kernel` does."""
        return merged_kernel([Member(*call) for call in calls], self.merger)


def merged_kernel(members: Sequence[Member], merger: Merger) -> tuple[tirx.PrimFunc, list[Any]]:
    """Return the kernel that makes all the calls, and its arguments, each once.

    Its parameters are the arguments, then the results of the first call, the second, and so on. A
    result may be written over an argument that only its own call reads.
    """
    inputs: dict[Hashable, tirx.Var] = {}
    outputs: list[tirx.Var] = []
    readers: dict[Hashable, int] = {}
    pairs: list[tuple[int, Hashable]] = []
    groups: dict[str, HorizontalGroup] = {}
    for member in members:
        count, own = len(member.arguments), list(member.function.params)
        for argument, buffer in zip(member.arguments, own, strict=False):
            inputs.setdefault(argument, like(buffer, f"in{len(inputs)}"))
            readers[argument] = readers.get(argument, 0) + 1
        for output, source in _pairs_of(member.function):
            pairs.append((len(outputs) + output, member.arguments[source]))
        made = [like(one, f"out{len(outputs) + k}") for k, one in enumerate(own[count:])]
        outputs += made
        if member.name not in groups:
            body = merger.body_of(member.function)
            assert body is not None
            groups[member.name] = HorizontalGroup(body, [])
        given = [inputs[one] for one in member.arguments]
        groups[member.name].parameters.append([*given, *made])
    place = {argument: k for k, argument in enumerate(inputs)}
    safe = [[output, place[source]] for output, source in pairs if readers[source] == 1]
    function = tirx.PrimFunc([*inputs.values(), *outputs], merger.launch(list(groups.values())))
    function = function.with_attr("tirx.noalias", not safe)
    if safe:
        function = function.with_attr(INPLACE, safe)
    return function, list(inputs)


def _pairs_of(function: tirx.PrimFunc) -> list[tuple[int, int]]:
    pairs = function.attrs.get(INPLACE, []) if function.attrs else []
    return [(int(output), int(source)) for output, source in pairs]
