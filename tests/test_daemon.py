# SPDX-License-Identifier: Apache-2.0
"""When work runs, what probes answer and what is measured: the parts of the daemon, without its process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import aiohttp
import asyncpg
import pytest
from aiohttp import web
from kit import call, event, old_claim, state
from prometheus_client import REGISTRY
from receiver_app import Cut
from sends_kit import SETTINGS as API
from structlog.testing import capture_logs

from reconciler import metrics
from reconciler.composition import policies
from reconciler.configuration.settings import Settings
from reconciler.configuration.tables import DatabaseSettings, ReceiverSettings
from reconciler.errors import UserError
from reconciler.metrics import FeedFigures
from reconciler.serving import scheduler
from reconciler.serving.daemon import Daemon, _may_pass
from reconciler.serving.health import REFUSALS, STALE, Health
from reconciler.serving.process import begin_to_answer, take_ports, urls_of
from reconciler.serving.scheduler import Clock, Worker, finish, listen
from webhooks.fetch import open_fetch
from webhooks.metrics import UNKNOWN_FEED
from webhooks.receiver import make_runner

LIMIT = 10.0


async def within(awaitable: Awaitable[object]) -> None:
    async with asyncio.timeout(LIMIT):
        await awaitable


@contextlib.asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(worker.run(), name=worker.name)
    yield task
    await finish([worker], [task], LIMIT)


class Work:
    """Counts what is begun and ended; `go` lets it end."""

    def __init__(self) -> None:
        self.begun = asyncio.Queue[float]()
        self.ended = 0
        self.go = asyncio.Semaphore(0)

    async def __call__(self) -> None:
        self.begun.put_nowait(time.monotonic())
        await self.go.acquire()
        self.ended += 1


async def test_wishes_during_the_work_are_remembered_and_become_one_more_run() -> None:
    work = Work()
    worker = Worker("test", work, "test_failed")
    async with running(worker):
        worker.wish()
        await within(work.begun.get())
        for _ in range(10):
            worker.wish()
        work.go.release()
        await within(work.begun.get())
        work.go.release()
    assert work.ended == 2
    assert work.begun.empty()


async def test_work_never_runs_twice_at_once() -> None:
    work = Work()
    worker = Worker("test", work, "test_failed")
    async with running(worker):
        worker.wish()
        await within(work.begun.get())
        worker.wish()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(work.begun.get(), 0.05)
        work.go.release()
        work.go.release()
        await within(work.begun.get())


async def test_an_idle_worker_begins_at_once_and_the_next_run_keeps_the_pause() -> None:
    idle, work = Work(), Work()
    idle.go.release()
    async with running(worker := Worker("test", idle, "test_failed", pause=3600.0)):
        worker.wish()
        await within(idle.begun.get())
    async with running(worker := Worker("test", work, "test_failed", pause=0.5)):
        asked_at = time.monotonic()
        worker.wish()
        await within(work.begun.get())
        worker.wish()
        work.go.release()
        second = await asyncio.wait_for(work.begun.get(), LIMIT)
        work.go.release()
    assert second - asked_at >= 0.499


async def test_case_086_shutdown_waits_for_the_work_under_way_and_does_not_cancel_it() -> None:
    work = Work()
    worker = Worker("test", work, "test_failed")
    task = asyncio.create_task(worker.run())
    worker.wish()
    await within(work.begun.get())
    finishing = asyncio.create_task(finish([worker], [task], LIMIT))
    for _ in range(10):
        await asyncio.sleep(0)  # it has begun to wait
    worker.wish()  # after the stop: not begun any more
    work.go.release()
    await within(finishing)
    assert work.ended == 1
    assert work.begun.empty()


async def test_work_that_outlasts_the_limit_at_shutdown_is_cancelled_and_told() -> None:
    work = Work()
    worker = Worker("slow", work, "test_failed")
    task = asyncio.create_task(worker.run(), name="slow")
    worker.wish()
    await within(work.begun.get())
    with capture_logs() as logs:
        await within(finish([worker], [task], 0.01))
    assert task.cancelled()
    assert [(line["event"], line["work"]) for line in logs] == [("work_cancelled", "slow")]


async def test_work_that_fails_is_told_in_one_line_counted_and_done_again() -> None:
    failures = iter([OSError("no route\nto host"), OSError("no route\nto host"), ValueError("odd")])
    succeeded = asyncio.Event()

    async def work() -> None:
        for error in failures:
            raise error
        succeeded.set()

    def failed() -> float:
        return REGISTRY.get_sample_value("reconciler_work_failed_total", {"work": "failing"}) or 0.0

    before = failed()
    worker = Worker("failing", work, "test_failed")
    with capture_logs() as logs:
        assert [await worker.attempt() for _ in range(4)] == [False, False, False, True]
    assert succeeded.is_set()
    assert failed() - before == 3
    told = [(line["log_level"], line["reason"]) for line in logs if line["event"] == "test_failed"]
    assert told == [("warning", "OSError: no route to host"), ("error", "ValueError: odd")]
    assert {line["log_level"] for line in logs if "exc_info" in line} == {"debug"}
    assert [line["work"] for line in logs if line["event"] == "work_recovered"] == ["failing"]


async def test_what_the_database_details_of_a_row_is_not_logged(db: asyncpg.Pool) -> None:
    with pytest.raises(asyncpg.UniqueViolationError) as caught:
        await db.execute("INSERT INTO feed_state (feed) VALUES ('*')")
    assert "Key (feed)=(*)" in str(caught.value)
    assert "(*)" not in scheduler.reason_of(caught.value)


async def test_case_087_a_blocked_loop_delays_a_tick_and_does_not_drop_it() -> None:
    work = Work()
    worker = Worker("blocked", work, "test_failed")
    clock = Clock()
    clock.every(3600, worker)
    async with running(worker):
        clock.start()
        time.sleep(1.2)  # noqa: ASYNC251 - the loop is blocked on purpose, for longer than apscheduler's default grace
        await within(work.begun.get())
        work.go.release()
        clock.stop()
    assert work.ended == 1
    assert REGISTRY.get_sample_value("reconciler_ticks_missed_total", {"work": "blocked", "cause": "missed"}) is None


class Counted(Worker):
    """Counts its wishes."""

    def __init__(self, work: Work) -> None:
        super().__init__("ticked", work, "test_failed")
        self.wishes = 0
        self.third = asyncio.Event()

    def wish(self, *_: object) -> None:
        self.wishes += 1
        if self.wishes == 3:
            self.third.set()
        super().wish()


async def test_ticks_that_come_during_the_work_become_one_more_run() -> None:
    work = Work()
    worker = Counted(work)
    clock = Clock()
    clock.every(0.02, worker)
    clock.start()
    async with running(worker):
        await within(work.begun.get())
        await within(worker.third.wait())
        clock.stop()
        work.go.release()
        await within(work.begun.get())
        work.go.release()
    assert work.ended == 2


async def listener_pid(db: asyncpg.Pool) -> int:
    async with asyncio.timeout(LIMIT):
        while True:
            pid: int | None = await db.fetchval(
                "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
            )
            if pid is not None:
                return pid
            await asyncio.sleep(0.01)


async def test_a_notification_wakes_the_work_and_a_lost_connection_is_made_again(
    dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "FIRST_PAUSE", 0.01)
    work = Work()
    for _ in range(100):
        work.go.release()
    worker = Worker("listening", work, "test_failed")
    listening = asyncio.create_task(listen(dsn, worker))
    async with running(worker):
        await within(work.begun.get())  # it looks once when it begins to listen
        pid = await listener_pid(db)
        await db.execute("SELECT pg_notify('evidence', '')")
        await within(work.begun.get())
        assert await db.fetchval("SELECT pg_terminate_backend($1, 10000)", pid)  # true once it is gone
        await within(work.begun.get())  # something may have been missed
        assert await listener_pid(db) != pid
        await db.execute("SELECT pg_notify('evidence', '')")
        await within(work.begun.get())
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


@contextlib.asynccontextmanager
async def false_server_pid(dsn: str) -> AsyncIterator[str]:
    """Another address of the database that gives out a made-up process id, as a pooler does."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    path = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                head, key, rest = data.partition(b"K\x00\x00\x00\x0c")
                writer.write(head + key + (b"\x00\x00\x00\x01" + rest[4:] if key else b""))
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(path)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"postgresql://postgres@127.0.0.1:{server.sockets[0].getsockname()[1]}{parts.path}?sslmode=disable"


