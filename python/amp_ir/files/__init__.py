# SPDX-License-Identifier: Apache-2.0
"""Writing and reading of files: atomic, sealed with digests, in a cache directory."""
