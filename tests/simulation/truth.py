# SPDX-License-Identifier: Apache-2.0
"""What only the provider and the simulation know, kept beside the product's tables and unknown to it.

What is still to happen is kept here too (`agenda`), so that a run that was killed goes on where it was: a tick ends
with one transaction, and one that is lived through again changes nothing that it did before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

TABLES: Final = """
CREATE SCHEMA truth;
CREATE TABLE truth.run (seed int, sends int, tick int, seconds float8, counted jsonb);
CREATE TABLE truth.tick (n int PRIMARY KEY, began timestamptz);
CREATE INDEX ON truth.tick (began);
CREATE TABLE truth.send (wire_key text PRIMARY KEY, send_key text, feed text, options text);
CREATE TABLE truth.granted (fence bigint PRIMARY KEY, wire_key text, attempt int, feed text, tick int, how text,
                            says text, submit_by timestamptz, ambiguous boolean);
CREATE INDEX ON truth.granted (wire_key);
CREATE TABLE truth.message (wire_key text, fence bigint, copy int, message_id text, taken_at timestamptz,
                            reached boolean, PRIMARY KEY (wire_key, fence, copy));
CREATE TABLE truth.agenda (id bigint GENERATED ALWAYS AS IDENTITY, at timestamptz, what text, body bytea);
CREATE INDEX ON truth.agenda (at);
CREATE TABLE truth.acknowledged (feed text PRIMARY KEY, n bigint);
CREATE TABLE truth.paused (feed text, since timestamptz, until timestamptz);
CREATE TABLE truth.resumed (feed text, at timestamptz);
"""
START: Final = "INSERT INTO truth.run VALUES ($1, $2, 0, 0, '{}')"


class Grant(NamedTuple):
    """A claim that was given out."""

    fence: int
    wire_key: str
    attempt: int
    feed: str
    tick: int
    how: str
    says: str | None
    submit_by: datetime
    ambiguous: bool


class Message(NamedTuple):
    """A message that a provider took."""

    wire_key: str
    fence: int
    copy: int
    message_id: str
    taken_at: datetime
    reached: bool
    """Whether the recipient gets it."""


class Due(NamedTuple):
    """Something that is to happen."""

    at: datetime
    what: str
    """event, report, submit, or claim."""
    body: bytes
    """A list, as JSON."""


def due(at: datetime, what: str, *body: Any) -> Due:
    """Return an entry of the agenda."""
    return Due(at, what, msgspec.json.encode(body))


class Entry(NamedTuple):
    """Something that is due."""

    id: int
    what: str
    body: list[Any]


@dataclass(slots=True)
class Tick:
    """A short time in which all parties act at once. What it did is kept at its end, all or nothing."""

    n: int
    at: datetime
    """When it began."""
    entries: list[Entry]
    """What is due."""
    done: list[int] = field(default_factory=list)
    """Ids of those entries that are over."""
    acknowledged: Counter[str] = field(default_factory=Counter)
    """Events that were acknowledged for the first time, by feed."""
    counted: Counter[str] = field(default_factory=Counter)
    """What else happened."""

    def due(self, what: str) -> list[list[Any]]:
        """Return what of one kind is due."""
        return [entry.body for entry in self.entries if entry.what == what]


async def start(connection: Any, seed: int, sends: int) -> None:
    """Make the tables."""
    await connection.execute(TABLES)
    await connection.execute(START, seed, sends)


RUN: Final = "SELECT * FROM truth.run"


async def read_run(connection: Any) -> Any:
    """Return the row of the run: how far it came."""
    return await connection.fetchrow(RUN)


KEEP_GRANTS: Final = """
INSERT INTO truth.granted
SELECT * FROM unnest($1::bigint[], $2::text[], $3::int[], $4::text[], $5::int[], $6::text[], $7::text[],
                     $8::timestamptz[], $9::bool[])
