# SPDX-License-Identifier: Apache-2.0
"""Frequency caps: at most so many of a class to one recipient in a window, whoever claims."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import psycopg
import pytest
from campaign_kit import PLAN, batch, loaded, people, states
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit import FEED, call, claim, confirm, event, fail, old_claim, reconcile, row, state, until_it_waits
from program import Program
from sends_kit import api, fresh

from reconciler import campaign, guard, guard_many, guard_many_sync
from reconciler.campaigns.caps import Cap, caps_of, keep_caps
from reconciler.configuration.settings import ConfigError, Settings, load_settings
from reconciler.upkeep.forgetting import forget
from reconciler.upkeep.retention import prune
from reconciler.upkeep.retention_look import Ages, ages_of, would_prune
from webhooks.registry import PROVIDERS

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
ADA = {"message_class": "marketing", "recipient": "ada@example.org"}


async def capped(db: asyncpg.Pool, most: int, window: timedelta | str = DAY, zone: str = "UTC") -> None:
    span = window if isinstance(window, timedelta) else None
    await keep_caps(db, [Cap("marketing", most, span, None if span else str(window), zone)])


async def ask(db: Any, key: str, **options: Any) -> str:
    outcome: str = (await claim(db, key, **{**ADA, **options}))["outcome"]
    return outcome


async def let_pass(db: asyncpg.Pool, by: timedelta) -> None:
    """Let the places that are taken have been taken so much earlier."""
    await db.execute("UPDATE cap_taken SET taken_at = ARRAY(SELECT t - $1::interval FROM unnest(taken_at) AS t)", by)


# Exactness


async def test_a_hundred_claims_at_once_get_three_places_of_three(db: asyncpg.Pool) -> None:
    await capped(db, 3)
    outcomes = await asyncio.gather(*(ask(db, f"news:{n}") for n in range(100)))
    assert sorted(outcomes) == ["capped"] * 97 + ["claimed"] * 3
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'claimed'") == 3


async def test_case_070_of_twenty_to_one_person_two_go_and_the_ambiguous_one_keeps_its_place(db: asyncpg.Pool) -> None:
    await capped(db, 2, "day")
    submitted = []

    async def submit(claimed: guard.Claim) -> str:
        submitted.append(claimed.send_key)
        if len(submitted) == 1:
            raise TimeoutError
        return "m-1"

    async def send(n: int) -> guard.Sent:
        address = ("Ada@Example.org", "ada@example.org")[n % 2]
        return await guard.send_once(db, f"news:{n}", FEED, submit, message_class="marketing", recipient=address)

    outcomes = [sent.outcome for sent in await asyncio.gather(*(send(n) for n in range(20)))]
    assert sorted(outcomes) == ["capped"] * 18 + ["sent", "waiting"]
    assert len(submitted) == 2
    assert await ask(db, "news:late") == "capped", "nobody knows whether the ambiguous one was taken"
    await event(db, submitted[0], "rejected", kind="rejected")
    await db.execute(
        "UPDATE send_log SET next_check_at = clock_timestamp() - interval '3 days' WHERE state = 'claimed'"
    )
    await db.execute(
        "UPDATE send_log SET submit_by = submit_by - interval '3 days', claimed_at = claimed_at - interval '3 days', "
        "first_claimed_at = first_claimed_at - interval '3 days' WHERE state = 'claimed'"
    )
    await reconcile(db)
    assert await state(db, submitted[0]) == "failed"
    assert await ask(db, "news:late") == "claimed", "it was resolved: it never reached anybody"


@pytest.mark.parametrize("taken", [0, 1])
async def test_who_waits_for_anothers_place_sees_it_taken(db: asyncpg.Pool, taken: int) -> None:
    await capped(db, taken + 1)
    assert [await ask(db, f"news:earlier:{n}") for n in range(taken)] == ["claimed"] * taken
    async with db.acquire() as first, first.transaction():
        assert await ask(first, "news:1") == "claimed"
        second = asyncio.create_task(ask(db, "news:2"))
        await until_it_waits(db, second)
    assert await second == "capped"


async def test_a_place_of_a_claim_that_was_rolled_back_is_free(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    async with db.acquire() as first:
        transaction = first.transaction()
        await transaction.start()
        assert await ask(first, "news:1") == "claimed"
        await transaction.rollback()
    assert await ask(db, "news:2") == "claimed"


# Whom and what it holds for


@pytest.mark.parametrize("address", ["ADA@EXAMPLE.ORG", " Ada <ada@example.org>", "aDa@example.ORG"])
async def test_recipients_are_compared_normalised_and_without_case(db: asyncpg.Pool, address: str) -> None:
    await capped(db, 1)
    assert await ask(db, "news:1") == "claimed"
    assert await ask(db, "news:2", recipient=address) == "capped"


async def test_other_people_and_other_classes_have_places_of_their_own(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    assert await ask(db, "news:1") == "claimed"
    assert await ask(db, "news:2", recipient="bob@example.org") == "claimed"
    assert await ask(db, "receipt:1", message_class="receipts") == "claimed"
    assert await ask(db, "receipt:2", message_class="receipts") == "claimed"


async def test_a_cap_holds_over_all_feeds(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    assert await ask(db, "news:1") == "claimed"
    answer = await claim(db, "news:2", "another-feed", **ADA)
    assert answer["outcome"] == "capped"


@pytest.mark.parametrize("recipient", [None, "ada@example.org, bob@example.org"])
async def test_a_send_of_a_capped_class_needs_one_recipient(db: asyncpg.Pool, recipient: str | None) -> None:
    await capped(db, 1)
    with pytest.raises(
        asyncpg.InvalidParameterValueError, match="'marketing' has a frequency cap: .* one recipient each"
    ):
        await claim(db, "news:1", message_class="marketing", recipient=recipient)
    assert await row(db, "news:1") is None


async def test_a_send_from_before_the_cap_that_has_no_recipient_stops_nobody(db: asyncpg.Pool) -> None:
    both = ADA | {"recipient": "ada@example.org, bob@example.org"}
    for n, options in enumerate((both, ADA)):
        fence = (await claim(db, f"news:{n}", **options))["fence"]
        await fail(db, f"news:{n}", fence, not_sent=True)
    await loaded(db, people(3), replace(PLAN, message_class="marketing"))
    await call(db, "send_enqueue", "news:2", FEED, json.dumps(both | {"campaign": "spring"}))
    await capped(db, 1)
    answer = await claim(db, "news:0")
    assert (answer["outcome"], answer["reason"]) == ("held", "cap_needs_recipient")
    given = await db.fetch("SELECT send_key FROM send_claim_released($1, 1, '{}')", FEED)
    assert [one["send_key"] for one in given] == ["news:1"]
    assert sum([len(await batch(db, 1)) for _ in range(3)]) == 3
    assert await batch(db, 1) == []
    assert await states(db) == {"claimed": 3, "pending": 1}


async def test_an_enqueued_send_may_be_given_its_recipient_by_the_claim(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    await call(db, "send_enqueue", "news:1", FEED, '{"message_class": "marketing"}')
    assert await ask(db, "news:1") == "claimed"
    assert (await row(db, "news:1"))["recipient_key"] == "ada@example.org"
    assert await ask(db, "news:2") == "capped"


async def test_a_class_that_the_environment_names_with_hyphens_holds_for_underscores(db: asyncpg.Pool) -> None:
    await keep_caps(db, [Cap("password-reset", 1, DAY, None, "UTC")])
    options = {"message_class": "password_reset", "recipient": "ada@example.org"}
    assert (await claim(db, "reset:1", **options))["outcome"] == "claimed"
    assert (await claim(db, "reset:2", **options))["outcome"] == "capped"


async def test_what_was_enqueued_is_capped_when_it_is_claimed(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    for n in (1, 2):
        assert (await call(db, "send_enqueue", f"news:{n}", FEED, json.dumps(ADA)))["outcome"] == "enqueued"
    assert (await claim(db, "news:1"))["outcome"] == "claimed"
    assert (await claim(db, "news:2"))["outcome"] == "capped"


# When a capped send may go


async def test_a_capped_send_says_when_the_next_place_of_a_sliding_window_comes_free(db: asyncpg.Pool) -> None:
    await capped(db, 2, 10 * HOUR)
    assert await ask(db, "news:1") == "claimed"
    await let_pass(db, 4 * HOUR)
    assert await ask(db, "news:2") == "claimed"
    answer = await claim(db, "news:3", **ADA)
    assert (answer["outcome"], answer["reason"]) == ("capped", "frequency_cap")
    now = await db.fetchval("SELECT clock_timestamp()")
    assert timedelta(hours=5, minutes=59) < answer["retry_at"] - now <= 6 * HOUR
    found = await row(db, "news:3")
    assert (found["state"], found["attempt"], found["fence"]) == ("pending", 0, None)
    assert found["capped_until"] == answer["retry_at"]
    await let_pass(db, 6 * HOUR)
    assert await ask(db, "news:3") == "claimed", "the first place has come free, as was said"
    assert (await row(db, "news:3"))["capped_until"] is None
    assert await ask(db, "news:4") == "capped"


@pytest.mark.parametrize("zone", ["UTC", "Europe/Vienna", "Pacific/Auckland", "America/St_Johns"])
async def test_a_day_begins_in_its_zone_by_the_databases_clock(db: asyncpg.Pool, zone: str) -> None:
    await capped(db, 1, "day", zone)
    assert await ask(db, "news:1") == "claimed"
    answer = await claim(db, "news:2", **ADA)
    now = (await db.fetchval("SELECT clock_timestamp()")).astimezone(ZoneInfo(zone))
    midnight = datetime(now.year, now.month, now.day, tzinfo=ZoneInfo(zone))
    tomorrow = (now + DAY).date()
    assert answer["retry_at"] == datetime(tomorrow.year, tomorrow.month, tomorrow.day, tzinfo=ZoneInfo(zone))
    place = (midnight - timedelta(microseconds=1)).astimezone(UTC)
    await db.execute("UPDATE cap_taken SET taken_at = ARRAY[$1::timestamptz]", place)
    assert await ask(db, "news:2") == "claimed", "it was taken yesterday, where the recipient's days begin"
    await db.execute("UPDATE cap_taken SET taken_at = ARRAY[$1::timestamptz], wire_keys = '{x}'", midnight)
    assert await ask(db, "news:3") == "capped", "it was taken today"


@pytest.mark.parametrize(
    ("calendar", "until"),
    [
        ("day", "2026-10-26 00:00"),  # a day of 25 hours
        ("week", "2026-10-26 00:00"),
        ("month", "2026-11-01 00:00"),
    ],
)
async def test_windows_of_the_calendar_end_where_the_next_begins(db: asyncpg.Pool, calendar: str, until: str) -> None:
    since, end = await db.fetchrow(
        """SELECT cap_since(c, t), cap_end(c, t)
           FROM (SELECT ('x', 1, NULL, $1, 'Europe/Vienna', now())::frequency_cap AS c) AS c,
                (SELECT '2026-10-25 12:00 Europe/Vienna'::timestamptz AS t) AS t""",
        calendar,
    )
    begin = {"day": datetime(2026, 10, 25), "week": datetime(2026, 10, 19), "month": datetime(2026, 10, 1)}[calendar]  # noqa: DTZ001
    assert since == begin.replace(tzinfo=ZoneInfo("Europe/Vienna")) - timedelta(microseconds=1)
    assert end == datetime.fromisoformat(until).replace(tzinfo=ZoneInfo("Europe/Vienna"))


@pytest.mark.parametrize("minutes", [5, 30, 55, 65, 90])
async def test_where_clocks_are_set_back_over_midnight_the_cap_holds(db: asyncpg.Pool, minutes: int) -> None:
    """In the Azores 2026-10-25 00:00 was twice: at 00:00 and at 01:00 UTC."""
    at = datetime(2026, 10, 25, 0, minutes % 60, tzinfo=UTC) + timedelta(hours=minutes // 60)
    since = await db.fetchval(
        "SELECT cap_since(('x', 1, NULL, 'day', 'Atlantic/Azores', now())::frequency_cap, $1)", at
    )
    first, second = datetime(2026, 10, 24, tzinfo=UTC), datetime(2026, 10, 25, 1, tzinfo=UTC)
    assert since == (first if at < second else second) - timedelta(microseconds=1)


async def test_the_time_to_submit_begins_when_the_place_is_had(db: asyncpg.Pool) -> None:
    await capped(db, 2)
    async with db.acquire() as first, first.transaction():
        assert await ask(first, "news:1") == "claimed"
        waiting = asyncio.create_task(claim(db, "news:2", submit_within=5, **ADA))
        await until_it_waits(db, waiting)
        await first.execute("SELECT pg_sleep(0.3)")
        let_go = await db.fetchval("SELECT clock_timestamp()")
    assert (await waiting)["seconds_left"] == 5
    found = await row(db, "news:2")
    assert found["claimed_at"] >= let_go
    assert found["submit_by"] == found["next_check_at"] == found["claimed_at"] + timedelta(seconds=5)


async def test_what_a_lifted_or_raised_cap_refused_is_given_out_again(db: asyncpg.Pool) -> None:
    await capped(db, 1, "month")
    await loaded(db, b"recipient\nada@example.org\n", replace(PLAN, message_class="marketing"))
    fence = (await claim(db, "news:0", **ADA | {"recipient": "bob@example.org"}))["fence"]
    await fail(db, "news:0", fence, not_sent=True)
    assert await ask(db, "news:1") == "claimed"
    assert await ask(db, "news:2", recipient="bob@example.org") == "claimed"
    assert [one["outcome"] for one in await batch(db)] == ["capped"]
    assert await ask(db, "news:0") == "capped"
    assert await batch(db) == []
    await capped(db, 2, "month")
    assert [one["outcome"] for one in await batch(db)] == ["claimed"]
    assert (await row(db, "news:0"))["next_check_at"] <= await db.fetchval("SELECT clock_timestamp()")
    assert len(await db.fetch("SELECT FROM send_claim_released($1, 5, '{}')", FEED)) == 1
    assert await ask(db, "news:3") == "capped"
    await keep_caps(db, [])
    assert (await row(db, "news:3"))["capped_until"] is None


async def test_a_released_send_that_is_capped_is_told_again_when_it_may_go_and_alarms_nobody(
    db: asyncpg.Pool, program: Program
) -> None:
    await capped(db, 1, 10 * HOUR)
    fence = (await claim(db, "news:0", **ADA))["fence"]
    await fail(db, "news:0", fence, not_sent=True)
    assert await ask(db, "news:1") == "claimed"
    assert await ask(db, "news:0") == "capped"
    found = await row(db, "news:0")
    assert found["next_check_at"] == found["capped_until"]
    await db.execute("UPDATE send_log SET released_at = released_at - interval '5 h' WHERE released_at IS NOT NULL")
    findings = (await program.json("status"))["findings"]
    assert "unclaimed" not in {one["code"] for one in findings}


AGES = Ages(30 * DAY, 60 * DAY, 30 * DAY, 7 * DAY)
A_YEAR_EARLIER = """
UPDATE send_log SET capped_until = capped_until - interval '1 year', created_at = created_at - interval '1 year',
    updated_at = updated_at - interval '1 year'
