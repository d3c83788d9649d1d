# SPDX-License-Identifier: Apache-2.0
"""Reports for people: tables on a terminal, pages in a browser."""
