# SPDX-License-Identifier: Apache-2.0
"""Changes of a traced step to the user's Python objects: undone, and rejected where they matter.

A compiled step changes tensors only. A counter, a list that grows or an attribute that keeps a
tensor would not change; the capture reports it. It may ignore attributes that are written before
they are read and hold no tensor, and tensors that do not depend on the step's inputs (caches of
positions and masks), which are computed in the graph.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy
import torch

from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.guards.kept_tables import KeptTables
from amp_ir.capture.guards.kept_values import KeptValues
from amp_ir.capture.guards.left_values import (
    FollowedValue,
    Left,
    StoredValue,
    as_now,
    holds_result_number,
    holds_symbol,
    is_of_user,
    put_left,
    renewed,
)
from amp_ir.capture.guards.module_modes import ModuleModes
from amp_ir.capture.guards.observer import Observer
from amp_ir.capture.guards.optimizer_objects import OptimizerObjects
from amp_ir.capture.guards.outside_calls import draw
from amp_ir.capture.guards.places import (
    ABSENT,
    Contents,
    Place,
    flat,
    in_words,
    is_plain,
    is_same,
    line_of,
    location_at,
)
from amp_ir.capture.guards.registered_modules import ChangedTensor, NewModule, RegisteredModules
from amp_ir.capture.guards.traced_values import (
    begins_anew,
    holds_result,
    is_constant_tensor,
    traced_tensors,
)
from amp_ir.capture.state import StateTensor
from amp_ir.errors import CaptureError
from amp_ir.host.held_values import SEQUENCES, held_by
from amp_ir.ir.location import Location

_MOVE = (
    "A compiled step changes tensors only: return what is new and change it after the call, or "
    "make it a tensor that is a buffer of the model. What it decides (if count % 4 == 0) is passed "
    "to the step as an argument, a bool"
)
_OF_OPTIMIZER = (
    "A compiled step changes tensors only: let the optimizer keep it as a tensor of its state "
    "(state[parameter]['step'], as PyTorch's do), or set it between two steps"
)
_PASS = "Use it outside of the step, and pass what it gives as an argument"
_IN_INIT = (
    "Make it in __init__, or call the model once on a batch before, under torch.no_grad(), and "
    "pass its parameters to the optimizer"
)
_MAKE_BUFFER = (
    "Make it in __init__ with its shape, or call the model once on a batch before, under "
    "torch.no_grad(): a buffer that is a tensor is written by the step"
)
_REMOVE = "Keep it in the step, and remove it after the call"
_SET_MODE = "Set it before the step, and between steps"
_PLAIN = "Guards do not see what it holds: call the module that it was made of"
_MAKE_ITERATOR = "Keep a list or a tuple of what it gives, or make it after the call"
_RETURN_NUMBER = "Return it from the step, and keep it after the call"
_RETURN = (
    "Return the tensor from the step, and keep it after the call; what only the step reads, such "
    "as what a forward hook keeps, it may drop before it ends (kept.clear())"
)


@attrs.define(eq=False)
class SideEffects:
    """The effects of one traced step besides computing; `put` are the objects that the capture put.

    `stored` are the plain values that it left where it had read nothing, and `left` those that it
    left where it had, with their places; `leaves_followed` says that one is a number that is an
    input. A step that would leave the same values again, and have the same graph, has only
    initialized itself (`if self.kind is None: ...`); any other has state, which `state_error`
    reports. `tables` are tensors of constants alone that it left, and `kept` other tensors and
    numbers that it computes.
    """

    observer: Observer
    put: dict[int, Any]
    state: Sequence[StateTensor] = ()
    left: list[Left] = attrs.Factory(list)
    stored: list[StoredValue] = attrs.Factory(list)
    leaves_followed: bool = False
    tables: KeptTables = attrs.Factory(
        lambda self: KeptTables(self.observer.note_read, self.state), takes_self=True
    )
    kept: KeptValues = attrs.Factory(
        lambda self: KeptValues(self.observer.objects), takes_self=True
    )
    registered: RegisteredModules = attrs.Factory(lambda: RegisteredModules([]))
    of_optimizers: OptimizerObjects = attrs.Factory(lambda: OptimizerObjects([]))
    random_before: Any = attrs.Factory(random.getstate)
    numpy_before: Any = attrs.Factory(numpy.random.get_state)

    def begin(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Remember submodules, and what optimizers hold; call it before the step runs."""
        self.registered = RegisteredModules(models)
        self.of_optimizers = OptimizerObjects(optimizers)

    def report(self, diagnostics: Diagnostics) -> None:
        """Record everything that a compiled step would not do again; call it inside the trace."""
        self._report_modules(diagnostics)
        self._report_tensors(diagnostics)
        self._report_modes()
        self.observer.objects.unnamed.add_changed(self.observer.objects.places)
        reported = self._report_places(diagnostics)
        for contents in self.observer.objects.contents.values():
            self._report_contents(contents, reported, diagnostics)
        # Names come from sets, whose order differs from process to process.
        self.kept.sort()
        self._report_optimizers(diagnostics)
        self._report_draws(diagnostics)
        self.observer.report_variables(diagnostics)

    def _report_places(self, diagnostics: Diagnostics) -> set[tuple[int, Any]]:
        """Report changes of places; return the holder's id and the key of each that differs."""
        reported: set[tuple[int, Any]] = set()
        anew: list[Place] = []
        for place in self.observer.objects.places.values():
            now = place.now()
            is_followed = self._is_followed_elsewhere(place, now)
            if self._is_unchanged(place, now):
                self.leaves_followed |= is_followed
                # The step stores what was there already, or stores in another branch: the graph
                # is valid for this value only.
                place.is_loaded |= bool(place.line[1]) and is_plain(now)
                continue
            reported.add(place.identity)
            is_of_state = place.is_loaded and self._is_table_of_state(now)
            if begins_anew(now, place.before):
                anew.append(place)
            elif is_of_state or not self.kept.keep(place, now):
                self.leaves_followed |= is_followed
                self._report_place(place, now, diagnostics, is_of_state=is_of_state)
        for place in anew:
            # Beside a plain value it is a table, which the value says when to make.
            if self.left or not self.kept.keep(place, place.now()):
                self._report_place(place, place.now(), diagnostics, is_of_state=False)
        return reported

    def _report_place(
        self, place: Place, now: Any, diagnostics: Diagnostics, *, is_of_state: bool
    ) -> None:
        shared = frozenset(self.observer.objects.contents)
        is_table = is_of_state or is_constant_tensor(now)
        if holds_result(now) and not is_of_state:
            diagnostics.add(*_kept(place.name(), now, self._line(place)))
        elif holds_result_number(now, shared):
            diagnostics.add(*_kept_number(place.name(), self._line(place)))
        elif place.is_loaded and not is_table:
            now = as_now(now, shared)
            said = _changed(place, now, self._line(place))
            self.left.append(Left(place, now, place.identity, said))
        elif is_of_user(value := renewed(now, shared, FollowedValue.of), self.registered.known):
            self.stored.append(StoredValue(place, value, shared))
        elif holds_symbol(value, shared):
            diagnostics.add(*_kept_number(place.name(), self._line(place)))
        elif isinstance(now, Iterator) and held_by(now) is None:
            diagnostics.add(*_kept_iterator(place.name(), now, self._line(place)))
        if is_table:
            kept = [_kept(place.name(), now, self._line(place))] if is_of_state else []
            self._add_tables(place, now, kept, diagnostics)

    def _add_tables(
        self,
        place: Place | Contents,
        now: Any,
        of_state: Sequence[tuple[str, Location, str]],
        diagnostics: Diagnostics,
    ) -> None:
        """Add the tables in a place; `of_state` is what a refusal says of those of the state.

        These are refused where they have too many numbers to compute them here.
        """
        shared, line = frozenset(self.observer.objects.contents), place.line
        if isinstance(place, Place):
            line = self._line(place)
        is_read = isinstance(place, Contents) or place.is_loaded
        if self.tables.add(place, now, shared, location_at(line), is_read=is_read):
            self.tables.of_state += of_state
        else:
            for one in of_state:
                diagnostics.add(*one)

    def _is_table_of_state(self, value: Any) -> bool:
        return holds_result(value) and self.tables.is_of_state(list(traced_tensors(value)))

    def restore(self) -> None:
        """Restore everything to its value before the step."""
        self.observer.objects.unnamed.add_changed(self.observer.objects.places)
        self.registered.restore()
        self._restore_modes()
        for changed in self.of_optimizers.changes():
            changed.put_back()
        for contents in self.observer.objects.contents.values():
            now = flat(contents.target)
            if len(now) != len(contents.before) or any(
                one is not other for one, other in zip(now, contents.before, strict=True)
            ):
                contents.put_back()
        for place in self.observer.objects.places.values():
            if place.now() is not place.before or place.held() is place.stand_in:
                place.put_back()
        self.observer.restore_variables()
        self.observer.objects.stand_ins.end()
        for moving in self.observer.objects.advancing.values():
            if moving.has_moved():
                moving.move_back()
        self._forget()

    def _forget(self) -> None:
        """Drop what the step kept for later, which may be fake tensors; it is computed again."""
        for own, before in self.observer.objects.lazy.values():
            for key in own.keys() - before:
                del own[key]
        for cache, size in self.observer.objects.caches.values():
            if cache.cache_info().currsize != size:
                cache.cache_clear()

    @contextlib.contextmanager
    def again(self, tables: Sequence[Left] = ()) -> Iterator[None]:
        """Hold in the user's objects, for the duration of the context, what the step left."""
        put_left([*self.left, *tables])
        try:
            yield
        finally:
            self.restore()

    def _is_unchanged(self, place: Place, now: Any) -> bool:
        """Return whether a place holds what it held, or a mode, which `_report_modes` looks at."""
        is_mode = self.observer.objects.modes.before(place) is not None
        is_put = now is place.before or id(now) in self.put
        return is_mode or is_put or is_same(now, place.before)

    def _is_followed_elsewhere(self, place: Place, now: Any) -> bool:
        """Return whether the step left a number that is an input in another place than its own."""
        is_own = id(now) in self.put and (place.is_loaded or not place.line[1])
        return not is_own and holds_symbol(now, self.observer.objects.contents)

    def _report_modules(self, diagnostics: Diagnostics) -> None:
        """Report modules that the step registers; one without tensors may initialize itself.

        A scripted module is refused.
        """
        for module, name in self.observer.objects.modules.values():
            if isinstance(module, torch.jit.ScriptModule):
                diagnostics.add(f"calls {name()}, which torch.jit made", Location(), _PLAIN)
        for one in self.registered.new():
            kind, of = type(one.child).__name__, type(one.parent).__name__
            what = f"makes the module {one.key!r} ({kind}) of {of} and keeps it"
            line = self._line_of(one)
            if one.holds_tensors:
                told = f"{what}: each compiled step would make its parameters anew"
                diagnostics.add(told, location_at(line), _IN_INIT)
            else:
                said = what, location_at(line), _IN_INIT
                self.left.append(Left(one, one.child, (id(one.parent), one.key), said))

    def _report_tensors(self, diagnostics: Diagnostics) -> None:
        """Report parameters and buffers that the step registers, or takes out of a module."""
        for one in self.registered.changed_tensors():
            at = location_at(self._line_of(one))
            if one.tensor is None:
                diagnostics.add(f"removes {one.name()}", at, _REMOVE)
            elif holds_result(one.tensor):
                what, _, _ = _kept(one.name(), one.tensor, ("", 0))
                diagnostics.add(what, at, _IN_INIT if one.kind == "parameter" else _MAKE_BUFFER)
            elif one.kind == "buffer":
                place = Place(one.parent._buffers, "entry", one.key, one.name, ABSENT)
                self.tables.add(place, one.tensor, (), at)

    def _line_of(self, one: NewModule | ChangedTensor) -> tuple[str, int]:
        """Return the line that stores what the step registers; ("", 0) where none is known."""
        for place in self.observer.objects.places.values():
            if place.key == one.key and place.holder in (one.parent, vars(one.parent)):
                return self._line(place)
        return "", 0

    def _report_modes(self) -> None:
        """Leave modes as the step does; in those, the same graph is the step again, or another."""
        changed = self._changed_modes()
        if changed is not None:
            said = f"changes {changed.name()}, train or eval", Location(), _SET_MODE
            self.left.append(Left(changed, changed.now(), (0, "modes"), said))

    def _changed_modes(self) -> ModuleModes | None:
        return self.observer.objects.modes.changed(self.observer.has_made)

    def _restore_modes(self) -> None:
        changed = self._changed_modes()
        if changed is not None:
            changed.put_back()

    def leave_modes(self) -> bool:
        """Let each call leave the modes, if a step leaves nothing else; return whether it does."""
        modes = [(one.place, one.value) for one in self.left if isinstance(one.place, ModuleModes)]
        if len(modes) < len(self.left):
            return False
        self.stored += [StoredValue(place, value) for place, value in modes]
        self.left.clear()
        return True

    def state_error(self, again: SideEffects | None = None) -> CaptureError:
        """Return the error about the state of a step that was traced `again` with what it left.

        What the second trace leaves as it is was initialized, unless nothing else changed.
        """
        moving = {one.key for one in again.left} if again is not None else set()
        diagnostics = Diagnostics()
        for one in self.left:
            if one.key in moving or not any(other.key in moving for other in self.left):
                diagnostics.add(*one.diagnostic)
        return diagnostics.error()

    def _report_contents(
        self, contents: Contents, reported: set[tuple[int, Any]], diagnostics: Diagnostics
    ) -> None:
        """Report changes of containers; entries that are places are reported as places."""
        differing = [
            (key, now, before)
            for key, now, before in _differences(contents)
            if (id(contents.target), key) not in reported
            and id(now) not in self.put
            and not is_same(now, before)
        ]
        of_state = [now for _, now, _ in differing if self._is_table_of_state(now)]
        if sum(holds_result(now) for _, now, _ in differing) > len(of_state):
            of_state = []  # beside others, which each call computes
        known = {*map(id, of_state)}

        def is_table(now: Any, before: Any) -> bool:
            is_anew = begins_anew(now, before) and not self.left
            return id(now) in known or (is_constant_tensor(now) and not is_anew)

        changed = [one for one in differing if not is_table(*one[1:])]
        kind = type(contents.target).__name__
        name = f"{contents.name()} (a {kind})"
        if len(changed) < len(differing):
            said = [_kept(name, one, contents.line) for one in of_state]
            self._add_tables(contents, contents.now(), said, diagnostics)
        if (
            not changed
            or self.kept.holds(contents.target)
            or self.kept.keep_entries(contents, changed)
        ):
            return
        kept = [now for _, now, before in changed if holds_result(now) or begins_anew(now, before)]
        if kept:
            diagnostics.add(*_kept(name, kept[0], contents.line))
            return
        keys = ", ".join(in_words(key) for key, *_ in changed[:3])
        what = f"changes {contents.name()} (a {kind}, at {keys})"
        moved = what, location_at(contents.line), _MOVE
        now = as_now(contents.now(), self.observer.objects.contents)
        self.left.append(Left(contents, now, (id(contents.target), None), moved))

    def _report_optimizers(self, diagnostics: Diagnostics) -> None:
        for place in self.of_optimizers.changes():
            now = place.now()
            if holds_result(now):
                what, _, _ = _kept(place.name(), now, ("", 0))
                diagnostics.add(what, Location(), _OF_OPTIMIZER)
            elif not is_constant_tensor(now):
                if isinstance(place, Contents):
                    what, key = f"changes {place.name()}", (id(place.target), None)
                else:
                    what, _, _ = _changed(place, now, ("", 0))
                    key = place.identity
                self.left.append(Left(place, now, key, (what, Location(), _OF_OPTIMIZER)))

    def _line(self, place: Place) -> tuple[str, int]:
        return line_of(place, self.observer.objects.contents)

    def _report_draws(self, diagnostics: Diagnostics) -> None:
        """Report draws that were not seen as calls, with the line that names the generator."""
        for moving in self.observer.objects.advancing.values():
            if moving.has_moved() and not self.observer.has_drawn:
                what = (
                    f"moves {moving.name()} on, {moving.word}, which a compiled step would not do"
                )
                diagnostics.add(what, Location(), _PASS)
        if random.getstate() != self.random_before and not self.observer.has_drawn:
            diagnostics.add(*draw("the step", Location()))
        before, now = self.numpy_before, numpy.random.get_state()
        if any(not numpy.array_equal(a, b) for a, b in zip(before, now, strict=True)):
            diagnostics.add(*draw("numpy.random", location_at(self.observer.numpy_line)))


