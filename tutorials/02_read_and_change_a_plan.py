# SPDX-License-Identifier: Apache-2.0
"""Lesson 2: read what autocast decided, change one layer, and see what that costs and gains."""

# %% [markdown]
# # Read a plan and change one layer
#
# `autocast` leaves a plan: what it decided for every op, by which rule and why. This lesson reads
# one, keeps one layer in float32 by a single `Override`, and shows what that costs in bytes and
# what it gains in the exactness of the gradients.

# %% A small classifier and its training step, in plain PyTorch.
import torch
from torch import nn
from torch.nn import functional

import amp_ir
from amp_ir.ir.interpreter import interpret

torch.manual_seed(0)
model = nn.Sequential()
model.add_module("body", nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()))
model.add_module("head", nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(x, y):
    """One training step."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


batch = torch.randn(16, 32), torch.randint(0, 10, (16,))
mod, args = amp_ir.trace_step(step, batch, model=model, optimizer=optimizer)

# %% The plan: first in numbers, then for one module, op by op with reasons.
amp_mod = amp_ir.autocast(mod, args, amp_dtype="bfloat16")
print(amp_mod.plan.summary())
print()
print(amp_mod.plan.explain("head"))

matmuls = [op for op in amp_mod.plan.ops if op.name == "relax.matmul"]
assert all(set(op.reads) == {"bfloat16"} for op in matmuls)

# %% Change one layer: its matmuls, forward and backward, now read float32.
override = amp_ir.Override(module="head", op="relax.matmul", to="float32")
changed = amp_ir.autocast(mod, args, amp_dtype="bfloat16", overrides=[override])
print(amp_mod.plan.diff(changed.plan))

in_head = [op for op in changed.plan.ops if op.name == "relax.matmul" and op.module == "head"]
elsewhere = [op for op in changed.plan.ops if op.name == "relax.matmul" and op.module != "head"]
assert in_head and all(set(op.reads) == {"float32"} for op in in_head)
assert elsewhere and all(set(op.reads) == {"bfloat16"} for op in elsewhere)

# %% [markdown]
# What does it cost? A library call that reads float32 moves twice the bytes of one that reads
# bfloat16. `explain_plan` gives the plan with the kernels that the step really gets, so that only
# casts which nothing fuses with are counted.

# %% The cost: bytes that matmuls read and write, and casts that are kernels of their own.
WIDTH = {"bfloat16": 2, "float32": 4}


def matmul_nbytes(one):
    """Bytes of all arguments and results of the step's matmuls."""
    bindings = one.ir["main"].body.blocks[0].bindings
    calls = [
        binding
        for binding in bindings
        if getattr(getattr(binding.value, "op", None), "name", "") == "relax.matmul"
    ]
    types = [ty for call in calls for ty in (call.var.ty, *(a.ty for a in call.value.args))]
    return sum(WIDTH[str(ty.dtype)] * int(ty.shape[0]) * int(ty.shape[1]) for ty in types)


for name, one in (("all low", amp_mod), ("head in float32", changed)):
    alone = sum(cast.is_alone for cast in amp_ir.explain_plan(one).casts)
    print(f"{name}: matmuls move {matmul_nbytes(one)} bytes; {alone} casts stand alone")

assert matmul_nbytes(changed) > matmul_nbytes(amp_mod)

# %% [markdown]
# What does it gain? The interpreter evaluates a step op by op with exact roundings, and in float64
# on request: the oracle that the gradients are measured against.

# %% The error of the gradients against float64.
inputs = []
tensors = iter(mod.signature.flatten_batch(batch))
for spec in mod.signature.inputs:
    value = mod.state[spec.name] if spec.is_state else next(tensors)
    inputs.append(value.detach() if isinstance(value, torch.Tensor) else value())


def gradients(one, **options):
    """Name -> gradient, as the step leaves it."""
    outputs = zip(one.signature.outputs, interpret(one, inputs, **options), strict=True)
    return {spec.name: value for spec, value in outputs if spec.role is amp_ir.Role.GRADIENT}


exact = gradients(mod, float_dtype=torch.float64)


def error(one):
    """Relative error of all gradients together, in the Euclidean norm."""
    got = gradients(one)
    squares = sum(((got[name].double() - exact[name]) ** 2).sum() for name in exact)
    return float((squares / sum((value**2).sum() for value in exact.values())).sqrt())


errors = {"all low": error(amp_mod), "head in float32": error(changed), "float32": error(mod)}
for name, value in errors.items():
    print(f"{name:16} {value:.1e}")

assert errors["float32"] < 1e-6
assert errors["float32"] < errors["head in float32"] < errors["all low"] < 2e-2

# %% A plan is data: keep it beside the model, and replay it later to get the same step.
amp_mod.plan.save("plan.json")
again = amp_ir.autocast(mod, args, amp_dtype="bfloat16", plan=amp_ir.CastPlan.load("plan.json"))
assert again.plan.hash == amp_mod.plan.hash
assert again.script() == amp_mod.script()
