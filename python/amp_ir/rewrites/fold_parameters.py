# SPDX-License-Identifier: Apache-2.0
"""Compute what a program computes of its parameters alone once, instead of at every call."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
import tvm
from tvm import relax
from tvm.ir import GenericConst

from amp_ir.ir.dataflow import Dataflow, op_name, replaced, variables_of
from amp_ir.ir.fixed_values import fixed_inputs, fixed_values
from amp_ir.ir.interpreter import evaluate
from amp_ir.ir.static_shape import extents_of, shape_of
from amp_ir.ir.step_module import InputSpec, Signature, StepModule

# Views that cost nothing at a call. Stored, they would be a second copy for a second reader.
_VIEWS = ("relax.reshape", "relax.permute_dims", "relax.expand_dims", "relax.squeeze")
# What is stored in any case, also beside the parameter that it is computed from.
_SMALL_NBYTES = 4096
_NBYTES = {"bool": 1, "int8": 1, "uint8": 1, "float16": 2, "bfloat16": 2, "int16": 2}
_NBYTES |= {"int64": 8, "float64": 8}


@attrs.frozen
class Computed:
    """A value to store: how it is computed, of which inputs, and `value()`, which computes it.

    `recipe` is text that is equal for equal computations, in programs of other shapes too. `taken`
    are the names of inputs that calls still read as they are.
    """

    recipe: str
    name: str
    sources: tuple[str, ...]
    taken: frozenset[str]
    value: Callable[[], torch.Tensor] = attrs.field(eq=False, repr=False)


# Gives the name under which a computed value is stored, and its tensor or what returns it.
Store = Callable[[Computed], "tuple[str, torch.Tensor | Callable[[], torch.Tensor]]"]


def fold_parameters(mod: StepModule, store: Store) -> StepModule:
    """Replace values of parameters and buffers that no call changes by inputs of their own.

    Before:  main(x, w: f32):   y = matmul(x, cast(w, "bfloat16"))
    After:   main(x, w: bf16):  y = matmul(x, w)

    A value is stored if this takes no memory: it is no larger than the arguments of its op, and no
    call still reads the inputs that it comes from; 4 KiB are stored in any case. So a weight is
    stored low where all of its readers read it low.

    Requires: one function `main` of one dataflow block.
    Ensures:  bit-identical results where the interpreter rounds as kernels do: for casts.
    """
    return _Folder(mod, store).run()


class _Folder:
    def __init__(self, mod: StepModule, store: Store) -> None:
        self.mod = mod
        self.store = store
        self.flow = Dataflow(mod.ir)
        pairs = zip(self.flow.main.params, mod.signature.inputs, strict=True)
        self.specs = dict(pairs)
        self.inputs = fixed_inputs(mod)
        self.fixed = fixed_values(self.flow, self.inputs)
        self.sources = self._sources()
        self.recipes: dict[relax.Var, str] = {}

    def run(self) -> StepModule:
        border = self.border()
        chosen = [one for one in self.flow.values if one in border and one not in self.inputs]
        if not chosen:
            return self.mod
        taken = frozenset(self.specs[one].name for one in border & self.inputs)
        stored: dict[relax.Var, tuple[relax.Var, InputSpec]] = {}
        state: dict[str, Any] = {}
        for variable in chosen:
            name, value = self.store(self.computed(variable, taken))
            role = self.specs[self.sources_of(variable)[0]].role
            type_ = variable.ty
            spec = InputSpec(name, role, extents_of(type_), str(type_.dtype))
            stored[variable] = (relax.Var(_identifier(name), type_), spec)
            state[name] = value
        return self.rewritten(stored, {**self.mod.state, **state})

    def border(self) -> set[relax.Var]:
        """Return the inputs and the values to store that are read by what runs at every call."""
        kept = self.fixed - self.inputs
        while True:
            read = set(variables_of(self.flow.result))
            for variable, value in self.flow.values.items():
                if variable not in kept:
                    read.update(variables_of(value))
            border = self.fixed & read & (kept | self.inputs)
            wrong = {one for one in border & kept if not self.is_worth_it(one, border)}
            if not wrong:
                return border
            kept -= wrong

    def is_worth_it(self, variable: relax.Var, border: set[relax.Var]) -> bool:
        """Return whether a value is not a view and takes no memory beside what else is read."""
        call = self.flow.values[variable]
        if op_name(call) in _VIEWS:
            return False
        nbytes = _nbytes(variable)
        if nbytes <= _SMALL_NBYTES:
            return True
        # Not one that widens, or repeats, what could be stored as it is.
        arguments = sum(map(_nbytes, set(variables_of(call))))
        return nbytes <= arguments and not self.sources[variable] & border

    def _sources(self) -> dict[relax.Var, frozenset[relax.Var]]:
        found = {one: frozenset({one}) for one in self.inputs}
        for variable, value in self.flow.values.items():
            if variable in self.fixed:
                parts = [found[one] for one in variables_of(value)]
                found[variable] = frozenset().union(*parts)
        return found

    def sources_of(self, variable: relax.Var) -> list[relax.Var]:
        """Return the inputs that a value is computed from, in order."""
        return [one for one in self.specs if one in self.sources[variable]]

    def computed(self, variable: relax.Var, taken: frozenset[str]) -> Computed:
        sources = self.sources_of(variable)
        # A value that has the shape of a parameter takes its name: a weight stays the weight.
        same_shape = [one for one in sources if shape_of(one) == shape_of(variable)]
        name = self.specs[(same_shape or sources)[0]].name

        def value() -> torch.Tensor:
            state = {one: self.mod.state[self.specs[one].name] for one in sources}
            tensors = {one: held() if callable(held) else held for one, held in state.items()}
            return self.evaluated(variable, tensors)

        names = tuple(self.specs[one].name for one in sources)
        return Computed(self.recipe(variable), name, names, taken, value)

    def evaluated(self, variable: relax.Var, tensors: Mapping[relax.Var, Any]) -> torch.Tensor:
        needed, wanted = [], {variable}
        for binding in reversed(self.flow.bindings):
            if binding.var in wanted:
                needed.append(binding)
                wanted.update(variables_of(binding.value))
        with torch.no_grad():
            found = evaluate(variable, needed[::-1], tensors)
        # Memory of its own, dense: an expanded or shared result is neither.
        return found.detach().clone(memory_format=torch.contiguous_format)

    def recipe(self, variable: relax.Var) -> str:
        if variable in self.specs:
            return self.specs[variable].name
        if variable not in self.recipes:
            call = self.flow.values[variable]
            parts = [self._argument(argument) for argument in call.args]
            options = str(call.attrs) if call.attrs is not None else ""
            self.recipes[variable] = f"{op_name(call)}({', '.join(parts)}; {options})"
        return self.recipes[variable]

    def _argument(self, argument: relax.Expr) -> str:
        if isinstance(argument, relax.Var):
            return self.recipe(argument)
        if isinstance(argument, relax.Tuple):
            return f"({', '.join(map(self._argument, argument.fields))})"
        if isinstance(argument, GenericConst):
            array = argument.value.numpy()
            return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
        return str(argument)

    def rewritten(
        self, stored: Mapping[relax.Var, tuple[relax.Var, InputSpec]], state: dict[str, Any]
    ) -> StepModule:
        """Return the program that reads the stored values, without inputs that nothing reads."""
        now = {variable: parameter for variable, (parameter, _) in stored.items()}
        bindings = [
            relax.VarBinding(binding.var, replaced(binding.value, now))
            for binding in self.flow.bindings
            if binding.var not in now
        ]
        ir = self.flow.finish(bindings, replaced(self.flow.result, now))
        used = set(Dataflow(ir).uses)
        at = {one: position for position, one in enumerate(self.specs)}
        # A stored value takes the place of the first of its sources.
        inputs = [
            (at[one], one, spec)
            for one, spec in self.specs.items()
            if one in used or one not in self.inputs
        ]
        inputs += [(min(at[one] for one in self.sources[v]), *pair) for v, pair in stored.items()]
        inputs.sort(key=lambda entry: entry[0])
        specs = tuple(spec for _, _, spec in inputs)
        names = {spec.name for spec in specs}
        return attrs.evolve(
            self.mod,
            ir=_with_parameters(ir, [one for _, one, _ in inputs]),
            signature=self.signature(specs, {one: k for k, (_, one, _) in enumerate(inputs)}),
            state={name: value for name, value in state.items() if name in names},
        )

    def signature(
        self, inputs: tuple[InputSpec, ...], positions: Mapping[relax.Var, int]
    ) -> Signature:
        """Return the signature with other inputs; `updates` of outputs are positions among them."""
        before = list(self.specs)
        outputs = tuple(
            one
            if one.updates is None
            else attrs.evolve(one, updates=positions[before[one.updates]])
            for one in self.mod.signature.outputs
        )
        return attrs.evolve(self.mod.signature, inputs=inputs, outputs=outputs)


def _with_parameters(ir: tvm.IRModule, parameters: list[relax.Var]) -> tvm.IRModule:
    main = ir["main"]
    new = relax.Function(parameters, main.body, main.ret_ty, main.is_pure, main.attrs, main.span)
    return tvm.IRModule({**ir.functions, ir.get_global_var("main"): new}, attrs=ir.attrs)


def _nbytes(variable: relax.Var) -> int:
    return math.prod(extents_of(variable.ty)) * _NBYTES.get(str(variable.ty.dtype), 4)


def _identifier(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)