def _differences(contents: Contents) -> Iterator[tuple[Any, Any, Any]]:
    """Return (key or position, value now, value before) of differences; ABSENT for no value."""
    now, before = contents.now(), contents.before
    if isinstance(contents.target, dict):
        new, old = (dict(zip(one[::2], one[1::2], strict=True)) for one in (now, before))
    elif isinstance(contents.target, SEQUENCES):
        new, old = dict(enumerate(now)), dict(enumerate(before))
    else:
        new, old = ({one: one for one in side} for side in (now, before))
    is_moved = isinstance(contents.target, dict) and new.keys() == old.keys()
    for key, other in zip(old, new, strict=True) if is_moved else ():
        if key is not other:  # as OrderedDict.move_to_end leaves it
            yield key, ABSENT, old[key]
            break
    for key in {**old, **new}:
        if new.get(key, ABSENT) is not old.get(key, ABSENT):
            yield key, new.get(key, ABSENT), old.get(key, ABSENT)


def _changed(place: Place, now: Any, line: tuple[str, int]) -> tuple[str, Location, str]:
    what = f"changes {place.name()}, which was {in_words(place.before)} and becomes {in_words(now)}"
    return what, location_at(line), _MOVE


def _kept(name: str, now: Any, line: tuple[str, int]) -> tuple[str, Location, str]:
    tensor = next(traced_tensors(now))
    what = (
        f"keeps a tensor of shape {tuple(tensor.shape)} in {name}, where a compiled step puts none"
    )
    return what, location_at(line), _RETURN


def _kept_number(name: str, line: tuple[str, int]) -> tuple[str, Location, str]:
    what = f"keeps a number that it computes in {name}, where a compiled step puts none"
    return what, location_at(line), _RETURN_NUMBER


def _kept_iterator(name: str, now: Any, line: tuple[str, int]) -> tuple[str, Location, str]:
    what = f"keeps a {type(now).__name__} in {name}, which a compiled step does not make again"
    return what, location_at(line), _MAKE_ITERATOR
