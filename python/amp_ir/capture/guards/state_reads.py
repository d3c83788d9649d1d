# SPDX-License-Identifier: Apache-2.0
"""What a step reads in Python of its state, as it is before the step: guards.

`if self.inited.item() == 0:`, or `if self.steps % 10 == 0:` after `self.steps += 1`. What is read
is computed from small tensors of the state alone, writes of the step to them included. The ops that
compute it are recorded; at each call they run on the state of then, and the result is compared. So
a branch on a counter is guarded by the way it goes, and not by the counter's number.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.capture.constant_values import computes_again, is_from_outside, nodes_behind
from amp_ir.capture.diagnostics import Diagnostics, TracingStopped
from amp_ir.capture.guards.places import change_in_words
from amp_ir.capture.state import StateTensor
from amp_ir.capture.symbolic_float import FloatTape
from amp_ir.ir.location import Location
from amp_ir.ir.memory_overlap import storage_address
from amp_ir.ir.short_list import short_list
from amp_ir.ir.step_module import Role

# The reads are computed at every call: a step counter takes some 20 us.
_MOST_ELEMENTS = 2**14
_MOST_READS = 64
_MOST_SHOWN = 8
_NAMESPACES = ("aten", "prims")
_ROLES = (Role.PARAMETER, Role.BUFFER, Role.OPTIMIZER_STATE)

PLACE_ADVICE = (
    "A place may stay a tensor: x[k] for x[int(k)], and x[(k + torch.arange(n)) % len(x)] for n "
    "places from k on"
)
_COUNTER_ADVICE = (
    "Compute with x.item() itself, which may stay a number of the step, or branch on a comparison "
    "of it: a program is compiled for either outcome. Or count outside of the step, and pass the "
    "number as an argument"
)


@attrs.frozen
class _Ref:
    """An argument that is a result: its position."""

    at: int


@attrs.frozen(eq=False)
class _Call:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_flat: bool

    def run(self, values: list[Any]) -> Any:
        if self.is_flat:
            args = [values[one.at] if type(one) is _Ref else one for one in self.args]
            return self.function(*args, **self.kwargs)
        args, kwargs = pytree.tree_map_only(
            _Ref, lambda one: values[one.at], (self.args, dict(self.kwargs))
        )
        return self.function(*args, **kwargs)


@attrs.frozen(eq=False)
class Program:
    """Ops that compute one tensor of tensors of the state, at these positions in it.

    Values are numbered: the inputs, the constants, then the results of the calls.
    """

    inputs: tuple[int, ...]
    constants: tuple[torch.Tensor, ...]
    calls: tuple[_Call, ...]
    result: int
    writes: bool

    def run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the tensor; the inputs stay as they are."""
        values: list[Any] = [*inputs, *self.constants]
        with torch.no_grad(), torch._C._DisableAutocast():
            if self.writes:
                values = [one.clone() for one in values]
            for call in self.calls:
                values.append(call.run(values))
            found: torch.Tensor = values[self.result].detach()
            return found


@attrs.frozen(eq=False)
class _Read:
    program: Program
    tensors: tuple[torch.Tensor, ...]
    kinds: tuple[tuple[torch.Size, torch.dtype, torch.device], ...]
    before: torch.Tensor
    names: str
    location: Location

    def now(self) -> torch.Tensor | None:
        """Return the value of the present state; None where a tensor is of another kind."""
        if any(map(operator.ne, map(_kind, self.tensors), self.kinds)):
            return None
        return self.program.run([one.detach() for one in self.tensors])

    def holds(self) -> bool:
        now = self.now()
        return now is not None and _is_same(now, self.before)

    def change(self) -> str:
        now = self.now()
        words = "is of another kind"
        if now is not None and _is_same(now, self.before):
            return ""
        if now is not None:
            is_short = now.numel() <= _MOST_SHOWN
            words = "is another one"
            if is_short:
                before, after = tuple(self.before.flatten().tolist()), tuple(now.flatten().tolist())
                is_one = len(after) == 1
                words = change_in_words(*((before[0], after[0]) if is_one else (before, after)))
        return f"what the step reads of {self.names} ({self.location}) {words}"


