# SPDX-License-Identifier: Apache-2.0
"""Which sends are controls, and that silence is never a reason to release."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from kit import (
    FEED,
    RULES,
    event,
    heard_neighbours,
    keep_neighbours,
    make_due,
    old_claim,
    reconcile,
    row,
    state,
)

from reconciler.rule.policy import FeedView, Heard, Row, Witness, decide
from webhooks.event import Answer

KEY = "order:1"
HOUR = timedelta(hours=1)
NOW = "SELECT clock_timestamp()"


# What is a control


async def held_reason(db: asyncpg.Pool) -> str | None:
    await reconcile(db)
    assert await state(db, KEY) == "claimed"
    return (await row(db, KEY))["held_reason"]


MOVE_ONE_SIDE = """
UPDATE send_log n SET first_claimed_at = n.first_claimed_at + $1 * $2::interval
FROM send_log c
WHERE c.state = 'claimed' AND n.state = 'sent' AND sign(extract(epoch FROM n.first_claimed_at - c.claimed_at)) = $1
"""


@pytest.mark.parametrize("side", [-1, 1], ids=["before", "after"])
@pytest.mark.parametrize(("minutes", "wanted"), [(55, None), (61, "few_controls")])
async def test_controls_lie_within_an_hour_on_either_side(
    db: asyncpg.Pool, side: int, minutes: int, wanted: str | None
) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await db.execute(MOVE_ONE_SIDE, side, timedelta(minutes=minutes))
    await reconcile(db)
    assert (await row(db, KEY))["held_reason"] == wanted
    assert await state(db, KEY) == ("claimed" if wanted else "pending")


NO_CONTROLS = "answered_at = NULL", "attempt = 2"


@pytest.mark.parametrize("change", NO_CONTROLS)
async def test_a_recent_control_is_a_send_whose_first_attempt_was_answered(db: asyncpg.Pool, change: str) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await keep_neighbours(db, range(454))
    await db.execute(f"UPDATE send_log SET {change} WHERE send_key = $1", f"neighbour:{FEED}:453")  # noqa: S608
    assert await held_reason(db) == "few_controls"


@pytest.mark.parametrize("change", NO_CONTROLS)
async def test_history_is_of_sends_whose_first_attempt_was_answered(db: asyncpg.Pool, change: str) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await keep_neighbours(db, [*range(441), *range(475, 600)])
    early = "state = 'sent' AND split_part(send_key, ':', 3)::int < 342"
    await db.execute(f"UPDATE send_log SET {change} WHERE {early}")  # noqa: S608
    assert await held_reason(db) == "few_controls"
    await db.execute(
        "UPDATE send_log SET answered_at = sent_at, attempt = 1 WHERE send_key = $1", f"neighbour:{FEED}:0"
    )
    await make_due(db, KEY)
    assert await held_reason(db) == "risk"


async def test_a_control_is_heard_of_through_its_own_feed_only(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db, heard=425)
    for n in range(425, 475):
        await event(db, f"neighbour:{FEED}:{n}", feed="another")
    assert await held_reason(db) == "silent"


# Silence


SILENT = FeedView(witness=Witness(Answer.SILENT, "few_controls"), key_window=timedelta(days=1))
AT = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)


def claimed(age: timedelta) -> Row:
    return Row("claimed", 1, AT - age, AT - age - timedelta(minutes=1), None, has_fingerprint=True)


def test_not_even_a_class_that_asks_for_release_gets_one_out_of_silence_before_give_up_after() -> None:
    rules = replace(RULES, on_unknown="release", same_key_retry=False)
    assert decide(claimed(23 * HOUR), Heard(), SILENT, None, rules, AT).reason == "few_controls"
    assert decide(claimed(24 * HOUR), Heard(), SILENT, None, rules, AT).reason == "gave_up"


@pytest.mark.parametrize("heard", [Heard(other=True), Heard(rejected=True)])
def test_a_same_key_retry_needs_silence(heard: Heard) -> None:
    row = replace(claimed(timedelta(minutes=5)), reached=2)
    assert decide(row, Heard(), SILENT, None, RULES, AT).reason == "same_key_retry"
    assert decide(row, heard, SILENT, None, RULES, AT).reason == "grace"


# A queue that can't be read

NOTE = """
INSERT INTO feed_delivery (feed, minute, outcome, n, last_at)
VALUES ($1, date_trunc('minute', clock_timestamp()), $2, 1, clock_timestamp() + $3::interval)
ON CONFLICT (feed, minute, outcome) DO UPDATE SET last_at = excluded.last_at
"""


async def test_a_feed_whose_queue_could_not_be_read_since_anything_was_stored_is_silent(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await db.execute(NOTE, FEED, "stored", timedelta(seconds=-30))
    await db.execute(NOTE, FEED, "later:queue", timedelta(seconds=-20))
    assert await held_reason(db) == "queue"
    await db.execute(NOTE, FEED, "stored", timedelta(seconds=-10))
    await db.execute("UPDATE send_log SET next_check_at = clock_timestamp() WHERE send_key = $1", KEY)
    await reconcile(db)
    assert await state(db, KEY) == "pending"


async def test_a_request_without_any_signature_silences_no_feed_and_one_with_a_wrong_one_does(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    await db.execute(NOTE, FEED, "stored", timedelta(seconds=-30))
    await db.execute(NOTE, FEED, "refused:signature", timedelta(seconds=-20))
    assert await held_reason(db) == "refused"
    await db.execute("DELETE FROM feed_delivery WHERE outcome = 'refused:signature'")
    await db.execute(NOTE, FEED, "refused:missing", timedelta(seconds=-10))
    await db.execute("UPDATE send_log SET next_check_at = clock_timestamp() WHERE send_key = $1", KEY)
    await reconcile(db)
    assert await state(db, KEY) == "pending"
