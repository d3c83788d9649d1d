# SPDX-License-Identifier: Apache-2.0
"""The two halves of a joint graph as AOTAutograd takes them: graphs that call a program each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from amp_ir.integrations.torch_compile.backend_options import BackendOptions
from amp_ir.integrations.torch_compile.graph_program import (
    GraphProgram,
    compiled,
    outputs_of,
)
from amp_ir.integrations.torch_compile.import_graph import GraphOutput, ImportedGraph
from amp_ir.integrations.torch_compile.partition import Half, partition, whole
from amp_ir.ir.step_module import Role, StepModule


class _Program(torch.nn.Module):
    """A compiled program as the one module that a graph calls."""

    def __init__(self, run: GraphProgram) -> None:
        super().__init__()
        self.run = run

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        """Run it."""
        return tuple(self.run(inputs))

    def __deepcopy__(self, memo: Any) -> _Program:
        # AOTAutograd copies the graph of a backward pass; machine code is not copied.
        return self


def program_in(graph_module: fx.GraphModule) -> GraphProgram:
    """Return the program that a graph of `Halves.graphs` calls."""
    module = graph_module.get_submodule("program")
    assert isinstance(module, _Program)
    return module.run


def compiled_whole(
    imported: ImportedGraph, mod: StepModule, options: BackendOptions
) -> GraphProgram:
    """Compile a graph that has no backward pass; `mod` is its module, maybe with casts."""
    half = whole(mod, _numbers(imported.outputs))
    positions = _positions(half, mod)
    return GraphProgram(
        compiled(half, options),
        tuple(k for k in positions if k is not None),
        outputs_of(half, imported.outputs),
        positions.index(None) if None in positions else None,
    )


class Halves:
    """A joint graph with casts, cut into its halves.

    `mod` is the module of `imported`, maybe with casts, and `joint` its graph. The backward pass
    gets the values that were saved, the random state if it reads it, the saved inputs, and the
    tangents.
    """

    def __init__(
        self, imported: ImportedGraph, mod: StepModule, joint: fx.GraphModule, forward_outputs: int
    ) -> None:
        inputs: list[fx.Node] = joint.graph.find_nodes(op="placeholder")
        self._inputs = [(one.name, one.meta["val"]) for one in inputs]
        self._primals = sum("tangents" not in str(one.target) for one in inputs)
        tangents = range(self._primals, len(inputs))
        self._forward = imported.outputs[:forward_outputs]
        backward = imported.outputs[forward_outputs:]
        self._cut = cut = partition(
            mod,
            _numbers(self._forward),
            _numbers(backward),
            tangents=tangents,
            overwritten=_overwritten(joint, inputs),
        )
        self._early, late = _positions(cut.forward, mod), _positions(cut.backward, mod)
        self._saves_random_state = None in late
        read = {k for k in late if isinstance(k, int)} | {one.input for one in backward}
        self._saved_inputs = [k for k in range(self._primals) if k in read]
        order: list[Any] = [one.name for one in cut.saved]
        order += [None] * self._saves_random_state + [*self._saved_inputs, *tangents]
        places = {one: k for k, one in enumerate(order)}
        self._late = [places[one] for one in late]
        self._backward = [
            one if one.input is None else attrs.evolve(one, input=places[one.input])
            for one in backward
        ]

    def graphs(
        self, options: BackendOptions, descriptions: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Compile both halves; return their graphs.

        `descriptions` are those of the joint graph's outputs, which AOTAutograd reads.
        """
        cut, early = self._cut, self._early
        forward = GraphProgram(
            compiled(cut.forward, options),
            tuple(k for k in early if k is not None),
            outputs_of(cut.forward, self._forward),
            early.index(None) if None in early else None,
            cut.forward.saves,
            self._saves_random_state,
            tuple(self._saved_inputs),
        )
        backward = GraphProgram(
            compiled(cut.backward, options),
            tuple(self._late),
            outputs_of(cut.backward, self._backward),
        )
        saved = self._saved_values()
        inputs = [self._inputs[k] for k in self._saved_inputs]
        outputs = [*self._forward, *(GraphOutput(result=0, value=value) for _, value in saved)]
        outputs += [
            GraphOutput(input=k, value=value)
            for k, (_, value) in zip(self._saved_inputs, inputs, strict=True)
        ]
        about, about_saved = descriptions or [], _saved_descriptions(len(saved) + len(inputs))
        count = len(self._forward)
        return (
            _graph(forward, self._inputs[: self._primals], outputs, about[:count] + about_saved),
            _graph(
                backward,
                [*saved, *inputs, *self._inputs[self._primals :]],
                self._backward,
                about[count:],
            ),
        )

    def _saved_values(self) -> list[tuple[str, Any]]:
        """Return the names of what the forward pass computes for the backward, and fake tensors."""
        _, any_fake = self._inputs[0]
        with any_fake.fake_mode:
            saved = [
                (f"saved_{k}", torch.empty(one.shape, dtype=getattr(torch, one.dtype)))
                for k, one in enumerate(self._cut.saved)
            ]
            if self._saves_random_state:
                saved.append(("random_state", torch.empty(2, dtype=torch.int64)))
        return saved


def _overwritten(joint: fx.GraphModule, inputs: Sequence[fx.Node]) -> list[int]:
    """Return the inputs whose new values AOTAutograd writes to them after the forward pass."""
    (output,) = joint.graph.find_nodes(op="output")
    written = [getattr(one, "mutated_input", None) for one in output.meta.get("desc") or ()]
    return [k for k, one in enumerate(inputs) if one.meta.get("desc") in written]


def _numbers(outputs: Sequence[GraphOutput]) -> list[int]:
    return sorted({one.result for one in outputs if one.result is not None})


def _positions(half: Half, mod: StepModule) -> list[Any]:
    """Return where the inputs of a half come from, with None for the random state."""
    inputs = mod.signature.inputs
    return [
        None if isinstance(k, int) and inputs[k].role is Role.RANDOM_STATE else k
        for k in half.reads
    ]


def _saved_descriptions(count: int) -> list[Any]:
    return [SavedForBackwardsAOTOutput(k) for k in range(count)]


def _graph(
    run: GraphProgram,
    inputs: Sequence[tuple[str, Any]],
    outputs: Sequence[GraphOutput],
    descriptions: Any,
) -> fx.GraphModule:
    """Return a graph that calls a program, with the fake tensors that AOTAutograd looks at."""
    graph = fx.Graph()
    nodes = []
    for name, value in inputs:
        node = graph.placeholder(name)
        node.meta["val"] = value
        nodes.append(node)
    call = graph.call_module("program", tuple(nodes))
    results: list[Any] = []
    for k, one in enumerate(outputs):
        if one.input is not None:
            results.append(nodes[one.input])
        elif one.result is None:
            results.append(one.value)
        else:
            result = graph.call_function(operator.getitem, (call, k))
            result.meta["val"] = one.value
            results.append(result)
    output = graph.output(tuple(results))
    output.meta["desc"] = descriptions
    return fx.GraphModule({"program": _Program(run)}, graph)
