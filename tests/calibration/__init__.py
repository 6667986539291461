# SPDX-License-Identifier: Apache-2.0
"""Judges the rule of release: invented providers and feeds, the real decision and risk, stated against actual."""
