# SPDX-License-Identifier: Apache-2.0
"""Errors that a person can act on. The command line prints their text as one line and exits with status 1."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit


class UserError(Exception):
    """Something the person who runs the program can put right. The text is one line and says how."""


class DatabaseUnavailable(UserError):
    """There is no usable PostgreSQL: not running, not reachable, or it refuses us."""


OTHER_SCHEMA: Final = "the database's schema is not this program's ({}): run reconciler migrate"
"""What is said where a table, function or column is missing."""

NO_DATABASE_URL: Final = (ValueError, OverflowError, IndexError)
"""What is raised for a database URL that is none: half of one, a port above 65535, a host's name that is empty."""


def describe_connection_error(dsn: str, error: BaseException) -> str:
    """One line on why the database at `dsn` can't be used, and what to do.

    Never holds the password, not even of a mistyped URL.
    """
    address = _address(dsn)
    no_url = isinstance(error, NO_DATABASE_URL) and not isinstance(error, OSError)  # a certificate's is both
    if address is None or no_url:  # its text may quote any piece of the URL
        return (
            "database.url is no PostgreSQL URL: expected postgresql://user:password@host:port/database, "
            "with special characters in the password percent-encoded"
        )
    reason = "no answer in time" if isinstance(error, TimeoutError) else " ".join(str(error).split())
    for secret in _passwords(dsn):
        reason = reason.replace(secret, "***")
    advice = _advice(error)
    return f"the database at {address} can't be used: {reason or type(error).__name__}" + (advice and f"; {advice}")


_ADVICE: Final = {
    "28P01": "check user and password in database.url",
    "28000": "check user and password in database.url, and what the server's pg_hba.conf lets in",
    "3D000": "check the name in database.url, or create it (createdb)",
    "53300": "raise its max_connections, or lower database.pool_max_size",
    "57P03": "try again in a moment, and see the server's log",
}
"""What to do, by the SQLSTATE with which PostgreSQL turns a connection away."""


def _advice(error: BaseException) -> str:
    """Say what to do about an error; nothing where it isn't known."""
    text = str(error)
    if isinstance(error, TimeoutError):
        return "is it the right host and port in database.url, and does a firewall let us through?"
    if isinstance(error, socket.gaierror):
        return "no host has that name: check the host in database.url"
    # Of a host with several addresses the errors come as one, which is of no kind of its own.
    if isinstance(error, ConnectionRefusedError | FileNotFoundError) or f"[Errno {errno.ECONNREFUSED}]" in text:
        return "nothing listens there: is PostgreSQL running? Check host and port in database.url"
    if isinstance(error, ssl.SSLError) or "SSL upgrade" in text:
        return "check sslmode and sslrootcert in database.url"
    return _ADVICE.get(getattr(error, "sqlstate", None) or "", "")


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
