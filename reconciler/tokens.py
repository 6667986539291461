# SPDX-License-Identifier: Apache-2.0
"""Bearer tokens of the HTTP API: who calls, and what he may do. Settings hold only their hashes.

A token is 256 random bits, so its plain SHA-256 can't be searched for: a slow, salted hash is for passwords, which
people choose, and would cost every request what it costs an attacker. A hash doesn't show whether what was hashed is
random: take tokens from `reconciler token`, never a password of one's own.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

Scope = Literal["send", "operate", "read"]
SCOPES: Final[tuple[Scope, ...]] = get_args(Scope)

PREFIX: Final = "espr_"
"""How our tokens begin, so that scanners of repositories can find one that leaked."""

HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_BEARER: Final = re.compile(r"bearer +([!-~]{1,512})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a token stands for. Several tokens may stand for one caller, while they are rotated."""

    name: str
    scopes: frozenset[Scope]


def new_token() -> str:
    """Return a fresh token."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    """Return what the settings hold of a token."""
    return "sha256:" + hashlib.sha256(token.encode()).hexdigest()


class Tokens:
    """The tokens that are known, by their hashes."""

    def __init__(self, known: Iterable[tuple[str, Caller]]) -> None:
        self.replace(known)

    def replace(self, known: Iterable[tuple[str, Caller]]) -> None:
        """Know these from now on, and no others."""
        self._known = tuple(known)

    def caller(self, authorization: str | None) -> Caller | None:
        """Return whose token an Authorization header bears; None: no known one.

        Each known hash is compared, and each in constant time.
        """
        found = _BEARER.fullmatch(authorization or "")
        given = hash_of(found[1] if found else "")
        matches = [caller for known, caller in self._known if hmac.compare_digest(known, given)]
        return matches[0] if found and matches else None
