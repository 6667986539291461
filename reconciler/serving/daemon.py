# SPDX-License-Identifier: Apache-2.0
"""The parts of the process that `reconciler serve` is: receiver, passes and probes on one event loop."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, Literal

import asyncpg
import structlog
from aiohttp import web

from reconciler import composition, metrics
from reconciler.api.application import API_LOCK_SECONDS, add_api, callers
from reconciler.api.routes import API_CONNECTIONS
from reconciler.campaigns.caps import CAPS_SECONDS
from reconciler.configuration.settings import Settings
from reconciler.database.postgres import EmbeddedPostgres
from reconciler.distributed.statements import refuse_outbox
from reconciler.errors import DatabaseUnavailable, UserError
from reconciler.idempotency import Store, delete_old
from reconciler.insight.figures import FIGURES_SECONDS
from reconciler.insight.watch import WATCH_SECONDS
from reconciler.outbox.delivery import OUTBOX_SECONDS
from reconciler.passes.reconcile import Policies, run_pass
from reconciler.passes.restore import Heart
from reconciler.serving.health import Health
from reconciler.serving.process import begin_to_answer
from reconciler.serving.scheduler import Clock, Worker, finish, listen, reason_of
from reconciler.serving.self_check import TELL_SECONDS, SelfCheck
from reconciler.serving.traced import Traced
from reconciler.serving.works import UPLOAD_SECONDS, Works, by_settings, close_archive, take_back, tell_pass, upload
from reconciler.tokens import Tokens
from reconciler.ui.application import add_ui
from reconciler.ui.data import UI_CONNECTIONS, Data
from reconciler.ui.viewers import is_wanted
from reconciler.upkeep.retention import PRUNE_SECONDS
from webhooks.archive import Archive
from webhooks.counters import Counters
from webhooks.database import ACQUIRE_SECONDS, FAILURES, BoundedPool
from webhooks.inbox import InboxBusy, InboxUnavailable
from webhooks.intake import Intake, Keep
from webhooks.provider import Feed, Fetch
from webhooks.receiver import RECEIVER, Limits, Receiver, add_receiver
from webhooks.registry import PROVIDERS
from webhooks.sqs import QueueReader

Only = Literal["receiver", "reconciler"] | None

RETRY_SECONDS: Final = 3.0
"""How long after a database that could not be used at start it is tried again."""
ANSWER_SECONDS: Final = 5.0
"""How long at most nobody is answered at start, before the database was reached."""
CHECK_SECONDS: Final = 2.0
FLUSH_SECONDS: Final = 5.0
ARCHIVE_SECONDS: Final = 1.0
ENDPOINTS_SECONDS: Final = 3600.0
"""How often it is asked whether a feed's webhook was looked at within a day."""
PARTITIONS_SECONDS: Final = 3600.0
IDEMPOTENCY_SECONDS: Final = 60.0
PASS_PAUSE: Final = 1.0
"""Least time between the beginnings of two passes, however fast evidence comes."""
FAILED_ROWS_SECONDS: Final = 300.0
"""How often a pass looks for late evidence of failed rows, too."""
DRAIN_SECONDS: Final = 12.0
"""How long requests in flight, and then the work under way, may take at shutdown: together less than Kubernetes' 30."""
PASS_CONNECTIONS: Final = 8
"""Two pages of a pass at once; one each for watch, heartbeat, figures, outbox, look-ups and what deletes old rows."""

_log: Final = structlog.get_logger()


