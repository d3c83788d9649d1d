# SPDX-License-Identifier: Apache-2.0
"""Memory plan: where every tensor of a step is stored, and its role for the user."""

from __future__ import annotations

import enum
import functools

import attrs
import tvm

from amp_ir.deprecation import Renamed, renamed_in
from amp_ir.dialect.collectives import START_SYMBOL
from amp_ir.ir.dispatch_log import DispatchNote
from amp_ir.ir.location import Location
from amp_ir.ir.planned_checks import PlannedChecks
from amp_ir.ir.step_module import OutputSpec, Role, Signature


class MemoryRole(enum.Enum):
    """The purpose of an allocation, as reports name it."""

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
    """One piece of the arena and its live interval; positions of calls, both inclusive.

    Values that reuse each other's bytes share one interval.
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
    """One value in memory; alive from call `first_use` to call `last_use`, inclusive.

    `offset_bytes` is its offset in the arena, None for values with memory of their own: state, the
    batch and results, which are alive throughout. A value that reuses another's bytes begins when
    that one has ended.
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

    `symbol` is what the virtual machine calls; `ops` are the names of the ops that it computes,
    and `locations` where they come from, each once. `read_nbytes` and `written_nbytes` count every
    tensor once. `compute_dtype` is the dtype in which a library multiplies; kernels compute in
    float32. `is_rerun` marks a call that runs a second time because its results were not held. The
    last `result_count` arguments of the call are what it writes. `sent_nbytes` are the bytes of
    the range that half of a collective works on; 0 for other calls.
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
    result_count: int = 1
    sent_nbytes: int = 0


@attrs.frozen
class StateWrites:
    """The state that is saved to roll back a failed step, and until when that works.

    `kept` are the positions of the inputs whose values are saved before a step, in `kept_nbytes`
    bytes. From call `first_call` on, the step writes state that is not saved; that is the number
    of calls where there is none.
    """

    kept: tuple[int, ...] = ()
    kept_nbytes: int = 0
    first_call: int = 0


@attrs.frozen
class ChunkedLoss:
    """A matmul and its loss, computed in `chunks` chunks of rows; `nbytes` is the whole matmul's.

    `location` is where the user's program computes it.
    """

    location: Location
    chunks: int
    nbytes: int

    blocks = Renamed("chunks")

    def __str__(self) -> str:
        """Return one line for a report."""
        return (
            f"to hold the memory budget, {self.location.module or 'a matmul'} and its loss are "
            f"computed in {self.chunks} chunks of rows ({self.nbytes} bytes as a whole): the loss "
            "and the gradients of weights there are sums over the chunks, in another order"
        )


@attrs.frozen
class Recomputation:
    """What the calls that run a second time save and cost.

    `saved_nbytes` is what is alive at most before less that after, in the arena. `time_share` is an
    estimate, which reads no clock: the time of the second runs over that of all first ones.
    """

    saved_nbytes: int
    time_share: float


@attrs.frozen
class MemoryPlan:
    """The storage of all values: `arena_bytes` for intermediates; state and results are apart.

    `lower_bound_bytes` is the largest sum of bytes alive at once: no plan of this order is
    smaller. `intervals` are the live intervals in the arena; `values` is everything that is
    stored, wherever it is; `calls` are what the step runs, in order; `library_bytes` is what
    libraries allocate from the system themselves and keep; `chunked_losses` is what a
    `memory_budget` computes in chunks of rows; `writes` is when the step writes its state;
    `recomputed` is what its second runs of calls save and cost, None where there are none.
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
    chunked_losses: tuple[ChunkedLoss, ...] = ()
    writes: StateWrites = attrs.field(factory=StateWrites, repr=False)
    recomputed: Recomputation | None = None

    splits = Renamed("chunked_losses")

    @property
    def peak_bytes(self) -> int:
        """Return all bytes of a step: state and its saved part, batch, results and so on."""
        outside = self.state_bytes + self.batch_bytes + self.result_bytes + self.library_bytes
        return self.arena_bytes + outside + self.writes.kept_nbytes

    @property
    def sent_nbytes(self) -> tuple[int, ...]:
        """Return the bytes of each bucket that ranks exchange, in the order of their starts."""
        return tuple(call.sent_nbytes for call in self.calls if call.symbol == START_SYMBOL)

    @functools.cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Return the bytes of the arena that are in use during each call."""
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
        """Return the signature of the planned step, given that of the captured one."""
        return captured if self.outputs is None else attrs.evolve(captured, outputs=self.outputs)


__getattr__ = renamed_in(__name__, {"RowSplit": "ChunkedLoss"})
