# SPDX-License-Identifier: Apache-2.0
"""What a feed's silence is worth, as a pass measures it on real rows: history, neighbours, bursts, strata, priors."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

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
    make_older,
    old_claim,
    old_claims,
    policies,
    reconcile,
    row,
    state,
    stored_delivery,
)

from reconciler.passes.feeds import pause, resume
from reconciler.passes.histories import SHARES, Histories
from reconciler.passes.judging import Page, read_page
from reconciler.passes.reconcile import Policies, Scope, look
from reconciler.rule.policy import Rules
from reconciler.rule.risk import Burst
from reconciler.rule.silence import REMEMBERED, Spell

KEY = "order-1"
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)
NOW = "SELECT clock_timestamp()"

Judged = tuple[str, dict[str, Any]]


def by_domain() -> Policies:
    """Policies of a feed whose first event comes from the recipient's server."""
    return replace(policies(), histories=Histories(lambda _feed, _class: RULES, lambda _feed: True))


async def judged(db: asyncpg.Pool, key: str = KEY, rules: Rules = RULES, chosen: Policies | None = None) -> Judged:
    """Return the reason of the verdict that a pass would reach now on a claim, and what its risk is computed from."""
    (one,) = (await look(db, chosen or policies(rules), Scope(wire_key=key))).decided
    assert one.inputs is not None
    return one.verdict.reason, json.loads(one.inputs)


async def reason(db: asyncpg.Pool, key: str = KEY, rules: Rules = RULES, chosen: Policies | None = None) -> str:
    return (await judged(db, key, rules, chosen))[0]


async def verdicts(db: asyncpg.Pool, like: str) -> dict[str, int]:
    rows = await db.fetch(
        "SELECT action || ':' || reason AS said, count(*) AS n FROM verdict WHERE wire_key LIKE $1 GROUP BY 1", like
    )
    return {row["said"]: row["n"] for row in rows}


# The risk, and what a verdict keeps of it


