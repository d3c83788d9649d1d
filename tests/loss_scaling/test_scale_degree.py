# SPDX-License-Identifier: Apache-2.0
"""Steps that use a loss scale rightly pass the proof; each wrong use is named with its repair."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from tvm import relax
from tvm.relax import op

import amp_ir
from amp_ir.dialect import call_op
from amp_ir.errors import LossScaleError, StateError
from amp_ir.ir.step_module import Role
from amp_ir.loss_scaling.degrees import check_scale_degrees as scale_degree
from amp_ir.loss_scaling.degrees.check_scale_degrees import ScaleDegrees, check_scale_degrees
from amp_ir.loss_scaling.degrees.degree import ZERO, Degree, Solver, Special, Unknown, Words
from scale_programs import Steps, at, call_step
from scaled_training import Training, count_growing, line_of

ONCE = Degree.of("scaler0")
Step = Callable[[torch.Tensor, torch.Tensor], Any]


# Right uses.


def typical(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = t.scaled_backward(x, y)
    t.end()
    return loss.detach()


def clipped(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = t.scaled_backward(x, y)
    t.scaler.unscale_(t.optimizer)
    norm = t.clip(1.0)
    t.end()
    return loss.detach(), norm


def clipped_by_value(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    t.scaler.unscale_(t.optimizer)
    nn.utils.clip_grad_value_(t.model.parameters(), 0.5)
    t.end()


def accumulated(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    for part_x, part_y in zip(x.chunk(2), y.chunk(2), strict=True):
        t.scaler.scale(t.loss(part_x, part_y) / 2).backward()
    t.scaler.unscale_(t.optimizer)
    t.clip(1.0)
    t.end()
    t.optimizer.zero_grad()


def penalized(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    """As the note "Automatic Mixed Precision examples" of PyTorch has it."""
    t.optimizer.zero_grad()
    loss = t.loss(x, y)
    parameters = list(t.model.parameters())
    scaled = torch.autograd.grad(t.scaler.scale(loss), parameters, create_graph=True)
    inverse = 1.0 / t.scaler.get_scale()
    norm = sum((grad * inverse).pow(2).sum() for grad in scaled) ** 0.5
    loss = loss + norm
    t.scaler.scale(loss).backward()
    t.scaler.unscale_(t.optimizer)
    t.clip(1.0)
    t.end()
    return loss.detach()


def two_losses(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    out = t.model(x)
    t.scaler.scale(functional.cross_entropy(out, y)).backward(retain_graph=True)
    t.scaler.scale(out.square().mean()).backward()
    t.end()


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(
    "program", [typical, clipped, clipped_by_value, accumulated, penalized, two_losses]
)
def test_a_right_program_passes_without_a_note(program, optimizer, options):
    found = Training.make(optimizer, **options).degrees(program)
    assert found.notes == ()
    states = {name: degree for name, degree in found.outputs.items() if "scaler0." not in name}
    assert set(states.values()) <= {ZERO, Special.ANY} | {
        degree for name, degree in found.outputs.items() if name.endswith(".grad")
    }
    assert found.outputs["scaler0.scale"] == ONCE


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=["sgd", "momentum", "adamw"])
@pytest.mark.parametrize(
    "program", [typical, clipped, clipped_by_value, accumulated, penalized, two_losses]
)
def test_every_value_of_a_captured_step_grows_by_its_degree(program, optimizer, options):
    checked, unknown = count_growing(Training.make(optimizer, **options), program)
    # The scaler's log, whose rows hold scales beside counts, has no degree; all else has.
    assert unknown <= 5 and checked >= 80, (unknown, checked)


def kept(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = t.loss(x, y)
    t.scaler.scale(loss).backward()
    return t.scaler.scale(loss).detach()


@pytest.mark.parametrize("exists", [False, True], ids=["first", "later"])
def test_a_micro_step_of_an_accumulation_leaves_scaled_gradients(exists: bool):
    training = Training.make(torch.optim.SGD, lr=0.1)
    if exists:
        for parameter in training.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    found = training.degrees(kept)
    assert found.outputs["0.weight.grad"] == ONCE
    assert found.notes == ("The step returns result0 multiplied by the loss scale.",)


def hand_clipped(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Clips scaled gradients by a scaled threshold, which is right."""
    t.scaled_backward(x, y)
    gradients = [p.grad for p in t.model.parameters() if p.grad is not None]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    share = (1.5 * t.scaler.get_scale() / (norm + 1e-6)).clamp(max=1.0)  # here
    for gradient in gradients:
        gradient.mul_(share)
    t.end()


