# SPDX-License-Identifier: Apache-2.0
"""The backend that `torch.compile(model, backend="amp_ir")` calls with each of its graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import UserError
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import _disable_current_modes

from amp_ir.amp.hints import FULL_DTYPE
from amp_ir.api import autocast
from amp_ir.capture.functional import decomposition_table
from amp_ir.capture.symbolic_float import FloatTape
from amp_ir.errors import AmpIrError
from amp_ir.integrations.torch_compile.backend_options import BackendOptions
from amp_ir.integrations.torch_compile.graph_program import boxed
from amp_ir.integrations.torch_compile.halves import Halves, compiled_whole, program_in
from amp_ir.integrations.torch_compile.import_graph import import_graph
from amp_ir.integrations.torch_compile.shape_family import ShapeFamily, has_symbols
from amp_ir.integrations.torch_compile.whole_ops import whole_ops
from amp_ir.ir.step_module import StepModule

Compiled = Callable[..., Any]
# What a graph cannot be compiled for; it then runs as PyTorch runs it.
_REFUSALS = (
    AmpIrError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
    UserError,
)
_said: set[str] = set()


def amp_ir_backend(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one graph of `torch.compile`, forward and backward, with amp_ir's rules.

    A graph that amp_ir refuses runs in eager PyTorch, in its own dtypes; one warning says so and
    why. A graph of symbolic sizes is compiled for each shape that comes.

    Args:
        graph_module: what Dynamo captured.
        example_inputs: fake tensors, and symbolic integers where shapes are dynamic.
        options: see `BackendOptions`.
        mode: not supported.

    Raises:
        OptionError: an option is wrong.
    """
    chosen = BackendOptions.of(options, mode)
    if has_symbols(example_inputs):
        return ShapeFamily(
            graph_module, lambda static, given: _compiled(static, given, chosen), chosen.max_shapes
        )
    return _compiled(graph_module, example_inputs, chosen)


def _compiled(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], options: BackendOptions
) -> Compiled:
    """Return a graph of static shapes, compiled; or as PyTorch runs it."""
    graphs = _Graphs(options)
    made = aot_autograd(
        fw_compiler=_as_it_is,
        bw_compiler=_as_it_is,
        inference_compiler=graphs.inference,
        partition_fn=graphs.partition,
        decompositions=decomposition_table(FloatTape([], _no_floats)),
    )
    try:
        # A backward pass may be called again, retain_graph=True.
        with torch._functorch.config.patch(donated_buffer=False), whole_ops():
            compiled: Compiled = made(graph_module, example_inputs)
            return compiled
    except _REFUSALS as error:
        _say_once(error)
        return graph_module.forward


def _no_floats(_reason: str) -> None:
    """Refuse a use of a followed float; graphs of Dynamo have none."""


def _say_once(error: Exception) -> None:
    reason = str(error).strip() or type(error).__name__
    if reason not in _said:
        _said.add(reason)
        warnings.warn(
            "amp_ir cannot compile a graph of torch.compile, which runs in eager PyTorch instead, "
            f"without amp_ir's mixed precision: {reason}",
            stacklevel=3,
        )


def _as_it_is(graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Compiled:
    """Return the program inside of a graph that `_Graphs.partition` made."""
    return boxed(program_in(graph_module))


class _Graphs:
    """The graphs that AOTAutograd makes of one of Dynamo's, compiled."""

    def __init__(self, options: BackendOptions) -> None:
        self._options = options

    def inference(self, graph_module: fx.GraphModule, _inputs: Sequence[Any]) -> Compiled:
        """Compile a graph without a backward pass."""
        # AOTAutograd traces with fake tensors, and here real memory is asked for.
        with _disable_current_modes():
            imported = import_graph(graph_module)
            return boxed(compiled_whole(imported, self._cast(imported.module), self._options))

    def partition(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **known: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Compile a joint graph; return a graph for each half that calls its program."""
        static = frozenset(known.get("static_lifetime_input_indices") or ())
        descriptions = joint.graph.find_nodes(op="output")[0].meta.get("desc")
        with _disable_current_modes():
            imported = import_graph(joint, forward_outputs=num_fwd_outputs, parameters=static)
            halves = Halves(imported, self._cast(imported.module), joint, num_fwd_outputs)
            return halves.graphs(self._options, descriptions)

    def _cast(self, mod: StepModule) -> StepModule:
        options = self._options
        if options.amp_dtype in (None, FULL_DTYPE):
            return mod
        cast: StepModule = autocast(
            mod,
            amp_dtype=options.amp_dtype,
            policy=options.policy,
            overrides=options.overrides,
        )
        return cast
