# SPDX-License-Identifier: Apache-2.0
"""`/v1/sends`: what a sender in another language is granted, told and refused. Real HTTP on a real database."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import math
import string
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from kit import call, event, make_older, row, until_it_waits
from multidict import CIMultiDict
from prometheus_client import REGISTRY
from sends_kit import FEEDS, KEY, OPS, OTHER, SETTINGS, SHOP, Losing, Sender, api, fresh, losing, path, token
from structlog.testing import capture_logs
from yarl import URL

from reconciler.api.routes import API_CONNECTIONS
from reconciler.configuration.tables import ApiSettings
from webhooks.database import connect_pool
from webhooks.event import wire_key

WIRE_KEY = wire_key(KEY)
LIMIT = 30.0


@pytest.fixture
async def sender(db: asyncpg.Pool) -> AsyncIterator[Sender]:
    async with api(db) as found:
        yield found


def as_(sender: Sender, bearer: str) -> Sender:
    return Sender(sender.client, bearer)


def told(answer: tuple[int, Any]) -> tuple[int, str, str | None]:
    """Status, outcome and state of an answer."""
    return answer[0], answer[1].get("outcome"), answer[1].get("state")


# Claims


async def test_a_claim_is_committed_and_carries_all_that_a_submission_needs(sender: Sender, db: asyncpg.Pool) -> None:
    status, claimed = await sender.claim(submit_within=30, message_class="receipt", recipient="ada@example.org")
    sent = await row(db, KEY)
    assert status == 201
    assert claimed == {
        "outcome": "claimed",
        "state": "claimed",
        "wire_key": WIRE_KEY,
        "attempt": 1,
        "fence": sent["fence"],
        "seconds_left": 30.0,
        "stamp": {
            "body": {"v:send_key": WIRE_KEY},
            "headers": {},
            "smtp_headers": claimed["stamp"]["smtp_headers"],
            "message_id": None,
        },
    }
    assert WIRE_KEY in json.dumps(claimed["stamp"]["smtp_headers"])
    assert (sent["send_key"], sent["state"], sent["message_class"]) == (KEY, "claimed", "receipt")
    assert sent["claimed_by"] == "api:shop"
    assert "Idempotent-Replayed" not in sender.headers


async def test_the_stamp_is_that_of_the_feeds_provider(sender: Sender) -> None:
    _, claimed = await sender.claim("k-1", "sg")
    stamp = FEEDS["sg"].stamp("k-1")
    assert claimed["stamp"]["body"] == stamp.body
    assert claimed["stamp"]["smtp_headers"] == stamp.smtp_headers


async def test_an_id_that_is_known_before_the_call_is_given_and_kept(sender: Sender, db: asyncpg.Pool) -> None:
    _, claimed = await sender.claim(feed="acs")
    known = FEEDS["acs"].stamp(WIRE_KEY).message_id
    assert known is not None
    assert (claimed["stamp"]["message_id"], (await row(db, KEY))["known_message_id"]) == (known, known)


async def test_of_a_thousand_callers_at_once_exactly_one_is_granted_and_all_are_answered(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.api.routes.ACQUIRE_SECONDS", 60.0)  # on a busy machine they last longer
    pool = await connect_pool(dsn, size=4, application="test")
    async with api(pool) as sender:
        answers = Counter(map(told, await asyncio.gather(*(sender.claim() for _ in range(1000)))))
    await pool.close()
    assert answers == {(201, "claimed", "claimed"): 1, (409, "in_flight", "claimed"): 999}


async def test_whoever_else_asks_is_told_until_when_to_wait(sender: Sender) -> None:
    await sender.claim(submit_within=40)
    status, refused = await sender.claim()
    assert (status, refused["outcome"], refused["state"]) == (409, "in_flight", "claimed")
    assert (refused["title"], refused["type"], refused["status"]) == ("Conflict", "about:blank", 409)
    assert sender.headers["Content-Type"] == "application/problem+json"
    assert 30 < int(sender.headers["Retry-After"]) <= 40
    assert datetime.fromisoformat(refused["retry_at"]) > datetime.now(UTC)


async def test_a_claim_that_says_no_time_gets_what_its_class_is_given(sender: Sender, db: asyncpg.Pool) -> None:
    for key, options, seconds in (
        ("a", {}, 60),
        ("b", {"message_class": "slow"}, 45),
        ("c", {"submit_within": 20}, 20),
    ):
        status, claimed = await sender.claim(key, **options)
        assert (status, math.ceil(claimed["seconds_left"])) == (201, seconds)
        given = await db.fetchval("SELECT submit_by - claimed_at FROM send_log WHERE send_key = $1", key)
        assert given == timedelta(seconds=seconds)


async def test_an_attempt_that_nobody_can_tell_of_is_ambiguous(sender: Sender, db: asyncpg.Pool) -> None:
    _, claimed = await sender.claim("reported")
    assert told(await sender.fail(claimed["fence"], "reported")) == (200, "waiting", "ambiguous")
    await sender.claim("crashed")
    await make_older(db, "crashed", timedelta(minutes=2))
    for key in ("reported", "crashed"):
        status, refused = await sender.claim(key)
        assert (status, refused["outcome"], refused["state"]) == (409, "ambiguous", "ambiguous")
        assert refused["retry_at"] == (await row(db, key))["next_check_at"].isoformat()
        assert int(sender.headers["Retry-After"]) >= 1
        assert (await sender.look(key))[1]["state"] == "ambiguous"


async def test_each_outcome_of_a_claim_is_told_apart(sender: Sender, db: asyncpg.Pool) -> None:
    _, claimed = await sender.claim("sent")
    await sender.confirm(claimed["fence"], "sent", message_id="m-1")
    assert told(await sender.claim("sent")) == (200, "already_sent", "sent")

    _, claimed = await sender.claim("failed")
    await sender.fail(claimed["fence"], "failed", not_sent=False)
    assert told(await sender.claim("failed")) == (409, "failed", "failed")

    past, future = (datetime.now(UTC) + timedelta(hours=hours) for hours in (-1, 1))
    assert told(await sender.claim("late", expires_at=past.isoformat())) == (410, "expired", "pending")
    status, held = await sender.claim("early", not_before=future.isoformat())
    assert (status, held["outcome"], held["state"], held["reason"]) == (409, "held", "pending", "not_before")
    assert datetime.fromisoformat(held["retry_at"]) == future
    assert 3500 < int(sender.headers["Retry-After"]) <= 3600

    await sender.claim("content", fingerprint="one")
    status, reused = await sender.claim("content", fingerprint="two")
    assert (status, reused["outcome"], reused["reason"]) == (422, "key_reused", "the content differs")
    assert told(await sender.claim("old", intended_at="2020-01-01T00:00:00Z")) == (410, "beyond_memory", None)

    await sender.claim("moved")
    await make_older(db, "moved", timedelta(hours=1))
    assert (await call(db, "operator_release", "moved", "note", "ann"))["outcome"] == "released"
    assert told(await sender.claim("moved", "sg")) == (409, "other_feed", "pending")
    await db.execute("UPDATE feed_state SET suspect_at = now() WHERE feed = '*'")
    status, held = await sender.claim("moved")
    assert (status, held["outcome"], held["reason"], sender.headers["Retry-After"]) == (409, "held", "suspect", "15")


async def test_whatever_is_not_granted_is_answered_with_a_problem_that_the_table_names(sender: Sender) -> None:
    await sender.claim()
    _, refused = await sender.claim()
    assert "fence" not in refused
    assert "stamp" not in refused
    assert KEY not in json.dumps(refused)


# The lost answer


async def test_the_same_call_gets_the_same_claim_with_the_time_that_is_left(sender: Sender, db: asyncpg.Pool) -> None:
    nonce = uuid4().hex
    _, first = await sender.claim(nonce=nonce, submit_within=60)
    await db.execute("UPDATE send_log SET submit_by = submit_by - interval '20 s'")
    status, again = await sender.claim(nonce=nonce, submit_within=60)
    assert status == 201
    assert sender.headers["Idempotent-Replayed"] == "true"
    assert (again["fence"], again["attempt"]) == (first["fence"], 1)
    assert again["seconds_left"] < 40.1
    assert told(await sender.claim(submit_within=60)) == (409, "in_flight", "claimed")
    assert told(await as_(sender, OTHER).claim(nonce=nonce)) == (409, "in_flight", "claimed")


async def test_two_workers_at_one_job_share_its_idempotency_key_and_only_one_may_submit(sender: Sender) -> None:
    job = fresh()
    assert told(await sender.claim(call=job)) == (201, "claimed", "claimed")
    assert told(await sender.claim(call=job)) == (409, "in_flight", "claimed")
    assert told(await sender.claim(call=f'"{job}"')) == (409, "in_flight", "claimed")


async def test_a_job_that_comes_again_after_its_send_was_given_free_gets_the_next_attempt(sender: Sender) -> None:
    job = fresh()
    _, first = await sender.claim(call=job)
    assert told(await sender.fail(first["fence"], not_sent=True)) == (200, "released", "pending")
    status, second = await sender.claim(call=job)
    assert (status, second["attempt"]) == (201, 2)
    assert second["fence"] != first["fence"]


async def test_a_repeated_call_is_no_right_to_submit_once_the_attempt_is_over(sender: Sender, db: asyncpg.Pool) -> None:
    reported, overdue = uuid4().hex, uuid4().hex
    _, claimed = await sender.claim("reported", nonce=reported)
    await sender.fail(claimed["fence"], "reported")
    assert told(await sender.claim("reported", nonce=reported)) == (409, "ambiguous", "ambiguous")
    await sender.claim("overdue", nonce=overdue)
    await make_older(db, "overdue", timedelta(minutes=2))
    assert told(await sender.claim("overdue", nonce=overdue)) == (409, "ambiguous", "ambiguous")


async def test_a_claims_idempotency_key_belongs_to_one_call_and_one_caller(sender: Sender) -> None:
    mine = fresh()
    await sender.claim(call=mine)
    assert told(await sender.claim("another", call=mine)) == (422, "idempotency_key_reused", None)
    assert told(await sender.claim(call=mine, claimed_by="another worker")) == (422, "idempotency_key_reused", None)
    assert told(await as_(sender, OTHER).claim(call=mine)) == (409, "in_flight", "claimed")
    status, refused = await sender.call("POST", "/v1/sends", {"key": "k", "feed": "mg"})
    assert (status, refused["outcome"]) == (400, "idempotency_key_missing")


# How it went


async def test_a_confirm_is_kept_whatever_the_row_is(sender: Sender, db: asyncpg.Pool) -> None:
    _, first = await sender.claim()
    answer = await sender.confirm(first["fence"], message_id="<m-1>", response={"id": "m-1", "odd": "\0\ud800"})
    assert told(answer) == (200, "sent", "sent")
    sent = await row(db, KEY)
    assert (sent["provider_message_id"], json.loads(sent["response"])) == ("m-1", {"id": "m-1", "odd": "\ufffd?"})
    assert told(await sender.confirm(first["fence"], message_id="m-1")) == (200, "sent", "sent")
    assert told(await sender.confirm(77, "nobody's")) == (404, "unknown_key", None)
    kept = "SELECT count(*) FROM provider_event WHERE wire_key = wire_key('nobody''s') AND testimony = 'accepted'"
    assert await db.fetchval(kept) == 1


async def test_a_failure_is_one_of_three_things(sender: Sender, db: asyncpg.Pool) -> None:
    outcomes = []
    for key, not_sent in (("never-left", True), ("refused", False), ("unknown", None)):
        _, claimed = await sender.claim(key)
        outcomes.append(told(await sender.fail(claimed["fence"], key, not_sent=not_sent)))
    assert outcomes == [(200, "released", "pending"), (200, "failed", "failed"), (200, "waiting", "ambiguous")]
    assert told(await sender.fail(1, "refused")) == (409, "not_yours", None)
    assert told(await sender.claim("never-left")) == (201, "claimed", "claimed")


async def test_a_failure_meets_evidence_first(sender: Sender, db: asyncpg.Pool) -> None:
    _, claimed = await sender.claim()
    await event(db, KEY)
    assert told(await sender.fail(claimed["fence"], not_sent=True)) == (200, "sent", "sent")


async def test_a_send_can_be_written_now_and_claimed_later(sender: Sender, db: asyncpg.Pool) -> None:
    body = {"key": KEY, "feed": "mg", "payload": {"template": 7}, "fingerprint": "one"}
    assert (await sender.call("POST", "/v1/enqueue", body))[0] == 201
    assert await sender.call("POST", "/v1/enqueue", body) == (200, {"outcome": "exists", "wire_key": WIRE_KEY})
    status, refused = await sender.call("POST", "/v1/enqueue", body | {"fingerprint": "two"})
    assert (status, refused["outcome"]) == (422, "key_reused")
    assert json.loads((await row(db, KEY))["payload"]) == {"template": 7}
    assert told(await sender.claim(fingerprint="one")) == (201, "claimed", "claimed")


async def test_what_is_repeated_with_its_idempotency_key_gets_the_stored_answer(
    sender: Sender, db: asyncpg.Pool
) -> None:
    _, claimed = await sender.claim()
    call_1 = fresh()
    first = await sender.confirm(claimed["fence"], message_id="m-1", call=call_1)
    assert await sender.confirm(claimed["fence"], message_id="m-1", call=call_1) == first
    assert sender.headers["Idempotent-Replayed"] == "true"
    assert told(await sender.confirm(claimed["fence"], message_id="m-2", call=call_1)) == (
        422,
        "idempotency_key_reused",
        None,
    )
    assert told(await sender.claim("other", call=call_1)) == (201, "claimed", "claimed")


async def test_what_a_sender_says_is_stored_though_the_process_that_heard_it_first_died(
    dsn: str, db: asyncpg.Pool
) -> None:
    pool = await connect_pool(dsn, size=2, application="test")
    async with api(pool) as dying, api(db) as other, db.acquire() as connection:
        fences = [(await other.claim(key))[1]["fence"] for key in ("sent", "failed")]
        held = connection.transaction()
        await held.start()
        await connection.execute("SELECT FROM send_log FOR UPDATE")
        enqueued = {"key": "later", "feed": "mg"}
        await connection.execute("SELECT send_enqueue('later', 'mg', '{}')")

        async def say(to: Sender) -> list[tuple[int, str, str | None]]:
            calls = (
                to.confirm(fences[0], "sent", call="c-1"),
                to.fail(fences[1], "failed", not_sent=False, call="f-1"),
                to.call("POST", "/v1/enqueue", enqueued, key="e-1"),
            )
            return [told(await call_) for call_ in calls]

        first = asyncio.create_task(say(dying))
        await until_it_waits(db, first)
        pool.terminate()
        assert {status for status, _, _ in await first} == {503}
        await held.rollback()
        assert await say(other) == [(200, "sent", "sent"), (200, "failed", "failed"), (201, "enqueued", None)]
        assert await say(other) == [(200, "sent", "sent"), (200, "failed", "failed"), (201, "enqueued", None)]
        assert other.headers["Idempotent-Replayed"] == "true"


async def test_a_release_whose_answer_was_lost_is_not_performed_again(dsn: str, db: asyncpg.Pool) -> None:
    async with losing(dsn) as pool, api(pool) as sender:
        ops, body = as_(sender, OPS), {"reason": "lost"}
        for key in ("r-1", None):
            await sender.claim()
            await make_older(db, KEY, timedelta(hours=1))
            Losing.statement = "COMMIT;"
            answer = await ops.call("POST", path(KEY, "operator", "release"), body, key=key)
            assert told(answer) == (409, "ambiguous", "ambiguous")
            assert (await row(db, KEY))["state"] == "pending"
        await sender.claim()
        await make_older(db, KEY, timedelta(hours=1))
        answer = await ops.call("POST", path(KEY, "operator", "release"), body, key="r-1")
        assert told(answer) == (409, "ambiguous", "ambiguous")
        assert (await row(db, KEY))["state"] == "claimed"


async def test_a_decision_that_the_database_never_took_is_made_by_its_repeat(dsn: str, db: asyncpg.Pool) -> None:
    pool = await connect_pool(dsn, size=2, application="test", lock_seconds=0.2)
    async with api(pool) as sender, db.acquire() as connection:
        ops, body = as_(sender, OPS), {"reason": "lost"}
        await sender.claim()
        await make_older(db, KEY, timedelta(hours=1))
        async with connection.transaction():
            await connection.execute("SELECT FROM send_log FOR UPDATE")
            assert (await ops.call("POST", path(KEY, "operator", "release"), body, key="r-1"))[0] == 503
        answer = await ops.call("POST", path(KEY, "operator", "release"), body, key="r-1")
        assert told(answer) == (200, "released", "pending")
    await pool.close()


async def test_a_send_is_one_however_its_key_is_encoded_in_a_path(sender: Sender, db: asyncpg.Pool) -> None:
    ops = as_(sender, OPS)
    for key in ("order%3A1", "order:1"):
        await sender.claim("order:1")
        await make_older(db, "order:1", timedelta(hours=1))
        release = URL(f"/v1/sends/{key}/operator/release", encoded=True)
        assert told(await ops.call("POST", release, {"reason": "lost"}, key="r-1")) == (200, "released", "pending")
    assert ops.headers["Idempotent-Replayed"] == "true"
    assert (await row(db, "order:1"))["attempt"] == 2


async def test_a_repeated_release_does_not_release_the_next_attempt(sender: Sender, db: asyncpg.Pool) -> None:
    ops = as_(sender, OPS)
    release, body = path(KEY, "operator", "release"), {"reason": "lost"}
    await sender.claim()
    await make_older(db, KEY, timedelta(hours=1))
    assert told(await ops.call("POST", release, body, key="r-1")) == (200, "released", "pending")
    await sender.claim()
    await make_older(db, KEY, timedelta(hours=1))
    assert told(await ops.call("POST", release, body, key="r-1")) == (200, "released", "pending")
    assert ops.headers["Idempotent-Replayed"] == "true"
    assert (await row(db, KEY))["state"] == "claimed"


# Looking


async def test_a_look_shows_how_a_send_stands_and_nobodys_address(sender: Sender, db: asyncpg.Pool) -> None:
    assert told(await sender.look()) == (404, "unknown_key", None)
    _, claimed = await sender.claim(recipient="ada@example.org", payload={"to": "ada@example.org"})
    await sender.confirm(claimed["fence"], message_id="m-1", response={"to": "ada@example.org"})
    await event(db, KEY, kind="delivered")
    await db.execute("SELECT send_note_delivery(wire_key) FROM send_log")
    for key in (KEY, WIRE_KEY):
        status, shown = await sender.look(key)
        assert status == 200
        assert (shown["state"], shown["attempt"], shown["delivery"], shown["message_id"]) == (
            "sent",
            1,
            "delivered",
            "m-1",
        )
        assert (shown["wire_key"], shown["verdict_source"], shown["feed"]) == (WIRE_KEY, "sender", "mg")
        assert "ada" not in json.dumps(shown)
    status, nothing = await sender.call("HEAD", path(KEY))
    assert (status, nothing) == (200, None)


@pytest.mark.parametrize("key", ["a/b", "50%", "a%2Fb", "a b?c#d", "grüße:ä@ö", "enqueue", ";x=1", "+"])
async def test_a_key_of_any_characters_can_be_named_in_a_path(sender: Sender, key: str) -> None:
    _, claimed = await sender.claim(key)
    assert claimed["wire_key"] == wire_key(key)
    assert told(await sender.confirm(claimed["fence"], key)) == (200, "sent", "sent")
    assert (await sender.look(key))[1]["wire_key"] == wire_key(key)


async def test_a_second_attempt_is_told_that_its_send_was_found_sent_before_it_was_confirmed(
    sender: Sender, db: asyncpg.Pool
) -> None:
    _, first = await sender.claim()
    assert (await sender.confirm(first["fence"]))[1] == {"outcome": "sent", "state": "sent", "reason": None}
    await sender.claim("again")
    await make_older(db, "again", timedelta(hours=1))
    assert (await call(db, "operator_release", "again", "note", "ann"))["outcome"] == "released"
    _, second = await sender.claim("again")
    assert (await call(db, "operator_decide", "again", "sent", "note", "ann"))["outcome"] == "sent"
    status, answer = await sender.confirm(second["fence"], "again")
    assert (status, answer["outcome"], answer["state"]) == (200, "sent", "sent")
    assert answer["reason"] == "it was sent already (operator): an earlier attempt may have been accepted"


async def test_any_printable_key_can_be_named_in_a_path(sender: Sender) -> None:
    random = Random(7)
    alphabet = string.printable + "äß€😀\u0301" + "%/?#{}" * 5
    for length in range(1, 41):
        key = "".join(random.choices(alphabet, k=length)) + "!"  # no client sends the paths . and ..
        _, claimed = await sender.claim(key)
        assert claimed["wire_key"] == wire_key(key)
        assert told(await sender.confirm(claimed["fence"], key)) == (200, "sent", "sent")


# Operators


async def test_operators_decide_as_on_the_command_line(sender: Sender, db: asyncpg.Pool) -> None:
    ops = as_(sender, OPS)
    assert told(await ops.decide("release")) == (404, "unknown_key", None)
    await sender.claim()
    status, refused = await ops.decide("release")
    assert (status, refused["outcome"]) == (409, "refused")
    assert "may still submit" in refused["detail"]
    await make_older(db, KEY, timedelta(hours=1))
    assert told(await ops.decide("release")) == (200, "released", "pending")
    assert told(await ops.decide("failed")) == (200, "failed", "failed")
    assert told(await ops.decide("sent")) == (200, "sent", "sent")
    said = await db.fetch("SELECT action, who, note FROM verdict ORDER BY id")
    assert [tuple(one) for one in said] == [
        (action, "api:ops", "seen in the log") for action in ("released", "failed", "sent")
    ]
    assert (await ops.look())[0] == 200


async def test_a_refusal_names_times_in_utc_wherever_the_database_stands(dsn: str) -> None:
    there = {"timezone": "Asia/Kolkata", "datestyle": "German"}
    async with asyncpg.create_pool(dsn, min_size=1, server_settings=there) as abroad, api(abroad) as sender:
        await sender.claim()
        until = (await row(abroad, KEY))["submit_by"]
        for verb in ("release", "failed"):
            _, refused = await as_(sender, OPS).decide(verb)
            assert f"its sender may still submit until {until:%Y-%m-%d %H:%M:%S}" in refused["detail"]
            assert refused["detail"].endswith("+00")


A_TIME_AS_TEXT = r"\|\|\s*(\w+\.)?\w*(_at|_by|_until|_since|_before)\M"


async def test_every_function_that_makes_text_of_a_time_says_in_which_zone_and_style(db: asyncpg.Pool) -> None:
    rows = await db.fetch(
        "SELECT proname, proconfig FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND prosrc ~ $1",
        A_TIME_AS_TEXT,
    )
    assert {row["proname"] for row in rows} >= {"operator_release", "operator_decide"}
    assert [row["proname"] for row in rows if not {"TimeZone=UTC", "DateStyle=ISO"} <= set(row["proconfig"])] == []


# Tokens


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {SHOP}", SHOP, f"Bearer {SHOP}x", "Bearer \xe4"],
)
async def test_nobody_without_a_known_token_learns_anything(sender: Sender, authorization: str | None) -> None:
    headers = {"Authorization": authorization} if authorization is not None else {}
    for method, route in (("POST", "/v1/sends"), ("GET", "/v1/sends/k"), ("GET", "/v1/nothing"), ("PUT", "/v1/sends")):
        async with sender.client.request(method, route, headers=headers, json={}) as answer:
            assert answer.status == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert (await answer.json(content_type=None))["outcome"] == "unauthenticated"


async def test_without_tokens_everybody_is_refused(db: asyncpg.Pool) -> None:
    async with api(db, ApiSettings()) as sender:
        assert (await sender.claim())[0] == 401


async def test_a_scope_leads_no_further_than_its_routes(sender: Sender) -> None:
    ops = as_(sender, OPS)
    assert told(await ops.claim()) == (403, "forbidden", None)
    assert told(await ops.confirm(1)) == (403, "forbidden", None)
    assert told(await ops.fail(1)) == (403, "forbidden", None)
    for verb in ("release", "sent", "failed"):
        assert told(await sender.decide(verb)) == (403, "forbidden", None)


async def test_a_caller_stays_the_same_while_his_token_is_rotated(db: asyncpg.Pool) -> None:
    settings = ApiSettings(tokens={"shop": token("old-token", "new-token")})
    async with api(db, settings) as sender:
        nonce = uuid4().hex
        assert (await as_(sender, "old-token").claim(nonce=nonce))[0] == 201
        status, again = await as_(sender, "new-token").claim(nonce=nonce)
        assert (status, again["attempt"]) == (201, 1)


# What is refused


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"", 400, "must be JSON"),
        (b"{", 400, "must be JSON"),
        (b"\xff", 400, "must be JSON"),
        (b'{"key": NaN}', 400, "must be JSON"),
        (b"[" * 5000 + b"]" * 5000, 400, "no deeper than 100"),
        (b'{"key": "k", "feed": "mg", "payload": ' + b"[" * 120 + b"]" * 120 + b"}", 400, "no deeper than 100"),
        (b"[]", 422, "Expected `object`"),
        (b'{"feed": "mg"}', 422, "`key`"),
        (b'{"key": 5, "feed": "mg"}', 422, "`$.key`"),
        (b'{"key": "", "feed": "mg"}', 422, "`$.key`"),
        (b'{"key": "k", "feed": "mg", "colour": 1}', 422, "`colour`"),
        (b'{"key": "k", "feed": "mg", "nonce": "n"}', 422, "`$.nonce`"),
        (b'{"key": "k", "feed": "mgg"}', 422, "there is acs, mg, sg"),
        (b'{"key": "k", "feed": "mg", "submit_within": 0}', 422, "`$.submit_within`"),
        (b'{"key": "k", "feed": "mg", "submit_within": true}', 422, "`$.submit_within`"),
        (b'{"key": "k", "feed": "mg", "not_before": "2026-01-01T00:00:00"}', 422, "timezone"),
        (b'{"key": "k", "feed": "mg", "not_before": "tomorrow"}', 422, "RFC3339"),
        (b'{"key": "k", "feed": "mg", "not_before": "0001-01-01T00:00:00Z"}', 422, "1970"),
        (b'{"key": "k\\u0000", "feed": "mg"}', 422, "key: holds a zero byte"),
        (b'{"key": "k", "feed": "mg", "payload": {"a": ["\\ud800"]}}', 422, "payload: holds"),
        (b'{"key": "k", "feed": "mg", "payload": {"\\u0000": 1}}', 422, "payload: holds"),
        (b'{"key": "k", "feed": "mg", "\\ud800": 1}', 422, "the body: holds"),
        (b'{"key": "k", "feed": "mg", "payload": 1e999}', 422, "json"),
    ],
)
async def test_a_request_that_cannot_be_meant_is_refused_in_one_line(
    sender: Sender, db: asyncpg.Pool, body: bytes, status: int, says: str
) -> None:
    answered, refused = await sender.call("POST", "/v1/sends", key=fresh(), data=body)
    assert answered == status
    assert says in refused["detail"]
    assert "\n" not in refused["detail"]
    assert await db.fetchval("SELECT count(*) FROM send_log") == 0


@pytest.mark.parametrize("key", ["k" * 256, "ä" * 128])
async def test_case_075_a_key_of_more_than_255_bytes_is_refused(sender: Sender, key: str) -> None:
    assert told(await sender.claim(key)) == (422, "invalid", None)
    assert told(await sender.look(key)) == (422, "invalid", None)
    assert told(await sender.confirm(1, key)) == (422, "invalid", None)
    assert told(await sender.claim("k" * 255)) == (201, "claimed", "claimed")
    assert told(await sender.claim("ä" * 127)) == (201, "claimed", "claimed")


async def test_a_fence_that_no_claim_can_have_is_refused(sender: Sender) -> None:
    for fence in (0, 2**62, 2**63 - 1):
        assert told(await sender.confirm(fence)) == (422, "invalid", None)


async def test_a_null_is_not_given(sender: Sender, db: asyncpg.Pool) -> None:
    assert (await sender.claim(recipient=None, submit_within=None, payload=None))[0] == 201
    assert (await row(db, KEY))["payload"] is None


async def test_bodies_are_small_plain_and_soon_there(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await sender.claim("big", payload="x" * 260_000))[0] == 201
    for data in (b" " * 262_145, io.BytesIO(b" " * 262_145), io.BytesIO(b" " * 1_100_000)):
        status, refused = await sender.call("POST", "/v1/sends", key=fresh(), data=data)
        assert (status, refused["outcome"]) == (413, "too_large")
    packed, encodings = gzip.compress(b"{}"), (["gzip"], ["identity", "gzip"], ["identity, gzip"])
    for encoding in encodings:
        headers = CIMultiDict([("Content-Encoding", one) for one in encoding])
        status, refused = await sender.call("POST", "/v1/sends", key=fresh(), data=packed, headers=headers)
        assert (status, refused["outcome"]) == (415, "encoding")
    monkeypatch.setattr("reconciler.api.application.BODY_SECONDS", 0.05)
    ended = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await ended.wait()

    status, refused = await sender.call("POST", "/v1/sends", key=fresh(), data=slowly())
    ended.set()
    assert (status, refused["outcome"]) == (408, "slow")


async def test_only_so_many_large_bodies_are_held_and_small_ones_pass(
    dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.api.application.LARGE_AT_ONCE", 1)
    pool = await connect_pool(dsn, size=API_CONNECTIONS, application="test")
    async with api(pool) as sender, db.acquire() as connection:
        _, claimed = await sender.claim()
        held = connection.transaction()
        await held.start()
        await connection.execute("SELECT FROM send_log FOR UPDATE")
        first = asyncio.create_task(sender.confirm(claimed["fence"], response="x" * 20_000))
        await until_it_waits(db, first)
        monkeypatch.setattr("reconciler.api.application.BODY_SECONDS", 0.05)
        assert told(await sender.claim("large", payload="x" * 20_000)) == (503, "busy", None)
        assert told(await sender.claim("small")) == (201, "claimed", "claimed")
        await held.rollback()
        assert told(await first) == (200, "sent", "sent")
        assert told(await sender.claim("large", payload="x" * 20_000)) == (201, "claimed", "claimed")
    await pool.close()


async def test_unknown_paths_and_methods_are_problems_too(sender: Sender) -> None:
    status, refused = await sender.call("GET", "/v1/nothing")
    assert (status, refused["title"]) == (404, "Not Found")
    status, refused = await sender.call("DELETE", path(KEY))
    assert (status, refused["status"], sender.headers["Allow"]) == (405, 405, "GET,HEAD")


# The database


async def test_without_a_database_nothing_is_performed_and_repeating_is_asked_for() -> None:
    async with api(None) as sender:
        for answer in (
            await sender.claim(),
            await sender.confirm(1),
            await sender.confirm(1, call="x"),
            await sender.look(),
        ):
            assert (answer[0], answer[1]["outcome"]) == (503, "unavailable")
        assert sender.headers["Retry-After"] == "5"


async def test_a_pool_that_is_taken_is_not_waited_for_long(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reconciler.api.routes.ACQUIRE_SECONDS", 0.05)
    pool = await connect_pool(dsn, size=1, application="test")
    async with api(pool) as sender, pool.acquire():
        assert (await sender.claim())[0] == 503
    await pool.close()


async def test_a_send_that_somebody_holds_is_busy_and_nothing_is_lost(dsn: str, db: asyncpg.Pool) -> None:
    pool = await connect_pool(dsn, size=2, application="test", lock_seconds=0.2)
    async with api(pool) as sender:
        _, claimed = await sender.claim()
        async with db.acquire() as connection:
            held = connection.transaction()
            await held.start()
            await connection.execute("SELECT FROM send_log FOR UPDATE")
            assert (await sender.confirm(claimed["fence"], call="c-1"))[0] == 503
            await held.rollback()
        assert told(await sender.confirm(claimed["fence"], call="c-1")) == (200, "sent", "sent")
    await pool.close()


async def test_a_send_that_a_transaction_holds_delays_nobody_elses_claims(
    dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.api.routes.LOCK_PAUSES", (0.05,) * 2000)
    pool = await connect_pool(dsn, size=API_CONNECTIONS, application="test")
    async with api(pool) as sender, db.acquire() as connection:
        _, claimed = await sender.claim("mine")
        await call(db, "send_enqueue", "wanted", "mg", "{}")
        held = connection.transaction()
        await held.start()
        await connection.execute("SELECT FROM send_log WHERE wire_key = 'wanted' FOR UPDATE")
        crowd = [asyncio.create_task(sender.claim("wanted")) for _ in range(20)]
        async with asyncio.timeout(LIMIT):
            for n in range(10):
                assert told(await sender.claim(f"other-{n}")) == (201, "claimed", "claimed")
            assert told(await sender.confirm(claimed["fence"], "mine")) == (200, "sent", "sent")
        assert not any(task.done() for task in crowd)
        await held.rollback()
        assert Counter(status for status, _ in await asyncio.gather(*crowd)) == {201: 1, 409: 19}
    await pool.close()


@pytest.mark.parametrize("holds", ["SELECT FROM send_log FOR UPDATE", "SELECT send_enqueue('wanted', 'mg', '{}')"])
async def test_a_claim_that_was_not_waited_for_is_never_granted(
    dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch, holds: str
) -> None:
    monkeypatch.setattr("reconciler.api.routes.LOCK_PAUSES", (0.01,))
    monkeypatch.setattr("reconciler.api.routes.CLAIM_LOCK", "20ms")
    pool = await connect_pool(dsn, size=API_CONNECTIONS, application="test")  # no lock_timeout, as behind a pooler
    async with api(pool) as sender, db.acquire() as connection:
        if "FOR UPDATE" in holds:
            await call(db, "send_enqueue", "wanted", "mg", "{}")
        async with connection.transaction():
            await connection.execute(holds)
            assert told(await sender.claim("wanted")) == (503, "unavailable", None)
        assert (await row(db, "wanted"))["state"] == "pending"
        assert told(await sender.claim("wanted")) == (201, "claimed", "claimed")
    await pool.close()


async def test_whatever_waits_for_a_lock_is_answered_in_time(
    dsn: str, db: asyncpg.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reconciler.api.routes.STATEMENTS_SECONDS", 0.2)
    pool = await connect_pool(dsn, size=API_CONNECTIONS, application="test")
    async with api(pool) as sender, db.acquire() as connection:
        _, claimed = await sender.claim()
        async with connection.transaction():
            await connection.execute("SELECT FROM send_log FOR UPDATE")
            async with asyncio.timeout(LIMIT):
                assert (await sender.confirm(claimed["fence"]))[0] == 503
        assert told(await sender.confirm(claimed["fence"])) == (200, "sent", "sent")
    await pool.close()


async def test_a_mistake_of_ours_is_a_problem_and_a_log_line(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reconciler.api.routes._shown", None)
    await sender.claim()
    with capture_logs() as logs:
        status, refused = await sender.look()
    assert (status, refused["status"]) == (500, 500)
    told_ = [line for line in logs if line["log_level"] == "error"]
    assert [(line["event"], line["reason"], line["route"]) for line in told_] == [
        ("api_request_refused", "TypeError", "/v1/sends/{key}")
    ]


# What is logged and counted


def counted(route: str, outcome: str) -> float:
    return REGISTRY.get_sample_value("reconciler_api_requests_total", {"route": route, "outcome": outcome}) or 0.0


async def test_requests_are_counted_by_route_and_outcome(sender: Sender) -> None:
    labels = [("/v1/sends", "claimed"), ("/v1/sends", "in_flight"), ("/v1/sends/{key}", "found"), ("other", "404")]
    before = [counted(*label) for label in labels]
    await sender.claim()
    await sender.claim()
    await sender.look()
    await sender.call("GET", "/v1/sends/a/b/c/d")
    assert [counted(*label) for label in labels] == [n + 1 for n in before]


async def test_no_log_line_holds_a_key_and_a_flood_of_refusals_is_one(sender: Sender) -> None:
    with capture_logs() as logs:
        await sender.claim()
        await sender.claim()
        for _ in range(5):
            await as_(sender, "wrong").claim()
    assert [(line["event"], line["status"]) for line in logs] == [("api_request_refused", 401)]
    assert KEY not in str(logs)


async def test_settings_name_scopes_and_hashes_only() -> None:
    assert "espr_" not in SETTINGS.model_dump_json()
