# SPDX-License-Identifier: Apache-2.0
"""Rewrite Relax to Relax with the same semantics, before and after autocast."""
