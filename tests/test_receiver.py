# SPDX-License-Identifier: Apache-2.0
"""What the receiver answers over real HTTP: to deliveries, faults of our own, and whatever the internet sends."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import zlib

import asyncpg
import pytest
from aiohttp import ClientSession, web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inbox_kit import count
from prometheus_client import generate_latest
from receiver_app import NOW, PLAIN, Cut, Plain, random_bytes, running, signature, signed
from structlog.testing import capture_logs

from webhooks.database import connect_pool
from webhooks.fetch import open_fetch
from webhooks.inbox import Inbox, InboxUnavailable
from webhooks.metrics import UNKNOWN_FEED
from webhooks.provider import FetchError
from webhooks.quiet import Quiet
from webhooks.receiver import Limits

PATH = f"/webhooks/{PLAIN.name}"
ONE = {"id": "e1", "message": "m1", "key": "order-1", "recipient": "ada@example.org"}


async def outcomes(app, db) -> dict[str, int]:
    await app.counters.flush(db)
    return dict(await db.fetch("SELECT outcome, sum(n)::int FROM feed_delivery GROUP BY 1"))


# Answers


async def test_a_delivery_is_answered_200_with_what_was_stored_and_repeated(db):
    async with running(db) as app:
        first = await app.send(ONE, ONE, {"id": "e2"})
        again = await app.send(ONE, {"id": "e3"})
    assert (first.status, first.json) == (200, {"stored": 2, "repeated": 1})
    assert (again.status, again.json) == (200, {"stored": 1, "repeated": 1})
    assert first.headers["Content-Type"] == "application/json"


async def test_an_unsigned_or_wrongly_signed_delivery_is_401_and_counted(db):
    body = json.dumps([ONE]).encode()
    async with running(db) as app:
        for headers, reason in (
            ({}, "missing"),
            ({"x-signature": "00"}, "signature"),
            (signed(body, "other"), "signature"),
        ):
            answer = await app.post(PLAIN.name, body, headers)
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json["detail"].startswith(reason)
        assert await outcomes(app, db) == {"refused:missing": 1, "refused:signature": 2}
    assert await count(db) == 0


async def test_a_provider_that_would_drop_the_event_at_401_gets_its_own_answer(db):
    async with running(db, plain=Plain(refused_status=503)) as app:
        answer = await app.post(PLAIN.name, b"[]")
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "30"
    assert "WWW-Authenticate" not in answer.headers


async def test_a_thousand_refused_deliveries_are_counted_and_logged_once(db):
    async with running(db) as app:
        with capture_logs() as logs:
            await asyncio.gather(*(app.post(PLAIN.name, b"[]", {"x-signature": "no"}) for _ in range(1_000)))
        assert await outcomes(app, db) == {"refused:signature": 1_000}
    assert [(line["event"], line["feed"], line["reason"]) for line in logs] == [
        ("delivery_refused", PLAIN.name, "signature")
    ]


async def test_an_unknown_feed_is_404_and_counted_under_no_name_of_its_own(db):
    places = ("stranger", "stranger/", "stranger/more", f"{PLAIN.name}/", "", "Stranger%20")
    async with running(db) as app:
        with capture_logs() as logs:
            for place in places:
                assert (await app.post(place, b"x")).status == 404
        by_query = await app.request(
            "GET", "/webhooks/stranger?event=opened"
        )  # as a provider delivers that uses no body
        assert by_query.status == 404
        assert await outcomes(app, db) == {"refused:unknown_feed": len(places) + 1}
        assert await db.fetch("SELECT DISTINCT feed FROM feed_delivery") == [(UNKNOWN_FEED,)]
        assert "stranger" not in (await text_of_metrics())
    told = [(line["event"], line["feed"], line["reason"], line["name"]) for line in logs]
    assert told == [("delivery_refused", "", "unknown_feed", "stranger")]


async def test_what_asks_whether_an_unknown_feed_is_there_delivers_nothing(db):
    async with running(db) as app:
        for method in ("GET", "HEAD"):
            assert (await app.request(method, "/webhooks/stranger")).status == 404
        assert await outcomes(app, db) == {}


async def test_a_name_that_no_feed_can_have_is_not_logged(db):
    async with running(db) as app:
        with capture_logs() as logs:
            assert (await app.post("ada@example.org", b"x")).status == 404
    assert [line["name"] for line in logs] == [None]


async def text_of_metrics() -> str:
    return generate_latest().decode()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_probes_are_answered_200(db, method):
    async with running(db) as app:
        assert (await app.request(method, PATH)).status == 200


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
async def test_other_methods_are_405_and_say_what_is_allowed(db, method):
    async with running(db) as app:
        answer = await app.request(method, PATH, b"[]", signed(b"[]"))
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET,HEAD,POST"


async def test_a_control_message_stores_nothing_and_is_counted_as_such(db):
    async with running(db) as app:
        for body in (b"ping", b"[]"):
            answer = await app.post(PLAIN.name, body, signed(body))
            assert (answer.status, answer.json) == (200, {"stored": 0, "repeated": 0})
        assert await outcomes(app, db) == {"control": 2}


async def test_a_verified_body_of_another_format_is_400_and_counted(db):
    async with running(db) as app:
        for body in (b"", b"[", b"hello", b'{"no":"id"}', b"\xff\xfe", b"[" * 100_000):
            assert (await app.post(PLAIN.name, body, signed(body))).status == 400
        assert await outcomes(app, db) == {"refused:format": 6}


async def test_the_content_type_never_decides(db):
    body = json.dumps([ONE]).encode()
    kinds = ["text/plain", "application/json; charset=klingon", "multipart/form-data", "image/png", ";;;", ""]
    async with running(db) as app:
        for kind in kinds:
            assert (await app.post(PLAIN.name, body, signed(body) | {"Content-Type": kind})).status == 200
    assert await count(db) == 1


# Bodies


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity", "GZIP"])
async def test_a_compressed_delivery_is_verified_over_what_it_inflates_to(db, encoding):
    body = json.dumps([ONE]).encode()
    packed = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding.lower(), bytes)(body)
    async with running(db) as app:
        answer = await app.post(PLAIN.name, packed, signed(body) | {"Content-Encoding": encoding})
    assert answer.json == {"stored": 1, "repeated": 0}


async def test_a_truncated_or_corrupt_gzip_body_is_400(db):
    body = json.dumps([ONE]).encode()
    packed = gzip.compress(body)
    headers = signed(body) | {"Content-Encoding": "gzip"}
    async with running(db) as app:
        for damaged in (packed[:-3], packed[:5], b"no gzip", packed + b"more"):
            assert (await app.post(PLAIN.name, damaged, headers)).status == 400
        assert await outcomes(app, db) == {"refused:body": 4}
    assert await count(db) == 0


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "nonsense"])
async def test_a_content_encoding_that_can_not_be_read_is_415(db, encoding):
    async with running(db) as app:
        assert (await app.post(PLAIN.name, b"x", {"Content-Encoding": encoding})).status == 415
        assert await outcomes(app, db) == {"refused:encoding": 1}


async def test_a_body_that_is_too_large_is_413_however_it_comes(db):
    async def chunks():
        for _ in range(11):
            yield bytes(10_000)

    large = random_bytes(100_001, "large")
    async with running(db, limits=Limits(max_body=100_000)) as app:
        plain = await app.post(PLAIN.name, large)
        packed = await app.post(PLAIN.name, gzip.compress(bytes(100_001)), {"Content-Encoding": "gzip"})
        async with app.session.post(app.url(PATH), data=chunks()) as response:
            chunked = response.status
        exactly = await app.post(PLAIN.name, large[:100_000])
        assert [plain.status, packed.status, chunked, exactly.status] == [413, 413, 413, 401]
        assert await outcomes(app, db) == {"refused:too_large": 3, "refused:missing": 1}


async def test_a_declared_length_that_is_too_large_is_refused_before_it_is_read(db):
    async with running(db, limits=Limits(max_body=1_000)) as app:
        answer = await raw(app.port, b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n" % PATH.encode())
    assert answer.startswith(b"HTTP/1.1 413 ")


async def test_a_body_that_does_not_arrive_is_not_waited_for_for_ever(db):
    async with running(db, limits=Limits(body_seconds=0.1)) as app:
        answer = await raw(app.port, b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nabc" % PATH.encode())
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_chunked_body_is_read_whole(db):
    body = json.dumps([ONE, {"id": "e2", "reason": "x" * 200_000}]).encode()

    async def chunks():
        for at in range(0, len(body), 7_001):
            yield body[at : at + 7_001]

    async with running(db) as app, app.session.post(app.url(PATH), data=chunks(), headers=signed(body)) as response:
        assert (response.status, await response.json()) == (200, {"stored": 2, "repeated": 0})


async def raw(port: int, request: bytes) -> bytes:
    """Send bytes as they are; return the head of what comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(10):
        answer = await reader.read(4_096)
    writer.close()
    return answer


