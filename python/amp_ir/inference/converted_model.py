# SPDX-License-Identifier: Apache-2.0
"""A converted model: a program for each shape of its inputs, on parameters of its own."""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from amp_ir.api import compile_into
from amp_ir.capture.batch import structures_of
from amp_ir.capture.call_arguments import bound, call_arguments, signature_of
from amp_ir.capture.guards.call_signature import CallSignature
from amp_ir.errors import CopyError, OptionError, ShapeMismatchError
from amp_ir.host.fork_safe_lock import ForkSafeLock
from amp_ir.inference.conversion import Conversion
from amp_ir.inference.stored_parameters import StoredParameters
from amp_ir.ir.nbytes_text import mebibytes
from amp_ir.ir.step_module import StepHooks, StepModule
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.step import CompiledStep
from amp_ir.runtime.step_variants import (
    DEFAULT_LIMIT,
    DEFAULT_SHAPES,
    Recompile,
    StepVariants,
    Users,
    Variant,
)

_NO_COPY = (
    "a converted model cannot be copied or pickled: it is machine code of this process. Write it "
    "to a file with amp_ir.save, or convert a copy of the model"
)


@attrs.frozen
class InputSignature(CallSignature):
    """The signature of a model's inputs: plain values are part of the key, as shapes are."""

    @property
    def key(self) -> Any:
        """Return all of it: a program serves the inputs of one key."""
        return self.structure, self.kinds, self.values


class ConvertedModel:
    """A model in mixed precision, called as the model is. Made by `amp_ir.convert_model`.

    A call by position and one by name, in any order, are the same. Inputs of other shapes or plain
    values get a program of their own at their first call; all programs share the parameters and one
    arena. Those of the `max_shapes` used last are kept; of a loaded model all, which cannot be made
    again. Calls from several threads run one after the other.
    """

    def __init__(
        self,
        conversion: Conversion | None,
        stored: StoredParameters,
        options: Mapping[str, Any] | None = None,
        *,
        programs: Sequence[CompiledStep] = (),
        arena: Arena | None = None,
        max_shapes: int = DEFAULT_SHAPES,
    ) -> None:
        self._conversion = conversion
        self._stored = stored
        self._options = dict(options or {})
        name = "" if conversion is None else type(conversion.model).__qualname__
        self._signature: inspect.Signature | None = None
        if conversion is not None:
            self._signature = signature_of(conversion.model.forward)
        elif programs:
            self._signature = structures_of(programs[0].module.signature)[0].names
        keyed_by = "shapes, dtypes, structures or plain values"
        users = Users("a converted model", name, "inputs", keyed_by, "model.recompiles")
        self._variants: StepVariants[InputSignature]
        self._variants = StepVariants(DEFAULT_LIMIT, max(max_shapes, len(programs)), users)
        signatures = [InputSignature.of(_inputs_of(one))[0] for one in programs]
        for signature, program in zip(signatures, programs, strict=True):
            self._variants.keep(signature, StepHooks(), program)
        if signatures:
            self._variants.find(signatures[0])  # `compiled` is the first until one is called
        self._turn = ForkSafeLock("the model was running")
        self._arena = Arena() if arena is None else arena

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the model returns for these inputs; compiles first for a new shape.

        Raises:
            ArgumentError: an input is not a tensor or plain value that can be used, or the model
                takes no input of that name.
            StateError: the model changed since its conversion, and a new program is needed.
            ShapeMismatchError: it was loaded from a file that has no program for these inputs.
            IndexOutOfRangeError: an index, such as a token, is out of range.
        """
        moved = bound(self._signature, inputs, named) if named else inputs
        with self._turn:
            signature, tensors = InputSignature.of(moved)
            variant = self._variants.find(signature)
            if variant is None:
                variant = self._compiled(signature, call_arguments(*inputs, **named))
            return variant.program.run_current(tensors)

    def compile(self, *inputs: Any, **named: Any) -> None:
        """Compile for the shapes of these inputs, if that was not done; nothing is run."""
        with self._turn:
            signature, _ = InputSignature.of(bound(self._signature, inputs, named))
            if self._variants.find(signature) is None:
                self._compiled(signature, call_arguments(*inputs, **named))

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the programs read, by name; they are the model's own no more."""
        return dict(self._stored.tensors)

    @property
    def nbytes(self) -> int:
        """Return the bytes of `parameters`."""
        return self._stored.nbytes

    @property
    def compiled(self) -> CompiledStep:
        """The program that was used or compiled last."""
        assert self._variants.last is not None
        return self._variants.last.program

    @property
    def recompiles(self) -> list[Recompile]:
        """The compilations after the first: the reason and the seconds of each."""
        return list(self._variants.recompiles)

    @property
    def plan(self) -> Any:
        """The CastPlan of `compiled`; None for "float32"."""
        return self.compiled.module.plan

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes of the input tensors of each program."""
        signatures = [one.signature for one in self._variants.in_order]
        return [[tuple(one.shape) for one in key.kinds if one] for key in signatures]

    @property
    def programs(self) -> list[CompiledStep]:
        """Return the programs that are kept, in the order in which they were made."""
        return [one.program for one in self._variants.in_order]

    def without_casts(self) -> list[StepModule]:
        """Return the float32 program for each of `programs`, on float32 weights of the model.

        Raises:
            OptionError: the model was loaded from a file.
            StateError: it changed after the conversion.
        """
        if self._conversion is None:
            raise OptionError(
                "the model was loaded from a file, which has its weights as they were stored; "
                "remove_amp_cast=True needs the model that amp_ir.convert_model returned"
            )
        return self._conversion.without_casts([_inputs_of(one) for one in self.programs])

    def _compiled(
        self, signature: InputSignature, inputs: tuple[Any, ...]
    ) -> Variant[InputSignature]:
        if self._conversion is None:
            shapes = "; ".join(str(one) for one in self.shapes)
            raise ShapeMismatchError(
                "the model was loaded from a file, which has programs for inputs of the shapes "
                f"{shapes}; these inputs differ in shape, dtype or structure. Call the converted "
                "model with such inputs before it is saved"
            )
        why, started = self._variants.why_none(signature), time.perf_counter()
        program = self._conversion.program(inputs)
        compiled = compile_into(self._arena, program, **self._options)
        seconds = time.perf_counter() - started
        return self._variants.add(signature, StepHooks(), compiled, why, seconds)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            CopyError: always.
        """
        raise CopyError(_NO_COPY)

    def __repr__(self) -> str:
        """Describe the converted model in one line."""
        count = len(self.programs)
        return (
            f"ConvertedModel({count} program{'s' if count > 1 else ''}, "
            f"parameters {mebibytes(self.nbytes)})"
        )


def _inputs_of(program: CompiledStep) -> tuple[Any, ...]:
    """Return inputs like those of a program."""
    arguments, _ = structures_of(program.module.signature)
    return arguments.with_tensors(arguments.tensors)
