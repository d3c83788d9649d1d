# SPDX-License-Identifier: Apache-2.0
"""What a step reads and writes by methods and functions of libraries is guarded, or refused."""

from __future__ import annotations

import collections
import configparser
import csv
import functools
import inspect
import io
import multiprocessing
import operator
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

import amp_ir
from amp_ir.capture.trace import capture_step
from amp_ir.errors import CaptureError

X = torch.linspace(-1, 1, 6, dtype=torch.float64).view(2, 3)
OF_THREAD = threading.local()
CONTEXT = ContextVar("CONTEXT", default=1.0)
GETENV, ENVIRON, MODULES = os.getenv, os.environ, sys.modules
NAME = "SCALE_OF_A_TEST_OF_LIBRARIES"


@attrs.frozen
class Case:
    """A factor of the loss, what is changed between two calls, and the reason to compile again."""

    weight: Callable[[], Any]
    change: Callable[[], Any]
    reason: str
    undo: Callable[[], Any] = lambda: None


def model_and_step(weight: Callable[[Any], Any]) -> tuple[Any, Callable[[torch.Tensor], Any]]:
    torch.manual_seed(0)
    model: Any = nn.Linear(3, 2).double()

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * weight(model)

    return model, step


def held_by(name: str) -> str:
    return f"closure variable {name!r} of "


def a_proxy() -> Case:
    held = {"w": 1.0}
    proxy = types.MappingProxyType(held)
    return Case(lambda: proxy["w"], lambda: held.update(w=2.0), "entry 'w' of closure variable")


def a_view() -> Case:
    held = collections.OrderedDict(w=1.0)
    values = held.values()
    return Case(lambda: sum(values), lambda: held.update(w=2.0), "entry 'w' of closure variable")


def a_bound_method() -> Case:
    held = {"w": 1.0}
    get = held.get
    return Case(lambda: get("w"), lambda: held.update(w=2.0), "entry 'w' of closure variable")


def a_reference() -> Case:
    class Holder:
        weight = 1.0

    holder = Holder()
    holder.weight = 1.0
    reference: Any = weakref.ref(holder)
    return Case(
        lambda: reference().weight, lambda: setattr(holder, "weight", 2.0), "attribute 'weight' of"
    )


def an_event() -> Case:
    event = threading.Event()
    return Case(lambda: 2.0 if event.is_set() else 1.0, event.set, "attribute '_flag' of")


def a_parser() -> Case:
    parser = configparser.ConfigParser()
    parser.read_dict({"loss": {"w": "1.0"}})
    return Case(
        lambda: float(parser["loss"]["w"]),
        lambda: parser.set("loss", "w", "2.0"),
        "entry 'w' of entry 'loss' of attribute '_sections' of",
    )


def a_scheduler() -> Case:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def change() -> None:
        optimizer.step()
        scheduler.step()

    return Case(lambda: scheduler.get_last_lr()[0], change, "get_last_lr() of ")


def a_later_function() -> Case:
    @functools.singledispatch
    def weight(_value: object) -> float:
        return 1.0

    return Case(
        lambda: weight([]), lambda: weight.register(list, lambda _value: 2.0), "functions of weight"
    )


def a_later_method() -> Case:
    class Loss:
        @functools.singledispatchmethod
        def weight(self, _value: object) -> float:
            return 1.0

    loss = Loss()
    return Case(
        lambda: loss.weight([]),
        lambda: Loss.weight.register(list, lambda _self, _value: 2.0),
        "functions of ",
    )


def the_dictionary_of_a_class() -> Case:
    class Options:
        weight = 1.0

    return Case(
        lambda: vars(Options)["weight"] * Options.__dict__["weight"],
        lambda: setattr(Options, "weight", 2.0),
        "attribute 'weight' of class Options was 1.0 and is 2.0",
    )


def an_attribute_of_the_thread() -> Case:
    OF_THREAD.weight = 1.0
    return Case(
        lambda: OF_THREAD.weight,
        lambda: setattr(OF_THREAD, "weight", 2.0),
        "attribute 'weight' of global 'OF_THREAD'",
    )


