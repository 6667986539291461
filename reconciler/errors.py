# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on. The command line prints their text as one line and exits with status 1."""

from __future__ import annotations

from urllib.parse import parse_qs, unquote, urlsplit


class UserError(Exception):
    """Something the person who runs the program can put right. The text is one line and says how."""


class DatabaseUnavailable(UserError):
    """There is no usable PostgreSQL: not running, not reachable, or it refuses us."""


def describe_connection_error(dsn: str, error: BaseException) -> str:
    """One line on why the database at `dsn` can't be used. Never holds the password, not even of a mistyped URL."""
    address = _address(dsn)
    if address is None or isinstance(error, ValueError):  # its text may quote any piece of the URL
        return (
            "database.url is no PostgreSQL URL: expected postgresql://user:password@host:port/database, "
            "with special characters in the password percent-encoded"
        )
    reason = "no answer in time" if isinstance(error, TimeoutError) else " ".join(str(error).split())
    for secret in _passwords(dsn):
        reason = reason.replace(secret, "***")
    return f"the database at {address} can't be used: {reason or type(error).__name__}"


def _address(dsn: str) -> str | None:
    """Host and port. None where a password with / ? or # in it makes the URL fall into the wrong pieces."""
    try:
        parts = urlsplit(dsn)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if "@" in parts.path + parts.query + parts.fragment:
        return None
    host = host or parse_qs(parts.query).get("host", ["the default host"])[0]
    return f"{host}:{port}" if port else host


def _passwords(dsn: str) -> list[str]:
    parts = urlsplit(dsn)
    given = [parts.password or "", *parse_qs(parts.query).get("password", [])]
    return [secret for word in given if word for secret in (word, unquote(word))]
