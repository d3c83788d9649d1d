# SPDX-License-Identifier: Apache-2.0
"""What a refused step is told to do works: the same step, changed so, trains as eager does.

Each kind of refusal has a page in docs/refused too, whose programs tests/test_readme.py runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import amp_ir
from amp_ir.errors import AmpIrError

Step = Callable[..., Any]


class Setting:
    """A model, an optimizer and what steps of this file use beside them."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(4, 3)
        self.other = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.outside = torch.zeros(3, 2)[:, 0]
        self.model.register_buffer("seen", torch.zeros(3))
        self.model.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.head, self.scaled = self.model.weight[:1], self.model.weight * 2
        self.model.register_buffer("queue", torch.zeros(5, 3))
        self.transposed = {"weight": torch.zeros(4, 3).t()}
        self.averages = {"weight": torch.zeros(3, 4)}
        self.copied = {name: one.clone() for name, one in self.model.state_dict().items()}
        self.kept: list[torch.Tensor] = []
        self.calls = 0

    def train(self, loss: torch.Tensor) -> torch.Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x), torch.tensor([0, 1, 2, 0]))


@attrs.frozen
class Hint:
    """A step that is refused, a part of what it is told, and the step that does so.

    `after` runs after each call of the changed step, `models` names what it trains.
    """

    refused: Callable[[Setting, torch.Tensor], Any]
    told: str
    changed: Callable[..., Any]
    after: Callable[[Setting, Any], Any] = lambda _setting, _result: None
    models: tuple[str, ...] = ("model",)
    extra: Callable[[int], tuple[Any, ...]] = lambda _k: ()


def write_outside(s: Setting, x: torch.Tensor) -> Any:
    s.outside.add_(s.model(x).detach().mean(0))
    return s.train(s.loss(x))


def write_buffer(s: Setting, x: torch.Tensor) -> Any:
    s.model.seen.add_(s.model(x).detach().mean(0))
    return s.train(s.loss(x))


def reads_the_loss_before(s: Setting, x: torch.Tensor) -> Any:
    loss = s.loss(x) * (1 + s.calls)
    s.calls = loss.item()
    return s.train(loss)


def updates_the_loss_before(s: Setting, x: torch.Tensor) -> Any:
    loss = s.loss(x) * (1 + s.model.seen[0])
    s.model.seen.copy_(loss.detach().expand(3))
    return s.train(loss)


def goes_on_into_the_call_before(s: Setting, x: torch.Tensor) -> Any:
    y = s.model(x) + s.averages.get("output", torch.zeros(4, 3))
    s.averages["output"] = y
    return s.train(F.cross_entropy(y, torch.tensor([0, 1, 2, 0])))


def detaches_for_the_next_call(s: Setting, x: torch.Tensor) -> Any:
    y = s.model(x) + s.averages.get("output", torch.zeros(4, 3))
    s.averages["output"] = y.detach()
    return s.train(F.cross_entropy(y, torch.tensor([0, 1, 2, 0])))


def keeps_a_view(s: Setting, x: torch.Tensor) -> Any:
    s.averages["first"] = s.model.weight[0]
    return s.train(s.loss(x))


def keeps_a_copy(s: Setting, x: torch.Tensor) -> Any:
    s.averages["first"] = s.model.weight[0].clone()
    return s.train(s.loss(x))


def selects_if_any(s: Setting, x: torch.Tensor) -> Any:
    y, mask = x * 1, x[:, 0] > 0
    if mask.any():
        y[mask] = x[mask].tanh()
    return s.train(s.loss(y))


def selects(s: Setting, x: torch.Tensor) -> Any:
    y, mask = x * 1, x[:, 0] > 0
    y[mask] = x[mask].tanh()
    return s.train(s.loss(y))


def averaged(s: Setting, x: torch.Tensor, averages: Any) -> Any:
    loss = s.train(s.loss(x))
    with torch.no_grad():
        averages["weight"].mul_(0.5).add_(s.model.weight, alpha=0.5)
    return loss, averages["weight"].clone()


def read_place(s: Setting, x: torch.Tensor) -> Any:
    k = int(s.model.count)
    s.model.queue[k : k + 2] = s.model(x).detach()[:2]
    s.model.count[...] = (k + 2) % 4
    return s.train(s.loss(x) + s.model.queue.square().mean() * s.model.weight.sum())


def keep_place(s: Setting, x: torch.Tensor) -> Any:
    k = s.model.count
    s.model.queue[(k + torch.arange(2)) % len(s.model.queue)] = s.model(x).detach()[:2]
    s.model.count.copy_((k + 2) % 4)
    return s.train(s.loss(x) + s.model.queue.square().mean() * s.model.weight.sum())


