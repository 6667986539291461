# SPDX-License-Identifier: Apache-2.0
"""The work whose statements are held to their plans: what daemon, senders and receiver do all day."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import uuid4

import asyncpg
from plans_fill import AGAIN, BUSY, FEEDS, FIRST_FENCE, HEARD, HELD, RELEASED, RUNNING, SILENT, keys, numbers, wire_key

from reconciler import campaign, guard, guard_many, metrics
from reconciler.api import routes
from reconciler.campaigns import caps, load
from reconciler.cli import operate, root
from reconciler.cli import reconcile as cli_reconcile
from reconciler.configuration.settings import Settings
from reconciler.database.connection import BEGINNING, Place
from reconciler.filling import importing
from reconciler.insight import duplicates, reports, status, why
from reconciler.outbox import delivery as outbox
from reconciler.passes import (
    by_hand,
    evidence,
    feeds,
    judging,
    ledger,
    lookup,
    outcomes,
    releasing,
    second_witness,
    shadow,
)
from reconciler.passes.histories import Histories
from reconciler.passes.ledger import Decided
from reconciler.rule.limits import ALL_LIVE, Limit
from reconciler.rule.policy import Action, Verdict
from reconciler.sending import idempotency_store
from reconciler.serving import works
from reconciler.ui import actions, claims
from reconciler.upkeep import retention
from webhooks import counters, writer

Job = Callable[[asyncpg.Connection, datetime], Awaitable[object]]
"""Runs statements over a connection; the time is the database's."""

PAGE: Final = 1000
HOUR, DAY = timedelta(hours=1), timedelta(days=1)
RULES_FOR: Final = Settings().rules_for
DUE: Final = keys((*SILENT, *AGAIN))[:PAGE]
FENCES: Final = {wire_key("claim", n): FIRST_FENCE + n for n in numbers(tuple(range(10)))}
RELEASED_CAMPAIGN: Final = "SELECT * FROM send_claim_campaign($1, $2, $3)"
CLAIM_RELEASED: Final = "SELECT * FROM send_claim_released($1, $2, $3)"
OWN: Final = {"send_claim_released": CLAIM_RELEASED, "send_claim_campaign": RELEASED_CAMPAIGN}
"""What the procedures of these names run; they commit, so that no transaction can take it back."""


async def settle_evidence(c: asyncpg.Connection, now: datetime) -> None:
    await evidence.settle_watched(c, BEGINNING, None, None, ALL_LIVE, 1, "test", half=0)
    await evidence.settle_failed(c, Place(now - 7 * DAY, ""), None, None, ALL_LIVE, 1, "test")


async def take_pages(c: asyncpg.Connection, now: datetime) -> None:
    await ledger.take_back_same_key_releases(c, now, None, None, ALL_LIVE)
    await ledger.watched_keys(c, BEGINNING, None, None)
    assert len(await ledger.take_due(c, now, None)) == PAGE


async def judge_a_page(c: asyncpg.Connection, _now: datetime) -> None:
    page = await judging.read_page(c, RULES_FOR, Histories(RULES_FOR, lambda feed: feed == BUSY), DUE)
    assert len(page.rows) == len(page.silence) == PAGE


def decided(action: Action, reason: str, now: datetime) -> list[Decided]:
    look_at = None if action is Action.FAILED else now + HOUR
    verdict = Verdict(action, reason, next_check_at=look_at, risk=0.004)
    return [Decided(key, "claimed", FENCES[key], verdict, {}, FEEDS[n % 8]) for n, key in enumerate(DUE)]


async def write_held(c: asyncpg.Connection, now: datetime) -> None:
    counts = await ledger.postpone(c, decided(Action.HELD, "few_controls", now), 1, "test")
    assert counts == {"few_controls": PAGE}


async def write_failed(c: asyncpg.Connection, now: datetime) -> None:
    assert await ledger.fail(c, decided(Action.FAILED, "expired", now), now, 1, "test") == {"expired": PAGE}


