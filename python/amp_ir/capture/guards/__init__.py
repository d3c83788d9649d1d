# SPDX-License-Identifier: Apache-2.0
"""What a capture read of the user's Python: inputs that are followed, and guards."""
