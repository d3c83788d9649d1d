# SPDX-License-Identifier: Apache-2.0
"""Real programs, ours beside PyTorch: `python -m benchmarks.programs`."""
