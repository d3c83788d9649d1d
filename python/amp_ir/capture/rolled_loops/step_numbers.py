# SPDX-License-Identifier: Apache-2.0
"""Numbers that differ from step to step, as `x * t` and `t < lengths` have: entries of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from amp_ir.capture.cell_loops.graph_writer import GraphWriter, value

aten = torch.ops.aten
# Ops whose second argument may be such a number -> the op that takes a tensor there.
_WITH_TENSOR = {
    **{op: op for op in (aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor)},
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    aten.full.default: aten.expand.default,
}
_LOW_DTYPES = (torch.float16, torch.bfloat16)


def step_number(node: Node) -> float | int | None:
    """Return the number of a call that may differ from step to step; None where it has none."""
    if node.target not in _WITH_TENSOR or len(node.args) != 2:
        return None
    number = node.args[1]
    return number if type(number) in (int, float) else None  # type: ignore[return-value]


def dtype_of_number(node: Node) -> torch.dtype | None:
    """Return the dtype in which a tensor has the numbers of such calls; None where none has."""
    if node.target is aten.full.default:
        return value(node).dtype
    (source,) = node.all_input_nodes
    dtype = value(source).dtype
    if dtype.is_floating_point:
        # PyTorch computes with a number in float32 beside a low tensor.
        return torch.float32 if dtype in _LOW_DTYPES else dtype
    is_integer = dtype not in (torch.bool,) and not dtype.is_complex
    is_same = is_integer and type(node.args[1]) is int and not value(node).is_floating_point()
    return torch.int64 if is_same else None


def with_tensor(graph: torch.fx.Graph, node: Node, entry: Node) -> Node:
    """Write a call with the entry of a tensor in place of its number."""
    target = _WITH_TENSOR[node.target]  # type: ignore[index]
    if node.target is aten.full.default:
        return graph.call_function(target, (entry, node.args[0]))
    return graph.call_function(target, (node.args[0], entry))


def constant(
    writer: GraphWriter, numbers: Sequence[float | int], dtype: torch.dtype, device: torch.device
) -> Node:
    """Write a constant [steps] of the graph."""
    module = writer.graph.owning_module
    assert module is not None
    name = next(
        f"_step_numbers{k}" for k in range(1 << 30) if not hasattr(module, f"_step_numbers{k}")
    )
    tensor = torch.tensor(numbers, dtype=dtype)
    module.register_buffer(name, tensor)
    with writer.graph.inserting_before(next(iter(writer.graph.nodes))):
        node = writer.graph.get_attr(name)
    with writer.mode:
        node.meta["val"] = torch.empty(tensor.shape, dtype=dtype, device=device)
    return node
