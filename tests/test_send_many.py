# SPDX-License-Identifier: Apache-2.0
"""Several sends in one call to the provider: each has its own claim, and its own answer where there is one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import asyncpg
import psycopg
import pytest
from kit import call, claim, old_claim

from reconciler import guard, guard_many, guard_many_sync

FEED = "mg"
SENDS = {f"order:{n}": {"recipient": f"r{n}@example.com"} for n in (1, 2, 3)}

Answer = Callable[[Sequence[guard.Claim]], object]
Many = Callable[..., Awaitable[list[guard.Sent]]]


@pytest.fixture(params=["asyncio", "threads"])
def many(request: pytest.FixtureRequest, db: asyncpg.Pool, dsn: str) -> Many:
    """Sends several in one call by one of the guards."""

    async def with_asyncpg(sends: Any, answer: Answer, **options: Any) -> list[guard.Sent]:
        async def submit(claims: Sequence[guard.Claim]) -> object:
            return answer(claims)

        return await guard_many.send_many(db, sends, FEED, submit, **options)

    def with_psycopg(sends: Any, answer: Answer, **options: Any) -> list[guard.Sent]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return guard_many_sync.send_many(connection, sends, FEED, answer, **options)

    async def in_thread(sends: Any, answer: Answer, **options: Any) -> list[guard.Sent]:
        return await asyncio.to_thread(with_psycopg, sends, answer, **options)

    return with_asyncpg if request.param == "asyncio" else in_thread


async def states(db: asyncpg.Pool) -> dict[str, str]:
    return {row["send_key"]: row["state"] for row in await db.fetch("SELECT send_key, state FROM send_log")}


def postmark(*codes: int) -> tuple[int, dict[str, str], bytes]:
    items = [{"ErrorCode": code, **({"MessageID": f"m-{n}"} if code == 0 else {})} for n, code in enumerate(codes)]
    return 200, {}, json.dumps(items).encode()


async def test_each_message_of_a_batch_has_its_own_answer(db: asyncpg.Pool, many: Many) -> None:
    sent = await many(SENDS, lambda _: postmark(0, 406, 405), provider="postmark")
    assert [(one.claim.send_key, one.outcome, one.message_id) for one in sent] == [
        ("order:1", "sent", "m-0"),
        ("order:2", "failed", None),
        ("order:3", "released", None),
    ]
    assert await states(db) == {"order:1": "sent", "order:2": "failed", "order:3": "pending"}


async def test_only_what_nobody_has_sent_is_submitted(db: asyncpg.Pool, many: Many) -> None:
    await claim(db, "order:2", FEED)
    submitted: list[str] = []

    def answer(claims: Sequence[guard.Claim]) -> object:
        submitted.extend(claimed.send_key for claimed in claims)
        return postmark(0, 0)

    sent = await many(SENDS, answer, provider="postmark")
    assert [one.outcome for one in sent] == ["sent", "in_flight", "sent"]
    assert submitted == ["order:1", "order:3"]
    assert [one.outcome for one in await many(SENDS, answer, provider="postmark")] == [
        "already_sent",
        "in_flight",
        "already_sent",
    ]
    assert submitted == ["order:1", "order:3"], "nothing was granted, so nothing was called"


async def test_an_answer_to_all_holds_for_each(db: asyncpg.Pool, many: Many) -> None:
    def answer(claims: Sequence[guard.Claim]) -> object:
        personalizations = [claimed.stamp.body for claimed in claims]
        assert len({json.dumps(one, default=dict) for one in personalizations}) == 3
        return 202, {"X-Message-Id": "abc"}, b""

    sent = await many(SENDS, answer, provider="sendgrid")
    assert [(one.outcome, one.message_id) for one in sent] == [("sent", "abc")] * 3


async def test_entries_of_ses_bulk_are_read_each(db: asyncpg.Pool, many: Many) -> None:
    result = {
        "ResponseMetadata": {"HTTPStatusCode": 200},
        "BulkEmailEntryResults": [
            {"Status": "SUCCESS", "MessageId": "0100-1"},
            {"Status": "MESSAGE_REJECTED", "Error": "not allowed"},
            {"Status": "ACCOUNT_THROTTLED"},
        ],
    }
    sent = await many(SENDS, lambda _: result, provider="ses")
    assert [(one.outcome, one.message_id) for one in sent] == [("sent", "0100-1"), ("failed", None), ("released", None)]


async def test_an_answer_about_another_number_of_messages_leaves_all_open(db: asyncpg.Pool, many: Many) -> None:
    sent = await many(SENDS, lambda _: postmark(0, 0), provider="postmark")
    assert [(one.outcome, one.reason) for one in sent] == [("waiting", "2 answers for 3 messages")] * 3
    assert set((await states(db)).values()) == {"claimed"}


async def test_a_call_that_fails_is_the_failure_of_each(db: asyncpg.Pool, many: Many) -> None:
    def answer(_: Sequence[guard.Claim]) -> object:
        raise TimeoutError

    sent = await many(SENDS, answer)
    assert [(one.outcome, type(one.error)) for one in sent] == [("waiting", TimeoutError)] * 3
    assert await db.fetchval("SELECT array_agg(DISTINCT cause) FROM send_log") == ["TimeoutError"]


async def test_no_send_of_a_batch_may_be_retried_with_a_key_that_its_provider_never_had(
    db: asyncpg.Pool, many: Many
) -> None:
    with_content = {"order:1": {"fingerprint": "5f2c8e"}}
    with pytest.raises(guard.GuardError, match="resend keeps one idempotency key for a whole call.*leave out fing"):
        await many(with_content, lambda _: pytest.fail("it was submitted"), provider="resend")
    assert await states(db) == {}
    await many(with_content, lambda _: postmark(0), provider="postmark")
    assert await states(db) == {"order:1": "sent"}


async def test_a_mistake_in_submit_is_recorded_for_each_and_raised(db: asyncpg.Pool, many: Many) -> None:
    def answer(_: Sequence[guard.Claim]) -> object:
        raise KeyError("template")

    with pytest.raises(KeyError):
        await many(SENDS, answer)
    assert await db.fetchval("SELECT array_agg(DISTINCT cause) FROM send_log") == ["KeyError"]


async def test_batches_over_the_same_keys_in_opposite_orders_neither_deadlock_nor_double(
    db: asyncpg.Pool,
) -> None:
    keys = [f"order:{n}" for n in range(300)]
    submitted: list[str] = []

    async def submit(claims: Sequence[guard.Claim]) -> str:
        submitted.extend(claimed.send_key for claimed in claims)
        return ""

    async def batch(order: list[str]) -> list[guard.Sent]:
        return await guard_many.send_many(db, {key: {} for key in order}, FEED, submit)

    await asyncio.gather(*(batch(order) for order in (keys, keys[::-1], keys[150:] + keys[:150], keys)))
    assert sorted(submitted) == sorted(keys)
    assert set((await states(db)).values()) == {"sent"}


async def test_a_cancelled_batch_leaves_its_cause(db: asyncpg.Pool) -> None:
    submitting = asyncio.Event()

    async def submit(_claims: Sequence[guard.Claim]) -> None:
        submitting.set()
        await asyncio.Event().wait()

    sender = asyncio.create_task(guard_many.send_many(db, SENDS, FEED, submit))
    await submitting.wait()
    sender.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sender
    assert await db.fetchval("SELECT array_agg(DISTINCT cause) FROM send_log") == ["CancelledError"]


async def test_of_a_batch_only_the_send_that_somebody_called_sent_meanwhile_is_told_so(
    db: asyncpg.Pool, dsn: str, many: Many
) -> None:
    for key in SENDS:
        await old_claim(db, key)
        assert (await call(db, "operator_release", key, "because", "me"))["outcome"] == "released"

    def answer(_: Sequence[guard.Claim]) -> object:
        with psycopg.connect(dsn, autocommit=True) as person:
            person.execute("SELECT * FROM operator_decide('order:2', 'sent', 'seen in the log', 'me')")
        return postmark(0, 0, 0)

    sent = await many(SENDS, answer, provider="postmark")
    assert [(one.outcome, one.claim.attempt) for one in sent] == [("sent", 2)] * 3
    told = [one.reason for one in sent]
    assert told[1] == "it was sent already (operator): an earlier attempt may have been accepted"
    assert told[0] == told[2] != told[1]
