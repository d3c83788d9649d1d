# SPDX-License-Identifier: Apache-2.0
"""What is computed of parameters alone is stored, where that takes no memory; optional casts."""

from __future__ import annotations

import torch
from torch import nn

import amp_ir
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.fixed_values import fixed_inputs
from amp_ir.ir.interpreter import interpret
from amp_ir.rewrites.fold_parameters import Computed, fold_parameters
from amp_ir.rewrites.store_low import store_low

X = torch.linspace(-1, 1, 96).sin().reshape(2, 48)
IDS = torch.tensor([1, 3])


class Tied(nn.Module):
    """A table that is looked up in float32 and multiplied low."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(64, 48)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.table(ids), self.table.weight)


def low(model: nn.Module, *args: torch.Tensor) -> amp_ir.StepModule:
    mod, args = amp_ir.trace_model(model, args)
    return amp_ir.autocast(mod, args, amp_dtype="bfloat16")


def stored_of(mod: amp_ir.StepModule) -> tuple[amp_ir.StepModule, dict[str, torch.Tensor]]:
    found = {}

    def store(computed: Computed):
        found[computed.name] = computed.value()
        return computed.name, found[computed.name]

    return fold_parameters(mod, store), found


def values_of(mod: amp_ir.StepModule, *batch: torch.Tensor) -> list[torch.Tensor]:
    given = iter(batch)
    inputs = [mod.state[o.name] if o.is_state else next(given) for o in mod.signature.inputs]
    return interpret(mod, [one.detach() for one in inputs])


def test_a_weight_is_stored_as_it_is_read():
    mod = low(nn.Linear(48, 64), X)
    folded, stored = stored_of(mod)
    assert {name: str(one.dtype) for name, one in stored.items()} == {"weight": "torch.bfloat16"}
    dtypes = {one.name: one.dtype for one in folded.signature.inputs}
    assert dtypes == {"weight": "bfloat16", "bias": "float32", "batch0": "float32"}
    assert [str(one.ty.dtype) for one in Dataflow(folded.ir).main.params] == list(dtypes.values())
    # The transposed view costs nothing, and stays.
    assert tuple(stored["weight"].shape) == (64, 48)
    assert torch.equal(values_of(folded, X)[0], values_of(mod, X)[0])


def test_a_weight_that_is_also_read_in_float32_is_not_stored_twice():
    mod = low(Tied(), IDS)
    folded, stored = stored_of(mod)
    assert folded is mod and not stored


def test_an_optional_cast_rounds_the_table_once():
    mod = low(Tied(), IDS)
    rounded = mod.with_ir(store_low(mod.ir, fixed_inputs(mod), "bfloat16"))
    folded, stored = stored_of(rounded)
    table = mod.state["table.weight"].detach()
    assert torch.equal(stored["table.weight"], table.bfloat16())
    assert [one.dtype for one in folded.signature.inputs if one.is_state] == ["bfloat16"]
    # bfloat16 has 8 significant bits: 2^-9 of each of two factors, and sums of 48 terms.
    expected, got = values_of(mod, IDS)[0], values_of(folded, IDS)[0]
    assert float((got - expected).abs().max()) < 2**-7 * float(expected.abs().max())


def test_a_parameter_that_is_added_is_not_rounded():
    mod = low(nn.Linear(48, 64), X)
    rounded = store_low(mod.ir, fixed_inputs(mod), "bfloat16")
    bias = next(one for one in Dataflow(rounded).main.params if one.name == "bias")
    assert all(
        one is not bias
        for call in Dataflow(rounded).calls("amp_ir.cast").values()
        for one in call.args
    )


def test_state_that_a_step_writes_is_not_fixed():
    model = nn.Linear(48, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    mod, args = amp_ir.trace_step(step, (X,), model=model, optimizer=optimizer)
    mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
    assert not fixed_inputs(mod)
    assert stored_of(mod)[0] is mod
