# SPDX-License-Identifier: Apache-2.0
"""How files are written and read: atomically, sealed with digests, in a cache directory."""
