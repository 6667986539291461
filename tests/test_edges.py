# SPDX-License-Identifier: Apache-2.0
"""What anybody can throw at the edges: broken requests, vanishing clients, odd arguments. Nothing falls or floods."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import asyncpg
import pytest
from aiohttp.http_exceptions import BadHttpMessage
from click.testing import CliRunner
from receiver_app import PLAIN, running, signed
from serving import serving, write_config
from structlog.testing import capture_logs

from reconciler.cli.commands import cli
from reconciler.configuration.settings import ConfigError, load_settings
from reconciler.errors import UserError
from reconciler.serving.serve import serve
from webhooks import body as bodies
from webhooks.inbox import Inbox, InboxUnavailable
from webhooks.quiet import UnreadableRequests
from webhooks.receiver import Limits
from webhooks.registry import PROVIDERS
from webhooks.writer import Writer

HEAD = f"POST /webhooks/{PLAIN.name} HTTP/1.1\r\nHost: x\r\n"


def reasons(logs: list) -> list[tuple[str, str | None]]:
    return [(line["event"], line.get("reason")) for line in logs]


async def test_a_client_that_hangs_up_half_way_is_counted_and_logged_in_one_line(db: asyncpg.Pool, caplog) -> None:
    async with running(db) as app:
        with capture_logs() as logs:
            _, writer = await asyncio.open_connection("127.0.0.1", app.port)
            writer.write(f"{HEAD}Content-Length: 100\r\n\r\nhalf".encode())
            await writer.drain()
            writer.close()
            async with asyncio.timeout(20):
                while not logs:  # noqa: ASYNC110 - it happens in the server
                    await asyncio.sleep(0.01)
    assert reasons(logs) == [("delivery_refused", "cut_off")]
    assert not [record for record in caplog.records if record.exc_info]


async def test_bodies_of_strangers_together_are_bounded_and_what_is_too_much_is_put_off(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODIES_AT_ONCE", 2)
    limits = Limits(max_body=1_000_000)
    async with running(db, limits=limits) as app:
        connections = []
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
            writer.write(f"{HEAD}Content-Length: 999999\r\n\r\n".encode() + b" " * 900_000)
            connections.append((reader, writer))
        lines = [asyncio.create_task(reader.readline()) for reader, _ in connections]
        done, _ = await asyncio.wait(lines, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result().split()[1] for task in done] == [b"503"]
        small = b'[{"id": "1"}]'
        assert (await app.post(PLAIN.name, small, signed(small))).status == 200
        for _, writer in connections:
            writer.close()
        await asyncio.gather(*lines, return_exceptions=True)
        async with asyncio.timeout(20):
            while app.receiver._bodies._arriving:  # noqa: ASYNC110 - it happens in the server
                await asyncio.sleep(0.01)


def test_requests_that_are_no_http_become_one_line_a_minute_that_quotes_nothing() -> None:
    keep = UnreadableRequests()

    def record(error: Exception) -> logging.LogRecord:
        info = (type(error), error, None)
        return logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error handling request", (), info)

    with capture_logs() as logs:
        passed = [keep.filter(record(BadHttpMessage("Authorization: Basic c2VjcmV0"))) for _ in range(1000)]
    assert passed == [False] * 1000
    assert logs == [
        {"event": "request_unreadable", "error": "BadHttpMessage", "unlogged_before": 0, "log_level": "warning"}
    ]
    assert keep.filter(record(RuntimeError("a fault of ours")))


async def test_a_receiver_uses_that_filter(db: asyncpg.Pool) -> None:
    async with running(db) as app:
        with capture_logs() as logs:
            reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
    assert [line["event"] for line in logs] == ["request_unreadable"]


async def test_a_database_that_is_away_does_not_fill_the_log(db: asyncpg.Pool) -> None:
    writer = Writer(db, 1)
    with capture_logs() as logs:
        for _ in range(1000):
            writer.report(ConnectionRefusedError(), 1)
    assert [line["event"] for line in logs] == ["inbox_not_stored"]


async def test_a_read_only_database_is_not_ready(db: asyncpg.Pool, dsn: str) -> None:
    name = await db.fetchval("SELECT current_database()")
    await db.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        inbox = Inbox()
        await inbox.open(pool)
        with pytest.raises(InboxUnavailable, match="read-only"):
            await inbox.check()
        await inbox.close()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT '4000-01-01 BC'::timestamptz",
        "SELECT '20000-01-01'::date",
        "SELECT '24:00'::time",
        "COPY (SELECT 1) TO STDOUT",
        "/* x */ copy pass from stdin",
    ],
)
def test_sql_that_only_psql_can_show_is_refused_in_one_line(sql: str, dsn: str, tmp_path: Path) -> None:
    done = run(dsn, tmp_path, "psql", "-c", sql)
    assert (done.exit_code, done.stdout, len(done.stderr.splitlines())) == (1, "", 1)


@pytest.fixture
def dsn_less(tmp_path: Path) -> str:
    return f"postgresql://nobody@/none?host={tmp_path}"


def run(dsn: str, folder: Path, *args: str):
    config = folder / "reconciler.toml"
    config.write_text('[feeds.mg]\nprovider = "mailgun"\nsecrets = ["key-0123456789abcdef"]\n')
    env = {"RECONCILER_CONFIG": str(config), "RECONCILER_DATABASE__URL": dsn}
    done = CliRunner().invoke(cli, args, env=env)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_an_empty_feed_never_means_all_feeds(verb: str, dsn_less: str, tmp_path: Path) -> None:
    done = run(dsn_less, tmp_path, verb, "--feed", "", "--reason", "x")
    assert (done.exit_code, "not empty" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    "args",
    [
        ("psql", "-c", "SELECT '\udcff'"),
        ("pause", "--reason", "\udcff"),
        ("status", "--feed", "\udcff"),
        ("why", "\udcff"),
    ],
)
def test_arguments_that_are_not_utf8_are_wrong_usage(args: tuple[str, ...], dsn_less: str, tmp_path: Path) -> None:
    assert run(dsn_less, tmp_path, *args).exit_code == 2


def test_an_error_steers_no_terminal_and_stays_one_line(dsn: str, tmp_path: Path) -> None:
    done = run(dsn, tmp_path, "why", "a\nb\x1b[31m")
    assert done.stderr == "reconciler: a\\nb\\x1b[31m: no send and no event has this key\n"


def test_a_password_in_the_receivers_url_is_not_shown(dsn_less: str, tmp_path: Path) -> None:
    url = "http://me:throw-away@127.0.0.1:1"
    done = run(dsn_less, tmp_path, "trigger", "delivered", "--feed", "mg", "--key", "k", "--url", url)
    assert (done.exit_code, "throw-away" in done.output) == (1, False)


@pytest.mark.parametrize(
    "text",
    ['[database]\ndata_dir = "~nobody-of-this-name/x"', '[database]\ndata_dir = "a\\u0000b"', "a = " + "[" * 5000],
)
def test_odd_settings_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    file = tmp_path / "reconciler.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_settings(file, {}, PROVIDERS)
    assert isinstance(refused.value, UserError)
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize("host", ["a..b", "x" * 300])
async def test_a_host_that_is_no_name_ends_serve_with_one_line(host: str, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    settings = load_settings(config, {"RECONCILER_RECEIVER__HOST": host}, PROVIDERS)
    with pytest.raises(UserError, match="no name of a host"):
        await serve(settings)


async def test_a_second_signal_ends_serve_though_its_database_hangs(tmp_path: Path) -> None:
    async with serving(write_config(tmp_path)) as server:
        await server.becomes(200)
        postmaster = int((tmp_path / "pg/data/postmaster.pid").read_text().split()[0])
        os.kill(postmaster, signal.SIGSTOP)
        try:
            server.process.send_signal(signal.SIGTERM)
            await server.told("stopping")
            # Idle as it was, it comes to wait for the frozen server's end soon; told then, it goes at once.
            await asyncio.sleep(1)
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                assert await server.ended() == 128 + signal.SIGTERM
        finally:
            os.kill(postmaster, signal.SIGCONT)
            os.kill(postmaster, signal.SIGINT)
