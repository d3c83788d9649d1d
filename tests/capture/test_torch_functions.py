# SPDX-License-Identifier: Apache-2.0
"""Functions that the trace decomposes into others, beside PyTorch's own kernels."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import amp_ir
from amp_ir.capture.decompositions import batch_statistics
from amp_ir.capture.decompositions.torch_functions import decompose
from amp_ir.errors import CaptureError
from compiled_steps import assert_compiled_alike
from step_comparison import Training, integers, normal


def assert_same(func: Any, *args: Any, **options: Any) -> None:
    """The composition gives PyTorch's result and gradients.

    In float64, where both have some 16 digits, so that 1e-9 leaves room for other orders of sums.
    """
    args = tuple(one.double() if _is_float(one) else one for one in args)
    leaves = [one.requires_grad_() for one in args if _is_float(one)]
    expected = func(*args, **options)
    weights = normal(9, 1, *expected.shape)[0].double()
    wanted = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=True)
    found = decompose(func, args, options)
    assert found is not NotImplemented and found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradients = torch.autograd.grad((found * weights).sum(), leaves, allow_unused=True)
    for one, other in zip(gradients, wanted, strict=True):
        # A gradient that PyTorch writes as zeros may be absent.
        one, other = (torch.zeros(()) if g is None else g for g in (one, other))
        torch.testing.assert_close(
            one.expand(other.shape).double(), other.double(), rtol=1e-9, atol=1e-9
        )


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
def test_distances(p: float) -> None:
    assert_same(torch.cdist, normal(0, 2, 1, 5, 4), normal(1, 3, 6, 4), p)
    assert_same(F.pdist, normal(0, 6, 4), p)


def test_equal_rows_have_no_slope() -> None:
    assert_same(torch.cdist, torch.ones(2, 3), torch.ones(2, 3))
    assert_same(F.pdist, torch.ones(3, 2))


def test_many_rows_are_a_product_as_in_pytorch() -> None:
    x, y = torch.zeros(26, 2), torch.ones(3, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "vector_norm", None)
        torch.testing.assert_close(decompose(torch.cdist, (x, y), {}), torch.cdist(x, y))


GRID = itertools.product(["bilinear", "nearest"], ["zeros", "border", "reflection"], [False, True])


@pytest.mark.parametrize(("mode", "padding_mode", "align_corners"), GRID)
def test_grid_samples(mode: str, padding_mode: str, align_corners: bool) -> None:  # noqa: FBT001
    options = {"mode": mode, "padding_mode": padding_mode, "align_corners": align_corners}
    assert_same(F.grid_sample, normal(0, 2, 3, 5, 4), normal(1, 2, 4, 6, 2), **options)
    assert_same(F.grid_sample, normal(0, 2, 2, 3, 1, 4), normal(1, 2, 2, 3, 2, 3), **options)


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_the_identity_grid_lies_on_the_border(padding_mode: str) -> None:
    grid = F.affine_grid(torch.eye(2, 3)[None].double(), [1, 1, 4, 4], align_corners=True)
    options = {"padding_mode": padding_mode, "align_corners": True}
    assert_same(F.grid_sample, normal(0, 1, 1, 4, 4), grid.detach(), **options)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_bags(mode: str, padding_idx: int | None) -> None:
    table = normal(0, 7, 3)
    offsets = torch.tensor([0, 4, 4, 9, 12])
    options = {"mode": mode, "padding_idx": padding_idx}
    assert_same(F.embedding_bag, integers(0, 7, 4, 5), table, **options)
    assert_same(F.embedding_bag, integers(1, 7, 12), table, offsets, **options)
    assert_same(
        F.embedding_bag, integers(1, 7, 12), table, offsets, include_last_offset=True, **options
    )


def test_embedding_bags_with_weights() -> None:
    ids, offsets = integers(0, 7, 8), torch.tensor([0, 3])
    options = {"mode": "sum", "per_sample_weights": normal(1, 8).double()}
    assert_same(F.embedding_bag, ids, normal(0, 7, 3), offsets, **options)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_gaussian_losses(full: bool, reduction: str) -> None:  # noqa: FBT001
    options = {"full": full, "reduction": reduction}
    variance = normal(2, 4, 3).abs() * torch.tensor([0.0, 1.0, 2.0])
    assert_same(F.gaussian_nll_loss, normal(0, 4, 3), normal(1, 4, 3), variance, **options)
    assert_same(F.gaussian_nll_loss, normal(0, 4, 3), normal(1, 4, 3), variance[:, 1], **options)
    assert_same(F.gaussian_nll_loss, normal(0, 4, 3), normal(1, 4, 3), 0.5, **options)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (F.embedding_bag, (torch.tensor([[1, 2]]), torch.ones(3, 2), None, None, 2, False, "max")),
        (F.grid_sample, (torch.ones(1, 1, 4, 4), torch.zeros(1, 2, 2, 2), "bicubic")),
    ],
)
def test_other_options_are_left_to_pytorch(func: Any, args: tuple[Any, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        called = []
        patch.setattr(F, func.__name__, lambda *given: called.append(given))
        decompose(func, args, {})
    assert len(called) == 1


class Bags(nn.Module):
    """Two tables, whose bags are as long as the offsets of the batch say."""

    def __init__(self) -> None:
        super().__init__()
        self.sums, self.means = nn.EmbeddingBag(9, 4, mode="sum"), nn.EmbeddingBag(9, 4)
        self.head = nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        parts = self.sums(ids, offsets), self.means(ids.view(5, 4))
        return self.head(torch.cat(parts, -1))


class Warped(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.head = nn.Linear(16, 6), nn.Conv2d(1, 1, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        theta = self.place(images.flatten(1)).view(-1, 2, 3) * 0.3 + torch.eye(2, 3)
        grid = F.affine_grid(theta, list(images.shape), align_corners=False)
        return self.head(F.grid_sample(images, grid, align_corners=False))


class Policy(nn.Module):
    """Actions drawn elsewhere, whose distribution checks its arguments as it does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.mean = nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        discrete = torch.distributions.Categorical(logits=self.logits(x))
        mean = torch.tanh(self.mean(x))
        continuous = torch.distributions.Normal(mean, mean.exp())
        moved = continuous.log_prob(torch.zeros(2)).sum(-1)
        return discrete.log_prob(chosen) + 0.1 * discrete.entropy() + moved