async def test_behind_a_pooler_listening_ends_with_one_line_and_the_timer_decides(dsn: str) -> None:
    worker = Worker("pooled", Work(), "test_failed")
    async with false_server_pid(dsn) as pooled:
        with capture_logs() as logs:
            await within(listen(pooled, worker))
    assert [line["event"] for line in logs] == ["notifications_unavailable"]


def app_of(health: Health) -> web.Application:
    app = web.Application()
    health.add_routes(app)
    return app


class Ticking:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_ready_means_checked_lately_and_not_draining() -> None:
    seconds = Ticking()
    health = Health(["mg"], seconds)
    assert health.problem() == "starting"
    health.note_check(None)
    assert health.problem() is None
    seconds.now += STALE + 1
    assert health.problem() == "the database was not checked lately"
    health.note_check("the database is not available")
    assert health.problem() == "the database is not available"
    health.note_check(None)
    health.draining = True
    assert health.problem() == "draining"


async def test_probes_tell_liveness_and_readiness_apart(aiohttp_client: Callable[..., Awaitable[object]]) -> None:
    health = Health(["mg"])
    client = await aiohttp_client(app_of(health))
    assert (await client.get("/healthz")).status == 200
    assert (await client.get("/readyz")).status == 503
    health.note_check(None)
    health.note_feeds({"mg": FeedFigures(datetime(2026, 1, 2, tzinfo=UTC), None, 0)})
    answer = await client.get("/readyz")
    assert answer.status == 200
    assert await answer.json() == {
        "ready": True,
        "problem": None,
        "feeds": {
            "mg": {
                "stored_at": "2026-01-02T00:00:00+00:00",
                "refused_at": None,
                "refused_in_a_row": 0,
                "healthy": True,
            }
        },
    }
    health.draining = True
    assert (await client.get("/readyz")).status == 503
    assert (await client.get("/healthz")).status == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_probes_and_metrics_take_nothing_but_get_and_head(
    aiohttp_client: Callable[..., Awaitable[object]], path: str
) -> None:
    client = await aiohttp_client(app_of(Health([])))
    assert [(await client.request(method, path)).status for method in ("POST", "PUT", "DELETE")] == [405] * 3


