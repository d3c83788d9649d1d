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

from amp_ir.dialect.collectives import STARTS, WAITS
from amp_ir.dialect.registry import options_of
from amp_ir.ir.dataflow import op_name
from amp_ir.ir.library_call import DPS_CALL, library_call
from amp_ir.ir.static_shape import extents_of

START_SYMBOL, WAIT_SYMBOL = "amp_ir.collective.start", "amp_ir.collective.wait"
HALVES = {START_SYMBOL: "start", WAIT_SYMBOL: "wait"}
SYMBOLS = frozenset(HALVES)


@attrs.frozen
class Collective:
    """One bucket: what is done to it, in which group, and what is in it.

    `sizes` are the numbers of elements of its tensors, `names` what they belong to.
    """

    kind: str
    group: int
    bucket: int
    ranks: int
    dtype: str
    sizes: tuple[int, ...]
    names: str = ""

    @property
    def size(self) -> int:
        """The number of elements of all tensors."""
        return sum(self.sizes)

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
    )
    description = tvm.ir.StringImm(json.dumps(attrs.asdict(made)))
    symbol = START_SYMBOL if is_start else WAIT_SYMBOL
    new = library_call(symbol, [description, *call.args], call.ty, call.span)
    notes = tvm.ir.make_node("ir.DictAttrs", ops=call.op.name.removeprefix("amp_ir."))
    planned = relax.Call(new.op, new.args, notes, new.ty_args, new.span)
    relax.expr._update_type(planned, call.ty)
    return planned


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
    return Collective(**{**known, "sizes": tuple(known["sizes"])})
