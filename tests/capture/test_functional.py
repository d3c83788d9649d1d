# SPDX-License-Identifier: Apache-2.0
"""The table of decompositions: that of PyTorch without what tracing decomposes by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch._decomp import core_aten_decompositions

import amp_ir
from amp_ir.capture import functional
from amp_ir.capture.trace import capture_step
from amp_ir.demo.workloads import WORKLOADS
from amp_ir.errors import CaptureError

COMPOSITE = {
    "matmul": lambda x: x @ x.transpose(-1, -2) @ x[0],
    "einsum": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "shuffle": lambda x: F.channel_shuffle(x.reshape(2, 4, 2, 2), 2) * 2,
    "norms": lambda x: F.instance_norm(x) + torch.linalg.vector_norm(x) + x.std(),
    "resize": lambda x: F.interpolate(x[None], scale_factor=2.0, mode="bilinear").square(),
    "nearest": lambda x: F.interpolate(x[None], size=(3, 5)) * 2,
    "distance": lambda x: F.pairwise_distance(x[0], x[1]) + F.cosine_similarity(x[0], x[1]),
    "stacks": lambda x: torch.block_diag(x[0], x[1]).trace() + torch.kron(x[0], x[1]).sum(),
    "one hot": lambda x: F.one_hot(x[0].argmax(-1), 5) * 2.0,
    "losses": lambda x: (
        F.kl_div(x, x.softmax(-1), reduction="sum") + F.triplet_margin_loss(x[0], x[1], x[0] * 2)
    ),
}


@pytest.fixture
def public_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The table that PyTorch's public function makes."""
    whole = dict(core_aten_decompositions().items())
    monkeypatch.setattr(functional, "core_decompositions", lambda: whole)
    functional._core_table.cache_clear()
    yield
    functional._core_table.cache_clear()


def graphs() -> dict[str, str]:
    """The graphs of composite ops, and of a step."""
    x = torch.rand(2, 4, 4)
    found = {}
    for name, function in COMPOSITE.items():
        for mode in (torch.enable_grad, torch.no_grad):

            def step(x, function=function, mode=mode):
                with mode():
                    return function(x)

            graph = capture_step(step, (x,), model=torch.nn.Identity()).graph
            found[f"{name}, {mode.__name__}"] = str(graph.graph)
    training = WORKLOADS["bert1"].make(small=True)
    owners = {"model": training.model, "optimizer": training.optimizer}
    found["bert1"] = str(capture_step(training.step, training.batch, **owners).graph.graph)
    return found


def test_graphs_are_those_of_the_public_table(public_table: None) -> None:
    wanted = graphs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "core_decompositions", _own)
        functional._core_table.cache_clear()
        assert graphs() == wanted


_own = functional.core_decompositions


def test_the_table_lacks_composite_ops_alone() -> None:
    whole, own = dict(core_aten_decompositions().items()), _own()
    kept = functional._KEPT
    missing = [op for op in set(whole) - set(own) if functional._packet_name(op) not in kept]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    # `autograd_would_have_decomposed` of PyTorch asks for these two.
    assert all(op._can_decompose() for op in missing)
    assert not [op for op in missing if has(op.name(), "CPU") or has(op.name(), "CUDA")]
    assert set(own) <= set(whole)


def test_a_write_to_overlapping_elements_is_refused() -> None:
    """PyTorch does not make it functional: it was a RuntimeError without a place."""
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        h = x.clone()
        h.unfold(1, 3, 2)[:, 0] = 0  # here
        return model(h).sum()

    with pytest.raises(CaptureError) as caught:
        amp_ir.jit(step, model=model)(torch.randn(2, 4))
    line = step.__code__.co_firstlineno + 2
    assert str(caught.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward), {__file__}:{line}: writes to a view of which elements share memory, "
        "as those of unfold and expand do. Write to the tensor itself, by an index or a slice, or "
        "to a clone of the view"
    )
