# SPDX-License-Identifier: Apache-2.0
"""Calls that PyTorch's kernels refuse for the dtypes of their tensors, and its fakes do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

# (what is refused, what to do)
_Refusal = tuple[str, str]
_Rule = Callable[[Any, Any, Mapping[str, Any], list[torch.dtype]], _Refusal | None]


def refused_dtypes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Refusal | None:
    """Return what PyTorch refuses in the dtypes of a call's tensors, and what to do; else None."""
    find = _RULES.get(func._schema.name)
    if find is None:
        return None
    dtypes = [one.dtype for one in args if isinstance(one, torch.Tensor)]
    return find(func, args, kwargs, dtypes)


def _no_booleans(func: Any, _args: Any, _kwargs: Any, dtypes: list[torch.dtype]) -> _Refusal | None:
    is_refused = all(one is torch.bool for one in dtypes)
    return _refusal(f"{func} of bool", "Cast it: x.to(torch.uint8)") if is_refused else None


def _no_integers(func: Any, _args: Any, _kwargs: Any, dtypes: list[torch.dtype]) -> _Refusal | None:
    is_refused = _are_exact(dtypes)
    return _refusal(f"{func} of {_name(dtypes[0])}", "Cast it: x.float()") if is_refused else None


def _sums(
    func: Any, args: Any, kwargs: Mapping[str, Any], dtypes: list[torch.dtype]
) -> _Refusal | None:
    factor = kwargs.get("alpha", 1)
    has_float = any(isinstance(one, float | complex) for one in args)
    if has_float or not (isinstance(factor, float) and _are_exact(dtypes)):
        return None
    return _refusal(f"{func} of {_name(dtypes[0])} with alpha={factor}", "Cast it: x.float()")


def _differences(
    func: Any, args: Any, kwargs: Mapping[str, Any], dtypes: list[torch.dtype]
) -> _Refusal | None:
    if torch.bool not in dtypes:
        return _sums(func, args, kwargs, dtypes)
    return _refusal(f"{func} of bool", "Write ~mask for 1 - mask, or cast it: mask.float()")


def _products(
    func: Any, args: Any, kwargs: Mapping[str, Any], dtypes: list[torch.dtype]
) -> _Refusal | None:
    factor = kwargs.get("value", 1)
    if _are_exact(dtypes) and factor != int(factor):
        # PyTorch rounds it to an integer, 0.5 to 0.
        what = f"{func} of {_name(dtypes[0])} has value={factor}, which is no integer"
        return what, "Cast the tensors: x.float()"
    return _no_booleans(func, args, kwargs, dtypes)


def _products_in_place(
    func: Any, args: Any, kwargs: Mapping[str, Any], dtypes: list[torch.dtype]
) -> _Refusal | None:
    return _writes(func, args, kwargs, dtypes) or _products(func, args, kwargs, dtypes)


def _writes(func: Any, args: Any, _kwargs: Any, _dtypes: list[torch.dtype]) -> _Refusal | None:
    """Refuse results that the dtype of the tensor which is written cannot hold."""
    target, *others = args
    result = target.dtype
    for one in others:
        result = torch.promote_types(result, torch.result_type(target, one))
    if torch.can_cast(result, target.dtype):
        return None
    what = f"{func} writes a result of {_name(result)} to a tensor of {_name(target.dtype)}"
    return _refusal(what, "Make a new tensor: x = x * y instead of x *= y")


def _assignments(func: Any, args: Any, _kwargs: Any, _dtypes: list[torch.dtype]) -> _Refusal | None:
    target, values = args[0].dtype, args[2].dtype
    if target == values:
        return None
    what = f"{func} writes {_name(values)} to a tensor of {_name(target)}"
    return _refusal(what, f"Cast it: values.to(torch.{_name(target)})")


def _are_exact(dtypes: list[torch.dtype]) -> bool:
    return not any(one.is_floating_point or one.is_complex for one in dtypes)


def _refusal(what: str, advice: str) -> _Refusal:
    return f"{what}, which PyTorch refuses too", advice


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_RULES: Mapping[str, _Rule] = {
    f"aten::{name}": rule
    for names, rule in (
        ("abs abs_ ceil ceil_ floor floor_ round round_ trunc trunc_", _no_booleans),
        ("argmax argmin dot kthvalue median topk trace vdot", _no_booleans),
        ("addmm addmv baddbmm bmm mm mv searchsorted", _no_booleans),
        ("frac frac_ glu hardswish hardswish_ lerp lerp_ logaddexp", _no_integers),
        ("rand_like std uniform uniform_ var", _no_integers),
        ("add add_", _sums),
        ("rsub sub sub_", _differences),
        ("addcdiv addcmul", _products),
        ("addcdiv_ addcmul_", _products_in_place),
        ("mul_", _writes),
        ("index_put index_put_", _assignments),
    )
    for name in names.split()
}
