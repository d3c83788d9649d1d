# SPDX-License-Identifier: Apache-2.0
"""Changes of decisions by the user: calls that an Override selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import tvm_ffi
from tvm import relax

from amp_ir.amp.decisions import Decision, Mode
from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.amp.kernels import SET_BY_OPTION
from amp_ir.amp.override_texts import describe, explain_unchanged, explain_unused
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.errors import OptionError
from amp_ir.host.user_warning import warn_user
from amp_ir.ir.call_attributes import attribute_fields
from amp_ir.ir.options import dtype_name, meant_dtype
from amp_ir.ir.selection import is_inside
from amp_ir.ir.static_shape import shape_of
from amp_ir.ir.step_graph import Op, StepGraph, leaves

PHASES = ("forward", "backward", "optimizer")
_MODES = {
    "float32": Mode.FULL,
    "low": Mode.LOW,
    "free": Mode.VARY,
    "original": Mode.KEEP,
}
# The arguments as they were decided, and the result in float32.
_RESULT = "float32_result"
TARGETS = (*_MODES, _RESULT)
_EXPECTED = {
    "op": 'the name of an op or a glob, such as "relax.matmul"',
    "module": 'its path in the model or a glob, such as "encoder.layer.0"',
    "parameter": 'the name of a parameter or a glob, such as "head.weight"',
}


@attrs.frozen(kw_only=True)
class Override:
    """Select calls of a step and set their dtypes::

        Override(module="bert.encoder.layer.*.attention", op="amp_ir.softmax", to="float32")

    What is not given matches everything. `module` and `op` are globs, whose star matches dots
    too; a module path also selects what is inside of it. An op's name may be written without what
    precedes its last dot: `"matmul"`, `"gelu"`. PyTorch's own and custom ops that amp_ir
    has no kernel of have their names there: `"aten::lgamma"`, `"mylib::*"`. `parameter` is a glob
    over the names of inputs that the call reads, through views too. Backward calls carry the module
    of their forward call.
    Optimizer calls are selected by `phase="optimizer"` only.

    Attributes:
        to: "float32"; "low", the low dtype for the arguments and the result; "free", the placement
            chooses; "original", the dtypes of the user's program; "float32_result", the result
            alone in float32, where the op can leave another dtype than it reads (matmuls and
            convolutions can), else as "float32".
        argument: position of the one argument to change; the result then keeps its dtype.
        attributes: options of the op, and the values with which a call is selected:
            {"groups": (32,)}; with several, all of them must fit. Of the types there are
            "input_dtype", "input_ndim" and "input_shape" of the first tensor that the call reads.

    Precedence: of several that match a call, the last in the list decides. An override comes after
    everything else: the rule, CustomTypeHint, the policy, `autocast_off`, gradients in float32 and
    the check of constants.
    """

    to: str = attrs.field(converter=dtype_name)
    op: str | None = None
    module: str | None = None
    parameter: str | None = None
    phase: str | None = None
    argument: int | None = None
    attributes: Mapping[str, Sequence[Any]] | None = None

    @to.validator
    def _check_to(self, _attribute: object, value: str) -> None:
        if value not in TARGETS:
            accepted = ", ".join(map(repr, TARGETS))
            raise OptionError(
                f"Override(to={value!r}); expected one of {accepted}{meant_dtype(value, TARGETS)}"
            )

    def __attrs_post_init__(self) -> None:
        for name in ("op", "module", "parameter"):
            pattern = getattr(self, name)
            if not isinstance(pattern, str | None):
                raise OptionError(
                    f"Override({name}=) has a {type(pattern).__name__}; expected {_EXPECTED[name]}"
                )
        if self.phase not in (None, *PHASES):
            accepted = ", ".join(map(repr, PHASES))
            raise OptionError(f"Override(phase={self.phase!r}); expected one of {accepted}")
        if (self.op, self.module, self.parameter, self.phase) == (None,) * 4:
            raise OptionError(
                f"Override(to={self.to!r}) would select every call; give op, module, parameter or "
                "phase, or choose a policy"
            )

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return describe(self)

    def matches(self, op: Op, parameters: Sequence[str]) -> bool:
        """Return whether a call is selected; `parameters` are the names of the inputs it reads."""
        place = op.location
        if self.phase is None and place.phase == "optimizer":
            return False
        return (
            (self.phase is None or self.phase == place.phase)
            and (self.op is None or any(fnmatchcase(one, self.op) for one in op.names))
            and (self.module is None or is_inside(place.module, self.module))
            and (self.parameter is None or any(fnmatchcase(p, self.parameter) for p in parameters))
            and (self.attributes is None or _has_attributes(op, self.attributes))
        )


def call_attributes(op: Op) -> dict[str, Any]:
    """Return what an override may ask of a call: its options, and the type of its first tensor."""
    found = {}
    if op.call.attrs is not None:
        found = {key: _plain(value) for key, value in attribute_fields(op.call.attrs)[1].items()}
    tensors = [one for one in op.call.args if isinstance(one.ty, relax.TensorType)]
    if tensors:
        shape = shape_of(tensors[0])
        found |= {"input_dtype": str(tensors[0].ty.dtype), "input_ndim": len(shape)}
        found["input_shape"] = shape
    return found


def _plain(value: Any) -> Any:
    return tuple(_plain(one) for one in value) if isinstance(value, tvm_ffi.Array) else value


def _has_attributes(op: Op, wanted: Mapping[str, Sequence[Any]]) -> bool:
    found = call_attributes(op)
    # MXNet writes values as text.
    return all(
        name in found and (found[name] in values or str(found[name]) in values)
        for name, values in wanted.items()
    )


def listed(overrides: Any) -> Sequence[Override]:
    """Return the overrides that a user passes, which are a list or a tuple of them.

    Raises:
        OptionError: they are something else.
    """
    if isinstance(overrides, Override):
        raise OptionError(
            f"overrides is {overrides!r}; expected a list of them: overrides=[{overrides!r}]"
        )
    if not isinstance(overrides, (list, tuple)):
        raise OptionError(f"overrides is {overrides!r}; expected a list of amp_ir.Override(...)")
    for one in overrides:
        if not isinstance(one, Override):
            raise OptionError(f"overrides holds {one!r}; expected a list of amp_ir.Override(...)")
    return overrides


class QuietOverride(Override):
    """An Override that may change nothing: of a list for several models, or one that is tried."""

    @classmethod
    def of(cls, override: Override) -> QuietOverride:
        """Return an override as one that is not spoken of."""
        return cls(**attrs.asdict(override, recurse=False))


@attrs.define(eq=False)
class AppliedOverrides:
    """Overrides that are applied to the ops of a step, and to those in the bodies of its loops."""

    overrides: Sequence[Override]
    # The calls that each one selects, and the numbers of those that changed one.
    _selected: dict[int, list[Op]] = attrs.field(factory=dict)
    _changed: set[int] = attrs.field(factory=set)
    _scopes: list[tuple[StepGraph, Sequence[str]]] = attrs.field(factory=list)

    def apply(
        self, graph: StepGraph, decisions: Sequence[Decision], input_names: Sequence[str]
    ) -> None:
        """Change the decisions that overrides select; an input without a name is no parameter."""
        self._scopes.append((graph, input_names))
        if not self.overrides:
            return
        names = {leaf: name for leaf, name in zip(graph.inputs, input_names, strict=True) if name}
        for op in graph.ops:
            if op.is_view or op.name == LOOP:
                continue
            roots = (graph.values[leaf].root for leaf in op.reads)
            parameters = [names[root] for root in roots if root in names]
            chosen = [n for n, one in enumerate(self.overrides) if one.matches(op, parameters)]
            self._apply(graph, op, decisions[op.position], chosen)

    def _apply(self, graph: StepGraph, op: Op, decision: Decision, chosen: Sequence[int]) -> None:
        changing: set[int] = set()
        for number in chosen:
            override = self.overrides[number]
            before = attrs.evolve(decision, modes=list(decision.modes))
            _apply(graph, op, decision, override)
            self._selected.setdefault(number, []).append(op)
            if override.argument is None and override.to != _RESULT:
                # What came before has no effect on this call.
                changing.clear()
            if not _is_same(before, decision):
                changing.add(number)
        self._changed |= changing

    @property
    def op_names(self) -> set[str]:
        """The names of the ops that rules and overrides decide about."""
        ops = (op for graph, _ in self._scopes for op in graph.ops)
        return {op.name for op in ops if op.location.phase != "optimizer"}

    def check_all_used(self) -> None:
        """Report the overrides that selected nothing, and warn of those that changed nothing.

        Raises:
            OptionError: there are some of the first kind; it lists all of them, with near matches.
        """
        unused = [one for n, one in enumerate(self.overrides) if n not in self._selected]
        if unused:
            raise OptionError("\n".join(explain_unused(self._scopes, one) for one in unused))
        for number, calls in sorted(self._selected.items()):
            override = self.overrides[number]
            if number not in self._changed and not isinstance(override, QuietOverride):
                warn_user(explain_unchanged(self._scopes, override, calls))


def _apply(graph: StepGraph, op: Op, decision: Decision, override: Override) -> None:
    if override.to == _RESULT and op.name in SET_BY_OPTION:
        decision.rule, decision.reason = "override", f"Selected by {describe(override)}"
        decision.label = "full"
        return
    mode = _MODES.get(override.to, Mode.FULL)
    castable = [graph.values[leaf].dtype == FULL_DTYPE for leaf in op.reads]
    meant = castable
    if override.argument is not None:
        selected = _leaves_of_argument(op, override)
        meant = [can and n in selected for n, can in enumerate(castable)]
    for number, is_meant in enumerate(meant):
        if is_meant:
            decision.modes[number] = mode
    decision.rule, decision.reason = "override", f"Selected by {describe(override)}"
    if override.argument is None:
        has_result = any(graph.values[leaf].dtype == FULL_DTYPE for leaf in op.results)
        label = {"low": "low", "free": "free"}.get(override.to, "full")
        decision.label = label if has_result else "full"  # type: ignore[assignment]
        if label != "free":
            decision.sets_result = False


def _leaves_of_argument(op: Op, override: Override) -> set[int]:
    position = override.argument
    assert position is not None
    if not 0 <= position < len(op.args):
        raise OptionError(
            f"{describe(override)} selects argument {position} of {op.name} in {op.location}, "
            f"which has {len(op.args)}, counted from 0"
        )
    before = sum(len(leaves(tree)) for tree in op.args[:position])
    return set(range(before, before + len(leaves(op.args[position]))))


def _is_same(one: Decision, other: Decision) -> bool:
    """Return whether two decisions of an op give it the same dtypes."""
    return (one.modes, one.label, one.sets_result) == (other.modes, other.label, other.sets_result)
