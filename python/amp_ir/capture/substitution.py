# SPDX-License-Identifier: Apache-2.0
"""The mode that sees every call of the torch API in the traced step.

A parameter that the step reaches through its own reference (a list made beforehand, a closure) is
replaced by its fake there.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.capture.chosen_rows import ChosenRow, assigned, call_with_rows, chosen
from amp_ir.capture.constant_values import constant_value
from amp_ir.capture.data_assignments import DataAssignments
from amp_ir.capture.decompositions.cell_ops import cell_of
from amp_ir.capture.decompositions.packed_sequences import PackedPart
from amp_ir.capture.decompositions.recurrent_layers import layers_of
from amp_ir.capture.decompositions.torch_functions import decompose
from amp_ir.capture.diagnostics import Diagnostics, TracingStopped, UnsupportedCall
from amp_ir.capture.gradient_watch import GradientWatch
from amp_ir.capture.guards.left_values import holds_symbol
from amp_ir.capture.guards.state_reads import StateReads
from amp_ir.capture.locations import Locator, is_users_file
from amp_ir.capture.mask_indices import select_by_mask
from amp_ir.capture.recording import caller_advice
from amp_ir.capture.special_numbers import guard_special_numbers
from amp_ir.capture.symbolic_float import SymbolicFloat
from amp_ir.capture.texts_of_numbers import NO_VALUE, refuse_text
from amp_ir.capture.transaction import Transaction
from amp_ir.capture.value_checks import check_arguments
from amp_ir.capture.widened import CASTS, mark_widened
from amp_ir.ir.location import Location

_GRADIENT: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
_GET_GRADIENT, _SET_GRADIENT, _SET_DATA = _GRADIENT.__get__, _GRADIENT.__set__, _DATA.__set__
_TENSOR: Any = torch.Tensor
# What takes no gradient of a tensor.
_DETACHED = frozenset({
    _TENSOR.detach, torch.detach, _TENSOR.data.__get__, _TENSOR.shape.__get__, _TENSOR.size,
    _TENSOR.dim, _TENSOR.ndim.__get__, _TENSOR.__len__, _TENSOR.numel, _TENSOR.dtype.__get__,
    _TENSOR.device.__get__, _TENSOR.requires_grad.__get__,
})  # fmt: skip
_GET_ITEM, _SET_ITEM = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_VERSION: Any = torch.Tensor._version
_GET_VERSION = _VERSION.__get__
_DROPOUT = (torch.dropout, torch.nn.functional.dropout)
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward)
# What print and f-strings call. With a specification it is the text of a number, else of a tensor.
_TO_TEXT = (torch.Tensor.__repr__, torch.Tensor.__format__)
# What takes values from memory, past every mode: of a tensor from outside of the step those that it
# has at the capture.
_TAKES_VALUES = (
    torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__,
    torch.Tensor.__reduce_ex__,
)  # fmt: skip
_COPIES_VALUES = (torch.Tensor.tolist, torch.Tensor.numpy)
# Types of arguments that are passed on.
_AS_THEY_ARE = frozenset(
    (FakeTensor, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)
)
_DIFFERENTIATES = (*_BACKWARD, torch.autograd.grad)


# Kernels of PyTorch's that compute with a number before any op sees it: the result is a constant.
_COMPUTES_WITH_NUMBERS = (
    torch.tensor, torch.as_tensor, torch.asarray, torch.linspace, torch.logspace, torch.arange,
    torch.nn.functional.cross_entropy,
)  # fmt: skip


class Substitution(TorchFunctionMode):
    """A mode that replaces the user's own tensors by their fakes, and watches gradients."""

    def __init__(
        self,
        fakes: Mapping[int, torch.Tensor],
        watch: GradientWatch,
        transaction: Transaction,
        locator: Locator,
        diagnostics: Diagnostics,
        state_reads: StateReads,
    ) -> None:
        super().__init__()
        self._fakes = fakes
        self._watch = watch
        self._locator = locator
        self._diagnostics = diagnostics
        self._state_reads = state_reads
        self.data = DataAssignments(fakes.values(), transaction, diagnostics, locator)
        self.shown_at: dict[Location, None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make one call of the torch API."""
        # Seldom anything else; the observer's hook is called for each call made here.
        if not _AS_THEY_ARE.issuperset(map(type, args)):
            args = self._replace(args, is_detached=func in _DETACHED)
        kwargs = {key: self._replace(value) for key, value in kwargs.items()} if kwargs else {}
        if func == _GET_GRADIENT:
            self._watch.looked_at(args[0])
        elif func == _SET_GRADIENT:
            self._watch.assigns(*args)
        elif func == _SET_DATA and _are_tensors(*args):
            self.data.assign(*args)
            return None
        elif func in _TO_TEXT:
            if any(args[1:]):
                return self._text_of_number(*args)
            self.shown_at[self._locator.here()] = None
        elif func == _GET_VERSION:
            self._refuse_version(sys._getframe(1))
        recurrent = layers_of(func, args, kwargs) or cell_of(func, args, kwargs)
        if recurrent is not None:
            return recurrent()
        try:
            return self._called(func, args, kwargs)
        except UnsupportedCall as unsupported:
            place = self._locator.here()
            advice = caller_advice(place) or unsupported.advice
            self._diagnostics.add(unsupported.what, place, advice)
            raise TracingStopped from unsupported

    def _refuse_version(self, caller: FrameType) -> None:
        """Refuse a look at how often a tensor was written; PyTorch's own code may look."""
        if is_users_file(caller.f_code.co_filename):
            self._diagnostics.add(
                "_version counts the writes to a tensor, and those of a compiled step do not",
                self._locator.here(),
                "Count updates in a buffer of the model, or compare the numbers themselves",
            )

    def _values_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what is taken from the memory of a tensor from outside, which is a guard then."""
        self._state_reads.read_outside(args[0], self._locator.here())
        with _disable_current_modes():
            return func(*args, **kwargs)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _DROPOUT:
            return _dropout(*args, **kwargs)
        if func is _SET_ITEM and isinstance(args[2], SymbolicFloat):
            args = *args[:2], _tensor_of(args[2], args[0])
        if func in _TAKES_VALUES and not isinstance(args[0], (FakeTensor, PackedPart)):
            return self._values_of(func, args, kwargs)
        if func in _COPIES_VALUES and type(args[0]) is FakeTensor:
            known = self._state_reads.value(args[0], self._locator.here())
            if known is not None:
                with _disable_current_modes():
                    return func(known, *args[1:], **kwargs)
        is_packed = not _AS_THEY_ARE.issuperset(map(type, args)) and any(map(_is_packed, args))
        if is_packed and any(type(one) is ChosenRow for one in args):
            return call_with_rows(func, args, kwargs, self._called)
        selected = select_by_mask(func, args, kwargs)
        if selected is not NotImplemented:
            return selected
        if is_packed:
            args, kwargs = self._with_special_numbers(func, args, kwargs)
            return PackedPart.__torch_function__(func, (), args, kwargs)
        row = chosen(args) if func is _GET_ITEM else None
        return self._computed(func, args, kwargs) if row is None else row

    def _with_special_numbers(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if func in _COMPUTES_WITH_NUMBERS and holds_symbol((args, kwargs)):
            raise UnsupportedCall(
                f"gives a hyper-parameter of an optimizer to {func.__name__}, which computes with "
                "the number that it is now",
                "Make a tensor by torch.full((), number) and compute with that, or pass the number "
                "to the step as an argument",
            )
        return guard_special_numbers(func, args, kwargs)

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self._with_special_numbers(func, args, kwargs)
        check_arguments(func, args, kwargs)
        if assigned(func, args):
            return None
        out = decompose(func, args, kwargs)
        if out is not NotImplemented:
            return out
        out = func(*args, **kwargs)
        if func in CASTS:
            mark_widened(args, kwargs, out)
        if func in _BACKWARD:
            self._watch.accumulated()
        if func in _DIFFERENTIATES:
            self._watch.has_differentiated = True
        return out

    def _text_of_number(self, tensor: torch.Tensor, specification: str) -> str:
        """Refuse the text of a value that does not exist yet; some text lets the step go on."""
        if not isinstance(tensor, FakeTensor):
            return format(tensor, specification)
        constant = tensor.constant if tensor.constant is not None else constant_value(tensor)
        if constant is not None:
            return format(constant, specification)
        refuse_text(self._diagnostics, self._locator)
        return NO_VALUE

    def _replace(self, value: Any, *, is_detached: bool = False) -> Any:
        if isinstance(value, torch.Tensor):
            if type(value) is FakeTensor or _is_packed(value):
                return value
            fake = self._fakes.get(id(value))
            if fake is not None:
                return fake
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                # Made by torch.func of a tensor that came through here.
                return value
            if value.requires_grad and torch.is_grad_enabled():
                # A parameter is of a module that was not passed, and the next op may write to it.
                if not is_detached or isinstance(value, torch.nn.Parameter):
                    return self._outside(value)
            return value
        if type(value) in (tuple, list):
            return type(value)(self._replace(item, is_detached=is_detached) for item in value)
        return value

    def _outside(self, tensor: torch.Tensor) -> torch.Tensor:
        shape = tuple(tensor.shape)
        if tensor._base is not None and id(tensor._base) in self._fakes:
            what = f"uses a view of shape {shape} of a parameter that was made before the step"
            advice = "Make the view inside of the step"
        elif tensor.grad_fn is not None:
            what = f"uses a tensor of shape {shape} with a gradient, computed before the step"
            advice = "Compute it inside of the step, or detach() it"
        else:
            what = "uses what requires a gradient and is in none of the models"
            advice = "Pass its module in model=[...], or detach() the tensor"
            of_shape = f"a tensor of shape {shape}"
            self._diagnostics.add(what, self._locator.here(), advice, of_shape)
            return tensor.detach()
        self._diagnostics.add(what, self._locator.here(), advice)
        return tensor.detach()


def _tensor_of(number: SymbolicFloat, beside: torch.Tensor) -> torch.Tensor:
    """Return a tensor f[] of a number: PyTorch makes a constant of one that a mask assigns."""
    return torch.full((), number, dtype=beside.dtype, device=beside.device)


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedPart)


def _dropout(
    x: torch.Tensor,
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - torch's own signature
    inplace: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    """Run dropout as one op on every device; ATen decomposes it on a CPU."""
    if inplace or not training or not 0.0 < p < 1.0:
        return torch.nn.functional.dropout(x, p, training, inplace)
    return torch.native_dropout(x, p, True)[0]


def _are_tensors(target: torch.Tensor, value: object) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not _is_packed(value)
    return type(target) is FakeTensor and is_tensor
