# SPDX-License-Identifier: Apache-2.0
"""A fuzzer of training steps: writes programs, runs them in PyTorch and compiled, compares."""