# Not stored, for our reasons


async def test_with_the_database_away_deliveries_are_put_off_and_probes_are_answered(dsn, sockets):
    async with Cut(dsn, sockets) as cut:
        pool = await connect_pool(cut.dsn, size=3, application="test")
        async with running(pool) as app:
            await app.inbox.check()
            cut.cut()
            with capture_logs() as logs:
                for _ in range(3):
                    answer = await app.send(ONE)
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "30")
            assert "delivery_not_stored" in {line["event"] for line in logs}
            assert (await app.request("GET", PATH)).status == 200
            with pytest.raises(InboxUnavailable):
                await app.inbox.check()
            cut.resume()
            assert (await app.send(ONE)).json == {"stored": 1, "repeated": 0}
            await app.inbox.check()
            assert await outcomes(app, pool) == {"later:database": 3, "stored": 1}
        await asyncio.wait_for(pool.close(), 10)


async def test_a_provider_that_drops_events_at_503_gets_its_own_answer(dsn, sockets):
    async with Cut(dsn, sockets) as cut:
        pool = await connect_pool(cut.dsn, size=1, application="test")
        async with running(pool, plain=Plain(busy_status=429)) as app:
            cut.cut()
            answer = await app.send(ONE)
            assert (answer.status, answer.headers["Retry-After"]) == (429, "30")
        await asyncio.wait_for(pool.close(), 10)


