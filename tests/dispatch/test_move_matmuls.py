# SPDX-License-Identifier: Apache-2.0
"""Which matmuls move from oneDNN to PyTorch, and that training is what it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import tvm
import tvm_ffi
from torch import nn
from tvm import relax
from tvm.relax import op as R

import amp_ir
from amp_ir.api import lower
from amp_ir.dispatch.accumulate_matmuls import accumulate_matmuls
from amp_ir.dispatch.dispatch import LIBRARIES, dispatch
from amp_ir.dispatch.move_matmuls import REASON, move_matmuls
from amp_ir.host import native
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.dispatch_log import DispatchLog, DispatchNote
from amp_ir.ir.library_call import LibraryMatmul, read
from amp_ir.ir.step_module import OutputSpec, Role
from compiled_steps import assert_compiled_alike
from relax_functions import build
from step_comparison import Training

pytestmark = pytest.mark.skipif(
    not native.has("amp_ir.onednn.matmul")
    or not native.has("amp_ir.torch.matmul_accumulate")
    or not torch.backends.mkl.is_available(),
    reason="one of the two libraries is missing",
)


@pytest.fixture(autouse=True)
def with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose as on a CPU with AMX; PyTorch's calls are right on any."""
    monkeypatch.setattr("amp_ir.host.native.has_amx", lambda: True)


def product(
    rows: int, columns: int, terms: int, dtype: str, *, turns: str = "", out: str = ""
) -> tvm.IRModule:
    """A step of one matmul; `turns` names the operands that are stored transposed."""

    def body(a: Any, b: Any) -> tuple[Any, ...]:
        emit = relax.BlockBuilder.current().emit
        a = emit(R.permute_dims(a)) if "a" in turns else a
        b = emit(R.permute_dims(b)) if "b" in turns else b
        return (R.matmul(a, b, out_dtype=out or dtype),)

    a = (terms, rows) if "a" in turns else (rows, terms)
    b = (columns, terms) if "b" in turns else (terms, columns)
    return build([(a, dtype), (b, dtype)], body)


def libraries_of(ir: tvm.IRModule) -> list[str]:
    """The libraries of the matmuls of main."""
    calls = [read(value) for value in Dataflow(ir).values.values()]
    return [call.library for call in calls if isinstance(call, LibraryMatmul)]


@pytest.mark.parametrize(
    ("shape", "dtype", "given", "library"),
    [
        # In bfloat16 there is a kernel of ours.
        ((1576, 3072, 768), "bfloat16", {}, "onednn"),
        ((2048, 1024, 1024), "bfloat16", {"turns": "b"}, "onednn"),
        ((3072, 768, 1576), "bfloat16", {"turns": "a", "out": "float32"}, "onednn"),
        ((3072, 768, 1576), "float32", {"turns": "a"}, "torch"),
        ((1024, 768, 768), "float32", {}, "torch"),
        ((1024, 768, 768), "float32", {"turns": "b"}, "onednn"),
        ((1024, 640, 768), "float32", {}, "onednn"),
        ((8, 200000, 64), "float32", {}, "onednn"),
        ((4096, 4096, 4096), "float16", {}, "onednn"),
    ],
)
def test_sizes_that_pytorch_multiplies_faster_move(
    shape: tuple[int, int, int], dtype: str, given: dict[str, str], library: str
) -> None:
    log = DispatchLog()
    ir = move_matmuls(dispatch(product(*shape, dtype, **given), log=log), LIBRARIES, log=log)
    assert libraries_of(ir) == [library]
    reason = REASON if library == "torch" else ""
    assert log.notes == (DispatchNote("relax.matmul", library, 1, reason),)


def test_the_call_stays_the_same_but_for_the_library() -> None:
    before = dispatch(product(2048, 1024, 1024, "float32"))
    after = move_matmuls(before, LIBRARIES)
    text = before.script().replace("amp_ir.onednn.matmul", "amp_ir.torch.matmul")
    assert text != before.script()
    assert after.script() == text


@pytest.mark.parametrize("libraries", [("onednn",), ("torch",)])
def test_a_user_of_one_library_keeps_it(libraries: tuple[str, ...]) -> None:
    ir = dispatch(product(2048, 1024, 1024, "float32"))
    assert libraries_of(move_matmuls(ir, libraries)) == ["onednn"]


def test_without_amx_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amp_ir.host.native.has_amx", lambda: False)
    ir = dispatch(product(2048, 1024, 1024, "float32"))
    assert move_matmuls(ir, LIBRARIES) is ir


def test_sums_biases_and_batches_stay() -> None:
    def body(x: Any, w: Any, bias: Any, heads: Any, total: Any) -> tuple[Any, ...]:
        emit = relax.BlockBuilder.current().emit
        biased = emit(R.add(emit(R.matmul(x, w)), bias))
        return biased, emit(R.matmul(heads, w)), emit(R.add(total, bias))

    shapes = [(1024, 1024), (1024, 1024), (1024,), (4, 1024, 1024), (1024, 1024)]
    ir = dispatch(build([(shape, "float32") for shape in shapes], body))
    assert libraries_of(ir) == ["onednn"] * 2
    assert libraries_of(move_matmuls(ir, LIBRARIES)) == ["onednn"] * 2


