# SPDX-License-Identifier: Apache-2.0
"""Training on several ranks: models that are copies of each other, and what they exchange."""
