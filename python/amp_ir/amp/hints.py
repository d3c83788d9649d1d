# SPDX-License-Identifier: Apache-2.0
"""The hints of a cast rule, and the table of rules. RAF calls them type hints.

A rule returns, for one call of an op, what each argument must be:

    @type_hint("relax.nn.softmax")
    def softmax(args, ret_type, amp_dtype):
        '''Stay in float32: exp(x) overflows float16 above x = ln 65504, about 11.09.'''
        return [PrimType("float32")]

It gets the arguments as Relax expressions (`args[i].ty` is the type), the type of the result and
the low dtype, and returns hints; it rewrites nothing. Its docstring is the numerical reason, and
a plan prints the first sentence of it.

`bool`, integer and float64 arguments are never cast, whatever a rule says; neither are values that
the user made bfloat16 or float16 already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import attrs
from tvm import relax

from amp_ir.errors import RuleError
from amp_ir.ir.options import dtype_name

FULL_DTYPE = "float32"
LOW_DTYPES = ("float16", "bfloat16")


def _to_hints(hints: Iterable[Hint]) -> tuple[Hint, ...]:
    return tuple(hints)


@attrs.frozen
class PrimType:
    """A tensor must have this dtype; `PrimType(None)` keeps the dtype of the user's program.

    `PrimType("float32")` asks for the dtype of the argument, and takes a value that was stored low
    (widening is exact). With `exact=True` no value that leads to the argument may be rounded. The
    name is RAF's.
    """

    dtype: str | None = attrs.field(converter=dtype_name)
    exact: bool = attrs.field(default=False, kw_only=True)


@attrs.frozen
class TupleType:
    """One hint per field, for an argument or result that is a tuple. The name is RAF's."""

    fields: tuple[Hint, ...] = attrs.field(converter=_to_hints)


class _Free:
    """The hint of an argument or result whose dtype the placement chooses."""

    def __repr__(self) -> str:
        return "FREE"


FREE = _Free()
Hint: TypeAlias = PrimType | TupleType | _Free


@attrs.frozen
class RuleResult:
    """The hints of a rule with its options.

    Attributes:
        args: one hint per argument of the call.
        result: dtype of the (first) result; None follows the arguments, FREE lets the placement
            choose, whatever the dtype of the arguments.
        accumulate: dtype in which the op accumulates; every kernel of amp_ir uses "float32".
        gradient: dtype of the result where the call computes a gradient of a parameter, that is
            where its result reaches only the optimizer, sums of gradients and outputs.
        is_unbounded: the result may leave the range of a low dtype although the arguments do not;
            sums and products that use it stay in float32 then.
    """

    args: tuple[Hint, ...] = attrs.field(converter=_to_hints)
    result: Hint | None = attrs.field(default=None, kw_only=True)
    accumulate: str | None = attrs.field(default=None, kw_only=True)
    gradient: PrimType | None = attrs.field(default=None, kw_only=True)
    is_unbounded: bool = attrs.field(default=False, kw_only=True)


RuleReturn: TypeAlias = RuleResult | Sequence[Hint]
Rule = Callable[[Sequence[relax.Expr], relax.Type, str], RuleReturn]
RULES: dict[str, Rule] = {}
# Those of them that are not ours.
REGISTERED: dict[str, Rule] = {}


def type_hint(*op_names: str) -> Callable[[Rule], Rule]:
    """Register a rule for these ops.

    Raises:
        RuleError: an op has a rule already, or the rule has no docstring (its reason).
    """

    def register(rule: Rule) -> Rule:
        if not reason_of(rule):
            name = getattr(rule, "__qualname__", name_of(rule))
            raise RuleError(f"rule {name} has no docstring; its first sentence is the reason")
        for name in op_names:
            if name in RULES:
                raise RuleError(
                    f"{name} has a rule already: {describe(RULES[name])}; "
                    f"{describe(rule)} is the second. Use amp_ir.CustomTypeHint to replace one"
                )
            RULES[name] = rule
            if package_of(rule) != "amp_ir":
                REGISTERED[name] = rule
        return rule

    return register


def describe(rule: Rule) -> str:
    """Return the name and file of a rule."""
    code = getattr(_function_of(rule), "__code__", None)
    place = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{name_of(rule)}{place}"