async def test_metrics_are_served_in_the_format_of_prometheus(
    aiohttp_client: Callable[..., Awaitable[object]],
) -> None:
    client = await aiohttp_client(app_of(Health([])))
    answer = await client.get("/metrics")
    assert answer.status == 200
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert "# TYPE reconciler_pass_seconds histogram" in await answer.text()


def refusing(n: int) -> dict[str, FeedFigures]:
    return {"mg": FeedFigures(None, datetime(2026, 1, 2, tzinfo=UTC), n)}


def test_a_feed_that_refuses_everything_is_an_error_once_a_streak() -> None:
    health = Health(["mg"])
    with capture_logs() as logs:
        for n in (REFUSALS - 1, REFUSALS, REFUSALS + 5, 0, REFUSALS):
            health.note_feeds(refusing(n))
    assert [(line["log_level"], line["event"], line["feed"]) for line in logs] == [
        ("error", "feed_refuses_everything", "mg")
    ] * 2


def test_a_feed_that_is_not_configured_any_more_alarms_nobody() -> None:
    health = Health([])
    with capture_logs() as logs:
        health.note_feeds(refusing(REFUSALS))
    assert logs == []


NOTE = """
INSERT INTO feed_delivery (feed, minute, outcome, n, last_at)
SELECT $1, date_trunc('minute', at), $2, $3, at FROM (SELECT now() - $4::float8 * interval '1 minute' AS at) AS t
"""


async def test_refusals_in_a_row_count_from_the_newest_good_delivery(db: asyncpg.Pool) -> None:
    await db.execute(NOTE, "mg", "refused:signature", 7, 30.0)
    await db.execute(NOTE, "mg", "stored", 1, 20.0)
    await db.execute(NOTE, "mg", "refused:signature", 3, 10.0)
    await db.execute(NOTE, "mg", "refused:stale", 2, 5.0)
    await db.execute(NOTE, "mg", "later:database", 9, 4.0)
    await db.execute(NOTE, "mg", "refused:missing", 40, 4.0)
    await db.execute(NOTE, "sg", "refused:topic", 4, 3.0)
    await db.execute(NOTE, "old", "refused:missing", 4, 60.0 * 24 + 2)
    feeds = await metrics.read_feeds(db)
    assert {feed: figures.refused_in_a_row for feed, figures in feeds.items()} == {"mg": 5, "sg": 4}
    assert feeds["mg"].stored_at is not None
    assert feeds["mg"].refused_at is not None
    assert feeds["mg"].stored_at < feeds["mg"].refused_at
    assert feeds["sg"].stored_at is None
    assert REGISTRY.get_sample_value("reconciler_feed_refused_in_a_row", {"feed": "mg"}) == 5


