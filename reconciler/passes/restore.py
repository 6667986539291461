# SPDX-License-Identifier: Apache-2.0
"""Notices that the database was restored from a backup, and holds all claims and releases until a person resumes.

A restored database has forgotten sends that were made, and would give them out again. So each process keeps outside of
it what it last saw: the number of the heartbeat that it committed, the server's system identifier, the WAL time line,
and the highest fence. A database that does not hold that heartbeat any more has gone back: all feeds become suspect.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Final

import asyncpg
import msgspec
import structlog

from reconciler.database.connection import Connection
from reconciler.errors import UserError

_log: Final = structlog.get_logger()


Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""What the database takes: a file that holds more was not written by us."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What a process remembers of the last heartbeat that it committed."""

    heartbeat: Number
    system: Number | None
    """The server's system identifier; None where the server doesn't tell it."""
    timeline: Number | None
    line_from: Number
    """The first heartbeat on that server and time line: two restores may begin time lines of one number."""
    fence: Number
    """The highest fence given out until then."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the database answers: its own last heartbeat, where that was, and the server that it is on now."""

    heartbeat: int
    kept_system: int | None
    kept_timeline: int | None
    line_from: int
    """The first heartbeat on the kept server and time line."""
    system: int | None
    suspect: bool
    reason: str | None


def gone_back(memory: Memory | None, found: Found) -> str | None:
    """Say in one line how the database has gone back, None where all that is remembered is there. Pure.

    A planned fail-over is no restore: a new time line, on which the remembered heartbeat came before the first new one.
    """
    if None not in (found.kept_system, found.system) and found.kept_system != found.system:
        return (
            f"the database's last heartbeat was on server {found.kept_system} and it is on server {found.system} now: "
            "it was restored from a dump, or moved"
        )
    if memory is None:
        return None
    if found.heartbeat < memory.heartbeat:
        return (
            f"the database answers heartbeat {found.heartbeat} after {memory.heartbeat}: it was restored from a backup"
        )
    line = (memory.system, memory.timeline, memory.line_from)
    if line == (found.kept_system, found.kept_timeline, found.line_from) or memory.heartbeat < found.line_from:
        return None
    return (
        f"heartbeat {memory.heartbeat} is missing from the database, whose time line {found.kept_timeline} began with "
        f"heartbeat {found.line_from}: it was restored from a backup, or a fail-over lost its end"
    )


class Heart:
    """One process's memory of the database, in `folder` too where that can be written.

    `who` names the process in a suspicion. May be asked by several tasks at once.
    """

    def __init__(self, folder: Path, who: str) -> None:
        self._folder = folder
        self._who = who
        self._file: Path | None = None
        self._memory: Memory | None = None
        self._lock = asyncio.Lock()
        self._kept = True
        self._suspect = False

    async def beat(self, pool: asyncpg.Pool) -> None:
        """Check, and unless the database is suspect commit one more heartbeat and remember it."""
        async with self._lock, pool.acquire() as connection:
            if not await self._check(connection):
                return
            remembered = await _raise_heartbeat(connection, self._memory)
        if remembered:
            self._memory = remembered
            await asyncio.to_thread(self._keep, remembered)

    async def check(self, pool: asyncpg.Pool) -> bool:
        """Return whether the database may be trusted; one that has gone back is made suspect first."""
        async with self._lock, pool.acquire() as connection:
            return await self._check(connection)

    async def _check(self, connection: Connection) -> bool:
        if self._file is None:  # before the look: what another process of this host committed meanwhile is in both
            file = self._folder / f"heartbeat-{await _installed(connection)}.json"
            self._memory = await asyncio.to_thread(_read, file)
            self._file = file
        found = await _look(connection)
        if gone_back(self._memory, found):
            found = await _suspect(connection, self._memory, self._who)
        self._tell(found)
        return not found.suspect

    def _tell(self, found: Found) -> None:
        if found.suspect and not self._suspect:
            _log.error(
                "database_suspect",
                reason=found.reason,
                hint="nothing is claimed or released: bring back what the gap lacks with reconciler replay or "
                "reconciler backfill, then reconciler resume --reason TEXT",
            )
        elif self._suspect and not found.suspect:
            _log.info("database_accepted")
        self._suspect = found.suspect

    def _keep(self, memory: Memory) -> None:
        assert self._file is not None  # noqa: S101 - _check has set it
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            written = self._file.with_suffix(f".{os.getpid()}-{id(self):x}")
            written.write_bytes(msgspec.json.encode(memory))
            written.replace(self._file)
        except OSError as error:
            if self._kept:
                _log.warning(
                    "heartbeat_not_kept",
                    reason=error.strerror,
                    hint="a database restored while this process is down will not be noticed: let "
                    "database.data_dir be a folder that this account can write",
                )
            self._kept = False
        else:
            self._kept = True


