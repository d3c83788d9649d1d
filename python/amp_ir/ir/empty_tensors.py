# SPDX-License-Identifier: Apache-2.0
"""Evaluation of nodes on tensors without elements, which need no kernel and no library.

A batch of no rows, a mean over nothing, a parameter of no elements: the result of such an op has
no elements either, or is one number everywhere (0 for a sum, NaN for a mean), or is another
argument, unchanged (nothing is written to it). PyTorch itself gives the result, on substitute
arguments: what all trials agree on does not depend on elements. So no later stage, and no library,
sees an extent of 0 except in what the step returns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

# Unlike in order, sign and ratio, and then NaN: a quotient of two arguments, an order or "all are
# finite" is the same for elements that are alike in these.
_TRIALS = range(3)


def results_by_evaluation(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return an op's result for fake tensors without elements, where PyTorch's tracing fails.

    It may divide by their number, or take it for a flag. None where eager PyTorch fails too, and
    where elements of other arguments decide the result.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    if func._schema.is_mutable or not any(map(has_no_elements, tensors)):
        return None
    with _disable_current_modes(), torch.no_grad():
        trials = []
        for trial in _TRIALS:
            made = [_made_up(x, trial) if isinstance(x, torch.Tensor) else x for x in leaves]
            arguments, options = pytree.tree_unflatten(made, spec)
            try:
                result = func(*arguments, **options)
            except (ArithmeticError, IndexError, RuntimeError, TypeError):
                return None
            results, shape = pytree.tree_flatten(result)
            trials.append(results)
        found = [_number_of_all(values) for values in zip(*trials, strict=True)]
    if not all(
        one is None or number is not None for one, number in zip(results, found, strict=True)
    ):
        return None
    # With the modes again, so that they are traced.
    filled = [
        None
        if one is None
        else torch.full(one.shape, number, dtype=one.dtype, device=tensors[0].device)
        for one, number in zip(results, found, strict=True)
    ]
    return pytree.tree_unflatten(filled, shape)


def _number_of_all(values: Sequence[torch.Tensor | None]) -> Any:
    """Return the number that all elements of the trials' results are, 0 without any, or None."""
    first, *others = values
    if first is None or not all(one is not None and _alike(first, one) for one in others):
        return None
    return number_everywhere(first) if first.numel() else 0


def has_no_elements(value: Any) -> bool:
    """Return whether `meta["val"]` is a tensor without elements, or a tuple of only such."""
    if isinstance(value, (tuple, list)):
        given = [one for one in value if one is not None]
        return bool(given) and all(has_no_elements(one) for one in given)
    return isinstance(value, torch.Tensor) and 0 in value.shape


def results_of_nothing(node: fx.Node) -> list[torch.Tensor | fx.Node | None] | None:
    """Return each result of a node, tensor or argument, where an argument has no elements.

    None where every argument has elements, or where elements of others decide the result.
    """
    tensors = [one for one in node.all_input_nodes if _is_tensor(one)]
    if not any(has_no_elements(one.meta["val"]) for one in tensors):
        return None
    if len(tensors) < len(node.all_input_nodes) or not isinstance(
        node.target, torch._ops.OpOverload
    ):
        return None
    made = [{one: _made_up(one.meta["val"], trial) for one in tensors} for trial in _TRIALS]
    try:
        trials = [_evaluate(node, values) for values in made]
    except (IndexError, RuntimeError):
        # The op does not take what was made up, such as a place outside of a table.
        return None
    found: list[torch.Tensor | fx.Node | None] = []
    for results in zip(*trials, strict=True):
        if all(one is None or _alike(results[0], one) for one in results):
            found.append(results[0])
            continue
        unchanged = [
            one
            for one in tensors
            if all(
                _alike(values[one], result) for values, result in zip(made, results, strict=True)
            )
        ]
        if not unchanged:
            return None
        found.append(unchanged[0])
    return found


def number_everywhere(value: torch.Tensor) -> float | int | bool | None:
    """Return the number that all elements of a tensor are; None if they differ."""
    first = value.flatten()[0]
    return first.item() if _alike(value, first.expand(value.shape)) else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _made_up(like: torch.Tensor, trial: int) -> torch.Tensor:
    """Return a tensor of the shape and dtype of `like`, another at each trial."""
    shape = tuple(like.shape)
    if like.dtype.is_floating_point:
        numbers = torch.arange(1, math.prod(shape) + 1).reshape(shape)
        values = [numbers % 7 / 8, numbers * 3 % 11 / 4 - 1, torch.full(shape, math.nan)]
        return values[trial].to(like.dtype)
    return torch.full(shape, trial % 2, dtype=like.dtype)


def _evaluate(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> list[Any]:
    arguments, options = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad():
        result = node.target(*arguments, **options)  # type: ignore[operator]
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