async def write_shadow(c: asyncpg.Connection, now: datetime) -> None:
    await shadow.note_shadow(c, decided(Action.RELEASED, "absent", now), now, 1, "test")


async def write_released(c: asyncpg.Connection, now: datetime) -> None:
    def limit_for(_feed: str) -> Limit:
        return Limit(count=PAGE, share=1.0, canary=1.0, awaited=timedelta(minutes=15))

    done = await releasing.release(c, decided(Action.RELEASED, "absent", now), limit_for, now, 1, "test")
    assert done.counts["absent"] > 100


async def follow_outcomes(c: asyncpg.Connection, now: datetime) -> None:
    await c.fetchval(outcomes.STORED, now - HOUR - outcomes.SLICE, now - HOUR)
    await c.execute(outcomes.FOLLOW, now - HOUR - outcomes.SLICE, now - HOUR)


async def ask_providers(c: asyncpg.Connection, _now: datetime) -> None:
    questions = await lookup.read_questions(c, DUE[:60])
    sought = [
        [q.sought.wire_key for q in questions],
        [q.feed for q in questions],
        [q.message_class for q in questions],
        [q.sought.submit_by for q in questions],
        ["id"] * len(questions),
    ]
    await c.fetch(lookup.CONTROLS, *sought)
    await c.fetch(second_witness.READ_RESTS, list(FEEDS))
    asked = await c.fetch(second_witness.RESERVE, BUSY, "test", DUE[:60], [0] * 60, 60)
    answers = [row["wire_key"] for row in asked], [row["id"] for row in asked]
    await c.execute(lookup.NOTE_ANSWERS, *answers, ["absent"] * len(asked), [""] * len(asked))


async def watch(c: asyncpg.Connection, now: datetime) -> None:
    await feeds.stop_refused_feeds(c, FEEDS, "test")
    found = await duplicates.spoken_of(c, now - HOUR - duplicates.SLICE, now - HOUR)
    again, _ = await duplicates.given_out_again(c, Place(now - 7 * DAY, ""))
    await duplicates.find_duplicates(c, sorted({*found, *again}))
    await reports.vanished_sends(c, dict.fromkeys(FEEDS, now - 6 * HOUR), now - DAY)


async def look_how_it_stands(c: asyncpg.Connection, now: datetime) -> None:
    await metrics.read_undecided(c)
    await metrics.read_feeds(c)
    await c.fetch(works.NEWLY_HELD, "host:1")
    await feeds.feed_health(c, set(FEEDS))
    await c.fetch(status.UNDECIDED, now, None)
    await c.fetch(status.FEEDS, [*FEEDS, "*"], now)
    await c.fetch(status.REFUSED, list(FEEDS), now)
    await c.fetch(status.FOREIGN, now, None)
    await c.fetch(status.DUPLICATES, now, None)
    await c.fetch(status.LAST_PASS)
    await outbox.read_outbox(c, BUSY)
    await c.fetch(operate.HELD_KEYS, None)
    await c.fetch(root.SENDS_NAME_FEED, BUSY)


async def why_one(c: asyncpg.Connection, _now: datetime) -> None:
    key = keys(AGAIN)[0]
    row = await c.fetchrow(why.ROW, key)
    assert row is not None
    await c.fetch(why.EVENTS, key, row["feed"], "m-1", row["known_message_id"], 1000)
    await c.fetch(cli_reconcile.SEND_STATE, key)
    await c.fetch(cli_reconcile.SEND_KEYS, [key])
    for statement in (why.VERDICTS, why.SHADOW_VERDICTS, why.LOOK_UPS, why.TELLINGS, why.DUPLICATES):
        await c.fetch(statement, key)


async def tell_the_application(c: asyncpg.Connection, _now: datetime) -> None:
    first, second, third, *_ = await outbox.lease(c)  # a connection serves for a pool here
    await c.execute(outbox.DELIVERED, first.wire_key, first.id)
    await c.execute(outbox.CANCEL, second.wire_key, second.id)
    marks = (third.wire_key, third.id, third.leased_until, "busy", HOUR, DAY)
    await c.fetchval(outbox.NOT_DELIVERED, *marks)
    await outbox.clean(c)
    await outbox.undelivered(c, 100)
    await outbox.retry(c, None)


