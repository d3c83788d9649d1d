# SPDX-License-Identifier: Apache-2.0
"""Checks of a capture's arguments before tracing; each error lists everything that is wrong."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.utils._pytree as pytree
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.parallel import DistributedDataParallel

from amp_ir.capture.batch import leaf_error
from amp_ir.capture.call_arguments import signature_of, split
from amp_ir.capture.containers import flatten_with_path, leaves_of
from amp_ir.capture.distribution import wrapper_error
from amp_ir.errors import ArgumentError
from amp_ir.ir.bare_tensors import BareTensors, with_bare_tensors
from amp_ir.ir.memory_overlap import memory_range
from amp_ir.ir.unusable_tensors import tensor_error

NESTED = "this is already inside of a capture; capture the outermost step only"
# What `capture/loss_scaling.py` puts in the place of a scaler's own.
_SCALING = ("scale", "get_scale", "update", "_unscale_grads_", "_maybe_opt_step")


@attrs.frozen
class Checked:
    """Models, optimizers and enabled scalers as lists."""

    models: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]
    scalers: list[torch.amp.GradScaler]


def check_arguments(
    step: object, example_batch: object, model: object, optimizer: object, scaler: object
) -> Checked:
    """Make lists of the models and optimizers, and refuse what cannot be captured.

    Raises:
        ArgumentError: listing everything that is wrong.
    """
    if get_proxy_mode() is not None:
        raise ArgumentError(NESTED)
    batch_errors = [*_batch_errors(example_batch)]
    wrong = [*_step_errors(step), *batch_errors, *_scaler_errors(scaler)]
    if not wrong:
        wrong += _call_errors(step, example_batch)
    return _check(wrong, model, optimizer, scaler, example_batch)


def refuse_bare_tensors(models: Sequence[torch.nn.Module]) -> None:
    """Refuse tensors in no module where ranks exchange the gradients of modules.

    Raises:
        ArgumentError: there are some.
    """
    bare = [p for one in models if isinstance(one, BareTensors) for p in one.parameters()]
    if bare:
        raise ArgumentError(
            f"{len(bare)} of the parameters of the optimizers are tensors in no model, whose "
            "gradients the ranks would not exchange. Make each a parameter, p = "
            "torch.nn.Parameter(p), before its optimizer is made, and pass "
            "model=[model, torch.nn.ParameterList([p])]"
        )


def check_training(step: object, model: object, optimizer: object, scaler: object) -> None:
    """Refuse what cannot be captured whatever the batch is.

    Raises:
        ArgumentError: listing everything that is wrong.
    """
    _check([*_step_errors(step), *_scaler_errors(scaler)], model, optimizer, scaler, ())


def _check(
    wrong: list[str], model: object, optimizer: object, scaler: object, batch: object
) -> Checked:
    models: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if optimizer is None:
        optimizers = []
    model_errors = list(dict.fromkeys(error for m in models for error in _model_errors(m)))
    if not models:
        model_errors = ["model= is an empty list; pass the torch.nn.Module that the step trains"]
    wrong += model_errors
    if not model_errors:
        models = with_bare_tensors(models, optimizers)
        wrong += _tensor_errors(models, batch)
        wrong += _optimizer_errors(models, optimizers)
        wrong += _state_errors(models, optimizers)
    if wrong:
        raise ArgumentError("; ".join(wrong))
    return Checked(models, optimizers, [one for one in _scalers(scaler) if one.is_enabled()])


def _step_errors(step: object) -> Iterator[str]:
    if not callable(step):
        yield f"step= is a {type(step).__name__}, expected a function that makes one training step"
    elif isinstance(step, torch.nn.Module) or hasattr(step, "_torchdynamo_orig_callable"):
        if hasattr(step, "_orig_mod") or hasattr(step, "_torchdynamo_orig_callable"):
            yield "step= was made by torch.compile; pass the plain function instead"


def _call_errors(step: Any, batch: Any) -> Iterator[str]:
    """Return why the step cannot be called with as many arguments as the batch has."""
    signature = signature_of(step)
    if signature is None:
        return
    by_position, named = split(batch)
    try:
        signature.bind(*by_position, **named)
    except TypeError as error:
        number = len(by_position) + len(named)
        count = "1 argument" if number == 1 else f"{number} arguments"
        hint = "" if named else _unpacked(signature, by_position)
        yield f"the step takes {signature} and is given {count}: {error}{hint}"


def _unpacked(signature: inspect.Signature, arguments: Sequence[Any]) -> str:
    """Return what to do where the one argument is the tuple of all of them; else ""."""
    if len(arguments) != 1 or not isinstance(arguments[0], (tuple, list)):
        return ""
    (batch,) = arguments
    try:
        signature.bind(*batch)
    except TypeError:
        return ""
    return f"; it is a {type(batch).__name__} of them: give them one by one, as in step(*batch)"


def _scaler_errors(scaler: object) -> Iterator[str]:
    seen: set[int] = set()
    for one in _scalers(scaler):
        if not isinstance(one, torch.amp.GradScaler):
            yield f"scaler= has {_in_words(one)}, expected an amp_ir.GradScaler"
        elif id(one) in seen:
            yield f"scaler= holds the same {type(one).__name__} twice"
        elif own := _own_scaling(type(one)):
            yield (
                f"scaler= has a {type(one).__name__} whose own {own}() a compiled step would not "
                "call; use amp_ir.GradScaler, whose options decide how the scale changes"
            )
        elif one.is_enabled() and len(one._per_optimizer_states) > 0:
            yield (
                "scaler= is in the middle of an iteration: unscale_ or step was called on it, and "
                "update was not; call scaler.update() first"
            )
        seen.add(id(one))


def _own_scaling(kind: type) -> str:
    """Return the method that a user's class has in place of one that is captured as ops, or ""."""
    for owner in kind.__mro__:
        if owner.__module__.partition(".")[0] in ("torch", "amp_ir"):
            return ""
        for name in _SCALING:
            if name in vars(owner):
                return name
    return ""