@pytest.mark.parametrize(
    ("dtype", "columns", "libraries"),
    [("float32", 1024, ["torch"]), ("float32", 256, ["onednn"]), ("bfloat16", 1024, ["onednn"])],
)
def test_of_the_sums_only_large_ones_in_float32_move(
    dtype: str, columns: int, libraries: list[str]
) -> None:
    shapes = {"x": (768, 1024), "d": (768, columns), "weight": (columns, 1024)}
    dtypes = {"x": dtype, "d": dtype, "weight": "float32"}
    x, d, weight = (relax.Var(k, relax.TensorType(shapes[k], dtypes[k])) for k in shapes)
    builder = relax.BlockBuilder()
    with builder.function("main", [x, d, weight]):
        with builder.dataflow():
            turned = builder.emit(R.permute_dims(d))
            gradient = builder.emit(R.matmul(turned, x, out_dtype="float32"))
            change = builder.emit(R.multiply(gradient, relax.const(-0.5, "float32")))
            updated = builder.emit(R.add(weight, change))
            result = builder.emit_output(relax.Tuple([updated]))
        builder.emit_func_output(result)
    outputs = [OutputSpec("weight", Role.PARAMETER, shapes["weight"], "float32", updates=2)]
    summed = accumulate_matmuls(dispatch(builder.get()), outputs)
    ir = move_matmuls(summed, LIBRARIES)
    assert libraries_of(ir) == libraries
    text = summed.script().replace("amp_ir.onednn.", f"amp_ir.{libraries[0]}.")
    assert f"amp_ir.{libraries[0]}.matmul_accumulate" in text
    assert ir.script() == text


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("alpha", "beta"), [(None, None), (-0.5, 0.9)])
def test_pytorch_adds_a_product_to_a_matrix(
    in_place: bool, alpha: float | None, beta: float | None
) -> None:
    d, x, c = torch.randn(40, 24), torch.randn(40, 32), torch.randn(24, 32)
    out = c.clone() if in_place else torch.full((24, 32), torch.nan)
    before = out if in_place else c
    expected = (1.0 if beta is None else beta) * c.double()
    expected += (1.0 if alpha is None else alpha) * (d.T.double() @ x.double())
    shapes = ((24, 40), (1, 24), (40, 32), (32, 1), (24, 32), (32, 1))
    layout = [tvm_ffi.Shape(one) for one in shapes]
    factors = [None if n is None else tvm_ffi.from_dlpack(torch.tensor(n)) for n in (alpha, beta)]
    function = native.function("amp_ir.torch.matmul_accumulate")
    operands = [tvm_ffi.from_dlpack(one) for one in (d, x, before)]
    function(*operands, None, *factors, *layout, "none", tvm_ffi.from_dlpack(out))
    # 41 roundings of float32 of numbers up to some 20.
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    if not in_place:
        with pytest.raises(ValueError, match="no bias and no epilogue"):
            function(*operands, None, *factors, *layout, "relu", tvm_ffi.from_dlpack(out))


@pytest.mark.parametrize("alpha", [0.0, math.nan, 0.5])
@pytest.mark.parametrize("beta", [None, 0.0, 0.5, math.nan])
def test_a_factor_of_zero_keeps_what_is_not_finite(alpha: float, beta: float | None) -> None:
    """A learning rate of 0 times a gradient of infinity is NaN; BLAS leaves the product out."""
    d, x, c = torch.randn(40, 24), torch.randn(40, 32), torch.randn(24, 32)
    d[0, 0], d[1, 1], c[5, 5], c[6, 6] = math.inf, math.nan, math.inf, math.nan
    expected = (1.0 if beta is None else beta) * c + alpha * (d.T @ x)
    shapes = ((24, 40), (1, 24), (40, 32), (32, 1), (24, 32), (32, 1))
    layout = [tvm_ffi.Shape(one) for one in shapes]
    factors = [None if n is None else tvm_ffi.from_dlpack(torch.tensor(n)) for n in (alpha, beta)]
    function = native.function("amp_ir.torch.matmul_accumulate")
    operands = [tvm_ffi.from_dlpack(one) for one in (d, x, c)]
    function(*operands, None, *factors, *layout, "none", operands[2])
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def with_sgd() -> Training:
    made = network()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = made.model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Training(made.model, optimizer, step)


def test_training_with_sums_in_float32_is_pytorchs() -> None:
    # Both gradients of weights, and that of the second layer's input.
    assert moved_calls(with_sgd()) == 3
    assert_compiled_alike(with_sgd, batch, steps=3)


def network() -> Training:
    """Two layers without biases, whose products are just large enough, and Adam."""
    torch.manual_seed(0)
    first, second = nn.Linear(512, 1024, bias=False), nn.Linear(1024, 1536, bias=False)
    model = nn.Sequential(first, nn.GELU(), second)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Training(model, optimizer, step)


def batch(k: int) -> tuple[torch.Tensor, ...]:
    return (torch.randn(1536, 512, generator=torch.Generator().manual_seed(k)),)


def moved_calls(made: Training) -> int:
    mod, _ = amp_ir.trace_step(made.step, batch(0), model=made.model, optimizer=made.optimizer)
    return sum(note.calls for note in lower(mod).dispatched if note.reason == REASON)


def test_training_in_float32_is_pytorchs() -> None:
    # Of the second layer the gradients of its weight and of its input.
    assert moved_calls(network()) == 2
    assert_compiled_alike(network, batch, steps=3)
