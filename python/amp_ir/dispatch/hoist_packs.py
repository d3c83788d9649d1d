# SPDX-License-Identifier: Apache-2.0
"""Pack the weights that every step of a loop multiplies by once, before the loop."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs
import tvm
from tvm import relax

from amp_ir.dispatch.prepack_weights import prepack_weights
from amp_ir.ir.dataflow import Dataflow, replaced
from amp_ir.ir.dispatch_log import DispatchLog
from amp_ir.ir.library_call import LibraryPack, read, write
from amp_ir.ir.step_module import InputSpec, Role


@attrs.define(eq=False)
class PackHoister:
    """Turns the packs of a loop's body into more inputs of it, which the step computes once.

    `whole` are the positions of the body's inputs that are the same at every step. `packs` are,
    after the call, the packs by those positions, in the order of the new inputs.
    """

    whole: Collection[int]
    packs: list[tuple[int, LibraryPack]] = attrs.field(factory=list)

    def __call__(
        self, ir: tvm.IRModule, log: DispatchLog
    ) -> tuple[tvm.IRModule, tuple[InputSpec, ...]]:
        """Return a dispatched body without packs, and its new inputs, behind the others.

        Before:  (h, w) -> y = onednn.matmul(h, w)
        After:   (h, w, packed) -> y = onednn.matmul_packed(h, packed)
        """
        parameters = Dataflow(ir).main.params
        among = {parameters[k]: k for k in self.whole}
        flow = Dataflow(prepack_weights(ir, log=log, least_calls=1, among=among))
        now: dict[relax.Var, relax.Expr] = {}
        added: list[relax.Var] = []
        for variable, value in flow.values.items():
            pack = read(value)
            if isinstance(pack, LibraryPack) and pack.b.base in among:
                now[variable] = relax.Var(f"packed{len(added)}", value.ty)
                added.append(now[variable])
                self.packs.append((among[pack.b.base], pack))
        if not added:
            return ir, ()
        bindings = [
            relax.VarBinding(one.var, replaced(one.value, now))
            for one in flow.bindings
            if one.var not in now
        ]
        new = flow.finish(bindings)
        old = new["main"]
        all_parameters = [*old.params, *added]
        main = relax.Function(
            all_parameters, old.body, old.body.ty, old.is_pure, old.attrs, old.span
        )
        new.update_func(new.get_global_var("main"), main)
        return new, tuple(_spec(one) for one in added)

    def calls(self, operands: Sequence[relax.Expr]) -> list[relax.Call]:
        """Return the packs of a loop's operands, in the order of the new inputs."""
        return [
            write(attrs.evolve(pack, b=attrs.evolve(pack.b, base=operands[k])))
            for k, pack in self.packs
        ]


def _spec(parameter: relax.Var) -> InputSpec:
    shape = tuple(int(extent) for extent in parameter.ty.shape)
    return InputSpec(str(parameter.name), Role.BATCH, shape, str(parameter.ty.dtype))