PROGRAMS: dict[type[nn.Module], Callable[[int], tuple[torch.Tensor, ...]]] = {
    Bags: lambda k: (integers(k, 9, 20), torch.tensor([0, 3, 3, 11, 16 + k])),
    Warped: lambda k: (normal(k, 3, 1, 4, 4),),
    Policy: lambda k: (normal(k, 5, 6), integers(k, 4, 5)),
}


def trainings(model: type[nn.Module]) -> Callable[[], Training]:
    """Trainings of the model, on the mean of its results' squares."""

    def build() -> Training:
        built = model()
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)

        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = built(*batch).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Training(built, optimizer, step)

    return build


@pytest.mark.parametrize("model", PROGRAMS, ids=lambda model: model.__name__)
def test_they_train_as_in_eager(model: type[nn.Module]) -> None:
    assert assert_compiled_alike(trainings(model), PROGRAMS[model]) == 1


@pytest.mark.parametrize(
    ("func", "shapes"),
    [(torch.cdist, [(5, 4), (3, 4)]), (F.grid_sample, [(1, 2, 3, 3), (1, 2, 2, 2)])],
)
def test_in_an_autocast_region_they_are_wide_as_in_pytorch(func: Any, shapes: Any) -> None:
    args = tuple(normal(k, *shape).bfloat16() for k, shape in enumerate(shapes))
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # grid_sample's, of align_corners
        expected, found = func(*args), decompose(func, args, {})
    assert found.dtype == expected.dtype == torch.float32
    # Some ten roundings of float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("replacement", [True, False])
def test_positions_are_drawn_by_their_weights(replacement: bool) -> None:  # noqa: FBT001
    weights = torch.tensor([0.5, 0.0, 1.0, 2.5]).expand(4000, 4)
    chances = torch.tensor([1 / 8, 0, 1 / 4, 5 / 8])

    def step(given: torch.Tensor) -> torch.Tensor:
        return torch.multinomial(given, 2, replacement=replacement)

    drawn = amp_ir.jit(step, model=nn.Linear(1, 1))(weights.contiguous())
    assert drawn.shape == (4000, 2) and drawn.dtype == torch.int64
    shares = F.one_hot(drawn[:, 0], 4).float().mean(0)
    # Five standard deviations of a share of 4000 draws.
    assert bool(((shares - chances).abs() <= 5 * (chances * (1 - chances) / 4000).sqrt()).all())
    is_twice = (drawn[:, 0] == drawn[:, 1]).float().mean()
    expected = float(chances.square().sum()) if replacement else 0.0
    assert abs(float(is_twice) - expected) <= 5 * (expected * (1 - expected) / 4000) ** 0.5


