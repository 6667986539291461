# SPDX-License-Identifier: Apache-2.0
"""What an operator decides about one send, whether a command, `/v1` or the page says it. The SQL functions judge it."""

from __future__ import annotations

from typing import Final, NamedTuple

from reconciler.database.connection import Connection

VERBS: Final = ("release", "confirm", "fail")


class Ruled(NamedTuple):
    """What became of it: `released`, `sent`, `failed`; `refused` with the reason, or `unknown_key`."""

    outcome: str
    reason: str | None


RELEASE: Final = "SELECT outcome, reason FROM operator_release($1, $2, $3)"
DECIDE: Final = "SELECT outcome, reason FROM operator_decide($1, $4, $2, $3)"


async def decide(connection: Connection, verb: str, key: str, reason: str, who: str) -> Ruled:
    """Perform one of `VERBS` on the send of a key.

    In the caller's transaction, read committed: the functions lock the row, then look.
    """
    if verb == "release":
        row = await connection.fetchrow(RELEASE, key, reason, who)
    else:
        row = await connection.fetchrow(DECIDE, key, reason, who, {"confirm": "sent", "fail": "failed"}[verb])
    assert row is not None  # noqa: S101 - the functions return one row
    return Ruled(row["outcome"], row["reason"])
