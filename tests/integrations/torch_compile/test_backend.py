# SPDX-License-Identifier: Apache-2.0
"""`torch.compile(backend=...)` computes what eager PyTorch computes, forward and backward."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from amp_ir.errors import OptionError, UnsupportedOpError
from amp_ir.integrations.torch_compile import backend as backend_module
from amp_ir.integrations.torch_compile.backend import amp_ir_backend
from amp_ir.integrations.torch_compile.backend_options import BackendOptions
from amp_ir.integrations.torch_compile.import_graph import import_graph


@pytest.fixture(autouse=True)
def forgotten_graphs() -> Iterator[None]:
    """Compile in every test, and warn again."""
    torch._dynamo.reset()
    backend_module._said.clear()
    yield
    torch._dynamo.reset()


class Convolutions(nn.Module):
    """BatchNorm writes its statistics; the result is laid out as channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).permute(0, 2, 3, 1)


class Attention(nn.Module):
    """`MultiheadAttention` calls the function of attention inside of PyTorch's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.attention(x, x, x, need_weights=False)[0])


class Writes(nn.Module):
    """Writes to its input, to a value and to a buffer; returns views, and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> Any:
        x.add_(1)
        y = x.exp() * self.weight
        y[1:3] = 0
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return {"y": (y - self.mean).t(), "row": y[0], "x": x, "n": 3, "nothing": None}


class Breaks(nn.Module):
    """Reads a value in Python, computes a part without gradients and one on a dead end."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight * self.frozen
        torch._dynamo.graph_break()
        with torch.no_grad():
            scale = (y * 2).sum()
        return (y.sin() * scale).sum(0, keepdim=True).expand(3, -1) + y.detach().mean()


class Language(nn.Module):
    """Integers in, a loss out, an op without a converter between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.table(tokens) @ self.table.weight.T
        return F.cross_entropy(logits, tokens) + logits.logcumsumexp(-1).mean()


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "convolutions": (
        Convolutions,
        lambda: torch.randn(2, 3, 6, 6).to(memory_format=torch.channels_last),
    ),
    "convolutions in eval": (lambda: Convolutions().eval(), lambda: torch.randn(2, 3, 6, 6)),
    "attention": (Attention, lambda: torch.randn(2, 5, 8, requires_grad=True)),
    "writes": (Writes, lambda: torch.randn(4, 5)),
    "breaks": (Breaks, lambda: torch.randn(5, 4).t()),
    "language": (Language, lambda: torch.randint(11, (7,))),
}


def tensors_of(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def backward(outputs: list[torch.Tensor]) -> None:
    live = [one for one in outputs if one.requires_grad]
    torch.manual_seed(3)
    torch.autograd.backward(live, [torch.randn_like(one) for one in live])


# Dynamo looks for a gradient of the value on which it resumes.
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_gradients_and_buffers_are_those_of_eager_pytorch(name: str) -> None:
    make, batch = PROGRAMS[name]
    model = make()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=amp_ir_backend)
    for _ in range(2):
        x = batch()
        y = x.detach().clone().requires_grad_(x.requires_grad)
        found, wanted = tensors_of(compiled(x)), tensors_of(eager(y))
        for one, other in zip(found, wanted, strict=True):
            assert one.stride() == other.stride()
            assert one.requires_grad == other.requires_grad
        backward(found)
        backward(wanted)
        # A dozen float32 ops, of which sums are in another order. A bias before BatchNorm has
        # a true gradient of 0, which the absolute tolerance is for.
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close((x, x.grad), (y, y.grad), rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    assert not backend_module._said, "a graph was refused"


def test_training_takes_the_same_steps_as_eager_and_modes_are_graphs_of_their_own() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=amp_ir_backend)
    losses: list[list[float]] = [[], []]
    for run, callee, own in ((0, compiled, model), (1, eager, eager)):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(5)
        for _ in range(5):
            x, y = torch.randn(12, 8), torch.randint(3, (12,))
            own.train()
            loss = F.cross_entropy(callee(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            own.eval()
            with torch.no_grad():
                losses[run] += [loss.item(), F.cross_entropy(callee(x), y).item()]
    # Differences of rounding in each of five steps, with momentum.
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)


def test_dropout_follows_the_seed_and_drops_the_same_in_the_backward_pass() -> None:
    dropped = torch.compile(nn.Dropout(0.5), backend=amp_ir_backend)
    x = torch.ones(64, 64, requires_grad=True)
    torch.manual_seed(1)
    first, second = dropped(x), dropped(x)
    torch.manual_seed(1)
    again = dropped(x)
    state = torch.get_rng_state()
    third = dropped(x)
    torch.set_rng_state(state)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(third, dropped(x))
    # 4096 draws: 0.5 within five standard deviations of 1/128.
    assert abs(float((first == 0).float().mean()) - 0.5) < 5 / 128
    # The passes of two calls, backward in the other order.
    for y in (second, first):
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, y.detach())