def test_a_threshold_may_be_scaled_in_place_of_the_gradients():
    found = Training.make(torch.optim.SGD, lr=0.1).degrees(hand_clipped)
    assert found.notes == (
        f"step (forward), {line_of(hand_clipped, 'here')}: 1e-06 is taken for a guard against a "
        "division by zero beside a value that is multiplied by the loss scale.",
    )


def clipped_scaled(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = t.scaled_backward(x, y)
    norm = nn.utils.clip_grad_norm_(t.model.parameters(), 2.0 * t.scaler.get_scale())  # here
    t.end()
    return loss.detach(), norm


def test_clip_grad_norm_takes_a_scaled_threshold():
    found = Training.make(torch.optim.SGD, lr=0.1).degrees(clipped_scaled)
    assert found.notes == (
        f"step (optimizer), {line_of(clipped_scaled, 'here')}: 1e-06 is taken for a guard against "
        "a division by zero beside a value that is multiplied by the loss scale.",
        "The step returns result1 multiplied by the loss scale.",
    )


def test_a_scaled_threshold_clips_as_eager_pytorch_does():
    ours, theirs = (Training.make(torch.optim.SGD, lr=0.1) for _ in range(2))
    for training in (ours, theirs):
        training.model[3].p = 0.0
    train = amp_ir.jit(
        lambda x, y: clipped_scaled(ours, x, y),
        model=ours.model,
        optimizer=ours.optimizer,
        scaler=ours.scaler,
    )
    for _ in range(3):
        got, expected = train(*ours.batch), clipped_scaled(theirs, *theirs.batch)
        assert expected[1] > 0.1 * theirs.scaler.get_scale()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        ours.model.state_dict(), theirs.model.state_dict(), rtol=1e-4, atol=1e-5
    )


