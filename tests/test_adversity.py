# SPDX-License-Identifier: Apache-2.0
"""What a hostile expert tried on the ledger and broke once: values no driver can read, deleted rows, killed passes."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from datetime import timedelta
from typing import Any

import asyncpg
import pytest
from kit import (
    FEED,
    RULES,
    call,
    claim,
    confirm,
    event,
    fail,
    make_older,
    old_claim,
    policies,
    reasons,
    reconcile,
    row,
    state,
    until_it_waits,
)

from reconciler import guard
from reconciler.passes import ledger
from reconciler.passes.feeds import FEED_HEALTH, pause
from reconciler.passes.reconcile import Scope, run_pass
from reconciler.rule.policy import Rules

KEY = "order:1"
DAY = timedelta(days=1)


# Values


@pytest.mark.parametrize("name", ["expires_at", "not_before", "intended_at"])
@pytest.mark.parametrize("time", ["infinity", "-infinity", "20000-01-01", "0044-01-01 BC"])
async def test_a_time_that_would_stop_every_pass_is_refused(db: asyncpg.Pool, name: str, time: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=name):
        await claim(db, KEY, **{name: time})


async def test_a_pass_gets_over_the_oldest_and_the_newest_time_that_a_send_may_have(db: asyncpg.Pool) -> None:
    for n, time in enumerate(("1970-01-01", "9999-01-01")):
        await call(db, "send_enqueue", f"order:{n}", FEED, json.dumps({"expires_at": time}))
    await old_claim(db, "order:2")
    await reconcile(db)
    assert [await state(db, f"order:{n}") for n in range(3)] == ["failed", "pending", "claimed"]
    assert (await row(db, "order:2"))["held_reason"] == "silent"


@pytest.mark.parametrize("value", [["a@example.com"], {"to": "a@example.com"}, True])
async def test_an_option_of_the_wrong_type_is_refused(db: asyncpg.Pool, value: object) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match="recipient"):
        await claim(db, KEY, recipient=value)


@pytest.mark.parametrize("payload", [None, [1], {"a": {"b": None}}, "text", 1, True])
async def test_a_payload_may_be_any_json(db: asyncpg.Pool, payload: object) -> None:
    await claim(db, KEY, payload=payload)
    assert json.loads((await row(db, KEY))["payload"]) == payload


async def test_a_time_without_a_zone_is_utc_in_a_session_of_any_zone(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection:
        await connection.execute("SET timezone = 'Pacific/Kiritimati'")
        await call(connection, "send_enqueue", KEY, FEED, json.dumps({"expires_at": "2400-01-01T00:00:00"}))
        await claim(connection, "order:2", expires_at="2400-01-01T00:00:00")
    for key in (KEY, "order:2"):
        assert (await row(db, key))["expires_at"].isoformat() == "2400-01-01T00:00:00+00:00"


async def test_submit_by_lies_exactly_seconds_left_ahead_whatever_the_calendar_does(db: asyncpg.Pool) -> None:
    given = await claim(db, KEY, submit_within="1 mon -29 days -12:00")
    stored = await row(db, KEY)
    assert stored["submit_by"] - stored["claimed_at"] == timedelta(seconds=given["seconds_left"])


@pytest.mark.parametrize("response", [{"a": "x\0y"}, {"\0": "\ud800"}, [float("nan")], "\0"])
async def test_an_odd_character_in_an_answer_does_not_lose_the_answer(db: asyncpg.Pool, response: Any) -> None:
    claimed = await guard.claim(db, KEY, FEED)
    assert await guard.confirm(db, claimed, "m\0", response) == "sent"
    assert (await row(db, KEY))["response"] is not None


# The same call again


async def test_a_call_repeated_for_another_feed_gets_no_second_claim(db: asyncpg.Pool) -> None:
    await claim(db, KEY, nonce="job-1")
    assert (await claim(db, KEY, "other", nonce="job-1"))["outcome"] == "in_flight"


async def test_a_call_repeated_after_its_attempt_was_reported_gets_no_second_claim(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY, nonce="job-1"))["fence"]
    assert (await claim(db, KEY, nonce="job-1"))["fence"] == fence
    assert await fail(db, KEY, fence, "timeout", not_sent=None) == "waiting"
    assert (await claim(db, KEY, nonce="job-1"))["outcome"] == "in_flight"


async def test_a_claim_of_a_row_that_is_deleted_meanwhile_grants_nothing(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", KEY, FEED, "{}")
    async with db.acquire() as other:
        async with other.transaction():
            await other.execute("DELETE FROM send_log")
            asked = asyncio.create_task(claim(db, KEY))
            await until_it_waits(db, asked)
        with pytest.raises(asyncpg.SerializationError, match="deleted"):
            await asked
    assert (await claim(db, KEY))["outcome"] == "claimed"


# Same-key releases


async def same_key_release(db: asyncpg.Pool, key: str, **options: Any) -> None:
    await old_claim(db, key, timedelta(minutes=2), fingerprint="f", **options)
    await reconcile(db, key_window=DAY, scope=Scope(wire_key=await db.fetchval("SELECT wire_key($1)", key)))
    assert (await row(db, key))["release_basis"] == "same_key_retry"


EXPIRE = "UPDATE send_log SET expires_at = clock_timestamp() WHERE send_key = $1"


async def test_a_same_key_release_that_expires_in_the_middle_of_a_pass_is_not_failed(db: asyncpg.Pool) -> None:
    """Its attempt is as ambiguous as ever: only a pass that has taken it back may end it."""
    await same_key_release(db, KEY)
    await db.execute(EXPIRE, KEY)
    async with db.acquire() as connection:
        [found] = await ledger.read_rows(connection, [(await row(db, KEY))["wire_key"]])
    assert found["expires_at"] is None
    await reconcile(db, key_window=DAY)
    after = await row(db, KEY)
    assert (after["state"], after["release_basis"]) == ("claimed", None)


async def test_a_pass_over_one_key_takes_back_no_other_same_key_release(db: asyncpg.Pool) -> None:
    for key in ("order-1", "order-2"):
        await same_key_release(db, key)
        await db.execute(EXPIRE, key)
    await reconcile(db, key_window=DAY, scope=Scope(wire_key="order-1"))
    assert (await state(db, "order-1"), await state(db, "order-2")) == ("claimed", "pending")


async def test_thousands_of_same_key_releases_are_taken_back_page_by_page(db: asyncpg.Pool) -> None:
    await db.execute(
        """INSERT INTO send_log (wire_key, send_key, feed, attempt, fence, first_claimed_at, claimed_at, submit_by,
               released_at, release_basis, retry_until, next_check_at)
           SELECT 'k' || n, 'k' || n, 'mg', 1, n, now(), now(), now(), now(), 'same_key_retry', now(), now() + '1h'
           FROM generate_series(1, 2500) AS n"""
    )
    await reconcile(db)
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'claimed'") == 2500


# Pause


async def test_pause_returns_although_senders_ask_without_end(db: asyncpg.Pool) -> None:
    """Whoever is refused doesn't take the lock that `pause` waits for: they used to share it in turns for ever."""
    await db.execute(
        """INSERT INTO send_log (wire_key, send_key, feed, attempt, fence, first_claimed_at, released_at, release_basis,
               next_check_at)
           SELECT 'k' || n, 'k' || n, 'mg', 1, n, now(), now(), 'absent', now() FROM generate_series(1, 20000) AS n"""
    )
    keys = iter(range(1, 20001))
    over = asyncio.Event()

    async def sender() -> None:
        async with db.acquire() as connection:
            while not over.is_set():
                async with connection.transaction():
                    await claim(connection, f"k{next(keys)}")
                    await connection.execute("SELECT pg_sleep(0.005)")

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(sender())
        async with db.acquire() as connection:
            await connection.execute("SELECT pg_sleep(0.1)")
            async with asyncio.timeout(20):
                await pause(connection, "*", "stop", "test")
            granted = await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'claimed'")
            await connection.execute("SELECT pg_sleep(0.1)")
        over.set()
    assert 0 < granted == await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'claimed'")


