# SPDX-License-Identifier: Apache-2.0
"""Attributes, globals and closure variables that a function may load before it stores them.

A data-flow analysis of bytecode (definite assignment). A store counts for loads that reach the same
object by the same words: one of `self.child.size` says nothing of `other.size`. An exception may
come before each instruction of a `try`, and of a `with` whose object may catch it. What a function
defined inside loads of a closure counts where that is made.
"""

from __future__ import annotations

import dis
import itertools
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
# Of what `with` enters: these let exceptions pass.
_PASS_EXCEPTIONS = frozenset(
    {
        "no_grad", "enable_grad", "inference_mode", "set_grad_enabled", "autocast", "autocast_off",
        "record_function", "nullcontext", "no_sync", "sdpa_kernel",
    }
)  # fmt: skip
_WITH = frozenset({"BEFORE_WITH", "SETUP_WITH"})
# Those of `self.n += 1` on the object itself.
_COPIES = frozenset({"COPY", "DUP_TOP"})

# The words of a place, ("self", "child", "size"); of a variable one word.
_Words = tuple[str, ...]


@attrs.define
class _Step:
    """One instruction: what it loads, stores and gives another object, and where it goes on.

    `handlers` are where it goes on, if it raises, before it has stored anything.
    """

    loads: list[tuple[str, _Words | None, str]] = attrs.Factory(list)
    stores: list[_Words] = attrs.Factory(list)
    next: list[int] = attrs.Factory(list)
    handlers: list[int] = attrs.Factory(list)


def loaded_first(code: CodeType) -> set[tuple[str, str]]:
    """Return ("attribute", "global" or "cell", name) of what may be loaded before it is stored."""
    steps = _steps(code)
    return {
        (kind, name)
        for one, stored in zip(steps, _stored_before(steps), strict=True)
        for kind, words, name in one.loads
        if stored is not None and words not in stored
    }


def _steps(code: CodeType) -> list[_Step]:
    instructions, position, targets = _instructions(code)
    steps: list[_Step] = []
    on_top: _Words | None = None  # the words of what was pushed last
    for k, one in enumerate(instructions):
        step, on_top = _step(one, None if k in targets else on_top)
        if one.opname not in _NO_NEXT and k + 1 < len(instructions):
            step.next.append(k + 1)
        if one.opcode in _JUMPS and not one.opname.startswith("SETUP_"):
            step.next.append(position[one.argval])
        steps.append(step)
    for start, end, target in _handled(code, instructions):
        for step in steps[position[start] : position.get(end)]:
            step.handlers.append(position[target])
    return steps


def _instructions(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int], set[int]]:
    """Return instructions, their positions by offset, and the positions that are jumped to.

    One with a large argument begins where its first prefix does.
    """
    instructions: list[dis.Instruction] = []
    position: dict[int, int] = {}
    targets: set[int] = set()
    for one in dis.get_instructions(code):
        position[one.offset] = len(instructions)
        if one.is_jump_target:
            targets.add(len(instructions))
        if one.opname != "EXTENDED_ARG":
            instructions.append(one)
    return instructions, position, targets


def _handled(code: CodeType, instructions: list[dis.Instruction]) -> list[tuple[int, int, int]]:
    """Return (start, end, handler), as offsets, of parts of the code after which it may go on."""
    passing = {
        after.offset
        for k, (one, after) in enumerate(itertools.pairwise(instructions))
        if one.opname in _WITH and _passes_exceptions(instructions[:k])
    }
    entries = getattr(dis.Bytecode(code), "exception_entries", None)
    if entries is None:  # before Python 3.11
        found = [
            (after.offset, one.argval, one.argval)
            for one, after in itertools.pairwise(instructions)
            if one.opcode in _JUMPS and one.opname.startswith("SETUP_")
        ]
    else:
        found = [(one.start, one.end, one.target) for one in entries]
    ended = {target for start, _, target in found if start in passing}
    return [one for one in found if one[-1] not in ended]


def _passes_exceptions(before: list[dis.Instruction]) -> bool:
    """Return whether what `with` enters lets exceptions pass, by the names that give it."""
    for one in reversed(before):
        if one.opname.startswith("LOAD_") and one.argval in _PASS_EXCEPTIONS:
            return True
        if one.opname.startswith(("STORE_", "POP_")) or one.opname in _WITH:
            break
    return False


def _step(one: dis.Instruction, on_top: _Words | None) -> tuple[_Step, _Words | None]:
    """Return what an instruction loads and stores, and the words of what it pushes last."""
    name = one.opname
    words = one.argval if isinstance(one.argval, tuple) else (one.argval,)
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        on_top = None if on_top is None else (*on_top, one.argval)
        return _Step([("attribute", on_top, one.argval)]), on_top
    if name == "LOAD_SUPER_ATTR":
        return _Step([("attribute", None, one.argval)]), None
    if name in ("STORE_ATTR", "DELETE_ATTR"):
        return _Step(stores=[] if on_top is None else [(*on_top, one.argval)]), None
    if name.startswith("STORE_FAST_LOAD"):
        return _Step(stores=[words[:1]]), words[1:]
    if name.startswith(("STORE_", "DELETE_")) and name.endswith(_NAMES):
        return _Step(stores=[(word,) for word in words]), None
    if name.startswith("LOAD_") and any(part in name for part in _NAMES):
        kind = "cell" if "DEREF" in name else "global"
        is_local = "_FAST" in name
        return _Step([] if is_local else [(kind, words[-1:], words[-1])]), words[-1:]
    if name.startswith("LOAD_") and isinstance(one.argval, CodeType):
        return _Step([("cell", (word,), word) for word in one.argval.co_freevars]), None
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
            waiting += [(handler, now) for handler in steps[k].handlers]
    return before


def _after(stored: frozenset[_Words], stores: list[_Words]) -> Iterator[_Words]:
    """Return what is stored after some stores: words that lead through these lead elsewhere."""
    for words in stored:
        through = words[:1] if len(words) > 1 else ()
        if not any(one[-1] in words[1:-1] if len(one) > 1 else one == through for one in stores):
            yield words
    yield from stores
