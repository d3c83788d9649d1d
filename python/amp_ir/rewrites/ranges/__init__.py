# SPDX-License-Identifier: Apache-2.0
"""Compute the ranges of the integers of a step."""
