# SPDX-License-Identifier: Apache-2.0
"""The second witness of a pass, over providers' APIs on loopback and the real database: what it may ask, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

import asyncpg
import pytest
from aiohttp import web
from api_kit import Sent, asked
from apis.mailgun import Fake
from kit import claim, confirm, make_older, old_claim, policies, reconcile, row, until_it_waits

from reconciler import composition
from reconciler.configuration.settings import Settings
from reconciler.passes import second_witness
from reconciler.passes.lookup import Last, Question, look_up_send
from reconciler.passes.reconcile import run_pass
from reconciler.passes.second_witness import SecondWitness, _due_at, together
from reconciler.rule.policy import Witness
from webhooks.event import Answer, wire_key
from webhooks.lookup import Sought
from webhooks.provider import Feed
from webhooks.registry import PROVIDERS

ADA, BEN = "ada@example.org", "ben@example.org"
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)
ABSENT, ACCEPTED = Witness(Answer.ABSENT), Witness(Answer.ACCEPTED)


@dataclass
class Api(Fake):
    """A Mailgun that answers what it is told to, and holds back its answers while `open` is not set."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    open: asyncio.Event = field(default_factory=asyncio.Event)
    inside: int = 0
    full: int = 1
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once so many requests were inside at a time."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.inside += 1
        if self.inside >= self.full:
            self.reached.set()
        try:
            await self.open.wait()
        finally:
            self.inside -= 1
        if self.status != 200:
            return web.Response(status=self.status, headers=self.headers)
        return await super().answer(request)


@asynccontextmanager
async def mailgun(*sends: Sent, name: str = "mg", hangs: bool = False) -> AsyncIterator[tuple[Feed, Api]]:
    fake = Api(list(sends))
    if not hangs:
        fake.open.set()
    async with asked("mailgun", fake) as (feed, _):
        yield replace(feed, name=name), fake


def witness(*feeds: Feed, budget: int = 60) -> SecondWitness:
    return SecondWitness({feed.name: feed for feed in feeds}, lambda _: budget)


async def ask(db: asyncpg.Pool, of: SecondWitness, *keys: str, seconds: float = 20.0) -> dict[str, Witness]:
    return await of.ask(db, [wire_key(key) for key in keys], who="test", seconds=seconds)


def took(key: str, recipient: str = BEN, age: timedelta = HOUR) -> Sent:
    return Sent(wire_key(key), recipient, f"id-{wire_key(key)[:8]}", at=datetime.now(UTC) - age)


async def ambiguous(db, key: str = "order:1", age: timedelta = 2 * HOUR, feed: str = "mg") -> str:
    await claim_in(db, key, feed)
    await make_older(db, key, age + MINUTE)
    return wire_key(key)


async def claim_in(db, key: str, feed: str) -> None:
    assert (await claim(db, key, feed, recipient=ADA))["outcome"] == "claimed"


async def answered(db, key: str = "order:2", age: timedelta = HOUR, feed: str = "mg") -> None:
    """A send that the provider took, `age` ago: a control."""
    fence = (await claim(db, key, feed, recipient=BEN))["fence"]
    await confirm(db, key, fence, f"m-{key}")
    await make_older(db, key, age)


async def remember(db, key: str, answer: str | None, reason: str, age: timedelta, feed: str = "mg") -> None:
    """A question of `age` ago, and its answer."""
    await db.execute(
        "INSERT INTO look_up (wire_key, feed, asked_at, who, answered_at, answer, reason)"
        " SELECT wire_key($1), $2, t, 'test', CASE WHEN $3::text IS NOT NULL THEN t END, $3, $4"
        " FROM (SELECT clock_timestamp() - $5::interval) AS at(t)",
        key,
        feed,
        answer,
        reason,
        age,
    )


async def questions(db) -> list[tuple[str, str | None, str]]:
    rows = await db.fetch("SELECT wire_key, answer, reason FROM look_up ORDER BY id")
    return [tuple(one) for one in rows]


