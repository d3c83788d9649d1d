# SPDX-License-Identifier: Apache-2.0
"""Relax to Relax with the same meaning, before and after autocast."""
