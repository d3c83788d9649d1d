# SPDX-License-Identifier: Apache-2.0
"""Kernels whose outer extents are arguments: a step of another shape takes their machine code.

A step with a smaller batch or shorter sequences differs from the first one in how many rows its
kernels have, in where a row stands in a tensor, and in how many vectors long rows have. Opened,
these are parameters, and the virtual machine passes them at each call. The loops over the elements
of short rows keep their extents, so LLVM unrolls them as before. In kernels of a few hundred
elements, such as those of masks and positions, every number of a shape is opened: compiling one
takes longer than the divisions by unknown numbers in a million calls.

A division by a parameter is a product with its reciprocal, a parameter too: what LLVM makes of a
division by a known number (Granlund and Montgomery, "Division by invariant integers using
multiplication", PLDI 1994).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import tvm
import tvm_ffi
from tvm import relax, sym, tirx
from tvm.ir import Range, TensorLoad
from tvm.tirx import For, ForKind

from amp_ir.ir.memory_plan import PlannedStep
from amp_ir.ir.row_loops import ROW, is_over_blocks, is_over_numbers, is_over_rows
from amp_ir.vm.loop_nests import LoopNests

# Elements of every tensor of an opened kernel, as far as TVM knows: its real size may change.
_ANY_SIZE = 2**31 - 1
# Compared by `type(...) in`, since `isinstance` is slow for TVM's classes.
_BINARY = (
    tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max,
)  # fmt: skip
# What takes the bits of a number apart.
_TAKES_APART = (
    tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod, tirx.BitwiseAnd, tirx.BitwiseOr,
    tirx.BitwiseXor, tirx.LShift, tirx.RShift,
)  # fmt: skip
_COMPARES = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_OPENED = re.compile("kernel_[0-9a-f]{16}_*")
# Elements of a row from which on a loop of unknown extent takes no longer than an unrolled one.
_LONG = 96
# Elements of a row from which on a sum over few rows takes no longer where their number is unknown.
_LONG_IN_BLOCK = 512
# Elements of a kernel up to which the time of its divisions, two microseconds, is not seen.
_FEW = 512
# Divisions in each other up to which a kernel is opened. `a % b` holds `a` twice where b is a
# parameter, and TVM goes through a vector's divisions several times for each that is around them:
# compiling a kernel takes 0.3 s at two, 0.4 to 1 s at five and six, 6 s at nine, and more than 15 s
# at ten.
_DEEPEST = 4
# Rows that are added up one after the other, as nearly always; where rows are short, LLVM is to
# know how many.
_BLOCK = 16


def open_kernels(step: PlannedStep) -> PlannedStep:
    """Return the step with opened kernels, named after what they are.

    Before:  kernel_3(x, y)                     # for row in parallel(1024): ...
    After:   kernel_0c5e...(x, y, 1024)         # for row in parallel(n0): ...

    Requires: the output of `plan_memory` for a CPU.
    Ensures:  each element is computed by the same arithmetic; kernels that are equal but for outer
              extents, of this step and others, have one name.
    """
    if is_opened(step):
        return step
    opened: dict[tvm.ir.GlobalVar, tuple[tvm.ir.GlobalVar, list[int]]] = {}
    functions: dict[tvm.ir.GlobalVar, Any] = {}
    made: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]] = {}
    for variable, function in step.ir.functions.items():
        if isinstance(function, tirx.PrimFunc):
            body, values = opened_kernel(function)
            opened[variable] = _named(body, variable, made), values
    functions = dict(made.values())
    for variable, function in step.ir.functions.items():
        if not isinstance(function, tirx.PrimFunc):
            functions[variable] = _with_extents(function, opened)
    names = {old.name_hint: new.name_hint for old, (new, _) in opened.items()}
    calls = tuple(
        attrs.evolve(call, symbol=names.get(call.symbol, call.symbol)) for call in step.plan.calls
    )
    return attrs.evolve(step, ir=tvm.IRModule(functions), plan=attrs.evolve(step.plan, calls=calls))


def is_opened(step: PlannedStep) -> bool:
    """Return whether the kernels are named after what they are."""
    kernels = (v for v, f in step.ir.functions.items() if isinstance(f, tirx.PrimFunc))
    return all(_OPENED.fullmatch(one.name_hint) for one in kernels)


def _named(
    function: tirx.PrimFunc,
    like: tvm.ir.GlobalVar,
    made: dict[str, tuple[tvm.ir.GlobalVar, tirx.PrimFunc]],
) -> tvm.ir.GlobalVar:
    """Return the variable of the function, whose name is its hash; equal functions share it."""
    function = function.without_attr("global_symbol")
    name = f"kernel_{tvm_ffi.structural_hash(function) & (2**64 - 1):016x}"
    while name in made:
        other = made[name][1].without_attr("global_symbol")
        if tvm_ffi.structural_equal(other, function):
            return made[name][0]
        name += "_"  # two kernels with one hash
    variable = tvm.ir.GlobalVar(name)
    relax.expr._update_type(variable, like.ty)
    made[name] = variable, function.with_attr("global_symbol", name)
    return variable


def _with_extents(
    function: relax.Function, opened: dict[tvm.ir.GlobalVar, tuple[tvm.ir.GlobalVar, list[int]]]
) -> relax.Function:
    """Return the function with calls of opened kernels."""

    def renewed(call: relax.Call) -> relax.Call:
        if not isinstance(call.op, tvm.ir.GlobalVar) or call.op not in opened:
            return call
        kernel, values = opened[call.op]
        arguments = [*call.args, *map(relax.prim_value, values)]
        new = relax.Call(kernel, arguments, call.attrs, call.ty_args, call.span)
        relax.expr._update_type(new, call.ty)
        return new

    return tvm_ffi.structural_map(function, (relax.Call, renewed))


def opened_kernel(kernel: tirx.PrimFunc) -> tuple[tirx.PrimFunc, list[int]]:
    """Return a kernel with parameters for its outer extents, and their values.

    Opened are the extents of loops over rows of vectors, over numbers of rows, over blocks of a
    row, and of parallel loops, and the numbers in the indices of their variables; where rows have
    at least 96 elements, or one thread runs the kernel, also the number of vectors of a row. Of
    kernels of at most 512 elements, every extent but a vector's is opened, and every int32 of an
    index. Where that leaves more than four divisions in each other, less is opened.

    LLVM 22 may compile a loop of unknown extent wrongly that reads at its counter modulo a power
    of two (https://github.com/llvm/llvm-project/issues/191382: the check that 8 counters in a row
    are one vector is lost where the loop has another such check). It does not vectorise loops that
    contain vectors. A modulus that is a parameter is no power of two to LLVM; where a known one is
    left, only parallel loops are opened: their threads' parts begin at unknown counters, of which
    that wrong proof knows too little, whether the extent is known or not.
    """
    nests = LoopNests(kernel.body)
    everything = ("everything",) if nests.elements(unknown=_FEW + 1) <= _FEW else ()
    for what in (*everything, "vectors", "rows", "parallel loops"):
        kind = _OpeningOfFew if what == "everything" else _Opening
        opening = kind(kernel, nests, what)
        body = opening.run()
        if not opening.is_too_deep and not opening.is_doubtful(body):
            break
    parameters = {one: _of_any_size(one) for one in kernel.params if _is_tensor(one)}
    body = tvm_ffi.structural_map(body, (tirx.Var, lambda one: parameters.get(one, one)))
    params = [parameters.get(one, one) for one in kernel.params]
    values = opening.values
    made = tirx.PrimFunc([*params, *values.values()], body, kernel.ret_type, kernel.attrs)
    return made, [number for _, number in values]


def _is_tensor(parameter: tirx.Var) -> bool:
    return isinstance(parameter.ty, tirx.BufferType)


def _of_any_size(tensor: tirx.Var) -> tirx.Var:
    return tirx.decl_buffer((_ANY_SIZE,), str(tensor.ty.dtype), tensor.name)


class _Opening:
    """One kernel while it is opened; `values` has the parameter of each number, by its use."""

    def __init__(self, kernel: tirx.PrimFunc, nests: LoopNests, what: str) -> None:
        # Numbers that are equal in one shape, as a block's rows and the parts, differ in another,
        # so the extents of each kind of loop have parameters of their own.
        self.values: dict[tuple[str, int], tirx.Var] = {}
        self._kernel = kernel
        self._parallel_only = what == "parallel loops"
        self._with_blocks = what == "vectors"
        self._nests = nests
        elements = nests.row_elements()
        self._is_long = not self._parallel_only and elements >= _LONG
        self._with_steps = what == "vectors" and (self._is_long or not nests.is_parallel)
        self._is_long_in_block = elements >= _LONG_IN_BLOCK
        self._analyzer = sym.Analyzer()
        # The variables of outer loops, of loops inside of a row, and of loops whose extent is
        # unknown to one thread.
        self._rows: set[tirx.Var] = set()
        self._steps: set[tirx.Var] = set()
        self._counters: set[tirx.Var] = set()
        self._is_in_block = False
        # Divisions around the expression that is opened now, and the most of all expressions.
        self._depth = self._most_depth = 0

    @property
    def is_too_deep(self) -> bool:
        """Whether so many divisions are in each other that compiling them would take long."""
        return self._most_depth > _DEEPEST

    def run(self) -> tirx.Stmt:
        """Return the body with numbers replaced by parameters."""
        callbacks: list[tuple[Any, Callable[..., Any]]] = [(For, self._loop)]
        if not self._parallel_only:
            callbacks += [
                (_BINARY, self._expression),
                (_COMPARES, self._comparison),
                (tirx.Bind, self._bound),
            ]
        return tvm_ffi.structural_mutate(self._kernel.body, callbacks)

    def _loop(self, loop: For, mutator: Any) -> For:
        extent = loop.extent
        self._analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, extent))
        if not (loop.kind == ForKind.PARALLEL or is_over_rows(loop) or is_over_blocks(loop)):
            self._steps.add(loop.loop_var)
        if self._is_outer(loop):
            self._rows.add(loop.loop_var)
            if loop.kind != ForKind.PARALLEL:
                self._counters.add(loop.loop_var)
            if _is_number(extent) and self._may_vary(loop):
                extent = self._opened(extent, loop.loop_var.name)
        if not _is_number(loop.extent):
            extent = mutator.mutate(extent)
        before = self._is_in_block
        self._is_in_block |= is_over_blocks(loop) and not is_over_rows(loop)
        body = mutator.mutate(loop.body)
        self._is_in_block = before
        return For(loop.loop_var, loop.min, extent, loop.kind, body, annotations=loop.annotations)

    def _is_outer(self, loop: For) -> bool:
        if loop.kind == ForKind.PARALLEL:
            return True
        if self._parallel_only or not (loop in self._nests.of_vectors or is_over_numbers(loop)):
            return False
        if is_over_rows(loop) or (self._with_blocks and is_over_blocks(loop)):
            return True
        # Of a loop in blocks, the number of blocks varies.
        return self._with_steps and not self._is_in_block

    def _may_vary(self, loop: For) -> bool:
        is_serial = loop.kind != ForKind.PARALLEL
        is_block = is_serial and loop.loop_var not in self._steps and int(loop.extent) == _BLOCK
        return self._is_long_in_block or not is_block

    def _bound(self, found: tirx.Bind, mutator: Any) -> tirx.Bind:
        """Take a number of a row that was read or computed as one that a loop runs to.

        With its bounds: TVM lowers each division of an unknown sign to several, and one in another
        takes a multiple of the time of that, which for five does not end.
        """
        if found.var.name.startswith(ROW):
            self._rows.add(found.var)
            self._analyzer.bind(found.var, found.value)
        return mutator.default_mutate(found)

    def _expression(self, found: Any, mutator: Any) -> Any:
        """Open a number computed from rows alone; leave a short row's length a number."""
        if not self._is_of(self._rows, found):
            return mutator.default_mutate(found)
        if type(found) is tirx.Mul and _is_number(found.b) and not self._is_length_of(found):
            return self._opened(found.a) * found.b
        return self._opened(found)

    def _is_length_of(self, product: tirx.Mul) -> bool:
        """Return whether a product is the place of a long row: its number times its length."""
        return self._is_long and self._is_of(self._rows - self._steps, product.a)

    def _comparison(self, found: Any, mutator: Any) -> Any:
        """Open the numbers of a comparison of rows, such as with the last word of a sequence."""
        if self._is_of(self._rows, found.a) and self._is_of(self._rows, found.b):
            return type(found)(self._opened(found.a), self._opened(found.b))
        return mutator.default_mutate(found)

    def _is_of(self, variables: set[tirx.Var], found: Any) -> bool:
        """Return whether an expression is computed from these variables and numbers alone."""
        kind = type(found)
        if kind in _BINARY:
            return self._is_of(variables, found.a) and self._is_of(variables, found.b)
        return found in variables if kind is tirx.Var else _is_number(found)

    def _opened(self, found: Any, use: str = "") -> Any:
        kind = type(found)
        if kind is tirx.IntImm:
            return self._parameter(int(found), use) if abs(int(found)) > 1 else found
        if kind not in _BINARY:
            return found
        return self._with_parts(found, self._opened)

    def _with_parts(self, found: Any, part: Callable[[Any], Any]) -> Any:
        """Return a binary expression of other parts, whose values are the same."""
        kind = type(found)
        is_division = kind in (tirx.FloorDiv, tirx.FloorMod)
        self._depth += is_division
        self._most_depth = max(self._most_depth, self._depth)
        a = part(found.a)
        self._depth -= is_division
        if not is_division or not self._is_positive(found):
            return kind(a, part(found.b))
        if not _is_number(found.b):
            b = part(found.b)
            # Of an unknown sign they would be several instructions.
            return tirx.truncdiv(a, b) if kind is tirx.FloorDiv else tirx.truncmod(a, b)
        quotient = self._quotient(a, int(found.b))
        return quotient if kind is tirx.FloorDiv else a - quotient * part(found.b)

    def _quotient(self, a: Any, divisor: int) -> Any:
        """Return a // divisor of an int32 that is not negative, without a division."""
        reciprocal, shift = (
            self._parameter(number, f"{name} of {divisor}", "int64")
            for name, number in zip(("reciprocal", "shift"), reciprocal_of(divisor), strict=True)
        )
        return tirx.Cast("int32", (tirx.Cast("int64", a) * reciprocal) >> shift)

    def _is_positive(self, division: Any) -> bool:
        bound = self._analyzer.const_int_bound
        return bound(division.a).min_value >= 0 and bound(division.b).min_value > 0

    def _parameter(self, number: int, use: str, dtype: str = "int32") -> tirx.Var:
        name = f"n{len(self.values)}"
        return self.values.setdefault((use, number), tirx.Var(name, dtype))

    def is_doubtful(self, body: tirx.Stmt) -> bool:
        """Return whether a counter of an unknown extent is taken apart by a known number."""
        if not self._counters:
            return False
        taken: list[Any] = []
        bound: dict[tirx.Var, Any] = {}
        callbacks = [
            (_TAKES_APART, lambda one: taken.append(one.a) if _is_number(one.b) else None),
            (tirx.Cast, lambda one: taken.append(one.value) if _is_narrow(one.ty) else None),
            (tirx.Bind, lambda one: bound.update({one.var: one.value})),
        ]
        tvm_ffi.structural_walk(body, callbacks, order="pre")
        known: dict[tirx.Var, bool] = {one: True for one in self._counters}

        def is_counter(variable: tirx.Var) -> bool:
            if variable not in known:
                known[variable] = variable in bound and is_computed(bound[variable])
            return known[variable]

        def is_computed(expression: Any) -> bool:
            return any(is_counter(one) for one in _variables_of(expression))

        return any(is_computed(one) for one in taken)


