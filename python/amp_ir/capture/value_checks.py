# SPDX-License-Identifier: Apache-2.0
"""Values that PyTorch's kernels refuse, and `torch._assert_async`: checks of the compiled step.

A call in which one fails raises, with the state as before, as for a check of the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from amp_ir.capture.traced_node import traced_node
from amp_ir.ir.index_check import ASSERTIONS, USERS_CHECK
from amp_ir.ir.location import Location

aten = torch.ops.aten

_TAKE_VALUES = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.squeeze.dim,
    aten.squeeze.default, aten.unsqueeze.default, aten.select.int, aten.slice.Tensor,
    aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default,
})  # fmt: skip
_MAKE_SHARES = frozenset({
    aten.sigmoid.default, aten._softmax.default, aten.rand.default, aten.rand_like.default,
    aten.bernoulli.default, aten.zeros.default, aten.zeros_like.default, aten.ones.default,
    aten.ones_like.default, aten.eq.Tensor, aten.eq.Scalar, aten.gt.Scalar, aten.lt.Scalar,
})  # fmt: skip
_MAKE_NONE_BELOW_0 = _MAKE_SHARES | {
    aten.exp.default, aten.softplus.default, aten.abs.default, aten.relu.default, aten.sqrt.default,
}  # fmt: skip
# (whether a value is wrong: bool[], what is expected)
_Check = tuple[torch.Tensor, str]


def checks_of(func: Any, args: tuple[Any, ...], location: Location) -> list[_Check]:
    """Return what a call of one of CHECKED_OPS requires of values, each with its message."""
    if func in ASSERTIONS:
        # PyTorch's own words where the user has none.
        text = args[1] if len(args) > 1 else "Expected Tensor with single nonzero value"
        return [(args[0] == 0, f"{USERS_CHECK}: {text}, in {location}")]
    return [
        (is_wrong, f"{USERS_CHECK}: {text}, for {func} in {location}; PyTorch refuses that too")
        for is_wrong, text in _OF_OPS[func](*args)
    ]


def check_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Assert the values that a function requires which a capture composes of other ops."""
    if func in _OF_FUNCTIONS:
        for is_wrong, text in _OF_FUNCTIONS[func](*args, **kwargs):
            _require(is_wrong, text)


def _require(is_wrong: torch.Tensor, text: str) -> None:
    """Assert that nothing is wrong, in no row of a vmap."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(is_wrong):
        is_wrong = functorch.get_unwrapped(is_wrong)
    # The assertion has no rule for functorch's transforms.
    with torch._C._DisableFuncTorch():
        torch._assert_async(is_wrong.any().logical_not(), text)


def _is_of(x: torch.Tensor, makers: frozenset[Any]) -> bool:
    """Return whether one of these ops made all values of a tensor, so that they need no check.

    They may be NaN, which is not looked for: a check keeps a loop from being compiled as one.
    """
    node: Any = traced_node(x)
    while node is not None and node.target in _TAKE_VALUES:
        node = node.args[0]
    return node is not None and node.target in makers


def _is_no_share(x: torch.Tensor) -> torch.Tensor:
    return ((x >= 0) & (x <= 1)).logical_not().any()


def _cross_entropy(x: torch.Tensor, target: torch.Tensor, *_rest: Any) -> list[_Check]:
    # NaN is refused, too, and a loss is seldom in a loop.
    text = "all elements of {} should be between 0 and 1"
    return [
        (_is_no_share(x), text.format("input")),
        (_is_no_share(target), text.format("target")),
    ]


def _chances(p: torch.Tensor, *_rest: Any) -> list[_Check]:
    if _is_of(p, _MAKE_SHARES):
        return []
    return [(_is_no_share(p), "all probabilities should be between 0 and 1")]


def _deviations(_mean: object, std: torch.Tensor, *_rest: Any) -> list[_Check]:
    if _is_of(std, _MAKE_NONE_BELOW_0):
        return []
    return [((std >= 0).logical_not().any(), "all elements of std should be at least 0")]


def _weights(input: torch.Tensor, *_rest: Any, **_options: Any) -> list[_Check]:
    x = input.detach()
    if _is_of(input, frozenset({aten._softmax.default})):
        return []
    is_wrong = ((x >= 0) & (x < torch.inf)).logical_not().any()
    text = "all weights of multinomial should be finite and at least 0, in each row one above 0"
    return [(is_wrong | (x <= 0).all(-1).any(), text)]


def _variances(
    _input: torch.Tensor, _target: torch.Tensor, var: torch.Tensor | float, *_rest: Any, **_: Any
) -> list[_Check]:
    text = "var has negative entry/entries"
    if isinstance(var, torch.Tensor):
        is_proven = _is_of(var, _MAKE_NONE_BELOW_0)
        return [] if is_proven else [((var.detach() < 0).any(), text)]
    if var < 0:
        raise ValueError(text)
    return []


_OF_OPS: Mapping[Any, Callable[..., list[_Check]]] = {
    aten.binary_cross_entropy.default: _cross_entropy,
    aten.bernoulli.default: _chances,
    aten.normal.Tensor_Tensor: _deviations,
    aten.normal.float_Tensor: _deviations,
}
CHECKED_OPS = ASSERTIONS | frozenset(_OF_OPS)
_OF_FUNCTIONS: Mapping[Any, Callable[..., list[_Check]]] = {
    torch.multinomial: _weights,
    torch.Tensor.multinomial: _weights,
    F.gaussian_nll_loss: _variances,
}
