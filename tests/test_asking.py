# SPDX-License-Identifier: Apache-2.0
"""The second witness and the back-fill, over a provider's API on loopback and the real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from api_kit import Sent, asked
from apis.mailgun import Fake
from kit import claim, confirm, fail, make_older, old_claim, reconcile, row, state

from reconciler.errors import UserError
from reconciler.filling.backfill import Backfilled, backfill
from reconciler.passes.feeds import feed_health
from reconciler.passes.lookup import look_up_send
from webhooks.asking import ApiError
from webhooks.event import Answer, wire_key
from webhooks.provider import Feed

ADA, BEN = "ada@example.org", "ben@example.org"
HOUR = timedelta(hours=1)


@asynccontextmanager
async def mailgun(
    sends: list[Sent], spoil: Callable[[web.Request], web.Response | None] = lambda _: None, **settings: bool
) -> AsyncIterator[tuple[dict[str, Feed], Fake]]:
    fake = Fake(sends, **settings)
    async with asked("mailgun", fake, spoil) as (feed, _):
        yield {"mg": replace(feed, name="mg")}, fake


def now() -> datetime:
    return datetime.now(UTC)


async def ambiguous(db, key: str = "order:1", age: timedelta = 2 * HOUR) -> None:
    await old_claim(db, key, age, recipient=ADA)


async def answered(db, key: str = "order:2", age: timedelta = HOUR, **options: str | None) -> None:
    """A send that the provider took, `age` ago: a control."""
    given = {name: value for name, value in {"recipient": BEN, **options}.items() if value is not None}
    fence = (await claim(db, key, **given))["fence"]
    await confirm(db, key, fence, f"m-{key}")
    await make_older(db, key, age)


def took(key: str, recipient: str, age: timedelta) -> Sent:
    return Sent(wire_key(key), recipient, f"id-{wire_key(key)[:8]}", at=now() - age)


async def test_what_a_look_up_finds_is_kept_as_evidence_and_settles_the_row(db) -> None:
    await ambiguous(db)
    async with mailgun([took("order:1", ADA, 2 * HOUR)]) as (feeds, _):
        answer = await look_up_send(db, feeds, "order:1")
    assert (answer.found.answer, answer.stored.stored) == (Answer.ACCEPTED, 2)
    assert (
        await db.fetchval("SELECT DISTINCT source FROM provider_event WHERE wire_key = $1", answer.wire_key)
        == "look-up"
    )
    await reconcile(db)
    found = await row(db, "order:1")
    assert (found["state"], found["verdict_source"]) == ("sent", "look-up")
    assert await db.fetchval("SELECT source FROM verdict WHERE action = 'sent'") == "look-up"


async def test_what_the_feed_says_too_is_the_feed_s_verdict(db) -> None:
    await ambiguous(db)
    async with mailgun([took("order:1", ADA, 2 * HOUR)]) as (feeds, _):
        await look_up_send(db, feeds, "order:1")
    await db.execute("UPDATE provider_event SET source = 'http' WHERE kind = 'delivered'")
    await reconcile(db)
    assert (await row(db, "order:1"))["verdict_source"] == "feed"


async def test_a_rejection_that_is_looked_up_fails_the_row(db) -> None:
    await ambiguous(db)
    async with mailgun([replace(took("order:1", ADA, 2 * HOUR), rejected=True)]) as (feeds, _):
        assert (await look_up_send(db, feeds, "order:1")).found.answer is Answer.REJECTED
    await reconcile(db)
    assert (await row(db, "order:1"))["verdict_source"] == "look-up"
    assert await state(db, "order:1") == "failed"


@pytest.mark.parametrize(
    ("age", "status", "answer", "reason"),
    [
        (timedelta(seconds=30), 200, Answer.SILENT, "not_settled"),
        (timedelta(hours=2), 404, Answer.SILENT, "not_found"),
        (timedelta(hours=2), 401, Answer.SILENT, "unauthorized"),
        (timedelta(hours=2), 400, Answer.SILENT, "refused"),
        (timedelta(days=4), 200, Answer.SILENT, "too_old"),
        (timedelta(hours=2), 200, Answer.ABSENT, ""),
    ],
)
async def test_case_069_an_empty_answer_counts_only_in_its_time_and_a_failing_one_never(
    db, age: timedelta, status: int, answer: Answer, reason: str
) -> None:
    await ambiguous(db, "order:1", age)
    await answered(db, "order:2", age - timedelta(seconds=20))

    def spoil(_: web.Request) -> web.Response | None:
        return None if status == 200 else web.Response(status=status)

    async with mailgun([took("order:2", BEN, age - timedelta(seconds=20))], spoil) as (feeds, _):
        found = (await look_up_send(db, feeds, "order:1")).found
    assert (found.answer, found.reason) == (answer, reason)
    assert await state(db, "order:1") == "claimed"


async def test_absence_is_proved_by_a_later_send_that_the_log_knows_to_be_accepted(db) -> None:
    await ambiguous(db)
    async with mailgun([took("order:2", BEN, HOUR)]) as (feeds, fake):
        assert (await look_up_send(db, feeds, "order:1")).found.reason == "no_control"
        await answered(db, "order:2")
        answer = await look_up_send(db, feeds, "order:1")
        assert (answer.found.answer, answer.stored) == (Answer.ABSENT, (0, 0))
        fake.sends = []
        assert (await look_up_send(db, feeds, "order:1")).found.reason == "control_not_found"
    assert await state(db, "order:1") == "claimed", "a look-up releases nothing by itself"


async def test_a_send_that_was_accepted_before_the_claim_s_submit_by_is_no_control(db) -> None:
    await ambiguous(db)
    await answered(db, "order:2", 2 * HOUR + timedelta(minutes=2))
    async with mailgun([took("order:2", BEN, 2 * HOUR)]) as (feeds, _):
        assert (await look_up_send(db, feeds, "order:1")).found.reason == "no_control"


@pytest.mark.parametrize(
    "options",
    [
        {"message_class": "other"},  # whose sends may not be stamped alike
        {"recipient": None},  # which can't be asked for
    ],
)
async def test_a_control_is_of_the_same_class_and_can_be_found_alike(db, options: dict[str, str | None]) -> None:
    await ambiguous(db)
    await answered(db, "order:2", **options)
    async with mailgun([took("order:2", BEN, HOUR), took("order:3", BEN, HOUR)]) as (feeds, _):
        assert (await look_up_send(db, feeds, "order:1")).found.reason == "no_control"
        await answered(db, "order:3", HOUR - timedelta(minutes=1))
        assert (await look_up_send(db, feeds, "order:1")).found.answer is Answer.ABSENT, "the next one will do"


async def test_neither_an_earlier_nor_an_unanswered_send_stands_before_a_good_control(db) -> None:
    await ambiguous(db)
    await answered(db, "order:early", 2 * HOUR + timedelta(minutes=2))
    await old_claim(db, "order:unanswered", HOUR + timedelta(minutes=5), recipient=BEN)
    await answered(db, "order:good", HOUR)
    async with mailgun([took("order:good", BEN, HOUR)]) as (feeds, _):
        assert (await look_up_send(db, feeds, "order:1")).found.answer is Answer.ABSENT


async def test_a_send_with_an_attempt_on_another_feed_is_not_absent_by_this_one(db) -> None:
    await ambiguous(db)
    await answered(db)
    await db.execute(
        "INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed)"
        " SELECT wire_key, 0, 0, 'released', 'absent', 'feed', 'test', 'another' FROM send_log"
        " WHERE send_key = 'order:1'"
    )
    async with mailgun([took("order:2", BEN, HOUR)]) as (feeds, _):
        assert (await look_up_send(db, feeds, "order:1")).found.reason == "other_feed"


async def test_a_failed_row_that_a_look_up_corrects_says_so(db) -> None:
    fence = await old_claim(db, "order:1", 2 * HOUR, recipient=ADA)
    await fail(db, "order:1", fence, not_sent=False)
    async with mailgun([took("order:1", ADA, 2 * HOUR)]) as (feeds, _):
        await look_up_send(db, feeds, "order:1")
    await reconcile(db)
    found = await row(db, "order:1")
    assert (found["state"], found["verdict_source"]) == ("sent", "look-up")


async def test_a_stranger_s_send_to_the_same_recipient_is_no_evidence(db) -> None:
    await ambiguous(db)
    await answered(db)
    async with mailgun([took("order:9", ADA, 2 * HOUR), took("order:2", BEN, HOUR)]) as (feeds, _):
        answer = await look_up_send(db, feeds, "order:1")
    assert answer.found.answer is Answer.ABSENT
    assert await db.fetchval("SELECT count(*) FROM provider_event WHERE source = 'look-up'") == 0


async def test_an_installation_s_namespace_holds_for_look_ups_too(db) -> None:
    await db.execute("UPDATE installation SET namespace = 'shop-a'")
    await ambiguous(db)
    key = await db.fetchval("SELECT wire_key('order:1')")
    theirs = Sent(wire_key("order:1"), ADA, "theirs", at=now() - 2 * HOUR)
    async with mailgun([theirs]) as (feeds, fake):
        assert (await look_up_send(db, feeds, "order:1")).found.reason == "no_control"
        fake.sends = [Sent(key, ADA, "ours", at=now() - 2 * HOUR)]
        assert (await look_up_send(db, feeds, "order:1")).found.answer is Answer.ACCEPTED


async def test_who_can_t_be_asked_is_said_in_a_line(db) -> None:
    await ambiguous(db)
    with pytest.raises(UserError, match=r"^no send has the key order:77: "):
        await look_up_send(db, {}, "order:77")
    with pytest.raises(UserError, match=r"^the send's feed mg is not configured"):
        await look_up_send(db, {}, "order:1")
    answer = await look_up_send(db, {"mg": Feed("mg", "ses")}, "order:1")
    assert (answer.found.answer, answer.found.reason) == (Answer.SILENT, "unsupported")


async def test_a_back_fill_brings_what_the_webhooks_missed_once(db) -> None:
    sends = [took(f"order:{n}", ADA, n * HOUR + timedelta(minutes=1)) for n in range(1, 6)]
    await ambiguous(db, "order:3", 3 * HOUR)
    before = await db.fetchval("SELECT clock_timestamp()")
    async with mailgun(sends) as (feeds, _):
        done = await backfill(db, feeds["mg"], now() - 6 * HOUR, now(), who="test")
        again = await backfill(db, feeds["mg"], now() - 6 * HOUR, now(), who="test")
    assert (done.events, done.stored, done.resumed) == (10, 10, False)
    assert (again.events, again.stored) == (10, 0)
    assert await db.fetchval("SELECT DISTINCT source FROM provider_event") == "back-fill"
    assert await db.fetchval("SELECT min(received_at) FROM provider_event") >= before, "when it was stored"
    await reconcile(db)
    assert await state(db, "order:3") == "sent"


async def test_a_back_fill_that_was_broken_off_goes_on_where_it_was(db) -> None:
    sends = [took(f"order:{n}", ADA, n * HOUR - timedelta(minutes=1)) for n in range(1, 7)]
    since, until = now() - 6 * HOUR, now()
    broken = False

    def spoil(request: web.Request) -> web.Response | None:
        late = float(request.query.get("begin", 0)) > (since + 2 * HOUR).timestamp() - 1
        return web.Response(status=403) if late and broken else None

    told: list[datetime] = []

    def tell(done: Backfilled) -> None:
        told.append(done.done_until)

    async with mailgun(sends, spoil) as (feeds, fake):
        broken = True
        with pytest.raises(ApiError, match="^forbidden: "):
            await backfill(db, feeds["mg"], since, until, who="test", tell=tell)
        assert told == [since + HOUR, since + 2 * HOUR]
        broken, asked_before = False, len(fake.requests)
        done = await backfill(db, feeds["mg"], since, until + timedelta(seconds=1), who="test", tell=tell)
        assert min(float(r.query.get("begin", "inf")) for r in fake.requests[asked_before:]) >= told[1].timestamp() - 1
    assert (done.resumed, done.done_until) == (True, until + timedelta(seconds=1))
    assert await db.fetchval("SELECT count(*) FROM provider_event") == 12
    assert await db.fetchval("SELECT count(*) FROM backfill WHERE ended_at IS NULL") == 0


async def broken_off(db, sends: list[Sent], since: datetime, until: datetime) -> None:
    """A run that came two hours far, and then was forbidden to go on."""

    def spoil(request: web.Request) -> web.Response | None:
        late = float(request.query.get("begin", 0)) > (since + 2 * HOUR).timestamp() - 1
        return web.Response(status=403) if late else None

    async with mailgun(sends, spoil) as (feeds, _):
        with pytest.raises(ApiError, match="^forbidden"):
            await backfill(db, feeds["mg"], since, until, who="test")


async def test_a_run_is_resumed_only_at_the_same_place_within_a_day_and_unless_asked_afresh(db) -> None:
    sends = [took(f"order:{n}", ADA, n * HOUR - timedelta(minutes=1)) for n in range(1, 7)]
    since, until = now() - 6 * HOUR, now()
    await broken_off(db, sends, since, until)
    async with mailgun(sends) as (feeds, _):  # another port, so another place
        assert not (await backfill(db, feeds["mg"], since, until, who="test")).resumed
        place = f"{feeds['mg'].api_url} {feeds['mg'].api_scope}"
        await db.execute("UPDATE backfill SET ended_at = NULL, done_until = since, asked = $1", place)
        afresh = await backfill(db, feeds["mg"], since, until, who="test", afresh=True)
        await db.execute("UPDATE backfill SET ended_at = NULL, done_until = since, asked = $1", place)
        same = await backfill(db, feeds["mg"], since, until, who="test")
        await db.execute(
            "UPDATE backfill SET ended_at = NULL, done_until = since, started_at = now() - interval '25 hours'"
        )
        old = await backfill(db, feeds["mg"], since, until, who="test")
    assert (afresh.resumed, same.resumed, old.resumed) == (False, True, False)


async def test_what_the_api_may_not_show_yet_is_not_counted_as_done(db) -> None:
    asked_at: list[float] = []

    def spoil(request: web.Request) -> None:
        asked_at.append(float(request.query.get("begin", 0)))

    since, until = now() - timedelta(minutes=90), now()
    async with mailgun([], spoil) as (feeds, _):
        await backfill(db, feeds["mg"], since, until, who="test")
    settled = await db.fetchval("SELECT done_until FROM backfill")
    assert max(asked_at) > since.timestamp()
    assert settled == since + HOUR, "the last half-hour, in which Mailgun's list still grows, is asked for again"


async def test_while_a_back_fill_runs_the_feed_is_marked(db) -> None:
    looks: list[asyncio.Task[bool]] = []

    async def is_marked() -> bool:
        async with db.acquire() as connection:
            return (await feed_health(connection, {"mg"}))["mg"].filling

    def spoil(_: web.Request) -> None:
        looks.append(asyncio.create_task(is_marked()))

    assert not await is_marked()
    async with mailgun([], spoil) as (feeds, _):
        await backfill(db, feeds["mg"], now() - HOUR, now(), who="test")
    assert set(await asyncio.gather(*looks)) == {True}


async def test_a_provider_that_lists_nothing_says_so(db) -> None:
    with pytest.raises(UserError, match=r"lists no events of a span of time: "):
        await backfill(db, Feed("ses", "ses"), now() - HOUR, now(), who="test")