"""


@pytest.mark.parametrize("enqueued", [True, False])
async def test_no_prune_takes_a_send_that_a_cap_refused_however_old(db: asyncpg.Pool, enqueued: bool) -> None:
    await capped(db, 1)
    assert await ask(db, "news:1") == "claimed"
    if enqueued:
        mail = ADA | {"payload": {"subject": "News"}}
        assert (await call(db, "send_enqueue", "news:2", FEED, json.dumps(mail)))["outcome"] == "enqueued"
    assert await ask(db, "news:2") == "capped"
    await db.execute(A_YEAR_EARLIER)
    assert (await would_prune(db, AGES)).rows["send_log"] == 0
    assert (await prune(db, AGES, pause=0)).rows["send_log"] == 0
    assert await state(db, "news:2") == "pending"
    await let_pass(db, DAY)
    assert await ask(db, "news:2") == "claimed"
    assert (await row(db, "news:2"))["payload"] == ('{"subject": "News"}' if enqueued else None)


async def test_a_refused_claim_of_a_campaigns_send_leaves_nothing_of_a_claim(db: asyncpg.Pool) -> None:
    options = {**ADA, "campaign": "a label", "not_before": "2999-01-01T00:00:00Z", "nonce": "n", "claimed_by": "w"}
    assert await ask(db, "news:1", **options) == "held"
    found = await row(db, "news:1")
    assert {found[name] for name in ("nonce", "claimed_by", "claimed_at", "submit_by", "next_check_at", "fence")} == {
        None
    }


async def test_a_capped_send_ends_at_its_expiry_and_is_pruned_as_any_that_ended(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    assert await ask(db, "news:1") == "claimed"
    later = (await db.fetchval("SELECT clock_timestamp()")) + HOUR
    assert await ask(db, "news:2", expires_at=later.isoformat()) == "capped"
    await db.execute(
        "UPDATE send_log SET expires_at = expires_at - interval '61 min', next_check_at = clock_timestamp() "
        "WHERE expires_at IS NOT NULL"
    )
    await reconcile(db)
    found = await row(db, "news:2")
    assert (found["state"], found["verdict_reason"]) == ("failed", "expired")
    await db.execute("UPDATE send_log SET failed_at = failed_at - interval '31 days' WHERE state = 'failed'")
    assert (await prune(db, AGES, pause=0)).rows["send_log"] == 1
    assert await row(db, "news:2") is None


# Whose place it is


async def test_a_send_that_never_left_gives_its_place_up_and_needs_one_again(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    fence = (await claim(db, "news:1", **ADA))["fence"]
    assert await ask(db, "news:2") == "capped"
    assert await fail(db, "news:1", fence, not_sent=True) == "released"
    assert await ask(db, "news:2") == "claimed"
    assert await ask(db, "news:1") == "capped", "its place was taken meanwhile"


async def test_a_send_that_the_provider_refused_gives_its_place_up(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    fence = (await claim(db, "news:1", **ADA))["fence"]
    assert await fail(db, "news:1", fence, not_sent=False) == "failed"
    assert await ask(db, "news:2") == "claimed"


async def test_a_refused_send_of_which_an_earlier_attempt_may_have_arrived_keeps_its_place(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    await old_claim(db, "news:1", **ADA)
    assert (await call(db, "operator_release", "news:1", "why", "me"))["outcome"] == "released"
    fence = (await claim(db, "news:1", **ADA))["fence"]
    assert await fail(db, "news:1", fence, not_sent=False) == "failed"
    assert await ask(db, "news:2") == "capped"


async def test_what_an_operator_calls_failed_keeps_its_place(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    await old_claim(db, "news:1", **ADA)
    assert (await call(db, "operator_decide", "news:1", "failed", "why", "me"))["outcome"] == "failed"
    assert await ask(db, "news:2") == "capped"


async def test_another_attempt_goes_by_the_sends_own_place(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    await old_claim(db, "news:1", **ADA)
    assert (await call(db, "operator_release", "news:1", "why", "me"))["outcome"] == "released"
    assert await ask(db, "news:2") == "capped", "a released send may have been delivered"
    assert await ask(db, "news:1") == "claimed"
    assert await db.fetchval("SELECT cardinality(wire_keys) FROM cap_taken") == 1


async def test_an_attempt_made_after_its_window_needs_a_place_again(db: asyncpg.Pool) -> None:
    await capped(db, 1, 10 * HOUR)
    fence = await old_claim(db, "news:1", **ADA)
    await let_pass(db, 10 * HOUR)
    assert await ask(db, "news:2") == "claimed"
    assert (await call(db, "operator_release", "news:1", "why", "me"))["outcome"] == "released"
    assert await ask(db, "news:1") == "capped"
    assert await confirm(db, "news:1", fence) == "sent_late", "a cap stands in no answer's way"


async def test_a_claim_that_is_refused_otherwise_takes_no_place(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    await event(db, "news:1", "none", kind="unknown")
    assert await ask(db, "news:1") == "held"
    assert await ask(db, "news:2", not_before="2999-01-01T00:00:00Z") == "held"
    assert await db.fetchval("SELECT count(*) FROM cap_taken") == 0
    assert await ask(db, "news:3") == "claimed"


async def test_a_repeated_call_gets_its_own_claim_and_no_second_place(db: asyncpg.Pool) -> None:
    await capped(db, 2)
    first = await claim(db, "news:1", nonce="n", **ADA)
    again = await claim(db, "news:1", nonce="n", **ADA)
    assert (again["outcome"], again["fence"]) == ("claimed", first["fence"])
    assert await ask(db, "news:2") == "claimed"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["claim", "sent", "left", "refused", "lost", "wait"]), st.integers(0, 5)), max_size=40
    )
)
async def test_never_more_than_the_cap_may_have_arrived_within_a_window(
    db: asyncpg.Pool, steps: list[tuple[str, int]]
) -> None:
    await db.execute("TRUNCATE send_log, cap_taken, provider_event, verdict CASCADE")
    await capped(db, 2, 10 * HOUR)
    now, fences, arrived = 0, dict[str, int](), list[tuple[str, int]]()  # what may have arrived, and at which hour
    for what, n in steps:
        key = f"news:{n}"
        match what:
            case "claim":
                answer = await claim(db, key, **ADA)
                within = {k for k, at in arrived if at > now - 10}
                if answer["outcome"] == "claimed":
                    fences[key] = answer["fence"]
                    arrived.append((key, now))
                    assert len(within | {key}) <= 2
                elif answer["outcome"] == "capped":
                    assert len(within - {key}) >= 2, "there was a place"
            case "wait":
                now += n
                await let_pass(db, n * HOUR)
            case "sent" if key in fences:
                await confirm(db, key, fences.pop(key), f"m-{n}")
            case "left" | "refused" if key in fences:
                await fail(db, key, fences.pop(key), not_sent=what == "left")
                arrived = [(k, at) for k, at in arrived if k != key]
            case "lost" if key in fences:
                await fail(db, key, fences[key])


# Several at once


async def test_a_campaign_passes_over_who_has_had_enough_and_comes_back_to_him(db: asyncpg.Pool) -> None:
    await db.execute("INSERT INTO frequency_cap (message_class, most, span) VALUES ('default', 1, '1 day')")
    address = "person3@example3.com"
    assert (await claim(db, "receipt:1", recipient=address.upper()))["outcome"] == "claimed"
    await loaded(db, people(10))
    outcomes = [one["outcome"] for one in await batch(db)]
    assert sorted(outcomes) == ["capped"] + ["claimed"] * 9
    assert await batch(db) == []
    assert await states(db) == {"claimed": 9, "pending": 1}
    left = await db.fetchrow(
        "SELECT send_key, capped_until FROM send_log WHERE campaign = 'spring' AND state = 'pending'"
    )
    assert left["send_key"] == f"campaign:spring:{address}"
    await db.execute("DELETE FROM cap_taken WHERE recipient_key = $1", address)
    assert await batch(db) == [], "it is not asked for again before it was said to be worth it"
    await db.execute("UPDATE send_log SET capped_until = clock_timestamp() WHERE capped_until IS NOT NULL")
    assert [one["recipient"] for one in await batch(db)] == [address]


async def test_a_campaigns_status_counts_who_is_capped(db: asyncpg.Pool, program: Program) -> None:
    await db.execute("INSERT INTO frequency_cap (message_class, most, span) VALUES ('default', 1, '1 day')")
    assert (await claim(db, "receipt:1", recipient="person3@example3.com"))["outcome"] == "claimed"
    await loaded(db, people(10))
    await batch(db)
    assert (await program.json("campaign", "status", "spring"))["capped"] == 1
    assert "1 (0 released, 1 capped)" in (await program("campaign", "status", "spring")).stdout


async def test_released_sends_that_are_capped_do_not_hide_the_others(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    fences = {}
    for n in range(3):
        fences[n] = (await claim(db, f"news:{n}", **ADA | {"recipient": f"p{n}@example.org"}))["fence"]
        await fail(db, f"news:{n}", fences[n], not_sent=True)
    assert await ask(db, "news:other", recipient="p0@example.org") == "claimed"
    given = await db.fetch("SELECT send_key FROM send_claim_released($1, 1, '{}')", FEED)
    assert [one["send_key"] for one in given] == ["news:1"]
    given = await db.fetch("SELECT send_key FROM send_claim_released($1, 5, '{}')", FEED)
    assert [one["send_key"] for one in given] == ["news:2"]


TO = [{**ADA, "recipient": f"p{n}@example.org"} for n in (0, 1)]


BATCH = {"news:3": TO[0], "news:4": TO[1]}
"""Locked in the order of recipients: whoever claims to the second before the first crosses it."""


async def test_batches_to_the_same_people_never_deadlock(db: asyncpg.Pool) -> None:
    await capped(db, 3)

    async def caller(n: int) -> list[str]:
        sends = {f"news-{n}:{p}": {**ADA, "recipient": f"p{p}@example.org"} for p in range(60)}
        async with db.acquire() as connection:  # no second try: the statement itself
            options = [json.dumps(one) for one in sends.values()]
            return [r["outcome"] for r in await connection.fetch(guard_many.CLAIM, FEED, [*sends], options)]

    outcomes = [one for told in await asyncio.gather(*(caller(n) for n in range(8))) for one in told]
    assert sorted(set(outcomes)) == ["capped", "claimed"]
    assert outcomes.count("claimed") == 60 * 3


async def test_campaigns_to_the_same_people_never_deadlock_and_leave_nobody_out(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    for name in ("spring", "summer"):
        await loaded(db, people(300), replace(PLAN, name=name, message_class="marketing"))

    async def worker(name: str) -> int:
        claimed = 0
        after = ""
        while rows := await db.fetch(
            "SELECT * FROM send_claim_campaign($1, 40, $2)", name, json.dumps({"after": after})
        ):
            claimed += sum(one["outcome"] == "claimed" for one in rows)
            after = max(one["wire_key"] for one in rows)
        return claimed

    assert sum(await asyncio.gather(*(worker(name) for name in ("spring", "summer") * 3))) == 300
    assert await db.fetchval("SELECT count(*) FROM send_log WHERE state = 'pending' AND capped_until IS NULL") == 0


async def test_a_campaigns_iteration_ends_only_when_everybody_was_looked_at(db: asyncpg.Pool) -> None:
    await loaded(db, people(130), replace(PLAN, message_class="marketing"))
    await capped(db, 1)
    last = await db.fetchval("SELECT max(wire_key) FROM send_log")
    for r in await db.fetch("SELECT recipient FROM send_log WHERE wire_key <> $1", last):
        assert await ask(db, f"news:{r['recipient']}", recipient=r["recipient"]) == "claimed"
    given = [one.claim.wire_key async for claims in campaign.batches(db, "spring", size=20) for one in claims]
    assert given == [last]


# Each looks for a deadlock once, so long after it began to wait: the first that finds one is ended by it.
ENDED = "SET deadlock_timeout = '4s'"
NOT_ENDED = "SET LOCAL deadlock_timeout = '1 min'"


async def test_batches_that_deadlock_over_places_are_claimed_once_more(db: asyncpg.Pool, dsn: str) -> None:
    await capped(db, 1)
    async with db.acquire() as first:
        transaction = first.transaction()
        await transaction.start()
        assert (await claim(first, "news:1", **TO[1]))["outcome"] == "claimed"
        async with db.acquire() as second:
            await second.execute(ENDED)
            late = asyncio.create_task(guard_many.claim_many(second, BATCH, FEED))
            await until_it_waits(db, late)
            await first.execute(NOT_ENDED)
            assert (await claim(first, "news:2", **TO[0]))["outcome"] == "claimed"
            await transaction.commit()
            assert [one.outcome for one in await late] == ["capped", "capped"]


async def test_threads_batches_that_deadlock_over_places_are_claimed_once_more(db: asyncpg.Pool, dsn: str) -> None:
    await capped(db, 1)
    async with db.acquire() as first:
        transaction = first.transaction()
        await transaction.start()
        assert (await claim(first, "news:1", **TO[1]))["outcome"] == "claimed"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(ENDED)
            late = asyncio.create_task(asyncio.to_thread(guard_many_sync.claim_many, connection, BATCH, FEED))
            await until_it_waits(db, late)
            await first.execute(NOT_ENDED)
            assert (await claim(first, "news:2", **TO[0]))["outcome"] == "claimed"
            await transaction.commit()
            assert [one.outcome for one in await late] == ["capped", "capped"]


async def test_a_campaigns_batch_that_deadlocks_over_places_is_claimed_once_more(db: asyncpg.Pool) -> None:
    await db.execute("INSERT INTO frequency_cap (message_class, most, span) VALUES ('default', 1, '1 day')")
    await loaded(db, people(2))
    rows = await db.fetch("SELECT recipient FROM send_log WHERE campaign = 'spring' ORDER BY recipient")
    earlier, later = (r["recipient"] for r in rows)
    async with db.acquire() as first:
        transaction = first.transaction()
        await transaction.start()
        assert (await claim(first, "receipt:1", recipient=later))["outcome"] == "claimed"
        async with db.acquire() as second:
            await second.execute(ENDED)
            late = asyncio.create_task(second.fetchval("CALL send_claim_campaign_commit('spring', 10, '{}')"))
            await until_it_waits(db, late)
            await first.execute(NOT_ENDED)
            assert (await claim(first, "receipt:2", recipient=earlier))["outcome"] == "claimed"
            await transaction.commit()
            assert [one["outcome"] for one in json.loads(await late)] == ["capped", "capped"]
    assert await states(db) == {"pending": 2}


# Settings and surfaces


def test_settings_name_the_cap_its_window_and_its_zone(tmp_path: Any) -> None:
    path = tmp_path / "reconciler.toml"
    path.write_text(
        '[classes.a]\ncap = 2\n[classes.b]\ncap = 3\ncap_window = "36h"\n'
        '[classes.c]\ncap = 1\ncap_window = "month"\ncap_zone = "Europe/Vienna"\n[classes.d]\nfailover = true\n'
        '[retention]\nrows = "31d"\n'
    )
    assert caps_of(load_settings(path, {}, PROVIDERS)) == [
        Cap("a", 2, None, "day", "UTC"),
        Cap("b", 3, timedelta(hours=36), None, "UTC"),
        Cap("c", 1, None, "month", "Europe/Vienna"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('cap_window = "fortnight"', "is no window"),
        ('cap_window = "0s"', "is no window"),
        ('cap_zone = "Middle/Earth"', "is no time zone"),
        ("cap = 0", "greater than or equal to 1"),
        ('cap_window = "day"', "a window for a cap and no cap"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Any, line: str, words: str) -> None:
    path = tmp_path / "reconciler.toml"
    path.write_text(f"[classes.marketing]\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        load_settings(path, {}, PROVIDERS)


def with_window(path: Any, window: str, kept: str) -> Settings:
    path.write_text(
        f'[classes.marketing]\ncap = 1\ncap_window = "{window}"\n[retention]\nrows = "{kept}"\nevents = "{kept}"\n'
    )
    return load_settings(path, {}, PROVIDERS)


@pytest.mark.parametrize("window", ["31d", "month"])
def test_a_window_is_no_longer_than_sends_are_kept(tmp_path: Any, window: str) -> None:
    with pytest.raises(ConfigError) as refused:
        with_window(tmp_path / "reconciler.toml", window, "30d")
    assert str(refused.value).endswith(
        "retention.rows is 30d, and classes.marketing.cap_window counts what became of sends for so long: "
        "set it to 31d or more"
    )
    with_window(tmp_path / "reconciler.toml", window, "31d")


def least_kept(path: Any, window: str) -> Ages:
    """Return the shortest ages that the settings take beside a window."""
    for kept in ("30d", "31d"):
        with suppress(ConfigError):
            return ages_of(with_window(path, window, kept).retention, 7 * DAY)
    raise AssertionError


END_EARLIER = """
UPDATE send_log SET sent_at = sent_at - $1::interval, failed_at = failed_at - $1::interval,
    claimed_at = claimed_at - $1::interval, first_claimed_at = first_claimed_at - $1::interval
