# SPDX-License-Identifier: Apache-2.0
"""Live intervals and bytes after any updates are those of a computation from scratch."""

from __future__ import annotations

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from amp_ir.ir.step_module import InputSpec, OutputSpec, Role
from amp_ir.memory.buffers import Buffer, BufferizedStep, Call, parameter_buffer
from amp_ir.memory.liveness import Liveness


@attrs.define(eq=False)
class PlainCall(Call):
    """A call without a kernel, which may write its results over some of its arguments."""

    pairs: tuple[tuple[int, int], ...] = ()

    def inplace_pairs(self) -> tuple[tuple[int, int], ...]:
        return self.pairs


def call_of(arguments: list[Buffer], sizes: list[int], workspace: int, pairs: int) -> PlainCall:
    call = PlainCall(None, None, list(arguments), [Buffer("uint8", size) for size in sizes])
    if workspace:
        call.workspace = Buffer("uint8", workspace)
    every = [(k, j) for k in range(len(sizes)) for j in range(len(arguments))]
    call.pairs = tuple(every[:pairs])
    return call


@st.composite
def programs(draw: st.DrawFn) -> tuple[BufferizedStep, list[OutputSpec]]:
    """Return calls that read what comes before them; some results are new values of the inputs."""
    size = st.sampled_from([0, 8, 8, 16])
    spec = InputSpec("i", Role.PARAMETER, (8,), "uint8")
    inputs = [parameter_buffer(f"i{k}", spec) for k in range(2)]
    values, calls = list(inputs), []
    for _ in range(draw(st.integers(1, 9))):
        reads = draw(st.lists(st.sampled_from(values), max_size=3))
        sizes = draw(st.lists(size, min_size=1, max_size=2))
        calls.append(call_of(reads, sizes, draw(size), draw(st.integers(0, 3))))
        values += calls[-1].results
    results = draw(st.lists(st.sampled_from(values), max_size=3))
    updates = draw(st.lists(st.sampled_from([None, 0, 1]), min_size=3, max_size=3, unique=True))
    outputs = [
        OutputSpec(f"o{k}", Role.RESULT, (one.size,), "uint8", update)
        for k, (one, update) in enumerate(zip(results, updates, strict=False))
    ]
    body = relax.Function([], relax.Tuple([]), relax.TupleType([]))
    return BufferizedStep(body, inputs, calls, results), outputs


def move(live: Liveness, start: int, wanted: int) -> None:
    """Move a call as far towards a position as what it reads and what reads it allow."""
    call = live.program.calls[start]
    first = max((live.written(one) for one in call.reads), default=-1) + 1
    readers = [place for one in call.results for place in live.reads(one)]
    last = min(readers, default=len(live.program.calls)) - 1
    live.move(start, min(max(wanted, first), last))


def rerun(live: Liveness, position: int, before: int) -> None:
    """Run a call again before a later one, and let those from there on read the second results."""
    call = live.program.calls[position]
    before = max(before, position + 1)
    again = call_of(call.reads, [one.size for one in call.results], 8, len(call.pairs))
    new = {id(old): one for old, one in zip(call.results, again.results, strict=True)}
    late = [one for one in live.program.calls[before:] if any(id(b) in new for b in one.reads)]
    live.splice({before: [again]})
    for reader in late:
        live.replace_arguments(reader, new)


def remove(live: Liveness, position: int) -> None:
    """Remove a call that nothing reads."""
    results = live.program.calls[position].results
    if not any(live.reads(one) or live.is_held_at_end(one) for one in results):
        live.splice({}, removed=[position])


def assert_as_from_scratch(live: Liveness) -> None:
    program = live.program
    fresh = Liveness(attrs.evolve(program, calls=list(program.calls)), live.outputs)
    assert live.position == fresh.position == {id(c): k for k, c in enumerate(program.calls)}
    for buffer in {b for call in program.calls for b in [*call.reads, *call.results]}:
        assert live.writer.get(id(buffer)) is fresh.writer.get(id(buffer))
        assert (live.written(buffer), live.reads(buffer), live.ends(buffer)) == (
            fresh.written(buffer),
            fresh.reads(buffer),
            fresh.ends(buffer),
        )
        assert live.nbytes(buffer) == fresh.nbytes(buffer)
    assert np.array_equal(live.gross, fresh.gross)
    assert np.array_equal(live.at, fresh.at)


def bytes_alive(live: Liveness, position: int) -> int:
    """Return `gross` at a call by its definition."""
    call = live.program.calls[position]
    written = [one for other in live.program.calls for one in other.results]
    alive = [one for one in written if live.written(one) <= position <= live.ends(one)]
    return sum(map(live.nbytes, alive)) + call.workspace_nbytes


@given(
    programs(), st.lists(st.tuples(st.sampled_from([move, rerun, remove]), *[st.integers(0)] * 2))
)
def test_updates_give_what_a_computation_from_scratch_gives(drawn, updates):
    live = Liveness(*drawn)
    for update, first, second in updates:
        count = len(live.program.calls)
        if not count:
            break
        if update is remove:
            remove(live, first % count)
        else:
            update(live, first % count, second % count)
        live.find_destinations()
        assert_as_from_scratch(live)
        assert [bytes_alive(live, k) for k in range(len(live.program.calls))] == live.gross.tolist()


def test_a_result_takes_over_the_bytes_of_a_dying_argument():
    a = call_of([], [16], 0, 0)
    b = call_of(a.results, [16], 4, 1)
    c = call_of(b.results, [8], 0, 1)
    body = relax.Function([], relax.Tuple([]), relax.TupleType([]))
    live = Liveness(BufferizedStep(body, [], [a, b, c], []), [])
    assert live.gross.tolist() == [16, 36, 24]
    # The last result is smaller than its argument, and has bytes of its own.
    assert live.at.tolist() == [16, 20, 24]
    assert live.taken_over(b) == [(b.results[0], a.results[0])]
    live.splice({3: [call_of(a.results, [8], 0, 0)]})
    assert live.taken_over(b) == []
    assert live.at.tolist() == [16, 36, 40, 24]
