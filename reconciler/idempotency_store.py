# SPDX-License-Identifier: Apache-2.0
"""The records behind the Idempotency-Key header: who performs a request, and what was answered."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg
from aiohttp import hdrs, web

from reconciler.problem import Problem, retry_after

HEADER: Final = "Idempotency-Key"
ACQUIRE_SECONDS: Final = 2.0
"""Longest wait for a connection of the pool."""
AWAY_SECONDS: Final = 5.0
IN_PROGRESS_SECONDS: Final = 1.0
KEPT_HEADERS: Final = (hdrs.CONTENT_TYPE, hdrs.CONTENT_LANGUAGE, hdrs.LOCATION, hdrs.LINK, hdrs.ETAG)
"""Headers of an answer that its repeats have, too."""
AWAY: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""How a database shows itself that is away, slow or unwilling (a TimeoutError is an OSError)."""
MOST_DELETED: Final = 1000


@dataclass(slots=True)
class Run:
    """A request that is being performed. A run whose record was given to another one changes nothing any more."""

    identity: str
    number: UUID
    store: Store
    wire_key: str | None = None


class Store:
    """The records, and how long they are kept: longer than any client repeats a request.

    A request that was not answered within `lease` is taken to have died with its process. Without a pool, or where the
    database is away, each method raises Problem 503.
    """

    def __init__(
        self, pool: Any = None, *, retention: timedelta = timedelta(hours=24), lease: timedelta = timedelta(seconds=60)
    ) -> None:
        self.pool = pool
        self._retention, self._lease = retention, lease
        self._unperformed: deque[UUID] = deque(maxlen=MOST_DELETED)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        if self.pool is None:
            raise unavailable()
        try:
            async with self.pool.acquire(timeout=ACQUIRE_SECONDS) as connection:
                yield connection
        except AWAY as error:
            raise unavailable() from error

    BEGIN: Final = """
    INSERT INTO idempotency (id, fingerprint, state, run, lease_until, keep_until)
    SELECT $1, $2, $3, $4, t + $5::interval, t + $6::interval FROM clock_timestamp() AS t
    ON CONFLICT (id) DO NOTHING RETURNING true
    """
    FIND: Final = """
    SELECT i.fingerprint, i.state, i.run, i.status, i.headers, i.body, i.wire_key, i.lease_until > t AS running,
        s.state AS send, t AS now,
        CASE s.state WHEN 'claimed' THEN s.next_check_at ELSE i.resolves_at END AS resolves_at
    FROM clock_timestamp() AS t CROSS JOIN idempotency i LEFT JOIN send_log s ON s.wire_key = i.wire_key
    WHERE i.id = $1
    """

    async def begin(self, identity: str, content: str) -> Run | Any:
        """Begin a record, and commit it; return its run, or the record that was there."""
        async with self._connection() as connection:
            return await self.begin_on(connection, identity, content)

    async def begin_on(self, connection: Any, identity: str, content: str, state: str = "begun") -> Run | Any:
        """Do the same on a connection; errors are the database's own."""
        run = Run(identity, uuid4(), self)
        row = (identity, content, state, run.number, self._lease, self._retention)
        while True:  # a record may be freed between the two statements
            self._unperformed.append(run.number)  # what is committed and not answered is met again below
            begun = await connection.fetchval(self.BEGIN, *row)
            self._forget(run.number)
            if begun:
                return run
            if (found := await connection.fetchrow(self.FIND, identity)) is not None:
                break
        if found["run"] in self._unperformed and found["fingerprint"] == content:
            self._forget(found["run"])
            return Run(identity, found["run"], self)
        return found

    def _forget(self, number: UUID) -> None:
        with suppress(ValueError):  # it may have been crowded out
            self._unperformed.remove(number)

    TAKE_OVER: Final = """
    UPDATE idempotency i SET state = 'begun', run = $3, resolves_at = NULL, begun_at = t,
        lease_until = t + $4::interval, keep_until = t + $5::interval
    FROM clock_timestamp() AS t
    WHERE i.id = $1 AND i.run = $2 AND (i.state = 'ambiguous' OR i.state = 'begun' AND i.lease_until <= t)
      AND i.wire_key IS NOT NULL
      AND NOT EXISTS (SELECT FROM send_log s WHERE s.wire_key = i.wire_key AND s.state <> 'pending')
    RETURNING i.wire_key
    """

    async def take_over(self, identity: str, from_run: UUID) -> Run | None:
        """Begin an ambiguous request again whose send is free to be claimed; None: somebody else did, or it isn't."""
        run = Run(identity, uuid4(), self)
        async with self._connection() as connection:
            row = (identity, from_run, run.number, self._lease, self._retention)
            run.wire_key = await connection.fetchval(self.TAKE_OVER, *row)
        return run if run.wire_key else None

    NAME: Final = "UPDATE idempotency SET wire_key = $3 WHERE id = $1 AND run = $2 AND state = 'begun' RETURNING true"

    async def name(self, run: Run, wire_key: str) -> None:
        """Note which send a request is about. Raises Problem 409 where the request was given to another run."""
        async with self._connection() as connection:
            if not await connection.fetchval(self.NAME, run.identity, run.number, wire_key):
                raise in_progress()
        run.wire_key = wire_key

    ANSWER: Final = """
    UPDATE idempotency SET state = 'answered', status = $3, headers = $4, body = $5, resolves_at = NULL,
        keep_until = clock_timestamp() + $6::interval
    WHERE id = $1 AND run = $2 AND state = 'begun'
    """

    async def answer(self, run: Run, response: web.Response) -> None:
        """Keep an answer. Raises TypeError for one whose body is no plain bytes: it can't be given again."""
        if not isinstance(response.body, bytes | bytearray | None):
            raise TypeError("only an answer whose body is bytes or text can be kept for an Idempotency-Key")
        headers = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
        row = (response.status, json.dumps(headers), bytes(response.body or b""), self._retention)
        async with self._connection() as connection:
            await connection.execute(self.ANSWER, run.identity, run.number, *row)

    FREE: Final = "DELETE FROM idempotency WHERE id = $1 AND run = $2 AND state = 'begun'"

    async def free(self, run: Run) -> None:
        """Forget a request that queued nothing; where that fails, this process remembers it, and performs a repeat."""
        self._unperformed.append(run.number)
        async with self._connection() as connection:
            await connection.execute(self.FREE, run.identity, run.number)
        self._forget(run.number)

    GIVE_UP: Final = """
    UPDATE idempotency SET state = 'ambiguous', wire_key = coalesce($3, wire_key), resolves_at = $4
    WHERE id = $1 AND run = $2 AND state = 'begun' RETURNING clock_timestamp()
    """

    async def give_up(self, run: Run, wire_key: str | None = None, retry_at: datetime | None = None) -> datetime | None:
        """Keep that nobody can tell what a request did; return the database's clock."""
        async with self._connection() as connection:
            now: datetime | None = await connection.fetchval(self.GIVE_UP, run.identity, run.number, wire_key, retry_at)
        return now


