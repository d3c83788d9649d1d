# SPDX-License-Identifier: Apache-2.0
"""The commands of `amp-ir`, each with its arguments."""

# What `amp-ir --help` says of each; here, since it imports none of them.
SUMMARIES = {
    "demo": "train a model in float32 and in mixed precision, beside PyTorch",
    "examine": "say what of a step is compiled, what stays PyTorch's own op, and what is refused",
    "explain": "show where a step uses which dtype, and why",
    "profile": "time every kernel of a step: modules, bytes, share of the roofline",
    "report": "write a page with a step's memory over time, kernels and casts",
    "compile": "write a step as a file that TVM's runtime runs, on this machine or another",
    "verify": "compare a step's numbers with float64, with PyTorch and with its plan",
    "advise": "estimate what mixed precision gains, here or on a GPU, before any training",
    "errors": "say how much of the gradients' error in mixed precision each op and each cast makes",
    "search": "search the cheapest cast plan whose gradient error is within a budget",
    "plan": "save a step's cast plan, or compare two; with --ranks, simulate a step on a cluster",
    "doctor": "look at this machine: versions, CPU, libraries, CUDA, caches; a text for an issue "
    "report",
    "cache": "look at the steps that are kept for later starts, remove or move them",
}