def a_context_variable() -> Case:
    return Case(
        lambda: CONTEXT.get(),
        lambda: CONTEXT.set(2.0),
        "get() of a ContextVar was 1.0 and is 2.0",
        lambda: CONTEXT.set(1.0),
    )


def of_environment(weight: Callable[[], float], reason: str) -> Case:
    return Case(
        weight, lambda: os.environ.update({NAME: "2"}), reason, lambda: os.environ.pop(NAME)
    )


def the_environment_by_another_name() -> Case:
    return of_environment(
        lambda: float(ENVIRON.get(NAME, "1")), "attribute '_data' of global 'ENVIRON'"
    )


def the_environment_by_a_function() -> Case:
    return of_environment(lambda: float(GETENV(NAME, "1")), "os.environ has other keys")


def the_arguments_of_the_process() -> Case:
    return Case(
        lambda: len(sys.argv), lambda: sys.argv.append("--x"), "sys.argv was ", sys.argv.pop
    )


def the_name_of_the_thread() -> Case:
    thread = threading.current_thread()
    name = thread.name
    return Case(
        lambda: 2.0 if threading.current_thread().name == "other" else 1.0,
        lambda: setattr(thread, "name", "other"),
        "the thread of the call was ",
        lambda: setattr(thread, "name", name),
    )


def the_seed() -> Case:
    return Case(  # `model_and_step` seeds
        lambda: torch.initial_seed() % 7,
        lambda: torch.manual_seed(4),
        "the seed of torch was 0 and is 4",
    )


def the_threads() -> Case:
    count = torch.get_num_threads()
    return Case(
        torch_threads,
        lambda: torch.set_num_threads(count + 1),
        f"torch.get_num_threads() was {count} and is {count + 1}",
        lambda: torch.set_num_threads(count),
    )


def torch_threads() -> int:
    return torch.get_num_threads()


def a_backends_setting() -> Case:
    return Case(
        lambda: 2.0 if torch.backends.cudnn.benchmark else 1.0,
        lambda: setattr(torch.backends.cudnn, "benchmark", True),
        "torch.backends.cudnn.benchmark was False and is True",
        lambda: setattr(torch.backends.cudnn, "benchmark", False),
    )


def a_tensors_shape() -> Case:
    tensor = torch.zeros(1)
    return Case(
        lambda: tensor.numel(), lambda: setattr(tensor, "data", torch.zeros(2)), "the shape of "
    )


def a_tensors_gradient() -> Case:
    tensor = torch.zeros(1)
    return Case(
        lambda: 1.0 if tensor.grad is None else 2.0,
        lambda: setattr(tensor, "grad", torch.ones(1)),
        "the gradient of ",
    )


def a_tensors_flag() -> Case:
    tensor = torch.zeros(1, requires_grad=True)
    held = [tensor.detach()]
    return Case(
        lambda: 2.0 if held[0].is_shared() else 1.0,
        lambda: held[0].share_memory_(),
        "is_shared() of ",
    )


class Holder:
    """Holds a number, by itself and deeper."""

    def __init__(self) -> None:
        self.weight = 1.0

    def twice(self) -> float:
        return 2.0 * self.weight


class Half(Holder):
    """Another class for a holder."""

    def twice(self) -> float:
        return self.weight


def deep_holder() -> Any:
    holder: Any = Holder()
    holder.inner = Holder()
    return holder


def a_getter() -> Case:
    holder, get = deep_holder(), operator.attrgetter("inner.weight")
    return Case(
        lambda: get(holder), lambda: setattr(holder.inner, "weight", 2.0), "attribute 'weight' of"
    )


def a_getter_that_sorts() -> Case:
    holders, key = [Holder(), Holder()], operator.attrgetter("weight")
    holders[1].weight = 3.0
    return Case(
        lambda: float(1 + holders.index(sorted(holders, key=key)[0])),
        lambda: setattr(holders[0], "weight", 4.0),
        "attribute 'weight' of item 0",
    )


