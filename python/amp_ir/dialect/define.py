# SPDX-License-Identifier: Apache-2.0
"""Declaration of an op by a shape rule and a reference implementation, for the op families.

    @define("amp_ir.softmax_backward", "grad", "y", reference=_softmax_backward)
    def softmax_backward(grad: Tensor, y: Tensor, *, axis: int) -> Tensor: ...

The shape rule maps shapes and dtypes as `Tensor` to those of the results, so that one function
serves the IR's type inference and the rounding of the reference. The reference computes with
PyTorch on arguments that are float32 or wider and need not handle dtypes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import attrs
import torch
import tvm_ffi
from tvm import relax

from amp_ir.dialect.registry import declare
from amp_ir.errors import ArgumentError, OptionError

# Type inference is called through tvm-ffi, which keeps the class of the errors it knows.
tvm_ffi.register_error(ArgumentError)
tvm_ffi.register_error(OptionError)

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
LOW_DTYPES = ("float16", "bfloat16")
INDEX_DTYPES = ("int32", "int64")

Shape = tuple[int, ...]
Reference = Callable[..., "torch.Tensor | tuple[torch.Tensor, ...]"]


@attrs.frozen
class Tensor:
    """Shape and dtype of an argument or a result of a shape rule.

    `label` is how errors name it ("argument grad of amp_ir.softmax_backward"); results need none.
    """

    shape: Shape
    dtype: str
    label: str = attrs.field(default="", eq=False)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def statistic_dtype(self) -> str:
        """Return the dtype of means, variances and sums over this tensor: float32 or wider."""
        return "float64" if self.dtype == "float64" else "float32"

    def with_shape(self, shape: Sequence[int]) -> Tensor:
        """Return a result of this dtype."""
        return Tensor(tuple(shape), self.dtype)

    def refuse(self, what: str, expected: object) -> NoReturn:
        """Raise the error that this argument has a wrong `what` ("shape", "dtype", ...)."""
        got = getattr(self, what)
        raise ArgumentError(f"{self.label} has {what} {got}, expected {expected}")

    def expect_float(self) -> None:
        """Require a floating dtype."""
        if self.dtype not in FLOAT_DTYPES:
            self.refuse("dtype", f"one of {', '.join(FLOAT_DTYPES)}")

    def expect_index(self) -> None:
        """Require an integer dtype that addresses elements."""
        if self.dtype not in INDEX_DTYPES:
            self.refuse("dtype", " or ".join(INDEX_DTYPES))

    def expect_dtype(self, dtype: str) -> None:
        """Require exactly `dtype`."""
        if self.dtype != dtype:
            self.refuse("dtype", dtype)

    def expect_shape(self, shape: Sequence[int]) -> None:
        """Require exactly `shape`."""
        if self.shape != tuple(shape):
            self.refuse("shape", tuple(shape))

    def expect_broadcastable(self, shape: Sequence[int]) -> None:
        """Require a shape that NumPy broadcasts to `shape`."""
        tail = tuple(shape)[len(shape) - self.ndim :]
        fits = self.ndim <= len(shape) and all(
            mine in (1, theirs) for mine, theirs in zip(self.shape, tail, strict=True)
        )
        if not fits:
            self.refuse("shape", f"one that broadcasts to {tuple(shape)}")

    def axis(self, axis: int) -> int:
        """Return `axis` counted from the front; raise OptionError when there is no such axis."""
        if not -self.ndim <= axis < self.ndim:
            raise OptionError(
                f"axis {axis} is out of range for {self.label} of shape {self.shape}, "
                f"expected {-self.ndim} to {self.ndim - 1}"
            )
        return axis % self.ndim


_Values = torch.Tensor | tuple[torch.Tensor, ...]
ShapeRule = Callable[..., "Tensor | tuple[Tensor, ...]"]


def define(
    name: str, *arguments: str, reference: Reference, stores_inside: bool = False
) -> Callable[[ShapeRule], ShapeRule]:
    """Declare the op `name`; decorates its shape rule.

    `arguments` are names for errors; one that ends in "?" may be absent, one that ends in "..."
    stands for any number. Options are the keyword-only parameters of the shape rule, with their
    defaults, and both the rule and the reference receive all of them.

    An op that `stores_inside`, in the dtype of its first argument, is several kernels. Its
    reference receives `stored`, which rounds to that dtype what one kernel stores for the next.
    """

    def register(rule: ShapeRule) -> ShapeRule:
        signature = inspect.signature(rule)

        def apply(arguments_got: Sequence[Tensor], options: dict[str, Any]) -> _Applied:
            _check_arity(name, arguments, len(arguments_got))
            bound = _bind(name, signature, arguments_got, options)
            results = rule(*bound.args, **bound.kwargs)
            return _Applied(results, bound.kwargs)

        def infer(*types: relax.Type, **options: Any) -> relax.Type:
            specs = [
                _from_type(ty, _label(name, arguments, position))
                for position, ty in enumerate(types)
            ]
            return _to_type(apply(specs, options).results)

        def compute(*tensors: torch.Tensor, **options: Any) -> _Values:
            # With a float64 argument it is an oracle.
            is_exact = any(dtype_name(one) == "float64" for one in tensors)
            return computed(tensors, options, wide=torch.float64 if is_exact else None)

        def compute_unrounded(*tensors: torch.Tensor, **options: Any) -> _Values:
            dtypes = [one.dtype for one in tensors if one.is_floating_point()]
            wide = functools.reduce(torch.promote_types, dtypes, torch.float32)
            return computed(tensors, options, wide=wide)

        def computed(
            tensors: Sequence[torch.Tensor], options: dict[str, Any], wide: torch.dtype | None
        ) -> _Values:
            specs = [
                Tensor(tuple(tensor.shape), dtype_name(tensor), _label(name, arguments, position))
                for position, tensor in enumerate(tensors)
            ]
            applied = apply(specs, options)
            taken = applied.options
            if stores_inside:
                taken = {**taken, "stored": functools.partial(_stored, tensors[0].dtype)}
            values = reference(*(_widen(tensor) for tensor in tensors), **taken)
            return _round_all(values, applied.results, wide)

        infer.__doc__ = rule.__doc__
        infer.__signature__ = signature  # type: ignore[attr-defined]
        declare(name, *arguments, reference=compute, unrounded=compute_unrounded)(infer)
        return rule

    return register


def check_choice(op: str, option: str, got: object, choices: Sequence[object]) -> None:
    """Raise OptionError unless `got` is one of `choices`."""
    if got not in choices:
        expected = ", ".join(map(repr, choices))
        raise OptionError(f"{op}: option {option} is {got!r}, expected one of {expected}")


def check_length(op: str, option: str, got: Sequence[int], length: int) -> None:
    """Raise OptionError unless `got` has one number for each of `length` axes."""
    if len(got) != length:
        raise OptionError(
            f"{op}: option {option} is {tuple(got)}, expected {length} numbers, one a spatial axis"
        )


def expect_rest(rest: tuple[Tensor, ...], flags: dict[str, bool], shape: Shape, op: str) -> None:
    """Require one floating tensor of `shape` in `rest` for each flag that is set.

    `flags` maps the option that declares a tensor ("has_weight") to its value.
    """
    present = [name for name, flag in flags.items() if flag]
    if len(rest) != len(present):
        raise OptionError(
            f"{op} has {len(rest)} optional tensors but "
            f"{', '.join(f'{name}={flag}' for name, flag in flags.items())}"
        )
    for tensor in rest:
        tensor.expect_float()
        tensor.expect_shape(shape)


def dtype_name(tensor: torch.Tensor) -> str:
    """Return TVM's name of a torch tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")