async def test_case_082_with_every_connection_taken_fifty_deliveries_are_put_off_in_time(dsn, db):
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=3)
    async with running(pool, inbox=Inbox(seconds=0.5)) as app:
        taken = [await pool.acquire() for _ in range(3)]
        began = time.monotonic()
        answers = await asyncio.gather(*(app.send({"id": f"e{n}"}) for n in range(50)))
        assert {answer.status for answer in answers} == {503}
        assert time.monotonic() - began < 15  # one after the other they would take 25
        for connection in taken:
            await pool.release(connection)
        # As a provider does, until it is done: half a second may be too short for so many on a busy machine.
        while (answer := await app.send(*({"id": f"e{n}"} for n in range(5_000)))).status != 200:
            assert answer.status == 503
        assert await db.fetchval("SELECT count(*) FROM provider_event") == 5_000
    await asyncio.wait_for(pool.close(), 10)


async def test_case_084_a_client_that_hangs_up_before_the_commit_finds_its_event_stored(db):
    body = json.dumps([ONE]).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nx-signature: {signature(body)}\r\n\r\n"
    async with running(db) as app, db.acquire() as other:
        async with other.transaction():
            await other.execute("LOCK TABLE provider_event IN SHARE MODE")
            _, writer = await asyncio.open_connection("127.0.0.1", app.port)
            writer.write(head.encode() + body)
            while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                pass  # until the insert waits
            writer.transport.abort()
            await app.request("GET", PATH)  # so that the server has noticed
        assert (await app.send(ONE)).json == {"stored": 0, "repeated": 1}
        assert await outcomes(app, db) == {"stored": 2}


async def test_while_draining_new_deliveries_are_put_off_and_those_in_flight_finish(db):
    async with running(db) as app, db.acquire() as other:
        async with other.transaction():
            await other.execute("LOCK TABLE provider_event IN SHARE MODE")
            in_flight = asyncio.create_task(app.send(ONE))
            while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                pass  # until the insert waits
            app.receiver.draining = True
            late = await app.send({"id": "late"})
            assert (late.status, late.headers["Retry-After"]) == (503, "30")
            assert (await app.request("GET", PATH)).status == 200
        assert (await in_flight).json == {"stored": 1, "repeated": 0}
    assert await count(db) == 1


