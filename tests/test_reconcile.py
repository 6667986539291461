# SPDX-License-Identifier: Apache-2.0
"""One pass: what it decides of each kind of row, what it leaves alone, and that many at once are as one."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import timedelta

import asyncpg
import pytest
from kit import (
    FEED,
    RULES,
    claim,
    confirm,
    event,
    fail,
    heard_neighbours,
    keep_neighbours,
    make_due,
    old_claim,
    policies,
    reasons,
    reconcile,
    row,
    state,
    stored_delivery,
    unlimited,
    until_it_waits,
)

from reconciler.passes import ledger
from reconciler.passes.ledger import Decided
from reconciler.passes.reconcile import Scope, look
from reconciler.passes.releasing import release
from reconciler.rule.policy import Action, Verdict

KEY = "order:1"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


# What evidence does


@pytest.mark.parametrize("kind", ["queued", "delivered", "bounced", "deferred", "opened", "complained"])
async def test_any_acceptance_makes_a_claim_sent_even_before_submit_by(db: asyncpg.Pool, kind: str) -> None:
    await claim(db, KEY)
    await event(db, KEY, kind=kind, message_id="m-7")
    report = await reconcile(db)
    sent = await row(db, KEY)
    assert (sent["state"], sent["verdict_source"], sent["provider_message_id"]) == ("sent", "feed", "m-7")
    assert report.counts["sent:accepted"] == 1


async def test_case_040_an_event_may_come_before_its_row(db: asyncpg.Pool) -> None:
    await event(db, KEY)
    await reconcile(db)
    await db.execute("SELECT * FROM send_enqueue($1, $2, $3)", KEY, FEED, "{}")
    assert (await claim(db, KEY))["outcome"] == "already_sent"


async def test_case_051_the_provider_id_is_filled_in_from_the_event_once(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await event(db, KEY, kind="queued", message_id="20261120@mg.example")
    await reconcile(db)
    first = await row(db, KEY)
    assert (first["state"], first["provider_message_id"]) == ("sent", "20261120@mg.example")
    assert (await reconcile(db)).counts["sent:accepted"] == 0
    assert await row(db, KEY) == first


async def test_evidence_counts_from_any_feed(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    await event(db, KEY, feed="another")
    await reconcile(db)
    assert await state(db, KEY) == "sent"


async def test_case_014_a_rejection_of_the_only_attempt_fails_the_row_in_the_providers_words(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    await event(db, KEY, "rejected", kind="failed", reason="suppressed")
    await reconcile(db)
    failed = await row(db, KEY)
    assert (failed["state"], failed["verdict_source"], failed["verdict_reason"]) == ("failed", "feed", "rejected")
    assert await db.fetchval("SELECT note FROM verdict") == "suppressed"


async def test_an_event_that_is_not_understood_forbids_release_and_is_held(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await event(db, KEY, "none", kind="unknown")
    await reconcile(db)
    assert (await row(db, KEY))["held_reason"] == "unknown_event"


# What absence does


async def test_absence_between_neighbours_heard_of_is_released_and_says_on_what_grounds(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await reconcile(db)
    verdict = await db.fetchrow("SELECT * FROM verdict")
    said = [verdict[name] for name in ("action", "reason", "feed", "who")]
    assert said == ["released", "absent", FEED, "test"]
    assert json.loads(verdict["witnesses"]) == {"feed": {"answer": "absent", "reason": "absent"}}
    inputs = json.loads(verdict["inputs"])
    assert inputs["recent"] == {"n": 50, "before": 25, "after": 25, "k": 0, "k_late": 0, "longest": 2.0}
    assert (inputs["history"]["n"] >= 450, inputs["history"]["k"], inputs["max_risk"]) == (True, 0, 0.01)
    assert 0.006 < verdict["risk"] <= 0.01  # stress 3, 1 in 460 or so, p0 a half
    assert inputs["risk"] == pytest.approx(verdict["risk"], rel=1e-3)
    assert verdict["claimed_at"] == (await row(db, KEY))["claimed_at"]
    assert (await claim(db, KEY))["attempt"] == 2


async def test_a_claim_younger_than_the_grace_is_left_alone(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(minutes=14))
    await heard_neighbours(db, timedelta(minutes=14))
    assert (await reconcile(db)).counts["waiting"] == 1
    assert await reasons(db, KEY) == []


async def silent_because(db: asyncpg.Pool) -> str | None:
    await old_claim(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "claimed"
    return (await row(db, KEY))["held_reason"]


async def test_case_052_without_a_feed_nothing_is_released_nor_called_failed(db: asyncpg.Pool) -> None:
    assert await silent_because(db) == "silent"


async def test_neighbours_of_which_none_was_heard_of_make_the_feed_silent(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, heard=425)
    assert await silent_because(db) == "silent"


async def test_a_few_neighbours_that_were_not_heard_of_raise_the_risk_above_its_ceiling(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    unheard = ["n-447", "n-448", "n-450", "n-452"]
    await db.execute("DELETE FROM provider_event WHERE message_id = ANY ($1)", unheard)
    assert await silent_because(db) == "risk"
    inputs = json.loads(await db.fetchval("SELECT inputs FROM verdict"))
    assert (inputs["recent"]["k"], inputs["risk"] > 0.01) == (4, True)


@pytest.mark.parametrize(
    ("kept", "wanted"),
    [
        ((*range(454),), "absent"),
        ((*range(453),), "few_controls"),  # three after the claim
        ((*range(341, 441), *range(475, 600)), "risk"),
        ((*range(342, 441), *range(475, 600)), "few_controls"),  # 99 that have passed its age
        ((*range(90), *range(446, 600)), "risk"),
        ((*range(90), *range(447, 600)), "few_controls"),  # three before it within an hour
    ],
)
async def test_a_hundred_controls_of_its_age_and_four_on_either_side_are_needed(
    db: asyncpg.Pool, kept: tuple[int, ...], wanted: str
) -> None:
    await heard_neighbours(db)
    await keep_neighbours(db, kept)
    await old_claim(db, KEY)
    await reconcile(db)
    assert await db.fetchval("SELECT reason FROM verdict") == wanted


async def test_neighbours_more_than_an_hour_away_do_not_speak(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, timedelta(hours=4))
    assert await silent_because(db) == "few_controls"


async def test_neighbours_of_another_feed_do_not_speak(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, feed="another")
    await stored_delivery(db)
    assert await silent_because(db) == "few_controls"


@pytest.mark.parametrize("source", ["sender", "look-up"])
async def test_the_senders_own_answers_and_lookups_are_not_the_feeds_voice(db: asyncpg.Pool, source: str) -> None:
    await heard_neighbours(db)
    await db.execute(
        "UPDATE provider_event SET source = $1, fence = CASE $1 WHEN 'sender' THEN 1 END WHERE wire_key IN"
        " (SELECT wire_key FROM send_log WHERE first_claimed_at > clock_timestamp() - interval '2 hours 8 minutes')",
        source,
    )
    assert await silent_because(db) == "silent"


async def test_a_feed_that_never_spoke_of_a_send_of_its_class_has_no_echo(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await db.execute("UPDATE provider_event SET source = 'look-up'")
    assert await silent_because(db) == "no_echo"


async def test_neighbours_heard_of_by_message_id_only_do_not_speak(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, heard=425)
    for n in range(425, 475):
        await event(db, None, message_id=f"n-{n}")
    assert await silent_because(db) == "silent"


async def test_a_send_to_several_recipients_is_no_control(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await keep_neighbours(db, range(454))
    await db.execute(
        "UPDATE send_log SET recipient = 'ada@example.org, bob@example.org' WHERE send_key = $1",
        f"neighbour:{FEED}:453",
    )
    assert await silent_because(db) == "few_controls"


async def test_case_066_a_feed_whose_newest_delivery_was_refused_releases_nothing(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await stored_delivery(db, outcome="refused:signature")
    assert await silent_because(db) == "refused"
    await stored_delivery(db)
    await make_due(db, KEY)
    await reconcile(db)
    assert await state(db, KEY) == "pending"


@pytest.mark.parametrize(("cause", "risk"), [("timed out", 0.5), (None, 0.95)])
async def test_a_class_may_ask_in_writing_for_release_after_giving_up(
    db: asyncpg.Pool, cause: str | None, risk: float
) -> None:
    await old_claim(db, KEY, 2 * DAY, cause=cause)
    await reconcile(db, replace(RULES, on_unknown="release"))
    verdict = await db.fetchrow("SELECT reason, risk FROM verdict")
    assert tuple(verdict) == ("gave_up", risk)


async def test_giving_up_states_the_owners_floor_of_the_prior_where_nothing_was_learned(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, 2 * DAY)
    await reconcile(db, replace(RULES, on_unknown="release", prior_floor=0.8))
    assert await db.fetchval("SELECT risk FROM verdict") == 0.8


# What a pass writes


async def test_being_held_is_told_once_a_reason_and_looked_at_ever_more_rarely(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    for _ in range(3):
        await reconcile(db)
        await make_due(db, KEY)
    assert await reasons(db, KEY) == ["held:silent"]
    since = (await row(db, KEY))["held_since"]
    await event(db, KEY, "none", kind="unknown")
    await reconcile(db)
    assert await reasons(db, KEY) == ["held:silent", "held:unknown_event"]
    assert (await row(db, KEY))["held_since"] > since


async def test_rows_that_can_not_be_decided_do_not_starve_the_others(db: asyncpg.Pool) -> None:
    await db.execute("""
        INSERT INTO send_log (wire_key, send_key, feed, state, attempt, fence, first_claimed_at, claimed_at, submit_by,
                              next_check_at)
        SELECT 'stuck-' || n, 'stuck-' || n, 'deaf', 'claimed', 1, n, t, t, t, t
        FROM generate_series(1, 2500) n, (SELECT now() - interval '3 hours') AS old(t)
    """)
    await old_claim(db, KEY)
    await heard_neighbours(db)
    counts = (await reconcile(db)).counts
    assert counts["held:silent"] == 2500
    assert counts["released:absent"] == 1


async def test_a_pass_over_one_feed_or_one_key_leaves_the_others_alone(db: asyncpg.Pool) -> None:
    for key, feed in (("a", "one"), ("b", "two"), ("c", "two")):
        await claim(db, key, feed)
        await event(db, key, feed=feed, message_id=key)
    await reconcile(db, scope=Scope(wire_key="b"))
    assert [await state(db, key) for key in "abc"] == ["claimed", "sent", "claimed"]
    await reconcile(db, scope=Scope(feed="one"))
    assert [await state(db, key) for key in "abc"] == ["sent", "sent", "claimed"]


async def test_a_dry_run_says_what_would_happen_and_changes_nothing(db: asyncpg.Pool) -> None:
    await old_claim(db, "absent")
    await heard_neighbours(db)
    await old_claim(db, "accepted", timedelta(minutes=1))
    await event(db, "accepted")
    everything = """
        SELECT (SELECT jsonb_agg(l ORDER BY wire_key) FROM send_log l), (SELECT count(*) FROM verdict),
               (SELECT count(*) FROM pass)
    """
    before = await db.fetchrow(everything)
    report = await look(db, policies())
    assert {key: (v.action, v.reason) for key, v in report.verdicts} == {
        "absent": ("released", "absent"),
        "accepted": ("sent", "accepted"),
    }
    assert await db.fetchrow(everything) == before


async def test_a_verdict_older_than_a_minute_is_not_written(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    late = await db.fetchval("SELECT clock_timestamp() - interval '61 seconds'")
    released = Verdict(Action.RELEASED, "absent", next_check_at=late)
    decided = [Decided((await row(db, KEY))["wire_key"], "claimed", fence, released, {})]
    async with db.acquire() as connection:
        assert not (await release(connection, decided, unlimited, late, 1, "test")).counts
        failed = [replace(decided[0], verdict=Verdict(Action.FAILED, "attempts"))]
        assert not await ledger.fail(connection, failed, late, 1, "test")
    assert await state(db, KEY) == "claimed"


async def test_a_verdict_on_an_older_claim_is_not_written(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    now = await db.fetchval("SELECT clock_timestamp()")
    decided = [Decided((await row(db, KEY))["wire_key"], "claimed", fence, Verdict(Action.FAILED, "attempts"), {})]
    await fail(db, KEY, fence, not_sent=True)
    await claim(db, KEY)
    async with db.acquire() as connection:
        assert not await ledger.fail(connection, decided, now, 1, "test")
    assert await state(db, KEY) == "claimed"


async def test_evidence_that_commits_between_decision_and_release_stops_the_release(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    async with db.acquire() as holder:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("SELECT FROM feed_state WHERE feed = '*' FOR UPDATE")
        running = asyncio.create_task(reconcile(db))
        await until_it_waits(db, running)
        await event(db, KEY)
        await transaction.commit()
        assert (await running).counts["released:absent"] == 0
    assert await state(db, KEY) == "claimed"
    await reconcile(db)
    assert await state(db, KEY) == "sent"


# What became of it


@pytest.mark.parametrize("order", [("delivered", "bounced"), ("bounced", "delivered")])
async def test_case_044_a_bounce_after_delivery_is_the_outcome_in_either_order(
    db: asyncpg.Pool, order: tuple[str, str]
) -> None:
    fence = (await claim(db, KEY))["fence"]
    await confirm(db, KEY, fence)
    for kind in order:
        await event(db, KEY, kind=kind)
        await reconcile(db)
    sent = await row(db, KEY)
    assert (sent["state"], sent["delivery"]) == ("sent", "bounced")


async def test_a_temporary_failure_then_delivery_ends_as_delivered(db: asyncpg.Pool) -> None:
    await claim(db, KEY)
    for kind in ("deferred", "delivered", "deferred"):
        await event(db, KEY, kind=kind, event_id=kind + str(await db.fetchval("SELECT count(*) FROM provider_event")))
        await reconcile(db)
    assert (await row(db, KEY))["delivery"] == "delivered"


async def test_case_012_an_event_without_key_reaches_a_sent_row_by_its_message_id(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY))["fence"]
    await confirm(db, KEY, fence, "guid-1")
    await event(db, None, kind="complained", message_id="guid-1")
    await reconcile(db)
    assert (await row(db, KEY))["delivery"] == "complained"


async def test_case_100_the_outcome_finds_the_row_in_either_spelling_of_the_address(db: asyncpg.Pool) -> None:
    fence = (await claim(db, KEY, recipient="info@Bücher.example"))["fence"]
    await confirm(db, KEY, fence, "guid-1")
    await event(db, None, kind="bounced", message_id="guid-1", recipient="info@xn--bcher-kva.example")
    await event(db, None, kind="complained", message_id="guid-1", recipient="info+x@xn--bcher-kva.example")
    await reconcile(db)
    assert (await row(db, KEY))["delivery"] == "bounced"


# Many at once


async def test_two_webhooks_racing_on_one_row_end_the_same_in_every_round(db: asyncpg.Pool) -> None:
    for n in range(40):
        key = f"race:{n}"
        await claim(db, key)
        await asyncio.gather(
            event(db, key, kind="delivered", message_id=key),
            event(db, key, kind="bounced", message_id=key),
            reconcile(db),
        )
    await reconcile(db)
    ends = await db.fetch("SELECT DISTINCT state, delivery FROM send_log")
    assert [tuple(end) for end in ends] == [("sent", "bounced")]
