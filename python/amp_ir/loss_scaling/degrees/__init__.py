# SPDX-License-Identifier: Apache-2.0
"""The degree of every value in the loss scale: rules, operands and diagnostics."""
