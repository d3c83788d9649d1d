# SPDX-License-Identifier: Apache-2.0
"""A converted model: a program for each shape of its inputs, on parameters of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_ir.api import compile_into
from amp_ir.capture.batch import structures_of
from amp_ir.capture.guards.call_signature import CallSignature
from amp_ir.errors import CopyError, OptionError, ShapeMismatchError
from amp_ir.host.fork_safe_lock import ForkSafeLock
from amp_ir.inference.conversion import Conversion
from amp_ir.inference.stored_parameters import StoredParameters
from amp_ir.ir.step_module import StepModule
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.step import CompiledStep, refuse_names

_NO_COPY = (
    "a converted model cannot be copied or pickled: it is machine code of this process. Write it "
    "to a file with amp_ir.save, or convert a copy of the model"
)


class ConvertedModel:
    """A model in mixed precision, called as the model is. Made by `amp_ir.convert_model`.

    Inputs of other shapes or plain values get a program of their own at their first call; all
    programs share the parameters and one arena. Calls from several threads run one after the other.
    """

    def __init__(
        self,
        conversion: Conversion | None,
        stored: StoredParameters,
        options: Mapping[str, Any] | None = None,
        *,
        programs: Sequence[CompiledStep] = (),
        arena: Arena | None = None,
    ) -> None:
        self._conversion = conversion
        self._stored = stored
        self._options = dict(options or {})
        self._programs = {CallSignature.of(_inputs_of(one))[0]: one for one in programs}
        self._turn = ForkSafeLock("the model was running")
        self._arena = Arena() if arena is None else arena
        self._last = programs[0] if programs else None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Return what the model returns for these inputs; compiles first for a new shape.

        Raises:
            ArgumentError: an input is not a tensor or plain value that can be used.
            StateError: the model changed since its conversion, and a new program is needed.
            ShapeMismatchError: it was loaded from a file that has no program for these inputs.
            IndexOutOfRangeError: an index, such as a token, is out of range.
        """
        refuse_names(named)
        with self._turn:
            signature, tensors = CallSignature.of(inputs)
            program = self._programs.get(signature) or self._compiled(signature, inputs)
            self._last = program
            return program.run_current(tensors)

    def compile(self, *inputs: Any) -> None:
        """Compile for the shapes of these inputs, if that was not done; nothing is run."""
        with self._turn:
            signature, _ = CallSignature.of(inputs)
            if signature not in self._programs:
                self._last = self._compiled(signature, inputs)

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
        assert self._last is not None
        return self._last

    @property
    def plan(self) -> Any:
        """The CastPlan of `compiled`; None for "float32"."""
        return self.compiled.module.plan

    @property
    def shapes(self) -> list[list[tuple[int, ...]]]:
        """Return the shapes of the input tensors of each program."""
        return [[tuple(one.shape) for one in key.kinds if one] for key in self._programs]

    @property
    def programs(self) -> list[CompiledStep]:
        """Return the programs, in the order in which they were made."""
        return list(self._programs.values())

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

    def _compiled(self, signature: CallSignature, inputs: tuple[Any, ...]) -> CompiledStep:
        if self._conversion is None:
            shapes = "; ".join(str(one) for one in self.shapes)
            raise ShapeMismatchError(
                "the model was loaded from a file, which has programs for inputs of the shapes "
                f"{shapes}; these inputs differ in shape, dtype or structure. Call the converted "
                "model with such inputs before it is saved"
            )
        program = self._conversion.program(inputs)
        compiled = compile_into(self._arena, program, **self._options)
        self._programs[signature] = compiled
        return compiled

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            CopyError: always.
        """
        raise CopyError(_NO_COPY)

    def __repr__(self) -> str:
        """Describe the converted model in one line."""
        count = len(self._programs)
        return (
            f"ConvertedModel({count} program{'s' if count > 1 else ''}, "
            f"parameters {self.nbytes / 2**20:.1f} MiB)"
        )


def _inputs_of(program: CompiledStep) -> tuple[Any, ...]:
    """Return inputs like those of a program."""
    arguments, _ = structures_of(program.module.signature)
    return arguments.with_tensors(arguments.tensors)