async def keep_house(c: asyncpg.Connection, _now: datetime) -> None:
    assert await idempotency_store.delete_old(c)
    await caps.keep_caps(c, [])


async def prune_sends(c: asyncpg.Connection, now: datetime) -> None:
    cuts, page = (now - 80 * DAY, now - 80 * DAY), (datetime(1970, 1, 1, tzinfo=UTC), "")
    await c.fetch(retention.FEEDS)
    rows = await c.fetch(retention.CLAIMED_PAGE, *page, *cuts, retention.BATCH, BUSY)
    await c.fetch(retention.FAILED_PAGE, *page, *cuts, retention.BATCH)
    await c.fetch(retention.UNCLAIMED_PAGE, *page, *cuts, retention.BATCH)
    assert (await c.fetchrow(retention.DELETE_SENDS, [row["wire_key"] for row in rows], *cuts))["send_log"]
    await c.fetchval(retention.DELETE_CANCELLED, now - 80 * DAY, retention.BATCH)


async def prune_the_rest(c: asyncpg.Connection, now: datetime) -> None:
    await c.fetchval(retention.DELETE_UNDATED, "(0,0)", "(16,0)", now - 80 * DAY, 7 * DAY)
    for statement in retention.DELETE_NOTES.values():
        await c.fetchval(statement, now - 29 * DAY, retention.BATCH)


async def claim(c: asyncpg.Connection, _now: datetime) -> None:
    options = {"recipient": "ada@example.com", "fingerprint": "f", "claimed_by": "test"}
    expected = {
        "a-new-key": "claimed",
        keys(RELEASED)[0]: "claimed",
        keys(RUNNING)[0]: "in_flight",
        wire_key("spring", 1000): "claimed",
    }
    for key, outcome in expected.items():
        own = options if key == "a-new-key" else {}
        assert (await c.fetchrow(routes.CLAIM, key, BUSY, json.dumps(own)))["outcome"] in (outcome, "other_feed")
        await c.fetchrow(routes.PEEK, key, BUSY, "{}", "of-no-request")
        await c.fetchrow(routes.STANDING, key)
        await c.execute(routes.HURRY, key, "200ms")
    await c.fetchrow(idempotency_store.Store.FIND, "of-no-request")
    await c.fetchrow(idempotency_store.Store.TAKE_OVER, "of-no-request", uuid4(), uuid4(), HOUR, DAY)
    many = [f"many-{n}" for n in range(50)]
    await c.fetch(guard_many.CLAIM, BUSY, many, [json.dumps(options | {"known_message_id": key}) for key in many])


async def enqueue(c: asyncpg.Connection, now: datetime) -> None:
    await c.fetchrow(guard.ENQUEUE, "to-be-sent-later", BUSY, "{}")
    await c.fetchrow(routes.ENQUEUE, "to-be-sent-later", BUSY, "{}")
    at = now - DAY
    past = {"claimed_at": f"{at:%Y-%m-%dT%H:%M:%SZ}", "answered_at": f"{at:%Y-%m-%dT%H:%M:%SZ}", "message_id": "old-1"}
    await c.fetch(importing.ADOPT, ["from-before"], [BUSY], [json.dumps(past)])


async def report(c: asyncpg.Connection, _now: datetime) -> None:
    running = keys(RUNNING)
    await c.fetchrow(guard.CONFIRM, running[0], FENCES[running[0]], "m-c1", "{}")
    await c.fetchrow(guard.CONFIRM, keys(AGAIN)[0], FENCES[keys(AGAIN)[0]] - 1, "m-c2", "{}")
    for key, not_sent in zip(running[1:4], (True, False, None), strict=True):
        await c.fetchrow(guard.FAIL, key, FENCES[key], "why", not_sent)
    taken, others = running[10:60], running[60:110]
    await c.fetch(guard_many.CONFIRM, taken, [FENCES[key] for key in taken], [f"m-{key}" for key in taken])
    fates = [True, False, None, None, None] * 10
    await c.fetch(guard_many.FAIL, others, [FENCES[key] for key in others], ["why"] * 50, fates)


