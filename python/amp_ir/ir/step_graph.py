# SPDX-License-Identifier: Apache-2.0
"""`main` as plain records: which op makes which tensor, and who reads it.

Reading the IR once into Python objects makes everything after it (rules, placement, rewriting) a
loop over lists. Tuples are flattened: a value is always one tensor. A reshape or a permutation of
dimensions is a view: it has no dtype of its own and stands for the tensor it looks at.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import attrs
import tvm
from tvm import relax, tirx

from amp_ir.dialect.external_call import NAME as EXTERNAL
from amp_ir.dialect.external_call import external_op
from amp_ir.errors import OptionError
from amp_ir.ir.dataflow import Dataflow
from amp_ir.ir.location import Location, from_span
from amp_ir.ir.selection import names_of_op

VIEWS = frozenset(
    {"relax.reshape", "relax.permute_dims", "relax.expand_dims", "relax.squeeze", "relax.flatten"}
)
_ALIASES = (relax.Var, tvm.ir.GenericConst, relax.Tuple, relax.TupleGetItem)
# A value id, a nested tuple of them, or an argument that is not a tensor (a shape, a number).
Tree: TypeAlias = "int | tuple[Tree, ...] | relax.Expr"


@attrs.define(eq=False)
class Value:
    """One tensor of the program.

    `op` is the position of the op that makes it, -1 for an input and -2 for a constant. `root` is
    the value that a view looks at, through all views; the value itself where it is none.
    """

    ty: relax.TensorType
    shape: tuple[int, ...]
    dtype: str
    size: int
    op: int
    expr: relax.Expr | None = None
    root: int = -1
    readers: list[int] = attrs.field(factory=list)

    @property
    def is_constant(self) -> bool:
        """Return whether the value is a constant of the program."""
        return self.op == -2


@attrs.define(eq=False)
class Op:
    """One call. `args` is one tree per argument, `reads` the tensors among them in order."""

    position: int
    name: str
    call: relax.Call
    variable: relax.Var
    args: list[Tree]
    reads: list[int]
    result: Tree
    results: list[int]
    location: Location
    is_view: bool

    @property
    def label(self) -> str:
        """The op's name for people: that of PyTorch's op for an external call, "mylib::scale"."""
        return external_op(self.call) if self.name == EXTERNAL else self.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a user may select the op."""
        return *names_of_op(self.name), self.label


@attrs.define(eq=False)
class StepGraph:
    """`main` as records: its inputs, values, ops and outputs."""

    inputs: list[int]
    values: list[Value]
    ops: list[Op]
    output: Tree
    outputs: list[int]
    function: relax.Function
    has_locations: bool

    def maker(self, leaf: int) -> Op | None:
        """Return the op that makes a value; None for an input or a constant."""
        position = self.values[leaf].op
        return None if position < 0 else self.ops[position]


def leaves(tree: Tree) -> list[int]:
    """Return the value ids of a tree, in order."""
    if isinstance(tree, int):
        return [tree]
    if isinstance(tree, tuple):
        return [leaf for field in tree for leaf in leaves(field)]
    return []


class _Reader:
    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.trees: dict[relax.Var, Tree] = {}

    def new_value(self, ty: relax.TensorType, op: int, expr: relax.Expr | None = None) -> int:
        shape = tuple([int(extent) for extent in ty.shape.values])
        number = len(self.values)
        size = math.prod(shape)
        self.values.append(Value(ty, shape, str(ty.dtype), size, op, expr, number))
        return number

    def new_tree(self, ty: relax.Type, op: int, variable: relax.Var) -> Tree:
        if isinstance(ty, relax.TensorType):
            _check_static(ty, f"`{variable.name}` in `main`")
            return self.new_value(ty, op)
        if isinstance(ty, relax.TupleType):
            return tuple(self.new_tree(field, op, variable) for field in ty.fields)
        raise OptionError(
            f"`{variable.name}` in `main` is {ty}, and autocast takes calls that return tensors or "
            "tuples of them; take it out of `main` first"
        )

    def tree_of(self, expr: relax.Expr) -> Tree:
        if isinstance(expr, relax.Var):
            return self.trees[expr]
        if isinstance(expr, tvm.ir.GenericConst):
            return self.new_value(expr.ty, -2, expr)
        if isinstance(expr, relax.Tuple):
            return tuple(self.tree_of(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            whole = self.tree_of(expr.tuple_value)
            assert isinstance(whole, tuple)
            return whole[int(expr.index)]
        return expr

    def read_call(self, variable: relax.Var, call: relax.Call) -> None:
        position = len(self.ops)
        args = [self.tree_of(argument) for argument in call.args]
        reads = [leaf for tree in args for leaf in leaves(tree)]
        name = call.op.name
        result = self.new_tree(variable.ty, position, variable)
        is_view = name in VIEWS and len(reads) == 1
        op = Op(
            position,
            name,
            call,
            variable,
            args,
            reads,
            result,
            leaves(result),
            from_span(call.span),
            is_view,
        )
        self.ops.append(op)
        self.trees[variable] = result
        for leaf in reads:
            self.values[leaf].readers.append(position)
        if is_view:
            self.values[op.results[0]].root = self.values[reads[0]].root


def _check_static(ty: relax.TensorType, what: str) -> None:
    extents = ty.shape.values if isinstance(ty.shape, relax.ShapeExpr) else (None,)
    if not all(isinstance(extent, tirx.IntImm) for extent in extents):
        raise OptionError(
            f"{what} is {ty}, and autocast takes tensors of static shape; give every extent a "
            'number, as relax.transform.BindSymbolicVars({"n": 8}, "main") does'
        )


def read_step(mod: tvm.IRModule) -> StepGraph:
    """Read `main`.

    Raises:
        OptionError: `main` is missing, or holds something other than calls and tuples of tensors
            whose shapes are static.
    """
    flow = Dataflow(mod)
    function = flow.main
    reader = _Reader()
    inputs = []
    for parameter in function.params:
        if not isinstance(parameter.ty, relax.TensorType):
            raise OptionError(
                f"input `{parameter.name}` of `main` is {parameter.ty}, and autocast takes "
                "tensors; make each tensor of it an input of its own"
            )
        _check_static(parameter.ty, f"input `{parameter.name}` of `main`")
        number = reader.new_value(parameter.ty, -1, parameter)
        reader.trees[parameter] = number
        inputs.append(number)
    for binding in flow.bindings:
        value = binding.value if isinstance(binding, relax.VarBinding) else None
        if isinstance(value, relax.Call) and isinstance(value.op, tvm.ir.Op):
            reader.read_call(binding.var, value)
        elif isinstance(value, _ALIASES):
            reader.trees[binding.var] = reader.tree_of(value)
        else:
            what = type(binding if value is None else value).__name__
            if isinstance(value, relax.Call):
                what = f"a call of {value.op}"
            raise OptionError(
                f"`{binding.var.name}` in `main` is bound to {what}, and autocast takes calls of "
                "ops and tuples only; inline functions, and take out branches and what is no "
                "tensor first"
            )
    output = reader.tree_of(flow.result)
    has_locations = any(op.location.phase != "forward" for op in reader.ops)
    return StepGraph(
        inputs, reader.values, reader.ops, output, leaves(output), function, has_locations
    )