async def test_a_release_keeps_the_figures_that_its_risk_was_computed_from(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await db.execute("DELETE FROM provider_event WHERE message_id = 'n-100'")
    await reconcile(db, replace(RULES, max_risk=0.02))
    verdict = await db.fetchrow("SELECT action, risk, inputs FROM verdict")
    kept = json.loads(verdict["inputs"])
    assert verdict["action"] == "released"
    assert kept["history"] == {"n": pytest.approx(459, abs=5), "k": 1, "missing": 0}
    assert kept["m"] == pytest.approx(3 * 2 / (kept["history"]["n"] + 2), rel=0.05)  # and little for the neighbours
    assert (kept["p0"], kept["stress"], kept["max_risk"], kept["reported"]) == (0.5, 3.0, 0.02, True)
    assert verdict["risk"] == pytest.approx(kept["risk"], rel=1e-3)
    assert kept["risk"] == pytest.approx(kept["m"] / (kept["m"] + 1), rel=1e-3)
    assert kept["age"] == 7168  # two hours, rounded down
    assert (kept["recent"]["n"], kept["recent"]["k"]) == (50, 0)


async def test_a_held_send_keeps_the_risk_that_stood_against_its_ceiling(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await reconcile(db, replace(RULES, max_risk=0.005))
    verdict = await db.fetchrow("SELECT action, reason, risk, inputs FROM verdict")
    kept = json.loads(verdict["inputs"])
    assert (verdict["action"], verdict["reason"], verdict["risk"]) == ("held", "risk", None)
    assert (kept["max_risk"], 0.0065 < kept["risk"] < 0.008) == (0.005, True)


async def test_a_held_send_keeps_how_many_controls_are_missing(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await keep_neighbours(db, [*range(361, 441), *range(475, 600)])
    await reconcile(db)
    kept = json.loads(await db.fetchval("SELECT inputs FROM verdict WHERE reason = 'few_controls'"))
    assert kept["history"] == {"n": 80, "k": 0, "missing": 20}
    assert (kept["risk"], kept["m"]) == (0.5, 1.0)


async def test_the_risk_is_computed_from_the_claims_own_age(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await db.execute("UPDATE provider_event SET received_at = received_at + interval '105 minutes'")
    await old_claim(db, "early", 2 * HOUR)
    await old_claim(db, "late", 2 * HOUR - 20 * MINUTE)
    assert await reason(db, "early") == "absent"
    why, late = await judged(db, "late")
    assert (why, late["recent"]["n"] < 3) == ("few_controls", True)  # its neighbours are too young to be heard of


@pytest.mark.parametrize(
    ("cause", "rules", "wanted"),
    [
        ("timed out", RULES, "absent"),
        (None, RULES, "risk"),
        ("timed out", replace(RULES, prior_floor=0.95), "risk"),
        ("timed out", replace(RULES, stress=6.0), "risk"),
        ("timed out", replace(RULES, stress=1.0), "absent"),
        (None, replace(RULES, max_risk=0.2), "absent"),
    ],
    ids=["reported", "unreported", "prior floor", "more stress", "less stress", "higher ceiling"],
)
async def test_what_raises_the_risk(db: asyncpg.Pool, cause: str | None, rules: Rules, wanted: str) -> None:
    await old_claim(db, KEY, cause=cause)
    await heard_neighbours(db)
    assert await reason(db, rules=rules) == wanted


async def test_a_retry_is_placed_by_the_time_of_its_own_claim(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await old_claim(db, "first-time", 5 * HOUR)
    await db.execute("UPDATE send_log SET attempt = 2, first_claimed_at = claimed_at - interval '3 hours'")
    await heard_neighbours(db)
    assert await reason(db) == "absent"
    await db.execute(
        "UPDATE send_log SET first_claimed_at = claimed_at + interval '3 hours' WHERE wire_key = 'first-time'"
    )
    assert await reason(db, "first-time") == "few_controls"


@pytest.mark.parametrize(("failover", "outcome"), [(True, "claimed"), (False, "other_feed")])
async def test_a_release_on_absence_lets_its_class_go_to_another_feed_where_the_owner_allows_it(
    db: asyncpg.Pool, failover: bool, outcome: str
) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await reconcile(db, replace(RULES, failover=failover))
    assert await state(db, KEY) == "pending"
    assert (await claim(db, KEY, "other"))["outcome"] == outcome


@pytest.mark.parametrize("held", [FEED, "other"])
async def test_a_hold_of_either_feed_stops_a_fail_over(db: asyncpg.Pool, held: str) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await reconcile(db, replace(RULES, failover=True))
    async with db.acquire() as connection:
        await pause(connection, held, "incident", "test")
    assert (await claim(db, KEY, "other"))["outcome"] == "held"
    async with db.acquire() as connection:
        await resume(connection, held, "over", "test")
    assert (await claim(db, KEY, "other"))["outcome"] == "claimed"


async def test_after_a_fail_over_the_first_feed_still_speaks_by_message_id(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, known_message_id="m-7")
    await heard_neighbours(db)
    await reconcile(db, replace(RULES, failover=True))
    assert (await claim(db, KEY, "other"))["outcome"] == "claimed"
    await event(db, None, message_id="m-7")
    await reconcile(db)
    assert await state(db, KEY) == "sent"


async def test_giving_up_lets_no_retry_go_to_another_feed(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, 2 * 24 * HOUR)
    await reconcile(db, replace(RULES, failover=True, on_unknown="release"))
    assert await state(db, KEY) == "pending"
    assert (await claim(db, KEY, "other"))["outcome"] == "other_feed"


async def test_after_fail_over_the_attempt_is_judged_by_its_own_feed(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await reconcile(db, replace(RULES, failover=True))
    await fail(db, KEY, (await claim(db, KEY, "other"))["fence"], "timed out")
    await make_older(db, KEY, 2 * HOUR + MINUTE)
    await stored_delivery(db, "other")
    assert await reason(db) == "few_controls"
    await heard_neighbours(db, feed="other")
    assert await reason(db) == "absent"
    await event(db, KEY)  # of the first feed, late
    await reconcile(db)
    assert await state(db, KEY) == "sent"


# Bursts


async def test_sends_of_a_brown_out_are_held_and_isolated_ones_are_not(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=1500)
    await old_claims(db, "brown", 30, 100 * SECOND / 30)
    await old_claim(db, "isolated", 3 * HOUR)
    await reconcile(db)
    assert await verdicts(db, "brown-%") == {"held:burst": 30}
    assert await verdicts(db, "isolated") == {"released:absent": 1}
    kept = json.loads(await db.fetchval("SELECT inputs FROM verdict WHERE wire_key = 'brown-15'"))
    assert kept["burst"]["crowd"][0][0] > 10  # of the twenty nearest sends
    assert kept["burst"]["crowd"][1][0] == 29


async def test_where_more_than_half_are_ambiguous_silence_tells_nothing_however_usual_that_is(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await old_claims(db, "usual", 300, 20 * SECOND, age=3 * HOUR + 15 * MINUTE)  # every third send
    await old_claims(db, "more", 8, SECOND, age=2 * HOUR + 4 * SECOND)
    await old_claim(db, KEY)
    why, kept = await judged(db)
    assert (why, kept["burst"]["crowd"][0][0] > 10, kept["burst"]["excess"]) == ("burst", True, 0)


async def test_an_outlier_of_a_burst_is_held_for_the_excess_of_the_hundred_around_it(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await old_claims(db, "brown", 30, 100 * SECOND / 30)
    await old_claim(db, KEY, 2 * HOUR + 3 * MINUTE)
    why, kept = await judged(db)
    assert (why, kept["burst"]["crowd"][0]) == ("burst", [0, 20])
    assert kept["burst"]["excess"] > 0.9
    assert kept["risk"] > 0.3  # p0 a half, and half of the accepted ones of a burst are not heard of


@pytest.mark.parametrize(("left", "wanted"), [(MINUTE, "absent"), (-SECOND, "burst")])
async def test_a_send_in_flight_is_not_ambiguous(db: asyncpg.Pool, left: timedelta, wanted: str) -> None:
    await heard_neighbours(db)
    await old_claims(db, "flying", 30, 100 * SECOND / 30)
    await db.execute("UPDATE send_log SET submit_by = clock_timestamp() + $1 WHERE state = 'claimed'", left)
    await old_claim(db, KEY, 2 * HOUR - 50 * SECOND)
    assert await reason(db) == wanted


async def test_answers_that_come_late_end_a_burst(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await old_claims(db, "late", 30, 100 * SECOND / 30)
    await old_claim(db, KEY, 2 * HOUR - 50 * SECOND)
    assert await reason(db) == "burst"
    for n in range(30):
        key, message_id = f"late-{n}", f"late-{n}"
        assert await confirm(db, key, (await row(db, key))["fence"], message_id) == "sent"
        await event(db, key, message_id=message_id)
    await db.execute(
        "UPDATE provider_event e SET received_at = s.claimed_at + interval '2 s' FROM send_log s"
        " WHERE s.wire_key = e.wire_key AND s.wire_key LIKE 'late-%'"
    )
    why, kept = await judged(db)
    assert (why, kept["burst"]["crowd"][0]) == ("absent", [0, 20])


async def test_a_send_whose_late_answer_came_is_a_control_whoever_moved_it(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await db.execute("UPDATE send_log SET verdict_source = 'feed', verdict_reason = 'accepted' WHERE state = 'sent'")
    assert await reason(db) == "absent"
    await db.execute("UPDATE send_log SET answered_at = NULL WHERE state = 'sent'")
    assert await reason(db) == "few_controls"


# Strata


@pytest.mark.parametrize("n", [60, 600])
async def test_a_class_of_which_nothing_was_ever_heard_is_silent_though_its_feed_speaks_of_others(
    db: asyncpg.Pool, n: int
) -> None:
    await heard_neighbours(db)
    await heard_neighbours(db, n=n, heard=0, message_class="unstamped")
    await old_claim(db, "deaf", message_class="unstamped")
    await old_claim(db, KEY)
    assert await reason(db, "deaf") == "no_echo"
    assert await reason(db) == "absent"


async def test_a_class_with_few_controls_is_judged_by_its_feed(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await heard_neighbours(db, n=60, message_class="rare")
    await old_claim(db, "rare", message_class="rare")
    why, kept = await judged(db, "rare")
    assert (why, kept["history"]["n"] > 490) == ("absent", True)  # 45 or more of the 60 among them
    await old_claim(db, "new", message_class="new")
    assert await reason(db, "new") == "no_echo"  # nobody knows whether the feed ever speaks of this class


async def test_a_class_that_was_never_heard_of_is_not_judged_by_its_feed_a_month_later(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, 32 * 24 * HOUR, n=500, heard=0, message_class="monthly")
    await heard_neighbours(db)
    await old_claim(db, KEY, message_class="monthly")
    assert await reason(db) == "no_echo"


@pytest.mark.parametrize(("submit_within", "wanted"), [(1800, "risk"), (60, "absent"), (3700, "long_window")])
async def test_a_send_that_had_long_to_leave_is_judged_wherever_it_may_have_left(
    db: asyncpg.Pool, submit_within: int, wanted: str
) -> None:
    # The feed died forty minutes ago. The claim is an hour old.
    await heard_neighbours(db, 40 * MINUTE, heard=450)
    await claim(db, KEY, submit_within=f"{submit_within} seconds")
    await fail(db, KEY, (await row(db, KEY))["fence"], "timed out")
    await make_older(db, KEY, HOUR + 30 * MINUTE if submit_within > 3600 else HOUR)
    (one,) = (await look(db, policies(replace(RULES, grace=MINUTE)), Scope(wire_key=KEY))).decided
    assert one.verdict.reason == wanted


async def test_an_earlier_attempt_that_no_witness_judged_is_judged_too(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=1990)
    await db.execute(  # what was sent from 5 h 10 min to 4 h 50 min ago was not heard of
        "DELETE FROM provider_event e USING send_log s WHERE s.wire_key = e.wire_key"
        " AND s.claimed_at BETWEEN now() - interval '5 hours 10 minutes' AND now() - interval '4 hours 50 minutes'"
    )
    await old_claim(db, KEY)
    assert await reason(db) == "absent"
    await db.execute(
        "UPDATE send_log SET state = 'claimed', released_at = NULL, release_basis = NULL, attempt = 2, told = 0"
        " WHERE wire_key = wire_key($1)",
        KEY,
    )
    await db.execute("DELETE FROM verdict")
    await make_due(db, KEY)
    earlier = (
        "INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed, claimed_at, submit_by)"
        " SELECT wire_key, 1, 0, 'released', $1, 'inferred', 'test', $2, now() - interval '5 hours',"
        " now() - interval '4 hours 59 minutes' FROM send_log WHERE wire_key = wire_key($3)"
    )
    await db.execute(earlier, "same_key_retry", FEED, KEY)
    assert await reason(db) == "silent"
    await db.execute("UPDATE verdict SET reason = 'not_sent' WHERE reason = 'same_key_retry'")
    await make_due(db, KEY)
    assert await reason(db) == "absent"


async def test_a_feeds_history_is_of_its_twenty_newest_classes_and_of_those_that_are_asked_about(
    db: asyncpg.Pool,
) -> None:
    for n in range(25):
        await heard_neighbours(db, (26 - n) * HOUR, n=4, message_class=f"class-{n}")
    histories = Histories(lambda _feed, _class: RULES, lambda _feed: False)
    now = await db.fetchval(NOW)
    async with db.acquire() as connection:
        first = (await histories.of(connection, [(FEED, "class-24")], now))[FEED]
        assert sorted(first.controls) == sorted(f"class-{n}" for n in range(5, 25))
        second = (await histories.of(connection, [(FEED, "class-0"), (FEED, "unheard-of")], now))[FEED]
    assert len(second.controls["class-0"]) == 4
    assert (second.controls["unheard-of"], len(second.controls)) == ([], 22)


async def test_a_class_with_many_controls_is_judged_by_its_own(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=2000)
    await heard_neighbours(db, heard=300, message_class="ill")
    await old_claim(db, "ill", message_class="ill")
    await old_claim(db, KEY)
    assert await reason(db, "ill") != "absent"
    why, kept = await judged(db)
    assert (why, kept["recent"]["k"], kept["history"]["k"]) == ("absent", 0, 0)


AT_DOMAIN = """
UPDATE send_log SET recipient = 'ada@' || $1, recipient_key = 'ada@' || $1
WHERE state = 'sent' AND split_part(send_key, ':', 3)::int % $2 = ANY ($3::int[])
"""

SLOW = """
UPDATE provider_event e SET received_at = received_at + interval '3 hours'
FROM send_log s WHERE s.wire_key = e.wire_key AND s.recipient_key LIKE '%@slow.example'
"""


async def test_a_slow_domain_is_judged_by_itself_where_the_first_event_is_its_servers(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=1200)
    for n, domain in enumerate(("slow", "fast")):
        await db.execute(AT_DOMAIN, f"{domain}.example", 2, [n])
        await old_claim(db, domain, recipient=f"bob@{domain}.example")
    await db.execute(SLOW)
    assert await reason(db, "fast", chosen=by_domain()) == "absent"
    assert await reason(db, "slow", chosen=by_domain()) == "few_controls"  # of its domain none is old enough to speak
    assert await reason(db, "fast") == "few_controls"  # where domains do not differ the slow ones count


async def test_domains_with_few_controls_are_judged_together_and_without_the_large_ones(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, n=1200)
    await db.execute(AT_DOMAIN, "slow.example", 20, list(range(10)))
    for n in range(10, 20):
        await db.execute(AT_DOMAIN, f"small-{n}.example", 20, [n])
    await db.execute(SLOW)
    await old_claim(db, KEY, recipient="bob@small-12.example")
    await old_claim(db, "unknown", recipient="bob@never-seen.example")
    why, kept = await judged(db, chosen=by_domain())
    assert (why, kept["recent"]["k"], kept["history"]["n"]) == ("absent", 0, pytest.approx(455, abs=5))
    assert await reason(db, "unknown", chosen=by_domain()) == "absent"


# What is known of ambiguous sends


async def test_ambiguous_sends_proved_late_count_against_the_feed_unless_their_neighbours_were_ill(
    db: asyncpg.Pool,
) -> None:
    await heard_neighbours(db)
    await old_claims(db, "proved", 10, MINUTE, age=5 * HOUR)
    for n in range(10):
        await event(db, f"proved-{n}", message_id=f"p-{n}")
    await reconcile(db)
    await old_claim(db, KEY)
    why, kept = await judged(db)
    assert (why, kept["ambiguous"]) == ("risk", {"n": 10, "k": 10})
    await db.execute(
        "INSERT INTO verdict (wire_key, attempt, action, reason, source, who, inputs)"
        " SELECT wire_key, 1, 'held', 'risk', 'inferred', 'test', '{\"ill\": true}' FROM send_log"
        " WHERE wire_key LIKE 'proved-%'"
    )
    why, kept = await judged(db)
    assert (why, kept["ambiguous"]) == ("absent", {"n": 0, "k": 0})


@pytest.mark.parametrize(("sort", "k"), [("duplicate", 1), ("ids_differ", 0)])
async def test_a_duplicate_of_a_release_is_one_of_which_the_feed_spoke_too_late(
    db: asyncpg.Pool, sort: str, k: int
) -> None:
    await heard_neighbours(db)
    await old_claim(db, "twice")
    await reconcile(db)
    await db.execute("INSERT INTO duplicate (wire_key, sort, feed) VALUES ('twice', $1, $2)", sort, FEED)
    await old_claim(db, KEY)
    assert (await judged(db))[1]["ambiguous"] == {"n": k, "k": k}


PROVE = """
UPDATE send_log SET state = 'sent', sent_at = claimed_at + interval '1 minute', next_check_at = NULL,
    verdict_source = 'feed', verdict_reason = 'accepted'
WHERE wire_key LIKE $1
"""


@pytest.mark.parametrize(
    ("of_cause", "share", "reported", "p0"),
    [
        ("timed out", "%", True, 161 / 162),  # all of 160 were accepted
        ("timed out", "%", False, 0.95),  # what is known of one cause says nothing of the other
        (None, "%", True, 0.5),
        (None, "%", False, 161 / 162),
        ("timed out", "known-1%", True, (71 + 0.5 * 89 + 1) / 162),  # 71 accepted; of 89 nothing known but the prior
        ("timed out", "none", True, 0.5),  # never below where it starts
    ],
)
async def test_the_prior_is_learned_by_cause_and_upwards_only(
    db: asyncpg.Pool, of_cause: str | None, share: str, reported: bool, p0: float
) -> None:
    await old_claims(db, "known", 160, 5 * MINUTE, age=timedelta(days=3), cause=of_cause)
    await db.execute(PROVE, share)
    await old_claim(db, KEY, cause="timed out" if reported else None)
    await stored_delivery(db)
    assert (await judged(db))[1]["p0"] == pytest.approx(p0, abs=1e-4)


REFUSE = """
UPDATE send_log SET state = 'failed', failed_at = claimed_at + interval '1 minute', next_check_at = NULL,
    verdict_source = $1, verdict_reason = 'rejected'
WHERE wire_key LIKE 'known%'
"""


@pytest.mark.parametrize("source", ["feed", "look-up"])
async def test_what_a_provider_refused_is_not_ambiguous_whoever_told_of_it(db: asyncpg.Pool, source: str) -> None:
    await old_claims(db, "known", 60, 5 * MINUTE, age=timedelta(days=3))
    await db.execute(REFUSE, source)
    await old_claims(db, "taken", 100, 5 * MINUTE, age=timedelta(days=3))
    await db.execute(PROVE, "taken%")
    await old_claim(db, KEY)
    await stored_delivery(db)
    assert (await judged(db))[1]["p0"] == pytest.approx(101 / 102, abs=1e-4)


async def test_the_prior_is_learned_of_sends_older_than_giving_up_only(db: asyncpg.Pool) -> None:
    await old_claims(db, "known", 160, SECOND, age=23 * HOUR)
    await db.execute(PROVE, "%")
    await old_claim(db, KEY)
    await stored_delivery(db)
    assert (await judged(db))[1]["p0"] == 0.5


# What it costs


async def count(histories: Histories, db: asyncpg.Pool, now: datetime) -> int:
    async with db.acquire() as connection:
        return len((await histories.of(connection, [(FEED, "default")], now))[FEED].controls.get("default", ()))


async def test_a_history_is_kept_for_five_minutes_and_then_read_anew(db: asyncpg.Pool) -> None:
    histories = Histories(lambda _feed, _class: RULES, lambda _feed: False)
    now = await db.fetchval(NOW)
    assert await count(histories, db, now) == 0
    await heard_neighbours(db)
    assert await count(histories, db, now + 5 * MINUTE - SECOND) == 0
    assert await count(histories, db, now + 5 * MINUTE) == 600
    await db.execute("DELETE FROM send_log")
    assert await count(histories, db, now) == 0  # the clock went back


async def test_a_history_holds_controls_older_than_the_grace_and_at_most_two_thousand_spread_over_a_busy_day(
    db: asyncpg.Pool,
) -> None:
    now = await db.fetchval(NOW)
    await heard_neighbours(db, 15 * MINUTE, n=100)
    fresh = Histories(lambda _feed, _class: RULES, lambda _feed: False)
    assert await count(fresh, db, now) == pytest.approx(81, abs=2)  # 75, and those of the minute until submit_by
    await heard_neighbours(db, n=6000, message_class="busy")
    fresh = Histories(lambda _feed, _class: RULES, lambda _feed: False)
    async with db.acquire() as connection:
        busy = (await fresh.of(connection, [(FEED, "busy")], now))[FEED].controls["busy"]
    assert 50 * 21 < len(busy) <= 2000
    quarters = [int((now.timestamp() - RULES.grace.total_seconds() - seen.at) // 900) for seen in busy]
    assert max(quarters.count(quarter) for quarter in set(quarters)) == 21


async def test_pages_judged_side_by_side_read_each_history_once(db: asyncpg.Pool) -> None:
    histories = Histories(lambda _feed, _class: RULES, lambda _feed: False)
    now, asked = await db.fetchval(NOW), [(f"feed-{n}", "default") for n in range(4)]
    read: list[str] = []

    def note(said: Any) -> None:
        read.append(said.query)

    async with db.acquire() as one, db.acquire() as other:
        with one.query_logger(note), other.query_logger(note):
            both = await asyncio.gather(histories.of(one, asked, now), histories.of(other, asked, now - SECOND))
    assert read.count(SHARES) == 4
    assert all(both[0][feed] is both[1][feed] for feed, _ in asked)


async def test_a_page_after_another_finds_the_same_ambiguous_sends_around_it_as_a_page_alone(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await old_claims(db, "brown", 30, 20 * SECOND)
    await old_claims(db, "later", 5, SECOND, age=20 * MINUTE)
    shared, now = policies().histories, await db.fetchval(NOW)
    pages = [["brown-0", "later-0"], ["brown-3"], ["brown-4", "brown-9", "later-1"], ["brown-29"], ["brown-2"]]
    async with db.acquire() as connection:
        history = (await shared.of(connection, [(FEED, "default")], now))[FEED]
        for keys in pages:
            after = await read_page(connection, shared.rules_for, shared, keys)
            remembered, history.ambiguous = history.ambiguous, None
            alone = await read_page(connection, shared.rules_for, shared, keys)
            history.ambiguous = remembered
            assert crowds(after) == crowds(alone)
            assert len(crowds(after)) == len(keys)


@pytest.mark.parametrize(
    ("moment", "now", "wanted"), [(9, 100, False), (10, 104, True), (20, 100, True), (21, 100, False), (15, 99, False)]
)
def test_remembered_ambiguous_sends_are_gone_on_with_where_they_reach(moment: float, now: float, wanted: bool) -> None:
    assert Spell(10, 20, 100, (11, 19)).reaches(moment, now) is wanted


def crowds(page: Page) -> dict[str, Burst]:
    return {key: judged.assessment.burst for key, judged in page.silence.items()}


async def test_ambiguous_sends_are_remembered_for_some_seconds_only(db: asyncpg.Pool) -> None:
    await heard_neighbours(db)
    await old_claims(db, "brown", 30, SECOND)
    shared, now = policies().histories, await db.fetchval(NOW)
    async with db.acquire() as connection:
        history = (await shared.of(connection, [(FEED, "default")], now))[FEED]
        first = await read_page(connection, shared.rules_for, shared, ["brown-15"])
        await db.execute("DELETE FROM send_log WHERE wire_key LIKE 'brown-%' AND wire_key <> 'brown-15'")
        assert crowds(await read_page(connection, shared.rules_for, shared, ["brown-15"])) == crowds(first)
        assert history.ambiguous
        history.ambiguous = history.ambiguous._replace(at=history.ambiguous.at - REMEMBERED)
        last = await read_page(connection, shared.rules_for, shared, ["brown-15"])
    assert (crowds(first)["brown-15"].crowd[0][0] > 10, crowds(last)["brown-15"].crowd[0][0]) == (True, 0)


# Cases


async def test_case_045_a_feed_that_tells_of_every_second_send_only_releases_none(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, 3 * HOUR, n=900, every=MINUTE, name="yesterday")  # a healthy feed until then
    await heard_neighbours(db, n=15_000, every=HOUR / 15_000)
    await db.execute(
        "DELETE FROM provider_event e USING send_log s WHERE s.wire_key = e.wire_key AND s.send_key LIKE 'neighbour:%'"
        " AND substring(e.message_id FROM 3)::int % 2 = 1"
    )
    await old_claims(db, "timed-out", 40, MINUTE, age=2 * HOUR + 30 * MINUTE)
    async with db.acquire() as connection:
        keys = [f"timed-out-{n}" for n in range(40)]
        page = await read_page(connection, policies().rules_for, policies().histories, keys)
        asked = [row["wire_key"] for row in page.unheard(policies().rules_for)]
    counts = (await reconcile(db)).counts
    assert counts["held:risk"] == 40
    assert sorted(asked) == sorted(keys)  # the provider's API is asked where the rules let it be asked
    told = json.loads(await db.fetchval("SELECT inputs FROM verdict WHERE wire_key = 'timed-out-20'"))
    assert told["risk"] > 0.2


async def test_case_067_one_feed_stalls_and_its_neighbour_goes_on(db: asyncpg.Pool) -> None:
    await heard_neighbours(db, feed="ses")
    await heard_neighbours(db, feed="sendgrid", heard=200)
    await old_claims(db, "on-ses", 3, 5 * MINUTE, feed="ses")
    await old_claims(db, "on-sendgrid", 3, 5 * MINUTE, feed="sendgrid")
    await reconcile(db)
    assert await verdicts(db, "on-ses-%") == {"released:absent": 3}
    assert await verdicts(db, "on-sendgrid-%") == {"held:silent": 3}
