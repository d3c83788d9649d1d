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
import types
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from amp_ir.capture.constant_values import nodes_behind
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.diagnostics import Diagnostics
from amp_ir.capture.guards.kept_tables import KeptTables, is_table
from amp_ir.capture.guards.kept_values import KeptValue
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
from amp_ir.capture.guards.observed_objects import part_name
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
)
from amp_ir.capture.guards.registered_modules import ChangedTensor, NewModule, RegisteredModules
from amp_ir.capture.later_number import LaterNumber
from amp_ir.capture.state import StateTensor
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.capture.traced_node import traced_node
from amp_ir.errors import CaptureError
from amp_ir.host.held_values import SEQUENCES, each_held, held_by
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
# As of loops that fill a mask element by element.
_MOST_OPS = 2**20
_RETURN_NUMBER = "Return it from the step, and keep it after the call"
_RETURN = (
    "Return the tensor from the step, and keep it after the call; what only the step reads, such "
    "as what a forward hook keeps, it may drop before it ends (kept.clear())"
)
_UPDATE = (
    "Update the tensor that is there in place: kept[k].copy_(value), or kept[k].mul_(decay).add_("
    "value, alpha=1 - decay). Or return what is new, and assign it after the call"
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
    kept: list[KeptValue] = attrs.Factory(list)
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
        self.kept.sort(key=lambda one: one.order)
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
            reported.add((id(place.holder), place.key))
            is_of_state = place.is_loaded and self._is_table_of_state(now)
            if _begins_anew(now, place.before):
                anew.append(place)
            elif is_of_state or not self._keep(place, now):
                self.leaves_followed |= is_followed
                self._report_place(place, now, diagnostics, is_of_state=is_of_state)
        for place in anew:
            # Beside a plain value it is a table, which the value says when to make.
            if self.left or not self._keep(place, place.now()):
                self._report_place(place, place.now(), diagnostics, is_of_state=False)
        return reported

    def _report_place(
        self, place: Place, now: Any, diagnostics: Diagnostics, *, is_of_state: bool
    ) -> None:
        shared = frozenset(self.observer.objects.contents)
        is_table = is_of_state or _is_constant_tensor(now)
        if _holds_result(now) and not is_of_state:
            diagnostics.add(*_kept(place.name(), now, self._line(place)))
        elif holds_result_number(now, shared):
            diagnostics.add(*_kept_number(place.name(), self._line(place)))
        elif place.is_loaded and not is_table:
            now = as_now(now, shared)
            said = _changed(place, now, self._line(place))
            self.left.append(Left(place, now, (id(place.holder), place.key), said))
        elif is_of_user(value := renewed(now, shared, FollowedValue.of), self.registered.known):
            self.stored.append(StoredValue(place, value, shared))
        elif holds_symbol(value, shared):
            diagnostics.add(*_kept_number(place.name(), self._line(place)))
        elif isinstance(now, Iterator) and held_by(now) is None:
            diagnostics.add(*_kept_iterator(place.name(), now, self._line(place)))
        if is_table:
            kept = [_kept(place.name(), now, self._line(place))] if is_of_state else []
            self._add_tables(place, now, kept, diagnostics)

    def _keep(self, place: Place, now: Any) -> bool:
        """Make what a place holds a result of the step; return whether it is one."""
        is_computed = _holds_result(now) or holds_result_number(now, self.observer.objects.contents)
        if not (is_computed or _begins_anew(now, place.before)):
            return False
        kept = self._kept_value(place, now)
        self.kept += [] if kept is None else [kept]
        return kept is not None

    def _keep_entries(self, contents: Contents, changed: Sequence[tuple[Any, Any, Any]]) -> bool:
        """Make all entries that changed results of the step, if one is; return whether they are."""
        shared = self.observer.objects.contents
        if not any(
            _holds_result(now) or holds_result_number(now, shared) or _begins_anew(now, before)
            for _, now, before in changed
        ):
            return False
        is_dict = isinstance(contents.target, dict)
        kept = []
        for key, now, before in changed:
            if now is ABSENT or not (is_dict or before is not ABSENT):
                return False
            name = part_name("entry" if is_dict else "item", key, contents.name)
            place = Place(
                contents.target, "entry", key, name, before, is_loaded=True, line=contents.line
            )
            one = self._kept_value(place, now)
            if one is None:
                return False
            kept.append(one)
        self.kept += kept
        return True

    def _kept_value(self, place: Place, now: Any) -> KeptValue | None:
        objects = self.observer.objects
        filled = (one.target for one in objects.contents.values() if not one.before)
        line = self._line(place)
        contents = objects.contents.get(id(place.holder))
        if contents is None:
            order = *line, place.name(), 0
        else:  # in the order of the container, for that of a dictionary's keys
            is_dict = isinstance(contents.target, dict)
            position = list(contents.target).index(place.key) if is_dict else place.key
            order = *line, contents.name(), position
        return KeptValue.of(place, now, order, objects.known, set(map(id, filled)), _at(line))

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
        if self.tables.add(place, now, shared, _at(line), is_read=is_read):
            self.tables.of_state += of_state
        else:
            for one in of_state:
                diagnostics.add(*one)

    def _is_table_of_state(self, value: Any) -> bool:
        return _holds_result(value) and self.tables.is_of_state(list(_tensors(value)))

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
                diagnostics.add(told, _at(line), _IN_INIT)
            else:
                said = what, _at(line), _IN_INIT
                self.left.append(Left(one, one.child, (id(one.parent), one.key), said))

    def _report_tensors(self, diagnostics: Diagnostics) -> None:
        """Report parameters and buffers that the step registers, or takes out of a module."""
        for one in self.registered.changed_tensors():
            at = _at(self._line_of(one))
            if one.tensor is None:
                diagnostics.add(f"removes {one.name()}", at, _REMOVE)
            elif _holds_result(one.tensor):
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

    @property
    def unsure(self) -> list[KeptValue]:
        """What it keeps where it may read what the call before has kept."""
        return [one for one in self.kept if one.unsure is not None]

    def keeps_as(self, first: SideEffects) -> bool:
        """Return whether a trace that found what another kept keeps that again, made anew."""
        mine, others = (
            [one.key for one in each.unsure if one.is_computed] for each in (self, first)
        )
        made = {id(one) for each in first.kept for one in each.made}
        is_anew = not any(id(one) in made for each in self.kept for one in each.made)
        return mine == others and is_anew

    def kept_error(self) -> CaptureError:
        """Return the error about what the step keeps and reads."""
        diagnostics = Diagnostics()
        for one in self.unsure:
            if one.unsure is not None and one.is_computed:
                diagnostics.add(*one.unsure)
        return diagnostics.error()

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
        known = {*map(id, of_state)}

        def is_table(now: Any, before: Any) -> bool:
            is_anew = _begins_anew(now, before) and not self.left
            return id(now) in known or (_is_constant_tensor(now) and not is_anew)

        changed = [one for one in differing if not is_table(*one[1:])]
        kind = type(contents.target).__name__
        name = f"{contents.name()} (a {kind})"
        if len(changed) < len(differing):
            said = [_kept(name, one, contents.line) for one in of_state]
            self._add_tables(contents, contents.now(), said, diagnostics)
        is_made = any(one is contents.target for each in self.kept for one in each.made)
        if not changed or is_made or self._keep_entries(contents, changed):
            return
        kept = [
            (now, before)
            for _, now, before in changed
            if _holds_result(now) or _begins_anew(now, before)
        ]
        if kept:
            what, place, advice = _kept(name, kept[0][0], contents.line)
            updates = all(_are_alike(now, before) for now, before in kept)
            diagnostics.add(what, place, _UPDATE if updates else advice)
            return
        keys = ", ".join(in_words(key) for key, *_ in changed[:3])
        what = f"changes {contents.name()} (a {kind}, at {keys})"
        moved = what, _at(contents.line), _MOVE
        now = as_now(contents.now(), self.observer.objects.contents)
        self.left.append(Left(contents, now, (id(contents.target), None), moved))

    def _report_optimizers(self, diagnostics: Diagnostics) -> None:
        for place in self.of_optimizers.changes():
            now = place.now()
            if _holds_result(now):
                what, _, _ = _kept(place.name(), now, ("", 0))
                diagnostics.add(what, Location(), _OF_OPTIMIZER)
            elif not _is_constant_tensor(now):
                if isinstance(place, Contents):
                    what, key = f"changes {place.name()}", (id(place.target), None)
                else:
                    what, _, _ = _changed(place, now, ("", 0))
                    key = id(place.holder), place.key
                self.left.append(Left(place, now, key, (what, Location(), _OF_OPTIMIZER)))

    def _line(self, place: Place) -> tuple[str, int]:
        contents = self.observer.objects.contents.get(id(place.holder))
        return place.line if place.line[1] or contents is None else contents.line

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
            diagnostics.add(*draw("numpy.random", _at(self.observer.numpy_line)))


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
    return what, _at(line), _MOVE


def _kept(name: str, now: Any, line: tuple[str, int]) -> tuple[str, Location, str]:
    tensor = next(_tensors(now))
    what = (
        f"keeps a tensor of shape {tuple(tensor.shape)} in {name}, where a compiled step puts none"
    )
    return what, _at(line), _RETURN


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether both are tensors of one shape, so that one is written into the other."""
    are_tensors = isinstance(one, FakeTensor) and isinstance(other, torch.Tensor)
    return are_tensors and one.shape == other.shape


def _kept_number(name: str, line: tuple[str, int]) -> tuple[str, Location, str]:
    what = f"keeps a number that it computes in {name}, where a compiled step puts none"
    return what, _at(line), _RETURN_NUMBER


def _kept_iterator(name: str, now: Any, line: tuple[str, int]) -> tuple[str, Location, str]:
    what = f"keeps a {type(now).__name__} in {name}, which a compiled step does not make again"
    return what, _at(line), _MAKE_ITERATOR


def _at(line: tuple[str, int]) -> Location:
    return Location(file=line[0], line=line[1]) if line[1] else Location()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the fake tensors that a value reaches, also in what a function reads when called."""
    kinds = (
        type, types.ModuleType, torch.nn.Module, torch.Tensor, SymbolicFloat, LaterNumber,
    )  # fmt: skip
    with contextlib.suppress(OverflowError):
        for one in each_held(value, lambda one: isinstance(one, kinds)):
            if isinstance(one, FakeTensor):
                yield one
            elif isinstance(one, PackedPart):
                yield from one.held()


def _holds_result(value: Any) -> bool:
    """Return whether a value holds a tensor that depends on inputs or on random numbers."""
    return any(not _is_constant(tensor) for tensor in _tensors(value))


def _is_constant_tensor(value: Any) -> bool:
    return any(True for _ in _tensors(value)) and not _holds_result(value)


def _begins_anew(now: Any, before: Any) -> bool:
    """Return whether a tensor of constants takes the place of another one that is no table."""
    return _are_alike(now, before) and not is_table(before) and _is_constant_tensor(now)


def _is_constant(tensor: torch.Tensor) -> bool:
    """Return whether a tensor of the trace is the same at every call."""
    node = traced_node(tensor)
    if node is None:
        return False
    behind = nodes_behind(node, _is_computed_again, most_nodes=_MOST_OPS)
    return behind is not None


def _is_computed_again(node: torch.fx.Node) -> bool:
    tags: Any = getattr(node.target, "tags", ())
    return node.op != "placeholder" and torch.Tag.nondeterministic_seeded not in tags