async def test_what_was_posted_to_feeds_that_nobody_has_is_no_streak_of_a_feed(db: asyncpg.Pool) -> None:
    await db.execute(NOTE, UNKNOWN_FEED, "refused:unknown_feed", 70, 3.0)
    assert await metrics.read_feeds(db) == {}
    assert REGISTRY.get_sample_value("reconciler_feed_refused_in_a_row", {"feed": UNKNOWN_FEED}) is None


async def test_a_streak_of_refusals_that_is_a_day_old_is_told_no_more(db: asyncpg.Pool) -> None:
    await db.execute(NOTE, "mg", "refused:signature", 7, 30.0)
    await metrics.read_feeds(db)
    await db.execute("UPDATE feed_delivery SET minute = minute - interval '1 day'")
    await metrics.read_feeds(db)
    assert REGISTRY.get_sample_value("reconciler_feed_refused_in_a_row", {"feed": "mg"}) is None


def sends(state: str, held: str = "") -> float | None:
    return REGISTRY.get_sample_value("reconciler_sends", {"state": state, "held": held})


async def test_figures_tell_undecided_sends_by_state_and_hold_and_their_ages(db: asyncpg.Pool) -> None:
    for key in ("a", "b", "c", "done"):
        await db.execute("CALL send_claim_commit($1, 'mg', '{}')", key)
    await db.execute("UPDATE send_log SET held_reason = 'silent', held_since = now() WHERE wire_key = 'b'")
    await db.execute("UPDATE send_log SET claimed_at = claimed_at - interval '1 hour' WHERE wire_key = 'a'")
    fence = await db.fetchval("SELECT fence FROM send_log WHERE wire_key = 'c'")
    await db.execute("SELECT send_fail('c', $1, 'refused', true)", fence)
    await db.execute("UPDATE send_log SET released_at = now() - interval '10 minutes' WHERE wire_key = 'c'")
    await db.execute("SELECT send_confirm('done', fence, 'id', '{}') FROM send_log WHERE wire_key = 'done'")
    await metrics.read_undecided(db)
    assert (sends("claimed"), sends("claimed", "silent"), sends("released")) == (1, 1, 1)
    assert REGISTRY.get_sample_value("reconciler_oldest_claimed_seconds") == pytest.approx(3600, abs=60)
    assert REGISTRY.get_sample_value("reconciler_oldest_released_seconds") == pytest.approx(600, abs=60)
    await db.execute("DELETE FROM send_log")
    await metrics.read_undecided(db)
    assert (sends("claimed"), sends("claimed", "silent"), sends("released")) == (0, None, 0)
    assert REGISTRY.get_sample_value("reconciler_oldest_claimed_seconds") == 0


async def test_a_schema_that_is_lost_or_another_one_is_told_as_commands_tell_it(empty_dsn: str) -> None:
    connection = await asyncpg.connect(empty_dsn)
    try:
        with pytest.raises(asyncpg.UndefinedTableError) as caught:
            await connection.fetch("SELECT FROM send_log")
    finally:
        await connection.close()
    assert scheduler.reason_of(caught.value) == (
        "the database's schema is not this program's (relation \"send_log\" does not exist): run reconciler migrate"
    )


def test_verdicts_of_a_pass_are_counted_by_action_and_reason() -> None:
    def counted(action: str, reason: str) -> float:
        return REGISTRY.get_sample_value("reconciler_verdicts_total", {"action": action, "reason": reason}) or 0.0

    before = counted("released", "absent"), counted("waiting", "")
    metrics.note_pass({"released:absent": 2, "waiting": 3, "outcomes": 9, "retried": 1}, 0.5)
    assert (counted("released", "absent"), counted("waiting", "")) == (before[0] + 2, before[1] + 3)
    assert counted("outcomes", "") == 0


@pytest.mark.parametrize(
    ("cause", "embedded", "waits"),
    [
        (ConnectionRefusedError(111, "refused"), False, True),
        (OSError(-2, "Name or service not known"), False, True),
        (TimeoutError(), False, True),
        (asyncpg.CannotConnectNowError("the database system is starting up"), False, True),
        (asyncpg.InvalidPasswordError("password authentication failed"), False, False),
        (asyncpg.InvalidAuthorizationSpecificationError("no pg_hba.conf entry"), False, False),
        (asyncpg.InvalidCatalogNameError("database does not exist"), False, False),
        (ValueError("no URL"), False, False),
        (ConnectionRefusedError(111, "refused"), True, True),
        (PermissionError(13, "denied"), True, False),
        (None, True, False),
    ],
)
def test_only_a_database_that_may_come_back_is_waited_for(
    cause: BaseException | None, embedded: bool, waits: bool
) -> None:
    assert _may_pass(cause, embedded=embedded) is waits


