# SPDX-License-Identifier: Apache-2.0
"""Batches of varying lengths, padded to a few sizes for which programs are compiled."""
