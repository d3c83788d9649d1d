# SPDX-License-Identifier: Apache-2.0
"""Lesson 13: a Hugging Face model in a training loop of one's own."""

# %% [markdown]
# # Your loop, your schedule, your batches
#
# Without a Trainer, the step is a function that you write. What stays in it: forward, backward,
# clipping, `optimizer.step()`, `zero_grad()`. What stays outside: the data loader, the scheduler,
# logs and checkpoints, all as before. The model is tiny and made from a configuration: nothing is
# downloaded.

# %% Real text: from the letters so far, which comes next?
import inspect
import tempfile
import textwrap
from pathlib import Path

import numpy
import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup, set_seed

import amp_ir

LENGTH, BATCH, STEPS = 32, 8, 30
set_seed(0)
text = inspect.getsource(textwrap).encode("ascii", "replace")
letters = torch.from_numpy(numpy.frombuffer(text, numpy.uint8).astype("int64"))
windows = letters[: len(letters) // LENGTH * LENGTH].reshape(-1, LENGTH)
loader = torch.utils.data.DataLoader(windows, batch_size=BATCH, shuffle=True, drop_last=True)

config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
scheduler = get_linear_schedule_with_warmup(optimizer, 5, STEPS)


# %% The step, as it would be for eager PyTorch. A value is read after the call: no `.item()` here.
def step(input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Train on one batch; return its loss and the norm of its gradient."""
    loss = model(input_ids=input_ids, labels=input_ids).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


# %% Before anything is compiled: does it compile, and what of it?
example = (next(iter(loader)),)
print(amp_ir.examine(step, example, model=model, optimizer=optimizer).headline())

# %% The loop. The scheduler changes the learning rate between steps, which the program reads.
train = amp_ir.jit(step, model=model, optimizer=optimizer, amp_dtype=torch.bfloat16)
losses: list[float] = []
while len(losses) < STEPS:
    for batch in loader:
        loss, norm = train(batch)
        scheduler.step()
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            rate = scheduler.get_last_lr()[0]
            print(f"step {len(losses)}: loss {loss:.3f}, norm {norm:.2f}, rate {rate:.1e}")
        if len(losses) == STEPS:
            break
assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
print(train)

# %% Evaluation, saving and loading are PyTorch's: the model was updated in place.
model.eval()
with torch.no_grad():
    evaluated = model(input_ids=example[0], labels=example[0]).loss
assert evaluated < losses[0]
with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    assert (Path(folder) / "model.safetensors").is_file()
    again = GPT2LMHeadModel.from_pretrained(folder).eval()
with torch.no_grad():
    assert torch.equal(again(input_ids=example[0], labels=example[0]).loss, evaluated)

# %% Why is something low? And where something else is wanted: an override, and what it changed.
mod, args = amp_ir.trace_step(step, example, model=model.train(), optimizer=optimizer)
before = amp_ir.autocast(mod, args, amp_dtype="bfloat16").plan
print(before.explain("lm_head").splitlines()[0])
head = amp_ir.Override(module="lm_head", to="float32")
after = amp_ir.autocast(mod, args, amp_dtype="bfloat16", overrides=[head]).plan
assert "lm_head" in before.diff(after)
