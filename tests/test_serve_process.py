# SPDX-License-Identifier: Apache-2.0
"""`reconciler serve` as a real process, on real databases, from its first line to its exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from serving import LIMIT, Server, free_port, sample, serving, start, until, write_config

from reconciler.database.migrate import migrate
from reconciler.database.postgres import EmbeddedPostgres
from webhooks.event import wire_key


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    yield write_config(tmp_path)
    EmbeddedPostgres(tmp_path / "pg").stop()  # a killed process of a failed test left it running


@contextlib.asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(dsn, timeout=LIMIT)
    try:
        yield connection
    finally:
        await connection.close()


LISTENER_LIMIT = 30 + LIMIT
"""Seconds for which a listener is waited for, which rests for up to 30 s before it tries again."""


async def is_sent(connection: asyncpg.Connection, key: str, seconds: float = LIMIT) -> None:
    async def there() -> bool:
        return bool(await connection.fetchval("SELECT state = 'sent' FROM send_log WHERE wire_key = $1", key))

    await until(there, f"{key} to be sent", seconds)


async def exit_of(server: Server) -> tuple[int, list[str]]:
    return await server.ended(), server.errors


async def test_an_event_settles_its_claim_at_once_and_a_stop_leaves_everything_committed(config: Path) -> None:
    embedded = EmbeddedPostgres(config.parent / "pg")
    async with serving(config, RECONCILER_RECONCILE__EVERY="1h") as server:  # so only the notification can do it
        await server.becomes(200)
        key = wire_key("order.receipt:1")
        async with connected(embedded.dsn()) as connection:
            await connection.execute("CALL send_claim_commit($1, 'mg', '{}')", "order.receipt:1")
            assert await server.deliver("mg", sample("mg", "accepted", key)) == 200
            await is_sent(connection, key)
        assert await server.deliver("mg", sample("mg", "delivered", key)) == 200
        assert await server.deliver("nobody", sample("mg", "delivered", key)) == 404

        async def counted() -> bool:  # the pass is counted at its end, a moment after it has settled the row
            async with server.session.get(server.url + "/metrics") as answer:
                text = await answer.text()
            assert 'reconciler_deliveries_total{feed="mg",outcome="stored"} 2.0' in text
            return 'reconciler_verdicts_total{action="sent",reason="accepted"} 1.0' in text

        await until(counted, "the verdict to be counted")
        assert await server.stop() == 0
    named = [line["event"] for line in server.lines]  # what was begun, a prune say, ends between these two
    assert named.count("stopping") == 1
    assert named[-1] == "stopped"
    assert server.events("serving")[0]["database"] == f"embedded in {embedded.root.resolve()}"
    assert {(line["feed"], line["url"]) for line in server.events("feed_configured")} == {
        ("mg", f"{server.url}/webhooks/mg"),
        ("sg", f"{server.url}/webhooks/sg"),
        ("re", f"{server.url}/webhooks/re"),
    }
    assert not (embedded.data / "postmaster.pid").exists()  # the last user stops it
    embedded.start()
    try:
        async with connected(embedded.dsn()) as connection:
            kinds = [row["kind"] for row in await connection.fetch("SELECT kind FROM provider_event ORDER BY kind")]
            stored = await connection.fetchval("SELECT sum(n)::int FROM feed_delivery WHERE outcome = 'stored'")
    finally:
        embedded.stop()
    assert (kinds, stored) == (["delivered", "queued"], 2)


async def test_a_port_in_use_ends_it_with_one_line(config: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        async with aiohttp.ClientSession() as session:
            server = await start(config, session, RECONCILER_RECEIVER__PORT=str(port))
            status, errors = await exit_of(server)
    assert status == 1
    assert errors == [f"reconciler: port {port} on 127.0.0.1 is in use: stop the other program, or set receiver.port"]


async def test_whoever_is_answered_at_start_is_not_turned_away(config: Path, dsn: str) -> None:
    """So a balancer that tries another one where a connection is refused turns nobody away in a rolling restart."""
    port = free_port()
    async with aiohttp.ClientSession() as session:
        server = await start(config, session, RECONCILER_DATABASE__URL=dsn, RECONCILER_RECEIVER__PORT=str(port))
        server.url = f"http://127.0.0.1:{port}"

        async def first_answer() -> int:
            return await server.status("/readyz")

        try:
            assert await until(first_answer, "an answer") == 200
            assert await server.deliver("mg", sample("mg", "accepted", "key-1")) == 200
            assert await server.stop() == 0
        finally:
            if server.process.returncode is None:
                await server.kill()


@pytest.mark.parametrize(
    ("change", "reason"),
    [("no_such_database?", "no_such_database"), ("postgres?user=nobody_here&", "nobody_here")],
    ids=["database", "account"],
)
async def test_a_database_that_refuses_us_ends_it_with_one_line(
    config: Path, pg: EmbeddedPostgres, change: str, reason: str
) -> None:
    url = pg.dsn().replace("postgres@/postgres?", f"@/{change}" if "user=" in change else f"postgres@/{change}")
    async with aiohttp.ClientSession() as session:
        server = await start(config, session, RECONCILER_DATABASE__URL=url)
        status, errors = await exit_of(server)
    assert status == 1
    assert len(errors) == 1
    assert reason in errors[0]


async def test_an_old_schema_is_refused_with_the_command_that_helps(config: Path, empty_dsn: str) -> None:
    async with aiohttp.ClientSession() as session:
        server = await start(config, session, RECONCILER_DATABASE__URL=empty_dsn)
        status, errors = await exit_of(server)
    assert status == 1
    assert errors == ["reconciler: the database has no schema yet: run reconciler migrate"]
    assert not server.events("serving")


async def test_a_pass_that_moves_or_comes_to_hold_a_send_is_told_and_one_that_waits_is_not(
    config: Path, dsn: str
) -> None:
    rules = {"RECONCILER_RULES__GRACE": "0s", "RECONCILER_RECONCILE__EVERY": "100ms"}
    async with serving(config, RECONCILER_DATABASE__URL=dsn, **rules) as server, connected(dsn) as connection:
        await server.becomes(200)
        await connection.execute("CALL send_claim_commit('waits', 'mg', '{}')")
        await connection.execute("CALL send_claim_commit('key-1', 'mg', '{\"submit_within\": \"10ms\"}')")
        assert (await server.told("pass_done"))["counts"] == {"held:silent": 1}
        await connection.execute("UPDATE send_log SET next_check_at = now() WHERE state = 'claimed'")  # held as before

        async def looked_again() -> bool:
            return bool(await connection.fetchval("SELECT count(*) > 0 FROM pass WHERE counts @> '{\"waiting\": 1}'"))

        await until(looked_again, "a pass that looks at both")
        assert await server.deliver("mg", sample("mg", "accepted", "key-1")) == 200
        await is_sent(connection, "key-1")
        assert await server.stop() == 0
    assert [line["counts"] for line in server.events("pass_done")] == [{"held:silent": 1}, {"sent:accepted": 1}]


async def test_a_server_without_any_feed_warns(tmp_path: Path, dsn: str) -> None:
    config = tmp_path / "empty.toml"
    config.write_text("[receiver]\nport = 0\n")
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        assert (await server.told("no_feed"))["level"] == "warning"
        assert await server.stop() == 0


@pytest.fixture
def database(tmp_path: Path) -> Iterator[EmbeddedPostgres]:
    """A server of the test's own, not yet started: the test may kill it."""
    server = EmbeddedPostgres(tmp_path / "own", fast=True)
    yield server
    server.stop()
    shutil.rmtree(tmp_path / "own", ignore_errors=True)


