# SPDX-License-Identifier: Apache-2.0
"""Measurements beside PyTorch: ratios of runs taken in turns, never timed asserts in tests."""

import os

# What is timed is a compilation, not what an earlier run left; benchmarks/second_start.py sets it.
os.environ.setdefault("AMP_IR_CACHE", "off")
