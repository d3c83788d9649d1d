# SPDX-License-Identifier: Apache-2.0
"""`AmpIrPrecision`: a plugin by which Lightning's Trainer runs each batch as one compiled program.

Lightning's loop calls a closure for each batch: training_step, backward, and, through the precision
plugin, clipping and the optimizer. The plugin replaces the closure by one compiled step, in which
the hooks of module and callbacks that come in between are captured, too.
"""

from __future__ import annotations

import contextlib
import dis
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

import amp_ir
from amp_ir.errors import OptionError
from amp_ir.integrations.lightning.log_calls import LogCalls
from amp_ir.integrations.lightning.optimization import CompiledOptimization

_AMP_DTYPES = {"32-true": None, "bf16-mixed": "bfloat16", "16-mixed": "float16"}


class AmpIrPrecision(Precision):
    """A precision plugin that compiles the steps of Lightning's Trainer with `amp_ir.jit`.

    `Trainer(plugins=[AmpIrPrecision("bf16-mixed")])` instead of `Trainer(precision="bf16-mixed")`;
    the module stays as it is. One process, on one device, with automatic optimization.

    Args:
        precision: "32-true", "bf16-mixed" or "16-mixed"; the last trains under a loss scale, whose
            state is in the checkpoint.
        scaler: an `amp_ir.GradScaler` for "16-mixed", where its defaults are not right.
        jit_options: further options of `amp_ir.jit`: overrides, policy, memory_budget, ...

    Raises:
        OptionError: there is no such precision, or it needs no scaler; or, in `fit`, trainer or
            module ask for what one compiled step cannot do, and the message names all of it.
    """

    def __init__(
        self,
        precision: str = "bf16-mixed",
        *,
        scaler: amp_ir.GradScaler | None = None,
        **jit_options: Any,
    ) -> None:
        if precision not in _AMP_DTYPES:
            raise OptionError(
                f"precision={precision!r} is none that AmpIrPrecision trains in; give one of "
                f"{', '.join(map(repr, _AMP_DTYPES))}"
            )
        if scaler is not None and precision != "16-mixed":
            raise OptionError(
                f"precision={precision!r} needs no scaler; leave it out, or give "
                'precision="16-mixed"'
            )
        self.precision: Any = precision
        self._amp_dtype = _AMP_DTYPES[precision]
        self._scaler = scaler
        if precision == "16-mixed" and scaler is None:
            self._scaler = amp_ir.GradScaler()
        self._jit_options = jit_options
        self._device = "cpu"
        self._step: Any = None

    @property
    def compiled_step(self) -> Any:
        """The jitted step, as `amp_ir.jit` returns it; None before `fit`."""
        return self._step

    def connect(self, model: Any, optimizers: Any, lr_schedulers: Any) -> Any:
        """Put the compiled step into the trainer's loop."""
        trainer = model.trainer
        self._device = str(trainer.strategy.root_device)
        if trainer.state.fn == "fit":
            _check(trainer, model, optimizers)
            calls = LogCalls(model)
            step = amp_ir.jit(
                _step_of(trainer, model, optimizers[0], self._scaler, calls),
                model=model,
                optimizer=optimizers[0],
                scaler=self._scaler,
                **{"device": self._device, "amp_dtype": self._amp_dtype, **self._jit_options},
            )
            # A second fit goes on with the numbers of the first.
            step.load_state_dict(self._step.state_dict() if self._step is not None else {})
            self._step = step
            reads = _reads_batch_index(model)

            def run_step(arguments: tuple[Any, ...], phase: str, count: int) -> Any:
                batch, *index = arguments
                index = index if reads else [0 for _ in index]
                with calls.noted(), trainer.profiler.profile("[AmpIrPrecision]step"):
                    output, logged = step((batch, *index), phase, count)
                calls.log(logged)
                return output

            trainer.fit_loop.epoch_loop.automatic_optimization = CompiledOptimization(
                trainer, run_step
            )
        return model, optimizers, lr_schedulers

    def optimizer_step(
        self, optimizer: Any, model: Any = None, closure: Any = None, **kwargs: Any
    ) -> Any:
        """Run the closure, in which the optimizer's step is."""
        return closure()

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """Evaluate as Lightning does: in eager PyTorch, under autocast of the same dtype."""
        if self._amp_dtype is None:
            yield
            return
        device = torch.device(self._device).type
        with torch.autocast(device, getattr(torch, self._amp_dtype), cache_enabled=False):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the loss scale, and the state of dropout."""
        scaler = {} if self._scaler is None else {"scaler": self._scaler.state_dict()}
        return scaler if self._step is None else {**scaler, "step": self._step.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` returned."""
        if self._scaler is not None and "scaler" in state_dict:
            self._scaler.load_state_dict(state_dict["scaler"])
        if self._step is not None:
            self._step.load_state_dict(state_dict.get("step", {}))


