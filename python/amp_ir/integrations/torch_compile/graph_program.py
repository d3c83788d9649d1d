# SPDX-License-Identifier: Apache-2.0
"""A compiled program, called as AOTAutograd calls a graph: a flat list in, a flat list out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch

from amp_ir.api import compile_into
from amp_ir.integrations.torch_compile.backend_options import BackendOptions
from amp_ir.integrations.torch_compile.import_graph import GraphOutput
from amp_ir.integrations.torch_compile.partition import Half
from amp_ir.runtime.arena import Arena
from amp_ir.runtime.step import CompiledStep

# What the random ops take: 31 bits, which every conversion of an int64 keeps.
_SEEDS = 2**31 - 1
# One for all programs of the process: they run one after the other.
_ARENA = Arena()


@attrs.frozen(eq=False)
class GraphProgram:
    """A half of a graph that runs on the graph's inputs, in their order.

    `reads` are the positions among the inputs that the program takes. `random_state` is the
    position among the program's inputs of the state that random numbers come from; it is drawn from
    PyTorch's generator at each call, so that seeds, forks and saved states of it hold.
    `outputs` are those of the graph. For the backward pass follow the results `saved`, the random
    state where `saves_random_state`, and the inputs `saved_inputs`.
    """

    step: CompiledStep
    reads: tuple[int, ...]
    outputs: tuple[GraphOutput, ...]
    random_state: int | None = None
    saved: tuple[int, ...] = ()
    saves_random_state: bool = False
    saved_inputs: tuple[int, ...] = ()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Run the program."""
        tensors = [inputs[k] for k in self.reads]
        state = None
        if self.random_state is not None or self.saves_random_state:
            state = drawn_random_state()
        if self.random_state is not None:
            tensors.insert(self.random_state, state)
        results = self.step.run_current(tensors)
        outputs = [_output(one, inputs, results) for one in self.outputs]
        outputs += [results[k] for k in self.saved]
        if self.saves_random_state:
            outputs.append(state)
        return outputs + [inputs[k] for k in self.saved_inputs]


def drawn_random_state() -> torch.Tensor:
    """Return int64[2], a random state drawn from PyTorch's generator of the CPU."""
    return torch.stack((torch.randint(_SEEDS, ()), torch.zeros((), dtype=torch.int64)))


def _output(output: GraphOutput, inputs: Sequence[Any], results: Sequence[torch.Tensor]) -> Any:
    if output.input is not None:
        return inputs[output.input]
    if output.result is None:
        return output.value
    result = results[output.result]
    if output.strides is not None:
        return _with_strides(result, output.strides)
    order = output.order or ()
    if order == tuple(range(result.dim())):
        return result
    return result.permute([order.index(d) for d in range(len(order))])


def _with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Return a copy in a layout with gaps, or that repeats elements."""
    repeated = [d for d, stride in enumerate(strides) if stride == 0]
    source = result
    for d in repeated:
        source = source.narrow(d, 0, 1)
    laid_out = torch.empty_strided(source.shape, strides, dtype=result.dtype)
    return laid_out.copy_(source).expand(result.shape)


def compiled(half: Half, options: BackendOptions) -> CompiledStep:
    """Compile one half.

    Raises:
        UnsupportedOpError, OutOfMemoryError: as `amp_ir.compile`.
    """
    return compile_into(_ARENA, half.module, rounding=options.rounding, opt_level=options.opt_level)


def outputs_of(half: Half, outputs: Sequence[GraphOutput]) -> tuple[GraphOutput, ...]:
    """Return a graph's outputs with the places of their results in a half, which has them all."""
    numbers = sorted({one.result for one in outputs if one.result is not None})
    place = dict(zip(numbers, half.results, strict=True))
    return tuple(
        one if one.result is None else attrs.evolve(one, result=place[one.result])
        for one in outputs
    )


def boxed(run: GraphProgram) -> Callable[[list[Any]], list[Any]]:
    """Return a function that takes its inputs as a list, which it empties, as AOTAutograd asks."""

    def call(inputs: list[Any]) -> list[Any]:
        given = list(inputs)
        inputs.clear()
        return run(given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
