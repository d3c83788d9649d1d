# SPDX-License-Identifier: Apache-2.0
"""Let each rank update its part of the parameters, and exchange what that needs.

This runs on the step as it was captured, before the other collectives are begun. A value has one of
two shardings, or both: whole on every rank, as it was captured, or the part of a parameter that
this rank holds, flat. `wanted_parts.py` finds the shardings of every value, from the results back,
and this pass writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow, variables_of
from amp_ir.ir.elementwise_ops import is_elementwise
from amp_ir.ir.static_shape import extents_of, shape_of
from amp_ir.ir.step_module import InputSpec, StepModule
from amp_ir.rewrites.shard_plan import ShardPlan
from amp_ir.rewrites.sharded_program import ShardedProgram
from amp_ir.rewrites.wanted_parts import WantedParts, is_sum


def shard_updates(mod: StepModule, plan: ShardPlan) -> StepModule:
    """Update on each rank the part of the parameters whose optimizer state it holds.

    Before:  r = all_reduce(g); m1 = 0.9 * m + r; p1 = p - 0.1 * m1            # all f32[8]
    After:   f = reduce_scatter_start(g); s = reduce_scatter_wait(f); r = average(s)
             m1 = 0.9 * m + r; q = p[0:4] - 0.1 * m1                           # f32[4], m too
             f = all_gather_start(q); p1 = all_gather_wait(f)

    - A value is written as a part where all that leads to it is elementwise; what is computed from
      no gradient and no state is sliced.
    - A sum over a part is added over the ranks, with all others that can be at once: norms of
      gradients, and the check for infinities with the norm that it returns.
    - A gradient that is wanted whole as well (left in `p.grad`) is all-reduced, and sliced.
    - What computes with an updated parameter reads the gathered one.

    Requires: whole collectives; no loops.
    Ensures:  ops and exchanges come in one order on all ranks. State without an element on this
              rank is no input any more.
    Errors:   ShardingError, listing every op that needs whole what is split.
    """
    flow = Dataflow(mod.ir)
    wanted = WantedParts(flow, mod, plan)
    wanted.find()
    return _Writer(flow, mod, plan, wanted).run()


class _Writer:
    """Writes each value in its shardings.

    A sum over the ranks ends a level: all that can be computed without it comes before it, so that
    sums of one level travel together.
    """

    def __init__(
        self, flow: Dataflow, mod: StepModule, plan: ShardPlan, wanted: WantedParts
    ) -> None:
        self.flow = flow
        self.mod = mod
        self.plan = plan
        self.wanted = wanted
        self.position = {binding.var: k for k, binding in enumerate(flow.bindings)}
        self.level = self._levels()
        self.out = ShardedProgram(flow, plan.rank)
        self.scattered: set[relax.Var] = set()
        self.sums: dict[int, list[relax.Var]] = {}
        for one in sorted(wanted.summed, key=self.position.__getitem__):
            self.sums.setdefault(self.level[one, None], []).append(one)
        self.inputs: list[tuple[relax.Var, InputSpec]] = []

    def run(self) -> StepModule:
        self._write_inputs()
        items = [
            (
                self.level[variable, sharding],
                self.position[variable],
                sharding or "",
                variable,
                sharding,
            )
            for variable, shardings in self.wanted.shardings.items()
            if variable in self.position
            for sharding in shardings
        ]
        for _level, _place, _, variable, sharding in sorted(items, key=lambda one: one[:3]):
            self._write(variable, self.flow.values[variable], sharding)
        return self._finished()

    def _levels(self) -> dict[tuple[relax.Var, str | None], int]:
        """Return how many sums over the ranks come before each value."""
        level: dict[tuple[relax.Var, str | None], int] = {}
        together = self.wanted.groups(list(self.wanted.scattered))
        known = dict.fromkeys(together, 0)
        while True:
            level.clear()
            for variable, value in self.flow.values.items():
                for sharding in self.wanted.shardings.get(variable, ()):
                    read = [level.get(one, 0) for one in self._read(variable, value, sharding)]
                    found = max(read, default=0)
                    if sharding is not None and variable in self.wanted.scattered:
                        found = max(found, known[self.wanted.backward_of(variable)])
                    is_sum_of_ranks = sharding is None and variable in self.wanted.summed
                    level[variable, sharding] = found + is_sum_of_ranks
                for sharding in self.wanted.shardings.get(variable, ()):
                    if sharding is None and variable in self.wanted.gathered:
                        level[variable, None] = level[variable, self.wanted.gathered[variable]]
            now = {
                key: max(level.get((self.flow.values[one].args[0], None), 0) for one in reduces)
                for key, reduces in together.items()
            }
            if all(now[key] <= known[key] for key in known):
                return level
            known = {key: max(known[key], now[key]) for key in known}

    def _read(
        self, variable: relax.Var, value: Any, sharding: str | None
    ) -> Iterator[tuple[relax.Var, str | None]]:
        """Return what a value in one sharding is computed from."""
        if sharding is None and variable in self.wanted.gathered:
            return
        if sharding is None and variable in self.wanted.summed:
            yield from ((one, self.wanted.owner(one)) for one in variables_of(value))
        elif sharding is None or variable in self.wanted.scattered:
            yield from ((one, None) for one in variables_of(value))
        elif self._is_sliced(variable, value):
            yield from ((one, None) for one in variables_of(value))
        else:
            for one in variables_of(value):
                yield one, sharding if shape_of(one) == shape_of(variable) else None

    def _is_sliced(self, variable: relax.Var, value: Any) -> bool:
        """Return whether the part of a value is cut out of the whole."""
        is_own = is_elementwise(value) and WantedParts.is_computed_so(variable, value)
        return not is_own and variable not in self.wanted.scattered

    def _write_inputs(self) -> None:
        for variable, spec in self.wanted.inputs:
            owner = self.wanted.part_of.get(variable)
            if owner is None:
                self.out.now[variable, None] = variable
                self.inputs.append((variable, spec))
                continue
            place = self.plan.places[owner]
            size = place.end - place.first
            if size:
                part = relax.Var(str(variable.name), relax.TensorType([size], spec.dtype))
                self.out.now[variable, owner] = part
                self.inputs.append((part, attrs.evolve(spec, shape=(size,))))

    def _write(self, variable: relax.Var, value: Any, sharding: str | None) -> None:
        if sharding is None:
            self._write_whole(variable, value)
        elif variable in self.wanted.scattered:
            self._scatter_backward(variable)
        elif self._is_sliced(variable, value):
            return  # cut out where it is read
        else:
            self._write_part(variable, value, sharding)

    def _write_whole(self, variable: relax.Var, value: Any) -> None:
        if variable in self.wanted.gathered or variable in self.wanted.summed:
            return  # gathered, or added over the ranks, where it is read
        now = {one: self.whole(one) for one in variables_of(value)}
        self.out.copy(variable, now)

    def _write_part(self, variable: relax.Var, value: relax.Call, sharding: str) -> None:
        shape = shape_of(variable)
        arguments = []
        for one in value.args:
            is_tensor = isinstance(getattr(one, "ty", None), relax.TensorType)
            if not is_tensor:
                arguments.append(one)
            elif shape_of(one) == shape:
                arguments.append(self.part(one, sharding))
            else:
                arguments.append(self.number(one))
        place = self.plan.places[sharding]
        self.out.written.add((variable, sharding))
        if place.end > place.first:
            self.out.write_part(variable, sharding, value, arguments)

    def number(self, expr: relax.Expr) -> relax.Expr:
        """Return a value of one element as a number, of whatever shape it was."""
        whole = self.whole(expr)
        return whole if not shape_of(whole) else self.out.reshaped(whole, ())

    def whole(self, expr: relax.Expr) -> relax.Expr:
        """Return a value as it was captured; what all ranks compute together is begun here."""
        if not isinstance(expr, relax.Var):
            return expr
        if (expr, None) not in self.out.now:
            if expr in self.wanted.gathered:
                self._gather(expr)
            else:
                self._sum_level(self.level[expr, None])
        return self.out.now[expr, None]

    def part(self, expr: relax.Expr, sharding: str) -> relax.Expr | None:
        """Return this rank's part of a value; None where it has none."""
        place = self.plan.places[sharding]
        if (expr, sharding) in self.out.now:
            return self.out.now[expr, sharding]
        if isinstance(expr, relax.Var) and expr in self.wanted.scattered:
            self._scatter_backward(expr)
            return self.out.now.get((expr, sharding))
        if isinstance(expr, relax.Var) and expr in self.wanted.part_of:
            return None
        if isinstance(expr, relax.Var) and (expr, sharding) in self.level:
            value = self.flow.values[expr]
            if not self._is_sliced(expr, value):
                return None  # it was written, of nothing
        whole = self.whole(expr)
        if place.end == place.first:
            return None
        made = self.out.sliced(whole, place.first, place.end)
        if isinstance(expr, relax.Var):
            self.out.now[expr, sharding] = made
        return made

    def _scatter_backward(self, reduce: relax.Var) -> None:
        """Exchange all gradients of a backward pass, in the order in which they are known."""
        if reduce in self.scattered:
            return
        backward, _ = self.wanted.backward_of(reduce)
        groups = self.wanted.groups(list(self.wanted.scattered))
        due = [group for key, group in groups.items() if key[0] == backward]
        due = [group for group in due if group[0] not in self.scattered]
        level = self.level[reduce, self.wanted.scattered[reduce]]
        due = [g for g in due if self.level[g[0], self.wanted.scattered[g[0]]] <= level]
        due.sort(key=lambda group: max(self._known_at(one) for one in group))
        begun = []
        for group in due:
            self.scattered.update(group)
            places = [self.plan.places[self.wanted.scattered[one]] for one in group]
            order = sorted(range(len(group)), key=lambda k: places[k].offset)
            calls = [self.flow.values[group[k]] for k in order]
            sources = [self.whole(call.args[0]) for call in calls]
            known = [(group[k], places[k]) for k in order]
            begun.append(self.out.begin_scatter(calls, sources, known))
        for one in begun:
            self.out.end_scatter(one, self.wanted.scattered)

    def _known_at(self, reduce: relax.Var) -> int:
        return self.position.get(self.flow.values[reduce].args[0], -1)

    def _gather(self, parameter: relax.Var) -> None:
        """Give all ranks the updated parameters of a bucket that are known by now."""
        bucket = self.plan.places[self.wanted.gathered[parameter]].bucket
        members = []
        for one, name in self.wanted.gathered.items():
            place = self.plan.places[name]
            is_due = place.bucket is bucket and (one, None) not in self.out.now
            if is_due and (one, name) in self.out.written:
                members.append((one, place, self.part(one, name)))
        # A parameter that is updated twice before it is read has two values; one goes.
        of_member = {place.member: (one, place, part) for one, place, part in members}
        for one, place, part in members:
            if one.same_as(parameter):
                of_member[place.member] = one, place, part
        once = sorted(of_member.values(), key=lambda one: one[1].offset)
        self.out.gather(bucket, once, [self.wanted.gathered[one] for one, _, _ in once])

    def _sum_level(self, level: int) -> None:
        """Add the sums of a level over the ranks, in one exchange."""
        terms = []
        for variable in self.sums[level]:
            value = self.flow.values[variable]
            if is_sum(value):
                owner = self.wanted.owner(value.args[0])
                assert owner is not None
                terms.append(self.out.sum_of_part(variable, value, self.part(value.args[0], owner)))
            else:
                terms += self._check(variable, value)
        group = next(iter(self.plan.buckets.values()))
        self.out.sum_over_ranks(terms, group.group, group.ranks)

    def _check(self, variable: relax.Var, value: relax.Call) -> list[Any]:
        """Return the terms of a check of gradients: how many are not finite, and their squares."""
        *gradients, scale = value.args
        parts, wholes = [], []
        for one in gradients:
            owner = self.wanted.owner(one)
            if owner is None:
                wholes.append(self.whole(one))
            else:
                found = self.part(one, owner)
                parts += [] if found is None else [found]
        return self.out.check_of_parts(variable, value, parts, wholes, self.whole(scale))

    def _finished(self) -> StepModule:
        fields = []
        outputs = []
        positions = {spec.name: k for k, (_, spec) in enumerate(self.inputs)}
        for spec, field in zip(self.mod.signature.outputs, self.flow.fields, strict=True):
            name = None if spec.updates is None else self.wanted.inputs[spec.updates][1].name
            owner = None if name is None else self.plan.parts.get(name)
            found = self.whole(field) if owner is None else self.part(field, owner)
            if found is None:
                continue
            shape = spec.shape if owner is None else extents_of(found.ty)
            updates = None if name is None else positions[name]
            outputs.append(attrs.evolve(spec, shape=shape, updates=updates))
            fields.append(found)
        parameters = [one for one, _ in self.inputs]
        ir: tvm.IRModule = self.out.finish(parameters, fields, self.wanted.whole_reduces)
        signature = attrs.evolve(
            self.mod.signature,
            inputs=tuple(spec for _, spec in self.inputs),
            outputs=tuple(outputs),
        )
        kept = {spec.name for spec in signature.inputs}
        state = {name: one for name, one in self.mod.state.items() if name in kept}
        return attrs.evolve(self.mod, ir=ir, signature=signature, state=state)
