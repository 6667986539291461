# SPDX-License-Identifier: Apache-2.0
"""When background work runs: workers that take wishes, a clock of intervals, and the database's notifications.

The clock only wishes; what is wished is done by a worker, one at a time. So a tick or a notification that comes while
the work runs is remembered, and at shutdown the work under way is awaited instead of being cancelled by the scheduler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

import asyncpg
import structlog
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobEvent
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.triggers.interval import IntervalTrigger

from reconciler import metrics
from reconciler.errors import OTHER_SCHEMA
from webhooks.asking import ApiError
from webhooks.database import CONNECT_SECONDS, is_behind_pooler

_log: Final = structlog.get_logger()

_AWAY: Final = (OSError, asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, asyncpg.InterfaceError)
"""How a database that is away shows itself (a TimeoutError is an OSError). It is away now and then: that is normal."""


class Worker:
    """Does one kind of work whenever somebody wished for it since it was last begun: never twice at once.

    `pause` is the least number of seconds between two beginnings. Work that raises is logged as `failed_event` and
    counted; it is done again at the next wish.
    """

    def __init__(self, name: str, work: Callable[[], Awaitable[object]], failed_event: str, pause: float = 0.0) -> None:
        self.name = name
        self._work, self._failed_event, self._pause = work, failed_event, pause
        self._wished = asyncio.Event()
        self._stopping = asyncio.Event()
        self._last_reason = ""

    def change(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do other work from the next time on."""
        self._work = work

    def wish(self, *_: object) -> None:
        """Ask for the work to be done, now or once the work under way has ended."""
        self._wished.set()

    def stop(self) -> None:
        """Begin nothing more; `run` returns when the work under way has ended."""
        self._stopping.set()
        self._wished.set()

    async def run(self) -> None:
        """Work until `stop`."""
        while True:
            await self._wished.wait()
            if self._stopping.is_set():
                return
            self._wished.clear()
            begun = time.monotonic()
            await self.attempt()
            await self._rest(begun + self._pause)

    async def attempt(self) -> bool:
        """Do the work once; return whether it succeeded. Raises nothing but a cancellation."""
        try:
            await self._work()
        except Exception as error:  # noqa: BLE001 - whatever it was, the next tick tries again
            self._report(error)
            return False
        if self._last_reason:
            _log.info("work_recovered", work=self.name)
            self._last_reason = ""
        return True

    async def _rest(self, until: float) -> None:
        if (seconds := until - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), seconds)

    def _report(self, error: Exception) -> None:
        metrics.WORK_FAILED.labels(self.name).inc()
        reason = reason_of(error)
        if reason != self._last_reason:  # a failure that goes on is told once, its repetition is a metric
            level = _log.warning if isinstance(error, _AWAY) else _log.error
            level(self._failed_event, reason=reason)
        _log.debug("traceback", of=self._failed_event, exc_info=error)
        self._last_reason = reason


def reason_of(error: BaseException) -> str:
    """One line on an error. Of the database's only the message: its details may quote a row."""
    if isinstance(error, ApiError):
        return str(error)
    words = error.args[0] if isinstance(error, asyncpg.PostgresError) and error.args else str(error)
    said = " ".join(str(words).split())[:300]
    if isinstance(error, asyncpg.UndefinedTableError | asyncpg.UndefinedFunctionError | asyncpg.UndefinedColumnError):
        return OTHER_SCHEMA.format(said)
    return f"{type(error).__name__}: {said}".removesuffix(": ")


class Clock:
    """Makes workers work at intervals. A loop that was blocked delays a tick and never drops it."""

    def __init__(self) -> None:
        self._scheduler = AsyncIOScheduler(
            timezone=UTC, job_defaults={"misfire_grace_time": None, "coalesce": True, "max_instances": 1}
        )
        self._scheduler.add_listener(_count_missed, EVENT_JOB_MISSED | EVENT_JOB_MAX_INSTANCES | EVENT_JOB_ERROR)

    def every(self, seconds: float, worker: Worker) -> None:
        """Wish for a worker's work now and then at this interval."""

        async def tick() -> None:  # a plain function would be called in a thread
            worker.wish()

        self._scheduler.add_job(
            tick, IntervalTrigger(seconds=seconds, timezone=UTC), id=worker.name, next_run_time=datetime.now(UTC)
        )

    def start(self) -> None:
        """Begin to tick."""
        self._scheduler.start()

    def stop(self) -> None:
        """Tick no more. It holds no work that could be cancelled."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)


_CAUSES: Final = {EVENT_JOB_MISSED: "missed", EVENT_JOB_MAX_INSTANCES: "still_running", EVENT_JOB_ERROR: "error"}


def _count_missed(event: JobEvent) -> None:
    metrics.TICKS_MISSED.labels(event.job_id, _CAUSES[event.code]).inc()


async def finish(workers: Iterable[Worker], tasks: Iterable[asyncio.Task[None]], seconds: float) -> None:
    """Let workers end what they are doing, for at most this long; what lasts longer is cancelled."""
    for worker in workers:
        worker.stop()
    waiting = set(tasks)
    if not waiting:
        return
    _, late = await asyncio.wait(waiting, timeout=seconds)
    for task in late:
        _log.warning("work_cancelled", work=task.get_name(), waited_seconds=seconds)
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


CHANNEL: Final = "evidence"
FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
ALIVE_EVERY: Final = 30.0
"""Seconds after which a silent connection is asked whether it still stands."""

ALIVE: Final = "SELECT 1"


async def listen(dsn: str, worker: Worker) -> None:
    """Wish for work whenever the database says that evidence came in. Ends by cancellation, or behind a pooler.

    A lost connection is made again, with growing pauses, and then once wished for: something may have been missed.
    """
    pause = FIRST_PAUSE
    while True:
        try:
            if not await _listen_once(dsn, worker):
                _log.warning(
                    "notifications_unavailable",
                    reason="database.url leads through a pooler, which drops notifications: passes run by the timer; "
                    "set database.direct_url",
                )
                return
            pause = FIRST_PAUSE
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            _log.debug("notifications_not_reached", reason=reason_of(error))
        await asyncio.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


async def _listen_once(dsn: str, worker: Worker) -> bool:
    """Listen until the connection is lost; False where nothing could be heard over it."""
    connection = await asyncpg.connect(
        dsn,
        statement_cache_size=0,
        timeout=CONNECT_SECONDS,
        command_timeout=CONNECT_SECONDS,
        server_settings={"application_name": "reconciler listener"},
    )
    try:
        if await is_behind_pooler(connection):
            return False
        await connection.add_listener(CHANNEL, worker.wish)
        worker.wish()
        await _until_lost(connection)
    finally:
        connection.terminate()
    return True


async def _until_lost(connection: asyncpg.Connection[Any]) -> None:
    lost = asyncio.Event()
    connection.add_termination_listener(lambda _: lost.set())
    while not lost.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(lost.wait(), ALIVE_EVERY)
            return
        await connection.execute(ALIVE)
