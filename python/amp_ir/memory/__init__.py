# SPDX-License-Identifier: Apache-2.0
"""Plan the order, in-place updates, rematerialisation, and one arena of bytes."""
