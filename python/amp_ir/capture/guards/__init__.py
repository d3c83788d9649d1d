# SPDX-License-Identifier: Apache-2.0
"""The user's Python values that a capture read: followed inputs, and guards."""
