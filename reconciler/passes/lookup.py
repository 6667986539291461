# SPDX-License-Identifier: Apache-2.0
"""Questions to a feed's provider about single sends: what is asked, by which control, and how the answer is kept.

Whoever asks reads the questions and their controls, gives the connection back, asks, and keeps what was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple

import asyncpg

from reconciler.database.connection import Connection, as_wire_key, read_namespace
from reconciler.errors import UserError
from reconciler.filling.common import opened_inbox, store
from webhooks.api import open_api
from webhooks.event import Answer
from webhooks.inbox import Stored
from webhooks.lookup import Found, Sought, look_up
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS


class Last(NamedTuple):
    """What a feed's provider was asked last about a send, and what it said."""

    id: int
    asked_at: datetime
    answer: Answer | None
    """None: nothing yet, or never."""
    reason: str


@dataclass(frozen=True, slots=True)
class Question:
    """What one feed's provider may be asked about one send."""

    feed: str
    sought: Sought
    own: bool
    """False: an earlier attempt went to this feed, the row has another one now."""
    message_class: str
    state: str
    now: datetime
    """The database's clock, when this was read."""
    last: Last | None


# Every feed to which an attempt went that was not proved to have stayed away from the provider. The id that was known
# before the call is the one of the row's own feed. For all feeds the times are those of the whole send: the careful
# side, since a control must come after them.
QUESTIONS: Final = """
SELECT s.wire_key, asked.feed, asked.feed = s.feed AS own, s.message_class, s.state,
       coalesce(s.recipient, CASE WHEN i.recipient_salt IS NOT NULL AND s.recipient_key NOT LIKE '~forgotten:%'
                                  THEN s.recipient_key END) AS recipient, i.recipient_salt AS salt,
       coalesce(s.first_claimed_at, s.created_at) AS claimed_at,
       coalesce(s.submit_by, s.first_claimed_at, s.created_at) AS submit_by,
       CASE WHEN asked.feed = s.feed THEN s.known_message_id END AS known_message_id,
       l.id, l.asked_at, l.answer, l.reason, clock_timestamp() AS now
FROM unnest($1::text[]) AS wanted(wire_key)
JOIN send_log s ON s.wire_key = wanted.wire_key
CROSS JOIN installation i
CROSS JOIN LATERAL (
    SELECT s.feed
    UNION
    SELECT v.feed FROM verdict v
    WHERE v.wire_key = s.wire_key AND v.action = 'released' AND v.reason <> 'not_sent' AND v.feed IS NOT NULL
) AS asked
LEFT JOIN LATERAL (
    SELECT id, asked_at, answer, reason FROM look_up
    WHERE wire_key = s.wire_key AND feed = asked.feed ORDER BY id DESC LIMIT 1
) AS l ON true
ORDER BY s.wire_key, asked.feed
"""


async def read_questions(connection: Connection, keys: Sequence[str]) -> list[Question]:
    """Return what there is to ask about sends, by wire key: one question for each feed with an attempt out."""
    return [_question(row) for row in await connection.fetch(QUESTIONS, keys)]


def _question(row: asyncpg.Record) -> Question:
    answer = Answer(row["answer"]) if row["answer"] else None
    last = Last(row["id"], row["asked_at"], answer, row["reason"]) if row["id"] is not None else None
    return Question(
        row["feed"], _sought(row), row["own"], row["message_class"], row["state"], now=row["now"], last=last
    )


def _sought(row: asyncpg.Record) -> Sought:
    return Sought(
        row["wire_key"],
        row["claimed_at"],
        row["submit_by"],
        row["recipient"],
        message_id=row["known_message_id"],
        salt=row["salt"],
    )


# The nearest later one has had the most time to show. Of the next hundred, so that a class of whose sends none can be
# found by the provider's kind of question costs no more.
CONTROLS: Final = """
SELECT a.place, s.*
FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::text[]) WITH ORDINALITY
    AS a(wire_key, feed, message_class, submit_by, found_by, place)
CROSS JOIN LATERAL (
    SELECT s.wire_key, coalesce(s.recipient, CASE WHEN i.recipient_salt IS NOT NULL
                                                   AND s.recipient_key NOT LIKE '~forgotten:%'
                                                  THEN s.recipient_key END) AS recipient, i.recipient_salt AS salt,
           s.claimed_at, coalesce(s.submit_by, s.answered_at) AS submit_by, s.known_message_id
    FROM (
        SELECT wire_key, first_claimed_at FROM control
        WHERE feed = a.feed AND message_class = a.message_class AND first_claimed_at >= a.submit_by
          AND wire_key <> a.wire_key
        ORDER BY first_claimed_at LIMIT 100
    ) AS c JOIN send_log s USING (wire_key) CROSS JOIN installation i
    WHERE a.found_by = 'key' OR a.found_by = 'recipient' AND s.recipient IS NOT NULL
       OR a.found_by = 'id' AND s.known_message_id IS NOT NULL
    ORDER BY c.first_claimed_at LIMIT 1
) AS s
"""


