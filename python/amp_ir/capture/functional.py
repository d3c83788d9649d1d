# SPDX-License-Identifier: Apache-2.0
"""Functionalization of the traced graph: no op writes, composite ops are decomposed, no dead code.

A second `make_fx` over the graph of the first; one pass cannot do both, since user code such as
`requires_grad_` is not allowed under `functionalize`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from amp_ir.capture.decompositions.layouts import view
from amp_ir.capture.decompositions.logit import logit_backward
from amp_ir.capture.decompositions.margin_loss import multi_margin_loss
from amp_ir.capture.factor_layouts import factor_by_strides
from amp_ir.capture.patches.module_methods import module_methods_kept
from amp_ir.capture.replay import Replay
from amp_ir.capture.symbolic_float import FloatTape, plain

try:
    # Not part of PyTorch's public interface. The public table takes 0.1 s to make: it has an entry
    # of each composite op too, which tracing decomposes without one where no kernel computes it.
    from torch._decomp import _core_aten_decompositions_post_autograd as _of_pytorch
except ImportError:
    from torch._decomp import core_aten_decompositions as _of_pytorch

aten = torch.ops.aten

# Fused ops that PyTorch could decompose: casting rules refer to them (design D3). Of the last one
# its decomposition is wrong: where a row has fewer labels than others, it adds class 0 (2.13).
FUSED_OPS = frozenset(
    """
    convolution convolution_backward addmm mm bmm baddbmm
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward
    native_group_norm native_group_norm_backward native_batch_norm native_batch_norm_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    embedding embedding_dense_backward
    nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward
    avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool3d
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward
    gelu gelu_backward silu silu_backward tanh_backward sigmoid_backward threshold_backward relu
    leaky_relu leaky_relu_backward elu elu_backward softplus softplus_backward
    hardtanh hardtanh_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward
    celu softshrink mish mish_backward log_sigmoid_forward log_sigmoid_backward threshold
    native_dropout native_dropout_backward
    mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss
    huber_loss_backward binary_cross_entropy binary_cross_entropy_backward
    soft_margin_loss soft_margin_loss_backward
    index index_put index_add index_copy index_fill scatter gather scatter_add
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_nearest2d_backward
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bilinear2d_backward
    upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    cumsum sort topk mv
    multilabel_margin_loss_forward
    """.split()
)
# Its decomposition returns the attention weights where its backward op reads logarithms of sums.
_ATTENTION_OF_CPU = "_scaled_dot_product_flash_attention_for_cpu"
# What is decomposed when loops over time steps are found (cell_loops/).
_KEPT = FUSED_OPS | {"select_backward", "select_scatter", _ATTENTION_OF_CPU}
_ALIASES = frozenset({aten.alias.default, aten.detach.default})
_RENAMES = _ALIASES | {aten.lift_fresh_copy.default}
# functionalize ends with writes to the inputs (copy_); the outputs hold the same values.
_COPIES = frozenset({aten.copy_.default, aten.copy.default})


@functools.lru_cache(maxsize=1)
def core_decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return core ATen's decompositions, and that of the one composite op with a CPU kernel."""
    shuffle = aten.native_channel_shuffle.default
    return {**dict(_of_pytorch().items()), shuffle: shuffle.decompose}


@functools.lru_cache(maxsize=1)
def _core_table() -> Mapping[Any, Callable[..., Any]]:
    table = core_decompositions()
    return {op: function for op, function in table.items() if _packet_name(op) not in _KEPT}


def _packet_name(op: Any) -> str:
    return str(getattr(op, "overloadpacket", op).__name__)


def decomposition_table(tape: FloatTape) -> dict[Any, Callable[..., Any]]:
    """Return core ATen's decompositions without FUSED_OPS, with followed scalars kept symbolic."""

    def follow(value: float) -> float:
        return tape.find(value) or value

    def lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
        # PyTorch's kernel uses the form that is exact at the nearer end.
        if abs(plain(weight)) < 0.5:
            return _wide(lambda a, b: a + (b - a) * follow(weight), start, end)
        return _wide(lambda a, b: b - (b - a) * (1 - follow(weight)), start, end)

    def addcmul(
        x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, value: float = 1
    ) -> torch.Tensor:
        return _wide(lambda a, b, c: a + _scaled(b, value) * c, x, left, right)

    def addcdiv(
        x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, value: float = 1
    ) -> torch.Tensor:
        return _wide(lambda a, b, c: a + _scaled(b, value) / c, x, left, right)

    def add(x: Any, y: Any, *, alpha: float = 1) -> Any:
        symbol = tape.find(alpha)
        return NotImplemented if symbol is None else x + y * symbol

    def subtract(x: Any, y: Any, *, alpha: float = 1) -> Any:
        symbol = tape.find(alpha)
        return NotImplemented if symbol is None else x - y * symbol

    followed: dict[Any, Callable[..., Any]] = {
        aten.add.Tensor: add,
        aten.sub.Tensor: subtract,
        aten.lerp.Scalar: lerp,
        aten.addcmul.default: addcmul,
        aten.addcdiv.default: addcdiv,
        aten.view.default: view,
        aten.logit_backward.default: logit_backward,
        aten.multi_margin_loss.default: multi_margin_loss,
    }
    return {**_core_table(), **followed}


