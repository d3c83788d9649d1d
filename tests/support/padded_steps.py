# SPDX-License-Identifier: Apache-2.0
"""Check by execution what the padding proof claims of every tensor of a step.

A step is traced at the size of a bucket, at another size, and at the length of a batch without
padding. The programs run in the interpreter, and the tensors of both are compared with the claims.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from tvm import relax

from amp_ir.api import trace_unchanged
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.interpreter import interpret
from amp_ir.ir.step_graph import StepGraph, read_step
from amp_ir.ir.step_module import Role, StepModule
from amp_ir.padding.axes import Dimension, Factor
from amp_ir.padding.check_padding import Proof
from amp_ir.padding.inert_padding import InertPadding, PaddedInput
from amp_ir.padding.pad_range import Range
from amp_ir.padding.padded_call import PaddedTensor

# Rounding differs with the length of a sum, in float64 by some 1e-15 of the largest term.
TOLERANCE = {"rtol": 1e-7, "atol": 1e-9, "equal_nan": True}
SLACK = 1e-6


@attrs.frozen
class Case:
    """A step to pad.

    `make(length, ...)` returns the step, its model, its optimizer and a batch of these lengths, one
    for each entry of `sizes`: the size of the bucket and the other one. `pads`: for each tensor of
    the batch None, or the dimension of each padded axis and the number of the padding.
    """

    make: Callable[..., tuple[Callable[..., Any], Any, Any, tuple[Any, ...]]]
    pads: Sequence[tuple[Mapping[int, int], float] | None]
    sizes: Sequence[tuple[int, int]] = ((8, 13),)
    lengths: Sequence[tuple[int, ...]] = ((1,), (2,), (5,), (7,), (8,))

    @property
    def dimensions(self) -> list[Dimension]:
        """The padded dimensions."""
        return [Dimension(f"dimension {k}", *pair) for k, pair in enumerate(self.sizes)]

    @property
    def inputs(self) -> list[PaddedInput | None]:
        """The padding of each tensor of the batch, as `check_padding` takes it."""
        known = self.dimensions
        return [
            None
            if one is None
            else PaddedInput({axis: known[k] for axis, k in one[0].items()}, one[1])
            for one in self.pads
        ]

    def trace(self, lengths: Sequence[int]) -> tuple[StepModule, list[torch.Tensor]]:
        """Trace the step for a batch of these lengths; return it and the tensors of the batch."""
        torch.manual_seed(0)
        step, model, optimizer, batch = self.make(*lengths)
        # As `jit` has it: the rewrites after a capture change no value.
        module = trace_unchanged(step, batch, model=model, optimizer=optimizer)
        return module, module.signature.flatten_batch(tuple(batch))


def proof_of(case: Case) -> Proof:
    """Return the proof of a case, after its walk."""
    step, other = (case.trace([pair[k] for pair in case.sizes])[0] for k in (0, 1))
    proof = Proof(step, other, case.inputs)
    proof.run()
    return proof


def check_claims(case: Case) -> InertPadding:
    """Check every claim on a case that the proof accepts; return what was proven."""
    proof = proof_of(case)
    proven = proof.conclusion()
    failures = list(failures_of(case, proof))
    assert not failures, "\n".join(failures[:12])
    return proven


def failures_of(case: Case, proof: Proof) -> Iterator[str]:
    """Yield each claim of a proof that an execution contradicts."""
    step = proof.step
    for lengths in case.lengths:
        least = [proof.least_sizes[one.name] for one in case.dimensions]
        if any(n < size for n, size in zip(lengths, least, strict=True)):
            continue
        exact, given = case.trace(lengths)
        padded = _padded_batch(case, step, given)
        known = {d.name: n for d, n in zip(case.dimensions, lengths, strict=True)}
        if not conditions_hold(proof, padded, known):
            continue
        whole, results = _run(step, padded, torch.float64)
        alone, expected = _run(exact, _with_state(step, given), torch.float64)
        if not _are_one_program(proof.graph, read_step(exact.ir)):
            alone = {}  # such as with a length of 1, which is broadcast: only outputs compare
        alone.update(zip(proof.graph.outputs, expected, strict=True))
        whole.update(zip(proof.graph.outputs, results, strict=True))
        low, _ = _run(step, padded, None)
        for leaf, tensor in enumerate(proof.tensors):
            if tensor is None or leaf not in whole or _is_unread(proof.graph, leaf):
                continue
            place = f"lengths {lengths}, {_name(proof.graph, leaf)}"
            yield from _differences(place, tensor, whole[leaf], alone.get(leaf), known)
            if leaf in low:
                place += ", in its own dtype"
                yield from _differences(place, tensor, low[leaf], None, known)


def conditions_hold(
    proof: Proof, inputs: Sequence[torch.Tensor], lengths: Mapping[str, int]
) -> bool:
    """Return whether a batch is one that the proof is for; `inputs` are those of the step."""
    specs = zip(inputs, proof.step.signature.inputs, strict=True)
    batch = [one for one, spec in specs if spec.role is Role.BATCH]
    return all(one.holds(batch, lengths) for one in proof.required.conditions.values())


def _are_one_program(graph: StepGraph, other: StepGraph) -> bool:
    steps = [[(op.name, op.reads) for op in one.ops] for one in (graph, other)]
    return steps[0] == steps[1]


def _is_unread(graph: StepGraph, leaf: int) -> bool:
    """Return whether a value is the total weight of a loss, which only a mean reads."""
    value = graph.values[leaf]
    op = graph.ops[value.op] if value.op >= 0 else None
    return op is not None and op.name == "amp_ir.nll_loss" and leaf == op.results[1]


def _name(graph: StepGraph, leaf: int) -> str:
    value = graph.values[leaf]
    if value.op < 0:
        return f"input {leaf}"
    op = graph.ops[value.op]
    return f"result {op.results.index(leaf)} of {op.name} ({op.location})"


def _run(
    step: StepModule, inputs: Sequence[torch.Tensor], dtype: torch.dtype | None
) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of a program by their numbers in its graph, and its outputs."""
    graph, flow = read_step(step.ir), Dataflow(step.ir)
    trees: dict[relax.Var, Any] = dict(zip(flow.main.params, graph.inputs, strict=True))
    ops = iter(graph.ops)
    for binding in flow.bindings:
        value = binding.value
        if isinstance(value, relax.Call):
            trees[binding.var] = next(ops).result
        elif isinstance(value, relax.Var):
            trees[binding.var] = trees[value]
        elif isinstance(value, relax.TupleGetItem):
            trees[binding.var] = trees[value.tuple_value][int(value.index)]
    found: dict[int, torch.Tensor] = {}

    def watch(var: relax.Var, value: torch.Tensor) -> torch.Tensor:
        leaf = trees.get(var)
        if isinstance(leaf, int):
            found[leaf] = value
        return value

    results = interpret(step, inputs, on_value=watch, float_dtype=dtype)
    return found, results