def a_getter_of_a_path() -> Case:
    holder = deep_holder()
    return Case(
        lambda: operator.attrgetter("inner.weight")(holder),
        lambda: setattr(holder.inner, "weight", 2.0),
        "attribute 'weight' of",
    )


def a_partial_getattr() -> Case:
    holder = Holder()
    get: Any = functools.partial(getattr, holder, "weight")
    return Case(get, lambda: setattr(holder, "weight", 2.0), "attribute 'weight' of")


def a_caller() -> Case:
    holder, call = Holder(), operator.methodcaller("twice")
    return Case(
        lambda: call(holder), lambda: setattr(holder, "twice", lambda: 3.0), "attribute 'twice' of"
    )


def a_proxy_of_a_class() -> Case:
    class Options:
        weight = 1.0

    proxy = Options.__dict__
    return Case(
        lambda: proxy["weight"],
        lambda: setattr(Options, "weight", 2.0),
        "attribute 'weight' of class Options was 1.0 and is 2.0",
    )


def a_name_in_a_proxy_of_a_class() -> Case:
    class Options:
        pass

    proxy = Options.__dict__
    return Case(
        lambda: 2.0 if "weight" in proxy else 1.0,
        lambda: setattr(Options, "weight", 2.0),
        "the names of closure variable 'proxy'",
    )


def a_distribution() -> Case:
    normal = torch.distributions.Normal(torch.zeros(3).double(), torch.ones(3).double())
    return Case(
        lambda: normal.log_prob(X[0]).sum(),
        lambda: setattr(normal, "loc", torch.ones(3).double()),
        "attribute 'loc' of closure variable 'normal'",
    )


def a_distribution_in_another() -> Case:
    normal = torch.distributions.Normal(torch.zeros(3).double(), torch.ones(3).double())
    rows = torch.distributions.Independent(normal, 1)
    return Case(
        lambda: torch.distributions.kl_divergence(rows, rows) + rows.log_prob(X[0]),
        lambda: setattr(normal, "scale", torch.full((3,), 2.0).double()),
        "attribute 'scale' of attribute 'base_dist' of closure variable 'rows'",
    )


def a_transform() -> Case:
    affine = torch.distributions.AffineTransform(0.0, 2.0)
    return Case(
        lambda: affine(X).square().sum(),
        lambda: setattr(affine, "scale", 3.0),
        "attribute 'scale' of closure variable 'affine' of ",
    )


def a_loaded_module() -> Case:
    return Case(
        lambda: 2.0 if "module_of_a_test" in sys.modules else 1.0,
        lambda: sys.modules.update(module_of_a_test=types.ModuleType("module_of_a_test")),
        "entry 'module_of_a_test' of sys.modules was None and is a module",
        lambda: sys.modules.pop("module_of_a_test"),
    )


def a_loaded_module_by_another_name() -> Case:
    return Case(
        lambda: 2.0 if MODULES.get("module_of_a_test") is None else 1.0,
        lambda: sys.modules.update(module_of_a_test=types.ModuleType("module_of_a_test")),
        "entry 'module_of_a_test' of sys.modules was None and is a module",
        lambda: sys.modules.pop("module_of_a_test"),
    )


def the_class_of_an_object() -> Case:
    holder: Any = Holder()
    return Case(
        lambda: holder.twice(),
        lambda: setattr(holder, "__class__", Half),
        "the class of closure variable 'holder' of <lambda> (test_guards_on_library_objects.py:",
    )