async def test_a_claim_that_the_api_does_not_show_is_absent_and_the_answer_is_remembered(db) -> None:
    key = await ambiguous(db)
    await answered(db)
    async with mailgun(took("order:2")) as (feed, _):
        assert await ask(db, witness(feed), "order:1") == {key: ABSENT}
    assert await questions(db) == [(key, "absent", "")]
    assert (await row(db, "order:1"))["state"] == "claimed", "a look-up releases nothing by itself"


async def test_a_pass_releases_what_the_api_says_is_absent_and_shows_its_word(db) -> None:
    await ambiguous(db)
    await answered(db)
    async with mailgun(took("order:2")) as (feed, _):
        await run_pass(db, replace(policies(), second_witness=witness(feed)), who="test")
    assert (await row(db, "order:1"))["release_basis"] == "looked_up"
    said = await db.fetchval("SELECT witnesses -> 'look_up' ->> 'answer' FROM verdict WHERE action = 'released'")
    assert said == "absent"


async def test_without_a_later_send_that_is_found_the_api_is_silent(db) -> None:
    key = await ambiguous(db)
    async with mailgun() as (feed, _):
        assert await ask(db, witness(feed), "order:1") == {key: Witness(Answer.SILENT, "no_control")}
        await db.execute("TRUNCATE look_up")
        await answered(db)
        assert await ask(db, witness(feed), "order:1") == {key: Witness(Answer.SILENT, "control_not_found")}


async def test_each_claim_of_a_page_has_its_own_control(db) -> None:
    early, late = await ambiguous(db, "order:1", 5 * HOUR), await ambiguous(db, "order:3", 2 * HOUR)
    await answered(db, "order:0", 6 * HOUR)
    await answered(db, "order:2", 4 * HOUR)
    async with mailgun(took("order:0", age=6 * HOUR), took("order:2", age=4 * HOUR)) as (feed, _):
        answers = await ask(db, witness(feed), "order:1", "order:3")
    assert answers == {early: ABSENT, late: Witness(Answer.SILENT, "no_control")}


async def test_what_the_api_shows_is_stored_as_evidence_and_the_next_pass_settles_the_row(db) -> None:
    key = await ambiguous(db)
    async with mailgun(took("order:1", ADA, 2 * HOUR)) as (feed, _):
        assert await ask(db, witness(feed), "order:1") == {key: ACCEPTED}
    assert await db.fetch("SELECT DISTINCT wire_key, source FROM provider_event") == [(key, "look-up")]
    await reconcile(db)
    assert (await row(db, "order:1"))["verdict_source"] == "look-up"


