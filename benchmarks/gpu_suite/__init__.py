# SPDX-License-Identifier: Apache-2.0
"""Everything that a machine with a GPU is to be asked, in one command that ends in time."""