# Outcomes that were there before the row was sent


LATER = "UPDATE feed_state SET outcomes_until = clock_timestamp() + interval '1 hour' WHERE feed = '*'"


async def test_an_outcome_heard_long_before_a_late_confirm_is_kept(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await event(db, None, kind="bounced", message_id="m-1")
    await db.execute(LATER)
    assert await confirm(db, KEY, fence, "m-1") == "sent"
    assert (await row(db, KEY))["delivery"] == "bounced"


async def test_an_outcome_heard_long_before_the_first_claim_is_kept(db: asyncpg.Pool) -> None:
    await event(db, KEY, kind="bounced")
    await db.execute(LATER)
    assert (await claim(db, KEY))["outcome"] == "already_sent"
    assert (await row(db, KEY))["delivery"] == "bounced"


async def test_an_outcome_heard_long_before_a_failure_is_corrected_is_kept(db: asyncpg.Pool) -> None:
    """Failed rows are looked at every few minutes only, and outcomes never wait for them."""
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, not_sent=False)
    await event(db, KEY, kind="complained")
    await db.execute(LATER)
    await reconcile(db)
    assert ((await row(db, KEY))["state"], (await row(db, KEY))["delivery"]) == ("sent", "complained")


async def test_the_outcome_of_a_send_whose_id_was_known_before_the_call_is_followed(db: asyncpg.Pool) -> None:
    await claim(db, KEY, known_message_id="op-1")
    await event(db, None, kind="delivered", message_id="op-1")
    await reconcile(db)
    await reconcile(db)
    assert ((await row(db, KEY))["state"], (await row(db, KEY))["delivery"]) == ("sent", "delivered")


