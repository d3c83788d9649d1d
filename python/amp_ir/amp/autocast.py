# SPDX-License-Identifier: Apache-2.0
"""The autocast pass: rules decide, a placement labels the free ops, a rewrite inserts the casts."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import attrs
import tvm

import amp_ir.dialect  # noqa: F401  (registers the ops)
from amp_ir.amp import placement as placing
from amp_ir.amp.annotations import apply_annotations
from amp_ir.amp.custom_type_hint import find_rule, warn_of_unused_rules
from amp_ir.amp.decisions import Decision, decide, round_after_convolution
from amp_ir.amp.hints import FULL_DTYPE, LOW_DTYPES
from amp_ir.amp.keep_full import Border, keep_full
from amp_ir.amp.kernels import FindKernels, Places, kernels_from, kernels_of, places_of
from amp_ir.amp.loop_plans import operand_names, plan_of_loop, plan_with_loops
from amp_ir.amp.loops import autocast_loops
from amp_ir.amp.lost_constants import warn_of_lost_constants
from amp_ir.amp.overrides import AppliedOverrides, Override, listed
from amp_ir.amp.plan import CastPlan, PlanCost
from amp_ir.amp.policies import find_policy
from amp_ir.amp.real_kernels import without_optimizer
from amp_ir.amp.record_plan import make_plan, replay
from amp_ir.amp.rewrite import rewrite
from amp_ir.dialect.loop import NAME as LOOP
from amp_ir.dialect.loop import Loop
from amp_ir.errors import OptionError, UnsupportedOpError
from amp_ir.host import native
from amp_ir.ir.call_attributes import AMP_DTYPE
from amp_ir.ir.loop_body import step_of_body
from amp_ir.ir.options import meant_dtype
from amp_ir.ir.step_graph import StepGraph, read_step
from amp_ir.ir.step_module import Role, StepModule

Module = TypeVar("Module", StepModule, tvm.IRModule)
PLACEMENTS = ("cut", "greedy")


def autocast(
    mod: Module,
    args: Any = None,
    *,
    amp_dtype: str = "float16",
    out_dtype: str | None = None,
    overrides: Sequence[Override] = (),
    policy: str = "default",
    placement: str = "cut",
    on_unknown: str = "error",
    plan: CastPlan | None = None,
    find_kernels: FindKernels | None = None,
) -> Module:
    """Use a low dtype where the rules allow it, and insert the casts that this needs.

    Before:  y = matmul(x: f32[m, k], w: f32[k, n])
             z = nn.softmax(y)
    After:   y = matmul(cast(x, "float16"), cast(w, "float16"))   # y: f16[m, n]
             z = nn.softmax(cast(y, "float32"))

    Requires: one function `main` of calls and tuples in one block, as the importer leaves it.
    Ensures:  inputs and outputs keep their dtypes (results take `out_dtype` where it is given);
              spans stay; a second autocast with the same dtype changes nothing.
    Errors:   RuleError, once, listing every op without a rule; OptionError.
    Source:   Micikevicius et al. 2018, section 3; the placement is in placement.py.

    Args:
        mod: a captured step, or a bare module.
        args: the example batch; accepted for symmetry with `trace_step`, not used.
        amp_dtype: "float16", "bfloat16", or "float32", which changes nothing.
        out_dtype: dtype of the float32 results (of a bare module: of every float32 output). State
            keeps its dtype always.
        overrides: selectors of calls; see `Override`.
        policy: "default", "torch", "aggressive" or "conservative"; see `list_ops`.
        placement: "cut" (least bytes) or "greedy" (RAF's majority).
        on_unknown: "error", or "float32" to leave ops without a rule in float32.
        plan: decisions made before, to be followed instead of rules, overrides and placement.
        find_kernels: tells which kernels fusion will make; an estimate takes its place.
    """
    ir = mod.ir if isinstance(mod, StepModule) else mod
    choices = _Choices(
        amp_dtype=amp_dtype,
        out_dtype=out_dtype,
        overrides=overrides,
        policy=policy,
        placement=placement,
        on_unknown=on_unknown,
    )
    if not isinstance(ir, tvm.IRModule):
        raise OptionError(
            f"autocast takes a StepModule or an IRModule, got {type(mod).__name__}; make one with "
            "mod, args = amp_ir.trace_step(step, example_batch, model=..., optimizer=...)"
        )
    if plan is not None and not isinstance(plan, CastPlan):
        raise OptionError(f"plan is a {type(plan).__name__}; expected a CastPlan (CastPlan.load)")
    if amp_dtype == FULL_DTYPE and out_dtype in (None, FULL_DTYPE):
        return mod
    if _went_through(ir, amp_dtype):
        _check_output_dtype(mod, ir, out_dtype)
        return mod
    new_ir, made, dtypes = _with_loops(mod, ir, choices, plan, find_kernels)
    if not isinstance(mod, StepModule):
        return new_ir
    return attrs.evolve(_with_output_dtypes(mod, dtypes), ir=new_ir, plan=made)


@attrs.frozen(kw_only=True)
class _Choices:
    """The options of one autocast, checked."""

    amp_dtype: str
    out_dtype: str | None
    overrides: Sequence[Override]
    policy: str
    placement: str
    on_unknown: str

    def __attrs_post_init__(self) -> None:
        dtypes = (*LOW_DTYPES, FULL_DTYPE)
        for name, accepted in (
            ("amp_dtype", dtypes),
            ("out_dtype", (None, *dtypes)),
            ("placement", PLACEMENTS),
            ("on_unknown", ("error", FULL_DTYPE)),
        ):
            got = getattr(self, name)
            if got not in accepted:
                accepted_names = ", ".join(map(repr, accepted))
                meant = meant_dtype(got, accepted) if name.endswith("dtype") else ""
                raise OptionError(f"{name} is {got!r}; expected one of {accepted_names}{meant}")
        find_policy(self.policy)
        listed(self.overrides)


def plan_of(mod: StepModule | tvm.IRModule, **options: Any) -> CastPlan:
    """Return the plan that `autocast(mod, **options)` follows; for bare modules, without a plan."""
    find_kernels = options.pop("find_kernels", None)
    ir = mod.ir if isinstance(mod, StepModule) else mod
    defaults = inspect.signature(autocast).parameters
    choices = {
        field.name: options.pop(field.name, defaults[field.name].default)
        for field in attrs.fields(_Choices)
    }
    assert not options, f"plan_of has no option {', '.join(sorted(options))}"
    return _with_loops(mod, ir, _Choices(**choices), None, find_kernels)[1]


def _with_loops(
    mod: StepModule | tvm.IRModule,
    ir: tvm.IRModule,
    choices: _Choices,
    plan: CastPlan | None,
    find_kernels: FindKernels | None,
) -> tuple[tvm.IRModule, CastPlan, list[str]]:
    """Return the new module, with loops whose bodies went through autocast too, and its plan.

    The dtypes of its outputs come third.
    """
    applied = AppliedOverrides(choices.overrides)
    with _no_garbage_collection():
        graph = read_step(ir)
        loops = [op for op in graph.ops if op.name == LOOP]
        names = _input_names(graph, mod)
        pass_ = _Pass(choices, applied, find_kernels)
        new_ir, made, dtypes = pass_.run(mod, ir, graph, plan)

        def autocast_body(number: int, loop: Loop) -> tuple[tvm.IRModule, CastPlan]:
            given = operand_names(graph, loops[number], names)
            body = step_of_body(loop, given, carried=Role.GRADIENT)
            inside = attrs.evolve(pass_, choices=attrs.evolve(choices, out_dtype=None))
            of_body = None if plan is None else plan_of_loop(plan, loops[number].position)
            return inside.run(body, body.ir, read_step(body.ir), of_body)[:2]

        new_ir, cast_loops = autocast_loops(new_ir, autocast_body)
        applied.check_all_used()
        if plan is None:
            warn_of_unused_rules(applied.op_names)
        return new_ir, plan or plan_with_loops(made, graph, new_ir, cast_loops), dtypes


@attrs.frozen
class _Pass:
    """One autocast of a step, or of the body of a loop."""

    choices: _Choices
    applied: AppliedOverrides
    find_kernels: FindKernels | None

    def run(
        self,
        mod: StepModule | tvm.IRModule,
        ir: tvm.IRModule,
        graph: StepGraph,
        plan: CastPlan | None,
    ) -> tuple[tvm.IRModule, CastPlan, list[str]]:
        """Return the new module, its plan, and the dtypes of its outputs."""
        kernels = _kernels(graph, ir, plan, self.find_kernels)
        return _rewritten_at_once(mod, ir, graph, kernels, self.choices, self.applied, plan)


def _kernels(
    graph: StepGraph, ir: tvm.IRModule, plan: CastPlan | None, find_kernels: FindKernels | None
) -> list[int]:
    """Return the kernel of each op: from the plan, from fusion, or estimated."""
    if plan is not None and len(plan.ops) == len(graph.ops):
        return [one.kernel for one in plan.ops]
    if find_kernels is None:
        return kernels_of(graph)
    try:
        return kernels_from(graph, find_kernels(without_optimizer(ir)))
    except UnsupportedOpError:
        # Some op has no kernel: it is an external call, or the step will not be compiled here.
        return kernels_of(graph)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside: a big step makes 10^5 records that live until the end.

    Every collection would visit them and all of torch's objects: half of the time at 24 layers.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rewritten_at_once(
    mod: StepModule | tvm.IRModule,
    ir: tvm.IRModule,
    graph: StepGraph,
    kernels: list[int],
    choices: _Choices,
    applied: AppliedOverrides,
    plan: CastPlan | None,
) -> tuple[tvm.IRModule, CastPlan, list[str]]:
    places = places_of(graph, kernels)
    dtypes = _output_dtypes(graph, mod, choices.out_dtype)
    if plan is None:
        decisions, cost = _decided(graph, places, dtypes, choices, applied, mod)
    else:
        decisions, cost = replay(plan, graph, choices.amp_dtype), plan.cost_nbytes
        dtypes = list(plan.output_dtypes)
    rewritten = rewrite(graph, decisions, places, choices.amp_dtype, dtypes)
    function = rewritten.function.with_attr(AMP_DTYPE, choices.amp_dtype)
    new_ir = tvm.IRModule({gv: ir[gv] for gv in ir.get_global_vars()}, attrs=ir.attrs)
    new_ir.update_func(new_ir.get_global_var("main"), function)
    made = make_plan(
        graph,
        decisions,
        kernels,
        rewritten,
        amp_dtype=choices.amp_dtype,
        policy=choices.policy,
        placement=choices.placement,
        output_dtypes=tuple(dtypes),
        cost_nbytes=cost,
    )
    return new_ir, made, dtypes


def _decided(
    graph: StepGraph,
    places: Places,
    output_dtypes: Sequence[str],
    choices: _Choices,
    applied: AppliedOverrides,
    mod: StepModule | tvm.IRModule,
) -> tuple[list[Decision], PlanCost]:
    """Return the decisions of rules and overrides, with labels by the placement, and their cost."""
    rules = functools.partial(find_rule, find_policy(choices.policy))
    amp_dtype, on_unknown = choices.amp_dtype, choices.on_unknown
    decisions = decide(graph, rules, amp_dtype, output_dtypes, on_unknown=on_unknown)
    keep_full(graph, decisions, amp_dtype, _border(graph, mod))
    round_after_convolution(graph, decisions)
    apply_annotations(graph, decisions, amp_dtype)
    applied.apply(graph, decisions, _input_names(graph, mod))
    problem = placing.build_problem(graph, decisions, places, output_dtypes)
    greedy = placing.greedy(graph, decisions)
    best, bound = placing.solve(problem, native_cut)
    labels = greedy if choices.placement == "greedy" else best
    cost = PlanCost(
        chosen=problem.cost(labels),
        greedy=problem.cost(greedy),
        full=problem.cost([False] * len(labels)),
        bound=bound,
    )
    free = placing.free_ops(graph, decisions)
    for position, is_low in zip(free, labels, strict=True):
        decisions[position].label = "low" if is_low else "full"
    for position in [*free, *problem.open_ops]:
        decisions[position].is_free = True
    warn_of_lost_constants(graph, decisions, amp_dtype)
    return decisions, cost


def _went_through(ir: tvm.IRModule, amp_dtype: str) -> bool:
    if "main" not in [gv.name_hint for gv in ir.get_global_vars()]:
        return False
    attributes = ir["main"].attrs
    before = attributes.get(AMP_DTYPE) if attributes is not None else None
    if before is not None and str(before) != amp_dtype:
        raise OptionError(
            f"the module went through autocast with amp_dtype={str(before)!r} already; "
            f"apply {amp_dtype!r} to the module before that"
        )
    return before is not None


def _check_output_dtype(
    mod: StepModule | tvm.IRModule, ir: tvm.IRModule, out_dtype: str | None
) -> None:
    graph = read_step(ir)
    wanted = _output_dtypes(graph, mod, out_dtype)
    now = [graph.values[leaf].dtype for leaf in graph.outputs]
    if wanted != now:
        raise OptionError(
            f"the module went through autocast already, with float32 results; apply out_dtype="
            f"{out_dtype!r} to the module before that"
        )


def native_cut(
    vertices: int, edges: Sequence[tuple[int, int, int]], source: int, sink: int
) -> tuple[list[bool], int]:
    """Return the minimum cut in C++ (include/amp_ir/min_cut.h): the source side, and its value."""
    flat = [number for edge in edges for number in edge]
    cut = native.function("amp_ir.min_cut")(vertices, flat, source, sink)
    return [bool(side) for side in cut[1:]], int(cut[0])


def _input_names(graph: StepGraph, mod: StepModule | tvm.IRModule) -> list[str]:
    if isinstance(mod, StepModule):
        return [one.name for one in mod.signature.inputs]
    return [str(parameter.name) for parameter in graph.function.params]


def _border(graph: StepGraph, mod: StepModule | tvm.IRModule) -> Border:
    if not isinstance(mod, StepModule):
        return Border()
    outputs = zip(graph.outputs, mod.signature.outputs, strict=True)
    inputs = zip(graph.inputs, mod.signature.inputs, strict=True)
    return Border(
        state=frozenset(leaf for leaf, spec in outputs if spec.role is not Role.RESULT),
        batch=frozenset(leaf for leaf, spec in inputs if spec.role is Role.BATCH),
    )


def _output_dtypes(
    graph: StepGraph, mod: StepModule | tvm.IRModule, out_dtype: str | None
) -> list[str]:
    dtypes = [graph.values[leaf].dtype for leaf in graph.outputs]
    if out_dtype is None:
        return dtypes
    roles = [Role.RESULT] * len(dtypes)
    if isinstance(mod, StepModule):
        roles = [output.role for output in mod.signature.outputs]
    return [
        out_dtype if dtype == FULL_DTYPE and role is Role.RESULT else dtype
        for dtype, role in zip(dtypes, roles, strict=True)
    ]


def _with_output_dtypes(mod: StepModule, dtypes: Sequence[str]) -> StepModule:
    outputs = tuple(
        attrs.evolve(output, dtype=dtype)
        for output, dtype in zip(mod.signature.outputs, dtypes, strict=True)
    )
    return attrs.evolve(mod, signature=attrs.evolve(mod.signature, outputs=outputs))
