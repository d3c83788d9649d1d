# SPDX-License-Identifier: Apache-2.0
"""What the updates of split state are computed from: all ranks need the same of it.

Each rank updates a part of every parameter, and all get the whole. Where plain copies would train
apart (another learning rate, a step size of the rank's own loss), parts would be put together that
belong to different trainings, and every rank would have them alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import attrs
import torch
from tvm import relax

from amp_ir.dialect.collectives import ALL_REDUCE, BROADCAST
from amp_ir.distributed.shards import Shards
from amp_ir.errors import ShardingError
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.location import from_span
from amp_ir.ir.short_list import short_list, short_names
from amp_ir.ir.step_module import InputSpec, Role, StepModule

# What comes out of these is the same on all ranks.
_ALIKE = frozenset({ALL_REDUCE, BROADCAST})
_KEPT = (Role.OPTIMIZER_STATE, Role.BUFFER, Role.SCALER_STATE)
# A gradient is one that was in p.grad before, and that the step does not exchange.
_READ_AT_EACH_CALL = (
    Role.HYPER_PARAMETER, Role.SCALER_STATE, Role.RANDOM_STATE, Role.BATCH, Role.GRADIENT,
)  # fmt: skip


@attrs.frozen
class SplitUpdates:
    """The ops of the updates, in order, and the inputs that they read, up to exchanges.

    `own` are ops that compute with what a rank has of its own batch, with what they lead to, and
    `split` the names of the state in parts, and of its parameters.
    """

    ops: tuple[relax.VarBinding, ...] = ()
    inputs: tuple[InputSpec, ...] = ()
    own: dict[str, list[str]] = attrs.field(factory=dict)
    split: tuple[str, ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of inputs whose values are compared at each call."""
        return tuple(one.name for one in self.inputs if one.role in _READ_AT_EACH_CALL)

    @property
    def kept_numbers(self) -> tuple[str, ...]:
        """The names of numbers that the step itself changes: alike once, they stay so."""
        kept = (one for one in self.inputs if one.role in _KEPT and one.name not in self.split)
        return tuple(one.name for one in kept if math.prod(one.shape) == 1)


def refuse_own_updates(mod: StepModule) -> None:
    """Require updates that are the same on all ranks, of a step that is to be split.

    Raises:
        ShardingError: one is computed from a rank's own batch; lists the ops.
    """
    own = find_split_updates(mod).own
    if not own:
        return
    listed = short_list([f"{op}, for {short_names(names)}" for op, names in own.items()])
    raise ShardingError(
        "shard= leaves each rank a part of every update, and puts the parts together, so ranks "
        "have to update alike; here they compute with numbers of their own batch, which no "
        f"exchange has made alike: {listed}. Compute updates from what backward() leaves in p.grad "
        "outside of no_sync, and from numbers that all ranks have, or leave shard= out: then each "
        "rank trains on its own numbers, as in PyTorch"
    )


def find_split_updates(mod: StepModule) -> SplitUpdates:
    """Return what the updates of a step, as it was captured, are computed from."""
    return _Search(mod).run()


class _Search:
    """From what is updated back to exchanges and inputs."""

    def __init__(self, mod: StepModule) -> None:
        self.mod = mod
        self.flow = Dataflow(mod.ir)
        self.specs = dict(zip(self.flow.main.params, mod.signature.inputs, strict=True))
        self.reached: dict[relax.Var, InputSpec] = {}
        self.seen: set[relax.Var] = set()
        self.own: dict[str, list[str]] = {}

    def run(self) -> SplitUpdates:
        """Search from all that is split, and from numbers of the state that this leads to."""
        inputs = self.mod.signature.inputs
        updated = {
            inputs[one.updates].name: field
            for one, field in zip(self.mod.signature.outputs, self.flow.fields, strict=True)
            if one.updates is not None
        }
        split = list(self._split())
        due = [name for name in split if name in updated]
        done: set[str] = set()
        while due:
            name = due.pop()
            done.add(name)
            self._search(updated[name], name)
            kept = (one.name for one in self.reached.values() if one.role in _KEPT)
            due += [one for one in kept if one in updated and one not in (*done, *due)]
        ops = [one for one in self.flow.bindings if one.var in self.seen]
        read = [one for variable, one in self.specs.items() if variable in self.reached]
        return SplitUpdates(tuple(ops), tuple(read), self.own, tuple(split))

    def _split(self) -> Iterator[str]:
        """Return the names of the state in parts, and of its parameters."""
        shards: Shards = self.mod.hooks.ranks.shards
        held = [(one, self.mod.state.get(one.name)) for one in self.mod.signature.inputs]
        names = {id(tensor): one.name for one, tensor in held if one.role is Role.PARAMETER}
        for one, tensor in held:
            if one.role is Role.OPTIMIZER_STATE and isinstance(tensor, torch.Tensor):
                owner = shards.parameter_of(tensor)
                if owner is not None:
                    yield one.name
                    yield names[id(owner)]

    @functools.cached_property
    def _of_own_batch(self) -> set[relax.Var]:
        """Return what depends on a rank's batch; a number of it may be one that all ranks have."""
        batch = [one for one, spec in self.specs.items() if spec.role is Role.BATCH]
        found = {one for one in batch if math.prod(self.specs[one].shape) != 1}
        for variable, value in self.flow.values.items():
            if op_name(value) not in _ALIKE and not found.isdisjoint(variables_of(value)):
                found.add(variable)
        return found

    @functools.cached_property
    def _of_updates(self) -> set[relax.Var]:
        """Return what depends on exchanged gradients or the optimizers' state."""
        state = [v for v, spec in self.specs.items() if spec.role is Role.OPTIMIZER_STATE]
        found = set(state)
        for variable, value in self.flow.values.items():
            if op_name(value) in _ALIKE or not found.isdisjoint(variables_of(value)):
                found.add(variable)
        return found

    def _search(self, field: relax.Expr, name: str) -> None:
        due = variables_of(field)
        while due:
            variable = due.pop()
            if variable in self.specs:
                self.reached[variable] = self.specs[variable]
                continue
            value = self.flow.values[variable]
            read = variables_of(value)
            if variable in self._of_own_batch and self._brings_own(read):
                what = f"{op_name(value) or 'a result'} in {from_span(value.span)}"
                names = self.own.setdefault(what, [])
                names += [name] if name not in names else []
            elif variable not in self.seen and op_name(value) not in _ALIKE:
                self.seen.add(variable)
                due += read

    def _brings_own(self, read: Sequence[relax.Var]) -> bool:
        """Return whether an op that reads these brings numbers of a rank's own into an update."""
        own = self._of_own_batch.intersection(read)
        return any(one in self.specs or one not in self._of_updates for one in own)
