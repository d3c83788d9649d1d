# SPDX-License-Identifier: Apache-2.0
"""A graph of AOTAutograd as a StepModule: of the forward pass alone, or joint with the backward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir import pipeline
from amp_ir.capture.factor_layouts import factor_by_strides
from amp_ir.capture.functional import clean
from amp_ir.capture.locations import is_users_file
from amp_ir.errors import UnsupportedOpError
from amp_ir.ir.captured_step import CapturedInput, CapturedOutput, CapturedStep
from amp_ir.ir.location import META_KEY, Location
from amp_ir.ir.step_module import Role, StepModule

aten = torch.ops.aten
# Checks of what is known when a graph is compiled.
_STATIC_CHECKS = frozenset({aten._assert_tensor_metadata.default})
_WRITES = frozenset({aten.copy_.default, aten.set_.source_Tensor})
_ROOT = re.compile(r"^L\['[^']*'\](\.forward)?\.?")
_ITEM = re.compile(r"\._modules\['([^']+)'\]|\[['\"]?([^'\"\]]+)['\"]?\]")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@attrs.frozen
class GraphOutput:
    """One output of a graph: nothing, an input, or a result of the program.

    `order` are the dimensions of a result as they lie in memory, outermost first: where the graph
    promises another layout than the dense one, the program returns the result permuted to it.
    `strides` is that layout, where it has gaps or overlaps and the caller has to copy.
    """

    input: int | None = None
    result: int | None = None
    order: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    value: Any = attrs.field(default=None, eq=False, repr=False)


@attrs.frozen(eq=False)
class ImportedGraph:
    """A graph as a step without state, whose inputs are all those of the graph, in order.

    `outputs` are those of the graph; a step's result is the RESULT or GRADIENT output of the
    position that they name.
    """

    module: StepModule
    outputs: tuple[GraphOutput, ...]


def import_graph(
    graph_module: fx.GraphModule,
    *,
    forward_outputs: int | None = None,
    parameters: frozenset[int] = frozenset(),
) -> ImportedGraph:
    """Import a graph.

    Args:
        graph_module: functional ATen ops on fake tensors of static shapes; is changed.
        forward_outputs: how many outputs belong to the forward pass; the others are gradients.
        parameters: the positions of inputs that are the same tensors at every call.

    Raises:
        UnsupportedOpError: an op, an input or an output cannot be compiled; lists all ops.
    """
    graph = graph_module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    _refuse_inputs(placeholders)
    _refuse_writes(graph)
    for node in list(graph.nodes):
        if node.target in _STATIC_CHECKS:
            graph.erase_node(node)
    factor_by_strides(graph)
    _locate(graph)
    clean(graph)
    (output_node,) = graph.find_nodes(op="output")
    leaves = list(output_node.args[0])
    count = len(leaves) if forward_outputs is None else forward_outputs
    made, outputs = _Results(graph, output_node, placeholders), []
    for position, leaf in enumerate(leaves):
        outputs.append(made.add(leaf, Role.RESULT if position < count else Role.GRADIENT))
    output_node.args = (tuple(made.nodes),)
    graph.eliminate_dead_code()
    graph_module.recompile()
    captured = CapturedStep(
        graph=graph_module,
        inputs=tuple(
            CapturedInput(
                node.name,
                Role.PARAMETER if k in parameters else Role.BATCH,
                None,  # type: ignore[arg-type]  # tensors come with each call
            )
            for k, node in enumerate(placeholders)
        ),
        outputs=tuple(CapturedOutput(f"output{k}", role) for k, role in enumerate(made.roles)),
        flatten_batch=_unused,
        unflatten_results=_unused,
    )
    return ImportedGraph(pipeline.rewrite(pipeline.import_captured(captured)), tuple(outputs))


def _unused(given: Any) -> Any:
    """Pass a flat batch and flat results as they are."""
    return given


class _Results:
    """The distinct results of a graph, each permuted to the layout that it has to have."""

    def __init__(self, graph: fx.Graph, output: fx.Node, placeholders: list[fx.Node]) -> None:
        self._graph = graph
        self._output = output
        self._inputs = {node: k for k, node in enumerate(placeholders)}
        self._known: dict[fx.Node, GraphOutput] = {}
        self.nodes: list[fx.Node] = []
        self.roles: list[Role] = []

    def add(self, leaf: Any, role: Role) -> GraphOutput:
        """Return what an output of the graph is; number it if it is a new result."""
        if leaf is None:
            return GraphOutput()
        if not isinstance(leaf, fx.Node):
            return GraphOutput(value=leaf)
        value = leaf.meta.get("val")
        if leaf in self._inputs:
            return GraphOutput(input=self._inputs[leaf], value=value)
        if leaf not in self._known:
            self._known[leaf] = self._new(leaf, value, role)
        return self._known[leaf]

    def _new(self, leaf: fx.Node, value: Any, role: Role) -> GraphOutput:
        if not isinstance(value, FakeTensor):
            raise UnsupportedOpError(
                f"the graph returns a number ({type(value).__name__}) that it computes in "
                f"{leaf.meta.get(META_KEY, Location())}; a compiled graph returns tensors: set "
                "torch._dynamo.config.capture_scalar_outputs to False, so that the graph ends there"
            )
        position, order, strides = len(self.nodes), _memory_order(value), None
        if order is None:
            order, strides = tuple(range(value.dim())), value.stride()
        if order != tuple(range(value.dim())):
            with self._graph.inserting_before(self._output), value.fake_mode:
                permuted = self._graph.call_function(aten.permute.default, (leaf, list(order)))
                permuted.meta.update(leaf.meta, val=value.permute(order).contiguous())
            leaf = permuted
        elif leaf.op == "get_attr":
            with self._graph.inserting_before(self._output):
                copy = self._graph.call_function(aten.clone.default, (leaf,))
                copy.meta.update(leaf.meta)
            leaf = copy
        self.nodes.append(leaf)
        self.roles.append(role)
        return GraphOutput(None, position, order, strides, value)


def _memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Return a dense tensor's dimensions, outermost in memory first; None if it is not dense."""
    if value.is_contiguous():
        return tuple(range(value.dim()))
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda d: (-strides[d], -value.shape[d], d))
    expected = 1
    for d in reversed(order):
        if value.shape[d] != 1 and strides[d] != expected:
            return None
        expected *= value.shape[d]
    return tuple(order)