def _step_of(
    trainer: Any, module: Any, optimizer: torch.optim.Optimizer, scaler: Any, calls: LogCalls
) -> Callable[..., Any]:
    """Return the step that `amp_ir.jit` compiles: what Lightning does for a batch, in its order."""
    hooks = {name: _overridden(trainer, module, name) for name in _HOOKS}
    backward = module.backward if _is_own(module, "backward") else torch.Tensor.backward
    clip = _clip_of(trainer, module, optimizer)

    def step(arguments: tuple[Any, ...], phase: str, count: int) -> tuple[Any, dict[int, Any]]:
        with calls.capturing() as capturing:

            def call(name: str, *given: Any) -> None:
                capturing.hook = name
                for hook in hooks[name]:
                    hook(*given)

            output = module.training_step(*arguments)
            loss = _loss_of(output)
            scaled = loss / count if count != 1 else loss
            scaled = scaled if scaler is None else scaler.scale(scaled)
            call("on_before_backward", scaled)
            backward(scaled)
            call("on_after_backward")
            if phase == "update":
                if scaler is not None:
                    scaler.unscale_(optimizer)
                call("on_before_optimizer_step", optimizer)
                capturing.hook = "configure_gradient_clipping"
                clip()
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
            if isinstance(output, Mapping):
                return {**output, "loss": loss.detach()}, capturing.values
            return loss.detach(), capturing.values

    return step


# Of module and callbacks, between training_step and the optimizer's step.
_HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step")


def _overridden(trainer: Any, module: Any, name: str) -> list[Callable[..., Any]]:
    """Return the hook of each callback, bound as Lightning calls it, and the module's own."""
    found: list[Callable[..., Any]] = []
    for callback in trainer.callbacks:
        own = getattr(callback, name)
        if getattr(own, "__func__", own) is not getattr(Callback, name):
            found.append(lambda *given, own=own: own(trainer, module, *given))
    return [*found, getattr(module, name)] if _is_own(module, name) else found


def _is_own(module: Any, name: str) -> bool:
    """Return whether the module's class defines one of LightningModule's methods itself."""
    own = getattr(module, name)
    return getattr(own, "__func__", own) is not getattr(LightningModule, name)


def _clip_of(trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    value, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
    if _is_own(module, "configure_gradient_clipping"):
        return lambda: module.configure_gradient_clipping(
            optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm
        )
    if not value:
        return lambda: None
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    if str(getattr(algorithm, "value", algorithm)) == "value":
        return lambda: torch.nn.utils.clip_grad_value_(parameters, value)
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, value)


def _loss_of(output: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, torch.Tensor):
        return loss
    raise OptionError(
        f"training_step returned {type(output).__name__}"
        f"{' without a tensor loss' if isinstance(output, Mapping) else ''}; a compiled step needs "
        'the loss of every batch, a tensor or {"loss": tensor, ...}: leave out a batch in the data '
        "loader, or in on_train_batch_start"
    )


def _reads_batch_index(module: Any) -> bool:
    """Return whether training_step may read its second argument, a number that always changes."""
    code = getattr(getattr(module.training_step, "__func__", None), "__code__", None)
    if code is None or code.co_argcount < 3 or _READ_ALL & set(code.co_names):
        return True
    name = code.co_varnames[2]
    # Where only the data of a batch matter, another number must not make another program.
    return name in code.co_cellvars or any(
        name in _loaded(one) for one in dis.get_instructions(code)
    )


# With these, code reads local variables that it does not name.
_READ_ALL = frozenset({"locals", "vars", "eval", "exec"})


def _loaded(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the names that an instruction loads; in Python 3.13 also two, or one after a store."""
    what, value = instruction.opname, instruction.argval
    if "LOAD" not in what:
        return ()
    names = value if isinstance(value, tuple) else (value,)
    return names[1:] if what.startswith("STORE") else names


def _check(trainer: Any, module: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    """Reject what one compiled step on one device cannot do.

    Raises:
        OptionError: lists all of it.
    """
    wrong = {
        "automatic_optimization=False": not module.automatic_optimization,
        f"{trainer.world_size} processes": trainer.world_size > 1,
        f"{type(trainer.strategy).__name__}": not isinstance(
            trainer.strategy, SingleDeviceStrategy
        ),
        f"{len(optimizers)} optimizers": len(optimizers) != 1,
        "LBFGS, which runs a batch several times": any(
            isinstance(one, torch.optim.LBFGS) for one in optimizers
        ),
        "optimizer_zero_grad of the module": _is_own(module, "optimizer_zero_grad"),
        "a module of torch.compile": getattr(module, "_compiler_ctx", None) is not None,
    }
    found = [name for name, is_wrong in wrong.items() if is_wrong]
    if found:
        raise OptionError(
            "AmpIrPrecision compiles all of a batch, for one device of one process; it cannot do "
            f"{'; '.join(found)}. Train these with Lightning's own precision, with "
            'torch.compile(module, backend="amp_ir") where that is enough'
        )
