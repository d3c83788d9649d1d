# SPDX-License-Identifier: Apache-2.0
"""Compute a few small gradients after the last large one, whose exchange they then hide."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tvm
from tvm import relax

from amp_ir.dialect.collectives import ALL_REDUCE, BROADCAST
from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import Dataflow, variables_of
from amp_ir.ir.static_shape import nbytes_of


def order_gradients(ir: tvm.IRModule) -> tvm.IRModule:
    """Move gradients that nothing waits for behind the last large one of a backward pass.

    Before:  d1 = ...; g1 = matmul(x1, d1); d0 = ...; g0 = scatter(d0)    # g0 has 4 MiB, g1 1 MiB
    After:   d1 = ...; d0 = ...; g0 = scatter(d0); g1 = matmul(x1, d1)

    What is exposed of an exchange is mostly the gradient that is known last. One of more bytes than
    the last bucket should have (`last_bucket_nbytes`), as that of an embedding, is hidden by other
    gradients: the latest ones of a matmul that the rest of the backward pass does not read, of
    together at most half of its bytes.

    Requires: whole collectives; one dataflow block.
    Ensures:  the same values, by the same ops. Without `last_bucket_nbytes` nothing moves.
    Source:   Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2, for the part of a
              backward pass that nothing waits for.
    """
    flow = Dataflow(ir)
    captured = flow.calls(ALL_REDUCE, BROADCAST)
    order = _Order(flow, captured)
    for calls in _passes(captured):
        order.delay(calls)
    return flow.finish(order.bindings(), kept=captured) if order.moved else ir


def _passes(captured: dict[relax.Var, relax.Call]) -> Iterator[list[relax.Var]]:
    """Return the all-reduces of each backward pass and group whose buckets end small."""
    found: dict[tuple[int, int], list[relax.Var]] = {}
    for variable, call in captured.items():
        options = options_of(call)
        if call.op.name == ALL_REDUCE and options["last_bucket_nbytes"]:
            key = int(options["group"]), int(options["backward"])
            found.setdefault(key, []).append(variable)
    yield from found.values()


class _Order:
    """The order of the bindings.

    `moved` are those that come after another one: its position, and the bytes of their gradient.
    """

    def __init__(self, flow: Dataflow, captured: dict[relax.Var, relax.Call]) -> None:
        self.flow = flow
        self.captured = captured
        self.position = {binding.var: k for k, binding in enumerate(flow.bindings)}
        self.moved: dict[int, tuple[int, int]] = {}

    def bindings(self) -> list[relax.VarBinding]:
        """Return all bindings in their new order."""
        order = sorted(range(len(self.flow.bindings)), key=self._place)
        return [self.flow.bindings[k] for k in order]

    def _place(self, k: int) -> tuple[int, bool, int, int]:
        # The smallest comes last, to be a small last bucket.
        place, nbytes = self.moved.get(k, (k, 0))
        return place, k in self.moved, -nbytes, k

    def delay(self, calls: Sequence[relax.Var]) -> None:
        """Move gradients of a backward pass behind its last large one, if that is late."""
        last = int(options_of(self.captured[calls[0]])["last_bucket_nbytes"])
        reduces: dict[relax.Var, list[relax.Var]] = {}
        for one in calls:
            source = self.captured[one].args[0]
            if source in self.position:
                reduces.setdefault(source, []).append(one)
        known = sorted(reduces, key=self.position.__getitem__)
        large = next((one for one in reversed(known) if nbytes_of(one.ty) > last), None)
        if large is None:
            return
        place = known.index(large)
        # What is behind it already hides it, too.
        left = nbytes_of(large.ty) // 2 - sum(nbytes_of(one.ty) for one in known[place + 1 :])
        for one in reversed(known[:place]):
            size = nbytes_of(one.ty)
            if size <= last // 16:
                continue  # a bias: nothing to compute
            if size > left or any(self.position[k] < self.position[large] for k in reduces[one]):
                return
            own = self._own_bindings(one, reduces[one])
            left -= size if own else 0
            self.moved.update(dict.fromkeys(own, (self.position[large], size)))

    def _own_bindings(self, source: relax.Var, reduces: Sequence[relax.Var]) -> list[int]:
        """Return the bindings that only this gradient needs, with a matmul; else none."""
        own, read = {*reduces}, {source}
        for one in self.flow.bindings[self.position[source] :: -1]:
            if one.var not in read or self.flow.uses[one.var] != sum(
                reader in own for reader in self.flow.readers.get(one.var, ())
            ):
                continue
            own.add(one.var)
            read.update(variables_of(one.value))
        found = sorted(self.position[one] for one in own - {*reduces})
        names = (str(getattr(self.flow.bindings[k].value, "op", "")) for k in found)
        return found if any("matmul" in name for name in names) else []