def _refuse_inputs(placeholders: list[fx.Node]) -> None:
    found = [f"{node.name} {reason}" for node in placeholders for reason in _input_errors(node)]
    if found:
        raise UnsupportedOpError(
            "the graph has inputs that amp_ir cannot take: " + "; ".join(found)
        )


def _input_errors(node: fx.Node) -> Iterator[str]:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        if value is not None and node.users:
            yield f"is a {type(value).__name__}"
        return
    if value.layout is not torch.strided:
        yield f"is sparse ({value.layout})"
    elif value.device.type != "cpu":
        # A program on a GPU copies its batch, and here parameters are part of the batch.
        yield f"is on {value.device}; the backend compiles for the CPU, amp_ir.jit for both"
    elif not all(isinstance(extent, int) for extent in value.shape):
        yield f"has a shape that depends on values, {tuple(value.shape)}"


def _refuse_writes(graph: fx.Graph) -> None:
    written = [str(node.target) for node in graph.nodes if node.target in _WRITES]
    if written:
        raise UnsupportedOpError(
            f"the graph writes to its inputs ({', '.join(sorted(set(written)))}), which "
            "AOTAutograd did not move out of it"
        )


def _locate(graph: fx.Graph) -> None:
    """Give every node its location: of a backward op, its module and its forward op's line."""
    forward: dict[int, Location] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_backward = node.meta.get("partitioner_tag") == "is_backward"
        sequence = node.meta.get("seq_nr", -1)
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        file, line = _users_line(node.meta.get("stack_trace") or "")
        place = Location(_module_path(stack), "forward", file, line)
        if is_backward:
            known = forward.get(sequence, place)
            place = attrs.evolve(known, phase="backward")
        elif place != Location():
            forward.setdefault(sequence, place)
        node.meta[META_KEY] = place


def _module_path(stack: Mapping[str, Any]) -> str:
    """Return the innermost module of a stack, as `model.named_modules()` names it."""
    for path, _ in reversed(list(stack.values())):
        return _ITEM.sub(lambda found: f".{found[1] or found[2]}", _ROOT.sub("", path)).strip(".")
    return ""


def _users_line(trace: str) -> tuple[str, int]:
    for file, line in reversed(_FRAME.findall(trace)):
        if is_users_file(file):
            return file, int(line)
    return "", 0
