# SPDX-License-Identifier: Apache-2.0
"""Tensors whose values are not what their memory holds: none of them may reach a kernel.

A kernel gets an address. A fake or freed tensor has no memory there, and a negated, sparse or
wrapped one has other numbers there than its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

# The key sets and dtypes of plain tensors that were accepted. All that `_tensor_errors` asks is in
# them, but for the memory: PyTorch dispatches by layout, negation, wrappers and the like.
_accepted: set[tuple[int, torch.dtype]] = set()
# Not part of PyTorch's public interface; without it, every tensor is asked everything.
_key_set_of: Callable[[torch.Tensor], Any] | None = getattr(torch._C, "_dispatch_keys", None)


def tensor_error(tensor: torch.Tensor) -> str | None:
    """Return why a compiled step cannot work on a tensor, and what to do; None where it can."""
    if type(tensor) is not torch.Tensor or _key_set_of is None:
        return next(_tensor_errors(tensor), None)
    kind = _key_set_of(tensor).raw_repr(), tensor.dtype
    if kind in _accepted:
        return memory_error(tensor)
    error = next(_tensor_errors(tensor), None)
    if error is None:
        _accepted.add(kind)
    return error


def memory_error(tensor: torch.Tensor) -> str | None:
    """Return `tensor_error` for what may happen to a strided tensor after a capture.

    It runs for every tensor at every call, and takes half a microsecond.
    """
    held = tensor.untyped_storage().nbytes()
    needed = _needed_bytes(tensor)
    if needed > held:
        return (
            f"has {held} bytes of memory, and its shape needs {needed}: its storage was freed or "
            "resized (untyped_storage().resize_); give it memory again before the step"
        )
    if tensor.is_neg():
        return "is negated only when it is read (torch.Tensor.is_neg()); use .resolve_neg()"
    return None


def _needed_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes that a storage must have for a strided tensor."""
    count = tensor.numel()
    if count and not tensor.is_contiguous():
        extents = zip(tensor.shape, tensor.stride(), strict=True)
        count = 1 + sum((size - 1) * stride for size, stride in extents)
    return int(tensor.storage_offset() + count) * tensor.element_size() if count else 0


def _tensor_errors(tensor: torch.Tensor) -> Iterator[str]:
    if torch.nn.parameter.is_lazy(tensor):
        yield "is not initialised; run the lazy module once on an example"
    if tensor.is_nested:
        yield "is a nested tensor; pad it to a dense one"
    yield from _type_errors(tensor)
    if tensor.layout is not torch.strided:
        yield f"is sparse ({tensor.layout}); only dense tensors can be captured, use .to_dense()"
    if tensor.is_quantized:
        yield "is quantized; train in floating point"
    if tensor.is_complex():
        yield (
            f"is complex ({tensor.dtype}); keep torch.view_as_real of it, and call "
            "torch.view_as_complex in the step"
        )
    if tensor.is_meta:
        yield "is on the meta device and has no values; materialise it (to_empty) first"
    if tensor._is_zerotensor():
        yield "is a zero without memory; use torch.zeros_like of it"
    error = memory_error(tensor)
    if error:
        yield error


def _is_plain(kind: type[torch.Tensor]) -> bool:
    """Return whether tensors of a class behave as PyTorch's: also plain subclasses of Parameter."""
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return True
    return (
        issubclass(kind, torch.nn.Parameter)
        and kind.__torch_function__ == torch.nn.Parameter.__torch_function__
        and kind.__torch_dispatch__ == torch.Tensor.__torch_dispatch__
    )


def _type_errors(tensor: torch.Tensor) -> Iterator[str]:
    kind = type(tensor)
    if isinstance(tensor, FakeTensor):
        yield (
            "is a FakeTensor, which has no values; make a real tensor outside of FakeTensorMode. "
            "In a step that is captured, call the model or the function itself, not what "
            "amp_ir.convert_model or amp_ir.jit made of it"
        )
    elif torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        yield "is wrapped by torch.func (vmap, grad, jvp); call the step outside of it"
    elif kind.__name__ == "DTensor":
        yield "is a DTensor, of which this process holds a part; use .full_tensor()"
    elif not _is_plain(kind):
        yield (
            f"is a {kind.__module__}.{kind.__qualname__}, and a compiled step calls nothing that a "
            "subclass of torch.Tensor defines; use a plain tensor of its values"
        )
