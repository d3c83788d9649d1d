# SPDX-License-Identifier: Apache-2.0
"""A generated training step as data, and as the Python source that a user might have written."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import attrs

HEADER = """\
import torch, amp_ir
from torch import nn
import torch.nn.functional as F
"""


@attrs.frozen
class Statement:
    """Lines of `forward` that define `name`, and the lines of `__init__` that they need."""

    name: str
    lines: tuple[str, ...]
    init: tuple[str, ...] = ()


@attrs.frozen
class Program:
    """A model, a step, a batch and the options of its compilation.

    `dtype` is that of parameters and batch; `after_init` ties and freezes parameters. `batch` has
    an expression for each input by name. `jit` are keyword arguments of `amp_ir.jit`;
    `budget_share` is the share of the unlimited plan's arena that a second compilation is given.
    """

    statements: tuple[Statement, ...]
    losses: tuple[str, ...]
    batch: dict[str, str]
    optimizer: str
    after_init: tuple[str, ...] = ()
    dtype: str = "float32"
    accumulate: bool = False
    clip: str = ""
    scaler: str = ""
    overflow_at: int = -1
    zero_grad: str = "optimizer.zero_grad()"
    zero_first: bool = True
    jit: dict[str, object] = attrs.field(factory=dict)
    budget_share: float = 0.0

    def source(self) -> str:
        """The functions `build(dtype)`, which returns model, optimizer, scaler and step, and
        `batches(dtype)`, which returns three batches."""
        return "\n".join([HEADER, self._model(), self._build(), self._batches()])

    def standalone(self) -> str:
        """The source with what compiles and runs it."""
        options = "".join(f", {key}={value!r}" for key, value in self.jit.items())
        share = (
            f"  # and memory_budget = {self.budget_share} of its arena" if self.budget_share else ""
        )
        return (
            f"{self.source()}\n"
            f"model, optimizer, scaler, step = build(torch.{self.dtype})\n"
            f"train = amp_ir.jit(step, model=model, optimizer=optimizer, scaler=scaler{options})"
            f"{share}\n"
            f"for batch in batches(torch.{self.dtype}):\n    print(train(*batch))\n"
        )

    def _model(self) -> str:
        init = [line for one in self.statements for line in one.init]
        forward = [line for one in self.statements for line in one.lines]
        results = ", ".join(one.name for one in self.statements[-2:])
        inputs = ", ".join(self.batch)
        return (
            "class Model(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            + textwrap.indent("\n".join(init) + "\n", " " * 8)
            + f"    def forward(self, {inputs}):\n"
            + textwrap.indent("\n".join([*forward, f"return ({results},)"]) + "\n", " " * 8)
        )

    def _build(self) -> str:
        lines = [
            "torch.manual_seed(0)",
            "model = Model()",
            *self.after_init,
            "model = model.to(dtype)",
            "parameters = [one for one in model.parameters() if one.requires_grad]",
            f"optimizer = {self.optimizer}",
            f"scaler = {self.scaler or None}",
            f"def step({', '.join(self.batch)}):",
            *(f"    {line}" for line in self._step()),
            "return model, optimizer, scaler, step",
        ]
        return "def build(dtype):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"

    def _step(self) -> Iterator[str]:
        if self.zero_first:
            yield self.zero_grad
        call = f"values = model({', '.join(self.batch)})"
        for half in (1, 2) if self.accumulate else (0,):
            yield call
            yield f"loss = {' + '.join(self.losses)}" if half < 2 else f"loss = {self.losses[0]}"
            yield "scaler.scale(loss).backward()" if self.scaler else "loss.backward()"
        if self.clip:
            if self.scaler:
                yield "scaler.unscale_(optimizer)"
            yield self.clip
        yield from (
            ("scaler.step(optimizer)", "scaler.update()") if self.scaler else ("optimizer.step()",)
        )
        if not self.zero_first:
            yield self.zero_grad
        yield "return loss.detach(), [one.detach() for one in values]"

    def _batches(self) -> str:
        floats = [name for name, text in self.batch.items() if "randint" not in text]
        spoil = ""
        if self.overflow_at >= 0 and floats:
            spoil = (
                f"        if k == {self.overflow_at}:\n{' ' * 12}{floats[0]}.fill_(float('inf'))\n"
            )
        made = "".join(f"        {name} = {text}\n" for name, text in self.batch.items())
        cast = ", ".join(f"{n}.to(dtype)" if n in floats else n for n in self.batch)
        return (
            "def batches(dtype):\n    found = []\n    for k in range(3):\n"
            f"        torch.manual_seed(100 + k)\n{made}{spoil}"
            f"        found.append(({cast},))\n    return found\n"
        )
