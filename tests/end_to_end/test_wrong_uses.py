# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of the public API: each is refused in words, and changes nothing at all."""

from __future__ import annotations

import copy
import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

import attrs
import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.errors import (
    AmpIrError,
    ArgumentError,
    CaptureError,
    DeviceError,
    IndexOutOfRangeError,
    OptionError,
    RuleError,
    ShapeMismatchError,
    StateError,
    UnsupportedOpError,
)
from device_messages import no_gpu

CAPTURE_AGAIN = "Call it as it was captured, or capture (jit) the step again"
AGAIN = "Call amp_ir.trace_step and amp_ir.compile again, or use amp_ir.jit, which does"
MAKE_ONE = "make one with amp_ir.trace_step(step, example_batch, model=..., optimizer=...)"
RULE = "give a function (args, ret_type, amp_dtype)"
POLICIES = (
    '"default" (The numerics policy of the design: no less accurate than PyTorch\'s); '
    '"torch" (PyTorch\'s CUDA lists; what is on none of them is free); '
    '"aggressive" (Sums and normalizations may be stored low); '
    '"conservative" (Only inputs of matmuls are low)'
)


@attrs.define(eq=False)
class Setting:
    """A model, its optimizer, a batch, and the step in every form."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def make(cls) -> Setting:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return cls(model, optimizer, (torch.randn(4, 6), torch.randint(0, 3, (4,))))

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(x), y)  # marked: loss
        loss.backward()
        self.optimizer.step()
        return loss

    def trace(self, **changed: Any) -> Any:
        """`trace_step` with some arguments replaced."""
        given = {"step": self.step, "example_batch": self.batch}
        given |= {"model": self.model, "optimizer": self.optimizer, **changed}
        return amp_ir.trace_step(given.pop("step"), given.pop("example_batch"), **given)

    @functools.cached_property
    def mod(self) -> amp_ir.StepModule:
        return self.trace()[0]

    @functools.cached_property
    def low(self) -> amp_ir.StepModule:
        return amp_ir.autocast(self.mod, amp_dtype="bfloat16")

    @functools.cached_property
    def train(self) -> amp_ir.CompiledStep:
        return amp_ir.compile(self.mod)

    @property
    def x(self) -> torch.Tensor:
        return self.batch[0]

    @property
    def y(self) -> torch.Tensor:
        return self.batch[1]


def everything(setting: Setting) -> list[Any]:
    """All that a wrong use could change, copied."""
    parameters = list(setting.model.parameters())
    return [
        copy.deepcopy(dict(setting.model.state_dict())),
        [None if p.grad is None else p.grad.clone() for p in parameters],
        [(id(p), p.data_ptr(), p.requires_grad, p.stride()) for p in parameters],
        [(module.training, set(vars(module))) for module in setting.model.modules()],
        copy.deepcopy(setting.optimizer.state_dict()),
        set(vars(setting.optimizer)),
        [tensor.clone() for tensor in setting.batch],
        [torch.get_rng_state(), random.getstate(), numpy.random.get_state()],
        [torch.is_grad_enabled(), functional.scaled_dot_product_attention, nn.Module.__call__],
    ]


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit, through containers."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        return a.is_meta or bool(torch.equal(a, b))
    if isinstance(a, numpy.ndarray):
        return bool((a == b).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def place(mark: str, of: Any = None) -> str:
    """`file:line` of the line here that ends in `# marked: ...`."""
    lines, first = inspect.getsourcelines(of if of is not None else inspect.getmodule(place))
    number = next(n for n, text in enumerate(lines) if text.endswith(f"# marked: {mark}\n"))
    return f"{__file__}:{max(first, 1) + number}"


@pytest.fixture(scope="module")
def trained() -> Setting:
    """A setting whose compiled step has run once, shared: nothing may change it."""
    setting = Setting.make()
    setting.train(*setting.batch)
    _ = setting.low
    return setting


def check(setting: Setting, use: Callable[[], Any], error: type[AmpIrError], message: str) -> None:
    before = everything(setting)
    with pytest.raises(AmpIrError) as caught:
        use()
    assert type(caught.value) is error
    assert str(caught.value) == message
    assert same(before, everything(setting))


# Steps that cannot be captured.


def branching(s: Setting, x: Any, y: Any) -> Any:
    return x if s.model(x).sum() > 0 else y  # marked: branch


def reading(s: Setting, x: Any, y: Any) -> Any:
    return float(s.model(x).sum())  # marked: item


def transforming(s: Setting, x: Any, y: Any) -> Any:
    return torch.poisson(x.abs()).sum()  # marked: poisson


def exporting(s: Setting, x: Any, y: Any) -> Any:
    return s.model(x).detach().numpy()  # marked: numpy


def mismatching(s: Setting, x: Any, y: Any) -> Any:
    return s.model(x.T)  # marked: mismatch


def updating(s: Setting, x: Any, y: Any) -> Any:
    s.optimizer.step()


def returning(s: Setting, x: Any, y: Any) -> Any:
    return s.model


READ = (
    "a tensor's value is read in Python, by .item(), float(), int(), bool(), if or while. Keep it "
    "a tensor: return it and read it after the call, or choose with torch.where. A check of "
    "tensors that raises (if not torch.isfinite(loss): raise ...) stays; to skip a step whose "
    "gradients are not finite, use amp_ir.GradScaler"
)
RUNS = (
    "Shapes are known while a step is captured: print(x.shape) before this line shows them. They "
    "have to be what PyTorch takes"
)
ONE_PLACE = "this step cannot be captured, 1 place:\n  1. step"

CAPTURE = [
    (
        branching,
        CaptureError,
        lambda: f"{ONE_PLACE} (forward), {place('branch')}: {READ}",
    ),
    (
        reading,
        CaptureError,
        lambda: f"{ONE_PLACE} (forward), {place('item')}: {READ}",
    ),
    (
        transforming,
        UnsupportedOpError,
        lambda: (
            "the step has an op that amp_ir cannot import:\n  aten.poisson.default: draws random "
            "numbers from a generator that a compiled step lacks (1 call, first in step (forward), "
            f"{place('poisson')})\nWrite that part of the step with other PyTorch "
            "ops, or compute it before the step and pass the result in the batch."
        ),
    ),
    (
        exporting,
        CaptureError,
        lambda: (
            f"the step failed while it was traced, at step (forward), {place('numpy')}: "
            f"RuntimeError: .numpy() is not supported for tensor subclasses. The values do not "
            "exist yet when a step is captured: return the tensor, and call .numpy() on it after "
            "the call"
        ),
    ),
    (
        mismatching,
        CaptureError,
        lambda: (
            f"the step failed while it was traced, at 0 (forward), {place('mismatch')}: "
            "RuntimeError: a and b must have same reduction dim, but got [6, 4] X [6, 8]. " + RUNS
        ),
    ),
    (
        returning,
        CaptureError,
        lambda: (
            f"{ONE_PLACE} (forward): the step returns an object of type Sequential. Return tensors "
            "and plain values in tuples, lists, dicts or dataclasses"
        ),
    ),
]


@pytest.mark.parametrize(
    ("body", "error", "message"), CAPTURE, ids=[c[0].__name__ for c in CAPTURE]
)
def test_steps_that_cannot_be_captured(
    trained: Setting, body: Callable[..., Any], error: type[AmpIrError], message: Callable[[], str]
) -> None:
    step = functools.partial(body, trained)
    check(trained, lambda: trained.trace(step=step), error, message())


def never_cast(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    return [amp_ir.amp.PrimType("float32")]


def nameless(args: Any, ret_type: Any, amp_dtype: str) -> Any:
    return None


def cast_with(rule: Any, s: Setting) -> Any:
    with amp_ir.CustomTypeHint({"relax.matmul": rule}):
        return amp_ir.autocast(s.mod, amp_dtype="bfloat16")


def rule_place(rule: Any) -> str:
    return f"{rule.__name__} ({__file__}:{rule.__code__.co_firstlineno})"


def requiring_closure(s: Setting) -> Any:
    return s.trace(optimizer=torch.optim.LBFGS(s.model.parameters()))


def optimizer_of_another(s: Setting) -> Any:
    return s.trace(optimizer=torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1))


SPARSE = nn.Embedding(3, 2, sparse=True)
Row = tuple[str, Callable[[Setting], Any], type[AmpIrError], str]

TRACE: list[Row] = [
    (
        "step is not a function",
        lambda s: s.trace(step="train"),
        ArgumentError,
        "step= is a str, expected a function that makes one training step",
    ),
    (
        "step takes other arguments",
        lambda s: s.trace(step=lambda x: x),
        ArgumentError,
        "the step takes (x) and is given 2 arguments: too many positional arguments",
    ),
    (
        "batch is not unpacked",
        lambda s: s.trace(step=lambda x, y: x, example_batch=((s.x, s.x),)),
        ArgumentError,
        "the step takes (x, y) and is given 1 argument: missing a required argument: 'y'; it is a "
        "tuple of them: give them one by one, as in step(*batch)",
    ),
    (
        "batch is a tensor",
        lambda s: s.trace(example_batch=s.x),
        ArgumentError,
        "example_batch= is a Tensor, expected the tuple of the step's arguments: (inputs, "
        "targets), or (batch,) for a single one",
    ),
    (
        "batch of numpy",
        lambda s: s.trace(example_batch=(s.x.numpy(), s.y)),
        ArgumentError,
        "example_batch[0] is a numpy.ndarray, expected a tensor; torch.from_numpy makes a tensor "
        "of an array",
    ),
    (
        "complex batch",
        lambda s: s.trace(example_batch=(s.x.to(torch.complex64), s.y)),
        ArgumentError,
        "example_batch[0] is complex (torch.complex64); keep torch.view_as_real of it, and call "
        "torch.view_as_complex in the step",
    ),
    (
        "sparse embedding",
        lambda s: s.trace(model=SPARSE, optimizer=None),
        ArgumentError,
        "model= (itself) has sparse gradients; make the Embedding with sparse=False, and an Adam "
        "where there was a SparseAdam",
    ),
    (
        "model is not a module",
        lambda s: s.trace(model=list(s.model.parameters()), optimizer=None),
        ArgumentError,
        "model= has a Parameter, expected torch.nn.Module",
    ),
    (
        "models in a dict",
        lambda s: s.trace(model={"net": s.model}, optimizer={"net": s.optimizer}),
        ArgumentError,
        "model= has a dict, expected torch.nn.Module; pass them as a list",
    ),
    (
        "model of a function",
        lambda s: amp_ir.trace_model(s.step, s.batch),
        ArgumentError,
        "model= has a method, expected torch.nn.Module",
    ),
    (
        "optimizer is a class",
        lambda s: s.trace(optimizer=torch.optim.SGD),
        ArgumentError,
        "optimizer= has the class SGD, expected torch.optim.Optimizer",
    ),
    (
        "optimizer of another model",
        optimizer_of_another,
        ArgumentError,
        "1 of the 1 parameters of optimizer 0 (SGD) are in no model; pass every module that it "
        "trains in model=[...], for a parameter in no module torch.nn.ParameterList([p]), or, "
        "where parameters were replaced (load_state_dict(assign=True), a new layer), make the "
        "optimizer anew",
    ),
    (
        "LBFGS",
        requiring_closure,
        ArgumentError,
        (
            "LBFGS calls its closure as often as the numbers decide; jit the forward and backward "
            "pass without optimizer=, and call that in the closure, or use another optimizer"
        ),
    ),
    (
        "scaler of another kind",
        lambda s: s.trace(scaler=1024.0),
        ArgumentError,
        "scaler= has a float, expected an amp_ir.GradScaler",
    ),
    (
        "capture inside of a capture",
        lambda s: s.trace(step=lambda x, y: s.trace()),
        ArgumentError,
        "this is already inside of a capture; capture the outermost step only",
    ),
]

AUTOCAST: list[Row] = [
    (
        "unknown amp_dtype",
        lambda s: amp_ir.autocast(s.mod, amp_dtype="fp16"),
        OptionError,
        "amp_dtype is 'fp16'; expected one of 'float16', 'bfloat16', 'float32'; did you mean "
        "'float16'?",
    ),
    (
        "amp_dtype of torch",
        lambda s: amp_ir.autocast(s.mod, amp_dtype=torch.float64),
        OptionError,
        "amp_dtype is 'float64'; expected one of 'float16', 'bfloat16', 'float32'",
    ),
    (
        "unknown out_dtype",
        lambda s: amp_ir.autocast(s.mod, out_dtype="int8"),
        OptionError,
        "out_dtype is 'int8'; expected one of None, 'float16', 'bfloat16', 'float32'",
    ),
    (
        "unknown policy",
        lambda s: amp_ir.autocast(s.mod, policy="O1"),
        OptionError,
        f"policy is 'O1'; expected one of {POLICIES}",
    ),
    (
        "autocast of a model",
        lambda s: amp_ir.autocast(s.model, s.batch),
        OptionError,
        "autocast takes a StepModule or an IRModule, got Sequential; make one with mod, args = "
        "amp_ir.trace_step(step, example_batch, model=..., optimizer=...)",
    ),
    (
        "autocast with another dtype on top",
        lambda s: amp_ir.autocast(s.low, amp_dtype="float16"),
        OptionError,
        "the module went through autocast with amp_dtype='bfloat16' already; apply 'float16' to "
        "the module before that",
    ),
    (
        "args of another batch",
        lambda s: amp_ir.autocast(s.mod, (s.x,)),
        ArgumentError,
        "the step was called with the structure (Tensor,), but was captured with (Tensor, Tensor). "
        + CAPTURE_AGAIN,
    ),
    (
        "override that selects nothing",
        lambda s: amp_ir.autocast(
            s.mod, overrides=[amp_ir.Override(op="relax.matmull", to="float32")]
        ),
        OptionError,
        "Override(to='float32', op='relax.matmull') selects nothing: no op matches "
        "'relax.matmull'; near: 'relax.matmul', 'relax.multiply', 'relax.astype'",
    ),
    (
        "override to an unknown dtype",
        lambda s: amp_ir.Override(op="relax.matmul", to="fp32"),
        OptionError,
        "Override(to='fp32'); expected one of 'float32', 'low', 'free', 'original', "
        "'float32_result'; did you mean 'float32'?",
    ),
    (
        "override of a module that is no path",
        lambda s: amp_ir.Override(module=s.model, to="float32"),
        OptionError,
        "Override(module=) has a Sequential; expected its path in the model or a glob, such as "
        '"encoder.layer.0"',
    ),
    (
        "one override for a list of them",
        lambda s: amp_ir.jit(
            s.step, model=s.model, overrides=amp_ir.Override(module="2", to="float32")
        ),
        OptionError,
        "overrides is Override(to='float32', module='2'); expected a list of them: "
        "overrides=[Override(to='float32', module='2')]",
    ),
    (
        "override of a module that is not there",
        lambda s: amp_ir.autocast(s.mod, overrides=[amp_ir.Override(module="head", to="float32")]),
        OptionError,
        "Override(to='float32', module='head') selects nothing: no module matches 'head'; the step "
        "has '0', '1', '2'",
    ),
    (
        "overrides of strings",
        lambda s: amp_ir.autocast(s.mod, overrides=["relax.matmul"]),
        OptionError,
        "overrides holds 'relax.matmul'; expected a list of amp_ir.Override(...)",
    ),
    (
        "overrides beside a plan",
        lambda s: amp_ir.autocast(
            s.mod,
            amp_dtype="bfloat16",
            plan=s.low.plan,
            overrides=[amp_ir.Override(op="relax.matmul", to="float32")],
        ),
        OptionError,
        "plan= is followed as it is, so that overrides= would change nothing; give the overrides "
        "without a plan, or save the plan that they make",
    ),
    (
        "plan is a path",
        lambda s: amp_ir.autocast(s.mod, plan="plan.json"),
        OptionError,
        "plan is a str; expected a CastPlan (CastPlan.load)",
    ),
    (
        "rule is not a function",
        lambda s: amp_ir.CustomTypeHint({"relax.add": "float32"}),
        RuleError,
        f"the rule for relax.add is 'float32'; {RULE}",
    ),
    (
        "rule of another signature",
        lambda s: amp_ir.CustomTypeHint({"relax.add": lambda args: []}),
        RuleError,
        f"the rule for relax.add takes (args); {RULE}",
    ),
    (
        "rule of no op",
        lambda s: amp_ir.CustomTypeHint({"relax.matmull": never_cast}),
        RuleError,
        "'relax.matmull' is not an op name; op names look like \"relax.add\"; near: "
        "'relax.matmul', 'relax.full', 'relax.maximum'",
    ),
    (
        "rules in a list",
        lambda s: amp_ir.CustomTypeHint(["relax.add"]),
        RuleError,
        "CustomTypeHint takes a dict such as {\"relax.add\": rule} and got ['relax.add']",
    ),
    (
        "rule with too few hints",
        lambda s: cast_with(never_cast, s),
        RuleError,
        f"rule {rule_place(never_cast)} gives 1 hints for relax.matmul, which has 2 arguments "
        "here; give one hint an argument, PrimType(None) for one to leave as it is",
    ),
    (
        "rule without a result",
        lambda s: cast_with(nameless, s),
        RuleError,
        f"rule {rule_place(nameless)} returns None for relax.matmul; expected a list with one hint "
        "an argument, or RuleResult(...)",
    ),
]


COMPILE: list[Row] = [
    (
        "unknown device",
        lambda s: amp_ir.compile(s.mod, device="gpu"),
        OptionError,
        'device=\'gpu\' is not a device; expected "cpu" or "cuda"',
    ),
    (
        "cuda",
        lambda s: amp_ir.compile(s.mod, device="cuda:0"),
        DeviceError,
        no_gpu("cuda:0"),
    ),
    (
        "profile of a GPU's kernels",
        lambda s: amp_ir.profile_kernels(s.mod, "cuda", s.batch),
        DeviceError,
        no_gpu("cuda"),
    ),
    (
        "device is a number",
        lambda s: amp_ir.profile_vm_model(s.mod, 0, s.batch),
        OptionError,
        'device=0 is not a device; expected "cpu" or "cuda"',
    ),
    (
        "compile of a function",
        lambda s: amp_ir.compile(s.step),
        OptionError,
        f"compile takes a StepModule and got method; {MAKE_ONE}",
    ),
    (
        "opt_level",
        lambda s: amp_ir.compile(s.mod, opt_level=9),
        OptionError,
        "opt_level=9 is not known; expected 0, 1, 2 or 3",
    ),
    (
        "rounding",
        lambda s: amp_ir.compile(s.mod, rounding="exact"),
        OptionError,
        'rounding=\'exact\' is not known; expected "strict" or "fast"',
    ),
    (
        "jit with an unknown dtype",
        lambda s: amp_ir.jit(s.step, model=s.model, amp_dtype="half"),
        OptionError,
        'amp_dtype=\'half\' is not supported; expected "float16", "bfloat16", "float32" or None '
        "for no casts; did you mean 'float16'?",
    ),
    (
        "jit of nothing",
        lambda s: amp_ir.jit(None, model=3),
        ArgumentError,
        "step= is a NoneType, expected a function that makes one training step; model= has a int, "
        "expected torch.nn.Module",
    ),
    (
        "jit called by a wrong name",
        lambda s: amp_ir.jit(s.step, model=s.model, optimizer=s.optimizer)(x=s.x, z=s.y),
        ArgumentError,
        "missing a required argument: 'y'; the arguments are (x, y)",
    ),
    (
        "profile of a model",
        lambda s: amp_ir.profile_vm_model(s.model, "cpu", s.batch),
        OptionError,
        f"profile_vm_model takes a StepModule and got Sequential; {MAKE_ONE}",
    ),
    (
        "profile of a tensor",
        lambda s: amp_ir.profile_vm_model(s.mod, "cpu", s.x),
        ArgumentError,
        "args is a Tensor, expected the tuple of the step's arguments that trace_step returns "
        "beside the module",
    ),
    (
        "profile of no steps",
        lambda s: amp_ir.profile_vm_model(s.mod, "cpu", s.batch, number=0),
        OptionError,
        "number=0 steps cannot be run; expected a whole number of at least 1",
    ),
    (
        "profile of ids outside",
        lambda s: amp_ir.profile_vm_model(s.mod, "cpu", (s.x, s.y + 3)),
        IndexOutOfRangeError,
        "",
    ),
    (
        "peak of a compiled step",
        lambda s: amp_ir.get_peak_memory(s.train, "cpu"),
        OptionError,
        f"get_peak_memory takes a StepModule and got CompiledStep; {MAKE_ONE}",
    ),
    (
        "peak with the batch for the device",
        lambda s: amp_ir.get_peak_memory(s.mod, 3),
        OptionError,
        'target=3 is not known; expected "cpu", "cuda" or an architecture such as "sm_90"',
    ),
    (
        "peak of another batch",
        lambda s: amp_ir.get_peak_memory(s.mod, "cpu", (s.x[:2], s.y)),
        ShapeMismatchError,
        f"argument 0 has shape (2, 6), captured with (4, 6). {CAPTURE_AGAIN}",
    ),
]

CALL: list[Row] = [
    (
        "dtype",
        lambda s: s.train(s.x.double(), s.y),
        ArgumentError,
        f"argument 0 has dtype torch.float64, captured with torch.float32. {CAPTURE_AGAIN}",
    ),
    (
        "structure",
        lambda s: s.train((s.x, s.y)),
        ArgumentError,
        "the step was called with the structure ((Tensor, Tensor),), but was captured with "
        f"(Tensor, Tensor). {CAPTURE_AGAIN}",
    ),
    (
        "too few",
        lambda s: s.train(s.x),
        ArgumentError,
        "the step was called with the structure (Tensor,), but was captured with (Tensor, Tensor). "
        + CAPTURE_AGAIN,
    ),
    (
        "shape",
        lambda s: s.train(s.x[:2], s.y[:2]),
        ShapeMismatchError,
        "argument 0 has shape (2, 6), captured with (4, 6); argument 1 has shape (2,), captured "
        f"with (4,). {CAPTURE_AGAIN}",
    ),
    (
        "device",
        lambda s: s.train(s.x.to("meta"), s.y),
        ArgumentError,
        "argument 0 is on the meta device and has no values; materialise it (to_empty) first",
    ),
    (
        "layout",
        lambda s: s.train(s.x.to_sparse(), s.y),
        ArgumentError,
        "argument 0 is sparse (torch.sparse_coo); only dense tensors can be captured, use "
        ".to_dense()",
    ),
    (
        "numpy",
        lambda s: s.train(s.x.numpy(), s.y),
        ArgumentError,
        "argument 0 is a numpy.ndarray, expected a tensor; torch.from_numpy makes a tensor of an "
        "array",
    ),
    (
        "gradient",
        lambda s: s.train(s.x.clone().requires_grad_() * 2, s.y),
        ArgumentError,
        "argument 0 is the result of another computation with gradients; pass it detached",
    ),
    (
        "gradient of a leaf",
        lambda s: s.train(s.x.clone().requires_grad_(), s.y),
        ArgumentError,
        f"argument 0 requires a gradient, captured without; pass it detached. {CAPTURE_AGAIN}",
    ),
    (
        "by a wrong name",
        lambda s: s.train(s.x, s.y, z=s.y),
        ArgumentError,
        "got an unexpected keyword argument 'z'; the arguments are (x, y)",
    ),
    ("ids outside", lambda s: s.train(s.x, s.y + 3), IndexOutOfRangeError, ""),
]

ROWS = [*TRACE, *AUTOCAST, *COMPILE, *CALL]


@pytest.mark.parametrize(
    ("use", "error", "message"), [r[1:] for r in ROWS], ids=[r[0] for r in ROWS]
)
def test_wrong_uses(
    trained: Setting, use: Callable[[Setting], Any], error: type[AmpIrError], message: str
) -> None:
    if error is IndexOutOfRangeError:
        largest = int((trained.y + 3).max())
        message = (
            f"batch1 holds the index {largest}, expected 0 to 2 (or -100, which is ignored), "
            f"for amp_ir.nll_loss in step (forward), {place('loss', Setting)}. Nothing was run and "
            "nothing has changed"
        )
    check(trained, lambda: use(trained), error, message)


# The model or the optimizer changes between the capture and the call.


def freeze(s: Setting) -> None:
    s.model[0].weight.requires_grad_(False)


def halve(s: Setting) -> None:
    s.model.half()


def resize(s: Setting) -> None:
    s.model[0].weight.data = torch.zeros(2, 2)


def transpose(s: Setting) -> None:
    weight = s.model[0].weight
    weight.data = weight.data.t().contiguous().t()


def replace(s: Setting) -> None:
    s.model[2].bias = nn.Parameter(torch.zeros(3))


def evaluate(s: Setting) -> None:
    s.model.eval()


def misplace(s: Setting) -> None:
    weight = s.model[0].weight
    weight.data = torch.cat([torch.zeros(1), weight.data.flatten()])[1:].view(weight.shape)


def change_option(s: Setting) -> None:
    s.optimizer.param_groups[0]["nesterov"] = True


def spoil_rate(s: Setting) -> None:
    s.optimizer.param_groups[0]["lr"] = "0.1"


def add_group(s: Setting) -> None:
    s.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def load_state(s: Setting) -> None:
    s.optimizer.load_state_dict(copy.deepcopy(s.optimizer.state_dict()))


def forget_state(s: Setting) -> None:
    s.optimizer.state.clear()


CAPTURED = "the step is no longer as it was captured: {}. " + AGAIN
STRIDED = (
    "parameter 0.weight was contiguous at the capture and is now of strides (1, 8), changed in its "
    "place, as .data = does; assign a new tensor instead, for which amp_ir.jit compiles again, or "
    "call amp_ir.trace_step and amp_ir.compile again"
)
MISPLACED = (
    "parameter 0.weight is at an address that is not a multiple of 64 bytes, as a slice of another "
    "tensor does; give it memory of its own before the capture: tensor.data = tensor.data.clone()"
)
CHANGES = [
    (freeze, CAPTURED.format("parameter 0.weight was trained and is frozen")),
    (halve, CAPTURED.format("parameter 0.weight was torch.float32 and is torch.float16")),
    (resize, CAPTURED.format("parameter 0.weight was (8, 6) and is (2, 2)")),
    (
        transpose,
        CAPTURED.format("parameter 0.weight was contiguous and is of strides (1, 8)"),
    ),
    (misplace, MISPLACED),
    (replace, CAPTURED.format("2.bias was replaced by another tensor")),
    (
        evaluate,
        CAPTURED.format("module (the model itself) is in eval mode now, and was in train mode"),
    ),
    (change_option, CAPTURED.format("nesterov of param group 0 was False and is True")),
    (
        spoil_rate,
        "optimizer0.group0.lr is an input of the compiled step, but param_groups[0]['lr'] is now "
        "'0.1'; expected a number. Restore it, or capture the step again",
    ),
    (add_group, CAPTURED.format("the optimizer had 1 param groups and has 2")),
]
CHANGES_OF_STATE = [
    (
        load_state,
        CAPTURED.format(
            "optimizer0.0.weight.momentum_buffer was replaced by another tensor, as "
            "load_state_dict does"
        ),
    ),
    (forget_state, CAPTURED.format("optimizer0.0.weight.momentum_buffer was removed")),
]


@pytest.mark.parametrize("has_run", [False, True], ids=["before the first run", "after a run"])
@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[c[0].__name__ for c in CHANGES])
def test_changes_that_need_a_new_capture(
    change: Callable[[Setting], None], message: str, has_run: bool
) -> None:
    setting = Setting.make()
    _ = setting.train
    if has_run:
        setting.train(*setting.batch)
    change(setting)
    check(setting, lambda: setting.train(*setting.batch), StateError, message)


@pytest.mark.parametrize(
    ("change", "message"), CHANGES_OF_STATE, ids=[c[0].__name__ for c in CHANGES_OF_STATE]
)
def test_changes_of_optimizer_state_need_a_new_capture(
    change: Callable[[Setting], None], message: str
) -> None:
    setting = Setting.make()
    setting.train(*setting.batch)
    change(setting)
    check(setting, lambda: setting.train(*setting.batch), StateError, message)


def test_parameters_transposed_since_the_capture_are_refused() -> None:
    setting = Setting.make()
    _ = setting.mod
    transpose(setting)
    check(setting, lambda: amp_ir.compile(setting.mod), StateError, STRIDED)


def test_an_optimizer_that_was_not_passed_is_asked_for() -> None:
    setting = Setting.make()
    setting.train(*setting.batch)
    with pytest.raises(CaptureError, match="that was not passed is called. Pass it in"):
        setting.trace(optimizer=None)


def test_jit_compiles_again_after_a_change() -> None:
    setting = Setting.make()
    train = amp_ir.jit(setting.step, model=setting.model, optimizer=setting.optimizer)
    train(*setting.batch)
    first = train.compiled
    forget_state(setting)
    train(*setting.batch)
    assert train.compiled is not first


PATH = "path is a int; expected the name of a file, a str or a pathlib.Path"
ANNOTATE = "write @amp_ir.{0} above the function's definition"
NOT_OURS: dict[str, tuple[Callable[[Setting], Any], type[AmpIrError], str]] = {
    "load": (lambda s: amp_ir.load(1), ArgumentError, PATH),  # type: ignore[arg-type]
    "save": (lambda s: amp_ir.save(s.train, 1), ArgumentError, PATH),  # type: ignore[arg-type]
    "save_checkpoint": (
        lambda s: amp_ir.save_checkpoint(1, model=s.model),  # type: ignore[arg-type]
        ArgumentError,
        PATH,
    ),
    "load_checkpoint": (
        lambda s: amp_ir.load_checkpoint(1, model=s.model),  # type: ignore[arg-type]
        ArgumentError,
        PATH,
    ),
    "plan": (lambda s: amp_ir.CastPlan.load(1), ArgumentError, PATH),  # type: ignore[arg-type]
    "gather_state_dict": (
        lambda s: amp_ir.gather_state_dict(s.model),  # type: ignore[arg-type]
        ArgumentError,
        "gather_state_dict takes a torch.optim.Optimizer and got a Sequential",
    ),
    "scale_loss": (
        lambda s: amp_ir.scale_loss(torch.ones(()), []).__enter__(),
        ArgumentError,
        "scale_loss takes an optimizer, or a list of them, and got []; pass every optimizer that "
        "owns parameters which the loss gives gradients",
    ),
    **{
        name: (
            lambda s, name=name: getattr(amp_ir, name)(3),
            OptionError,
            f"{name} takes a function and got a int; {ANNOTATE.format(name)}",
        )
        for name in ("half_function", "float_function", "promote_function")
    },
    "register_half_function": (
        lambda s: amp_ir.register_half_function(functional, 3),  # type: ignore[arg-type]
        OptionError,
        "torch.nn.functional has no function 3; pass the module, or the class, that the function "
        'is looked up in, as in register_half_function(torch.nn.functional, "linear")',
    ),
}


@pytest.mark.parametrize(("use", "error", "message"), NOT_OURS.values(), ids=NOT_OURS)
def test_arguments_of_other_kinds_are_refused(
    use: Callable[[Setting], Any], error: type[AmpIrError], message: str
) -> None:
    setting = Setting.make()
    check(setting, lambda: use(setting), error, message)