ON CONFLICT DO NOTHING RETURNING fence
"""
KEEP_SENDS: Final = """
INSERT INTO truth.send SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) ON CONFLICT DO NOTHING
"""
KEEP_MESSAGES: Final = """
INSERT INTO truth.message
SELECT * FROM unnest($1::text[], $2::bigint[], $3::int[], $4::text[], $5::timestamptz[], $6::bool[])
ON CONFLICT DO NOTHING RETURNING fence
"""


async def keep_sends(pool: Any, rows: Sequence[tuple[str, str, str, str]]) -> None:
    """Keep what the application wants to be sent: wire key, key, feed and options."""
    if rows:
        await pool.execute(KEEP_SENDS, *_columns(rows))


async def keep_grants(connection: Any, grants: Sequence[Grant]) -> set[int]:
    """Keep what was given out; return the fences that were not known."""
    if not grants:
        return set()
    return {row["fence"] for row in await connection.fetch(KEEP_GRANTS, *_columns(grants))}


async def keep_messages(connection: Any, messages: Sequence[Message]) -> set[int]:
    """Keep what a provider took; return the fences of those messages that were not known."""
    if not messages:
        return set()
    return {row["fence"] for row in await connection.fetch(KEEP_MESSAGES, *_columns(messages))}


async def plan(connection: Any, entries: Iterable[Due]) -> None:
    """Add to the agenda."""
    columns = ("at", "what", "body")
    await connection.copy_records_to_table("agenda", schema_name="truth", columns=columns, records=entries)


TAKEN: Final = """
SELECT m.wire_key, min(m.message_id) AS message_id
FROM unnest($1::text[], $2::timestamptz[]) AS asked(wire_key, since)
JOIN truth.message m ON m.wire_key = asked.wire_key AND m.taken_at >= asked.since
GROUP BY m.wire_key
"""


async def taken(pool: Any, sends: Sequence[tuple[str, datetime]]) -> dict[str, str]:
    """Return the message that was taken of each send since a time, where one was."""
    return {row["wire_key"]: row["message_id"] for row in await pool.fetch(TAKEN, *_columns(sends))} if sends else {}


BEGIN_TICK: Final = """
INSERT INTO truth.tick AS t VALUES ($1, $2) ON CONFLICT (n) DO UPDATE SET began = t.began RETURNING began
"""
DUE: Final = "SELECT id, what, body FROM truth.agenda WHERE at <= $1 ORDER BY id"


async def begin_tick(pool: Any, n: int, at: datetime) -> Tick:
    """Note when a tick begins, unless it began before and the run was killed; return it with what is due."""
    at = await pool.fetchval(BEGIN_TICK, n, at)
    rows = await pool.fetch(DUE, at)
    return Tick(n, at, [Entry(row["id"], row["what"], msgspec.json.decode(row["body"])) for row in rows])


END_TICK: Final = """
UPDATE truth.run SET tick = $1, seconds = seconds + $2,
    counted = (SELECT coalesce(jsonb_object_agg(name, n), '{}') FROM (
        SELECT name, sum(n) AS n FROM (
            SELECT key AS name, value::bigint AS n FROM jsonb_each_text(counted)
            UNION ALL SELECT * FROM unnest($3::text[], $4::bigint[])) AS parts GROUP BY name) AS summed)
"""
DONE: Final = "DELETE FROM truth.agenda WHERE id = ANY ($1::bigint[])"
ACKNOWLEDGED: Final = """
INSERT INTO truth.acknowledged AS a SELECT * FROM unnest($1::text[], $2::bigint[])
ON CONFLICT (feed) DO UPDATE SET n = a.n + excluded.n
"""


async def end_tick(pool: Any, tick: Tick, seconds: float) -> None:
    """Keep what a tick did, and that the next one comes."""
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute(DONE, tick.done)
        await connection.execute(ACKNOWLEDGED, list(tick.acknowledged), list(tick.acknowledged.values()))
        await connection.execute(END_TICK, tick.n + 1, seconds, list(tick.counted), list(tick.counted.values()))


OPEN: Final = """
SELECT (SELECT count(*) FROM truth.agenda)
     + (SELECT count(*) FROM send_log WHERE state = 'pending' AND held_reason IS NULL)
     + (SELECT count(*) FROM send_log WHERE state = 'claimed' AND held_reason IS NULL) AS n
"""


async def still_open(pool: Any) -> int:
    """Return how much is still to happen: of the agenda, and sends that are neither decided nor held."""
    n: int = await pool.fetchval(OPEN)
    return n


def _columns(rows: Sequence[tuple[Any, ...]]) -> list[list[Any]]:
    return [list(column) for column in zip(*rows, strict=True)]