"""


@pytest.mark.parametrize("window", ["31d", "month"])
@pytest.mark.parametrize(
    ("end", "same", "other"),
    [("answered", "already_sent", "capped"), ("confirmed", "already_sent", "capped"), ("refused", "failed", "claimed")],
)
async def test_a_prune_changes_nothing_of_what_a_window_still_counts(
    db: asyncpg.Pool, tmp_path: Any, window: str, end: str, same: str, other: str
) -> None:
    ages = least_kept(tmp_path / "reconciler.toml", window)
    await capped(db, 1, 31 * DAY)  # as long as the longest month
    fence = (await claim(db, "news:1", **ADA))["fence"]
    if end == "answered":
        await confirm(db, "news:1", fence)
    elif end == "confirmed":
        await call(db, "operator_decide", "news:1", "sent", "in its log", "ann")
    else:
        await fail(db, "news:1", fence, not_sent=False)
    await let_pass(db, 31 * DAY - 10 * MINUTE)
    await db.execute(END_EARLIER, 31 * DAY - 10 * MINUTE)
    await prune(db, ages, pause=0)
    assert await ask(db, "news:1") == same
    assert await ask(db, "news:2") == other


async def test_the_database_keeps_what_the_settings_say_and_no_more(db: asyncpg.Pool) -> None:
    await keep_caps(db, [Cap("a", 2, DAY, None, "UTC"), Cap("b", 1, None, "week", "Europe/Vienna")])
    await keep_caps(db, [Cap("b", 4, None, "week", "Europe/Vienna"), Cap("c", 1, HOUR, None, "UTC")])
    rows = await db.fetch("SELECT message_class, most, span, calendar, zone FROM frequency_cap ORDER BY 1")
    assert [tuple(r) for r in rows] == [("b", 4, None, "week", "Europe/Vienna"), ("c", 1, HOUR, None, "UTC")]
    await keep_caps(db, [])
    assert await db.fetchval("SELECT count(*) FROM frequency_cap") == 0


async def test_a_zone_that_the_database_does_not_know_changes_nothing(db: asyncpg.Pool) -> None:
    await capped(db, 1)
    with pytest.raises(asyncpg.InvalidParameterValueError, match="Middle/Earth"):
        await keep_caps(db, [Cap("marketing", 5, None, "day", "Middle/Earth")])
    assert await db.fetchval("SELECT most FROM frequency_cap") == 1


async def test_a_pass_by_hand_keeps_the_caps_and_why_and_config_tell_of_them(
    db: asyncpg.Pool, program: Program, config: Any
) -> None:
    config.write_text(
        '[feeds.mg]\nprovider = "mailgun"\nsecrets = ["key-0123456789"]\n'
        '[classes.marketing]\ncap = 1\ncap_window = "36h"\n'
    )
    assert (await program("reconcile")).exit_code == 0
    assert await ask(db, "news:1") == "claimed"
    assert await ask(db, "news:2") == "capped"
    told = (await program("why", "news:2")).stdout
    assert "its recipient has had what the cap of its class allows" in told
    told = (await program("config", "--feed", "mg", "--class", "marketing")).stdout
    assert "capped where its recipient had 1 of this class within 36h" in " ".join(told.split())


async def test_over_http_a_capped_claim_is_429_and_says_when(db: asyncpg.Pool) -> None:
    await capped(db, 1, 10 * HOUR)
    assert await ask(db, "news:1") == "claimed"
    async with api(db) as sender:
        status, body = await sender.call("POST", "/v1/sends", {"key": "news:2", "feed": FEED, **ADA}, key=fresh())
    assert (status, body["outcome"], body["state"], body["reason"]) == (429, "capped", "pending", "frequency_cap")
    assert 35_900 < int(sender.headers["Retry-After"]) <= 36_000
    assert datetime.fromisoformat(body["retry_at"]) == (await row(db, "news:2"))["capped_until"]


async def test_places_go_with_the_person_and_with_their_time(db: asyncpg.Pool) -> None:
    await capped(db, 1, 40 * DAY)
    fence = (await claim(db, "news:1", **ADA))["fence"]
    await ask(db, "news:2", recipient="bob@example.org")
    await let_pass(db, 39 * DAY)
    assert (await prune(db, AGES, pause=0)).rows["cap_taken"] == 0, "they still count"
    assert (await forget(db, "ADA@example.org")).rows["cap_taken"] == 0, "nobody knows yet whether it arrived"
    await confirm(db, "news:1", fence)
    assert (await forget(db, "ADA@example.org")).rows["cap_taken"] == 1
    await let_pass(db, 2 * DAY)
    assert (await prune(db, AGES, pause=0)).rows["cap_taken"] == 1
    assert await db.fetchval("SELECT count(*) FROM cap_taken") == 0


def test_without_settings_nothing_is_capped() -> None:
    assert caps_of(Settings()) == []
