# SPDX-License-Identifier: Apache-2.0
"""Asks the provider of a send's feed about it, and keeps what it says as evidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import asyncpg

from reconciler.errors import UserError
from reconciler.filling import opened_inbox, store
from webhooks.api import open_api
from webhooks.event import Answer
from webhooks.inbox import Stored
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

SOUGHT: Final = """
SELECT wire_key, feed, recipient, coalesce(first_claimed_at, created_at) AS claimed_at, state,
       coalesce(submit_by, first_claimed_at, created_at) AS submit_by, known_message_id, message_class,
       EXISTS (SELECT FROM verdict v WHERE v.wire_key = s.wire_key AND v.action = 'released' AND v.feed <> s.feed)
           AS elsewhere, clock_timestamp() AS now
FROM send_log s WHERE wire_key = wire_key($1)
"""

# The nearest later one has had the most time to show.
CONTROL: Final = """
SELECT s.wire_key, s.recipient, s.claimed_at, coalesce(s.submit_by, s.answered_at) AS submit_by, s.known_message_id
FROM control c JOIN send_log s USING (wire_key)
WHERE c.feed = $1 AND c.first_claimed_at >= $2 AND c.wire_key <> $3
  AND s.message_class = $5
  AND ($4 = 'key' OR $4 = 'recipient' AND s.recipient IS NOT NULL OR $4 = 'id' AND s.known_message_id IS NOT NULL)
ORDER BY c.first_claimed_at LIMIT 1
"""

NAMESPACE: Final = "SELECT namespace FROM installation"


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What a provider's API said about one send."""

    wire_key: str
    feed: str
    state: str
    found: Found
    stored: Stored


async def look_up_send(pool: asyncpg.Pool, feeds: dict[str, Feed], key: str) -> LookedUp:
    """Ask the provider of a send's feed about it, and keep what it says as events. Raises UserError."""
    row = await pool.fetchrow(SOUGHT, key)
    if row is None:
        raise UserError(f"no send has the key {key}: reconciler why {key} says whether events do")
    if row["feed"] not in feeds:
        raise UserError(f"the send's feed {row['feed']} is not configured: add [feeds.{row['feed']}] to the settings")
    feed, sought = feeds[row["feed"]], _sought(row)
    provider = PROVIDERS[feed.provider]
    found_by = provider.facts.finds_by
    control = await pool.fetchrow(CONTROL, feed.name, sought.submit_by, sought.wire_key, found_by, row["message_class"])
    namespace = await pool.fetchval(NAMESPACE)
    async with open_api() as api:
        found = await look_up(provider, feed, api, sought, _sought(control) if control else None, row["now"], namespace)
    if row["elsewhere"] and found.answer is Answer.ABSENT:
        found = Found(Answer.SILENT, "other_feed", "an earlier attempt went to another feed, which was not asked")
    async with opened_inbox(pool) as inbox:
        stored = await store(inbox, feed.name, list(found.events), "look-up")
    return LookedUp(sought.wire_key, feed.name, row["state"], found, stored)


def _sought(row: asyncpg.Record) -> Sought:
    return Sought(
        row["wire_key"], row["claimed_at"], row["submit_by"], row["recipient"], message_id=row["known_message_id"]
    )
