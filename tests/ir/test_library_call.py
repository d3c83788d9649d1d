# SPDX-License-Identifier: Apache-2.0
"""Library calls are read as they were written, in the order of arguments that C++ states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from tvm import relax
from tvm.ir import StringImm

from amp_ir.ir.library_call import (
    ARGUMENTS,
    Layout,
    LibraryAttention,
    LibraryCall,
    LibraryConvolution,
    LibraryMatmul,
    LibraryPack,
    LibraryRecurrence,
    operands_of,
    read,
    write,
)
from amp_ir.ir.strided_view import StridedView

KERNELS = Path(__file__).resolve().parents[2] / "src" / "kernels"
HEADER = KERNELS / "tensors" / "library_calls.h"
TYPE = relax.TensorType((4, 4), "float32")
OUT = Layout((4, 4), (1, 4))
OF_ONEDNN: dict[str, Any] = {"library": "onednn", "type_": TYPE}


def tensor(name: str) -> relax.Var:
    return relax.Var(name, TYPE)


def view(name: str) -> StridedView:
    return StridedView(tensor(name), (4, 4), (1, 4))


def matmul(**fields: Any) -> LibraryMatmul:
    return LibraryMatmul(**OF_ONEDNN, a=view("a"), b=view("b"), out=OUT, **fields)


def convolution(*operands: str) -> LibraryConvolution:
    lists: dict[str, Any] = {"strides": (2, 1), "padding": (0, 1), "dilation": (1, 3)}
    views: dict[str, Any] = {name: view(name) for name in operands}
    return LibraryConvolution(**OF_ONEDNN, out=OUT, groups=2, **lists, **views)


def recurrence(verb: str) -> LibraryRecurrence:
    operands = {name: tensor(name) for name in operands_of(verb)}
    return LibraryRecurrence(
        **OF_ONEDNN, verb=verb, operands=operands, dims=(5, 2, 4), reverse=True
    )


ATTENTION = LibraryAttention(
    library="torch", type_=TYPE, q=view("q"), k=view("k"), v=view("v"), is_causal=True, scale=0.5
)
CALLS = {
    call.verb: call
    for call in (
        matmul(bias=tensor("bias"), allow_tf32=True),
        matmul(c=tensor("c"), beta=tensor("beta")),
        matmul(activation="relu", is_packed=True),
        LibraryPack(**OF_ONEDNN, b=view("b")),
        convolution("x", "w"),
        convolution("grad", "w"),
        convolution("grad", "x"),
        ATTENTION,
        attrs.evolve(ATTENTION, grad=view("grad"), out=view("out"), lse=tensor("lse")),
        *(
            recurrence(f"{kind}{suffix}")
            for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu")
            for suffix in ("", "_backward")
        ),
    )
}


def fields_of(call: LibraryCall | None) -> dict[str, Any]:
    assert call is not None
    return {field.name: getattr(call, field.name) for field in attrs.fields(type(call))}


@pytest.mark.parametrize("verb", ARGUMENTS)
def test_what_is_written_is_read_field_by_field(verb: str) -> None:
    call = CALLS[verb]
    found = read(write(call))
    assert type(found) is type(call) and found is not None and found.symbol == call.symbol
    expected = fields_of(call)
    if verb == "matmul_packed":  # the library's own layout has no strides
        expected["b"] = attrs.evolve(call.b, strides=())
    assert fields_of(found) == expected


@pytest.mark.parametrize("verb", ARGUMENTS)
def test_a_planned_call_is_read_behind_its_workspace_and_before_its_results(verb: str) -> None:
    call = CALLS[verb]
    symbol, (_, arguments) = StringImm(call.symbol), write(call).args
    planned = [symbol, tensor("workspace"), *arguments.fields, tensor("result")]
    function = relax.ExternFunc("amp_ir.onednn.with_scratch")
    value = relax.Call(function, planned, None, [TYPE])
    relax.expr._update_type(value, TYPE)
    assert fields_of(read(value)) == fields_of(read(write(call)))


def test_a_field_is_replaced_by_name() -> None:
    other = tensor("other")
    call = read(write(CALLS["matmul"]))
    again = read(write(attrs.evolve(call, c=other, bias=None)))
    assert isinstance(again, LibraryMatmul) and again.symbol == "amp_ir.onednn.matmul_accumulate"
    assert again.c.same_as(other) and again.bias is None and again.alpha is None
    assert again.epilogue == "none+tf32"


def test_other_values_are_no_library_calls() -> None:
    x = tensor("x")
    view_call = relax.Call(relax.ExternFunc("amp_ir.view"), [x], None, [TYPE])
    for value in (x, relax.op.add(x, x), relax.Tuple([x]), view_call, relax.const(1.0)):
        assert read(value) is None


def stated(text: str) -> dict[str, list[str]]:
    """The arguments and results that the header states, by function."""
    comment = " ".join(line.removeprefix("//").strip() for line in text.splitlines())
    found = re.findall(r"(\w+)\(([^()]*)\) -> ((?:\w+, )*\w+)", comment)
    return {name: f"{given}, {results}".split(", ") for name, given, results in found}


def test_the_header_states_the_order_of_arguments() -> None:
    states = stated(HEADER.read_text())
    assert list(states) == list(ARGUMENTS)
    for verb, names in ARGUMENTS.items():
        assert states[verb][: len(names)] == list(names), verb


def test_the_native_functions_take_the_arguments_that_the_header_states() -> None:
    states = stated(HEADER.read_text())
    seen = set()
    for file in ("onednn/ffi.cc", "onednn/recurrence_ffi.cc", "cublaslt/ffi.cc", "torch/shim.cc"):
        text = (KERNELS / file).read_text()
        for function, parameters in re.findall(r"\bvoid (\w+)\(([^(){}]*)\) \{", text):
            verb = re.sub(r"(?<!^)(?=[A-Z])", "_", function).lower()
            if verb in states:
                seen.add(verb)
                names = [one.split()[-1] for one in parameters.split(",")]
                assert names == states[verb], f"{function} in {file}"
    assert seen == set(ARGUMENTS)
