# SPDX-License-Identifier: Apache-2.0
"""Loads a campaign's recipients: chunks of the file are copied into a staging table, and from there into the send log.

Each chunk is a transaction of its own. A recipient has one send in a campaign, so that whoever is in the file twice, in
another file, or was loaded before is passed over: a load that was broken off is simply run again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from typing import Any, BinaryIO, Final
from uuid import UUID, uuid4

import asyncpg

from reconciler.campaign import NAME
from reconciler.campaigns.file import Bad, Line, Row, read_lines, row_maker
from reconciler.database.connection import BAD_DATA, TRY_AGAIN
from reconciler.errors import UserError
from webhooks.event import wire_key
from webhooks.provider import Provider

CHUNK_ROWS: Final = 20_000
CHUNK_BYTES: Final = 16_000_000
AT_ONCE: Final = 2
"""Chunks that are stored side by side, while the next is read."""

MOST_NAMED: Final = 20
"""Bad lines that are named; the others are counted."""

STORE_SECONDS: Final = 600.0

Told = Callable[[int], None]
"""Is told how many lines were read so far."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be loaded, and how it is to be sent."""

    name: str
    feed: str
    source: str
    """What names the file: the same one loaded again, and another one beside it."""
    message_class: str | None = None
    """None: `default`, or the one that the campaign has."""
    starts_at: datetime | None = None
    """None: at once, or what was said before."""
    max_lateness: timedelta | None = None


@dataclass
class Loaded:
    """What a load did."""

    lines: int = 0
    added: int = 0
    duplicates: int = 0
    """In the file, in another file of the campaign, or loaded before."""
    suppressed: int = 0
    bad_lines: int = 0
    bad: list[Bad] = field(default_factory=list)
    """The first bad lines, by number, and what is wrong with them."""
    addresses_kept: bool = True
    """False where recipients are stored hashed: workers get what else a line says, and no address."""

    def note_bad(self, found: list[Bad]) -> None:
        """Count what is passed over."""
        self.lines += len(found)
        self.bad_lines += len(found)
        self.bad = sorted([*self.bad, *found])[:MOST_NAMED]

    def note_stored(self, counts: Counter[str]) -> None:
        """Count what was stored."""
        self.lines += counts.total()
        self.added += counts["added"]
        self.duplicates += counts["duplicates"]
        self.suppressed += counts["suppressed"]


async def load(pool: asyncpg.Pool, plan: Plan, file: BinaryIO, provider: Provider, told: Told) -> Loaded:
    """Load a file of recipients, in bounded memory, and return what was done. Doing it again changes nothing.

    Bad lines are counted, named by number and stop nothing. Nothing is given out before a file was loaded to its end.
    Raises UserError where its name is none, the campaign is another one or was cancelled, or the file's form is wrong.
    """
    if not NAME.fullmatch(plan.name):
        raise UserError(f"a campaign's name is made of letters, digits, and . _ - after the first, not {plan.name!a}")
    ((namespace, salt),) = await pool.fetch(INSTALLATION)
    lines = await asyncio.to_thread(_begin_reading, file)
    run = await _begin(pool, plan)
    chunks = _chunks(lines, row_maker(plan.name, namespace, _known_ids(provider, namespace), salt))
    done = Loaded(addresses_kept=salt is None)
    storing: set[asyncio.Task[tuple[Counter[str], list[Bad]]]] = set()
    try:
        while chunk := await asyncio.to_thread(next, chunks, None):
            done.note_bad([entry for entry in chunk if isinstance(entry, Bad)])
            rows = [entry for entry in chunk if not isinstance(entry, Bad)]
            storing.add(asyncio.create_task(_store(pool, plan.name, rows)))
            if len(storing) == AT_ONCE:
                ended, storing = await asyncio.wait(storing, return_when=asyncio.FIRST_COMPLETED)
                _note(done, ended, told)
        while storing:
            ended, storing = await asyncio.wait(storing, return_when=asyncio.FIRST_COMPLETED)
            _note(done, ended, told)
    finally:
        for task in storing:
            task.cancel()
        await asyncio.gather(*storing, return_exceptions=True)
    await _end(pool, plan, run, done)
    return done


def _note(done: Loaded, ended: set[asyncio.Task[tuple[Counter[str], list[Bad]]]], told: Told) -> None:
    for task in ended:
        counts, bad = task.result()
        done.note_stored(counts)
        done.note_bad(bad)
        told(done.lines)


def _begin_reading(file: BinaryIO) -> Iterator[Line | Bad]:
    """Return the file's lines. The first is read here: a file of the wrong form must not begin a campaign."""
    lines = read_lines(file)
    first = next(lines, None)
    return chain([] if first is None else [first], lines)


def _known_ids(provider: Provider, namespace: str) -> Callable[[str], str | None] | None:
    if provider.stamp("any").message_id is None:
        return None
    return lambda key: provider.stamp(wire_key(key, namespace)).message_id


def _chunks(lines: Iterator[Line | Bad], row: Callable[[Line], Row | Bad]) -> Iterator[list[Row | Bad]]:
    chunk: list[Row | Bad] = []
    size = 0
    for said in lines:
        if isinstance(said, Bad):
            chunk.append(said)
        else:
            chunk.append(row(said))
            size += len(said[2] or "")
        if len(chunk) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


