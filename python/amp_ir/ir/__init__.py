# SPDX-License-Identifier: Apache-2.0
"""Data that every stage shares: the step's program and the facts about it. It imports no stage."""
