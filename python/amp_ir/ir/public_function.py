# SPDX-License-Identifier: Apache-2.0
"""Public functions whose wrong arguments are named, with the closest right one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from amp_ir.errors import REFUSALS, ArgumentError

P = ParamSpec("P")
T = TypeVar("T")


def public_function(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function that users call as `name`; of many options, one is soon misspelt.

    Raises, when the function is called:
        ArgumentError: an argument is missing or unknown; the message has the closest names.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            try:
                signature.bind(*args, **named)
            except TypeError as error:
                why = _why(error, signature, args, named)
                raise ArgumentError(f"{name}: {why}") from None
            try:
                return function(*args, **named)
            except REFUSALS as error:
                raise error.with_traceback(None) from error.__cause__

        return call

    return decorate


def _why(
    error: TypeError, signature: inspect.Signature, args: Sequence[Any], named: Mapping[str, Any]
) -> str:
    known = list(signature.parameters)
    unknown = [one for one in named if one not in known]
    said = []
    for one in unknown:
        # A word of the right name, such as dtype= for amp_dtype=, is closer than letters tell.
        words = [name for name in known if one in name.split("_") or name in one.split("_")]
        near = [*words, *difflib.get_close_matches(one, known, n=1)]
        said.append(
            f"there is no argument {one!r}" + (f", did you mean {near[0]}=?" if near else "")
        )
    options = [n for n, one in signature.parameters.items() if one.kind is one.KEYWORD_ONLY]
    rest = [one for one in known if one not in options]
    takes = ", ".join([*rest, *(f"{one}=" for one in options)])
    if len(args) > len(rest) and options:
        taken = f"{len(rest)} ({', '.join(rest)}) {'is' if len(rest) == 1 else 'are'} taken so"
        said.append(
            f"{len(args)} arguments are given by position, and {taken}; give the others by name, "
            f"as in {options[0]}=..."
        )
    return f"{'; '.join(said) or error}. It takes {takes}"
