# SPDX-License-Identifier: Apache-2.0
"""An infinity or a NaN in the result of any op: the step changes nothing, or is none the worse.

Every floating result of the forward and backward pass passes through `where(which == k, bad, x)`,
so that one compiled step can be spoilt anywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
import torch
import tvm
from torch import nn
from torch.nn import functional
from tvm import relax

import amp_ir

NOWHERE = -1


def mlp() -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = torch.randn(6, 4), torch.randn(6, 3)
    return model, lambda x, y: functional.mse_loss(model(x), y), batch


def convolutional() -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip
    batch = torch.randn(3, 2, 6, 6), torch.randint(0, 3, (3,))
    return model, lambda x, y: functional.cross_entropy(model(x), y), batch


def bert() -> tuple[nn.Module, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=23, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=8,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    batch = torch.randint(0, 23, (2, 8)), torch.randint(0, 23, (2, 8))
    return model, lambda ids, labels: model(input_ids=ids, labels=labels).loss, batch


def spoilt_anywhere(mod: amp_ir.StepModule) -> tuple[amp_ir.StepModule, list[str]]:
    """The step with a `where` behind each float result that a checked gradient depends on.

    The first tensors of the batch say which of the returned places is spoilt, i64[], and by what,
    f32[].
    """
    main = mod.ir["main"]
    bindings = [one for block in main.body.blocks for one in block.bindings]
    names = [one.name for one in mod.signature.inputs]
    which, bad = (main.params[names.index(f"batch{k}")] for k in range(2))
    reaching = before_the_check(bindings)
    builder, written, places = relax.BlockBuilder(), [], []
    now: dict[relax.Var, relax.Expr] = {}

    def emit(value: relax.Expr) -> relax.Var:
        value = builder.normalize(value)
        variable = relax.DataflowVar(f"spoilt{len(written)}", value.ty)
        written.append(relax.VarBinding(variable, value))
        return variable

    for binding in bindings:
        value = builder.normalize(renamed(binding.value, now))
        written.append(relax.VarBinding(binding.var, value))
        if binding.var in reaching and is_float(binding.var):
            here = emit(relax.op.equal(which, relax.const(len(places), "int64")))
            value = emit(relax.op.where(here, bad, binding.var))
            now[binding.var] = value
            places.append(str(binding.value)[:80])
    body = relax.SeqExpr([relax.DataflowBlock(written)], main.body.body)
    relax.expr._update_type(body, main.body.ty)
    function = relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs, main.span)
    return mod.with_ir(tvm.IRModule({mod.ir.get_global_var("main"): function})), places


def is_float(variable: relax.Var) -> bool:
    return isinstance(variable.ty, relax.TensorType) and str(variable.ty.dtype) == "float32"


def renamed(value: relax.Expr, now: dict[relax.Var, relax.Expr]) -> relax.Expr:
    if isinstance(value, relax.Var):
        return now.get(value, value)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([renamed(one, now) for one in value.fields])
    if isinstance(value, relax.Call):
        arguments = [renamed(one, now) for one in value.args]
        return relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
    return value


def before_the_check(bindings: list[relax.Binding]) -> set[relax.Var]:
    """Every variable that an argument of `all_finite` depends on.

    What follows the check (the update itself) is not a gradient, and neither are a loss that is
    only returned or the statistics of a BatchNorm: their overflow is not one of gradients.
    """
    wanted: set[relax.Var] = set()
    for binding in reversed(bindings):
        value = binding.value
        is_check = isinstance(value, relax.Call) and value.op.name == "amp_ir.all_finite"
        if is_check or binding.var in wanted:
            relax.analysis.post_order_visit(
                value, lambda one: wanted.add(one) if isinstance(one, relax.Var) else None
            )
    return wanted


MODELS = {"mlp": mlp, "convolutional": convolutional, "bert": bert}


@attrs.frozen(eq=False)
class Training:
    """A model in a compiled step that can be spoilt, and all of its state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: amp_ir.CompiledStep
    batch: tuple[torch.Tensor, ...]
    places: list[str]

    @classmethod
    def make(cls, name: str) -> Training:
        torch.manual_seed(0)
        model, loss_of, batch = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = amp_ir.GradScaler("cpu", init_scale=1024.0, dynamic=False)

        def step(which: torch.Tensor, bad: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(*batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        example = torch.tensor(NOWHERE), torch.tensor(0.0), *batch
        mod, _ = amp_ir.trace_step(step, example, model=model, optimizer=optimizer, scaler=scaler)
        mod, places = spoilt_anywhere(mod)
        return cls(model, optimizer, amp_ir.compile(mod), batch, places)

    def run(self, place: int = NOWHERE, bad: float = 0.0) -> None:
        self.step(torch.tensor(place), torch.tensor(bad), *self.batch)

    def state(self) -> dict[str, torch.Tensor]:
        """The live tensors that a skipped step must not change."""
        return {
            name: tensor
            for name, tensor in self.step.module.state.items()
            if isinstance(tensor, torch.Tensor) and not name.startswith("scaler")
        }

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.state().items()}

    def put(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.state().items():
                value.copy_(state[name])

    def is_at(self, state: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(value, state[name]) for name, value in self.state().items())


@pytest.mark.parametrize("name", MODELS)
def test_no_op_can_spoil_the_state(name: str):
    training = Training.make(name)
    training.run()
    before = training.copy()
    training.run()
    after = training.copy()
    training.put(before)
    skips, swallowed = 0, []
    for place, text in enumerate(training.places):
        for bad in (float("inf"), float("nan")):
            training.run(place, bad)
            if training.step.skipped:
                skips += 1
                assert training.is_at(before), text
                continue
            # A ReLU, a mask or a maximum may swallow it; then the step was one as any other.
            swallowed.append(text)
            assert all(torch.isfinite(one).all() for one in training.state().values()), text
            training.put(before)
    assert skips >= 0.8 * 2 * len(training.places), swallowed
    training.run()
    assert training.is_at(after)
