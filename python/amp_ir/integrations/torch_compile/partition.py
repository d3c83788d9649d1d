# SPDX-License-Identifier: Apache-2.0
"""The joint program of a graph, cut into its forward and its backward pass.

Mixed precision is decided in the joint program, so a value is saved in the dtype in which the
backward pass reads it. What is saved is a minimum cut of bytes: inputs are there anyway and cost
nothing, and what fuses into the kernels that read it is computed again instead of saved. Random
numbers are a function of the random state, of which the backward pass gets the forward pass's copy.

Source: the cut is that of PyTorch's `min_cut_rematerialization_partition` (He et al. 2021), on the
    program after casts, with what our kernels fuse as what may be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs
import tvm
from tvm import relax

from amp_ir.amp.autocast import native_cut
from amp_ir.ir.dataflow import Dataflow, live_bindings, op_name, replaced, variables_of
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature, StepModule
from amp_ir.ir.tensor_layout import dtype_nbytes
from amp_ir.loops.lowerings.elementwise import BINARY, PREDICATES, UNARY

# Ops that become part of the kernels that read their results.
_FUSED = frozenset({*UNARY, *BINARY, *PREDICATES}) | frozenset(
    """
    relax.where relax.astype amp_ir.cast relax.nn.leakyrelu amp_ir.dropout
    relax.permute_dims relax.reshape relax.expand_dims relax.squeeze relax.broadcast_to
    relax.full relax.zeros relax.ones relax.full_like relax.zeros_like relax.ones_like relax.arange
    """.split()
)


@attrs.frozen(eq=False)
class Half:
    """One pass as a step without state.

    `reads` says where each input comes from, in order: the joint program's parameter of that
    position, or a saved value of that name. `results` is the position among the module's results of
    each output that was asked for, `saves` that of each saved value.
    """

    module: StepModule
    reads: tuple[int | str, ...]
    results: tuple[int, ...]
    saves: tuple[int, ...] = ()


@attrs.frozen
class Saved:
    """A value that the forward pass computes for the backward pass."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@attrs.frozen(eq=False)
class Partition:
    """The two passes, and what goes from one to the other beside the joint program's inputs."""

    forward: Half
    backward: Half
    saved: tuple[Saved, ...]


def whole(mod: StepModule, kept: Sequence[int]) -> Half:
    """Return a program that has no backward pass as one half; `kept` are the outputs it returns."""
    return _Cut(mod, ()).half(kept, (), [])


def partition(
    mod: StepModule,
    forward: Sequence[int],
    backward: Sequence[int],
    *,
    tangents: Collection[int],
    overwritten: Collection[int] = (),
) -> Partition:
    """Cut a joint program, whose outputs are those of the forward pass and gradients.

    Before:   (x, w, dy) -> (y, dx, dw)
    After:    forward (x, w) -> (y, saved...), backward (saved, w, dy) -> (dx, dw)
    Requires: the inputs `tangents` are known to the backward pass only. The inputs `overwritten`
              are so after the forward pass: a copy of one is saved as a value is.
    Ensures:  the values of both are those of the joint program.
    """
    cut = _Cut(mod, backward, overwritten)
    saved = cut.saved(tangents)
    return Partition(
        forward=cut.half(forward, saved, []),
        backward=cut.half(backward, (), saved),
        saved=tuple(_saved(one) for one in saved),
    )