async def test_a_senders_failure_is_remembered_after_the_row_has_moved_on(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await fail(db, KEY, fence, "no such mailbox", not_sent=False)
    await make_older(db, KEY, timedelta(seconds=61))
    await call(db, "operator_release", KEY, "corrected", "me")
    await claim(db, KEY)
    assert await reasons(db, KEY) == ["failed:no such mailbox", "released:operator"]


# Passes that are killed, schemas that change


EVERYTHING_AT_ONCE = Rules(
    **{f: getattr(RULES, f) for f in RULES.__slots__}
    | {
        "grace": timedelta(0),
        "give_up_after": timedelta(0),
        "retry_backoff": timedelta(0),
        "max_attempts": 10**6,
        "on_unknown": "release",
    }
)
KILL = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'victim' AND datname = current_database() AND state = 'active' ORDER BY random() LIMIT 1
"""


async def test_passes_killed_in_the_middle_leave_nothing_behind_that_the_next_does_not_end(
    db: asyncpg.Pool, dsn: str
) -> None:
    rng, keys, ended = random.Random(7), [f"k{n}" for n in range(120)], Counter[str]()
    accepted: set[str] = set()
    over = asyncio.Event()

    async def sender() -> None:
        while not over.is_set():
            key = rng.choice(keys)
            heard = key in accepted
            given = await claim(db, key, submit_within=0.001, fingerprint="f")
            ended[given["outcome"]] += 1
            assert not (heard and given["outcome"] == "claimed"), "a send with evidence of acceptance was given out"
            if given["outcome"] == "claimed" and rng.random() < 0.6:
                await fail(db, key, given["fence"], not_sent=rng.choice([True, None]))

    async def receiver() -> None:
        for key in keys[:80]:
            await event(db, key, rng.choice(["accepted", "accepted", "none"]), message_id=f"m-{key}")
            if await db.fetchval("SELECT bool_or(testimony = 'accepted') FROM provider_event WHERE wire_key = $1", key):
                accepted.add(key)
            await db.execute("SELECT pg_sleep(0.02)")
        over.set()

    async def passes() -> None:
        async with asyncpg.create_pool(
            dsn, min_size=1, max_size=2, server_settings={"application_name": "victim"}
        ) as pool:
            while not over.is_set():
                try:
                    await run_pass(pool, policies(EVERYTHING_AT_ONCE, DAY), who="victim")
                    ended["whole"] += 1
                except (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError):
                    ended["killed"] += 1

    async def killer() -> None:
        while not over.is_set():
            await db.execute(KILL)
            await db.execute("SELECT pg_sleep(0.005)")

    await asyncio.gather(sender(), sender(), receiver(), passes(), passes(), killer())
    assert ended["killed"] > 3
    assert ended["claimed"] > 50
    await db.execute("UPDATE send_log SET next_check_at = clock_timestamp() WHERE next_check_at IS NOT NULL")
    for _ in range(2):
        await reconcile(db, EVERYTHING_AT_ONCE)
    rows = {r["send_key"]: r for r in await db.fetch("SELECT * FROM send_log")}
    assert {rows[key]["state"] for key in accepted & set(rows)} == {"sent"}
    assert all(r["next_check_at"] for r in rows.values() if r["state"] != "sent")


async def test_every_function_goes_on_in_a_session_that_a_migration_overtook(db: asyncpg.Pool) -> None:
    async def all_of_them(connection: Any, key: str) -> None:
        fence = (await claim(connection, key))["fence"]
        assert await fail(connection, key, fence, not_sent=None) == "waiting"
        assert await confirm(connection, key, fence) == "sent"
        await call(connection, "operator_release", key, "why", "me")
        await call(connection, "operator_decide", key, "failed", "why", "me")

    async with db.acquire() as session:
        for n in range(8):
            await all_of_them(session, f"before:{n}")
        await db.execute("ALTER TABLE send_log ADD COLUMN new_one text DEFAULT 'x'")
        await db.execute("ALTER TABLE provider_event ADD COLUMN new_one text")
        await db.execute("ALTER TABLE verdict ADD COLUMN new_one text")
        await all_of_them(session, "after")


async def test_the_health_of_a_feed_reads_one_day_of_its_deliveries_by_index(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection, connection.transaction():
        await connection.execute("SET LOCAL enable_seqscan = off")
        plan = "\n".join(r[0] for r in await connection.fetch(f"EXPLAIN {FEED_HEALTH}", [FEED]))
    assert "minute > " in next(line for line in plan.splitlines() if "Index Cond" in line), plan
