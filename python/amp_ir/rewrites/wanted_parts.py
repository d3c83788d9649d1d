# SPDX-License-Identifier: Apache-2.0
"""Find the sharding of each value of a step: whole on every rank, or the part that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from amp_ir.dialect.collectives import ALL_REDUCE
from amp_ir.dialect.registry import options_of
from amp_ir.errors import ShardingError
from amp_ir.ir.dataflow import Dataflow, op_name, variables_of
from amp_ir.ir.elementwise_ops import is_elementwise
from amp_ir.ir.location import from_span
from amp_ir.ir.short_list import short_names
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, StepModule
from amp_ir.rewrites.shard_plan import ShardPlan

_ALL_FINITE = "amp_ir.all_finite"


def is_sum(value: Any) -> bool:
    """Return whether an op adds all elements of a tensor."""
    if op_name(value) != "relax.sum":
        return False
    axes = value.attrs.axis
    return axes is None or len(axes) == len(shape_of(value.args[0]))


class WantedParts:
    """The shardings in which each value is needed: None is whole, a name the part of a parameter.

    `shardings` has them by variable, `scattered` the all-reduces that become reduce-scatters,
    `gathered` the updated parameters that all ranks get, with the parameter of each, and `summed`
    the sums and checks that become sums over the ranks. `whole_reduces` stay all-reduces, also on
    ranks that read nothing of them.
    """

    def __init__(self, flow: Dataflow, mod: StepModule, plan: ShardPlan) -> None:
        self.flow = flow
        self.plan = plan
        self.outputs = mod.signature.outputs
        pairs = list(zip(flow.main.params, mod.signature.inputs, strict=True))
        self.inputs: list[tuple[relax.Var, InputSpec]] = pairs
        self.part_of = {v: plan.parts[one.name] for v, one in pairs if one.name in plan.parts}
        self.shapes = {one.name: one.shape for _, one in pairs}
        self.shardings: dict[relax.Var, set[str | None]] = {}
        self.gathered: dict[relax.Var, str] = {}
        self.scattered: dict[relax.Var, str] = {}
        self.summed: set[relax.Var] = set()
        self.whole_reduces: set[relax.Var] = set()
        self._owners: dict[relax.Var, str] = dict(self.part_of)
        self._from_state = set(self.part_of)
        # The first op that wants a value whole and is not elementwise; None for a result.
        self._why: dict[relax.Var, relax.Call | None] = {}

    def find(self) -> None:
        """Find the shardings of all values.

        Raises:
            ShardingError: state is wanted whole.
        """
        self._find_owners()
        self.whole_reduces = self._too_thin()
        for spec, field in zip(self.outputs, self.flow.fields, strict=True):
            self._want_result(spec, field)
        for binding in reversed(self.flow.bindings):
            shardings = self.shardings.get(binding.var, set())
            if shardings and isinstance(binding.value, relax.Tuple):
                continue
            # What is whole may be sliced, so the parts come first.
            for sharding in sorted(shardings, key=lambda one: one is None):
                self._want_for(binding.var, binding.value, sharding)
        self._refuse()

    def owner(self, expr: relax.Expr) -> str | None:
        """Return the parameter of whose part a value can be computed; None for a whole value."""
        return self._owners.get(expr) if isinstance(expr, relax.Var) else None

    def backward_of(self, reduce: relax.Var) -> tuple[int, int]:
        """Return the backward pass and the bucket of a gradient's all-reduce."""
        options = options_of(self.flow.values[reduce])
        place = self.plan.places[str(options["parameter"])]
        return int(options["backward"]), place.bucket.number

    def groups(self, reduces: Sequence[relax.Var]) -> dict[tuple[int, int], list[relax.Var]]:
        """Return the gradients that are scattered together."""
        found: dict[tuple[int, int], list[relax.Var]] = {}
        for one in reduces:
            found.setdefault(self.backward_of(one), []).append(one)
        return found

    def _find_owners(self) -> None:
        """Learn what carries state or gradients in parts."""
        for variable, value in self.flow.values.items():
            name = op_name(value)
            if name == ALL_REDUCE:
                parameter = str(options_of(value)["parameter"])
                if parameter in self.plan.places:
                    self._owners[variable] = parameter
            elif is_elementwise(value):
                alike = [one for one in _tensors(value) if self._is_part_like(one, variable)]
                owners = {self._owners[one] for one in alike if one in self._owners}
                if len(owners) == 1:
                    self._owners[variable] = owners.pop()
                if any(one in self._from_state for one in alike):
                    self._from_state.add(variable)

    @staticmethod
    def _is_part_like(one: relax.Expr, result: relax.Var) -> bool:
        return shape_of(one) == shape_of(result)

    def _too_thin(self) -> set[relax.Var]:
        """Return the gradients of groups that are a small part of a bucket, for some ranks nothing.

        They are all-reduced: a reduce-scatter is of the whole range of the bucket.
        """
        reduces = [one for one in self.flow.calls(ALL_REDUCE) if one in self._owners]
        thin: set[relax.Var] = set()
        for group in self.groups(reduces).values():
            places = [self.plan.places[self._owners[one]] for one in group]
            bucket, members = places[0].bucket, [one.member for one in places]
            if bucket.share_of(members) < 0.5 and not bucket.reaches_all(members):
                thin.update(group)
        return thin

    def _want_result(self, spec: OutputSpec, field: relax.Expr) -> None:
        if not isinstance(field, relax.Var):
            return
        target = None if spec.updates is None else self.inputs[spec.updates][0]
        if target in self.part_of:
            self._want(field, self.part_of[target])
            return
        owner = self.owner(field)
        is_parameter = spec.role is Role.PARAMETER and spec.name in self.plan.places
        if is_parameter and owner == spec.name and field in self._from_state:
            self.gathered[field] = spec.name
        self._want(field, None)
        if owner is not None and spec.role is Role.GRADIENT and self.plan.drops_gradients:
            raise ShardingError(
                f'shard="gradients" leaves no whole gradient, and the step ends with one in '
                f"{spec.name}; call optimizer.zero_grad() in the step, or use "
                'shard="optimizer"'
            )

    def _want(self, expr: relax.Expr, sharding: str | None, why: relax.Call | None = None) -> None:
        if isinstance(expr, relax.Var):
            self.shardings.setdefault(expr, set()).add(sharding)
            if sharding is None and self._why.get(expr) is None:
                self._why[expr] = why

    def _want_for(self, variable: relax.Var, value: Any, sharding: str | None) -> None:
        """Add the shardings that a binding's arguments need for one of its own."""
        if sharding is None:
            self._want_for_whole(variable, value)
        elif op_name(value) == ALL_REDUCE:
            if variable in self.whole_reduces:
                self._want(variable, None)
                self._want_for_whole(variable, value)
            elif None not in self.shardings[variable]:
                self.scattered[variable] = sharding
                self._want(value.args[0], None)
        elif is_elementwise(value) and self.is_computed_so(variable, value):
            for one in _tensors(value):
                is_part = self._is_part_like(one, variable)
                self._want(one, sharding if is_part else None, value)
        else:
            self._want(variable, None, value if isinstance(value, relax.Call) else None)
            self._want_for_whole(variable, value)

    @staticmethod
    def is_computed_so(variable: relax.Var, value: relax.Call) -> bool:
        """Return whether each argument is a number, or has the shape of the result."""
        shape = shape_of(variable)
        return all(shape_of(one) in (shape, ()) or _is_one(one) for one in _tensors(value))

    def _want_for_whole(self, variable: relax.Var, value: Any) -> None:
        why = self._why.get(variable)
        if variable in self.gathered:
            self._want(variable, self.gathered[variable])
            self._want_for(variable, value, self.gathered[variable])
        elif variable in self._from_state and self._is_read_by_model(variable, why):
            self.gathered[variable] = owner = self._owners[variable]
            self._want(variable, owner)
            self._want_for(variable, value, owner)
        elif (is_sum(value) or op_name(value) == _ALL_FINITE) and any(map(self.owner, value.args)):
            self.summed.add(variable)
            for one in value.args:
                self._want(one, self.owner(one), value)
        else:
            why = why if is_elementwise(value) else value if isinstance(value, relax.Call) else why
            for one in variables_of(value):
                self._want(one, None, why)

    def _is_read_by_model(self, variable: relax.Var, why: relax.Call | None) -> bool:
        """Return whether what wants a parameter's value whole is no op of the optimizer."""
        owner = self._owners.get(variable)
        if why is None or owner is None or shape_of(variable) != self.shapes[owner]:
            return False
        return from_span(why.span).phase != "optimizer"

    def _refuse(self) -> None:
        wrong: dict[str, list[str]] = {}
        for variable, spec in self.inputs:
            if variable not in self.part_of or None not in self.shardings.get(variable, ()):
                continue
            why = self._why.get(variable)
            what = "a result" if why is None else f"{op_name(why)} in {from_span(why.span)}"
            wrong.setdefault(what, []).append(spec.name)
        if wrong:
            listed = "; ".join(
                f"{what} reads {short_names(names)}" for what, names in wrong.items()
            )
            raise ShardingError(
                f"shard= splits the optimizer's state over the ranks, and the step needs it whole: "
                f"{listed}. Only optimizers that compute each element alone can be split (SGD, "
                "Adam, AdamW, RMSprop, Adagrad and the like); leave shard= out for this one"
            )


def _tensors(value: relax.Call) -> list[relax.Expr]:
    return [one for one in value.args if isinstance(getattr(one, "ty", None), relax.TensorType)]


def _is_one(expr: relax.Expr) -> bool:
    return all(extent == 1 for extent in shape_of(expr))
