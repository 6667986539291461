# SPDX-License-Identifier: Apache-2.0
"""Stores events: whoever waits for `Inbox.store` waits for a commit that many deliveries share (group commit)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Final, NamedTuple

import asyncpg

from webhooks import metrics
from webhooks.database import ACQUIRE_SECONDS, FAILURES
from webhooks.event import Event
from webhooks.rows import RowMaker, Rows, bytes_of, parts
from webhooks.writer import Writer, read_layout

MAX_BATCH: Final = 1_000
"""Events of one transaction."""

MAX_BATCH_BYTES: Final = 16_000_000
"""Bytes of one transaction, unless a single event is larger."""

LONGEST_SECONDS: Final = 25.0
"""Longest that a transaction may take. Whoever reads on by the time of storing goes back further than this."""


class InboxBusy(Exception):
    """Not stored: too much waits, it took too long, or the inbox is closed. The provider must deliver again."""


class InboxUnavailable(Exception):
    """Not stored: the database could not do it. The provider must deliver again."""


class Stored(NamedTuple):
    """What became of a delivery's events: `repeated` ones were there before, or twice in the delivery."""

    stored: int
    repeated: int


class _Waiting:
    """One call of `store`: how many of its chunks are not committed yet, and how many of its events were new."""

    __slots__ = ("chunks", "done", "since", "stored")

    def __init__(self, done: asyncio.Future[int], since: float) -> None:
        self.chunks = 1
        self.done = done
        self.since = since
        self.stored = 0


class _Chunk(NamedTuple):
    """What goes into one transaction as a whole."""

    rows: Rows
    size: int
    waiting: _Waiting


