# SPDX-License-Identifier: Apache-2.0
"""Capture: the user's step becomes one functional FX graph. Only here is PyTorch patched."""
