# SPDX-License-Identifier: Apache-2.0
"""Writes batches of rows into `provider_event`: one statement, one transaction, nothing twice, nothing poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import asyncpg
import structlog

from webhooks import metrics
from webhooks.database import ACQUIRE_SECONDS, is_behind_pooler
from webhooks.rows import RowMaker, Rows, halves, reduced

Fresh = Sequence[Sequence[object]]
"""The rows that were not there before; each begins with wire key, message id, event id and feed."""

FAILURES: Final = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)
"""All that asyncpg raises where a database is away, slow or unwilling (a TimeoutError is an OSError)."""

_log: Final = structlog.get_logger()

_BAD_DATA: Final = (
    asyncpg.DataError,  # class 22
    asyncpg.IntegrityConstraintViolationError,  # class 23
    asyncpg.ProgramLimitExceededError,  # class 54
    ValueError,  # asyncpg could not encode it
    TypeError,
)
_TRY_AGAIN: Final = (
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.InvalidCachedStatementError,
    asyncpg.OutdatedSchemaCacheError,
)
_LOST: Final = (
    OSError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,  # asyncpg's own confusion where a connection breaks in the middle of a message
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
)

NAMESPACE: Final = "SELECT namespace FROM installation"
MONTHS: Final = "SELECT provider_event_months()"


async def read_layout(connection: Any) -> RowMaker:
    """Return a maker of rows for this database: the installation's namespace and the months with a partition."""
    async with connection.transaction():
        namespace = await connection.fetchval(NAMESPACE)
        months = await connection.fetch(MONTHS)
    return RowMaker(namespace, [month for (month,) in months])


class Writer:
    """Stores one batch at a time over a connection that it keeps. `rows` is a newer maker of rows, where it got one."""

    def __init__(self, pool: asyncpg.Pool, seconds: float) -> None:
        self.rows: RowMaker | None = None
        self._pool = pool
        self._seconds = seconds
        self._connection: Any = None
        self._pooled = False

    async def store(self, rows: Rows) -> Fresh:
        """Return which rows were new, once all are committed. Raises FAILURES if that can't be said.

        A row that the database refuses for what it holds is kept in reduced form and fails no other row.
        """
        try:
            return await self._with_retry(rows)
        except asyncpg.CheckViolationError:  # most likely a partition that is gone, or not there yet
            self.rows = await read_layout(await self._connected())
            return await self._in_halves(self.rows.redated(rows))
        except _BAD_DATA:
            return await self._in_halves(rows)

    async def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with suppress(*FAILURES):
                await self._pool.release(connection, timeout=ACQUIRE_SECONDS)

    def report(self, error: Exception, events: int) -> None:
        """Log that a batch was not stored, and let go of the connection, which may be what ails."""
        code = getattr(error, "sqlstate", None)
        _log.error("inbox_not_stored", error=type(error).__name__, sqlstate=code, events=events)
        self._drop()

    async def _in_halves(self, rows: Rows) -> Fresh:
        try:
            return await self._with_retry(rows)
        except _BAD_DATA:
            if len(rows) == 1:
                return await self._reduced(rows)
        return [fresh for half in halves(rows) for fresh in await self._in_halves(half)]

    async def _reduced(self, rows: Rows) -> Fresh:
        ((key, rest),) = rows.items()
        stored = await self._with_retry(reduced(key, rest))
        metrics.REDUCED.inc()
        _log.warning("event_reduced", feed=key[3], wire_key=key[0] if key[0].isascii() else None)
        return [key] if stored else []

    async def _with_retry(self, rows: Rows) -> Fresh:
        kept = self._connection is not None
        try:
            return await self._insert(rows)
        except _TRY_AGAIN as error:
            cause = type(error).__name__
        except FAILURES as error:
            # A connection kept since an earlier batch may have died with its server; a slow one is not tried again.
            if not kept or isinstance(error, TimeoutError | ValueError) or not isinstance(error, _LOST):
                raise
            cause = "ConnectionLost"
            self._drop()
        metrics.RETRIES.labels(cause).inc()
        return await self._insert(rows)

    async def _insert(self, rows: Rows) -> Fresh:
        # Sorted by their key: unsorted batches of two writers deadlock.
        keys = sorted(rows)
        columns = (*zip(*keys, strict=True), *zip(*map(rows.__getitem__, keys), strict=True))
        connection = await self._connected()
        with metrics.COMMIT_SECONDS.time():
            if self._pooled:
                async with connection.transaction():
                    (record,) = await connection.fetch(STORE_EVENTS, *columns, timeout=self._seconds)
            else:
                (record,) = await connection.fetch(STORE_EVENTS, *columns, timeout=self._seconds)
        return keys if record["n"] == len(keys) else record["idents"] or ()

    async def _connected(self) -> Any:
        if self._connection is None:
            connection = await self._pool.acquire(timeout=ACQUIRE_SECONDS)
            try:
                self._pooled = await is_behind_pooler(connection)
            except BaseException:
                connection.terminate()
                raise
            self._connection = connection
        return self._connection

    def _drop(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with suppress(asyncpg.InterfaceError):  # it was closed, and the pool knows
                connection.terminate()


# Whose rows were new is only told when it must be asked: none and all need no list.
STORE_EVENTS: Final = """
WITH fresh AS (
    INSERT INTO provider_event (wire_key, message_id, event_id, feed, partition_at,
        occurred_at, kind, testimony, recipient, reason, source, raw)
    SELECT wire_key, message_id, event_id, feed, partition_at,
        occurred_at, kind, testimony, recipient, reason, source, raw
    FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::timestamptz[],
        $6::timestamptz[], $7::text[], $8::text[], $9::text[], $10::text[], $11::text[], $12::bytea[])
        AS given (wire_key, message_id, event_id, feed, partition_at,
            occurred_at, kind, testimony, recipient, reason, source, raw)
    ON CONFLICT DO NOTHING
    RETURNING wire_key, message_id, event_id, feed
), counted AS (
    SELECT count(*) AS n FROM fresh
)
SELECT n,
    CASE WHEN n BETWEEN 1 AND cardinality($1) - 1
        THEN (SELECT array_agg(ARRAY[wire_key, message_id, event_id, feed]) FROM fresh) END AS idents,
    CASE WHEN n > 0 THEN pg_notify('evidence', '') END AS told
FROM counted
"""