def _scalers(scaler: object) -> list[Any]:
    if scaler is None:
        return []
    return list(scaler) if isinstance(scaler, (list, tuple)) else [scaler]


def _batch_errors(batch: object) -> Iterator[str]:
    if not isinstance(batch, tuple):
        yield (
            f"example_batch= is a {type(batch).__name__}, expected the tuple of the step's "
            "arguments: (inputs, targets), or (batch,) for a single one"
        )
        return
    for path, leaf in flatten_with_path(batch):
        error = leaf_error(leaf)
        if error:
            yield f"example_batch{pytree.keystr(path)} {error}"


def _model_errors(model: object) -> Iterator[str]:
    if not isinstance(model, torch.nn.Module):
        hint = "; pass them as a list" if isinstance(model, Mapping) else ""
        yield f"model= has {_in_words(model)}, expected torch.nn.Module{hint}"
        return
    for name, module in model.named_modules():
        kind, where = type(module).__name__, f"model= ({name or 'itself'})"
        shared = wrapper_error(module)
        if shared is not None and not isinstance(module, DistributedDataParallel):
            yield f"{where} {shared}"
        elif kind == "OptimizedModule":
            yield f"{where} was made by torch.compile; pass the plain module (._orig_mod)"
        elif isinstance(module, torch.jit.ScriptModule):
            yield f"{where} is a TorchScript module; pass the Python module"
        elif "quantized" in type(module).__module__ and "torch" in type(module).__module__:
            yield f"{where} is the quantized module {kind}; train in floating point"
        elif isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.sparse:
            yield (
                f"{where} has sparse gradients; make the {kind} with sparse=False, and an Adam "
                "where there was a SparseAdam"
            )


