# SPDX-License-Identifier: Apache-2.0
"""The CTC loss with a shape that its lengths do not change: `torch.ops.amp_ir.ctc_loss`.

PyTorch's own op saves a table for the backward pass that is as wide as the longest target of the
batch. This one saves one that is as wide as any target can be; PyTorch's op gets the part in use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from amp_ir.capture.decompositions.checked_lengths import require_lengths
from amp_ir.capture.define_op import define_op

aten = torch.ops.aten

_SCHEMA = (
    "ctc_loss(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, "
    "int blank=0, bool zero_infinity=False) -> (Tensor, Tensor)"
)
_BACKWARD_SCHEMA = (
    "ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, "
    "Tensor target_lengths, Tensor neg_log_likelihood, Tensor log_alpha, int blank, "
    "bool zero_infinity=False) -> Tensor"
)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,  # noqa: FBT001, FBT002 (ATen's own signature)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return f32[batch] and the table f32[batch, time, 2 * longest + 1], zero where unused.

    Raises:
        IndexError: a label is no class.
    """
    lengths = input_lengths, target_lengths
    _check_labels(targets, target_lengths, log_probs.shape[2])
    loss, table = aten._ctc_loss.Tensor(log_probs, targets, *lengths, blank, zero_infinity)
    padded = table.new_zeros(_shape_of_table(log_probs, targets))
    padded[..., : table.shape[-1]] = table
    return loss, padded


def _check_labels(targets: torch.Tensor, lengths: torch.Tensor, classes: int) -> None:
    """Check the labels in use; PyTorch's op reads and writes memory that is not there by others."""
    if targets.ndim == 1:
        used = targets[: int(lengths.sum().clamp(min=0))]
    else:
        places = torch.arange(targets.shape[1], device=targets.device)
        used = targets[places < lengths.to(targets.device)[:, None]]
    if used.numel() == 0:
        return
    least, largest = (int(one) for one in used.aminmax())
    wrong = least if least < 0 else largest
    if wrong < 0 or wrong >= classes:
        raise IndexError(f"a label of ctc_loss is {wrong}, expected 0 to {classes - 1}")


def _ctc_loss_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    neg_log_likelihood: torch.Tensor,
    log_alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,  # noqa: FBT001, FBT002
) -> torch.Tensor:
    table = log_alpha[..., : 2 * int(target_lengths.max()) + 1].contiguous()
    lengths = input_lengths, target_lengths
    gradient: torch.Tensor = aten._ctc_loss_backward.Tensor(
        grad, log_probs, targets, *lengths, neg_log_likelihood, table, blank, zero_infinity
    )
    return gradient


def _shape_of_table(log_probs: torch.Tensor, targets: torch.Tensor) -> tuple[int, int, int]:
    """Return the largest shape: no target is longer than all of those that are concatenated."""
    time, batch, _ = log_probs.shape
    return batch, time, 2 * targets.shape[-1] + 1


def _fake_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    table = log_probs.new_empty(_shape_of_table(log_probs, targets))
    return log_probs.new_empty(log_probs.shape[1]), table


def _fake_backward(_grad: torch.Tensor, log_probs: torch.Tensor, *_rest: Any) -> torch.Tensor:
    return torch.empty_like(log_probs)


define_op(_SCHEMA, _ctc_loss, _fake_loss)
define_op(_BACKWARD_SCHEMA, _ctc_loss_backward, _fake_backward)

# Called instead of these ops while a step is traced; autograd has done its part by then.
CTC: Mapping[Any, Callable[..., Any]] = {
    aten._ctc_loss.Tensor: torch.ops.amp_ir.ctc_loss.default,
    aten._ctc_loss_backward.Tensor: torch.ops.amp_ir.ctc_loss_backward.default,
}


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    *rest: Any,
    **options: Any,
) -> torch.Tensor:
    """Compute PyTorch's loss with lengths in tensors, as the ops above take them."""
    loss: torch.Tensor = torch.nn.functional.ctc_loss(
        log_probs, targets, _in_tensor(input_lengths), _in_tensor(target_lengths), *rest, **options
    )
    return loss


def padded_targets(
    labels: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor | Sequence[int]
) -> torch.Tensor:
    """Return a row for each target of labels[mask], which has them one after the other.

    The labels are int[*mask.shape], the result int[n, longest]. The step checks what PyTorch does
    of targets one after the other: that the lengths int[n] add up to their number.
    """
    count, lengths = mask.numel(), _in_tensor(lengths).to(mask.device)
    # With a row of the mask for each target, as masks of padding have.
    longest = mask.shape[-1] if mask.shape[:-1] == lengths.shape else count
    # What is not selected is written to one more place, which none reads but for padding.
    places = torch.where(mask, mask.flatten().cumsum(0).view_as(mask) - 1, count)
    in_turn = labels.new_zeros(count + 1).scatter(0, places.flatten(), labels.flatten())
    starts = (lengths.cumsum(0) - lengths).unsqueeze(1)
    targets = in_turn[(starts + torch.arange(longest, device=mask.device)).clamp(0, count)]
    text = "target_lengths of ctc_loss add up to the number of labels that the mask selects, plus 0"
    targets = require_lengths(targets, (lengths.sum() - mask.sum()).view(1), 0, 0, text)
    text = (
        f"targets of ctc_loss have at most {longest} labels, as each row of the mask that selects "
        "them (flatten labels and mask for longer ones)"
    )
    return require_lengths(targets, lengths, 0, longest, text)


def _in_tensor(lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    if isinstance(lengths, torch.Tensor):
        return lengths
    return torch.tensor(lengths, dtype=torch.int64)
