# SPDX-License-Identifier: Apache-2.0
"""The records behind the Idempotency-Key header: who performs a request, and what was answered."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

from aiohttp import hdrs, web

from reconciler.problem import Problem, retry_after
from webhooks.database import FAILURES

HEADER: Final = "Idempotency-Key"
ACQUIRE_SECONDS: Final = 10.0
"""Longest wait for a connection of the pool: while the database answers, waiting is better than to be refused."""
STATEMENTS_SECONDS: Final = 5.0
"""How long one use of it may take: behind a pooler nothing else ends the wait for a lock."""
AWAY_SECONDS: Final = 5.0
IN_PROGRESS_SECONDS: Final = 1.0
KEPT_HEADERS: Final = (
    hdrs.CONTENT_TYPE,
    hdrs.CONTENT_ENCODING,
    hdrs.CONTENT_LANGUAGE,
    hdrs.LOCATION,
    hdrs.LINK,
    hdrs.ETAG,
)
"""Headers of an answer that its repeats have, too, each as often as it was there."""
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
            async with (
                self.pool.acquire(timeout=ACQUIRE_SECONDS) as connection,
                asyncio.timeout(STATEMENTS_SECONDS),
            ):
                yield connection
        except FAILURES as error:
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

    async def begin(self, identity: str, content: str, *, anew: bool = False) -> Run | Any:
        """Begin a record, and commit it; return its run, or the record that was there.

        `anew`: a repeat is performed, too, until an answer is kept.
        """
        run, reached = Run(identity, uuid4(), self), False
        try:
            async with self._connection() as connection:
                reached = True
                found = await self.begin_on(connection, run, content, "anew" if anew else "begun")
        except BaseException:
            if reached:  # it may have been committed all the same
                self._unperformed.append(run.number)
            raise
        if isinstance(found, Run) or found["fingerprint"] != content:
            return found
        return self._unperformed_run(identity, found["run"]) or found

    async def begin_on(self, connection: Any, run: Run, content: str, state: str) -> Run | Any:
        """Begin the record of a run on a connection, and return it or what was there; errors are the database's own."""
        row = (run.identity, content, state, run.number, self._lease, self._retention)
        while True:  # a record may be freed between the two statements
            if await connection.fetchval(self.BEGIN, *row):
                return run
            if (found := await connection.fetchrow(self.FIND, run.identity)) is not None:
                return found

    def _unperformed_run(self, identity: str, number: UUID) -> Run | None:
        """Return a run of this process that was begun or freed while the database was lost: once, for one repeat."""
        with suppress(ValueError):
            self._unperformed.remove(number)
            return Run(identity, number, self)
        return None

    TAKE_OVER: Final = """
    UPDATE idempotency i SET state = 'begun', run = $3, resolves_at = NULL, begun_at = t,
        lease_until = t + $4::interval, keep_until = t + $5::interval
    FROM clock_timestamp() AS t
    WHERE i.id = $1 AND i.run = $2 AND (i.state = 'ambiguous' OR i.state = 'begun' AND i.lease_until <= t)
      AND EXISTS (SELECT FROM send_log s WHERE s.wire_key = i.wire_key AND s.state = 'pending')
    RETURNING i.wire_key
    """

    async def take_over(self, identity: str, from_run: UUID) -> Run | None:
        """Begin an ambiguous request again whose send is free to be claimed; None: somebody else did, or it isn't.

        A send that the log doesn't know proves nothing: the name may be wrong.
        """
        run = Run(identity, uuid4(), self)
        async with self._connection() as connection:
            row = (identity, from_run, run.number, self._lease, self._retention)
            run.wire_key = await connection.fetchval(self.TAKE_OVER, *row)
        return run if run.wire_key else None

    NAME: Final = """
    UPDATE idempotency SET wire_key = wire_key($3) WHERE id = $1 AND run = $2 AND state = 'begun' RETURNING wire_key
    """

    async def name(self, run: Run, key: str) -> None:
        """Note which send a request is about. Raises Problem 409 where the request was given to another run."""
        async with self._connection() as connection:
            run.wire_key = await connection.fetchval(self.NAME, run.identity, run.number, key)
        if run.wire_key is None:
            raise in_progress()

    ANSWER: Final = """
    UPDATE idempotency SET state = 'answered', status = $3, headers = $4, body = $5, resolves_at = NULL,
        keep_until = clock_timestamp() + $6::interval
    WHERE id = $1 AND run = $2 AND state IN ('begun', 'anew')
    """

    async def answer(self, run: Run, response: web.Response) -> None:
        """Keep an answer. Raises TypeError for one whose body is no plain bytes: it can't be given again."""
        if not isinstance(response.body, bytes | bytearray | None):
            raise TypeError("only an answer whose body is bytes or text can be kept for an Idempotency-Key")
        headers = [(name, value) for name in KEPT_HEADERS for value in response.headers.getall(name, [])]
        row = (response.status, json.dumps(headers), bytes(response.body or b""), self._retention)
        async with self._connection() as connection:
            await connection.execute(self.ANSWER, run.identity, run.number, *row)

    FREE: Final = "DELETE FROM idempotency WHERE id = $1 AND run = $2 AND state = 'begun'"

    async def free(self, run: Run) -> None:
        """Forget a request that queued nothing; where that fails, this process remembers it, and performs a repeat."""
        try:
            async with self._connection() as connection:
                await connection.execute(self.FREE, run.identity, run.number)
        except BaseException:
            self._unperformed.append(run.number)
            raise

    GIVE_UP: Final = """
    UPDATE idempotency SET state = 'ambiguous', wire_key = coalesce(wire_key($3), wire_key), resolves_at = $4
    WHERE id = $1 AND run = $2 AND state = 'begun' RETURNING wire_key, clock_timestamp() AS now
    """

    async def give_up(self, run: Run, key: str | None = None, retry_at: datetime | None = None) -> datetime | None:
        """Keep that nobody can tell what a request did; return the database's clock."""
        async with self._connection() as connection:
            row = await connection.fetchrow(self.GIVE_UP, run.identity, run.number, key, retry_at)
        if row is None:
            return None
        run.wire_key = row["wire_key"]
        now: datetime = row["now"]
        return now


# A record whose send is still undecided, or whose request runs, is what keeps that from being performed again. (A
# volatile time would use no index: whoever finds nothing would have read all that is kept.)
DELETE_OLD: Final = """
WITH gone AS (
    DELETE FROM idempotency WHERE keep_until < statement_timestamp() AND id IN (
        SELECT i.id FROM idempotency i LEFT JOIN send_log s ON s.wire_key = i.wire_key
        WHERE i.keep_until < statement_timestamp() AND s.state IS DISTINCT FROM 'claimed'
          AND (i.state <> 'begun' OR i.lease_until < clock_timestamp())
        ORDER BY i.keep_until LIMIT $1)
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
