# SPDX-License-Identifier: Apache-2.0
"""The sender's thin guard: a claim is durable before the provider is called, and its deadline is the sender's own."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import asyncpg
import pytest
from kit import event

from reconciler import guard
from reconciler.sending import claims
from webhooks.provider import Stamp

ROOT = Path(__file__).parents[1]


async def state(db: asyncpg.Pool, key: str) -> str:
    return await db.fetchval("SELECT state FROM send_log WHERE wire_key = wire_key($1)", key)


async def test_a_claim_is_committed_when_it_is_returned(db: asyncpg.Pool) -> None:
    async with db.acquire() as mine, db.acquire() as other:
        claimed = await guard.claim(mine, "order:1", "mg", submit_within=30)
        assert claimed.granted
        assert (claimed.attempt, claimed.reason, claimed.retry_at) == (1, None, None)
        assert await other.fetchval("SELECT fence FROM send_log WHERE wire_key = $1", claimed.wire_key) == claimed.fence


async def test_a_second_caller_gets_no_claim(db: asyncpg.Pool) -> None:
    await guard.claim(db, "order:1", "mg")
    second = await guard.claim(db, "order:1", "mg")
    assert (second.outcome, second.granted) == ("in_flight", False)
    with pytest.raises(guard.NotSent, match="not granted"):
        second.seconds_left()
    assert second.retry_at is not None


async def test_the_deadline_counts_from_before_the_claim_was_asked_for(db: asyncpg.Pool) -> None:
    before = guard.boot_time()
    claimed = await guard.claim(db, "order:1", "mg", submit_within=30)
    assert before + 30 <= claimed.deadline <= guard.boot_time() + 30
    assert 0 < claimed.seconds_left() <= 30


async def test_a_deadline_that_has_passed_leaves_no_seconds(db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = await guard.claim(db, "order:1", "mg", submit_within=30)
    monkeypatch.setattr(claims, "boot_time", lambda: claimed.deadline + 1)
    with pytest.raises(guard.NotSent, match="time to submit is over"):  # aiohttp takes 0 for no time-out at all
        claimed.seconds_left()


async def test_confirm_and_fail_say_how_it_went(db: asyncpg.Pool) -> None:
    sent = await guard.claim(db, "order:1", "mg")
    assert await guard.confirm(db, sent, "message-1", response={"id": "message-1"}) == "sent"
    refused = await guard.claim(db, "order:2", "mg")
    assert await guard.fail(db, refused, "422 bad address", not_sent=False) == "failed"
    never_left = await guard.claim(db, "order:3", "mg")
    assert await guard.fail(db, never_left, "connection refused", not_sent=True) == "released"
    unknown = await guard.claim(db, "order:4", "mg")
    assert await guard.fail(db, unknown, "time-out", not_sent=None) == "waiting"
    assert [await state(db, f"order:{n}") for n in (1, 2, 3, 4)] == ["sent", "failed", "pending", "claimed"]


async def test_a_connection_inside_a_transaction_is_refused_with_a_way_out(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection, connection.transaction():
        with pytest.raises(guard.GuardError, match="inside a transaction.*send_enqueue"):
            await guard.claim(connection, "order:1", "mg")


async def test_options_may_be_datetimes_and_none_means_not_given(db: asyncpg.Pool) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    held = await guard.claim(db, "order:1", "mg", not_before=soon, campaign=None)
    assert (held.outcome, held.reason, held.retry_at) == ("held", "not_before", soon)


async def test_the_stamp_carries_the_wire_key(db: asyncpg.Pool) -> None:
    claimed = await guard.claim(db, "order.receipt:1:a@example.com", "mg")
    assert claimed.wire_key in str(guard.stamp("mailgun", claimed.wire_key))


def test_an_unknown_provider_is_named_together_with_the_known_ones() -> None:
    with pytest.raises(guard.GuardError, match="unknown provider 'mailgum'; known: .*mailgun"):
        guard.stamp("mailgum", "k")


SENDER = """
import asyncio, sys
import asyncpg
from reconciler import guard

async def main(dsn):
    connection = await asyncpg.connect(dsn)
    one = await guard.claim(connection, "order:1", "mg")
    two = await guard.claim(connection, "order:2", "mg")
    print(await guard.confirm(connection, one, "m1"), await guard.fail(connection, two, "refused", not_sent=True))
    try:
        guard.stamp("mailgun", one.wire_key)
    except guard.GuardError as error:
        print(error)
    await connection.close()

asyncio.run(main(sys.argv[1]))
"""


async def test_a_sender_with_a_webhooks_package_of_its_own_can_claim_confirm_and_fail(tmp_path: Path, dsn: str) -> None:
    (tmp_path / "webhooks").mkdir()
    (tmp_path / "webhooks" / "__init__.py").write_text("APPLICATION = True\n")
    (tmp_path / "sender.py").write_text(SENDER)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "sender.py"), dsn],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.stderr == ""
    answers, refusal = ran.stdout.splitlines()
    assert answers == "sent released"
    assert refusal.startswith("another package named 'webhooks' hides the one of esp-reconciler")


def test_a_stamp_joins_lists_merges_objects_and_leaves_the_body_alone() -> None:
    stamp = Stamp({"tags": [{"name": "send_key", "value": "k"}], "headers": {"X-Send-Key": "k"}, "CustomID": "k"})
    body = {"tags": [{"name": "app", "value": "shop"}], "headers": {"Reply-To": "a"}, "CustomID": "theirs", "to": ["x"]}
    before = json.loads(json.dumps(body))
    assert stamp.into(body) == {
        "tags": [{"name": "app", "value": "shop"}, {"name": "send_key", "value": "k"}],
        "headers": {"Reply-To": "a", "X-Send-Key": "k"},
        "CustomID": "k",
        "to": ["x"],
    }
    assert body == before
    assert stamp.into({}) == stamp.body


async def test_a_repeated_call_gets_no_claim_once_anything_was_heard_of_the_send(db: asyncpg.Pool) -> None:
    first = await guard.claim(db, "order:1", "mg", nonce="8c2e5b1d")
    assert (await guard.claim(db, "order:1", "mg", nonce="8c2e5b1d")).fence == first.fence
    await event(db, "order:1", "accepted")
    repeated = await guard.claim(db, "order:1", "mg", nonce="8c2e5b1d")
    assert (repeated.outcome, repeated.fence) == ("in_flight", None)


@pytest.mark.parametrize("fence", [None, 0, -1, 2**62, 2**63 - 1])
async def test_a_fence_that_no_claim_ever_gave_is_refused(db: asyncpg.Pool, fence: int | None) -> None:
    claimed = guard.Claim("order:1", "claimed", "order:1", 1, fence, None, None, 0.0)
    with pytest.raises(asyncpg.InvalidParameterValueError, match="needs the fence that send_claim gave"):
        await guard.confirm(db, claimed, "m-1")
