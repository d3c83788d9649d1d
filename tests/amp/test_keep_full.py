# SPDX-License-Identifier: Apache-2.0
"""What autocast keeps in float32 for what it carries, seen in whole captured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import amp_ir
from amp_ir.ir.step_graph import read_step
from amp_ir.ir.step_module import Role, StepModule

LOW = ("float16", "bfloat16")


def _captured(step: Callable[..., Any], *batch: torch.Tensor, **options: Any) -> StepModule:
    return amp_ir.trace_step(step, batch, **options)[0]


def _widened_outputs(mod: StepModule) -> list[str]:
    """Names of state outputs that the step rounds to a low dtype on the way out."""
    graph = read_step(mod.ir)
    found = []
    for leaf, spec in zip(graph.outputs, mod.signature.outputs, strict=True):
        value = graph.values[leaf]
        if spec.role is Role.RESULT or value.op < 0:
            continue
        maker = graph.ops[value.op]
        source = graph.values[maker.reads[0]] if maker.reads else value
        if maker.name == "amp_ir.cast" and source.dtype in LOW:
            found.append(spec.name)
    return found


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_no_tensor_of_the_state_is_rounded_by_the_selection_of_a_skipped_step(low: str, make: Any):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    average = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
    optimizer = make(model.parameters(), lr=0.1)
    scaler = amp_ir.GradScaler("cpu")

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model[0].parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        return loss

    if make is torch.optim.AdamW:
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    mod = _captured(
        step, torch.randn(8, 4), model=[model, average], optimizer=optimizer, scaler=scaler
    )
    low_mod = amp_ir.autocast(mod, amp_dtype=low)
    assert _widened_outputs(low_mod) == []
    # Strict rounding rounds wherever the plan says so: a weight must not be a low number.
    compiled = amp_ir.compile(low_mod, rounding="strict")
    compiled(torch.randn(8, 4))
    for weight in (*model.parameters(), *average.parameters()):
        assert not torch.equal(weight, weight.to(getattr(torch, low)).float())


def test_the_seed_of_a_backward_pass_is_not_rounded():
    model = torch.nn.Linear(4, 5)

    def step(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        loss = 0.9 * F.cross_entropy(model(x), c, label_smoothing=0.3) + 0.1 * model(x).abs().mean()
        loss.backward()
        return loss

    batch = torch.randn(7, 4), torch.randint(0, 5, (7,))
    mod = amp_ir.autocast(_captured(step, *batch, model=model), amp_dtype="bfloat16")
    graph = read_step(mod.ir)
    rounded = [
        op
        for op in graph.ops
        if op.name == "amp_ir.cast" and graph.values[op.results[0]].dtype == "bfloat16"
    ]
    assert rounded and all(graph.values[op.results[0]].size > 1 for op in rounded)


def test_what_a_batch_holds_is_not_cast_to_float16_where_pytorch_would_promote():
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.l1_loss(model(x), target)
        loss.backward()
        return loss

    batch = torch.randn(8, 4), torch.full((8, 4), 1e5)
    compiled = amp_ir.compile(
        amp_ir.autocast(_captured(step, *batch, model=model), amp_dtype="float16"),
        rounding="strict",
    )
    # 1e5 is beyond 65504; the layer's values, of size 1, are rounded by 2^-11.
    assert compiled(*batch).item() == pytest.approx(1e5, rel=1e-4)


class _Residual(torch.nn.Module):
    """A residual stream that begins with `start(table[ids])`; its only layer adds nothing."""

    def __init__(self, start: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table, self.layer = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 8)
        self.start, self.norm = start, torch.nn.RMSNorm(8)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        stream = self.start(self.table(ids))
        return stream + self.layer(self.norm(stream))


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
    "start",
    [
        torch.nn.Identity(),
        torch.nn.Dropout(0.5),
        lambda x: 3.0 * x,
        lambda x: torch.cat([x.tanh(), x.flip(1)], 1),
    ],
    ids=["embedding", "dropout", "scaled", "put_together"],
)
def test_what_begins_a_residual_stream_is_not_rounded(low: str, start: Any):
    model = _Residual(start)

    def step(ids: torch.Tensor) -> torch.Tensor:
        stream = model(ids)
        stream.square().mean().backward()
        return stream.detach()

    ids = torch.arange(10).reshape(2, 5)
    mod = amp_ir.autocast(_captured(step, ids, model=model), amp_dtype=low)
    stream = amp_ir.compile(mod, rounding="strict")(ids)
    rounded = stream == stream.to(getattr(torch, low)).float()
    # Zeros of dropout are low numbers; of others one in 2^13 (float16) or 2^16 is by chance.
    assert stream.any() and not rounded[stream != 0].any()


def test_an_activation_that_a_gradient_masks_with_is_stored_low():
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(8, 16, 3, padding=1, bias=False), torch.nn.BatchNorm2d(16)),
        *(torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1, bias=False)),
        *(torch.nn.BatchNorm2d(16), torch.nn.ReLU()),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    # More elements a channel than where a convolution's result stays float32 for the statistics.
    mod = _captured(step, torch.randn(4, 8, 16, 16), model=model, optimizer=optimizer)
    graph = read_step(amp_ir.autocast(mod, amp_dtype="bfloat16").ir)
    first = next(op for op in graph.ops if op.name == "relax.nn.relu")
    readers = {graph.ops[reader].name for reader in graph.values[first.results[0]].readers}
    # The next convolution and the mask of the gradient both read what the cast leaves in memory.
    assert readers == {"amp_ir.cast"}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_logarithm_of_sums_over_steps_is_not_rounded_before_its_exponential(rows: int):
    tags = 4
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, tags))
    moves = torch.nn.Parameter(torch.randn(tags, tags) * 0.1)
    model.register_parameter("moves", moves)

    def step(x: torch.Tensor) -> torch.Tensor:
        score = model(x)
        alpha = score[:, 0]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + moves, 1) + score[:, t]
        loss = torch.logsumexp(alpha, 1).mean()
        loss.backward()
        return loss

    mod = _captured(step, torch.randn(rows, 7, 6), model=model)
    low = amp_ir.autocast(mod, amp_dtype="bfloat16")
    summed = [one for one in low.plan.ops if one.name in ("relax.add", "relax.subtract")]
    assert len([one for one in summed if not one.module]) > 20
    assert {one.label for one in summed if not one.module} == {"full"}
    assert "low" in {one.label for one in summed if one.module}  # a bias


def test_a_table_of_float64_numbers_is_not_rounded_on_the_way():
    model = torch.nn.Linear(8, 8)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100, dtype=torch.float64), 0)

    def step(x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        # As diffusion models mix their batch with noise; 1 - 0.9999 cancels.
        share = kept.to(x.dtype)[t][:, None]
        loss = F.mse_loss(model(share.sqrt() * x + (1 - share).sqrt() * noise), noise)
        loss.backward()
        return loss

    batch = torch.randn(4, 8), torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    low = amp_ir.autocast(_captured(step, *batch, model=model), amp_dtype="bfloat16")
    (read,) = (one for one in low.plan.ops if one.name == "amp_ir.index")
    assert (read.label, read.rule, read.results) == ("full", "unrounded", ("float32",))


@pytest.mark.parametrize("low", LOW)
def test_what_an_update_of_the_users_own_adds_is_not_rounded(low: str) -> None:
    """An evolution strategy: the difference of two losses would be lost in the low dtype."""
    model = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)

    def step(x: torch.Tensor, y: torch.Tensor, noise: torch.Tensor) -> None:
        before, update = model.weight.clone(), 0
        for sign in (1.0, -1.0):
            model.weight.copy_(before + sign * 0.01 * noise)
            update = update + sign * F.cross_entropy(model(x), y) * noise
        model.weight.copy_(before - update)

    batch = torch.randn(8, 4), torch.randint(0, 4, (8,)), torch.randn(4, 4)
    plan = amp_ir.autocast(_captured(step, *batch, model=model), amp_dtype=low).plan
    products = [one for one in plan.ops if one.name == "relax.multiply"]
    assert products
    assert all(one.results == ("float32",) for one in products)


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
    "normed", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm]
)
def test_a_power_iteration_of_a_weight_is_not_rounded(low: str, normed: Any) -> None:
    """Its vectors are state; a matmul by a vector of the batch's is low, and so are others."""
    model, vector = normed(torch.nn.Linear(8, 16)), torch.nn.ParameterList([torch.randn(16)])
    optimizer = torch.optim.SGD([*model.parameters(), *vector], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x) @ vector[0]).square().mean()
        loss.backward()
        optimizer.step()
        return model(x)

    mod = _captured(step, torch.randn(4, 8), model=[model, vector], optimizer=optimizer)

    def matmuls(**options: Any) -> list[tuple[str, str]]:
        plan = amp_ir.autocast(mod, amp_dtype=low, **options).plan
        ops = (one for one in plan.ops if one.phase == "forward")
        return [(one.rule, one.reads[0]) for one in ops if one.name == "relax.matmul"]

    of_state = [("vector_of_state", "float32")] * 3
    for policy, rule in (("default", "matmul"), ("conservative", "product_in_float32")):
        of_rows = (rule, low)
        assert matmuls(policy=policy) == [*of_state, of_rows, of_rows, *of_state, of_rows]
    override = amp_ir.Override(to="low", op="matmul")
    assert matmuls(overrides=[override]) == [("override", low)] * 9


