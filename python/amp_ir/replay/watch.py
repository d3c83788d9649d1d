# SPDX-License-Identifier: Apache-2.0
"""Watch: how near chosen tensors of a training are to the ends of their dtype, every so many steps.

A step that is watched runs as a program of its own, which has the statistics among its results: all
other steps cost nothing. Statistics stay tensors until they are asked for.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.amp.overrides import PHASES
from amp_ir.errors import OptionError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.selection import is_inside
from amp_ir.ir.static_shape import extents_of
from amp_ir.ir.step_graph import Op, read_step
from amp_ir.ir.step_module import OutputSpec, Role, StepModule
from amp_ir.rewrites.unroll_loops import unroll_loops

_FLOATS = ("float16", "bfloat16", "float32")
_COUNTS = 3


@attrs.frozen
class Watched:
    """One tensor that is watched: the op that makes it, where, and its dtype and elements."""

    op: str
    variable: str
    module: str
    phase: str
    file: str
    line: int
    dtype: str
    elements: int


@attrs.frozen
class Statistics:
    """What one tensor held in one step.

    Attributes:
        tensor: which one.
        largest: the largest finite magnitude.
        headroom_bits: how often that may double before it overflows in the tensor's dtype.
        subnormal: how many elements are below the smallest normal number of the dtype, and not 0.
        zero: how many are 0.
        not_finite: how many are infinite or NaN.
    """

    tensor: Watched
    largest: float
    headroom_bits: float
    subnormal: int
    zero: int
    not_finite: int


@attrs.frozen
class WatchRecord:
    """One watched step: its number, counted by the jitted step from 0, and its tensors."""

    step: int
    tensors: tuple[Statistics, ...]


@attrs.define(eq=False)
class Watch:
    """Tensors to watch in a jitted step::

        watch = amp_ir.Watch(every=100, ops="*.attn*")
        train = amp_ir.jit(step, model=model, optimizer=optimizer, watch=watch)
        ...
        for record in watch.records():
            print(record.step, max(one.largest for one in record.tensors))

    Attributes:
        every: the steps 0, every, 2 every, ... are watched. The first one compiles a program more.
        ops: a glob over module paths (what is inside of a module included), names of ops and of
            values, as for `plan.explain`.
        phase: "forward", "backward" or "optimizer"; None for all.
        length: how many records are kept, the last ones.
    """

    every: int = attrs.field(default=100, kw_only=True)
    ops: str = attrs.field(default="*", kw_only=True)
    phase: str | None = attrs.field(default=None, kw_only=True)
    length: int = attrs.field(default=256, kw_only=True)
    _ring: collections.deque[Any] = attrs.field(init=False, repr=False)
    _step: int = attrs.field(init=False, default=0, repr=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.ops, str):
            raise OptionError(f'Watch(ops={self.ops!r}); expected a glob, such as "*.attn*"')
        for name in ("every", "length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"Watch({name}={value!r}); expected a positive int")
        if self.phase not in (None, *PHASES):
            accepted = ", ".join(map(repr, PHASES))
            raise OptionError(f"Watch(phase={self.phase!r}); expected one of {accepted}, or None")
        self._ring = collections.deque(maxlen=self.length)

    def records(self) -> list[WatchRecord]:
        """Return the records that are kept, oldest first; on a GPU this waits for their steps."""
        return [_record(*one) for one in list(self._ring)]

    @property
    def last(self) -> WatchRecord | None:
        """The last record; None before the first."""
        return _record(*self._ring[-1]) if self._ring else None

    def is_due(self, step: int) -> bool:
        """Return whether the step that comes, of this number in its jitted step, is watched."""
        self._step = step
        return step % self.every == 0

    def watched(self, mod: StepModule) -> StepModule:
        """Return the step that also puts statistics of the chosen tensors in the ring.

        Raises:
            OptionError: `ops` and `phase` choose nothing.
        """
        mod = mod.with_ir(unroll_loops(mod.ir))
        chosen = [pair for pair in _tensors(mod.ir) if self._is_meant(*pair)]
        if not chosen:
            of_phase = "" if self.phase is None else f" in the {self.phase} pass"
            raise OptionError(
                f"Watch(ops={self.ops!r}) matches no tensor of {', '.join(_FLOATS)} of the step"
                f'{of_phase}; train.ir("amp") lists its ops with their modules'
            )
        return self._with_statistics(mod, chosen)

    def _is_meant(self, op: Op, variable: relax.Var) -> bool:
        place = op.location
        if op.is_view or op.name == "amp_ir.cast" or self.phase not in (None, place.phase):
            return False
        if str(variable.ty.dtype) not in _FLOATS:
            return False
        names = (*op.names, str(op.variable.name), str(variable.name))
        return is_inside(place.module, self.ops) or any(fnmatchcase(n, self.ops) for n in names)

    def _with_statistics(
        self, mod: StepModule, chosen: Sequence[tuple[Op, relax.Var]]
    ) -> StepModule:
        ir = with_statistics(mod.ir, [variable for _, variable in chosen])
        tensors = tuple(_watched(*pair) for pair in chosen)
        specs = (
            OutputSpec("watch.largest", Role.RESULT, (len(chosen),), "float32"),
            OutputSpec("watch.counts", Role.RESULT, (len(chosen) * _COUNTS,), "int64"),
        )
        inner = mod.signature.unflatten_results

        def unflatten(results: list[torch.Tensor]) -> Any:
            *own, largest, counts = results
            self._ring.append((self._step, tensors, largest, counts))
            return inner(own)

        signature = attrs.evolve(
            mod.signature,
            outputs=(*mod.signature.outputs, *specs),
            unflatten_results=unflatten,
        )
        return attrs.evolve(mod, ir=ir, signature=signature)


def _tensors(ir: tvm.IRModule) -> Iterator[tuple[Op, relax.Var]]:
    """Yield each op with its result; with each that is read of several, as of an attention."""
    fields: dict[relax.Var, dict[int, relax.Var]] = {}
    for variable, value in Dataflow(ir).values.items():
        if isinstance(value, relax.TupleGetItem) and isinstance(variable.ty, relax.TensorType):
            fields.setdefault(value.tuple_value, {}).setdefault(int(value.index), variable)
    for op in read_step(ir).ops:
        if isinstance(op.variable.ty, relax.TensorType):
            yield op, op.variable
        else:
            yield from ((op, one) for _, one in sorted(fields.get(op.variable, {}).items()))


def _watched(op: Op, variable: relax.Var) -> Watched:
    place, type_ = op.location, variable.ty
    return Watched(
        op=op.label,
        variable=str(variable.name),
        module=place.module,
        phase=place.phase,
        file=place.file,
        line=place.line,
        dtype=str(type_.dtype),
        elements=math.prod(extents_of(type_)),
    )


def with_statistics(ir: tvm.IRModule, chosen: Sequence[relax.Var]) -> tvm.IRModule:
    """Return `main` with two results more: largest magnitudes f32[n], and counts i64[3 n].

    Before:  y: f16[m]
    After:   largest = [max(|y|) over finite elements]; counts = [subnormal, zero, not finite]
    """
    flow = Dataflow(ir)
    emitter = _Emitter()
    pairs = [emitter.statistics(one) for one in chosen]
    largest = emitter.emit(relax.op.concat([one for one, _ in pairs], axis=0))
    counts = emitter.emit(relax.op.concat([one for _, one in pairs], axis=0))
    output = relax.Tuple([*flow.fields, largest, counts])
    variable = relax.Var("outputs", output.ty)
    bindings = [*flow.bindings, *emitter.bindings, relax.VarBinding(variable, output)]
    return flow.finish(bindings, variable)


class _Emitter:
    def __init__(self) -> None:
        self.builder = relax.BlockBuilder()
        self.bindings: list[relax.VarBinding] = []

    def emit(self, expr: relax.Expr) -> relax.Var:
        value = self.builder.normalize(expr)
        variable = relax.DataflowVar(f"watch{len(self.bindings)}", value.ty)
        self.bindings.append(relax.VarBinding(variable, value))
        return variable

    def statistics(self, x: relax.Var) -> tuple[relax.Var, relax.Var]:
        limits = torch.finfo(getattr(torch, str(x.ty.dtype)))
        emit, zero = self.emit, relax.const(0.0, "float32")
        full = x if str(x.ty.dtype) == "float32" else emit(relax.op.astype(x, "float32"))
        magnitude = emit(relax.op.abs(full))
        is_finite = emit(relax.op.isfinite(full))
        finite = emit(relax.op.where(is_finite, magnitude, zero))
        smallest = relax.const(float(limits.smallest_normal), "float32")
        is_zero = emit(relax.op.equal(magnitude, zero))
        is_small = emit(relax.op.less(magnitude, smallest))
        is_subnormal = emit(relax.op.logical_and(is_small, emit(relax.op.logical_not(is_zero))))
        is_wrong = emit(relax.op.logical_not(is_finite))
        largest = self.one(emit(relax.op.max(finite)))
        counts = [self.one(self.count(one)) for one in (is_subnormal, is_zero, is_wrong)]
        return largest, emit(relax.op.concat(counts, axis=0))

    def count(self, flags: relax.Var) -> relax.Var:
        return self.emit(relax.op.sum(self.emit(relax.op.astype(flags, "int64"))))

    def one(self, value: relax.Var) -> relax.Var:
        return self.emit(relax.op.reshape(value, (1,)))


def _record(
    step: int, tensors: Sequence[Watched], largest: torch.Tensor, counts: torch.Tensor
) -> WatchRecord:
    rows = zip(tensors, largest.tolist(), counts.view(-1, _COUNTS).tolist(), strict=True)
    return WatchRecord(step, tuple(_statistics(*row) for row in rows))


def _statistics(tensor: Watched, largest: float, counts: Sequence[int]) -> Statistics:
    limit = float(torch.finfo(getattr(torch, tensor.dtype)).max)
    bits = math.log2(limit) - math.log2(largest) if largest else math.inf
    return Statistics(tensor, largest, bits, *counts)