class Daemon:
    """The parts of one process and what they share. `open` begins the work, `close` ends it."""

    def __init__(self, settings: Settings, only: Only) -> None:
        self._settings = settings
        self._receives, self._reconciles = only != "reconciler", only != "receiver"
        self.health = Health(settings.feeds if self._receives else ())
        self._counters = Counters()
        self._who = f"{socket.gethostname()}:{os.getpid()}"
        self.traced = Traced(settings.tracing, self._who)
        self._inbox = self.traced.inbox(settings.receiver)
        self._receiver: Receiver | None = None
        self._queues: list[QueueReader] = []
        self._archive: Archive | None = None
        self._heart = Heart(settings.database.data_dir, self._who)
        self._clock = Clock()
        self._api = Store(retention=settings.api.idempotency_retention)  # its pool comes once the database was reached
        self._tokens: Tokens | None = None
        self._providers = composition.providers(settings)
        self._ui: Data | None = None
        self._workers: list[Worker] = []
        self._works: Callable[[Settings], Works] = lambda _: {}
        self._tasks: list[asyncio.Task[None]] = []
        self._listener: asyncio.Task[None] | None = None
        self._flush: Worker | None = None
        self._take_back: list[Callable[[], Awaitable[None]]] = []
        self._opened = AsyncExitStack()

    def app(self, fetch: Fetch) -> web.Application:
        """Return the HTTP side: probes, and the feeds unless this process only reconciles.

        Raises UserError where a feed has a queue and there is nothing to read it with.
        """
        app = web.Application()
        self.health.add_routes(app)
        if self._reconciles and self._settings.outbox.queue_url:
            composition.require_aws("outbox.queue_url")
        if self._receives:
            feeds = composition.feeds(self._settings)
            intake = Intake(self._inbox, fetch, lambda: datetime.now(UTC), self._counters, self._keep())
            limits = Limits(max_body=self._settings.receiver.max_body)
            add_receiver(app, feeds, intake, fetch, limits, watch=self.traced.watch)
            self._receiver = app[RECEIVER]
            self._queues = [self._queue(feed, intake) for feed in feeds.values() if feed.queue_url]
        if self._reconciles:  # it works on sends, which a mere receiver doesn't touch
            self._tokens = add_api(app, self._settings.api, self._providers, self._api, self._submit_within)
            self._ui = add_ui(app, self._settings)
        return app

    def _submit_within(self, feed: str, message_class: str) -> timedelta:
        return self._settings.rule_settings_for(feed, message_class).submit_within

    def _queue(self, feed: Feed, intake: Intake) -> QueueReader:
        composition.require_aws(f"feeds.{feed.name}.queue_url")
        return QueueReader(feed, PROVIDERS[feed.provider], intake, self._settings.feeds[feed.name].queue_consumers)

    def _keep(self) -> Keep | None:
        """Return what archives deliveries, where that is configured."""
        self._archive = composition.archive(self._settings)
        if self._archive is None:
            return None
        composition.require_aws("archive.url")
        try:
            self._archive.open()
        except OSError as error:
            raise UserError(f"archive.spool can't be used ({error.strerror}): set it to a folder of ours") from None
        return self._archive.add

    def take(self, settings: Settings) -> None:
        """Go on with other settings, of which `reload.merge` left out what a restart is needed for.

        All at once: nothing waits in between, and what can fail comes first.
        """
        feeds, providers, works = composition.feeds(settings), composition.providers(settings), self._works(settings)
        self._settings = settings
        for worker in self._workers:
            if worker.name in works:
                worker.change(works[worker.name])
        if self._receiver is not None:
            self._receiver.replace(feeds)
            self.health.watch(settings.feeds)
        for queue in self._queues:
            queue.replace(feeds[queue.feed])
        self._providers.clear()
        self._providers.update(providers)
        if self._tokens is not None:
            self._tokens.replace(callers(settings.api))
        if self._ui is not None:
            self._ui.take(settings)

    def drain(self) -> None:
        """Take no more from queues, and tell probes so. Requests on connections that are open yet are answered."""
        self.health.draining = True
        for queue in self._queues:
            queue.stop()

    async def open(self, tell_serving: Callable[[], None], servers: Sequence[asyncio.Server] = ()) -> None:
        """Wait for the database, then begin all work. Raises UserError where waiting would not help.

        `tell_serving` is called after the first try: whoever is refused for good never reads that it serves. Nor do
        `servers` answer before, unless it takes long: what comes while all is well is not turned away.
        """
        trying = asyncio.create_task(self._try_to_open())
        try:
            await asyncio.wait((trying,), timeout=ANSWER_SECONDS)
            if trying.done():
                trying.result()
            await begin_to_answer(servers)
            reason = await trying
        finally:
            trying.cancel()
            await asyncio.gather(trying, return_exceptions=True)
        tell_serving()
        while reason is not None:
            self.health.note_check("the database is not available")
            _log.warning("database_unavailable", reason=reason, next_try_in_seconds=RETRY_SECONDS)
            await asyncio.sleep(RETRY_SECONDS)
            reason = await self._try_to_open()

    async def _try_to_open(self) -> str | None:
        """Return None once everything works, or why the database can't be used now."""
        try:
            async with AsyncExitStack() as stack:
                await self._open(stack)
                self._opened = stack.pop_all()
                self.health.note_check(None)
        except DatabaseUnavailable as error:
            if not _may_pass(error.__cause__, embedded=not self._settings.database.url):
                raise
            return str(error)
        except FAILURES as error:
            return reason_of(error)
        return None

    async def _open(self, stack: AsyncExitStack) -> None:
        database = await stack.enter_async_context(composition.open_database(self._settings))
        pool = await self._pool(stack, database.dsn, PASS_CONNECTIONS, "reconciler")
        if self._reconciles:
            await refuse_outbox(pool, self._settings.outbox)
        receivers = api = ui = None
        if self._receives:
            # At least its writer's and one for everything else; never a connection that a pass could hold.
            size = max(2, self._settings.database.pool_max_size)
            receivers = await self._pool(stack, database.dsn, size, "reconciler receiver", None)
        if self._reconciles:  # a reload may name the first who may call or look: until they do, no connection is kept
            dsn, callers_known, page = database.dsn, bool(self._settings.api.tokens), is_wanted(self._settings)
            api = await self._pool(stack, dsn, API_CONNECTIONS, "reconciler api", API_LOCK_SECONDS, kept=callers_known)
            ui = await self._pool(stack, dsn, UI_CONNECTIONS, "reconciler ui", API_LOCK_SECONDS, kept=page)
        # Nothing begins before all that may fail: at the next try it would begin once more.
        if receivers is not None:
            await receivers.fetch(MAKE_PARTITIONS)
            await self._inbox.open(receivers)
            self._begin_receiving(receivers)
        self._api.pool = api
        if self._ui is not None:
            self._ui.pool = ui
        self._begin(pool, database)

    async def _pool(
        self,
        stack: AsyncExitStack,
        dsn: str,
        size: int,
        application: str,
        lock_seconds: float | None = composition.LOCK_SECONDS,
        *,
        kept: bool = True,
    ) -> BoundedPool:
        min_size = min(size, self._settings.database.pool_min_size) if kept else 0
        pool = await composition.open_pool(
            dsn, size=size, min_size=min_size, application=application, lock_seconds=lock_seconds
        )
        stack.push_async_callback(composition.close_pool, pool)
        return pool

    def _begin(self, pool: BoundedPool, database: composition.Database) -> None:
        self._worker("check", partial(self._check, pool, database.embedded), "database_unavailable", CHECK_SECONDS)
        note_feeds = self.health.note_feeds if self._receives else None
        passing = self._passes if self._reconciles else None
        self._works = partial(by_settings, pool=pool, who=self._who, passes=passing, note_feeds=note_feeds)
        works = self._works(self._settings)
        self._worker("figures", works["figures"], "figures_not_read", FIGURES_SECONDS)
        check = SelfCheck(self._who, reconciles=self._reconciles)
        self._worker("self check", partial(check.tell, pool), "self_check_not_told", TELL_SECONDS)
        self._take_back.append(partial(check.take_back, pool))
        if self._reconciles:
            self._worker("heartbeat", partial(self._heart.beat, pool), "heartbeat_failed", CHECK_SECONDS)
            every = self._settings.reconcile.every.total_seconds()
            passes = self._worker("pass", works["pass"], "pass_failed", every, PASS_PAUSE)
            self._worker("endpoints", works["endpoints"], "endpoints_not_checked", ENDPOINTS_SECONDS)
            self._worker("watch", works["watch"], "watch_failed", WATCH_SECONDS)
            self._worker("idempotency", partial(delete_old, pool), "idempotency_not_deleted", IDEMPOTENCY_SECONDS)
            self._worker("outbox", works["outbox"], "outbox_failed", OUTBOX_SECONDS)
            self._worker("caps", works["caps"], "caps_not_kept", CAPS_SECONDS)
            self._worker("prune", works["prune"], "prune_failed", PRUNE_SECONDS)
            dsn = self._settings.database.direct_url or database.dsn
            self._listener = asyncio.create_task(listen(dsn, passes), name="listener")
        self._clock.start()

    def _worker(
        self, name: str, work: Callable[[], Awaitable[object]], failed_event: str, every: float, pause: float = 0.0
    ) -> Worker:
        worker = Worker(name, work, failed_event, pause)
        self._workers.append(worker)
        self._tasks.append(asyncio.create_task(worker.run(), name=name))
        self._clock.every(every, worker)
        return worker

    async def close(self) -> None:
        """Commit what waits, let a running pass end, write the counters, close the database. May be called unopened."""
        async with self._opened:
            self._clock.stop()
            if self._listener is not None:
                self._listener.cancel()
                await asyncio.gather(self._listener, return_exceptions=True)
            try:
                await asyncio.gather(*(queue.finish() for queue in self._queues))
                await self._inbox.close()
            finally:
                await finish(self._workers, self._tasks, DRAIN_SECONDS)
            if self._flush is not None:
                await self._flush.attempt()
            if self._archive is not None:
                await close_archive(self._archive)
            await asyncio.gather(*(takes_back() for takes_back in self._take_back))

    def _passes(self, pool: BoundedPool, policies: Policies) -> Callable[[], Awaitable[None]]:
        looked_at_failed = -math.inf

        async def one_pass() -> None:
            nonlocal looked_at_failed
            began = time.monotonic()
            await self._heart.check(pool)  # a database that has gone back is suspect first: the pass releases nothing
            look_at_failed = began - looked_at_failed >= FAILED_ROWS_SECONDS
            report = await run_pass(pool, policies, who=self._who, look_at_failed=look_at_failed)
            if look_at_failed:
                looked_at_failed = began
            metrics.note_pass(report.counts, time.monotonic() - began)
            await self.traced.passed(pool, self._who, report.counts)
            await tell_pass(pool, self._who, report.counts)

        return one_pass

    async def _check(self, pool: BoundedPool, embedded: EmbeddedPostgres | None) -> None:
        """Ask the database whether it answers; an embedded one that was killed is started again."""
        try:
            await self._ask(pool)
        except (InboxUnavailable, *FAILURES) as error:
            self.health.note_check("the database is not available")
            if embedded is None:
                raise
            _log.warning("database_unavailable", reason=reason_of(error))
            await asyncio.to_thread(embedded.start)
            await self._ask(pool)

    async def _ask(self, pool: BoundedPool) -> None:
        try:
            with metrics.DATABASE_SECONDS.time():
                if self._receives:
                    await self._inbox.check()
                else:
                    async with asyncio.timeout(ACQUIRE_SECONDS):
                        await pool.execute(ASK)
        except InboxBusy as error:  # the receiver logs it; here it only turns requests away
            self.health.note_check(str(error))
        else:
            self.health.note_check(None)

    def _begin_receiving(self, pool: BoundedPool) -> None:
        async def make_partitions() -> None:
            await pool.fetch(MAKE_PARTITIONS)
            await self._inbox.refresh_partitions()

        flush = partial(self._counters.flush, pool)
        self._flush = self._worker("counters", flush, "counters_not_written", FLUSH_SECONDS)
        self._worker("partitions", make_partitions, "partitions_not_made", PARTITIONS_SECONDS)
        for queue in self._queues:
            queue.start()
        if self._archive is not None:
            every = min(self._settings.archive.every.total_seconds(), UPLOAD_SECONDS)
            self._worker("archive", self._archive.write, "archive_not_written", ARCHIVE_SECONDS)
            self._worker("archive upload", partial(upload, self._archive, pool), "archive_not_uploaded", every)
            self._take_back.append(partial(take_back, pool))


MAKE_PARTITIONS: Final = "SELECT provider_event_make_partitions()"
ASK: Final = "SELECT 1"


def _may_pass(cause: BaseException | None, *, embedded: bool) -> bool:
    """Say whether waiting may help: not with a wrong URL, account, password or database name, nor a wrong directory."""
    if isinstance(cause, ValueError | asyncpg.InvalidAuthorizationSpecificationError | asyncpg.InvalidCatalogNameError):
        return False
    return not embedded or isinstance(cause, ConnectionError | TimeoutError | asyncpg.PostgresError)
