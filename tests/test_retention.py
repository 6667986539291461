# SPDX-License-Identifier: Apache-2.0
"""What is over goes, in small steps and nobody's way; what may still be needed stays, and says for whom."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from campaign_kit import batch, loaded, people
from kit import FEED, call, claim, confirm, event, fail, heard_neighbours, make_month, old_claim, reconcile, row
from program import Program
from structlog.testing import capture_logs

from reconciler import campaign
from reconciler.configuration.settings import ConfigError, Settings, load_settings
from reconciler.configuration.tables import RetentionSettings
from reconciler.insight.findings import judge
from reconciler.insight.status import read_status
from reconciler.upkeep import retention
from reconciler.upkeep.retention import keep_memory, prune, pruning
from reconciler.upkeep.retention_look import Ages, Month, Pruned, would_prune
from webhooks.registry import PROVIDERS

DOCS = Path(__file__).parents[1] / "docs/retention.md"
DAY = timedelta(days=1)
AGES = Ages(rows=30 * DAY, events=60 * DAY, passes=30 * DAY, late_window=7 * DAY)
KEY = "order:1"


async def once(db: asyncpg.Pool, ages: Ages = AGES, **named: float) -> Pruned:
    return await prune(db, ages, **{"pause": 0.0, **named})


MAKE_ALL_OLDER = """
UPDATE send_log SET created_at = created_at - $2::interval, claimed_at = claimed_at - $2::interval,
    first_claimed_at = first_claimed_at - $2::interval, submit_by = submit_by - $2::interval,
    answered_at = answered_at - $2::interval, sent_at = sent_at - $2::interval, failed_at = failed_at - $2::interval,
    released_at = released_at - $2::interval, held_since = held_since - $2::interval,
    next_check_at = next_check_at - $2::interval