INSTALLATION: Final = "SELECT namespace, recipient_salt FROM installation"
# A campaign keeps its feed and class: its sends may have been attempted there. A new time has to be confirmed anew. One
# whose sends may have been pruned takes no more: nothing would tell who was written to.
BEGIN: Final = """
INSERT INTO campaign AS c (name, feed, message_class, starts_at, max_lateness)
VALUES ($1, $2, coalesce($3, 'default'), $4, coalesce($5::interval, '2 hours'))
ON CONFLICT (name) DO UPDATE SET starts_at = coalesce($4, c.starts_at),
    max_lateness = coalesce($5::interval, c.max_lateness), updated_at = clock_timestamp(),
    confirmed_at = CASE WHEN $4 IS NULL OR $4 IS NOT DISTINCT FROM c.starts_at THEN c.confirmed_at END
WHERE c.feed = $2 AND c.message_class = coalesce($3, c.message_class) AND c.state <> 'cancelled'
  AND NOT EXISTS (SELECT FROM installation i
                  WHERE c.created_at < greatest(i.pruned_until, clock_timestamp() - i.memory))
RETURNING name
"""
EXISTING: Final = """
SELECT CASE WHEN state = 'cancelled' THEN 'was cancelled'
            WHEN feed <> $2 OR message_class <> coalesce($3, message_class)
            THEN 'is on feed ' || feed || ', message class ' || message_class
            ELSE 'is older than sends are kept, so that nothing tells who was written to' END
FROM campaign WHERE name = $1
"""
BEGIN_FILE: Final = """
INSERT INTO campaign_load (campaign, source, run) VALUES ($1, $2, $3)
ON CONFLICT (campaign, source) DO UPDATE SET run = $3, started_at = clock_timestamp(), ended_at = NULL
"""


async def _begin(pool: asyncpg.Pool, plan: Plan) -> UUID:
    run = uuid4()
    asked = plan.name, plan.feed, plan.message_class, plan.starts_at, plan.max_lateness
    async with pool.acquire() as connection, connection.transaction():
        if not await connection.fetchval(BEGIN, *asked):
            why = await connection.fetchval(EXISTING, *asked[:3])
            raise UserError(f"campaign {plan.name} {why}: take another name")
        await connection.execute(BEGIN_FILE, plan.name, plan.source, run)
    return run


END_FILE: Final = """
UPDATE campaign_load SET ended_at = clock_timestamp(), added = $4, duplicates = $5, suppressed = $6, bad_lines = $7
WHERE campaign = $1 AND source = $2 AND run = $3 AND ended_at IS NULL
"""
END: Final = """
UPDATE campaign SET loaded_at = clock_timestamp(), updated_at = clock_timestamp()
WHERE name = $1 AND loaded_at IS NULL AND state <> 'cancelled'
"""


async def _end(pool: asyncpg.Pool, plan: Plan, run: UUID, done: Loaded) -> None:
    counts = done.added, done.duplicates, done.suppressed, done.bad_lines
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute(END_FILE, plan.name, plan.source, run, *counts)
        await connection.execute(END, plan.name)


async def _store(pool: asyncpg.Pool, name: str, rows: list[Row]) -> tuple[Counter[str], list[Bad]]:
    """Store rows and return the counts, and those that the database refuses: halving finds them."""
    if not rows:
        return Counter(), []
    try:
        try:
            return await _store_all(pool, name, rows), []
        except TRY_AGAIN:
            return await _store_all(pool, name, rows), []
    except BAD_DATA:
        if len(rows) == 1:
            return Counter(), [Bad(rows[0][0], "holds what the database can't store, such as a zero character")]
        middle = len(rows) // 2
        first, bad_of_first = await _store(pool, name, rows[:middle])
        second, bad_of_second = await _store(pool, name, rows[middle:])
        return first + second, bad_of_first + bad_of_second


# Whoever cancels waits for this lock: what is added later than that would never be looked at.
LOCK_CAMPAIGN: Final = "SELECT FROM campaign WHERE name = $1 FOR KEY SHARE"
IS_CANCELLED: Final = "SELECT state = 'cancelled' FROM campaign WHERE name = $1"
STAGING: Final = """
CREATE TEMPORARY TABLE campaign_staging (wire_key text, send_key text, recipient text, recipient_key text,
    known_message_id text, payload text) ON COMMIT DROP
"""
# One look into the index for each: a join would read the whole list for each chunk.
DROP_SUPPRESSED: Final = """
DELETE FROM campaign_staging s
WHERE (SELECT true FROM suppression p WHERE p.recipient_key = lower(s.recipient_key))
"""
# In the order of the keys: two loads that overlap can't deadlock, and neighbours in the index are written together.
ADD: Final = """
INSERT INTO send_log (wire_key, send_key, feed, message_class, recipient, recipient_key, campaign, known_message_id,
                      payload)
SELECT s.wire_key, s.send_key, c.feed, c.message_class, s.recipient, s.recipient_key, c.name, s.known_message_id,
       s.payload::jsonb
FROM (SELECT * FROM campaign_staging ORDER BY wire_key) AS s, campaign c WHERE c.name = $1
ON CONFLICT (wire_key) DO NOTHING
"""


async def _store_all(pool: asyncpg.Pool, name: str, rows: list[Row]) -> Counter[str]:
    """Store rows, all or none, and return how many were added, duplicates or suppressed."""
    async with pool.acquire(timeout=STORE_SECONDS) as connection, connection.transaction():
        await connection.execute(LOCK_CAMPAIGN, name)
        if await connection.fetchval(IS_CANCELLED, name):
            raise UserError(f"campaign {name} was cancelled meanwhile")
        await connection.execute(STAGING)
        await connection.copy_records_to_table("campaign_staging", records=[row[1:] for row in rows])
        suppressed = _count(await connection.execute(DROP_SUPPRESSED))
        added = _count(await connection.execute(ADD, name, timeout=STORE_SECONDS))
    return Counter(added=added, suppressed=suppressed, duplicates=len(rows) - suppressed - added)


def _count(tag: Any) -> int:
    """Return the number of rows of a command's tag: `INSERT 0 17`."""
    return int(str(tag).rpartition(" ")[2])