def skips(s: Setting, x: torch.Tensor) -> Any:
    loss = s.loss(x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    if torch.isfinite(norm):
        s.optimizer.step()
    s.optimizer.zero_grad()
    return loss.detach()


def raises(s: Setting, x: torch.Tensor) -> Any:
    loss = s.loss(x)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(s.model.parameters(), 1.0)
    if not torch.isfinite(norm):
        raise ValueError("the gradients are not finite")
    s.optimizer.step()
    s.optimizer.zero_grad()
    return loss.detach()


def write_batch(s: Setting, x: torch.Tensor) -> Any:
    x[0].mul_(2)
    return s.train(s.loss(x))


def write_copy(s: Setting, x: torch.Tensor) -> Any:
    x = x.clone()
    x[0].mul_(2)
    return s.train(s.loss(x))


def trains_both(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.other(s.model(x)).square().mean())


def set_rate(s: Setting, x: torch.Tensor) -> Any:
    s.optimizer.param_groups[0]["lr"] = 0.05
    return s.train(s.loss(x))


def halve_rate(s: Setting, _result: Any) -> None:
    s.optimizer.param_groups[0]["lr"] = 0.05


def plain(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x))


def schedule_inside(s: Setting, x: torch.Tensor) -> Any:
    loss = s.train(s.loss(x))
    s.scheduler.step()
    return loss


def select(s: Setting, x: torch.Tensor) -> Any:
    y = s.model(x)
    return s.train(torch.cat([y[y > 0], x[0]]).sum())


def mask(s: Setting, x: torch.Tensor) -> Any:
    y = s.model(x)
    return s.train((y * (y > 0)).sum() + x[0].sum())


def bincount(s: Setting, x: torch.Tensor) -> Any:
    counts = torch.bincount(s.model(x).argmax(1), minlength=3)
    return s.train(s.loss(x)), counts


def index_add(s: Setting, x: torch.Tensor) -> Any:
    ids = s.model(x).argmax(1)
    counts = torch.zeros(3).index_add(0, ids, torch.ones(len(ids)))
    return s.train(s.loss(x)), counts


def lstsq(s: Setting, x: torch.Tensor) -> Any:
    b = s.model(x).t()[:, :1].expand(3, 1).repeat(2, 1)[:4]
    return s.train(torch.linalg.lstsq(x[:3].t(), b)[0].sum())


def pinv(s: Setting, x: torch.Tensor) -> Any:
    b = s.model(x).t()[:, :1].expand(3, 1).repeat(2, 1)[:4]
    return s.train((torch.linalg.pinv(x[:3].t()) @ b).sum())


def returns_module(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x)), s.model


def returns_dict(s: Setting, x: torch.Tensor) -> Any:
    return {"loss": s.train(s.loss(x))}


def counts(s: Setting, x: torch.Tensor) -> Any:
    s.calls += 1
    return s.train(s.loss(x) / s.calls)


def counts_in_buffer(s: Setting, x: torch.Tensor) -> Any:
    s.model.count.add_(1)
    return s.train(s.loss(x) / s.model.count)


def keeps(s: Setting, x: torch.Tensor) -> Any:
    loss = s.train(s.loss(x))
    s.kept.append(loss)
    return loss


def draws(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x) * random.random())


def drawn_outside(s: Setting, x: torch.Tensor, factor: float) -> Any:
    return s.train(s.loss(x) * factor)


def changes_argument(s: Setting, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    batch["x"] = x * 2
    return s.train(s.loss(batch["x"]))


def changes_copy(s: Setting, x: torch.Tensor, batch: dict[str, Any]) -> Any:
    batch = {**batch, "x": x * 2}
    return s.train(s.loss(batch["x"]))


def gradient_of_batch(s: Setting, x: torch.Tensor, w: torch.Tensor) -> Any:
    return s.train(s.loss(x * w))


def gradient_inside(s: Setting, x: torch.Tensor, w: torch.Tensor) -> Any:
    w = w.detach().requires_grad_()
    loss = s.train(s.loss(x * w))
    return loss, w.grad


def uses_view(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x) + s.head.square().sum())


def makes_view(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x) + s.model.weight[:1].square().sum())


def uses_scaled(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x) + s.scaled.sum())


def scales(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x) + (s.model.weight * 2).sum())


def one_hot(s: Setting, x: torch.Tensor) -> Any:
    return s.train((s.model(x) * F.one_hot(x[:, :3].argmax(-1))).sum())


def one_hot_of_three(s: Setting, x: torch.Tensor) -> Any:
    return s.train((s.model(x) * F.one_hot(x[:, :3].argmax(-1), num_classes=3)).sum())


def reads_clock(s: Setting, x: torch.Tensor) -> Any:
    return s.train(s.loss(x) * (1.0 if time.monotonic() > 0 else 2.0))


