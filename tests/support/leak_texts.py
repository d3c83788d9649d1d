# SPDX-License-Identifier: Apache-2.0
"""What the refusals of test_leaks.py say of each op by which padding gets in."""

from __future__ import annotations

MASK = (
    "Mask the padding there (masked attention, ignored labels, sums of masked values over the "
    "mask's sum), or call the step without buckets="
)
MASKED_ROWS = (
    "relax.nn.softmax: softmax of a row of padding in which everything is masked is NaN. "
    "Mask only what each row does not see, with -1e4, which is no infinity in float16 "
    "either, or use scaled_dot_product_attention, of which such a row is 0"
)
# What is said of each, after its line.
TEXTS: dict[str, list[str]] = {
    "mean without the mask": [
        "relax.mean: elements are averaged over dimension 0, padding included",
    ],
    "sum without the mask": [
        "relax.sum: elements are added over dimension 0, where padding is not 0",
    ],
    "sum over the length": [
        (
            "relax.divide: a number that it takes depends on the padded length (8.0, or 13.0). "
            "Compute it from a mask"
        ),
    ],
    "max without the mask": [
        "relax.max: the largest element over dimension 0 is taken, where padding may be it",
    ],
    "max of relu and 0": [
        "relax.max: the largest element over dimension 0 is taken, where padding may be it",
    ],
    "last step": [
        ("relax.strided_slice: entries are counted from the end of dimension 0, where padding is"),
    ],
    "last three steps": [
        ("relax.strided_slice: entries are counted from the end of dimension 0, where padding is"),
    ],
    "standard deviation": [
        "relax.mean: elements are averaged over dimension 0, padding included",
        (
            "relax.divide: a number that it takes depends on the padded length (7.0, or 12.0). "
            "Compute it from a mask"
        ),
    ],
    "argmax": [
        ("relax.argmax: the largest element over dimension 0 is taken, where padding may be it"),
    ],
    "cumsum at the end": [
        ("relax.strided_slice: entries are counted from the end of dimension 0, where padding is"),
    ],
    "cumsum of rows in a row": [
        (
            "relax.cumsum: elements are added up along an axis into which dimension 0 is merged, "
            "padding between data"
        ),
    ],
    "softmax over the length": [
        "relax.nn.softmax: softmax over dimension 0 gives padding a weight: no mask hides it",
    ],
    "norm over the length": [
        "amp_ir.layer_norm: normalizes over dimension 0, padding included",
    ],
    "attention without the mask": [
        (
            "amp_ir.attention: attention sees the padding of dimension 0: no mask hides it. Pass "
            "an attention mask, and give pad= the value of its padding"
        ),
    ],
    "attention to the length": [
        ("amp_ir.attention: scale depends on the padded length (0.125, or 0.07692307692307693)"),
    ],
    "batch norm": [
        "amp_ir.batch_norm: this op has no rule for padding",
    ],
    "group norm": [
        "amp_ir.group_norm: elements are mixed over dimension 0, padding included",
    ],
    "interpolation": [
        (
            "relax.take: the places that it takes depend on the padded length, as those of "
            "x.unfold do. Take them by slices, such as x[:, :-1]"
        ),
    ],
    "adaptive pooling": [
        "relax.mean: elements are averaged over dimension 0, padding included",
    ],
    "reversal": [
        "relax.flip: the order of dimension 0 is reversed, which moves padding in front",
    ],
    "number of all entries": [
        "relax.sum: elements are added over dimension 0, where padding is not 0",
    ],
    "rows of -1e9, which float16 makes -inf": [
        MASKED_ROWS,
    ],
    "rows of -inf": [
        MASKED_ROWS,
    ],
    "window of -inf": [
        MASKED_ROWS,
    ],
    "two softmaxes that meet": [
        MASKED_ROWS,
    ],
    "mask that is taken back": [
        "relax.nn.softmax: softmax over dimension 0 gives padding a weight: no mask hides it",
    ],
    "filled up in front": [
        "relax.concat: what is in front of dimension 0 depends on its length",
    ],
    "filled up with another number": [
        "relax.concat: entries follow the padding of dimension 0, and differ from it",
    ],
    "labels that count": [
        (
            "amp_ir.nll_loss: the loss of padding counts: the targets there are not -1 "
            "(ignore_index) over dimension 0. Give pad= that value for the labels"
        ),
    ],
    "mean of losses": [
        "relax.mean: elements are averaged over dimension 0, padding included",
    ],
    "mean squared error": [
        "amp_ir.mse_loss: a loss is reduced to its mean over dimension 0, padding included",
    ],
    "sum of squares": [
        "relax.sum: elements are added over dimension 0, where padding is not 0",
    ],
    "length as a number": [
        (
            "relax.divide: a number that it takes depends on the padded length (16.0, or 26.0). "
            "Compute it from a mask"
        ),
    ],
    "rows of a table": [
        "relax.sum: elements are added over dimension 0, where padding is not 0",
    ],
    "chosen classes": [
        "relax.sum: elements are added over dimension 0, where padding is not 0",
    ],
}
