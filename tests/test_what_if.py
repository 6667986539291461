# SPDX-License-Identifier: Apache-2.0
"""Other rules over recorded history: what they would have released, and what of it later evidence shows to be wrong."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
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
    make_older,
    old_claim,
    policies,
    reasons,
    reconcile,
    release_by_pass,
    row,
)
from program import Program

from reconciler.insight.what_if import Replay, Tally, what_if
from reconciler.rule.policy import Rules

KEY = "order:1"
MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
GIVE_UP = replace(RULES, give_up_after=HOUR, on_unknown="release")


async def replayed(
    db: asyncpg.Pool, rules: Rules = RULES, *, key_window: timedelta | None = None, feed: str | None = None
) -> Replay:
    now: datetime = await db.fetchval("SELECT clock_timestamp()")
    return await what_if(db, policies(rules, key_window), now - 4 * HOUR, feed=feed)


async def tally(db: asyncpg.Pool, rules: Rules = RULES, **named: Any) -> Tally:
    (found,) = (await replayed(db, rules, **named)).tallies
    return found


async def spoken(db: asyncpg.Pool, after: timedelta, testimony: str = "accepted", **named: Any) -> None:
    """Store an event about the send so long after its submit_by."""
    key = named.pop("key", KEY)
    await event(db, key, testimony, **named)
    await db.execute(
        "UPDATE provider_event SET received_at = (SELECT submit_by FROM send_log WHERE send_key = $1) + $2"
        " WHERE wire_key = coalesce(wire_key($3), stand_in_key($4, $5))",
        KEY,
        after,
        key,
        FEED,
        named.get("message_id", "m-1"),
    )


def ended(found: Tally) -> dict[str, object]:
    """What became of the sends, without what is nought."""
    counts = {
        "settled": found.settled,
        "released": dict(found.released),
        "duplicates": dict(found.duplicates),
        "failed": dict(found.failed),
        "held": dict(found.held),
    }
    return {name: n for name, n in counts.items() if n}


async def test_a_send_that_carried_no_key_is_released_by_no_silence(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    assert ended(await tally(db)) == {"released": {"absent": 1}}
    await db.execute("UPDATE send_log SET unstamped = true WHERE send_key = $1", KEY)
    assert ended(await tally(db)) == {"held": {"unstamped": 1}}


# Duplicates


async def test_a_release_whose_acceptance_comes_later_is_a_duplicate_that_would_have_shipped(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await spoken(db, HOUR)
    found = await tally(db)
    assert (found.feed, found.message_class, found.ambiguous) == (FEED, "default", 1)
    assert ended(found) == {"released": {"absent": 1}, "duplicates": {"absent": 1}}
    assert 0.006 < found.stated < 0.007  # three times 1 in some 458, p0 a half
    assert found.median == found.most
    assert 15 * MINUTE <= (found.median or HOUR) <= 17 * MINUTE  # the grace, and at most two ticks


async def test_a_release_of_which_nothing_is_heard_later_is_no_duplicate(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    assert ended(await tally(db)) == {"released": {"absent": 1}}


async def test_a_stricter_ceiling_of_risk_holds_it(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    found = await tally(db, replace(RULES, max_risk=0.001))
    assert (ended(found), found.median, found.stated) == ({"held": {"risk": 1}}, None, 0)


async def test_a_longer_grace_waits_until_the_evidence_and_releases_nothing(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await spoken(db, HOUR)
    found = await tally(db, replace(RULES, grace=90 * MINUTE))
    assert (ended(found), found.median) == ({"settled": 1}, HOUR)  # when it came, not when the next look was due


async def test_evidence_that_comes_after_the_last_look_still_settles(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await spoken(db, 2 * HOUR - 30 * timedelta(seconds=1))
    assert ended(await tally(db, replace(RULES, grace=3 * HOUR))) == {"settled": 1}


async def test_giving_up_releases_with_the_prior_as_its_risk(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await spoken(db, 90 * MINUTE)
    found = await tally(db, GIVE_UP)
    assert ended(found) == {"released": {"gave_up": 1}, "duplicates": {"gave_up": 1}}
    assert found.stated == 0.5
    assert HOUR <= (found.median or 2 * HOUR) <= HOUR + 8 * MINUTE  # looks are then a tenth of the age apart


async def test_a_retry_with_the_same_key_is_no_duplicate_whatever_comes_later(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, fingerprint="f")
    await spoken(db, HOUR)
    found = await tally(db, key_window=timedelta(days=1))
    assert (ended(found), found.stated) == ({"released": {"same_key_retry": 1}}, 0)
    assert (found.median or HOUR) <= 2 * MINUTE  # after its back-off of 30 s, not after the grace


# What was heard


@pytest.mark.parametrize(
    ("testimony", "ending"),
    [("rejected", {"failed": {"rejected": 1}}), ("none", {"held": {"unknown_event": 1}})],
)
async def test_what_was_said_before_the_first_look_counts(
    db: asyncpg.Pool, testimony: str, ending: dict[str, object]
) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await spoken(db, MINUTE, testimony)
    assert ended(await tally(db)) == ending


async def test_what_proves_neither_and_comes_later_does_not_count_yet(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await spoken(db, HOUR, "none")
    assert ended(await tally(db)) == {"released": {"absent": 1}}


async def test_an_event_without_our_key_counts_by_the_id_that_was_known(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, known_message_id="op-1")
    await spoken(db, 90 * MINUTE, key=None, message_id="op-1")
    assert ended(await tally(db, GIVE_UP)) == {"released": {"gave_up": 1}, "duplicates": {"gave_up": 1}}


@pytest.mark.parametrize(
    ("neighbours", "ending"),
    # A hundred must be older than the send: three quarters of these are, and six claimed before its submit_by.
    [(124, {"held": {"few_controls": 1}}), (128, {"released": {"absent": 1}})],
)
async def test_the_feed_is_judged_as_it_was_then(db: asyncpg.Pool, neighbours: int, ending: dict[str, object]) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db, n=neighbours)
    assert ended(await tally(db, replace(RULES, max_risk=0.05))) == ending


# Sends that were claimed again


async def claimed_again(db: asyncpg.Pool) -> tuple[int, int]:
    """A send that a pass released, claimed again; the fences of both attempts."""
    first = await release_by_pass(db, KEY)
    return first, (await claim(db, KEY))["fence"]


async def test_an_event_of_either_attempt_proves_no_duplicate(db: asyncpg.Pool) -> None:
    await claimed_again(db)
    await event(db, KEY)
    assert ended(await tally(db)) == {"released": {"absent": 1}}


async def test_the_answer_to_the_second_attempt_proves_no_duplicate(db: asyncpg.Pool) -> None:
    _, second = await claimed_again(db)
    await confirm(db, KEY, second)
    assert ended(await tally(db)) == {"released": {"absent": 1}}


async def test_the_late_answer_to_the_first_attempt_proves_a_duplicate(db: asyncpg.Pool) -> None:
    first, _ = await claimed_again(db)
    await confirm(db, KEY, first)
    found = await tally(db)
    assert ended(found) == {"released": {"absent": 1}, "duplicates": {"absent": 1}}
    assert (found.released_then, found.duplicates_then) == (1, 1)


async def test_a_duplicate_that_was_found_proves_one(db: asyncpg.Pool) -> None:
    await claimed_again(db)
    await db.execute("INSERT INTO duplicate (wire_key, sort, feed) VALUES (wire_key($1), 'duplicate', $2)", KEY, FEED)
    assert ended(await tally(db)) == {"released": {"absent": 1}, "duplicates": {"absent": 1}}


async def test_what_passes_released_in_truth_stands_beside_it(db: asyncpg.Pool) -> None:
    await release_by_pass(db, KEY)
    found = await tally(db, replace(RULES, max_risk=0.001))
    assert (ended(found), found.released_then, found.duplicates_then) == ({"held": {"risk": 1}}, 1, 0)
    await event(db, KEY)
    assert (await tally(db)).duplicates_then == 1


# Which sends


async def test_a_send_that_was_answered_at_last_is_one_where_a_pass_had_judged_it(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    await reconcile(db)
    assert await reasons(db, KEY) == ["held:silent"]
    await confirm(db, KEY, fence)
    assert ended(await tally(db, GIVE_UP)) == {"released": {"gave_up": 1}, "duplicates": {"gave_up": 1}}


async def test_an_attempt_that_never_left_is_passed_over_for_the_next(db: asyncpg.Pool) -> None:
    await fail(db, KEY, (await claim(db, KEY))["fence"], not_sent=True)
    assert (await replayed(db)).tallies == []
    await old_claim(db, KEY)
    assert (await row(db, KEY))["attempt"] == 2
    assert ended(await tally(db, GIVE_UP)) == {"released": {"gave_up": 1}}


async def test_a_retry_that_never_left_leaves_its_first_attempt_ambiguous(db: asyncpg.Pool) -> None:
    _, second = await claimed_again(db)
    await fail(db, KEY, second, not_sent=True)
    await make_older(db, KEY, MINUTE)
    found = await tally(db)
    assert (ended(found), found.ambiguous) == ({"released": {"absent": 1}}, 1)
    assert 15 * MINUTE <= (found.median or HOUR) <= 17 * MINUTE


@pytest.mark.parametrize("not_sent", [True, False])
async def test_a_send_whose_failure_was_told_at_last_is_not_ambiguous(db: asyncpg.Pool, not_sent: bool) -> None:
    fence = await old_claim(db, KEY)
    await reconcile(db)
    assert await reasons(db, KEY) == ["held:silent"]
    await fail(db, KEY, fence, not_sent=not_sent)
    assert (await replayed(db)).tallies == []


async def test_answered_refused_and_running_sends_are_not_ambiguous(db: asyncpg.Pool) -> None:
    await confirm(db, "answered", (await claim(db, "answered"))["fence"])
    await fail(db, "refused", (await claim(db, "refused"))["fence"], not_sent=False)
    await claim(db, "running")
    await old_claim(db, "too old", age=5 * HOUR)
    assert (await replayed(db)).tallies == []


async def test_feeds_and_classes_are_counted_apart(db: asyncpg.Pool) -> None:
    for key, feed, message_class in (("a", "mg", "receipts"), ("b", "mg", "news"), ("c", "ses", "news")):
        await old_claim(db, key, feed=feed, message_class=message_class)
    found = (await replayed(db)).tallies
    assert [(t.feed, t.message_class, t.ambiguous) for t in found] == [
        ("mg", "news", 1),
        ("mg", "receipts", 1),
        ("ses", "news", 1),
    ]
    assert [t.feed for t in (await replayed(db, feed="ses")).tallies] == ["ses"]


TABLES = "SELECT relname FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace ORDER BY 1"


async def all_rows(db: asyncpg.Pool) -> dict[str, str | None]:
    """A digest of what each table holds."""
    digest = "SELECT md5(string_agg(t::text, '' ORDER BY t::text)) FROM {} AS t"
    return {name: await db.fetchval(digest.format(name)) for (name,) in await db.fetch(TABLES)}


async def test_nothing_is_changed(db: asyncpg.Pool) -> None:
    await claimed_again(db)
    await old_claim(db, "order:2")
    await spoken(db, HOUR)
    before = await all_rows(db)
    assert None not in {before["send_log"], before["verdict"], before["pass"], before["feed_state"]}
    assert (await tally(db)).ambiguous == 2
    assert await all_rows(db) == before


# The command


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return tmp_path / "rules.toml"


async def test_the_command_prints_a_table_and_json(db: asyncpg.Pool, program: Program, rules: Path) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await spoken(db, HOUR)
    done = await program("what-if", "--since", "4h")
    assert (done.exit_code, done.stderr) == (0, "")
    _, header, line = done.stdout.splitlines()
    assert header.split()[:5] == ["FEED", "CLASS", "AMBIGUOUS", "SETTLED", "RELEASED"]
    assert line.split()[:8] == ["mg", "default", "1", "0", "1", "absent", "1", "absent"]
    rules.write_text('[feeds.mg]\nprovider = "mailgun"\ngrace = "90m"\n')
    (found,) = (await program.json("what-if", "--since", "4h", "--rules", str(rules)))["tallies"]
    assert (found["settled"], found["released"], found["median"]) == (1, {}, 3600.0)
    rules.write_text('[classes.default]\ngive_up_after = "1h"\non_unknown = "fail"\n[rules]\nmax_risk = 0\n')
    (found,) = (await program.json("what-if", "--since", "4h", "--rules", str(rules), "--feed", "mg"))["tallies"]
    assert (found["settled"], found["failed"]) == (1, {})
    await db.execute("DELETE FROM provider_event WHERE wire_key = wire_key($1)", KEY)
    (found,) = (await program.json("what-if", "--since", "4h", "--rules", str(rules)))["tallies"]
    assert (found["settled"], found["failed"]) == (0, {"gave_up": 1})


async def test_the_command_says_when_no_send_was_ambiguous(program: Program) -> None:
    done = await program("what-if")
    assert (done.exit_code, done.stdout.splitlines()[1]) == (0, "no send was ambiguous")


@pytest.mark.parametrize(
    ("text", "args", "exit_code", "line"),
    [
        ("[rules]\nmax_risks = 0.1\n", [], 1, "{rules}:2: unknown setting rules.max_risks; did you mean"),
        ("[rules]\ngrace = 5\n", [], 1, None),
        (None, [], 1, "{rules}: can't be read (No such file or directory)"),
        ("", ["--feed", "mh"], 1, 'no feed is named "mh": there is mg, resend-main'),
        ("", ["--since", "soon"], 2, None),
    ],
)
async def test_a_mistake_is_told_in_one_line(
    program: Program, rules: Path, text: str | None, args: list[str], exit_code: int, line: str | None
) -> None:
    if text is not None:
        rules.write_text(text)
    done = await program("what-if", "--rules", str(rules), *args)
    assert (done.exit_code, done.stdout) == (exit_code, "")
    if exit_code == 1:
        (said,) = done.stderr.splitlines()
        assert said.startswith("reconciler: " + (line or "{rules}:2: ").format(rules=rules))
