# SPDX-License-Identifier: Apache-2.0
"""Measurements beside PyTorch: ratios of runs taken in turns, never timed asserts in tests."""
