# SPDX-License-Identifier: Apache-2.0
"""The body of a loop as a step of its own, which stages work on as on any step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amp_ir.dialect.loop import CARRIED, Loop
from amp_ir.ir.loop_call import shape_of_type
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature, StepModule


def step_of_body(
    loop: Loop, names: Sequence[str] | None = None, *, carried: Role = Role.RESULT
) -> StepModule:
    """Return a body as a step without state.

    `names` are those of its inputs; `carried` is what values for the next step are.
    """
    main = loop.body["main"]
    names = [f"input{k}" for k in range(len(main.params))] if names is None else names
    inputs = [
        InputSpec(name, Role.BATCH, shape_of_type(one.ty), str(one.ty.dtype))
        for name, one in zip(names, main.params, strict=True)
    ]
    read_next = {output for kind, output, _ in loop.inputs if kind == CARRIED}
    outputs = [
        OutputSpec(
            f"output{k}",
            carried if k in read_next else Role.RESULT,
            shape_of_type(one),
            str(one.dtype),
        )
        for k, one in enumerate(main.body.ty.fields)
    ]
    signature = Signature(tuple(inputs), tuple(outputs), _called, _called)
    return StepModule(ir=loop.body, signature=signature, state={})


def _called(_given: Any) -> Any:
    raise NotImplementedError("the body of a loop is no step of the user's")