def gan_step(models: list[nn.Module], optimizers: list[Any], scalers: list[Any]) -> Step:
    """Two models and optimizers; one scaler for both, or one for each."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        first, second = models[0](x), models[1](x)
        losses = [
            functional.cross_entropy(2 * first + 3 * second, y),
            functional.cross_entropy(3 * first - 5 * second, y),
        ]
        for k, loss in enumerate(losses):
            scalers[k % len(scalers)].scale(loss).backward(retain_graph=not k)
        scalers[0].unscale_(optimizers[0])
        for k, optimizer in enumerate(optimizers):
            scalers[k % len(scalers)].step(optimizer)
        for scaler in scalers:
            scaler.update()

    return step


def gan_degrees(make_step: Callable[..., Step], count: int) -> ScaleDegrees:
    torch.manual_seed(0)
    models = [nn.Linear(6, 3), nn.Linear(6, 3)]
    optimizers = [torch.optim.Adam(model.parameters()) for model in models]
    scalers = [amp_ir.GradScaler() for _ in range(count)]
    mod, _ = amp_ir.trace_step(
        make_step(models, optimizers, scalers),
        (torch.randn(4, 6), torch.randint(0, 3, (4,))),
        model=models,
        optimizer=optimizers,
        scaler=scalers if count > 1 else scalers[0],
    )
    return check_scale_degrees(mod)


def test_two_models_losses_and_optimizers_share_a_scaler():
    assert gan_degrees(gan_step, 1).notes == ()


def apart(models: list[nn.Module], optimizers: list[Any], scalers: list[Any]) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(functional.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    return step


def test_each_loss_may_have_a_scaler_of_its_own():
    found = gan_degrees(apart, 2)
    assert found.notes == ()
    assert found.outputs["scaler1.scale"] == Degree.of("scaler1")


def test_gradients_of_two_scalers_must_not_meet():
    with pytest.raises(LossScaleError) as error:
        gan_degrees(gan_step, 2)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("this step uses its loss scale wrongly, ")
    assert "relax.add combines a gradient, multiplied by the loss scale of scaler" in lines[1]


# Wrong uses: (program, optimizer, its options, message after the place, phase).

UNSCALE_FIRST = (
    "The gradients are still multiplied by the loss scale here: call scaler.unscale_(optimizer) "
    "before this line, or move the line after the block of amp_ir.scale_loss"
)
STEP_BY_SCALER = (
    "The gradients are still multiplied by the loss scale here: call scaler.step(optimizer) "
    "instead of optimizer.step()"
)
SCALE_ONCE = (
    "Scale the loss once, scaler.scale(loss).backward(), and leave it to unscale_ or step of the "
    "same scaler to divide its gradients by the scale, once"
)
DIVIDE_FIRST = (
    "Divide by the scale before this line: multiply what torch.autograd.grad returned by "
    "1.0 / scaler.get_scale(); for the .grad of parameters call scaler.unscale_(optimizer)"
)
SCALED, PLAIN = "multiplied by the loss scale", "not multiplied by the loss scale"


def clip_before_unscale(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    nn.utils.clip_grad_norm_(t.model.parameters(), 2.0)  # here
    t.end()


def test_the_scale_of_another_scaler_is_named():
    def crossed(models: list[nn.Module], optimizers: list[Any], scalers: list[Any]) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            for k, model in enumerate(models):
                optimizers[k].zero_grad()
                scalers[k].scale(functional.cross_entropy(model(x), y)).backward()
            for k in (0, 1):
                scalers[k].step(optimizers[1 - k])
                scalers[k].update()

        return step

    with pytest.raises(LossScaleError) as error:
        gan_degrees(crossed, 2)
    assert (
        "amp_ir.all_finite divides a gradient, multiplied by the loss scale of scaler1, by the "
        "loss scale of scaler0"
    ) in str(error.value)


def clip_value_before_unscale(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    nn.utils.clip_grad_value_(t.model.parameters(), 0.5)  # here
    t.end()


def penalty_on_scaled(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    loss = t.loss(x, y)
    parameters = list(t.model.parameters())
    scaled = torch.autograd.grad(t.scaler.scale(loss), parameters, create_graph=True)
    norm = sum(grad.pow(2).sum() for grad in scaled) ** 0.5
    loss = loss + norm  # here
    t.scaler.scale(loss).backward()
    t.end()
    return loss.detach()


def clamped_in_a_hook(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    out = t.model(x)  # here
    out.register_hook(lambda grad: grad.clamp(max=0.01))
    t.scaler.scale(functional.cross_entropy(out, y)).backward()
    t.end()


def clamped_by_the_scale(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    out = t.model(x)
    out.register_hook(lambda grad: grad.clamp(max=0.01 * t.scaler.get_scale()))
    t.scaler.scale(functional.cross_entropy(out, y)).backward()
    t.end()


def test_a_hook_clamps_by_the_scale_as_the_error_says():
    with pytest.raises(LossScaleError) as error:
        Training.make(torch.optim.SGD, lr=0.1).degrees(clamped_in_a_hook)
    assert str(error.value) == (
        "this step uses its loss scale wrongly, 1 place:\n"
        f"  1. 4 (backward), {line_of(clamped_in_a_hook, 'here')}: relax.minimum compares a "
        f"gradient, {SCALED}, with 0.01, {PLAIN}. Gradients are still multiplied by the loss scale "
        "in a backward pass, so in hooks: multiply the number by scaler.get_scale()"
    )
    assert Training.make(torch.optim.SGD, lr=0.1).degrees(clamped_by_the_scale).notes == ()


def plain_step(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    t.optimizer.step()  # here


def sum_of_scaled_and_plain(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    out = t.model(x)
    loss = t.scaler.scale(functional.cross_entropy(out, y)) + out.square().mean()  # here
    loss.backward()
    t.end()
    return loss.detach()


def never_scaled(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    t.loss(x, y).backward()
    t.scaler.step(t.optimizer)  # here
    t.scaler.update()


def scaled_twice(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.optimizer.zero_grad()
    (t.scaler.scale(t.loss(x, y)) * t.scaler.get_scale()).backward()
    t.scaler.step(t.optimizer)  # here
    t.scaler.update()


def plain_update_by_hand(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    with torch.no_grad():
        for parameter in t.model.parameters():
            assert parameter.grad is not None
            parameter.sub_(0.1 * parameter.grad)  # here


SGD, ADAMW = (torch.optim.SGD, {"lr": 0.1}), (torch.optim.AdamW, {"lr": 0.1})
DECAY = (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1})
WRONG = [
    (
        clip_before_unscale,
        SGD,
        "optimizer",
        "relax.minimum compares a value computed from gradients, divided by the loss scale, with "
        f"1, {PLAIN}. {UNSCALE_FIRST}",
    ),
    (
        clip_value_before_unscale,
        SGD,
        "optimizer",
        f"relax.maximum compares a gradient, {SCALED}, with -0.5, {PLAIN} (and 5 more ops of this "
        f"line). {UNSCALE_FIRST}",
    ),
    (
        penalty_on_scaled,
        SGD,
        "forward",
        f"relax.add combines a value, {PLAIN}, and a value computed from gradients, {SCALED}. "
        f"{DIVIDE_FIRST}",
    ),
    (
        plain_step,
        SGD,
        "optimizer",
        f"relax.add combines 0.weight, {PLAIN}, and a value computed from gradients, {SCALED} (and "
        f"5 more ops of this line). {STEP_BY_SCALER}",
    ),
    (
        plain_step,
        DECAY,
        "optimizer",
        f"relax.add combines a gradient, {SCALED}, and a value, {PLAIN} (and 5 more ops of this "
        f"line). {STEP_BY_SCALER}",
    ),
    (
        plain_step,
        ADAMW,
        "optimizer",
        f"relax.subtract combines a gradient, {SCALED}, and optimizer0.0.weight.exp_avg, {PLAIN} "
        f"(and 11 more ops of this line). {STEP_BY_SCALER}",
    ),
    (
        sum_of_scaled_and_plain,
        SGD,
        "forward",
        f"relax.add combines a value, {SCALED}, and a value, {PLAIN}. Compute with values that are "
        "not scaled, and scale the result: scaler.scale(a + b), not scaler.scale(a) + b",
    ),
    (
        never_scaled,
        SGD,
        "optimizer",
        f"amp_ir.all_finite divides a gradient, {PLAIN}, by the loss scale (and 6 more ops of this "
        f"line). {SCALE_ONCE}",
    ),
    (
        scaled_twice,
        SGD,
        "optimizer",
        "amp_ir.all_finite divides a gradient, multiplied by the square of the loss scale, by the "
        f"loss scale (and 6 more ops of this line). {SCALE_ONCE}",
    ),
    (
        plain_update_by_hand,
        SGD,
        "forward",
        f"relax.subtract combines 0.weight, {PLAIN}, and a value computed from gradients, {SCALED} "
        f"(and 5 more ops of this line). {DIVIDE_FIRST}",
    ),
]


@pytest.mark.parametrize(
    ("program", "optimizer", "phase", "message"), WRONG, ids=[f"{w[0].__name__}-{k}"
    for k, w in enumerate(WRONG)]
)  # fmt: skip
def test_a_wrong_program_is_refused_at_its_line(program, optimizer, phase, message):
    kind, options = optimizer
    with pytest.raises(LossScaleError) as error:
        Training.make(kind, **options).degrees(program)
    assert str(error.value) == (
        "this step uses its loss scale wrongly, 1 place:\n"
        f"  1. step ({phase}), {line_of(program, 'here')}: {message}"
    )


def test_a_refused_step_has_changed_nothing_and_runs_eagerly():
    training = Training.make(torch.optim.AdamW)
    model, scaler = training.model, training.scaler
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train = amp_ir.jit(
        lambda x, y: clip_before_unscale(training, x, y),
        model=model,
        optimizer=training.optimizer,
        scaler=scaler,
    )
    assert not train.skipped
    with pytest.raises(StateError, match="has not run yet"):
        _ = train.last
    generator = torch.get_rng_state()
    with pytest.raises(LossScaleError):
        train(*training.batch)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert not training.optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert scaler.get_scale() == 2.0**16
    clip_before_unscale(training, *training.batch)


def test_a_jit_step_says_what_became_of_its_last_run():
    training = Training.make(torch.optim.SGD, lr=0.1)
    train = amp_ir.jit(
        lambda x, y: typical(training, x, y),
        model=training.model,
        optimizer=training.optimizer,
        scaler=training.scaler,
    )
    train(*training.batch)
    assert not train.skipped
    x, y = training.batch
    train(torch.full_like(x, float("nan")), y)
    assert train.skipped and train.last.skipped and train.last.step == 1


def silent_penalty(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    """As penalty_on_scaled, but the wrong sum is returned to nobody, and so not in the graph."""
    penalty_on_scaled(t, x, y)


def test_a_penalty_is_found_where_its_gradients_meet_too():
    with pytest.raises(LossScaleError) as error:
        Training.make(torch.optim.SGD, lr=0.1).degrees(silent_penalty)
    text = str(error.value)
    assert "(backward)" in text
    assert text.endswith(
        "One of them comes through gradients that were still scaled when a loss was computed from "
        "them, as a gradient penalty does: multiply what torch.autograd.grad returned by "
        "1.0 / scaler.get_scale() first"
    )


def never_cleared(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaler.scale(t.loss(x, y)).backward()
    t.end()


def test_unscaled_gradients_that_the_next_call_would_add_to_get_a_note():
    """The step cannot see whether the user clears them between the calls."""
    training = Training.make(torch.optim.SGD, lr=0.1)
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert training.degrees(never_cleared).notes == (
        "0.weight.grad, 0.bias.grad, 1.weight.grad and 3 more must be cleared before the next "
        "call, as optimizer.zero_grad() does: the step leaves unscaled gradients there, and adds "
        "scaled ones.",
    )


def test_a_kept_gradient_of_another_degree_gets_the_note_too():
    step = Steps()
    grad = step.input("w.grad", Role.GRADIENT, (3,))
    weight = step.input("w", Role.PARAMETER, (3,))

    def body(builder: relax.BlockBuilder) -> dict[tuple[str, Role], relax.Expr]:
        free = builder.emit(call_op("amp_ir.unscale", [grad, step.scales[0]]))
        new = builder.emit(op.subtract(weight, free))
        return {("w", Role.PARAMETER): new, ("w.grad", Role.GRADIENT): free}

    (note,) = check_scale_degrees(step.finish(body)).notes
    assert note.startswith("w.grad must be cleared before the next call")


def update_alone(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The last part of an accumulation: all gradients come from earlier calls."""
    nn.utils.clip_grad_norm_(t.model.parameters(), 2.0)  # here
    t.end()
    t.optimizer.zero_grad(set_to_none=False)


