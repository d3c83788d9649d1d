# SPDX-License-Identifier: Apache-2.0
"""The compile cache: built steps on disk, so that a second start of a script builds nothing."""
