# SPDX-License-Identifier: Apache-2.0
"""The process and its machine: native libraries, locks, forks, memory limits, peak rates."""