def _read(file: Path) -> Memory | None:
    """Return what the file remembers. One that can't be read is no memory, as at the first start, and is told."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Memory)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        _log.warning(
            "heartbeat_unreadable",
            file=file.name,
            reason=reason,
            hint="going on as at a first start: a database restored while no process ran is not noticed",
        )
        return None


# The moment of the first migration: it comes along with a backup, and no two installations share it.
INSTALLED: Final = "SELECT (extract(epoch FROM applied_at) * 1000000)::bigint FROM schema_migration WHERE version = 1"


async def _installed(connection: Connection) -> int:
    installed: int = await connection.fetchval(INSTALLED)
    return installed


LOOK: Final = """
SELECT s.heartbeat, s.system_identifier AS kept_system, s.timeline AS kept_timeline, s.line_from,
       now.system_identifier AS system, s.suspect_at IS NOT NULL AS suspect, s.reason
FROM feed_state s CROSS JOIN database_line() AS now
WHERE s.feed = '*'
"""


async def _look(connection: Connection) -> Found:
    row = await connection.fetchrow(LOOK)
    if row is None:
        raise UserError("feed_state has no row '*': is a restore of the database still running? Wait for its end")
    return Found(**row)


# `database_line` of the server on which the new heartbeat is committed. Whoever sees a new time line first says where
# it began.
RAISE: Final = """
UPDATE feed_state s SET heartbeat = s.heartbeat + 1, heartbeat_at = clock_timestamp(),
    line_from = CASE WHEN (s.system_identifier, s.timeline) IS DISTINCT FROM (now.system_identifier, now.timeline)
                     THEN s.heartbeat + 1 ELSE s.line_from END,
    system_identifier = now.system_identifier, timeline = now.timeline
FROM database_line() AS now
WHERE s.feed = '*' AND s.suspect_at IS NULL AND s.heartbeat >= $1
  AND coalesce(s.system_identifier = now.system_identifier, true)
RETURNING s.heartbeat, s.system_identifier AS system, s.timeline, s.line_from,
          coalesce(pg_sequence_last_value('send_fence'), 0) AS fence
"""


async def _raise_heartbeat(connection: Connection, memory: Memory | None) -> Memory | None:
    """Commit one more heartbeat; None where the database came to be suspect meanwhile."""
    row = await connection.fetchrow(RAISE, memory.heartbeat if memory else 0)
    return Memory(**row) if row else None


LOCK: Final = "SELECT FROM feed_state WHERE feed = '*' FOR NO KEY UPDATE"
SUSPECT: Final = """
UPDATE feed_state SET suspect_at = coalesce(suspect_at, clock_timestamp()),
    reason = CASE WHEN suspect_at IS NULL THEN $3 ELSE reason END,
    who = CASE WHEN suspect_at IS NULL THEN $4 ELSE who END,
    heartbeat_seen = greatest(heartbeat_seen, $1), fence_seen = greatest(fence_seen, $2), updated_at = clock_timestamp()
WHERE feed = '*' AND (suspect_at IS NULL OR heartbeat_seen < $1 OR fence_seen < $2)
"""


async def _suspect(connection: Connection, memory: Memory | None, who: str) -> Found:
    """Hold all feeds, if the database has still gone back once its row is locked: it may have been resumed meanwhile.

    What this process remembers is kept for whoever resumes, who may sit at another machine.
    """
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(LOCK)
        if reason := gone_back(memory, await _look(connection)):
            heartbeat, fence = (memory.heartbeat, memory.fence) if memory else (0, 0)
            await connection.execute(SUSPECT, heartbeat, fence, reason, who)
        return await _look(connection)


# The sequence may have come back without the rows that drew from it, or the other way round. Of the events, only those
# stored since the restore can name a fence that no row has: late answers of senders.
KEEP_HIGHEST_FENCE: Final = """
UPDATE feed_state s SET fence_seen = greatest(s.fence_seen,
    (SELECT max(fence) FROM send_log),
    (SELECT max(fence) FROM verdict),
    (SELECT max(fence) FROM provider_event
     WHERE received_at > least(s.suspect_at, s.heartbeat_at) - interval '1 day' AND source = 'sender'
       AND fence < 4611686018427387904))  -- no sequence reaches half of all numbers: a sender made it up
WHERE s.feed = $1 AND s.suspect_at IS NOT NULL
"""
LIFT_FENCE: Final = "SELECT send_fence_lift($1)"
ACCEPT: Final = """
UPDATE feed_state s SET heartbeat = greatest(s.heartbeat, s.heartbeat_seen) + 1000000,
    line_from = greatest(s.heartbeat, s.heartbeat_seen) + 1000000,
    system_identifier = now.system_identifier, timeline = now.timeline, heartbeat_seen = 0, fence_seen = 0
FROM database_line() AS now
WHERE s.feed = $1 AND s.suspect_at IS NOT NULL
"""

SCAN_SECONDS: Final = 3600.0
"""Longest look for the highest fence: it reads the whole send log, once, when a person resumes after a restore."""


async def keep_highest_fence(connection: Connection, feed: str) -> None:
    """Note the highest fence that any row names, where the feed is suspect. No lock is held meanwhile."""
    await connection.execute(KEEP_HIGHEST_FENCE, feed, timeout=SCAN_SECONDS)


async def accept(connection: Connection, feed: str) -> None:
    """Make the database as it is the one that all processes go on from, where the feed is suspect.

    Called in the transaction that lifts the suspicion. Fences jump past every one given out, and heartbeats past every
    one remembered, so that no process takes the accepted database for one that has gone back.
    """
    await connection.execute(LIFT_FENCE, feed)
    await connection.execute(ACCEPT, feed)
