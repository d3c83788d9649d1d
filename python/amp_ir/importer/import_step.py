# SPDX-License-Identifier: Apache-2.0
"""Import: convert a captured step (FX graph of functional ATen ops) to a StepModule in Relax.

One pass over the graph. The converter of each node's overload (`converters/<family>.py`) emits
Relax and `amp_ir.*` ops that carry the node's location as their span; the import then compares
the result's shape and dtype with those of PyTorch's fake tensors.
"""

from __future__ import annotations

import contextlib
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import fx
from tvm import relax

from amp_ir.dialect.external_call import ResultSpec
from amp_ir.errors import UnsupportedOpError
from amp_ir.importer.converters import ConversionError, Emitter, converter_of
from amp_ir.importer.converters.emitter import RANDOM_STATE, dtype_name
from amp_ir.importer.converters.promotion import DTYPE_NAMES, Scalar, dtype_of, is_scalar, shape_of
from amp_ir.importer.external_call import convert_external, is_complex_call, reads_number
from amp_ir.importer.loop import convert_loop
from amp_ir.ir.captured_loop import LOOP_KEY
from amp_ir.ir.captured_step import CapturedInput, CapturedStep
from amp_ir.ir.empty_tensors import has_no_elements, number_everywhere, results_of_nothing
from amp_ir.ir.index_check import ASSERTIONS
from amp_ir.ir.location import META_KEY, Location, to_span
from amp_ir.ir.memory_order import memory_order
from amp_ir.ir.random_draws import DRAW_KEY, number_draws
from amp_ir.ir.step_module import InputSpec, OutputSpec, Role, Signature, StepModule

# The part of torch's seed that the random ops use: their hash works on 32-bit words, and a
# non-negative int64 survives every conversion.
_SEED_MASK = 0x7FFFFFFF


def import_step(captured: CapturedStep) -> StepModule:
    """Convert a captured step to IR.

    Ensures:  `main` has one parameter per input, in order, and returns one tuple field per output;
              its ops are those of Relax and of the dialect, each with a location as span. A step
              with random ops has one more state input and output, "random_state" (int64[2]: seed
              of `torch.initial_seed()`, number of steps done).
    Errors:   UnsupportedOpError, once, listing every op that cannot be converted.
    """
    number_draws(captured.graph.graph)
    emitter, parameters, outputs = _convert(captured)
    inputs = [
        InputSpec(one.name, one.role, shape_of(parameter), dtype_of(parameter), _order_of(one))
        for one, parameter in zip(captured.inputs, parameters, strict=True)
    ]
    # Of a new gradient it is that of its parameter, as PyTorch accumulates it.
    orders = {f"{one.name}.grad": one.order for one in inputs if one.role is Role.PARAMETER}
    results = [
        OutputSpec(
            *(one.name, one.role, shape_of(value), dtype_of(value), one.updates),
            orders.get(one.name, ()) if one.updates is None else (),
        )
        for one, value in zip(captured.outputs, outputs, strict=True)
    ]
    state: dict[str, torch.Tensor | Callable[[], torch.Tensor]] = {
        one.name: one.tensor_or_reader
        for one in captured.inputs
        if one.role is not Role.BATCH and one.tensor_or_reader is not None
    }
    if emitter.random_state is not None:
        inputs.append(InputSpec(RANDOM_STATE, Role.RANDOM_STATE, (2,), "int64"))
        results.append(OutputSpec(RANDOM_STATE, Role.RANDOM_STATE, (2,), "int64", len(inputs) - 1))
        state[RANDOM_STATE] = torch.tensor([torch.initial_seed() & _SEED_MASK, 0])
    return StepModule(
        ir=emitter.finish(),
        signature=Signature(
            tuple(inputs), tuple(results), captured.flatten_batch, captured.unflatten_results
        ),
        state=state,
        notes=captured.notes,
        hooks=captured.hooks,
    )


def _order_of(one: CapturedInput) -> tuple[int, ...]:
    """Return the order of a tensor's dimensions in memory, if a step works on it where it is.

    A program refuses one that has none.
    """
    held = one.tensor_or_reader
    if one.role is Role.GRADIENT and callable(held):
        held = held()
    if one.role is Role.BATCH or not isinstance(held, torch.Tensor):
        return ()
    return memory_order(held) or ()


def _convert(captured: CapturedStep) -> tuple[Emitter, list[relax.Var], list[relax.Expr]]:
    """Fill `main`; the random state, where there is one, becomes its last input and output."""
    builder = relax.BlockBuilder()
    emitter = Emitter(builder)
    parameters = _parameters(captured)
    graph = _Graph(captured.graph, emitter, parameters)
    try:
        with builder.function("main"):
            with builder.dataflow():
                outputs = graph.convert()
                results, inputs = list(outputs), list(parameters)
                if emitter.random_state is not None:
                    inputs.append(emitter.random_state)
                    results.append(emitter.next_random_state())
                result = builder.emit_output(relax.Tuple(results))
            builder.emit_func_output(result, inputs)
    except BaseException:
        # The scopes leave a block behind, of which TVM would warn beside the error.
        builder._end_block()
        raise
    graph.raise_if_unsupported()
    return emitter, parameters, outputs