def _tensor_errors(models: list[torch.nn.Module], batch: object) -> Iterator[str]:
    """Return errors of parameters and buffers: kinds, devices, sharing unknown to PyTorch."""
    by_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    devices: dict[torch.device, str] = {}
    for index, model in enumerate(models):
        prefix = f"model{index}." if index else ""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            error = tensor_error(tensor)
            if error:
                yield f"{prefix}{name} {error}"
                continue
            devices.setdefault(tensor.device, prefix + name)
            by_storage.setdefault(_address(tensor), []).append((prefix + name, tensor))
    for found in by_storage.values():
        yield from _sharing_errors(found)
    leaves = leaves_of(batch)
    for tensor in (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)):
        # A batch may be on the host: the step itself then moves it to the model's GPU.
        if tensor.device.type != "cpu":
            devices.setdefault(tensor.device, "the example batch")
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        yield f"tensors are on different devices ({places}); move all to one with .to(device)"


def _sharing_errors(found: list[tuple[str, torch.Tensor]]) -> Iterator[str]:
    """Return errors of tensors of one storage that overlap; parts of it may lie side by side."""
    distinct = {id(tensor): (name, tensor) for name, tensor in reversed(found) if tensor.numel()}
    ranges = [(memory_range(tensor), name) for name, tensor in reversed(distinct.values())]
    ranges.sort(key=lambda one: one[0].start)
    for (owned, owner), (other, name) in itertools.pairwise(ranges):
        if other.start < owned.stop:
            yield (
                f"{name} and {owner} share memory but are two tensors; "
                "tie them by assigning the same Parameter to both"
            )


def _in_words(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _optimizer_errors(models: list[torch.nn.Module], optimizers: list[object]) -> Iterator[str]:
    known = {id(parameter) for model in models for parameter in model.parameters()}
    seen: set[int] = set()
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            hint = "; pass them as a list" if isinstance(optimizer, Mapping) else ""
            yield f"optimizer= has {_in_words(optimizer)}, expected torch.optim.Optimizer{hint}"
            continue
        kind = type(optimizer).__name__
        if id(optimizer) in seen:
            yield f"optimizer= holds the same {kind} twice"
        seen.add(id(optimizer))
        if isinstance(optimizer, torch.optim.LBFGS):
            yield (
                f"{kind} calls its closure as often as the numbers decide; jit the forward and "
                "backward pass without optimizer=, and call that in the closure, or use another "
                "optimizer"
            )
        elif isinstance(optimizer, torch.optim.SparseAdam):
            yield f"{kind} needs sparse gradients; use Adam"
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [parameter for parameter in parameters if id(parameter) not in known]
        if foreign:
            yield (
                f"{len(foreign)} of the {len(parameters)} parameters of optimizer {index} ({kind}) "
                "are in no model; pass every module that it trains in model=[...], for a parameter "
                "in no module torch.nn.ParameterList([p]), or, where parameters were replaced "
                "(load_state_dict(assign=True), a new layer), make the optimizer anew"
            )
        # A few kinds would update it twice with one state, others once.
        twice = len(parameters) - len({id(one) for one in parameters})
        if twice:
            yield (
                f"optimizer {index} ({kind}) holds {twice} of its parameters twice, which PyTorch "
                "warns of; make it anew with each once, as of dict.fromkeys(parameters)"
            )


def _state_errors(models: list[torch.nn.Module], optimizers: list[Any]) -> Iterator[str]:
    """Return errors of gradients and of optimizer state."""
    names: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"model{index}." if index else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + name)
            if parameter.grad is not None and (error := tensor_error(parameter.grad)):
                yield f"{prefix}{name}.grad {error}"
    for index, optimizer in enumerate(optimizers):
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        for owner, values in optimizer.state.items():
            name = names.get(id(owner), "a parameter of another model")
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, torch.Tensor) and (error := tensor_error(value)):
                    yield f"{key!r} of optimizer {index} for {name} {error}"