async def operate_on_one(c: asyncpg.Connection, _now: datetime) -> None:
    first, second, third = keys(HELD)[:3]
    await by_hand.decide(c, "release", first, "why", "ada")
    await by_hand.decide(c, "confirm", second, "why", "ada")
    await by_hand.decide(c, "fail", third, "why", "ada")
    await by_hand.decide(c, "release", keys(HEARD)[0], "why", "ada")


async def list_for_people(c: asyncpg.Connection, _now: datetime) -> None:
    first = await claims.read_claims(c, claims.Wanted(), None, 50)
    assert len(first.sends) == 50
    second = await claims.read_claims(c, claims.Wanted(), first.then, 50)
    assert {one.wire_key for one in first.sends} & {one.wire_key for one in second.sends} == set()
    assert len((await claims.read_claims(c, claims.Wanted("held"), first.then, 50)).sends) == 50
    assert await actions.decide(
        c, actions.Wish("fail", "why", "ada"), actions.Seen(first.sends[0].wire_key, 99, "claimed")
    )
    assert await claims.wire_key_of(c, first.sends[0].wire_key) == first.sends[0].wire_key
    failed = await claims.read_claims(c, claims.Wanted("failed"), None, 50)
    assert len((await claims.read_claims(c, claims.Wanted("failed"), failed.then, 50)).sends) == 50


async def claim_batches(c: asyncpg.Connection, _now: datetime) -> None:
    assert await c.fetch(CLAIM_RELEASED, BUSY, 50, "{}") is not None
    assert len(await c.fetch(RELEASED_CAMPAIGN, "spring", 100, '{"claimed_by": "test"}')) == 100


async def run_a_campaign(c: asyncpg.Connection, _now: datetime) -> None:
    assert await campaign.standing(c, "spring") == "active"
    await c.execute(load.STAGING)
    rows = [
        (wire_key("more", n), f"more-{n}", f"s{n}@example.com", f"s{n}@example.com", None, None) for n in range(500)
    ]
    await c.copy_records_to_table("campaign_staging", records=rows)
    await c.execute(load.DROP_SUPPRESSED)
    assert await c.execute(load.ADD, "spring") == "INSERT 0 500"


async def count_a_campaign(c: asyncpg.Connection, _now: datetime) -> None:
    assert await campaign.status(c, "spring")
    await c.fetch(campaign.END_RELEASED, "autumn", "ada", "why")


async def receive(c: asyncpg.Connection, now: datetime) -> None:
    n = PAGE
    columns: Sequence[Any] = (
        *("\x1f".join(f"{name}-{i}" for i in range(n)) for name in ("w", "m", "e")),
        *("\x1f".join([value] * n) for value in (BUSY, "delivered", "accepted", "http", "ada@example.com", "")),
        "t" * (n - 10) + "f" * 10,
    )
    row = await c.fetchrow(writer.STORE_EVENTS, *columns, [now] * n, [b"{}"] * n)
    assert row is not None
    assert row["n"] == n
    await c.execute(counters.ADD_DELIVERIES, list(FEEDS), ["stored"] * 8, [5] * 8, [1.0] * 8)


JOBS: Final[tuple[Job, ...]] = (
    settle_evidence,
    take_pages,
    judge_a_page,
    write_held,
    write_failed,
    write_shadow,
    write_released,
    follow_outcomes,
    ask_providers,
    watch,
    look_how_it_stands,
    why_one,
    tell_the_application,
    keep_house,
    prune_sends,
    prune_the_rest,
    claim,
    enqueue,
    report,
    operate_on_one,
    list_for_people,
    claim_batches,
    run_a_campaign,
    count_a_campaign,
    receive,
)
