# SPDX-License-Identifier: Apache-2.0
"""Modules and buffers that `forward` makes: it may use them once; what it keeps is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DebertaV2Config
from transformers.activations import ACT2FN
from transformers.models.deberta_v2.modeling_deberta_v2 import ContextPooler

import amp_ir
from amp_ir.errors import CaptureError

X = torch.randn(4, 8)
KEEPS = "and keeps it: each compiled step would make its parameters anew"
ADVICE = (
    "Make it in __init__, or call the model once on a batch before, under torch.no_grad(), and "
    "pass its parameters to the optimizer"
)


class Made(nn.Module):
    """Makes an activation, a normalization and a container of its own layer in each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = nn.Sequential(self.linear, ACT2FN["gelu"])(x)
        return nn.LayerNorm(8)(x) * x


class Drops(Made):
    def forward(self, x):
        return nn.Dropout(0.5)(self.linear(x))


class Lazy(Made):
    """Makes what it keeps at the first call."""

    def __init__(self, kept=None):
        super().__init__()
        if kept is not None:
            self.kept = None

    def forward(self, x):
        if getattr(self, "kept", None) is None:
            self.kept = self.make()
        return self.kept(self.linear(x))

    def make(self):
        return nn.Linear(8, 8)


class LazyDropout(Lazy):
    def make(self):
        return nn.Dropout(0.0)


class Counts(Lazy):
    """The first call differs from all that follow."""

    def forward(self, x):
        if not hasattr(self, "warm"):
            self.warm = nn.Identity()
            return self.linear(x) * 2
        return self.linear(x)


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pooler = ContextPooler(DebertaV2Config(pooler_hidden_size=8, pooler_dropout=0.0))

    def forward(self, x):
        return self.pooler(x[:, None])


def trained(model, *, compiles):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    train = amp_ir.jit(step, model=model, optimizer=optimizer) if compiles else step
    return torch.stack([train(X) for _ in range(3)])


@pytest.mark.parametrize("kind", [Made, Pooled, LazyDropout, lambda: LazyDropout(kept=True)])
def test_what_forward_makes_and_uses_trains_as_in_eager(kind):
    torch.manual_seed(3)
    model = kind()
    eager = kind()
    eager.load_state_dict(model.state_dict())
    # Sums of 8 products in another order, three steps: some units in the last place of float32.
    torch.testing.assert_close(
        trained(model, compiles=True), trained(eager, compiles=False), rtol=1e-5, atol=1e-6
    )


def test_a_dropout_made_in_forward_draws_other_numbers_in_each_step():
    model = Drops()
    train = amp_ir.jit(lambda x: model(x), model=model)
    first, second = train(X), train(X)
    assert not torch.equal(first == 0, second == 0) and 4 < int((first == 0).sum()) < 28


@pytest.mark.parametrize("kept", [None, True])
def test_a_module_with_parameters_that_forward_keeps_is_refused_with_what_works(kept):
    model = Lazy(kept)
    with pytest.raises(CaptureError) as caught:
        trained(model, compiles=True)
    line = Lazy.forward.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        f"this step cannot be captured, 1 place:\n  1. step (forward), {__file__}:{line}: makes "
        f"the module 'kept' (Linear) of Lazy {KEEPS}. {ADVICE}"
    )
    assert "kept" not in dict(model.named_children())
    # As it says: the module exists before the step is captured.
    with torch.no_grad():
        model(X)
    eager = Lazy(kept)
    eager.kept = nn.Linear(8, 8)
    eager.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        trained(model, compiles=True), trained(eager, compiles=False), rtol=1e-5, atol=1e-6
    )


def test_a_first_call_that_differs_is_refused():
    with pytest.raises(CaptureError, match=r"makes the module 'warm' \(Identity\) of Counts"):
        trained(Counts(), compiles=True)


class Averages(Made):
    """Makes a buffer, which was registered as None, at the first call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x):
        now = self.linear(x)
        old = now.detach().mean(0) if self.mean is None else self.mean
        self.mean = old * 0.5 + now.detach().mean(0) * 0.5
        return now - self.mean


class Removes(Made):
    def __init__(self):
        super().__init__()
        self.register_buffer("warm", torch.ones(8))

    def forward(self, x):
        x = self.linear(x) * self.warm
        del self.warm
        return x


def refusal(kind, at_line, what):
    line = kind.forward.__code__.co_firstlineno + at_line
    return f"this step cannot be captured, 1 place:\n  1. step (forward), {__file__}:{line}: {what}"


def test_a_buffer_that_forward_makes_and_keeps_is_refused_with_what_works():
    model = Averages()
    with pytest.raises(CaptureError) as caught:
        trained(model, compiles=True)
    assert str(caught.value) == refusal(
        Averages,
        3,
        "keeps a tensor of shape (8,) in buffer 'mean' of Averages, where a compiled step puts "
        "none. Make it in __init__ with its shape, or call the model once on a batch before, under "
        "torch.no_grad(): a buffer that is a tensor is written by the step",
    )
    assert model.mean is None
    # As it says: the buffer is a tensor before the step is captured.
    with torch.no_grad():
        model(X)
    eager = copy.deepcopy(model)
    torch.testing.assert_close(
        trained(model, compiles=True), trained(eager, compiles=False), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(model.mean, eager.mean, rtol=1e-5, atol=1e-6)


def test_a_buffer_that_forward_removes_is_refused():
    model = Removes()
    with pytest.raises(CaptureError) as caught:
        trained(model, compiles=True)
    assert str(caught.value) == refusal(
        Removes,
        2,
        "removes buffer 'warm' of Removes. Keep it in the step, and remove it after the call",
    )
    assert torch.equal(model.warm, torch.ones(8))
