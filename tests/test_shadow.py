# SPDX-License-Identifier: Apache-2.0
"""A feed in shadow mode: what passes would do is recorded once, and nothing is done, until the mode is live again."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import asyncpg
import pytest
from kit import (
    FEED,
    RULES,
    confirm,
    event,
    fail,
    heard_neighbours,
    make_due,
    make_older,
    old_claim,
    old_claims,
    policies,
    reasons,
    row,
    state,
)

from reconciler import composition
from reconciler.configuration.settings import Settings
from reconciler.passes.ledger import Decided
from reconciler.passes.reconcile import Report, run_pass
from reconciler.passes.shadow import note_shadow
from reconciler.rule.limits import Limit, Live
from reconciler.rule.policy import Action, Rules, Verdict

KEY = "order-1"
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


async def shadow_pass(
    db: asyncpg.Pool, rules: Rules = RULES, *, key_window: timedelta | None = None, limit: Limit | None = None
) -> Report:
    shadow = replace(policies(rules, key_window, limit), live=Live(frozenset({FEED}), only=False))
    return await run_pass(db, shadow, who="test")


async def live_pass(db: asyncpg.Pool, key_window: timedelta | None = None) -> Report:
    return await run_pass(db, policies(RULES, key_window), who="test")


async def foreseen(db: asyncpg.Pool, key: str = KEY) -> list[str]:
    rows = await db.fetch(
        "SELECT action || ':' || reason AS said FROM shadow_verdict WHERE wire_key = $1 ORDER BY id", key
    )
    return [row["said"] for row in rows]


async def unmoved(db: asyncpg.Pool, key: str = KEY) -> dict[str, object]:
    """Return all of a row but when it is looked at next."""
    return {name: value for name, value in (await row(db, key)).items() if name != "next_check_at"}


async def test_a_release_is_recorded_with_its_risk_and_not_done(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    await heard_neighbours(db)
    before = await unmoved(db)
    report = await shadow_pass(db)
    assert report.counts["shadow:released:absent"] == 1
    noted = await db.fetchrow("SELECT * FROM shadow_verdict")
    assert [noted[name] for name in ("action", "reason", "feed", "attempt", "who")] == [
        *("released", "absent", FEED, 1, "test")
    ]
    assert 0.006 < noted["risk"] < 0.01
    assert json.loads(noted["inputs"])["risk"] == pytest.approx(noted["risk"], rel=1e-3)
    assert await unmoved(db) == before
    assert await reasons(db, KEY) == []


async def test_a_verdict_is_recorded_once_and_again_when_it_changes(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY)
    for _ in range(3):
        await shadow_pass(db)
        await make_due(db, KEY)
    assert await foreseen(db) == ["held:silent"]
    await heard_neighbours(db)
    await shadow_pass(db)
    await event(db, KEY)
    await make_due(db, KEY)
    await shadow_pass(db)
    assert await foreseen(db) == ["held:silent", "released:absent", "sent:accepted"]
    assert (await row(db, KEY))["held_reason"] is None


async def test_evidence_moves_no_row(db: asyncpg.Pool) -> None:
    await old_claim(db, "accepted")
    await event(db, "accepted")
    await old_claim(db, "rejected")
    await event(db, "rejected", "rejected", message_id="m-2", kind="failed")
    await fail(db, "failed", await old_claim(db, "failed"), "422", not_sent=False)
    await event(db, "failed", message_id="m-3")
    before = [await unmoved(db, key) for key in ("accepted", "rejected", "failed")]
    await shadow_pass(db)
    assert [await unmoved(db, key) for key in ("accepted", "rejected", "failed")] == before
    assert await foreseen(db, "accepted") == ["sent:accepted"]
    assert await foreseen(db, "rejected") == ["failed:rejected"]


async def test_a_retry_with_the_same_key_is_neither_released_nor_taken_back(db: asyncpg.Pool) -> None:
    await old_claim(db, "released", timedelta(minutes=2), fingerprint="f")
    await live_pass(db, key_window=DAY)
    assert (await row(db, "released"))["release_basis"] == "same_key_retry"
    await make_older(db, "released", DAY)
    await old_claim(db, "claimed", timedelta(minutes=2), fingerprint="f")
    before = await unmoved(db, "released")
    await shadow_pass(db, key_window=DAY)
    assert await unmoved(db, "released") == before
    assert await state(db, "claimed") == "claimed"
    assert await foreseen(db, "claimed") == ["released:same_key_retry"]
    await live_pass(db, key_window=DAY)
    assert await state(db, "released") == "claimed"


async def test_a_send_given_up_on_is_not_failed(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, 2 * DAY)
    await shadow_pass(db, replace(RULES, on_unknown="fail"))
    assert await state(db, KEY) == "claimed"
    assert await foreseen(db) == ["failed:gave_up"]


async def test_a_send_that_waits_is_not_recorded(db: asyncpg.Pool) -> None:
    await old_claim(db, KEY, timedelta(minutes=5))
    await shadow_pass(db)
    assert await foreseen(db) == []


async def test_shadow_releases_take_no_budget_and_open_no_breaker(db: asyncpg.Pool) -> None:
    rules = replace(RULES, on_unknown="release", give_up_after=HOUR)
    await old_claims(db, "send", 5)
    counts = (await shadow_pass(db, rules, limit=Limit(1, 1.0, 1.0, HOUR))).counts
    assert counts["shadow:released:gave_up"] == 5
    assert await db.fetchval("SELECT count(*) FROM feed_state WHERE breaker_at IS NOT NULL") == 0


async def test_where_all_feeds_are_in_shadow_mode_those_that_no_settings_name_are_too(db: asyncpg.Pool) -> None:
    await old_claim(db, "order:1", 48 * HOUR)
    settings = Settings.model_validate({"rules": {"mode": "shadow", "on_unknown": "fail"}})
    report = await run_pass(db, composition.policies(settings), who="test")
    assert report.counts["shadow:failed:gave_up"] == 1
    assert await state(db, "order:1") == "claimed"


async def test_other_feeds_go_on(db: asyncpg.Pool) -> None:
    for feed in (FEED, "other"):
        await old_claim(db, f"absent-{feed}", feed=feed)
        await heard_neighbours(db, feed=feed)
        await old_claim(db, f"accepted-{feed}", timedelta(minutes=5), feed=feed)
        await event(db, f"accepted-{feed}", feed=feed, message_id=f"accepted-{feed}")
    await shadow_pass(db)
    states = {key: await state(db, key) for key in ("absent-mg", "accepted-mg", "absent-other", "accepted-other")}
    assert list(states.values()) == ["claimed", "claimed", "pending", "sent"]


async def test_once_the_mode_is_live_the_next_pass_acts(db: asyncpg.Pool) -> None:
    await old_claim(db, "absent")
    await heard_neighbours(db)
    await old_claim(db, "accepted", timedelta(minutes=5))
    await event(db, "accepted")
    await shadow_pass(db)
    await live_pass(db)
    assert await state(db, "accepted") == "sent"
    at = await db.fetchval(
        "SELECT next_check_at - clock_timestamp() FROM send_log WHERE wire_key = 'absent' AND state = 'claimed'"
    )
    assert at <= timedelta(minutes=15)
    await make_due(db, "absent")
    await live_pass(db)
    assert await state(db, "absent") == "pending"


async def test_what_a_sender_knows_still_moves_its_row(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    await shadow_pass(db)
    assert await confirm(db, KEY, fence) == "sent"
    assert await state(db, KEY) == "sent"


async def test_a_send_that_moved_meanwhile_is_not_recorded(db: asyncpg.Pool) -> None:
    fence = await old_claim(db, KEY)
    async with db.acquire() as connection:
        now = await db.fetchval("SELECT clock_timestamp()")
        held = Decided(KEY, "claimed", fence, Verdict(Action.HELD, "silent", next_check_at=now), {}, FEED)
        await confirm(db, KEY, fence)
        assert await note_shadow(connection, [held], now, 1, "test") == {}
    assert await foreseen(db) == []
