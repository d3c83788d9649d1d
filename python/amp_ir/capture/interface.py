# SPDX-License-Identifier: Apache-2.0
"""The inputs and outputs of a captured graph: those that are used, with their names and roles."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_ir.capture.dense_tensors import DenseReader, is_dense
from amp_ir.capture.guards.followed_numbers import FollowedNumber
from amp_ir.capture.guards.read_places import PlaceReader, ReadPlaces
from amp_ir.capture.hyper_parameters import HyperParameter
from amp_ir.capture.scalar_nodes import ScalarNodes
from amp_ir.capture.state import GradientReader, State, StateTensor
from amp_ir.capture.symbolic_float import FloatTape
from amp_ir.capture.traced import Traced
from amp_ir.ir.captured_step import CapturedInput, CapturedOutput, NumberReader
from amp_ir.ir.location import META_KEY, Location
from amp_ir.ir.memory_order import extents_in_memory, from_memory, memory_order
from amp_ir.ir.step_module import Role

_ALWAYS_INPUTS = (Role.PARAMETER, Role.BUFFER, Role.BATCH)


@attrs.define(eq=False)
class _Output:
    node: torch.fx.Node
    name: str
    role: Role
    updates: torch.fx.Node | None = None


@attrs.frozen(eq=False)
class Interface:
    """The signature of a finished graph.

    `fresh` is the optimizer state to install before the first run: (optimizer position,
    parameter, key, tensor). `put` are the parameters whose gradients `after_step` receives, in
    order; `kept` those whose `grad` is unchanged or updated in place.
    """

    inputs: tuple[CapturedInput, ...]
    outputs: tuple[CapturedOutput, ...]
    fresh: tuple[tuple[int, torch.Tensor, str, torch.Tensor], ...]
    put: tuple[torch.Tensor, ...]
    kept: tuple[torch.Tensor, ...]


def finish(
    module: torch.fx.GraphModule,
    traced: Traced,
    state: State,
    hypers: Sequence[HyperParameter | FollowedNumber],
    batch: list[torch.Tensor],
    tape: FloatTape,
    mode: FakeTensorMode,
) -> Interface:
    """Give the graph its final placeholders and output tuple.

    Before: placeholders are the state tensors, then the batch; outputs as `Traced` lists them.
    After:  placeholders are parameters, buffers, used gradients and optimizer state, used
            hyper-parameters, batch; outputs are results, changed state, gradients.
    """
    return _Finishing(module.graph, traced, state, hypers, batch, tape, mode).run(module)


class _Finishing:
    def __init__(
        self,
        graph: torch.fx.Graph,
        traced: Traced,
        state: State,
        hypers: Sequence[HyperParameter | FollowedNumber],
        batch: list[torch.Tensor],
        tape: FloatTape,
        mode: FakeTensorMode,
    ) -> None:
        self._graph = graph
        self._traced = traced
        self._readers = ReadPlaces(traced.read_places, state).readers
        self._state = state
        self._hypers = hypers
        self._batch = batch
        self._tape = tape
        self._mode = mode
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._state_nodes = placeholders[: len(state.tensors)]
        self._batch_nodes = placeholders[len(state.tensors) :]
        self._after_state = next(n for n in graph.nodes if n not in set(self._state_nodes))
        self._inputs: dict[torch.fx.Node, CapturedInput] = {}
        self._created: list[tuple[int, torch.Tensor, str, torch.Tensor]] = []
        named = {id(entry.tensor): entry for entry in state.parameters}
        self._owners = {id(gradient): named[key] for key, gradient in state.gradients.items()}

    def run(self, module: torch.fx.GraphModule) -> Interface:
        """Run all steps in order."""
        for node, entry in zip(self._state_nodes, self._state.tensors, strict=True):
            self._inputs[node] = CapturedInput(entry.name, entry.role, self._source_of(entry))
        for index, (node, tensor) in enumerate(zip(self._batch_nodes, self._batch, strict=True)):
            self._inputs[node] = CapturedInput(f"batch{index}", Role.BATCH, tensor)
        outputs = self._collect_outputs()
        self._set_outputs(outputs)
        self._graph.eliminate_dead_code()
        used = self._keep_used_inputs(outputs)
        module.recompile()
        position = {node: index for index, node in enumerate(used)}
        final = tuple(
            CapturedOutput(o.name, o.role, None if o.updates is None else position[o.updates])
            for o in outputs
        )
        inputs = tuple(self._inputs[node] for node in used)
        by_id = {id(entry.tensor): entry.tensor for entry in self._state.parameters}
        assigned = {output.name for output in final if output.updates is None}
        put = [s for s in self._traced.gradients if f"{s.name}.grad" in assigned]
        left = {id(s.tensor) for s in self._traced.gradients} - {id(s.tensor) for s in put}
        return Interface(
            inputs=inputs,
            outputs=final,
            fresh=self._fresh(inputs),
            put=tuple(entry.tensor for entry in put),
            kept=tuple(by_id[key] for key in left),
        )

    def _source_of(
        self, entry: StateTensor
    ) -> torch.Tensor | GradientReader | DenseReader | PlaceReader:
        """Return the tensor that the graph reads; a gradient's is looked up at every call."""
        if (reader := self._readers.get(id(entry.tensor))) is not None:
            return reader
        if entry in self._state.outside:
            # PyTorch accepts a 0-d tensor of the host among tensors of a GPU.
            devices = {one.tensor.device for one in self._state.parameters}
            is_here = not devices or entry.tensor.device in devices
            if not is_dense(entry.tensor) or (entry.tensor.dim() == 0 and not is_here):
                return DenseReader(entry.tensor)
        if entry.role is not Role.GRADIENT:
            return entry.tensor
        return GradientReader(self._owners[id(entry)].name, self._owners[id(entry)].tensor)

    def _collect_outputs(self) -> list[_Output]:
        traced = self._traced
        output_node = next(iter(reversed(self._graph.nodes)))
        flat = iter(output_node.args[0])
        results = [next(flat) for _ in range(traced.result_count)]
        values = [next(flat) for _ in self._state_nodes]
        gradients = [next(flat) for _ in traced.gradients]
        created = [next(flat) for _ in traced.created]
        created_inputs = self._add_created_inputs()
        results += self._replace_scalars(list(flat), output_node)
        outputs = [_Output(node, f"result{i}", Role.RESULT) for i, node in enumerate(results)]
        outputs += self._changed_state(values)
        outputs += [
            _Output(value, self._inputs[node].name, Role.OPTIMIZER_STATE, node)
            for value, node in zip(created, created_inputs, strict=True)
        ]
        return outputs + self._gradients_left(gradients)

    def _replace_scalars(
        self, read: list[torch.fx.Node], output_node: torch.fx.Node
    ) -> list[torch.fx.Node]:
        """Convert the hyper-parameters to inputs; return the nodes of those among the results."""
        scalars = ScalarNodes(self._graph, self._tape, read, self._mode)
        names = [hyper.name for hyper in self._hypers]
        nodes = scalars.add_inputs(names, before=self._after_state)
        for node, hyper in zip(nodes, self._hypers, strict=True):
            reader = NumberReader(hyper.value)
            self._inputs[node] = CapturedInput(hyper.name, Role.HYPER_PARAMETER, reader)
        scalars.replace_all()
        return scalars.nodes_of(self._traced.symbols, before=output_node)

    def _changed_state(self, values: list[torch.fx.Node]) -> list[_Output]:
        """Return the state that the step changes; a gradient is what `grad` holds at the end."""
        changed = []
        for node, value in zip(self._state_nodes, values, strict=True):
            captured = self._inputs[node]
            if value is not node and captured.role is not Role.GRADIENT:
                changed.append(_Output(value, captured.name, captured.role, node))
        return changed

    def _gradients_left(self, values: list[torch.fx.Node]) -> list[_Output]:
        """Return what `grad` holds at the end; an unchanged gradient is not an output."""
        before = {self._inputs[node].name: node for node in self._state_nodes}
        left = []
        for entry, value in zip(self._traced.gradients, values, strict=True):
            name = f"{entry.name}.grad"
            node = before.get(name)
            if value is not node:
                updated = node if node is not None and self._is_used(node) else None
                left.append(_Output(value, name, Role.GRADIENT, updated))
        return left

    def _is_used(self, node: torch.fx.Node) -> bool:
        return any(user.op != "output" for user in node.users)

    def _add_created_inputs(self) -> list[torch.fx.Node]:
        """Add unused placeholders for the state that the first step makes: the tensors to fill."""
        nodes = []
        names = {id(entry.tensor): entry.name for entry in self._state.parameters}
        for made in self._traced.created:
            name = f"optimizer{made.optimizer}.{names[id(made.parameter)]}.{made.key}"
            value = made.value
            order = memory_order(value) or ()
            extents = extents_in_memory(value.shape, order)
            zeros = torch.zeros(extents, dtype=value.dtype, device=value.device)
            tensor = from_memory(zeros, order)
            shards = self._state.shards
            if shards is not None and shards.is_split(made.parameter, tensor):
                tensor = shards.part_of(made.parameter, tensor)
            with self._graph.inserting_before(self._after_state):
                node = self._graph.placeholder(name.replace(".", "_"))
            node.meta.update({"val": value.detach(), META_KEY: Location()})
            self._inputs[node] = CapturedInput(name, Role.OPTIMIZER_STATE, tensor)
            self._created.append((made.optimizer, made.parameter, made.key, tensor))
            nodes.append(node)
        return nodes

    def _set_outputs(self, outputs: list[_Output]) -> None:
        """Set the output tuple; copy a value that is an input, or occurs twice."""
        output_node = next(iter(reversed(self._graph.nodes)))
        seen: set[torch.fx.Node] = set()
        for output in outputs:
            if output.node in seen or output.node.op in ("placeholder", "get_attr"):
                with self._graph.inserting_before(output_node):
                    copy = self._graph.call_function(torch.ops.aten.clone.default, (output.node,))
                copy.meta.update(output.node.meta)
                copy.meta.setdefault(META_KEY, Location())
                output.node = copy
            seen.add(output.node)
        output_node.args = (tuple(output.node for output in outputs),)

    def _keep_used_inputs(self, outputs: list[_Output]) -> list[torch.fx.Node]:
        updated = {output.updates for output in outputs}
        kept = []
        for node, captured in sorted_by_graph(self._graph, self._inputs):
            if captured.role in _ALWAYS_INPUTS or node.users or node in updated:
                kept.append(node)
            else:
                self._graph.erase_node(node)
        return kept

    def _fresh(
        self, inputs: tuple[CapturedInput, ...]
    ) -> tuple[tuple[int, torch.Tensor, str, torch.Tensor], ...]:
        """Return the new optimizer state of every parameter that uses any of it."""
        used = {id(one.tensor_or_reader) for one in inputs}
        by_key = self._state.optimizer_state
        fresh = [
            (index, parameter, key, by_key[index, id(parameter)][key].tensor)
            for index, parameter, key in self._state.fresh
        ]
        users = {(index, id(p)) for index, p, _, tensor in fresh if id(tensor) in used}
        return (*(f for f in fresh if (f[0], id(f[1])) in users), *self._created)


def sorted_by_graph(
    graph: torch.fx.Graph, inputs: dict[torch.fx.Node, CapturedInput]
) -> list[tuple[torch.fx.Node, CapturedInput]]:
    """Return the inputs in the order of their placeholders."""
    return [(node, inputs[node]) for node in list(graph.nodes) if node in inputs]