@contextlib.asynccontextmanager
async def ports(daemon: Daemon, settings: Settings) -> AsyncIterator[list[asyncio.Server]]:
    """What has the port of a receiver."""
    async with contextlib.AsyncExitStack() as stack:
        fetch = await stack.enter_async_context(open_fetch())
        runner = make_runner(daemon.app(fetch), 1)
        stack.push_async_callback(runner.cleanup)
        yield await take_ports(stack, runner, settings)


async def test_a_database_that_hangs_at_start_keeps_nobody_from_being_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reconciler.serving.daemon.ANSWER_SECONDS", 0.1)
    silent = socket.create_server(("127.0.0.1", 0))  # connections wait for ever
    port = silent.getsockname()[1]
    settings = Settings(
        database=DatabaseSettings(url=f"postgresql://nobody@127.0.0.1:{port}/none"), receiver=ReceiverSettings(port=0)
    )
    daemon, told = Daemon(settings, "receiver"), list[str]()
    with silent:
        async with ports(daemon, settings) as servers, aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"{urls_of(servers)[0]}/readyz")
            opening = asyncio.create_task(daemon.open(lambda: told.append("serving"), servers))
            async with asyncio.timeout(LIMIT):
                while not servers[0].is_serving():  # noqa: ASYNC110 - nobody tells it
                    await asyncio.sleep(0)
                async with session.get(f"{urls_of(servers)[0]}/readyz") as answer:
                    assert (answer.status, (await answer.json())["problem"]) == (503, "starting")
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
            assert told == []


async def test_of_two_that_had_a_port_before_anybody_listened_one_is_refused_in_words() -> None:
    settings = Settings(receiver=ReceiverSettings(port=0))
    async with ports(Daemon(settings, "receiver"), settings) as first:
        port = first[0].sockets[0].getsockname()[1]
        same = Settings(receiver=ReceiverSettings(port=port))
        async with ports(Daemon(same, "receiver"), same) as second:
            await begin_to_answer(first)
            with pytest.raises(UserError, match=f"port {port} on 127.0.0.1 is in use"):
                await begin_to_answer(second)


@pytest.mark.parametrize("pool", ["receiver", "api", "ui"])
async def test_a_database_that_refuses_the_last_connections_at_first_is_waited_for_and_nothing_begins_twice(
    dsn: str, sockets: Path, monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    monkeypatch.setattr("reconciler.serving.daemon.RETRY_SECONDS", 0.1)
    async with Cut(dsn, sockets) as cut, aiohttp.ClientSession() as session:
        settings = Settings(database=DatabaseSettings(url=cut.dsn), receiver=ReceiverSettings(port=0), api=API)
        cut.refused = f"application_name\0reconciler {pool}\0".encode()
        daemon = Daemon(settings, None)
        with capture_logs() as logs:
            async with ports(daemon, settings) as servers:
                try:
                    await within(daemon.open(lambda: setattr(cut, "refused", b""), servers))
                    await within(becomes_ready(session, urls_of(servers)[0]))
                finally:
                    await daemon.close()
    assert [line["event"] for line in logs].count("database_unavailable") == 1
    assert Path(os.environ["XDG_DATA_HOME"]) in settings.database.data_dir.parents, "no other test's, nor a person's"


async def test_late_evidence_of_a_failed_send_is_looked_for_every_five_minutes(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings()
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("reconciler.serving.daemon.time", SimpleNamespace(monotonic=lambda: clock.now))
    one_pass = Daemon(settings, None)._passes(db, policies(settings))
    await one_pass()
    for key in ("order:1", "order:2"):
        await old_claim(db, key)
        assert (await call(db, "operator_decide", key, "failed", "gave up", "ann"))["outcome"] == "failed"
        await event(db, key, message_id=key)
        for seconds, found in ((299, "failed"), (1, "sent")):
            clock.now += seconds
            await one_pass()
            assert await state(db, key) == found


async def becomes_ready(session: aiohttp.ClientSession, url: str) -> None:
    while True:
        async with session.get(f"{url}/readyz") as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.01)
