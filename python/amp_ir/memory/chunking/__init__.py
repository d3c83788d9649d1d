# SPDX-License-Identifier: Apache-2.0
"""Compute a loss in chunks of rows, so that its largest tensor is never held as a whole."""