async def test_case_097_a_database_that_is_away_is_waited_for_and_comes_back(
    config: Path, database: EmbeddedPostgres
) -> None:
    database.start()
    await migrate(database.dsn())
    database.stop()
    once = {"RECONCILER_RECONCILE__EVERY": "1h"}  # so only the listener can have a pass made
    async with serving(config, RECONCILER_DATABASE__URL=database.dsn(), **once) as server:
        await server.told("database_unavailable")
        await answers_as_without_database(server)
        database.start()
        await server.becomes(200)
        assert await server.deliver("mg", sample("mg", "accepted", "key-1")) == 200

        database.stop()
        await server.becomes(503)
        await answers_as_without_database(server)
        database.start()
        await server.becomes(200)
        delivery = sample("mg", "accepted", "key-2")
        assert await server.deliver("mg", delivery) == 200
        async with connected(database.dsn()) as connection:
            await connection.execute("CALL send_claim_commit('key-2', 'mg', '{}')")
            assert await server.deliver("mg", sample("mg", "delivered", "key-2")) == 200
            await is_sent(connection, "key-2", LISTENER_LIMIT)  # the listener is back, too
        assert await server.stop() == 0
    assert not [line for line in server.lines if "Traceback" in str(line)]
    assert server.errors == []


async def answers_as_without_database(server: Server) -> None:
    assert await server.status("/healthz") == 200
    assert await server.status("/readyz") == 503
    assert await server.deliver("mg", sample("mg", "accepted", "key-0")) == 503
    assert await server.status("/metrics") == 200


