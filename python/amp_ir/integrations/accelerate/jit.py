# SPDX-License-Identifier: Apache-2.0
"""`amp_ir.jit` for a step with `accelerator.backward`, in the Accelerator's mixed precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from accelerate.utils import DistributedType

from amp_ir.errors import OptionError
from amp_ir.integrations.tool_step import ToolStep, listed, refuse

_AMP_DTYPES = {"no": None, "bf16": "bfloat16", "fp16": "float16"}


def jit(
    step: Callable[..., Any], *, accelerator: Any, model: Any, optimizer: Any, **options: Any
) -> ToolStep:
    """Compile the body of a loop that calls an Accelerator; as `amp_ir.jit`.

    `Accelerator(mixed_precision="bf16")` chooses the dtype that amp_ir's rules work with, instead
    of autocast in the forward pass; "fp16" trains under the Accelerator's own loss scale. Other
    calls of the model, such as an evaluation, stay under autocast. Call the step inside of
    `accelerator.accumulate(model)`, and the scheduler after it.

    `accelerator.save_state` and `load_state` keep the state of dropout too: the step is registered.

    Args:
        step: what the loop did for a batch: forward, `accelerator.backward`, clipping, and step and
            zero_grad of the optimizer.
        accelerator: an Accelerator of one process, on one device.
        model: what `accelerator.prepare` returned, or a list of these, as is `optimizer`.
        options: further options of `amp_ir.jit`: overrides, policy, memory_budget, ...

    Raises:
        OptionError: the Accelerator does what one compiled step cannot do; the message names all
            of it.
    """
    models, wrappers = listed(model), listed(optimizer)
    _check(accelerator, models, wrappers)
    scaled = None if accelerator.scaler is None else _ScaledStep(accelerator, wrappers[0])

    @contextlib.contextmanager
    def set_aside() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # The count of batches, which `accumulate` advances: each would be another program.
            stack.enter_context(_set(accelerator, "step", _COUNT))
            for one in models:
                original = vars(one).get("_original_forward")
                if original is not None:
                    stack.enter_context(_set(one, "forward", original))
            if scaled is not None:
                stack.enter_context(scaled.set_aside())
            yield

    made = ToolStep(
        step,
        set_aside,
        model=models,
        # A compiled step's optimizers are torch's, inside of Accelerate's wrappers.
        optimizer=[getattr(one, "optimizer", one) for one in wrappers],
        **{
            "device": str(accelerator.device),
            "amp_dtype": _AMP_DTYPES[accelerator.mixed_precision],
            "scaler": accelerator.scaler,
            **options,
        },
    )
    accelerator.register_for_checkpointing(made)
    return made


@contextlib.contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of an instance, for the time of a call."""
    attributes = vars(owner)
    before = attributes.get(name, _ABSENT)
    attributes[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del attributes[name]
        else:
            attributes[name] = before


class _ScaledStep:
    """What `step` of Accelerate's optimizer is under a loss scale, inside of a compiled step.

    Accelerate's own counts in Python whether the scaler called the optimizer, which a compiled step
    cannot. Here the scale says so after the call: only a skipped step makes it smaller.
    """

    def __init__(self, accelerator: Any, wrapper: Any) -> None:
        self._wrapper, self._gradients = wrapper, accelerator.gradient_state
        self._scaler = scaler = accelerator.scaler
        optimizer = wrapper.optimizer

        def update(closure: None = None) -> None:
            if closure is not None:
                raise OptionError("optimizer.step takes no closure under a loss scale")
            scaler.step(optimizer)
            scaler.update()

        def accumulate(_closure: None = None) -> None:
            """Leave the gradients for a later batch."""

        self._update, self._accumulate = update, accumulate

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Replace the wrapper's `step`; then say whether it was skipped, for the scheduler."""
        # A program each: guards tell the two functions apart.
        if not self._gradients.sync_gradients:
            with _set(self._wrapper, "step", self._accumulate):
                yield
            return
        before = self._scaler.get_scale()
        with _set(self._wrapper, "step", self._update):
            yield
        self._wrapper._is_overflow = self._scaler.get_scale() < before


class _Count:
    """What `accelerator.step` is inside of a compiled step: a number that must not be used."""

    def _refuse(self, *_others: object) -> NoReturn:
        raise OptionError(
            "the step computes with accelerator.step, the number of the batch, which changes at "
            "every call, as accelerator.accumulate(model) does too: call the step inside of `with "
            "accelerator.accumulate(model):`, and pass what else depends on the number to the step "
            "as an argument"
        )

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __bool__ = __int__ = __index__ = __float__ = _refuse
    __hash__ = object.__hash__


_COUNT = _Count()
_ABSENT = object()


def _check(accelerator: Any, models: list[Any], wrappers: list[Any]) -> None:
    """Reject what one compiled step on one device cannot do.

    Raises:
        OptionError: lists all of it.
    """
    precision = accelerator.mixed_precision
    wrong = {
        f"{accelerator.num_processes} processes": accelerator.num_processes > 1,
        str(accelerator.distributed_type): accelerator.distributed_type != DistributedType.NO,
        f"mixed_precision={precision!r}": precision not in _AMP_DTYPES,
        # Accelerate updates the scale after each of them.
        "several optimizers under one loss scale": accelerator.scaler is not None
        and len(wrappers) > 1,
        "a model of torch.compile": any(
            isinstance(one, torch._dynamo.eval_frame.OptimizedModule) for one in models
        ),
    }
    refuse("accelerate", _AMP_DTYPES, wrong)
