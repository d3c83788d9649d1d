# SPDX-License-Identifier: Apache-2.0
"""Tensors that a step reaches outside of models, optimizers and batch: inputs, read at every call.

A frozen teacher, class weights, a mask of a closure. In the traced graph each is a constant, the
user's own tensor; this module makes it one more input by reference, so that the step sees writes
between calls. Tensors that the step itself makes (`torch.tensor([1.0])`) stay constants.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_ir.capture.constant_values import is_from_outside
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.state import State, StateTensor, fake_of
from amp_ir.capture.traced import Traced
from amp_ir.errors import StateError
from amp_ir.ir.location import META_KEY, Location
from amp_ir.ir.memory_overlap import storage_address
from amp_ir.ir.step_module import Role
from amp_ir.ir.unusable_tensors import tensor_error

aten = torch.ops.aten
Names = Mapping[int, tuple[torch.Tensor, Callable[[], str]]]


def lift_outside_tensors(
    traced: Traced, state: State, names: Names, mode: FakeTensorMode
) -> Traced:
    """Make inputs of the user's tensors that the graph has as constants.

    Before: placeholders are the tensors of `state`, then the batch.
    After:  `state.outside` are the new inputs; their placeholders follow those of the others, and
            their values, unchanged, follow those of the others among the outputs.

    Raises:
        CaptureError: a tensor shares memory with the state, but is only a part of it.
        StateError: a tensor's memory does not hold its values.
    """
    graph = traced.graph.graph
    users = _constants(traced.graph)
    if not users:
        return traced
    known = state.tensors
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    own = {geometry(entry.tensor): node for entry, node in zip(known, placeholders, strict=False)}
    memory = {storage_address(entry.tensor): entry for entry in known if entry.tensor.numel()}
    after_state = next(node for node in graph.nodes if node not in set(placeholders[: len(known)]))
    diagnostics, added = Diagnostics(), []
    for tensor, nodes in users:
        if tensor.layout is not torch.strided:
            raise StateError(f"{_name_of(tensor, names)} {tensor_error(tensor)}")
        node = own.get(geometry(tensor))
        if node is None:
            sharing = memory.get(storage_address(tensor))
            if sharing is not None and tensor.numel():
                _report_part(diagnostics, tensor, sharing, nodes[0])
            node = _add_input(graph, after_state, tensor, names, state, mode)
            added.append(node)
            node = _as_complex(graph, tensor, node)
        for constant in nodes:
            constant.replace_all_uses_with(node)
    if diagnostics:
        raise diagnostics.error()
    # At the end: without tensors in the batch, `after_state` itself may be a constant.
    for constant in (one for _, nodes in users for one in nodes):
        graph.erase_node(constant)
    output = next(iter(reversed(graph.nodes)))
    at = traced.result_count + len(known)
    flat = list(output.args[0])
    output.args = ([*flat[:at], *added, *flat[at:]],)
    fakes = [entry.fake for entry in state.outside]
    inputs = [*traced.inputs[: len(known)], *fakes, *traced.inputs[len(known) :]]
    return attrs.evolve(traced, inputs=inputs)


def _constants(module: torch.fx.GraphModule) -> list[tuple[torch.Tensor, list[torch.fx.Node]]]:
    """Return the user's tensors among the constants, with the nodes that name them."""
    found: dict[int, tuple[torch.Tensor, list[torch.fx.Node]]] = {}
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        tensor = getattr(module, str(node.target))
        if isinstance(tensor, torch.Tensor) and is_from_outside(node):
            found.setdefault(id(tensor), (tensor, []))[1].append(node)
    return list(found.values())


def _add_input(
    graph: torch.fx.Graph,
    before: torch.fx.Node,
    tensor: torch.Tensor,
    names: Names,
    state: State,
    mode: FakeTensorMode,
) -> torch.fx.Node:
    taken = {entry.name for entry in state.tensors}
    own = _name_of(tensor, names)
    name, count = own, 1
    while name in taken:
        count += 1
        name = f"{own} ({count})"
    is_paired = tensor.is_complex() and not tensor.is_conj()
    real = torch.view_as_real(tensor.detach()) if is_paired else tensor
    error = tensor_error(real)
    if error:
        raise StateError(f"{name} {error}")
    entry = StateTensor(name, Role.BUFFER, real)
    entry.fake = fake_of(real.detach(), mode)
    state.outside.append(entry)
    with graph.inserting_before(before):
        node = graph.placeholder(f"outside_{len(state.outside)}")
    node.meta.update({"val": entry.fake, META_KEY: Location()})
    return node


def _name_of(tensor: torch.Tensor, names: Names) -> str:
    _, name_of = names.get(id(tensor), (tensor, lambda: "a tensor outside of the model"))
    return name_of()


def _as_complex(graph: torch.fx.Graph, tensor: torch.Tensor, node: torch.fx.Node) -> torch.fx.Node:
    """Return an input as the graph uses it: what is complex is passed as pairs of numbers."""
    if not tensor.is_complex():
        return node
    body = next(one for one in graph.nodes if one.op != "placeholder")
    with graph.inserting_before(body):
        viewed = graph.call_function(aten.view_as_complex.default, (node,))
    fake = aten.view_as_complex.default(node.meta["val"])
    viewed.meta.update({"val": fake, META_KEY: Location()})
    return viewed


def _report_part(
    diagnostics: Diagnostics, tensor: torch.Tensor, entry: StateTensor, node: torch.fx.Node
) -> None:
    user = next(iter(node.users), node)
    diagnostics.add(
        f"uses a view of shape {tuple(tensor.shape)} of {entry.name} that was made before the step",
        user.meta.get(META_KEY, Location()),
        "Make the view inside of the step",
    )


def geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors with the same memory and layout."""
    if not tensor.numel():
        return (id(tensor),)
    return (
        tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device,
    )  # fmt: skip
