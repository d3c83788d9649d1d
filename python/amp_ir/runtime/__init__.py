# SPDX-License-Identifier: Apache-2.0
"""Execution of compiled steps on the user's tensors, and their timing."""