async def test_an_embedded_database_that_was_killed_is_started_again(config: Path) -> None:
    async with serving(config) as server:
        await server.becomes(200)
        first = int((config.parent / "pg/data/postmaster.pid").read_text().split()[0])
        os.kill(first, signal.SIGKILL)
        await server.told("database_unavailable")
        await server.becomes(200)
        assert await server.deliver("mg", sample("mg", "accepted", "key-1")) == 200
        assert await server.stop() == 0


async def test_a_stop_while_the_database_is_away_ends_it(config: Path, database: EmbeddedPostgres) -> None:
    async with serving(config, RECONCILER_DATABASE__URL=database.dsn()) as server:
        await server.told("database_unavailable")
        assert await server.stop() == 0
    assert server.events("stopped")


@contextlib.asynccontextmanager
async def locked(dsn: str, statement: str) -> AsyncIterator[asyncpg.Connection]:
    """Hold a lock that somebody else will wait for."""
    async with connected(dsn) as connection, connection.transaction():
        await connection.execute(statement)
        yield connection


async def somebody_waits(dsn: str, application: str, words: str) -> None:
    async with connected(dsn) as connection:

        async def there() -> bool:
            return bool(
                await connection.fetchval(
                    "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()"
                    " AND wait_event_type = 'Lock' AND application_name = $1 AND query LIKE '%' || $2 || '%'",
                    application,
                    words,
                )
            )

        await until(there, f"{application} to wait with {words}")


async def test_a_stuck_pass_stops_no_delivery_and_a_stop_waits_for_its_end(config: Path, dsn: str) -> None:
    async with serving(config, RECONCILER_DATABASE__URL=dsn, RECONCILER_RECONCILE__EVERY="1h") as server:
        await server.becomes(200)
        async with connected(dsn) as connection:
            await connection.execute("CALL send_claim_commit('key-1', 'mg', '{}')")
        async with locked(dsn, "SELECT FROM send_log WHERE wire_key = 'key-1' FOR UPDATE"):
            assert await server.deliver("mg", sample("mg", "accepted", "key-1")) == 200
            await somebody_waits(dsn, "reconciler", "FROM send_log")
            assert await server.deliver("mg", sample("mg", "delivered", "key-1")) == 200
            server.process.terminate()
            await server.told("stopping")
            assert server.process.returncode is None
        assert await server.ended() == 0
    async with connected(dsn) as connection:
        assert await connection.fetchval("SELECT state FROM send_log") == "sent"
        assert await connection.fetchval("SELECT count(*) FROM pass WHERE ended_at IS NULL") == 0


