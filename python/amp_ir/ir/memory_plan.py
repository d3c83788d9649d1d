# SPDX-License-Identifier: Apache-2.0
"""Where every tensor of a step lies in memory, and what it is to the user."""

from __future__ import annotations

import enum
import functools

import attrs
import tvm

from amp_ir.ir.dispatch_log import DispatchNote
from amp_ir.ir.location import Location
from amp_ir.ir.planned_checks import PlannedChecks
from amp_ir.ir.step_module import OutputSpec, Role, Signature


class MemoryRole(enum.Enum):
    """Why bytes are held, in the words of reports."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    OTHER_STATE = "other state"
    SAVED_ACTIVATION = "saved activation"
    LOW_COPY = "low copy of a weight"
    TEMPORARY = "temporary"
    WORKSPACE = "library workspace"
    BATCH = "batch"
    RESULT = "result"


ROLE_OF_STATE = {
    Role.PARAMETER: MemoryRole.PARAMETER,
    Role.BUFFER: MemoryRole.BUFFER,
    Role.GRADIENT: MemoryRole.GRADIENT,
    Role.OPTIMIZER_STATE: MemoryRole.OPTIMIZER_STATE,
    Role.BATCH: MemoryRole.BATCH,
    Role.RESULT: MemoryRole.RESULT,
}


@attrs.frozen
class Interval:
    """One piece of the arena and how long it is taken; positions of calls, both inclusive.

    Values that take over each other's bytes share one interval.
    """

    name: str
    nbytes: int
    first_use: int
    last_use: int
    offset_bytes: int
    dtype: str
    span: tvm.ir.Span | None = attrs.field(default=None, repr=False)


@attrs.frozen
class PlannedValue:
    """One value that the step holds; alive from call `first_use` to call `last_use`, inclusive.

    `offset_bytes` is its place in the arena, None for what lies in memory of its own: state, the
    batch and results, which are there all the time. A value that takes over another's bytes begins
    when that one has ended.
    """

    name: str
    op: str
    location: Location
    role: MemoryRole
    dtype: str
    nbytes: int
    first_use: int
    last_use: int
    offset_bytes: int | None = None


@attrs.frozen
class PlannedCall:
    """One call of a kernel or of a library.

    `symbol` is what the virtual machine calls; `ops` are the names of the ops that it computes, and
    `locations` where they come from, each once. `read_nbytes` and `written_nbytes` count every
    tensor once. `compute_dtype` is what a library multiplies in; kernels compute in float32.
    `is_rerun` marks a call that runs a second time because its results were not held.
    """

    name: str
    symbol: str
    ops: tuple[str, ...]
    locations: tuple[Location, ...]
    read_nbytes: int
    written_nbytes: int
    is_cast: bool = False
    compute_dtype: str = "float32"
    is_rerun: bool = False


@attrs.frozen
class StateWrites:
    """What a failed step can be undone by, and until when.

    `kept` are the positions of the inputs whose values are kept aside before a step, in
    `kept_nbytes` bytes. From call `first_call` on, state that is not kept is written; that is the
    number of calls where none is.
    """

    kept: tuple[int, ...] = ()
    kept_nbytes: int = 0
    first_call: int = 0


@attrs.frozen
class RowSplit:
    """A product that is made in `blocks` blocks of its rows; `nbytes` is what all of it takes.

    `location` is where the user's program makes it.
    """

    location: Location
    blocks: int
    nbytes: int

    def __str__(self) -> str:
        """One line for a report."""
        return (
            f"to hold the memory budget, {self.location.module or 'a product'} and its loss are "
            f"computed in {self.blocks} blocks of rows ({self.nbytes} bytes as a whole): the loss "
            "and the gradients of weights there are sums over the blocks, in another order"
        )


@attrs.frozen
class MemoryPlan:
    """Where everything lies: `arena_bytes` for intermediates, state and results apart from it.

    `lower_bound_bytes` is the largest sum of bytes alive at once: no plan of this order is smaller.
    `intervals` are the stays in the arena; `values` is everything that is held, whatever its place;
    `calls` are what the step runs, in order; `library_bytes` is what libraries take from the system
    themselves and keep; `splits` is what a `memory_budget` computes in blocks of rows; `writes` is
    when the step writes its state.
    """

    arena_bytes: int
    lower_bound_bytes: int
    intervals: tuple[Interval, ...] = attrs.field(repr=False)
    state_bytes: int
    batch_bytes: int
    result_bytes: int
    library_bytes: int = 0
    values: tuple[PlannedValue, ...] = attrs.field(default=(), repr=False)
    calls: tuple[PlannedCall, ...] = attrs.field(default=(), repr=False)
    splits: tuple[RowSplit, ...] = ()
    writes: StateWrites = attrs.field(factory=StateWrites, repr=False)

    @property
    def peak_bytes(self) -> int:
        """All bytes that a step needs: state and what is kept of it, batch, results, and so on."""
        outside = self.state_bytes + self.batch_bytes + self.result_bytes + self.library_bytes
        return self.arena_bytes + outside + self.writes.kept_nbytes

    @functools.cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes of the arena that are in use during each call."""
        changes = [0] * (len(self.calls) + 1)
        for value in self.values:
            if value.offset_bytes is not None:
                changes[value.first_use] += value.nbytes
                changes[value.last_use + 1] -= value.nbytes
        alive, live = 0, []
        for change in changes[:-1]:
            alive += change
            live.append(alive)
        return tuple(live)


@attrs.frozen
class PlannedStep:
    """IR whose memory is fixed, and the plan it follows.

    `ir` has `main(arena, inputs..., results...)`: all tensors flat and of physical dtype
    (bfloat16 as uint16, bool as uint8); it returns nothing and writes state inputs in place.
    `dispatched` says which library each heavy op went to. `checks` are those of its indices; with
    some in the step, `outputs` are its signature's and one more, else they are None.
    """

    ir: tvm.IRModule
    plan: MemoryPlan
    dispatched: tuple[DispatchNote, ...] = ()
    checks: PlannedChecks = attrs.field(factory=PlannedChecks)
    outputs: tuple[OutputSpec, ...] | None = None

    def signature(self, captured: Signature) -> Signature:
        """The signature of the planned step, given that of the captured one."""
        return captured if self.outputs is None else attrs.evolve(captured, outputs=self.outputs)
