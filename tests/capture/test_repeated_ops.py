# SPDX-License-Identifier: Apache-2.0
"""What is captured does not depend on whether repeated ops are copied or traced one by one."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_ir.capture import call_templates, outcome_store, repeated_ops, replay
from amp_ir.capture.trace import capture_step
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.ir.location import META_KEY
from own_recurrence import language_training


def described(graph):
    """Each node of a graph: what it calls, on what, with which result, from where."""
    position = {node: k for k, node in enumerate(graph.nodes)}

    def of(val):
        if isinstance(val, torch.Tensor):
            return tuple(val.shape), val.stride(), val.dtype, str(val.device)
        return [of(one) for one in val] if isinstance(val, (list, tuple)) else val

    return [
        (
            node.op,
            node.op == "placeholder" or str(node.target),
            repr(torch.fx.map_arg((node.args, node.kwargs), lambda one: f"%{position[one]}")),
            repr(of(node.meta.get("val"))),
            node.meta.get(META_KEY),
        )
        for node in graph.nodes
    ]


def captured(step, batch, **owners):
    return described(capture_step(step, batch, **owners).graph.graph)


def forget_earlier_captures():
    repeated_ops.OUTCOMES.clear()
    call_templates.TEMPLATES.clear()


def both_ways(capture):
    """The capture with repetitions copied, those of earlier captures too, and without."""
    forget_earlier_captures()
    quick = capture()
    assert capture() == quick
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeated_ops, "_is_possible", False)
        patch.setattr(replay, "_is_possible", False)
        slow = capture()
    return quick, slow


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_captured_the_same(name):
    def capture():
        training = WORKLOADS[name].make(small=True, dropout=0.1)
        return captured(
            training.step, training.batch, model=training.model, optimizer=training.optimizer
        )

    quick, slow = both_ways(capture)
    assert quick == slow


@pytest.mark.parametrize("name", WORKLOADS)
def test_another_batch_is_captured_as_a_first_one(name):
    training = WORKLOADS[name].make(small=True)
    fewer = tuple(one[: len(one) // 2].contiguous() for one in training.batch)

    def capture(batch):
        return captured(training.step, batch, model=training.model, optimizer=training.optimizer)

    forget_earlier_captures()
    first = capture(fewer)
    capture(training.batch)
    assert capture(fewer) == first
    forget_earlier_captures()
    capture(training.batch)
    assert capture(fewer) == first


def numbers_of(optimizer, *, lr, weight_decay):
    """The captured step of an optimizer with these numbers."""
    model = torch.nn.Linear(3, 2)
    made = optimizer(model.parameters(), lr=lr, weight_decay=weight_decay)

    def step(x):
        made.zero_grad()
        model(x).square().mean().backward()
        made.step()

    step(torch.randn(4, 3))
    return captured(step, (torch.randn(4, 3),), model=model, optimizer=made)


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.RAdam],
)
def test_numbers_are_those_of_the_step_and_not_of_an_earlier_capture(optimizer):
    wanted = []
    for lr, weight_decay in ((1e-3, 0.1), (1.0, 0.0), (0.5, 1.0), (0.25, 0.5)):
        forget_earlier_captures()
        wanted.append(numbers_of(optimizer, lr=lr, weight_decay=weight_decay))
    found = [
        numbers_of(optimizer, lr=lr, weight_decay=weight_decay)
        for lr, weight_decay in ((1e-3, 0.1), (1.0, 0.0), (0.5, 1.0), (0.25, 0.5))
    ]
    assert found == wanted


def test_constants_of_earlier_captures_are_not_taken():
    def step_with(number):
        def step(x):
            return (
                torch.add(x, x, alpha=number) + torch.lerp(x, x * 2, number) + x.mul(number),
                torch.addcmul(x, x, x, value=number) + torch.addcdiv(x, x, x, value=number),
                torch.div(x, number) + x.clamp(max=number) + x.pow(number),
            )

        return step

    # NaN is not here: it is not equal to itself. Half is 1 - half, which a lerp computes with.
    numbers = [0.5, 0.0, -0.0, 0.25, 0.75, 1.0, -1.0, 2.0, float("inf")]
    x = torch.randn(4, 3)
    wanted = []
    for number in numbers:
        forget_earlier_captures()
        wanted.append(captured(step_with(number), (x,), model=torch.nn.Identity()))
    assert [
        captured(step_with(number), (x,), model=torch.nn.Identity()) for number in numbers
    ] == wanted


def test_views_of_written_tensors_come_in_one_order():
    """Ranks compare their programs; one of them may have captured something before."""

    def step(x, *, is_written):
        y = x.clone()
        if is_written:
            y.clamp_(-0.5, 0.5)
        return torch.outer(y.flatten()[:9], x.flatten()[:5])

    def capture(is_written):
        x = torch.randn(3, 4)
        bound = functools.partial(step, is_written=is_written)
        return captured(bound, (x,), model=torch.nn.Identity())

    forget_earlier_captures()
    first = capture(True)
    forget_earlier_captures()
    capture(False)
    assert capture(True) == first


def test_a_setting_that_chooses_kernels_is_told_apart():
    def step(x):
        return torch.arange(3.0) * x.mean()

    forget_earlier_captures()
    single = captured(step, (torch.ones(2),), model=torch.nn.Identity())
    torch.set_default_dtype(torch.float64)
    try:
        double = captured(step, (torch.ones(2),), model=torch.nn.Identity())
    finally:
        torch.set_default_dtype(torch.float32)
    assert "float64" in repr(double) and "float64" not in repr(single)


def test_the_store_is_bounded(monkeypatch):
    monkeypatch.setattr(outcome_store, "_MOST_OUTCOMES", 3)
    store = outcome_store.OutcomeStore()
    for number in range(5):
        store.put((number,), number)
    assert [store.get((number,)) for number in range(5)] == [None, None, 2, 3, 4]


def test_most_of_a_recurrence_is_copied(monkeypatch):
    seen = {"traced": 0, "copied": 0}
    traced, copied = replay.Replay._traced, replay.Replay._copied

    def count(kind, function):
        def counted(self, *args):
            seen[kind] += 1
            return function(self, *args)

        return counted

    monkeypatch.setattr(replay.Replay, "_traced", count("traced", traced))
    monkeypatch.setattr(replay.Replay, "_copied", count("copied", copied))
    training = language_training()
    captured(training.step, training.batch, model=training.model, optimizer=training.optimizer)
    # 4 time steps and 2 layers, of which one has to be traced, and what is there once.
    assert seen["copied"] > seen["traced"]


class _Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("table", torch.zeros(4, 4))


def gradients_kept(model, x):
    for layer in model.layers:
        x = torch.relu_(layer(x))
    x.sum().backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def accumulated(model, x):
    for part in x.split(1):
        model.layers[0](part).square().sum().backward()
    for part in x.unbind(0):
        model.layers[1](part * part).sum().backward()


def written_through_views(model, x):
    with torch.no_grad():
        for k in range(4):
            model.table[k] = x[0] * k
            model.table.t()[k].add_(x[1])
            model.seen.add_(model.table[k])
    return model.table @ x.t()


def read_after_a_write(model, x):
    y = x + 1
    views = [y[k] for k in range(2)] + [y.t(), y.view(-1)]
    before = [view * 2 for view in views]
    y.mul_(3)
    after = [view * 2 for view in views]
    z = x * 2
    row = z[0]
    z.add_(1)
    again = z[0]
    again.add_(1)
    return [*before, *after, row + 1, again + 1, z + 1]


def pieces_written(model, x):
    pieces = []
    for _ in range(3):
        a, b = (x + 1).chunk(2, dim=1)
        a, b = a.sigmoid_(), b.tanh_()
        pieces.append(torch.cat([a, b], 1) * x)
    c, d = torch.split_with_sizes_copy(x, [1, 3], 1)
    return [*pieces, c.add_(1), d.add_(1), c + d.sum()]


def alike_but_not_equal(model, x):
    one, row, column = x[:1], x[1:2], x[:, :2]
    numbers = [x * 1, x * 1.0, x * True, x * 0.0, x * -0.0]
    views = [one + row, row + row, row + one, column.contiguous(), column + 0, one.t(), row.t()]
    shapes = [x.sum(0), x.sum(0, keepdim=True), x.sum(1), x.t() @ x, x.t() @ x.t().t()]
    # Views that differ by where they begin.
    places = [x[:1] * (1 + view.storage_offset()) for view in (one.t(), row.t())]
    # The default dtype is what a whole number divided by another has.
    halves = x.long() / 2
    return [*numbers, *views, *shapes, *places, halves, torch.zeros_like(x), torch.zeros_like(one)]


def selected(model, x):
    steps = [x[k] for k in (0, 1, -1, -2)]
    across = [x.select(1, k) for k in (0, 3)] + [x.select(-1, k) for k in (1, -1)]
    places = [x[:1] * (1 + one.storage_offset()) for one in (*steps, *across)]
    twice = [x.t()[k][1] + x[1, k] for k in range(3)]
    # A view of a view: its layout depends on where that begins.
    again = [one.as_strided((2,), (1,)) + 1 for one in (x[0], x[1])]
    y = x * 2
    for k in range(2):
        y[k].add_(x[1 - k])
    return [*steps, *across, *places, *twice, *again, y]


def detached(model, x):
    y = x * 2
    known = y.detach()
    row = known[1].detach()
    before = [known + 1, row + 1]
    known.add_(1)
    after = [known + y, row + 1]
    y.detach().mul_(3)
    weight = model.layers[0].weight
    loss = (weight.detach() * weight).sum() + (weight @ x.t()).detach().sum()
    loss.backward()
    return [*before, *after, y, known, row, y.detach().detach() + 1, loss]


def constants_and_randomness(model, x):
    weights = [torch.tensor([1.0, 2.0, 3.0, 4.0]) for _ in range(2)]
    noise = [torch.rand_like(x) for _ in range(2)]
    assert float(torch.tensor(2.0) * torch.tensor(3.0)) == 6.0
    return [x * weights[0] + noise[0], x * weights[1] + noise[1]]


@pytest.mark.parametrize(
    "body",
    [
        gradients_kept,
        accumulated,
        written_through_views,
        read_after_a_write,
        pieces_written,
        alike_but_not_equal,
        selected,
        detached,
        constants_and_randomness,
    ],
    ids=lambda body: body.__name__,
)
def test_what_writes_and_what_only_looks_alike_is_captured_the_same(body):
    def capture():
        model = _Model()
        return captured(lambda x: body(model, x), (torch.ones(2, 4),), model=model)

    quick, slow = both_ways(capture)
    assert quick == slow


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_optimizer_is_captured_the_same(kind, foreach):
    def capture():
        model = _Model()
        optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.01, foreach=foreach)

        def step(x):
            for layer in model.layers:
                x = layer(x)
            loss = x.square().sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return captured(step, (torch.ones(2, 4),), model=model, optimizer=optimizer)

    quick, slow = both_ways(capture)
    assert quick == slow


_MAKERS = {
    "add": lambda a, b: a + b,
    "double": lambda a, b: a * 2,
    "square": lambda a, b: a * a,
    "transpose": lambda a, b: a.t(),
    "row": lambda a, b: a[0].expand(3, 3),
    "rows": lambda a, b: a[1:],
    "flat": lambda a, b: a.reshape(-1)[:9],
    "parts": lambda a, b: torch.cat([part + 1 for part in a.split(1)]),
}
_WRITERS = {
    "add_": lambda a, b: a.add_(b),
    "relu_": lambda a, b: a.relu_(),
    "copy_": lambda a, b: a.copy_(b),
    "row_": lambda a, b: a[0].mul_(2),
    "column_": lambda a, b: a.t()[0].add_(1),
    "fill_": lambda a, b: a.fill_(1.0),
}


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from([*_MAKERS, *_WRITERS]), st.integers(0, 99), st.integers(0, 99)),
        min_size=4,
        max_size=24,
    )
)
def test_random_programs_of_views_and_writes_compute_what_eager_does(program):
    """Functionalization may name a view twice; what a graph computes is what counts."""

    def step(x):
        pool = [x * 1, x * 2]
        for name, first, second in program:
            a, b = pool[first % len(pool)], pool[second % len(pool)]
            if name in _WRITERS:
                if a.is_contiguous() and a.shape == b.shape == (3, 3):
                    pool.append(_WRITERS[name](a, b.clone()))
            elif a.shape == b.shape == (3, 3):
                pool.append(_MAKERS[name](a, b))
        return [one + 0 for one in pool]

    x = torch.arange(9.0).reshape(3, 3) - 4
    graph = capture_step(step, (x,), model=torch.nn.Flatten()).graph
    for got, wanted in zip(torch.fx.Interpreter(graph).run(x), step(x), strict=True):
        assert torch.equal(got, wanted)