WHERE wire_key = wire_key($1)
"""


async def older(db: asyncpg.Pool, key: str, by: timedelta) -> None:
    """Move all times of a send, and those of its verdicts, into the past."""
    await db.execute(MAKE_ALL_OLDER, key, by)
    await db.execute("UPDATE verdict SET decided_at = decided_at - $2::interval WHERE wire_key = wire_key($1)", key, by)


async def sent(db: asyncpg.Pool, key: str, ago: timedelta, **options: str) -> None:
    """A send that was answered so long ago."""
    claimed = await claim(db, key, **options)
    await confirm(db, key, claimed["fence"])
    await older(db, key, ago)


async def failed(db: asyncpg.Pool, key: str, ago: timedelta) -> None:
    """A send that its provider refused so long ago."""
    claimed = await claim(db, key)
    await fail(db, key, claimed["fence"], "refused", not_sent=False)
    await older(db, key, ago)


async def keys(db: asyncpg.Pool) -> set[str]:
    return {r["send_key"] for r in await db.fetch("SELECT send_key FROM send_log")}


async def month(db: asyncpg.Pool, ago: timedelta = 120 * DAY) -> tuple[date, datetime]:
    """Make the month that holds this day a partition; returns its name and a time in its middle."""
    first = await make_month(db, await db.fetchval("SELECT clock_timestamp()") - ago)
    return first.date(), first + 14 * DAY


async def months(db: asyncpg.Pool) -> list[date]:
    return [r[0] for r in await db.fetch("SELECT provider_event_months()")]


# Rows


@pytest.mark.parametrize(("days", "there"), [(29, True), (30, True), (31, False)])
async def test_a_final_send_goes_thirty_days_after_its_end(db: asyncpg.Pool, days: int, there: bool) -> None:
    await sent(db, "sent", timedelta(days=days, minutes=5))
    await failed(db, "failed", timedelta(days=days, minutes=5))
    done = await once(db)
    assert await keys(db) == ({"sent", "failed"} if there else set())
    assert done.rows["send_log"] == (0 if there else 2)
    assert done.ended


async def test_what_belongs_to_a_send_goes_with_it(db: asyncpg.Pool) -> None:
    await failed(db, KEY, 31 * DAY)
    w = await db.fetchval("SELECT wire_key($1)", KEY)
    await db.execute("INSERT INTO look_up (wire_key, feed, who) VALUES ($1, 'mg', 'test'), ('other', 'mg', 'test')", w)
    await db.execute("INSERT INTO asked_again VALUES ($1, 1, now() - interval '31 days', now() - interval '31 days',"
                     " 'key_reused')", w)  # fmt: skip
    await db.execute("INSERT INTO shadow_verdict OVERRIDING SYSTEM VALUE SELECT * FROM verdict")
    done = await once(db)
    assert {name: n for name, n in done.rows.items() if n} == {
        "send_log": 1, "verdict": 1, "shadow_verdict": 1, "look_up": 1,
    }  # fmt: skip
    for table in ("send_log", "verdict", "shadow_verdict", "asked_again"):
        assert await db.fetchval(f"SELECT count(*) FROM {table}") == 0  # noqa: S608
    assert await db.fetchval("SELECT wire_key FROM look_up") == "other"


async def test_what_is_not_decided_never_goes_however_old(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", "enqueued", FEED, "{}")
    await old_claim(db, "claimed")
    await old_claim(db, "held")
    await db.execute("UPDATE send_log SET held_reason = 'silent', held_since = now() WHERE send_key = 'held'")
    await old_claim(db, "released")
    await call(db, "operator_release", "released", "note", "ann")
    everything = {"enqueued", "claimed", "held", "released"}
    for key in everything:
        await older(db, key, 900 * DAY)
    done = await once(db)
    assert await keys(db) == everything
    assert done.rows["send_log"] == 0


async def test_a_send_that_was_ambiguous_stays_as_long_as_its_events(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await event(db, KEY)
    await reconcile(db)
    await older(db, KEY, 59 * DAY)
    await once(db)
    assert await keys(db) == {KEY}
    await older(db, KEY, 2 * DAY)
    await once(db)
    assert await keys(db) == set()


async def test_a_send_that_is_still_asked_for_stays(db: asyncpg.Pool) -> None:
    await sent(db, KEY, 90 * DAY)
    assert (await claim(db, KEY))["outcome"] == "already_sent"  # and is noted, since it was sent long ago
    await once(db)
    assert await keys(db) == {KEY}
    await db.execute("UPDATE asked_again SET asked_at = asked_at - interval '31 days'")
    await once(db)
    assert await keys(db) == set()


async def test_sends_that_ended_without_a_claim_go_too(db: asyncpg.Pool) -> None:
    await call(db, "send_enqueue", "expired", FEED, '{"expires_at": "2026-01-01"}')
    await reconcile(db)
    await call(db, "send_enqueue", "by hand", FEED, "{}")
    await call(db, "operator_decide", "by hand", "sent", "seen in the provider's log", "ann")
    assert [(await row(db, k))["state"] for k in ("expired", "by hand")] == ["failed", "sent"]
    await once(db)
    assert len(await keys(db)) == 2
    for key in await keys(db):
        await older(db, key, 31 * DAY)
    await once(db)
    assert await keys(db) == set()


async def test_a_failed_send_that_is_still_asked_for_stays(db: asyncpg.Pool) -> None:
    await failed(db, KEY, 31 * DAY)
    assert (await claim(db, KEY))["outcome"] == "failed"
    assert (await once(db)).rows["send_log"] == 0
    assert (await claim(db, KEY))["outcome"] == "failed", "and is not sent after all"


async def test_a_job_that_was_enqueued_when_it_was_older_than_the_memory_is_refused(db: asyncpg.Pool) -> None:
    at = (await db.fetchval("SELECT clock_timestamp()")) - 31 * DAY
    options = json.dumps({"intended_at": at.isoformat()})
    assert (await call(db, "send_enqueue", KEY, FEED, options))["outcome"] == "enqueued"
    assert (await claim(db, KEY))["outcome"] == "beyond_memory"


async def test_what_a_cancelled_campaign_never_gave_out_goes_thirty_days_after_it_was_cancelled(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "BATCH", 2)
    await loaded(db, people(8))
    given = {one["send_key"] for one in await batch(db, 2)}
    others = sorted(await keys(db) - given)
    await event(db, others[0], "none", kind="unknown")
    await claim(db, "order:1", campaign="a label")
    await campaign.cancel(db, "spring", "wrong list", "me")
    await db.execute("UPDATE campaign SET updated_at = updated_at - interval '29 days'")
    assert (await once(db)).rows["send_log"] == 0
    await db.execute("UPDATE campaign SET updated_at = updated_at - interval '2 days'")
    assert (await would_prune(db, AGES)).rows["send_log"] == 5
    assert (await once(db)).rows["send_log"] == 5
    assert await keys(db) == given | {others[0], "order:1"}, "what was given out or heard of stays"


async def test_many_sends_claimed_in_one_moment_go_in_batches(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=2 * retention.BATCH + 7)
    await db.execute(
        "UPDATE send_log SET claimed_at = now() - interval '40 days', first_claimed_at = now() - interval '40 days',"
        " sent_at = now() - interval '40 days'"
    )
    await sent(db, "other", 40 * DAY)
    await db.execute("UPDATE send_log SET feed = 'zz' WHERE send_key = 'other'")
    done = await once(db)
    assert done.rows["send_log"] == 2 * retention.BATCH + 8
    assert await keys(db) == set()


async def test_a_locked_send_is_passed_over_and_not_waited_for(db: asyncpg.Pool) -> None:
    await sent(db, "locked", 40 * DAY)
    await sent(db, "free", 40 * DAY)
    async with db.acquire() as other, other.transaction():
        await other.execute("SELECT FROM send_log WHERE send_key = 'locked' FOR NO KEY UPDATE")
        await asyncio.wait_for(once(db), 20)
        assert await keys(db) == {"locked"}
    await once(db)
    assert await keys(db) == set()


async def test_a_send_that_is_decided_anew_between_the_look_and_the_deletion_stays(db: asyncpg.Pool) -> None:
    await failed(db, KEY, 40 * DAY)
    now = await db.fetchval("SELECT clock_timestamp()")
    cuts = AGES.cuts(now)
    (page,) = await db.fetch(
        retention.CLAIMED_PAGE, datetime(1970, 1, 1, tzinfo=UTC), "", cuts.rows, cuts.events, 10, FEED
    )
    await call(db, "operator_release", KEY, "note", "ann")
    (counts,) = await db.fetch(retention.DELETE_SENDS, [page["wire_key"]], cuts.rows, cuts.events)
    assert counts["send_log"] == 0
    assert await keys(db) == {KEY}


# The guard's memory


async def memory(db: asyncpg.Pool) -> timedelta:
    found: timedelta = await db.fetchval("SELECT memory FROM installation")
    return found


async def test_a_job_whose_send_was_deleted_is_refused(db: asyncpg.Pool) -> None:
    made = await db.fetchval("SELECT clock_timestamp() - interval '31 days 1 minute'")
    await sent(db, KEY, 31 * DAY)
    await once(db)
    assert await keys(db) == set()
    assert (await claim(db, KEY, intended_at=made.isoformat()))["outcome"] == "beyond_memory"


async def test_a_longer_memory_promises_no_more_than_is_still_there(db: asyncpg.Pool) -> None:
    await sent(db, KEY, 45 * DAY)
    await once(db)
    longer = Ages(90 * DAY, 120 * DAY, 30 * DAY, 7 * DAY)
    await once(db, longer)
    assert timedelta(0) <= await memory(db) - 30 * DAY < timedelta(minutes=5)
    made = await db.fetchval("SELECT clock_timestamp() - interval '45 days 1 minute'")
    assert (await claim(db, KEY, intended_at=made.isoformat()))["outcome"] == "beyond_memory"
    await db.execute("UPDATE installation SET pruned_until = pruned_until - interval '20 days'")  # as time passes
    await keep_memory(db, longer.rows)
    assert timedelta(0) <= await memory(db) - 50 * DAY < timedelta(minutes=5)


async def test_before_anything_was_deleted_the_memory_is_as_long_as_was_asked(db: asyncpg.Pool) -> None:
    await keep_memory(db, 90 * DAY)
    assert await memory(db) == 90 * DAY


async def test_a_shorter_memory_holds_before_the_first_row_goes(db: asyncpg.Pool) -> None:
    await keep_memory(db, 90 * DAY)
    await sent(db, KEY, 60 * DAY)
    async with db.acquire() as other, other.transaction():
        await other.execute("LOCK TABLE send_log IN ACCESS EXCLUSIVE MODE")
        task = asyncio.create_task(once(db))
        async with asyncio.timeout(10):
            while await memory(db) != 30 * DAY:  # noqa: ASYNC110 - only the database tells
                await asyncio.sleep(0.005)
        assert await other.fetchval("SELECT count(*) FROM send_log") == 1
    await task


# Events


async def test_a_month_of_events_is_dropped_when_its_last_day_is_old_enough(db: asyncpg.Pool) -> None:
    old, middle = await month(db, 120 * DAY)
    young, _ = await month(db, 62 * DAY)  # its last day is younger than 60 days, or a day older at most
    await event(db, KEY, occurred_at=middle)
    done = await once(db, Ages(30 * DAY, 63 * DAY, 30 * DAY, 7 * DAY))
    assert done.months == [Month(old, "dropped")]
    assert old not in await months(db)
    assert young in await months(db)
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0


async def claimed_then(db: asyncpg.Pool, key: str, at: datetime) -> None:
    await old_claim(db, key, await db.fetchval("SELECT clock_timestamp() - $1", at))


async def test_a_month_that_an_undecided_send_may_need_is_kept_and_names_it(db: asyncpg.Pool) -> None:
    first, middle = await month(db)
    await claimed_then(db, "order:2", middle + DAY)
    await claimed_then(db, KEY, middle)
    done = await once(db)
    assert done.months == [Month(first, "held", await db.fetchval("SELECT wire_key($1)", KEY))]
    assert first in await months(db)
    for key in (KEY, "order:2"):
        await call(db, "operator_decide", key, "sent", "note", "ann")
    assert (await once(db)).months == [Month(first, "dropped")]


async def test_a_month_that_a_released_send_may_need_is_kept(db: asyncpg.Pool) -> None:
    first, middle = await month(db)
    await claimed_then(db, KEY, middle)
    assert (await call(db, "operator_release", KEY, "note", "ann"))["outcome"] == "released"
    assert (await once(db)).months == [Month(first, "held", await db.fetchval("SELECT wire_key($1)", KEY))]


@pytest.mark.parametrize(("failed_ago", "outcome"), [(6 * DAY, "held"), (8 * DAY, "dropped")])
async def test_a_month_that_a_recently_failed_send_may_need_is_kept(
    db: asyncpg.Pool, failed_ago: timedelta, outcome: str
) -> None:
    _, middle = await month(db)
    await claimed_then(db, KEY, middle)
    await call(db, "operator_decide", KEY, "failed", "note", "ann")
    await db.execute("UPDATE send_log SET failed_at = now() - $1::interval", failed_ago)
    assert [m.outcome for m in (await once(db)).months] == [outcome]


async def test_a_month_that_speaks_of_a_send_never_given_out_is_kept(db: asyncpg.Pool) -> None:
    first, middle = await month(db)
    await call(db, "send_enqueue", "silent", FEED, "{}")
    await older(db, "silent", 200 * DAY)
    await call(db, "send_enqueue", KEY, FEED, "{}")
    await event(db, KEY, occurred_at=middle)
    assert (await once(db)).months == [Month(first, "held", await db.fetchval("SELECT wire_key($1)", KEY))]
    assert (await claim(db, KEY))["outcome"] == "already_sent"  # which is why it was kept
    assert [m.outcome for m in (await once(db)).months] == ["dropped"]


async def test_a_month_in_use_is_left_to_the_next_run_and_nobody_waits_for_it(
    db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "TRIES", 2)
    monkeypatch.setattr(retention, "TRY_SECONDS", 0.01)
    first, _ = await month(db)
    async with db.acquire() as other, other.transaction():
        await other.execute("SELECT FROM provider_event")
        done = await once(db)
        assert done.months == [Month(first, "busy")]
        await asyncio.wait_for(event(db, KEY), 20)
    assert await db.fetchval("SELECT pruned_at FROM installation") is None  # so that the daemon comes again soon
    assert (await once(db)).months == [Month(first, "dropped")]
    assert await db.fetchval("SELECT pruned_at FROM installation") is not None


async def test_an_event_of_a_dropped_month_is_stored_as_undated_and_goes_by_the_time_of_storing(
    db: asyncpg.Pool,
) -> None:
    _, middle = await month(db)
    await once(db)
    await event(db, KEY, occurred_at=middle)
    assert await db.fetchval("SELECT partition_at FROM provider_event") == datetime(1970, 1, 1, tzinfo=UTC)
    await once(db)
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 1
    await db.execute("UPDATE provider_event SET received_at = received_at - interval '61 days'")
    assert (await once(db)).rows["provider_event"] == 1
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 0


async def test_undated_events_that_a_send_may_need_stay(db: asyncpg.Pool) -> None:
    long_ago = datetime(2001, 1, 1, tzinfo=UTC)
    await old_claim(db, "waits")
    await event(db, "waits", "none", kind="unknown", occurred_at=long_ago)
    await old_claim(db, "by id", known_message_id="m-7")
    await event(db, None, "none", kind="unknown", message_id="m-7", occurred_at=long_ago)
    await event(db, "decided", occurred_at=long_ago)
    await event(db, None, message_id="m-8", occurred_at=long_ago)
    await db.execute("UPDATE provider_event SET received_at = received_at - interval '61 days'")
    assert (await once(db)).rows["provider_event"] == 2
    left = await db.fetch("SELECT message_id FROM provider_event ORDER BY message_id")
    assert [r["message_id"] for r in left] == ["m-1", "m-7"]


@pytest.mark.parametrize("day", ["2026-11-01", "2026-11-15"])
async def test_nobody_can_drop_a_month_that_is_not_thirty_days_over(db: asyncpg.Pool, day: str) -> None:
    now = await db.fetchval("SELECT date_trunc('month', clock_timestamp() AT TIME ZONE 'UTC')::date")
    with pytest.raises(asyncpg.InvalidParameterValueError):
        await db.fetchval("SELECT provider_event_drop_month($1, '7 days')", now)


# Who may


@asynccontextmanager
async def role(db: asyncpg.Pool, dsn: str, rights: str) -> AsyncIterator[asyncpg.Pool]:
    name = f"pruner_{re.sub(r'[^a-z0-9]', '', dsn.partition('?')[0].rpartition('/')[2])}"
    await db.execute(
        f"CREATE ROLE {name} LOGIN; GRANT USAGE ON SCHEMA public TO {name};"
        f"GRANT {rights} ON ALL TABLES IN SCHEMA public TO {name};"
        f"GRANT EXECUTE ON FUNCTION provider_event_drop_month(date, interval) TO {name}"
    )
    pool = await asyncpg.create_pool(dsn, user=name, min_size=1, max_size=3)
    try:
        yield pool
    finally:
        await pool.close()
        await db.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


async def test_a_role_that_may_delete_rows_and_no_tables_prunes_it_all(db: asyncpg.Pool, dsn: str) -> None:
    first, _ = await month(db)
    await sent(db, KEY, 40 * DAY)
    async with role(db, dsn, "SELECT, INSERT, UPDATE, DELETE") as pool:
        done = await once(pool)
    assert (done.rows["send_log"], done.months) == (1, [Month(first, "dropped")])


async def test_a_role_that_may_only_read_drops_no_events(db: asyncpg.Pool, dsn: str) -> None:
    first, _ = await month(db)
    async with role(db, dsn, "SELECT") as pool:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await pool.fetchval("SELECT provider_event_drop_month($1, '7 days')", first)
    assert first in await months(db)


# Records


async def test_records_of_passes_and_deliveries_go_after_thirty_days(db: asyncpg.Pool) -> None:
    for days in (29, 31):
        at = await db.fetchval("SELECT clock_timestamp() - make_interval(days => $1)", days)
        await db.execute("INSERT INTO pass (started_at, who) VALUES ($1, 'test')", at)
        await db.execute("INSERT INTO feed_delivery VALUES ('mg', $1, 'stored', 1, $1)", at)
        await db.execute("INSERT INTO finding VALUES ('archive', $2, 'text', $1, $1)", at, f"host-{days}")
        await db.execute("INSERT INTO duplicate (wire_key, sort, found_at, feed) VALUES ($2, 'duplicate', $1, 'mg')",
                         at, f"w{days}")  # fmt: skip
        await db.execute("INSERT INTO look_up (wire_key, feed, asked_at, who) VALUES ('w', 'mg', $1, 'test')", at)
        await db.execute(
            "INSERT INTO backfill (feed, asked, since, until, done_until, who, started_at, ended_at)"
            " VALUES ('mg', 'x', $1::timestamptz - interval '1 day', $1, $1, 'ann', $1, $1)", at,
        )  # fmt: skip
    done = await once(db)
    tables = ("pass", "feed_delivery", "finding", "duplicate", "look_up", "backfill")
    assert [done.rows[table] for table in tables] == [1, 1, 1, 1, 1, 1]
    assert [await db.fetchval(f"SELECT count(*) FROM {t}") for t in tables] == [1, 1, 1, 1, 1, 1]  # noqa: S608


async def test_a_duplicate_stays_known_while_its_send_is(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await db.execute(
        "INSERT INTO duplicate (wire_key, sort, found_at, feed) VALUES (wire_key($1), 'duplicate',"
        " now() - interval '90 days', 'mg')", KEY,
    )  # fmt: skip
    assert (await once(db)).rows["duplicate"] == 0


# Every table has somebody who cleans it

TABLES = """
SELECT relname FROM pg_class
WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY 1
"""


async def test_the_documentation_says_of_every_table_who_bounds_it(db: asyncpg.Pool) -> None:
    listed = re.findall(r"^\| `(\w+)` \|", DOCS.read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == [r["relname"] for r in await db.fetch(TABLES)]


# Beside others


async def test_two_prunes_share_the_work(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=4 * retention.BATCH)
    await db.execute(
        "UPDATE send_log SET claimed_at = claimed_at - interval '40 days', sent_at = sent_at - interval '40 days'"
    )
    first, _ = await month(db)
    one, two = await asyncio.gather(once(db), once(db))
    assert one.rows["send_log"] + two.rows["send_log"] == 4 * retention.BATCH
    dropped = [m for m in (*one.months, *two.months) if m.outcome == "dropped"]
    assert dropped[0].month == first
    assert await keys(db) == set()


async def test_sends_and_passes_go_on_while_it_prunes(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=6 * retention.BATCH)
    await db.execute(
        "UPDATE send_log SET claimed_at = claimed_at - interval '40 days', sent_at = sent_at - interval '40 days'"
    )
    old, middle = await month(db)
    await event(db, "long ago", occurred_at=middle)
    stop = asyncio.Event()

    async def send(worker: int) -> int:
        n = 0
        while not stop.is_set():
            key = f"new:{worker}:{n}"
            claimed = await claim(db, key)
            assert claimed["outcome"] == "claimed"
            await event(db, key, message_id=key)
            assert await confirm(db, key, claimed["fence"]) == "sent"
            n += 1
        return n

    async def passes() -> int:
        n = 0
        while not stop.is_set():
            await reconcile(db)
            n += 1
        return n

    workers = [asyncio.create_task(work) for work in (send(1), send(2), passes())]
    done = await once(db, pause=0.01)
    stop.set()
    counts = await asyncio.gather(*workers)
    assert min(counts) >= 1
    left = await once(db)  # what somebody held just then is the next prune's
    assert done.rows["send_log"] + left.rows["send_log"] == 6 * retention.BATCH
    assert old not in await months(db)
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'sent'") == counts[0] + counts[1]


PRUNER = """
import asyncio, sys
import asyncpg
from datetime import timedelta
from reconciler.upkeep.retention import prune
from reconciler.upkeep.retention_look import Ages
async def main():
    pool = await asyncpg.create_pool(sys.argv[1], min_size=1, max_size=1)
    day = timedelta(days=1)
    await prune(pool, Ages(30 * day, 60 * day, 30 * day, 7 * day), pause=0.2)