class Inbox:
    """The only writer of provider events. `open` it, `store` from any number of tasks, `close` it; else it is busy.

    `queue_events` and `queue_bytes` bound what may wait, `seconds` (LONGEST_SECONDS at most) how long. Each of the
    `writers` keeps one connection of the pool for itself; one writer is quickest.
    """

    def __init__(
        self,
        *,
        queue_events: int = 20_000,
        queue_bytes: int = 64_000_000,
        seconds: float = 10.0,
        writers: int = 1,
    ) -> None:
        if seconds > LONGEST_SECONDS:
            raise ValueError(f"an inbox may take {LONGEST_SECONDS:g} seconds at most")
        self._max_events, self._max_bytes, self._seconds = queue_events, queue_bytes, seconds
        self._events = self._bytes = 0
        self._queue: deque[_Chunk] = deque()
        self._committing: dict[Writer, list[_Chunk]] = {}
        self._wake = asyncio.Event()
        self._closing = False
        self._rows = RowMaker()
        self._writers = writers
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, pool: asyncpg.Pool) -> None:
        """Read the installation's namespace and partitions, and start. Raises what asyncpg raises."""
        self._pool = pool
        await self.refresh_partitions()
        self._loop = asyncio.get_running_loop()  # to ask for it at each delivery is a system call
        self._expire()
        writers = [Writer(pool, self._seconds) for _ in range(self._writers)]
        self._tasks = [asyncio.create_task(self._run(writer)) for writer in writers]

    async def refresh_partitions(self) -> None:
        """Read again which months have a partition; to be called now and then, since new ones are made each month."""
        async with self._pool.acquire(timeout=ACQUIRE_SECONDS) as connection:
            self._rows = await read_layout(connection)

    async def store(self, feed: str, events: Sequence[Event], source: str = "http") -> Stored:
        """Return once all events are committed, or were before.

        Raises InboxBusy or InboxUnavailable where that can't be said; some may be stored nevertheless.
        """
        rows, size = self._rows.make(feed, events, source)
        if not rows:
            return Stored(0, 0)
        self._check_room(len(rows), size)
        waiting = _Waiting(self._loop.create_future(), self._loop.time())
        self._enqueue(rows, size, waiting)
        stored = await waiting.done
        return Stored(stored, len(events) - stored)

    async def check(self) -> None:
        """Return if events could be stored now. Raises InboxBusy or InboxUnavailable."""
        self._check_room(1, 0)
        try:
            async with asyncio.timeout(ACQUIRE_SECONDS), self._pool.acquire(timeout=ACQUIRE_SECONDS) as connection:
                await read_layout(connection)
                writable = await connection.fetchval(WRITABLE)
        except FAILURES as error:
            raise InboxUnavailable(type(error).__name__) from None
        if not writable:
            raise InboxUnavailable("the database is read-only")

    async def close(self) -> None:
        """Take nothing more, commit what waits, and give the connections back. May be called twice."""
        self._closing = True
        self._wake.set()
        await asyncio.gather(*self._tasks)

    def _check_room(self, events: int, size: int) -> None:
        if self._closing or not self._tasks:
            raise InboxBusy("the inbox is closed")
        # A delivery larger than the whole queue is taken when nothing else waits; else it would never be.
        if self._events and (self._events + events > self._max_events or self._bytes + size > self._max_bytes):
            raise InboxBusy("too many events are waiting for the database")

    def _expire(self) -> None:
        """Tell those who waited too long; one timer for all, since one each costs as much as a row."""
        oldest = self._loop.time() - self._seconds
        for chunk in chain(self._queue, *self._committing.values()):
            if chunk.waiting.since <= oldest:
                _fail(chunk.waiting.done, InboxBusy("the database took too long"))
        if not self._closing or self._queue or self._committing:
            self._loop.call_later(min(0.1, self._seconds / 10), self._expire)

    def _enqueue(self, rows: Rows, size: int, waiting: _Waiting) -> None:
        if len(rows) <= MAX_BATCH and size <= MAX_BATCH_BYTES:
            self._queue.append(_Chunk(rows, size, waiting))
        else:
            cut = parts(rows, MAX_BATCH, MAX_BATCH_BYTES)
            waiting.chunks = len(cut)
            self._queue.extend(_Chunk(part, bytes_of(part), waiting) for part in cut)
        self._events += len(rows)
        self._bytes += size
        self._wake.set()

    async def _run(self, writer: Writer) -> None:
        try:
            while batch := await self._next_batch():
                await self._commit(writer, batch)
        finally:
            await writer.close()

    async def _next_batch(self) -> list[_Chunk]:
        """Return what waits, as much as one transaction may hold; an empty list once the inbox is closed and empty."""
        while not self._queue and not self._closing:
            self._wake.clear()
            await self._wake.wait()
        batch: list[_Chunk] = []
        events = size = 0
        while self._queue:
            chunk = self._queue[0]
            events += len(chunk.rows)
            size += chunk.size
            if batch and (events > MAX_BATCH or size > MAX_BATCH_BYTES):
                break
            batch.append(self._queue.popleft())
        self._measure()
        return batch

    async def _commit(self, writer: Writer, batch: list[_Chunk]) -> None:
        # Whoever gave up waiting is not stored: the provider delivers again anyway, and the database is slow.
        wanted = self._committing[writer] = [chunk for chunk in batch if not chunk.waiting.done.done()]
        try:
            rows, firsts = _merged(wanted)
            if rows:
                _tell(wanted, firsts, len(rows), await writer.store(rows))
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must be told, and the writer goes on
            for chunk in wanted:
                _fail(chunk.waiting.done, InboxUnavailable(type(error).__name__))
            writer.report(error, sum(len(chunk.rows) for chunk in wanted))
        finally:
            del self._committing[writer]
            self._events -= sum(len(chunk.rows) for chunk in batch)
            self._bytes -= sum(chunk.size for chunk in batch)
            if writer.rows is not None:
                self._rows, writer.rows = writer.rows, None

    def _measure(self) -> None:
        metrics.QUEUED_EVENTS.set(self._events)
        metrics.QUEUED_BYTES.set(self._bytes)


WRITABLE: Final = "SELECT current_setting('transaction_read_only') = 'off'"


def _fail(done: asyncio.Future[int], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)


def _merged(batch: list[_Chunk]) -> tuple[Rows, list[int]]:
    """Return all rows, each identity once, and how many of them each chunk brought first."""
    if len(batch) == 1:
        return batch[0].rows, [len(batch[0].rows)]
    rows: Rows = {}
    firsts = []
    for chunk in batch:
        before = len(rows)
        rows.update(chunk.rows)
        firsts.append(len(rows) - before)
    return rows, firsts


def _tell(batch: list[_Chunk], firsts: list[int], total: int, fresh: Sequence[Sequence[object]]) -> None:
    """Tell those who wait how many of their events were new; the first of several that brought an event stored it."""
    if len(fresh) == total:
        shares = firsts
    elif not fresh:
        shares = [0] * len(batch)
    else:
        left = {tuple(ident[:4]) for ident in fresh}
        shares = [_taken(chunk.rows, left) for chunk in batch]
    for chunk, share in zip(batch, shares, strict=True):
        waiting = chunk.waiting
        waiting.stored += share
        waiting.chunks -= 1
        if waiting.chunks == 0 and not waiting.done.done():
            waiting.done.set_result(waiting.stored)


def _taken(rows: Rows, left: set[tuple[object, ...]]) -> int:
    mine = left.intersection(key[:4] for key in rows)
    left -= mine
    return len(mine)
