# SPDX-License-Identifier: Apache-2.0
"""Loops over time steps in Python become loops, with the values that PyTorch computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir import pipeline
from amp_ir.dialect.loop import NAME, loop_of
from amp_ir.ir import target as targets
from amp_ir.ir.dataflow import Dataflow

STEPS = 20
WIDTH = 8


class Decoder(nn.Module):
    """An attention decoder around an LSTMCell."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        memory = x[:, :5] * 2
        h = x.new_zeros(x.shape[0], x.shape[2])
        c, context, made = h, h, []
        for t in range(x.shape[1]):
            h, c = self.cell(torch.cat([x[:, t], context], 1), (h, c))
            weights = torch.softmax(torch.bmm(memory, self.query(h).unsqueeze(2)).squeeze(2), 1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            made.append(torch.tanh(self.out(torch.cat([h, context], 1))))
        return torch.stack(made, 1)


class OwnCell(nn.Module):
    """A gated cell of the user's own, with a residual; results are concatenated."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2 * WIDTH, WIDTH)
        self.new = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        h, made = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            both = torch.cat([x[:, t], h], -1)
            gate = torch.sigmoid(self.gate(both))
            h = self.norm(h + gate * torch.tanh(self.new(both)) + x[:, t])
            made.append(h)
        return torch.cat(made, 1).view(x.shape[0], x.shape[1], WIDTH)


class LastState(nn.Module):
    """Only the last state is read, and the input has a gradient."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        inputs = self.before(x).transpose(0, 1)
        h = torch.zeros_like(inputs[0])
        for one in inputs:
            h = torch.tanh(h @ self.weight + one)
        return h


class LossInEachStep(nn.Module):
    """The loss of a step is added in the loop."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h, y, loss = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), 0.0
        for t in range(x.shape[1] - 1):
            h = self.cell(x[:, t] + 0.5 * y, h)
            y = self.out(h)
            loss = loss + ((y - x[:, t + 1]) ** 2).mean()
        return loss / x.shape[1]


class Chunks(nn.Module):
    """A step reads a chunk of columns, and the state of before the last one is not read."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.decay = nn.Parameter(torch.rand(WIDTH) / 2)

    def forward(self, x):
        flat = x.flatten(1)
        h, total = flat[:, :WIDTH], 0.0
        for t in range(x.shape[1]):
            part = flat[:, t * WIDTH : (t + 1) * WIDTH]
            h = self.decay * h + torch.relu(part @ self.weight)
            total = total + h / x.shape[1]
        return total


def count_loops(ir):
    return [loop_of(call).length for call in Dataflow(ir).calls(NAME).values()]


def training(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    step.optimizer = optimizer
    return step


def relative(got, wanted):
    return max(
        ((p.double() - q).norm() / q.norm()).item()
        for p, q in zip(got.parameters(), wanted.parameters(), strict=True)
    )


MODELS = [Decoder, OwnCell, LastState, LossInEachStep, Chunks]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rows", [3, 4])
def test_three_steps_equal_pytorch_in_float64(kind, rows):
    torch.manual_seed(0)
    model = kind()
    exact = copy.deepcopy(model).double()
    step, exact_step = training(model), training(exact)
    train = amp_ir.jit(step, model=model, optimizer=step.optimizer)
    for _ in range(3):
        x = torch.randn(rows, STEPS, WIDTH)
        loss, wanted = train(x), exact_step(x.double())
        # float32 has 24 significant bits, and a value passes through some 20 x 10 roundings.
        assert abs(loss.item() - wanted.item()) <= 1e-5 * abs(wanted.item())
    assert relative(model, exact) < 1e-5


@pytest.mark.parametrize("kind", MODELS)
def test_bfloat16_is_as_exact_as_autocast(kind):
    torch.manual_seed(0)
    model = kind()
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    step, exact_step = training(model), training(exact)
    eager_step = training(eager)
    train = amp_ir.jit(step, model=model, optimizer=step.optimizer, amp_dtype="bfloat16")
    for _ in range(3):
        x = torch.randn(4, STEPS, WIDTH)
        train(x)
        exact_step(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            eager_step(x)
    # Of single roundings: eager's may cancel where ours do not.
    assert relative(model, exact) < 2 * relative(eager, exact) + 1e-4


@pytest.mark.parametrize("kind", MODELS)
def test_the_interpreter_runs_loops(kind):
    torch.manual_seed(0)
    model = kind()
    exact = copy.deepcopy(model).double()
    x = torch.randn(4, STEPS, WIDTH)
    mod, args = amp_ir.trace_model(model, (x,))
    assert count_loops(mod.ir)
    from amp_ir.ir.interpreter import interpret

    inputs = [mod.state[one.name] for one in mod.signature.inputs if one.is_state]
    values = interpret(mod, [*inputs, x], float_dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(values[0], exact(x.double()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", MODELS)
def test_the_program_does_not_grow_with_the_number_of_steps(kind):
    counts = []
    for length in (32, 40):
        torch.manual_seed(0)
        model = kind()
        step = training(model)
        mod, _ = amp_ir.trace_step(
            step, (torch.randn(4, length, WIDTH),), model=model, optimizer=step.optimizer
        )
        assert len(count_loops(mod.ir)) == 2
        counts.append(len(Dataflow(mod.ir).bindings))
    assert counts[0] == counts[1]


def test_a_body_that_depends_on_the_step_stays_as_it_is():
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = weight

        def forward(self, x):
            h = torch.zeros_like(x[:, 0])
            for t in range(x.shape[1]):
                h = torch.tanh(h @ self.weight + x[:, t] * float(t % 3))
            return h

    model = Odd()
    step = training(model)
    mod, _ = amp_ir.trace_step(
        step, (torch.randn(4, STEPS, WIDTH),), model=model, optimizer=step.optimizer
    )
    assert not count_loops(mod.ir)


def test_undoing_autocast_gives_the_loops_before():
    torch.manual_seed(0)
    model = Decoder()
    step = training(model)
    mod, args = amp_ir.trace_step(
        step, (torch.randn(4, STEPS, WIDTH),), model=model, optimizer=step.optimizer
    )
    back = amp_ir.autocast(mod, args, amp_dtype="bfloat16").without_casts()
    before = [dict(call.attrs) for call in Dataflow(mod.ir).calls(NAME).values()]
    after = [dict(call.attrs) for call in Dataflow(back.ir).calls(NAME).values()]
    assert len(Dataflow(back.ir).bindings) == len(Dataflow(mod.ir).bindings)
    assert [str(one["body"]) for one in before] == [str(one["body"]) for one in after]
    assert {str(one["uncast"]) for one in after} == {""}


class Tokens(nn.Module):
    """Teacher forcing: each step embeds a token, and has a loss on the next one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.cell = nn.LSTMCell(2 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 11)

    def forward(self, tokens):
        h = torch.zeros(tokens.shape[0], WIDTH, dtype=self.out.weight.dtype)
        c, loss = h, 0.0
        for t in range(tokens.shape[1] - 1):
            h, c = self.cell(torch.cat([self.embedding(tokens[:, t]), torch.tanh(h)], 1), (h, c))
            loss = loss + nn.functional.cross_entropy(self.out(h), tokens[:, t + 1])
        return loss / tokens.shape[1]


def test_tokens_are_checked_for_all_steps_at_once():
    torch.manual_seed(0)
    model = Tokens()
    exact = copy.deepcopy(model).double()
    step, exact_step = training(model), training(exact)
    tokens = torch.randint(0, 11, (4, STEPS + 4))
    mod, _ = amp_ir.trace_step(step, (tokens,), model=model, optimizer=step.optimizer)
    assert len(count_loops(mod.ir)) == 2
    train = amp_ir.jit(step, model=model, optimizer=step.optimizer)
    for _ in range(3):
        tokens = torch.randint(0, 11, (4, STEPS + 4))
        torch.testing.assert_close(train(tokens).double(), exact_step(tokens), rtol=1e-6, atol=0)
    assert relative(model, exact) < 1e-5
    before = [one.detach().clone() for one in model.parameters()]
    tokens[2, 9] = 11
    with pytest.raises(amp_ir.errors.IndexOutOfRangeError, match="11"):
        train(tokens)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)


def test_a_computed_index_unrolls_the_loop_and_says_so():
    class Greedy(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, WIDTH)
            self.out = nn.Linear(WIDTH, 11)

        def forward(self, x):
            made = []
            h = torch.zeros_like(x)
            for _ in range(STEPS):
                scores = self.out(torch.tanh(h + x))
                h = self.embedding(scores.argmax(1)) + h
                made.append(scores)
            return torch.stack(made)

    torch.manual_seed(0)
    model = Greedy()
    mod, args = amp_ir.trace_model(model, (torch.randn(3, WIDTH),))
    assert not count_loops(mod.ir)
    found = [note for note in mod.notes if "step by step" in note]
    assert len(found) == 1
    assert found[0].startswith("a loop of ")
    assert found[0].endswith(
        "is compiled step by step, which takes long, since each step computes indices, which are "
        "checked one by one. Do that for all steps at once, before or after the loop"
    )
    del args


def _notes_on(model, x):
    step = training(model)
    mod, _ = amp_ir.trace_step(step, (x,), model=model, optimizer=step.optimizer)
    assert not count_loops(mod.ir)
    return [note for note in mod.notes if "steps of a loop" in note]


class ThreeStepsBack(nn.Module):
    """Each step reads the value of two steps before the last one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        made = [x[:, 0], x[:, 1], x[:, 2]]
        for t in range(3, x.shape[1]):
            made.append(torch.tanh(made[-3] @ self.weight + torch.sigmoid(x[:, t])) * 0.5)
        return torch.stack(made, 1)


@torch.library.custom_op("amp_ir_loop_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5


@halve.register_fake
def _(x):
    return torch.empty_like(x)


halve.register_autograd(lambda _ctx, grad: halve(grad))


class CallsAnOpOfItsOwn(LastState):
    def forward(self, x):
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(halve(h @ self.weight) + torch.sigmoid(x[:, t]) * x[:, t])
        return h


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (ThreeStepsBack, "a step reads what a step before the last one made"),
        (CallsAnOpOfItsOwn, "each step calls amp_ir_loop_tests.halve"),
    ],
)
def test_a_long_loop_that_stays_unrolled_says_so_once(kind, reason):
    (note,) = _notes_on(kind(), torch.randn(2, 66, WIDTH))
    assert note.startswith("some ")
    assert " steps of a loop in " in note
    assert f"{__file__}:" in note
    assert note.endswith(f" are compiled one by one, which takes long, since {reason}")


def test_a_gpu_unrolls_loops_and_says_so():
    model = LastState()
    mod, _ = amp_ir.trace_model(model, (torch.randn(2, STEPS, WIDTH),))
    assert len(count_loops(mod.ir)) == 1
    planned = pipeline.lower(mod, target=targets.cuda("sm_90"))
    (note,) = [one for one in planned.dispatched if one.op == NAME]
    assert str(note).startswith(
        "amp_ir.loop: 1 call -> single steps, because the host calls the body of a loop, and a GPU "
        f"runs without it: the {STEPS} steps of the loop in step (forward), {__file__}:"
    )
    assert str(note).endswith(" are unrolled, which takes long to compile")


def test_what_is_carried_over_two_steps_is_carried_twice():
    class TwoBack(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x):
            before, h = x[:, 0], x[:, 1]
            for t in range(x.shape[1]):
                new = torch.tanh(self.norm(h) @ self.weight + torch.sigmoid(x[:, t])) + before
                before, h = h * 0.5, new
            return h

    # The value of two steps ago is carried as its half, of one step ago: a loop.
    model = TwoBack()
    step = training(model)
    mod, _ = amp_ir.trace_step(
        step, (torch.randn(2, 24, WIDTH),), model=model, optimizer=step.optimizer
    )
    assert count_loops(mod.ir)