def _with_state(step: StepModule, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    own = iter(batch)
    found = []
    for spec in step.signature.inputs:
        value = next(own) if spec.role is Role.BATCH else step.state[spec.name]
        found.append(value() if callable(value) else value)
    return found


def _padded_batch(
    case: Case, step: StepModule, batch: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    pads = iter(case.pads)
    found = _with_state(step, batch)
    for k, spec in enumerate(step.signature.inputs):
        pad = next(pads) if spec.role is Role.BATCH else None
        for axis, dimension in pad[0].items() if pad else ():
            missing = case.sizes[dimension][0] - found[k].shape[axis]
            behind = [0, 0] * (found[k].ndim - axis - 1) + [0, missing]
            found[k] = F.pad(found[k], behind, value=pad[1])
    return found


def _differences(
    place: str,
    claim: PaddedTensor,
    whole: torch.Tensor,
    alone: torch.Tensor | None,
    lengths: Mapping[str, int],
) -> Iterator[str]:
    """Yield where a tensor is not what is claimed of it."""
    factors = list(claim.factors)
    parts = whole.reshape([one.size for one in factors])
    counts = [_data_count(one, lengths) for one in factors]
    for k, one in enumerate(factors):
        if one.is_reversed:  # its data are the last entries
            parts = parts.roll(counts[k], k)
    data = _narrowed(parts, counts)
    yield from _wrong_padding(place, factors, parts, counts)
    if not _is_in(data, claim.data):
        yield f"{place}: data {_extremes(data)} are not in {claim.data}"
    if claim.is_uniform and whole.numel() and (whole != whole.reshape(-1)[0]).any():
        yield f"{place}: not uniform"
    if claim.index_axis is not None and not _are_indices(whole, claim.index_axis):
        yield f"{place}: not its own indices"
    if alone is None or any(one.is_padded and one.dimension is None for one in factors):
        return
    if alone.numel() != data.numel():
        yield f"{place}: data {list(data.shape)}, without padding {list(alone.shape)}"
    elif not torch.allclose(data.double().reshape(-1), alone.double().reshape(-1), **TOLERANCE):
        wide = (data.double().reshape(-1) - alone.double().reshape(-1)).abs().max()
        yield f"{place}: data differ by {wide} from those without padding"


def _wrong_padding(
    place: str, factors: Sequence[Factor], parts: torch.Tensor, counts: Sequence[int]
) -> Iterator[str]:
    """Yield where padding is not what is claimed of it."""
    for k, one in enumerate(factors):
        near = [f.size if i == k else counts[i] for i, f in enumerate(factors)]
        # What is known of an open factor's padding is known beside data of the others.
        rest = near if one.is_open else [f.size for f in factors]
        for extents, known in ((rest, one.pad), (near, one.beside)):
            beyond = _narrowed(parts, extents).narrow(k, counts[k], one.size - counts[k])
            if known is not None and not _is_in(beyond, known):
                yield f"{place}: padding {_extremes(beyond)} of factor {k} is not in {known}"


def _data_count(factor: Factor, lengths: Mapping[str, int]) -> int:
    if factor.dimension is None:
        return factor.size
    return min(max(lengths[factor.dimension.name] + factor.shift, 0), factor.size)


def _narrowed(parts: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    for k, count in enumerate(counts):
        parts = parts.narrow(k, 0, count)
    return parts


def _are_indices(whole: torch.Tensor, axis: int) -> bool:
    shape = [1] * whole.ndim
    shape[axis] = -1
    return bool((whole == torch.arange(whole.shape[axis]).reshape(shape)).all())


def _is_in(numbers: torch.Tensor, known: Range) -> bool:
    wide = numbers.double().reshape(-1)
    if not wide.numel():
        return True
    if (wide.isnan().any() and not known.has_nan) or (
        (wide == float("inf")).any() and not known.has_plus_inf
    ):
        return False
    if (wide == float("-inf")).any() and not known.has_minus_inf:
        return False
    wide = wide[~wide.isnan()]
    slack = SLACK * wide[wide.isfinite()].abs().max() if wide.isfinite().any() else 0.0
    return bool(((wide >= known.low - slack) & (wide <= known.high + slack)).all())


def _extremes(numbers: torch.Tensor) -> str:
    wide = numbers.double()
    return f"[{wide.min().item()}, {wide.max().item()}]"