def _scaled(x: torch.Tensor, value: float) -> torch.Tensor:
    return x if value == 1 else x * value


def _wide(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Compute in float32 where the tensors are narrower, as ATen's fused kernels do."""
    dtype = tensors[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return function(*tensors)
    return function(*(tensor.to(torch.float32) for tensor in tensors)).to(dtype)


def make_functional(
    traced: torch.fx.GraphModule,
    inputs: list[torch.Tensor],
    tape: FloatTape,
    mode: FakeTensorMode,
) -> torch.fx.GraphModule:
    """Return a graph of the same inputs and outputs without writes, in core ATen and FUSED_OPS."""

    without_names(traced)
    factor_by_strides(traced.graph)

    def replay(*flat: torch.Tensor) -> Any:
        return Replay(traced, mode).run(*flat)

    functional = trace_functional(replay, inputs, decomposition_table(tape), mode)
    for node in functional.graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = mode.from_tensor(getattr(functional, node.target))
    clean(functional.graph)
    return functional


def trace_functional(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    mode: FakeTensorMode,
) -> torch.fx.GraphModule:
    """Return the graph of a function of fake tensors, without writes."""
    with (
        mode, torch.no_grad(), torch._C._DisableAutocast(), uncompiled_graphs(),
        module_methods_kept(),
    ):  # fmt: skip
        return make_fx(
            torch.func.functionalize(function, remove="mutations"),
            decomposition_table=dict(decompositions),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
            _disable_torch_fn_metadata_mode=True,
        )(*(value.detach() for value in inputs))


def clean(graph: torch.fx.Graph) -> None:
    """Drop ops that only rename a value, writes back to inputs, and dead code.

    In a graph without writes a copy of the same layout equals the value itself.
    """
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.copy.default and not _same_kind(*map(_value, _operands(node)[:2])):
            _replace_by_cast(graph, node)
        elif node.target in _COPIES:
            node.replace_all_uses_with(_operands(node)[1])
            graph.erase_node(node)
        elif node.target in _RENAMES or _is_plain_clone(node):
            node.replace_all_uses_with(_operands(node)[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the leading arguments that are nodes."""
    return [argument for argument in node.args if isinstance(argument, torch.fx.Node)]


def _value(node: torch.fx.Node) -> Any:
    return node.meta["val"]


def _is_plain_clone(node: torch.fx.Node) -> bool:
    """Return whether a clone keeps the layout: a `view` after it may need the changed strides."""
    if node.target is not aten.clone.default:
        return False
    return bool(_value(_operands(node)[0]).stride() == _value(node).stride())


def _same_kind(target: torch.Tensor, source: torch.Tensor) -> bool:
    return target.shape == source.shape and target.dtype == source.dtype


def _replace_by_cast(graph: torch.fx.Graph, node: torch.fx.Node) -> None:
    """Replace `copy(target, source)` by the source, cast and expanded to the target's kind."""
    target, source = _operands(node)[:2]
    wanted, given = _value(target), _value(source)
    with graph.inserting_before(node), given.fake_mode:
        if given.dtype != wanted.dtype:
            options = {"dtype": wanted.dtype}
            source = graph.call_function(aten._to_copy.default, (source,), options)
            source.meta.update(node.meta, val=torch.empty_like(given, dtype=wanted.dtype))
        if given.shape != wanted.shape:
            source = graph.call_function(aten.expand.default, (source, list(wanted.shape)))
            source.meta.update(node.meta)
    node.replace_all_uses_with(source)
    graph.erase_node(node)


def uncompiled_graphs() -> contextlib.AbstractContextManager[None]:
    """Disable code generation for graphs traced inside: nothing calls them.

    Writing and compiling the code takes a seventh of the time of a capture.
    """
    try:
        # Not part of PyTorch's public interface; without it, capture only takes longer.
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        return contextlib.nullcontext()
    manager: contextlib.AbstractContextManager[None] = _use_lazy_graph_module(True)
    return manager


def without_names(traced: torch.fx.GraphModule) -> None:
    """Drop nodes that only cost time in the second pass: aliases, profiling, dead code.

    A detached tensor is its source wherever gradients are not recorded, writes included.
    """
    for node in reversed(traced.graph.nodes):
        if node.target in _ALIASES:
            node.replace_all_uses_with(node.args[0])
            traced.graph.erase_node(node)
        elif getattr(node.target, "namespace", "") == "profiler":
            # Marks that a step makes by the op itself; patches/install.py drops record_function's.
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