async def test_a_request_in_flight_at_the_stop_is_stored_and_answered(config: Path, dsn: str) -> None:
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        async with locked(dsn, "LOCK TABLE provider_event IN SHARE MODE"):
            posting = asyncio.create_task(server.deliver("mg", sample("mg", "accepted", "key-1")))
            await somebody_waits(dsn, "reconciler receiver", "INSERT INTO provider_event")
            server.process.terminate()
            await server.becomes(0, "/healthz")  # it listens no more
            assert not posting.done()
        assert await posting == 200
        assert await server.ended() == 0
    async with connected(dsn) as connection:
        assert await connection.fetchval("SELECT count(*) FROM provider_event") == 1
        assert await connection.fetchval("SELECT n FROM feed_delivery WHERE outcome = 'stored'") == 1


@pytest.mark.usefixtures("interruptible")
async def test_a_second_signal_exits_at_once(config: Path, dsn: str) -> None:
    async with serving(config, RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        async with locked(dsn, "LOCK TABLE provider_event IN SHARE MODE"):
            posting = asyncio.create_task(server.deliver("mg", sample("mg", "accepted", "key-1")))
            await somebody_waits(dsn, "reconciler receiver", "INSERT INTO provider_event")
            server.process.send_signal(signal.SIGINT)
            await server.told("stopping")
            server.process.send_signal(signal.SIGINT)
            assert await server.ended() == 128 + signal.SIGINT
        assert await posting == 0


async def test_a_receiver_alone_needs_no_send_log(config: Path, dsn: str) -> None:
    async with connected(dsn) as connection:
        await connection.execute("DROP TABLE send_log CASCADE")
    async with serving(config, "--only", "receiver", RECONCILER_DATABASE__URL=dsn) as server:
        await server.becomes(200)
        assert await server.deliver("re", sample("re", "delivered", "key-1")) == 200
        assert await server.stop() == 0
    assert not server.events("pass_failed")


async def test_a_reconciler_alone_settles_evidence_and_takes_none(config: Path, dsn: str) -> None:
    async with (
        serving(
            config, "--only", "reconciler", RECONCILER_DATABASE__URL=dsn, RECONCILER_RECONCILE__EVERY="1h"
        ) as passes,
        serving(config, "--only", "receiver", RECONCILER_DATABASE__URL=dsn) as receiver,
        connected(dsn) as connection,
    ):
        await passes.becomes(200)
        await receiver.becomes(200)
        await connection.execute("CALL send_claim_commit('key-1', 'mg', '{}')")
        delivery = sample("mg", "accepted", "key-1")
        assert await passes.deliver("mg", delivery) == 404
        assert await receiver.deliver("mg", delivery) == 200
        await is_sent(connection, "key-1")
        assert await passes.stop() == 0
        assert await receiver.stop() == 0


async def test_a_pass_that_fails_is_one_line_and_the_process_goes_on(config: Path, dsn: str) -> None:
    async with connected(dsn) as connection:
        await connection.execute("ALTER TABLE pass RENAME TO elsewhere")
        async with serving(config, RECONCILER_DATABASE__URL=dsn, RECONCILER_RECONCILE__EVERY="100ms") as server:
            line = await server.told("pass_failed")
            assert await server.deliver("mg", sample("mg", "accepted", "key-1")) == 200
            await connection.execute("ALTER TABLE elsewhere RENAME TO pass")

            async def ended() -> bool:
                return bool(await connection.fetchval("SELECT count(*) > 0 FROM pass WHERE ended_at IS NOT NULL"))

            await until(ended, "a pass that ends")
            assert await server.stop() == 0
    said = "the database's schema is not this program's (relation \"pass\" does not exist): run reconciler migrate"
    assert line["reason"] == said
    assert "exception" not in line