def test_actions_are_drawn_in_a_step() -> None:
    def step(logits: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=logits).sample()

    train = amp_ir.jit(step, model=nn.Linear(1, 1))
    sure = torch.tensor([[-50.0, 50.0], [50.0, -50.0]])
    assert train(sure).tolist() == [1, 0]


def test_distributions_check_their_arguments_after_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch.compile, which other tests use, turns these checks off for the process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    trainings(Policy)().capture(PROGRAMS[Policy](0))
    with pytest.raises(ValueError, match="Expected parameter scale"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


def cumulative(kind: Any = nn.BatchNorm1d) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), kind(6, momentum=None), nn.Linear(6, 1))
    opt = torch.optim.SGD(model.parameters())

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return Training(model, opt, step)


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_a_cumulative_average_of_statistics(kind: Any) -> None:
    """The share of each batch is 1 / n, from the count of batches: three steps in a row."""
    assert_compiled_alike(lambda: cumulative(kind), lambda k: (normal(k, 5, 4),), steps=3)


def test_a_cumulative_average_goes_on_from_its_count() -> None:
    """The count is read at every call, so that a state which is loaded counts."""
    training, other = cumulative(), cumulative()
    train = amp_ir.jit(training.step, model=training.model, optimizer=training.optimizer)
    train(normal(0, 5, 4))
    other.step(normal(0, 5, 4))
    for model in (training.model, other.model):
        model[1].num_batches_tracked.fill_(9)
    train(normal(1, 5, 4))
    other.step(normal(1, 5, 4))
    assert not train.recompiles
    for found, expected in zip(training.model[1].buffers(), other.model[1].buffers(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_batch_without_elements_leaves_a_cumulative_average() -> None:
    model = nn.BatchNorm1d(3, momentum=None)
    amp_ir.jit(lambda x: model(x), model=model)(torch.zeros(2, 3, 0))
    assert model.running_var.tolist() == [1.0, 1.0, 1.0] and int(model.num_batches_tracked) == 1


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_normalizations_are_captured_without_cudnn(kind: Any, monkeypatch: Any) -> None:
    """Its kernels are ops of their own, which keep what only they can read."""
    name = {nn.BatchNorm1d: "_batch_norm", nn.InstanceNorm1d: "_instance_norm"}[kind]
    plain = getattr(batch_statistics, name)

    def checked(*args: Any) -> Any:
        assert args[-1] is False
        raise RuntimeError("it is called without cuDNN")

    monkeypatch.setattr(batch_statistics, name, checked)
    with pytest.raises(CaptureError, match="it is called without cuDNN"):
        amp_ir.trace_model(kind(3), (torch.ones(2, 3, 4),))
    assert getattr(torch, name[1:]) is plain


@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (7, 3), (9, 2), (1, 1), (3, 3, 3)])
@pytest.mark.parametrize("wrap", [False, True])
def test_a_diagonal_is_filled(shape: tuple[int, ...], wrap: bool) -> None:
    def filled(x: torch.Tensor, how: Callable[..., Any]) -> torch.Tensor:
        x = x * 1.0
        assert how(x, -2.0, wrap) is x
        return x

    x = normal(0, *shape)
    with torch.no_grad():
        expected = filled(x, torch.Tensor.fill_diagonal_)
        found = filled(x, lambda *args: decompose(torch.Tensor.fill_diagonal_, args, {}))
    assert torch.equal(found, expected)


def test_a_contrastive_loss_leaves_out_the_diagonal() -> None:
    def contrastive() -> Training:
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            z = F.normalize(model(x))
            likeness = z @ z.t() / 0.5
            likeness.fill_diagonal_(float("-inf"))
            loss = F.cross_entropy(likeness, torch.arange(len(x)).roll(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return Training(model, optimizer, step)

    assert_compiled_alike(contrastive, lambda k: (normal(k, 8, 6),))
