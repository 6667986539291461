# SPDX-License-Identifier: Apache-2.0
"""Tells the application what became of its sends."""
