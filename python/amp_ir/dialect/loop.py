# SPDX-License-Identifier: Apache-2.0
"""A loop: one small program, the body, run on one step after the other.

The body is a module of its own, written as text. Each of its inputs has a place, three numbers:

- (WHOLE, 0, 0): the operand itself, the same at every step.
- (ENTRY, first, stride): entry `first + stride * step` of the operand, which has one more axis.
- (CARRIED, output, 0): what the body's output of that position was in the step before; the operand
  is its value before the first step.

And so has each of its outputs:

- (ENTRY, first, stride): all steps' values are a result, with one more axis; as for inputs.
- (CARRIED, 0, 0): the last step's value is the result, and an input reads it in the next step.
- (WHOLE, 0, 0): the last step's value is the result, and no input reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
import tvm
from tvm import relax

from amp_ir.dialect.registry import declare, options_of

NAME = "amp_ir.loop"
WHOLE, ENTRY, CARRIED = 0, 1, 2
Place = tuple[int, int, int]


@attrs.frozen(eq=False)
class Loop:
    """What the options of a call say."""

    body: tvm.IRModule
    length: int
    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    # The body's text as it was before autocast, "" where it did not go through that.
    uncast: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The options of a call of this loop."""
        return {
            "body": tvm.ir.save_json(self.body),
            "length": self.length,
            "inputs": [number for place in self.inputs for number in place],
            "outputs": [number for place in self.outputs for number in place],
            "uncast": self.uncast,
        }


def loop_of(call: relax.Call) -> Loop:
    """Return the loop that a call of this op runs."""
    options = options_of(call)
    return Loop(
        body_of(str(options["body"])),
        int(options["length"]),
        _places(options["inputs"]),
        _places(options["outputs"]),
        str(options["uncast"]),
    )


@functools.lru_cache(maxsize=64)
def body_of(text: str) -> tvm.IRModule:
    """Return the module that a body's text is of; never change it."""
    return tvm.ir.load_json(text)


def _places(numbers: Sequence[int]) -> tuple[Place, ...]:
    flat = [int(one) for one in numbers]
    return tuple((flat[k], flat[k + 1], flat[k + 2]) for k in range(0, len(flat), 3))


def body_types(body: tvm.IRModule) -> list[relax.TensorType]:
    """Return the types of a body's outputs."""
    return list(body["main"].body.ty.fields)


def _reference(*_tensors: torch.Tensor, **_options: Any) -> torch.Tensor:
    raise NotImplementedError("the interpreter runs the body of a loop itself")


@declare(NAME, "operands...", reference=_reference)
def loop(
    *_types: relax.Type,
    body: str,
    length: int,
    inputs: Sequence[int],
    outputs: Sequence[int],
    uncast: str = "",
) -> relax.Type:
    """Run the body `length` times; a result for each of its outputs, several in a tuple."""
    del inputs, uncast
    places = _places(outputs)
    found = []
    for type_, (kind, _, _) in zip(body_types(body_of(str(body))), places, strict=True):
        shape = [int(extent) for extent in type_.shape]
        whole = [int(length), *shape] if kind == ENTRY else shape
        found.append(relax.TensorType(whole, str(type_.dtype)))
    return found[0] if len(found) == 1 else relax.TupleType(found)
