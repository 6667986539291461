# SPDX-License-Identifier: Apache-2.0
"""Whoever floods a feed with what is not the provider's is slowed down; the provider himself never is."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import closing

import aiohttp
import asyncpg
import pytest
from aiohttp import web
from kit import until_it_waits
from receiver_app import PLAIN, Answer, Running, running, signed

from webhooks import body as bodies
from webhooks import floods
from webhooks.floods import BURST, HELD_AT_ONCE, REFUSALS_A_SECOND, Floods
from webhooks.provider import Feed
from webhooks.receiver import Limits, make_runner

OTHER = Feed("plain-other", "plain", PLAIN.secrets)
_numbers = itertools.count(1)


def fresh() -> bytes:
    return b'[{"id": "%d"}]' % next(_numbers)


async def honest(app: Running) -> Answer:
    body = fresh()
    return await app.post(PLAIN.name, body, signed(body))


async def forged(app: Running) -> Answer:
    return await app.post(PLAIN.name, fresh(), {"x-signature": "0" * 64})


def test_refusals_are_answered_at_once_until_there_are_too_many() -> None:
    now = 0.0
    flood = Floods(lambda: now)
    assert [flood.note("mg") for _ in range(int(BURST))] == [False] * int(BURST)
    assert flood.note("mg")
    assert not flood.note("other")
    now += 1.0
    answered = [flood.note("mg") for _ in range(int(REFUSALS_A_SECOND) + 1)]
    assert answered == [False] * int(REFUSALS_A_SECOND) + [True]
    now += 3600.0
    assert [flood.note("mg") for _ in range(int(BURST) + 1)].count(True) == 1


async def test_only_so_many_answers_are_held_back_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floods, "HELD_BACK", 3600.0)
    flood = Floods()
    waiting = [asyncio.create_task(flood.hold_back("mg")) for _ in range(HELD_AT_ONCE)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await flood.hold_back("mg")
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_refusal_too_many_ends_its_connection_and_the_first_ones_do_not(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floods, "BURST", 2.0)
    monkeypatch.setattr(floods, "HELD_BACK", 0.0)
    async with running(db) as app:
        answers = [await forged(app) for _ in range(3)]
        assert [answer.status for answer in answers] == [401] * 3
        assert [answer.headers.get("Connection") for answer in answers] == [None, None, "close"]
        assert "Connection" not in (await honest(app)).headers


async def test_large_bodies_at_one_feed_leave_room_for_those_of_another(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODIES_OF_ONE_FEED", 1)
    async with running(db, [PLAIN, OTHER], limits=Limits(max_body=1_000_000)) as app:
        head = f"POST /webhooks/{PLAIN.name} HTTP/1.1\r\nHost: a\r\nContent-Length: 999999\r\n\r\n".encode()
        strangers = [await asyncio.open_connection("127.0.0.1", app.port) for _ in range(2)]
        for _, writer in strangers:
            writer.write(head + b" " * 900_000)
        lines = [asyncio.create_task(reader.readline()) for reader, _ in strangers]
        (first,), _ = await asyncio.wait(lines, timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert first.result().split()[1] == b"503"  # it comes again
        large = b'[{"id": "large", "key": "%s"}]' % (b"k" * 900_000)
        assert (await app.post(OTHER.name, large, signed(large))).status == 200
        for _, writer in strangers:
            writer.close()
        await asyncio.gather(*lines, return_exceptions=True)


async def test_a_flood_of_forged_deliveries_counts_and_makes_the_provider_wait_for_nothing(db: asyncpg.Pool) -> None:
    """Eight connections that forge as fast as they can, at the limits as they are."""
    async with running(db) as app:
        ended = asyncio.Event()
        forgeries = 0

        async def flood() -> None:
            nonlocal forgeries
            while not ended.is_set():
                answer = await forged(app)
                forgeries += answer.status == 401

        flooding = [asyncio.create_task(flood()) for _ in range(8)]
        while forgeries <= BURST:  # noqa: ASYNC110 - it happens in the server
            await asyncio.sleep(0.01)
        begun, at_first = time.monotonic(), forgeries
        for _ in range(100):
            assert (await honest(app)).status == 200
        seconds, ended_at = time.monotonic() - begun, forgeries
        ended.set()
        await asyncio.gather(*flooding)
        assert ended_at - at_first <= 8 + (REFUSALS_A_SECOND + 8) * (seconds + 1)
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 100


# Headers


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", f"/webhooks/{PLAIN.name}"), ("GET", f"/webhooks/{PLAIN.name}"), ("POST", "/webhooks/nobody"),
     ("PUT", f"/webhooks/{PLAIN.name}"), ("GET", "/nowhere")],
)  # fmt: skip
async def test_every_answer_keeps_browsers_from_guessing_and_keeping_and_tells_nothing_of_us(
    db: asyncpg.Pool, method: str, path: str
) -> None:
    async with running(db) as app:
        body = fresh()
        answer = await app.request(method, path, body if method == "POST" else None, signed(body))
    checked(dict(answer.headers))


async def test_so_does_what_is_said_to_no_http_and_to_a_stored_delivery(db: asyncpg.Pool) -> None:
    async with running(db) as app:
        checked(dict((await honest(app)).headers))
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        with closing(writer):
            writer.write(b"what is this\r\n\r\n")
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode()
        assert head.startswith("HTTP/1.")
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
        checked(lines)


async def test_a_page_may_say_otherwise_of_itself() -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(headers={"Cache-Control": "private, max-age=60"})

    app = web.Application()
    app.router.add_get("/", page)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/") as answer:
        assert answer.headers["Cache-Control"] == "private, max-age=60"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    await runner.cleanup()


async def test_at_the_end_an_answer_ends_its_connection_so_that_no_request_is_cut_off() -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def page(request: web.Request) -> web.Response:
        if "slow" in request.query:
            asked.set()
            await go.wait()
        return web.Response(text="here")

    app = web.Application()
    app.router.add_get("/", page)
    runner = make_runner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    async with asyncio.timeout(10):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"Connection" not in await reader.readuntil(b"here")
        slow, slow_writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
        slow_writer.write(b"GET /?slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await asked.wait()
        winding_down = asyncio.create_task(runner.wind_down())
        await asyncio.sleep(0)  # it has begun
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        last = await reader.read()  # all, to the end of the connection
        assert last.startswith(b"HTTP/1.1 200")
        assert b"Connection: close" in last
        go.set()
        assert b"Connection: close" in await slow.read()
        await winding_down
    for each in (writer, slow_writer):
        each.close()
    await runner.cleanup()


async def test_so_does_the_answer_to_what_was_being_stored_when_the_end_began(db: asyncpg.Pool) -> None:
    async with running(db) as app, db.acquire() as other:
        async with other.transaction():
            await other.execute("LOCK TABLE provider_event IN SHARE MODE")
            in_flight = asyncio.create_task(honest(app))
            await until_it_waits(db, in_flight)
            winding_down = asyncio.create_task(app.runner.wind_down())
            await asyncio.sleep(0)  # it has begun
        answer = await in_flight
        assert (answer.status, answer.headers.get("Connection")) == (200, "close")
        await winding_down
    checked(dict(answer.headers))


def checked(headers: dict[str, str]) -> None:
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Server" not in headers
