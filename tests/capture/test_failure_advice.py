# SPDX-License-Identifier: Apache-2.0
"""An error of the user's own step says what to do about it, and that works."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import amp_ir
from amp_ir.errors import CaptureError

FLOATS = (
    "Leave the batch and the model in float32, for amp_dtype= inserts the casts; or cast one of "
    "them in the step, with x.to(...)"
)
HALF = torch.bfloat16


def jitted(model: nn.Module, forward: Callable[[Any], torch.Tensor] | None = None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (forward or model)(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype="bfloat16")


def message(train: Any, *batch: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        train(*batch)
    return str(caught.value)


@pytest.mark.parametrize(
    ("op", "make", "dtypes"),
    [
        ("addmm", lambda: nn.Linear(4, 4), "float32 and bfloat16"),
        ("mm", lambda: nn.Linear(4, 4, bias=False), "bfloat16 and float32"),
        ("addmm", lambda: nn.Linear(4, 4).bfloat16(), "bfloat16 and float32"),
    ],
)
def test_a_matmul_of_two_dtypes_is_refused_as_in_pytorch(op, make, dtypes):
    model = make()
    is_low = next(model.parameters()).dtype is HALF
    x = torch.randn(2, 4, dtype=torch.float32 if is_low else HALF)
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    text = message(jitted(model), x)
    assert text.startswith("this step cannot be captured, 1 place:\n  1. step (forward), ")
    assert text.endswith(
        f": aten.{op}.default reads tensors of {dtypes}, which PyTorch refuses too. {FLOATS}"
    )
    assert jitted(model.float())(x.float()).isfinite()


@pytest.mark.parametrize(
    "forward",
    [
        lambda w, x: w @ x[0],
        lambda w, x: torch.addmm(w[0], x, x.T @ x),
        lambda w, x: torch.bmm(x[None], w[None]),
        lambda w, x: nn.functional.conv_transpose1d(x[None], w[None, :2, :1].mT.mT),
        lambda w, x: nn.functional.scaled_dot_product_attention(x[None], w[None], w[None]),
    ],
    ids=["mv", "addmm", "bmm", "conv_transpose1d", "attention"],
)
def test_ops_of_two_dtypes_are_refused_where_pytorch_refuses_them(forward):
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4, dtype=HALF)
    with pytest.raises(RuntimeError):
        forward(model.weight, x)
    assert FLOATS in message(jitted(model, lambda x: forward(model.weight, x)), x)


def test_an_error_about_types_says_which_dtypes_meet():
    model = nn.Conv1d(3, 4, 3)
    text = message(jitted(model), torch.randn(2, 3, 8, dtype=HALF))
    assert text.endswith(
        "RuntimeError: Input type (c10::BFloat16) and bias type (float) should be the same. "
        f"The model is in float32, and the batch in bfloat16. {FLOATS}"
    )


def test_a_model_that_torch_compile_made_is_named():
    model = nn.Linear(4, 4)
    compiled = torch.compile(model)
    text = message(jitted(model, lambda x: compiled(x)), torch.randn(2, 4))
    assert text.endswith(
        ". A module or function that the step calls is compiled by torch.compile, and amp_ir "
        "compiles the whole step: call the plain one, which is compiled._orig_mod, and leave "
        "model.compile() out"
    )
    assert jitted(model, compiled._orig_mod)(torch.randn(2, 4)).isfinite()


def test_gradients_that_are_off_are_named():
    train = jitted(nn.Linear(4, 4))
    with torch.no_grad():
        text = message(train, torch.randn(2, 4))
    assert text.endswith(
        ". Gradients are off here: call the step outside of torch.no_grad() or inference_mode()"
    )
    assert train(torch.randn(2, 4)).isfinite()


def test_numpy_is_for_results():
    model = nn.Linear(4, 4)
    text = message(jitted(model, lambda x: torch.tensor(model(x).detach().numpy())), torch.ones(4))
    assert text.endswith(
        ". The values do not exist yet when a step is captured: return the tensor, and call "
        ".numpy() on it after the call"
    )


SHAPES = (
    ". Shapes are known while a step is captured: print(x.shape) before this line shows them. They "
    "have to be what PyTorch takes"
)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None, :, :2], x[None]),
        lambda x: nn.functional.scaled_dot_product_attention(
            x[None], x[None], x[None], attn_mask=x.new_zeros(3, 3)
        ),
        lambda x: torch.cat([x, x[:1, :2]]),
        lambda x: x @ x,
        lambda x: x.view(3, 3),
        lambda x: x + x[:, :3],
    ],
    ids=["query", "mask", "cat", "matmul", "view", "add"],
)
def test_shapes_that_do_not_fit_are_to_be_printed(forward, capsys):
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        forward(torch.randn(2, 4))

    def printed(x):
        print(tuple(x.shape))
        return forward(model(x))

    assert message(jitted(model, printed), torch.randn(2, 4)).endswith(SHAPES)
    assert capsys.readouterr().out == "(2, 4)\n"


def test_attention_of_two_dtypes_says_how_to_have_one():
    model = nn.Linear(4, 4)

    def forward(x, low):
        return nn.functional.scaled_dot_product_attention(x[None], x[None].to(low), x[None])

    text = message(jitted(model, lambda x: forward(model(x), HALF)), torch.randn(2, 4))
    assert text.endswith(f"; expected one dtype. PyTorch refuses it too. {FLOATS}")
    fits = jitted(model, lambda x: forward(model(x).float(), torch.float32))
    assert fits(torch.randn(2, 4)).isfinite()


def test_a_target_made_in_inference_mode_is_refused_as_in_pytorch():
    model = nn.Linear(4, 4)

    def step_of(mode):
        def step(x):
            with mode():
                target = model(x).argmax(-1)
            loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            return loss.detach()

        return step

    with pytest.raises(RuntimeError, match="Inference tensors"):
        step_of(torch.inference_mode)(torch.randn(2, 4))
    text = message(amp_ir.jit(step_of(torch.inference_mode), model=model), torch.randn(2, 4))
    assert text.endswith(
        ". PyTorch refuses it too: compute it under torch.no_grad() instead of inference_mode()"
    )
    assert amp_ir.jit(step_of(torch.no_grad), model=model)(torch.randn(2, 4)).isfinite()


def test_inference_mode_inside_of_a_step_is_as_in_pytorch():
    """Metrics, a moving average, and results of it that the step returns."""
    trained = {}
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, model=model, average=average, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.inference_mode():
                kept = average(x)
                kept += 1
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
            return loss.detach(), kept.view(-1)[:3]

        train = (
            amp_ir.jit(step, model=[model, average], optimizer=optimizer) if is_compiled else step
        )
        x = torch.randn(8, 4)
        results = [train(x) for _ in range(3)]
        trained[is_compiled] = [results, *average.state_dict().values(), *model.parameters()]
    torch.testing.assert_close(trained[True], trained[False])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.transpose(0, 1),
        lambda x: x[:, 1:3],
        lambda x: x[None, 0],
        lambda x: x.unsqueeze(1).expand(4, 3, 4),
        lambda x: x.split(2, dim=-1)[1],
        lambda x: x.view(-1),
    ],
)
def test_views_in_inference_mode_are_as_in_pytorch(view: Any) -> None:
    """Of the batch and of a buffer, also written to and read by a loss, as views of both may be.

    Each was a RuntimeError about a version counter, at the first view.
    """
    trained = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model.register_buffer("seen", torch.ones(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, model: Any = model, optimizer: Any = optimizer) -> torch.Tensor:
            with torch.inference_mode():
                part = view(x).detach()
                if view(model.seen).is_contiguous():
                    view(model.seen).add_(1)
                far = view(model(x)).abs().sum()
            loss = (view(model(x)) * part).mean() + far
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        train = amp_ir.jit(step, model=model, optimizer=optimizer) if is_compiled else step
        x = torch.randn(4, 4)
        trained.append([*(train(x + k) for k in range(3)), *model.state_dict().values()])
    torch.testing.assert_close(trained[1], trained[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_of_a_step_become_padded_rows(layout: torch.layout) -> None:
    model = nn.Linear(4, 4)
    rows = torch.randn(2, 4), torch.randn(3, 4)

    def nested(_x: torch.Tensor) -> torch.Tensor:
        return model(torch.nested.nested_tensor(list(rows), layout=layout)).to_padded_tensor(0.0)

    assert "torch.nested.to_padded_tensor(nested, 0.0)" in message(jitted(model, nested), rows[0])
    wanted = nested(rows[0]).float().square().sum()
    made = torch.nested.nested_tensor(list(rows), layout=layout)
    padded = torch.nested.to_padded_tensor(made, 0.0)
    mask = torch.arange(3)[None, :, None] < torch.tensor([2, 3])[:, None, None]
    found = jitted(model, lambda x: model(x) * mask)(padded)
    torch.testing.assert_close(
        found * mask.expand(2, 3, 4).numel(), wanted.detach(), rtol=0.02, atol=0.02
    )


def test_an_adaptive_softmax_has_the_loss_of_its_probabilities() -> None:
    model = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [3, 10], div_value=1.5)
    x = torch.randn(6, 8)

    def classes(x: torch.Tensor) -> torch.Tensor:
        return x[:, 0].argsort()

    wanted = model(x, classes(x)).loss.detach()
    text = message(jitted(model, lambda x: model(x, classes(x)).loss), x)
    assert "use F.nll_loss(layer.log_prob(x), y), which is the same loss" in text
    found = jitted(model, lambda x: nn.functional.nll_loss(model.log_prob(x), classes(x)))(x)
    torch.testing.assert_close(found, wanted.square(), rtol=0.05, atol=0.05)


def test_a_mistake_in_our_own_code_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KeyError of a decomposition is told as a fault of amp_ir; one of the step is not."""
    from amp_ir.capture import substitution

    # Compiled as a file of the package: the traceback tells whose code it is.
    source, names = "def check(*_):\n    return {}['row']\n", {}
    exec(compile(source, substitution.__file__, "exec"), names)
    monkeypatch.setattr(substitution, "check_arguments", names["check"])
    assert message(jitted(nn.Linear(4, 4)), torch.ones(2, 4)).endswith(
        "KeyError: 'row'. Check that it runs as plain PyTorch on the same batch; if it does, this "
        "is a fault of amp_ir: please report it with this text and the output of amp-ir doctor"
    )
    monkeypatch.undo()
    table: dict[str, torch.Tensor] = {}
    assert "fault of amp_ir" not in message(
        jitted(nn.Linear(4, 4), lambda x: table["row"]), torch.ones(2, 4)
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_compressed_sparse_tensor_is_to_be_made_dense() -> None:
    """PyTorch says that such tensors have no strides."""
    model, matrix = nn.Linear(4, 4), torch.eye(4).to_sparse_csr()
    text = message(jitted(model, lambda x: torch.sparse.mm(matrix, model(x))), torch.randn(4, 4))
    assert text.endswith(
        "Only dense tensors can be captured: make a sparse one dense before the call, with "
        ".to_dense()"
    )
    dense = matrix.to_dense()
    jitted(model, lambda x: torch.mm(dense, model(x)))(torch.randn(4, 4))


def test_a_size_that_values_decide_is_to_be_an_argument() -> None:
    """Tacotron's mask of lengths, as it is published."""
    model = nn.Linear(4, 4)

    def mask_of(lengths: torch.Tensor, most: int) -> torch.Tensor:
        ids = torch.arange(0, most, out=torch.LongTensor(most))
        return ids < lengths[:, None]

    def step(x: torch.Tensor, lengths: torch.Tensor, most: int | None = None) -> torch.Tensor:
        most = most or torch.max(lengths).item()  # type: ignore[assignment]
        return (model(x) * mask_of(lengths, most)).sum()  # type: ignore[arg-type]

    x, lengths = torch.randn(2, 4), torch.tensor([3, 4])
    assert message(amp_ir.jit(step, model=model), x, lengths).endswith(
        "A size that values of the batch decide is not known when a step is captured: compute it "
        "before the call, and pass the Python number as an argument"
    )
    found = amp_ir.jit(step, model=model)(x, lengths, 4)
    # Rounding of float32 sums in another order.
    torch.testing.assert_close(found, step(x, lengths, 4), rtol=1e-5, atol=1e-6)
