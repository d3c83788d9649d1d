# SPDX-License-Identifier: Apache-2.0
"""The commands of `amp-ir`, each with its arguments."""