def replaces(s: Setting, x: torch.Tensor) -> Any:
    loss = s.train(s.loss(x))
    s.model.bias = nn.Parameter(torch.zeros(3))
    return loss


def copies(s: Setting, x: torch.Tensor) -> Any:
    loss = s.train(s.loss(x))
    with torch.no_grad():
        s.model.bias.copy_(torch.zeros(3))
    return loss


def penalized_attention(s: Setting, x: torch.Tensor, dropout_p: float) -> Any:
    x = x.detach().requires_grad_()
    y = F.scaled_dot_product_attention(*([s.model(x)[None]] * 3), dropout_p=dropout_p).sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return s.train(gradient.square().sum())


def drops_attention(s: Setting, x: torch.Tensor) -> Any:
    return penalized_attention(s, x, 0.1)


def keeps_attention(s: Setting, x: torch.Tensor) -> Any:
    return penalized_attention(s, x, 0.0)


HINTS = {
    "a write outside": Hint(write_outside, "register it as a buffer of the model", write_buffer),
    "a write to the batch": Hint(write_batch, "Write to a copy: call .clone() first", write_copy),
    "another model": Hint(
        trains_both, "Pass its module in model=[...]", trains_both, models=("model", "other")
    ),
    "a learning rate": Hint(set_rate, "Set it between two steps", plain, after=halve_rate),
    "a scheduler": Hint(
        schedule_inside, "Call it after the compiled step", plain,
        after=lambda s, _: s.scheduler.step(),
    ),
    "tensors of a dict": Hint(
        lambda s, x: averaged(s, x, s.transposed),
        "A tensor of a dict, a list or a closure is followed where it needs no gradient, is contig",
        lambda s, x: averaged(s, x, s.averages),
    ),
    "a number for the next call": Hint(
        reads_the_loss_before, "Make it a tensor before the first call", updates_the_loss_before,
    ),
    "a graph for the next call": Hint(
        goes_on_into_the_call_before, "Keep it detached", detaches_for_the_next_call,
    ),
    "a view of a weight": Hint(keeps_a_view, "Keep a copy of it (.clone())", keeps_a_copy),
    "a selection of no rows": Hint(
        selects_if_any, "An if around a selection by this mask may go", selects
    ),
    "a place": Hint(
        read_place,
        "A place may stay a tensor: x[k] for x[int(k)], and x[(k + torch.arange(n)) % len(x)] for",
        keep_place,
    ),
    "a step that is skipped": Hint(
        skips, "A check of tensors that raises (if not torch.isfinite(loss): raise ...)", raises
    ),
    "a selection": Hint(
        select, "compute on all rows, and choose by torch.where(mask, a, b)", mask
    ),
    "bincount": Hint(bincount, "torch.zeros(n).index_add(0, ids, torch.ones(len(ids)))", index_add),
    "lstsq": Hint(lstsq, "Use torch.linalg.pinv(a) @ b", pinv),
    "a result": Hint(returns_module, "Return tensors and plain values in tuples", returns_dict),
    "a counter": Hint(counts, "make it a tensor that is a buffer of the model", counts_in_buffer),
    "a kept tensor": Hint(
        keeps, "Return the tensor from the step, and keep it after the call", plain,
        after=lambda s, loss: s.kept.append(loss),
    ),
    "a random number": Hint(
        draws, "or outside of the step and pass it as an argument", drawn_outside,
        extra=lambda k: (0.25 + k,),
    ),
    "an argument": Hint(
        changes_argument, "Change a copy of it", changes_copy, extra=lambda k: ({"k": k},)
    ),
    "a view": Hint(uses_view, "Make the view inside of the step", makes_view),
    "a product": Hint(uses_scaled, "Compute it inside of the step, or detach() it", scales),
    "classes": Hint(one_hot, "Pass num_classes=", one_hot_of_three),
    "a clock": Hint(
        reads_clock, "Read it outside of the step", drawn_outside, extra=lambda _k: (1.0,)
    ),
    "another parameter": Hint(replaces, "Write to it in place (copy_)", copies),
    "attention": Hint(drops_attention, "set the model's attention dropout to 0", keeps_attention),
    "a gradient of the batch": Hint(
        gradient_of_batch, "let it begin with x = x.detach().requires_grad_()", gradient_inside,
        extra=lambda _k: (torch.ones(4, requires_grad=True),),
    ),
}  # fmt: skip


def batch(k: int) -> torch.Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(k))


def jitted(s: Setting, step: Step, models: tuple[str, ...] = ("model",)) -> Any:
    owners = [getattr(s, name) for name in models]
    return amp_ir.jit(lambda *args: step(s, *args), model=owners, optimizer=s.optimizer)


