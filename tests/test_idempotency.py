# SPDX-License-Identifier: Apache-2.0
"""The Idempotency-Key contract, as any aiohttp application gets it, on a real database. Case 061 corner by corner."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from aiohttp import ClientError, web
from aiohttp.test_utils import TestClient, TestServer
from kit import call, claim, confirm, fail, make_older
from multidict import CIMultiDict
from sends_kit import Losing, losing
from structlog.testing import capture_logs
from yarl import URL

from reconciler.idempotency import Ambiguous, Store, delete_old, idempotency, names_send, nothing_queued
from webhooks.event import wire_key

Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]
LIMIT = 10.0


class Shop:
    """An application with one handler, which a test may change between two calls; it counts how often it ran."""

    def __init__(self, client: TestClient[Any, Any], store: Store) -> None:
        self.client, self.store = client, store
        self.runs = 0
        self.handle: Handle = queued
        self.headers: dict[str, str] = {}

    async def __call__(
        self,
        body: bytes = b'{"order": 7}',
        *,
        key: str | None = "k-1",
        who: str = "ann",
        path: str = "/receipts",
        method: str = "POST",
    ) -> tuple[int, str]:
        headers = {"X-Who": who} | ({"Idempotency-Key": key} if key is not None else {})
        async with self.client.request(method, path, data=body, headers=headers) as answer:
            self.headers = dict(answer.headers)
            return answer.status, await answer.text()

    async def problem(self, **asked: Any) -> tuple[int, dict[str, Any]]:
        headers = {"X-Who": "ann", "Idempotency-Key": "k-1"}
        async with self.client.post("/receipts", data=asked.get("body", b'{"order": 7}'), headers=headers) as answer:
            self.headers = dict(answer.headers)
            return answer.status, await answer.json(content_type="application/problem+json")


async def queued(_: web.Request) -> web.Response:
    return web.json_response({"queued": True}, status=202, headers={"Location": "/receipts/7", "X-Other": "1"})


@asynccontextmanager
async def serving(store: Store, **options: Any) -> AsyncIterator[Shop]:
    async def handler(request: web.Request) -> web.StreamResponse:
        served.runs += 1
        return await served.handle(request)

    once = idempotency(store, caller=lambda request: request.headers["X-Who"], **{"required": True, **options})
    app = web.Application(middlewares=[once])
    app.router.add_route("*", "/receipts", handler)
    app.router.add_route("*", "/letters", handler)
    async with TestClient(TestServer(app)) as client:
        served = Shop(client, store)
        yield served


@pytest.fixture
async def shop(db: asyncpg.Pool) -> AsyncIterator[Shop]:
    async with serving(Store(db)) as found:
        yield found


async def end_lease(db: asyncpg.Pool) -> None:
    """What is true once a process has died long ago."""
    await db.execute("UPDATE idempotency SET lease_until = clock_timestamp()")


async def test_case_061_1_while_the_first_call_runs_a_repeat_is_told_to_come_back(shop: Shop) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        begun.set()
        await go.wait()
        return await queued(request)

    shop.handle = slow
    first = asyncio.create_task(shop())
    async with asyncio.timeout(LIMIT):
        await begun.wait()
    status, refused = await shop.problem()
    assert (status, refused["outcome"], shop.headers["Retry-After"]) == (409, "in_progress", "1")
    go.set()
    assert (await first)[0] == 202
    assert shop.runs == 1


async def test_case_061_2_a_repeat_gets_the_original_answer_and_the_replay_header(shop: Shop) -> None:
    first = await shop()
    assert "Idempotent-Replayed" not in shop.headers
    again = await shop()
    assert first == again == (202, '{"queued": true}')
    assert shop.headers["Idempotent-Replayed"] == "true"
    assert (shop.headers["Location"], shop.headers["Content-Type"]) == (
        "/receipts/7",
        "application/json; charset=utf-8",
    )
    assert "X-Other" not in shop.headers
    assert shop.runs == 1


@pytest.mark.parametrize(
    "other", [b'{"order": 8}', b'{"order": 7.0}', b'{"order": "7"}', b'{"order": 7, "x": null}', b"order=7", b""]
)
async def test_case_061_3_another_body_under_the_same_key_is_refused(shop: Shop, other: bytes) -> None:
    await shop()
    status, refused = await shop.problem(body=other)
    assert (status, refused["outcome"]) == (422, "idempotency_key_reused")
    assert shop.runs == 1


async def test_case_061_3_another_query_is_another_content(shop: Shop) -> None:
    await shop()
    assert (await shop(path="/receipts?draft=1"))[0] == 422


async def test_case_061_4_a_refusal_is_replayed(shop: Shop) -> None:
    async def refuse(_: web.Request) -> web.Response:
        raise web.HTTPBadRequest(text="no such order")

    shop.handle = refuse
    assert [await shop(), await shop()] == [(400, "no such order")] * 2
    assert shop.headers["Idempotent-Replayed"] == "true"
    assert shop.runs == 1


async def raised_503(_: web.Request) -> web.Response:
    with nothing_queued():
        raise web.HTTPServiceUnavailable


async def not_now(_: web.Request) -> web.Response:
    return web.Response(status=429)


async def broke_before(_: web.Request) -> web.Response:
    with nothing_queued():
        raise KeyError("order")


@pytest.mark.parametrize("handle", [raised_503, not_now, broke_before])
async def test_case_061_5_what_failed_before_anything_was_queued_is_performed_again(shop: Shop, handle: Handle) -> None:
    shop.handle = handle
    assert (await shop())[0] in (500, 503, 429)
    shop.handle = queued
    assert (await shop())[0] == 202
    assert shop.runs == 2


async def timed_out(_: web.Request) -> web.Response:
    raise Ambiguous


async def broke(_: web.Request) -> web.Response:
    raise KeyError("answer")


async def returned_504(_: web.Request) -> web.Response:
    return web.Response(status=504)


async def returned_408(_: web.Request) -> web.Response:
    return web.Response(status=408)


async def raised_500(_: web.Request) -> web.Response:
    raise web.HTTPInternalServerError


@pytest.mark.parametrize("handle", [timed_out, broke, returned_504, returned_408, raised_500])
async def test_case_061_6_what_may_have_been_sent_is_never_performed_again(shop: Shop, handle: Handle) -> None:
    shop.handle = handle
    assert (await shop())[0] in (408, 409, 500, 504)
    shop.handle = queued
    status, refused = await shop.problem()
    assert (status, refused["outcome"], refused["state"]) == (409, "ambiguous", "ambiguous")
    assert "Retry-After" not in shop.headers
    assert shop.runs == 1


async def test_case_061_6_a_process_that_died_while_it_ran_leaves_an_ambiguous_request(
    shop: Shop, db: asyncpg.Pool
) -> None:
    begun = asyncio.Event()

    async def dies(_: web.Request) -> web.Response:
        begun.set()
        raise asyncio.CancelledError  # nothing more of it runs, as in a killed process

    shop.handle = dies
    with pytest.raises(Exception, match="disconnected"):
        await shop()
    assert begun.is_set()
    assert (await shop.problem())[1]["outcome"] == "in_progress"
    await end_lease(db)
    assert (await shop.problem())[1]["outcome"] == "ambiguous"
    assert shop.runs == 1


async def test_case_061_6_an_ambiguous_request_says_when_more_will_be_known(shop: Shop) -> None:
    at = datetime.now(UTC) + timedelta(minutes=5)

    async def unsure(_: web.Request) -> web.Response:
        raise Ambiguous(at)

    shop.handle = unsure
    for _ in range(2):
        status, refused = await shop.problem()
        assert (status, refused["retry_at"]) == (409, at.isoformat())
        assert 200 < int(shop.headers["Retry-After"]) <= 300


async def test_case_061_7_the_same_json_in_another_order_and_spacing_is_equal(shop: Shop) -> None:
    await shop(b'{"a": 1.50, "b": [1, {"x": "\\u00e4", "y": null}]}')
    assert (await shop('{"b":[1,{"y":null,"x":"ä"}],\n "a":1.50}'.encode()))[0] == 202
    assert shop.headers["Idempotent-Replayed"] == "true"
    assert shop.runs == 1


async def test_case_061_7_what_is_no_json_is_compared_by_its_bytes(shop: Shop) -> None:
    odd = b'{"a": "\\ud800"' + b"[" * 100_000
    await shop(odd)
    assert (await shop(odd))[0] == 202
    assert (await shop(odd + b" "))[0] == 422
    assert shop.runs == 1


async def test_case_061_8_callers_methods_and_paths_are_independent(shop: Shop) -> None:
    others: tuple[dict[str, Any], ...] = ({}, {"who": "bob"}, {"path": "/letters"}, {"method": "PATCH"})
    for other in others:
        assert (await shop(**other))[0] == 202
        assert "Idempotent-Replayed" not in shop.headers
    assert shop.runs == 4


# Requests that name their send


@pytest.mark.parametrize("beforehand", [True, False])
async def test_an_ambiguous_request_is_answered_by_what_became_of_its_send(
    shop: Shop, db: asyncpg.Pool, beforehand: bool
) -> None:
    fence = (await claim(db, "receipt-7"))["fence"]

    async def unsure(request: web.Request) -> web.Response:
        if beforehand:
            await names_send(request, "receipt-7")
            raise TimeoutError
        raise Ambiguous(key="receipt-7")

    shop.handle = unsure
    await shop()
    status, refused = await shop.problem()
    due = await db.fetchval("SELECT next_check_at FROM send_log")
    assert (status, refused["state"], refused["wire_key"]) == (409, "ambiguous", "receipt-7")
    assert refused["retry_at"] == due.isoformat()
    await confirm(db, "receipt-7", fence)
    assert await shop() == (200, '{"state": "sent", "wire_key": "receipt-7"}')
    assert shop.headers["Idempotent-Replayed"] == "true"
    assert shop.runs == 1


async def test_a_request_whose_send_failed_says_so(shop: Shop, db: asyncpg.Pool) -> None:
    fence = (await claim(db, "receipt-7"))["fence"]

    async def unsure(_: web.Request) -> web.Response:
        raise Ambiguous(key="receipt-7")

    shop.handle = unsure
    await shop()
    await fail(db, "receipt-7", fence, not_sent=False)
    status, refused = await shop.problem()
    assert (status, refused["state"]) == (409, "failed")
    assert shop.runs == 1


async def test_a_request_whose_send_was_released_is_performed_again_by_one_caller(shop: Shop, db: asyncpg.Pool) -> None:
    await claim(db, "receipt-7")

    async def unsure(_: web.Request) -> web.Response:
        raise Ambiguous(key="receipt-7")

    shop.handle = unsure
    await shop()
    await make_older(db, "receipt-7", timedelta(hours=1))
    assert (await call(db, "operator_release", "receipt-7", "note", "ann"))["outcome"] == "released"
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        begun.set()
        await go.wait()
        return await queued(request)

    shop.handle = slow
    first = asyncio.create_task(shop())
    async with asyncio.timeout(LIMIT):
        await begun.wait()
    assert (await shop.problem())[1]["outcome"] == "in_progress"
    go.set()
    assert (await first)[0] == 202
    assert (await shop())[0] == 202
    assert shop.runs == 2


async def test_a_named_request_that_ends_with_an_error_is_left_to_its_send(shop: Shop, db: asyncpg.Pool) -> None:
    await claim(db, "receipt-7")

    async def unsure(request: web.Request) -> web.Response:
        await names_send(request, "receipt-7")
        return web.Response(status=502)

    shop.handle = unsure
    assert (await shop())[0] == 502
    assert (await shop.problem())[1]["outcome"] == "ambiguous"
    assert shop.runs == 1


READABLE = "order.receipt:7"


@pytest.mark.parametrize("beforehand", [True, False])
async def test_a_send_may_be_named_by_the_key_that_its_sender_gave_it(
    shop: Shop, db: asyncpg.Pool, beforehand: bool
) -> None:
    fence = (await claim(db, READABLE))["fence"]

    async def unsure(request: web.Request) -> web.Response:
        if beforehand:
            await names_send(request, READABLE)
            raise TimeoutError
        raise Ambiguous(key=READABLE)

    shop.handle = unsure
    await shop()
    status, refused = await shop.problem()
    assert (status, refused["state"], refused["wire_key"]) == (409, "ambiguous", wire_key(READABLE))
    await confirm(db, READABLE, fence)
    assert (await shop())[0] == 200
    assert shop.runs == 1


@pytest.mark.parametrize("beforehand", [True, False])
async def test_a_send_that_the_log_does_not_know_proves_nothing(shop: Shop, db: asyncpg.Pool, beforehand: bool) -> None:
    async def unsure(request: web.Request) -> web.Response:
        if beforehand:
            await names_send(request, READABLE)
            raise asyncio.CancelledError  # as in a killed process
        raise Ambiguous(key=READABLE)

    shop.handle = unsure
    with suppress(ClientError):
        await shop()
    await end_lease(db)
    for _ in range(2):
        assert (await shop.problem())[1]["outcome"] == "ambiguous"
    assert shop.runs == 1


async def test_a_crash_before_the_claim_is_resolved_where_the_send_was_written_first(
    shop: Shop, db: asyncpg.Pool
) -> None:
    async def dies(request: web.Request) -> web.Response:
        await call(db, "send_enqueue", READABLE, "mg", "{}")
        await names_send(request, READABLE)
        raise asyncio.CancelledError

    shop.handle = dies
    with suppress(ClientError):
        await shop()
    await end_lease(db)
    shop.handle = queued
    assert (await shop())[0] == 202
    assert shop.runs == 2


async def test_a_handler_without_a_key_may_be_unsure_too(db: asyncpg.Pool) -> None:
    async with serving(Store(db), required=False) as shop:
        shop.handle = timed_out
        status, text = await shop(key=None)
        assert (status, json.loads(text)["outcome"]) == (409, "ambiguous")


async def test_what_is_safe_to_repeat_is_performed_until_an_answer_is_kept(db: asyncpg.Pool) -> None:
    async with serving(Store(db), repeatable=lambda _: True) as shop:
        for shop.handle in (broke, returned_504, timed_out):
            assert (await shop())[0] >= 400
        assert (await shop(b"other"))[0] == 422
        shop.handle = queued
        assert [await shop(), await shop()] == [(202, '{"queued": true}')] * 2
        assert shop.headers["Idempotent-Replayed"] == "true"
        assert shop.runs == 4


async def test_of_two_answers_to_what_is_safe_to_repeat_the_first_is_kept(db: asyncpg.Pool) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.StreamResponse:
        begun.set()
        await go.wait()
        return web.Response(status=201)

    async with serving(Store(db), repeatable=lambda _: True) as shop:
        shop.handle = slow
        first = asyncio.create_task(shop())
        async with asyncio.timeout(LIMIT):
            await begun.wait()
        shop.handle = queued
        assert (await shop())[0] == 202
        go.set()
        assert (await first)[0] == 201
        assert (await shop())[0] == 202


async def test_a_request_is_taken_over_only_while_its_send_is_free(db: asyncpg.Pool) -> None:
    store = Store(db)
    run = await store.begin("id", "content")
    await store.give_up(run, "receipt-7")
    assert await store.take_over("id", run.number) is None
    fence = (await claim(db, "receipt-7"))["fence"]
    assert await store.take_over("id", run.number) is None
    await fail(db, "receipt-7", fence, not_sent=True)
    assert await store.take_over("id", run.number) is not None


async def test_a_run_whose_request_was_given_to_another_changes_nothing(db: asyncpg.Pool) -> None:
    store = Store(db)
    await call(db, "send_enqueue", "receipt-7", "mg", "{}")
    late = await store.begin("id", "content")
    await store.name(late, "receipt-7")
    await end_lease(db)
    new = await store.take_over("id", late.number)
    assert new is not None
    assert await store.take_over("id", late.number) is None
    await store.answer(late, web.Response(status=202))
    await store.free(late)
    await store.give_up(late)
    with pytest.raises(web.HTTPException):
        await store.name(late, "other")
    assert await db.fetchval("SELECT (state, run, wire_key) FROM idempotency") == ("begun", new.number, "receipt-7")


# The header


@pytest.mark.parametrize("key", ['"k-1"', "k-1", ' "k-1" ', '"k-1"; version=2', "\tk-1"[1:]])
async def test_a_bare_key_is_equal_to_the_quoted_one(shop: Shop, key: str) -> None:
    await shop(key="k-1")
    await shop(key=key)
    assert shop.headers["Idempotent-Replayed"] == "true"


async def test_a_quoted_key_may_hold_more_characters_than_a_bare_one(shop: Shop) -> None:
    for key in (r'"a\"b, c"', r'"a\\"', '"{}"'):
        assert (await shop(key=key))[0] == 202
    assert shop.runs == 3


@pytest.mark.parametrize(
    "key", ["", '""', '"open', 'a"b', "a b", "a,b", "ä", "k" * 256, '"' + "k" * 256 + '"', r'"\x"']
)
async def test_what_is_no_key_is_refused(shop: Shop, key: str) -> None:
    assert (await shop(key=key))[0] == 400
    assert shop.runs == 0


async def test_two_keys_are_none(shop: Shop) -> None:
    headers = [("X-Who", "ann"), ("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    async with shop.client.post("/receipts", headers=headers) as answer:
        assert answer.status == 400


async def test_the_longest_key_is_taken(shop: Shop) -> None:
    assert (await shop(key="k" * 255))[0] == 202


async def test_a_missing_key_is_refused_only_where_one_is_required(shop: Shop, db: asyncpg.Pool) -> None:
    assert (await shop(key=None))[0] == 400
    assert (await shop(key=None, method="GET"))[0] == 202
    async with serving(Store(db), required=False) as other:
        assert [(await other(key=None))[0] for _ in range(2)] == [202, 202]
        assert other.runs == 2
    async with serving(Store(db), required=True, applies=lambda request: request.path == "/receipts") as third:
        assert (await third(key=None))[0] == 400
        assert [(await third(path="/letters", key="l"))[0] for _ in range(2)] == [202, 202]
        assert third.runs == 2


# The store


async def test_without_the_store_nothing_is_performed(db: asyncpg.Pool) -> None:
    async with serving(Store()) as shop:
        status, refused = await shop.problem()
        assert (status, refused["outcome"], shop.headers["Retry-After"], shop.runs) == (503, "unavailable", "5", 0)
    await db.execute("ALTER TABLE idempotency RENAME TO elsewhere")
    async with serving(Store(db)) as shop:
        assert ((await shop())[0], shop.runs) == (503, 0)


async def test_the_record_is_committed_before_the_handler_runs_and_no_connection_is_held(
    dsn: str, db: asyncpg.Pool
) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, serving(Store(pool)) as shop:

        async def looks(_: web.Request) -> web.Response:
            seen.append(await db.fetchval("SELECT state FROM idempotency"))
            async with pool.acquire(timeout=LIMIT):
                return web.Response(status=204)

        seen: list[str] = []
        shop.handle = looks
        assert (await shop())[0] == 204
        assert seen == ["begun"]
        assert (await shop())[0] == 204
        assert shop.headers["Idempotent-Replayed"] == "true"


async def test_an_answer_that_could_not_be_kept_is_given_and_its_repeat_is_ambiguous(
    shop: Shop, db: asyncpg.Pool
) -> None:
    async def loses_the_table(request: web.Request) -> web.StreamResponse:
        await db.execute("ALTER TABLE idempotency RENAME TO elsewhere")
        return await queued(request)

    shop.handle = loses_the_table
    with capture_logs() as logs:
        assert (await shop())[0] == 202
    assert [line["event"] for line in logs] == ["idempotency_not_stored"]
    await db.execute("ALTER TABLE elsewhere RENAME TO idempotency")
    await end_lease(db)
    assert (await shop.problem())[1]["outcome"] == "ambiguous"


async def test_a_freed_key_that_could_not_be_freed_is_performed_again_all_the_same(
    shop: Shop, db: asyncpg.Pool
) -> None:
    async def loses_the_table(_: web.Request) -> web.Response:
        await db.execute("ALTER TABLE idempotency RENAME TO elsewhere")
        return web.Response(status=429)

    shop.handle = loses_the_table
    assert (await shop())[0] == 429
    await db.execute("ALTER TABLE elsewhere RENAME TO idempotency")
    shop.handle = queued
    assert (await shop(b"other"))[0] == 422
    assert [(await shop())[0], (await shop())[0]] == [202, 202]
    assert shop.runs == 2


@pytest.mark.parametrize("lost", ["INSERT INTO idempotency", "pg_advisory_unlock_all"])
async def test_a_record_that_nobody_knows_was_begun_is_performed_by_a_repeat(
    dsn: str, db: asyncpg.Pool, lost: str
) -> None:
    async with losing(dsn) as pool, serving(Store(pool)) as shop:
        Losing.statement = lost
        shop.handle = queued
        assert (await shop())[0] == 503
        assert await db.fetchval("SELECT state FROM idempotency") == "begun"
        assert (await shop())[0] == 202
        assert (await shop())[0] == 202
        assert shop.runs == 1


async def test_a_repeated_answer_is_the_same_to_its_last_header(shop: Shop) -> None:
    packed = gzip.compress(b'{"queued": true}')

    async def packs(_: web.Request) -> web.Response:
        headers = [("Content-Encoding", "gzip"), ("Link", "</1>; rel=self"), ("Link", "</2>; rel=next")]
        return web.Response(body=packed, content_type="application/json", headers=CIMultiDict(headers))

    shop.handle = packs
    for _ in range(2):
        async with shop.client.post("/receipts", headers={"X-Who": "ann", "Idempotency-Key": "k-1"}) as answer:
            assert answer.headers.getall("Link") == ["</1>; rel=self", "</2>; rel=next"]
            assert await answer.json() == {"queued": True}
    assert answer.headers["Idempotent-Replayed"] == "true"


async def test_a_path_is_one_however_it_is_encoded(shop: Shop) -> None:
    for path in ("/receipts", "/receipt%73"):
        headers = {"X-Who": "ann", "Idempotency-Key": "k-1"}
        async with shop.client.post(URL(path, encoded=True), headers=headers) as answer:
            assert answer.status == 202
    assert shop.runs == 1


async def test_an_answer_that_cannot_be_given_again_is_a_mistake_that_shows_at_once(shop: Shop) -> None:
    async def streams(_: web.Request) -> web.StreamResponse:
        return web.StreamResponse()

    shop.handle = streams
    assert (await shop())[0] == 500
    assert (await shop.problem())[1]["outcome"] == "ambiguous"


async def test_records_are_deleted_when_kept_long_enough_and_never_while_their_send_is_undecided(
    db: asyncpg.Pool,
) -> None:
    store = Store(db, retention=timedelta(hours=24))
    for name in ("old", "new", "undecided"):
        run = await store.begin(name, "content")
        if name == "undecided":
            await claim(db, "receipt-7")
            await store.give_up(run, "receipt-7")
        else:
            await store.answer(run, web.Response())
    kept_for = await db.fetchval("SELECT min(keep_until) - clock_timestamp() FROM idempotency")
    assert timedelta(hours=23) < kept_for <= timedelta(hours=24)
    await db.execute("UPDATE idempotency SET keep_until = clock_timestamp() WHERE id <> 'new'")
    assert await delete_old(db) == 1
    assert [r["id"] for r in await db.fetch("SELECT id FROM idempotency ORDER BY id")] == ["new", "undecided"]
    await confirm(db, "receipt-7", await db.fetchval("SELECT fence FROM send_log"))
    assert await delete_old(db) == 1


async def test_a_record_is_not_deleted_while_its_request_runs(db: asyncpg.Pool) -> None:
    store = Store(db, retention=timedelta(0))
    await store.begin("running", "content")
    assert await delete_old(db) == 0
    await end_lease(db)
    assert await delete_old(db) == 1


async def test_of_many_equal_calls_at_once_one_is_performed(shop: Shop) -> None:
    answers = await asyncio.gather(*(shop() for _ in range(50)))
    assert shop.runs == 1
    assert {status for status, _ in answers} <= {202, 409}