def test_kept_gradients_that_are_clipped_first_are_blamed_on_the_clipping():
    """Taken for unscaled there, they would be blamed on the scaler's step."""
    training = Training.make(torch.optim.SGD, lr=0.1)
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(LossScaleError) as error:
        training.degrees(update_alone)
    assert str(error.value).startswith(
        "this step uses its loss scale wrongly, 1 place:\n"
        f"  1. step (optimizer), {line_of(update_alone, 'here')}: relax.minimum compares"
    )
    assert str(error.value).endswith(UNSCALE_FIRST)


def two_errors(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    nn.utils.clip_grad_norm_(list(t.model.parameters())[:1], 2.0)  # first
    nn.utils.clip_grad_value_(list(t.model.parameters())[1:], 0.5)  # second
    t.end()


def test_every_root_cause_is_listed_once_and_no_cascade():
    with pytest.raises(LossScaleError) as error:
        Training.make(torch.optim.AdamW).degrees(two_errors)
    lines = str(error.value).splitlines()
    assert lines[0] == "this step uses its loss scale wrongly, 2 places:"
    assert [line.split(": ")[0] for line in lines[1:]] == [
        f"  1. step (optimizer), {line_of(two_errors, 'first')}",
        f"  2. step (optimizer), {line_of(two_errors, 'second')}",
    ]


# What is merely returned is not refused.


def reported(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    loss = t.scaled_backward(x, y)
    metric = t.scaler.scale(loss) + 3.0  # here
    growth = torch.exp(t.scaler.scale(loss))  # exp
    t.end()
    return metric.detach(), growth.detach()


def test_what_no_state_depends_on_gets_a_note():
    found = Training.make(torch.optim.SGD, lr=0.1).degrees(reported)
    cannot = "Cannot tell how the loss scale enters {}: step (forward), {}: {}."
    assert found.notes == (
        cannot.format(
            "result0",
            line_of(reported, "here"),
            f"relax.add combines a value, {SCALED}, and 3, {PLAIN}",
        ),
        cannot.format(
            "result1", line_of(reported, "exp"), "relax.exp of a value that is " + SCALED
        ),
    )


def squashed(t: Training, x: torch.Tensor, y: torch.Tensor) -> Any:
    t.scaled_backward(x, y)
    for parameter in t.model.parameters():
        assert parameter.grad is not None
        parameter.grad.tanh_()  # here
    t.end()


def test_a_state_whose_degree_is_unknown_is_reported_and_not_refused():
    (note,) = Training.make(torch.optim.SGD, lr=0.1).degrees(squashed).notes
    assert note == (
        "Cannot tell how the loss scale enters 0.weight, 0.bias, 1.weight and 9 more: "
        f"step (forward), {line_of(squashed, 'here')}: relax.tanh of a gradient that is {SCALED}."
    )


# On modules made by hand.


def test_a_step_without_a_scaler_is_not_read(monkeypatch: pytest.MonkeyPatch):
    def refuse(_ir: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(scale_degree, "read_step", refuse)
    step = Steps()
    step.specs.clear()
    step.vars.clear()
    x = step.input("batch0", Role.BATCH, (3,))
    mod = step.finish(lambda builder: {("result0", Role.RESULT): op.exp(x)})
    assert check_scale_degrees(mod) == ScaleDegrees()


def test_a_buffer_that_keeps_a_scaled_value_is_refused():
    step = Steps()
    buffer = step.input("mean_loss", Role.BUFFER, ())
    loss = step.input("batch0", Role.BATCH, ())

    def body(builder: relax.BlockBuilder) -> dict[tuple[str, Role], relax.Expr]:
        scaled = at(op.multiply(loss, step.scales[0]), "forward", 7, "head")
        return {("mean_loss", Role.BUFFER): builder.emit(scaled)}

    with pytest.raises(LossScaleError) as error:
        check_scale_degrees(step.finish(body))
    assert buffer.name == "p_mean_loss"
    assert str(error.value) == (
        "this step uses its loss scale wrongly, 1 place:\n"
        f"  1. head (forward), train.py:7: mean_loss is {SCALED} after the step, and {PLAIN} "
        "before it. The loss scale changes between calls, so state must not depend on it: divide "
        "by scaler.get_scale() before it is stored"
    )


def test_the_degree_of_a_kept_gradient_is_told_by_its_first_use():
    step = Steps()
    grad = step.input("w.grad", Role.GRADIENT, (3,))
    weight = step.input("w", Role.PARAMETER, (3,))

    def body(builder: relax.BlockBuilder) -> dict[tuple[str, Role], relax.Expr]:
        free = builder.emit(call_op("amp_ir.unscale", [grad, step.scales[0]]))
        return {
            ("w", Role.PARAMETER): builder.emit(op.subtract(weight, free)),
            ("w.grad", Role.GRADIENT): builder.emit(op.multiply(grad, relax.const(0.0))),
        }

    found = check_scale_degrees(step.finish(body))
    assert found.degree["p_w_grad"] == ONCE
    assert found.outputs == {"w": ZERO, "w.grad": Special.ANY}


def test_a_kept_gradient_that_nothing_uses_stays_open():
    step = Steps()
    grad = step.input("w.grad", Role.GRADIENT, (3,))
    found = check_scale_degrees(step.finish(lambda _: {("result0", Role.RESULT): op.abs(grad)}))
    assert found.outputs == {"result0": Degree.of("w.grad")}
    assert found.notes == ()


def test_halves_and_quotients_of_degrees():
    scale = Degree.of("scaler0")
    root = check_scale_degrees(call_step([torch.ones(3)], [1], op.sqrt)).outputs["result0"]
    assert root == scale.times(Fraction(1, 2))
    inverse = call_step([torch.ones(3)], [-2], op.rsqrt)
    assert check_scale_degrees(inverse).outputs["result0"] == scale


def test_the_solver_substitutes_and_refuses():
    solver = Solver()
    a, b = solver.new_unknown("a.grad"), solver.new_unknown("b.grad")
    assert solver.equate(a.times(2), b + ONCE)
    assert solver.is_open(solver.resolve(a))
    assert solver.equate(b, ONCE)
    assert solver.resolve(a) == ONCE
    assert not solver.equate(a, ZERO)


@pytest.mark.parametrize(
    ("degree", "text"),
    [
        (ZERO, "not multiplied by the loss scale"),
        (ONCE.times(-2), "divided by the square of the loss scale of scaler0"),
        (
            ONCE.times(Fraction(3, 2)) - Degree.of("scaler1"),
            "multiplied by the loss scale of scaler0 to the power 3/2 and divided by the loss "
            "scale of scaler1",
        ),
        (Degree.of("w.grad"), "multiplied by what w.grad is multiplied by"),
    ],
)
def test_degrees_in_words(degree: Degree, text: str):
    assert Words(["scaler0", "scaler1"]).of(degree) == text


def test_an_unknown_degree_spreads_but_not_through_finiteness():
    step = Steps()
    x = step.input("batch0", Role.BATCH, (3,))

    def body(builder: relax.BlockBuilder) -> dict[tuple[str, Role], relax.Expr]:
        odd = builder.emit(op.exp(builder.emit(op.multiply(x, step.scales[0]))))
        more = builder.emit(op.add(odd, odd))
        return {("a", Role.RESULT): more, ("b", Role.RESULT): builder.emit(op.isfinite(more))}

    found = check_scale_degrees(step.finish(body))
    assert isinstance(found.outputs["a"], Unknown)
    assert found.outputs["b"] == ZERO