def _parameters(captured: CapturedStep) -> list[relax.Var]:
    taken: set[str] = {RANDOM_STATE}
    placeholders = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
    return [
        relax.Var(_unique_name(one, taken), _type_of_input(node.meta["val"]))
        for one, node in zip(captured.inputs, placeholders, strict=True)
    ]


def _type_of_input(value: torch.Tensor) -> relax.TensorType:
    """Return a parameter's type; the walk over the graph reports a dtype that amp_ir lacks."""
    if value.is_complex():
        return ResultSpec.of(value).type_
    return relax.TensorType(list(value.shape), DTYPE_NAMES.get(value.dtype, "float32"))


def _unique_name(one: CapturedInput, taken: set[str]) -> str:
    """Return the input's name with invalid TVMScript characters replaced, numbered if taken."""
    stem = re.sub(r"\W", "_", one.name)
    stem = f"p_{stem}" if not stem[:1].isidentifier() else stem
    name, count = stem, 1
    while name in taken:
        count += 1
        name = f"{stem}_{count}"
    taken.add(name)
    return name


@attrs.frozen
class _Unsupported:
    """A call that cannot be converted; `reason` is empty where its overload has no converter."""

    op: str
    reason: str
    location: Location


class _Graph:
    """The walk over an FX graph: the conversion of each node, and the calls without one."""

    def __init__(
        self, graph: fx.GraphModule, emitter: Emitter, parameters: Sequence[relax.Var]
    ) -> None:
        self._graph = graph
        self._emitter = emitter
        self._inputs = iter(parameters)
        self._values: dict[fx.Node, Any] = {}
        self._unsupported: list[_Unsupported] = []

    def convert(self) -> list[relax.Expr]:
        """Convert every node; return the outputs of the graph."""
        outputs: Any = ()
        for node in self._graph.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = next(self._inputs)
                self._note_dtype(node)
            elif node.op == "output":
                outputs = self._lookup(node.args[0])
                self._note_complex(node.all_input_nodes)
            else:
                self._convert_or_note(node)
        return list(outputs)

    def raise_if_unsupported(self) -> None:
        """Report every call that could not be converted, at once."""
        if self._unsupported:
            raise UnsupportedOpError(_explain(self._unsupported))

    def _note_dtype(self, placeholder: fx.Node) -> None:
        dtype = placeholder.meta["val"].dtype
        if dtype not in DTYPE_NAMES:
            op = f"input {placeholder.name}"
            self._unsupported.append(_Unsupported(op, f"dtype {dtype}", Location()))

    def _note_complex(self, outputs: Sequence[fx.Node]) -> None:
        for node in outputs:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_complex():
                reason = (
                    f"leaves the step with dtype {value.dtype}; return torch.view_as_real of it"
                )
                location = node.meta.get(META_KEY) or Location()
                self._unsupported.append(_Unsupported(str(node.target), reason, location))

    def _convert_or_note(self, node: fx.Node) -> None:
        location = node.meta.get(META_KEY) or Location()
        self._emitter.span = to_span(location)
        try:
            self._values[node] = self._convert_node(node)
        except ConversionError as error:
            op = str(node.target)
            self._unsupported.append(_Unsupported(op, str(error), location))
            self._values[node] = self._stand_in(node)

    def _convert_node(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self._graph)
            return self._emitter.tensor(value) if isinstance(value, torch.Tensor) else value
        if node.target is operator.getitem:
            return self._lookup(node.args[0])[node.args[1]]
        if node.target in ASSERTIONS:
            # `jit` makes them checks; a graph of torch.compile is not rolled back.
            raise ConversionError("asserts a value in a graph; compile the step by amp_ir.jit")
        if LOOP_KEY in node.meta:
            operands = self._lookup(node.args[0])
            return convert_loop(self._emitter, node.meta[LOOP_KEY], operands, self._convert_body)
        if is_complex_call(node):
            return convert_external(self._emitter, node, self._lookup)
        of_nothing = self._of_nothing(node)
        if of_nothing is not None:
            _check(of_nothing, node.meta["val"])
            return of_nothing
        converter = converter_of(node.target)
        if converter is None:
            return convert_external(self._emitter, node, self._lookup)
        value = self._converted(node, converter)
        _check(value, node.meta["val"])
        return value

    def _converted(self, node: fx.Node, converter: Callable[..., Any]) -> Any:
        self._emitter.result = node.meta["val"]
        self._emitter.draw_index = node.meta.get(DRAW_KEY)
        arguments = [self._lookup(argument) for argument in node.args]
        options = {name: self._lookup(argument) for name, argument in node.kwargs.items()}
        try:
            return converter(self._emitter, *arguments, **options)
        except ConversionError as error:
            # PyTorch may do what the converter cannot. Of a number that changes it may not: the
            # caller compiles the op for each of its values, as one that fuses.
            if not reads_number(node):
                with contextlib.suppress(ConversionError):
                    return convert_external(self._emitter, node, self._lookup)
            raise error from None
        except Exception as error:
            # A converter that takes a number as a constant computes with it in Python.
            if not reads_number(node):
                raise
            raise ConversionError(
                "takes as a constant a number that changes between steps, as a learning rate does; "
                "pass the number to the step as an argument, which compiles again for each value"
            ) from error

    def _convert_body(
        self, body: fx.GraphModule, emitter: Emitter, parameters: Sequence[relax.Var]
    ) -> list[relax.Expr]:
        inner = _Graph(body, emitter, parameters)
        outputs = inner.convert()
        self._unsupported += inner._unsupported
        return outputs

    def _of_nothing(self, node: fx.Node) -> Any:
        """Return a node's value when it computes on tensors without elements, if that is known."""
        expected = node.meta["val"]
        if has_no_elements(expected):
            several = isinstance(expected, (tuple, list))
            values = [self._filled(one) for one in (expected if several else [expected])]
            return tuple(values) if several else values[0]
        results = results_of_nothing(node)
        if results is None:
            return None
        known = [self._known(one) for one in results]
        return tuple(known) if isinstance(expected, (tuple, list)) else known[0]

    def _known(self, result: torch.Tensor | fx.Node | None) -> relax.Expr | None:
        if result is None:
            return None
        if isinstance(result, fx.Node):
            value: relax.Expr = self._values[result]
            return value
        number = number_everywhere(result) if result.numel() else 0
        return self._emitter.tensor(result) if number is None else self._filled(result, number)

    def _filled(self, like: torch.Tensor | None, number: Scalar = 0) -> relax.Expr | None:
        if like is None:
            return None
        return self._emitter.full(tuple(like.shape), number, dtype_name(like.dtype))

    def _lookup(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return self._values[argument]
        if isinstance(argument, (list, tuple)):
            return [self._lookup(one) for one in argument]
        return argument

    def _stand_in(self, node: fx.Node) -> Any:
        """Return a value of the right type, so that the walk continues and reports every error."""
        expected = node.meta.get("val")
        if isinstance(expected, (tuple, list)):
            return tuple(self._zeros(one) for one in expected)
        return self._zeros(expected)

    def _zeros(self, expected: Any) -> relax.Expr:
        if not isinstance(expected, torch.Tensor):
            return self._emitter.constant(0, "float32")
        dtype = DTYPE_NAMES.get(expected.dtype, "float32")
        # An extent that depends on values has no number; the op that made it is reported.
        shape = [extent if isinstance(extent, int) else 1 for extent in expected.shape]
        return self._emitter.full(shape, 0, dtype)


def _check(value: Any, expected: Any) -> None:
    """Reject a conversion whose type differs from PyTorch's result."""
    if isinstance(expected, (tuple, list)):
        for one, wanted in zip(value, expected, strict=True):
            if one is not None:
                _check(one, wanted)
        return
    if not isinstance(expected, torch.Tensor) or is_scalar(value):
        return
    got = (shape_of(value), dtype_of(value))
    wanted = (tuple(expected.shape), dtype_name(expected.dtype))
    if got != wanted:
        raise ConversionError(
            f"its converter gives {_type_text(*got)} and PyTorch {_type_text(*wanted)}; "
            f"this is a bug in amp_ir"
        )


def _type_text(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}{list(shape)}"


def _explain(unsupported: list[_Unsupported]) -> str:
    """Return the message that names each kind of rejected call, its count and first location."""
    kinds: dict[tuple[str, str], list[_Unsupported]] = {}
    for one in unsupported:
        kinds.setdefault((one.op, one.reason), []).append(one)
    lines = []
    for (op, reason), calls in kinds.items():
        count = "1 call" if len(calls) == 1 else f"{len(calls)} calls"
        because = f": {reason}" if reason else ""
        lines.append(f"  {op}{because} ({count}, first in {calls[0].location})")
    return "\n".join(
        [
            f"the step has {len(kinds)} kinds of op that amp_ir cannot import:"
            if len(kinds) > 1
            else "the step has an op that amp_ir cannot import:",
            *lines,
            "Write that part of the step with other PyTorch ops, or compute it before the step and "
            "pass the result in the batch.",
        ]
    )
