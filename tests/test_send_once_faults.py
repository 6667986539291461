# SPDX-License-Identifier: Apache-2.0
"""`send_once` where something is amiss: transactions, a database that is away, cancellation, no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import asyncpg
import psycopg
import pytest

from reconciler import guard, guard_many, guard_sync
from reconciler.sending import claims
from webhooks.registry import PROVIDERS

KEY = "order:1"
FEED = "mg"


async def taken(_claim: guard.Claim) -> str:
    return "m-1"


def taken_in_thread(_claim: guard.Claim) -> str:
    return "m-1"


async def row(db: asyncpg.Pool) -> tuple[str, str | None]:
    found = await db.fetchrow("SELECT state, cause FROM send_log")
    assert found is not None
    return found["state"], found["cause"]


class Flaky:
    """Lends a connection that is away for some calls after the first, which is the claim."""

    def __init__(self, connection: Any, away: int) -> None:
        self.lent = connection
        self.away = away
        self.calls = 0

    def _arrive(self) -> None:
        self.calls += 1
        if 1 < self.calls <= 1 + self.away:
            raise ConnectionResetError("the database is away")

    async def fetchrow(self, query: str, /, *args: Any) -> Any:
        self._arrive()
        return await self.lent.fetchrow(query, *args)

    @contextmanager
    def connection(self) -> Iterator[psycopg.Connection[Any]]:
        self._arrive()
        yield self.lent


Send = Callable[[int], Awaitable[tuple[guard.Sent, int]]]


@pytest.fixture(params=["asyncio", "threads"])
def send(request: pytest.FixtureRequest, dsn: str) -> Send:
    """Sends once through a database that is away for so many calls; returns the outcome and the number of calls."""

    async def with_asyncpg(away: int) -> tuple[guard.Sent, int]:
        connection = await asyncpg.connect(dsn)
        database = Flaky(connection, away)
        try:
            return await guard.send_once(database, KEY, FEED, taken), database.calls
        finally:
            await connection.close()

    def with_psycopg(away: int) -> tuple[guard.Sent, int]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            database = Flaky(connection, away)
            return guard_sync.send_once(database, KEY, FEED, taken_in_thread), database.calls

    async def in_thread(away: int) -> tuple[guard.Sent, int]:
        return await asyncio.to_thread(with_psycopg, away)

    return with_asyncpg if request.param == "asyncio" else in_thread


async def test_an_answer_is_told_until_the_database_takes_it(db: asyncpg.Pool, send: Send) -> None:
    sent, calls = await send(3)
    assert (sent.outcome, sent.recorded, sent.message_id, calls) == ("sent", True, "m-1", 5)
    assert await row(db) == ("sent", None)


async def test_a_send_costs_two_statements(db: asyncpg.Pool, send: Send) -> None:
    assert (await send(0))[1] == 2


async def test_an_answer_that_could_not_be_told_is_the_callers_to_repeat(
    db: asyncpg.Pool, send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "STORE_SECONDS", 0.2)
    monkeypatch.setattr(guard_sync, "STORE_SECONDS", 0.2)
    sent, _ = await send(1000)
    assert (sent.outcome, sent.taken, sent.recorded, sent.message_id) == ("sent", True, False, "m-1")
    assert await row(db) == ("claimed", None)
    assert await guard.confirm(db, sent.claim, sent.message_id) == "sent"
    assert await row(db) == ("sent", None)


async def test_each_of_the_two_statements_is_a_transaction_of_its_own(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    queries: list[str] = []
    connection.add_query_logger(lambda record: queries.append(record.query))
    seen: list[object] = []

    async def submit(_claim: guard.Claim) -> str:
        seen.append(connection.is_in_transaction())
        other = await asyncpg.connect(dsn)
        seen.append(await other.fetchval("SELECT state FROM send_log"))
        await other.close()
        return "m-1"

    await guard.send_once(connection, KEY, FEED, submit)
    await connection.close()
    assert seen == [False, "claimed"]
    assert queries == [guard.CLAIM, guard.CONFIRM]


async def test_no_connection_of_the_pool_is_held_while_the_provider_is_called(dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:

        async def submit(_claim: guard.Claim) -> str:
            assert pool.get_idle_size() == 1
            return "m-1"

        assert (await guard.send_once(pool, KEY, FEED, submit)).outcome == "sent"


@pytest.mark.parametrize("way", ["asyncio", "threads"])
async def test_a_connection_inside_a_transaction_is_refused(db: asyncpg.Pool, dsn: str, way: str) -> None:
    def in_thread() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection, connection.transaction():
            connection.execute("SELECT 1")
            with pytest.raises(guard_sync.GuardError, match="inside a transaction.*send_enqueue"):
                guard_sync.send_once(connection, KEY, FEED, taken_in_thread)
        with (
            psycopg.connect(dsn) as connection,
            pytest.raises(guard_sync.GuardError, match="inside a transaction.*autocommit=True"),
        ):
            guard_sync.send_once(connection, KEY, FEED, taken_in_thread)

    if way == "threads":
        await asyncio.to_thread(in_thread)
    else:
        async with db.acquire() as connection, connection.transaction():
            with pytest.raises(guard.GuardError, match="inside a transaction.*send_enqueue"):
                await guard.send_once(connection, KEY, FEED, taken)
    assert await db.fetchval("SELECT count(*) FROM send_log") == 0


async def test_a_send_that_is_decided_inside_a_transaction_is_enqueued_in_it(db: asyncpg.Pool, dsn: str) -> None:
    async with db.acquire() as connection:
        with suppress(ZeroDivisionError):
            async with connection.transaction():
                assert await guard.enqueue(connection, "order:never", FEED) == "enqueued"
                raise ZeroDivisionError
        async with connection.transaction():
            assert await guard.enqueue(connection, KEY, FEED, recipient="ada@example.com") == "enqueued"

    def in_thread() -> list[str]:
        with psycopg.connect(dsn) as connection:
            return [guard_sync.enqueue(connection, key, FEED) for key in (KEY, "order:2")]

    assert await asyncio.to_thread(in_thread) == ["exists", "enqueued"]
    assert await db.fetchval("SELECT string_agg(send_key || ' ' || state, ', ' ORDER BY send_key) FROM send_log") == (
        "order:1 pending, order:2 pending"
    )
    assert (await guard.send_once(db, KEY, FEED, taken)).outcome == "sent"


async def test_an_answer_is_stored_though_its_sender_is_cancelled_meanwhile(db: asyncpg.Pool, dsn: str) -> None:
    """A caller's time-out, or a sibling that fails, comes while the confirm waits for the row."""
    holder = await asyncpg.connect(dsn)
    held = holder.transaction()

    async def submit(_claim: guard.Claim) -> str:
        await held.start()
        await holder.execute("SELECT FROM send_log FOR UPDATE")
        return "m-1"

    sender = asyncio.create_task(guard.send_once(db, KEY, FEED, submit))
    while not await db.fetchval(WAITING):
        assert not sender.done()
    sender.cancel()
    await asyncio.sleep(0)
    await held.rollback()
    with pytest.raises(asyncio.CancelledError):
        await sender
    await holder.close()
    assert await row(db) == ("sent", None)


WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


async def test_a_driver_that_hangs_is_left_alone(db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "STORE_SECONDS", 0.2)
    hanging = asyncio.Event()

    class Hangs(Flaky):
        """After the claim it neither answers nor lets itself be cancelled, as a pool whose server has stopped."""

        async def fetchrow(self, query: str, /, *args: Any) -> Any:
            self.calls += 1
            while self.calls > 1 and not hanging.is_set():
                with suppress(asyncio.CancelledError):
                    await hanging.wait()
            return await self.lent.fetchrow(query, *args)

    async with asyncio.timeout(10):
        sent = await guard.send_once(Hangs(db, 0), KEY, FEED, taken)
    hanging.set()
    assert (sent.outcome, sent.message_id, sent.recorded) == ("sent", "m-1", False)


async def test_a_transaction_that_submit_began_leaves_the_answer_with_the_caller(dsn: str, db: asyncpg.Pool) -> None:
    connection = await asyncpg.connect(dsn)

    async def submit(_claim: guard.Claim) -> str:
        await connection.execute("BEGIN")
        return "m-1"

    sent = await guard.send_once(connection, KEY, FEED, submit)
    await connection.execute("ROLLBACK")
    assert (sent.outcome, sent.taken, sent.recorded, sent.message_id) == ("sent", True, False, "m-1")
    assert await guard.confirm(connection, sent.claim, sent.message_id) == "sent"
    await connection.close()


