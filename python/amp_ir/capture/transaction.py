# SPDX-License-Identifier: Apache-2.0
"""A step under a loss scale is a transaction: a gradient that is not finite rolls it back.

While the step is traced, the value of a state tensor is saved before each write. The tensors of an
optimizer are selected by the check of that optimizer's gradients, as PyTorch skips each optimizer
separately; all others (BatchNorm's statistics, averaged copies, gradient accumulators) by the
checks of all gradients together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from amp_ir.capture.state import State, StateTensor
from amp_ir.ir.step_module import Role


@attrs.define(eq=False)
class _Written:
    """The writes of one transaction to a tensor of the state.

    `before` is its value before the first write of the transaction, None if there was none.
    `is_ended` says that an `update` came after the last write, and `is_settled` that no selection
    remains after it: its optimizer's selection was made, or it was cleared.
    """

    before: torch.Tensor | None = None
    is_ended: bool = False
    is_settled: bool = False


@attrs.frozen(eq=False)
class BufferPlace:
    """Where a module holds a buffer of the state: a step may put another tensor there."""

    entry: StateTensor
    buffers: dict[str, torch.Tensor | None]
    key: str

    def replaced(self) -> torch.Tensor | None:
        """Return what the step has put there, if that is another tensor that fits."""
        value, fake = self.buffers.get(self.key), self.entry.fake
        if not isinstance(value, torch.Tensor) or value is fake:
            return None
        return value if (value.shape, value.dtype) == (fake.shape, fake.dtype) else None


class Transaction:
    """The writes of a traced step to its state, and which of them an overflow rolls back.

    `places` returns where the buffers are held.
    """

    def __init__(self, state: State, places: Callable[[], Iterator[BufferPlace]]) -> None:
        self._entries = [entry for entry in state.tensors if entry.role is not Role.SCALER_STATE]
        self._places = places
        # Of buffers that the step replaces: the values when the transaction began, and those that
        # were selected last.
        self._begun: dict[int, torch.Tensor] = {}
        self._selected: dict[int, torch.Tensor] = {}
        # Without a scaler nothing is rolled back, so no value is saved.
        entries = self._entries if state.scalers else []
        self._written = {id(entry.fake): _Written() for entry in entries}
        # Writes to a parameter may come through `.data`, `detach()` or a part of it.
        self._in_storage = {_storage(entry.fake): [entry] for entry in entries}
        self._watched: dict[int, bool] = {}
        self._owner = _owners(state)
        # The check of each optimizer that stepped; None for one without a scaler.
        self._found: dict[int, torch.Tensor | None] = {}
        # Those that a scaler steps now, and those that one has stepped.
        self._guarding: set[int] = set()
        self.guarded: set[int] = set()
        self._ended: list[tuple[object, torch.Tensor]] = []
        self._is_selecting = False
        self._statistics: set[int] = set()

    def before_write(self, target: torch.Tensor) -> None:
        """Save the value of a tensor of the state before it, or a view of it, is written."""
        if self._is_selecting:
            return
        storage = _storage(target)
        if storage in self._watched:
            self._watched[storage] = True
        for entry in self._in_storage.get(storage, ()):
            self._save(entry)

    def _save(self, entry: StateTensor) -> None:
        written = self._written[id(entry.fake)]
        if written.before is None or written.is_ended:
            # A value that was selected by then is the old one, if the step is skipped.
            written.before = torch.ops.aten.clone.default(entry.fake)
            written.is_ended = False
        written.is_settled = False

    def before_statistics(self, target: torch.Tensor) -> None:
        """Save running statistics before a batch norm in training updates them.

        Autograd keeps them for the backward pass of the batch norm, which does not read them.
        """
        self.before_write(target)
        self._statistics.add(_storage(target))

    @contextlib.contextmanager
    def moving(self, tensor: torch.Tensor) -> Iterator[None]:
        """Save the value of a tensor of the state, which gets other memory inside."""
        found = [entry for entry in self._entries_in(tensor) if entry.fake is tensor]
        for entry in found:
            self._save(entry)
            self._entries_in(tensor).remove(entry)
        yield
        if found:
            self._in_storage.setdefault(_storage(tensor), []).extend(found)

    def watch_writes(self, tensor: torch.Tensor) -> None:
        """Record from here on whether the step writes to the memory of a tensor that stays."""
        self._watched[_storage(tensor)] = False

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Return whether the step wrote to a tensor that is watched."""
        return self._watched[_storage(tensor)]

    def _entries_in(self, tensor: torch.Tensor) -> list[StateTensor]:
        return self._in_storage.get(_storage(tensor), [])

    def cleared(self, target: torch.Tensor) -> None:
        """Record that a tensor was set to zero: a gradient that the step clears stays cleared."""
        for entry in self._entries_in(target):
            if target.numel() == entry.fake.numel():
                self._written[id(entry.fake)].is_settled = True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a call of `optimizer.step`; without a scaler, no tensor of it is rolled back."""
        if id(optimizer) not in self._guarding:
            self._found[id(optimizer)] = None

    @contextlib.contextmanager
    def of_optimizer(self, optimizer: torch.optim.Optimizer, found: torch.Tensor) -> Iterator[None]:
        """Step `optimizer` under a scaler inside, and select its tensors afterwards."""
        own = [entry for entry in self._entries if self._owner.get(id(entry.fake)) == id(optimizer)]
        if id(optimizer) in self._found:
            # The results of its earlier step remain, whether or not this one is skipped.
            for entry in own:
                self._written[id(entry.fake)].before = None
        known = self._found.get(id(optimizer))
        self._found[id(optimizer)] = found if known is None else torch.logical_or(known, found)
        self._guarding.add(id(optimizer))
        self.guarded.add(id(optimizer))
        before = {id(values): dict(values) for values in optimizer.state.values()}
        yield
        self._guarding.discard(id(optimizer))
        for entry in own:
            self._select(entry, found)
            self._written[id(entry.fake)].is_settled = True
        self._select_replaced(optimizer, before, found)

    @staticmethod
    def _select_replaced(
        optimizer: torch.optim.Optimizer, before: dict[int, dict[Any, Any]], found: torch.Tensor
    ) -> None:
        """Keep the state of `before` that a skipped step replaced by new tensors."""
        for values in optimizer.state.values():
            for key, old in before.get(id(values), {}).items():
                new = values.get(key)
                both = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
                if both and new is not old and (new.shape, new.dtype) == (old.shape, old.dtype):
                    values[key] = torch.where(found, old, new)

    def end(self, scaler: object, found: torch.Tensor) -> None:
        """Select what was written since the transaction began: `scaler.update` was called."""
        if any(one is scaler for one, _ in self._ended):
            # It is another iteration of the same loop; what it did not write is settled.
            self._ended.clear()
            self._begun = dict(self._selected)
            for written in self._written.values():
                written.before = None if written.is_ended else written.before
        self._ended.append((scaler, found))
        self._select_all(found, only_new=False)
        self._select_replaced_buffers(found, only_new=False)
        for written in self._written.values():
            written.is_ended = True

    def advice_on_writes(self) -> str | None:
        """Return what to do about a write that the user may not have made: that of an `update`."""
        if not self._ended:
            return None
        return (
            "Check that it runs as plain PyTorch on the same batch; if it does, the write is that "
            "of scaler.update(), which puts back what the step wrote before it (an averaged copy) "
            "where an overflow skips it: call it before the forward pass of a loss of another "
            "scaler that reads this"
        )

    def finish(self) -> dict[int, torch.Tensor]:
        """Select what was written after the last `update`, such as averaged copies.

        Returns:
            the new values of buffers that the step replaced instead of writing, by the id of the
            state tensor.
        """
        if not self._ended:
            return {}
        found = self._ended[0][1]
        for _, other in self._ended[1:]:
            found = torch.logical_or(found, other)
        self._select_all(found, only_new=True)
        self._begun.update(self._selected)
        self._select_replaced_buffers(found, only_new=True)
        return dict(self._selected)

    def _select_replaced_buffers(self, found: torch.Tensor, *, only_new: bool) -> None:
        """Select between what the step put in a buffer's place and its value before."""
        for place in self._places():
            value, key = place.replaced(), id(place.entry)
            if value is None or (only_new and value is self._selected.get(key)):
                continue
            before = self._begun.get(key, self._written[id(place.entry.fake)].before)
            with torch.no_grad():
                new = torch.where(found, place.entry.fake if before is None else before, value)
            place.buffers[place.key] = self._selected[key] = new

    def _select_all(self, found: torch.Tensor, *, only_new: bool) -> None:
        for entry in self._entries:
            written = self._written[id(entry.fake)]
            if written.is_settled or (only_new and written.is_ended):
                continue
            owner = self._owner.get(id(entry.fake))
            if owner is None or owner not in self._found:
                self._select(entry, found)
                continue
            own = self._found[owner]
            if own is not None:
                self._select(entry, own)

    def _select(self, entry: StateTensor, found: torch.Tensor) -> None:
        before = self._written[id(entry.fake)].before
        if before is None:
            return
        self._is_selecting = True
        with torch.no_grad(), self._hidden_from_autograd(entry):
            entry.fake.copy_(torch.where(found, before, entry.fake))
        self._is_selecting = False

    def _hidden_from_autograd(self, entry: StateTensor) -> contextlib.AbstractContextManager[None]:
        """Let a backward pass follow the selection of statistics, as with the scalers of a GAN."""
        if _storage(entry.fake) not in self._statistics:
            return contextlib.nullcontext()
        return torch.autograd.grad_mode._unsafe_preserve_version_counter(entry.fake)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _owners(state: State) -> dict[int, int]:
    """Return the id of the optimizer that owns a parameter or its state, by the id of the fake.

    Requires: the optimizers hold the fakes.
    """
    owners = {}
    for index, optimizer in enumerate(state.optimizers):
        for group in optimizer.param_groups:
            owners.update({id(parameter): id(optimizer) for parameter in group["params"]})
        for (position, _), by_key in state.optimizer_state.items():
            if position == index:
                owners.update({id(entry.fake): id(optimizer) for entry in by_key.values()})
    return owners