async def read_controls(
    connection: Connection, questions: Sequence[Question], feeds: Mapping[str, Feed]
) -> list[Sought | None]:
    """Return for each question the send by which absence can be proved, None where the log knows none.

    It is the next send of the same feed and class that got the provider's answer, and is found by the same means.
    """
    columns = [
        [q.sought.wire_key for q in questions],
        [q.feed for q in questions],
        [q.message_class for q in questions],
        [q.sought.submit_by for q in questions],
        [PROVIDERS[feeds[q.feed].provider].facts.finds_by for q in questions],
    ]
    found = {row["place"]: _sought(row) for row in await connection.fetch(CONTROLS, *columns)}
    return [found.get(place) for place in range(1, len(questions) + 1)]


class Asked(NamedTuple):
    """A question that was written down before its provider is called."""

    id: int
    wire_key: str
    asked_at: datetime


NOTE_ANSWERS: Final = """
UPDATE look_up l SET answered_at = clock_timestamp(), answer = n.answer, reason = n.reason
FROM (SELECT * FROM unnest($1::text[], $2::bigint[], $3::text[], $4::text[]) AS given(wire_key, id, answer, reason)
      ORDER BY wire_key, id) AS n
WHERE l.wire_key = n.wire_key AND l.id = n.id AND l.answer IS NULL
"""


async def keep(pool: asyncpg.Pool, feed: str, found: Mapping[Asked, Found]) -> Stored:
    """Store the events that were found as evidence, and then note the answers. Raises UserError."""
    stored = Stored(0, 0)
    if events := [event for one in found.values() for event in one.events]:
        async with opened_inbox(pool) as inbox:
            stored = await store(inbox, feed, events, "look-up")
    columns = [
        [asked.wire_key for asked in found],
        [asked.id for asked in found],
        [one.answer for one in found.values()],
        [one.reason for one in found.values()],
    ]
    await pool.execute(NOTE_ANSWERS, *columns)
    return stored


@dataclass(frozen=True, slots=True)
class LookedUp:
    """What a provider's API said about one send."""

    wire_key: str
    feed: str
    state: str
    found: Found
    stored: Stored


NOTE_QUESTION: Final = "INSERT INTO look_up (wire_key, feed, who) VALUES ($1, $2, $3) RETURNING id, wire_key, asked_at"


async def look_up_send(pool: asyncpg.Pool, feeds: Mapping[str, Feed], key: str) -> LookedUp:
    """Ask the provider of a send's feed about it, and keep what it says as events. Raises UserError.

    A person's question is always asked; it counts in the feed's budget like the passes' ones.
    """
    async with pool.acquire() as connection:
        questions = await read_questions(connection, [await as_wire_key(connection, key)])
        own = next((question for question in questions if question.own), None)
        if own is None:
            raise UserError(f"no send has the key {key}: reconciler why {key} says whether events do")
        if own.feed not in feeds:
            raise UserError(f"the send's feed {own.feed} is not configured: add [feeds.{own.feed}] to the settings")
        (control,) = await read_controls(connection, [own], feeds)
        namespace = await read_namespace(connection)
        (row,) = await connection.fetch(NOTE_QUESTION, own.sought.wire_key, own.feed, "lookup")
    feed, asked = feeds[own.feed], Asked(*row)
    async with open_api() as api:
        found = await look_up(PROVIDERS[feed.provider], feed, api, own.sought, control, asked.asked_at, namespace)
    stored = await keep(pool, feed.name, {asked: found})
    if len(questions) > 1 and found.answer is Answer.ABSENT:
        found = Found(Answer.SILENT, "other_feed", "an earlier attempt went to another feed, which was not asked")
    return LookedUp(own.sought.wire_key, feed.name, own.state, found, stored)