@pytest.mark.parametrize("name", HINTS)
def test_a_refused_step_that_does_as_it_is_told_trains_as_eager(name: str) -> None:
    hint = HINTS[name]
    refused_by, s = hint.refused, Setting()
    extra = () if refused_by in (draws, reads_clock) else hint.extra(0)
    with pytest.raises(AmpIrError) as refused:
        jitted(s, refused_by)(batch(0), *extra)
    assert hint.told in str(refused.value)

    ours, eager = Setting(), Setting()
    train = jitted(ours, hint.changed, hint.models)
    for k in range(3):
        results = []
        for one, call in ((ours, train), (eager, lambda *args: hint.changed(eager, *args))):
            results.append(call(batch(k), *hint.extra(k)))
            hint.after(one, results[-1])
        # float32, sums of a few products; a pseudoinverse adds some digits.
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    states = (one.model.state_dict().values() for one in (ours, eager))
    for one, other in zip(*states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_op_without_a_fake_works_once_it_has_one() -> None:
    @torch.library.custom_op("hints::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def step(s: Setting, x: torch.Tensor) -> Any:
        return s.train(s.loss(twice(x)))

    with pytest.raises(AmpIrError, match=r"register a function that returns empty tensors"):
        jitted(Setting(), step)(batch(0))
    twice.register_fake(torch.empty_like)
    torch.testing.assert_close(jitted(Setting(), step)(batch(0)), step(Setting(), batch(0)))


def test_a_state_that_an_overflow_may_skip_exists_after_one_step_of_pytorch() -> None:
    s, scaler = Setting(), amp_ir.GradScaler()
    adam = torch.optim.Adam(s.model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = s.loss(x)
        scaler.scale(loss).backward()
        scaler.step(adam)
        scaler.update()
        adam.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=s.model, optimizer=adam, scaler=scaler)
    try:
        train(batch(0))
    except AmpIrError as refused:
        assert "Run one step in plain PyTorch first" in str(refused)
        step(batch(0))
    assert torch.isfinite(train(batch(1))) and not train.skipped


def test_an_optimizer_that_was_not_passed_works_when_it_is() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(s.other(s.model(x)), torch.tensor([0, 1, 2, 0]))
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        return loss.detach()

    losses = []
    for compiles in (True, False):
        s = Setting()
        optimizers = [s.optimizer, torch.optim.SGD(s.other.parameters(), lr=0.1)]
        owners = [s.model, s.other]
        train = step
        if compiles:
            with pytest.raises(AmpIrError, match="Pass it in optimizer=, or a list of all"):
                amp_ir.jit(step, model=owners, optimizer=s.optimizer)(batch(0))
            train = amp_ir.jit(step, model=owners, optimizer=optimizers)
        losses.append(torch.stack([train(batch(k)) for k in range(3)]))
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)


def test_a_scaler_that_was_not_passed_works_when_it_is() -> None:
    s, scaler = Setting(), torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = s.loss(x)
        scaler.scale(loss).backward()
        scaler.step(s.optimizer)
        scaler.update()
        s.optimizer.zero_grad()
        return loss.detach()

    with pytest.raises(AmpIrError, match="Pass it in scaler="):
        amp_ir.jit(step, model=s.model, optimizer=s.optimizer)(batch(0))
    train = amp_ir.jit(step, model=s.model, optimizer=s.optimizer, scaler=scaler)
    assert torch.isfinite(train(batch(0)))


class Decayed(torch.optim.Optimizer):
    """An average of gradients without the bias of its begin; it counts as it is told."""

    def __init__(self, parameters: Any, count: Callable[[], Any]) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = count

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = self.count(), torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(group["lr"] * state["mean"] / (1 - 0.9 ** state["step"]))


def test_an_optimizer_that_counts_in_a_tensor_as_it_is_told() -> None:
    losses = []
    for count, compiles in ((lambda: 0, False), (lambda: torch.zeros(()), True)):
        s = Setting()
        s.optimizer = Decayed(s.model.parameters(), count)
        train = jitted(s, lambda s, x: s.train(s.loss(x))) if compiles else None
        losses.append([train(batch(k)) if train else s.train(s.loss(batch(k))) for k in range(4)])
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    s = Setting()
    s.optimizer = Decayed(s.model.parameters(), lambda: 0)
    with pytest.raises(AmpIrError) as caught:
        jitted(s, lambda s, x: s.train(s.loss(x)))(batch(0))
    assert str(caught.value).endswith(
        ": Decayed keeps 'step' as a Python value and changes it. Let the optimizer keep it as a "
        "tensor and update it in place: state['step'] = torch.zeros(()), then state['step'] += 1"
    )