# A record whose send is still undecided is what keeps its request from being performed again.
DELETE_OLD: Final = """
WITH gone AS (
    DELETE FROM idempotency WHERE keep_until < clock_timestamp() AND id IN (
        SELECT i.id FROM idempotency i LEFT JOIN send_log s ON s.wire_key = i.wire_key
        WHERE i.keep_until < clock_timestamp() AND s.state IS DISTINCT FROM 'claimed' ORDER BY i.keep_until LIMIT $1)
    RETURNING true
)
SELECT count(*) FROM gone
"""


async def delete_old(pool: Any) -> int:
    """Delete records that have been kept long enough, in short transactions; return how many."""
    total = 0
    while deleted := await pool.fetchval(DELETE_OLD, MOST_DELETED):
        total += deleted
    return total


def unavailable() -> Problem:
    """Return the answer where the database can't be used: nothing was performed, or repeating it is safe."""
    detail, headers = "the database is away or busy: repeat the request", retry_after(AWAY_SECONDS)
    return Problem(503, detail, headers=headers, outcome="unavailable")


def in_progress() -> Problem:
    """Return the answer to a request that is being performed."""
    headers = retry_after(IN_PROGRESS_SECONDS)
    return Problem(409, f"a request with this {HEADER} is being performed", headers=headers, outcome="in_progress")
