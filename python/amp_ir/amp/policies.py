# SPDX-License-Identifier: Apache-2.0
"""Predefined policies: each is a name, a sentence, and the rules that differ from the default.

amp_ir.autocast(mod, args, policy="conservative")
amp_ir.list_ops("torch", "float32")
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.amp import type_hints
from amp_ir.amp.hints import FREE, RULES, PrimType, Rule, RuleResult, RuleReturn, apply_rule
from amp_ir.dialect.registry import DECLARATIONS
from amp_ir.errors import OptionError

Args = Sequence[relax.Expr]
KINDS = ("low", "float32", "free", "untouched")


@attrs.frozen
class Policy:
    """`rules` replace those of the default policy, op by op."""

    name: str
    summary: str
    rules: dict[str, Rule]

    def rule(self, op_name: str) -> Rule | None:
        """Return the rule of an op under this policy."""
        return self.rules.get(op_name) or RULES.get(op_name)


def _ops_of(*rules: Rule) -> list[str]:
    return [name for name, rule in RULES.items() if rule in rules]


def follows_its_input(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Not on PyTorch's lists, or to be promoted: runs in the dtype of its inputs."""
    return type_hints.each(args, FREE)


def float32_on_cuda(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """On PyTorch's CUDA list of ops that run in float32."""
    return type_hints.each(args, type_hints.FULL)


def stored_low(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Computed in float32 and stored low where that saves bytes: memory before accuracy."""
    hints = [
        FREE if isinstance(hint, PrimType) and hint.dtype == "float32" and not hint.exact else hint
        for hint in type_hints.each(args, type_hints.FULL)
    ]
    return RuleResult(hints)


def product_in_float32(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Low inputs, and a float32 result: only the inputs of matmuls are rounded."""
    low = type_hints.each(args, PrimType(amp_dtype))
    return RuleResult(low, result=type_hints.FULL, accumulate="float32", gradient=type_hints.FULL)


def arithmetic_in_float32(args: Args, ret_type: relax.Type, amp_dtype: str) -> RuleReturn:
    """Accuracy before memory: whatever computes leaves float32."""
    return type_hints.each(args, type_hints.FULL)


def _torch_rules() -> dict[str, Rule]:
    unlisted = ("erf", "sqrt", "mean", "atan", "asinh", "acosh", "atanh", "add", "subtract")
    listed = ("tan",)
    return {
        **{f"relax.{name}": follows_its_input for name in unlisted},
        **{f"relax.{name}": float32_on_cuda for name in listed},
    }


def _aggressive_rules() -> dict[str, Rule]:
    names = _ops_of(
        type_hints.softmax,
        type_hints.softmax_backward,
        type_hints.normalization,
        type_hints.addition,
    )
    statistics = ("_backward_weight", "attention_")
    low = [name for name in names if not any(word in name for word in statistics)]
    return dict.fromkeys(low, stored_low)


def _conservative_rules() -> dict[str, Rule]:
    computing = _ops_of(
        type_hints.arithmetic,
        type_hints.addition,
        type_hints.activation,
        type_hints.window_mean,
        type_hints.batch_norm_backward,
    )
    matmuls = _ops_of(type_hints.convolution, type_hints.matmul)
    return {
        **dict.fromkeys(computing, arithmetic_in_float32),
        **dict.fromkeys(matmuls, product_in_float32),
    }


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("default", "The numerics policy of the design: no less accurate than PyTorch's", {}),
        Policy("torch", "PyTorch's CUDA lists; what is on none of them is free", _torch_rules()),
        Policy("aggressive", "Sums and normalizations may be stored low", _aggressive_rules()),
        Policy("conservative", "Only inputs of matmuls are low", _conservative_rules()),
    )
}


def find_policy(name: str) -> Policy:
    """Return the policy of this name.

    Raises:
        OptionError: there is none; the message lists those there are.
    """
    policy = POLICIES.get(name)
    if policy is None:
        listed = "; ".join(f'"{one.name}" ({one.summary})' for one in POLICIES.values())
        raise OptionError(f"policy is {name!r}; expected one of {listed}")
    return policy


def list_ops(policy: str = "default", kind: str | None = None) -> dict[str, list[str]] | list[str]:
    """Return a policy's ops by kind: "low", "float32", "free", "untouched"; one list if `kind`.

    An op is low if it reads low, float32 if it computes and stores float32, free if the placement
    chooses the dtype of its result, untouched if autocast does not change it.

    Raises:
        OptionError: no such policy or kind.
    """
    chosen = find_policy(policy)
    if kind is not None and kind not in KINDS:
        raise OptionError(f"kind is {kind!r}; expected one of {', '.join(map(repr, KINDS))}")
    lists: dict[str, list[str]] = {name: [] for name in KINDS}
    for op_name in sorted(RULES):
        rule = chosen.rule(op_name)
        assert rule is not None
        lists[_kind_of(rule, op_name)].append(op_name)
    return lists if kind is None else lists[kind]


def _kind_of(rule: Rule, op_name: str) -> str:
    argument = relax.Var("x", relax.TensorType((4, 4), "float32"))
    args = [argument] * _arity(op_name)
    hints = apply_rule(rule, op_name, args, argument.ty, "bfloat16")
    if PrimType("bfloat16") in hints.args:
        return "low"
    if hints.result is FREE or (FREE in hints.args and hints.result is None):
        return "free"
    return "float32" if PrimType("float32") in _plain(hints) else "untouched"


def _plain(hints: RuleResult) -> list[PrimType]:
    return [PrimType(hint.dtype) for hint in hints.args if isinstance(hint, PrimType)]


def _arity(op_name: str) -> int:
    if op_name in DECLARATIONS:
        return len(DECLARATIONS[op_name].arguments)
    return max(int(tvm.ir.Op.get(op_name).num_inputs), 1)
