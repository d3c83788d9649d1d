# SPDX-License-Identifier: Apache-2.0
"""Ops that a trace has seen before, with arguments of the same kinds.

A step repeats itself: its layers, or the time steps of a recurrence, call the same ops with tensors
of the same shapes. The result of tracing an op (its node, and the properties of its results)
depends on the kinds of its arguments alone. So only the first call goes through PyTorch's two
modes, and its repetitions get a node and fake tensors like those of the first. Later captures of
the process, such as that of a smaller batch, begin with what the earlier ones have seen.

Two ops have special cases. `select` along a dimension gives views that differ only by their memory
offset, so that the steps of a sequence are repetitions too. A detached tensor is its source in a
graph that records no gradients: it gets no node at all.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from amp_ir.capture.outcome_store import OutcomeStore

try:
    # Not part of PyTorch's public interface; without them, capture only takes longer.
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager

    _get_slot, _set_slot = proxy_tensor.get_proxy_slot, proxy_tensor.set_proxy_slot
    _Slot = proxy_tensor._ProxyTensor
    _is_possible = True
except (ImportError, AttributeError):
    _is_possible = False

# Arguments whose meaning does not depend on the tensors beside them.
_PLAIN = (
    bool, int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_DETACH, _SELECT = torch.ops.aten.detach.default, torch.ops.aten.select.int
_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

# Namespaces of ops whose schemas say all of what they do.
DESCRIBED = frozenset({"aten", "amp_ir_cell"})

Kind = tuple[Any, ...]

# Ops that compute with a number for each element: its value decides nothing else. An optimizer's
# numbers change with the learning rate and from parameter to parameter.
BY_NUMBER = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("add", "Tensor"), ("add_", "Tensor"), ("sub", "Tensor"), ("sub_", "Tensor"),
        ("mul", "Tensor"), ("mul_", "Tensor"), ("div", "Tensor"), ("div_", "Tensor"),
        ("lerp", "Scalar"), ("lerp_", "Scalar"), ("addcmul", "default"), ("addcmul_", "default"),
        ("addcdiv", "default"), ("addcdiv_", "default"),
    )
)  # fmt: skip


def kind_of(tensor: FakeTensor, *, has_views: bool) -> Kind:
    """Return the properties that an op's results may depend on; only views depend on offsets."""
    offset = tensor.storage_offset() if has_views else 0
    return (tensor.dtype, tensor.shape, tensor.stride(), offset, tensor.fake_device)


def has_kind(tensor: torch.Tensor) -> bool:
    """Return whether `kind_of` describes a tensor fully: strided, real, no lazy negation."""
    return tensor.layout is torch.strided and not (tensor.dtype.is_complex or tensor.is_neg())


def key_of_plain(value: Any) -> Any:
    """Return a key of a plain argument (1, 1.0 and True are equal); None for a tensor."""
    kind = type(value)
    if kind is float:
        return (kind, value, math.copysign(1.0, value))
    return (kind, value) if kind in _PLAIN else None


def fake_of_kind(
    mode: FakeTensorMode, kind: Kind, storage: torch.UntypedStorage | None
) -> FakeTensor:
    """Return a fake tensor of a kind, in this memory or in new memory."""
    dtype, shape, stride, offset, device = kind
    with in_kernel_invocation_manager(mode):
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if storage is not None:
            empty.set_(storage, offset, shape, stride)
    return FakeTensor(mode, empty, device)


def begin_of_selected(func: Any, args: Sequence[Any], tensor: torch.Tensor) -> int | None:
    """Return the memory offset of `select(tensor, dim, index)`; None if `func` is another op."""
    if (
        func is not _SELECT
        or len(args) != 3
        or type(args[1]) is not int
        or type(args[2]) is not int
    ):
        return None
    _, dim, index = args
    if not -tensor.ndim <= dim < tensor.ndim or not -tensor.shape[dim] <= index < tensor.shape[dim]:
        return None
    return tensor.storage_offset() + index % tensor.shape[dim] * tensor.stride()[dim]


@attrs.frozen(eq=False)
class _Result:
    """One result tensor of an op; `shares` is the tensor argument whose memory it uses.

    `is_argument`: it is that argument, written in place.
    """

    kind: Kind
    shares: int | None
    is_argument: bool


@attrs.frozen(eq=False)
class _Outcome:
    """What becomes of an op: its node, and a getitem node per result where it has several."""

    name: str
    results: tuple[_Result, ...]
    container: type | None
    vals: tuple[Kind, ...]