class StateReads:
    """The reads of one trace; `entries` are the state, whose fakes are the first inputs."""

    def __init__(
        self,
        entries: Sequence[StateTensor],
        tape: FloatTape,
        note_read: Callable[[torch.Tensor], None],
        diagnostics: Diagnostics,
        *,
        is_alone: bool,
    ) -> None:
        # Ranks could read what others do not, and compile other programs.
        self._entries = entries if is_alone else ()
        self._tape = tape
        self._note_read = note_read
        self._diagnostics = diagnostics
        self._found: list[_Read] = []
        self._storages = {storage_address(one.tensor) for one in entries if one.tensor.numel()}

    def value(self, tensor: torch.Tensor, location: Location) -> torch.Tensor | None:
        """Return what Python reads of a traced tensor, and guard it; None if it may not."""
        program = self._program(tensor)
        if program is None or not program.inputs or len(self._found) >= _MOST_READS:
            return None
        entries = [self._entries[at] for at in program.inputs]
        tensors = tuple(one.tensor for one in entries)
        with _disable_current_modes():
            before = program.run([one.detach() for one in tensors]).clone()
        names = short_list([one.name for one in entries])
        kinds = tuple(map(_kind, tensors))
        self._found.append(_Read(program, tensors, kinds, before, names, location))
        return before

    def note_outside(self, tensor: torch.Tensor) -> bool:
        """Guard the value of a tensor from outside; return False where it may be the state's.

        A view of it that was made before the step: the step writes to the state's fake.
        """
        if not isinstance(tensor, FakeTensor) and storage_address(tensor) in self._storages:
            return False
        self._note_read(tensor)
        return True

    def read_outside(self, tensor: torch.Tensor, location: Location) -> None:
        """Guard the value of a tensor from outside, whose memory is read.

        Raises:
            TracingStopped: it is a view of the state.
        """
        if not self.note_outside(tensor):
            self._diagnostics.add(
                f"reads the value of a view of shape {tuple(tensor.shape)} of the state that was "
                "made before the step",
                location,
                "Make the view inside of the step",
            )
            raise TracingStopped

    def hold(self) -> bool:
        """Return whether all reads are as they were."""
        return all(one.holds() for one in self._found)

    def changes(self) -> Iterator[str]:
        """Describe each that differs."""
        yield from filter(None, (one.change() for one in self._found))

    def refuse_counters(self, values: Sequence[Any]) -> None:
        """Refuse reads that differ at each call, each of which would compile a program.

        `values` are those of the state after the step. Of a bool there are two programs at most,
        and of a number that is a flag, which the step sets from 0 to 1 or back.
        """
        for read in self._found:
            if read.before.dtype is not torch.bool and not self._settles(read, values):
                is_float = read.before.dtype.is_floating_point
                self._diagnostics.add(
                    f"reads the number in {read.names} in Python, which the step changes",
                    read.location,
                    _COUNTER_ADVICE if is_float else f"{PLACE_ADVICE}. {_COUNTER_ADVICE}",
                )

    def _settles(self, read: _Read, values: Sequence[Any]) -> bool:
        """Return whether the next call reads the same, or is the last one that reads another."""
        needed: dict[int, Program] = {}
        waiting = list(read.program.inputs)
        while waiting:
            at = waiting.pop()
            if at not in needed:
                program = self._program(values[at])
                if program is None:
                    return False  # it depends on the batch
                needed[at] = program
                waiting += program.inputs
        with _disable_current_modes():
            state = {at: self._entries[at].tensor.detach() for at in needed}
            seen = [read.before]
            for _ in range(2):
                state = {
                    at: program.run([state[k] for k in program.inputs]).clone()
                    for at, program in needed.items()
                }
                seen.append(read.program.run([state[k] for k in read.program.inputs]))
            before, after, later = seen
            if _is_same(before, after):
                return True
            # What is written may be what was read, and then differs from one program to the next.
            is_flag = after.numel() == 1 and {before.item(), after.item()} == {0, 1}
            return is_flag and _is_same(after, later)

    def _program(self, tensor: Any) -> Program | None:
        """Return the ops that compute a traced tensor of the state alone; None for others."""
        mode = get_proxy_mode()
        slot = None
        if mode is not None and isinstance(tensor, torch.Tensor):
            slot = get_proxy_slot(tensor, mode.tracer, None)
        if mode is None or slot is None:
            return None
        last = slot.proxy.node
        placeholders = last.graph.find_nodes(op="placeholder")
        known = dict(zip(placeholders, range(len(self._entries)), strict=False))
        nodes = nodes_behind(last, lambda node: self._allows(node, known))
        if nodes is None:
            return None
        read = [node for node in nodes if node.op == "placeholder"]
        held = [node for node in nodes if node.op == "get_attr"]
        root: Any = getattr(mode.tracer, "root", None)
        constants = [getattr(root, str(node.target)) for node in held]
        if any(isinstance(one, FakeTensor) for one in constants):
            return None
        outside = [one for node, one in zip(held, constants, strict=True) if is_from_outside(node)]
        if not all([self.note_outside(one) for one in outside]):
            return None
        made = [node for node in nodes if node.op == "call_function"]
        at = {node: k for k, node in enumerate((*read, *held, *made))}
        with _disable_current_modes():
            return Program(
                tuple(known[node] for node in read),
                tuple(one.detach().clone() for one in constants),
                tuple(_call(node, at) for node in made),
                at[last],
                any(_is_mutable(node) for node in made),
            )

    def _allows(self, node: torch.fx.Node, known: Mapping[torch.fx.Node, int]) -> bool:
        if node.op == "placeholder":
            if node not in known:
                return False  # of the batch
            entry = self._entries[known[node]]
            is_whole = entry.like is None and entry.role in _ROLES
            return is_whole and entry.tensor.numel() <= _MOST_ELEMENTS
        if node.op == "get_attr":
            return True
        arguments = pytree.tree_leaves((node.args, dict(node.kwargs)))
        if any(self._tape.find(one) is not None for one in arguments):
            return False  # a hyper-parameter
        return _is_known(node.target) and computes_again(node, _MOST_ELEMENTS)


def _is_known(target: Any) -> bool:
    """Return whether a function is one of ATen's ops, whose schema says what it writes."""
    if target is operator.getitem:
        return True
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES


def _is_mutable(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _call(node: torch.fx.Node, at: Mapping[torch.fx.Node, int]) -> _Call:
    arguments: Any = (node.args, dict(node.kwargs))
    args, kwargs = pytree.tree_map_only(torch.fx.Node, lambda one: _Ref(at[one]), arguments)
    count = sum(isinstance(one, _Ref) for one in pytree.tree_leaves((args, kwargs)))
    is_flat = count == sum(isinstance(one, _Ref) for one in args)
    function: Any = node.target
    return _Call(function, tuple(args), kwargs, is_flat)


def _kind(tensor: torch.Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two results of one program are equal; NaNs are."""
    if one.numel() == 1 and not one.is_complex():
        now, before = one.item(), other.item()
        return now == before or (now != now and before != before)
    return torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)