asyncio.run(main())
"""


async def test_a_prune_that_is_killed_leaves_nothing_half_done(db: asyncpg.Pool, dsn: str) -> None:
    n = 6 * retention.BATCH
    await heard_neighbours(db, n=n)
    await db.execute(
        "UPDATE send_log SET claimed_at = claimed_at - interval '40 days', sent_at = sent_at - interval '40 days'"
    )
    await db.execute(
        "INSERT INTO verdict (wire_key, attempt, action, reason, source, who)"
        " SELECT wire_key, 1, 'sent', 'accepted', 'feed', 'test' FROM send_log"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PRUNER, dsn)
    async with asyncio.timeout(30):
        while await db.fetchval("SELECT count(*) FROM send_log") == n:  # noqa: ASYNC110 - only the database tells
            await asyncio.sleep(0.01)
    process.kill()
    await process.wait()
    left = await db.fetchval("SELECT count(*) FROM send_log")
    assert 0 < left < n
    assert await db.fetchval("SELECT count(*) FROM verdict") == left
    assert await db.fetchval("SELECT pruned_at FROM installation") is None
    assert (await once(db)).rows["send_log"] == left
    assert await db.fetchval("SELECT count(*) FROM verdict") == 0


async def test_a_run_of_the_daemon_is_short_and_the_next_one_goes_on(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=2 * retention.BATCH)
    await db.execute(
        "UPDATE send_log SET claimed_at = claimed_at - interval '40 days', sent_at = sent_at - interval '40 days'"
    )
    done = await once(db, seconds=0.0)
    assert (done.ended, done.rows["send_log"]) == (False, retention.BATCH)
    assert await db.fetchval("SELECT pruned_at FROM installation") is None
    await pruning(db, RetentionSettings(), 7 * DAY)()
    assert await keys(db) == set()
    await sent(db, KEY, 40 * DAY)
    await pruning(db, RetentionSettings(), 7 * DAY)()  # not a day later
    assert await keys(db) == {KEY}
    await db.execute(A_DAY_LATER)
    await pruning(db, RetentionSettings(), 7 * DAY)()
    assert await keys(db) == set()


A_DAY_LATER = "UPDATE installation SET pruned_at = pruned_at - interval '25 hours'"


async def test_a_prune_that_ended_before_the_databases_clock_went_back_is_not_waited_for(db: asyncpg.Pool) -> None:
    await pruning(db, RetentionSettings(), 7 * DAY)()
    await db.execute("UPDATE installation SET pruned_at = pruned_at + interval '300 days'")
    await sent(db, KEY, 40 * DAY)
    await pruning(db, RetentionSettings(), 7 * DAY)()
    assert await keys(db) == set()


async def test_a_run_of_the_daemon_that_finds_nothing_says_nothing(db: asyncpg.Pool) -> None:
    await sent(db, KEY, 40 * DAY)
    with capture_logs() as lines:
        await pruning(db, RetentionSettings(), 7 * DAY)()
        await db.execute(A_DAY_LATER)
        await pruning(db, RetentionSettings(), 7 * DAY)()
    assert [(line["event"], line["rows"]) for line in lines] == [("pruned", {"send_log": 1})]


# Settings


REFUSED = {
    '[retention]\nrows = "29d"': "retention.rows is 29d, and what silence is worth is measured on the sends of that "
    "time: set it to 30d or more",
    '[rules]\nlate_window = "40d"': "retention.rows is 30d, and rules.late_window looks for evidence of failed sends "
    "for so long: set it to 40d or more",
    '[api]\nidempotency_retention = "31d"': "retention.rows is 30d, and api.idempotency_retention remembers requests "
    "about them for so long: set it to 31d or more",
    '[retention]\nrows = "90d"': "retention.events is 60d, and sends are kept for so long (retention.rows): set it to "
    "90d or more",
    '[retention]\npasses = "7d"': "retention.passes is 7d, and status looks back so far: set it to 30d or more",
}


@pytest.mark.parametrize(
    ("text", "refused"), [("", None), ('[retention]\nrows = "45d"\nevents = "45d"', None), *REFUSED.items()]
)
def test_an_age_below_what_may_still_come_is_refused_with_the_reason(
    tmp_path: Path, text: str, refused: str | None
) -> None:
    file = tmp_path / "reconciler.toml"
    file.write_text(text)
    if refused is None:
        load_settings(file, {}, PROVIDERS)
        return
    with pytest.raises(ConfigError) as error:
        load_settings(file, {}, PROVIDERS)
    assert error.value.problems == (refused,)


# What people see


async def findings(db: asyncpg.Pool) -> dict[str, str]:
    settings = Settings.model_validate({"feeds": {"mg": {"provider": "mailgun", "secrets": ["key-0123456789abcdef"]}}})
    async with db.acquire() as connection:
        status = await read_status(connection, settings, lambda: datetime.now(UTC))
    return {found.code: found.line() for found in judge(status, settings)}


async def test_status_names_the_send_that_holds_events_back_for_long(db: asyncpg.Pool) -> None:
    first, middle = await month(db, 150 * DAY)
    await claimed_then(db, KEY, middle)
    w = await db.fetchval("SELECT wire_key($1)", KEY)
    assert "retention" not in await findings(db)
    await once(db)
    assert (await findings(db))["retention"] == (
        f"retention: events of {first:%Y-%m} are too old to be kept, and send {w} holds them back: see reconciler why"
        f" {w}, then decide it with reconciler release, confirm or fail"
    )
    await call(db, "operator_decide", KEY, "sent", "note", "ann")
    await once(db)
    assert "retention" not in await findings(db)


async def test_status_tells_that_nothing_was_pruned_for_long(db: asyncpg.Pool) -> None:
    await once(db)
    assert "not_pruned" not in await findings(db)
    await db.execute("UPDATE installation SET pruned_at = pruned_at - interval '4 days'")
    assert "the last prune ended 4d ago" in (await findings(db))["not_pruned"]


async def test_a_dry_run_counts_and_changes_nothing(db: asyncpg.Pool, program: Program) -> None:
    await sent(db, "gone", 40 * DAY)
    await failed(db, "gone too", 40 * DAY)
    await sent(db, "stays", DAY)
    first, middle = await month(db, 150 * DAY)
    await event(db, "gone", occurred_at=middle)
    held, middle = await month(db, 100 * DAY)  # another month than the first, and over for 60 days, whatever day it is
    await claimed_then(db, KEY, middle)
    w = await db.fetchval("SELECT wire_key($1)", KEY)
    before = await db.fetchrow("SELECT * FROM installation")
    would = await program.json("prune", "--dry-run")
    assert await db.fetchrow("SELECT * FROM installation") == before
    assert len(await keys(db)) == 4
    assert {name: n for name, n in would["rows"].items() if n} == {"send_log": 2, "verdict": 1}
    assert would["months"] == [
        {"month": str(first), "outcome": "dropped", "wire_key": None, "events": 1},
        {"month": str(held), "outcome": "held", "wire_key": w, "events": 0},
    ]
    said = (await program("prune")).stdout.splitlines()
    assert said[0] == "sends are kept for 30d, events for 60d"
    assert [line.split() for line in said[1:]] == [
        ["TABLE", "DELETED"], ["send_log", "2"], ["verdict", "1"], [],
        ["EVENTS", "OF", "OUTCOME", "HELD", "BACK", "BY", "EVENTS"],
        [f"{first:%Y-%m}", "dropped", "-", "-"], [f"{held:%Y-%m}", "held", w, "-"],
    ]  # fmt: skip
    assert await keys(db) == {"stays", KEY}
    assert (await would_prune(db, AGES)).rows["send_log"] == 0


async def test_a_month_is_shown_by_its_first_day(db: asyncpg.Pool, program: Program) -> None:
    done: dict[str, Any] = await program.json("prune")
    assert done == {"dry_run": False, "rows": done["rows"], "months": []}
    assert not any(done["rows"].values())
    assert (await program("prune")).stdout == "sends are kept for 30d, events for 60d\nno row is over\n"
