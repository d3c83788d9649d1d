# SPDX-License-Identifier: Apache-2.0
"""Training steps that are measured besides the six workloads of the demos."""