@pytest.mark.parametrize("rows", [8, 32])
@pytest.mark.parametrize("low", LOW)
def test_distances_are_computed_in_float32_as_torch_autocast_computes_them(low: str, rows: int):
    """|x|^2 - 2 x y + |y|^2 of near rows cancels; above 25 rows PyTorch computes it by a matmul."""
    model = torch.nn.Linear(8, 8)
    x = torch.ones(rows, 8) + 0.05 * torch.randn(rows, 8)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = model(x)
        distances = torch.cdist(z, z.flip(0))
        distances.mean().backward()
        return z.detach(), distances.detach()

    z, got = amp_ir.jit(step, model=model, amp_dtype=low, rounding="strict")(x)
    z = z.double()
    exact = torch.cdist(z, z.flip(0))
    # Rows that are rounded before they are subtracted move a distance by as much.
    allowed = 0.05 if low == "bfloat16" else 0.01
    assert (got - exact).norm() < allowed * exact.norm()


@pytest.mark.parametrize("low", LOW)
def test_a_region_of_the_users_decides_how_distances_are_computed(low: str):
    model = torch.nn.Linear(8, 8)
    distances = amp_ir.half_function(torch.cdist)
    mod = _captured(lambda x: distances(model(x), model(x)), torch.randn(32, 8), model=model)
    graph = read_step(amp_ir.autocast(mod, amp_dtype=low).ir)
    reads = [
        graph.values[one].dtype for op in graph.ops if op.name == "relax.matmul" for one in op.reads
    ]
    assert reads == [low] * 6


@pytest.mark.parametrize("low", LOW)
def test_what_a_choice_compares_is_not_rounded_on_its_way(low: str) -> None:
    """Distances that are stored low are equal to others, and another row is the farthest."""
    model = torch.nn.Linear(8, 8)
    same = torch.rand(16, 16) < 0.5

    def step(x: torch.Tensor) -> torch.Tensor:
        z = model(x)
        distances = (z.unsqueeze(1) - z.unsqueeze(0)).abs().amax(-1)
        farthest = torch.where(same, distances, distances.new_zeros(())).argmax(1)
        loss = distances.gather(1, farthest.unsqueeze(1)).mean()
        loss.backward()
        return loss.detach()

    mod = _captured(step, torch.randn(16, 8), model=model)
    plan = amp_ir.autocast(mod, amp_dtype=low).plan
    compared = [one for one in plan.ops if one.name in ("relax.where", "relax.max")]
    assert compared
    assert all(one.results == ("float32",) for one in compared if one.phase == "forward"), compared
