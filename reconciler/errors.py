# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on. The command line prints their text as one line and exits with status 1."""

from __future__ import annotations


class UserError(Exception):
    """Something the person who runs the program can put right. The text is one line and says how."""


class DatabaseUnavailable(UserError):  # noqa: N818 - reads as what happened
    """There is no usable PostgreSQL: not running, not reachable, or it refuses us."""
