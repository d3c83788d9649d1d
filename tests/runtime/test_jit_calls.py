# SPDX-License-Identifier: Apache-2.0
"""A jitted step is called, decorated, shown and copied as a plain function is."""

from __future__ import annotations

import collections
import copy
import dataclasses
import inspect
import pickle
import types
import typing
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import BatchEncoding
from transformers.modeling_outputs import SequenceClassifierOutput

import amp_ir
from amp_ir.errors import ArgumentError, CaptureError, CopyError, StateError

X, Y = torch.arange(12.0).reshape(3, 4) / 8, torch.arange(6.0).reshape(3, 2) / 4
TIGHT: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}  # float32, sums of four products


class Named(typing.NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    is_last: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    loss: torch.Tensor
    name: str = "train"


class Plain:
    """A batch class of the user's own."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x, self.y


class DictOfOwn(dict[str, Any]):
    """A dict with attribute access, as many libraries have one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class Trainer:
    """A model, its optimizer and one step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(x)
        loss = torch.nn.functional.mse_loss(logits, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), logits.detach()


def call(*args: Any, **named: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, named


def pair(one: Trainer, batch: Any) -> Any:
    return one.step(batch.x, batch.y)[0]


def items(one: Trainer, batch: Any) -> Any:
    return one.step(batch["x"], batch["y"])[0]


def keyword_only(one: Trainer, x: Any, *, y: Any, scale: float = 1.0) -> Any:
    return one.step(x, y)[0] * scale


def any_names(one: Trainer, **batch: Any) -> Any:
    return one.step(batch["x"], batch["y"])[0]


def any_positions(one: Trainer, *batch: Any) -> Any:
    return one.step(*batch)[0]


def defaults(one: Trainer, x: Any, y: Any, scale: float = 2.0, mask: Any = None) -> Any:
    assert mask is None
    return one.step(x, y)[0] * scale


def plain_values(one: Trainer, batch: Any, flag: bool, kind: str, count: int, none: Any) -> Any:
    assert flag and kind == "mean" and none is None
    return one.step(batch[0][:count], batch[1][:count])[0]


def returns(make: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., Any]:
    return lambda one, x, y: make(*one.step(x, y))


CALLS: dict[str, tuple[Callable[..., Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "keywords": (defaults, call(x=X, y=Y)),
    "one keyword": (defaults, call(X, y=Y, scale=3.0)),
    "keyword only": (keyword_only, call(X, y=Y, scale=3.0)),
    "any names": (any_names, call(x=X, y=Y)),
    "any positions": (any_positions, call(X, Y)),
    "a dict": (items, call({"x": X, "y": Y})),
    "an ordered dict": (items, call(collections.OrderedDict(x=X, y=Y))),
    "a default dict": (items, call(collections.defaultdict(list, x=X, y=Y))),
    "a dict class": (items, call(DictOfOwn(x=X, y=Y))),
    "attributes of a dict class": (pair, call(DictOfOwn(x=X, y=Y))),
    "a BatchEncoding": (items, call(BatchEncoding({"x": X, "y": Y}))),
    "attributes of a BatchEncoding": (pair, call(BatchEncoding({"x": X, "y": Y}))),
    "a BatchEncoding's items": (
        lambda one, b: any_names(one, **b), call(BatchEncoding({"x": X, "y": Y})),
    ),
    "a ModelOutput": (
        lambda one, b: one.step(b.logits, b.loss)[0],
        call(SequenceClassifierOutput(loss=Y, logits=X)),
    ),
    "a named tuple": (pair, call(Named(X, Y))),
    "a dataclass": (pair, call(Batch(X, Y))),
    "nested": (lambda one, b: pair(one, b["all"][0]), call({"all": [Batch(X, Y)], "more": None})),
    "a namespace": (pair, call(types.SimpleNamespace(x=X, y=Y))),
    "a plain class": (lambda one, b: one.step(*b.pair())[0], call(Plain(X, Y))),
    "plain values": (plain_values, call((X, Y), True, "mean", 2, None)),
    "NumPy scalars": (plain_values, call((X, Y), numpy.bool_(True), "mean", numpy.int64(2), None)),
    "a NumPy float": (defaults, call(X, Y, numpy.float32(0.5))),
    "returns a tuple": (returns(lambda a, b: (a, b)), call(X, Y)),
    "returns a named tuple": (returns(Named), call(X, Y)),
    "returns a dict": (returns(lambda a, b: {"loss": a, "logits": b}), call(X, Y)),
    "returns a dataclass": (returns(lambda a, _: Result(a)), call(X, Y)),
    "returns a plain class": (returns(Plain), call(X, Y)),
    "returns a ModelOutput": (
        returns(lambda a, b: SequenceClassifierOutput(loss=a, logits=b)), call(X, Y),
    ),
    "returns a BatchEncoding": (
        returns(lambda a, b: BatchEncoding({"loss": a, "logits": b})), call(X, Y),
    ),
    "returns plain values": (returns(lambda a, _: [a, "a", 3, None, numpy.float32(2)]), call(X, Y)),
    "returns nothing": (returns(lambda _a, _b: None), call(X, Y)),
}  # fmt: skip


def contents(value: Any) -> Any:
    """Return what a value holds, in containers that can be compared."""
    if isinstance(value, (Result, Batch)):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, Plain):
        return vars(value)
    return dict(value) if isinstance(value, (dict, collections.UserDict)) else value


@pytest.mark.parametrize("name", CALLS)
def test_a_step_is_called_as_eager_is_and_returns_the_same_kind(name: str) -> None:
    function, (args, named) = CALLS[name]
    ours, eager = Trainer(), Trainer()
    train = amp_ir.jit(lambda *a, **k: function(ours, *a, **k), model=ours.model,
                       optimizer=ours.optimizer)  # fmt: skip
    for _ in range(2):
        found, expected = train(*args, **named), function(eager, *args, **named)
        assert type(found) is type(expected)
        pairs = zip(tree_leaves(contents(found)), tree_leaves(contents(expected)), strict=True)
        for one, other in pairs:
            if isinstance(other, torch.Tensor):
                torch.testing.assert_close(one, other, **TIGHT)
            else:
                assert type(one) is type(other) and one == other
    assert len(train.recompiles) == 0
    torch.testing.assert_close(ours.model.weight, eager.model.weight, **TIGHT)


def test_names_and_positions_run_one_program() -> None:
    one = Trainer()
    train = amp_ir.jit(lambda x, y: one.step(x, y)[0], model=one.model, optimizer=one.optimizer)
    train(X, Y), train(X, y=Y), train(y=Y, x=X)
    assert train.recompiles == []
    with pytest.raises(ArgumentError) as refused:
        train(X, z=Y)
    assert str(refused.value) == "missing a required argument: 'y'; the arguments are (x, y)"


def test_another_dtype_or_structure_compiles_again_and_names_the_argument() -> None:
    ours, eager = Trainer(), Trainer()

    def step(one: Trainer, batch: Any, *, mask: Any = None) -> Any:
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        loss = one.step(x.float(), y.float())[0]
        return loss if mask is None else (loss * mask).mean()

    train = amp_ir.jit(lambda *a, **k: step(ours, *a, **k), model=ours.model,
                       optimizer=ours.optimizer)  # fmt: skip
    calls = [
        call((X, Y)), call((X[:2], Y[:2])), call((X, Y.double())),
        call((X, Y), mask=torch.ones(3)), call([X, Y]), call({"x": X, "y": Y}),
    ]  # fmt: skip
    for args, named in calls:
        torch.testing.assert_close(train(*args, **named), step(eager, *args, **named), **TIGHT)
    structure, pair = "the structure of the arguments was", "((Tensor, Tensor),)"
    assert [one.reason for one in train.recompiles] == [
        "argument 0[0] was of shape (3, 4) and is of shape (2, 4) (dimension 0); "
        "argument 0[1] was of shape (3, 2) and is of shape (2, 2) (dimension 0)",
        "argument 0[1] was torch.float32 and is torch.float64",
        f"{structure} {pair} and is ((Tensor, Tensor), {{'mask': Tensor}})",
        f"{structure} ((Tensor, Tensor), {{'mask': Tensor}}) and is ([Tensor, Tensor],)",
        f"{structure} ([Tensor, Tensor],) and is ({{'x': Tensor, 'y': Tensor}},)",
    ]


def test_keys_that_a_step_pops_leave_the_callers_dict() -> None:
    one = Trainer()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        y = batch.pop("y")
        return one.step(batch["x"], y)[0]

    train = amp_ir.jit(step, model=one.model, optimizer=one.optimizer)
    for _ in range(2):
        batch = {"x": X, "y": Y}
        train(batch)
        assert set(batch) == {"x"}


@pytest.mark.parametrize("change", ["add", "replace", "append", "set"])
def test_other_changes_of_an_argument_are_refused(change: str) -> None:
    one = Trainer()

    def step(batch: Any, more: list[Any], plain: Plain) -> Any:
        loss = one.step(batch["x"], batch["y"])[0]
        if change == "add":
            batch["loss"] = loss
        elif change == "replace":
            batch["x"] = batch["x"] * 2
        elif change == "append":
            more.append(loss)
        else:
            plain.x = loss
        return loss

    where = {
        "add": "0 (a dict, at 'loss')", "replace": "0 (a dict, at 'x')",
        "append": "1 (a list, at 0)", "set": "2 (a Plain, at 'x')",
    }[change]  # fmt: skip
    train = amp_ir.jit(step, model=one.model, optimizer=one.optimizer)
    with pytest.raises(CaptureError) as refused:
        train({"x": X, "y": Y}, [], Plain(X, Y))
    assert str(refused.value) == (
        "this step cannot be captured, 1 place:\n"
        f"  1. step (forward): the step changes argument {where}. Change a copy of it, or return "
        "what is new"
    )


def test_the_example_batch_of_trace_step_may_have_names() -> None:
    ours, eager = Trainer(), Trainer()

    def step(x: Any, *, y: Any) -> Any:
        return ours.step(x, y)[0]

    batch = amp_ir.call_arguments(X, y=Y)
    mod, args = amp_ir.trace_step(step, batch, model=ours.model, optimizer=ours.optimizer)
    train = amp_ir.compile(amp_ir.autocast(mod, args, amp_dtype="float32"))
    torch.testing.assert_close(train(X, y=Y), eager.step(X, Y)[0], **TIGHT)
    with pytest.raises(ArgumentError, match="the structure .Tensor,., but was captured with"):
        train(X)


def test_a_jitted_step_inside_of_another_is_refused() -> None:
    one = Trainer()
    inner = amp_ir.jit(lambda x: one.model(x).sum().detach(), model=one.model)
    with pytest.raises(ArgumentError) as refused:
        amp_ir.jit(lambda x: inner(x), model=one.model)(X)
    assert str(refused.value) == (
        "this is already inside of a capture; capture the outermost step only"
    )


def test_a_builtin_step_is_called_by_name_as_given() -> None:
    train = amp_ir.jit(torch.sub, model=Trainer().model)
    for _ in range(2):
        assert torch.equal(train(X, other=X), torch.zeros_like(X))
    assert torch.equal(train(X, 2 * X), -X)


def test_a_decorated_function_keeps_its_name_text_and_signature() -> None:
    one, eager = Trainer(), Trainer()

    @amp_ir.jit(model=one.model, optimizer=one.optimizer, amp_dtype="bfloat16")
    def train(x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """Train once."""
        return one.step(x, y)[0] * scale

    assert (train.__name__, train.__doc__) == ("train", "Train once.")
    assert list(inspect.signature(train).parameters) == ["x", "y", "scale"]
    line = train.__wrapped__.__code__.co_firstlineno
    function = "test_a_decorated_function_keeps_its_name_text_and_signature.train"
    name = f"{function} (test_jit_calls.py:{line})"
    assert repr(train) == f"JitStep({name}, bfloat16, cpu, not compiled yet)"
    with pytest.raises(StateError, match="the step has not run yet; call it first"):
        train.report  # noqa: B018
    # Low inputs of a sum of four: 2^-8 each.
    torch.testing.assert_close(train(X, y=Y), eager.step(X, Y)[0], rtol=2**-6, atol=0.0)
    about = f"{name}, bfloat16, cpu, 1 program"
    assert repr(train) == f"JitStep({about}; the last one: {train.report.summary()})"
    assert f"{train.report.kernel_count} kernels, peak" in str(train.report)


class Decorated(Trainer):
    @amp_ir.jit(model="model", optimizer="optimizer")
    def train(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.step(x, y)[0]


def test_a_decorated_method_is_a_step_of_each_instance() -> None:
    one, two, eager = Decorated(), Decorated(), Trainer()
    for _ in range(2):
        expected = eager.step(X, Y)[0]
        torch.testing.assert_close(one.train(X, y=Y), expected, **TIGHT)
        torch.testing.assert_close(two.train(X, Y), expected, **TIGHT)
    assert one.train is one.train and one.train is not two.train
    assert list(inspect.signature(one.train).parameters) == ["x", "y"]
    # A shallow copy shares the model, but its steps see the copy's own attributes.
    assert copy.copy(one).train is not one.train
    with pytest.raises(ArgumentError) as refused:
        Decorated.train(one, X, Y)
    assert str(refused.value) == (
        "jit(model='model', optimizer='optimizer') names attributes of the object whose method it "
        "decorates, and Decorated.train is called as a function; pass the objects themselves, or "
        "decorate a method and call it on an instance"
    )
    del one.model
    one.__dict__.pop("_amp_ir_train")
    with pytest.raises(ArgumentError, match="model='model' names no attribute of this Decorated"):
        one.train(X, Y)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_says_what_to_copy_instead_and_that_works(copied: Callable[[Any], Any]) -> None:
    one = Trainer()
    train = amp_ir.jit(lambda x, y: one.step(x, y)[0], model=one.model, optimizer=one.optimizer)
    train(X, Y)
    with pytest.raises(CopyError, match=r"Copy these, copy\.deepcopy\(\(model, optimizer\)\)"):
        copied(train)
    two = Trainer()
    two.model, two.optimizer = copy.deepcopy((one.model, one.optimizer))
    again = amp_ir.jit(lambda x, y: two.step(x, y)[0], model=two.model, optimizer=two.optimizer)
    torch.testing.assert_close(again(X, Y), train(X, Y), rtol=0.0, atol=0.0)