async def test_a_connection_that_was_lost_meanwhile_leaves_the_answer_with_the_caller(
    dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard_sync, "STORE_SECONDS", 0.2)

    def in_thread() -> guard_sync.Sent:
        with psycopg.connect(dsn, autocommit=True) as connection:

            def submit(_claim: guard_sync.Claim) -> str:
                with psycopg.connect(dsn, autocommit=True) as other:
                    other.execute("SELECT pg_terminate_backend(%s)", [connection.info.backend_pid])
                return "m-1"

            return guard_sync.send_once(connection, KEY, FEED, submit)

    sent = await asyncio.to_thread(in_thread)
    assert (sent.outcome, sent.taken, sent.recorded, sent.message_id) == ("sent", True, False, "m-1")


async def test_a_message_id_may_be_a_number(db: asyncpg.Pool) -> None:
    claimed = await guard.claim(db, KEY, FEED)
    assert await guard.confirm(db, claimed, 288230376) == "sent"  # type: ignore[arg-type] - Mailjet's SDK gives one
    assert await db.fetchval("SELECT provider_message_id FROM send_log") == "288230376"


async def test_a_connection_with_a_codec_for_json_claims_like_any_other(dsn: str, db: asyncpg.Pool) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    assert (await guard.send_once(connection, KEY, FEED, taken, campaign="spring")).outcome == "sent"
    assert await guard.enqueue(connection, "order:2", FEED, campaign="spring") == "enqueued"
    many = await guard_many.send_many(connection, {"order:3": {"campaign": "spring"}}, FEED, lambda _: taken(_claim()))
    assert [sent.outcome for sent in many] == ["sent"]
    await connection.close()
    assert await db.fetchval("SELECT array_agg(DISTINCT campaign) FROM send_log") == ["spring"]


def _claim() -> guard.Claim:
    return guard.Claim(KEY, "claimed", KEY, 1, 1, None, None, 0.0)


@pytest.mark.parametrize("way", ["once", "block", "many"])
async def test_whoever_submits_may_not_be_given_a_nonce(db: asyncpg.Pool, way: str) -> None:
    ways = {
        "once": lambda: guard.send_once(db, KEY, FEED, taken, nonce="job-7"),
        "block": lambda: guard.sending(db, KEY, FEED, nonce="job-7").__aenter__(),
        "many": lambda: guard_many.send_many(db, {KEY: {"nonce": "job-7"}}, FEED, lambda _: taken(_claim())),
    }
    with pytest.raises(guard.GuardError, match="nonce belongs to one call of `claim`"):
        await ways[way]()
    assert await db.fetchval("SELECT count(*) FROM send_log") == 0


async def test_a_key_that_no_database_takes_is_refused_without_being_repeated(db: asyncpg.Pool) -> None:
    for key in ("ada@example.com\0", "ada@example.com\ud800"):
        with pytest.raises(guard.GuardError, match="zero byte or half a surrogate") as refused:
            await guard.claim(db, key, FEED)
        assert "ada" not in str(refused.value)


