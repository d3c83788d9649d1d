# SPDX-License-Identifier: Apache-2.0
"""Buckets of collectives: ranges of the arena in which the tensors of a bucket are neighbours.

The process group works on a whole range, so nothing is copied together or apart. A range is one
live interval, from the first of its gradients to the last reader of what was received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.ir.collective_call import NOTE_SIZE, Collective, read_collective
from amp_ir.ir.dataflow import KERNEL_CALL
from amp_ir.ir.tensor_layout import ALIGNMENT_BYTES, dtype_nbytes
from amp_ir.memory.buffers import Buffer, BufferizedStep, Call
from amp_ir.memory.write_planned import CopyKernel


@attrs.frozen(eq=False)
class BucketRange:
    """The range of one bucket: its members, in order, and the calls that begin and end it.

    `members` are what is sent, and what is received where it stays in the range.
    """

    collective: Collective
    range_: Buffer
    members: tuple[Buffer, ...]
    start: Call
    wait: Call


def find_buckets(
    ir: tvm.IRModule, program: BufferizedStep, copy_kernel: CopyKernel
) -> tuple[tvm.IRModule, list[BucketRange]]:
    """Give each bucket its range, and its tensors their places in it.

    Before:  g = matmul(...); f = start(g, p)                  # p is an input
    After:   g = matmul(...); c = copy(p); f = start(g, c)     # g and c are parts of one range

    Ensures:  each tensor that is sent is written by a call, for this start alone; what has to be
              copied for that is a call of its own. `ir` has the kernels of these copies. Behind the
              range of the first reduce-scatter are NOTE_SIZE elements for each rank, in which
              travels what ranks compare at each call.
    """
    starts = [call for call in program.calls if call.collective == "start"]
    if not starts:
        return ir, []
    waits = {_bucket_of(call): call for call in program.calls if call.collective == "wait"}
    copies = _Copies(ir, program, copy_kernel)
    scatters = [call for call in starts if _collective_of(call).kind == "reduce_scatter"]
    first = min(scatters, key=_bucket_of, default=None)
    found = [
        _range_of(call, waits[_bucket_of(call)], copies, has_notes=call is first) for call in starts
    ]
    copies.insert()
    return copies.ir, found


def _bucket_of(call: Call) -> tuple[int, int]:
    found = _collective_of(call)
    return found.group, found.bucket


def _collective_of(call: Call) -> Collective:
    found = read_collective(call.expr)
    assert found is not None, call
    return found


def _range_of(start: Call, wait: Call, copies: _Copies, *, has_notes: bool) -> BucketRange:
    collective = _collective_of(start)
    members = []
    for k, argument in enumerate(start.arguments):
        if isinstance(argument, Buffer):
            start.arguments[k] = member = copies.own(argument, start)
            members.append(member)
    item = dtype_nbytes(collective.dtype)
    if collective.range_size:
        offsets = [one * item for one in collective.offsets]
        notes = NOTE_SIZE * collective.ranks if has_notes else 0
        last = (collective.range_size + notes) * item
    else:
        offsets = _one_after_the_other(members)
        last = offsets[-1] + members[-1].nbytes
    name = f"bucket {collective.bucket} of {collective.kind}"
    whole = Buffer(collective.dtype, last // item, name, start.ops[0], span=start.expr.span)
    for member, place in zip(members, offsets, strict=True):
        member.part_of, member.part_offset = whole, place
    wait.places = tuple(one * item for one in _collective_of(wait).places)
    if collective.kind == "all_gather":
        # What is received stays in the range, which ends with it; parts of sums are copied out, so
        # that the range ends with the wait.
        for result, place in zip(wait.results, wait.places, strict=True):
            result.part_of, result.part_offset = whole, place
        members += wait.results
    return BucketRange(collective, whole, tuple(members), start, wait)


def _one_after_the_other(members: Sequence[Buffer]) -> list[int]:
    """Return the offset of each member in bytes."""
    offset, offsets = 0, []
    for member in members:
        offsets.append(offset)
        offset += -(-member.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets


class _Copies:
    """The copies of what cannot be sent where it is: inputs, constants, what others read too."""

    def __init__(self, ir: tvm.IRModule, program: BufferizedStep, copy_kernel: CopyKernel) -> None:
        self.ir = ir
        self._program = program
        self._copy_kernel = copy_kernel
        self._kernels: dict[str, tvm.ir.GlobalVar] = {}
        self._writers = {id(one): call for call in program.calls for one in call.results}
        self._reads: dict[int, int] = {}
        for call in program.calls:
            for one in call.reads:
                self._reads[id(one)] = self._reads.get(id(one), 0) + 1
        self._held = {id(one) for one in program.results}
        self._before: dict[int, list[Call]] = {}

    def own(self, source: Buffer, start: Call) -> Buffer:
        """Return a buffer that only `start` reads, with the values of `source`."""
        is_own = id(source) in self._writers and id(source) not in self._held
        if is_own and self._reads[id(source)] == 1 and source.part_of is None:
            return source
        made = Buffer(source.dtype, source.size, f"sent_{source.name}", "copy", span=source.span)
        call = self._copy(source, made, start)
        self._before.setdefault(id(start), []).append(call)
        return made

    def _copy(self, source: Buffer, target: Buffer, start: Call) -> Call:
        size, dtype = max(target.size, 1), target.physical_dtype
        name = f"sent_copy_{dtype}_{size}"
        if name not in self._kernels:
            variable = tvm.ir.GlobalVar(name)
            function = self._copy_kernel(size, dtype).with_attr("global_symbol", name)
            self._kernels[name] = variable
            self.ir = tvm.IRModule({**self.ir.functions, variable: function}, attrs=self.ir.attrs)
        callee = self._kernels[name]
        type_ = relax.TensorType([size], target.dtype)
        notes = tvm.ir.make_node("ir.DictAttrs", ops="copy")
        expr = relax.Call(
            tvm.ir.Op.get(KERNEL_CALL), [callee, relax.Tuple([])], notes, [type_], start.expr.span
        )
        return Call(expr, self.ir[callee], [source], [target])

    def insert(self) -> None:
        """Insert the copies before the starts that read them."""
        calls = self._program.calls
        calls[:] = [one for call in calls for one in (*self._before.get(id(call), ()), call)]


def spans_of_buckets(
    buckets: Sequence[BucketRange], ends: Mapping[Buffer, int], first: Mapping[Buffer, int]
) -> dict[Buffer, tuple[int, int]]:
    """Return the live interval of each range: from its first member to the last use of any."""
    return {
        one.range_: (
            min(first[member] for member in one.members if member in first),
            max(ends[member] for member in one.members if member in ends),
        )
        for one in buckets
    }
