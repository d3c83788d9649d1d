# SPDX-License-Identifier: Apache-2.0
"""Loss scaling: GradScaler, scale_loss, and the proof that a step uses its loss scale correctly."""
