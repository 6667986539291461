# SPDX-License-Identifier: Apache-2.0
"""`send_once` of both guards, on asyncio and in threads: claim, submit, say how it went; two statements, no more."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
import asyncpg
import psycopg
import pytest
import requests
from kit import claim, event, make_older, old_claim, reconcile

from reconciler import guard, guard_sync
from reconciler.breakable.esp import Esp, esp
from reconciler.breakable.fate import Fate
from reconciler.sending import claims

KEY = "order.receipt:1:ada@example.com"
FEED = "mg"
MESSAGE = {"to": "ada@example.com", "text": "hello"}

Once = Callable[..., Awaitable[guard.Sent]]


@pytest.fixture
async def provider() -> AsyncIterator[Esp]:
    async with esp("mailgun") as running:
        yield running


@pytest.fixture(params=["asyncio", "threads"])
async def once(request: pytest.FixtureRequest, dsn: str, provider: Esp) -> AsyncIterator[Once]:
    """Sends once to the provider by one of the guards, on a connection of its own."""
    make = _once_async if request.param == "asyncio" else _once_in_thread

    async def run(key: str = KEY, **options: Any) -> guard.Sent:
        return await make(dsn, provider.url, key, options)

    return run


async def _once_async(dsn: str, url: str, key: str, options: dict[str, Any]) -> guard.Sent:
    connection = await asyncpg.connect(dsn)
    async with aiohttp.ClientSession() as session:

        async def submit(claim: guard.Claim) -> aiohttp.ClientResponse:
            return await session.post(url, data=claim.stamp.into(MESSAGE))

        submit = options.pop("submit", submit)
        try:
            return await guard.send_once(connection, key, FEED, submit, provider="mailgun", **options)
        finally:
            await connection.close()


async def _once_in_thread(dsn: str, url: str, key: str, options: dict[str, Any]) -> guard.Sent:
    loop = asyncio.get_running_loop()
    given = options.pop("submit", None)

    def run() -> guard.Sent:
        with psycopg.connect(dsn, autocommit=True) as connection, requests.Session() as session:

            def submit(claim: guard_sync.Claim) -> requests.Response:
                return session.post(url, data=claim.stamp.into(MESSAGE), timeout=claim.seconds_left() / 2)

            def ask(claim: guard_sync.Claim) -> object:
                return asyncio.run_coroutine_threadsafe(given(claim), loop).result()

            call = ask if given else submit
            return guard_sync.send_once(connection, key, FEED, call, provider="mailgun", **options)

    return await asyncio.to_thread(run)


async def state(db: asyncpg.Pool, key: str = KEY) -> str:
    return await db.fetchval("SELECT state FROM send_log WHERE send_key = $1", key)


async def test_a_send_is_submitted_once_and_its_answer_is_kept(db: asyncpg.Pool, once: Once, provider: Esp) -> None:
    first = await once()
    again = await once()
    wire_key = first.claim.wire_key
    assert (first.outcome, first.taken, first.recorded, first.error) == ("sent", True, True, None)
    assert first.message_id == provider.messages[0].id
    assert (again.outcome, again.taken, again.message_id) == ("already_sent", True, None)
    assert provider.taken == {wire_key: 1}
    row = await db.fetchrow("SELECT state, provider_message_id, attempt FROM send_log")
    assert tuple(row) == ("sent", provider.messages[0].id, 1)


@pytest.mark.parametrize(
    ("fate", "outcome", "reason", "left"),
    [
        (Fate.BUSY, "released", "HTTP 429", "pending"),
        (Fate.REFUSED, "failed", "HTTP 400", "failed"),
        (Fate.LATE_ERROR, "waiting", "HTTP 500", "claimed"),
    ],
)
async def test_what_the_provider_answers_decides_what_becomes_of_the_send(
    db: asyncpg.Pool, once: Once, provider: Esp, fate: Fate, outcome: str, reason: str, left: str
) -> None:
    provider.next_fates.append(fate)
    sent = await once()
    assert (sent.outcome, sent.reason, sent.taken) == (outcome, reason, False)
    assert await state(db) == left
    assert provider.taken.total() == fate.taken


@pytest.mark.parametrize("fate", [Fate.HANGS, Fate.RESET])
async def test_a_call_without_an_answer_stays_claimed_with_its_cause(
    db: asyncpg.Pool, once: Once, provider: Esp, fate: Fate
) -> None:
    provider.next_fates.append(fate)
    sent = await once(submit_within=3 if fate is Fate.HANGS else 30)
    assert (sent.outcome, sent.taken, sent.recorded) == ("waiting", False, True)
    assert isinstance(sent.error, Exception)
    row = await db.fetchrow("SELECT state, cause FROM send_log")
    assert tuple(row) == ("claimed", type(sent.error).__name__)
    assert (await once()).outcome == "in_flight"
    assert sum(provider.taken.values()) == 1


async def test_a_submit_that_forgets_to_return_the_answer_leaves_the_send_claimed(db: asyncpg.Pool, once: Once) -> None:
    async def submit(_claim: guard.Claim) -> None:
        """As where `return` is missing before `await session.post(...)`: a 500 would look like an acceptance."""

    assert (await once(submit=submit)).outcome == "waiting"
    found = await db.fetchrow("SELECT state, cause FROM send_log")
    assert tuple(found) == ("claimed", "no answer")


async def test_a_refused_connection_frees_the_send_at_once(db: asyncpg.Pool, once: Once, provider: Esp) -> None:
    url, provider.url = provider.url, "http://127.0.0.1:1/v3/mg.example.com/messages"
    assert (await once()).outcome == "released"
    provider.url = url
    assert (await once()).outcome == "sent"
    row = await db.fetchrow("SELECT attempt, not_sent_attempts FROM send_log")
    assert tuple(row) == (2, 1)


async def test_other_content_under_the_same_key_is_not_sent(once: Once, provider: Esp) -> None:
    await once(fingerprint="one")
    assert (await once(fingerprint="two")).outcome == "key_reused"
    assert sum(provider.taken.values()) == 1


async def test_a_held_or_expired_send_says_so_and_is_not_submitted(db: asyncpg.Pool, once: Once, provider: Esp) -> None:
    held = await once("order:held", not_before="2999-01-01")
    expired = await once("order:expired", expires_at="2020-01-01")
    assert (held.outcome, held.reason, expired.outcome) == ("held", "not_before", "expired")
    assert held.retry_at is not None
    assert provider.taken == {}


async def test_a_time_is_told_in_whatever_way_the_database_writes_times(db: asyncpg.Pool, once: Once) -> None:
    here = await db.fetchval("SELECT current_database()")
    await db.execute(f"ALTER DATABASE {here} SET datestyle = 'German'")  # for connections made from now on
    held = await once("order:held", not_before="2999-01-01T00:00:00Z")
    assert (held.outcome, held.retry_at) == ("held", datetime(2999, 1, 1, tzinfo=UTC))


async def test_a_mistake_in_submit_is_recorded_and_raised(db: asyncpg.Pool, once: Once) -> None:
    async def submit(_claim: guard.Claim) -> None:
        raise KeyError("template")

    with pytest.raises(KeyError):
        await once(submit=submit)
    assert await db.fetchval("SELECT cause FROM send_log") == "KeyError"


async def test_a_submit_that_decides_not_to_send_gives_the_claim_back(db: asyncpg.Pool, once: Once) -> None:
    async def unsubscribed(_claim: guard.Claim) -> None:
        raise guard.NotSent("unsubscribed meanwhile")

    async def never(_claim: guard.Claim) -> None:
        raise guard.Rejected("no such template")

    assert (await once("order:1", submit=unsubscribed)).outcome == "released"
    assert (await once("order:2", submit=never)).outcome == "failed"
    reason = await db.fetchval("SELECT verdict_reason FROM send_log WHERE send_key = 'order:2'")
    assert reason == "no such template"


async def test_nothing_is_submitted_after_the_time_to_submit(
    db: asyncpg.Pool, once: Once, provider: Esp, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = claims.boot_time, 0

    def frozen() -> float:
        """Stand for a worker that was stopped for a minute right after its claim was answered."""
        nonlocal calls
        calls += 1
        return real() if calls == 1 else real() + 60

    for module in (claims, guard, guard_sync):
        monkeypatch.setattr(module, "boot_time", frozen)
    sent = await once(submit_within=30)
    assert (sent.outcome, provider.taken) == ("released", {})
    assert await state(db) == "pending"


async def test_the_late_answer_of_a_superseded_attempt_is_kept_and_wins(
    db: asyncpg.Pool, once: Once, provider: Esp
) -> None:
    async def slow(claimed: guard.Claim) -> str:
        """Answer only after the send was given up, released and claimed again."""
        await make_older(db, KEY, timedelta(hours=1))
        await db.execute("SELECT * FROM operator_release($1, 'because', 'me')", KEY)
        assert (await claim(db, KEY, FEED))["attempt"] == 2
        return "m-of-attempt-1"

    sent = await once(submit=slow)
    assert (sent.outcome, sent.taken, sent.reason) == ("sent_late", True, "the row was claimed")
    assert await state(db) == "sent"
    assert (await once()).outcome == "already_sent"


async def test_a_second_attempt_is_told_that_its_send_was_found_sent_before_it_was_confirmed(
    db: asyncpg.Pool, once: Once, provider: Esp
) -> None:
    await old_claim(db, KEY)
    await db.execute("SELECT * FROM operator_release($1, 'because', 'me')", KEY)

    async def overtaken(_: guard.Claim) -> str:
        """Answer only after the feed spoke, of this attempt or the first, and a pass heard it."""
        await event(db, KEY, message_id="m-of-attempt-1")
        await reconcile(db)
        return "m-of-attempt-2"

    sent = await once(submit=overtaken)
    assert (sent.outcome, sent.taken, sent.claim.attempt) == ("sent", True, 2)
    assert sent.reason == "it was sent already (feed): an earlier attempt may have been accepted"


async def test_a_second_attempt_that_was_the_first_to_say_so_is_told_the_providers_answer(
    db: asyncpg.Pool, once: Once, provider: Esp
) -> None:
    await old_claim(db, KEY)
    await db.execute("SELECT * FROM operator_release($1, 'because', 'me')", KEY)
    sent = await once()
    assert (sent.outcome, sent.claim.attempt, sent.reason) == ("sent", 2, "HTTP 200")


@pytest.mark.parametrize("module", ["guard_sync", "guard_many_sync"])
def test_without_psycopg_it_is_said_which_extra_is_to_be_installed(module: str) -> None:
    alone = f"import sys; sys.modules['psycopg'] = None; from reconciler import {module}"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(r"ImportError: guard_sync needs an extra \(.*psycopg.*\): install the extra sync of", done.stderr)
