# SPDX-License-Identifier: Apache-2.0
"""StepModule: a captured step as IR, with the names and tensors of its state."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.uncast import uncast


class Role(enum.Enum):
    """The role of a step's input or output for the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    HYPER_PARAMETER = "hyper_parameter"
    SCALER_STATE = "scaler_state"
    RANDOM_STATE = "random_state"
    BATCH = "batch"
    RESULT = "result"
    INDEX_EXTREMES = "index_extremes"


@attrs.frozen
class InputSpec:
    """One input of `main`, in order. `shape` holds extents, `dtype` is TVM's name ("float32").

    `order` is that of the dimensions in memory, as `ir/memory_order.py` has it.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    order: tuple[int, ...] = ()

    @property
    def is_state(self) -> bool:
        """Whether the input belongs to the step rather than to one call of it."""
        return self.role is not Role.BATCH


@attrs.frozen
class OutputSpec:
    """One field of the tuple that `main` returns, in order.

    `updates` is the position of the input whose tensor takes this value after the step, or None
    for a result that is returned to the caller. Of a result, `order` is that of its dimensions in
    memory.
    """

    name: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    updates: int | None = None
    order: tuple[int, ...] = ()


@attrs.frozen
class Signature:
    """The inputs and outputs of `main`, and the mapping from the caller's arguments to them.

    `flatten_batch(args, named)` gives the batch tensors in the order of the BATCH inputs and raises
    `errors.ArgumentError` when structure, dtype, device or a plain value differs from what was
    captured (another shape raises `ShapeMismatchError`; `jit` then compiles again).
    `unflatten_results(tensors)` builds what the user's step returns from the RESULT outputs.
    """

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    flatten_batch: Callable[..., list[torch.Tensor]] = attrs.field(eq=False)
    unflatten_results: Callable[[list[torch.Tensor]], Any] = attrs.field(eq=False)

    def __repr__(self) -> str:
        """Describe the signature in one line."""
        return f"Signature({_counted(self)}; .inputs and .outputs name them)"


def _counted(signature: Signature) -> str:
    """Return how many tensors a step takes and returns."""
    state = sum(one.is_state for one in signature.inputs)
    results = sum(one.updates is None for one in signature.outputs)
    batch = len(signature.inputs) - state
    return f"takes {state} tensors of state and {batch} of the batch, returns {results}"


def _nothing() -> None:
    """Do nothing."""


def _never() -> bool:
    """Return False."""
    return False


def _no_change() -> str:
    """Report no change."""
    return ""


def _no_numbers() -> tuple[str, ...]:
    """Report no changed number."""
    return ()


def _take_none(_plain: Sequence[Any]) -> None:
    """Read no numbers."""


def _leave(_args: tuple[Any, ...], _named: Mapping[str, Any]) -> None:
    """Leave the arguments of a call as they are."""


def _ignore(_gradients: Sequence[torch.Tensor]) -> None:
    """Do nothing."""


def _keep_none(_batch: Sequence[torch.Tensor], _results: Sequence[torch.Tensor]) -> None:
    """Keep nothing."""


@attrs.frozen
class StepHooks:
    """The functions that are called around a run of a step.

    `install_state()`: put optimizer state that the capture created into the optimizer, before the
    first run; calling it again changes nothing.
    `after_step(gradients)`: set or clear each `p.grad` as the step leaves it; takes the GRADIENT
    outputs that update no input, in order.
    `recompile_reason()`: the guard that fails, as text: a frozen parameter, a changed flag of a
    param group, a replaced state tensor, a gradient where there was none; then capture again. ""
    while the capture equals the step.
    `is_over()`: whether the guards will not hold again, as after the optimizer's first step.
    `changed_numbers()`: the names of the Python numbers outside of the step that are guarded, have
    another value now, and can be inputs of the next capture (`trace_step(numbers_as_inputs=...)`).
    `changed_tensors()`: likewise, of places outside of the step whose tensors were replaced.
    `take_numbers(plain)`: takes the plain values among the arguments of a call, in order, before
    `recompile_reason` is asked; `followed` are the positions of those that are read from there.
    `follow_changes(args, named)`: change a call's arguments, after its run, as the step does.
    `left` are the plain values that the step leaves in the user's objects, as text, by their names.
    `as_left()`: a context that holds there what the first call leaves, which `after_step` leaves.
    `keep_results(batch, results)`: put what the step keeps of a call's results, its RESULT outputs,
    or of its batch into the user's objects; `kept` are the names of these places.
    `ranks` are the replicas of the models on other ranks, `amp_ir.distributed.replicas.Ranks`; None
    where the step exchanges nothing.
    """

    install_state: Callable[[], None] = _nothing
    after_step: Callable[[Sequence[torch.Tensor]], None] = _ignore
    recompile_reason: Callable[[], str] = _no_change
    is_over: Callable[[], bool] = _never
    changed_numbers: Callable[[], tuple[str, ...]] = _no_numbers
    changed_tensors: Callable[[], tuple[str, ...]] = _no_numbers
    take_numbers: Callable[[Sequence[Any]], None] = _take_none
    followed: frozenset[int] = frozenset()
    follow_changes: Callable[[tuple[Any, ...], Mapping[str, Any]], None] = _leave
    left: Mapping[str, str] = attrs.field(factory=dict)
    as_left: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    keep_results: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = _keep_none
    kept: tuple[str, ...] = ()
    ranks: Any = None


@attrs.frozen
class StepModule:
    """A captured step.

    `ir` has one function `main(inputs...) -> R.Tuple(outputs...)`, a single dataflow block.
    `state` maps the name of every state input to the user's own live tensor; a hyper-parameter
    maps to the function that reads its current value (a 0-d tensor), a gradient to the one that
    returns the current tensor in `p.grad`.
    `notes` describe what the capture decided, one sentence each.
    `hooks` connect a run to the user's model and optimizer.
    `plan` is the CastPlan of a step that went through autocast, else None, `cast_options` are the
    options of that autocast, and `own_rules` the ops whose rule was the user's.
    `whole` is the step before its updates were split over the ranks, the same on all of them; None
    where nothing is split.
    """

    ir: tvm.IRModule
    signature: Signature
    state: Mapping[str, torch.Tensor | Callable[[], torch.Tensor]] = attrs.field(eq=False)
    notes: tuple[str, ...] = ()
    hooks: StepHooks = attrs.field(factory=lambda: StepHooks(), eq=False, repr=False)
    plan: Any = attrs.field(default=None, eq=False, repr=False)
    cast_options: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)
    own_rules: tuple[str, ...] = attrs.field(default=(), eq=False, repr=False)
    whole: StepModule | None = attrs.field(default=None, eq=False, repr=False)

    def with_ir(self, ir: tvm.IRModule) -> StepModule:
        """Return the same step with other IR of the same signature."""
        return attrs.evolve(self, ir=ir)

    def with_contiguous_state(self) -> StepModule:
        """Return the same step for state that is contiguous, as files hold it."""
        inputs = tuple(attrs.evolve(one, order=()) for one in self.signature.inputs)
        outputs = tuple(attrs.evolve(one, order=()) for one in self.signature.outputs)
        signature = attrs.evolve(self.signature, inputs=inputs, outputs=outputs)
        return attrs.evolve(self, signature=signature)

    @property
    def random_state(self) -> torch.Tensor | None:
        """Return int64[2], the seed and the step's number; None for a step without random ops."""
        names = [one.name for one in self.signature.inputs if one.role is Role.RANDOM_STATE]
        found = self.state[names[0]] if names else None
        assert found is None or isinstance(found, torch.Tensor)
        return found

    def with_random_state(self, random_state: torch.Tensor) -> StepModule:
        """Return the same step that draws random numbers from another state, and advances it."""
        names = {one.name for one in self.signature.inputs if one.role is Role.RANDOM_STATE}
        return attrs.evolve(self, state={**self.state, **dict.fromkeys(names, random_state)})

    def without_casts(self) -> StepModule:
        """Return the step as it was before `amp_ir.autocast`, node for node.

        Every cast that autocast inserted is gone, and what it stored low is float32 again, results
        of an `out_dtype` too. Casts that you wrote stay.
        """
        ir = uncast(self.ir)
        fields = Dataflow(ir).result.ty.fields
        outputs = tuple(
            attrs.evolve(one, dtype=str(field.dtype))
            for one, field in zip(self.signature.outputs, fields, strict=True)
        )
        signature = attrs.evolve(self.signature, outputs=outputs)
        return attrs.evolve(
            self, ir=ir, signature=signature, plan=None, cast_options={}, own_rules=()
        )

    def copied_state(self) -> dict[str, torch.Tensor | Callable[[], torch.Tensor]]:
        """Return the state with a copy of each tensor; numbers are still read from the user."""
        copies = dict(self.state)
        for one in self.signature.inputs:
            held = self.state.get(one.name)
            if one.role is Role.GRADIENT and callable(held):
                held = held()
            if isinstance(held, torch.Tensor):
                copies[one.name] = held.detach().clone()
        return copies

    def script(self) -> str:
        """Return the IR as TVMScript text."""
        return str(self.ir.script())

    def __repr__(self) -> str:
        """Describe the step in one line; its program is long."""
        calls = sum(isinstance(one, relax.Call) for one in Dataflow(self.ir).values.values())
        casts = "" if self.plan is None else f", {self.plan.amp_dtype}"
        shown = ".script() is the program" + ("" if self.plan is None else ", .plan its dtypes")
        return f"StepModule({calls} ops, {_counted(self.signature)}{casts}; {shown})"