def name_of(rule: Rule) -> str:
    """Return the name of a rule: of its function, or of the class whose object is called."""
    rule = _unwrapped(rule)
    return str(getattr(rule, "__name__", type(rule).__name__))


def package_of(rule: Rule) -> str:
    """Return the package whose code a rule is."""
    return str(getattr(_function_of(rule), "__module__", "")).partition(".")[0]


def reason_of(rule: Rule) -> str:
    """Return the first sentence of a rule's docstring."""
    described = getattr(_function_of(rule), "__doc__", None) or ""
    paragraph = " ".join(described.strip().split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


def _unwrapped(rule: Rule) -> Rule:
    while isinstance(rule, functools.partial):
        rule = rule.func
    return rule


def _function_of(rule: Rule) -> Any:
    rule = _unwrapped(rule)
    return rule if hasattr(rule, "__name__") else type(rule).__call__


def check_dtype(ty: relax.Type, dtype: str) -> bool:
    """Return whether a tensor, or every tensor of a tuple, has this dtype."""
    if isinstance(ty, relax.TupleType):
        return all(check_dtype(field, dtype) for field in ty.fields)
    return isinstance(ty, relax.TensorType) and str(ty.dtype) == dtype


def hint_for_floats(ty: relax.Type, dtype: str | None) -> Hint:
    """Return the hint that asks for `dtype` wherever `ty` has a float that autocast may cast."""
    if isinstance(ty, relax.TupleType):
        return TupleType([hint_for_floats(field, dtype) for field in ty.fields])
    castable = check_dtype(ty, FULL_DTYPE) or any(check_dtype(ty, low) for low in LOW_DTYPES)
    return PrimType(dtype if castable else None)


def apply_rule(
    rule: Rule, op_name: str, args: Sequence[Any], ty: Any, amp_dtype: str
) -> RuleResult:
    """Call a rule, and check the form of its result.

    Raises:
        RuleError: not one hint per argument or field of it, or a hint of another kind.
    """
    result = rule(args, ty, amp_dtype)
    if not isinstance(result, (RuleResult, Sequence)):
        raise RuleError(
            f"rule {describe(rule)} returns {result!r} for {op_name}; expected a list with one "
            "hint an argument, or RuleResult(...)"
        )
    hints = result if isinstance(result, RuleResult) else RuleResult(tuple(result))
    if len(hints.args) != len(args):
        raise RuleError(
            f"rule {describe(rule)} gives {len(hints.args)} hints for {op_name}, "
            f"which has {len(args)} arguments here; give one hint an argument, "
            "PrimType(None) for one to leave as it is"
        )
    for number, (hint, argument) in enumerate(zip(hints.args, args, strict=True)):
        _check_hint(hint, rule, op_name, amp_dtype)
        if isinstance(hint, TupleType):
            _check_fields(hint, argument, f"argument {number} of {op_name}", rule)
    for of_result in (hints.result, hints.gradient):
        if of_result is not None:
            _check_hint(of_result, rule, op_name, amp_dtype)
    return hints


def _check_fields(hint: TupleType, argument: relax.Expr, which: str, rule: Rule) -> None:
    is_tuple = isinstance(argument.ty, relax.TupleType)
    count = len(argument.ty.fields) if is_tuple else 1
    if not is_tuple or count != len(hint.fields):
        raise RuleError(
            f"rule {describe(rule)} gives a TupleType of {len(hint.fields)} hints for {which}, "
            f"which is {f'a tuple of {count} tensors' if is_tuple else 'no tuple'}; give a tuple a "
            "hint for each of its tensors, or one PrimType or FREE for all of them"
        )


def _check_hint(hint: Any, rule: Rule, op_name: str, amp_dtype: str) -> None:
    if isinstance(hint, TupleType):
        for field in hint.fields:
            _check_hint(field, rule, op_name, amp_dtype)
        return
    allowed = (None, FULL_DTYPE, amp_dtype)
    if hint is FREE or (isinstance(hint, PrimType) and hint.dtype in allowed):
        return
    raise RuleError(
        f"rule {describe(rule)} returns {hint!r} for {op_name}; the hints are "
        f'PrimType("float32"), PrimType("{amp_dtype}"), PrimType(None), TupleType([...]) and FREE'
    )
