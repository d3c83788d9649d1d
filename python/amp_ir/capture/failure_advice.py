# SPDX-License-Identifier: Apache-2.0
"""What to do about an error that the user's step raised while it was captured."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

ONE_DTYPE = (
    "Leave the batch and the model in float32, for amp_dtype= inserts the casts; or cast one of "
    "them in the step, with x.to(...)"
)
_NESTED = (
    "A nested tensor has a shape that depends on the data. Make padded rows of it before the call, "
    "with torch.nested.to_padded_tensor(nested, 0.0), and pass them with a mask by which the loss "
    "leaves the padding out"
)
_OF_TEXTS = {
    "_nested_tensor_from": _NESTED,
    "nested_tensor_from_jagged": _NESTED,
    # What jagged layouts say that are made of a list.
    "self.shape_env must not be None": _NESTED,
    "no fake impl registered": (
        "A compiled step needs the shapes of its results before it runs: register a function that "
        "returns empty tensors of them with torch.library.register_fake"
    ),
    "dynamo-optimized function": (
        "A module or function that the step calls is compiled by torch.compile, and amp_ir "
        "compiles the whole step: call the plain one, which is compiled._orig_mod, and leave "
        "model.compile() out"
    ),
    "its data is not allocated yet": (
        "The values do not exist yet when a step is captured: make the list (.tolist()) before the "
        "call and pass it as an argument, or pass the tensor where one is taken too, as "
        "pack_padded_sequence takes the lengths"
    ),
    ".numpy() is not supported": (
        "The values do not exist yet when a step is captured: return the tensor, and call .numpy() "
        "on it after the call"
    ),
    "tensors do not have strides": (
        "Only dense tensors can be captured: make a sparse one dense before the call, with "
        ".to_dense()"
    ),
    "not a storage 'LaterNumber'": (
        "A size that values of the batch decide is not known when a step is captured: compute it "
        "before the call, and pass the Python number as an argument"
    ),
    "expected one dtype": f"PyTorch refuses it too. {ONE_DTYPE}",
    "Inference tensors cannot": (
        "PyTorch refuses it too: compute it under torch.no_grad() instead of inference_mode()"
    ),
}
OUR_FAULT = (
    "Check that it runs as plain PyTorch on the same batch; if it does, this is a fault of amp_ir: "
    "please report it with this text and the output of amp-ir doctor"
)
# Others than these are PyTorch's words on wrong arguments, which ops of ours pass on.
_OF_PROGRAMS = (AttributeError, NameError, KeyError, AssertionError)
_OURS = str(Path(__file__).parents[1])
_OF_SHAPES = re.compile(r"\b(shapes?|sizes?|dims?|dimensions?)\b", re.IGNORECASE)
_SHAPES = (
    "Shapes are known while a step is captured: print(x.shape) before this line shows them. They "
    "have to be what PyTorch takes"
)
_OTHERWISE = (
    "Check that it runs as plain PyTorch on the same batch; if it does, it needs a tensor's values "
    "(as .numpy() does), which do not exist yet when a step is captured"
)


def is_our_fault(error: BaseException) -> bool:
    """Return whether amp_ir's own code raised an error that only a program's mistake raises."""
    frames = traceback.extract_tb(error.__traceback__)
    is_ours = bool(frames) and frames[-1].filename.startswith(_OURS)
    return is_ours and isinstance(error, _OF_PROGRAMS)


def advice_on(text: str, model: Sequence[torch.Tensor], batch: Sequence[torch.Tensor]) -> str:
    """Return what to do about an error with this text.

    Args:
        text: what PyTorch, or the user's own code, says.
        model: the parameters.
        batch: the tensors of the step's arguments.
    """
    of_model, of_batch = {str(one.device) for one in model}, {str(one.device) for one in batch}
    if "device" in text and not of_batch <= of_model:
        return (
            f"The model is on {_listed(of_model)}, and the batch on {_listed(of_batch)}; pass it "
            "on the model's device, or move it there in the step with .to(device)"
        )
    if "does not require grad" in text and not torch.is_grad_enabled():
        return (
            "Gradients are off here: call the step outside of torch.no_grad() or inference_mode()"
        )
    for part, advice in _OF_TEXTS.items():
        if part in text:
            return advice
    floats, given = _float_dtypes(model), _float_dtypes(batch)
    if "type" in text and floats and not given <= floats:
        return f"The model is in {_listed(floats)}, and the batch in {_listed(given)}. {ONE_DTYPE}"
    return _SHAPES if _OF_SHAPES.search(text) else _OTHERWISE


def _float_dtypes(tensors: Iterable[torch.Tensor]) -> set[str]:
    found = {one.dtype for one in tensors if one.is_floating_point()}
    return {str(dtype).removeprefix("torch.") for dtype in found}


def _listed(names: set[str]) -> str:
    return " and ".join(sorted(names))