SEEN = [
    a_getter, a_getter_that_sorts, a_getter_of_a_path, a_partial_getattr, a_caller,
    a_proxy_of_a_class, a_name_in_a_proxy_of_a_class, a_distribution, a_distribution_in_another,
    a_transform, a_loaded_module, a_loaded_module_by_another_name, the_class_of_an_object,
    a_proxy, a_view, a_bound_method, a_reference, an_event, a_parser, a_scheduler,
    a_later_function, a_later_method, the_dictionary_of_a_class, an_attribute_of_the_thread,
    a_context_variable, the_environment_by_another_name, the_environment_by_a_function,
    the_arguments_of_the_process, the_name_of_the_thread, the_seed, the_threads,
    a_backends_setting, a_tensors_shape, a_tensors_gradient, a_tensors_flag,
]  # fmt: skip


@pytest.mark.parametrize("build", SEEN, ids=lambda one: one.__name__)
def test_a_change_is_seen(build: Callable[[], Case]) -> None:
    """Each of these was frozen at the capture, silently."""
    case = build()
    weight = case.weight
    model, step = model_and_step(lambda _model: weight())
    train: Any = amp_ir.jit(step, model=model)
    try:
        torch.testing.assert_close(train(X), step(X), rtol=1e-12, atol=0)
        before = step(X)
        case.change()
        assert before != step(X)
        torch.testing.assert_close(train(X), step(X), rtol=1e-12, atol=0)
        assert train.recompiles[-1].reason.startswith(case.reason)
        assert len(train.recompiles) == 1
    finally:
        case.undo()


def test_the_gradient_flag_of_a_tensor_from_outside_is_guarded() -> None:
    flag = torch.zeros(1)
    model, step = model_and_step(lambda _model: 2.0 if flag.requires_grad else 1.0)
    captured = capture_step(step, (X,), model=model)
    assert captured.hooks.recompile_reason() == ""
    flag.requires_grad_()
    reason = captured.hooks.recompile_reason()
    assert reason.startswith("requires_grad of closure variable 'flag' of ")
    assert reason.endswith(" was False and is True")


# Look-ups of parameters by identity, of what holds them weakly or by position.


def by_partial(model: Any) -> Callable[[Any], bool]:
    return functools.partial(lambda weight, p: weight is p, model.weight)


def by_reference(model: Any) -> Callable[[Any], bool]:
    reference = weakref.ref(model.weight)
    return lambda p: reference() is p


def by_value(model: Any) -> Callable[[Any], bool]:
    held = weakref.WeakValueDictionary(weight=model.weight)
    return lambda p: held["weight"] is p


def by_weak_tensor(model: Any) -> Callable[[Any], bool]:
    held = WeakTensorKeyDictionary()
    held[model.weight] = True
    return lambda p: held.get(p, False)


def by_weak_id(model: Any) -> Callable[[Any], bool]:
    held = WeakIdKeyDictionary()
    held[model.weight] = 1.0
    return lambda p: p in held and held[p] > 0


def by_proxy(model: Any) -> Callable[[Any], bool]:
    held = types.MappingProxyType({model.weight: True})
    return lambda p: held.get(p, False)


