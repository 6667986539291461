# SPDX-License-Identifier: Apache-2.0
"""The application is told: what is written, when, in which order, and what it can claim by itself."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import psycopg
import pytest
from kit import (
    FEED,
    RULES,
    call,
    claim,
    confirm,
    event,
    fail,
    heard_neighbours,
    make_due,
    make_older,
    old_claim,
    old_claims,
    policies,
    reconcile,
    release_by_pass,
    row,
    state,
    unlimited,
)
from snippets import block

from reconciler import guard, guard_sync
from reconciler.passes.feeds import pause
from reconciler.passes.reconcile import run_pass
from reconciler.rule.limits import Live

ALL = ("failed", "held", "released", "sent")


async def wish(db: asyncpg.Pool, *what: str) -> None:
    await db.execute("UPDATE installation SET tell = $1", list(what or ALL))


async def entries(db: asyncpg.Pool, key: str = "order:1") -> list[str]:
    """What was written for a key, in order; in brackets what is no longer open."""
    rows = await db.fetch("SELECT * FROM release_outbox WHERE wire_key = wire_key($1) ORDER BY id", key)
    return [f"({r['what']})" if r["cancelled_at"] or r["delivered_at"] else r["what"] for r in rows]


async def released(db: asyncpg.Pool, key: str = "order:1", **options: Any) -> int:
    """A send whose sender says that nothing left; returns the fence."""
    fence: int = (await claim(db, key, **options))["fence"]
    assert await fail(db, key, fence, not_sent=True) == "released"
    return fence


class Heard:
    """What the database notified a connection of."""

    def __init__(self, connection: asyncpg.Connection[Any]) -> None:
        self._connection = connection
        self._keys: list[str] = []

    async def start(self) -> Heard:
        await self._connection.add_listener("reconciler_outbox", lambda *said: self._keys.append(str(said[3])))
        return self

    async def keys(self) -> list[str]:
        """The wire keys since the last call; an answer comes after what was notified before it was asked for."""
        await self._connection.execute("SELECT 1")
        found, self._keys[:] = list(self._keys), []
        return found


@pytest.fixture
async def heard(dsn: str) -> Any:
    connection = await asyncpg.connect(dsn)
    yield await Heard(connection).start()
    await connection.close()


# What is written


async def test_a_release_by_each_road_is_told_in_its_own_transaction(db: asyncpg.Pool, heard: Heard) -> None:
    await wish(db, "released")
    fence = (await claim(db, "order:1"))["fence"]
    async with db.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await fail(connection, "order:1", fence, not_sent=True)
        await transaction.rollback()
        assert (await entries(db), await heard.keys()) == ([], [])
    await fail(db, "order:1", fence, not_sent=True)
    await old_claim(db, "order:2")
    await call(db, "operator_release", "order:2", "note", "ann")
    await release_by_pass(db, "order:3")
    for key in ("order:1", "order:2", "order:3"):
        assert await entries(db, key) == ["released"]
    wires = [await db.fetchval("SELECT wire_key($1)", f"order:{n}") for n in (1, 2, 3)]
    assert await heard.keys() == wires


async def test_ordinary_sends_are_no_news(db: asyncpg.Pool, heard: Heard) -> None:
    await wish(db)
    await confirm(db, "order:1", (await claim(db, "order:1"))["fence"])
    await fail(db, "order:2", (await claim(db, "order:2"))["fence"], not_sent=False)
    await fail(db, "order:3", (await claim(db, "order:3"))["fence"], not_sent=None)
    assert await db.fetchval("SELECT count(*) FROM release_outbox") == 0
    assert await heard.keys() == []


async def test_without_a_channel_nothing_is_stored_and_releases_are_notified(db: asyncpg.Pool, heard: Heard) -> None:
    await released(db, "order-1")
    await event(db, "order-1")
    await reconcile(db)
    assert await state(db, "order-1") == "sent"
    assert await db.fetchval("SELECT count(*) FROM release_outbox") == 0
    assert await heard.keys() == ["order-1"]


@pytest.mark.parametrize("told", ["released", "sent", "failed", "held"])
async def test_only_what_is_wished_for_is_written(db: asyncpg.Pool, told: str) -> None:
    await wish(db, told)
    await old_claim(db, "order:1")
    await reconcile(db)  # held: nobody can tell
    await call(db, "operator_release", "order:1", "note", "ann")
    await call(db, "operator_decide", "order:1", "failed", "note", "ann")
    await event(db, "order:1")
    await reconcile(db)
    assert await state(db, "order:1") == "sent"
    assert await entries(db) == [told if told == "sent" else f"({told})"]


async def test_a_send_that_goes_on_takes_back_what_was_not_delivered_yet(db: asyncpg.Pool) -> None:
    await wish(db)
    await old_claim(db, "order:1")
    await reconcile(db)
    assert await entries(db) == ["held"]
    await call(db, "operator_release", "order:1", "note", "ann")
    assert await entries(db) == ["(held)", "released"]
    await call(db, "operator_decide", "order:1", "failed", "note", "ann")
    assert await entries(db) == ["(held)", "(released)", "failed"]
    await event(db, "order:1")
    await reconcile(db)
    assert await entries(db) == ["(held)", "(released)", "(failed)", "sent"]


async def by_evidence(db: asyncpg.Pool) -> None:
    await event(db, "order:1")
    await reconcile(db)


async def by_rejection(db: asyncpg.Pool) -> None:
    await event(db, "order:1", "rejected", kind="rejected")
    await reconcile(db)


async def by_claim(db: asyncpg.Pool) -> None:
    assert (await claim(db, "order:1"))["outcome"] == "claimed"


async def by_claim_that_sees_evidence(db: asyncpg.Pool) -> None:
    await event(db, "order:1")
    assert (await claim(db, "order:1"))["outcome"] == "already_sent"


async def by_confirm(db: asyncpg.Pool) -> None:
    assert await confirm(db, "order:1", (await row(db, "order:1"))["fence"]) == "sent_late"


async def by_operator_sent(db: asyncpg.Pool) -> None:
    await call(db, "operator_decide", "order:1", "sent", "note", "ann")


async def by_operator_failed(db: asyncpg.Pool) -> None:
    await call(db, "operator_decide", "order:1", "failed", "note", "ann")


async def by_unknown_event(db: asyncpg.Pool) -> None:
    await event(db, "order:1", "none", kind="unknown")
    await make_due(db, "order:1")
    await reconcile(db)
    assert (await row(db, "order:1"))["held_reason"] == "unknown_event"


ENDS = {
    by_evidence: ["sent"],
    by_rejection: ["failed"],
    by_claim: [],
    by_claim_that_sees_evidence: ["sent"],
    by_confirm: ["sent"],
    by_operator_sent: ["sent"],
    by_operator_failed: ["failed"],
    by_unknown_event: ["held"],
}


@pytest.mark.parametrize("end", ENDS)
async def test_whatever_ends_a_release_takes_its_message_back(db: asyncpg.Pool, end: Any) -> None:
    await wish(db)
    await released(db)
    await end(db)
    assert await entries(db) == ["(released)", *ENDS[end]]


async def test_a_same_key_release_that_is_taken_back_takes_its_message_back(db: asyncpg.Pool) -> None:
    await wish(db)
    await old_claim(db, "order:1", timedelta(minutes=5), fingerprint="f")
    await reconcile(db, key_window=timedelta(hours=1))
    assert (await row(db, "order:1"))["release_basis"] == "same_key_retry"
    assert await entries(db) == ["released"]
    await make_older(db, "order:1", timedelta(hours=2))
    await reconcile(db, key_window=timedelta(hours=1))
    assert (await entries(db))[0] == "(released)"


async def test_late_word_of_the_sender_is_news_where_a_hold_or_a_failure_was_told(db: asyncpg.Pool) -> None:
    await wish(db, "sent", "failed")
    fence = await old_claim(db, "order:1")
    await reconcile(db)
    await confirm(db, "order:1", fence)
    assert await entries(db) == ["sent"]
    fence = await old_claim(db, "order:2")
    await call(db, "operator_decide", "order:2", "failed", "note", "ann")
    await confirm(db, "order:2", fence)
    assert await entries(db, "order:2") == ["(failed)", "sent"]


async def tell_again(db: asyncpg.Pool) -> None:
    await make_due(db, "order-1")
    await reconcile(db)


async def test_told_again_notifies_again_and_makes_another_entry_once_the_first_was_delivered(
    db: asyncpg.Pool, heard: Heard
) -> None:
    await wish(db, "released")
    await released(db, "order-1")
    assert await heard.keys() == ["order-1"]
    await tell_again(db)  # this counts the telling that the release was
    assert (await row(db, "order-1"))["told"] == 1
    assert (await entries(db, "order-1"), await heard.keys()) == (["released"], [])
    await tell_again(db)
    assert (await entries(db, "order-1"), await heard.keys()) == (["released"], ["order-1"])
    await db.execute("UPDATE release_outbox SET delivered_at = now()")
    await tell_again(db)
    assert (await entries(db, "order-1"), await heard.keys()) == (["(released)", "released"], ["order-1"])


async def test_what_a_pass_releases_is_told_at_once_and_again_at_its_next_telling(
    db: asyncpg.Pool, heard: Heard
) -> None:
    await release_by_pass(db, "order-1")
    assert await heard.keys() == ["order-1"]
    await tell_again(db)
    assert await heard.keys() == ["order-1"]


async def test_what_passes_would_do_in_shadow_mode_is_not_told(db: asyncpg.Pool, heard: Heard) -> None:
    await wish(db)
    await old_claim(db, "order:1")
    await old_claim(db, "order:2")
    await heard_neighbours(db)
    await event(db, "order:2")
    shadow = replace(policies(), live=Live(frozenset({FEED}), only=False))
    report = await run_pass(db, shadow, who="test")
    assert report.counts["shadow:released:absent"] == 1
    assert await db.fetchval("SELECT count(*) FROM release_outbox") == 0
    assert await heard.keys() == []


async def test_a_pass_with_a_thousand_releases_tells_each_once(db: asyncpg.Pool, heard: Heard) -> None:
    await wish(db, "released")
    await old_claims(db, "order", 1000, timedelta(seconds=1), age=timedelta(minutes=30))
    soon = timedelta(minutes=5)
    rules = replace(RULES, on_unknown="release", grace=soon, give_up_after=soon)
    report = await reconcile(db, rules, limit=unlimited(FEED))
    assert report.counts["released:gave_up"] == 1000
    told = await db.fetch("SELECT wire_key FROM release_outbox WHERE what = 'released'")
    assert (len(told), len(set(told))) == (1000, 1000)
    keys = await heard.keys()
    assert (len(keys), len(set(keys))) == (1000, 1000)


# Pull


PULL = "SELECT * FROM send_claim_released($1, $2, $3)"


async def pull(db: Any, batch: int = 10, feed: str = FEED, **options: Any) -> list[asyncpg.Record]:
    rows: list[asyncpg.Record] = await db.fetch(PULL, feed, batch, json.dumps(options))
    return rows


async def test_released_sends_are_claimed_oldest_first_with_what_their_rows_know(db: asyncpg.Pool) -> None:
    for n, age in ((1, 1), (2, 3), (3, 2)):
        await released(db, f"order:{n}", recipient="a@example.com", message_class="receipts", fingerprint="f")
        await make_older(db, f"order:{n}", timedelta(minutes=age))
    first, second = await pull(db, 2, submit_within="30 seconds", claimed_by="worker-1")
    assert [first["send_key"], second["send_key"]] == ["order:2", "order:3"]
    assert dict(first) | {"fence": 0} == {
        "outcome": "claimed",
        "send_key": "order:2",
        "wire_key": (await row(db, "order:2"))["wire_key"],
        "attempt": 2,
        "fence": 0,
        "seconds_left": 30.0,
        "reason": None,
        "retry_at": None,
        "message_class": "receipts",
        "recipient": "a@example.com",
        "fingerprint": "f",
        "payload": None,
    }
    assert (await row(db, "order:2"))["claimed_by"] == "worker-1"
    assert await confirm(db, "order:2", first["fence"]) == "sent"


async def test_only_released_sends_of_the_feed_are_given_out(db: asyncpg.Pool) -> None:
    await db.fetch("SELECT send_enqueue('fresh', $1, '{}')", FEED)
    await claim(db, "running")
    await released(db, "elsewhere", feed="other")
    await released(db, "later", not_before="2001-01-01T00:00:00Z")
    await db.execute("UPDATE send_log SET not_before = now() + interval '1 hour' WHERE send_key = 'later'")
    await released(db, "over", expires_at="9000-01-01T00:00:00Z")
    await db.execute("UPDATE send_log SET expires_at = now() - interval '1 hour' WHERE send_key = 'over'")
    await released(db, "held")
    await event(db, "held", "none", kind="unknown")
    await reconcile(db)
    assert await pull(db) == []


async def test_a_send_that_was_heard_of_meanwhile_is_passed_over_for_the_next_one(db: asyncpg.Pool) -> None:
    for key in ("heard-of", "spoken-of", "silent"):
        await released(db, key)
    await event(db, "heard-of")
    await event(db, "spoken-of", "none", kind="unknown", message_id="m-2")
    assert [r["send_key"] for r in await pull(db, 1)] == ["silent"]
    assert await state(db, "heard-of") == "sent"
    assert await state(db, "spoken-of") == "pending"


async def test_a_same_key_retry_is_given_out_by_its_own_fingerprint(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", timedelta(minutes=5), fingerprint="f", payload={"subject": "s"})
    await reconcile(db, key_window=timedelta(hours=1))
    (found,) = await pull(db)
    assert (found["send_key"], found["attempt"], found["fingerprint"]) == ("order:1", 2, "f")
    assert json.loads(found["payload"]) == {"subject": "s"}


async def test_a_paused_feed_gives_out_only_what_its_senders_and_operators_freed(db: asyncpg.Pool) -> None:
    await release_by_pass(db, "by-pass")
    await released(db, "by-sender")
    async with db.acquire() as connection:
        await pause(connection, FEED, "test", "ann")
    assert [r["send_key"] for r in await pull(db)] == ["by-sender"]
    await released(db, "suspect")
    await db.execute("UPDATE feed_state SET suspect_at = now() WHERE feed = '*'")
    assert await pull(db) == []


@pytest.mark.parametrize(
    ("batch", "options", "says"),
    [
        (0, {}, "batch must lie between 1 and 1000"),
        (1001, {}, "batch must lie between 1 and 1000"),
        (None, {}, "batch must lie between 1 and 1000"),
        (1, {"recipient": "a"}, "unknown option"),
    ],
)
async def test_a_pull_that_is_a_mistake_is_refused(db: asyncpg.Pool, batch: Any, options: Any, says: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=says):
        await pull(db, batch, **options)


async def test_a_pull_with_an_old_snapshot_is_refused(db: asyncpg.Pool) -> None:
    async with db.acquire() as connection, connection.transaction(isolation="repeatable_read"):
        with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED"):
            await pull(connection)


async def test_of_twenty_workers_over_five_hundred_sends_each_send_goes_to_one(db: asyncpg.Pool, dsn: str) -> None:
    await db.execute(
        "INSERT INTO send_log (wire_key, send_key, feed, attempt, not_sent_attempts, released_at, release_basis,"
        " next_check_at) SELECT 'k-' || n, 'k-' || n, $1, 1, 1, now() + n * interval '1 ms', 'not_sent', now()"
        " FROM generate_series(1, 500) AS n",
        FEED,
    )
    pool = await asyncpg.create_pool(dsn, min_size=20, max_size=20)

    async def worker() -> list[tuple[str, int]]:
        got: list[tuple[str, int]] = []
        while rows := await pull(pool, 7):
            got += [(r["send_key"], r["fence"]) for r in rows]
        return got

    claims = [one for got in await asyncio.gather(*(worker() for _ in range(20))) for one in got]
    await pool.close()
    assert len(claims) == len({key for key, _ in claims}) == len({fence for _, fence in claims}) == 500
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'claimed' AND attempt = 2") == 500


async def test_workers_do_not_wait_for_a_send_that_another_one_holds(db: asyncpg.Pool) -> None:
    await released(db, "first")
    await released(db, "second")
    async with db.acquire() as slow, slow.transaction():
        assert [r["send_key"] for r in await pull(slow, 1)] == ["first"]
        assert [r["send_key"] for r in await asyncio.wait_for(pull(db), 20)] == ["second"]


# The documentation


def names_in(code: str) -> dict[str, Any]:
    """The names that a code block of the documentation defines."""
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102 - it is what readers copy
    return names


async def test_the_documented_worker_sends_again_what_was_released(db: asyncpg.Pool) -> None:
    await released(db, "order:1")
    await released(db, "order:2")
    submitted = []

    async def submit(released: guard.Released, claim: guard.Claim) -> str:
        assert (released.claim, claim.stamp.body) == (claim, {"v:send_key": claim.wire_key})
        submitted.append(claim.send_key)
        if claim.send_key == "order:1":
            raise TimeoutError
        return "m-2"

    retry_released = names_in(block("docs/outbox.md", "python", "claim_released"))["retry_released"]
    await retry_released(db, FEED, submit)
    await retry_released(db, FEED, submit)
    assert submitted == ["order:1", "order:2"]
    assert [await state(db, key) for key in ("order:1", "order:2")] == ["claimed", "sent"]


async def test_a_released_send_comes_with_what_its_row_knows_of_the_message(db: asyncpg.Pool, dsn: str) -> None:
    known = {"recipient": "ada@example.com", "fingerprint": "f", "payload": {"order": 1}, "message_class": "receipts"}
    for key in ("order:1", "order:2"):
        claimed = await guard.claim(db, key, FEED, **known)
        await guard.fail(db, claimed, "refused", not_sent=True)

    def in_thread() -> list[guard.Released]:
        with psycopg.connect(dsn, autocommit=True) as connection:
            return guard_sync.claim_released(connection, FEED, 1, submit_within=30)

    ours, theirs = await guard.claim_released(db, FEED, 1, submit_within=30), await asyncio.to_thread(in_thread)
    for (released,), key in ((ours, "order:1"), (theirs, "order:2")):
        assert (released.claim.send_key, released.claim.attempt, released.claim.granted) == (key, 2, True)
        assert 0 < released.claim.seconds_left() <= 30
        told = (released.recipient, released.fingerprint, released.payload, released.message_class)
        assert told == ("ada@example.com", "f", {"order": 1}, "receipts")
    assert await guard.claim_released(db, FEED, 1) == []


async def test_the_documented_listener_hears_of_each_release(db: asyncpg.Pool, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    asked: asyncio.Queue[None] = asyncio.Queue()

    async def retry() -> None:
        asked.put_nowait(None)

    listen = names_in(block("docs/outbox.md", "python", "add_listener"))["listen"]
    listening = asyncio.create_task(listen(connection, retry))
    async with asyncio.timeout(10):
        await asked.get()
        await released(db)
        await asked.get()
        await connection.close()
        await listening