def test_a_checkpointed_call_draws_the_same_numbers_again() -> None:
    dropped = torch.compile(nn.Dropout(0.5), backend=amp_ir_backend)
    x = torch.ones(32, 32, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(lambda x: dropped(x).square(), x, use_reentrant=False)
    y.sum().backward()
    # d(y)/dx of y = (2x)^2 where it was kept: 8 at x = 1, 2 y.
    torch.testing.assert_close(x.grad, 2 * y.detach())


def test_a_backward_pass_can_be_run_twice() -> None:
    model = nn.Linear(4, 4)
    loss = torch.compile(model, backend=amp_ir_backend)(torch.randn(3, 4)).sum()
    loss.backward(retain_graph=True)
    first = model.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(model.weight.grad, 2 * first)


def test_symbolic_sizes_and_numbers_compile_for_each_shape() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, factor: int) -> torch.Tensor:
            return self.layer(x).view(x.shape[0] // 2, -1) * (factor + x.shape[0])

    model = Scaled()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=amp_ir_backend, dynamic=True)
    for size, factor in ((4, 2), (6, 3), (4, 2)):
        x = torch.randn(size, 8)
        found, wanted = compiled(x, factor), eager(x, factor)
        found.sum().backward()
        wanted.sum().backward()
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(model.layer.weight.grad, eager.layer.weight.grad)