@attrs.frozen(eq=False)
class _Known:
    """An outcome in one capture, with fake tensors that describe its nodes."""

    outcome: _Outcome
    vals: tuple[torch.Tensor, ...]

    @property
    def val(self) -> Any:
        """What describes the op's own node."""
        container = self.outcome.container
        return self.vals[0] if container is None else container(self.vals)


# Of all captures of the process.
OUTCOMES: OutcomeStore[_Outcome] = OutcomeStore()


@attrs.define(eq=False)
class Call:
    """A call that may be a repetition: its key, and its tensors in order.

    `begin`: the memory offset of the result, if the key does not contain it.
    """

    has_views: bool
    is_by_number: bool
    key: tuple[Any, ...]
    tensors: list[FakeTensor]
    nodes: list[torch.fx.Node]
    before: torch.fx.Node
    begin: int | None = None


class RepeatedOps:
    """The ops of one trace, by kind of arguments."""

    def __init__(self, proxy_mode: ProxyTorchDispatchMode, mode: FakeTensorMode) -> None:
        self._tracer: Any = proxy_mode.tracer
        self._graph: torch.fx.Graph = proxy_mode.tracer.graph
        self._mode = mode
        self._known: dict[tuple[Any, ...], _Known] = {}
        self._usual: dict[Any, bool] = {}
        self._has_views: dict[Any, bool] = {}

    def begin(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
        """Return the call, if it is one of those whose results depend on kinds alone."""
        usual = self._usual.get(func)
        if usual is None:
            usual = self._usual[func] = _is_possible and _is_usual(func)
            self._has_views[func] = usual and has_views(func)
        if not usual:
            return None
        call = Call(self._has_views[func], func in BY_NUMBER, (), [], [], self._graph._root.prev)
        if func is _SELECT and isinstance(args[0], torch.Tensor):
            call.begin = begin_of_selected(func, args, args[0])
        parts: list[Any] = [func, torch.get_default_dtype()]
        told_apart = args if call.begin is None else args[:2]
        complete = all(self._add(call, parts, value) for value in told_apart)
        for name, value in kwargs.items():
            parts.append(name)
            complete = complete and self._add(call, parts, value)
        if not complete or not call.tensors:
            return None
        call.key = tuple(parts)
        return call

    def _add(self, call: Call, parts: list[Any], value: Any) -> bool:
        """Add an argument to the key; return whether that is possible."""
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor or value.constant is not None:
                return False
            slot = _get_slot(value, self._tracer, None)
            if slot is None or slot.constant is not None:
                return False
            if not has_kind(value):
                return False
            call.tensors.append(value)
            call.nodes.append(slot.proxy.node)
            parts.append(kind_of(value, has_views=call.has_views))
            return True
        if type(value) in (list, tuple):
            parts.append(len(value))
            return all(self._add(call, parts, item) for item in value)
        key = float if call.is_by_number and type(value) is float else key_of_plain(value)
        parts.append(key)
        return key is not None

    def renamed(self, func: Any, args: Sequence[Any]) -> FakeTensor | None:
        """Return a detached tensor, whose graph node is that of its source; None for another op."""
        if func is not _DETACH or not _is_possible:
            return None
        (source,) = args
        if type(source) is not FakeTensor or source.constant is not None or not has_kind(source):
            return None
        slot = _get_slot(source, self._tracer, None)
        if slot is None or slot.constant is not None:
            return None
        kind = kind_of(source, has_views=True)
        made = fake_of_kind(self._mode, kind, source.untyped_storage())
        _set_slot(made, self._tracer, slot)
        return made

    def repeat(self, call: Call, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the results of a call like an earlier one, with new nodes; None if none was."""
        known = self._known.get(call.key) or self._earlier(call.key)
        if known is None:
            return None
        outcome = known.outcome
        nodes = iter(call.nodes)
        node = self._graph.create_node(
            "call_function",
            func,
            tuple(_with_nodes(value, nodes) for value in args),
            {name: _with_nodes(value, nodes) for name, value in kwargs.items()},
            outcome.name,
        )
        first = outcome.results[0]
        node.meta["val"] = known.val if call.begin is None else self._make(call, first)
        made = [self._make(call, result) for result in outcome.results]
        if outcome.container is None:
            self._track(made[0], node)
            return made[0]
        for k, val in enumerate(known.vals):
            item = self._graph.call_function(operator.getitem, (node, k))
            item.meta["val"] = val
            self._track(made[k], item)
        return outcome.container(made)

    def _earlier(self, key: tuple[Any, ...]) -> _Known | None:
        """Return what an earlier capture has seen, with fake tensors of this one."""
        outcome = OUTCOMES.get(key)
        if outcome is None:
            return None
        vals = tuple(fake_of_kind(self._mode, kind, None) for kind in outcome.vals)
        known = self._known[key] = _Known(outcome, vals)
        return known

    def _make(self, call: Call, result: _Result) -> FakeTensor:
        if result.is_argument:
            assert result.shares is not None
            return call.tensors[result.shares]
        kind, storage = result.kind, None
        if result.shares is not None:
            storage = call.tensors[result.shares].untyped_storage()
        if call.begin is not None:
            kind = (*kind[:3], call.begin, kind[4])
        return fake_of_kind(self._mode, kind, storage)

    def _track(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        _set_slot(tensor, self._tracer, _Slot(torch.fx.Proxy(node, self._tracer), None))

    def learn(self, call: Call, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Record the outcome of a traced call, if a repetition can reproduce it."""
        written: list[torch.fx.Node] = []
        at = call.before.next
        while at is not self._graph._root:
            written.append(at)
            at = at.next
        container = type(out) if type(out) in (list, tuple) else None
        outs = list(out) if container else [out]
        if not written or not self._is_repeatable(call, func, args, kwargs, written, len(outs)):
            return
        node, *items = written
        vals = tuple(item.meta["val"] for item in items) if container else (node.meta["val"],)
        results = tuple(self._result(call, one) for one in outs)
        complete = tuple(one for one in results if one is not None)
        if len(complete) == len(outs):
            name = self._graph._target_to_str(func.overloadpacket.__name__)
            kinds = tuple(kind_of(val, has_views=True) for val in vals)
            outcome = _Outcome(name, complete, container, kinds)
            self._known[call.key] = _Known(outcome, vals)
            OUTCOMES.put(call.key, outcome)

    def _is_repeatable(
        self,
        call: Call,
        func: Any,
        args: Any,
        kwargs: Any,
        written: list[torch.fx.Node],
        count: int,
    ) -> bool:
        """Return whether `repeat` would have written the same nodes."""
        node, *items = written
        if node.target is not func or (len(items) != count if items else count > 1):
            return False
        if any("val" not in one.meta for one in written):
            return False
        nodes = iter(call.nodes)
        expected = tuple(_with_nodes(value, nodes) for value in args)
        named = {name: _with_nodes(value, nodes) for name, value in kwargs.items()}
        if tuple(node.args) != expected or dict(node.kwargs) != named:
            return False
        return all(
            item.target is operator.getitem and item.args == (node, k)
            for k, item in enumerate(items)
        )

    def _result(self, call: Call, out: Any) -> _Result | None:
        """Return what is needed to make such a tensor again; None where that is not enough."""
        if type(out) is not FakeTensor or out.constant is not None:
            return None
        if not has_kind(out):
            return None
        kind = kind_of(out, has_views=True)
        for k, tensor in enumerate(call.tensors):
            if tensor is out:
                is_same = kind_of(out, has_views=call.has_views) in call.key
                return _Result(kind, k, is_argument=True) if is_same else None
        memory = out.untyped_storage()._cdata
        shares = [k for k, one in enumerate(call.tensors) if one.untyped_storage()._cdata == memory]
        if len(shares) > 1 or (not shares and out.storage_offset()):
            return None
        return _Result(kind, shares[0] if shares else None, is_argument=False)


def _with_nodes(value: Any, nodes: Iterator[torch.fx.Node]) -> Any:
    """Return an argument as a node stores it: a node for each tensor."""
    if isinstance(value, torch.Tensor):
        return next(nodes)
    if type(value) in (list, tuple):
        return type(value)(_with_nodes(item, nodes) for item in value)
    return value


def has_views(func: Any) -> bool:
    """Return whether results may be views of arguments; an in-place op's result is its argument."""
    returned = (one.alias_info for one in func._schema.returns)
    return any(alias is not None and not alias.is_write for alias in returned)


def _is_usual(func: Any) -> bool:
    """Return whether kinds of arguments determine the results; the op may write its first one."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace not in DESCRIBED:
        return False
    if _DEPENDS_ON_VALUES & set(func.tags):
        return False
    schema = func._schema
    written = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    returned = [one.alias_info is not None and one.alias_info.is_write for one in schema.returns]
    return not schema.is_mutable or (returned == [True] and written[0] and sum(written) == 1)
