# SPDX-License-Identifier: Apache-2.0
"""How a user changes a decision: replace the rule of an op for a while, or select calls of it."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping
from types import MappingProxyType, TracebackType

from amp_ir.amp.hints import RULES, Rule
from amp_ir.errors import RuleError

_NOTHING: Mapping[str, Rule] = MappingProxyType({})
_replaced: contextvars.ContextVar[Mapping[str, Rule]] = contextvars.ContextVar(
    "amp_ir_replaced_rules", default=_NOTHING
)


class CustomTypeHint:
    """Replace the rules of some ops inside a `with` block, in this thread only.

        with amp_ir.CustomTypeHint({"relax.add": never_cast}):
            amp_mod = amp_ir.autocast(mod, args)

    Blocks nest, the inner one winning; leaving one, by an exception too, restores what was.

    Raises:
        RuleError: a rule cannot be called, or an op name is neither known nor has a dot.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        for name, rule in rules.items():
            if not callable(rule):
                raise RuleError(
                    f"the rule for {name} is {rule!r}; give a function (args, ret_type, amp_dtype)"
                )
            if "." not in name:
                raise RuleError(f'{name!r} is no op name; op names look like "relax.add"')
        self._rules = dict(rules)
        self._tokens: list[contextvars.Token[Mapping[str, Rule]]] = []

    def __enter__(self) -> CustomTypeHint:
        self._tokens.append(_replaced.set({**_replaced.get(), **self._rules}))
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _replaced.reset(self._tokens.pop())


def find_rule(op_name: str) -> Rule | None:
    """The rule of an op in this thread: the innermost CustomTypeHint's, else the registered one."""
    return _replaced.get().get(op_name) or RULES.get(op_name)
