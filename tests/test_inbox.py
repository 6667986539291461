# SPDX-License-Identifier: Apache-2.0
"""Events are stored once, whole batches at a time, and whoever waits is told the truth about the commit."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, timedelta

import asyncpg
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inbox_kit import count, event
from receiver_app import random_bytes

from webhooks import rows
from webhooks.event import Testimony, normal_recipient, stand_in_key, storable, wire_key
from webhooks.inbox import MAX_BATCH, Inbox, Stored
from webhooks.rows import RowMaker
from webhooks.writer import Writer, read_layout

AT = datetime(2026, 11, 20, 10, 0, tzinfo=UTC)


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
    box = Inbox()
    await box.open(db)
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
    box = Inbox(writers=writers)
    await box.open(pool)
    told = await asyncio.gather(*(box.store("main", [event(k) for k in batch]) for batch in copies))
    distinct = {k for batch in copies for k in batch}
    assert await count(pool) == len(distinct) == sum(result.stored for result in told)
    assert sum(map(sum, told)) == sum(map(len, copies))
    await box.close()
    await pool.execute("DELETE FROM provider_event")
    await asyncio.wait_for(pool.close(), 10)


async def test_two_replicas_storing_the_same_batches_backwards_do_not_deadlock(db, pg):
    before = pg.log_file.read_text().count("deadlock detected")
    boxes = [Inbox() for _ in range(2)]
    for box in boxes:
        await box.open(db)
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


async def test_what_can_not_even_be_encoded_is_kept_by_its_bytes(db):
    key = ("order-1", "message-1", "event-1", "main", rows.UNDATED)
    bad = {key: (None, "delivered", "accepted", 17, None, "http", b"exact")}
    writer = Writer(db, 10.0)
    assert [tuple(fresh)[:4] for fresh in await writer.store(bad)] == [key[:4]]
    await writer.close()
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


async def test_the_layout_is_read_from_the_database(db):
    async with db.acquire() as connection:
        maker = await read_layout(connection)
    assert isinstance(maker, RowMaker)
    assert len(maker._months) == 4