IN_TRANSACTION = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%'
"""


async def test_no_connection_is_held_while_a_provider_is_asked(db, dsn) -> None:
    key = await ambiguous(db)
    async with (
        mailgun(took("order:1", ADA, 2 * HOUR), hangs=True) as (feed, api),
        asyncpg.create_pool(dsn, min_size=1, max_size=1) as only_one,
    ):
        asking = asyncio.create_task(ask(only_one, witness(feed), "order:1"))
        try:
            await asyncio.wait_for(api.reached.wait(), 10)
            assert await asyncio.wait_for(only_one.fetchval("SELECT count(*) FROM look_up"), 9) == 1, "committed before"
            assert await only_one.fetchval(IN_TRANSACTION) == 0
            api.open.set()
            assert await asking == {key: ACCEPTED}
        finally:
            asking.cancel()


async def test_a_provider_that_hangs_is_given_up_and_delays_no_other_feed(db) -> None:
    await ambiguous(db, "order:1")
    healthy = await ambiguous(db, "order:2", feed="other")
    async with mailgun(hangs=True) as (feed, api), mailgun(took("order:2", ADA, 2 * HOUR), name="other") as (other, _):
        both = witness(feed, other)
        async with asyncio.timeout(10):
            assert await ask(db, both, "order:1", "order:2", seconds=3.0) == {healthy: ACCEPTED}
        assert api.inside == 0, "nobody waits for it any more"
        asked_before = len(api.requests)
        await ambiguous(db, "order:3")
        silent = Witness(Answer.SILENT, "timeout")
        assert await ask(db, both, "order:1", "order:3") == {wire_key("order:1"): silent, wire_key("order:3"): silent}
        assert len(api.requests) == asked_before, "for a minute it is left alone"


async def test_four_questions_at_a_time_reach_a_provider(db) -> None:
    keys = [f"order:{n}" for n in range(6)]
    for key in keys:
        await ambiguous(db, key)
    async with mailgun(*(took(key, ADA, 2 * HOUR) for key in keys), hangs=True) as (feed, api):
        asking = asyncio.create_task(ask(db, witness(feed), *keys))
        api.full = 4
        await asyncio.wait_for(api.reached.wait(), 10)
        assert len(await questions(db)) == 4, "the fifth takes its place when the four are answered"
        api.open.set()
        assert len(await asking) == 6


async def test_two_who_ask_at_once_share_a_budget_exactly_and_no_send_is_asked_about_twice(db, dsn) -> None:
    keys = [f"order:{n}" for n in range(12)]
    for key in keys:
        await ambiguous(db, key)
    async with (
        mailgun(*(took(key, ADA, 2 * HOUR) for key in keys)) as (feed, _),
        asyncpg.create_pool(dsn, min_size=1, max_size=2) as another,
    ):
        one, two = await asyncio.gather(*(ask(pool, witness(feed, budget=7), *keys) for pool in (db, another)))
    assert len(await questions(db)) == 7
    assert not one.keys() & two.keys()


async def test_who_takes_a_place_waits_for_whoever_takes_one_and_counts_it(db) -> None:
    for key in ("order:1", "order:2"):
        await ambiguous(db, key)
    async with mailgun() as (feed, _):
        await db.execute("INSERT INTO feed_state (feed) VALUES ('mg')")
        async with db.acquire() as other, other.transaction():
            await other.execute("SELECT FROM feed_state WHERE feed = 'mg' FOR UPDATE")
            await other.execute("INSERT INTO look_up (wire_key, feed, who) VALUES ('x', 'mg', 'other')")
            asking = asyncio.create_task(ask(db, witness(feed, budget=2), "order:1", "order:2"))
            await until_it_waits(db, asking)
        assert len(await asking) == 1
    assert len(await questions(db)) == 2


async def test_the_budget_is_of_the_last_minute_and_of_the_feed(db) -> None:
    key = await ambiguous(db)
    async with mailgun(took("order:1", ADA, 2 * HOUR)) as (feed, _):
        await remember(db, "order:8", "silent", "no_control", timedelta(seconds=30))
        await remember(db, "order:9", "silent", "no_control", timedelta(0), feed="other")
        assert await ask(db, witness(feed, budget=1), "order:1") == {}
        await db.execute("UPDATE look_up SET asked_at = asked_at - interval '31 s'")
        assert await ask(db, witness(feed, budget=1), "order:1") == {key: ACCEPTED}


async def test_a_person_s_question_is_never_refused_and_counts_in_the_budget(db) -> None:
    await ambiguous(db)
    await ambiguous(db, "order:2")
    async with mailgun() as (feed, _):
        for _ in range(2):
            assert (await look_up_send(db, {"mg": feed}, "order:1")).found.reason == "no_control"
        assert await ask(db, witness(feed, budget=2), "order:2") == {}
    assert await questions(db) == [(wire_key("order:1"), "silent", "no_control")] * 2


async def test_what_was_never_or_longest_ago_asked_comes_first(db) -> None:
    for n, age in ((1, 30), (2, 40), (3, None)):
        await ambiguous(db, f"order:{n}")
        if age:
            await remember(db, f"order:{n}", "silent", "no_control", age * MINUTE)
    async with mailgun() as (feed, _):
        assert list(await ask(db, witness(feed, budget=1), "order:1", "order:2", "order:3")) == [wire_key("order:3")]
        await db.execute("UPDATE look_up SET asked_at = asked_at - interval '2 minutes'")
        answers = await ask(db, witness(feed, budget=1), "order:1", "order:2")
    assert list(answers) == [wire_key("order:2")]


@pytest.mark.parametrize(
    ("status", "headers", "reason"),
    [(401, {}, "unauthorized"), (403, {}, "forbidden"), (429, {"Retry-After": "3600"}, "rate_limited")],
)
async def test_an_api_that_refuses_is_left_alone_for_all_sends_of_its_feed(
    db, status: int, headers: dict[str, str], reason: str
) -> None:
    silent = Witness(Answer.SILENT, reason)
    key, other = await ambiguous(db, "order:1"), await ambiguous(db, "order:2")
    async with mailgun() as (feed, api):
        api.status, api.headers = status, headers
        assert await ask(db, witness(feed), "order:1") == {key: silent}
        assert await ask(db, witness(feed), "order:1", "order:2") == {key: silent, other: silent}
        assert len(api.requests) == 1


async def test_once_an_api_refuses_the_rest_of_the_page_is_not_asked(db) -> None:
    keys = [f"order:{n}" for n in range(6)]
    for key in keys:
        await ambiguous(db, key)
    async with mailgun() as (feed, api):
        api.status = 401
        assert len(await ask(db, witness(feed), *keys)) == 4
        assert len(api.requests) == 4


@pytest.mark.parametrize(
    ("reason", "seconds", "rests"),
    [
        ("unauthorized", 295, True),
        ("unauthorized", 305, False),
        ("forbidden", 295, True),
        ("rate_limited", 55, True),
        ("rate_limited", 65, False),
        ("timeout", 55, True),
        ("unreachable", 55, True),
        ("server_error", 55, True),
        ("server_error", 65, False),
        ("no_control", 5, False),
        ("not_found", 5, False),
    ],
)
async def test_a_rest_has_its_time(db, reason: str, seconds: int, rests: bool) -> None:
    key = await ambiguous(db)
    await remember(db, "order:9", "silent", reason, timedelta(seconds=seconds))
    async with mailgun(took("order:1", ADA, 2 * HOUR)) as (feed, api):
        answers = await ask(db, witness(feed), "order:1")
    assert answers == {key: Witness(Answer.SILENT, reason) if rests else ACCEPTED}
    assert bool(api.requests) is not rests


async def test_an_absence_counts_for_a_minute_and_is_then_asked_for_again(db) -> None:
    key = await ambiguous(db)
    await answered(db)
    async with mailgun(took("order:2")) as (feed, api):
        await remember(db, "order:1", "absent", "", timedelta(seconds=30))
        assert (await ask(db, witness(feed), "order:1"), len(api.requests)) == ({key: ABSENT}, 0)
        api.sends = [took("order:1", ADA, 2 * HOUR)]
        await db.execute("UPDATE look_up SET asked_at = asked_at - interval '31 s'")
        assert await ask(db, witness(feed), "order:1") == {key: ACCEPTED}


async def test_a_silence_stands_until_its_send_is_asked_about_again(db) -> None:
    key = await ambiguous(db)
    async with mailgun(took("order:1", ADA, 2 * HOUR)) as (feed, api):
        await remember(db, "order:1", "silent", "no_control", 10 * MINUTE)  # at an age of 110 minutes
        assert await ask(db, witness(feed), "order:1") == {key: Witness(Answer.SILENT, "no_control")}
        assert not api.requests
        await db.execute("UPDATE look_up SET asked_at = asked_at - interval '2 minutes'")
        assert await ask(db, witness(feed), "order:1") == {key: ACCEPTED}


async def test_a_question_without_an_answer_yet_is_not_asked_again_at_once(db) -> None:
    await ambiguous(db)
    await remember(db, "order:1", None, "", MINUTE)
    async with mailgun() as (feed, api):
        assert await ask(db, witness(feed), "order:1") == {}
        assert not api.requests


async def test_what_was_said_before_this_attempt_was_over_says_nothing_of_it(db) -> None:
    key = await ambiguous(db, "order:1", timedelta(seconds=20))
    await remember(db, "order:1", "absent", "", timedelta(seconds=30))
    async with mailgun() as (feed, _):
        assert await ask(db, witness(feed), "order:1") == {key: Witness(Answer.SILENT, "not_settled")}


NOW = datetime(2026, 11, 2, 9, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("answer", "reason", "asked_after", "due_after"),
    [
        ("silent", "no_control", 5, 6),  # a tenth of five minutes is less than one
        ("silent", "no_control", 100, 110),
        ("silent", "timeout", 100, 110),
        (None, "", 100, 110),
        ("silent", "no_control", 1000, 1015),
        ("absent", "", 1000, 1001),
        ("silent", "not_settled", 15, 30),  # Mailgun's list is settled after half an hour
        ("silent", "not_settled", 29, 31.9),
        ("silent", "not_settled", -1, None),
    ],
)
def test_when_a_send_is_asked_about_again(
    answer: str | None, reason: str, asked_after: int, due_after: float | None
) -> None:
    last = Last(1, NOW + asked_after * MINUTE, Answer(answer) if answer else None, reason)
    question = Question("mg", Sought("k", NOW - MINUTE, NOW), True, "default", "claimed", NOW + 2000 * MINUTE, last)
    due_at = _due_at(question, Feed("mg", "mailgun"))
    assert due_at == (datetime(1, 1, 1, tzinfo=UTC) if due_after is None else NOW + due_after * MINUTE)


@pytest.mark.parametrize(
    ("feed", "answer"),
    [
        (Feed("another", "mailgun", api_key="k"), None),
        (Feed("mg", "mailgun", api_key="k"), Witness(Answer.SILENT, "unconfigured")),  # it needs an api_scope too
        (Feed("mg", "azure_acs", api_key="k", api_url="http://127.0.0.1:1"), Witness(Answer.SILENT, "no_message_id")),
    ],
)
async def test_who_can_t_be_asked_takes_no_place_in_the_budget(db, feed: Feed, answer: Witness | None) -> None:
    key = await ambiguous(db)
    assert await ask(db, witness(feed), "order:1") == ({key: answer} if answer else {})
    assert await questions(db) == []
    assert witness(feed).can_ask("mg") is (answer is not None)


async def test_a_send_without_a_recipient_takes_no_place_in_the_budget(db) -> None:
    await old_claim(db, "order:1")
    async with mailgun() as (feed, api):
        assert await ask(db, witness(feed), "order:1") == {wire_key("order:1"): Witness(Answer.SILENT, "no_recipient")}
        assert not api.requests
    assert await questions(db) == []


SILENT, REJECTED = Witness(Answer.SILENT, "no_control"), Witness(Answer.REJECTED)


@pytest.mark.parametrize(
    ("mine", "other", "both"),
    [
        (ABSENT, ABSENT, ABSENT),
        (ABSENT, SILENT, Witness(Answer.SILENT, "other_feed")),
        (ABSENT, None, None),
        (ABSENT, ACCEPTED, ACCEPTED),
        (ABSENT, REJECTED, REJECTED),
        (SILENT, ABSENT, SILENT),
        (SILENT, ACCEPTED, ACCEPTED),
        (None, ABSENT, None),
        (None, ACCEPTED, ACCEPTED),
        (REJECTED, ACCEPTED, ACCEPTED),
        (ACCEPTED, None, ACCEPTED),
    ],
)
def test_absence_is_what_all_feeds_with_an_attempt_out_say(
    mine: Witness | None, other: Witness | None, both: Witness | None
) -> None:
    assert together({"other": other, "own": mine}, "own") == both


async def ended(db, key: str, feed: str, reason: str = "absent") -> None:
    """An earlier attempt of the send on that feed, given up."""
    await db.execute(
        "INSERT INTO verdict (wire_key, attempt, fence, action, reason, source, who, feed)"
        " VALUES (wire_key($1), 0, 0, 'released', $2, 'inferred', 'test', $3)",
        key,
        reason,
        feed,
    )


async def test_each_feed_with_an_attempt_out_is_asked(db) -> None:
    key = await ambiguous(db)
    await answered(db)
    await answered(db, "order:3", feed="other")
    await ended(db, "order:1", "other")
    async with mailgun(took("order:2")) as (feed, _), mailgun(took("order:3"), name="other") as (other, api):
        assert await ask(db, witness(feed, other), "order:1") == {key: ABSENT}
        assert len(await questions(db)) == 2
        await db.execute("TRUNCATE look_up")
        assert await ask(db, witness(feed), "order:1") == {key: Witness(Answer.SILENT, "other_feed")}
        await db.execute("TRUNCATE look_up")
        api.sends = [took("order:1", ADA, 2 * HOUR)]
        assert await ask(db, witness(feed, other), "order:1") == {key: ACCEPTED}
    assert await db.fetchval("SELECT DISTINCT feed FROM provider_event WHERE wire_key = $1", key) == "other"


async def test_an_attempt_that_never_left_needs_no_word_of_its_feed(db) -> None:
    key = await ambiguous(db)
    await answered(db)
    await ended(db, "order:1", "other", "not_sent")
    async with mailgun(took("order:2")) as (feed, _):
        assert await ask(db, witness(feed), "order:1") == {key: ABSENT}
        await db.execute("TRUNCATE look_up")
        assert (await look_up_send(db, {"mg": feed}, "order:1")).found.answer is Answer.ABSENT


async def test_the_id_of_one_feed_s_attempt_is_not_asked_for_at_another(db) -> None:
    await claim(db, "order:1", "mg", recipient=ADA, known_message_id="id-1")
    await make_older(db, "order:1", 2 * HOUR)
    await answered(db)
    await ended(db, "order:1", "azure")
    async with mailgun(took("order:2")) as (feed, _):
        azure = Feed("azure", "azure_acs", api_key="k", api_url="http://127.0.0.1:1")
        answers = await ask(db, witness(feed, azure), "order:1")
    assert answers == {wire_key("order:1"): Witness(Answer.SILENT, "other_feed")}
    assert await db.fetchval("SELECT count(*) FROM look_up WHERE feed = 'azure'") == 0


class Stumbling:
    name, facts = "stumbling", PROVIDERS["mailgun"].facts

    async def search(self, *_: object) -> AsyncIterator[object]:
        raise ValueError("what is this?")
        yield None


async def test_an_answer_that_its_adapter_stumbles_over_stops_nobody(db, monkeypatch) -> None:
    monkeypatch.setattr(second_witness, "PROVIDERS", {"mailgun": Stumbling()})
    key = await ambiguous(db)
    answers = await ask(db, witness(Feed("mg", "mailgun", api_key="k")), "order:1")
    assert answers == {key: Witness(Answer.SILENT, "garbage")}


def test_a_pass_asks_feeds_whose_provider_can_be_asked_and_of_which_we_have_a_credential() -> None:
    feeds = {
        "asked": {"provider": "mailgun", "api_key": "k"},
        "without-a-key": {"provider": "mailgun"},
        "never-answers": {"provider": "ses", "api_key": "k"},
    }
    witness = composition.policies(Settings.model_validate({"feeds": feeds})).second_witness
    assert [name for name in (*feeds, "unknown") if witness.can_ask(name)] == ["asked"]