@pytest.mark.parametrize(
    "by", [by_partial, by_reference, by_value, by_weak_tensor, by_weak_id, by_proxy],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_a_parameter_is_found_again(by: Any) -> None:
    found: list[Any] = []

    def weight(model: Any) -> float:
        return sum(2.0 if found[0](p) else 3.0 for p in model.parameters())

    model, step = model_and_step(weight)
    found.append(by(model))
    torch.testing.assert_close(amp_ir.jit(step, model=model)(X), step(X), rtol=1e-12, atol=0)
    assert found[0](model.weight) and not found[0](model.bias)


def test_a_step_with_arguments_by_position_finds_its_parameter() -> None:
    model: Any = nn.Linear(3, 2).double()

    def given(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean() * (2.0 if weight is model.weight else 1.0)

    step = functools.partial(given, model.weight)
    torch.testing.assert_close(amp_ir.jit(step, model=model)(X), step(X), rtol=1e-12, atol=0)
    assert step.args == (model.weight,) and step.args[0] is model.weight


# What is refused: (what the step does, the message, what it changes).

MOVE = (
    "A compiled step changes tensors only: return what is new and change it after the call, or "
    "make it a tensor that is a buffer of the model. What it decides (if count % 4 == 0) is passed "
    "to the step as an argument, a bool"
)
OUTSIDE = (
    "acts outside of the step, which a compiled step would do only when it is captured. Return "
    "from the step what is to be written or put, and do it after the call; read or take before "
    "it, and pass that as an argument"
)


def writes_text() -> tuple[Any, str, Any]:
    text = io.StringIO("of before")
    return lambda: text.write("x"), f"write() of a StringIO {OUTSIDE}", text.getvalue


def writes_a_row() -> tuple[Any, str, Any]:
    writer = csv.writer(io.StringIO())
    return lambda: writer.writerow([1]), f"writerow() of a writer {OUTSIDE}", bool


def writes_an_entry() -> tuple[Any, str, Any]:
    writer = csv.DictWriter(io.StringIO(), ["a"])
    return lambda: writer.writerow({"a": 1}), f"writerow() of a DictWriter {OUTSIDE}", bool


def puts() -> tuple[Any, str, Any]:
    values: queue.SimpleQueue[int] = queue.SimpleQueue()
    return lambda: values.put(1), f"put() of a SimpleQueue {OUTSIDE}", bool


def puts_for_another_process() -> tuple[Any, str, Any]:
    values: Any = multiprocessing.Queue()
    values.put(0)  # starts its thread; one that a refused step started could not be ended
    return lambda: values.put(1), f"put() of a Queue {OUTSIDE}", bool


def appends() -> tuple[Any, str, Any]:
    held: list[int] = []
    add = held.append
    what = f"changes closure variable 'add' of <lambda> ({{at}}) (a list, at 0). {MOVE}"
    return lambda: add(1), what, lambda: list(held)


def moves_an_entry() -> tuple[Any, str, Any]:
    held = collections.OrderedDict(a=1, b=2)
    what = f"changes closure variable 'held' of <lambda> ({{at}}) (a OrderedDict, at 'a'). {MOVE}"
    return lambda: held.move_to_end(next(iter(held))), what, lambda: list(held)


def sets_a_variable() -> tuple[Any, str, Any]:
    what = (
        "sets the context variable 'CONTEXT', which a compiled step would do only when it is "
        "captured. Set it before the call or after it, or reset it in the step: token = "
        "variable.set(...), variable.reset(token)"
    )
    return lambda: CONTEXT.set(5.0), what, CONTEXT.get


def runs_in_a_context() -> tuple[Any, str, Any]:
    context = copy_context()
    what = (
        "run() of a Context reads context variables, and what they are there is not guarded. Pass "
        "what they give as an argument, or call the step itself with context.run(step, ...)"
    )
    return lambda: context.run(float), what, bool


REFUSED = [
    sets_a_variable, runs_in_a_context,
    writes_text, writes_a_row, writes_an_entry, puts, puts_for_another_process, appends,
    moves_an_entry,
]  # fmt: skip


@pytest.mark.parametrize("build", REFUSED, ids=lambda one: one.__name__)
def test_what_happens_only_at_the_capture_is_refused(build: Any) -> None:
    act, message, state = build()

    def weight(_model: Any) -> float:
        act()
        return 1.0

    model, step = model_and_step(weight)
    before = state()
    with pytest.raises(CaptureError) as caught:
        capture_step(step, (X,), model=model)
    line = act.__code__.co_firstlineno
    place = "" if build is moves_an_entry else f", {__file__}:{line}"
    at = f"{__file__.rpartition('/')[2]}:{line}"
    assert str(caught.value) == (
        f"this step cannot be captured, 1 place:\n  1. step (forward){place}: "
        f"{message.replace('{at}', at)}"
    )
    if build is not writes_text:  # a stream cannot take back what it was given
        assert state() == before
    if build is puts_for_another_process:
        # Else its thread meets later tests, until the garbage collector ends it.
        values = inspect.getclosurevars(act).nonlocals["values"]
        values.close()
        values.join_thread()


def test_print_into_a_stream_is_refused_and_undone() -> None:
    text = io.StringIO()

    def weight(_model: Any) -> float:
        print("x", file=text)
        return 1.0

    model, step = model_and_step(weight)
    with pytest.raises(CaptureError, match=r"moves closure variable 'text' of .* on, a stream"):
        capture_step(step, (X,), model=model)
    assert text.getvalue() == ""


def test_a_queue_of_python_is_as_before() -> None:
    values: queue.Queue[int] = queue.Queue()

    def weight(_model: Any) -> float:
        values.put(1)
        return 1.0

    model, step = model_and_step(weight)
    with pytest.raises(CaptureError, match="changes attribute 'queue' of closure variable"):
        capture_step(step, (X,), model=model)
    assert values.empty() and values.unfinished_tasks == 0


def test_what_the_step_makes_itself_and_the_output_are_its_own() -> None:
    output = sys.stdout

    def weight(_model: Any) -> float:
        text, lock = io.StringIO(), threading.Lock()
        with lock:
            text.write("x")
        print("", end="", file=output)
        output.write("")
        return float(len(text.getvalue()))

    model, step = model_and_step(weight)
    torch.testing.assert_close(amp_ir.jit(step, model=model)(X), step(X), rtol=1e-12, atol=0)


def test_a_context_variable_that_is_reset_is_the_steps_own() -> None:
    def weight(_model: Any) -> float:
        token = CONTEXT.set(3.0)
        factor = CONTEXT.get()
        CONTEXT.reset(token)
        return factor

    model, step = model_and_step(weight)
    torch.testing.assert_close(amp_ir.jit(step, model=model)(X), step(X), rtol=1e-12, atol=0)
    assert CONTEXT.get() == 1.0


def test_a_distribution_keeps_nothing_of_a_capture() -> None:
    """It kept the fake of its probabilities, which it computes when they are asked for."""
    classes = torch.distributions.Categorical(logits=torch.zeros(3).double())
    model, step = model_and_step(lambda _model: classes.probs.sum() + classes.entropy())
    train: Any = amp_ir.jit(step, model=model)
    got = train(X)
    assert "probs" not in vars(classes)
    torch.testing.assert_close(got, step(X), rtol=1e-12, atol=0)
    torch.testing.assert_close(train(X), step(X), rtol=1e-12, atol=0)


ALIAS = type


def test_python_s_type_by_another_name_tells_what_the_tensors_are() -> None:
    """It told of fakes, so that the step branched as it does not in PyTorch."""

    def weight(model: Any) -> float:
        return 2.0 if ALIAS(model.weight) is nn.Parameter else 1.0

    model, step = model_and_step(weight)
    torch.testing.assert_close(amp_ir.jit(step, model=model)(X), step(X), rtol=1e-12, atol=0)
    assert ALIAS is type


class Descriptor:
    """Gives another object each time."""

    def __get__(self, instance: Any, owner: Any = None) -> list[float]:
        return [1.0]


class Base:
    """Has attributes that are another object each time they are asked for."""

    numbers = Descriptor()

    @classmethod
    def own(cls) -> str:
        return cls.__name__

    @functools.singledispatchmethod
    def weight(self, _value: object) -> float:
        return 1.0

    twice = functools.partialmethod(weight, 2)


def test_a_class_is_as_before_a_capture() -> None:
    """A classmethod was replaced by the method of this class, also in classes made of it later."""
    before = dict(vars(Base))
    base = Base()

    def weight(_model: Any) -> float:
        return len(Base.own()) * len(base.own()) * base.weight(1) * base.numbers[0]

    model, step = model_and_step(weight)
    train: Any = amp_ir.jit(step, model=model)
    for _ in range(2):
        torch.testing.assert_close(train(X), step(X), rtol=1e-12, atol=0)
    assert not train.recompiles
    assert {key: vars(Base)[key] for key in before} == before
    assert type("Derived", (Base,), {}).own() == "Derived"