async def test_a_fault_in_verify_puts_the_delivery_off(db):
    async with running(db) as app:
        with capture_logs() as logs:
            answer = await app.post(PLAIN.name, b"[]", signed(b"[]") | {"x-fault": "verify"})
        assert answer.status == 503
        assert await outcomes(app, db) == {"later:verify_failed": 1}
    assert [line["event"] for line in logs] == ["verify_failed", "delivery_not_stored"]


async def test_a_fault_in_parse_keeps_the_whole_body_once_and_ends_the_retries(db):
    body = json.dumps([ONE]).encode() + b"\x00\xff"
    async with running(db) as app:
        with capture_logs() as logs:
            answers = [await app.post(PLAIN.name, body, signed(body) | {"x-fault": "parse"}) for _ in range(2)]
        assert [answer.json for answer in answers] == [{"stored": 1, "repeated": 0}, {"stored": 0, "repeated": 1}]
        assert await outcomes(app, db) == {"damaged": 2, "stored": 2}
    (row,) = await db.fetch("SELECT kind, testimony, raw FROM provider_event")
    assert tuple(row) == ("unknown", "none", body)
    assert [line["event"] for line in logs] == ["delivery_damaged"]
    assert "ada@example.org" not in str(logs)


# Handshakes


async def test_a_subscription_is_confirmed_once_and_a_failure_asks_for_another_try(db):
    asked: list[str] = []

    async def fetch(url: str, *, max_bytes: int = 65_536) -> bytes:
        asked.append(url)
        if url.endswith("/fails"):
            raise FetchError("answered 500")
        return b""

    async with running(db, fetch=fetch) as app:
        answers = [
            await app.post(PLAIN.name, b"{}", signed(b"{}") | {"x-confirm": f"https://sns/{end}"})
            for end in ("fails", "works")
        ]
        assert [answer.status for answer in answers] == [503, 200]
        assert await outcomes(app, db) == {"later:confirmation": 1, "control": 1}
        unsigned = await app.post(PLAIN.name, b"{}", {"x-confirm": "https://sns/evil"})
    assert unsigned.status == 401
    assert asked == ["https://sns/fails", "https://sns/works"]


@pytest.fixture
async def site():
    """A web site that redirects, dawdles and talks too much."""
    over = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        match request.path:
            case "/ok":
                return web.Response(body=b"x" * 100)
            case "/redirect":
                return web.Response(status=302, headers={"Location": "/ok"})
            case "/bomb":
                return web.Response(body=gzip.compress(bytes(10_000_000)), headers={"Content-Encoding": "gzip"})
            case "/long":
                return web.Response(body=bytes(101))
            case "/slow":
                await over.wait()
        return web.Response(status=500)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    over.set()
    await runner.cleanup()


async def test_a_fetch_returns_the_body_and_nothing_else_passes(site):
    async with open_fetch() as fetch:
        assert await fetch(f"{site}/ok", max_bytes=100) == b"x" * 100
    async with open_fetch(seconds=0.5) as fetch:
        for path in ("/redirect", "/long", "/slow", "/error", "/bomb"):
            with pytest.raises(FetchError):
                await fetch(f"{site}{path}", max_bytes=100)
        for url in ("http://127.0.0.1:1/", "no url", "http://", "file:///etc/passwd"):
            with pytest.raises(FetchError):
                await fetch(url)


# Hostile


async def test_twenty_bombs_in_parallel_hold_nobody_up(db):
    bomb = gzip.compress(bytes(50_000_000))
    longest = 0.0
    async with running(db) as app, ClientSession() as bombers:

        async def explode() -> int:
            async with bombers.post(app.url(PATH), data=bomb, headers={"Content-Encoding": "gzip"}) as response:
                return response.status

        bombs = [asyncio.create_task(explode()) for _ in range(20)]
        n = 0
        while not all(task.done() for task in bombs):
            began = time.monotonic()
            assert (await app.send({"id": f"quick-{n}"})).status == 200
            longest = max(longest, time.monotonic() - began)
            n += 1
        assert {task.result() for task in bombs} == {413}
    assert n > 5
    assert longest < 10.0  # a busy machine takes its time, too


