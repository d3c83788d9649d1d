# SPDX-License-Identifier: Apache-2.0
"""Tensors of constants alone that a step makes in its first call and keeps: tables of positions.

A compiled step computes them in each call. That is right where later calls only read them, as a
trace shows that finds them in place: a total that begins with zeros is written to in each call.
Beside a plain value (`if n > self.most: self.most, self.cos = n, ...`) they are left as that is,
and the compiled step reads them. So are tables that are computed of tensors which may change, of
buffers of the model (`self.inv_freq`) and of tensors from outside: PyTorch keeps those that were.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import WeakIdKeyDictionary

from amp_ir.capture.constant_values import nodes_behind, nodes_of_state, unguarded_value
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.guards.left_values import Left, as_now, renewed
from amp_ir.capture.guards.places import Contents, Place
from amp_ir.capture.guards.users_objects import own_attributes
from amp_ir.capture.state import StateTensor
from amp_ir.capture.traced_node import traced_node
from amp_ir.errors import CaptureError
from amp_ir.ir.location import Location
from amp_ir.ir.step_module import Role

_MAKE_BEFORE = (
    "Make it before the first call, and update it in place: a tensor that is there is followed"
)
# As of loops that fill a mask element by element.
_MOST_OPS = 2**14
_ROLES = (Role.PARAMETER, Role.BUFFER)
# The tables that captures have made, some of which are left in the user's objects.
_MADE = WeakIdKeyDictionary()
# Of these no attributes are looked at.
_WHOLE = (torch.Tensor, torch.nn.Module, types.ModuleType, types.FunctionType, type)


class KeptTables:
    """The tables of one trace, with their values.

    `found` are those that the step had looked for before it made them, and `stored` the others.
    `note` guards the value of a tensor, with its name in the `state`. `of_state` is what a refusal
    says of tables that are computed of it.
    """

    def __init__(self, note: Callable[[torch.Tensor, str], None], state: Sequence[StateTensor]):
        self.found: list[Left] = []
        self.stored: list[Left] = []
        self._sources: list[tuple[torch.Tensor, str]] = []
        self.of_state: list[tuple[str, Location, str]] = []
        self._note = note
        self._state = state
        self._nodes: dict[torch.fx.Node, torch.Tensor] = {}

    @property
    def may_change(self) -> bool:
        """Return whether one is computed of tensors from outside or of the state."""
        return bool(self._sources)

    def note_sources(self) -> None:
        """Guard the values of the tensors that the tables are computed of."""
        for tensor, name in self._sources:
            self._note(tensor, name)

    @property
    def all(self) -> list[Left]:
        """Return all tables."""
        return [*self.found, *self.stored]

    def add(
        self,
        place: Place | Contents,
        now: Any,
        shared: Container[int],
        where: Location,
        *,
        is_read: bool = True,
    ) -> bool:
        """Add what is in a place now, and return whether it is; call it inside the trace.

        Tensors of too many numbers to compute here are as the compiled step computes them.
        """
        value = as_now(now, shared)
        key: tuple[int, Any]
        if isinstance(place, Contents):
            value = tuple(renewed(one, shared, self._with_values) for one in value)
            key = id(place.target), None
        else:
            value = renewed(value, shared, self._with_values)
            key = place.identity
        made = [one for one in _leaves(value) if isinstance(one, torch.Tensor)]
        if made and not any(isinstance(one, FakeTensor) for one in made):
            shape = tuple(made[-1].shape)
            what = f"makes a tensor of shape {shape} for {place.name()}, and changes it once it is"
            said = f"{what} there", where, _MAKE_BEFORE
            (self.found if is_read else self.stored).append(Left(place, value, key, said))
            return True
        return False

    def is_of_state(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether tensors are computed of constants and of state that the step only reads.

        Call it inside the trace.
        """
        known = self._inputs()

        def is_one(tensor: torch.Tensor) -> bool:
            node = traced_node(tensor)
            return (
                node is not None
                and not tensor.requires_grad
                and nodes_of_state(node, known, most_nodes=_MOST_OPS) is not None
            )

        return bool(known) and bool(tensors) and all(map(is_one, tensors))

    def _inputs(self) -> dict[torch.fx.Node, StateTensor]:
        """Return the parameters and buffers, which are the first inputs of the trace."""
        mode = get_proxy_mode()
        nodes = () if mode is None else mode.tracer.graph.find_nodes(op="placeholder")
        pairs = zip(nodes, self._state, strict=False)
        return {node: one for node, one in pairs if one.role in _ROLES and one.like is None}

    def refuse_changed(self, later: KeptTables) -> None:
        """Raise unless a trace that found these in place left them so.

        Raises:
            CaptureError: a table has other values then.
        """
        before = {one.key: one.value for one in self.found}
        for one in later.found:
            if one.key not in before or not _are_equal(one.value, before[one.key]):
                raise self.error([one])

    def error(self, changed: Sequence[Left] = ()) -> CaptureError:
        """Return the error about changed tables, or about all of these."""
        diagnostics = Diagnostics()
        for one in changed or self.all:
            diagnostics.add(*one.diagnostic)
        return diagnostics.error()

    def error_of_state(self) -> CaptureError:
        """Return the error about tables of the state, where a step does not just find them."""
        diagnostics = Diagnostics()
        for one in self.of_state:
            diagnostics.add(*one)
        return diagnostics.error()

    def found_in_place(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Return the graph that has the tables as constants; the one that makes them stays."""
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in module.graph.nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        order = {node: at for at, node in enumerate(graph.nodes)}
        behind = (nodes_behind(node, lambda _: True, most_nodes=len(order)) for node in self._nodes)
        makers = {copies[one] for nodes in behind for one in nodes or ()}
        names: dict[torch.fx.Node, str] = {}
        for number, (node, value) in enumerate(self._nodes.items()):
            names[copies[node]] = f"kept_table_{number}"
            setattr(module, f"kept_table_{number}", value)
        for reader in [one for one in order if one not in makers]:
            # A trace has one constant for each use of it.
            for table in [one for one in reader.all_input_nodes if one in names]:
                with graph.inserting_before(reader):
                    reader.replace_input_with(table, graph.get_attr(names[table]))
        for node in sorted(makers, key=order.__getitem__, reverse=True):
            if not node.users and node.op != "placeholder":
                graph.erase_node(node)
        return torch.fx.GraphModule(module, graph)

    def _with_values(self, one: Any) -> Any:
        """Return the value of a tensor; give an object that the step has made those of its own."""
        if isinstance(one, FakeTensor):
            inputs = {node: entry.tensor for node, entry in self._inputs().items()}
            outside: list[torch.Tensor] = []
            value = unguarded_value(one, outside, most_nodes=_MOST_OPS, state=inputs)
            if value is None:
                return one
            names = {id(entry.tensor): entry.name for entry in self._state}
            self._sources += [(each, names.get(id(each), "")) for each in outside]
            node = traced_node(one)
            assert node is not None
            _MADE[value] = True
            return self._nodes.setdefault(node, value)
        if not isinstance(one, _WHOLE):
            own = own_attributes(one) or {}
            for key in [key for key, held in own.items() if isinstance(held, FakeTensor)]:
                own[key] = self._with_values(own[key])
        return one


def is_table(value: Any) -> bool:
    """Return whether a capture has made a value as a table."""
    return isinstance(value, torch.Tensor) and value in _MADE


def _leaves(value: Any) -> Iterator[Any]:
    """Return what is in a value, and in the containers that `renewed` makes anew."""
    if isinstance(value, dict):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, (list, tuple, set)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value
        if not isinstance(value, _WHOLE):
            yield from (own_attributes(value) or {}).values()


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether values hold equal tensors; of other values other checks tell."""
    mine, others = (
        [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
        for value in (one, other)
    )
    return len(mine) == len(others) and all(map(_is_same, mine, others))


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    return torch.equal(one, other) or bool((one.isclose(other, 0, 0, equal_nan=True)).all())
