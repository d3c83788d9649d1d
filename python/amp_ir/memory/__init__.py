# SPDX-License-Identifier: Apache-2.0
"""Order, in-place updates, rematerialisation, and one arena of bytes."""
