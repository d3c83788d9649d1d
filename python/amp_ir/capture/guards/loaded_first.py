# SPDX-License-Identifier: Apache-2.0
"""Attributes, globals and closure variables that a function may load before it stores them.

A data-flow analysis of bytecode (definite assignment). A store counts for loads that reach the same
object by the same words: one of `self.child.size` says nothing of `other.size`. Ways by which an
exception goes count as none: where a capture met one, each call of the compiled step would.
"""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType

import attrs

_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_NO_NEXT = frozenset(
    {
        "RETURN_VALUE", "RETURN_CONST", "RAISE_VARARGS", "RERAISE", "JUMP_FORWARD", "JUMP_ABSOLUTE",
        "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT",
    }
)  # fmt: skip
_NAMES = ("_FAST", "_GLOBAL", "_DEREF", "_NAME", "_CLASSDEREF")
# Those of `self.n += 1` on the object itself.
_COPIES = frozenset({"COPY", "DUP_TOP"})

# The words of a place, ("self", "child", "size"); of a variable one word.
_Words = tuple[str, ...]


@attrs.define
class _Step:
    """One instruction: what it loads, stores and gives another object, and where it goes on."""

    loads: tuple[str, _Words | None, str] | None = None
    stores: list[_Words] = attrs.Factory(list)
    next: list[int] = attrs.Factory(list)


def loaded_first(code: CodeType) -> set[tuple[str, str]]:
    """Return ("attribute", "global" or "cell", name) of what may be loaded before it is stored."""
    steps = _steps(code)
    return {
        (one.loads[0], one.loads[2])
        for one, stored in zip(steps, _stored_before(steps), strict=True)
        if one.loads is not None and stored is not None and one.loads[1] not in stored
    }


def _steps(code: CodeType) -> list[_Step]:
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    position = {one.offset: k for k, one in enumerate(instructions)}
    steps: list[_Step] = []
    on_top: _Words | None = None  # the words of what was pushed last
    for k, one in enumerate(instructions):
        step, on_top = _step(one, None if one.is_jump_target else on_top)
        if one.opname not in _NO_NEXT and k + 1 < len(instructions):
            step.next.append(k + 1)
        if one.opcode in _JUMPS and not one.opname.startswith("SETUP_"):
            target = position.get(one.argval)
            step.next += [] if target is None else [target]
        steps.append(step)
    return steps


def _step(one: dis.Instruction, on_top: _Words | None) -> tuple[_Step, _Words | None]:
    """Return what an instruction loads and stores, and the words of what it pushes last."""
    name = one.opname
    words = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        on_top = None if on_top is None else (*on_top, one.argval)
        return _Step(("attribute", on_top, one.argval)), on_top
    if name in ("STORE_ATTR", "DELETE_ATTR"):
        return _Step(stores=[] if on_top is None else [(*on_top, one.argval)]), None
    if name.startswith("STORE_FAST_LOAD"):
        return _Step(stores=[words[:1]]), words[1:]
    if name.startswith(("STORE_", "DELETE_")) and name.endswith(_NAMES):
        return _Step(stores=[(word,) for word in words]), None
    if name.startswith("LOAD_") and any(part in name for part in _NAMES):
        kind = "cell" if "DEREF" in name else "global"
        is_local = "_FAST" in name
        return _Step(None if is_local else (kind, words[-1:], words[-1])), words[-1:]
    return _Step(), on_top if name in _COPIES else None


def _stored_before(steps: list[_Step]) -> list[frozenset[_Words] | None]:
    """Return what is stored on every way to each instruction; None where no way leads."""
    before: list[frozenset[_Words] | None] = [None] * len(steps)
    waiting = [(0, frozenset[_Words]())] if steps else []
    while waiting:
        k, stored = waiting.pop()
        known = before[k]
        now = stored if known is None else known & stored
        if now != known:
            before[k] = now
            after = frozenset(_after(now, steps[k].stores))
            waiting += [(following, after) for following in steps[k].next]
    return before


def _after(stored: frozenset[_Words], stores: list[_Words]) -> Iterator[_Words]:
    """Return what is stored after some stores: words that lead through these lead elsewhere."""
    for words in stored:
        through = words[:1] if len(words) > 1 else ()
        if not any(one[-1] in words[1:-1] if len(one) > 1 else one == through for one in stores):
            yield words
    yield from stores
