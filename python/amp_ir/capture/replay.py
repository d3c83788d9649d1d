# SPDX-License-Identifier: Apache-2.0
"""The second run of the traced graph, op by op, under `functionalize` and the decompositions.

Most ops of a step read tensors that nothing writes to, and an op with arguments of the same kinds
becomes the same few nodes each time. So the first such call is traced, and its repetitions copy
its nodes, in later captures of the process too. Calls that write, and calls whose tensors share
memory with a tensor that is written later, are always traced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from amp_ir.capture.alias_sets import STRIDED, AliasSets
from amp_ir.capture.call_templates import (
    Place,
    Template,
    Templates,
    key_of_number,
    number_of,
    template_of,
)
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.locations import NodeMarker
from amp_ir.capture.parts_of_memory import PartsOfMemory, whole_of, write_part
from amp_ir.capture.repeated_ops import (
    begin_of_selected,
    fake_of_kind,
    has_kind,
    has_views,
    key_of_plain,
    kind_of,
)
from amp_ir.errors import CaptureError
from amp_ir.ir.location import META_KEY, Location

try:
    # Not part of PyTorch's public interface; without them, capture only takes longer.
    from torch._C._functorch import (
        _unwrap_functional_tensor,
        _wrap_functional_tensor,
        current_level,
    )

    _is_possible = True
except ImportError:
    _is_possible = False

aten = torch.ops.aten
# In what PyTorch says of a write that it does not make functional.
_OVERLAP = "has internal overlap"


@attrs.frozen(eq=False)
class _Value:
    """A tensor of the new graph that exists as its node only."""

    node: torch.fx.Node

    @property
    def val(self) -> torch.Tensor:
        """The fake tensor that describes it."""
        val = self.node.meta["val"]
        assert isinstance(val, torch.Tensor)
        return val


class Replay(torch.fx.Interpreter):
    """A runner of a graph op by op; the nodes of a decomposed op inherit its location."""

    def __init__(self, traced: torch.fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(traced, garbage_collect_values=True)
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self._tracer: Any = proxy_mode.tracer
        self._new: torch.fx.Graph = proxy_mode.tracer.graph
        self._marker = NodeMarker(self._new)
        self._marker.mark(Location())
        memory = AliasSets(traced.graph)
        self._orderly = memory.orderly_calls() if _is_possible else set()
        self._written = memory.written_bases() if _is_possible else {}
        self._parts = PartsOfMemory(memory)
        self._parts.keep_until_written(self.user_to_last_uses, traced.graph)
        self._now: dict[torch.fx.Node, Any] = {}
        self._templates = Templates(mode)

    def run_node(self, n: torch.fx.Node) -> Any:
        """Run one node, or copy the nodes of an equal one."""
        out = self._run(n)
        if n in self._written:
            self._now[self._written[n]] = out
        self._marker.mark(n.meta.get(META_KEY, Location()))
        return out

    def _run(self, n: torch.fx.Node) -> Any:
        if n.target is operator.getitem:
            return self._value(n.args[0])[n.args[1]]
        found = self._key_of(n) if n in self._orderly else None
        if found is None:
            return self._traced(n)
        key, tensors = found
        template = self._templates.get(key)
        if template is not None:
            begin = self._begin(n, tensors)
            if begin is None:
                return self._copied(template, tensors, number_of(n))
            return self._selected(template, n, tensors[0], begin)
        before = self._new._root.prev
        out = self._traced(n)
        self._learn(n, key, tensors, before, out)
        return out

    def _traced(self, n: torch.fx.Node) -> Any:
        """Run a node on tensors."""
        for argument in n.all_input_nodes:
            tensor = self.env[argument] = self._tensor(self._value(argument))
            if argument in self._written:
                self._now[self._written[argument]] = tensor
        if n.target in STRIDED:
            out = self._parts.value(n, self.env[whole_of(n)])
            if out is not None:
                return out
        try:
            out = super().run_node(n)
        except RuntimeError as error:
            if _OVERLAP in str(error):
                self.extra_traceback = False  # to our error, the interpreter adds nothing
                raise _overlap_error(n) from None
            raise
        part = self._parts.writers.get(n)
        if part is not None:
            write_part(part, self._tensor(self._value(whole_of(part))), self.env[part])
        return out

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return a constant wrapped by functionalize: values computed from it may be written.

        Ops with plain tensors alone do not pass through functionalize, and would stay in place.
        """
        value = super().get_attr(target, args, kwargs)
        return aten.lift_fresh.default(value) if isinstance(value, torch.Tensor) else value

    def _value(self, n: Any) -> Any:
        """Return the new value of a node of the old graph."""
        return self._now[self._written[n]] if n in self._written else self.env[n]

    def _key_of(self, n: torch.fx.Node) -> tuple[tuple[Any, ...], list[torch.fx.Node]] | None:
        """Return the key of a call, and the new graph's nodes of its tensors."""
        parts: list[Any] = [n.target]
        tensors: list[torch.fx.Node] = []
        keeps_place = has_views(n.target)

        def add(value: Any) -> bool:
            if isinstance(value, torch.fx.Node):
                node = self._node_of(self._value(value))
                if node is None:
                    return False
                if node not in tensors:
                    tensors.append(node)
                parts.append(
                    (tensors.index(node), kind_of(node.meta["val"], has_views=keeps_place))
                )
                return True
            if isinstance(value, (list, tuple)):
                parts.append(len(value))
                return all(add(item) for item in value)
            is_number = number is not None and value is number
            key = key_of_number(value) if is_number else key_of_plain(value)
            parts.append(key)
            return key is not None

        number = number_of(n)
        if not all(add(value) for value in _told_apart_by(n)):
            return None
        for name, value in n.kwargs.items():
            parts.append(name)
            if not add(value):
                return None
        return (tuple(parts), tensors) if tensors else None

    def _begin(self, n: torch.fx.Node, tensors: list[torch.fx.Node]) -> int | None:
        """Return the memory offset of the result, if the key does not contain it."""
        return begin_of_selected(n.target, n.args, tensors[0].meta["val"]) if tensors else None

    def _node_of(self, value: Any) -> torch.fx.Node | None:
        """Return the new graph's node of a value of this run; None where it has none of its own."""
        if type(value) is _Value:
            return value.node
        if not isinstance(value, torch.Tensor) or not torch._is_functional_tensor(value):
            return None
        torch._sync(value)  # type: ignore[attr-defined]
        inner = _unwrap_functional_tensor(value, True)  # noqa: FBT003 - reapply_views
        slot = proxy_tensor.get_proxy_slot(inner, self._tracer, None)
        if slot is None or slot.constant is not None or type(inner) is not FakeTensor:
            return None
        if not has_kind(inner):
            return None
        node = slot.proxy.node
        return node if isinstance(node.meta.get("val"), FakeTensor) else None

    def _tensor(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self._tensor(item) for item in value)
        if type(value) is not _Value:
            return value
        val = value.val
        assert isinstance(val, FakeTensor)
        with torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device="meta")
        inner = FakeTensor(val.fake_mode, empty, val.fake_device)
        slot = proxy_tensor._ProxyTensor(torch.fx.Proxy(value.node, self._tracer), None)
        proxy_tensor.set_proxy_slot(inner, self._tracer, slot)
        return _wrap_functional_tensor(inner, current_level())

    def _learn(
        self,
        n: torch.fx.Node,
        key: tuple[Any, ...],
        tensors: list[torch.fx.Node],
        before: torch.fx.Node,
        out: Any,
    ) -> None:
        """Record the nodes of a call, where copies of them would be the same."""
        nodes = tuple(_nodes_after(before, self._new._root))
        places = {node: Place(k) for k, node in enumerate((*tensors, *nodes))}
        results = self._results(out)
        named = [results] if isinstance(results, torch.fx.Node) else results
        if named is None or not all(node in places for node in named):
            return
        if self._begin(n, tensors) is not None and not _is_same_call(nodes, n):
            return
        for node in nodes:
            is_plain = node.op == "call_function" and "val" in node.meta
            if not is_plain or not all(one in places for one in node.all_input_nodes):
                return
        template = template_of(nodes, places, results, number_of(n))
        if template is not None:
            self._templates.learn(key, template)

    def _results(self, out: Any) -> Any:
        """Return the node of a result, or a sequence of those of several; None for no node."""
        if type(out) in (list, tuple):
            nodes = [self._node_of(item) for item in out]
            return None if None in nodes else type(out)(nodes)
        return self._node_of(out)

    def _copied(
        self, template: Template, tensors: list[torch.fx.Node], number: float | None
    ) -> Any:
        results = template.copied(self._new, tensors, number)
        if isinstance(results, torch.fx.Node):
            return _Value(results)
        return type(results)(map(_Value, results))

    def _selected(
        self, template: Template, n: torch.fx.Node, source: torch.fx.Node, begin: int
    ) -> _Value:
        """Copy a call of `select` with another index."""
        (node,) = template.nodes
        copy = self._new.create_node(
            "call_function", n.target, (source, *n.args[1:]), {}, node.name
        )
        val, whole = node.val, source.meta["val"]
        kind = (val.dtype, val.shape, val.stride(), begin, val.fake_device)
        with torch._C._DisableFuncTorch(), torch._C._DisableTorchDispatch():
            copy.meta["val"] = fake_of_kind(val.fake_mode, kind, whole.untyped_storage())
        return _Value(copy)


def _overlap_error(n: torch.fx.Node) -> CaptureError:
    """Return the error about a write to a view of which elements share memory."""
    diagnostics = Diagnostics()
    diagnostics.add(
        "writes to a view of which elements share memory, as those of unfold and expand do",
        n.meta.get(META_KEY, Location()),
        "Write to the tensor itself, by an index or a slice, or to a clone of the view",
    )
    return diagnostics.error()


def _told_apart_by(n: torch.fx.Node) -> tuple[Any, ...]:
    """Return the arguments that distinguish a call: all but the index of `select`.

    The call was made in the first pass, so the index is valid.
    """
    return n.args[:2] if n.target is aten.select.int and len(n.args) == 3 else n.args


def _is_same_call(nodes: tuple[torch.fx.Node, ...], n: torch.fx.Node) -> bool:
    """Return whether the nodes of a call are the call itself."""
    return len(nodes) == 1 and nodes[0].target is n.target and nodes[0].args[1:] == n.args[1:]


def _nodes_after(before: torch.fx.Node, root: torch.fx.Node) -> Iterator[torch.fx.Node]:
    at = before.next
    while at is not root:
        yield at
        at = at.next
