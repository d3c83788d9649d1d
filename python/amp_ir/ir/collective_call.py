# SPDX-License-Identifier: Apache-2.0
"""Collectives as the virtual machine calls them: a description, the bucket, and results elsewhere.

`write_collective` turns the dialect's `_start` and `_wait` ops into calls of two functions, which
`distributed/exchange.py` registers. The tensors of a bucket are neighbours in the arena, and the
group works on that range: a start and its wait are of the same bytes.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.dialect.collectives import REDUCE_SCATTER, START_SYMBOL, STARTS, WAIT_SYMBOL, WAITS
from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import DPS_CALL, op_name
from amp_ir.ir.library_call import library_call
from amp_ir.ir.static_shape import extents_of

HALVES = {START_SYMBOL: "start", WAIT_SYMBOL: "wait"}
SYMBOLS = frozenset(HALVES)
# The elements that each rank has behind the range of a step's first reduce-scatter.
NOTE_SIZE = 8


@attrs.frozen
class Collective:
    """One bucket: what is done to it, in which group, and what is in it.

    `sizes` are the numbers of elements of its tensors, `names` what they belong to. Where its range
    is split over the ranks, it has `range_size` elements, its tensors begin at `offsets`, and
    the results of the wait at `places`.
    """

    kind: str
    group: int
    bucket: int
    ranks: int
    dtype: str
    sizes: tuple[int, ...]
    names: str = ""
    range_size: int = 0
    offsets: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements of all tensors, or of the range that is split."""
        return self.range_size or sum(self.sizes)

    def __str__(self) -> str:
        """Describe it in one line: all_reduce of bucket 2, float32[1024]."""
        return f"{self.kind} of bucket {self.bucket}, {self.dtype}[{self.size}]"


def write_collective(call: relax.Call) -> relax.Call:
    """Return the planned form of a `_start` or `_wait` op; its results follow.

    Requires: what a wait reads is in flight, as its start left it.
    """
    options = options_of(call)
    is_start = call.op.name in STARTS
    whole = STARTS[call.op.name] if is_start else WAITS[call.op.name]
    fields = call.ty.fields
    names = options.get("parameters") or options.get("buffers") or ""
    made = Collective(
        whole.removeprefix("amp_ir."),
        int(options["group"]),
        int(options["bucket"]),
        int(options["ranks"]),
        str(fields[0].dtype),
        tuple(math.prod(extents_of(one)) for one in fields),
        str(names),
        int(options.get("size", 0)),
        tuple(map(int, options.get("offsets", ()))),
        _places(whole, options),
    )
    description = tvm.ir.StringImm(json.dumps(attrs.asdict(made)))
    symbol = START_SYMBOL if is_start else WAIT_SYMBOL
    new = library_call(symbol, [description, *call.args], call.ty, call.span)
    notes = tvm.ir.make_node("ir.DictAttrs", ops=call.op.name.removeprefix("amp_ir."))
    planned = relax.Call(new.op, new.args, notes, new.ty_args, new.span)
    relax.expr._update_type(planned, call.ty)
    return planned


def _places(whole: str, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return where in the range the results of a wait are, if not where its arguments are."""
    if whole == REDUCE_SCATTER and "parts" in options:
        parts = tuple(map(int, options["parts"]))
        offsets = options["offsets"]
        pairs = zip(parts[::3], parts[1::3], strict=True)
        return tuple(int(offsets[member]) + first for member, first in pairs)
    return tuple(map(int, options.get("places", ())))


def read_collective(value: Any) -> Collective | None:
    """Return what a call that `write_collective` wrote, or a planned one, does; else None."""
    if op_name(value) == DPS_CALL and str(value.args[0].global_symbol) in SYMBOLS:
        return described(str(value.args[1].fields[0].value))
    if isinstance(value, relax.Call) and getattr(value.op, "global_symbol", "") in SYMBOLS:
        return described(str(value.args[0].value))
    return None


@functools.lru_cache(maxsize=4096)
def described(description: str) -> Collective:
    """Read a call's description."""
    known: Mapping[str, Any] = json.loads(description)
    lists = {name: tuple(known[name]) for name in ("sizes", "offsets", "places")}
    return Collective(**{**known, **lists})
