# SPDX-License-Identifier: Apache-2.0
"""One small step on the device beside PyTorch's: does anything run, and is it right?"""

from __future__ import annotations

import sys

import torch

import amp_ir
from amp_ir.demo.workloads import WORKLOADS

_STEPS = 3
# float32 sums in another order, over a few steps; TF32 is off.
_TOLERANCE = 1e-4


def main(device: str) -> int:
    """Train a small MLP for some steps; return 0 where its losses are PyTorch's."""
    trainings = [WORKLOADS["mlp"].make(small=True, device=device) for _ in range(2)]
    ours, theirs = trainings
    train = amp_ir.jit(ours.step, model=ours.model, optimizer=ours.optimizer, device=device)
    got = torch.stack([train(*ours.batch) for _ in range(_STEPS)])
    expected = torch.stack([theirs.step(*theirs.batch) for _ in range(_STEPS)])
    error = float(((got - expected) / expected).abs().max())
    print(f"losses {got.tolist()}, PyTorch's {expected.tolist()}, relative error {error:.1e}")
    return int(not error <= _TOLERANCE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
