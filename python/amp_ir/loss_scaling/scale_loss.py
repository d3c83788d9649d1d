# SPDX-License-Identifier: Apache-2.0
"""The loop of apex and MXNet: `with scale_loss(loss, optimizer) as scaled`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from amp_ir.errors import ArgumentError, OptionError
from amp_ir.ir.capturing import captured_scalers
from amp_ir.loss_scaling.grad_scaler import GradScaler

_own: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, torch.amp.GradScaler]] = (
    weakref.WeakKeyDictionary()
)

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


class ScalerNotPassed(OptionError):
    """A captured step scales a loss, and its capture was given no scaler for it."""

    def __init__(self, message: str, optimizer: torch.optim.Optimizer, loss_id: int) -> None:
        super().__init__(message)
        self.optimizer, self.loss_id = optimizer, loss_id

    def make(self, device: torch.device) -> None:
        """Make the scaler, so that `scalers_of` has it for the next capture."""
        own_scaler(self.optimizer, self.loss_id, lambda: GradScaler(device.type))


def scalers_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.amp.GradScaler]:
    """Return the scalers that `scale_loss` made for optimizers, in the order of their loss_id."""
    found = {id(scaler): scaler for one in optimizers for scaler in _own.get(one, {}).values()}
    return list(found.values())


def own_scaler(
    optimizer: torch.optim.Optimizer, loss_id: int, make: Callable[[], torch.amp.GradScaler]
) -> torch.amp.GradScaler:
    """Return the scaler of an optimizer's loss, which `make` gives at the first call."""
    scalers = _own.setdefault(optimizer, {})
    if loss_id not in scalers:
        scalers[loss_id] = make()
    return scalers[loss_id]


def losses_before_step(optimizer: torch.optim.Optimizer) -> int:
    """Return through how many scalers the optimizer's next step goes."""
    return len(_chain(optimizer))


@contextlib.contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizer: Optimizers,
    *,
    scaler: torch.amp.GradScaler | None = None,
    loss_id: int = 0,
    delay_unscale: bool = False,
) -> Iterator[torch.Tensor]:
    """Scale a loss for its backward pass, and unscale the gradients after it::

        with amp_ir.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()            # does nothing where a gradient is not finite

    The next `optimizer.step()` steps through the scaler, and updates the scale once every
    optimizer that was passed has stepped. Several losses of one optimizer add their unscaled
    gradients; the step is skipped if any of them overflowed.

    Args:
        loss: f[...], or a list of losses.
        optimizer: every optimizer that owns parameters which the loss gives gradients.
        scaler: the scaler to use. By default one that belongs to the first optimizer and the
            `loss_id`; or, where scalers were passed to the capture, the one at that position.
        loss_id: a scaler of its own for each loss (apex's `num_losses`).
        delay_unscale: leave the gradients scaled: another `scale_loss` with the same scaler
            follows before the step (accumulation over several batches).

    Raises:
        ArgumentError: `optimizer` is no optimizer, and no sequence of them.
        OptionError: in a captured step to which scalers were passed, and not as many.

    Source: apex.amp.scale_loss and mxnet.contrib.amp.scale_loss.
    """
    optimizers = _optimizers_of(optimizer)
    chosen = scaler if scaler is not None else _scaler_of(optimizers, loss_id, loss)
    if not chosen.is_enabled():
        yield loss
        return
    kept = [] if delay_unscale else _stash(optimizers)
    yield chosen.scale(loss)
    if delay_unscale:
        return
    for one in optimizers:
        _unscale(chosen, one)
    _add_back(kept)
    waiting = {id(one) for one in optimizers}
    for one in optimizers:
        _step_through(chosen, one, waiting)


def _optimizers_of(given: Any) -> list[torch.optim.Optimizer]:
    if isinstance(given, torch.optim.Optimizer):
        return [given]
    several = list(given) if isinstance(given, Sequence) else []
    if not several or not all(isinstance(one, torch.optim.Optimizer) for one in several):
        raise ArgumentError(
            f"scale_loss takes an optimizer, or a list of them, and got {given!r}; pass every "
            "optimizer that owns parameters which the loss gives gradients"
        )
    return several