class _Cut:
    """The minimum cut of a joint program's values."""

    def __init__(
        self, mod: StepModule, backward: Sequence[int], overwritten: Collection[int] = ()
    ) -> None:
        self._mod = mod
        self._flow = Dataflow(mod.ir)
        self._parameters = list(self._flow.main.params)
        self._overwritten = {self._parameters[k] for k in overwritten}
        self._outputs = self._flow.fields
        self._backward = [self._outputs[k] for k in backward]

    def saved(self, tangents: Collection[int]) -> list[relax.Var]:
        """Return the values to save, in the order of the program."""
        values = self._flow.values
        late = {self._parameters[k] for k in tangents}
        for variable, value in values.items():
            if any(one in late for one in variables_of(value)):
                late.add(variable)
        needed = self._needed(self._backward)
        read_late = {
            one
            for variable in needed
            if variable in late and variable in values
            for one in variables_of(values[variable])
        }
        read_late.update(one for output in self._backward for one in variables_of(output))
        early = [one for one in self._flow.values if one in needed and one not in late]
        return self._between(early, [one for one in read_late if one not in late])

    def _needed(self, outputs: Iterable[relax.Expr]) -> set[relax.Var]:
        needed = {one for output in outputs for one in variables_of(output)}
        for variable, value in reversed(self._flow.values.items()):
            if variable in needed:
                needed.update(variables_of(value))
        return needed

    def _between(self, early: list[relax.Var], wanted: list[relax.Var]) -> list[relax.Var]:
        """Return the variables between what the forward pass has and what the backward needs."""
        nodes = [*self._parameters, *early]
        into = {one: 2 * k for k, one in enumerate(nodes)}
        source, sink = 2 * len(nodes), 2 * len(nodes) + 1
        total = 1 + sum(_cost(one) or 0 for one in (*early, *self._overwritten))
        edges: list[tuple[int, int, int]] = []
        for one in self._parameters:
            # An input is there anyway, if nothing overwrites it.
            of_copy = (_cost(one) or 0) if one in self._overwritten else 0
            edges += [(source, into[one], total), (into[one], into[one] + 1, of_copy)]
        for one in early:
            value = self._flow.values[one]
            cost = _cost(one)
            edges.append((into[one], into[one] + 1, total if cost is None else cost))
            if not _is_fused(value):
                edges.append((source, into[one], total))
            edges += [(into[read] + 1, into[one], total) for read in set(variables_of(value))]
        edges += [(into[one] + 1, sink, total) for one in wanted]
        sides, _ = native_cut(2 * len(nodes) + 2, edges, source, sink)
        saved = [*(one for one in self._parameters if one in self._overwritten), *early]
        return [one for one in saved if sides[into[one]] and not sides[into[one] + 1]]

    def half(
        self, outputs: Sequence[int], saves: Sequence[relax.Var], given: Sequence[relax.Var]
    ) -> Half:
        """Return the program of some outputs and saved values, with `given` as inputs."""
        inputs = {one: relax.Var(f"saved{k}", one.ty) for k, one in enumerate(given)}
        asked = [replaced(one, inputs) for one in (*(self._outputs[k] for k in outputs), *saves)]
        # A value that is saved and returned is one tensor.
        results = list(dict.fromkeys(asked))
        places = [results.index(one) for one in asked]
        bindings = [
            relax.VarBinding(one.var, replaced(one.value, inputs))
            for one in self._flow.bindings
            if one.var not in inputs and one.var != self._flow.result
        ]
        live = live_bindings(bindings, relax.Tuple(results))
        used = {v for one in live for v in variables_of(one.value)}
        used.update(v for one in results for v in variables_of(one))
        parameters = [
            (k, one) for k, one in enumerate(self._parameters) if one in used and one not in inputs
        ]
        saved = [(_name(one), inputs[one]) for one in given if inputs[one] in used]
        reads: list[int | str] = [k for k, _ in parameters]
        reads += [name for name, _ in saved]
        ir = _module(self._flow, [one for _, one in (*parameters, *saved)], live, results)
        specs = [self._mod.signature.inputs[k] for k, _ in parameters]
        specs = [attrs.evolve(one, role=Role.BATCH) for one in specs]
        specs += [_input_of(name, one) for name, one in saved]
        return Half(
            StepModule(
                ir=ir,
                signature=Signature(
                    tuple(specs),
                    tuple(_output_of(k, one) for k, one in enumerate(results)),
                    _unused,
                    _unused,
                ),
                state={},
                plan=self._mod.plan,
            ),
            tuple(reads),
            tuple(places[: len(outputs)]),
            tuple(places[len(outputs) :]),
        )


def _unused(given: Any) -> Any:
    """Pass a flat batch and flat results as they are."""
    return given


def _module(
    flow: Dataflow,
    parameters: list[relax.Var],
    bindings: list[relax.VarBinding],
    results: list[relax.Expr],
) -> tvm.IRModule:
    """Return a module whose `main` computes `results` of the parameters."""
    value = relax.Tuple(results)
    output = relax.Var("outputs", value.ty)
    block = relax.DataflowBlock([*bindings, relax.VarBinding(output, value)])
    body = relax.SeqExpr([block], output)
    relax.expr._update_type(body, value.ty)
    old = flow.main
    main = relax.Function(parameters, body, value.ty, old.is_pure, old.attrs, old.span)
    functions = {**flow.ir.functions, flow.ir.get_global_var("main"): main}
    return tvm.IRModule(functions, attrs=flow.ir.attrs)


def _is_fused(value: relax.Expr) -> bool:
    return isinstance(value, relax.TupleGetItem) or op_name(value) in _FUSED


def _cost(variable: relax.Var) -> int | None:
    """Return the bytes that saving a variable takes; None for a tuple, whose parts are saved."""
    if not isinstance(variable.ty, relax.TensorType):
        return None
    shape = [int(extent) for extent in variable.ty.shape]
    return 1 + math.prod(shape) * dtype_nbytes(str(variable.ty.dtype))


def _name(variable: relax.Var) -> str:
    return str(variable.name)


def _saved(variable: relax.Var) -> Saved:
    shape = tuple(int(extent) for extent in variable.ty.shape)
    return Saved(_name(variable), shape, str(variable.ty.dtype))


def _input_of(name: str, variable: relax.Var) -> InputSpec:
    shape = tuple(int(extent) for extent in variable.ty.shape)
    return InputSpec(name, Role.BATCH, shape, str(variable.ty.dtype))


def _output_of(position: int, value: relax.Expr) -> OutputSpec:
    shape = tuple(int(extent) for extent in value.ty.shape)
    return OutputSpec(f"output{position}", Role.RESULT, shape, str(value.ty.dtype))
