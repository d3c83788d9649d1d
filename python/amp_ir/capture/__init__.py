# SPDX-License-Identifier: Apache-2.0
"""Capture: convert the user's step to one functional FX graph. No other package patches PyTorch."""
