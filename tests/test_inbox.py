# SPDX-License-Identifier: Apache-2.0
"""Events are stored once, whole batches at a time, and whoever waits is told the truth about the commit."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Self

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from receiver_app import Cut, random_bytes

from webhooks import rows
from webhooks.counters import Counters
from webhooks.database import connect_pool, is_behind_pooler
from webhooks.event import Event, Kind, Testimony, normal_recipient, stand_in_key, storable, wire_key
from webhooks.inbox import MAX_BATCH, Inbox, InboxBusy, InboxUnavailable, Stored
from webhooks.rows import RowMaker
from webhooks.writer import STORE_EVENTS, read_layout

AT = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)


def event(n: object, **changes: object) -> Event:
    base = Event(
        kind=Kind.DELIVERED,
        testimony=Testimony.ACCEPTED,
        message_id=f"message-{n}",
        event_id=f"event-{n}",
        send_key=f"order-{n}",
        raw=b"{}",
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
async def inbox(db: asyncpg.Pool) -> AsyncIterator[Inbox]:
    box = Inbox(db)
    await box.open()
    yield box
    await box.close()


async def count(db: asyncpg.Pool) -> int:
    return await db.fetchval("SELECT count(*) FROM provider_event")


@pytest.fixture
def sockets():
    with tempfile.TemporaryDirectory(prefix="cut-") as directory:  # tmp_path may be too long for a socket
        yield Path(directory)


# What is stored


async def test_an_event_is_stored_with_its_exact_bytes(db, inbox):
    raw = b'{"subject":"cut \\ud83d","nul":"\\u0000"}\r\n\xff\x00'
    told = await inbox.store(
        "main", [event(1, recipient="Ada <ada@EXAMPLE.org>", occurred_at=AT, reason="no", raw=raw)]
    )
    assert told == Stored(1, 0)
    row = dict(await db.fetchrow("SELECT * FROM provider_event"))
    assert row.pop("received_at") is not None
    assert row.pop("partition_at") in (AT, rows.UNDATED)  # whether there is a partition for it is asked below
    assert row == {
        "feed": "main",
        "message_id": "message-1",
        "event_id": "event-1",
        "occurred_at": AT,
        "wire_key": "order-1",
        "kind": "delivered",
        "testimony": "accepted",
        "recipient": "ada@example.org",
        "reason": "no",
        "source": "http",
        "attempt": None,
        "fence": None,
        "raw": raw,
    }


async def test_an_event_lies_in_its_month_where_that_has_a_partition(db, inbox):
    months = await db.fetch("SELECT provider_event_months()")
    inside = datetime.combine(months[0][0], datetime.min.time(), UTC)
    zone = msgspec.json.decode(b'"2000-01-01T00:00:00+02:00"', type=datetime).tzinfo
    before = inside - timedelta(microseconds=1)
    cases = {
        "in": inside,
        "out": before,
        "none": None,
        "far": datetime(9999, 1, 1, tzinfo=UTC),
        "naive": before.replace(tzinfo=None),
    }
    cases["zone"] = (inside + timedelta(hours=1)).astimezone(zone)
    await inbox.store("main", [event(name, occurred_at=at) for name, at in cases.items()])
    found = await db.fetch("SELECT event_id, partition_at, occurred_at FROM provider_event")
    expected = {f"event-{name}": (rows.UNDATED, at) for name, at in cases.items()}
    expected["event-in"] = (inside, inside)
    expected["event-zone"] = (inside + timedelta(hours=1), inside + timedelta(hours=1))
    expected["event-naive"] = (rows.UNDATED, before)
    assert {row["event_id"]: (row["partition_at"], row["occurred_at"]) for row in found} == expected


async def test_the_wire_key_of_what_came_back_is_the_one_of_the_send(db, inbox):
    await inbox.store(
        "main", [event(1, send_key="order.receipt:1001"), event(2, send_key="plain_key-2"), event(3, send_key=None)]
    )
    found = {
        row["message_id"]: row["wire_key"] for row in await db.fetch("SELECT message_id, wire_key FROM provider_event")
    }
    assert found == {
        "message-1": await db.fetchval("SELECT wire_key('order.receipt:1001')"),
        "message-2": "plain_key-2",
        "message-3": await db.fetchval("SELECT stand_in_key('main', 'message-3')"),
    }


async def test_the_namespace_of_the_installation_is_used(db):
    await db.execute("UPDATE installation SET namespace = 'blue'")
    box = Inbox(db)
    await box.open()
    await box.store("main", [event(1, send_key="order-1")])
    await box.close()
    assert await db.fetchval("SELECT wire_key FROM provider_event") == wire_key("order-1", "blue")


async def test_events_of_no_message_get_a_message_id_of_their_own(db, inbox):
    assert await inbox.store(
        "main", [event(n, message_id=given, send_key=None) for n, given in enumerate([None, None, ""])]
    ) == (3, 0)
    found = await db.fetch("SELECT message_id, wire_key FROM provider_event ORDER BY 1")
    assert [tuple(row) for row in found] == [(f"~event-{n}", stand_in_key("main", f"~event-{n}")) for n in range(3)]


async def test_ids_longer_than_an_index_entry_are_stored_once(db, inbox):
    long = random_bytes(6_001, "id").hex()
    for _ in range(2):
        mail = "ada@example.org"
        await inbox.store("main", [event(1, event_id=long, message_id=long + "m", send_key=long + "k", recipient=mail)])
    (row,) = await db.fetch("SELECT * FROM provider_event")
    assert row["event_id"].startswith("sha256:")
    assert row["recipient"] == "ada@example.org", "whole, not in reduced form"
    assert row["wire_key"] == wire_key(long + "k")


@pytest.mark.parametrize("nasty", ["a\x00b", "half \ud83d", "\udfff", "\x00", "\u202e", "ünï", "x" * 5_000])
async def test_text_that_postgresql_refuses_loses_no_event(db, inbox, nasty):
    bad = event(1, event_id=nasty, message_id=nasty, send_key=nasty, recipient=f"{nasty}@{nasty}.org", reason=nasty)
    assert await inbox.store("main", [event(0), bad, event(2)]) == (3, 0)
    assert await inbox.store("main", [bad]) == (0, 1)
    assert await count(db) == 3


@given(address=st.one_of(st.emails(), st.text(max_size=400), st.from_regex(r"[ -~]{0,20}@[ -~]{0,20}", fullmatch=True)))
def test_the_quick_way_to_normalise_a_recipient_is_the_slow_one(address):
    normal = normal_recipient(address)
    assert rows._recipient(address) == (
        storable(normal).replace(rows.SEPARATOR, "\ufffd")[: rows.MAX_RECIPIENT] if normal else None
    )


# Once


async def test_a_duplicate_in_one_batch_is_stored_once(db, inbox):
    assert await inbox.store("main", [event(1), event(1), event(2)]) == Stored(2, 1)
    assert await inbox.store("main", [event(1), event(1), event(3)]) == Stored(1, 2)
    assert await count(db) == 3


async def test_the_same_ids_of_two_feeds_are_two_events(db, inbox):
    assert [await inbox.store(feed, [event(1)]) for feed in ("a", "b", "a")] == [(1, 0), (1, 0), (0, 1)]


async def test_concurrent_deliveries_share_a_transaction_and_each_is_told_its_own_share(db, inbox):
    await inbox.store("main", [event(0)])
    told = await asyncio.gather(*(inbox.store("main", [event(n // 2), event(f"own-{n}")]) for n in range(40)))
    assert sum(result.stored for result in told) == 59
    assert all(result.stored + result.repeated == 2 for result in told)
    assert sorted(result.stored for result in told) == [1] * 21 + [2] * 19
    transactions = await db.fetchval(
        "SELECT count(DISTINCT xmin::text) FROM provider_event WHERE event_id LIKE 'event-own-%'"
    )
    assert transactions <= 3


async def test_a_delivery_larger_than_a_batch_is_acknowledged_when_all_of_it_is_there(db, inbox):
    many = [event(n) for n in range(2 * MAX_BATCH + 7)]
    assert await inbox.store("main", many) == Stored(len(many), 0)
    assert await count(db) == len(many)
    assert await inbox.store("main", [*many, event("new")]) == Stored(1, len(many))
    sizes = await db.fetch("SELECT count(*) FROM provider_event GROUP BY xmin::text")
    assert sorted(n for (n,) in sizes) == [1, 7, MAX_BATCH, MAX_BATCH]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_redelivery_in_any_order_rebatched_and_concurrent_stores_once(dsn, data):
    n = data.draw(st.integers(1, 12))
    copies = data.draw(st.lists(st.lists(st.integers(0, n - 1), min_size=1, max_size=8), min_size=1, max_size=10))
    writers = data.draw(st.integers(1, 3))
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=5)
    box = Inbox(pool, writers=writers)
    await box.open()
    told = await asyncio.gather(*(box.store("main", [event(k) for k in batch]) for batch in copies))
    distinct = {k for batch in copies for k in batch}
    assert await count(pool) == len(distinct) == sum(result.stored for result in told)
    assert sum(map(sum, told)) == sum(map(len, copies))
    await box.close()
    await pool.execute("DELETE FROM provider_event")
    await asyncio.wait_for(pool.close(), 10)


async def test_two_replicas_storing_the_same_batches_backwards_do_not_deadlock(db, pg):
    before = pg.log_file.read_text().count("deadlock detected")
    boxes = [Inbox(db) for _ in range(2)]
    for box in boxes:
        await box.open()
    batches = [[event(f"{b}-{n}") for n in range(300)] for b in range(10)]
    forth = (boxes[0].store("main", batch) for batch in batches)
    back = (boxes[1].store("main", batch[::-1]) for batch in batches)
    told = await asyncio.gather(*forth, *back)
    assert sum(result.stored for result in told) == await count(db) == 3_000
    for box in boxes:
        await box.close()
    assert pg.log_file.read_text().count("deadlock detected") == before


async def test_the_pass_is_woken_once_a_batch_and_only_by_news(db, inbox):
    heard: list[str] = []
    async with db.acquire() as listener:
        note = lambda *_: heard.append("")  # noqa: E731
        await listener.add_listener("evidence", note)
        await inbox.store("main", [event(n) for n in range(50)])
        await inbox.store("main", [event(n) for n in range(50)])
        await listener.execute("SELECT pg_notify('evidence', '')")  # notifications come in order
        await listener.remove_listener("evidence", note)
    assert len(heard) == 2, "one of the first batch, none of the second, and our own"


# A bad event


async def test_an_event_that_the_database_refuses_fails_no_neighbour(db, inbox):
    await db.execute("ALTER TABLE provider_event ADD CONSTRAINT refuses CHECK (recipient <> 'poison@example.org')")
    many = [event(n) for n in range(40)]
    many[17] = event(17, recipient="poison@example.org", raw=b"exact", testimony=Testimony.REJECTED)
    assert await inbox.store("main", many) == Stored(40, 0)
    assert await inbox.store("main", many) == Stored(0, 40)
    found = await db.fetch(
        "SELECT message_id, testimony, kind, raw, recipient FROM provider_event WHERE message_id LIKE 'sha256:%'"
    )
    assert [tuple(row)[1:] for row in found] == [("rejected", "delivered", b"exact", None)]
    assert await count(db) == 40


async def test_what_can_not_even_be_encoded_is_kept_by_its_bytes(db, inbox):
    key = ("order-1", "message-1", "event-1", "main", rows.UNDATED)
    bad = {key: (None, "delivered", "accepted", 17, None, "http", b"exact")}
    writer = inbox._writers[0]
    assert [tuple(fresh)[:4] for fresh in await writer.store(bad)] == [key[:4]]
    assert await db.fetchval("SELECT raw FROM provider_event") == b"exact"


async def test_a_month_whose_partition_is_gone_is_stored_undated(db, inbox):
    month: date = await db.fetchval("SELECT max(m) FROM provider_event_months() AS m")
    at = datetime.combine(month, datetime.min.time(), UTC)
    await db.execute(f"DROP TABLE provider_event_{month:%Y%m}")
    assert await inbox.store("main", [event(1, occurred_at=at), event(2)]) == (2, 0)
    found = await db.fetch("SELECT event_id, occurred_at FROM provider_event_undated ORDER BY 1")
    assert [tuple(row) for row in found] == [("event-1", at), ("event-2", None)], "whole, not in reduced form"
    assert await inbox.store("main", [event(1, occurred_at=at)]) == (0, 1)


async def test_a_new_partition_is_used_once_the_months_are_read_again(db, inbox):
    month: date = await db.fetchval("SELECT max(m) FROM provider_event_months() AS m")
    at = datetime.combine(month, datetime.min.time(), UTC) + timedelta(days=40)
    await inbox.store("main", [event(1, occurred_at=at)])
    await db.execute("SELECT provider_event_make_partitions(5)")
    await inbox.refresh_partitions()
    await inbox.store("main", [event(2, occurred_at=at)])
    found = await db.fetch("SELECT event_id, partition_at FROM provider_event ORDER BY 1")
    assert [tuple(row) for row in found] == [("event-1", rows.UNDATED), ("event-2", at)]


# Limits and faults


async def test_more_than_may_wait_is_put_off_and_the_rest_is_stored(db):
    box = Inbox(db, queue_events=10)
    await box.open()
    told = await asyncio.gather(*(box.store("main", [event(n)]) for n in range(25)), return_exceptions=True)
    assert [type(result) for result in told] == [Stored] * 10 + [InboxBusy] * 15
    assert await count(db) == 10
    assert await box.store("main", [event(n) for n in range(50)]) == Stored(40, 10), "larger than the queue, but alone"
    await box.close()


async def test_bytes_that_wait_are_bounded(db):
    box = Inbox(db, queue_bytes=100_000)
    await box.open()
    raw = bytes(30_000)
    told = await asyncio.gather(*(box.store("main", [event(n, raw=raw)]) for n in range(5)), return_exceptions=True)
    assert [type(result) for result in told] == [Stored] * 3 + [InboxBusy] * 2
    assert (box._events, box._bytes) == (0, 0)
    await box.close()


@dataclass
class Locked:
    """A transaction that lets nobody write events."""

    connection: asyncpg.Connection

    async def __aenter__(self) -> Self:
        await self.connection.execute("BEGIN; LOCK TABLE provider_event IN SHARE MODE")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.connection.execute("COMMIT")


async def test_nothing_is_acknowledged_before_the_commit(db, inbox):
    async with db.acquire() as other:
        async with Locked(other):
            waiting = asyncio.create_task(inbox.store("main", [event(1)]))
            while not await other.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                assert not waiting.done()
            assert not waiting.done()
        assert await waiting == Stored(1, 0)


async def test_a_slow_database_is_not_waited_for_longer_than_the_limit(db):
    box = Inbox(db, seconds=0.3)
    await box.open()
    async with db.acquire() as other:
        async with Locked(other):
            told = await asyncio.gather(
                box.store("main", [event(1)]), box.store("main", [event(2)]), return_exceptions=True
            )
        assert {type(result) for result in told} <= {InboxBusy, InboxUnavailable}
    assert await box.store("main", [event(1), event(3)]) in [(2, 0), (1, 1)]
    await box.close()


async def test_an_exhausted_pool_is_not_waited_for_for_ever(dsn):
    pool = await asyncpg.create_pool(dsn, min_size=1, max_size=1)
    box = Inbox(pool, seconds=0.2)
    await box.open()
    async with pool.acquire():
        told = await asyncio.gather(*(box.store("main", [event(n)]) for n in range(50)), return_exceptions=True)
    assert {type(result) for result in told} == {InboxBusy}
    await box.close()
    await asyncio.wait_for(pool.close(), 10)


async def test_a_closed_inbox_takes_nothing_and_stores_what_it_took(db):
    box = Inbox(db)
    with pytest.raises(InboxBusy):
        await box.store("main", [event(0)])
    await box.open()
    waiting = [asyncio.create_task(box.store("main", [event(n)])) for n in range(20)]
    await asyncio.sleep(0)
    await box.close()
    with pytest.raises(InboxBusy):
        await box.store("main", [event(99)])
    assert [await task for task in waiting] == [(1, 0)] * 20
    assert await count(db) == 20


async def test_whoever_is_cancelled_takes_nobody_with_him(db, inbox):
    first, second = (asyncio.create_task(inbox.store("main", [event(n)])) for n in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == Stored(1, 0)
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_connection_that_died_is_replaced_without_the_provider_noticing(db, inbox):
    await inbox.store("main", [event(1)])
    await db.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert await inbox.store("main", [event(1), event(2)]) == Stored(1, 1)


async def test_a_database_that_is_away_is_said_and_its_return_is_noticed(dsn, sockets):
    async with Cut(dsn, sockets) as cut:
        pool = await connect_pool(cut.dsn, size=3, application="test")
        box = Inbox(pool)
        await box.open()
        assert await box.store("main", [event(1)]) == (1, 0)
        await box.check()
        cut.cut()
        for n in range(3):
            with pytest.raises(InboxUnavailable):
                await box.store("main", [event(n)])
            with pytest.raises(InboxUnavailable):
                await box.check()
        cut.resume()
        assert await box.store("main", [event(1), event(2)]) == (1, 1)
        await box.check()
        await box.close()
        await asyncio.wait_for(pool.close(), 10)


async def test_a_schema_that_changes_under_the_statement_loses_nothing(db, inbox):
    await inbox.store("main", [event(1)])
    await db.execute("ALTER TABLE provider_event ADD COLUMN more text DEFAULT 'x'")
    await db.execute("ALTER TABLE provider_event ALTER COLUMN reason TYPE varchar(600)")
    assert await inbox.store("main", [event(1), event(2, reason="because")]) == (1, 1)


# Poolers


async def test_behind_a_pooler_each_batch_is_one_explicit_transaction(dsn, sockets):
    async with Cut(dsn, sockets, pooled=True) as pooler:
        pool = await connect_pool(pooler.dsn, size=3, application="test")
        async with pool.acquire() as connection:
            assert await is_behind_pooler(connection)
            assert connection._con._config.statement_cache_size == 0
        box = Inbox(pool)
        await box.open()
        assert await box.store("main", [event(0)]) == (1, 0)
        before = pooler.transactions
        assert await box.store("main", [event(1), event(1), event(2)]) == (2, 1)
        assert pooler.transactions == before + 1
        await box.close()
        await asyncio.wait_for(pool.close(), 10)


async def test_a_direct_connection_keeps_its_statements_prepared(dsn):
    pool = await connect_pool(dsn, size=2, application="test")
    async with pool.acquire() as connection:
        assert not await is_behind_pooler(connection)
        assert connection._con._config.statement_cache_size == 100
    async with pool.acquire(), pool.acquire():
        with pytest.raises(TimeoutError):
            await pool.acquire(timeout=0.05)
    await asyncio.wait_for(pool.close(), 10)


async def test_200_concurrent_deliveries_through_pgbouncer_are_all_stored(pooler, db):
    pool = await connect_pool(pooler, size=4, application="test")
    box = Inbox(pool, writers=2)
    await box.open()
    for _ in range(5):
        await asyncio.gather(*(box.store("main", [event(n)]) for n in range(200)))
    assert await count(db) == 200
    await box.close()
    await asyncio.wait_for(pool.close(), 10)


# Counting


async def test_counts_of_deliveries_are_written_once_and_added_up(db):
    now = 100.0
    counters = Counters(lambda: now)
    for outcome in ("stored", "stored", "refused:signature"):
        counters.note("main", outcome)
    assert await counters.flush(db) == 2
    assert await counters.flush(db) == 0
    counters.note("main", "stored", 3)
    now += 1
    await counters.flush(db)
    found = await db.fetch(
        "SELECT feed, outcome, sum(n)::int AS n, bool_and(last_at <= now()) FROM feed_delivery GROUP BY 1, 2 ORDER BY 2"
    )
    assert [tuple(row) for row in found] == [("main", "refused:signature", 1, True), ("main", "stored", 5, True)]


async def test_counts_belong_to_the_minute_of_the_database_in_which_they_were_made(db):
    now = 1_000.0
    counters = Counters(lambda: now)
    counters.note("main", "stored")
    now += 600
    counters.note("main", "stored")
    await counters.flush(db)
    first, second = await db.fetch("SELECT n, last_at, now() AS t FROM feed_delivery ORDER BY minute")
    assert (first["n"], second["n"]) == (1, 1)
    assert timedelta(seconds=595) < first["t"] - first["last_at"] < timedelta(seconds=605)


async def test_counts_survive_a_database_that_is_away(dsn, db, sockets):
    counters = Counters()
    counters.note("main", "stored", 2)
    async with Cut(dsn, sockets) as cut:
        pool = await connect_pool(cut.dsn, size=1, application="test")
        cut.cut()
        with pytest.raises((OSError, asyncpg.PostgresError, asyncpg.InterfaceError)):
            await counters.flush(pool)
        counters.note("main", "stored")
        cut.resume()
        await counters.flush(pool)
        await asyncio.wait_for(pool.close(), 10)
    assert await db.fetchval("SELECT sum(n)::int FROM feed_delivery") == 3


async def test_the_layout_is_read_from_the_database(db):
    async with db.acquire() as connection:
        maker = await read_layout(connection)
    assert isinstance(maker, RowMaker)
    assert len(maker._months) == 4
    assert "ON CONFLICT DO NOTHING" in STORE_EVENTS
