# SPDX-License-Identifier: Apache-2.0
"""Rules that the user replaces in a `with` block, and the rules in effect at a point in time."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import itertools
import reprlib
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, MappingProxyType, MethodType, TracebackType

import attrs
import tvm

from amp_ir.amp.hints import REGISTERED, RULES, Rule, describe
from amp_ir.amp.policies import Policy
from amp_ir.amp.rule_reads import Read, reads_of
from amp_ir.errors import RuleError
from amp_ir.host.user_warning import warn_user
from amp_ir.ir.near_names import inside_of_others, near_names

_NOTHING: Mapping[str, Rule] = MappingProxyType({})
_replaced: contextvars.ContextVar[Mapping[str, Rule]] = contextvars.ContextVar(
    "amp_ir_replaced_rules", default=_NOTHING
)
# The rules around each block that this thread is in. They are not kept in the block's object, which
# several threads may enter.
_outer: contextvars.ContextVar[tuple[Mapping[str, Rule], ...]] = contextvars.ContextVar(
    "amp_ir_outer_rules", default=()
)


class CustomTypeHint:
    """Replace the rules of some ops inside a `with` block, in this thread only (RAF's name)::

        with amp_ir.CustomTypeHint({"relax.add": never_cast}):
            amp_mod = amp_ir.autocast(mod, args)

    Blocks nest, and the inner one wins; leaving one, by an exception too, restores the rules.
    `autocast` reads the rules. A jitted step compares them at each call: inside of a block it runs
    a program that was cast by the block's rules, and outside one that was not.

    Raises:
        RuleError: a rule cannot be called with three arguments, or no op has that name.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        if not isinstance(rules, Mapping):
            raise RuleError(
                f'CustomTypeHint takes a dict such as {{"relax.add": rule}} and got {rules!r}'
            )
        known = {*RULES, *tvm.ir.Op.list_op_names()}
        for name, rule in rules.items():
            _check_rule(name, rule)
            if name not in known:
                raise RuleError(
                    f'{name!r} is not an op name; op names look like "relax.add"'
                    f"{near_names(str(name), sorted(known))}"
                )
        self._rules = dict(rules)

    def __enter__(self) -> CustomTypeHint:
        around = _replaced.get()
        _outer.set((*_outer.get(), around))
        _replaced.set({**around, **self._rules})
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        *outer, around = _outer.get()
        _outer.set(tuple(outer))
        _replaced.set(around)


def _check_rule(name: str, rule: object) -> None:
    what = "give a function (args, ret_type, amp_dtype)"
    if not callable(rule):
        raise RuleError(f"the rule for {name} is {rule!r}; {what}")
    try:
        signature = inspect.signature(rule)
    except (TypeError, ValueError):  # a builtin, which cannot be asked
        return
    try:
        signature.bind((), None, "float16")
    except TypeError:
        raise RuleError(f"the rule for {name} takes {signature}; {what}") from None


def find_rule(policy: Policy, op_name: str) -> Rule | None:
    """Return the op's rule in this thread: the innermost CustomTypeHint's, else the policy's."""
    return _replaced.get().get(op_name) or policy.rule(op_name)


def ops_with_own_rules() -> tuple[str, ...]:
    """Return the ops whose rule in this thread is the user's: replaced, or registered."""
    return tuple(sorted(_own_rules()))


def _own_rules() -> dict[str, Rule]:
    registered = {name: rule for name, rule in REGISTERED.items() if RULES.get(name) is rule}
    return {**registered, **_replaced.get()}


def warn_of_unused_rules(ops: Collection[str]) -> None:
    """Warn of rules in a CustomTypeHint around this that are of no op of the step."""
    for name in _replaced.get():
        if name not in ops:
            nothing = f"CustomTypeHint has a rule for {name!r}, and the step has no such op"
            warn_user(". ".join([nothing + near_names(name, ops), *inside_of_others(name, ops)]))


def _read_by_rules() -> dict[str, dict[str, Read]]:
    """Return what each rule of the user's reads, by variable."""
    return {name: read for name, rule in _own_rules().items() if (read := reads_of(rule))}


@attrs.frozen(eq=False)
class RulesInEffect:
    """The rules of the user's that this thread has at one point: replaced, or registered."""

    _replaced: Mapping[str, Rule] = attrs.field(factory=_replaced.get)
    _registered: int = attrs.field(factory=lambda: len(RULES))
    _read: Mapping[str, Mapping[str, Read]] = attrs.field(factory=_read_by_rules)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Let exactly these replaced rules be in effect inside of a `with` block."""
        token = _replaced.set(self._replaced)
        try:
            yield
        finally:
            _replaced.reset(token)

    def change(self) -> str:
        """Describe how the rules in effect now differ; "" where they do not."""
        now = _replaced.get()
        if now is self._replaced and len(RULES) == self._registered:
            return "; ".join(self._changed_reads())
        pairs = {
            name: (self._replaced.get(name), now.get(name)) for name in {**self._replaced, **now}
        }
        changes = [
            f"the rule of {name} was {_in_words(was)} and is {_in_words(rule)}"
            for name, (was, rule) in sorted(pairs.items())
            if not _is_same(was, rule)
        ]
        changes = changes or list(self._changed_reads())
        # Rules are added at the end, and never removed.
        added = itertools.islice(RULES.items(), self._registered, None)
        changes += [f"{name} had no rule and has {describe(rule)}" for name, rule in added]
        return "; ".join(changes)

    def _changed_reads(self) -> Iterator[str]:
        now = _read_by_rules()
        for rule, read in sorted(self._read.items()):
            for name, was in read.items():
                value = now.get(rule, {}).get(name)
                if value != was:
                    yield f"the rule of {rule} reads {name}, which {_read_in_words(was, value)}"


def _read_in_words(was: Read, now: Read | None) -> str:
    if now is None:
        return f"was {reprlib.repr(was.value)} and is no more"
    if was.value is now.value or isinstance(now.value, MethodType):
        return f"holds other values now: {reprlib.repr(now.value)}"
    return f"was {reprlib.repr(was.value)} and is {reprlib.repr(now.value)}"


def _in_words(rule: Rule | None) -> str:
    return "the policy's" if rule is None else describe(rule)


def _is_same(one: Rule | None, other: Rule | None) -> bool:
    """Return whether two rules are one function, or one `def` or `lambda` that was run twice."""
    if not (isinstance(one, FunctionType) and isinstance(other, FunctionType)):
        return one is other
    return one is other or (
        one.__code__ is other.__code__
        and not (one.__closure__ or one.__defaults__ or one.__kwdefaults__)
        and not (other.__defaults__ or other.__kwdefaults__)
    )
