# SPDX-License-Identifier: Apache-2.0
"""The words of a cast rule, and the table of rules.

A rule answers, for one call of an op, what each argument must be:

    @type_hint("relax.nn.softmax")
    def softmax(args, ret_type, amp_dtype):
        '''Stay in float32: exp(x) overflows float16 above x = ln 65504, about 11.09.'''
        return [PrimType("float32")]

It gets the arguments as Relax expressions (`args[i].ty` is the type), the type of the result and
the low dtype, and returns words; it rewrites nothing. Its docstring is the numerical reason, and
the first sentence of it is what a plan prints.

`bool`, integer and float64 arguments are never cast, whatever a rule says; neither are values that
the user made bfloat16 or float16 already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
from tvm import relax

from amp_ir.errors import RuleError

FULL_DTYPE = "float32"
LOW_DTYPES = ("float16", "bfloat16")


def _to_hints(hints: Iterable[Hint]) -> tuple[Hint, ...]:
    return tuple(hints)


@attrs.frozen
class PrimType:
    """A tensor must have this dtype; `PrimType(None)` leaves it as it was in the user's program.

    `PrimType("float32")` asks for the dtype of the argument, and takes a value that was stored low
    (widening is exact). With `exact=True` no value on the way to the argument may be rounded.
    """

    dtype: str | None
    exact: bool = attrs.field(default=False, kw_only=True)


@attrs.frozen
class TupleType:
    """One hint a field, for an argument or result that is a tuple."""

    fields: tuple[Hint, ...] = attrs.field(converter=_to_hints)


class _Free:
    """The placement may choose."""

    def __repr__(self) -> str:
        return "FREE"


FREE = _Free()
Hint: TypeAlias = PrimType | TupleType | _Free


@attrs.frozen
class Hints:
    """The long form of a rule's answer.

    Attributes:
        args: one hint an argument of the call.
        result: dtype of the (first) result; None follows the arguments, FREE lets the placement
            choose, whatever the dtype of the arguments.
        accumulate: dtype in which the op adds up; "float32" is what every kernel of amp_ir does.
        gradient: dtype of the result where the call makes a gradient of a parameter, that is where
            its result reaches only the optimizer, sums of gradients and outputs.
        is_unbounded: the result may leave the range of a low dtype although the arguments do not;
            sums and products that carry it on stay in float32 then.
    """

    args: tuple[Hint, ...] = attrs.field(converter=_to_hints)
    result: Hint | None = attrs.field(default=None, kw_only=True)
    accumulate: str | None = attrs.field(default=None, kw_only=True)
    gradient: PrimType | None = attrs.field(default=None, kw_only=True)
    is_unbounded: bool = attrs.field(default=False, kw_only=True)


Answer: TypeAlias = Hints | Sequence[Hint]
Rule = Callable[[Sequence[relax.Expr], relax.Type, str], Answer]
RULES: dict[str, Rule] = {}


def type_hint(*op_names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these ops.

    Raises:
        RuleError: an op has a rule already, or the rule has no docstring (its reason).
    """

    def register(rule: Rule) -> Rule:
        if not (rule.__doc__ or "").strip():
            raise RuleError(
                f"rule {rule.__qualname__} has no docstring; its first sentence is the reason"
            )
        for name in op_names:
            if name in RULES:
                raise RuleError(
                    f"{name} has a rule already: {describe(RULES[name])}; "
                    f"{describe(rule)} is the second. Use amp_ir.CustomTypeHint to replace one"
                )
            RULES[name] = rule
        return rule

    return register


def describe(rule: Rule) -> str:
    """Name and file of a rule."""
    code = getattr(rule, "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{getattr(rule, '__name__', repr(rule))}{place}"


def reason_of(rule: Rule) -> str:
    """The first sentence of a rule's docstring."""
    paragraph = " ".join((rule.__doc__ or "").strip().split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def check_dtype(ty: relax.Type, dtype: str) -> bool:
    """Whether a tensor, or every tensor of a tuple, has this dtype."""
    if isinstance(ty, relax.TupleType):
        return all(check_dtype(field, dtype) for field in ty.fields)
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == dtype


def gen_hint_helper(ty: relax.Type, dtype: str | None) -> Hint:
    """The hint that asks for `dtype` wherever `ty` has a float that autocast may touch."""
    if isinstance(ty, relax.TupleType):
        return TupleType([gen_hint_helper(field, dtype) for field in ty.fields])
    castable = check_dtype(ty, FULL_DTYPE) or any(check_dtype(ty, low) for low in LOW_DTYPES)
    return PrimType(dtype if castable else None)


def answer_of(rule: Rule, op_name: str, args: Sequence[Any], ty: Any, amp_dtype: str) -> Hints:
    """Ask a rule, and check the form of its answer.

    Raises:
        RuleError: not one hint an argument, or a word that is none.
    """
    answer = rule(args, ty, amp_dtype)
    if not isinstance(answer, (Hints, Sequence)):
        raise RuleError(
            f"rule {describe(rule)} answers {answer!r} for {op_name}; expected a list with one "
            "hint an argument, or Hints(...)"
        )
    hints = answer if isinstance(answer, Hints) else Hints(tuple(answer))
    if len(hints.args) != len(args):
        raise RuleError(
            f"rule {describe(rule)} gives {len(hints.args)} hints for {op_name}, "
            f"which has {len(args)} arguments here; give one hint an argument, "
            "PrimType(None) for one to leave as it is"
        )
    for hint in hints.args:
        _check_word(hint, rule, op_name, amp_dtype)
    return hints


def _check_word(hint: Any, rule: Rule, op_name: str, amp_dtype: str) -> None:
    if isinstance(hint, TupleType):
        for field in hint.fields:
            _check_word(field, rule, op_name, amp_dtype)
        return
    allowed = (None, FULL_DTYPE, amp_dtype)
    if hint is FREE or (isinstance(hint, PrimType) and hint.dtype in allowed):
        return
    raise RuleError(
        f"rule {describe(rule)} answers {hint!r} for {op_name}; the words are "
        f'PrimType("float32"), PrimType("{amp_dtype}"), PrimType(None), TupleType([...]) and FREE'
    )
