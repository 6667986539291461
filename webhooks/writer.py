# SPDX-License-Identifier: Apache-2.0
"""Writes batches of rows into `provider_event`: one statement, one transaction, nothing twice, nothing poisoned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import asyncpg
import structlog

from webhooks import metrics
from webhooks.database import ACQUIRE_SECONDS, FAILURES, is_behind_pooler
from webhooks.quiet import Quiet
from webhooks.rows import SEPARATOR, UNDATED, Key, RowMaker, Rows, halves, reduced

Fresh = Sequence[Sequence[object]]
"""The rows that were not there before; each begins with wire key, message id, event id and feed."""

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

INSTALLATION: Final = "SELECT namespace, recipient_salt FROM installation"
MONTHS: Final = "SELECT provider_event_months()"


async def read_layout(connection: Any) -> RowMaker:
    """Return a maker of rows for this database: how it makes keys and recipients, and the months with a partition."""
    async with connection.transaction():
        ((namespace, salt),) = await connection.fetch(INSTALLATION)
        months = await connection.fetch(MONTHS)
    return RowMaker(namespace, [month for (month,) in months], salt)


# Whose rows were new is only told when it must be asked: none and all need no list.
STORE_EVENTS: Final = """
WITH fresh AS (
    INSERT INTO provider_event (wire_key, message_id, event_id, feed, kind, testimony, source, recipient, reason,
        partition_at, occurred_at, raw)
    SELECT wire_key, message_id, event_id, feed, kind, testimony, source, recipient, reason,
        CASE WHEN dated = 't' THEN occurred_at ELSE '1970-01-01 00:00:00+00' END, occurred_at, raw
    FROM unnest(string_to_array($1, E'\\x1f'), string_to_array($2, E'\\x1f'), string_to_array($3, E'\\x1f'),
        string_to_array($4, E'\\x1f'), string_to_array($5, E'\\x1f'), string_to_array($6, E'\\x1f'),
        string_to_array($7, E'\\x1f'), string_to_array($8, E'\\x1f', ''), string_to_array($9, E'\\x1f', ''),
        string_to_array($10, NULL), $11::timestamptz[], $12::bytea[])
        AS given (wire_key, message_id, event_id, feed, kind, testimony, source, recipient, reason,
            dated, occurred_at, raw)
    ON CONFLICT DO NOTHING
    RETURNING wire_key, message_id, event_id, feed
), counted AS (
    SELECT count(*) AS n FROM fresh
)
SELECT n,
    CASE WHEN n BETWEEN 1 AND cardinality($12) - 1
        THEN (SELECT array_agg(ARRAY[wire_key, message_id, event_id, feed]) FROM fresh) END AS idents,
    CASE WHEN n > 0 THEN pg_notify('evidence', '') END AS told
FROM counted
"""


class Writer:
    """Stores one batch at a time over a connection that it keeps. `rows` is a newer maker of rows, where it got one."""

    def __init__(self, pool: asyncpg.Pool, seconds: float) -> None:
        self.rows: RowMaker | None = None
        self._pool = pool
        self._seconds = seconds
        self._connection: Any = None
        self._pooled = False
        self._quiet = Quiet()

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
        name, code = type(error).__name__, getattr(error, "sqlstate", None)
        if (before := self._quiet.silenced("", name)) is not None:
            _log.error("inbox_not_stored", error=name, sqlstate=code, events=events, unlogged_before=before)
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
        keys = sorted(rows)  # unsorted batches of two writers deadlock
        columns = _columns(keys, rows)
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
                # An idle one may have died without a word, and all deliveries wait for this.
                async with asyncio.timeout(min(self._seconds, ACQUIRE_SECONDS)):
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


def _columns(keys: list[Key], rows: Rows) -> tuple[object, ...]:
    """Return the arguments of STORE_EVENTS.

    Text goes as one text a column: asyncpg looks at each element of an array several times, which costs more than
    everything else that is done for an event.
    """
    wire, message, event, feed, partition = zip(*keys, strict=True)
    occurred, kind, testimony, recipient, reason, source, raw = zip(*map(rows.__getitem__, keys), strict=True)
    texts = (wire, message, event, feed, kind, testimony, source, *map(_with_blanks, (recipient, reason)))
    dated = "".join(["f" if at is UNDATED else "t" for at in partition])
    return (*map(SEPARATOR.join, texts), dated, occurred, raw)


def _with_blanks(column: tuple[str | None, ...]) -> list[str]:
    return [value or "" for value in column]