async def test_a_block_whose_time_is_over_does_not_begin(db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    real = claims.boot_time
    monkeypatch.setattr(claims, "boot_time", lambda: real() + 60)  # frozen right after the claim was answered
    began = False
    with pytest.raises(guard.NotSent):
        async with guard.sending(db, KEY, FEED, submit_within=30):
            began = True
    assert (began, await db.fetchval("SELECT state FROM send_log")) == (False, "pending")


async def test_a_thread_whose_time_is_over_does_not_submit(
    db: asyncpg.Pool, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = claims.boot_time
    monkeypatch.setattr(claims, "boot_time", lambda: real() + 60)
    submitted = []

    def in_thread() -> guard_sync.Sent:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return guard_sync.send_once(connection, KEY, FEED, submitted.append, submit_within=30)

    assert (await asyncio.to_thread(in_thread)).outcome == "released"
    assert (submitted, await db.fetchval("SELECT state FROM send_log")) == ([], "pending")


async def test_an_answer_without_a_grant_is_a_mistake_that_is_seen(db: asyncpg.Pool) -> None:
    await guard.claim(db, KEY, FEED)
    with pytest.raises(guard.GuardError, match="ask `granted` before you submit"):
        async with guard.sending(db, KEY, FEED) as send:
            send.answer = "m-2"


async def test_a_message_id_that_the_message_will_not_bear_is_refused(db: asyncpg.Pool) -> None:
    await db.execute("UPDATE installation SET namespace = 'shop'")
    wrong, right = (guard.known_message_id("azure_acs", KEY, namespace) for namespace in ("", "shop"))
    with pytest.raises(guard.GuardError, match="with the namespace of the database"):
        await guard.send_once(db, KEY, FEED, taken, provider="azure_acs", known_message_id=wrong)
    with pytest.raises(guard.GuardError, match="with the namespace of the database"):
        await guard_many.claim_many(db, {"order:2": {"known_message_id": wrong}}, FEED, provider="azure_acs")
    assert await db.fetchval("SELECT array_agg(state) FROM send_log") == ["pending", "pending"]
    await db.execute("DELETE FROM send_log")
    sent = await guard.send_once(db, KEY, FEED, taken, provider="azure_acs", known_message_id=right)
    assert sent.outcome == "sent"


async def test_a_cancelled_sender_leaves_the_cause(db: asyncpg.Pool) -> None:
    submitting = asyncio.Event()

    async def submit(_claim: guard.Claim) -> None:
        submitting.set()
        await asyncio.Event().wait()

    sender = asyncio.create_task(guard.send_once(db, KEY, FEED, submit))
    await submitting.wait()
    sender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sender
    assert await row(db) == ("claimed", "CancelledError")


async def test_a_block_sets_its_answer_and_reads_what_became_of_the_send(db: asyncpg.Pool) -> None:
    async with guard.sending(db, KEY, FEED) as send:
        assert send.granted
        send.answer = "m-1"
    assert (send.sent.outcome, send.sent.message_id) == ("sent", "m-1")
    async with guard.sending(db, KEY, FEED) as again:
        assert not again.granted
    assert again.sent.outcome == "already_sent"


async def test_what_a_block_raises_is_recorded_and_goes_on(db: asyncpg.Pool) -> None:
    with pytest.raises(TimeoutError):
        async with guard.sending(db, KEY, FEED) as send:
            raise TimeoutError
    assert (send.sent.outcome, await row(db)) == ("waiting", ("claimed", "TimeoutError"))


async def test_a_block_that_gives_no_answer_leaves_the_send_claimed(db: asyncpg.Pool, dsn: str) -> None:
    async with guard.sending(db, KEY, FEED) as send:
        pass
    assert (send.sent.outcome, await row(db)) == ("waiting", ("claimed", "no answer"))

    def in_thread() -> guard_sync.Sent:
        with psycopg.connect(dsn, autocommit=True) as connection:
            with guard_sync.sending(connection, "order:2", FEED) as send:
                send.answer = ""  # taken, without an id
            return send.sent

    assert (await asyncio.to_thread(in_thread)).outcome == "sent"


async def test_a_claim_for_azure_without_its_message_id_is_refused(db: asyncpg.Pool) -> None:
    with pytest.raises(guard.GuardError, match="claim with known_message_id=guard.known_message_id"):
        await guard.send_once(db, KEY, FEED, taken, provider="azure_acs")
    known = guard.known_message_id("azure_acs", KEY)
    headers = {}

    async def submit(claim: guard.Claim) -> str:
        headers.update(claim.stamp.headers)
        return "m-1"

    assert (await guard.send_once(db, KEY, FEED, submit, provider="azure_acs", known_message_id=known)).taken
    assert headers == {"Operation-Id": known}
    assert await db.fetchval("SELECT known_message_id FROM send_log") == known


async def test_a_database_without_the_schema_is_named_as_that(empty_dsn: str) -> None:
    connection = await asyncpg.connect(empty_dsn)
    with pytest.raises(guard.GuardError, match="run reconciler migrate"):
        await guard.claim(connection, KEY, FEED)
    await connection.close()

    def in_thread() -> None:
        with (
            psycopg.connect(empty_dsn, autocommit=True) as connection,
            pytest.raises(guard.GuardError, match="run reconciler migrate"),
        ):
            guard_sync.claim(connection, KEY, FEED)

    await asyncio.to_thread(in_thread)


def test_a_claim_that_was_not_granted_stamps_nothing() -> None:
    with pytest.raises(guard.GuardError, match="ask `granted` before you submit"):
        _ = guard.Claim(KEY, "already_sent", KEY, None, None, None, None, 0.0, "mailgun").stamp


def test_what_a_claim_stamps_depends_on_a_provider_that_is_named() -> None:
    claim = guard.Claim(KEY, "claimed", KEY, 1, 1, None, None, 0.0)
    with pytest.raises(guard.GuardError, match="give provider="):
        _ = claim.stamp
    assert PROVIDERS["mailgun"].stamp(KEY) == guard.Claim(KEY, "claimed", KEY, 1, 1, None, None, 0.0, "mailgun").stamp
