# SPDX-License-Identifier: Apache-2.0
"""What was decided and measured, for people: tables on a terminal, pages in a browser."""
