# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a step agree on: its exchanges, its state, and for equal batches its ops."""

from __future__ import annotations

import functools
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.distributed.compared_casts import (
    options_of_casts,
    own_decisions,
    rules_of_gradients,
)
from amp_ir.distributed.split_updates import SplitUpdates, find_split_updates
from amp_ir.ir.call_attributes import attribute_fields
from amp_ir.ir.collective_call import SYMBOLS
from amp_ir.ir.dataflow import Dataflow, op_name
from amp_ir.ir.location import from_span
from amp_ir.ir.memory_plan import MemoryPlan
from amp_ir.ir.step_module import InputSpec, Role, StepModule


@attrs.frozen(slots=False)
class Contract:
    """A program as its ranks compare it, a line an item.

    `collectives` are those of the plan in the order in which they begin and end, `state` the
    tensors that the step works on, and `ops` the program before it was planned. Ranks whose
    batches have other shapes (`batch`) have other ops. `step` is the step's name in its group.
    `updates` are the ops of updates that are split, and `numbers` and `kept_numbers` the names of
    inputs that they read: values that are compared at each call, and at the first one. With
    `carries` an exchange can take their digest along before anything is written. `casts` are the
    options of autocast, `own_casts` what rules of the user's decide.
    """

    collectives: tuple[str, ...]
    state: tuple[str, ...]
    ops: tuple[str, ...]
    batch: str
    step: str = "step"
    updates: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    kept_numbers: tuple[str, ...] = ()
    carries: bool = False
    casts: tuple[str, ...] = ()
    own_casts: tuple[str, ...] = ()

    @functools.cached_property
    def exchange_digest(self) -> str:
        """A digest of what has to be alike in every program that runs at the same step."""
        casts = (self.casts, self.own_casts)
        lists = (*casts, self.collectives, self.state, self.updates, self.numbers)
        return _digest([self.step, *("\n".join([str(len(one)), *one]) for one in lists)])

    @functools.cached_property
    def digest(self) -> str:
        """A digest of everything."""
        return _digest([self.exchange_digest, self.batch, *self.ops])

    @functools.cached_property
    def batch_digest(self) -> str:
        """A digest of the shapes and dtypes of the batch."""
        return _digest([self.batch])

    def to_bytes(self) -> bytes:
        """Return it as the store holds it."""
        return zlib.compress(json.dumps(attrs.asdict(self)).encode())

    @classmethod
    def from_bytes(cls, data: bytes) -> Contract:
        """Read what `to_bytes` wrote."""
        known = json.loads(zlib.decompress(data))
        values: dict[str, Any] = {
            name: tuple(one) if isinstance(one, list) else one for name, one in known.items()
        }
        return cls(**values)

    def difference(self, first: Contract) -> str:
        """Describe the first difference to rank 0's: "..., and on rank 0 ..."; "" for none."""
        if self.step != first.step:
            return f"the step is {self.step}, and on rank 0 {first.step}"
        parts = [
            ("option of autocast", self.casts, first.casts),
            ("cast of your own rules", self.own_casts, first.own_casts),
            ("tensor of the state", self.state, first.state),
            ("collective", self.collectives, first.collectives),
            ("op of the updates", self.updates, first.updates),
            ("number that updates read", self.numbers, first.numbers),
        ]
        if self.batch == first.batch:
            parts.insert(3, ("op", self.ops, first.ops))
        found = (_first_difference(*one) for one in parts)
        return next((one for one in found if one), "")


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _first_difference(kind: str, own: Sequence[str], first: Sequence[str]) -> str:
    for k in range(max(len(own), len(first))):
        mine = own[k] if k < len(own) else "nothing"
        theirs = first[k] if k < len(first) else "nothing"
        if mine != theirs:
            return f"{kind} {k + 1} is {mine}, and on rank 0 {theirs}"
    return ""


def contract_of(mod: StepModule, plan: MemoryPlan, step: str) -> Contract:
    """Return what a planned step, with its name, agrees on with those of other ranks."""
    # Ranks that split the optimizers' state have parts of other sizes.
    whole = mod if mod.whole is None else mod.whole
    inputs = whole.signature.inputs
    # Programs that differ may wait elsewhere; what begins has to be alike.
    compared = SYMBOLS if mod.whole is None else {START_SYMBOL}
    collectives = tuple(_described(call) for call in plan.calls if call.symbol in compared)
    batch = [one for one in inputs if one.role is Role.BATCH]
    split = SplitUpdates() if mod.whole is None else find_split_updates(mod.whole)
    return Contract(
        collectives,
        tuple(_spec(one) for one in inputs if one.role is not Role.BATCH),
        (*_lines(Dataflow(whole.ir).bindings), *(rules_of_gradients(mod) if mod.whole else ())),
        "; ".join(map(_spec, batch)),
        step,
        tuple(_lines(split.ops)),
        split.numbers,
        split.kept_numbers,
        _carries(plan),
        options_of_casts(mod),
        own_decisions(mod),
    )


def _carries(plan: MemoryPlan) -> bool:
    """Return whether sums arrive before the first new parameters are sent, alike on all ranks.

    What is gathered is written after its wait, and nothing before it.
    """
    begun = [op for call in plan.calls if call.symbol == START_SYMBOL for op in call.ops]
    split = [one for one in begun if one in ("reduce_scatter_start", "all_gather_start")]
    return split[:1] == ["reduce_scatter_start"] and "all_gather_start" in split


def _described(call: Any) -> str:
    verb = "start" if call.symbol == START_SYMBOL else "wait"
    modules = ", ".join(dict.fromkeys(one.module or "step" for one in call.locations))
    return f"{verb} of {', '.join(call.ops)}, {call.sent_nbytes} bytes of {modules}"


def _spec(one: InputSpec) -> str:
    return f"{one.name} {one.dtype}{list(one.shape)}"


def _lines(bindings: Iterable[relax.VarBinding]) -> Iterator[str]:
    for binding in bindings:
        value = binding.value
        if isinstance(value, relax.Call):
            where = from_span(value.span)
            place = f"{where.module or 'step'} ({where.phase})"
            options = _options(value)
            constants = _constants(value)
            yield f"{op_name(value)} {_type(value.ty)} of {place}{options}{constants}"


def _type(type_: relax.Type) -> str:
    if isinstance(type_, relax.TupleType):
        return f"({', '.join(_type(one) for one in type_.fields)})"
    if isinstance(type_, relax.TensorType) and type_.shape is not None:
        return f"{type_.dtype}{[int(one) for one in type_.shape]}"
    return str(type_)


def _options(call: relax.Call) -> str:
    if call.attrs is None:
        return ""
    fields = attribute_fields(call.attrs)[1]
    # A loop's body is long.
    shown = (f"{name}={str(fields[name])[:80]}" for name in sorted(fields))
    whole = hashlib.sha256(repr([str(fields[k]) for k in sorted(fields)]).encode()).hexdigest()
    return f" with {', '.join(shown)} [{whole[:8]}]" if fields else ""


def _constants(call: relax.Call) -> str:
    found = []
    for one in call.args:
        if isinstance(one, GenericConst) and isinstance(one.ty, relax.TensorType):
            numbers = one.value.numpy()
            digest = hashlib.sha256(numbers.tobytes()).hexdigest()[:8]
            found.append(str(numbers) if numbers.size == 1 else f"a constant [{digest}]")
        elif not isinstance(one, (relax.Var, relax.Tuple)):
            found.append(str(one))
    return f" and {', '.join(found)}" if found else ""