class _OpeningOfFew(_Opening):
    """A kernel of few elements while all its numbers are opened."""

    def run(self) -> tirx.Stmt:
        """Return the body with numbers replaced by parameters."""
        callbacks: list[tuple[Any, Callable[..., Any]]] = [
            (For, self._loop),
            ((*_BINARY, *_COMPARES), self._expression),
            (tirx.Bind, self._bound),
            (tirx.Select, self._select),
            (TensorLoad, self._load),
            (tirx.BufferStore, self._store),
        ]
        return tvm_ffi.structural_mutate(self._kernel.body, callbacks)

    def _bound(self, found: tirx.Bind, mutator: Any) -> tirx.Bind:
        """Take the bounds of a position that was read, too: here its divisors are parameters."""
        if str(found.var.ty) == "int32":
            self._analyzer.bind(found.var, found.value)
        return mutator.default_mutate(found)

    def _is_outer(self, loop: For) -> bool:
        return loop.kind in (ForKind.PARALLEL, ForKind.SERIAL)

    def _may_vary(self, loop: For) -> bool:
        return True

    def _expression(self, found: Any, mutator: Any) -> Any:
        return self._with_parts(found, lambda part: self._part(part, mutator))

    def _select(self, found: Any, mutator: Any) -> Any:
        parts = (found.condition, found.true_value, found.false_value)
        return tirx.Select(*(self._part(one, mutator) for one in parts))

    def _load(self, found: Any, mutator: Any) -> Any:
        return tirx.BufferLoad(found.source, [self._part(one, mutator) for one in found.indices])

    def _store(self, found: tirx.BufferStore, mutator: Any) -> tirx.BufferStore:
        indices = [self._part(one, mutator) for one in found.indices]
        return tirx.BufferStore(found.buffer, self._part(found.value, mutator), indices)

    def _part(self, found: Any, mutator: Any) -> Any:
        """Open a number; what is not handled here, as shifts and calls, keeps its own numbers."""
        return self._opened(found) if _is_number(found) else mutator.mutate(found)


def reciprocal_of(divisor: int) -> tuple[int, int]:
    """Return r and s with (a * r) >> s == a // divisor for every a from 0 to 2**31 - 1.

    The divisor is from 1 to 2**31 - 1. With 2**bits >= divisor, r is 2**(31 + bits) / divisor
    rounded up, by less than 1; times `a`, that adds less than 2**-bits <= 1 / divisor to the
    quotient, whose floor stays. r is at most 2**32 and the product below 2**63.
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(2**shift) // divisor), shift


def _is_number(found: Any) -> bool:
    return type(found) is tirx.IntImm and str(found.ty) == "int32"


def _is_narrow(type_: Any) -> bool:
    return str(type_) in ("int8", "uint8", "int16", "uint16", "bool")


def _variables_of(expression: Any) -> list[tirx.Var]:
    """Return the variables of an expression, but for those in what is loaded."""
    found: list[tirx.Var] = []
    own = tvm_ffi.structural_map(expression, (TensorLoad, lambda load: tirx.const(0, load.ty)))
    tvm_ffi.structural_walk(own, (tirx.Var, found.append))
    return found
