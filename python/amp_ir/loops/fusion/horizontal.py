# SPDX-License-Identifier: Apache-2.0
"""Horizontal fusion of kernels after the last library call, such as the optimizer's updates.

Behind the last library call of a step all gradients exist. Kernels there that do not depend on
each other are merged: one launch goes over the tasks of all, and what is the same function for
many parameters is written once, with the addresses of each parameter's tensors chosen by task.
Small kernels that no library call waits for (a bias's update, its gradient's check) move there
too. Large ones stay where they are: merged, they would keep gradients alive that are used up now,
and read them again when they have left the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import tvm
from tvm import relax, tirx

from amp_ir.ir.dataflow import DPS_CALL, KERNEL_CALL, Dataflow, variables_of
from amp_ir.ir.location import join_spans
from amp_ir.loops.fusion import cpu_tasks
from amp_ir.loops.fusion.horizontal_groups import Merger, buffer_size
from amp_ir.loops.fusion.merged_kernel import Member, merged_kernel
from amp_ir.loops.fusion.write_fused import typed

# Largest number of elements of a kernel that may move: its tensors stay in the cache.
SMALL_ELEMENTS = 65536


@attrs.define(eq=False)
class _Call:
    """One kernel call after the last library call, and the variables of its results."""

    call: relax.Call
    function: tirx.PrimFunc
    results: list[relax.Var]
    level: int = 0

    @property
    def arguments(self) -> list[relax.Expr]:
        return list(self.call.args[1].fields)


def fuse_horizontally(ir: tvm.IRModule, merger: Merger = cpu_tasks) -> tvm.IRModule:
    """Fuse independent kernels after the last library call into few.

    Before:  w1 = call_tir(kernel_7, (found, p1, g1)); w2 = call_tir(kernel_7, (found, p2, g2))
             b1 = call_tir(kernel_8, (found, q1, h1))
    After:   (w1, w2, b1) = call_tir(kernel_9, (found, p1, g1, p2, g2, q1, h1))

    Requires: `fuse_loops` has run.
    Ensures:  every element is computed by the same code as before, so results are the same bit for
              bit; a result may be written over an input that only its own kernel reads.
    """
    return _Merging(ir, merger).run()


class _Merging:
    def __init__(self, ir: tvm.IRModule, merger: Merger) -> None:
        self.ir = ir
        self.merger = merger
        self.flow = Dataflow(ir)
        self.bindings = self.flow.bindings
        self.functions = dict(ir.functions)
        self.written: list[relax.Binding] = []
        self.count = len(ir.functions)

    def run(self) -> tvm.IRModule:
        start = self._after_library_calls()
        first, moved = self._without_postponed(self.bindings[:start])
        calls, others = self._read([*moved, *self.bindings[start:]])
        levels: dict[int, list[_Call]] = {}
        for call in calls:
            levels.setdefault(call.level, []).append(call)
        self.written = first
        for _, members in sorted(levels.items()):
            self._write(members)
        self.written += others
        return self._module()

    def _after_library_calls(self) -> int:
        last = 0
        for position, binding in enumerate(self.bindings):
            value = binding.value
            if isinstance(value, relax.Call) and value.op.name == DPS_CALL:
                last = position + 1
        while last < len(self.bindings) and isinstance(
            self.bindings[last].value, relax.TupleGetItem
        ):
            last += 1
        return last

    def _without_postponed(
        self, bindings: Sequence[relax.Binding]
    ) -> tuple[list[relax.Binding], list[relax.Binding]]:
        """Split off small kernels that none of the other bindings waits for."""
        kept: list[relax.Binding] = []
        moved: list[relax.Binding] = []
        awaited: set[relax.Var] = set()
        for binding in reversed(bindings):
            value = binding.value
            is_kernel = isinstance(value, relax.Call) and value.op.name == KERNEL_CALL
            is_item = isinstance(value, relax.TupleGetItem)
            if binding.var not in awaited and (
                is_item or (is_kernel and _is_small(self.ir[value.args[0]]))
            ):
                moved.append(binding)
                continue
            kept.append(binding)
            awaited.update(variables_of(value))
        # A name for one result of a kernel stays with the kernel.
        made = {binding.var for binding in moved}
        stray = [
            one
            for one in moved
            if isinstance(one.value, relax.TupleGetItem) and one.value.tuple_value not in made
        ]
        moved = [one for one in moved if one not in stray]
        return [*reversed(kept), *reversed(stray)], list(reversed(moved))

    def _read(self, bindings: Sequence[relax.Binding]) -> tuple[list[_Call], list[relax.Binding]]:
        """Read the kernel calls with their levels, and the bindings that only name results."""
        calls: list[_Call] = []
        maker: dict[relax.Var, _Call] = {}
        others = []
        for binding in bindings:
            value = binding.value
            if isinstance(value, relax.Call) and value.op.name == KERNEL_CALL:
                call = _Call(value, self.ir[value.args[0]], [binding.var])
                before = [maker[one].level + 1 for one in call.arguments if one in maker]
                call.level = max(before, default=0)
                calls.append(call)
                maker[binding.var] = call
                if isinstance(binding.var.ty, relax.TupleType):
                    call.results = []
            elif isinstance(value, relax.TupleGetItem) and value.tuple_value in maker:
                call = maker[value.tuple_value]
                call.results.append(binding.var)
                maker[binding.var] = call
            else:
                others.append(binding)
        return calls, others

    def _write(self, members: list[_Call]) -> None:
        """Write the calls of one level, merged where their kernels can be."""
        mergeable = []
        for one in members:
            if self.merger.body_of(one.function) is None:
                self._bind(one.call, one.results)
            else:
                mergeable.append(one)
        for batch in self._batches(mergeable):
            if len(batch) == 1:
                self._bind(batch[0].call, batch[0].results)
            else:
                self._merge(batch)

    def _batches(self, calls: list[_Call]) -> list[list[_Call]]:
        """Divide calls into those of each launch.

        Full batches of one kernel are one function, however many layers a model has; in the order
        of the step, each batch would be another mixture, and LLVM would compile it.
        """
        most = self.merger.most_parameters()
        by_kernel: dict[tvm.ir.GlobalVar, list[_Call]] = {}
        for one in calls:
            by_kernel.setdefault(one.call.args[0], []).append(one)
        batches: list[list[_Call]] = []
        left: list[_Call] = []
        for alike in by_kernel.values():
            size = max(1, most // len(alike[0].function.params))
            full = len(alike) - len(alike) % size
            batches += [alike[start : start + size] for start in range(0, full, size)]
            left += alike[full:]
        mixed: list[list[_Call]] = []
        for one in left:
            count = sum(len(other.function.params) for other in [*mixed[-1], one]) if mixed else 0
            if not mixed or count > most:
                mixed.append([])
            mixed[-1].append(one)
        return [*mixed, *batches]

    def _bind(self, call: relax.Call, results: list[relax.Var]) -> None:
        if len(results) == 1:
            self.written.append(relax.VarBinding(results[0], call))
            return
        types = relax.TupleType([one.ty for one in results])
        together = relax.DataflowVar(f"merged{len(self.written)}", types)
        self.written.append(relax.VarBinding(together, typed(call, types)))
        for k, one in enumerate(results):
            item = typed(relax.TupleGetItem(together, k), one.ty)
            self.written.append(relax.VarBinding(one, item))

    def _merge(self, members: list[_Call]) -> None:
        calls = [Member(one.call.args[0].name_hint, one.function, one.arguments) for one in members]
        function, arguments = merged_kernel(calls, self.merger)
        results = [result for one in members for result in one.results]
        variable = tvm.ir.GlobalVar(f"kernel_{self.count}")
        self.count += 1
        self.functions[variable] = function.with_attr("global_symbol", variable.name_hint)
        notes = [one.call.attrs for one in members]
        ops = ",".join(dict.fromkeys(op for one in notes for op in str(one["ops"]).split(",")))
        made = [op for one in members for op in _result_ops(one)]
        computes = ",".join(str(one["computes"]) for one in notes)
        stores = ",".join(str(one["stores"]) for one in notes)
        attributes = tvm.ir.make_node(
            "ir.DictAttrs", ops=ops, result_ops=",".join(made), computes=computes, stores=stores
        )
        types = relax.TupleType([one.ty for one in results])
        call = relax.Call(
            tvm.ir.Op.get(KERNEL_CALL), [variable, relax.Tuple(arguments)], attributes, [types],
            join_spans(one.call.span for one in members),
        )  # fmt: skip
        self._bind(call, results)

    def _module(self) -> tvm.IRModule:
        written = self.flow.finish(self.written)
        self.functions[self.ir.get_global_var("main")] = written["main"]
        used = _called(self.written)
        kept = {
            variable: function
            for variable, function in self.functions.items()
            if variable.name_hint == "main" or variable.name_hint in used
        }
        return tvm.IRModule(kept, attrs=self.ir.attrs)


def _is_small(function: tirx.PrimFunc) -> bool:
    return sum(buffer_size(one) for one in function.params) <= SMALL_ELEMENTS


def _result_ops(call: _Call) -> list[str]:
    """Return the op of each result, as the call of the kernel records it; "" if it does not."""
    names = str(call.call.attrs["result_ops"]).split(",")
    return (names + [""] * len(call.results))[: len(call.results)]


def _called(bindings: Sequence[relax.Binding]) -> set[str]:
    calls = [one.value for one in bindings if isinstance(one.value, relax.Call)]
    return {one.args[0].name_hint for one in calls if one.op.name == KERNEL_CALL}
