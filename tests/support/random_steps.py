# SPDX-License-Identifier: Apache-2.0
"""Random programs for property tests: `random_step(draws)` builds a module from integers."""

from __future__ import annotations

import torch
import tvm
from tvm import relax
from tvm.relax import op

from amp_ir.dialect.registry import call_op

ROWS, COLUMNS = 4, 8
SQUARE = (COLUMNS, COLUMNS)
WIDE = (ROWS, COLUMNS)


class StepBuilder:
    """Grows a program of [4, 8] tensors; `pick` chooses among the newest values and the inputs."""

    def __init__(self, draws: list[int]) -> None:
        self._draws = iter(draws)
        self.builder = relax.BlockBuilder()
        self.x, self.y = (relax.Var(n, relax.TensorType(WIDE, "float32")) for n in "xy")
        self.w = relax.Var("w", relax.TensorType(SQUARE, "float32"))
        self.b = relax.Var("b", relax.TensorType((COLUMNS,), "float32"))
        self.values: list[relax.Expr] = [self.x, self.y]

    def draw(self) -> int:
        return next(self._draws, 0)

    def pick(self) -> relax.Expr:
        return self.values[-1 - self.draw() % min(len(self.values), 4)]

    def emit(self, expr: relax.Expr) -> relax.Expr:
        return self.builder.emit(expr)

    def grow(self) -> None:
        steps = [
            lambda: op.matmul(self.pick(), self.w),
            lambda: op.matmul(self.pick(), self.emit(op.permute_dims(self.w))),
            lambda: op.add(self.pick(), self.pick()),
            lambda: op.add(self.pick(), self.b),
            lambda: op.multiply(self.pick(), self.pick()),
            lambda: op.multiply(self.pick(), relax.const(0.3)),
            lambda: op.maximum(self.pick(), relax.const(-1e9)),
            lambda: op.nn.gelu(self.pick()),
            lambda: op.nn.relu(self.pick()),
            lambda: op.nn.softmax(self.pick()),
            lambda: op.tanh(self.pick()),
            lambda: op.sin(self.pick()),
            lambda: op.exp(self.emit(op.tanh(self.pick()))),
            lambda: op.subtract(p := self.pick(), self.emit(op.mean(p, [1], keepdims=True))),
            lambda: op.reshape(self.emit(op.reshape(self.pick(), (32,))), WIDE),
            lambda: op.where(self.emit(op.less(self.pick(), self.pick())), self.pick(), self.b),
            lambda: op.concat([self._half(), self._half()], 0),
            self._layer_norm,
            lambda: call_op("amp_ir.gelu_backward", [self.pick(), self.pick()], approximate="none"),
            lambda: op.astype(self.emit(op.astype(self.pick(), "float16")), "float32"),
        ]
        self.values.append(self.emit(steps[self.draw() % len(steps)]()))

    def _half(self) -> relax.Expr:
        return self.emit(op.strided_slice(self.pick(), [0], [0], [ROWS // 2]))

    def _layer_norm(self) -> relax.Expr:
        scale = self.emit(op.add(self.b, relax.const(1.0)))
        options = {"ndim_normalized": 1, "eps": 1e-5, "has_weight": True, "has_bias": True}
        norm = self.emit(call_op("amp_ir.layer_norm", [self.pick(), scale, self.b], **options))
        return relax.TupleGetItem(norm, 0)


def random_step(draws: list[int], size: int = 12) -> tvm.IRModule:
    """A program of `size` steps chosen by `draws`, with three outputs."""
    step = StepBuilder(draws)
    with step.builder.function("main", [step.x, step.y, step.w, step.b]):
        with step.builder.dataflow():
            for _ in range(size):
                step.grow()
            outputs = relax.Tuple([step.values[-1], step.pick(), step.pick()])
            result = step.builder.emit_output(outputs)
        step.builder.emit_func_output(result)
    return step.builder.get()


def random_inputs(seed: int = 0) -> list[torch.Tensor]:
    """Inputs of a random step."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (WIDE, WIDE, SQUARE, (COLUMNS,))
    return [torch.randn(shape, generator=generator) / 2 for shape in shapes]