def test_a_graph_that_asserts_a_value_runs_in_eager() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "not positive")
        return x * 2

    run = torch.compile(positive, backend="amp_ir")
    with pytest.warns(UserWarning, match="asserts a value in a graph"):
        torch.testing.assert_close(run(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="not positive"):
        run(-torch.ones(2))


def test_a_refused_graph_runs_in_eager_and_one_warning_says_so() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.poisson(x.abs()) + x

    compiled = torch.compile(noisy, backend=amp_ir_backend)
    x = torch.randn(3, requires_grad=True)
    with pytest.warns(UserWarning) as caught:
        y = compiled(x)
        compiled(torch.randn(3))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    (warning,) = (str(one.message) for one in caught)
    assert warning.startswith(
        "amp_ir cannot compile a graph of torch.compile, which runs in eager PyTorch instead, "
        "without amp_ir's mixed precision: the step has an op that amp_ir cannot import:\n"
        "  aten.poisson.default: draws random numbers from a generator that a compiled step lacks"
    )


def test_a_graph_that_returns_a_number_ends_there_instead() -> None:
    def split(x: torch.Tensor) -> Any:
        return x * 2, x.argmax().item()  # marked

    def warnings_of(**options: Any) -> list[str]:
        torch._dynamo.reset()
        with torch._dynamo.config.patch(**options), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert torch.compile(split, backend=amp_ir_backend)(torch.arange(3.0))[1] == 2
        return [str(one.message) for one in told if "amp_ir" in str(one.message)]

    line = split.__code__.co_firstlineno + 1
    assert warnings_of(capture_scalar_outputs=True) == [
        "amp_ir cannot compile a graph of torch.compile, which runs in eager PyTorch instead, "
        "without amp_ir's mixed precision: the graph returns a number (SymInt) that it computes in "
        f"step (forward), {__file__}:{line}; a compiled graph returns tensors: set "
        "torch._dynamo.config.capture_scalar_outputs to False, so that the graph ends there"
    ]
    assert warnings_of(capture_scalar_outputs=False) == []


def placeholders(**values: Any) -> fx.GraphModule:
    """A graph of these inputs, which it returns."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in values]
    for node, value in zip(nodes, values.values(), strict=True):
        node.meta["val"] = value
    graph.output((tuple(nodes),))
    return fx.GraphModule(nn.Module(), graph)


def test_inputs_that_a_graph_cannot_have_are_listed() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        there = torch.empty(2, device="cuda:0")
        assert mode.shape_env is not None
        unknown = torch.empty(mode.shape_env.create_unbacked_symint(), 3)
    generator = torch.Generator()
    made = placeholders(a=torch.eye(2).to_sparse(), b=there, c=unknown, d=generator)
    with pytest.raises(UnsupportedOpError) as caught:
        import_graph(made)
    assert str(caught.value) == (
        "the graph has inputs that amp_ir cannot take: a is sparse (torch.sparse_coo); b is on "
        "cuda:0; the backend compiles for the CPU, amp_ir.jit for both; c has a shape that depends "
        "on values, (u0, 3); d is a Generator"
    )


def test_a_graph_that_writes_to_its_inputs_is_refused() -> None:
    made = placeholders(a=torch.ones(2), b=torch.ones(2))
    (output,), (a, b) = made.graph.find_nodes(op="output"), made.graph.find_nodes(op="placeholder")
    with made.graph.inserting_before(output):
        made.graph.call_function(torch.ops.aten.copy_.default, (a, b))
    with pytest.raises(UnsupportedOpError) as caught:
        import_graph(made)
    assert str(caught.value) == (
        "the graph writes to its inputs (aten.copy_.default), which AOTAutograd did not move out "
        "of it"
    )


def test_bfloat16_follows_the_rules_and_an_autocast_region_is_honoured() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    x = torch.randn(32, 64)
    wanted = model(x)
    low = torch.compile(model, backend=amp_ir_backend, options={"amp_dtype": "bfloat16"})
    found = low(x)
    assert found.dtype is torch.float32
    # bfloat16 has 8 significant bits: 2^-8 a rounding, of four on the way, on values near 1.
    torch.testing.assert_close(found, wanted, rtol=0, atol=4 * 2**-8)
    assert not torch.equal(found, wanted)

    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, model[0].weight)

    y = torch.compile(region, backend=amp_ir_backend)(x)
    assert y.dtype is torch.bfloat16
    # Both round once; sums in another order may round to the neighbour.
    torch.testing.assert_close(y, region(x), rtol=2**-7, atol=2**-8)


def test_the_environment_chooses_a_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMP_IR_AMP_DTYPE", "bfloat16")
    assert BackendOptions.of(None).amp_dtype == "bfloat16"
    assert BackendOptions.of({"amp_dtype": "float16"}).amp_dtype == "float16"


@pytest.mark.parametrize(
    ("options", "mode", "text"),
    [
        (
            {"dtype": "float16", "level": 3},
            None,
            "torch.compile(options=): the backend amp_ir does not know dtype, level; it knows "
            "amp_dtype, policy, overrides, rounding, opt_level, max_shapes",
        ),
        (
            {"amp_dtype": "fp16"},
            None,
            "amp_dtype='fp16' is not supported; expected 'float16', 'bfloat16', 'float32' or None "
            "for no casts, in options= or in the environment variable AMP_IR_AMP_DTYPE; did you "
            "mean 'float16'?",
        ),
        (
            None,
            "max-autotune",
            "torch.compile(mode='max-autotune'): the backend amp_ir has no modes; pass options=",
        ),
    ],
)
def test_wrong_options_are_named(options: Any, mode: str | None, text: str) -> None:
    with pytest.raises(OptionError) as caught:
        BackendOptions.of(options, mode)
    assert str(caught.value) == text


def test_the_package_announces_the_backend_to_torch() -> None:
    # The file that an installation is made from: one made earlier may lack the entry point.
    text = Path(__file__).resolve().parents[3].joinpath("pyproject.toml").read_text()
    section = text.split("[project.entry-points.torch_dynamo_backends]\n")[1]
    (line,) = section.split("\n\n")[0].splitlines()
    module, _, name = line.removeprefix('amp_ir = "').removesuffix('"').partition(":")
    assert getattr(importlib.import_module(module), name) is amp_ir_backend