def _scaler_of(
    optimizers: list[torch.optim.Optimizer], loss_id: int, loss: Any
) -> torch.amp.GradScaler:
    first = optimizers[0]
    passed = captured_scalers.get()
    if passed is None:
        device = loss.device if isinstance(loss, torch.Tensor) else loss[0].device
        return own_scaler(first, loss_id, lambda: GradScaler(device.type))
    own = _own.get(first, {}).get(loss_id)
    if own is not None and (not own.is_enabled() or any(own is one for one in passed)):
        return own
    are_own = all(any(one is own for own in _all_own()) for one in passed)
    if are_own or not 0 <= loss_id < len(passed):
        count = "no scaler was" if not passed else f"{len(passed)} were"
        message = (
            f"scale_loss with loss_id={loss_id} is in a captured step, to which {count} passed; "
            "pass scaler=amp_ir.GradScaler(), or a list of one scaler for each loss_id"
        )
        raise ScalerNotPassed(message, first, loss_id)
    scaler: torch.amp.GradScaler = passed[loss_id]
    return scaler


def _all_own() -> list[torch.amp.GradScaler]:
    return [scaler for scalers in list(_own.values()) for scaler in scalers.values()]


Kept = list[tuple[torch.Tensor, torch.Tensor]]


def _parameters(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    groups = [group for one in optimizers for group in one.param_groups]
    return [parameter for group in groups for parameter in group["params"]]


def _stash(optimizers: list[torch.optim.Optimizer]) -> Kept:
    """Stash gradients that an earlier loss left unscaled; those of this loss are scaled."""
    waiting = [one for one in optimizers if hasattr(vars(one).get("step"), "is_of_scale_loss")]
    kept = [(p, p.grad) for p in _parameters(waiting) if p.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    return kept


def _add_back(kept: Kept) -> None:
    for parameter, gradient in kept:
        with torch.no_grad():
            own = parameter.grad
            parameter.grad = gradient if own is None else own + gradient


def _unscale(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Call `scaler.unscale_`, also after another one before the step: `found_inf` accumulates."""
    state = scaler._per_optimizer_states[id(optimizer)]
    before = state["found_inf_per_device"]
    if before:
        # Another loss of the same scaler was unscaled; its gradients are stashed.
        del scaler._per_optimizer_states[id(optimizer)]
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    for device, flag in before.items():
        found[device] = found[device] + flag if device in found else flag


def _step_through(
    scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, waiting: set[int]
) -> None:
    """Route the next `optimizer.step()` through the scaler; `waiting` are those yet to step."""
    if any(one is scaler for one, _ in _chain(optimizer)):
        return
    own = vars(optimizer)
    before = own.get("step")

    def restore() -> None:
        if before is None:
            own.pop("step", None)
        else:
            own["step"] = before

    def done() -> None:
        waiting.discard(id(optimizer))
        if not waiting:
            scaler.update()

    def step(*args: Any, **kwargs: Any) -> Any:
        restore()
        result = scaler.step(optimizer, *args, **kwargs)
        # A step that this scaler skipped did not reach the other losses' scalers.
        while (inner := own.get("step")) is not None and hasattr(inner, "is_of_scale_loss"):
            inner.skip()
        done()
        return result

    def skip() -> None:
        restore()
        done()

    link: Callable[..., Any] = step
    link.is_of_scale_loss = (scaler, before)  # type: ignore[attr-defined]
    link.skip = skip  # type: ignore[attr-defined]
    own["step"] = link


def _chain(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any]]:
    """Return the scalers that the next step goes through, and `found_inf` of each of them."""
    links = []
    step: Any = vars(optimizer).get("step")
    while hasattr(step, "is_of_scale_loss"):
        links.append(step.is_of_scale_loss)
        step = links[-1][1]
    return links
