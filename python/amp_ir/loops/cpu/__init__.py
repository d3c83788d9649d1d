# SPDX-License-Identifier: Apache-2.0
"""The CPU emitter: parallel over rows, vectorised along columns."""
