# SPDX-License-Identifier: Apache-2.0
"""`reconciler serve --only receiver --workers N`: several processes on one port that stand and fall together."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from program import Program
from serving import FEEDS, Server, sample, serving, start, until, write_config
from structlog.testing import capture_logs

from reconciler.serving import workers
from webhooks.event import wire_key
from webhooks.provider import Delivery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux spreads connections over sockets")

WORKERS = 2
ARGUMENTS = ("--only", "receiver", "--workers", str(WORKERS))


def place(dsn: str, port: int) -> dict[str, str]:
    return {"RECONCILER_DATABASE__URL": dsn, "RECONCILER_RECEIVER__PORT": str(port)}


@pytest.fixture
def port() -> int:
    """The first of three ports in a row that nobody listens on."""
    for first in random.sample(range(20_000, 30_000), 1_000):
        with suppress(OSError):
            for number in range(WORKERS + 1):
                socket.create_server(("127.0.0.1", first + number)).close()
            return first
    raise AssertionError("no three free ports in a row")


@pytest.fixture
async def server(tmp_path: Path, dsn: str, port: int) -> AsyncIterator[Server]:
    async with serving(write_config(tmp_path), *ARGUMENTS, **place(dsn, port)) as server:
        for number in (1, 2):
            await alone(server, number)
        yield server


async def alone(server: Server, number: int) -> None:
    """Wait until a worker answers at the port that only it has."""

    async def ready() -> bool:
        with suppress(aiohttp.ClientError):
            async with server.session.get(own(server, number) + "/readyz") as answer:
                return answer.status == 200
        return False

    await until(ready, f"worker {number} to be ready")


def own(server: Server, number: int) -> str:
    """Return the address of one worker."""
    host, _, port = server.url.rpartition(":")
    return f"{host}:{int(port) + number}"


async def stored(server: Server, number: int) -> int:
    """Return how many deliveries a worker says it stored."""
    async with server.session.get(own(server, number) + "/metrics") as answer:
        found = re.search(
            r'^reconciler_deliveries_total\{feed="mg",outcome="stored"\} (\d+)', await answer.text(), re.MULTILINE
        )
        return int(found[1]) if found else 0


async def deliver_many(server: Server, keys: Iterable[str]) -> list[int]:
    """Deliver one event a connection, so that both workers get some; 0 stands for no answer."""
    return [await _delivered(server, sample("mg", "accepted", wire_key(key))) for key in keys]


async def _delivered(server: Server, delivery: Delivery) -> int:
    headers = {**delivery.headers, "connection": "close"}
    with suppress(aiohttp.ClientError):
        async with server.session.post(server.url + "/webhooks/mg", data=delivery.body, headers=headers) as answer:
            return answer.status
    return 0


def pid(server: Server, number: int) -> int:
    """Return the newest process of a worker."""
    return [int(line["pid"]) for line in server.events("worker_started") if line["worker"] == number][-1]


async def test_workers_share_a_port_and_each_tells_its_own_figures(server: Server, db: asyncpg.Pool) -> None:
    keys = [f"order:{n}" for n in range(24)]
    assert await deliver_many(server, keys) == [200] * 24
    shares = [await stored(server, number) for number in (1, 2)]
    assert sum(shares) == 24
    assert min(shares) > 0
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 24
    async with server.session.get(server.url + "/metrics") as answer:
        assert answer.status == 421
        assert "each worker" in (await answer.json())["detail"]
    assert await server.status("/healthz") == 200
    assert await server.stop() == 0
    assert [line["worker"] for line in server.events("stopped")] in ([1, 2], [2, 1])


async def test_a_worker_that_dies_is_started_again_while_the_other_receives(
    server: Server, db: asyncpg.Pool, tmp_path: Path
) -> None:
    (tmp_path / "webhooks").mkdir()  # an application's own, in the folder that `serve` was started in
    (tmp_path / "webhooks" / "__init__.py").write_text("raise SystemExit(7)")
    os.kill(pid(server, 1), signal.SIGKILL)
    died = await server.told("worker_died")
    assert (died["worker"], died["status"]) == (1, -signal.SIGKILL)
    statuses = await deliver_many(server, [f"order:{n}" for n in range(12)])
    assert await db.fetchval("SELECT count(*) FROM provider_event") == statuses.count(200) > 0
    await alone(server, 1)
    assert await deliver_many(server, [f"later:{n}" for n in range(12)]) == [200] * 12


async def test_a_hang_up_reaches_every_worker(server: Server, tmp_path: Path) -> None:
    write_config(tmp_path, f'[feeds.new]\nprovider = "resend"\nsecrets = {list(FEEDS["re"].secrets)}')
    server.process.send_signal(signal.SIGHUP)

    async def both() -> bool:
        return {line["worker"] for line in server.events("settings_reloaded")} == {1, 2}

    await until(both, f"both to read the settings: {server.lines[-4:]}")


async def test_a_stop_that_reaches_all_at_once_cuts_nobody_off(server: Server) -> None:
    for process in (pid(server, 1), pid(server, 2), server.process.pid):  # as systemd does
        os.kill(process, signal.SIGTERM)
    assert await server.ended() == 0
    assert sorted(line["worker"] for line in server.events("stopped")) == [1, 2]
    assert server.events("worker_died") == []


@pytest.mark.parametrize(
    ("command", "status"), [([sys.executable, "-c", "raise SystemExit(1)"], 1), (["/no/such/program"], "No such file")]
)
async def test_what_one_worker_lacks_later_takes_no_other_down(
    monkeypatch: pytest.MonkeyPatch, command: list[str], status: int | str
) -> None:
    monkeypatch.setattr(workers, "AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(workers, "MOST_AGAIN_SECONDS", 0.0)
    with capture_logs() as lines:
        running = asyncio.create_task(workers.Worker(1, command).run())

        async def again() -> bool:
            return [line["event"] for line in lines].count("worker_died") > 2

        await until(again, "it to be started again and again")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    died = next(line for line in lines if line["event"] == "worker_died")
    assert str(died["status"]).startswith(str(status))


async def test_workers_end_with_the_process_that_started_them(server: Server) -> None:
    left = [pid(server, number) for number in (1, 2)]
    server.process.kill()

    async def gone() -> bool:
        return not any(Path(f"/proc/{worker}").exists() for worker in left)

    await until(gone, "the workers to end")


async def test_a_port_that_another_program_has_is_not_shared_in_silence(tmp_path: Path, dsn: str, port: int) -> None:
    with socket.create_server(("127.0.0.1", port), reuse_port=True):
        async with aiohttp.ClientSession() as session:
            second = await start(write_config(tmp_path), session, *ARGUMENTS, **place(dsn, port))
            assert await second.ended() == 1
    assert second.errors == [
        f"reconciler: port {port} on 127.0.0.1 is in use: stop the other program, or set receiver.port"
    ]


async def test_what_no_worker_can_do_without_a_person_ends_all(tmp_path: Path, empty_dsn: str, port: int) -> None:
    async with aiohttp.ClientSession() as session:
        server = await start(write_config(tmp_path), session, *ARGUMENTS, **place(empty_dsn, port))
        assert await server.ended() == 1
    assert set(server.errors) == {"reconciler: the database has no schema yet: run reconciler migrate"}


async def test_workers_only_receive(program: Program) -> None:
    for arguments in (["--workers", "2"], ["--only", "reconciler", "--workers", "2"]):
        done = await program("serve", *arguments)
        assert done.exit_code == 2
        assert "--workers needs --only receiver" in done.output


async def test_workers_need_a_port_that_is_named(program: Program) -> None:
    program.env["RECONCILER_RECEIVER__PORT"] = "0"
    done = await program("serve", "--only", "receiver", "--workers", "2")
    assert done.exit_code == 1
    assert "workers share one port: set receiver.port" in done.output