RAW_REQUESTS = [
    b"",
    b"\r\n\r\n",
    b"GARBAGE\r\n\r\n",
    b"POST / HTTP/9.9\r\n\r\n",
    b"POST %b HTTP/1.1\r\n\r\n",
    b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n0\r\n\r\n",
    b"POST %b HTTP/1.1\r\nHost: x\r\nx-signature: \xff\xfe\r\nContent-Length: 2\r\n\r\n[]",
    b"POST %b HTTP/1.1\r\nHost: x\r\nx-signature: a\x00b\r\nContent-Length: 2\r\n\r\n[]",
    b"POST %b?%%00%%ff=%%ud83d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
    b"POST %b%%2e%%2e HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
    b"POST /webhooks/%%00 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]",
    b"POST %b HTTP/1.1\r\nHost: x\r\nx-long: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST %b HTTP/1.1\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(5_000)) + b"\r\n",
    b"POST " + b"/" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST %b HTTP/1.0\r\n\r\n",
    b"CONNECT %b HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("request_", range(len(RAW_REQUESTS)))
async def test_malformed_requests_are_refused_and_harm_nobody(db, request_):
    template = RAW_REQUESTS[request_]
    request = template.replace(b"%b", PATH.encode()).replace(b"%%", b"%")
    async with running(db) as app:
        reader, writer = await asyncio.open_connection("127.0.0.1", app.port)
        writer.write(request)
        writer.write_eof()
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        assert not answer or answer.split(b" ", 2)[1][:1] == b"4", answer[:200]
        assert (await app.send(ONE)).status == 200


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        ).map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")),
    ),
    encoding=st.sampled_from(["", "gzip", "deflate"]),
    is_signed=st.booleans(),
)
async def test_no_body_makes_the_receiver_fail(dsn, body, encoding, is_signed):
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=2)
    headers = {"Content-Encoding": encoding} | (signed(body) if is_signed else {"x-signature": "no"})
    async with running(pool) as app:
        assert (await app.post(PLAIN.name, body, headers)).status in {200, 400, 401}
    await asyncio.wait_for(pool.close(), 10)


async def test_deep_json_and_nul_bytes_neither_fail_nor_lose_anything(db):
    deep = b'[{"id":"deep","x":' + b"[" * 200_000 + b"]" * 200_000 + b"}]"
    nul = b'[{"id":"nul\\u0000","key":"\\u0000","message":"\\ud83d","recipient":"\\u0000@\\ud83d"}]'
    async with running(db) as app:
        assert (await app.post(PLAIN.name, deep, signed(deep))).status in {200, 400}
        assert (await app.post(PLAIN.name, nul, signed(nul))).json == {"stored": 1, "repeated": 0}
    assert await db.fetchval("SELECT raw FROM provider_event WHERE event_id LIKE 'nul%'") == nul[1:-1]


# Logs


def test_a_flood_of_log_lines_is_thinned_and_says_how_many_are_missing():
    now = 0.0
    quiet = Quiet(every=60, seconds=lambda: now)
    assert [quiet.silenced("a", "x") for _ in range(4)] == [0, None, None, None]
    assert quiet.silenced("b", "x") == 0
    now = 61.0
    assert [quiet.silenced("a", "x") for _ in range(2)] == [3, None]


async def test_logs_hold_no_recipient_key_or_secret(db):
    secret_key = "reset:ada@example.org"
    async with running(db) as app:
        with capture_logs() as logs:
            await app.send({"id": "e", "key": secret_key, "recipient": "ada@example.org", "at": NOW.timestamp()})
            await app.post(PLAIN.name, json.dumps([{"key": secret_key}]).encode(), {"x-signature": "wrong"})
            await app.send({"key": secret_key})
    assert len(logs) == 2
    assert "ada" not in str(logs)
    assert PLAIN.secrets[0] not in str(logs)
