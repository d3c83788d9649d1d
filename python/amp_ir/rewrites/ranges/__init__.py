# SPDX-License-Identifier: Apache-2.0
"""Between which numbers the integers of a step lie."""