@attrs.frozen
class _Applied:
    results: Tensor | tuple[Tensor, ...]
    options: dict[str, Any]


def _check_arity(name: str, arguments: tuple[str, ...], got: int) -> None:
    least = sum(not argument.endswith(("?", "...")) for argument in arguments)
    unbounded = any(argument.endswith("...") for argument in arguments)
    if got < least or (got > len(arguments) and not unbounded):
        raise ArgumentError(f"{name} has {got} tensor arguments, expected {', '.join(arguments)}")


def _bind(
    name: str, signature: inspect.Signature, arguments: Sequence[Tensor], options: dict[str, Any]
) -> inspect.BoundArguments:
    plain = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    try:
        bound = signature.bind(*arguments, **plain)
    except TypeError as error:
        accepted = [
            str(parameter)
            for parameter in signature.parameters.values()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        ]
        # From Python 3.12 on it says of a missing argument which kind it is.
        reason = str(error).replace("required keyword-only argument", "required argument")
        raise OptionError(
            f"{name}: {reason}; got {len(arguments)} tensors and the options {sorted(plain)}, "
            f"expected the options ({', '.join(accepted)})"
        ) from None
    bound.apply_defaults()
    return bound


def _label(name: str, arguments: tuple[str, ...], position: int) -> str:
    argument = arguments[min(position, len(arguments) - 1)] if arguments else "?"
    return f"argument {position} ({argument.rstrip('?.')}) of {name}"


def _from_type(ty: relax.Type, label: str) -> Tensor:
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        raise ArgumentError(f"{label} has type {ty}, expected a tensor of static shape")
    return Tensor(tuple(int(extent) for extent in ty.shape), str(ty.dtype), label)


def _to_type(results: Tensor | tuple[Tensor, ...]) -> relax.Type:
    if isinstance(results, Tensor):
        return relax.TensorType(results.shape, results.dtype)
    return relax.TupleType([relax.TensorType(one.shape, one.dtype) for one in results])


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if dtype_name(tensor) in LOW_DTYPES else tensor


def _stored(dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
    return value.to(dtype).to(value.dtype)


def _round_all(
    values: _Values, results: Tensor | tuple[Tensor, ...], wide: torch.dtype | None
) -> _Values:
    if isinstance(values, torch.Tensor):
        assert isinstance(results, Tensor)
        return _round(values, results, wide)
    assert isinstance(results, tuple)
    return tuple(_round(value, result, wide) for value, result in zip(values, results, strict=True))


def _round(value: torch.Tensor, result: Tensor, wide: torch.dtype | None) -> torch.Tensor:
    """Round a result to its dtype; with `wide`, floats are of that dtype instead."""
    assert tuple(value.shape) == result.shape, (tuple(value.shape), result)
    if wide is not None and value.is_floating_point():
        return value.to(wide)
    return value.to(getattr(torch, result.dtype))
