# SPDX-License-Identifier: Apache-2.0
"""What every stage shares: the step's program and the facts about it. No stage is imported here."""
